"""Seconds from `launch --machines 16` to the first step with rented machines, and the calls to AWS for 16 and 256.

    .venv/bin/python benchmarks/launch_rented.py                          # about eight minutes; its part of RESULTS.md
    .venv/bin/python benchmarks/launch_rented.py --rounds 1 --no-calls    # one launch, nothing is written

The cloud is the simulated one of tests/simcloud: its machines are real sshds that boot as slowly as machines on EC2 and
run a shell script for Python, which waits as long as our modules would (benchmarks/launch_stub.py). AWS itself answers
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

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

from support.simcloud.__main__ import environment  # noqa: E402
from support.simcloud.cloud import Sim  # noqa: E402
from support.simcloud.http_server import serve  # noqa: E402
from support.simcloud.machines import Machines  # noqa: E402

from benchmarks.launch import COMMAND, LOGIN, SLOW_LOGIN, Here, peak, processor, supervisors, training  # noqa: E402
from benchmarks.launch import wait_for as wait  # noqa: E402
from benchmarks.launch_stub import Waits  # noqa: E402
from cluster.backends.aws import backend  # noqa: E402
from cluster.machines.fleet import Fleet  # noqa: E402
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec  # noqa: E402
from infra.aws.journal import Journal  # noqa: E402

BEGIN, END = "<!-- launch_rented.py -->", "<!-- end of launch_rented.py -->"
MACHINES, MANY, TYPE = 16, 256, "c7i.2xlarge"
PENDING, SSHD, MARKER = 8.0, 8.0, 4.0  # seconds of a boot: until EC2 says running, until sshd, until the marker
SEEN = 1.0  # seconds until EC2 tells of a new machine
WATCH_SECONDS, BEAT = 60.0, 1.0  # the supervisor's own beat
WAITS, ROOT = Waits(count=MACHINES), os.geteuid() == 0
KNOWN = {  # the parts of a launch, and what of each nobody can save here
    "the command: plan, prices, run folder": 0.0,
    "the supervisor starts, looks at stack and image": 0.0,
    "RunInstances until all run": PENDING,
    "boot, first login, own host keys": SSHD + MARKER + LOGIN * ROOT,
    "set up to the first step": LOGIN * ROOT + WAITS.environment + 2 * WAITS.probe + WAITS.network + WAITS.start,
}
Calls = Counter[str]
Watched = tuple[dict[str, Calls], float, float]  # by what was done; seconds of a look, of a loop over machines


class SlowMachines(Machines):
    """Machines to which a login takes as long as on EC2 (that takes root), and whose fast disk is mounted late."""

    def _open(self, id: str) -> None:
        machine = self.machines[id]
        if ROOT:
            kept = (machine.folder / "authorized_keys").rename(machine.folder / "kept_keys")
            machine.write_config(machine.env, SLOW_LOGIN.format(seconds=LOGIN / 2, keys=kept))
        super()._open(id)

    def _ready(self, id: str) -> None:
        below = self.machines[id].home / ".imgnet"
        if below.exists():  # who logged in before has left files there, which nobody sees below the mount
            below.rename(below.with_name(".below"))
        super()._ready(id)


class Settled(Fleet):
    """Machines that are set up and at work, as far as their supervisor is concerned: nobody asks them anything."""

    launch = push = bring = lambda self: None
    alive, dead = lambda self: True, lambda self: []


class Bed:
    """The simulated cloud in this process, and a home from which it looks like AWS."""

    def __init__(self, folder: Path, disks: Path) -> None:
        self.sim = Sim(boot_seconds=PENDING, visible_after=SEEN)
        self.server, url = serve(sim=self.sim)
        self.here = Here(folder / "here")
        self.here.env |= environment(url)
        os.environ |= {name: self.here.env[name] for name in ("HOME", "TMUX_TMPDIR", *environment(url))}
        python = WAITS.write(folder / "python")
        self.machines: Machines | None = SlowMachines(self.sim, disks / "machines", python=str(python))
        self.machines.set(ssh_late=SSHD, ready_late=MARKER)

    def without_machines(self) -> None:
        """From now on there is nothing behind an instance, and its image says nothing of a login."""
        if self.machines:
            self.machines.close()
            self.machines, self.sim.listeners, self.sim.login = None, [], ("ubuntu", 22)

    def close(self) -> None:
        """End it all. Raises `RuntimeError` when the cloud itself had errors, or something still costs."""
        self.here.close()
        self.without_machines()
        self.server.shutdown()
        if self.sim.errors or self.sim.leaks():
            raise RuntimeError(f"{self.sim.errors[:1]} {self.sim.leaks()[:3]}")

    @property
    def calls(self) -> list[str]:
        """The actions that were called, in order."""
        return [name for _, name in self.server.front.calls]  # type: ignore[attr-defined]

    def during(self, work: Callable[[], object]) -> Calls:
        """Count the calls that something makes."""
        before = len(self.calls)
        work()
        return Calls(self.calls[before:])

    def launch(self, count: int) -> tuple[Path, float]:
        """Run the command. Returns the run folder and its processor time in seconds."""
        words = [COMMAND, "launch", "--machines", str(count), "--type", TYPE, "--procs", "1", "-y", "-d", "recipe.py"]
        command = subprocess.Popen(words, cwd=self.here.folder, env=self.here.env, stdout=subprocess.PIPE, text=True)
        said = command.stdout.read() if command.stdout else ""
        _, command.returncode, used = os.wait4(command.pid, 0)
        assert command.returncode == 0, said
        return Path(said.partition("run folder ")[2].splitlines()[0]), used.ru_utime + used.ru_stime

    def end(self, run: Path) -> None:
        """End a job with all that it rented."""
        self.here.cli("down", run.name)
        wait(lambda: not supervisors(run), "the supervisor has ended")


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


@dataclass(frozen=True)
class Launched:
    """One launch: seconds of its parts, of our processor, megabytes, calls, those before RunInstances, steps."""

    parts: dict[str, float]
    processor: float
    memory: float
    calls: Calls
    early: int
    steps: str


def one_launch(bed: Bed) -> Launched:
    """Launch on machines that are rented now, until all of them train; then end the job."""
    start, before = time.time(), len(bed.calls)
    run, ours = bed.launch(MACHINES)
    try:
        wait(lambda: training(run, MACHINES), f"{MACHINES} machines train")
        end, calls = time.time(), bed.calls[before:]
        (pid,) = supervisors(run)
        rows = [one["seconds"] for one in json.loads((run / "machines.json").read_text())["machines"].values()]
        steps = ", ".join(f"{name} {max(one.get(name, 0.0) for one in rows):.1f}" for name in rows[0])
        last = {line["what"]: line["time"] for line in Journal(run / "cloud.jsonl").lines()}
        moments = [start, last["begin"], last["ask"], last["granted"], last["host key"], end]
        parts = {name: after - at for name, (at, after) in zip(KNOWN, itertools.pairwise(moments), strict=True)}
        return Launched(parts, ours + processor(pid), peak(pid), Calls(calls), calls.index("RunInstances"), steps)
    finally:
        bed.end(run)


def watch(bed: Bed, count: int) -> Watched:
    """Rent so many machines by the command, look after them for a minute, ask as a plain loop would, end them."""
    before = len(bed.calls)
    run, _ = bed.launch(count)
    wait(lambda: Journal(run / "cloud.jsonl").lines("granted"), f"{count} machines run")
    found = {"renting": Calls(bed.calls[before:])}
    for pid in supervisors(run):
        os.kill(pid, signal.SIGKILL)
    wait(lambda: not supervisors(run), "the supervisor is dead")
    folders = Folders(run)
    spec = Spec.from_json(json.loads(folders.spec.read_text()))
    importlib.import_module(
        "cluster.backends.aws.controller"
    ).Fleet = Settled  # the package has a function of that name
    backend.step(spec, folders)  # finds the machines
    job, looks, loops, peer = backend.cloud(folders), list[float](), list[float](), Calls()
    assert len(job.present) == count

    def minute() -> None:
        deadline = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < deadline:
            backend.step(spec, folders)
            backend.dead(spec, folders)
            time.sleep(BEAT)

    def loop() -> None:
        for one in job.present.values():
            job.rented.account.ec2.describe_instances(InstanceIds=[one.id])

    found["watching"] = bed.during(minute)
    for _ in range(found["watching"]["DescribeInstances"]):  # in turn
        looks.append(timed(job.rented.look))
        peer += bed.during(lambda: loops.append(timed(loop)))
    found["`down`"] = bed.during(lambda: bed.end(run))
    found["watching, one call a machine"] = peer
    return found, statistics.median(looks), statistics.median(loops)


def launches(found: list[Launched]) -> Iterator[str]:
    """Give the lines about time."""
    yield (
        f"The machines wait, in seconds: {PENDING:g} pending, {SSHD:g} until sshd, {MARKER:g} until the boot is over; "
        f"{f'login {LOGIN:g}, twice' if ROOT else 'logins as quick as they are'}, environment {WAITS.environment:g}, "
        f"checks twice {WAITS.probe:g}, network {WAITS.network:g}, start {WAITS.start:g}. EC2 answers at once, and "
        f"shows a new machine after {SEEN:g} s. n = {len(found)}, medians."
    )
    head = f"| {MACHINES} machines, seconds | all | waiting, as set | our own, on cores that the machines share |"
    yield from ("", head, "|---|---|---|---|")
    for name, known in KNOWN.items():
        took = statistics.median(one.parts[name] for one in found)
        yield f"| {name} | {took:.1f} | {known:.1f} | {took - known:.1f} |"
    took, known = statistics.median(sum(one.parts.values()) for one in found), sum(KNOWN.values())
    yield f"| command to first step | {took:.1f} | {known:.1f} | {took - known:.1f}, {1 - known / took:.0%} |"
    yield ""
    first, used = found[0], statistics.median(one.processor for one in found)
    yield (
        f"The slowest machine, seconds a step: {first.steps}.\n"
        f"Our processor time, of command and supervisor: {used:.2f} s, {1000 * used / MACHINES:.0f} ms a machine, "
        f"{max(one.memory for one in found):.0f} MB of memory. {first.calls.total()} calls to AWS, {first.early} of "
        "them before RunInstances."
    )


def table(few: Watched, many: Watched) -> Iterator[str]:
    """Give the lines about calls; those that are the same, and only for renting, in one line."""
    rent, *others = parts = [(few[0][name], many[0][name]) for name in few[0]]
    names = sorted({name for part in parts for one in part for name in one})
    same = [name for name in names if rent[0][name] == rent[1][name] and not any(one[0][name] for one in others)]
    rows = {name: [(one[name], two[name]) for one, two in parts] for name in names if name not in same}
    described = [name for name in names if name.startswith("Describe")]
    rows["all that describe"] = [(sum(one[n] for n in described), sum(two[n] for n in described)) for one, two in parts]
    rows["all"] = [(one.total(), other.total()) for one, other in parts]
    yield f"| calls for {MACHINES} / {MANY} machines, watching for {WATCH_SECONDS:.0f} s | {' | '.join(few[0])} |"
    yield "|---" * (1 + len(parts)) + "|"
    for name, cells in rows.items():
        yield f"| {name} | {' | '.join(f'{one} / {other}' if one or other else '' for one, other in cells)} |"
    for name in ("DescribeInstances", "all that describe"):
        yield f"| {name}, {MANY} / {MACHINES} | {' | '.join(f'{b / a:.2f}' for a, b in rows[name])} |"
    yield ""
    yield f"And for renting, the same for both: {', '.join(f'{name} {rent[0][name]}' for name in same)}."
    yield (
        f"One look took {1000 * few[1]:.0f} / {1000 * many[1]:.0f} ms here, one call a machine {few[2]:.2f} / "
        f"{many[2]:.2f} s."
    )


def write(lines: list[str]) -> None:
    """Put the lines between our marks in RESULTS.md, at its end when there are none yet."""
    path = HERE / "RESULTS.md"
    text, part = path.read_text(), "\n".join([BEGIN, *lines, END])
    before, _, rest = text.partition(BEGIN) if BEGIN in text else (f"{text.rstrip()}\n\n", "", f"{END}\n")
    path.write_text(before + part + rest.partition(END)[2])


def main() -> int:
    """Measure and print; with everything measured, write the part of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Measure launches on rented machines.")
    parser.add_argument("--rounds", type=int, default=3, help="launches (default: 3)")
    parser.add_argument("--no-calls", action="store_true", help="leave out the calls for 256 machines; write nothing")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    folder, disks = (Path(tempfile.mkdtemp(prefix="imgnet-rented-", dir=one)) for one in ("/tmp", "/dev/shm"))
    bed = Bed(folder, disks)
    try:
        stack = timed(lambda: bed.here.cli("up", "--stack"))
        lines = [f"The stack, once for a region, before all else: {stack:.1f} s, {len(bed.calls)} calls.", ""]
        lines += launches([one_launch(bed) for _ in range(options.rounds)])
        if not options.no_calls:
            bed.without_machines()
            lines += ["", *table(watch(bed, MACHINES), watch(bed, MANY))]
    finally:
        bed.close()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(disks, ignore_errors=True)
    lines[:0] = [
        "## `launch --machines 16`, rented from the simulated AWS", "",
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, by `benchmarks/launch_rented.py`; the load of the "
        f"computer was {load:.1f} before, {os.getloadavg()[2]:.1f} in the last quarter of an hour.",
    ]  # fmt: skip
    print("\n".join(["", *lines]))
    if not options.no_calls:
        write(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
