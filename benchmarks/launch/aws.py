"""Seconds from `launch --machines 16` on rented machines to the first step, and the number of AWS calls.

    .venv/bin/python benchmarks/launch/aws.py               # four minutes; writes its section of RESULTS.md
    .venv/bin/python benchmarks/launch/aws.py --rounds 1    # one launch; writes nothing

The cloud is the simulated EC2 of tests/support/simcloud. Its machines are real sshds that boot as slowly as machines on
EC2. Instead of Python they run a shell script that waits as long as our modules would (stub.py).

Not counted as ours is what the simulation needs beside these delays: the cloud's answers while nothing else is waited
for, how late its machines boot, and the time of one machine for a new host key. AWS takes other times. The first step
is that of the last machine, as the machines write it; the run folder has it up to a second later.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.simcloud.__main__ import environment
from support.simcloud.cloud import SimulatedAws
from support.simcloud.http_server import Response, serve
from support.simcloud.machines import SimulatedMachines, new_login
from support.waiting import wait_for

from benchmarks.launch.local import (
    COMMAND,
    DEADLINE_SECONDS,
    LOGIN_SECONDS,
    SLOW_LOGIN_CONFIG,
    LaunchHost,
    are_all_training,
    cpu_seconds,
    peak_memory_mb,
    slowest_setup_steps,
    supervisor_pids,
)
from benchmarks.launch.stub import StubDelays
from benchmarks.measure import goal_verdict, seconds_of, write_section
from infra.aws.journal import Journal
from infra.aws.journal_events import HostKeyReplaced, JournalEvent, LaunchRequest, LaunchStarted

ROUNDS, MACHINES, INSTANCE_TYPE = 3, 16, "c7i.2xlarge"
# The parts of a boot: until EC2 reports the instance as running, then until sshd listens, then until the boot marker.
PENDING_SECONDS, SSHD_SECONDS, MARKER_SECONDS = 8.0, 8.0, 4.0
MAX_OWN_SHARE = 0.1
VISIBLE_AFTER_SECONDS = 1.0  # until EC2 lists a new machine
STUB_DELAYS = StubDelays(count=MACHINES)
IS_ROOT = os.geteuid() == 0
BOOT_SECONDS = PENDING_SECONDS + SSHD_SECONDS + MARKER_SECONDS
FIXED_SECONDS_BY_PART = {  # the parts of a launch, each with the delay that is fixed by this benchmark
    "the command: plan, prices, run folder": 0.0,
    "the supervisor starts, checks stack and image": 0.0,
    "RunInstances until the last machine has booted": BOOT_SECONDS,
    "the rest of the logins, own host keys": 0.0,
    "set-up until the first step": STUB_DELAYS.environment + STUB_DELAYS.probe + STUB_DELAYS.start,
}


class SlowMachines(SimulatedMachines):
    """Machines with the stub as Python, and logins (needs root) and a boot as slow as on EC2."""

    stub = ""

    def __init__(self, sim: SimulatedAws, folder: Path) -> None:
        self.boot_ends: dict[str, float] = {}  # as Unix times, by instance
        self.key_seconds: list[float] = []  # of each machine for its new host key
        super().__init__(sim, folder)

    def _start_sshd(self, id: str) -> None:
        machine = self.machines[id]
        machine.python = self.stub
        if IS_ROOT:
            moved_keys = (machine.folder / "authorized_keys").rename(machine.folder / "kept_keys")
            machine.write_config(machine.env, SLOW_LOGIN_CONFIG.format(seconds=LOGIN_SECONDS / 2, keys=moved_keys))
        super()._start_sshd(id)
        self._set_timer(id, "finish setup", MARKER_SECONDS)

    def _finish_setup(self, id: str) -> None:
        super()._finish_setup(id)
        self.boot_ends[id] = time.time()

    def run_root_command(self, id: str, words: list[str]) -> str:
        """Carry out a root command of a machine, and note the time that a host key takes."""
        begin = time.time()
        output = super().run_root_command(id, words)
        self.key_seconds += [time.time() - begin] if words == ["imgnet-hostkey"] else []
        return output


class SimulatedCloud:
    """The simulated cloud in this process, and a host to which it looks like AWS."""

    def __init__(self, folder: Path, machines_folder: Path) -> None:
        delays = {"boot_seconds": PENDING_SECONDS, "ssh_delay_seconds": SSHD_SECONDS}
        self.sim = SimulatedAws(new_login(), visible_after=VISIBLE_AFTER_SECONDS, **delays)
        self.server, url = serve(sim=self.sim)
        self.answers: list[tuple[float, float]] = []  # begin and end of each, as Unix times
        self._time_answers()
        self.host = LaunchHost(folder / "here")
        self.host.env |= environment(url)
        os.environ |= {name: self.host.env[name] for name in ("HOME", "TMUX_TMPDIR", *environment(url))}
        python = STUB_DELAYS.write_script(folder / "python")
        self.machines = SlowMachines(self.sim, machines_folder / "machines")
        self.machines.stub = str(python)

    def _time_answers(self) -> None:
        """Note from when to when the server prepares each answer."""
        answer = self.server.front.handle_call

        def timed_answer(environ: dict[str, Any], body: bytes) -> Response:
            begin = time.time()
            try:
                return answer(environ, body)
            finally:
                self.answers.append((begin, time.time()))

        self.server.front.handle_call = timed_answer

    def answer_seconds(self, begin: float, end: float) -> float:
        """Return the seconds between two Unix times in which the cloud prepares at least one answer."""
        seconds, covered_until = 0.0, begin
        for answer_begin, answer_end in sorted(self.answers):
            answer_begin, answer_end = max(answer_begin, covered_until), min(answer_end, end)
            if answer_end > answer_begin:
                seconds += answer_end - answer_begin
                covered_until = answer_end
        return seconds

    def close(self) -> None:
        """End host, machines and cloud. Raises `RuntimeError` for an error in the cloud, or a resource still billed."""
        self.host.close()
        self.machines.close()
        self.server.shutdown()
        if self.sim.errors or self.sim.leaks():
            raise RuntimeError(f"errors: {self.sim.errors[:1]}; still billed: {self.sim.leaks()[:3]}")

    @property
    def calls(self) -> list[str]:
        """The AWS actions that were called, in order."""
        return [name for _, name in self.server.front.calls]

    def launch(self) -> tuple[Path, float]:
        """Launch a job by the command. Return its run folder, and the command's processor time in seconds."""
        options = ["--machines", str(MACHINES), "--type", INSTANCE_TYPE, "--procs", "1", "-y", "-d"]
        argv = [COMMAND, "launch", *options, "recipe.py"]
        command = subprocess.Popen(argv, cwd=self.host.folder, env=self.host.env, stdout=subprocess.PIPE, text=True)
        output = command.stdout.read() if command.stdout else ""
        _, command.returncode, usage = os.wait4(command.pid, 0)
        assert command.returncode == 0, output
        return Path(output.partition("run folder ")[2].splitlines()[0]), usage.ru_utime + usage.ru_stime

    def terminate(self, run_folder: Path) -> None:
        """End a job and terminate all that it rented."""
        self.host.cli("down", "-y", run_folder.name)
        wait_for(lambda: not supervisor_pids(run_folder), DEADLINE_SECONDS)


@dataclass(frozen=True)
class RentedLaunchMeasurement:
    """One launch on rented machines: seconds, our processor time, the supervisor's memory, and calls to AWS.

    `setup_steps` names each set-up step with the seconds of the slowest machine.
    """

    seconds_by_part: dict[str, float]
    simulation_seconds_by_part: dict[str, float]  # what the simulation needs beside the fixed delays
    cpu_seconds: float
    memory_mb: float
    calls: int
    calls_before_run_instances: int
    setup_steps: str


def measure_rented_launch(cloud: SimulatedCloud) -> RentedLaunchMeasurement:
    """Launch on newly rented machines, wait until all of them train, and end the job."""
    start = time.time()
    earlier_calls = len(cloud.calls)
    cloud.machines.boot_ends.clear()
    cloud.machines.key_seconds.clear()
    run_folder, command_cpu_seconds = cloud.launch()
    try:
        wait_for(lambda: len(cloud.machines.boot_ends) == MACHINES, DEADLINE_SECONDS)
        (shared,) = (cloud.machines.folder / "efs").iterdir()
        uid = json.loads((run_folder / "job.json").read_text())["uid"]
        wait_for(lambda: are_all_training(run_folder, MACHINES, shared / uid), DEADLINE_SECONDS)
        end = time.time()
        calls = cloud.calls[earlier_calls:]
        (supervisor_pid,) = supervisor_pids(run_folder)
        setup_steps = slowest_setup_steps(run_folder)
        last_time = {type(event): event.time for event in Journal(run_folder / "cloud.jsonl").events(JournalEvent)}
        started, requested, has_keys = (last_time[each] for each in (LaunchStarted, LaunchRequest, HostKeyReplaced))
        launched = max(cloud.sim.find(id).life.launch_time for id in cloud.machines.boot_ends)
        booted = max(cloud.machines.boot_ends.values())
        boundaries = (start, started, requested, booted, has_keys, end)
        simulation_seconds = (
            cloud.answer_seconds(start, started),
            cloud.answer_seconds(started, requested),
            cloud.answer_seconds(requested, launched) + booted - launched - BOOT_SECONDS,
            min(cloud.machines.key_seconds),
            0.0,
        )
        part_seconds = [part_end - part_start for part_start, part_end in itertools.pairwise(boundaries)]
        return RentedLaunchMeasurement(
            seconds_by_part=dict(zip(FIXED_SECONDS_BY_PART, part_seconds, strict=True)),
            simulation_seconds_by_part=dict(zip(FIXED_SECONDS_BY_PART, simulation_seconds, strict=True)),
            cpu_seconds=command_cpu_seconds + cpu_seconds(supervisor_pid),
            memory_mb=peak_memory_mb(supervisor_pid),
            calls=len(calls),
            calls_before_run_instances=calls.index("RunInstances"),
            setup_steps=setup_steps,
        )
    finally:
        cloud.terminate(run_folder)


def launch_lines(measurements: list[RentedLaunchMeasurement]) -> Iterator[str]:
    """Yield the lines about time."""
    login = f"login {LOGIN_SECONDS:g} of these" if IS_ROOT else "logins without delay"
    yield (
        f"Delays of the machines in seconds: {PENDING_SECONDS:g} pending, {SSHD_SECONDS:g} until sshd, "
        f"{MARKER_SECONDS:g} until the boot is over; {login}, environment {STUB_DELAYS.environment:g}, checks "
        f"{STUB_DELAYS.probe:g}, start {STUB_DELAYS.start:g}. EC2 lists "
        f"a new machine after {VISIBLE_AFTER_SECONDS:g} s. n = {len(measurements)}, medians."
    )
    yield ""
    yield f"| {MACHINES} machines, seconds | in all | fixed delays | the simulation beside them | our own |"
    yield "|---|---|---|---|---|"
    own_seconds = 0.0
    for part, fixed_seconds in FIXED_SECONDS_BY_PART.items():
        seconds = statistics.median(measurement.seconds_by_part[part] for measurement in measurements)
        simulation = statistics.median(measurement.simulation_seconds_by_part[part] for measurement in measurements)
        own = seconds - fixed_seconds - simulation
        own_seconds += own
        yield f"| {part} | {seconds:.1f} | {fixed_seconds:.1f} | {simulation:.1f} | {own:.1f} |"
    seconds = statistics.median(sum(measurement.seconds_by_part.values()) for measurement in measurements)
    simulation = statistics.median(sum(each.simulation_seconds_by_part.values()) for each in measurements)
    own_share = own_seconds / seconds
    yield (
        f"| command to first step | {seconds:.1f} | {sum(FIXED_SECONDS_BY_PART.values()):.1f} | {simulation:.1f} | "
        f"{own_seconds:.1f}, {own_share:.0%} |"
    )
    yield ""
    yield (
        "The simulation: answers of the cloud while nothing else is waited for, machines that boot late, and the time "
        "of one machine for its host key. Our own includes the rest of the processor time of the simulated machines, "
        f"whose sshds and shells share the cores with command and supervisor. "
        f"Goal {MAX_OWN_SHARE:.0%}: {goal_verdict(own_share, MAX_OWN_SHARE, at_most=True)}."
    )
    yield ""
    first = measurements[0]
    our_cpu_seconds = statistics.median(measurement.cpu_seconds for measurement in measurements)
    memory_mb = max(measurement.memory_mb for measurement in measurements)
    yield f"The slowest machine, seconds of each step: {first.setup_steps}."
    yield (
        f"Our processor time, of command and supervisor: {our_cpu_seconds:.2f} s, "
        f"{1000 * our_cpu_seconds / MACHINES:.0f} ms per machine; memory {memory_mb:.0f} MB. "
        f"{first.calls} calls to AWS, {first.calls_before_run_instances} of them before RunInstances."
    )


def main() -> int:
    """Measure and print; if everything was measured, write the section of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Measure launches on rented machines.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"number of launches (default: {ROUNDS})")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    folder, machines_folder = (
        Path(tempfile.mkdtemp(prefix="imgnet-rented-", dir=parent)) for parent in ("/tmp", "/dev/shm")
    )
    cloud = SimulatedCloud(folder, machines_folder)
    try:
        stack_seconds = seconds_of(lambda: cloud.host.cli("up", "--stack"))
        lines = [f"The stack, made once per region beforehand: {stack_seconds:.1f} s, {len(cloud.calls)} calls.", ""]
        lines += launch_lines([measure_rented_launch(cloud) for _ in range(options.rounds)])
    finally:
        cloud.close()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(machines_folder, ignore_errors=True)
    lines = [
        "## `launch --machines 16`, rented from the simulated AWS",
        "",
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, by `benchmarks/launch/aws.py`; the load of the "
        f"computer was {load_before:.1f} before and {os.getloadavg()[2]:.1f} in the last quarter of an hour.",
        *lines,
    ]
    print("\n".join(["", *lines]))
    if options.rounds >= ROUNDS:
        write_section("launch/aws.py", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
