"""Where the wall time of a run goes: each moment from the first step to the last belongs to one part.

    steps         training, without the parts named below
    waits         for images that are not ready, in training and in validation
    validation    without its waits
    switches      the warm-up of a later phase; and what the first step of an epoch, and the first batch of each shape
                  in a validation, take above the median of their shape: memory is allocated, caches are cold
    checkpoints   what this process spends in saving: statistics gathered, the state copied, the last file waited for
    other         the rest: sums over all processes, logs

No step waits for these measurements. On a GPU the marks between the parts are events on the GPU's own clock. They are
read in `flush`, when the host waits anyway. A wait of the host during which the GPU still has work to do is no wait.
"""

import contextlib
import copy
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from .time_table import EpochGap, PartTime, TimePart, TimeTable

PART_OF_KIND = {"train": TimePart.STEPS, "val": TimePart.VALIDATION}
BEGIN_MARK = "begin"
BUSY_INTERVALS = 10  # of about a second each; a rank that is stopped now and then is slow too
Item = TypeVar("Item")
Shape = tuple[int, ...]
Moment = float | torch.cuda.Event  # seconds of `time.perf_counter`, or a mark on the GPU's own clock


@dataclass(frozen=True)
class _Mark:
    """A point in time between two parts.

    `part` is what the time before it belongs to; `outside_training` whether that is validation or saving, or within
    them; `label` is `BEGIN_MARK` where a step begins, its kind and shape where it ends, "" elsewhere.
    """

    epoch: int
    part: TimePart
    outside_training: bool
    label: str
    time: Moment


@dataclass(frozen=True, kw_only=True)
class EpochTimes:
    """The seconds of an epoch by part, and the gap before it in steps; None without an epoch before.

    The gap is the time from the last step of the epoch before to the end of this epoch's first step, without
    validation, saving and a median step, divided by the median step of this phase.
    """

    where: dict[str, float]
    gap_steps: float | None


@dataclass(kw_only=True)
class TimeState:
    """What a checkpoint stores of the measurements.

    `seconds_by_shape` has the seconds of each step and batch; the key is its kind and shape, such as "train 8 32".
    `gap_steps_by_epoch`: see `EpochTimes`. `startup_seconds` are those before the first step, by use. `first_seconds`,
    without waits, are those of the current epoch's first step and first batch of each shape, after `gap_seconds`.
    """

    seconds_by_shape: dict[str, list[float]] = field(default_factory=dict)
    part_seconds_by_epoch: dict[int, dict[str, float]] = field(default_factory=dict)
    gap_steps_by_epoch: dict[int, float] = field(default_factory=dict)
    startup_seconds: dict[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0
    first_seconds: dict[str, float] = field(default_factory=dict)
    gap_seconds: float | None = None


class TimeBreakdown:
    """Measures a run: the seconds of each training step and validation batch by shape, and of each part by epoch.

    A step lasts from the request for its images to its end, as the trainers of 2018 logged it. Epochs count from 1.
    """

    def __init__(self, device: torch.device) -> None:
        self.uses_cuda = device.type == "cuda"
        self.measured = TimeState()  # its `wall_seconds` are those of earlier attempts
        self.first_step_time: float | None = None
        self.epoch = 0
        self.recent_steps: list[tuple[float, float]] = []  # seconds of a step, and of its waits
        # Of the last intervals between two calls of `pop_recent_medians`: seconds of all steps, and of all waits for
        # other ranks in them.
        self.recent_intervals: deque[tuple[float, float]] = deque(maxlen=BUSY_INTERVALS)
        self._gradients_ready: Moment | None = None  # in the step that is under way
        self._rank_waits: list[tuple[Moment, Moment]] = []  # begin and end of each wait for other ranks, not read yet
        self._rank_wait_seconds = 0.0  # since the last call of `pop_recent_medians`
        self._part_stack = [TimePart.OTHER]
        self._marks: list[_Mark] = []  # marks that are not read yet
        self._last_mark_time: Moment | None = None
        # Of the step whose marks are being read:
        self._step_seconds = 0.0
        self._step_wait_seconds = 0.0
        self._seconds_since_step: float | None = None  # since the last step, without validation and saving

    # --- while it happens ------------------------------------------------------------------------------------------

    def begin_epoch(self, number: int) -> None:
        """Count what follows for this epoch."""
        self._mark()
        self.epoch = number

    @contextlib.contextmanager
    def measure(self, part: TimePart) -> Iterator[None]:
        """Count the time within the `with` block for a part, but for what an inner block counts for another."""
        self._mark()
        self._part_stack.append(part)
        try:
            yield
        finally:
            self._mark()
            self._part_stack.pop()

    def next_batch(self, batches: Iterator[Item]) -> Item:
        """Return the next batch, and count the time that it took as a wait."""
        with self.measure(TimePart.WAITS):
            return next(batches)

    def begin_step(self, kind: str) -> None:
        """Begin a training step ("train") or a validation batch ("val")."""
        if self.first_step_time is None:
            self.first_step_time = time.perf_counter()
            self._last_mark_time = self._now()
        self._mark(BEGIN_MARK)
        self._part_stack.append(PART_OF_KIND[kind])

    def end_step(self, kind: str, shape: Shape) -> None:
        """End the step or batch, and count its time under its shape."""
        self._mark(f"{kind} {' '.join(map(str, shape))}")
        self._part_stack.pop()

    def gradients_ready(self) -> None:
        """Note that this rank has computed its gradients: from here on, the step waits for the other ranks."""
        self._gradients_ready = self._now()

    def gradients_summed(self) -> None:
        """Note that the gradients have been summed over all ranks."""
        if self._gradients_ready is not None:
            self._rank_waits.append((self._gradients_ready, self._now()))
            self._gradients_ready = None

    def _now(self) -> Moment:
        if not self.uses_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _mark(self, label: str = "") -> None:
        """End the time since the last mark. Before the first step nothing is counted."""
        if self._last_mark_time is not None:
            outside_training = TimePart.VALIDATION in self._part_stack or TimePart.CHECKPOINTS in self._part_stack
            self._marks.append(_Mark(self.epoch, self._part_stack[-1], outside_training, label, self._now()))

    # --- afterwards ------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Turn the marks since the last call into seconds. On a GPU, wait until it has passed them."""
        self._mark()
        self._read_marks()

    def abandon_step(self) -> float:
        """Count nothing after the end of the last training step: a failure has met what followed, which is done again.

        The job counts that time as lost. Returns when that step ended, by `time.perf_counter`; of steps that were
        flushed, when that was. To be called once, before the state is taken, when a GPU has nothing to do any more.
        """
        while self._marks and not self._marks[-1].label.startswith("train"):
            self._marks.pop()
        self._read_marks()
        now = time.perf_counter()
        end = self._last_mark_time if isinstance(self._last_mark_time, float) else now
        if isinstance(self._last_mark_time, torch.cuda.Event) and isinstance(mark := self._now(), torch.cuda.Event):
            mark.synchronize()
            end = now - _seconds_between(self._last_mark_time, mark)
        if self.first_step_time is not None:
            self.first_step_time += now - end
        self._last_mark_time = None
        return end

    def _read_marks(self) -> None:
        if self._marks and isinstance(self._marks[-1].time, torch.cuda.Event):
            self._marks[-1].time.synchronize()
        for mark in self._marks:
            assert self._last_mark_time is not None
            seconds = _seconds_between(self._last_mark_time, mark.time)
            self._last_mark_time = mark.time
            self._parts_of(mark.epoch)[mark.part] += seconds
            self._step_seconds += seconds
            self._step_wait_seconds += seconds if mark.part is TimePart.WAITS else 0.0
            if self._seconds_since_step is not None and not mark.outside_training:
                self._seconds_since_step += seconds
            if mark.label == BEGIN_MARK:
                self._step_seconds = 0.0
                self._step_wait_seconds = 0.0
            elif mark.label:
                self._count_step(mark.label)
        self._marks.clear()
        self._rank_wait_seconds += sum(_seconds_between(begin, end) for begin, end in self._rank_waits)
        self._rank_waits.clear()

    def _count_step(self, key: str) -> None:
        """Count the step or batch that has just ended, by its key in `seconds_by_shape`."""
        measured = self.measured
        measured.seconds_by_shape.setdefault(key, []).append(self._step_seconds)
        seconds_without_waits = self._step_seconds - self._step_wait_seconds
        if not key.startswith("train"):
            measured.first_seconds.setdefault(key, seconds_without_waits)
            return
        self.recent_steps.append((self._step_seconds, self._step_wait_seconds))
        if not any(first_key.startswith("train") for first_key in measured.first_seconds):
            measured.first_seconds[key] = seconds_without_waits
            measured.gap_seconds = self._seconds_since_step
        self._seconds_since_step = 0.0

    def end_epoch(self) -> EpochTimes:
        """Close the epoch, except for its checkpoint, and return its times."""
        self.flush()
        parts, measured = self._parts_of(self.epoch), self.measured
        for key, seconds in measured.first_seconds.items():
            median = statistics.median(measured.seconds_by_shape[key])
            excess = max(0.0, seconds - median)
            parts[PART_OF_KIND[key.partition(" ")[0]]] -= excess
            parts[TimePart.SWITCHES] += excess
            if key.startswith("train") and measured.gap_seconds is not None:
                measured.gap_steps_by_epoch[self.epoch] = max(0.0, measured.gap_seconds - median) / median
        measured.first_seconds = {}
        measured.gap_seconds = None
        return self.epoch_times(self.epoch)

    def _parts_of(self, epoch: int) -> dict[str, float]:
        """Return the seconds of an epoch by part, to be changed in place."""
        return self.measured.part_seconds_by_epoch.setdefault(epoch, {str(part): 0.0 for part in TimePart})

    def epoch_times(self, epoch: int) -> EpochTimes:
        """Return the times of an epoch until now."""
        return EpochTimes(where=dict(self._parts_of(epoch)), gap_steps=self.measured.gap_steps_by_epoch.get(epoch))

    def pop_recent_medians(self) -> tuple[float, float]:
        """Return the median seconds of a training step and of its waits since the last call, 0 without any step."""
        if not self.recent_steps:
            return 0.0, 0.0
        steps, waits = zip(*self.recent_steps, strict=True)
        self.recent_steps.clear()
        self.recent_intervals.append((sum(steps), self._rank_wait_seconds))
        self._rank_wait_seconds = 0.0
        return statistics.median(steps), statistics.median(waits)

    def busy_share(self) -> float:
        """Return the share of the last intervals' steps in which this rank did not wait for other ranks."""
        step_seconds = sum(seconds for seconds, _ in self.recent_intervals)
        wait_seconds = sum(seconds for _, seconds in self.recent_intervals)
        return max(0.0, 1 - wait_seconds / step_seconds)

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first step until now, and those of earlier attempts."""
        own = time.perf_counter() - self.first_step_time if self.first_step_time is not None else 0.0
        return self.measured.wall_seconds + own

    @property
    def wait_seconds(self) -> float:
        """Seconds of all waits for images."""
        return sum(parts[TimePart.WAITS] for parts in self.measured.part_seconds_by_epoch.values())

    def _medians(self) -> list[tuple[float, list[float]]]:
        """Return for each shape the median of the seconds of its steps or batches, and these seconds."""
        return [(statistics.median(seconds), seconds) for seconds in self.measured.seconds_by_shape.values()]

    def goodput(self) -> float:
        """Return the seconds of all steps and batches at the median of their shape over the wall seconds, at most 1."""
        useful_seconds = sum(median * len(seconds) for median, seconds in self._medians())
        return min(1.0, useful_seconds / self.wall_seconds) if self.wall_seconds else 0.0

    def table(self) -> TimeTable:
        """Return the table of the run so far."""
        seconds_by_epoch, gaps = self.measured.part_seconds_by_epoch, self.measured.gap_steps_by_epoch
        parts = {}
        for part in TimePart:
            worst_epoch = max(seconds_by_epoch, key=lambda epoch: seconds_by_epoch[epoch][part], default=0)
            parts[part] = PartTime(
                seconds=sum(seconds_by_part[part] for seconds_by_part in seconds_by_epoch.values()),
                epoch=worst_epoch,
                most=seconds_by_epoch[worst_epoch][part] if worst_epoch else 0.0,
            )
        widest = max(gaps, key=lambda epoch: gaps[epoch], default=0)
        gap = EpochGap(steps=gaps[widest], epoch=widest) if gaps else None
        return TimeTable(wall=self.wall_seconds, parts=parts, gap=gap, start=dict(self.measured.startup_seconds))

    def summary(self) -> TimeTable:
        """Return the table of the whole run, with the seconds by which steps and batches were above their median."""
        self.flush()
        slower = sum(max(0.0, each - median) for median, seconds in self._medians() for each in seconds)
        return replace(self.table(), slower=slower)

    def state(self) -> TimeState:
        """Return what a checkpoint stores of the measurements, up to this moment."""
        self.flush()
        return copy.deepcopy(replace(self.measured, wall_seconds=self.wall_seconds))

    def restore(self, state: TimeState) -> None:
        """Continue from the measurements in a checkpoint."""
        self.measured = copy.deepcopy(state)


def _seconds_between(earlier: Moment, later: Moment) -> float:
    """Return the seconds between two moments of the same clock."""
    if isinstance(earlier, torch.cuda.Event) and isinstance(later, torch.cuda.Event):
        return float(earlier.elapsed_time(later)) / 1000
    assert not isinstance(earlier, torch.cuda.Event) and not isinstance(later, torch.cuda.Event)
    return later - earlier
