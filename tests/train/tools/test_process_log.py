"""The log of a process: JSON lines in a file of limited size, text on the terminal."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from train.tools import process_log

logger = logging.getLogger("cluster.test_process_log")


@pytest.fixture(autouse=True)
def restore_loggers() -> Iterator[None]:
    """Undo what the tests change in the loggers of this process."""
    loggers = [logging.getLogger(name) for name in process_log.PROJECT_LOGGERS]
    before = [(found.level, found.propagate, list(found.handlers)) for found in loggers]
    yield
    for found, (level, propagate, handlers) in zip(loggers, before, strict=True):
        found.setLevel(level)
        found.propagate = propagate
        found.handlers[:] = handlers


def test_log_to_file_writes_json_and_prints_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "supervisor.jsonl"
    process_log.log_to_file(path)
    logger.info("machine %s was lost", "2")
    try:
        raise ValueError("an example")
    except ValueError:
        logger.exception("an unexpected error")
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["message"], first["level"], first["source"]) == ("machine 2 was lost", "info", logger.name)
    assert "ValueError: an example" in second["message"] and second["level"] == "error"
    assert " machine 2 was lost\n" in capsys.readouterr().out


def test_log_file_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_log, "MAX_LOG_BYTES", 1000)
    path = tmp_path / "supervisor.jsonl"
    process_log.log_to_file(path)
    for number in range(100):
        logger.info("message %d", number)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["supervisor.jsonl", "supervisor.jsonl.1"]
    assert all(found.stat().st_size <= 1000 for found in tmp_path.iterdir())
    assert "message 99" in path.read_text()


def test_log_to_full_disk_or_missing_folder_raises_nothing(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "fill").write_bytes(bytes(150_000))
    for path in (small_disk / "supervisor.jsonl", tmp_path / "missing" / "supervisor.jsonl"):
        process_log.log_to_file(path)
        for _ in range(200):
            logger.info("x" * 500)


@pytest.mark.parametrize(("line", "text"), [
    ('{"time": 0, "message": "a\\nb"}', "a\nb\n"),
    ('{"time": 0, "attempt": 2, "state": "training", "reason": ""}', " attempt 2: training\n"),
    ('{"time": 0, "attempt": 2, "state": "failed", "reason": "lost", "step": 7}', " attempt 2, step 7: failed: lost\n"),
    ("no json", "no json"),
    ("[1]", "[1]"),
    ('{"time": 1e300, "message": "a"}', '{"time": 1e300, "message": "a"}'),
    ('{"time": 1e17, "message": "a"}', '{"time": 1e17, "message": "a"}'),
    ('{"time": 0, "message": 3}', '{"time": 0, "message": 3}'),
    ("[" * 100_000, "["),
])  # fmt: skip
def test_format_line_shows_json_as_text_and_other_lines_unchanged(line: str, text: str) -> None:
    assert process_log.format_line(line.encode()).decode().endswith(text)


def test_log_end_reads_only_the_end(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("one\ntwo\n")
    assert process_log.log_end(log, 100) == "one\ntwo\n"
    assert process_log.log_end(log, 5) == "\ntwo\n"
    with log.open("r+b") as file:
        file.seek(1 << 36)  # a sparse file of 64 GiB
        file.write(b"the end")
    assert process_log.log_end(log, 7) == "the end"
