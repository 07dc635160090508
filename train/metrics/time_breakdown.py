"""Where a run's wall time goes: each moment from the first step to the last belongs to one part. No sync in a step.

    steps         training, without what is named below
    waits         for images that are not ready, in training and in validation
    validation    without its waits
    switches      what the first step of an epoch, and the first batch of each shape in a validation, take above the
                  median of their shape: kernels searched, memory asked for, caches cold
    checkpoints   what this process spends in saving: statistics gathered, the state copied, the last file waited for
    other         the rest: sums over all processes, logs

On a GPU the marks between the parts are events on the GPU's own clock, read at `settle`, when the host waits anyway: a
wait that the GPU does not see, because it still has work, is none.
"""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

PARTS = ("steps", "waits", "validation", "switches", "checkpoints", "other")
KINDS = {"train": "steps", "val": "validation"}
BEGIN = "begin"
Item = TypeVar("Item")
Shape = tuple[int, ...]


class Times:
    """Seconds of each training step and validation batch by shape, and of each part by epoch (counted from 1).

    A step is a whole one, from asking for its images to its end, as the systems of 2018 logged it.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.by_shape: dict[str, list[float]] = defaultdict(list)
        self.parts: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PARTS, 0.0))
        self.gaps: dict[int, float] = {}  # steps from the last one of the epoch before to the first of this one
        self.start: dict[str, float] = {}  # seconds before the first step, by what they went into
        self.before = 0.0  # seconds from the first step to the last of earlier attempts
        self.first: float | None = None
        self.epoch = 0
        self.recent: list[tuple[float, float]] = []  # seconds of a step, and of its waits
        self._inside = ["other"]
        self._marks: list[tuple[int, str, bool, str, Any]] = []  # that were not read yet
        self._last: Any = None
        self._step = self._waited = 0.0  # of the step whose marks are being read
        self._firsts: dict[str, float] = {}  # first step, and first batch of each shape, in this epoch, without waits
        self._between: float | None = None  # since the last step: what is neither validation nor saving
        self._gap: float | None = None  # what that was at the end of the epoch's first step

    # --- while it happens ------------------------------------------------------------------------------------------

    def begin_epoch(self, number: int) -> None:
        """What comes belongs to this epoch."""
        self._mark()
        self.epoch = number

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        """A context whose time belongs to a part, but for what a context inside takes from it."""
        self._mark()
        self._inside.append(part)
        try:
            yield
        finally:
            self._mark()
            self._inside.pop()

    def wait(self, batches: Iterator[Item]) -> Item:
        """Take the next batch and note how long that took."""
        with self.within("waits"):
            return next(batches)

    def begin(self, kind: str) -> None:
        """A training step ("train") or a validation batch ("val") begins."""
        if self.first is None:
            self.first, self._last = time.perf_counter(), self._now()
        self._mark(BEGIN)
        self._inside.append(KINDS[kind])

    def end(self, kind: str, shape: Shape) -> None:
        """It ends; its time counts under its shape."""
        self._mark(f"{kind} {' '.join(map(str, shape))}")
        self._inside.pop()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _mark(self, what: str = "") -> None:
        """Close the time since the last mark; before the first step nothing is counted."""
        if self._last is not None:
            away = "validation" in self._inside or "checkpoints" in self._inside
            self._marks.append((self.epoch, self._inside[-1], away, what, self._now()))

    # --- afterwards ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Turn the marks since the last call into seconds. On a GPU waits for it."""
        self._mark()
        if self.cuda and self._marks:
            self._marks[-1][-1].synchronize()
        for epoch, part, away, what, mark in self._marks:
            seconds = self._last.elapsed_time(mark) / 1000 if self.cuda else mark - self._last
            self._last = mark
            self.parts[epoch][part] += seconds
            self._step += seconds
            self._waited += seconds if part == "waits" else 0.0
            if self._between is not None and not away:
                self._between += seconds
            if what == BEGIN:
                self._step = self._waited = 0.0
            elif what:
                self._count(what)
        self._marks.clear()

    def _count(self, key: str) -> None:
        """Count the step or batch that has just ended."""
        self.by_shape[key].append(self._step)
        if not key.startswith("train"):
            self._firsts.setdefault(key, self._step - self._waited)
            return
        self.recent.append((self._step, self._waited))
        if not any(one.startswith("train") for one in self._firsts):
            self._firsts[key], self._gap = self._step - self._waited, self._between
        self._between = 0.0

    def end_epoch(self) -> dict[str, Any]:
        """Close the epoch, but for its checkpoint. Returns what its row says of it: see `row`."""
        self.settle()
        parts = self.parts[self.epoch]
        for key, seconds in self._firsts.items():
            median = statistics.median(self.by_shape[key])
            more = max(0.0, seconds - median)
            parts[KINDS[key.partition(" ")[0]]] -= more
            parts["switches"] += more
            if key.startswith("train") and self._gap is not None:
                self.gaps[self.epoch] = max(0.0, self._gap - median) / median
        self._firsts, self._gap = {}, None
        return self.row(self.epoch)

    def row(self, epoch: int) -> dict[str, Any]:
        """Return the parts of an epoch in seconds, and the gap before it in steps, None where no epoch was before.

        The gap is the time from the last step of the epoch before to the end of this one's first, without validation,
        saving and a median step, divided by this phase's median step.
        """
        return {"where": dict(self.parts[epoch]), "gap_steps": self.gaps.get(epoch)}

    def stretch(self) -> tuple[float, float]:
        """Return the median seconds of a training step and of its waits since the last call."""
        middle = [statistics.median(one) for one in zip(*self.recent, strict=True)] or [0.0, 0.0]
        self.recent.clear()
        return middle[0], middle[1]

    @property
    def wall(self) -> float:
        """Seconds from the first step until now, those of earlier attempts added."""
        return self.before + (time.perf_counter() - self.first if self.first is not None else 0.0)

    @property
    def waited(self) -> float:
        """Seconds of all waits for images."""
        return sum(parts["waits"] for parts in self.parts.values())

    def seconds(self, kind: str) -> float:
        """Seconds of all steps of one kind, "train" or "val"."""
        return sum(sum(one) for key, one in self.by_shape.items() if key.startswith(kind))

    @property
    def useful(self) -> float:
        """Seconds of all steps and validation batches, had each taken the median time of its shape."""
        return sum(len(one) * statistics.median(one) for one in self.by_shape.values() if one)

    def goodput(self) -> float:
        """Every step and validation batch at the median time of its shape, over the wall time from first to last."""
        return min(1.0, self.useful / self.wall) if self.wall else 0.0

    def where(self) -> dict[str, Any]:
        """Return the run's table so far: see `where`."""
        return where(self.wall, self.parts, self.gaps, self.start)

    def summary(self) -> dict[str, Any]:
        """Return the table of all of the run, with the seconds by which steps and batches were `slower` than at their
        medians: what keeps goodput down and is in "steps" and "validation"."""
        self.settle()
        found = self.where()
        same = sum(found["parts"][part]["seconds"] for part in ("steps", "validation"))
        return {**found, "slower": max(0.0, same - self.useful)}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, up to this moment."""
        self.settle()
        return {
            "by_shape": {key: list(one) for key, one in self.by_shape.items()},
            "parts": {epoch: dict(one) for epoch, one in self.parts.items()},
            "gaps": dict(self.gaps),
            "start": dict(self.start),
            "firsts": dict(self._firsts),
            "gap": self._gap,
            "wall": self.wall,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's numbers."""
        self.by_shape.update({key: list(one) for key, one in state["by_shape"].items()})
        self.parts.update({int(epoch): dict(one) for epoch, one in state["parts"].items()})
        self.gaps = {int(epoch): one for epoch, one in state["gaps"].items()}
        self.start, self.before = dict(state["start"]), state["wall"]
        self._firsts, self._gap = dict(state["firsts"]), state["gap"]


def where(
    wall: float, parts: Mapping[int, Mapping[str, float]], gaps: Mapping[int, float], start: Mapping[str, float]
) -> dict[str, Any]:
    """Return where `wall` seconds went as plain data.

    `parts` has for each part its seconds, and the epoch that had most of it with its share of them; `gap` the largest
    gap between two epochs in steps, and the epoch after it; `start` the seconds before the first step of all.
    """
    rows = {}
    for part in PARTS:
        most = max(parts, key=lambda epoch: parts[epoch][part], default=0)
        seconds = sum(one[part] for one in parts.values())
        rows[part] = {"seconds": seconds, "epoch": most, "most": parts[most][part] if most else 0.0}
    worst = max(gaps, key=lambda epoch: gaps[epoch], default=0)
    return {
        "wall": wall,
        "parts": rows,
        "gap": {"steps": gaps[worst], "epoch": worst} if gaps else None,
        "start": dict(start),
    }
