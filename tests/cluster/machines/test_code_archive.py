"""The code archive: its content, when two are equal, and how it is placed on a machine."""

import importlib.metadata
import io
import os
import tarfile
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.local_connector import LocalConnector

from cluster.errors import ClusterError
from cluster.machines import code_archive

PYPROJECT = '[project]\ndependencies = ["click>=8"]\n'


def make_tree(root: Path) -> Path:
    """Make a project: the four packages, a script, a link, and files that must not be sent."""
    for name in (*code_archive.CODE_PACKAGES, "docs", "cluster/__pycache__"):
        (root / name).mkdir(parents=True)
    for name in code_archive.CODE_PACKAGES:
        (root / name / "__init__.py").write_text(f'"""{name}."""\n')
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "cluster/__pycache__/x.pyc").write_bytes(b"compiled")
    (root / "train/link.py").symlink_to("__init__.py")
    (root / "docs/page.md").write_text("")
    (root / "train/run").write_text("#!/bin/sh\n")
    (root / "train/run").chmod(0o755)
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The folder of such a project."""
    return make_tree(tmp_path / "checkout")


def archive_members(archive_bytes: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive_bytes)) as opened:
        return {member.name: member for member in opened}


def test_pack_code_has_packages_pyproject_and_the_copy_of_the_users_project(checkout: Path, tmp_path: Path) -> None:
    (checkout / "cluster/.swap").symlink_to("nowhere")
    project = tmp_path / "user_project"
    for name in ("nets.py", "parts/new ä\n.py", "__pycache__/nets.pyc"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    without, with_project = code_archive.pack_code(checkout), code_archive.pack_code(checkout, project)
    packages = {f"{name}/__init__.py" for name in code_archive.CODE_PACKAGES}
    names = {*packages, "train/link.py", "train/run", "cluster/.swap", "pyproject.toml"}
    assert set(archive_members(without[0])) == names
    assert set(archive_members(with_project[0])) == names | {"user_project/nets.py", "user_project/parts/new ä\n.py"}
    assert without[1] != with_project[1] and code_archive.pack_code(checkout, tmp_path / "nowhere") == without


def test_pack_code_of_installed_package_writes_pyproject(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "site-packages")
    (root / "pyproject.toml").unlink()
    with tarfile.open(fileobj=io.BytesIO(code_archive.pack_code(root)[0])) as opened:
        file = opened.extractfile("pyproject.toml")
        assert file
        dependencies = tomllib.loads(file.read().decode())["project"]["dependencies"]
    required = importlib.metadata.requires("imgnet-cluster") or []
    assert dependencies == [requirement for requirement in required if "extra ==" not in requirement]


def test_pack_code_ignores_times_and_owners(tmp_path: Path) -> None:
    first, second = make_tree(tmp_path / "one"), make_tree(tmp_path / "other")
    for number, path in enumerate(second.rglob("*.py")):
        os.utime(path, (number, number), follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o600)
    assert code_archive.pack_code(first) == code_archive.pack_code(second)
    members = archive_members(code_archive.pack_code(first)[0]).values()
    assert {(info.mtime, info.uid, info.gid, info.uname, info.gname) for info in members} == {(0, 0, 0, "", "")}


@pytest.mark.parametrize("change", [
    lambda path, link: path.write_text("changed"),
    lambda path, link: path.rename(path.with_name("other.py")),
    lambda path, link: path.chmod(0o755),
    lambda path, link: (link.unlink(), link.symlink_to("other.py")),
    lambda path, link: (link.unlink(), link.write_text("__init__.py")),
    lambda path, link: path.unlink(),
], ids=["content", "name", "x-bit", "link", "kind", "gone"])  # fmt: skip
def test_pack_code_changed_tree_changes_hash(tmp_path: Path, change: Callable[[Path, Path], object]) -> None:
    root = make_tree(tmp_path / "tree")
    before = code_archive.pack_code(root)[1]
    assert len(before) == 16 and set(before) <= set("0123456789abcdef")
    change(root / "cluster/__init__.py", root / "train/link.py")
    assert code_archive.pack_code(root)[1] != before


# --- on a machine -------------------------------------------------------------------------------------------------


def test_upload_code_places_tree_once_also_by_concurrent_calls(checkout: Path, tmp_path: Path) -> None:
    archive_bytes, name = code_archive.pack_code(checkout)
    folder = str(tmp_path / "a 'strange' $folder")

    def upload(_: int) -> str:
        return code_archive.upload_code(LocalConnector(), folder, archive_bytes, name)

    with ThreadPoolExecutor(6) as pool:
        (path,) = map(Path, set(pool.map(upload, range(24))))
    assert str(path) == code_archive.code_folder(folder, name) == f"{folder}/code/{name}"
    assert os.access(path / "train/run", os.X_OK) and not os.access(path / "pyproject.toml", os.X_OK)
    assert (path / "train/link.py").readlink() == Path("__init__.py")
    assert (path / "pyproject.toml").read_text() == PYPROJECT
    assert [path.name for path in path.parent.iterdir()] == [name]


def test_upload_code_broken_archive_leaves_nothing(checkout: Path, tmp_path: Path) -> None:
    archive_bytes, name = code_archive.pack_code(checkout)
    with pytest.raises(ClusterError, match=r"^box-1: the code cannot be unpacked into .*[^\n]$"):
        code_archive.upload_code(LocalConnector("box-1"), str(tmp_path), archive_bytes[: len(archive_bytes) // 2], name)
    assert list((tmp_path / "code").iterdir()) == []
