"""Runs one job on rented machines for a day of the cloud's time, and watches what supervisor and agent hold on to.

    .venv/bin/python benchmarks/elastic/soak.py                # 48 losses, half an hour apart; about 25 minutes
    .venv/bin/python benchmarks/elastic/soak.py --rounds 5     # writes nothing

The job is a command on two machines of the simulated EC2. In each round EC2 takes machine 1 away, the supervisor rents
another one, and the command starts again in a new attempt. Then the cloud's clock jumps, which the supervisor follows:
limits and prices see a day, the number of polls is that of an hour. Machine 0 and its agent stay for all rounds.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.aws_user import OPTIONS, TYPE, Renter
from support.exact_jobs import newest_attempt
from support.sandbox import Sandbox
from support.simcloud.fixture import CloudProcess
from support.simcloud.process_keeper import process_ids
from support.ssh_machines import command_line

from benchmarks.measure import describe_machine, write_section
from cluster.jobs.job import Job

ROUNDS, ROUND_SECONDS = 48, 1800.0  # of the cloud: 24 hours
WARM_UP_SHARE = 0.1  # of the rounds, after which nothing may grow
MAX_GROWTH_MB, MAX_GROWTH_COUNT = 20.0, 5  # of memory; of handles and of threads
COMMAND = ("sh", "-c", "while :; do sleep 1; done")


@dataclass(frozen=True)
class Sample:
    """What a process holds: memory in MB, open files, threads."""

    memory_mb: float
    handles: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Sample":
        """Take a sample of a process."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        handles = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(int(status["VmRSS"].split()[0]) / 1024, handles, int(status["Threads"]))

    def __str__(self) -> str:
        return f"{self.memory_mb:.0f} | {self.handles} | {self.threads}"


def growth(name: str, samples: Sequence[Sample]) -> tuple[bool, str]:
    """Return whether a process holds more at the last sample than it may, and a line on what its memory did.

    `samples` are those after the warm-up, one a loss.
    """
    first, last = samples[0], samples[-1]
    slope_kb = 1024 * statistics.linear_regression(range(len(samples)), [each.memory_mb for each in samples]).slope
    has_grown = (
        last.memory_mb > first.memory_mb + MAX_GROWTH_MB
        or last.handles > first.handles + MAX_GROWTH_COUNT
        or last.threads > first.threads + MAX_GROWTH_COUNT
    )
    return has_grown, f"{name}: {last.memory_mb - first.memory_mb:+.1f} MB, {slope_kb:+.0f} kB a loss (least squares)"


def is_newer(job: Job, attempt: int) -> bool:
    """Whether the job has a newer attempt."""
    return newest_attempt(job).number > attempt


def soak(renter: Renter, rounds: int) -> list[tuple[Sample, Sample]]:
    """Return samples of supervisor and agent of machine 0: before the first round, and after each. End the job."""
    renter.create_stack()
    options = ("-d", *OPTIONS[:3], "--type", TYPE, "--machines", "2", "--max-hours", "40")
    project = renter.path / "project"
    project.mkdir()
    renter.sandbox.env["IMGNET_RUNS"] = str(renter.path / "runs")
    renter.run("run", *options, "--", *COMMAND, cwd=project)
    job = renter.sandbox.job(1)
    samples: list[tuple[Sample, Sample]] = []
    for number in range(rounds + 1):
        if number:
            attempt, lost_id = newest_attempt(job).number, renter.instance_id("1")
            renter.cloud.post("kill", id=lost_id, reason="Server.SpotInstanceTermination")
            renter.wait_for_replacement("1", lost_id)
            renter.wait_for(partial(is_newer, job, attempt))
        renter.wait_for_members(job, "0", "1")
        (agent_pid,) = [
            pid
            for pid in process_ids(renter.cloud.folder / renter.instance_id("0"))
            if "-m cluster.agent" in command_line(pid)
        ]
        samples.append((Sample.of(renter.wait_for_supervisor()), Sample.of(agent_pid)))
        print(number, *samples[-1], sep=" | ", flush=True)
        renter.cloud.post("advance", seconds=ROUND_SECONDS)
    renter.run("down", "-y", job.name)
    renter.assert_nothing_left()
    return samples


def main() -> int:
    """Run the job and print the table. Return 1 when something has grown."""
    parser = argparse.ArgumentParser(description="Run a job for a day of a simulated cloud.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"number of losses (default: {ROUNDS})")
    rounds = parser.parse_args().rounds
    folder, start = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    cloud = CloudProcess()
    sandbox = Sandbox(folder / "home", folder)
    try:
        cloud.begin()
        samples = soak(Renter(sandbox, cloud), rounds)
        cloud.assert_clean()
    finally:
        sandbox.close()
        cloud.close()
        shutil.rmtree(folder, ignore_errors=True)
    columns = zip(*samples[round(WARM_UP_SHARE * rounds) :], strict=True)
    verdicts, memory_lines = zip(*map(growth, ("supervisor", "agent"), columns), strict=True)
    has_grown = any(verdicts)
    lines = [
        "## A job of a day on rented machines",
        "",
        f"{describe_machine()}. {rounds} losses, {rounds * ROUND_SECONDS / 3600:.0f} hours of the simulated cloud in "
        f"{(time.monotonic() - start) / 60:.0f} minutes; the load was {os.getloadavg()[2]:.1f}. "
        f"After the first tenth memory may grow by {MAX_GROWTH_MB:.0f} MB, handles and threads by {MAX_GROWTH_COUNT}; "
        f"one of them grew by more: {'yes' if has_grown else 'no'}. Memory of {'; of '.join(memory_lines)}.",
        "",
        "| losses | supervisor MB | handles | threads | agent MB | handles | threads |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {number} | {samples[number][0]} | {samples[number][1]} |"
            for number in range(0, rounds + 1, max(1, rounds // 6))
        ),
    ]
    print("\n".join(lines))
    if rounds >= ROUNDS:
        write_section("elastic/soak.py", lines)
    return int(has_grown)


if __name__ == "__main__":
    sys.exit(main())
