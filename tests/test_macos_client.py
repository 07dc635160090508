"""The client side (plan, launch to ssh or AWS, ls, tensorboard) works on macOS: nothing Linux-only runs at import."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Names of the standard library that macOS does not have, and its value of sys.platform.
AS_MACOS = """
import os, select, signal, socket, sys
for module, names in {
    os: ["sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "posix_fallocate", "posix_fadvise"],
    select: ["epoll"], signal: ["SIGRTMIN", "SIGRTMAX", "pidfd_send_signal"], socket: ["AF_NETLINK", "SO_BINDTODEVICE"],
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""
CLIENT_MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("cluster", "infra", "train/recipe", "train/forecast", "train/tools")
    for path in (ROOT / package).rglob("*.py")
    if path.name != "__main__.py" and "agent" not in path.parts
)


def run_as_macos(code: str, *argv: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code in a process without the Linux-only names."""
    return subprocess.run(
        [sys.executable, "-c", AS_MACOS + code, *argv], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_client_modules_import_without_linux_only_names() -> None:
    code = "import importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    done = run_as_macos(code, *CLIENT_MODULES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "argv", [["plan", "recipes/resnet50_18min.py"], ["ls"], ["launch", "--help"], ["completion", "zsh"]]
)
def test_client_command_runs_without_linux_only_names(argv: list[str]) -> None:
    code = "sys.platform = 'darwin'\nfrom cluster.cli import main\nsys.argv[0] = 'imgnet-cluster'\nmain()\n"
    done = run_as_macos(code, *argv)
    assert done.returncode == 0, done.stderr
