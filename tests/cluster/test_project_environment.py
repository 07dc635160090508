import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.wheels import make_wheel

from cluster import project_environment
from cluster.errors import ClusterError
from cluster.project_environment import ensure_project_environment, environment_key, find_requirements


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


def test_first_file_that_is_there_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(has_uv: bool = False) -> list[str]:
        monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/uv" if has_uv else None)
        requirements = find_requirements(project)
        return [path.name for path in requirements.sources] if requirements else []

    (project / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    assert found() == []
    (project / "pyproject.toml").write_text("[project]\ndependencies = ['tiny']\n")
    assert found() == ["pyproject.toml"]
    (project / "requirements.txt").write_text("tiny\n")
    assert found() == ["requirements.txt"]
    (project / "uv.lock").touch()
    assert found(has_uv=True) == ["uv.lock", "pyproject.toml"] and found() == ["requirements.txt"]


FAKE_UV = """\
#!/bin/sh
echo "$*" >"$0.log"
grep -q broken "$7/uv.lock" && { echo reading >&2; echo "error: damaged lock" >&2; exit 2; }
while [ "$1" != -o ]; do shift; done
echo tiny==1.0 >"$2"
"""


def test_lock_is_exported_by_uv_without_torch(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "programs/uv"
    uv.parent.mkdir()
    uv.write_text(FAKE_UV)
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=":")
    (project / "uv.lock").touch()
    found = find_requirements(project)
    assert found
    option, file = project_environment._install_arguments(found, tmp_path)
    assert option == "-r" and Path(file).read_text() == "tiny==1.0\n"
    words = uv.with_name("uv.log").read_text().split()
    assert words[:2] == ["export", "--frozen"] and words[words.index("--prune") + 1] == "torch"
    (project / "uv.lock").write_text("broken")
    with pytest.raises(ClusterError, match=r"^uv\.lock: uv cannot export it: error: damaged lock$"):
        project_environment._install_arguments(found, tmp_path)


def test_missing_and_damaged_files_are_one_line(project: Path) -> None:
    with pytest.raises(ClusterError, match=r"--requirements gpu\.txt: the project has no such file"):
        find_requirements(project, "gpu.txt")
    (project / "pyproject.toml").write_text("[project\n")
    with pytest.raises(ClusterError, match=r"^pyproject\.toml: "):
        find_requirements(project)


def test_key_follows_from_the_contents_also_of_included_files(project: Path) -> None:
    (project / "requirements.txt").write_text("-r more.txt\n")
    (project / "more.txt").write_text("a\n-c requirements.txt\n")

    def key(*kept: str) -> str:
        found = find_requirements(project)
        assert found
        return environment_key(found, kept)

    first = key()
    assert key() == first and key("torch==2.13.0") != first
    (project / "more.txt").write_text("b\n")
    assert key() != first


@pytest.mark.parametrize(("name", "line", "is_of_one_copy"), [
    *(("requirements.txt", line, True) for line in (
        "-e .", "--editable=libs", ".", "./libs", "libs/a", "a-1.0-py3-none-any.whl", "a @ file:libs/a", "-f wheels",
    )),
    *(("requirements.txt", line, False) for line in (
        "a==1 # ./b", "-r more/a.txt", "-e git+https://a/b", "https://a/b.whl", "-f https://a/b", "a @ https://a/b.whl",
    )),
    ("uv.lock", 'source = { directory = "libs/a" }', True),
    ("uv.lock", 'source = { editable = "." }', False),
])  # fmt: skip
def test_key_follows_from_the_copy_of_the_project_where_its_files_are_required(
    tmp_path: Path, name: str, line: str, is_of_one_copy: bool
) -> None:
    keys = set()
    for copy in ("first", "second"):
        file = tmp_path / copy / name
        file.parent.mkdir()
        file.write_text(f"{line}\n")
        keys.add(environment_key(project_environment.Requirements(file, (file,)), ()))
    assert len(keys) == (2 if is_of_one_copy else 1)


def test_main_without_requirements_gives_this_python(project: Path, tmp_path: Path) -> None:
    assert project_environment.main([str(project), str(tmp_path), str(tmp_path / "python"), ""]) == 0
    assert (tmp_path / "python").read_text() == sys.executable


@pytest.mark.rehearsal
def test_requirements_are_installed_once_beside_the_torch_of_this_python(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_wheel(project / "wheels", "tinypackage", requires="torch")
    (project / "requirements.txt").write_text("--no-index\n--find-links wheels\ntinypackage\n")
    python = ensure_project_environment(project, tmp_path)
    code = "import tinypackage, torch; print(tinypackage.NAME, torch.__file__)"
    output = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    this_torch = importlib.util.find_spec("torch")
    assert this_torch and output == f"tinypackage {this_torch.origin}\n"
    assert ensure_project_environment(project, tmp_path) == python
    assert "installed by an earlier job" in capfd.readouterr().out


@pytest.mark.rehearsal
def test_requirement_of_another_torch_is_one_line_and_leaves_nothing(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (project / "requirements.txt").write_text("--no-index\ntorch==1.0\n")
    assert project_environment.main([str(project), str(tmp_path), str(tmp_path / "python"), ""]) == 1
    last_line = capfd.readouterr().out.strip().splitlines()[-1]
    assert last_line.startswith("error: ") and "torch==1.0" in last_line
    assert not [path for path in (tmp_path / "venv").iterdir() if path.is_dir()]
