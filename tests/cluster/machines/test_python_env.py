"""The Python environment of a machine: the existing one, or a venv that is made once. Real venvs, no network."""

import ast
import errno
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.waiting import wait_for
from support.wheels import make_wheel

from cluster.errors import ClusterError
from cluster.machines import python_env

ROOT = Path(__file__).resolve().parents[3]


def copy_project(folder: Path, *dependencies: str) -> Path:
    for name in ("cluster", "train"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pyproject.toml").write_text(f"[project]\ndependencies = {json.dumps(dependencies)}\n")
    return folder


def start_main(root: Path, folder: Path, *options: str, path: str = "", **env: str) -> "subprocess.Popen[str]":
    """Start the module as it is started on a machine. uv is on PATH only if the folder `path` has it."""
    bare = os.pathsep.join(filter(None, [path, "/usr/bin:/bin"]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cluster.machines.python_env", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": bare, "HOME": str(folder), "PYTHONPATH": str(root), "PIP_NO_INDEX": "1", **env},
    )


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, _ = process.communicate(timeout=100)
    answer: dict[str, Any] = json.loads(next(line for line in out.splitlines() if line.startswith('{"python"')))
    return {**answer, "out": out, "code": process.returncode}


FAKE_UV = """\
#!{python} -IS
import os, signal, sys, time
argv, place = sys.argv[1:], {place!r}
with open(place + "/calls", "a") as file:
    print(*argv, file=file)
if argv[0] == "venv":
    os.makedirs(argv[-1] + "/bin")
    os.makedirs(argv[-1] + "/lib/python3.11/site-packages")
    os.symlink({python!r}, argv[-1] + "/bin/python")
else:
    if "-c" in argv:
        with open(place + "/constraints", "w") as file:
            file.write(open(argv[argv.index("-c") + 1]).read())
    print("installing", argv[-1])
    if os.path.exists(place + "/hang"):
        open(place + "/hangs", "w").write(str(os.getpid()))
        time.sleep(600)
    if os.path.exists(place + "/fail"):
        sys.exit(open(place + "/fail").read())
"""


@pytest.fixture
def uv(tmp_path: Path) -> Path:
    """A folder with a fake uv that makes a venv of links, installs nothing and records its calls."""
    folder = tmp_path / "uv"
    folder.mkdir()
    script = folder / "uv"
    script.write_text(FAKE_UV.format(python=sys.executable, place=str(folder)))
    script.chmod(0o755)
    return folder


@pytest.fixture
def uv_only(uv: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{uv}:/usr/bin:/bin")
    return uv


VERSION_CASES = [
    ("2.13.1+cu130", ">=2.13,<2.14", True),
    ("2.14.0", ">=2.13,<2.14", False),
    ("2.13.0a0+git1", ">=2.13,<2.14", False),
    ("1.2.3", "!=1.2.*", False),
    ("1", "; sys_platform == 'win32'", True),
]
PACKAGING_MODULES = ("packaging.requirements", "pip._vendor.packaging.requirements")  # the second is pip's own copy


def hide_modules(monkeypatch: pytest.MonkeyPatch, names: Iterable[str]) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("module", PACKAGING_MODULES)
def test_is_installed_follows_pep_440(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_modules(monkeypatch, [name for name in PACKAGING_MODULES if name != module])
    for version, specifiers, expected in VERSION_CASES:
        monkeypatch.setattr(python_env, "installed_version", {"imgnet-dummy": version}.get)
        assert python_env.is_installed(f"imgnet-dummy{specifiers}") is expected, (version, specifiers)
    assert not python_env.is_installed("imgnet-nowhere")


@pytest.mark.rehearsal
def test_main_two_jobs_make_one_venv_with_own_torch(tmp_path: Path) -> None:
    """Without ensurepip, which the Python of Debian's packages lacks."""
    make_wheel(tmp_path / "wheels", "imgnet-dummy")
    root, folder = copy_project(tmp_path / "code", "torch>=2", "imgnet-dummy>=1.2"), tmp_path / "a folder"
    folder.mkdir()
    of_user = {"PIP_USER": "1", "PIP_TARGET": str(tmp_path / "elsewhere")}
    wheels = (tmp_path / "wheels").as_uri()
    processes = [start_main(root, folder, PIP_FIND_LINKS=wheels, **of_user) for _ in range(2)]
    answers = [finish(process) for process in processes]
    assert [answer["code"] for answer in answers] == [0, 0], answers
    found, made = sorted(answers, key=lambda answer: answer["why"])
    assert found["why"] == "made by an earlier job" and made["python"] == found["python"]
    assert made["python"].startswith(f"{folder}/venv/") and made["torch"] == python_env.installed_version("torch")
    assert "imgnet-dummy" in made["out"] and "this machine's own torch==" in made["why"]
    program = "import imgnet_dummy, torch; print(imgnet_dummy.NAME, torch.__name__)"
    assert subprocess.check_output([made["python"], "-c", program], text=True) == "imgnet-dummy torch\n"
    assert finish(start_main(root, folder))["why"] == "made by an earlier job"
    assert not list((folder / "venv").glob(".*.tmp")) and not list(folder.glob("venv/*/lib/python3*/site-packages/pip"))


THIS_TORCH, THIS_PYTEST = (f"{name}=={python_env.installed_version(name)}" for name in ("torch", "pytest"))


@pytest.mark.parametrize(("needs", "installed", "constraints", "hidden"), [
    (["torch>=2", "pytest>=1", "imgnet-dummy"], ["imgnet-dummy"], [THIS_TORCH, THIS_PYTEST], ()),
    pytest.param(["torch>=9999", "pytest>=1"], ["torch>=9999", "pytest>=1"], [], (), id="another torch"),
    # Of two requirements of torch one is met, as for old GPUs: this torch must not be pinned.
    pytest.param(["torch>=2", "torch<2.1"], ["torch>=2", "torch<2.1"], [], (), id="older torch"),
    pytest.param(["torch>=2", "pytest>=1"], ["torch>=2", "pytest>=1"], [], PACKAGING_MODULES, id="no packaging"),
])  # fmt: skip
def test_ensure_environment_installs_what_is_missing_with_uv(
    uv_only: Path,
    tmp_path: Path,
    needs: list[str],
    installed: list[str],
    constraints: list[str],
    hidden: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide_modules(monkeypatch, hidden)
    assert python_env.ensure_environment(tmp_path / "here", needs).why.startswith("made")
    venv, install = (uv_only / "calls").read_text().splitlines()
    assert venv.startswith(f"venv --python {sys.executable}") and install.endswith(" ".join(["", *installed]))
    assert ("pytest>=1" in install) == ("pytest>=1" in installed)
    pinned = uv_only / "constraints"
    assert (pinned.read_text().splitlines() if pinned.exists() else []) == constraints
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)  # as that of a Python of the system
    python_env.ensure_environment(tmp_path / "of the system", needs)
    venv = (uv_only / "calls").read_text().splitlines()[2]
    assert ("--system-site-packages" in venv) == bool(constraints), "its own packages are shown"


def test_venv_key_depends_on_packages_python_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ((["a", "b"], ""), (["a"], ""), (["a", "b"], "torch==2.13.0"))
    keys = [python_env.venv_key(*case) for case in cases]
    assert python_env.venv_key(["b", "a"], "") == keys[0]
    for module, name, value in ((sys, "prefix", "/opt/other"), (platform, "python_version", lambda: "3.99.0")):
        monkeypatch.setattr(module, name, value)
        keys.append(python_env.venv_key(["a", "b"], ""))
    assert len(set(keys)) == 5


@pytest.mark.parametrize("fault", ["no mark", "no python", "no process"])
def test_ensure_environment_remakes_incomplete_venv(
    uv_only: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose Python cannot be started now, because this user may start no more processes, stays."""
    needs = ["imgnet-dummy>=1"]
    venv = Path(python_env.ensure_environment(tmp_path, needs).python).parents[1]
    (venv / "rest").write_text("of the old venv")
    if fault == "no process":
        failing = Mock(side_effect=BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
        with monkeypatch.context() as patch, pytest.raises(BlockingIOError):
            patch.setattr(subprocess, "run", failing)
            python_env.ensure_environment(tmp_path, needs)
        assert (venv / "rest").exists()
    else:
        (venv / {"no mark": python_env.COMPLETE_MARKER, "no python": "bin/python"}[fault]).unlink()
        assert python_env.ensure_environment(tmp_path, needs).why == "made" and not (venv / "rest").exists()
    assert python_env.ensure_environment(tmp_path, needs).why == "made by an earlier job"


def test_main_killed_leaves_no_installer_lock_or_venv(uv: Path, tmp_path: Path) -> None:
    root, folder = copy_project(tmp_path / "code", "imgnet-dummy>=1"), tmp_path / "here"
    (uv / "hang").write_text("")
    first = start_main(root, folder, path=str(uv))
    wait_for((uv / "hangs").exists)
    pid = int(wait_for((uv / "hangs").read_text))
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=120)
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text())
    assert not list(folder.glob("venv/*/" + python_env.COMPLETE_MARKER))
    (uv / "hang").unlink()
    assert finish(start_main(root, folder, path=str(uv)))["why"] == "made"


INSTALLER_ERRORS = {
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device": "the disk is full",
    "error: Failed to fetch: `x`\n  Caused by: dns error: failed to lookup": "no way from here to the package index",
    "The virtual environment was not created successfully because ensurepip is not\navailable.": "sudo apt-get install",
    "/usr/bin/python3: No module named venv": "sudo apt-get install",
    "note\n  \u00d7 No solution:\n  Because there is no torch": "ended with code 1: \u00d7 No solution: Because",
}


@pytest.mark.parametrize("output", INSTALLER_ERRORS)
def test_main_installer_error_becomes_one_line(uv: Path, tmp_path: Path, output: str) -> None:
    (uv / "fail").write_text(output)
    answer = finish(start_main(copy_project(tmp_path / "code", "imgnet-dummy>=1"), tmp_path / "here", path=str(uv)))
    assert (answer["code"], answer["python"]) == (1, "")
    assert INSTALLER_ERRORS[output] in answer["why"] and "\n" not in answer["why"] and "Traceback" not in answer["out"]
    assert output.splitlines()[0] in answer["out"]
    assert not list((tmp_path / "here/venv").glob("*/" + python_env.COMPLETE_MARKER))


def test_parse_output_returns_python_seconds_and_what_follows() -> None:
    good = 'noise\n{"python": "/p", "torch": "2", "why": "made", "seconds": 1}\nmore\n'
    environment = python_env.Environment(python="/p", torch="2", why="made", seconds=1.0)
    assert python_env.parse_output(good, "box-1") == (environment, "more")
    for out, message in {
        '{"python": "", "why": "the disk is full"}\n': "box-1: the disk is full",
        "": "box-1: no Python environment was found or made: the command printed nothing; check",
        "sh: python3: not found\n": "box-1: no Python environment was found or made: sh: python3: not found; check",
        '{"python": ' + "[" * 100_000: "box-1: no Python environment was found or made: ",
        '{"python": null}': "box-1: no Python environment was found or made: ",
    }.items():
        with pytest.raises(ClusterError) as raised:
            python_env.parse_output(out, "box-1")
        assert str(raised.value).startswith(message)


def test_main_find_names_what_is_missing_makes_nothing_and_runs_the_module_of_then(uv: Path, tmp_path: Path) -> None:
    code = copy_project(tmp_path / "code", "imgnet-dummy>=1")
    then = ("--find", "--then", "platform", "--terse")
    answer = finish(start_main(code, tmp_path / "here", *then, path=str(uv)))
    assert (answer["code"], answer["python"], answer["missing"]) == (0, sys.executable, ["imgnet-dummy>=1"])
    assert answer["out"].splitlines()[-1].startswith("Linux") and not (tmp_path / "here").exists()


def test_find_environment_says_when_none_could_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(python_env, "_has_pip_for_others", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = rf"cannot make a venv; .* apt-get install python3\.{sys.version_info[1]}-venv"
    with pytest.raises(ClusterError, match=message):
        python_env.ensure_environment(tmp_path, ["imgnet-dummy>=1"], find_only=True)


def test_main_on_older_python_says_what_is_needed(tmp_path: Path) -> None:
    for name in ("cluster/__init__", "cluster/machines/__init__", "cluster/machines/python_env"):
        ast.parse((ROOT / f"{name}.py").read_text(), feature_version=(3, 7))
    lines = (ROOT / "cluster/machines/python_env.py").read_text().split("import argparse")[0]
    (tmp_path / "old.py").write_text(lines.replace("0x030B0000", "0x7F0B0000"))
    completed = subprocess.run([sys.executable, str(tmp_path / "old.py")], capture_output=True, text=True)
    answer = json.loads(completed.stdout)
    assert completed.returncode == 1 and not completed.stderr and answer["python"] == ""
    assert "and 3.11 or newer is needed: sudo apt-get install python3.11" in answer["why"]
