"""A day of faults in 24 minutes: a rented job lives through them, and its processes do not grow.

    .venv/bin/python benchmarks/elastic/soak.py                                 # writes its section of RESULTS.md
    .venv/bin/python benchmarks/elastic/soak.py --hours 3 --seconds-per-hour 40   # a short try; writes nothing

Every minute stands for an hour and has one fault: a spot notice, a lost machine, a killed trainer, a full disk at
home, a shared folder that hangs, or keys that expire. The first two hours have the two faults after which processes
start anew (a killed supervisor, the loss of all machines). From then on the supervisor and the agent of machine 0 live
for the rest of the day. Their memory and open files are sampled every five seconds; those of the last quarter of the
samples must be those of the first. The cloud is the simulated EC2 of tests/support/simcloud. Mounts take root.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.aws_user import Renter
from support.sandbox import Sandbox
from support.simcloud.fixture import CloudProcess
from support.simcloud.process_keeper import process_ids
from support.ssh_machines import command_line

from benchmarks.measure import describe_machine, write_section
from cluster.jobs.job import Job
from cluster.state import attempts
from cluster.state.result import check_image_usage
from train.data.packing.synthetic import draw_sample_set

HOURS, SECONDS_PER_HOUR, SAMPLE_SECONDS = 24, 60.0, 5.0
MACHINES = 3
FAULT_SECONDS = 15.0  # how long a disk is full, a folder hangs, or keys are refused
RECOVERY_SECONDS = 120.0  # for all machines to train again after a fault
ENDLESS_EPOCHS = 1_000_000
HOME_DISK_MB, SHARED_DISK_MB = 512, 512
MAX_GROWTH = 1.1  # of memory and open files, from the first quarter of the samples to the last


@dataclass
class ProcessSamples:
    """What a process used: resident memory in MB, open files and threads, sampled every five seconds."""

    memory_mb: list[float] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def add(self, pid: int) -> None:
        """Add a sample. Raises `OSError` when the process has ended."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
        open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        if "VmRSS" in fields:  # a process that is ending has no memory any more
            self.memory_mb.append(int(fields["VmRSS"].split()[0]) / 1024)
            self.open_files.append(open_files)
            self.threads.append(int(fields["Threads"]))


def quarters(values: list[float] | list[int]) -> tuple[float, float]:
    """Return the medians of the first and the last quarter of the samples."""
    size = max(1, len(values) // 4)
    return statistics.median(values[:size]), statistics.median(values[-size:])


class Soak:
    """The job, its cloud, and the faults that it meets."""

    def __init__(self, folder: Path, seed: int) -> None:
        draw_sample_set(folder / "images", train=60, val=20)
        self.cloud = CloudProcess()
        self.renter = Renter(Sandbox(folder / "place", folder / "images"), self.cloud)
        self.home_disk = folder / "place" / "runs"
        self.shared_disk = self.cloud.folder / "efs"
        self.random = random.Random(seed)
        self.samples: dict[str, dict[int, ProcessSamples]] = {"supervisor": {}, "agent": {}}
        self.fault_counts: Counter[str] = Counter()
        self.slow_recoveries: list[str] = []
        self.job: Job
        self.faults_that_end_attempts = (self.lose_all_machines, self.lose_machine, self.interrupt_machine)
        self._mount(folder)

    def _mount(self, folder: Path) -> None:
        """Give the run folder a small disk that can be filled, and the shared folder a disk that can be frozen."""
        self.home_disk.mkdir()
        self.shared_disk.mkdir(exist_ok=True)
        size = f"size={HOME_DISK_MB}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.home_disk)], check=True)
        image = folder / "shared.img"
        with image.open("wb") as file:
            file.truncate(SHARED_DISK_MB << 20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(self.shared_disk)], check=True)
        self.shared_disk.chmod(0o777)

    def close(self) -> None:
        """End all processes and remove the disks."""
        subprocess.run(["fsfreeze", "-u", str(self.shared_disk)], capture_output=True)
        self.renter.sandbox.close()
        for instance_id in self.renter.live_instance_ids():
            self.cloud.post("kill", id=instance_id, reason="Client.UserInitiatedShutdown")
        for disk in (self.home_disk, self.shared_disk):
            subprocess.run(["umount", "-l", str(disk)], capture_output=True)
        self.cloud.close()

    # --- processes ---------------------------------------------------------------------------------------------------

    def agent_pids(self) -> list[int]:
        """Return the agents on all machines."""
        return [pid for pid in process_ids(self.cloud.folder) if "-m cluster.agent" in command_line(pid)]

    def trainer_pids(self) -> list[int]:
        """Return the trainers and standbys on all machines."""
        return [pid for pid in process_ids(self.cloud.folder) if "-m train" in command_line(pid)]

    def sample_until(self, end: threading.Event) -> None:
        """Sample the supervisor and all agents every five seconds until the event is set."""
        while not end.wait(SAMPLE_SECONDS):
            pids_by_kind = {"supervisor": self.renter.supervisor_pids(), "agent": self.agent_pids()}
            for kind, pids in pids_by_kind.items():
                for pid in pids:
                    with contextlib.suppress(OSError):
                        self.samples[kind].setdefault(pid, ProcessSamples()).add(pid)

    def longest_lived(self, kind: str) -> ProcessSamples:
        """Return the samples of the process of a kind that has lived longest."""
        return max(self.samples[kind].values(), key=lambda samples: len(samples.memory_mb))

    # --- faults ------------------------------------------------------------------------------------------------------

    def spared_machines(self) -> list[str]:
        """Return the machines that faults may take: all but machine 0, whose agent is measured."""
        return [name for name in self.renter.live_instances_by_machine() if name != "0"]

    def kill_supervisor(self) -> None:
        """Kill the supervisor; the next command starts another."""
        self.renter.kill_supervisor()
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.job.path / ".supervised", (0, 0))  # else it is not started again within 20 s
        self.renter.run("ls")

    def lose_all_machines(self) -> None:
        """End all machines without a notice."""
        for instance_id in self.renter.live_instance_ids():
            self.cloud.post("kill", id=instance_id, reason="Server.SpotInstanceTermination")

    def lose_machine(self) -> None:
        """End a machine without a notice."""
        instance_id = self.renter.instance_id(self.random.choice(self.spared_machines()))
        self.cloud.post("kill", id=instance_id, reason="Server.SpotInstanceTermination")

    def interrupt_machine(self) -> None:
        """Interrupt a machine with a notice."""
        self.cloud.interrupt(self.renter.instance_id(self.random.choice(self.spared_machines())), notice=FAULT_SECONDS)

    def kill_trainer(self) -> None:
        """Kill a trainer or a standby."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.random.choice(self.renter.wait_for(self.trainer_pids)), signal.SIGKILL)

    def fill_home_disk(self) -> None:
        """Fill the disk of the run folder for some seconds."""
        filler = self.home_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(FAULT_SECONDS)
        filler.unlink()

    def freeze_shared_folder(self) -> None:
        """Let every write to the shared folder hang for some seconds."""
        subprocess.run(["fsfreeze", "-f", str(self.shared_disk)], check=True)
        try:
            time.sleep(FAULT_SECONDS)
        finally:
            subprocess.run(["fsfreeze", "-u", str(self.shared_disk)], check=True)

    def expire_keys(self) -> None:
        """Let EC2 refuse the supervisor's keys for some seconds."""
        self.cloud.post("fault", action="DescribeInstances", code="ExpiredToken", message="too old", times=100_000)
        time.sleep(FAULT_SECONDS)
        self.cloud.post("no_faults")

    def faults_of_the_day(self, hours: int) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield a fault for each hour. From the third hour on, each of six comes as often as the others."""
        yield from [("supervisor killed", self.kill_supervisor), ("all machines lost", self.lose_all_machines)][:hours]
        repeated = [
            ("notice of an interruption", self.interrupt_machine),
            ("machine lost", self.lose_machine),
            ("process of a trainer killed", self.kill_trainer),
            ("disk at home full", self.fill_home_disk),
            ("shared folder hangs", self.freeze_shared_folder),
            ("keys expired", self.expire_keys),
        ]
        for hour in range(hours - 2):
            if hour % len(repeated) == 0:
                self.random.shuffle(repeated)
            yield repeated[hour % len(repeated)]

    # --- the day -----------------------------------------------------------------------------------------------------

    def newest_attempt(self) -> attempts.Attempt:
        """Return the newest attempt."""
        return attempts.newest_attempt(self.job.run_folder.shared) or attempts.Attempt()

    def are_all_training(self, after_attempt: int = 0, after_step: int = 0) -> bool:
        """Return whether a later attempt than this has all machines, and has trained a later step than this."""
        newest = self.newest_attempt()
        if newest.number <= after_attempt or len(newest.members) != MACHINES:
            return False
        return self.renter.training_step(self.job) > max(after_step, newest.first_step)

    def run(self, hours: int, seconds_per_hour: float) -> None:
        """Launch the job, let a fault happen each hour, and stop the job."""
        options = (
            "--save-seconds",
            "2",
            "--log-ids",
            "--lost-seconds",
            "3",
            "--max-hours",
            "20",
            "--max-exchanges",
            "99",
        )
        self.job = self.renter.launch(*options, machines=MACHINES, epochs=ENDLESS_EPOCHS)
        self.renter.wait_for(self.are_all_training, RECOVERY_SECONDS)
        end = threading.Event()
        sampler = threading.Thread(target=self.sample_until, args=(end,), daemon=True)
        sampler.start()
        for hour, (name, fault) in enumerate(self.faults_of_the_day(hours), 1):
            start = time.monotonic()
            attempt = self.newest_attempt().number if fault in self.faults_that_end_attempts else 0
            fault()
            self.fault_counts[name] += 1
            step = self.renter.training_step(self.job) if not attempt else 0
            try:
                self.renter.wait_for(partial(self.are_all_training, attempt, step), RECOVERY_SECONDS)
            except AssertionError:
                self.slow_recoveries.append(f"hour {hour}: {name}")
            print(f"hour {hour:2}: {name}, all training after {time.monotonic() - start:.0f} s", flush=True)
            time.sleep(max(0.0, seconds_per_hour - (time.monotonic() - start)))
        end.set()
        sampler.join()
        self.renter.run("stop", self.job.name, timeout=120)

    def problems(self) -> list[str]:
        """Return what is wrong after the stop."""
        problems = list(self.slow_recoveries)
        result = self.job.result
        if result is None or result.state != "stopped":
            return [*problems, f"the job is {self.job.state}: {self.job.status().reason}"]
        problems += check_image_usage(self.job.run_folder, result.epochs)
        problems += [f"still rented: {instance_id}" for instance_id in self.renter.live_instance_ids()]
        for kind in self.samples:
            samples = self.longest_lived(kind)
            for name, values in (("memory", samples.memory_mb), ("open files", samples.open_files)):
                first, last = quarters(values)
                if last > MAX_GROWTH * first:
                    problems.append(f"{name} of the {kind} grew from {first:.0f} to {last:.0f}")
        return problems

    def table(self) -> Iterator[str]:
        """Yield the table of the processes that lived longest."""
        yield "| process | sampled for | memory, MB: first quarter, last quarter | open files | threads |"
        yield "|---|---|---|---|---|"
        for kind in self.samples:
            samples = self.longest_lived(kind)
            minutes = len(samples.memory_mb) * SAMPLE_SECONDS / 60
            memory, open_files, threads = map(quarters, (samples.memory_mb, samples.open_files, samples.threads))
            yield (
                f"| {kind} | {minutes:.0f} min, n={len(samples.memory_mb)} | {memory[0]:.1f}, {memory[1]:.1f} | "
                f"{open_files[0]:.0f}, {open_files[1]:.0f} | {threads[0]:.0f}, {threads[1]:.0f} |"
            )


def main() -> int:
    """Run the day and print its table. Return 1 if something was wrong."""
    parser = argparse.ArgumentParser(description="Let a rented job live through a day of faults, a minute each hour.")
    parser.add_argument("--hours", type=int, default=HOURS)
    parser.add_argument("--seconds-per-hour", type=float, default=SECONDS_PER_HOUR)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        soak = Soak(Path(folder), arguments.seed)
        try:
            soak.run(arguments.hours, arguments.seconds_per_hour)
            problems, table = soak.problems(), list(soak.table())
            attempt_count, steps = soak.newest_attempt().number, soak.job.status().step
        finally:
            soak.close()
    faults = ", ".join(f"{name} ({count})" for name, count in soak.fault_counts.items())
    problem_text = "; ".join(problems) or "none: every image was used once in every epoch, and nothing is left rented"
    lines = [
        "## A day of faults in 24 minutes",
        "",
        f"{describe_machine()}; `benchmarks/elastic/soak.py`. {MACHINES} rented machines of the simulated EC2;",
        f"a minute is an hour. Faults: {faults}. {attempt_count} attempts, {steps} steps. We know no peer that lives",
        "through these faults on rented machines, so none is measured beside it.",
        "",
        *table,
        "",
        f"Problems: {problem_text}.",
    ]
    print("\n".join(lines))
    if (arguments.hours, arguments.seconds_per_hour) == (HOURS, SECONDS_PER_HOUR):
        write_section("elastic/soak.py", lines)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
