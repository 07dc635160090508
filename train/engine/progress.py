"""Progress reports of a training process: to its agent, and from rank 0 to TensorBoard, JSON lines and the console."""

import io
import time
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from train.distributed import process_group
from train.distributed.process_group import ProcessGroup
from train.metrics import hparams, text
from train.metrics.meters import NetworkMeter
from train.metrics.records import EpochRow, MetricsRow, StartRow, StepRow, row_line, val_scalars
from train.metrics.rows import StepTotals, interval_scalars
from train.metrics.time_breakdown import TimeBreakdown
from train.metrics.time_table import TimeTable
from train.recipe.history import EpochResult
from train.recipe.schedule import Epoch, Schedule
from train.tools.agent_protocol import EVENTS_FOLDER, TrainerState, metrics_file
from train.tools.files import open_regular
from train.tools.host import package_versions, unix_time
from train.tools.records import encode
from train.trackers.tracker_process import TrackerProcess, start_tracker

from .agent_channel import AgentChannel
from .options import RunOptions

PRINT_SECONDS = 10.0  # least time between two lines about steps
TRAINERS_TIME_NOTE = "measured by the trainers, without losses; of the job: imgnet-cluster status"


class MetricsLog:
    """Writes the metrics of one attempt of a run. Only the first process has one.

    The x axis of all curves is the number of training images seen, so that runs with different batches compare.
    `images` is where the attempt starts on it; `total_steps` is the number of steps of the run.
    """

    def __init__(self, log_dir: Path, attempt: int, images: int, total_steps: int) -> None:
        metrics_path = metrics_file(log_dir, attempt)
        metrics_path.parent.mkdir(parents=True, exist_ok=True)
        self.attempt = attempt
        self.total_steps = total_steps
        self.last_print_time = time.monotonic()
        print(text.epoch_header(), flush=True)
        # purge_step hides what an earlier attempt wrote after the point where this one starts, but not at that point.
        self.tensorboard = SummaryWriter(str(log_dir / EVENTS_FOLDER), purge_step=images + 1, flush_secs=2)
        self.jsonl_file = io.TextIOWrapper(open_regular(metrics_path, "ab"), line_buffering=True)

    def write_scalars(self, images: int, values: dict[str, float]) -> None:
        """Write scalars to TensorBoard at x = `images`."""
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, images)

    def write_row(self, row: MetricsRow) -> None:
        """Append a row."""
        self.jsonl_file.write(row_line(row))

    def write_interval(self, step: int, images: int, epoch: int, values: dict[str, float]) -> None:
        """Write the scalars of an interval of steps, by their names in TensorBoard, and now and then a line of text."""
        self.write_scalars(images, values)
        self.write_row(
            StepRow(attempt=self.attempt, time=unix_time(), step=step, images=images, epoch=epoch, scalars={**values})
        )
        if time.monotonic() - self.last_print_time > PRINT_SECONDS:
            self.last_print_time = time.monotonic()
            print(text.step_line(step, self.total_steps, epoch, values), flush=True)

    def write_epoch(self, step: int, images: int, epoch: EpochResult) -> None:
        """Write the result of an epoch. TensorBoard gets its validation as loss/val, accuracy/val_top1 ..."""
        self.write_scalars(images, val_scalars(epoch))
        self.write_row(EpochRow(**vars(epoch), attempt=self.attempt, time=unix_time(), step=step, images=images))
        print(text.epoch_line(epoch), flush=True)
        # No flush here: TensorBoard's writer flushes every two seconds by itself, and training must not wait for a
        # disk.

    def close(self) -> None:
        """Flush and close the files."""
        self.tensorboard.close()
        self.jsonl_file.close()


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
        # In place: when the attempt before last reported steps. None once this one has.
        self.pause_begin = None if options.live_step is None else agent_channel.steps_time

    def start_attempt(self, step: int, images_seen: int, begun: float, val_images: int, dtype: torch.dtype) -> None:
        """Open the logs at this position of the run, and write what the attempt runs on. It computes in `dtype`."""
        if self.group.is_first:
            start = StartRow(
                attempt=self.options.attempt,
                time=unix_time(),
                step=step,
                images=images_seen,
                begun=begun,
                train_images=self.schedule.images,
                val_images=val_images,
                world=self.group.world_size,
                gpus=self.schedule.gpus,
                device=self.group.device.type,
                processor=process_group.device_name(self.group.device),
                precision=str(dtype).removeprefix("torch."),
                versions=package_versions(),
            )
            self.log = MetricsLog(self.options.log_dir, self.options.attempt, images_seen, self.schedule.steps)
            self.log.write_row(start)  # for benchmark records
            if self.options.attempt > 1:
                is_in_place = self.options.live_step is not None
                recovery = {"recovery/attempt": self.options.attempt, "recovery/in_place": float(is_in_place)}
                self.log.write_scalars(images_seen, recovery)
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
        pause_begin, self.pause_begin = self.pause_begin, None
        self.agent_channel.steps_time = unix_time()
        if self.group.is_first:
            if pause_begin is not None:
                pause = self.agent_channel.steps_time - pause_begin
                steps_lost = float(self.agent_channel.furthest_step - (self.options.live_step or 0))
                self.log.write_scalars(images_seen, {"recovery/pause": pause, "recovery/steps_lost": steps_lost})
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
        if self.group.is_first and "log" in vars(self):  # else the attempt failed before it began to train
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
