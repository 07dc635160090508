"""Tests of reading growing files by offset: equal to reading all, in bounded bytes."""

import io
from pathlib import Path

import pytest

from train.tools import text_files
from train.tools.records import GrowingFile
from train.tools.text_files import lines_backwards

LINES = [b"row %d %s\n" % (number, b"x" * (number * 7 % 23)) for number in range(40)] + [b"\n", b"other\n", b"row 40\n"]


def parse(line: bytes) -> bytes | None:
    return line.strip() if line.startswith(b"row") else None


def all_rows(path: Path) -> list[bytes]:
    return [row for line in path.read_bytes().splitlines() if (row := parse(line)) is not None]


@pytest.mark.parametrize("chunk_bytes", [1, 5, 64, 1 << 18])
def test_growing_file_equals_full_reading_at_every_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """The file is cut at any byte: the last line is half-written."""
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk_bytes)
    text = b"".join(LINES)
    path = tmp_path / "log"
    growing = GrowingFile(path, b"row", parse)
    assert growing.rows() == []
    for length in range(1, len(text) + 1, 1 if chunk_bytes > 5 else 17):
        path.write_bytes(text[:length])
        assert growing.rows() == all_rows(path), length


def test_growing_file_keeps_the_newest_rows_within_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(LINES))
    growing = GrowingFile(path, b"row", parse, max_bytes=100)
    assert sum(len(row) + 1 for row in growing.rows()) <= 100 and growing.history.is_cut
    with path.open("ab") as file:
        file.write(b"".join(LINES[:3]))
    assert growing.rows() == all_rows(path)[-len(growing.rows()) :] and len(growing.rows()) > 3


@pytest.mark.parametrize("later", [LINES[:3], LINES[5:], [b"row replaced\n", *LINES[1:], b"row more\n"], []])
def test_growing_file_truncated_or_replaced_is_read_anew(tmp_path: Path, later: list[bytes]) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(LINES))
    growing = GrowingFile(path, b"row", parse)
    growing.rows()
    path.unlink()
    path.write_bytes(b"".join(later))
    assert growing.rows() == all_rows(path)
    path.unlink()
    assert growing.rows() == []


@pytest.mark.parametrize("block_bytes", [1, 3, 16, 4096])
@pytest.mark.parametrize("tail", [b"", b"half a li"])
def test_lines_backwards_are_those_in_reverse(monkeypatch: pytest.MonkeyPatch, block_bytes: int, tail: bytes) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", block_bytes)
    text = b"".join(LINES) + tail
    assert list(lines_backwards(io.BytesIO(text))) == [line for line in text.split(b"\n") if line][::-1]
