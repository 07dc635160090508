"""Which images each step used, written down and checked: every image once an epoch, over any number of attempts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from train.data.order.usage_log import USAGE_FOLDER, UsageLog, find_usage_errors

EPOCHS, STEPS, BATCH = 2, 3, 4  # 12 images, by 4, on two processes


def write(folder: Path, attempt: int, steps: range, world: int = 2) -> None:
    """Let an attempt of so many processes have done these steps, counted over the run."""
    for rank in range(world):
        notes = UsageLog(folder, attempt, rank)
        for step in steps:
            first = step % STEPS * BATCH
            notes.record_step(step, step // STEPS, list(range(first, first + BATCH))[rank::world])


def wrong(folder: Path, first_steps: dict[int, int]) -> list[str]:
    return find_usage_errors(folder / USAGE_FOLDER, first_steps, STEPS * BATCH, dict.fromkeys(range(EPOCHS), STEPS))


def test_one_attempt_that_uses_each_image_once_is_right(tmp_path: Path) -> None:
    write(tmp_path, 1, range(6))
    assert wrong(tmp_path, {1: 0}) == []


def test_steps_that_a_later_attempt_did_again_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 1, range(5))
    write(tmp_path, 2, range(2, 4), world=1)
    write(tmp_path, 3, range(3, 6), world=3)
    assert wrong(tmp_path, {1: 0, 2: 2, 3: 3}) == []


def test_an_attempt_that_made_no_step_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1, range(4))
    write(tmp_path, 3, range(2, 6))
    assert wrong(tmp_path, {1: 0, 2: 2, 3: 2}) == []


def test_half_a_line_at_the_end_of_a_killed_process_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1, range(6))
    with (tmp_path / USAGE_FOLDER / "000001-rank-0.jsonl").open("a") as file:
        file.write('{"step": 6, "epo')
    assert wrong(tmp_path, {1: 0}) == []


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "000002-rank-1.jsonl").unlink(), ["epoch 2: 0 images twice or more, 6 not at all"]),
        (lambda folder: UsageLog(folder.parent, 2, 7).record_step(4, 1, [5]), ["epoch 2: 1 images twice or more, 0 not at all"]),
        (lambda folder: [path.unlink() for path in folder.glob("000002*")],
         ["epoch 2: 0 of 3 steps are written down", "epoch 2: 0 images twice or more, 12 not at all"]),
        (lambda folder: [path.unlink() for path in folder.glob("000001*")],
         ["epoch 1: 0 of 3 steps are written down", "epoch 1: 0 images twice or more, 12 not at all"]),
    ],
    ids=["a process is missing", "an image twice", "an attempt is missing", "the first is missing"],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, harm: Callable[[Path], object], said: list[str]) -> None:
    write(tmp_path, 1, range(3))
    write(tmp_path, 2, range(3, 6))
    assert wrong(tmp_path, {1: 0, 2: 3}) == []
    harm(tmp_path / USAGE_FOLDER)
    assert wrong(tmp_path, {1: 0, 2: 3}) == said


def test_a_resume_one_step_too_late_or_too_early_is_found(tmp_path: Path) -> None:
    write(tmp_path, 1, range(4))
    write(tmp_path, 2, range(3, 6))
    assert wrong(tmp_path, {1: 0, 2: 3}) == []
    assert wrong(tmp_path, {1: 0, 2: 4}) == ["epoch 2: 4 images twice or more, 0 not at all"]
    assert wrong(tmp_path, {1: 0, 2: 2}) == [
        "epoch 1: 2 of 3 steps are written down", "epoch 1: 0 images twice or more, 4 not at all",
    ]  # fmt: skip


def test_a_step_of_the_wrong_images_is_found(tmp_path: Path) -> None:
    write(tmp_path, 1, range(5))
    for rank in (0, 1):
        UsageLog(tmp_path, 1, rank).record_step(5, 1, [0, 1, 2, 3][rank::2])
    assert wrong(tmp_path, {1: 0}) == ["epoch 2: 4 images twice or more, 4 not at all"]
