"""A user's own project, trained by the program as pip has installed it from a wheel, without a clone of the repository.

The wheel is installed without its dependencies into a new virtual environment, which sees the packages of this one.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.ssh_machines import Testbed

from cluster.machines.code_archive import CODE_PACKAGES

ROOT = Path(__file__).resolve().parents[2]
BUILD_WHEEL = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
OPTIONS = ("-y", "--procs", "1", "--workers", "0")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command `imgnet-cluster` of a new virtual environment into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("installed")
    source, venv = folder / "source", folder / "venv"
    source.mkdir()
    for name in CODE_PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run([sys.executable, "-c", BUILD_WHEEL, str(folder)], cwd=source)
    (wheel,) = folder.glob("*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    (site_packages,) = venv.glob("lib/python3*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "--no-deps", "--no-index"]
    run([*pip, str(wheel)])
    return str(venv / "bin" / "imgnet-cluster")


def run(argv: list[str], cwd: Path | None = None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed


class User:
    """A user with the installed command, in a sandbox with a new project in the folder `mine`."""

    def __init__(self, sandbox: Sandbox, command: str) -> None:
        self.sandbox = sandbox
        self.command = command
        self.project = sandbox.path / "mine"
        self.cli("init", "mine")

    def cli(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Run a command to its end and return what it prints, stderr too. It must succeed."""
        completed = subprocess.run(
            [self.command, *map(str, words)],
            cwd=cwd or self.sandbox.path,
            env=self.sandbox.env | {"IMGNET_RUNS": str(self.sandbox.path / "runs")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,  # several processes import torch, one after the other
        )
        assert completed.returncode == 0, completed
        return completed.stdout + completed.stderr

    def launch(self, *words: str | Path) -> str:
        return self.cli("launch", *OPTIONS, "--data", self.sandbox.data, *words)

    def image(self) -> Path:
        return next((self.sandbox.data / "val").glob("*/*"))


@pytest.fixture
def user(sandbox: Sandbox, command: str) -> User:
    return User(sandbox, command)


def test_own_project_trains_here_from_another_folder_and_keeps_its_code(user: User) -> None:
    assert "resnet10_tiny" in user.launch("--local", "--dry-run", "quickstart")  # it came with the program
    user.launch("--local", "mine/recipe.py")
    copy = user.sandbox.job().run_folder.user_project
    assert {path.name for path in copy.iterdir()} >= {"recipe.py", "nets.py", "losses.py"}
    (user.project / "nets.py").write_text("raise RuntimeError('the job has a copy')")
    elsewhere = user.sandbox.path / "elsewhere"
    elsewhere.mkdir()
    assert "%" in user.cli("predict", "job-1", user.image(), cwd=elsewhere)
    assert "mine" in user.cli("eval", "job-1", "--crops", "center", cwd=elsewhere)
    assert "job-1.safetensors" in user.cli("export", "job-1", cwd=elsewhere)


def test_own_project_travels_to_machines_over_ssh(user: User, testbed: Callable[[int], Testbed]) -> None:
    bed = testbed(2)
    hosts = bed.write_hosts_toml(user.sandbox.path / "hosts.toml")
    shown = user.launch("--ssh", hosts, "--machines", "2", "mine/recipe.py")
    assert f"your code travels to the machines: 4 files of {user.project}, " in shown
    assert "done" in user.cli("ls")
    for machine in bed.machines:
        (nets,) = machine.home.glob(".imgnet/code/*/user_project/nets.py")
        assert nets.read_text() == (user.project / "nets.py").read_text()
    assert "%" in user.cli("predict", "job-1", user.image())
