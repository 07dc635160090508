"""What a run measures of itself, but for times: sums on the device, network, TensorBoard, JSON lines."""

import json
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from train.tools.filesystem import finite

from . import text

PRINT_SECONDS = 10.0  # between two lines of text


class Log:
    """TensorBoard events, JSON lines and printed text of one attempt of a run of so many `steps`, x = images seen.

    Made by the first process only.
    """

    def __init__(self, out: Path, attempt: int, images: int, steps: int) -> None:
        (out / "metrics").mkdir(parents=True, exist_ok=True)
        self.attempt, self.steps, self.printed = attempt, steps, time.monotonic()
        print(text.epoch_title(), flush=True)
        # What an earlier attempt wrote beyond our starting point is hidden by purge_step; what it wrote there stays.
        self.board = SummaryWriter(str(out / "events"), purge_step=images + 1, flush_secs=2)
        self.lines = (out / "metrics" / f"{attempt:06d}.jsonl").open("a", buffering=1)

    def scalars(self, images: int, values: dict[str, float]) -> None:
        """Draw values at x = images."""
        for name, value in values.items():
            self.board.add_scalar(name, value, images)

    def line(self, kind: str, **values: Any) -> None:
        """Append one JSON line."""
        whole = {"kind": kind, "attempt": self.attempt, "time": time.time(), **values}
        self.lines.write(json.dumps(finite(whole)) + "\n")

    def start(self, step: int, images: int, facts: dict[str, Any]) -> None:
        """Note what an attempt is that goes on from a step: no curve shows it, and a record must say it."""
        self.line("start", step=step, images=images, **facts)

    def stretch(self, step: int, images: int, epoch: int, values: dict[str, float]) -> None:
        """Note some steps: scalars by their names in TensorBoard, after `images` images."""
        self.scalars(images, values)
        self.line("train", step=step, images=images, epoch=epoch, **values)
        if time.monotonic() - self.printed > PRINT_SECONDS:
            self.printed = time.monotonic()
            print(text.step_line(step, self.steps, epoch, values), flush=True)

    def epoch(self, step: int, images: int, row: dict[str, Any]) -> None:
        """Note an epoch's row of the result; what it says of the validation is drawn as val/..."""
        names = {
            name: name.removeprefix("val_")
            for name in row
            if name.startswith(("val_", "top")) and "images" not in name and row[name] is not None
        }
        self.scalars(images, {f"val/{short}": row[name] for name, short in names.items()})
        self.line("epoch", step=step, images=images, **row)
        print(text.epoch_line(row), flush=True)  # the events follow within two seconds: nobody waits for a disk here

    def flush(self) -> None:
        """Bring what is queued to the disk."""
        self.board.flush()

    def close(self) -> None:
        """Flush and close."""
        self.board.close()
        self.lines.close()
