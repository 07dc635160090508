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

TIME_PARTS = ("steps", "waits", "validation", "switches", "checkpoints", "other")
PART_OF_KIND = {"train": "steps", "val": "validation"}
BEGIN_MARK = "begin"
Item = TypeVar("Item")
Shape = tuple[int, ...]


class TimeBreakdown:
    """Seconds of each training step and validation batch by shape, and of each part by epoch (counted from 1).

    A step is a whole one, from asking for its images to its end, as the systems of 2018 logged it.
    """

    def __init__(self, device: torch.device) -> None:
        self.uses_cuda = device.type == "cuda"
        self.seconds_by_shape: dict[str, list[float]] = defaultdict(list)
        self.part_seconds_by_epoch: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(TIME_PARTS, 0.0))
        self.gap_steps_by_epoch: dict[
            int, float
        ] = {}  # steps from the last one of the epoch before to the first of this one
        self.startup_seconds: dict[str, float] = {}  # seconds before the first step, by what they went into
        self.earlier_wall_seconds = 0.0  # seconds from the first step to the last of earlier attempts
        self.first_step_time: float | None = None
        self.epoch = 0
        self.recent_steps: list[tuple[float, float]] = []  # seconds of a step, and of its waits
        self._part_stack = ["other"]
        self._marks: list[tuple[int, str, bool, str, Any]] = []  # that were not read yet
        self._last_mark: Any = None
        self._step_seconds = self._step_wait_seconds = 0.0  # of the step whose marks are being read
        self._first_seconds: dict[
            str, float
        ] = {}  # first step, and first batch of each shape, in this epoch, without waits
        self._seconds_since_step: float | None = None  # since the last step: what is neither validation nor saving
        self._gap_seconds: float | None = None  # what that was at the end of the epoch's first step

    # --- while it happens ------------------------------------------------------------------------------------------

    def begin_epoch(self, number: int) -> None:
        """What comes belongs to this epoch."""
        self._mark()
        self.epoch = number

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """A context whose time belongs to a part, but for what a context inside takes from it."""
        self._mark()
        self._part_stack.append(part)
        try:
            yield
        finally:
            self._mark()
            self._part_stack.pop()

    def next_batch(self, batches: Iterator[Item]) -> Item:
        """Take the next batch and note how long that took."""
        with self.measure("waits"):
            return next(batches)

    def begin_step(self, kind: str) -> None:
        """A training step ("train") or a validation batch ("val") begins."""
        if self.first_step_time is None:
            self.first_step_time, self._last_mark = time.perf_counter(), self._now()
        self._mark(BEGIN_MARK)
        self._part_stack.append(PART_OF_KIND[kind])

    def end_step(self, kind: str, shape: Shape) -> None:
        """It ends; its time counts under its shape."""
        self._mark(f"{kind} {' '.join(map(str, shape))}")
        self._part_stack.pop()

    def _now(self) -> Any:
        if not self.uses_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _mark(self, label: str = "") -> None:
        """Close the time since the last mark; before the first step nothing is counted."""
        if self._last_mark is not None:
            away = "validation" in self._part_stack or "checkpoints" in self._part_stack
            self._marks.append((self.epoch, self._part_stack[-1], away, label, self._now()))

    # --- afterwards ------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Turn the marks since the last call into seconds. On a GPU waits for it."""
        self._mark()
        if self.uses_cuda and self._marks:
            self._marks[-1][-1].synchronize()
        for epoch, part, away, what, mark in self._marks:
            seconds = self._last_mark.elapsed_time(mark) / 1000 if self.uses_cuda else mark - self._last_mark
            self._last_mark = mark
            self.part_seconds_by_epoch[epoch][part] += seconds
            self._step_seconds += seconds
            self._step_wait_seconds += seconds if part == "waits" else 0.0
            if self._seconds_since_step is not None and not away:
                self._seconds_since_step += seconds
            if what == BEGIN_MARK:
                self._step_seconds = self._step_wait_seconds = 0.0
            elif what:
                self._count_step(what)
        self._marks.clear()

    def _count_step(self, key: str) -> None:
        """Count the step or batch that has just ended."""
        self.seconds_by_shape[key].append(self._step_seconds)
        if not key.startswith("train"):
            self._first_seconds.setdefault(key, self._step_seconds - self._step_wait_seconds)
            return
        self.recent_steps.append((self._step_seconds, self._step_wait_seconds))
        if not any(one.startswith("train") for one in self._first_seconds):
            self._first_seconds[key], self._gap_seconds = (
                self._step_seconds - self._step_wait_seconds,
                self._seconds_since_step,
            )
        self._seconds_since_step = 0.0

    def end_epoch(self) -> dict[str, Any]:
        """Close the epoch, but for its checkpoint. Returns what its row says of it: see `row`."""
        self.flush()
        parts = self.part_seconds_by_epoch[self.epoch]
        for key, seconds in self._first_seconds.items():
            median = statistics.median(self.seconds_by_shape[key])
            more = max(0.0, seconds - median)
            parts[PART_OF_KIND[key.partition(" ")[0]]] -= more
            parts["switches"] += more
            if key.startswith("train") and self._gap_seconds is not None:
                self.gap_steps_by_epoch[self.epoch] = max(0.0, self._gap_seconds - median) / median
        self._first_seconds, self._gap_seconds = {}, None
        return self.epoch_times(self.epoch)

    def epoch_times(self, epoch: int) -> dict[str, Any]:
        """Return the parts of an epoch in seconds, and the gap before it in steps, None where no epoch was before.

        The gap is the time from the last step of the epoch before to the end of this one's first, without validation,
        saving and a median step, divided by this phase's median step.
        """
        return {"where": dict(self.part_seconds_by_epoch[epoch]), "gap_steps": self.gap_steps_by_epoch.get(epoch)}

    def pop_recent_medians(self) -> tuple[float, float]:
        """Return the median seconds of a training step and of its waits since the last call."""
        middle = [statistics.median(one) for one in zip(*self.recent_steps, strict=True)] or [0.0, 0.0]
        self.recent_steps.clear()
        return middle[0], middle[1]

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first step until now, those of earlier attempts added."""
        return self.earlier_wall_seconds + (
            time.perf_counter() - self.first_step_time if self.first_step_time is not None else 0.0
        )

    @property
    def wait_seconds(self) -> float:
        """Seconds of all waits for images."""
        return sum(parts["waits"] for parts in self.part_seconds_by_epoch.values())

    def seconds_of_kind(self, kind: str) -> float:
        """Seconds of all steps of one kind, "train" or "val"."""
        return sum(sum(one) for key, one in self.seconds_by_shape.items() if key.startswith(kind))

    @property
    def useful_seconds(self) -> float:
        """Seconds of all steps and validation batches, had each taken the median time of its shape."""
        return sum(len(one) * statistics.median(one) for one in self.seconds_by_shape.values() if one)

    def goodput(self) -> float:
        """Every step and validation batch at the median time of its shape, over the wall time from first to last."""
        return min(1.0, self.useful_seconds / self.wall_seconds) if self.wall_seconds else 0.0

    def breakdown(self) -> dict[str, Any]:
        """Return the run's table so far: see `where`."""
        return build_breakdown(
            self.wall_seconds, self.part_seconds_by_epoch, self.gap_steps_by_epoch, self.startup_seconds
        )

    def summary(self) -> dict[str, Any]:
        """Return the table of all of the run, with the seconds by which steps and batches were `slower` than at their
        medians: what keeps goodput down and is in "steps" and "validation"."""
        self.flush()
        found = self.breakdown()
        same = sum(found["parts"][part]["seconds"] for part in ("steps", "validation"))
        return {**found, "slower": max(0.0, same - self.useful_seconds)}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, up to this moment."""
        self.flush()
        return {
            "by_shape": {key: list(one) for key, one in self.seconds_by_shape.items()},
            "parts": {epoch: dict(one) for epoch, one in self.part_seconds_by_epoch.items()},
            "gaps": dict(self.gap_steps_by_epoch),
            "start": dict(self.startup_seconds),
            "firsts": dict(self._first_seconds),
            "gap": self._gap_seconds,
            "wall": self.wall_seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's numbers."""
        self.seconds_by_shape.update({key: list(one) for key, one in state["by_shape"].items()})
        self.part_seconds_by_epoch.update({int(epoch): dict(one) for epoch, one in state["parts"].items()})
        self.gap_steps_by_epoch = {int(epoch): one for epoch, one in state["gaps"].items()}
        self.startup_seconds, self.earlier_wall_seconds = dict(state["start"]), state["wall"]
        self._first_seconds, self._gap_seconds = dict(state["firsts"]), state["gap"]


def build_breakdown(
    wall_seconds: float,
    part_seconds_by_epoch: Mapping[int, Mapping[str, float]],
    gap_steps_by_epoch: Mapping[int, float],
    startup_seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Return where `wall` seconds went as plain data.

    `parts` has for each part its seconds, and the epoch that had most of it with its share of them; `gap` the largest
    gap between two epochs in steps, and the epoch after it; `start` the seconds before the first step of all.
    """
    rows = {}
    for part in TIME_PARTS:
        most = max(part_seconds_by_epoch, key=lambda epoch: part_seconds_by_epoch[epoch][part], default=0)
        seconds = sum(one[part] for one in part_seconds_by_epoch.values())
        rows[part] = {"seconds": seconds, "epoch": most, "most": part_seconds_by_epoch[most][part] if most else 0.0}
    worst = max(gap_steps_by_epoch, key=lambda epoch: gap_steps_by_epoch[epoch], default=0)
    return {
        "wall": wall_seconds,
        "parts": rows,
        "gap": {"steps": gap_steps_by_epoch[worst], "epoch": worst} if gap_steps_by_epoch else None,
        "start": dict(startup_seconds),
    }
