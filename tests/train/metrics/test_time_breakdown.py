"""Where the wall time goes: by step, by part, by epoch, through checkpoints, as a table."""

import json
from typing import Any

import pytest
import torch

from train.metrics import text
from train.metrics.time_breakdown import TIME_PARTS, TimeBreakdown

CPU = torch.device("cpu")


def take(own: TimeBreakdown, clock: Any, kind: str, shape: tuple[int, ...], wait: float, work: float) -> None:
    """A step or batch that waits and works for so many seconds."""
    own.begin_step(kind)

    def slow() -> Any:
        clock.now += wait
        yield "batch"

    assert own.next_batch(slow()) == "batch"
    clock.now += work
    own.end_step(kind, shape)


def an_epoch(own: TimeBreakdown, clock: Any, number: int, first: float = 1.0, steps: int = 4, wait: float = 0.0) -> Any:
    """Steps of 1 s, the first one longer, a batch of 3 s after one of 5, 0.5 s of sums, 2 s of saving after it."""
    own.begin_epoch(number)
    for step in range(steps):
        take(own, clock, "train", (8, 32), 0.0 if step else wait, 1.0 if step else first)
        clock.now += 0.25 if step == 1 else 0.0
    with own.measure("validation"):
        for work in (5.0, 3.0, 3.0):
            take(own, clock, "val", (8, 32), 0.5, work)
            clock.now += 0.25
    clock.now += 0.25
    row = own.end_epoch()
    with own.measure("checkpoints"):
        clock.now += 2.0
    return row


def test_a_step_lasts_from_asking_for_its_images_to_its_end(clock: Any) -> None:
    own = TimeBreakdown(CPU)
    for wait, work in ((0.5, 1.0), (0.0, 1.0), (0.25, 3.0)):
        take(own, clock, "train", (1, 8, 32, 32, 3), wait, work)
    take(own, clock, "val", (8, 32, 32, 3), 1.0, 2.0)
    own.flush()
    assert own.seconds_of_kind("train") == pytest.approx(5.75) and own.seconds_of_kind("val") == pytest.approx(3.0)
    assert own.wait_seconds == pytest.approx(1.75)
    assert own.pop_recent_medians() == (pytest.approx(1.5), pytest.approx(0.25))
    assert own.pop_recent_medians() == (0.0, 0.0)


def test_goodput_is_every_step_at_the_median_of_its_shape_over_the_wall_time(clock: Any) -> None:
    own = TimeBreakdown(CPU)
    for work in (1.0, 1.0, 4.0):  # a hiccup of 3 s
        take(own, clock, "train", (8, 32), 0.0, work)
    for work in (2.0, 2.0):
        take(own, clock, "train", (8, 64), 0.0, work)
    clock.now += 5  # a save
    take(own, clock, "val", (8, 64), 0.0, 1.0)
    own.flush()
    assert own.wall_seconds == pytest.approx(16)
    assert own.goodput() == pytest.approx((3 * 1 + 2 * 2 + 1) / 16)


def test_time_before_the_first_step_does_not_count(clock: Any) -> None:
    own = TimeBreakdown(CPU)
    assert own.goodput() == 0 and own.wall_seconds == 0
    own.begin_epoch(1)
    with own.measure("checkpoints"):
        clock.now += 50
    take(own, clock, "train", (8, 32), 0.0, 1.0)
    own.flush()
    assert own.goodput() == 1.0 and own.part_seconds_by_epoch[1] == {**dict.fromkeys(TIME_PARTS, 0.0), "steps": 1.0}


def test_each_second_of_an_epoch_is_in_the_part_that_took_it(clock: Any) -> None:
    own = TimeBreakdown(CPU)
    row = an_epoch(own, clock, 1, first=3.5, wait=0.75)
    assert row["gap_steps"] is None, "no epoch was before"
    # Medians with their waits: 1 s of a step, 3.5 s of a batch.
    expected = {"steps": 4.0, "waits": 2.25, "validation": 10.25, "switches": 2.5 + 1.5, "other": 0.5}
    assert row["where"] == pytest.approx({**expected, "checkpoints": 0.0})
    own.flush()
    assert own.epoch_times(1)["where"] == pytest.approx({**expected, "checkpoints": 2.0}), (
        "the save after it is its own"
    )
    assert sum(own.epoch_times(1)["where"].values()) == pytest.approx(own.wall_seconds)


def test_a_gap_is_what_lies_between_two_epochs_but_for_validation_and_saving_in_steps(clock: Any) -> None:
    own = TimeBreakdown(CPU)
    an_epoch(own, clock, 1)
    clock.now += 0.5
    row = an_epoch(own, clock, 2, first=1.5, wait=0.75)
    # 0.25 s after the validation, 0.5 s before the step, 0.75 s of waiting in it, and half a second too long.
    assert row["gap_steps"] == pytest.approx(2.0)
    own.flush()
    table = own.breakdown()
    assert table["gap"] == {"steps": pytest.approx(2.0), "epoch": 2}
    assert (table["parts"]["waits"]["epoch"], table["parts"]["waits"]["most"]) == (2, pytest.approx(2.25))
    assert table["parts"]["checkpoints"]["seconds"] == pytest.approx(4.0)


def test_the_parts_of_a_run_are_its_wall_time_also_after_a_resume(clock: Any) -> None:
    first = TimeBreakdown(CPU)
    first.startup_seconds = {"indexing": 2.0}
    an_epoch(first, clock, 1)
    first.begin_epoch(2)
    take(first, clock, "train", (8, 32), 0.5, 4.0)
    with first.measure("checkpoints"):
        clock.now += 1
        stored = json.loads(json.dumps(first.state()))
        clock.now += 100  # of writing, when it was killed
    again = TimeBreakdown(CPU)
    again.restore(stored)
    assert again.wall_seconds == 19.75 + 5.5 and again.wait_seconds == pytest.approx(2.0)
    again.begin_epoch(2)
    for _ in range(2):
        take(again, clock, "train", (8, 32), 0.0, 1.0)
    row = again.end_epoch()
    table = again.breakdown()
    assert sum(one["seconds"] for one in table["parts"].values()) == pytest.approx(again.wall_seconds) == 27.25
    assert row["where"]["switches"] == pytest.approx(3.0) and row["where"]["steps"] == pytest.approx(3.0)
    assert row["gap_steps"] == pytest.approx(0.25 + 0.5 + 3.0) and table["start"] == {"indexing": 2.0}
    assert again.goodput() == pytest.approx((7 * 1.0 + 3 * 3.5) / 27.25)
    assert len(first.seconds_by_shape["train 8 32"]) == 5  # the stored lists are copies


def test_a_run_that_only_has_its_result_to_write_knows_its_times(clock: Any) -> None:
    first = TimeBreakdown(CPU)
    an_epoch(first, clock, 1)
    stored, goodput = first.state(), first.goodput()
    again = TimeBreakdown(CPU)
    again.restore(stored)
    clock.now += 1000
    again.flush()
    assert again.goodput() == pytest.approx(goodput) and again.breakdown() == {
        **first.breakdown(),
        "wall": stored["wall"],
    }


def test_the_table_as_text_names_the_worst_epochs_and_fits_a_terminal(clock: Any) -> None:
    own = TimeBreakdown(CPU)
    own.startup_seconds = {"starting": 3.25, "indexing": 10.0, "joining": 0.5, "warming": 1.25}
    for number in (1, 2, 3):
        an_epoch(own, clock, number, first=1.0 if number == 1 else 1e4)
    lines = text.time_breakdown_lines({**own.breakdown(), "pauses": 12.5}, own.goodput())
    assert all(len(line) <= 79 for line in lines)
    shown = "\n".join(lines)
    assert "epoch 2: 10000.50 s" in shown and "before epoch 2" in shown and "pauses of losses" in shown
    assert [line.split()[-1] for line in lines[-5:]] == ["15.00", "3.25", "10.00", "0.50", "1.25"]
    assert f"goodput {own.goodput():.1%}" in shown
    empty = text.time_breakdown_lines(TimeBreakdown(CPU).breakdown())
    assert "first step to last" in empty[-1] and not any("epoch" in line for line in empty[1:])


def test_on_a_gpu_the_marks_are_events_that_are_read_only_when_the_host_waits_anyway(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU whose clock is ours; it works for as long as the host asks, after the host has gone on."""
    synced: list[float] = []
    gpu = type(clock)()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            gpu.now = self.at = max(gpu.now, clock.now)

        def synchronize(self) -> None:
            synced.append(self.at)

        def elapsed_time(self, end: "Event") -> float:
            assert synced and synced[-1] >= end.at, "read before the GPU was there"
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    own = TimeBreakdown(torch.device("cuda"))
    own.begin_epoch(1)
    for wait in (0.0, 0.5, 5.0):  # 2 s of work a step hide a wait of half a second, and 3.3 s of a longer one
        own.begin_step("train")
        clock.now += 0.05
        with own.measure("waits"):
            clock.now += wait
        gpu.now = max(gpu.now, clock.now) + 2.0
        clock.now += 0.05
        own.end_step("train", (8, 32))
    assert not synced
    row = own.end_epoch()["where"]
    assert len(synced) == 1
    assert row == pytest.approx({**dict.fromkeys(TIME_PARTS, 0.0), "steps": 2.05 + 2.0 + 2.0, "waits": 1.7})
    assert own.seconds_of_kind("train") == pytest.approx(7.75)
