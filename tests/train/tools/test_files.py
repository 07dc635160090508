"""Atomic writes, files with a checksum, and readers: damaged, endless or strange files are errors, never a hang."""

import json
import os
import resource
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.tools import files, sealed_files, text_files
from train.tools.agent_protocol import newest_intact_checkpoint


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_names_of_files_are_utf8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "k\u00e4fer").touch()
    script = (
        "import os, sys; from train.tools.files import FORMER_UTF8_VARIABLE, use_utf8_names; use_utf8_names()\n"
        "print(ascii(os.listdir(sys.argv[1])), os.getenv(FORMER_UTF8_VARIABLE))"
    )
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for flags, shown in (
        ((), "['k\\xe4fer'] 0"),
        (("-X", "utf8=0"), "['k\\udcc3\\udca4fer'] 0"),
    ):  # what Python was told counts
        argv = [sys.executable, *flags, "-c", script, str(tmp_path)]
        assert subprocess.check_output(argv, text=True, env=environment, timeout=60).strip() == shown


def test_create_once_has_one_winner_among_concurrent_writers(tmp_path: Path) -> None:
    path = tmp_path / "x"
    start = threading.Barrier(8)

    def race(number: int) -> bool:
        start.wait()
        return files.create_once(path, b"%d" % number * 1000)

    with ThreadPoolExecutor(8) as pool:
        has_won = list(pool.map(race, range(8)))
    assert sum(has_won) == 1
    winner = has_won.index(True)
    assert path.read_bytes() == b"%d" % winner * 1000
    assert file_names(tmp_path) == ["x"]


@pytest.mark.parametrize("write", [files.write_atomic, files.create_once])
def test_failed_write_keeps_the_old_content_and_no_temporary_file(write: Any, tmp_path: Path, in_group: Any) -> None:
    (tmp_path / "old").write_bytes(b"old")

    def write_with_size_limit(_: object) -> list[str]:
        """In its own process, which may write files of at most 1000 bytes."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        for name in ("old", "new"):
            with pytest.raises(OSError, match="too large"):
                write(tmp_path / name, b"x" * 5000)
        return file_names(tmp_path)

    assert in_group(1, write_with_size_limit) == [["old"]] and (tmp_path / "old").read_bytes() == b"old"


def test_read_with_checksum_detects_any_flipped_bit_and_cut_or_added_bytes(tmp_path: Path) -> None:
    sealed, path = sealed_files.with_checksum(b"weights and such\n" + bytes(range(256))), tmp_path / "x"
    flipped = (sealed[:at] + bytes([sealed[at] ^ 1 << at % 8]) + sealed[at + 1 :] for at in range(len(sealed)))
    cut = (sealed[:length] for length in range(len(sealed)))
    for data in (*flipped, *cut, sealed + b"\0", sealed + b"\n", b"\n" + sealed):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="x: is"):
            sealed_files.read_with_checksum(path)


def test_newest_intact_checkpoint_is_that_of_the_latest_step(tmp_path: Path) -> None:
    assert newest_intact_checkpoint(tmp_path / "none") is None
    for number in (3, 20, 100):
        (tmp_path / f"step-{number:08d}.pt").write_bytes(sealed_files.with_checksum(b"%d" % number))
    (tmp_path / "step-99999999.other").write_bytes(sealed_files.with_checksum(b""))
    (tmp_path / ".step-00000200.pt.1a2b").write_bytes(
        sealed_files.with_checksum(b"")[:20]
    )  # the rest of a killed writer
    for copy in ("step-old.pt", "step-00000200-old.pt", "step-00000200.old.pt"):  # that somebody has made
        (tmp_path / copy).write_bytes(sealed_files.with_checksum(b""))
    newest = tmp_path / "step-00000100.pt"
    assert newest_intact_checkpoint(tmp_path) == newest
    newest.write_bytes(newest.read_bytes()[:-1])
    assert newest_intact_checkpoint(tmp_path) == tmp_path / "step-00000020.pt"
    (tmp_path / "step-00000020.pt").write_bytes(b"")
    (tmp_path / "step-00000150.pt").mkdir()
    assert newest_intact_checkpoint(tmp_path) == tmp_path / "step-00000003.pt"
    (tmp_path / "step-00000003.pt").unlink()
    assert newest_intact_checkpoint(tmp_path) is None


@pytest.mark.parametrize("text", [
    b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"-Infinity", b"[1e999]", b"1" * 400 + b".0", b"9" * 5000, b"\xff", b"",
])  # fmt: skip
def test_parse_json_refuses_what_is_no_plain_data(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        text_files.parse_json(text)
    assert len(str(error.value)) < 200
    assert not text_files.is_valid_json(text)
    (tmp_path / "x").write_bytes(text)
    assert text_files.read_json(tmp_path / "x") is None and text_files.read_json(tmp_path / "missing") is None


@given(st.binary())
def test_parse_json_any_bytes_is_value_or_value_error(text: bytes) -> None:
    try:
        json.dumps(text_files.parse_json(text), allow_nan=False)
    except ValueError:
        assert not text_files.is_valid_json(text)


@pytest.mark.parametrize("kind", ["FIFO", "folder", "loop", "device"])
def test_readers_of_what_is_no_file_raise_and_do_not_wait(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    assert text_files.read_json(path) is None
    for read in (files.read_file, files.open_regular, lambda path: list(text_files.read_lines(path))):
        with pytest.raises(OSError, match=str(path)):
            read(path)
    with pytest.raises(OSError), files.locked(path, 0):
        pass


def test_read_lines_leaves_out_endless_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 10)
    path = tmp_path / "x"
    for text, lines in (
        (b"a\n" + b"x" * 95 + b"\nb\nc", [b"a\n", b"b\n", b"c"]),
        (b"x" * 200, []),
        (b"x" * 9 + b"\n", [b"x" * 9 + b"\n"]),
    ):
        path.write_bytes(text)
        assert list(text_files.read_lines(path)) == lines
    assert list(text_files.read_lines(tmp_path / "missing")) == []


def test_lock_is_held_by_no_other_user(tmp_path: Path) -> None:
    with files.locked(tmp_path / "own"), files.locked(tmp_path / "shared", permissions=files.SHARED_LOCK):
        assert (tmp_path / "own").stat().st_mode & 0o077 == 0 != (tmp_path / "shared").stat().st_mode & 0o077


def test_read_file_takes_memory_for_its_bytes_only(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1000))
    tracemalloc.start()
    try:
        assert files.read_file(path) == bytes(1000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert files.read_file(Path("/proc/self/status")).endswith(b"\n"), "a file whose size says less than it has"


def test_read_file_too_large_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(10**12)  # takes no space
    with pytest.raises(OSError, match="more than 64 MB"):
        files.read_file(path)
