"""Tests of the usage log: every image once per epoch, over any number of attempts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.specs import TINY

from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.usage_log import UsageLog, find_usage_errors
from train.recipe import Phase
from train.recipe.schedule import Schedule
from train.tools.agent_protocol import USAGE_FOLDER

EPOCHS, STEPS, BATCH = 2, 3, 4  # 12 images in steps of 4, on two ranks


def write_logs(folder: Path, attempt: int, steps: range, world: int = 2) -> None:
    for rank in range(world):
        log = UsageLog(folder, attempt, rank)
        for step in steps:
            first = step % STEPS * BATCH
            log.record_step(step, step // STEPS, list(range(first, first + BATCH))[rank::world])


def find_errors(folder: Path, first_steps: dict[int, int]) -> list[str]:
    return find_usage_errors(folder / USAGE_FOLDER, first_steps, STEPS * BATCH, dict.fromkeys(range(EPOCHS), STEPS))


def test_find_usage_errors_ignores_repeated_steps_and_attempts_without_steps(tmp_path: Path) -> None:
    write_logs(tmp_path, 1, range(5))
    write_logs(tmp_path, 2, range(2, 4), world=1)
    write_logs(tmp_path, 4, range(3, 6), world=3)
    assert find_errors(tmp_path, {1: 0, 2: 2, 3: 3, 4: 3}) == []  # attempt 3 did no step


LINE = {"step": 5, "epoch": 1, "ids": [11]}
WRONG_TYPES: list[dict[str, object]] = [
    {"step": "x"}, {"step": None}, {"epoch": [1]}, {"ids": 5}, {"ids": [[1]]}, {"ids": ["x"]}, {"ids": {}},
]  # fmt: skip
LOG_NAME = "000001-rank-0.jsonl"


OTHER_NAMES = ("evil.jsonl", "-rank-0.jsonl", f"{'9' * 200}-rank-0.jsonl", "000001-rank-x.jsonl")


@pytest.mark.parametrize(("name", "text"), [
    (LOG_NAME, '{"step": 6, "epo'),
    *((LOG_NAME, json.dumps({**LINE, **change}) + "\n") for change in WRONG_TYPES),
    *((name, json.dumps(LINE) + "\n") for name in OTHER_NAMES),
])  # fmt: skip
def test_find_usage_errors_ignores_damaged_lines_and_files_of_other_names(tmp_path: Path, name: str, text: str) -> None:
    write_logs(tmp_path, 1, range(6))
    with (tmp_path / USAGE_FOLDER / name).open("a") as file:
        file.write(text)
    assert find_errors(tmp_path, {1: 0}) == []


@pytest.mark.parametrize(("damage", "errors"), [
    pytest.param(lambda folder: (folder / "000002-rank-1.jsonl").unlink(),
                 ["epoch 2: 0 images used more than once, 6 not used"], id="rank missing"),
    pytest.param(lambda folder: UsageLog(folder.parent, 2, 7).record_step(4, 1, [5]),
                 ["epoch 2: 1 images used more than once, 0 not used"], id="image repeated"),
    pytest.param(lambda folder: [path.unlink() for path in folder.glob("000002*")],
                 ["epoch 2: 0 of 3 steps are in the logs", "epoch 2: 0 images used more than once, 12 not used"],
                 id="attempt missing"),
])  # fmt: skip
def test_find_usage_errors_reports_damage(tmp_path: Path, damage: Callable[[Path], object], errors: list[str]) -> None:
    write_logs(tmp_path, 1, range(3))
    write_logs(tmp_path, 2, range(3, 6))
    assert find_errors(tmp_path, {1: 0, 2: 3}) == []
    damage(tmp_path / USAGE_FOLDER)
    assert find_errors(tmp_path, {1: 0, 2: 3}) == errors


def test_find_usage_errors_finds_wrong_resume_step(tmp_path: Path) -> None:
    write_logs(tmp_path, 1, range(4))
    write_logs(tmp_path, 2, range(3, 6))
    assert find_errors(tmp_path, {1: 0, 2: 3}) == []
    assert find_errors(tmp_path, {1: 0, 2: 4}) == ["epoch 2: 4 images used more than once, 0 not used"]
    assert find_errors(tmp_path, {1: 0, 2: 2}) == [
        "epoch 1: 2 of 3 steps are in the logs", "epoch 1: 0 images used more than once, 4 not used",
    ]  # fmt: skip


def test_find_usage_errors_takes_lines_that_were_lost_with_a_machine_from_the_plan(tmp_path: Path) -> None:
    phase = Phase(epochs=(0, EPOCHS), size=32, batch=2, lr=0.1)
    schedule = Schedule(replace(TINY, phases=[phase]), STEPS * BATCH, 2)
    logs = []
    for attempt, world, steps in ((1, 2, range(5)), (2, 1, range(5, 6))):
        for rank in range(world):
            sampler = DistributedBatchSampler(schedule, {}, 0, rank, world)
            logs.append((UsageLog(tmp_path, attempt, rank), sampler))
            for step in steps:
                epoch, number = schedule.epochs[step // STEPS], step % STEPS
                chunks = sampler.chunks(epoch, number, sampler.epoch_order(epoch)[0])
                logs[-1][0].record_step(step, epoch.number, [int(image) for ids, _ in chunks for image in ids])
    assert find_errors(tmp_path, {1: 0, 2: 5}) == []
    path = tmp_path / USAGE_FOLDER / "000001-rank-1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert len(find_errors(tmp_path, {1: 0, 2: 5})) == EPOCHS, "one step of the first epoch, two of the second"
    first_log, sampler = logs[0]
    first_log.record_plan(sampler.planned_usage(1, 2))
    assert find_errors(tmp_path, {1: 0, 2: 5}) == []
