"""Where numbers come from: the versions and the commit that made them. Imports no torch."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]


def package_versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("imgnet-cluster", "torch", "numpy", "simplejpeg", "pillow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def cpu_model() -> str:
    """Return what this machine's processors call themselves, "" where they do not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def git_commit(folder: Path = REPOSITORY_ROOT) -> str | None:
    """Return the commit of a working tree, with "+changes" when files differ from it; None outside git."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
        return run.stdout.strip() if run.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "-uno") else "") if commit else None
    except (OSError, subprocess.TimeoutExpired):
        return None
