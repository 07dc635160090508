"""Write the metrics of a run: TensorBoard events, JSON lines, and text on stdout."""

import json
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from train.tools.filesystem import replace_nonfinite

from . import text

PRINT_SECONDS = 10.0  # least time between two lines about steps


class MetricsLog:
    """Writes the metrics of one attempt of a run. Only the first process has one.

    The x axis of all curves is the number of training images seen, so that runs with different batches compare.
    `images` is where the attempt starts on it; `total_steps` is the number of steps of the run.
    """

    def __init__(self, log_dir: Path, attempt: int, images: int, total_steps: int) -> None:
        (log_dir / "metrics").mkdir(parents=True, exist_ok=True)
        self.attempt = attempt
        self.total_steps = total_steps
        self.last_print_time = time.monotonic()
        print(text.epoch_header(), flush=True)
        # purge_step hides what an earlier attempt wrote after the point where this one starts, but not at that point.
        self.tensorboard = SummaryWriter(str(log_dir / "events"), purge_step=images + 1, flush_secs=2)
        self.jsonl_file = (log_dir / "metrics" / f"{attempt:06d}.jsonl").open("a", buffering=1)

    def write_scalars(self, images: int, values: dict[str, float]) -> None:
        """Write scalars to TensorBoard at x = `images`."""
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, images)

    def write_line(self, kind: str, **values: Any) -> None:
        """Append a JSON line with its kind, the attempt, the Unix time and the values. NaN and infinity become null."""
        line = {"kind": kind, "attempt": self.attempt, "time": time.time(), **values}
        self.jsonl_file.write(json.dumps(replace_nonfinite(line)) + "\n")

    def write_start(self, step: int, images: int, run_info: dict[str, Any]) -> None:
        """Write the JSON line that begins an attempt: where it starts, and on what it runs. For benchmark records."""
        self.write_line("start", step=step, images=images, **run_info)

    def write_interval(self, step: int, images: int, epoch: int, values: dict[str, float]) -> None:
        """Write the scalars of an interval of steps, by their names in TensorBoard, and now and then a line of text."""
        self.write_scalars(images, values)
        self.write_line("train", step=step, images=images, epoch=epoch, **values)
        if time.monotonic() - self.last_print_time > PRINT_SECONDS:
            self.last_print_time = time.monotonic()
            print(text.step_line(step, self.total_steps, epoch, values), flush=True)

    def write_epoch(self, step: int, images: int, row: dict[str, Any]) -> None:
        """Write an epoch's row of the result. TensorBoard gets its validation results as val/loss, val/top1 ..."""
        scalars = {
            f"val/{key.removeprefix('val_')}": value
            for key, value in row.items()
            if key.startswith(("val_", "top")) and "images" not in key and value is not None
        }
        self.write_scalars(images, scalars)
        self.write_line("epoch", step=step, images=images, **row)
        print(text.epoch_line(row), flush=True)
        # No flush here: TensorBoard's writer flushes every two seconds by itself, and training must not wait for a
        # disk.

    def flush(self) -> None:
        """Write queued events to the disk."""
        self.tensorboard.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self.tensorboard.close()
        self.jsonl_file.close()
