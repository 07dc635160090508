"""What the first process tells while it trains: the agent beside it, TensorBoard, JSON lines and text."""

from typing import Any

from train.distributed import process_group
from train.distributed.process_group import ProcessGroup
from train.metrics import hparams, text
from train.metrics.log_writer import MetricsLog
from train.metrics.meters import NetworkMeter
from train.metrics.rows import StepTotals, interval_scalars
from train.metrics.time_breakdown import TimeBreakdown
from train.recipe.schedule import Epoch, Schedule

from .agent_channel import AgentChannel
from .options import TrainOptions


class ProgressReporter:
    """One process's line to whoever follows the run; only the first one writes anything but to its agent."""

    def __init__(
        self,
        options: TrainOptions,
        schedule: Schedule,
        group: ProcessGroup,
        agent_channel: AgentChannel,
        time_breakdown: TimeBreakdown,
    ) -> None:
        self.options, self.schedule, self.group, self.agent_channel, self.time_breakdown = (
            options,
            schedule,
            group,
            agent_channel,
            time_breakdown,
        )
        self.network = NetworkMeter()

    def start_attempt(self, step: int, images_seen: int, run_info: dict[str, Any]) -> None:
        """Open the log, after so many steps and images of the run, and note what this attempt is."""
        if self.group.is_first:
            self.log = MetricsLog(self.options.log_dir, self.options.attempt, images_seen, self.schedule.steps)
            self.log.write_start(step, images_seen, run_info)
            hparams.write_settings(self.log.tensorboard, hparams.flat_settings(self.schedule, self.group.world_size))

    def report_interval(
        self,
        epoch: Epoch,
        step: int,
        images_seen: int,
        lr: float,
        totals: StepTotals,
        step_seconds: float,
        wait_seconds: float,
    ) -> None:
        """Tell of the steps up to the run's `step`: last rate, sums, median seconds of one and of its waits."""
        self.agent_channel.report_state(
            "training",
            throttled=True,
            step=step,
            epoch=epoch.number + 1,
            images_per_second=totals.images / totals.seconds,
            lr=lr,
            where=self.time_breakdown.breakdown(),
        )
        if self.group.is_first:
            values = interval_scalars(epoch, totals, lr, self.schedule.recipe.optim.momentum, self.group.world_size)
            values |= {"times/step_ms": 1000 * step_seconds, "times/data_ms": 1000 * wait_seconds}
            values |= {"memory/gb": process_group.peak_memory_gb(self.group.device), **self.network.rates()}
            self.log.write_interval(step, images_seen, epoch.number + 1, values)

    def report_epoch(self, step: int, images_seen: int, row: dict[str, Any]) -> None:
        """Tell of an epoch, after so many steps and images of the run."""
        known = {name: row[name] for name in ("top1", "top5") if row[name] is not None}
        self.agent_channel.report_state("training", step=step, where=self.time_breakdown.breakdown(), **known)
        if self.group.is_first:
            self.log.write_epoch(step, images_seen, row)

    def close(self) -> None:
        """Close the log of a run that goes on another time."""
        if self.group.is_first:
            self.log.close()

    def finish(self, time_summary: dict[str, Any], goodput: float) -> None:
        """Tell that all is done, and where the time went."""
        if self.group.is_first:
            hparams.write_session_end(self.log.tensorboard)
            self.log.close()
            print("\n".join(text.time_breakdown_lines(time_summary, goodput)), flush=True)
