"""What trainers of a trial write after each step, and what it must show: the digests, and who went on as who.

The module of a trial's loss installs the log in each trainer: it wraps `Trainer.run_step`. So the product needs no
option, and the same file works on this computer, over ssh and on rented machines, which get it with the project.

    steps/4711.jsonl    of process 4711: step, attempt, rank, digest; file descriptors, threads, resident megabytes
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from support.sandbox import SLOW_LOSS

from cluster.state.attempts import Attempt

STEPS_FOLDER = "steps"
MAX_USAGE_ROWS = 10
MANY_REGROUPS = 20
MAX_GROWTH = (2, 2, 20.0)  # of file descriptors, threads and megabytes, from the second quarter of them to the last
STEP_LOG = """

import hashlib, json, os, sys

STEPS = Path({folder!r})


def digest_of(trainer):
    momenta = trainer.optimizer.state_dict()["state"]
    statistics = [trainer.running_statistics.running, *trainer.running_statistics.counters]
    buffers = [momenta[key]["momentum_buffer"] for key in sorted(momenta)]
    digest = hashlib.sha1()
    for tensor in (*trainer.model.parameters(), *statistics, *buffers):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def log_steps(trainer_class):
    run_step = trainer_class.run_step

    def run_and_log_step(self, epoch, step, batches):
        run_step(self, epoch, step, batches)
        STEPS.mkdir(exist_ok=True)
        used = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        megabytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        row = (epoch.first_step + step + 1, self.options.attempt, self.group.rank, digest_of(self), *used, megabytes)
        with (STEPS / f"{{os.getpid()}}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\\n")

    trainer_class.run_step = run_and_log_step


if "train.engine.trainer" in sys.modules:  # not where the recipe is only read
    log_steps(sys.modules["train.engine.trainer"].Trainer)
"""


def loss_module(pace: str, folder: str) -> str:
    """Return the source of a module with a loss, slow as the file `pace` says, that logs the steps into a folder.

    Relative paths are relative to the folder in which a trainer runs.
    """
    return SLOW_LOSS.format(pace=pace) + STEP_LOG.format(folder=folder)


@dataclass(frozen=True)
class StepRow:
    """A line of the log. `pid` is the process that wrote it; `step` counts the finished steps of the run."""

    pid: int
    step: int
    attempt: int
    rank: int
    digest: str
    usage: tuple[float, ...]  # file descriptors, threads, resident megabytes


@dataclass
class StepFindings:
    """What the log of a trial shows.

    `usage` is of the process that regrouped most often: its regroups so far, file descriptors, threads, megabytes.
    """

    steps: int = 0  # compared
    lost: int = 0  # that a process had finished, and that it did again after it went on in place
    kept: int = 0  # processes of members that took part in two attempts running, the second in place
    replaced: int = 0  # members of that kind that had another process in the second
    usage: list[tuple[float, ...]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_steps(folder: Path) -> list[StepRow]:
    """Return the rows of all processes in the order of each; the last line of a killed one may be torn."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                step, attempt, rank, digest, *usage = json.loads(line)
                rows.append(StepRow(int(path.stem), step, attempt, rank, digest, tuple(usage)))
    return rows


def check_steps(
    folder: Path, reference: Path, history: Sequence[Attempt], procs: int, hit: Iterable[str]
) -> StepFindings:
    """Compare each step of each process with an undisturbed run, and the processes of each attempt with those before.

    A machine has `procs` processes. `hit` are the machines of which a trainer was killed or stood still: the agent may
    have replaced their processes.
    """
    rows, digests = read_steps(folder), {row.step: row.digest for row in read_steps(reference)}
    findings = StepFindings(steps=len(rows))
    findings.problems += [f"{row} differs" for row in rows if digests.get(row.step) != row.digest]
    if missing := digests.keys() - {row.step for row in rows}:
        findings.problems.append(f"no process has made the steps {sorted(missing)}")
    by_pid: dict[int, list[StepRow]] = defaultdict(list)
    for row in rows:
        by_pid[row.pid].append(row)
    for pid, own_rows in by_pid.items():
        for before, after in pairwise(own_rows):
            if before.attempt != after.attempt and after.step != before.step + 1:
                findings.lost += max(0, before.step + 1 - after.step)
        if any(before.step >= after.step for before, after in pairwise(own_rows)):
            findings.problems.append(f"process {pid} has done a step again")
    _compare_processes(rows, {attempt.number: attempt for attempt in history}, procs, set(hit), findings)
    first_rows = [list({row.attempt: row for row in reversed(own_rows)}.values())[::-1] for own_rows in by_pid.values()]
    longest = max(first_rows, key=len, default=[])
    numbers = {*range(0, len(longest), max(1, len(longest) // MAX_USAGE_ROWS)), len(longest) - 1} if longest else set()
    findings.usage = [(number, *longest[number].usage) for number in sorted(numbers)]
    quarter = len(longest) // 4
    if len(longest) > MANY_REGROUPS:  # in the first quarter memory that stays is still allocated
        early, last = (
            [max(row.usage[kind] for row in rows) for kind in range(len(MAX_GROWTH))]
            for rows in (longest[quarter : 2 * quarter], longest[-quarter:])
        )
        if any(after > before + limit for before, after, limit in zip(early, last, MAX_GROWTH, strict=True)):
            findings.problems.append(f"a process has grown from {early} to {last} (descriptors, threads, megabytes)")
    return findings


def _compare_processes(
    rows: Sequence[StepRow], attempts: Mapping[int, Attempt], procs: int, hit: set[str], findings: StepFindings
) -> None:
    """Count the members that went on in place as the same process, and those that did not."""
    pids = {(row.attempt, row.rank): row.pid for row in rows}
    seats: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)  # by member and process: attempt, pid
    for (number, rank), pid in sorted(pids.items()):
        seats[attempts[number].members[rank // procs], rank % procs].append((number, pid))
    for (member, place), seat in seats.items():
        for (number, pid), (next_number, next_pid) in pairwise(seat):
            between = [attempts[each] for each in range(number + 1, next_number + 1)]
            if any(attempt.live_step is None or member not in attempt.members for attempt in between):
                continue
            findings.kept += pid == next_pid
            findings.replaced += pid != next_pid
            if pid != next_pid and member.partition(".")[0] not in hit:
                findings.problems.append(f"process {place} of {member} was replaced in attempt {next_number}")
