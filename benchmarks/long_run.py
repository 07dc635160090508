"""Measures commands on a run of 30 days: `ls`, `status`, `report`; compared with the event reader of TensorBoard.

    .venv/bin/python benchmarks/long_run.py              # 5 minutes; writes its section of RESULTS.md
    .venv/bin/python benchmarks/long_run.py --days 1     # only printed

The run is made up, as a running job of two local machines leaves its files: a line of metrics a second, and every 20
minutes a loss, after which some minutes of steps are repeated. Each command is a process of its own. What it takes
beyond its start is the difference to the same command on a run of two minutes; the two alternate.
"""

import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")

from cluster.state.attempts import Attempt, attempt_path
from cluster.state.heartbeats import MachineStatus
from cluster.state.recovery_options import RecoveryOptions
from cluster.state.run_folder import AGENT_LOCK, RunFolder, agent_log_path
from cluster.state.spec import JobSpec
from cluster.state.states import AgentPhase, MachineState
from train.engine.options import TrainOptions
from train.metrics.records import ROW_KINDS, EpochRow, MetricsRow, StartRow
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
        recipe=RECIPE,
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
                file.write(self._step_line(step, begin + second, epoch))
                if epoch > (step - STEPS_PER_SECOND) // STEPS_PER_EPOCH + 1:
                    file.write(_line(_epoch_row(self.attempt, begin + second + 0.5, step, epoch - 1)))
                    self._note_state("validating", begin + second)
                    self._note_state("training", begin + second + 0.5)
        self.step_lines += seconds
        self.elapsed_seconds += PAUSE_SECONDS + seconds
        repeated_seconds = self.rng.randrange(min(seconds, MAX_REPEATED_SECONDS))
        self.step = start_step + (seconds - repeated_seconds) * STEPS_PER_SECOND

    def _step_line(self, step: int, now: float, epoch: int) -> str:
        """Return a line of steps as the trainer's JSON has it; json.dumps would take minutes for all of them."""
        noise = self.rng.random()
        return (
            f'{{"kind": "train", "attempt": {self.attempt}, "time": {now + noise}, "step": {step}, '
            f'"images": {step * GLOBAL_BATCH}, "epoch": {epoch}, "scalars": {{"train/loss": {1.5 + noise}, '
            f'"train/top1": {60 + noise}, "train/top5": {80 + noise}, "sizes/lr": {0.1 + noise / 1000}, '
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
    """What a command took: seconds of the wall, and the largest memory in MB."""

    seconds: float
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
    return CommandCost(time.perf_counter() - start, usage.ru_maxrss / 1e3)
