"""What a run measures of itself: sums on the device, times by shape, TensorBoard, JSON lines. No sync in a step."""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.tensorboard import SummaryWriter

from . import text
from .files import finite

PRINT_SECONDS = 10.0  # between two lines of text
Item = TypeVar("Item")
Shape = tuple[int, ...]


def hits(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many of [n, classes] scores have their label first, and among the first five, as int64 scalars."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
    return best[:, 0].sum(), best.sum()


class Meter:
    """Sums of a stretch of steps, kept on the device until `read`."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.losses = torch.zeros(capacity, dtype=torch.float64, device=device)
        self.hits = torch.zeros(2, dtype=torch.float64, device=device)
        self.steps = 0

    @torch.no_grad()
    def add(self, loss: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, share: float) -> None:
        """Count a chunk: its summed loss, to which `share` was applied, and its hits."""
        self.losses[self.steps] += loss
        self.hits += torch.stack(hits(scores, labels)) * share

    def end_step(self) -> None:
        """The chunks that follow belong to the next step."""
        self.steps += 1

    def reset(self) -> None:
        """Begin the next stretch."""
        self.losses.zero_()
        self.hits.zero_()
        self.steps = 0


class Times:
    """How long each training step and validation batch takes, by shape, and how much of it is waiting for its images.

    A step is a whole one, from asking for its images to its end, as the systems of 2018 logged it. On a GPU it is
    timed by events on the GPU's own clock, read at `settle`, when the host waits anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.by_shape: dict[str, list[float]] = defaultdict(list)
        self.waits: list[float] = []
        self.recent: list[float] = []
        self.first: float | None = None
        self.waited = 0.0  # seconds for images, all in all
        self.before = 0.0  # seconds from the first step to the last of earlier attempts
        self._open: list[tuple[str, Any, Any]] = []

    def wait(self, batches: Iterator[Item]) -> Item:
        """Take the next batch and note how long that took."""
        start = time.perf_counter()
        batch = next(batches)
        self.waits.append(time.perf_counter() - start)
        self.waited += self.waits[-1]
        return batch

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def begin(self) -> Any:
        """Return a mark for `end`."""
        if self.first is None:
            self.first = time.perf_counter()
        return self._now()

    def end(self, start: Any, shape: Shape, kind: str) -> None:
        """Note the time since the mark under a shape."""
        self._open.append((f"{kind} {' '.join(map(str, shape))}", start, self._now()))

    def settle(self) -> None:
        """Turn the marks of the past stretch into seconds. On a GPU waits for it."""
        if self.cuda and self._open:
            self._open[-1][2].synchronize()
        for key, start, end in self._open:
            seconds = start.elapsed_time(end) / 1000 if self.cuda else end - start
            self.by_shape[key].append(seconds)
            if key.startswith("train"):
                self.recent.append(seconds)
        self._open.clear()

    def stretch(self) -> tuple[float, float]:
        """Return the median seconds of a training step and of a wait since the last call."""
        middle = [statistics.median(one) if one else 0.0 for one in (self.recent, self.waits)]
        self.recent.clear()
        self.waits.clear()
        return middle[0], middle[1]

    @property
    def wall(self) -> float:
        """Seconds from the first step until now, those of earlier attempts added."""
        return self.before + (time.perf_counter() - self.first if self.first is not None else 0.0)

    def seconds(self, kind: str) -> float:
        """Seconds of all steps of one kind, "train" or "val"."""
        return sum(sum(one) for key, one in self.by_shape.items() if key.startswith(kind))

    def goodput(self) -> float:
        """Every step and validation batch at the median time of its shape, over the wall time from first to last."""
        useful = sum(len(one) * statistics.median(one) for one in self.by_shape.values() if one)
        return min(1.0, useful / self.wall) if self.wall else 0.0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"by_shape": dict(self.by_shape), "wall": self.wall, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's numbers."""
        self.by_shape = defaultdict(list, {key: list(one) for key, one in state["by_shape"].items()})
        self.before, self.waited = state["wall"], state["waited"]


class Network:
    """Bytes through this machine's network cards, the loopback left out (/proc/net/dev)."""

    def __init__(self) -> None:
        self.last = (time.perf_counter(), *self._read())

    @staticmethod
    def _read() -> tuple[int, int]:
        received = sent = 0
        for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            if name.strip() != "lo":
                received, sent = (
                    received + int(numbers.split()[0]),
                    sent + int(numbers.split()[8]),
                )
        return received, sent

    def rates(self) -> dict[str, float]:
        """Return Gbit/s received and sent since the last call."""
        before, self.last = self.last, (time.perf_counter(), *self._read())
        seconds, received, sent = (now - then for now, then in zip(self.last, before, strict=True))
        factor = 8e-9 / max(seconds, 1e-9)
        return {"net/receive_gbit": received * factor, "net/send_gbit": sent * factor}


class Log:
    """TensorBoard events, JSON lines and printed text of one attempt of a run of so many `steps`, x = images seen.

    Made by the first process only.
    """

    def __init__(self, out: Path, attempt: int, images: int, steps: int) -> None:
        (out / "metrics").mkdir(parents=True, exist_ok=True)
        self.attempt, self.steps, self.printed = attempt, steps, time.monotonic()
        print(text.epoch_title(), flush=True)
        # What an earlier attempt wrote beyond our starting point is hidden by purge_step.
        self.board = SummaryWriter(str(out / "events"), purge_step=images, flush_secs=2)
        self.lines = (out / "metrics" / f"{attempt:06d}.jsonl").open("a", buffering=1)

    def scalars(self, images: int, values: dict[str, float]) -> None:
        """Draw values at x = images."""
        for name, value in values.items():
            self.board.add_scalar(name, value, images)

    def line(self, kind: str, **values: Any) -> None:
        """Append one JSON line."""
        whole = {"kind": kind, "attempt": self.attempt, "time": time.time(), **values}
        self.lines.write(json.dumps(finite(whole)) + "\n")

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
            name: name.removeprefix("val_") for name in row if name.startswith(("val_", "top")) and "images" not in name
        }
        self.scalars(images, {f"val/{short}": row[name] for name, short in names.items()})
        self.line("epoch", step=step, images=images, **row)
        print(text.epoch_line(row), flush=True)
        self.flush()

    def flush(self) -> None:
        """Bring what is queued to the disk."""
        self.board.flush()

    def close(self) -> None:
        """Flush and close."""
        self.board.close()
        self.lines.close()
