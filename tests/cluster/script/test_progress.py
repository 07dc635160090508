import struct
from pathlib import Path
from typing import Any

import pytest

from cluster.script.progress import (
    MAX_LINE_CHARACTERS,
    MAX_POLL_BYTES,
    BadPattern,
    ScriptNumbers,
    ScriptProgress,
    compile_pattern,
)

STEP = r"step (?P<step>\d+)"


class Bed:
    """The files of a script that tells its progress."""

    def __init__(self, path: Path) -> None:
        self.log = path / "rank-0.log"
        self.events = path / "events"
        self.events.mkdir()
        self.touched = path / "progress"

    def follow(self, pattern: str = "", counts_output: bool = False) -> ScriptProgress:
        compiled = compile_pattern(pattern) if pattern else None
        return ScriptProgress(self.log, self.events, self.touched, compiled, counts_output)

    def print(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)

    def write_event(self, step: int, name: str = "events.out.tfevents.1", is_whole: bool = True) -> None:
        varint = bytes([step & 127 | 128, step >> 7])
        message = b"\x09" + struct.pack("<d", 1.5) + b"\x10" + varint + b"\x2a\x03abc"
        record = struct.pack("<QI", len(message), 0) + message + b"\0\0\0\0"
        with (self.events / name).open("ab") as file:
            file.write(record if is_whole else record[:-6])


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


BAR = r"(?P<step>\d+)/(?P<steps>\d+) .*loss=(?P<loss>\S+)"
WORDS = r"step (?P<step>\S+) loss (?P<loss>\S+)"


@pytest.mark.parametrize(("pattern", "printed", "expected"), [
    pytest.param(STEP, ["", "hello\nstep 1\nstep 2\nsaved\nste", "p 3", "4\n"],
                 [{"step": None}, {"step": 2}, {"step": 2}, {"step": 34, "signs": 2}], id="incomplete lines wait"),
    pytest.param(BAR, [" 1%| 10/1,000 [00:01 loss=2.5]\r 2%| 20/1000 [00:01 loss=1.25 ]\r"],
                 [{"step": 20, "steps": 1000, "loss": 1.25}], id="a bar with carriage returns"),
    pytest.param(WORDS, ["step 5 loss nan\n", f"step {'9' * 30} loss 1\n"],
                 [{"step": 5, "loss": None}, {"step": 5, "loss": 1.0}], id="a group that is no number"),
    pytest.param(STEP, [f"step 1\n{'x' * MAX_POLL_BYTES}\nstep 2\n", f"{'y' * MAX_LINE_CHARACTERS} step 3\n"],
                 [{"step": 2}, {"step": 2}], id="the end of much output"),
    pytest.param("", ["working\n"], [{"signs": 0}], id="output is no sign of life"),
])  # fmt: skip
def test_newest_line_that_matches_counts(bed: Bed, pattern: str, printed: list[str], expected: list[Any]) -> None:
    progress, counting = bed.follow(pattern), bed.follow(counts_output=True)
    for text, numbers in zip(printed, expected, strict=True):
        bed.print(text)
        found = vars(progress.poll())
        assert {name: found[name] for name in numbers} == numbers
    assert counting.poll().signs == 1


@pytest.mark.parametrize("pattern, problem", [
    ("step (", "is not a regular expression"),
    (r"step (\d+)", "has no group `step`"),
    (r"(?P<step>\d+) (?P<speed>\d+)", "the group speed is none of step,"),
    ("x" * 1000, "more than 500 characters"),
])  # fmt: skip
def test_bad_pattern_is_one_line(pattern: str, problem: str) -> None:
    with pytest.raises(BadPattern, match=problem) as error:
        compile_pattern(pattern)
    assert "\n" not in str(error.value)


def test_pattern_that_takes_too_long_at_run_time_is_switched_off(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.script.progress.MATCH_SECONDS", 0.05)
    progress = bed.follow(r"(x+x+)+y (?P<step>\d+)")
    bed.print("x" * 100 + "\n")
    assert progress.poll().step is None
    assert "takes too long on this output" in progress.problem
    bed.print("x" * 100 + "\n")
    assert progress.poll() == ScriptNumbers(signs=1), "without a pattern, output is the sign of life"


def test_steps_of_tensorboard_events_are_read_as_they_grow(bed: Bed) -> None:
    bed.write_event(900, "events.out.tfevents.of-the-attempt-before")
    progress = bed.follow()
    assert progress.poll().step is None
    damaged = struct.pack("<QI", 64, 0) + b"\xff" * 100  # the head of a record, and nothing that can be read
    (bed.events / "events.out.tfevents.damaged").write_bytes(damaged)
    bed.write_event(5)
    bed.write_event(7, is_whole=False)
    assert progress.poll().step == 5
    with (bed.events / "events.out.tfevents.1").open("ab") as file:
        file.write(b"c\0\0\0\0" + b"\0")
    assert progress.poll().step == 7
    bed.write_event(300, "events.out.tfevents.2")
    assert progress.poll().step == 300 and progress.numbers.signs == 3


def test_touched_file_is_a_sign_of_life_and_its_number_the_step(bed: Bed) -> None:
    progress = bed.follow()
    bed.touched.touch()
    assert progress.poll() == ScriptNumbers(signs=1)
    bed.touched.write_text("12\n")
    assert progress.poll() == ScriptNumbers(step=12, signs=2)
    assert progress.poll().signs == 2
