"""A run of four epochs with a loss in the third, as a simulated trainer writes it, for tests of benchmark records."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from support import aws_journal
from support.aws_journal import launch_request, request_granted
from support.train_records import make_epoch, make_result, metrics_line

from cluster.state import result as state_result
from infra.aws.journal_events import InstanceEnded
from infra.aws.launch_request import Place
from train.metrics.records import EpochRow, MetricsRow, StartRow, StepRow
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.history import EpochResult
from train.recipe.schedule import Epoch, Schedule
from train.tools.records import encode

LOADING_BEGAN, PRICE = 1_700_000_000.0, 2.5
IMAGES, VAL_IMAGES = 1000, 50
STEP_SECONDS = 2.0
SAVED_STEP = 68  # the step of the checkpoint from which the second attempt resumes
LOST_STEP = 72  # the last step before the machine is lost
PAUSE_SECONDS = 15.0  # from the loss to the start of the second attempt
RECIPE = Recipe(
    name="paper",
    data=Data(name="drawn", root="nowhere", train=IMAGES, val=VAL_IMAGES),
    model=Model(name="resnet18"),
    gpus=1,
    phases=[
        Phase(epochs=(0, 2), size=64, batch=16, lr=(0.1, 0.4)),
        Phase(epochs=(2, 4), size=96, batch=32, lr=(0.2, 0.02), rect_val=True, validate="last"),
    ],
)
SCHEDULE = Schedule(RECIPE, IMAGES, 2)
ACCURACIES = {1: (20.0, 50.0), 2: (40.0, 72.0), 4: (60.0, 94.0)}
PLACE = Place(region="r", zone="r-1a", type="p4d.24xlarge", market="spot", price=PRICE)


class SimulatedTrainer:
    """Writes the metrics and the history of a run, on a clock that advances only with the work."""

    def __init__(self) -> None:
        self.now = LOADING_BEGAN
        self.rows: dict[int, list[MetricsRow]] = {}
        self.history: list[EpochResult] = []

    def start(self, attempt: int, step: int, seconds: float) -> None:
        self.now += seconds
        row = StartRow(
            **self.place(attempt, step), begun=LOADING_BEGAN, train_images=IMAGES, val_images=VAL_IMAGES,
            world=2, gpus=2, device="cuda", processor="NVIDIA A100", precision="bfloat16",
            versions={"torch": "2", "imgnet-cluster": "1"},
        )  # fmt: skip
        self.rows[attempt] = [row]

    def place(self, attempt: int, step: int) -> dict[str, Any]:
        return {"attempt": attempt, "time": self.now, "step": step, "images": step}

    def train(self, attempt: int, epoch: Epoch, first: int, last: int) -> None:
        """Train the steps `first` to `last` of an epoch; a row after the first, each tenth, and the last of them."""
        for step in range(first, last):
            self.now += STEP_SECONDS
            if step in (first, last - 1) or step % 10 == 0:
                place = self.place(attempt, epoch.first_step + step + 1)
                row = StepRow(**place, epoch=epoch.number + 1, scalars={"sizes/lr": epoch.lr_at(step)})
                self.rows[attempt].append(row)

    def end_epoch(self, attempt: int, epoch: Epoch) -> None:
        """Validate where the recipe says so, and write the row of the epoch."""
        top1, top5 = ACCURACIES.get(epoch.number + 1, (None, None))
        val_seconds = 0.5 if top1 is None else 5.0
        self.now += val_seconds
        phase, steps = epoch.scheduled_phase, epoch.steps
        result = make_epoch(
            epoch=epoch.number + 1, size=phase.size, global_batch=phase.global_batch, steps=steps,
            lr=epoch.lr_at(steps - 1), train_seconds=steps * STEP_SECONDS, val_seconds=val_seconds,
            train_images=IMAGES, top1=top1, top5=top5, at=self.now, clock=self.now - LOADING_BEGAN,
        )  # fmt: skip
        self.history.append(result)
        self.rows[attempt].append(EpochRow(**self.place(attempt, epoch.first_step + steps), **vars(result)))
        self.now += 0.2  # the checkpoint

    def run(self) -> "SimulatedTrainer":
        """Train four epochs. In the third a machine is lost, and the steps after the checkpoint are repeated."""
        first, second, third, fourth = SCHEDULE.epochs
        self.start(1, 0, 20.0)
        for epoch in (first, second):
            self.train(1, epoch, 0, epoch.steps)
            self.end_epoch(1, epoch)
        saved_step = SAVED_STEP - third.first_step
        self.train(1, third, 0, LOST_STEP - third.first_step)
        self.start(2, SAVED_STEP, PAUSE_SECONDS)
        self.train(2, third, saved_step, third.steps)
        self.end_epoch(2, third)
        self.train(2, fourth, 0, fourth.steps)
        self.end_epoch(2, fourth)
        return self


def make_job(
    hand_made: Any, backend: str = "local", done: bool = True, target: str = "top5=93", data: str = "drawn"
) -> Any:
    """Return an ended job of a backend, with its run folder; `done` or failed. `data` is the name of its data set."""
    cloud = {"places": [PLACE]} if backend == "aws" else None
    run = hand_made(
        recipe=replace(RECIPE, data=replace(RECIPE.data, name=data)), procs=2, gpus=2, machines=2, uid="job-1-abc",
        created=LOADING_BEGAN - 100.0, backend=backend, cloud=cloud, target=target,
    )  # fmt: skip
    trainer = SimulatedTrainer().run()
    run.write_attempt(1, "0.a", "1.b", time=LOADING_BEGAN - 8.0)
    run.write_attempt(2, "0.a", "1.c", resume_step=SAVED_STEP, time=LOADING_BEGAN, reason="lost")
    for number, rows in trainer.rows.items():
        run.write_metrics(number, *map(metrics_line, rows))
    run.copy_logs()
    if backend == "aws":
        write_journal(run.run_folder.path)
    run.write_status("done" if done else "failed", ended=True)
    if done:
        run.write_shared("result.json", json.dumps(encode(make_result(*trainer.history))))
    state_result.write_result(run.job.run, run.job.backend)
    return run.job


def write_journal(run_folder: Path) -> None:
    """Write the journal of two instances, of which the second was replaced after the loss."""
    first_launched = LOADING_BEGAN - 90
    aws_journal.write_journal(
        run_folder / "cloud.jsonl",
        launch_request(1, PLACE, ["0", "1"], LOADING_BEGAN - 95),
        request_granted(1, ("i-0", "0", first_launched), ("i-1", "1", first_launched)),
        InstanceEnded(id="i-1", name="1", ended=LOADING_BEGAN + 170, reason="taken"),
        launch_request(2, PLACE, ["1"]),
        request_granted(2, ("i-2", "1", LOADING_BEGAN + 175)),
        InstanceEnded(id="i-0", name="0", ended=LOADING_BEGAN + 300, reason="done"),
        InstanceEnded(id="i-2", name="1", ended=LOADING_BEGAN + 300, reason="done"),
    )
