"""Atomic writes, files that are created once, and files with a checksum."""

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from train.tools import filesystem
from train.tools.agent_protocol import newest_intact_checkpoint

PAYLOAD = b"weights and such\n" + bytes(range(256))


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_create_once_has_one_winner_among_concurrent_writers(tmp_path: Path) -> None:
    path = tmp_path / "x"
    start = threading.Barrier(8)

    def race(number: int) -> bool:
        start.wait()
        return filesystem.create_once(path, b"%d" % number * 1000)

    with ThreadPoolExecutor(8) as pool:
        has_won = list(pool.map(race, range(8)))
    assert sum(has_won) == 1
    winner = has_won.index(True)
    assert path.read_bytes() == b"%d" % winner * 1000
    assert file_names(tmp_path) == ["x"]


@pytest.mark.parametrize("write", [filesystem.write_atomic, filesystem.create_once])
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


def test_read_with_checksum_returns_the_payload(tmp_path: Path) -> None:
    for payload in (PAYLOAD, b"", b"\n\n", bytes(1_000_000)):
        (tmp_path / "x").write_bytes(filesystem.with_checksum(payload))
        assert filesystem.read_with_checksum(tmp_path / "x") == payload

        def write_in_pieces(stream: Any, payload: bytes = payload) -> None:
            for start in range(0, len(payload), 7):
                stream.write(payload[start : start + 7])

        filesystem.write_with_checksum(tmp_path / "y", write_in_pieces)
        assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()


def test_read_with_checksum_detects_any_flipped_bit_and_cut_or_added_bytes(tmp_path: Path) -> None:
    sealed, path = filesystem.with_checksum(PAYLOAD), tmp_path / "x"
    flipped = (
        sealed[:place] + bytes([sealed[place] ^ 1 << place % 8]) + sealed[place + 1 :] for place in range(len(sealed))
    )
    cut = (sealed[:length] for length in range(len(sealed)))
    for data in (*flipped, *cut, sealed + b"\0", sealed + b"\n", b"\n" + sealed):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="x: is"):
            filesystem.read_with_checksum(path)


def test_write_with_checksum_leaves_nothing_when_the_payload_fails(tmp_path: Path) -> None:
    def fail_halfway(stream: Any) -> None:
        stream.write(b"half")
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        filesystem.write_with_checksum(tmp_path / "x", fail_halfway)
    assert list(tmp_path.iterdir()) == []


def test_newest_intact_checkpoint_is_that_of_the_latest_step(tmp_path: Path) -> None:
    assert newest_intact_checkpoint(tmp_path / "none") is None
    for number in (3, 20, 100):
        (tmp_path / f"step-{number:08d}.pt").write_bytes(filesystem.with_checksum(b"%d" % number))
    (tmp_path / "step-99999999.other").write_bytes(filesystem.with_checksum(b""))
    (tmp_path / ".step-00000200.pt.1a2b").write_bytes(filesystem.with_checksum(b"")[:20])  # the rest of a killed writer
    for copy in ("step-old.pt", "step-00000200-old.pt", "step-00000200.old.pt"):  # that somebody has made
        (tmp_path / copy).write_bytes(filesystem.with_checksum(b""))
    newest = tmp_path / "step-00000100.pt"
    assert newest_intact_checkpoint(tmp_path) == newest
    newest.write_bytes(newest.read_bytes()[:-1])
    assert newest_intact_checkpoint(tmp_path) == tmp_path / "step-00000020.pt"
    (tmp_path / "step-00000020.pt").write_bytes(b"")
    (tmp_path / "step-00000150.pt").mkdir()
    assert newest_intact_checkpoint(tmp_path) == tmp_path / "step-00000003.pt"
    (tmp_path / "step-00000003.pt").unlink()
    assert newest_intact_checkpoint(tmp_path) is None
