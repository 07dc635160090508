"""Readers of files: damaged, endless, huge or strange ones end in an error, never in a hang or another exception."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.tools import filesystem

Fixture = Any


@pytest.mark.parametrize("text", [
    b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"-Infinity", b"[1e999]", b"1" * 400 + b".0", b"9" * 5000, b"\xff", b"",
])  # fmt: skip
def test_parse_json_refuses_what_is_no_plain_data(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        filesystem.parse_json(text)
    assert len(str(error.value)) < 200
    assert not filesystem.is_valid_json(text)
    (tmp_path / "x").write_bytes(text)
    assert filesystem.read_json(tmp_path / "x") is None and filesystem.read_json(tmp_path / "missing") is None


@given(st.binary())
def test_parse_json_any_bytes_is_value_or_value_error(text: bytes) -> None:
    try:
        json.dumps(filesystem.parse_json(text), allow_nan=False)
    except ValueError:
        assert not filesystem.is_valid_json(text)


@pytest.fixture(params=["FIFO", "folder", "loop", "device"])
def strange_file(request: Fixture, tmp_path: Path) -> Path:
    path = tmp_path / "x.json"
    if request.param == "FIFO":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if request.param == "loop" else "/dev/zero")
    return path


def test_readers_of_what_is_no_file_raise_and_do_not_wait(strange_file: Path) -> None:
    assert filesystem.read_json(strange_file) is None
    for read in (filesystem.read_file, filesystem.open_regular, lambda path: list(filesystem.read_lines(path))):
        with pytest.raises(OSError, match=str(strange_file)):
            read(strange_file)
    with pytest.raises(OSError), filesystem.locked(strange_file, 0):
        pass


def test_read_file_too_large_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(10**12)  # takes no space
    with pytest.raises(OSError, match="more than 64 MB"):
        filesystem.read_file(path)


def test_read_lines_leaves_out_endless_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "MAX_LINE_BYTES", 10)
    path = tmp_path / "x"
    for text, lines in (
        (b"a\n" + b"x" * 95 + b"\nb\nc", [b"a\n", b"b\n", b"c"]),
        (b"x" * 200, []),
        (b"x" * 9 + b"\n", [b"x" * 9 + b"\n"]),
    ):
        path.write_bytes(text)
        assert list(filesystem.read_lines(path)) == lines
    assert list(filesystem.read_lines(tmp_path / "missing")) == []
