"""This computer as a machine: commands as lists of words, files moved whole, and nothing passes through a shell."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors.local import CommandFailed, Connector, module_command, visible_gpu_count

Fixture = Any
HERE = Connector()
TELL = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"


WORDS = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "\\",
    "$HOME",
    "`id`",
    "$(id)",
    ";",
    "&& false",
    "|",
    "*",
    "~",
    "\n",
    "-n",
    "ä",
    "\udcff",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_arrives_as_it_is(word: str) -> None:
    assert HERE.run([sys.executable, "-c", TELL, word, "end"]).out == os.fsencode(word) + b"\0end"


def test_a_result_has_the_words_the_code_both_outputs_and_the_time() -> None:
    argv = ["sh", "-c", "printf out; printf err >&2; sleep 0.1; exit 7"]
    result = HERE.run(argv, check=False)
    assert (result.argv, result.code, result.out, result.err) == (tuple(argv), 7, b"out", b"err")
    assert 0.1 <= result.seconds < 10


def test_bytes_go_in_and_out_unchanged() -> None:
    every = bytes(range(256)) * 5000
    assert HERE.run(["cat"], input=every).out == every
    assert HERE.run(["cat"]).out == b""


def test_variables_are_added_to_the_environment() -> None:
    said = HERE.run(["sh", "-c", 'printf "%s" "$OF_THIS_CALL:$PATH"'], env={"OF_THIS_CALL": "a b"}).out
    assert said.decode() == f"a b:{os.environ['PATH']}"


def test_a_command_that_fails_says_its_last_ten_lines() -> None:
    with pytest.raises(CommandFailed) as caught:
        HERE.run(["sh", "-c", "seq 20; echo the reason >&2; exit 3"])
    assert caught.value.result.code == 3
    assert str(caught.value).splitlines() == ["here: sh ended with code 3", *map(str, range(12, 21)), "the reason"]


def test_a_command_that_a_signal_ended_has_a_negative_code() -> None:
    assert HERE.run(["sh", "-c", "kill -TERM $$"], check=False).code == -signal.SIGTERM


@pytest.mark.parametrize("program", ["no-program-of-this-name", "/no/such/file", "/tmp"])
def test_a_program_that_cannot_be_started_fails_as_in_a_shell(program: str) -> None:
    assert HERE.run([program], check=False).code in (126, 127)
    with pytest.raises(CommandFailed, match=program):
        HERE.run([program])


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("script", ["echo begun; exec sleep 4321", "echo begun; sleep 4321 & wait"])
def test_a_command_that_takes_too_long_is_killed_with_what_it_started(place: Fixture, check: bool, script: str) -> None:
    start = time.monotonic()
    with pytest.raises(CommandFailed, match="not over in") as caught:
        HERE.run(["sh", "-c", script], timeout=0.3, check=check)
    assert time.monotonic() - start < 10 and caught.value.result.out == b"begun\n"
    assert not place.pids("sleep 4321")


def test_files_are_put_got_and_written_whole(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    HERE.write(str(tmp_path / "new/folder/a"), content)
    HERE.get(str(tmp_path / "new/folder/a"), tmp_path / "b")
    HERE.put(tmp_path / "b", str(tmp_path / "other folder/c"))
    assert (tmp_path / "other folder/c").read_bytes() == content
    HERE.write(str(tmp_path / "new/folder/a"), b"shorter")
    assert (tmp_path / "new/folder/a").read_bytes() == b"shorter"
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["a"]


def test_a_write_that_does_not_fit_leaves_the_old_file(small_disk: Path) -> None:
    HERE.write(str(small_disk / "a"), b"old")
    with pytest.raises(OSError, match="No space left"):
        HERE.write(str(small_disk / "a"), os.urandom(1_000_000))
    assert [(path.name, path.read_bytes()) for path in small_disk.iterdir()] == [("a", b"old")]


@pytest.mark.parametrize(
    "offset, limit, expected", [(0, 100, b"0123456789"), (3, 4, b"3456"), (9, 9, b"9"), (10, 1, b""), (99, 1, b"")]
)
def test_a_file_is_read_from_an_offset(tmp_path: Path, offset: int, limit: int, expected: bytes) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    assert HERE.read_from(str(tmp_path / "a"), offset, limit) == expected


def test_what_is_not_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert HERE.read_from(str(tmp_path / "a"), 0) == b""
    assert HERE.list_files(str(tmp_path / "folder")) == {}


def test_files_are_listed_with_their_sizes(tmp_path: Path) -> None:
    for name in ("a", "folder/b c", "folder/deep/\n"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".hidden").touch()
    (tmp_path / "to nowhere").symlink_to("nothing")
    assert HERE.list_files(str(tmp_path)) == {"a": 1, "folder/b c": 10, "folder/deep/\n": 13}


def test_files_can_be_listed_while_they_are_replaced_and_removed(
    tmp_path: Path, crowd: Callable[..., list[Any]]
) -> None:
    (tmp_path / "stays").write_text("1234")

    def one(number: int) -> bool:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            if number:
                assert HERE.list_files(str(tmp_path)).get("stays") == 4
            else:
                folder = tmp_path / "folder"
                folder.mkdir()
                for name in ("a", "b"):
                    (folder / name).write_text("x")
                    (folder / name).replace(folder / "c")
                (folder / "c").unlink()
                folder.rmdir()
        return True

    assert all(crowd(3, one))


def test_our_modules_are_found_from_any_folder_whatever_lies_there(tmp_path: Path) -> None:
    for name in ("train", "cluster", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    ran = subprocess.run(module_command("cluster", "--version"), cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.startswith("imgnet-cluster"), ran


@pytest.mark.parametrize("visible, count", [("", 0), ("-1", 0), ("0", 1), ("0,1, 2", 3), ("GPU-1,GPU-2", 2)])
def test_gpus_are_those_that_this_process_may_see(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpu_count() == count
