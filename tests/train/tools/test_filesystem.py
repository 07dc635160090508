"""Files that are whole or not there."""

import json
import math
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

from train.tools import filesystem

PAYLOAD = b"weights and such\n" + bytes(range(256))


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [True, False])
def test_replace_writes_anew_or_over(durable: bool, tmp_path: Path) -> None:
    for content in (b"one", b"", b"three"):
        filesystem.write_atomic(tmp_path / "x", content, durable)
        assert (tmp_path / "x").read_bytes() == content
    assert left(tmp_path) == ["x"]


def test_a_reader_sees_the_old_content_or_the_new_and_never_a_part(tmp_path: Path) -> None:
    contents = [bytes([number]) * 200_000 for number in range(40)]
    path = tmp_path / "x"
    filesystem.write_atomic(path, contents[0])
    done = threading.Event()

    def write() -> None:
        for content in contents:
            filesystem.write_atomic(path, content, durable=False)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    while not done.is_set() or not seen:
        assert path.read_bytes() in contents
        seen += 1
    writer.join()
    assert left(tmp_path) == ["x"]


def test_publish_writes_once_and_then_refuses(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert filesystem.create_once(path, b"first")
    assert not filesystem.create_once(path, b"second")
    assert path.read_bytes() == b"first"
    assert left(tmp_path) == ["x"]


def test_of_many_that_publish_at_once_one_wins_and_its_content_stays(tmp_path: Path) -> None:
    path, start, won = tmp_path / "x", threading.Barrier(8), []

    def race(number: int) -> None:
        start.wait()
        if filesystem.create_once(path, b"%d" % number * 1000):
            won.append(number)

    racers = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for one in racers:
        one.start()
    for one in racers:
        one.join()
    (winner,) = won
    assert path.read_bytes() == b"%d" % winner * 1000
    assert left(tmp_path) == ["x"]


@pytest.mark.parametrize("write", [filesystem.write_atomic, filesystem.create_once])
def test_a_folder_that_is_not_there_is_an_error(write: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "x", b"")
    assert left(tmp_path) == []


def limited(write: Any, path: Path, answer: Any) -> None:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        answer.send(write(path, b"x" * 5000))
    except OSError as error:
        answer.send(error)


@pytest.mark.parametrize("write", [filesystem.write_atomic, filesystem.create_once])
def test_a_write_that_fails_keeps_the_old_content_and_leaves_no_part(write: Any, tmp_path: Path) -> None:
    """In a process of its own that may write files of 1000 bytes only."""
    (tmp_path / "old").write_bytes(b"old")
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    for name in ("old", "new"):
        child = context.Process(target=limited, args=(write, tmp_path / name, writer))
        child.start()
        child.join(30)
        assert isinstance(reader.recv(), OSError)
    assert left(tmp_path) == ["old"] and (tmp_path / "old").read_bytes() == b"old"


def test_what_was_sealed_comes_back(tmp_path: Path) -> None:
    for payload in (PAYLOAD, b"", b"\n\n", bytes(1_000_000)):
        (tmp_path / "x").write_bytes(filesystem.with_checksum(payload))
        assert filesystem.read_with_checksum(tmp_path / "x") == payload

        def fill(stream: Any, payload: bytes = payload) -> None:
            for start in range(0, len(payload), 7):
                stream.write(payload[start : start + 7])

        filesystem.write_with_checksum(tmp_path / "y", fill)
        assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()


def test_a_sealed_file_of_which_a_part_could_not_be_written_is_not_there(tmp_path: Path) -> None:
    def broken(stream: Any) -> None:
        stream.write(b"half")
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        filesystem.write_with_checksum(tmp_path / "x", broken)
    assert list(tmp_path.iterdir()) == []


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    whole, path = filesystem.with_checksum(PAYLOAD), tmp_path / "x"
    for place in range(len(whole)):
        bit = 1 << place % 8
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="x: is"):
            filesystem.read_with_checksum(path)


def test_no_byte_changed_to_a_blank_changes_the_payload(tmp_path: Path) -> None:
    whole, path = filesystem.with_checksum(b"p"), tmp_path / "x"
    for place in range(len(whole)):
        for byte in b" \t\r\n\x0b\x0c\x1c\0":
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            try:
                assert filesystem.read_with_checksum(path) == b"p"
            except ValueError:
                continue


def test_any_cut_and_any_added_byte_is_noticed(tmp_path: Path) -> None:
    whole, path = filesystem.with_checksum(PAYLOAD), tmp_path / "x"
    for data in (*(whole[:length] for length in range(len(whole))), whole + b"\0", whole + b"\n", b"\n" + whole):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="x: is"):
            filesystem.read_with_checksum(path)


def test_newest_sealed_is_the_last_whole_one_by_name(tmp_path: Path) -> None:
    assert filesystem.newest_intact_file(tmp_path, "step-*.pt") is None
    assert filesystem.newest_intact_file(tmp_path / "none", "step-*.pt") is None
    for number in (3, 20, 100):
        (tmp_path / f"step-{number:08d}.pt").write_bytes(filesystem.with_checksum(b"%d" % number))
    (tmp_path / "step-99999999.other").write_bytes(filesystem.with_checksum(b""))
    (tmp_path / ".step-00000200.pt.1a2b").write_bytes(filesystem.with_checksum(b"")[:20])  # a writer was killed
    newest = tmp_path / "step-00000100.pt"
    assert filesystem.newest_intact_file(tmp_path, "step-*.pt") == newest
    newest.write_bytes(newest.read_bytes()[:-1])
    assert filesystem.newest_intact_file(tmp_path, "step-*.pt") == tmp_path / "step-00000020.pt"
    (tmp_path / "step-00000020.pt").write_bytes(b"")
    (tmp_path / "step-00000150.pt").mkdir()
    assert filesystem.newest_intact_file(tmp_path, "step-*.pt") == tmp_path / "step-00000003.pt"
    (tmp_path / "step-00000003.pt").unlink()
    assert filesystem.newest_intact_file(tmp_path, "step-*.pt") is None


def test_json_has_null_where_a_number_is_none(tmp_path: Path) -> None:
    value = {"a": [math.nan, 1.5, (math.inf, -math.inf)], "b": {"c": math.nan}, "d": "NaN", "e": 3, "f": None}
    text = filesystem.to_json_bytes(value)
    assert text.endswith(b"\n")
    assert json.loads(text) == {"a": [None, 1.5, [None, None]], "b": {"c": None}, "d": "NaN", "e": 3, "f": None}


def test_plain_is_what_json_gives_back() -> None:
    assert filesystem.json_roundtrip({1: (2, 3), "x": None}) == {"1": [2, 3], "x": None}


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xff"])
def test_json_that_cannot_be_read_is_none(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    assert filesystem.read_json(tmp_path / "x") is None
    filesystem.write_atomic(tmp_path / "x", filesystem.to_json_bytes([1]))
    assert filesystem.read_json(tmp_path / "x") == [1]
