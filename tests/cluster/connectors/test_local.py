"""The local connector: commands as argument lists without a shell, and files copied whole."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors.local import CommandFailed, Connector, module_command, visible_gpus

Fixture = Any
LOCAL = Connector()


PRINT_ARGV = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
ARGUMENTS = [
    *("", " ", "'", '"', "\\", "$HOME", "`id`", "$(id)", ";", "&& false", "*", "~", "|", "a b"),
    *("\n", "\n\n", "-n", "ä", "\udcff"),
]


def test_run_passes_arguments_and_input_unchanged() -> None:
    stdout = LOCAL.run([sys.executable, "-c", PRINT_ARGV, *ARGUMENTS, "end"]).out
    assert stdout == b"\0".join(map(os.fsencode, [*ARGUMENTS, "end"]))
    content = bytes(range(256)) * 5000
    assert LOCAL.run(["cat"], input=content).out == content
    assert LOCAL.run(["cat"]).out == b""


def test_run_returns_argv_code_outputs_and_seconds() -> None:
    argv = ["sh", "-c", "printf out; printf err >&2; sleep 0.1; exit 7"]
    result = LOCAL.run(argv, check=False)
    assert (result.argv, result.code, result.out, result.err) == (tuple(argv), 7, b"out", b"err")
    assert result.seconds >= 0.1


def test_run_adds_env_to_the_environment() -> None:
    stdout = LOCAL.run(["sh", "-c", 'printf "%s" "$OF_THIS_CALL:$PATH"'], env={"OF_THIS_CALL": "a b"}).out
    assert stdout.decode() == f"a b:{os.environ['PATH']}"


def test_run_failure_shows_last_ten_lines() -> None:
    with pytest.raises(CommandFailed) as caught:
        LOCAL.run(["sh", "-c", "seq 20; echo the reason >&2; exit 3"])
    assert caught.value.result.code == 3
    assert str(caught.value).splitlines() == ["here: sh ended with code 3", *map(str, range(12, 21)), "the reason"]


@pytest.mark.parametrize("program", ["no-program-of-this-name", "/no/such/file", "/tmp"])
def test_run_unknown_program_fails_with_126_or_127(program: str) -> None:
    assert LOCAL.run([program], check=False).code in (126, 127)
    with pytest.raises(CommandFailed, match=program):
        LOCAL.run([program])


def test_run_timeout_kills_command_and_children(sandbox: Fixture) -> None:
    out = b""
    for timeout in (0.3, 3.0, 30.0):  # a busy computer may take longer than the first to start sh
        with pytest.raises(CommandFailed, match="not over in") as caught:
            LOCAL.run(["sh", "-c", "echo begun; sleep 4321 & wait"], timeout=timeout, check=False)
        assert not sandbox.pids("sleep 4321")  # the call returned although the command would have slept for an hour
        if out := caught.value.result.out:
            break
    assert out == b"begun\n"


def test_put_and_write_copy_whole_files(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    LOCAL.write(str(tmp_path / "new/folder/a"), content)
    LOCAL.put(tmp_path / "new/folder/a", str(tmp_path / "other folder/c"))
    assert (tmp_path / "other folder/c").read_bytes() == content
    LOCAL.write(str(tmp_path / "new/folder/a"), b"shorter")
    assert (tmp_path / "new/folder/a").read_bytes() == b"shorter"
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["a"]


def test_write_on_full_disk_keeps_old_file(small_disk: Path) -> None:
    LOCAL.write(str(small_disk / "a"), b"old")
    with pytest.raises(OSError, match="No space left"):
        LOCAL.write(str(small_disk / "a"), os.urandom(1_000_000))
    assert [(path.name, path.read_bytes()) for path in small_disk.iterdir()] == [("a", b"old")]


def test_read_from_returns_limited_bytes_from_offset(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    assert LOCAL.read_from(path, 0) == b""
    (tmp_path / "a").write_bytes(b"0123456789")
    reads = [(0, 100, b"0123456789"), (3, 4, b"3456"), (9, 9, b"9"), (10, 1, b""), (99, 1, b"")]
    assert [LOCAL.read_from(path, offset, limit) for offset, limit, _ in reads] == [expected for *_, expected in reads]


def test_list_files_returns_sizes_by_relative_path(tmp_path: Path) -> None:
    assert LOCAL.list_files(str(tmp_path / "folder")) == {}
    for name in ("a", "folder/b c", "folder/deep/\n"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".hidden").touch()
    (tmp_path / "to nowhere").symlink_to("nothing")
    assert LOCAL.list_files(str(tmp_path)) == {"a": 1, "folder/b c": 10, "folder/deep/\n": 13}


def test_module_command_ignores_packages_in_current_folder(tmp_path: Path) -> None:
    for name in ("train", "cluster", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    completed = subprocess.run(module_command("cluster", "--version"), cwd=tmp_path, capture_output=True, text=True)
    assert completed.returncode == 0 and completed.stdout.startswith("imgnet-cluster"), completed


@pytest.mark.parametrize(
    ("variable", "names"),
    [("", ()), ("-1", ()), ("0", ("0",)), ("0,1, 2", ("0", "1", "2")), ("GPU-1,GPU-2", ("GPU-1", "GPU-2"))],
)
def test_visible_gpus_reads_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, variable: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == names
