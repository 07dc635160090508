"""Where results come from: package versions, processor and commit. Imports no torch."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
RECORDED_PACKAGES = ("imgnet-cluster", "torch", "numpy", "simplejpeg", "pillow")
GIT_TIMEOUT_SECONDS = 20


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on, "not installed" for a missing one."""
    versions = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def cpu_model() -> str:
    """Return the model name of this machine's processors, "" where /proc/cpuinfo does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def git_commit(folder: Path = REPOSITORY_ROOT) -> str | None:
    """Return the commit of a working tree, with "+changes" when tracked files differ from it; None outside git."""

    def git(*arguments: str) -> str:
        completed = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS
        )
        return completed.stdout.strip() if completed.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "-uno") else "") if commit else None
    except (OSError, subprocess.TimeoutExpired):
        return None
