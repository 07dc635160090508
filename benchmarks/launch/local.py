"""Seconds from `launch --hosts` to the first step for 1, 4, 16, 64 machines, and how much of that is ours.

    .venv/bin/python benchmarks/launch/local.py               # all, about ten minutes; writes its part of RESULTS.md
    .venv/bin/python benchmarks/launch/local.py 1 4 --rounds 1

Each machine is a real sshd on 127.1.0.N. What runs there is a shell script that waits as long as a machine on EC2 does
and says what our modules would say: the machines share this computer's cores, so they must cost little but time. Our
own processor time is that of the command and of the supervisor with its children, by wait4(2) and /proc.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.launch.stub import RECIPE, StubDelays

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
MACHINE_COUNTS = (1, 4, 16, 64)
CONCURRENT_JOBS = 16
STEADY_SECONDS = 20.0
DEADLINE_SECONDS = 240.0
BEGIN_MARK, END_MARK = "<!-- launch.py -->", "<!-- end of launch.py -->"

LOGIN_SECONDS = 1.5  # in two parts: sshd asks for the keys twice
SLOW_LOGIN_CONFIG = (
    "AuthorizedKeysCommand /bin/sh -c \"sleep {seconds}; cat '{keys}'\"\nAuthorizedKeysCommandUser root\n"
)


# --- a computer to launch from ------------------------------------------------------------------------------------


class LaunchHost:
    """A folder, a home and a tmux server of our own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tmux_folder = folder, tempfile.mkdtemp(prefix="imgt-", dir="/tmp")
        (folder / "home").mkdir(parents=True)
        (folder / "recipe.py").write_text(RECIPE)
        kept = {name: text for name, text in os.environ.items() if name not in ("IMGNET_RUNS", "TMUX", "PYTHONPATH")}
        self.env = {**kept, "HOME": str(folder / "home"), "TMUX_TMPDIR": self.tmux_folder, "TERM": "xterm"}

    def cli(self, *words: str) -> str:
        """Run the installed command; raises `CalledProcessError`."""
        run = subprocess.run([COMMAND, *words], cwd=self.folder, env=self.env, stdout=subprocess.PIPE, text=True)
        run.check_returncode()
        return run.stdout

    def launch(self, hosts_file: Path) -> Path:
        """Launch a job on these machines. Returns its run folder."""
        said = self.cli("launch", "--hosts", str(hosts_file), "-y", "-d", "recipe.py")
        return Path(said.partition("run folder ")[2].splitlines()[0])

    def stop(self, run: Path) -> None:
        """End a job and wait until its supervisor has gone."""
        self.cli("stop", run.name)
        wait_for(lambda: not supervisor_pids(run), "the supervisor has ended")

    def close(self) -> None:
        """End the tmux server."""
        subprocess.run(["tmux", "-L", "imgnet", "kill-server"], env=self.env, capture_output=True)
        shutil.rmtree(self.tmux_folder, ignore_errors=True)


def wait_for(condition: Callable[[], object], description: str) -> None:
    """Return when the condition is true. Raises `TimeoutError`."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {DEADLINE_SECONDS:g} s: {description}")
        time.sleep(0.02)


def supervisor_pids(run: Path) -> list[int]:
    """The processes that supervise a run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"cluster.jobs.supervisor" in words[:4] and os.fsencode(run) in words:
                found.append(int(entry.name))
    return found


def cpu_seconds(pid: int) -> float:
    """Seconds of processor time of a process and of its children that have ended (proc(5), stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(one) for one in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def peak_memory_mb(pid: int) -> float:
    """The most memory a process has had, in MB (1e6 bytes)."""
    said = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(said[1]) * 1024 / 1e6 if said else 0.0


def are_all_training(run_folder: Path, machine_count: int) -> bool:
    """Whether all machines train, as far as is known at home."""
    folder = run_folder / "machine" / "shared" / "status"
    if (run_folder / "result.json").exists():
        raise RuntimeError((run_folder / "result.json").read_text())
    files = [folder / f"{name}.json" for name in range(machine_count)]
    return all(one.exists() and '"state": "training"' in one.read_text() for one in files)


# --- what is measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchMeasurement:
    """One launch: seconds to the first step, ours of the processor, the supervisor's memory in MB, what then."""

    seconds: float
    cpu_seconds: float
    memory_mb: float
    steady_cpu_share: float = 0.0
    log_lag_seconds: float = 0.0
    setup_steps: str = ""


def measure_launch(
    host: LaunchHost, testbed: object, machine_count: int, measure_steady_state: bool
) -> LaunchMeasurement:
    """Launch a job on fresh machines, wait for the first step, look at it for a while, and stop it."""
    hosts = write_hosts_file(host, testbed, 0, machine_count)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    run = host.launch(hosts)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wait_for(lambda: are_all_training(run, machine_count), f"{machine_count} machines train")
    seconds = time.monotonic() - start
    (pid,) = supervisor_pids(run)
    ours = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime + cpu_seconds(pid)
    board = json.loads((run / "machines.json").read_text())
    rows = [one["seconds"] for one in board["machines"].values()]
    steps = {name: max(one.get(name, 0.0) for one in rows) for name in rows[0]}
    try:
        steady, lag = (
            (measure_steady_cpu_share([pid]), longest_log_lag(run, testbed)) if measure_steady_state else (0.0, 0.0)
        )
        return LaunchMeasurement(
            seconds, ours, peak_memory_mb(pid), steady, lag, ", ".join(f"{k} {v:.1f}" for k, v in steps.items())
        )
    finally:
        host.stop(run)


def write_hosts_file(host: LaunchHost, testbed: object, first: int, count: int) -> Path:
    """Write a hosts file of so many machines, which have never been used."""
    chosen = testbed.machines[first : first + count]  # type: ignore[attr-defined]
    for one in chosen:
        shutil.rmtree(one.home / ".imgnet", ignore_errors=True)
    stub = StubDelays(count=count).write_script(host.folder / f"python-{first}-{count}")
    path: Path = testbed.write_hosts_toml(host.folder / f"hosts-{first}.toml", python=str(stub))  # type: ignore[attr-defined]
    head, *tables = path.read_text().split("[[machines]]")
    path.write_text("[[machines]]".join([head, *tables[first : first + count]]))
    return path


def measure_steady_cpu_share(pids: list[int]) -> float:
    """The part of one core that these processes take."""
    before, start = sum(map(cpu_seconds, pids)), time.monotonic()
    time.sleep(STEADY_SECONDS)
    return (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - start)


def longest_log_lag(run_folder: Path, testbed: object) -> float:
    """The longest of ten times from a line that is written on the machines to its being home."""
    uid = json.loads((run_folder / "job.json").read_text())["uid"]
    there, home = testbed.shared / uid / "logs" / "lag.log", run_folder / "logs" / "lag.log"  # type: ignore[attr-defined]
    found = []
    for number in range(10):
        time.sleep(0.37)  # at another part of the second each time
        with there.open("a") as file:
            file.write(f"{number}\n")
        start, size = time.monotonic(), there.stat().st_size
        wait_for(lambda size=size: home.exists() and home.stat().st_size == size, "a line is home")  # type: ignore[misc]
        found.append(time.monotonic() - start)
    return max(found)


def measure_concurrent_jobs(host: LaunchHost, testbed: object) -> tuple[float, float]:
    """Jobs at once, of one to four machines: the part of a core that all supervisors take, and the memory of all."""
    runs, first = [], 0
    for number in range(CONCURRENT_JOBS):
        count = number % 4 + 1
        runs.append((host.launch(write_hosts_file(host, testbed, first, count)), count))
        first += count
    for run, count in runs:
        wait_for(lambda run=run, count=count: are_all_training(run, count), f"{run.name} trains")  # type: ignore[misc]
    pids = [pid for run, _ in runs for pid in supervisor_pids(run)]
    try:
        return measure_steady_cpu_share(pids), sum(map(peak_memory_mb, pids))
    finally:
        for run, _ in runs:
            host.stop(run)


def measure(machine_counts: list[int], rounds: int, with_concurrent_jobs: bool) -> Iterator[str]:
    """Give the lines of RESULTS.md."""
    from support.ssh_machines import Testbed

    most = max(*machine_counts, 40 if with_concurrent_jobs else 1)
    folder = Path(tempfile.mkdtemp(prefix="imgnet-launch-", dir="/tmp"))
    disks = Path(tempfile.mkdtemp(prefix="imgnet-launch-", dir="/dev/shm"))  # they would share one that is real
    here = LaunchHost(folder / "here")
    try:
        with Testbed(disks / "bed", most) as bed:
            slow_down_logins(bed)
            found: dict[int, list[LaunchMeasurement]] = {count: [] for count in machine_counts}
            for turn in range(rounds):
                for count in machine_counts:
                    found[count].append(measure_launch(here, bed, count, measure_steady_state=turn == 0))
                    print(count, found[count][-1], flush=True)
            yield from table(found)
            if with_concurrent_jobs:
                yield ""
                part, memory = measure_concurrent_jobs(here, bed)
                yield (
                    f"{CONCURRENT_JOBS} jobs at once, of 1 to 4 machines, in steady state, all supervisors "
                    f"together: {100 * part:.1f} % of a core (bound: 5), {memory:.0f} MB."
                )
    finally:
        here.close()
        for one in (folder, disks):
            shutil.rmtree(one, ignore_errors=True)


def slow_down_logins(testbed: object) -> None:
    """Let sshd ask a program for the keys, which takes as long as a login on EC2. That takes root."""
    keys = testbed.folder / "authorized_keys"  # type: ignore[attr-defined]
    if os.geteuid():
        return
    kept = keys.rename(keys.with_name("kept_keys"))
    for one in testbed.machines:  # type: ignore[attr-defined]
        one.configure(SLOW_LOGIN_CONFIG.format(seconds=LOGIN_SECONDS / 2, keys=kept))


def table(measurements: dict[int, list[LaunchMeasurement]]) -> Iterator[str]:
    """Give a row for each number of machines."""
    waits = StubDelays()
    login = f"login {LOGIN_SECONDS:g}" if os.geteuid() == 0 else "login as quick as it is"
    yield (
        f"The machines wait, in seconds: {login}, environment {waits.environment:g}, checks twice {waits.probe:g}, "
        f"network {waits.network:g} (not for one machine), start {waits.start:g}."
    )
    yield ""
    yield "| machines | to the first step | our processor time, a machine | memory | in steady state | lag, at most |"
    yield "|---|---|---|---|---|---|"
    for count, ones in measurements.items():
        seconds, ours, memory = (
            statistics.median(getattr(one, name) for one in ones) for name in ("seconds", "processor", "memory")
        )
        yield (
            f"| {count} | {seconds:.1f} s | {ours:.2f} s, {1000 * ours / count:.0f} ms | {memory:.0f} MB | "
            f"{100 * ones[0].steady_cpu_share:.1f} % of a core | {ones[0].log_lag_seconds:.1f} s |"
        )
    yield ""
    few, many = (
        statistics.median(one.seconds for one in measurements[count])
        for count in (min(measurements), max(measurements))
    )
    yield f"The slowest machine of {max(measurements)}, seconds a step: {measurements[max(measurements)][0].setup_steps}."
    yield f"{max(measurements)} machines take {many / few:.2f} times as long as {min(measurements)} (bound: 1.3)."
    if len(measurements) > 1:
        one, other = (
            statistics.median(one.cpu_seconds for one in measurements[count])
            for count in (min(measurements), max(measurements))
        )
        each = 1000 * (other - one) / (max(measurements) - min(measurements))
        most = few + (StubDelays().network if min(measurements) == 1 else 0.0) + other - one
        yield (
            f"The rest is the machines' own work, on cores that they share here. Had each its own, {max(measurements)} would "
            f"take at most {most / few:.2f} times as long: one machine's time, the network's wait, our processor time."
        )
        yield f"Each machine more costs {each:.0f} ms of our processor time (bound: 100); the memory's bound is 200 MB."


def main() -> int:
    """Measure and print; with everything measured, write the part of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Measure launches on many machines.")
    parser.add_argument("sizes", nargs="*", type=int, help="numbers of machines (default: 1 4 16 64)")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each size (default: 3)")
    parser.add_argument("--jobs", action="store_true", help=f"{CONCURRENT_JOBS} jobs at once, too")
    options = parser.parse_args()
    before = os.getloadavg()[1]
    lines = list(measure(options.sizes or list(MACHINE_COUNTS), options.rounds, options.jobs or not options.sizes))
    print("\n".join(lines))
    if not options.sizes:
        write_results(lines, before)
    return 0


def write_results(lines: list[str], load_before: float) -> None:
    """Put the lines between our two marks in RESULTS.md, or at its end."""
    path = ROOT / "benchmarks" / "RESULTS.md"
    after = os.getloadavg()[2]
    head = [
        BEGIN_MARK,
        "## `launch --hosts` on machines that cost only time",
        "",
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, by `benchmarks/launch/local.py`; the load of the computer was "
        f"{load_before:.1f} before and {after:.1f} in the last quarter of an hour"
        f"{': other things were running, which the times include' if load_before > 1 else ''}.",
    ]
    text = "\n".join([*head, *lines, END_MARK])
    old = path.read_text()
    if BEGIN_MARK in old and END_MARK in old:
        text = old[: old.index(BEGIN_MARK)] + text + old[old.index(END_MARK) + len(END_MARK) :]
    else:
        text = f"{old.rstrip()}\n\n{text}\n"
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
