"""Seconds from `launch --ssh` to the first step on machines that only wait: our own share, and how it grows.

    .venv/bin/python benchmarks/launch/waiting.py               # six minutes; writes its section of RESULTS.md
    .venv/bin/python benchmarks/launch/waiting.py 1 64 --rounds 1

The machines are ssh servers of one other process, which answer each command after a fixed delay (waiting_machines.py).
The sizes are launched in turn, and each round gives one ratio of the most machines to one machine.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.launch import waiting_machines
from benchmarks.launch.local import (
    LaunchHost,
    are_all_training,
    cpu_seconds,
    slowest_setup_steps,
    supervisor_pids,
    wait_for,
)
from benchmarks.measure import median_with_range, ratios, write_section

MACHINE_COUNTS = (1, 4, 16, 64)
PORT = 22022


@dataclass(frozen=True)
class WaitingLaunch:
    """One launch: seconds to the first step, our processor time, and the most logins and commands of a machine."""

    seconds: float
    cpu_seconds: float
    logins: int
    commands: int
    setup_steps: str


def measure_launch(host: LaunchHost, machines: "subprocess.Popen[str]", hosts_file: Path, count: int) -> WaitingLaunch:
    """Launch a job, wait for the first step of all machines, and stop the job."""
    counts_of(machines)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    run_folder = host.launch(hosts_file)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        wait_for(lambda: are_all_training(run_folder, count), f"{count} machines train")
        seconds = time.monotonic() - start
        (supervisor_pid,) = supervisor_pids(run_folder)
        logins, commands = counts_of(machines)
        command_cpu_seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return WaitingLaunch(
            seconds=seconds,
            cpu_seconds=command_cpu_seconds + cpu_seconds(supervisor_pid),
            logins=max(logins.values()),
            commands=max(commands.values()),
            setup_steps=slowest_setup_steps(run_folder),
        )
    finally:
        host.stop(run_folder)


def counts_of(machines: "subprocess.Popen[str]") -> list[dict[str, int]]:
    """Return the logins and the commands of each machine since the last call."""
    assert machines.stdin and machines.stdout
    machines.stdin.write("\n")
    machines.stdin.flush()
    counts: list[dict[str, int]] = json.loads(machines.stdout.readline())
    return counts


def measure(sizes: list[int], rounds: int) -> list[str]:
    """Measure in turn and return the lines of the section of RESULTS.md."""
    folder = Path(tempfile.mkdtemp(prefix="imgnet-waiting-"))
    waiting_machines.make_keys(folder)
    argv = [sys.executable, waiting_machines.__file__, str(folder), str(max(sizes)), str(PORT)]
    machines = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    host = LaunchHost(folder / "here")
    try:
        assert machines.stdout and machines.stdout.readline() == "ready\n"
        launches: dict[int, list[WaitingLaunch]] = {size: [] for size in sizes}
        for _ in range(rounds):
            for size in sizes:
                hosts_file = waiting_machines.write_hosts_file(folder, size, PORT)
                launches[size].append(measure_launch(host, machines, hosts_file, size))
                print(size, launches[size][-1], flush=True)
        return table(launches)
    finally:
        host.close()
        machines.kill()
        machines.wait()
        shutil.rmtree(folder, ignore_errors=True)


def table(launches: dict[int, list[WaitingLaunch]]) -> list[str]:
    """Return the delays, a row per number of machines, and the ratio of the most machines to the fewest."""
    delays = waiting_machines.DELAYS
    seconds = {size: [launch.seconds for launch in rows] for size, rows in launches.items()}
    fewest, most = min(launches), max(launches)
    lines = [
        f"Delays of the machines in seconds: login {waiting_machines.LOGIN_SECONDS:g}, each command "
        f"{waiting_machines.ANSWER_SECONDS:g}, environment {delays.environment:g}, checks {delays.probe:g}, "
        f"start {delays.start:g}. "
        f"Median (min-max), n = {len(seconds[fewest])}.",
        "",
        "| machines | seconds to the first step | our CPU seconds | logins per machine | commands, most of a machine |",
        "|---|---|---|---|---|",
    ]
    for size, rows in launches.items():
        cpu = statistics.median(launch.cpu_seconds for launch in rows)
        logins, commands = max(launch.logins for launch in rows), max(launch.commands for launch in rows)
        lines.append(f"| {size} | {median_with_range(seconds[size], 1)} | {cpu:.2f} | {logins} | {commands} |")
    lines += [
        "",
        f"{most} machines / {fewest}: {median_with_range(ratios(seconds[most], seconds[fewest]), 2)} (bound: 1.3). "
        f"The slowest of {most} machines, seconds of each step: {launches[most][0].setup_steps}.",
    ]
    return lines


def main() -> int:
    """Measure and print; if everything was measured, write the section of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Measure launches on machines that only wait.")
    parser.add_argument("sizes", nargs="*", type=int, help="numbers of machines (default: 1 4 16 64)")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each size (default: 3)")
    options = parser.parse_args()
    load_before = os.getloadavg()[1]
    lines = measure(options.sizes or list(MACHINE_COUNTS), options.rounds)
    header = [
        "## `launch --ssh` on machines that only wait",
        "",
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, by `benchmarks/launch/waiting.py`; the load of the "
        f"computer was {load_before:.1f} before and {os.getloadavg()[2]:.1f} in the last quarter of an hour.",
    ]
    print("\n".join(["", *header, *lines]))
    if not options.sizes:
        write_section("launch/waiting.py", [*header, *lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
