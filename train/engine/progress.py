"""Progress reports of a training process: to its agent, and from rank 0 to TensorBoard, JSON lines and the console."""

from train.distributed import process_group
from train.distributed.process_group import ProcessGroup
from train.metrics import hparams, text
from train.metrics.log_writer import MetricsLog
from train.metrics.meters import NetworkMeter
from train.metrics.records import RunInfo
from train.metrics.rows import StepTotals, interval_scalars
from train.metrics.time_breakdown import TimeBreakdown
from train.metrics.time_table import TimeTable
from train.recipe.history import EpochResult
from train.recipe.schedule import Epoch, Schedule
from train.tools.agent_protocol import TrainerState
from train.tools.records import encode
from train.trackers.process import TrackerProcess, start_tracker

from .agent_channel import AgentChannel
from .options import RunOptions

TRAINERS_TIME_NOTE = "measured by the trainers, without losses; of the job: imgnet-cluster status"


class ProgressReporter:
    """Reports one process's progress. Every rank reports to its agent; only rank 0 writes logs.

    In all methods, `step` and `images_seen` count from the start of the run.
    """

    def __init__(
        self,
        options: RunOptions,
        schedule: Schedule,
        group: ProcessGroup,
        agent_channel: AgentChannel,
        time_breakdown: TimeBreakdown,
    ) -> None:
        self.options = options
        self.schedule = schedule
        self.group = group
        self.agent_channel = agent_channel
        self.time_breakdown = time_breakdown
        self.network = NetworkMeter()
        self.tracker: TrackerProcess | None = None

    def start_attempt(self, step: int, images_seen: int, run_info: RunInfo) -> None:
        """Open the logs at this position of the run, and write what the attempt runs on."""
        if self.group.is_first:
            self.log = MetricsLog(self.options.log_dir, self.options.attempt, images_seen, self.schedule.steps)
            self.log.write_start(step, images_seen, run_info)
            settings = hparams.flat_settings(self.schedule, self.group.world_size)
            hparams.write_settings(self.log.tensorboard, settings)
            options = self.options
            if options.log:
                self.tracker = start_tracker(options.log, options.out, options.log_dir, options.attempt, settings)

    def report_interval(
        self,
        epoch: Epoch,
        step: int,
        images_seen: int,
        lr: float,
        totals: StepTotals,
        step_seconds: float,
        wait_seconds: float,
        loss_scale: float | None,
        broken_images: int,
        busy: tuple[float, ...],
    ) -> None:
        """Report the steps since the last report.

        `lr` is the last step's learning rate, `totals` the sums over the steps and all ranks. `step_seconds` and
        `wait_seconds` are medians: of a step, and of a step's wait for its images. `loss_scale` is that of float16,
        None in other precisions. `broken_images` is the number of those that were met so far. `busy` has the share of
        the time in which each rank here did not wait for others.
        """
        self.agent_channel.report_state(
            TrainerState.TRAINING,
            throttled=True,
            step=step,
            epoch=epoch.number + 1,
            images_per_second=totals.images / totals.seconds,
            lr=lr,
            loss=totals.loss / totals.images,
            busy=busy,
            where=encode(self.time_breakdown.table()),
        )
        if self.group.is_first:
            scalars = interval_scalars(epoch, totals, lr, self.schedule.recipe.optim.momentum, self.group.world_size)
            scalars |= {"times/step_ms": 1000 * step_seconds, "times/data_ms": 1000 * wait_seconds}
            scalars |= {"memory/gb": process_group.peak_memory_gb(self.group.device), **self.network.rates()}
            if loss_scale is not None:
                scalars["sizes/loss_scale"] = loss_scale
            if broken_images:
                scalars["sizes/broken_images"] = broken_images
            self.log.write_interval(step, images_seen, epoch.number + 1, scalars)

    def report_epoch(self, step: int, images_seen: int, epoch: EpochResult) -> None:
        """Report a finished epoch."""
        accuracies = {} if epoch.top1 is None else {"top1": epoch.top1, "top5": epoch.top5}
        where = encode(self.time_breakdown.table())
        self.agent_channel.report_state(TrainerState.TRAINING, False, step=step, where=where, **accuracies)
        if self.group.is_first:
            self.log.write_epoch(step, images_seen, epoch)

    def close(self) -> None:
        """Close the logs of an attempt that ends before the run does."""
        if self.group.is_first:
            self.log.close()
            if self.tracker:
                self.tracker.end(is_complete=False)

    def finish(self, time_summary: TimeTable) -> None:
        """Close the logs of a finished run, and print where its time went, as far as the trainers know it."""
        if self.group.is_first:
            hparams.write_session_end(self.log.tensorboard)
            self.log.close()
            if self.tracker:
                self.tracker.end(is_complete=True)
            print("\n".join((*text.time_table_lines(time_summary), TRAINERS_TIME_NOTE)), flush=True)

    def wait_for_tracker(self) -> None:
        """Wait some seconds for the tracker, after `close` or `finish`: it dies with this process."""
        if self.tracker:
            self.tracker.wait()
