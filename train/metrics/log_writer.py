"""Write the metrics of a run: TensorBoard events, JSON lines, and text on stdout."""

import io
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from train.recipe.history import EpochResult
from train.tools.agent_protocol import EVENTS_FOLDER, metrics_file
from train.tools.files import open_regular
from train.tools.host import unix_time

from . import text
from .records import EpochRow, MetricsRow, RunInfo, StartRow, StepRow, row_line, val_scalars

PRINT_SECONDS = 10.0  # least time between two lines about steps


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

    def write_start(self, step: int, images: int, run_info: RunInfo) -> None:
        """Write the JSON line that begins an attempt: where it starts, and on what it runs. For benchmark records."""
        self.write_row(StartRow(**vars(run_info), attempt=self.attempt, time=unix_time(), step=step, images=images))

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
