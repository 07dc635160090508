"""Measures commands on a run of 30 days: `ls`, `status`, `report`; compared with the event reader of TensorBoard.

    .venv/bin/python benchmarks/long_run.py              # 5 minutes; writes its section of RESULTS.md
    .venv/bin/python benchmarks/long_run.py --days 1     # only printed

The run is made up, as a running job of two local machines leaves its files: a line of metrics a second, and every 20
minutes a loss, after which some minutes of steps are repeated. Each command is a process of its own. What it takes
beyond its start is the difference to the same command on a run of two minutes; the two alternate.
"""

import argparse
import contextlib
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")

from benchmarks.measure import describe_machine, goal_verdict, median_with_range, ratios, seconds_of, write_section
from cluster.state.attempts import Attempt, attempt_path
from cluster.state.heartbeats import MachineStatus
from cluster.state.recovery_options import RecoveryOptions
from cluster.state.run_folder import AGENT_LOCK, RunFolder, agent_log_path
from cluster.state.spec import JobSpec
from cluster.state.states import AgentPhase, MachineState
from train.engine.options import TrainOptions
from train.metrics.records import ROW_KINDS, EpochRow, MetricsRow, StartRow, StepRow, read_metrics_file
from train.metrics.time_table import PartTime, TimePart, TimeTable
from train.recipe import Data, Model, Phase, Recipe
from train.tools.agent_protocol import metrics_file
from train.tools.filesystem import to_json_bytes, write_atomic
from train.tools.records import encode

DAYS = 30
ROUNDS = 5
BEGIN = 1_700_000_000.0
STEPS_PER_SECOND = 5
GLOBAL_BATCH = 256
STEPS_PER_EPOCH = 5004
ATTEMPT_SECONDS = 1200
PAUSE_SECONDS = 25  # from a loss to the first step after it
MAX_REPEATED_SECONDS = 500  # from the checkpoint to the loss
MACHINES = ("0", "1")
LAUNCH_ID = "made-up"
MAX_STATUS_SECONDS = 0.5
MAX_REPORT_SECONDS = 10.0
MAX_REPORT_MB = 500.0
PEER_ROWS = 20_000
SCALARS_PER_ROW = 10
RECIPE = Recipe(
    name="long",
    data=Data(name="none", root="/nowhere", train=STEPS_PER_EPOCH * GLOBAL_BATCH, val=50_000),
    model=Model(name="resnet50"),
    gpus=1,
    phases=[Phase(epochs=(0, 10_000), size=224, batch=GLOBAL_BATCH, lr=0.1)],
)


# --- a made-up run ------------------------------------------------------------------------------------------------


def write_long_run(path: Path, seconds: int) -> int:
    """Write the run folder of a running job that has trained for so long. Return the number of its lines of steps."""
    folder = RunFolder(path)
    for subfolder in (path / "metrics", path / "logs", *(folder.shared / name for name in ("attempts", "status"))):
        subfolder.mkdir(parents=True)
    spec = JobSpec(
        name=path.name,
        workload=RECIPE,
        recipe_file="",
        train=TrainOptions(data="/nowhere", gpus=1),
        recovery=RecoveryOptions(standby=False),
        machines=len(MACHINES),
        created=BEGIN,
    )
    folder.write_spec(spec)
    write_atomic(folder.launch_path, LAUNCH_ID.encode())
    run = _MadeUpRun(folder)
    while run.elapsed_seconds < seconds:
        run.add_attempt(min(ATTEMPT_SECONDS, seconds - run.elapsed_seconds))
    run.write_machine_files()
    return run.step_lines


class _MadeUpRun:
    """Writes one attempt after another, on a clock that advances only with the steps."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.rng = random.Random(0)
        self.elapsed_seconds = 0
        self.step = 0  # from which the next attempt goes on
        self.attempt = 0
        self.step_lines = 0
        self.state_lines: list[str] = []

    def add_attempt(self, seconds: int) -> None:
        """Write an attempt that trains for so long, and then is lost together with the steps since its checkpoint."""
        self.attempt += 1
        start_step, begin = self.step, BEGIN + self.elapsed_seconds
        attempt = Attempt(
            number=self.attempt,
            launch_id=LAUNCH_ID,
            members=tuple(f"{name}.{self.attempt}" for name in MACHINES),
            resume=f"checkpoints/{self.attempt:06d}/resume-{start_step:08d}-abcd.pt" if start_step else "",
            reason="machine 1 lost" if start_step else "start",
            time=begin,
        )
        write_atomic(attempt_path(self.folder.shared, self.attempt), to_json_bytes(encode(attempt)), durable=False)
        for state, delay in (("starting", 0), ("joining", 5), ("warming", 15)):
            self._note_state(state, begin + delay)
        begin += PAUSE_SECONDS
        self._note_state("training", begin)
        path = metrics_file(self.folder.path, self.attempt)
        with path.open("w") as file:
            file.write(_line(_start_row(self.attempt, begin, start_step)))
            for second in range(1, seconds + 1):
                step = start_step + second * STEPS_PER_SECOND
                epoch = step // STEPS_PER_EPOCH + 1
                file.write(self.step_line(step, begin + second, epoch))
                if epoch > (step - STEPS_PER_SECOND) // STEPS_PER_EPOCH + 1:
                    file.write(_line(_epoch_row(self.attempt, begin + second + 0.5, step, epoch - 1)))
                    self._note_state("validating", begin + second)
                    self._note_state("training", begin + second + 0.5)
        self.step_lines += seconds
        self.elapsed_seconds += PAUSE_SECONDS + seconds
        repeated_seconds = self.rng.randrange(min(seconds, MAX_REPEATED_SECONDS))
        self.step = start_step + (seconds - repeated_seconds) * STEPS_PER_SECOND

    def step_line(self, step: int, now: float, epoch: int) -> str:
        """Return a line of steps as the trainer's JSON has it; json.dumps would take minutes for all of them."""
        noise = self.rng.random()
        return (
            f'{{"kind": "train", "attempt": {self.attempt}, "time": {now + noise}, "step": {step}, '
            f'"images": {step * GLOBAL_BATCH}, "epoch": {epoch}, "scalars": {{"loss/train": {1.5 + noise}, '
            f'"accuracy/train_top1": {60 + noise}, "accuracy/train_top5": {80 + noise}, '
            f'"sizes/lr": {0.1 + noise / 1000}, '
            f'"sizes/momentum": 0.9, "sizes/image": 224, "sizes/batch": {GLOBAL_BATCH}, "sizes/batch_total": '
            f'{GLOBAL_BATCH}, "sizes/world": 2, "times/images_per_second": {1280 + noise}}}}}\n'
        )

    def _note_state(self, state: str, moment: float) -> None:
        self.state_lines.append(json.dumps({"time": moment, "attempt": self.attempt, "state": state}) + "\n")

    def write_machine_files(self) -> None:
        """Write the state logs and the last statuses of the agents."""
        for name in MACHINES:
            agent_log_path(self.folder.path, name).write_text("".join(self.state_lines))
            status = MachineStatus(
                id=f"{name}.{self.attempt}",
                attempt=self.attempt,
                phase=AgentPhase.RUNNING,
                state=MachineState.TRAINING,
                launch=LAUNCH_ID,
                time=BEGIN + self.elapsed_seconds,
                step=self.step,
                steps=10_000 * STEPS_PER_EPOCH,
                images_per_second=1280.0,
                where=encode(
                    TimeTable(wall=1.0, parts=dict.fromkeys(TimePart, PartTime(seconds=0.1, epoch=1, most=0.1)))
                ),
            )
            self.folder.status_path(name).write_bytes(to_json_bytes(encode(status)))


def _line(row: MetricsRow) -> str:
    return json.dumps({"kind": ROW_KINDS[type(row)], **encode(row)}) + "\n"


def _start_row(attempt: int, now: float, step: int) -> StartRow:
    return StartRow(
        attempt=attempt,
        time=now,
        step=step,
        images=step * GLOBAL_BATCH,
        begun=BEGIN,
        train_images=STEPS_PER_EPOCH * GLOBAL_BATCH,
        val_images=50_000,
        world=2,
        gpus=2,
        device="cuda",
        processor="made up",
        precision="bfloat16",
        versions={"torch": "2"},
    )


def _epoch_row(attempt: int, now: float, step: int, epoch: int) -> EpochRow:
    return EpochRow(
        attempt=attempt,
        time=now,
        step=step,
        images=step * GLOBAL_BATCH,
        epoch=epoch,
        size=224,
        global_batch=GLOBAL_BATCH,
        lr=0.1,
        steps=STEPS_PER_EPOCH,
        seconds=1001.0,
        train_seconds=1000.5,
        val_seconds=0.5,
        train_loss=1.5,
        train_top1=60.0,
        train_top5=80.0,
        train_images=STEPS_PER_EPOCH * GLOBAL_BATCH,
        top1=60.0,
        top5=80.0,
        val_loss=1.5,
        view="square",
        images_per_second=1280.0,
        at=now,
        clock=now - BEGIN,
    )


@contextlib.contextmanager
def living_agents(path: Path) -> Iterator[None]:
    """Hold the locks of a job's agents, so that the job is at work."""
    with contextlib.ExitStack() as stack:
        for name in MACHINES:
            work_folder = RunFolder(path).work_folder(name)
            work_folder.mkdir(parents=True)
            lock = stack.enter_context((work_folder / AGENT_LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- measurements -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandCost:
    """What a command took: seconds of the wall, seconds of processors, and the largest memory in MB."""

    seconds: float
    cpu_seconds: float
    megabytes: float


def run_command(runs: Path, *arguments: str) -> CommandCost:
    """Run a command of imgnet-cluster to its end. Raises `CalledProcessError`."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [COMMAND, *arguments],
        env={**os.environ, "IMGNET_RUNS": str(runs)},
        stdout=subprocess.DEVNULL,
    )
    _, exit_status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(exit_status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments)
    return CommandCost(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)


def write_scalar_events(folder: Path, rows: int) -> None:
    """Write rows of scalars as event files of TensorBoard, one event per scalar as the trainer's writer does."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for row in range(rows):
        for name in range(SCALARS_PER_ROW):
            value = Summary.Value(tag=f"train/scalar{name}", simple_value=row + name)
            writer.add_event(Event(wall_time=BEGIN + row, step=row, summary=Summary(value=[value])))
    writer.close()


def seconds_of_peer(folder: Path) -> float:
    """Return the seconds that TensorBoard's reader takes for a folder of events, all of which it keeps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    return seconds_of(accumulator.Reload)


def measure_readers(folder: Path, rounds: int) -> Iterator[str]:
    """Yield the rows of the table that compares our reader of metrics with TensorBoard's, on equally many scalars."""
    path = folder / "peer" / "metrics.jsonl"
    path.parent.mkdir()
    run = _MadeUpRun(RunFolder(folder / "unused"))
    path.write_text("".join(run.step_line(row, BEGIN + row, 1) for row in range(PEER_ROWS)))
    write_scalar_events(folder / "peer" / "events", PEER_ROWS)
    ours, peers = [], []
    for _ in range(rounds):
        ours.append(seconds_of(lambda: sum(1 for _ in read_metrics_file(path, StepRow))))
        peers.append(seconds_of_peer(folder / "peer" / "events"))
    yield f"| read {PEER_ROWS * SCALARS_PER_ROW:,} scalars | seconds |"
    yield "|---|---|"
    yield f"| lines of metrics, ours | {median_with_range(ours, 2)} |"
    yield f"| event files, TensorBoard's EventAccumulator | {median_with_range(peers, 2)} |"
    yield f"| TensorBoard / ours, by pairs | {median_with_range(ratios(peers, ours), 1)} |"


def measure_commands(folder: Path, days: int, rounds: int) -> Iterator[str]:
    """Yield the rows of the table of the commands, on the long run and, in turn, on one of two minutes."""
    lines = write_long_run(folder / "long" / "job-1", days * 86_400)
    write_long_run(folder / "short" / "job-1", 120)
    attempts = len(list((folder / "long/job-1/metrics").iterdir()))
    megabytes = sum(path.stat().st_size for path in (folder / "long/job-1/metrics").iterdir()) / 1e6
    yield (
        f"A run of {days} days: {lines:,} lines of steps ({megabytes:,.0f} MB) in {attempts:,} attempts. The goals are "
        "for CPU seconds, user and system: other programs run beside these."
    )
    yield ""
    yield "| command | CPU seconds | of two minutes' run | more, by pairs | wall seconds | MB | goal |"
    yield "|---|---|---|---|---|---|---|"
    with living_agents(folder / "long" / "job-1"), living_agents(folder / "short" / "job-1"):
        for command, max_seconds, counts_start in (
            ("ls", MAX_STATUS_SECONDS, False),
            ("status", MAX_STATUS_SECONDS, False),
            ("report", MAX_REPORT_SECONDS, True),
        ):
            costs = []
            for _ in range(rounds):
                costs.append([run_command(folder / run, command) for run in ("short", "long")])
            more = [long.cpu_seconds - short.cpu_seconds for short, long in costs]
            seconds = [long.cpu_seconds for _, long in costs]
            verdict = goal_verdict(statistics.median(seconds if counts_start else more), max_seconds, at_most=True)
            goal = f"{max_seconds:g} s{'' if counts_start else ' more'}: {verdict}"
            megabytes = max(long.megabytes for _, long in costs)
            if command == "report":
                goal += f"; {MAX_REPORT_MB:.0f} MB: {goal_verdict(megabytes, MAX_REPORT_MB, at_most=True)}"
            yield (
                f"| `{command}` | {median_with_range(seconds, 2)} | "
                f"{median_with_range([short.cpu_seconds for short, _ in costs], 2)} | {median_with_range(more, 2)} | "
                f"{median_with_range([long.seconds for _, long in costs], 2)} | {megabytes:.0f} | {goal} |"
            )


def main() -> int:
    """Measure, print, and write the section of RESULTS.md when the run has its full length."""
    parser = argparse.ArgumentParser(description="Measure commands on a long run.")
    parser.add_argument("--days", type=int, default=DAYS, metavar="N", help="length of the run (default: 30)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="rounds of each (default: 5)")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        tables = [*measure_commands(Path(folder), options.days, options.rounds)]
        tables += ["", *measure_readers(Path(folder), options.rounds)]
    lines = [
        "## Commands on a run of 30 days, compared with TensorBoard's reader",
        "",
        # It imports torch: done last, because a process counts the memory of the process that started it.
        f"{describe_machine()}. Median (min-max), n = {options.rounds}. Written by `benchmarks/long_run.py`.",
        "",
        *tables,
    ]
    lines += ["", f"Load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after."]
    print("\n".join(lines))
    if options.days == DAYS:
        write_section("long_run.py", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
