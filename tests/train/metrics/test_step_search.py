"""Tests of finding steps by offset: equal to reading all lines, and the bytes read do not grow with the file."""

import json
import random
from pathlib import Path

import pytest
from support.train_records import epoch_line, step_line

from train.metrics import step_search
from train.metrics.records import EpochRow, StepRow, read_metrics_file


def write_metrics(path: Path, steps: int, seed: int = 0) -> None:
    """Write lines of about every tenth step, some of them damaged, with epochs between them."""
    rng = random.Random(seed)
    lines = [json.dumps({"kind": "start"})]
    for step in range(1, steps, rng.randrange(1, 12)):
        line = step_line(step, 100.0 + step + rng.random() / 2, loss__train=2.5)
        lines.append(json.dumps({**line, "padding": "x" * rng.randrange(1, 300)}))
        if rng.random() < 0.1:
            lines.append(json.dumps(epoch_line(step, 100.5 + step)))
        if rng.random() < 0.05:
            lines += ["{torn", "", '{"kind": "train", "step": 7}']
    path.write_text("".join(line + "\n" for line in lines))


def assert_equals_full_reading(path: Path, steps: list[int]) -> None:
    """Compare the ends and the last row until each step, that of an epoch's end too, with what all rows give."""
    rows = [(row.step, row.images, row.time) for row in read_metrics_file(path, StepRow)]
    ends = step_search.first_and_last_step(path)
    assert ends and [(end.step, end.images, end.time) for end in (ends.first, ends.last)] == [rows[0], rows[-1]]
    rows += [(row.step, row.images, row.time) for row in read_metrics_file(path, EpochRow)]
    for step in steps:
        expected = max((row for row in rows if row[0] <= step), default=None)
        found = step_search.last_step_until(path, step)
        assert (found and (found.step, found.images, found.time)) == expected, step


@pytest.mark.parametrize("seed", range(6))
def test_search_equals_full_reading(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "000001.jsonl"
    size = random.Random(seed).choice([20, 300, 4000])
    write_metrics(path, size, seed)
    steps = [-1, 0, 1, size - 1, size + 5, *random.Random(seed).sample(range(size), 15)]
    assert_equals_full_reading(path, steps)
    with path.open("a") as file:  # a half-written line is none
        file.write('{"kind": "train", "attempt": 1, "step": 99')
    assert_equals_full_reading(path, steps)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # truncated, in the middle of a line
    assert_equals_full_reading(path, steps)
    path.unlink()
    write_metrics(path, size + 50, seed + 100)  # replaced
    assert_equals_full_reading(path, steps)
