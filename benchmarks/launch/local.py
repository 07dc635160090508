"""Seconds from `launch --ssh` to the first step for 1, 4, 16 and 64 machines, and the share that is our own work.

    .venv/bin/python benchmarks/launch/local.py               # about ten minutes; writes its section of RESULTS.md
    .venv/bin/python benchmarks/launch/local.py 1 4 --rounds 1

Each machine is a real sshd on 127.1.0.N. Instead of Python it runs a shell script (stub.py), which waits as long as a
machine on EC2 does and prints what our modules would print: all machines share the cores of this computer, so they must
cost little besides time. Our own processor time is that of the command and of the supervisor with its children, from
wait4(2) and /proc.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.ssh_machines import Testbed
from support.waiting import wait_for

from benchmarks.launch.stub import RECIPE, StubDelays
from benchmarks.measure import COMMAND, write_section

MACHINE_COUNTS = (1, 4, 16, 64)
STEADY_SECONDS = 20.0
DEADLINE_SECONDS = 240.0
LOGIN_SECONDS = 1.5  # of a login on EC2; in two parts, because sshd runs AuthorizedKeysCommand twice
SLOW_LOGIN_CONFIG = (
    "AuthorizedKeysCommand /bin/sh -c \"sleep {seconds}; cat '{keys}'\"\nAuthorizedKeysCommandUser root\n"
)


# --- a computer to launch from ------------------------------------------------------------------------------------


class LaunchHost:
    """The computer that launches jobs: a folder, a home and a tmux server of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tmux_folder = tempfile.mkdtemp(prefix="imgt-", dir="/tmp")
        (folder / "home").mkdir(parents=True)
        (folder / "recipe.py").write_text(RECIPE)
        dropped = ("IMGNET_RUNS", "TMUX", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # Python keeps what it compiles
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        self.env = {**inherited, "HOME": str(folder / "home"), "TMUX_TMPDIR": self.tmux_folder, "TERM": "xterm"}

    def cli(self, *arguments: str) -> str:
        """Run the installed command and return its output. Raises `CalledProcessError`."""
        completed = subprocess.run(
            [COMMAND, *arguments], cwd=self.folder, env=self.env, stdout=subprocess.PIPE, text=True
        )
        completed.check_returncode()
        return completed.stdout

    def launch(self, hosts_file: Path) -> Path:
        """Launch a job on the machines of a hosts file and return its run folder."""
        output = self.cli("launch", "--ssh", str(hosts_file), "-y", "-d", "recipe.py")
        return Path(output.partition("run folder ")[2].splitlines()[0])

    def stop(self, run: Path) -> None:
        """Stop a job and wait until its supervisor has ended."""
        self.cli("stop", run.name)
        wait_for(lambda: not supervisor_pids(run), DEADLINE_SECONDS)

    def close(self) -> None:
        """End the tmux server."""
        subprocess.run(["tmux", "-L", "imgnet", "kill-server"], env=self.env, capture_output=True)
        shutil.rmtree(self.tmux_folder, ignore_errors=True)


def supervisor_pids(run: Path) -> list[int]:
    """Return the process ids of the supervisors of a run folder."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            argv = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"cluster.jobs.supervisor" in argv[:4] and os.fsencode(run) in argv:
                pids.append(int(entry.name))
    return pids


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended, in seconds (proc(5), stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def peak_memory_mb(pid: int) -> float:
    """Return the peak resident memory of a process, in MB (1e6 bytes)."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 / 1e6 if match else 0.0


def are_all_training(run_folder: Path, machine_count: int, shared: Path | None = None) -> bool:
    """Return whether all machines train, by their status files in a shared folder, or as the run folder has them.

    Raises `RuntimeError` if the job has ended.
    """
    status_folder = (shared or run_folder / "machine" / "shared") / "status"
    if (run_folder / "result.json").exists():
        raise RuntimeError((run_folder / "result.json").read_text())
    paths = [status_folder / f"{name}.json" for name in range(machine_count)]
    return all(path.exists() and '"state": "training"' in path.read_text() for path in paths)


# --- measurements -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchMeasurement:
    """One launch: seconds to the first step, our processor time, the supervisor's memory, and its steady state.

    `steady_cpu_share` is the share of a core that the supervisor takes while the job trains. `setup_steps` names each
    set-up step with the seconds of the slowest machine.
    """

    seconds: float
    cpu_seconds: float
    memory_mb: float
    steady_cpu_share: float = 0.0
    log_lag_seconds: float = 0.0
    setup_steps: str = ""


def measure_launch(
    host: LaunchHost, testbed: Testbed, machine_count: int, measure_steady_state: bool
) -> LaunchMeasurement:
    """Launch a job on fresh machines, wait for the first step, measure the steady state if asked, and stop the job."""
    hosts_file = write_hosts_file(host, testbed, machine_count)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    run_folder = host.launch(hosts_file)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wait_for(lambda: are_all_training(run_folder, machine_count), DEADLINE_SECONDS)
    seconds = time.monotonic() - start
    (supervisor_pid,) = supervisor_pids(run_folder)
    command_cpu_seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    our_cpu_seconds = command_cpu_seconds + cpu_seconds(supervisor_pid)
    setup_steps = slowest_setup_steps(run_folder)
    try:
        steady_cpu_share = log_lag_seconds = 0.0
        if measure_steady_state:
            steady_cpu_share = measure_steady_cpu_share(supervisor_pid)
            log_lag_seconds = longest_log_lag(run_folder, testbed)
        return LaunchMeasurement(
            seconds=seconds,
            cpu_seconds=our_cpu_seconds,
            memory_mb=peak_memory_mb(supervisor_pid),
            steady_cpu_share=steady_cpu_share,
            log_lag_seconds=log_lag_seconds,
            setup_steps=setup_steps,
        )
    finally:
        host.stop(run_folder)


def slowest_setup_steps(run_folder: Path) -> str:
    """Return the set-up steps, each with the seconds of the machine that took longest, as text."""
    setup_progress = json.loads((run_folder / "machines.json").read_text())
    rows = [row["seconds"] for row in setup_progress["machines"].values()]
    return ", ".join(f"{step} {max(row.get(step, 0.0) for row in rows):.1f}" for step in rows[0])


def write_hosts_file(host: LaunchHost, testbed: Testbed, count: int) -> Path:
    """Write a hosts file of the first `count` machines, which are reset to be unused."""
    for machine in testbed.machines[:count]:
        shutil.rmtree(machine.home / ".imgnet", ignore_errors=True)
    stub = StubDelays(count=count).write_script(host.folder / f"python-{count}")
    return testbed.write_hosts_toml(host.folder / f"hosts-{count}.toml", count, python=str(stub))


def measure_steady_cpu_share(pid: int) -> float:
    """Return the share of one core that a process takes, over STEADY_SECONDS."""
    before = cpu_seconds(pid)
    start = time.monotonic()
    time.sleep(STEADY_SECONDS)
    return (cpu_seconds(pid) - before) / (time.monotonic() - start)


def longest_log_lag(run_folder: Path, testbed: Testbed) -> float:
    """Return the longest of ten times from the writing of a log line on a machine to its arrival in the run folder."""
    uid = json.loads((run_folder / "job.json").read_text())["uid"]
    remote_log = testbed.shared / uid / "logs" / "lag.log"
    local_log = run_folder / "logs" / "lag.log"
    lags = []
    for number in range(10):
        time.sleep(0.37)  # so that each line is written at another fraction of the second
        with remote_log.open("a") as file:
            file.write(f"{number}\n")
        start = time.monotonic()
        wait_for(lambda: local_log.exists() and local_log.stat().st_size == remote_log.stat().st_size)
        lags.append(time.monotonic() - start)
    return max(lags)


def measure(machine_counts: list[int], rounds: int) -> Iterator[str]:
    """Measure, and yield the lines of the section of RESULTS.md."""
    folder = Path(tempfile.mkdtemp(prefix="imgnet-launch-", dir="/tmp"))
    # In memory: real machines have a disk each, these would share one.
    machines_folder = Path(tempfile.mkdtemp(prefix="imgnet-launch-", dir="/dev/shm"))
    host = LaunchHost(folder / "here")
    try:
        with Testbed(machines_folder / "bed", max(machine_counts)) as testbed:
            slow_down_logins(testbed)
            measurements: dict[int, list[LaunchMeasurement]] = {count: [] for count in machine_counts}
            for round_number in range(rounds):
                for count in machine_counts:
                    measurement = measure_launch(host, testbed, count, measure_steady_state=round_number == 0)
                    measurements[count].append(measurement)
                    print(count, measurement, flush=True)
            yield from table(measurements)
    finally:
        host.close()
        for path in (folder, machines_folder):
            shutil.rmtree(path, ignore_errors=True)


def slow_down_logins(testbed: Testbed) -> None:
    """Make a login take as long as on EC2: sshd gets the keys from a program that sleeps. Does nothing without root."""
    authorized_keys = testbed.folder / "authorized_keys"
    if os.geteuid():
        return
    moved_keys = authorized_keys.rename(authorized_keys.with_name("kept_keys"))
    for machine in testbed.machines:
        machine.configure(SLOW_LOGIN_CONFIG.format(seconds=LOGIN_SECONDS / 2, keys=moved_keys))


def table(measurements: dict[int, list[LaunchMeasurement]]) -> Iterator[str]:
    """Yield the delays of the machines, a table with a row per machine count, and the comparison with the bounds."""
    delays = StubDelays()
    login = f"login {LOGIN_SECONDS:g}" if os.geteuid() == 0 else "login without delay"
    yield (
        f"Delays of the machines in seconds: {login}, environment {delays.environment:g}, checks "
        f"{delays.probe:g}, start {delays.start:g}."
    )
    yield ""
    yield "| machines | to the first step | our CPU time, per machine | memory | in steady state | log lag, at most |"
    yield "|---|---|---|---|---|---|"
    for count, launches in measurements.items():
        seconds = median_of("seconds", launches)
        cpu = median_of("cpu_seconds", launches)
        yield (
            f"| {count} | {seconds:.1f} s | {cpu:.2f} s, {1000 * cpu / count:.0f} ms | "
            f"{median_of('memory_mb', launches):.0f} MB | {100 * launches[0].steady_cpu_share:.1f} % of a core | "
            f"{launches[0].log_lag_seconds:.1f} s |"
        )
    yield ""
    fewest, most = min(measurements), max(measurements)
    fewest_seconds = median_of("seconds", measurements[fewest])
    most_seconds = median_of("seconds", measurements[most])
    yield f"The slowest of {most} machines, seconds of each step: {measurements[most][0].setup_steps}."
    yield f"{most} machines take {most_seconds / fewest_seconds:.2f} times as long as {fewest} (bound: 1.3)."
    if len(measurements) > 1:
        extra_cpu = median_of("cpu_seconds", measurements[most]) - median_of("cpu_seconds", measurements[fewest])
        ms_per_machine = 1000 * extra_cpu / (most - fewest)
        upper_bound = fewest_seconds + extra_cpu
        yield (
            f"The rest is the machines' own work, on the cores that they share here. If each machine had its own "
            f"cores, {most} would take at most {upper_bound / fewest_seconds:.2f} times as long: the time of one "
            "machine and our processor time."
        )
        yield (
            f"Each further machine costs {ms_per_machine:.0f} ms of our processor time (bound: 100); the bound of the "
            "memory is 200 MB."
        )


def median_of(field: str, measurements: list[LaunchMeasurement]) -> float:
    """Return the median of a field."""
    return float(statistics.median(getattr(measurement, field) for measurement in measurements))


def main() -> int:
    """Measure and print; if everything was measured, write the section of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Measure launches on many machines.")
    parser.add_argument("sizes", nargs="*", type=int, help="numbers of machines (default: 1 4 16 64)")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each size (default: 3)")
    options = parser.parse_args()
    load_before = os.getloadavg()[1]
    lines = list(measure(options.sizes or list(MACHINE_COUNTS), options.rounds))
    print("\n".join(lines))
    if not options.sizes:
        was_busy = "; other programs were running and slowed the launches" if load_before > 1 else ""
        header = [
            "## `launch --ssh` on machines that cost only time",
            "",
            f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, by `benchmarks/launch/local.py`; the load of the "
            f"computer was {load_before:.1f} before and {os.getloadavg()[2]:.1f} in the last quarter of an "
            f"hour{was_busy}.",
        ]
        write_section("launch/local.py", [*header, *lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
