"""What the first process tells while it trains: the agent beside it, TensorBoard, JSON lines and text."""

from typing import Any

from train.distributed import process_group
from train.distributed.process_group import Group
from train.metrics import hparams, text
from train.metrics.log_writer import Log
from train.metrics.meters import Network
from train.metrics.rows import Sums, stretch_values
from train.metrics.time_breakdown import Times
from train.recipe.schedule import Epoch, Schedule

from .agent_channel import Report
from .options import Options


class News:
    """One process's line to whoever follows the run; only the first one writes anything but to its agent."""

    def __init__(self, options: Options, schedule: Schedule, group: Group, report: Report, times: Times) -> None:
        self.options, self.schedule, self.group, self.report, self.times = options, schedule, group, report, times
        self.network = Network()

    def begin(self, step: int, images: int, facts: dict[str, Any]) -> None:
        """Open the log, after so many steps and images of the run, and note what this attempt is."""
        if self.group.first:
            self.log = Log(self.options.notes, self.options.attempt, images, self.schedule.steps)
            self.log.start(step, images, facts)
            hparams.begin(self.log.board, hparams.flat(self.schedule, self.group.world))

    def stretch(
        self, epoch: Epoch, step: int, images: int, rate: float, sums: Sums, seconds: float, waited: float
    ) -> None:
        """Tell of the steps up to the run's `step`: last rate, sums, median seconds of one and of its waits."""
        self.report.say(
            "training",
            often=True,
            step=step,
            epoch=epoch.number + 1,
            images_per_second=sums.images / sums.seconds,
            lr=rate,
            where=self.times.where(),
        )
        if self.group.first:
            values = stretch_values(epoch, sums, rate, self.schedule.recipe.optim.momentum, self.group.world)
            values |= {"times/step_ms": 1000 * seconds, "times/data_ms": 1000 * waited}
            values |= {"memory/gb": process_group.memory_gb(self.group.device), **self.network.rates()}
            self.log.stretch(step, images, epoch.number + 1, values)

    def epoch(self, step: int, images: int, row: dict[str, Any]) -> None:
        """Tell of an epoch, after so many steps and images of the run."""
        known = {name: row[name] for name in ("top1", "top5") if row[name] is not None}
        self.report.say("training", step=step, where=self.times.where(), **known)
        if self.group.first:
            self.log.epoch(step, images, row)

    def close(self) -> None:
        """Close the log of a run that goes on another time."""
        if self.group.first:
            self.log.close()

    def end(self, where: dict[str, Any], goodput: float) -> None:
        """Tell that all is done, and where the time went."""
        if self.group.first:
            hparams.end(self.log.board)
            self.log.close()
            print("\n".join(text.where_lines(where, goodput)), flush=True)
