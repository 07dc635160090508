"""Where the wall time goes: by step, by part and by epoch, over checkpoints, and as a table of text."""

import copy
from typing import Any

import pytest
import torch
from support.known import known

from train.metrics.time_breakdown import TimeBreakdown, TimeState
from train.metrics.time_table import TimePart
from train.tools.records import decode, encode

CPU = torch.device("cpu")


def run_step(times: TimeBreakdown, clock: Any, kind: str, shape: tuple[int, ...], wait: float, work: float) -> None:
    """Run a step or batch that waits and works for the given seconds."""
    times.begin_step(kind)

    def slow_batches() -> Any:
        clock.now += wait
        yield "batch"

    assert times.next_batch(slow_batches()) == "batch"
    clock.now += work
    times.end_step(kind, shape)


def run_epoch(
    times: TimeBreakdown, clock: Any, number: int, first: float = 1.0, steps: int = 4, wait: float = 0.0
) -> Any:
    """Run an epoch and return its row.

    Its steps take 1 s, but for the first; its validation batches 5, 3 and 3 s; sums 0.5 s, and saving 2 s at the end.
    """
    times.begin_epoch(number)
    for step in range(steps):
        run_step(times, clock, "train", (8, 32), 0.0 if step else wait, 1.0 if step else first)
        clock.now += 0.25 if step == 1 else 0.0
    with times.measure(TimePart.VALIDATION):
        for work in (5.0, 3.0, 3.0):
            run_step(times, clock, "val", (8, 32), 0.5, work)
            clock.now += 0.25
    clock.now += 0.25
    row = times.end_epoch()
    with times.measure(TimePart.CHECKPOINTS):
        clock.now += 2.0
    return row


def test_busy_share_is_the_part_of_the_steps_without_waits_for_other_ranks(clock: Any) -> None:
    times = TimeBreakdown(CPU)
    for step, wait in enumerate((3.0, 0.0, 0.0)):
        times.begin_step("train")
        clock.now += 1.0
        if step == 0:  # a chunk whose gradients are not summed: the mark of the last one counts
            times.gradients_ready()
            clock.now += 1.0
        times.gradients_ready()
        clock.now += wait
        times.gradients_summed()
        times.end_step("train", (8, 32))
    times.flush()
    times.pop_recent_medians()
    assert times.busy_share() == pytest.approx(4 / 7)  # in the mean, not the median: a rank that is stopped at times
    for _ in range(10):
        run_step(times, clock, "train", (8, 32), 5.0, 1.0)  # waiting for images is this rank's own slowness
        times.gradients_summed()
        times.flush()
        times.pop_recent_medians()
    assert times.busy_share() == 1.0


def test_end_epoch_assigns_each_second_to_its_part(clock: Any) -> None:
    times = TimeBreakdown(CPU)
    row = run_epoch(times, clock, 1, first=3.5, wait=0.75)
    assert row.gap_steps is None, "there was no epoch before"
    # Medians with their waits: 1 s of a step, 3.5 s of a batch.
    expected = {"steps": 4.0, "waits": 2.25, "validation": 10.25, "switches": 2.5 + 1.5, "other": 0.5}
    assert row.where == pytest.approx({**expected, "checkpoints": 0.0})
    times.flush()
    saved = times.epoch_times(1).where
    assert saved == pytest.approx({**expected, "checkpoints": 2.0}), "the checkpoint at its end belongs to the epoch"
    assert sum(times.epoch_times(1).where.values()) == pytest.approx(times.wall_seconds)


def test_parts_add_up_to_the_wall_time_after_a_resume(clock: Any) -> None:
    first = TimeBreakdown(CPU)
    first.measured.startup_seconds = {"indexing": 2.0}
    run_epoch(first, clock, 1)
    first.begin_epoch(2)
    run_step(first, clock, "train", (8, 32), 0.5, 4.0)
    with first.measure(TimePart.CHECKPOINTS):
        clock.now += 1
        state = copy.deepcopy(encode(first.state()))
        clock.now += 100  # written in the background until the run was killed
    resumed = TimeBreakdown(CPU)
    resumed.restore(decode(TimeState, state))
    assert resumed.wall_seconds == 19.75 + 5.5 and resumed.wait_seconds == pytest.approx(2.0)
    resumed.begin_epoch(2)
    for _ in range(2):
        run_step(resumed, clock, "train", (8, 32), 0.0, 1.0)
    row = resumed.end_epoch()
    table = resumed.summary()
    assert sum(part.seconds for part in table.parts.values()) == pytest.approx(resumed.wall_seconds) == 27.25
    assert row.where["switches"] == pytest.approx(3.0) and row.where["steps"] == pytest.approx(3.0)
    # From the last step to the end of the first one, without validation, saving and 1 s, the median of a step.
    assert row.gap_steps == known(table.gap).steps == pytest.approx(0.25 + 0.5 + 3.0) and known(table.gap).epoch == 2
    assert (table.parts[TimePart.WAITS].epoch, table.parts[TimePart.WAITS].most) == (1, pytest.approx(1.5))
    assert table.parts[TimePart.CHECKPOINTS].seconds == pytest.approx(3.0) and table.start == {"indexing": 2.0}
    assert resumed.goodput() == pytest.approx((7 * 1.0 + 3 * 3.5) / 27.25), "at the median of each shape"
    assert table.slower == pytest.approx(3.5 + 2.0)
    assert len(first.measured.seconds_by_shape["train 8 32"]) == 5  # the lists in the state are copies


@pytest.mark.parametrize("kind", ["train", "val"])
def test_time_after_the_last_step_is_not_counted_when_a_failure_has_met_what_follows(clock: Any, kind: str) -> None:
    times = TimeBreakdown(CPU)
    times.begin_epoch(1)
    for _ in range(2):
        run_step(times, clock, "train", (8, 32), 0.0, 1.0)
    if kind == "val":
        run_step(times, clock, "val", (8, 32), 0.0, 3.0)
    times.begin_step(kind)
    with times.measure(TimePart.WAITS):
        clock.now += 0.5
    clock.now += 5.0  # until the agent has ended the wait for a process that is gone
    times.abandon_step()
    state = times.state()
    assert state.wall_seconds == pytest.approx(2.0) == sum(state.part_seconds_by_epoch[1].values())
    assert state.seconds_by_shape == {"train 8 32": [1.0, 1.0]}


def test_flush_on_a_gpu_reads_events_with_one_synchronization(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake GPU has its own clock, and still works on its steps when the host has gone on."""
    synchronized: list[float] = []
    gpu = type(clock)(now=clock.now)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            gpu.now = self.at = max(gpu.now, clock.now)

        def synchronize(self) -> None:
            synchronized.append(self.at)

        def elapsed_time(self, end: "Event") -> float:
            assert synchronized and synchronized[-1] >= end.at, "read before the GPU had passed the event"
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = TimeBreakdown(torch.device("cuda"))
    times.begin_epoch(1)
    for wait in (0.0, 0.5, 5.0):  # the 2 s of work of a step hide a wait of 0.5 s, and 3.3 s of the wait of 5 s
        times.begin_step("train")
        clock.now += 0.05
        with times.measure(TimePart.WAITS):
            clock.now += wait
        gpu.now = max(gpu.now, clock.now) + 2.0
        clock.now += 0.05
        times.end_step("train", (8, 32))
    assert not synchronized
    row = times.end_epoch().where
    assert len(synchronized) == 1
    assert row == pytest.approx({**dict.fromkeys(TimePart, 0.0), "steps": 2.05 + 2.0 + 2.0, "waits": 1.7})
