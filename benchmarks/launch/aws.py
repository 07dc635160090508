"""Seconds from `launch --machines 16` to the first step with rented machines, and the calls to AWS for 16 and 256.

    .venv/bin/python benchmarks/launch/aws.py                          # about eight minutes; its part of RESULTS.md
    .venv/bin/python benchmarks/launch/aws.py --rounds 1 --no-calls    # one launch, nothing is written

The cloud is the simulated one of tests/simcloud: its machines are real sshds that boot as slowly as machines on EC2 and
run a shell script for Python, which waits as long as our modules would (benchmarks/launch/stub.py). AWS itself answers
at once here: its time is not in the seconds. For the calls there are no sshds: command and supervisor rent, then the
supervisor is killed, and another looks after machines that it takes for set up.
"""

import argparse
import importlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.simcloud.__main__ import environment
from support.simcloud.cloud import SimulatedAws
from support.simcloud.http_server import serve
from support.simcloud.machines import SimulatedMachines

from benchmarks.launch.local import (
    COMMAND,
    LOGIN_SECONDS,
    SLOW_LOGIN_CONFIG,
    LaunchHost,
    are_all_training,
    cpu_seconds,
    peak_memory_mb,
    supervisor_pids,
)
from benchmarks.launch.local import wait_for as wait
from benchmarks.launch.stub import StubDelays
from cluster.backends.aws import backend
from cluster.machines.fleet import Fleet
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from infra.aws.journal import Journal

BEGIN_MARK, END_MARK = "<!-- launch_rented.py -->", "<!-- end of launch_rented.py -->"
MACHINES, MANY_MACHINES, INSTANCE_TYPE = 16, 256, "c7i.2xlarge"
PENDING_SECONDS, SSHD_SECONDS, MARKER_SECONDS = (
    8.0,
    8.0,
    4.0,
)  # seconds of a boot: until EC2 says running, until sshd, until the marker
VISIBLE_AFTER_SECONDS = 1.0  # seconds until EC2 tells of a new machine
WATCH_SECONDS, POLL_SECONDS = 60.0, 1.0  # the supervisor's own beat
STUB_DELAYS, IS_ROOT = StubDelays(count=MACHINES), os.geteuid() == 0
FIXED_SECONDS_BY_PART = {  # the parts of a launch, and what of each nobody can save here
    "the command: plan, prices, run folder": 0.0,
    "the supervisor starts, looks at stack and image": 0.0,
    "RunInstances until all run": PENDING_SECONDS,
    "boot, first login, own host keys": SSHD_SECONDS + MARKER_SECONDS + LOGIN_SECONDS * IS_ROOT,
    "set up to the first step": LOGIN_SECONDS * IS_ROOT
    + STUB_DELAYS.environment
    + 2 * STUB_DELAYS.probe
    + STUB_DELAYS.network
    + STUB_DELAYS.start,
}
CallCounts = Counter[str]
WatchMeasurement = tuple[
    dict[str, CallCounts], float, float
]  # by what was done; seconds of a look, of a loop over machines


class SlowMachines(SimulatedMachines):
    """Machines to which a login takes as long as on EC2 (that takes root), and whose fast disk is mounted late."""

    def _start_sshd(self, id: str) -> None:
        machine = self.machines[id]
        if IS_ROOT:
            kept = (machine.folder / "authorized_keys").rename(machine.folder / "kept_keys")
            machine.write_config(machine.env, SLOW_LOGIN_CONFIG.format(seconds=LOGIN_SECONDS / 2, keys=kept))
        super()._start_sshd(id)

    def _finish_setup(self, id: str) -> None:
        below = self.machines[id].home / ".imgnet"
        if below.exists():  # who logged in before has left files there, which nobody sees below the mount
            below.rename(below.with_name(".below"))
        super()._finish_setup(id)


class ProvisionedFleet(Fleet):
    """Machines that are set up and at work, as far as their supervisor is concerned: nobody asks them anything."""

    set_up_machines = push_stop_request = pull_files = lambda self: None
    agents_alive, dead_machines = lambda self: True, lambda self: []


class SimulatedCloud:
    """The simulated cloud in this process, and a home from which it looks like AWS."""

    def __init__(self, folder: Path, disks: Path) -> None:
        self.sim = SimulatedAws(boot_seconds=PENDING_SECONDS, visible_after=VISIBLE_AFTER_SECONDS)
        self.server, url = serve(sim=self.sim)
        self.host = LaunchHost(folder / "here")
        self.host.env |= environment(url)
        os.environ |= {name: self.host.env[name] for name in ("HOME", "TMUX_TMPDIR", *environment(url))}
        python = STUB_DELAYS.write_script(folder / "python")
        self.machines: SimulatedMachines | None = SlowMachines(self.sim, disks / "machines", python=str(python))
        self.machines.configure(ssh_delay_seconds=SSHD_SECONDS, ready_delay_seconds=MARKER_SECONDS)

    def remove_machines(self) -> None:
        """From now on there is nothing behind an instance, and its image says nothing of a login."""
        if self.machines:
            self.machines.close()
            self.machines, self.sim.listeners, self.sim.login = None, [], ("ubuntu", 22)

    def close(self) -> None:
        """End it all. Raises `RuntimeError` when the cloud itself had errors, or something still costs."""
        self.host.close()
        self.remove_machines()
        self.server.shutdown()
        if self.sim.errors or self.sim.leaks():
            raise RuntimeError(f"{self.sim.errors[:1]} {self.sim.leaks()[:3]}")

    @property
    def calls(self) -> list[str]:
        """The actions that were called, in order."""
        return [name for _, name in self.server.front.calls]  # type: ignore[attr-defined]

    def count_calls(self, function: Callable[[], object]) -> CallCounts:
        """Count the calls that something makes."""
        before = len(self.calls)
        function()
        return CallCounts(self.calls[before:])

    def launch(self, count: int) -> tuple[Path, float]:
        """Run the command. Returns the run folder and its processor time in seconds."""
        words = [
            COMMAND,
            "launch",
            "--machines",
            str(count),
            "--type",
            INSTANCE_TYPE,
            "--procs",
            "1",
            "-y",
            "-d",
            "recipe.py",
        ]
        command = subprocess.Popen(words, cwd=self.host.folder, env=self.host.env, stdout=subprocess.PIPE, text=True)
        said = command.stdout.read() if command.stdout else ""
        _, command.returncode, used = os.wait4(command.pid, 0)
        assert command.returncode == 0, said
        return Path(said.partition("run folder ")[2].splitlines()[0]), used.ru_utime + used.ru_stime

    def terminate(self, run: Path) -> None:
        """End a job with all that it rented."""
        self.host.cli("down", run.name)
        wait(lambda: not supervisor_pids(run), "the supervisor has ended")


def seconds_of(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.monotonic()
    function()
    return time.monotonic() - start


@dataclass(frozen=True)
class RentedLaunchMeasurement:
    """One launch: seconds of its parts, of our processor, megabytes, calls, those before RunInstances, steps."""

    seconds_by_part: dict[str, float]
    cpu_seconds: float
    memory_mb: float
    calls: CallCounts
    calls_before_run_instances: int
    setup_steps: str


def measure_rented_launch(cloud: SimulatedCloud) -> RentedLaunchMeasurement:
    """Launch on machines that are rented now, until all of them train; then end the job."""
    start, before = time.time(), len(cloud.calls)
    run, ours = cloud.launch(MACHINES)
    try:
        wait(lambda: are_all_training(run, MACHINES), f"{MACHINES} machines train")
        end, calls = time.time(), cloud.calls[before:]
        (pid,) = supervisor_pids(run)
        rows = [one["seconds"] for one in json.loads((run / "machines.json").read_text())["machines"].values()]
        steps = ", ".join(f"{name} {max(one.get(name, 0.0) for one in rows):.1f}" for name in rows[0])
        last = {line["what"]: line["time"] for line in Journal(run / "cloud.jsonl").lines()}
        moments = [start, last["begin"], last["ask"], last["granted"], last["host key"], end]
        parts = {
            name: after - at
            for name, (at, after) in zip(FIXED_SECONDS_BY_PART, itertools.pairwise(moments), strict=True)
        }
        return RentedLaunchMeasurement(
            parts, ours + cpu_seconds(pid), peak_memory_mb(pid), CallCounts(calls), calls.index("RunInstances"), steps
        )
    finally:
        cloud.terminate(run)


def measure_calls(cloud: SimulatedCloud, count: int) -> WatchMeasurement:
    """Rent so many machines by the command, look after them for a minute, ask as a plain loop would, end them."""
    before = len(cloud.calls)
    run, _ = cloud.launch(count)
    wait(lambda: Journal(run / "cloud.jsonl").lines("granted"), f"{count} machines run")
    found = {"renting": CallCounts(cloud.calls[before:])}
    for pid in supervisor_pids(run):
        os.kill(pid, signal.SIGKILL)
    wait(lambda: not supervisor_pids(run), "the supervisor is dead")
    folders = RunFolder(run)
    spec = JobSpec.from_json(json.loads(folders.spec_path.read_text()))
    importlib.import_module(
        "cluster.backends.aws.controller"
    ).Fleet = ProvisionedFleet  # the package has a function of that name
    backend.poll(spec, folders)  # finds the machines
    job, looks, loops, peer = backend.get_controller(folders), list[float](), list[float](), CallCounts()
    assert len(job.live_instances) == count

    def minute() -> None:
        deadline = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < deadline:
            backend.poll(spec, folders)
            backend.dead_machines(spec, folders)
            time.sleep(POLL_SECONDS)

    def loop() -> None:
        for one in job.live_instances.values():
            job.job_instances.account.ec2.describe_instances(InstanceIds=[one.id])

    found["watching"] = cloud.count_calls(minute)
    for _ in range(found["watching"]["DescribeInstances"]):  # in turn
        looks.append(seconds_of(job.job_instances.list_instances))
        peer += cloud.count_calls(lambda: loops.append(seconds_of(loop)))
    found["`down`"] = cloud.count_calls(lambda: cloud.terminate(run))
    found["watching, one call a machine"] = peer
    return found, statistics.median(looks), statistics.median(loops)


def launch_lines(measurements: list[RentedLaunchMeasurement]) -> Iterator[str]:
    """Give the lines about time."""
    yield (
        f"The machines wait, in seconds: {PENDING_SECONDS:g} pending, {SSHD_SECONDS:g} until sshd, {MARKER_SECONDS:g} until the boot is over; "
        f"{f'login {LOGIN_SECONDS:g}, twice' if IS_ROOT else 'logins as quick as they are'}, environment {STUB_DELAYS.environment:g}, "
        f"checks twice {STUB_DELAYS.probe:g}, network {STUB_DELAYS.network:g}, start {STUB_DELAYS.start:g}. EC2 answers at once, and "
        f"shows a new machine after {VISIBLE_AFTER_SECONDS:g} s. n = {len(measurements)}, medians."
    )
    head = f"| {MACHINES} machines, seconds | all | waiting, as set | our own, on cores that the machines share |"
    yield from ("", head, "|---|---|---|---|")
    for name, known in FIXED_SECONDS_BY_PART.items():
        took = statistics.median(one.seconds_by_part[name] for one in measurements)
        yield f"| {name} | {took:.1f} | {known:.1f} | {took - known:.1f} |"
    took, known = (
        statistics.median(sum(one.seconds_by_part.values()) for one in measurements),
        sum(FIXED_SECONDS_BY_PART.values()),
    )
    yield f"| command to first step | {took:.1f} | {known:.1f} | {took - known:.1f}, {1 - known / took:.0%} |"
    yield ""
    first, used = measurements[0], statistics.median(one.cpu_seconds for one in measurements)
    yield (
        f"The slowest machine, seconds a step: {first.setup_steps}.\n"
        f"Our processor time, of command and supervisor: {used:.2f} s, {1000 * used / MACHINES:.0f} ms a machine, "
        f"{max(one.memory_mb for one in measurements):.0f} MB of memory. {first.calls.total()} calls to AWS, {first.calls_before_run_instances} of "
        "them before RunInstances."
    )


def call_lines(few: WatchMeasurement, many: WatchMeasurement) -> Iterator[str]:
    """Give the lines about calls; those that are the same, and only for renting, in one line."""
    rent, *others = parts = [(few[0][name], many[0][name]) for name in few[0]]
    names = sorted({name for part in parts for one in part for name in one})
    same = [name for name in names if rent[0][name] == rent[1][name] and not any(one[0][name] for one in others)]
    rows = {name: [(one[name], two[name]) for one, two in parts] for name in names if name not in same}
    described = [name for name in names if name.startswith("Describe")]
    rows["all that describe"] = [(sum(one[n] for n in described), sum(two[n] for n in described)) for one, two in parts]
    rows["all"] = [(one.total(), other.total()) for one, other in parts]
    yield f"| calls for {MACHINES} / {MANY_MACHINES} machines, watching for {WATCH_SECONDS:.0f} s | {' | '.join(few[0])} |"
    yield "|---" * (1 + len(parts)) + "|"
    for name, cells in rows.items():
        yield f"| {name} | {' | '.join(f'{one} / {other}' if one or other else '' for one, other in cells)} |"
    for name in ("DescribeInstances", "all that describe"):
        yield f"| {name}, {MANY_MACHINES} / {MACHINES} | {' | '.join(f'{b / a:.2f}' for a, b in rows[name])} |"
    yield ""
    yield f"And for renting, the same for both: {', '.join(f'{name} {rent[0][name]}' for name in same)}."
    yield (
        f"One look took {1000 * few[1]:.0f} / {1000 * many[1]:.0f} ms here, one call a machine {few[2]:.2f} / "
        f"{many[2]:.2f} s."
    )


def write_results(lines: list[str]) -> None:
    """Put the lines between our marks in RESULTS.md, at its end when there are none yet."""
    path = ROOT / "benchmarks" / "RESULTS.md"
    text, part = path.read_text(), "\n".join([BEGIN_MARK, *lines, END_MARK])
    before, _, rest = (
        text.partition(BEGIN_MARK) if BEGIN_MARK in text else (f"{text.rstrip()}\n\n", "", f"{END_MARK}\n")
    )
    path.write_text(before + part + rest.partition(END_MARK)[2])


def main() -> int:
    """Measure and print; with everything measured, write the part of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Measure launches on rented machines.")
    parser.add_argument("--rounds", type=int, default=3, help="launches (default: 3)")
    parser.add_argument("--no-calls", action="store_true", help="leave out the calls for 256 machines; write nothing")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    folder, disks = (Path(tempfile.mkdtemp(prefix="imgnet-rented-", dir=one)) for one in ("/tmp", "/dev/shm"))
    bed = SimulatedCloud(folder, disks)
    try:
        stack = seconds_of(lambda: bed.host.cli("up", "--stack"))
        lines = [f"The stack, once for a region, before all else: {stack:.1f} s, {len(bed.calls)} calls.", ""]
        lines += launch_lines([measure_rented_launch(bed) for _ in range(options.rounds)])
        if not options.no_calls:
            bed.remove_machines()
            lines += ["", *call_lines(measure_calls(bed, MACHINES), measure_calls(bed, MANY_MACHINES))]
    finally:
        bed.close()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(disks, ignore_errors=True)
    lines[:0] = [
        "## `launch --machines 16`, rented from the simulated AWS", "",
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, by `benchmarks/launch/aws.py`; the load of the "
        f"computer was {load:.1f} before, {os.getloadavg()[2]:.1f} in the last quarter of an hour.",
    ]  # fmt: skip
    print("\n".join(["", *lines]))
    if not options.no_calls:
        write_results(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
