"""What a run measures of itself, but for times: sums on the device, network, TensorBoard, JSON lines."""

import json
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from train.tools.filesystem import replace_nonfinite

from . import text

PRINT_SECONDS = 10.0  # between two lines of text


class MetricsLog:
    """TensorBoard events, JSON lines and printed text of one attempt of a run of so many `steps`, x = images seen.

    Made by the first process only.
    """

    def __init__(self, log_dir: Path, attempt: int, images: int, total_steps: int) -> None:
        (log_dir / "metrics").mkdir(parents=True, exist_ok=True)
        self.attempt, self.total_steps, self.last_print_time = attempt, total_steps, time.monotonic()
        print(text.epoch_header(), flush=True)
        # What an earlier attempt wrote beyond our starting point is hidden by purge_step; what it wrote there stays.
        self.tensorboard = SummaryWriter(str(log_dir / "events"), purge_step=images + 1, flush_secs=2)
        self.jsonl_file = (log_dir / "metrics" / f"{attempt:06d}.jsonl").open("a", buffering=1)

    def write_scalars(self, images: int, values: dict[str, float]) -> None:
        """Draw values at x = images."""
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, images)

    def write_line(self, kind: str, **values: Any) -> None:
        """Append one JSON line."""
        whole = {"kind": kind, "attempt": self.attempt, "time": time.time(), **values}
        self.jsonl_file.write(json.dumps(replace_nonfinite(whole)) + "\n")

    def write_start(self, step: int, images: int, run_info: dict[str, Any]) -> None:
        """Note what an attempt is that goes on from a step: no curve shows it, and a record must say it."""
        self.write_line("start", step=step, images=images, **run_info)

    def write_interval(self, step: int, images: int, epoch: int, values: dict[str, float]) -> None:
        """Note some steps: scalars by their names in TensorBoard, after `images` images."""
        self.write_scalars(images, values)
        self.write_line("train", step=step, images=images, epoch=epoch, **values)
        if time.monotonic() - self.last_print_time > PRINT_SECONDS:
            self.last_print_time = time.monotonic()
            print(text.step_line(step, self.total_steps, epoch, values), flush=True)

    def write_epoch(self, step: int, images: int, row: dict[str, Any]) -> None:
        """Note an epoch's row of the result; what it says of the validation is drawn as val/..."""
        names = {
            name: name.removeprefix("val_")
            for name in row
            if name.startswith(("val_", "top")) and "images" not in name and row[name] is not None
        }
        self.write_scalars(images, {f"val/{short}": row[name] for name, short in names.items()})
        self.write_line("epoch", step=step, images=images, **row)
        print(text.epoch_line(row), flush=True)  # the events follow within two seconds: nobody waits for a disk here

    def flush(self) -> None:
        """Bring what is queued to the disk."""
        self.tensorboard.flush()

    def close(self) -> None:
        """Flush and close."""
        self.tensorboard.close()
        self.jsonl_file.close()
