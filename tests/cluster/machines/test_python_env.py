"""A Python that has what the project needs: the one that is there, or a venv made once. Real venvs, no network."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ClusterError
from cluster.machines import python_env

ROOT = Path(__file__).resolve().parents[3]
WHEEL = "imgnet_dummy-1.5-py3-none-any.whl"


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "not true in time"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of a package that is nowhere installed."""
    folder = tmp_path_factory.mktemp("wheels")
    about = "Metadata-Version: 2.1\nName: imgnet-dummy\nVersion: 1.5\n"
    with zipfile.ZipFile(folder / WHEEL, "w") as file:
        file.writestr("imgnet_dummy.py", "word = 'found'\n")
        file.writestr("imgnet_dummy-1.5.dist-info/METADATA", about)
        file.writestr(
            "imgnet_dummy-1.5.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("imgnet_dummy-1.5.dist-info/RECORD", "")
    return folder


def code(folder: Path, *needs: str) -> Path:
    """A copy of the project with other requirements."""
    for name in ("cluster", "train"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pyproject.toml").write_text(f"[project]\ndependencies = {json.dumps(needs)}\n")
    return folder


def start(root: Path, folder: Path, path: str = "", **env: str) -> "subprocess.Popen[str]":
    """Start the command as it is started on a machine; uv only if `path` holds one."""
    bare = os.pathsep.join(filter(None, [path, "/usr/bin:/bin"]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cluster.machines.python_env", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": bare, "HOME": str(folder), "PYTHONPATH": str(root), "PIP_NO_INDEX": "1", **env},
    )


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, _ = process.communicate(timeout=100)
    said: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {**said, "out": out, "code": process.returncode}


FAKE_UV = """\
#!{python} -IS
import os, signal, sys, time
words, place = sys.argv[1:], {place!r}
with open(place + "/words", "a") as file:
    print(*words, file=file)
if words[0] == "venv":
    os.makedirs(words[-1] + "/bin")
    os.makedirs(words[-1] + "/lib/python3.11/site-packages")
    os.symlink({python!r}, words[-1] + "/bin/python")
else:
    if "-c" in words:
        with open(place + "/constraints", "w") as file:
            file.write(open(words[words.index("-c") + 1]).read())
    print("installing", words[-1])
    if os.path.exists(place + "/hang"):
        open(place + "/hangs", "w").write(str(os.getpid()))
        time.sleep(600)
    if os.path.exists(place + "/fail"):
        sys.exit(open(place + "/fail").read())
"""


@pytest.fixture
def uv(tmp_path: Path) -> Path:
    """A folder with a uv that makes a venv of links and installs nothing."""
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


# --- what is needed, and what is there ----------------------------------------------------------------------------


def test_a_python_that_has_everything_is_used_as_it_is(tmp_path: Path) -> None:
    found = python_env.ensure_environment(tmp_path, ["pytest>=1", "torch>=2"])
    assert found["python"] == sys.executable and not found["made"]
    assert found["torch"].split("+")[0] == python_env._installed_version("torch").split("+")[0]  # type: ignore[union-attr]
    assert not list(tmp_path.iterdir())


def test_the_requirements_are_those_of_the_pyproject_beside_the_package(tmp_path: Path) -> None:
    assert any(one.startswith("torch>=") for one in python_env.project_requirements())
    said = answer(start(code(tmp_path / "code"), tmp_path / "here"))
    assert (said["python"], said["made"], said["code"]) == (sys.executable, False, 0)


@pytest.mark.parametrize("text", [None, "not toml", "[project]\n"])
def test_no_requirements_is_one_line_that_names_the_file(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "pyproject.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ClusterError, match=r"pyproject.toml does not list the dependencies") as raised:
        python_env.project_requirements(path)
    assert "\n" not in str(raised.value)


FITS = [
    ("2.13.0", ">=2.13,<2.14", True),
    ("2.13.1+cu130", ">=2.13,<2.14", True),
    ("2.14.0", ">=2.13,<2.14", False),
    ("2.13.0a0+git1", ">=2.13,<2.14", False),
    ("2.9.1", ">=2.13", False),
    ("10.3", ">=10.3", True),
    ("10.3.0", "==10.3", True),
    ("1.2.3", "==1.2.*", True),
    ("1.20.3", "==1.2.*", False),
    ("1.2.3", "!=1.2.*", False),
    ("1.2.3", "!=1.2.4", True),
    ("1.9", "~=1.4", True),
    ("2.0", "~=1.4", False),
    ("1.4.9", "~=1.4.2", True),
    ("1.5", "~=1.4.2", False),
    ("3", ">2, <=3", True),
    ("1", "", True),
]


@pytest.mark.parametrize("version, specifiers, expected", FITS)
def test_a_version_fits_as_pip_says(version: str, specifiers: str, expected: bool) -> None:
    from packaging.specifiers import SpecifierSet

    assert python_env.version_matches(version, specifiers) is expected
    assert SpecifierSet(specifiers).contains(version, prereleases=True) is expected


def test_a_rule_that_is_not_known_fits_nothing() -> None:
    assert not python_env.version_matches("1.0", "<>1.0") and not python_env.version_matches(
        "1.0", "@ https://localhost/x.whl"
    )


@pytest.mark.parametrize("pip_is_there", [True, False])
@pytest.mark.parametrize(
    "need, expected",
    [
        ("pytest", True),
        ("PyTest >= 1.0", True),
        ("pytest[dev]>=1,<9999", True),
        ("pytest>=9999", False),
        ("imgnet-nowhere", False),
    ],
)
def test_a_requirement_is_held_against_what_is_installed(
    need: str, expected: bool, pip_is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Any:
        raise ImportError

    if not pip_is_there:
        monkeypatch.setattr(python_env, "_import_packaging", refuse)
    assert python_env.is_installed(need) is expected


def test_what_only_other_systems_need_is_not_missed() -> None:
    assert python_env.is_installed("imgnet-nowhere>=3; sys_platform == 'win32'")


# --- making one ---------------------------------------------------------------------------------------------------


@pytest.mark.rehearsal
def test_two_jobs_at_once_make_one_real_venv_that_has_the_package_and_sees_this_pythons_torch(
    tmp_path: Path, wheels: Path
) -> None:
    root, folder = code(tmp_path / "code", "torch>=2", "imgnet-dummy>=1.2"), tmp_path / "a folder"
    folder.mkdir()
    said = [answer(one) for one in [start(root, folder, PIP_FIND_LINKS=wheels.as_uri()) for _ in range(2)]]
    assert [one["code"] for one in said] == [0, 0], said
    assert sorted(one["made"] for one in said) == [False, True], said
    (python,) = {one["python"] for one in said}
    assert python.startswith(f"{folder}/venv/") and {one["torch"] for one in said} == {
        python_env._installed_version("torch")
    }
    made = next(one for one in said if one["made"])
    assert "imgnet-dummy" in made["out"] and "this machine's own torch==" in made["why"]
    ask = "import imgnet_dummy, torch; print(imgnet_dummy.word, torch.__name__)"
    assert subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout == "found torch\n"
    assert answer(start(root, folder))["why"] == "made by an earlier job"
    assert not list((folder / "venv").glob(".*.tmp"))


def test_uv_is_used_where_it_is_and_installs_only_what_is_missing(uv_only: Path, tmp_path: Path) -> None:
    found = python_env.ensure_environment(tmp_path / "here", ["torch>=2", "pytest>=1", "imgnet-dummy>=1"])
    venv, install = (uv_only / "words").read_text().splitlines()
    assert venv.startswith(f"venv --python {sys.executable}") and found["made"]
    assert install.endswith(" imgnet-dummy>=1") and "pytest>=1" not in install
    kept = (uv_only / "constraints").read_text().splitlines()
    assert kept == [f"{name}=={python_env._installed_version(name)}" for name in ("torch", "pytest")]


def test_without_a_fitting_torch_nothing_of_the_machine_is_used(uv_only: Path, tmp_path: Path) -> None:
    python_env.ensure_environment(tmp_path / "here", ["torch>=9999", "pytest>=1"])
    venv, install = (uv_only / "words").read_text().splitlines()
    assert "--system-site-packages" not in venv and install.endswith(" torch>=9999 pytest>=1")
    assert not (uv_only / "constraints").exists()


@pytest.mark.parametrize("child", [True, False])
def test_the_packages_of_this_python_are_seen_also_if_it_is_a_venv(
    uv_only: Path, tmp_path: Path, child: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/elsewhere" if child else sys.prefix)
    python_env.make_venv(tmp_path / "one", ["imgnet-dummy"], with_system_packages=True)
    words = (uv_only / "words").read_text().splitlines()[0]
    assert ("--system-site-packages" in words) is not child
    shown = list(tmp_path.glob("one/lib/python3*/site-packages/_machine.pth"))
    assert len(shown) == child
    if shown:
        assert f"addsitedir('{Path(pytest.__file__).parents[1]}')" in shown[0].read_text()


def test_nothing_to_install_is_a_venv_all_the_same(tmp_path: Path, uv_only: Path) -> None:
    python_env.make_venv(tmp_path / "one", [])
    assert (tmp_path / "one" / python_env.COMPLETE_MARKER).exists()
    assert len((uv_only / "words").read_text().splitlines()) == 1


def test_other_needs_another_python_or_another_torch_is_another_venv(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        python_env.venv_key(["a", "b"], ""),
        python_env.venv_key(["a"], ""),
        python_env.venv_key(["a", "b"], "torch==2.13.0"),
    ]
    assert python_env.venv_key(["b", "a"], "") == keys[0]
    monkeypatch.setattr(sys, "prefix", "/opt/other")
    keys.append(python_env.venv_key(["a", "b"], ""))
    monkeypatch.setattr(python_env.platform, "python_version", lambda: "3.99.0")
    keys.append(python_env.venv_key(["a", "b"], ""))
    assert len(set(keys)) == 5


@pytest.mark.parametrize("fault", ["no mark", "no python"])
def test_a_venv_that_is_not_whole_is_made_once_more(uv_only: Path, tmp_path: Path, fault: str) -> None:
    needs = ["imgnet-dummy>=1"]
    venv = Path(python_env.ensure_environment(tmp_path, needs)["python"]).parents[1]
    (venv / "rest").write_text("of before")
    if fault == "no mark":
        (venv / python_env.COMPLETE_MARKER).unlink()
    else:
        (venv / "bin/python").unlink()
    assert python_env.ensure_environment(tmp_path, needs)["made"] and not (venv / "rest").exists()
    assert not python_env.ensure_environment(tmp_path, needs)["made"]


def test_who_is_killed_leaves_no_installer_no_lock_and_no_venv_that_is_used(uv: Path, tmp_path: Path) -> None:
    root, folder = code(tmp_path / "code", "imgnet-dummy>=1"), tmp_path / "here"
    (uv / "hang").write_text("")
    first = start(root, folder, str(uv))
    until((uv / "hangs").exists)
    pid = int(until((uv / "hangs").read_text))
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=20)
    until(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text())
    assert not list(folder.glob("venv/*/" + python_env.COMPLETE_MARKER))
    (uv / "hang").unlink()
    assert answer(start(root, folder, str(uv)))["made"]


def test_who_waits_for_another_job_says_so(uv: Path, tmp_path: Path) -> None:
    root, folder = code(tmp_path / "code", "imgnet-dummy>=1"), tmp_path / "here"
    (uv / "hang").write_text("")
    first = start(root, folder, str(uv))
    until((uv / "hangs").exists)
    second = start(root, folder, str(uv))
    assert second.stdout
    lines = [second.stdout.readline(), second.stdout.readline()]
    assert "another job is making" in lines[1], lines
    first.kill()
    first.communicate(timeout=20)
    (uv / "hang").unlink()
    assert answer(second)["made"]


# --- what goes wrong, in one line ---------------------------------------------------------------------------------

WORDS = {
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device": "the disk is full",
    "error: Failed to fetch: `x`\n  Caused by: dns error: failed to lookup": "no way from here to the package index",
    "The virtual environment was not created successfully because ensurepip is not\navailable.": "sudo apt-get install",
    "/usr/bin/python3: No module named venv": "sudo apt-get install",
    "ERROR: ResolutionImpossible: see above": "ended with code 1: ERROR: ResolutionImpossible: see above",
    "note\n  \u00d7 No solution:\n  Because there is no torch": "ended with code 1: \u00d7 No solution: Because",
    "Error: [x, -m ensurepip] returned 1.": "ended with code 1: Error: [x, -m ensurepip] returned",
    "strange": "ended with code 1: strange",
}


@pytest.mark.parametrize("words", WORDS)
def test_what_an_installer_says_becomes_one_line(uv: Path, tmp_path: Path, words: str) -> None:
    (uv / "fail").write_text(words)
    said = answer(start(code(tmp_path / "code", "imgnet-dummy>=1"), tmp_path / "here", str(uv)))
    assert (said["code"], said["python"], said["made"]) == (1, None, False)
    assert WORDS[words] in said["why"] and "\n" not in said["why"] and "Traceback" not in said["out"]
    assert words.splitlines()[0] in said["out"]
    assert not list((tmp_path / "here/venv").glob("*/" + python_env.COMPLETE_MARKER))


def test_the_package_that_debian_lacks_is_named_for_this_python(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho because ensurepip is not available\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ClusterError, match=rf"apt-get install python3\.{sys.version_info[1]}-venv"):
        python_env._run_command([str(tmp_path / "python"), "-m", "venv", "x"], tmp_path)


def test_a_full_disk_is_found_also_when_nobody_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_env, "MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(ClusterError, match=r"false: the disk is full"):
        python_env._run_command(["false"], tmp_path)


def test_pip_without_a_network_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pip")
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--retries", "1", "--disable-pip-version-check"]
    with pytest.raises(ClusterError, match="no way from here to the package index"):
        python_env._run_command([*pip, "--index-url", "http://127.0.0.1:1/simple", "imgnet-nowhere"], tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = answer(start(code(tmp_path / "code", "imgnet-dummy>=1"), tmp_path / "file"))
    assert said["why"] == f"{tmp_path}/file/venv: Not a directory" and said["code"] == 1


def test_the_caller_reads_the_last_line() -> None:
    good = b'noise\n{"python": "/p", "made": true, "torch": "2", "why": "made", "seconds": 1}\n'
    assert python_env.parse_output(good, "box-1")["python"] == "/p"
    for out, said in {
        b'{"python": null, "why": "the disk is full"}\n': "box-1: the disk is full",
        b"": "box-1: no Python environment was found or made: the command printed nothing",
        b"sh: python3: not found\n": "box-1: no Python environment was found or made: sh: python3: not found",
    }.items():
        with pytest.raises(ClusterError) as raised:
            python_env.parse_output(out, "box-1")
        assert str(raised.value) == said


def test_an_older_python_can_read_it_and_says_what_is_needed(tmp_path: Path) -> None:
    for name in ("cluster/__init__", "cluster/machines/__init__", "cluster/machines/python_env"):
        ast.parse((ROOT / f"{name}.py").read_text(), feature_version=(3, 7))
    lines = (ROOT / "cluster/machines/python_env.py").read_text().split("import argparse")[0]
    (tmp_path / "old.py").write_text(lines.replace("0x030B0000", "0x7F0B0000"))
    ran = subprocess.run([sys.executable, str(tmp_path / "old.py")], capture_output=True, text=True)
    said = json.loads(ran.stdout)
    assert ran.returncode == 1 and not ran.stderr and said["python"] is None
    assert "and 3.11 or newer is needed: sudo apt-get install python3.11" in said["why"]
