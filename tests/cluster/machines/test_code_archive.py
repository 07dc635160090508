"""The working tree as one archive: what is in it, when two are equal, and how it comes to a machine."""

import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors.local import CommandResult, Connector
from cluster.errors import ClusterError
from cluster.machines import code_archive

PYPROJECT = '[project]\ndependencies = ["click>=8"]\n'


def git(root: Path, *words: str) -> None:
    me = ["-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *me, "-C", str(root), *words], check=True, capture_output=True)


def tree(root: Path) -> Path:
    """The four packages, a script, a link, and what must not travel."""
    for name in (*code_archive.CODE_PACKAGES, "tools", "cluster/__pycache__"):
        (root / name).mkdir(parents=True)
    for name in code_archive.CODE_PACKAGES:
        (root / name / "__init__.py").write_text(f'"""{name}."""\n')
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "cluster/__pycache__/x.pyc").write_bytes(b"compiled")
    (root / "train/link.py").symlink_to("__init__.py")
    (root / "tools/run").write_text("#!/bin/sh\n")
    (root / "tools/run").chmod(0o755)
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout of such a tree; secret.txt is ignored."""
    root = tree(tmp_path / "checkout")
    (root / ".gitignore").write_text("__pycache__/\nsecret.txt\n")
    (root / "secret.txt").write_text("not to be sent")
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "first")
    return root


def held(packed: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        return {one.name: one for one in opened}


def key(root: Path) -> str:
    return code_archive.pack_code(root)[1]


def test_a_checkout_holds_what_git_tracks_or_would_track(checkout: Path) -> None:
    (checkout / "new ä\n.py").write_text("")
    (checkout / "recipes/__init__.py").unlink()
    (checkout / "other").mkdir()
    git(checkout / "other", "init")
    found = held(code_archive.pack_code(checkout)[0])
    inits = {f"{name}/__init__.py" for name in ("cluster", "infra", "train")}
    assert set(found) == {*inits, "train/link.py", "tools/run", "pyproject.toml", ".gitignore", "new ä\n.py"}


def test_outside_a_checkout_it_holds_the_four_packages_and_pyproject(tmp_path: Path) -> None:
    found = held(code_archive.pack_code(tree(tmp_path / "copied"))[0])
    assert set(found) == {
        *(f"{name}/__init__.py" for name in code_archive.CODE_PACKAGES),
        "train/link.py",
        "pyproject.toml",
    }


def test_in_a_folder_of_another_checkout_that_ignores_it_it_holds_the_four_packages(checkout: Path) -> None:
    (checkout / ".gitignore").write_text("venv/\n")
    assert "train/__init__.py" in held(code_archive.pack_code(tree(checkout / "venv"))[0])


def test_without_git_a_checkout_is_a_folder(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert set(held(code_archive.pack_code(checkout)[0])) >= {"train/link.py", "pyproject.toml"}


def test_what_pip_installed_says_its_requirements_all_the_same(tmp_path: Path) -> None:
    import tomllib

    root = tree(tmp_path / "site-packages")
    (root / "pyproject.toml").unlink()
    packed = code_archive.pack_code(root)[0]
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        file = opened.extractfile("pyproject.toml")
        assert file
        said = tomllib.loads(file.read().decode())["project"]["dependencies"]
    assert any(one.startswith("torch") for one in said) and not any(one.startswith("pytest") for one in said)


def test_equal_trees_have_equal_bytes_and_keys_whatever_their_times_and_owners(tmp_path: Path) -> None:
    one, other = tree(tmp_path / "one"), tree(tmp_path / "other")
    for number, path in enumerate(other.rglob("*.py")):
        os.utime(path, (number, number), follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o600)
    assert code_archive.pack_code(one) == code_archive.pack_code(other)
    found = held(code_archive.pack_code(one)[0]).values()
    assert {(info.mtime, info.uid, info.gid, info.uname, info.gname) for info in found} == {(0, 0, 0, "", "")}


@pytest.mark.parametrize("change", ["content", "name", "x-bit", "link", "kind", "gone"])
def test_another_tree_has_another_key(tmp_path: Path, change: str) -> None:
    root = tree(tmp_path / "tree")
    before, path, link = key(root), root / "cluster/__init__.py", root / "train/link.py"
    assert len(before) == 16 and set(before) <= set("0123456789abcdef")
    if change == "content":
        path.write_text("changed")
    elif change == "name":
        path.rename(path.with_name("other.py"))
    elif change == "x-bit":
        path.chmod(0o755)
    elif change == "link":
        link.unlink()
        link.symlink_to("other.py")
    elif change == "kind":
        link.unlink()
        link.write_text("__init__.py")
    else:
        path.unlink()
    assert key(root) != before


def test_too_much_is_refused_in_one_line_that_names_the_largest(checkout: Path) -> None:
    for name, size in {"model.pt": 60e6, "b.bin": 50e6, "c.bin": 3e6, "small": 2e6}.items():
        with (checkout / name).open("wb") as file:
            file.truncate(int(size))
    with pytest.raises(ClusterError) as raised:
        code_archive.pack_code(checkout)
    said = str(raised.value)
    assert "model.pt (60 MB), b.bin (50 MB), c.bin (3 MB)" in said and "small" not in said and "\n" not in said
    (checkout / "model.pt").unlink()
    assert code_archive.pack_code(checkout)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ClusterError, match=r"cluster/__init__.py: Permission denied") as raised:
        code_archive.pack_code(tree(tmp_path / "tree"))
    assert "\n" not in str(raised.value)


# --- on a machine -------------------------------------------------------------------------------------------------


class Counting(Connector):
    """This computer; remembers the bytes of each command's input."""

    name = "box-1"

    def __init__(self) -> None:
        self.inputs: list[int] = []

    def run(self, argv: Sequence[str], *, input: bytes = b"", **how: Any) -> CommandResult:
        self.inputs.append(len(input))
        return super().run(argv, input=input, **how)


def test_it_is_placed_once_as_it_was(checkout: Path, tmp_path: Path) -> None:
    packed, name = code_archive.pack_code(checkout)
    machine, folder = Counting(), str(tmp_path / "a 'strange' $folder")
    path, sent = code_archive.upload_code(machine, folder, packed, name)
    assert (path, sent) == (f"{folder}/code/{name}", True)
    there = Path(path)
    assert os.access(there / "tools/run", os.X_OK) and not os.access(there / "pyproject.toml", os.X_OK)
    assert (there / "train/link.py").readlink() == Path("__init__.py")
    assert (there / "pyproject.toml").read_text() == PYPROJECT
    machine.inputs.clear()
    assert code_archive.upload_code(machine, folder, packed, name) == (path, False)
    assert machine.inputs == [0]
    assert [one.name for one in there.parent.iterdir()] == [name]


def test_a_broken_archive_leaves_nothing_and_the_next_one_is_sent(checkout: Path, tmp_path: Path) -> None:
    packed, name = code_archive.pack_code(checkout)
    with pytest.raises(ClusterError, match="box-1: the code cannot be put into") as raised:
        code_archive.upload_code(Counting(), str(tmp_path), packed[: len(packed) // 2], name)
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "code").iterdir()) == []
    assert code_archive.upload_code(Counting(), str(tmp_path), packed, name)[1]


def test_no_right_to_write_is_one_line_that_names_machine_and_folder(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"box-1: the code cannot be put into .*/file/code/.*: mkdir: .*directory"):
        code_archive.upload_code(Counting(), str(tmp_path / "file"), *code_archive.pack_code(checkout))


def test_many_at_once_leave_one_whole_folder(checkout: Path, tmp_path: Path) -> None:
    packed, name = code_archive.pack_code(checkout)
    together, answers = threading.Barrier(6), []

    class Together(Connector):
        """Begins to unpack when all others do too."""

        def run(self, argv: Sequence[str], **how: Any) -> CommandResult:
            if argv[0] == "sh":
                together.wait(30)
            return super().run(argv, **how)

    def put() -> None:
        answers.append(code_archive.upload_code(Together(), str(tmp_path), packed, name))

    threads = [threading.Thread(target=put) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert answers == [(f"{tmp_path}/code/{name}", True)] * 6
    assert [one.name for one in (tmp_path / "code").iterdir()] == [name]
    assert (tmp_path / "code" / name / "train/__init__.py").exists()


def test_what_is_placed_of_this_project_runs(tmp_path: Path) -> None:
    path, _ = code_archive.upload_code(Connector(), str(tmp_path), *code_archive.pack_code())
    ran = Connector().run(
        [sys.executable, "-P", "-c", "import cluster; print(cluster.__file__)"], env={"PYTHONPATH": path}
    )
    assert ran.out.decode().strip() == f"{path}/cluster/__init__.py"
