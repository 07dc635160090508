"""Installs what a user's project requires into an environment of its own, on a machine of a job.

    python3 -m cluster.project_environment PROJECT FOLDER RESULT REQUIREMENTS

REQUIREMENTS is the file that the user named, or "". The environment is FOLDER/venv/project-<key>. It sees the packages
of this Python, and keeps its torch: requirements of another version are an error. The key follows from the contents of
the project's files, so each state of them is installed once and kept for later jobs. Where these files require files of
the project, as `-e .` does, an environment belongs to one copy of the project: a later job would run the code of an
earlier one. RESULT gets the path of the environment's Python, or of this one when the project requires nothing.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError
from cluster.machines import python_env
from cluster.machines.python_env import installed_version
from train.tools.errors import one_line_error
from train.tools.files import write_atomic

LOCK_FILE, REQUIREMENTS_FILE, PROJECT_FILE = "uv.lock", "requirements.txt", "pyproject.toml"
FILES = (LOCK_FILE, REQUIREMENTS_FILE, PROJECT_FILE)  # the first that is there counts
# They belong to the build of torch for the machine's GPUs, so they are never replaced.
KEPT_PACKAGES = re.compile(r"torch|torchvision|torchaudio|triton|nvidia-.*", re.IGNORECASE)
INCLUDE_LINE = re.compile(r"\s*(?:-r|--requirement|-c|--constraint)[\s=]+(\S+)")
# A requirement of files, in the forms of pip and, at the end, of uv.lock; the project itself is left out of that.
LOCAL_LINE = re.compile(
    r"\s*(?:(?:-e|--editable|-f|--find-links)[\s=]+(?!\w+\+|https?:)|[./]|file:|[\w.-]+/|[\w.-]+\.(?:whl|zip|tgz|tar\.gz)\b)"
    r'|.*@\s*file:|.*\{ (?:directory|editable|path) = "(?!\.")'
)
MAX_INCLUDED_FILES = 50


@dataclass(frozen=True)
class Requirements:
    """What a project requires: the file that says so, and all files whose contents count."""

    file: Path
    sources: tuple[Path, ...]


def find_requirements(project: Path, name: str = "") -> Requirements | None:
    """Return what a project requires, None when it says nothing. `name` is the file that the user named, or "".

    Raises `ClusterError` when that file is missing.
    """
    if name and not (project / name).is_file():
        raise ClusterError(f"--requirements {name}: the project has no such file")
    for candidate in (name,) if name else FILES:
        file = project / candidate
        if not file.is_file() or (file.name == LOCK_FILE and not shutil.which("uv")):
            continue
        if file.name == PROJECT_FILE and not project_dependencies(file):
            continue
        sources = [file, file.with_name(PROJECT_FILE)] if file.name == LOCK_FILE else _with_included(file)
        return Requirements(file, tuple(path for path in sources if path.is_file()))
    return None


def _with_included(file: Path) -> list[Path]:
    found = [file]
    for path in found:
        if path.is_file() and path.suffix != ".toml" and len(found) < MAX_INCLUDED_FILES:
            names = INCLUDE_LINE.findall("\n".join(path.read_text(errors="replace").splitlines()))
            found += [included for name in names if (included := path.parent / name) not in found]
    return found


def project_dependencies(pyproject: Path) -> list[str]:
    """Return the dependencies in a pyproject.toml, none when it lists none. Raises `ClusterError` for a damaged one."""
    try:
        dependencies = tomllib.loads(pyproject.read_text()).get("project", {}).get("dependencies", [])
        return [str(dependency) for dependency in dependencies]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ClusterError(f"{pyproject.name}: {one_line_error(error)}") from None


def ensure_project_environment(project: Path, folder: Path, name: str = "") -> str:
    """Return the Python with what a project requires; install that if needed. Raises `ClusterError`, `OSError`."""
    requirements = find_requirements(project, name)
    if requirements is None:
        print("the project requires nothing", flush=True)
        return sys.executable
    names = {str(distribution.name) for distribution in importlib.metadata.distributions() if distribution.name}
    kept = sorted(f"{name}=={installed_version(name)}" for name in names if KEPT_PACKAGES.fullmatch(name))
    venv = folder.resolve() / "venv" / f"project-{environment_key(requirements, kept)}"
    venv.parent.mkdir(parents=True, exist_ok=True)
    with python_env.venv_lock(venv):
        if python_env.is_complete(venv):
            print(f"{requirements.file.name}: installed by an earlier job in {venv}", flush=True)
            return python_env.venv_python(venv)
        if venv.exists():
            shutil.rmtree(venv)
        print(f"{requirements.file.name}: installing into {venv}", flush=True)
        with tempfile.TemporaryDirectory(dir=venv.parent, prefix=".requirements-") as temp:
            arguments = _install_arguments(requirements, Path(temp))
            os.chdir(requirements.file.parent)  # paths in a file of requirements are relative to it
            python_env.make_venv(venv, arguments, kept, with_system_packages=True)
    return python_env.venv_python(venv)


def environment_key(requirements: Requirements, kept: Sequence[str]) -> str:
    """Return an environment's name: new for other files, Python or torch, or a copy whose files are required."""
    digest = hashlib.sha256("\n".join([platform.python_version(), sys.prefix, *kept]).encode())
    for path in requirements.sources:
        content = path.read_bytes()
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
        if any(LOCAL_LINE.match(line) for line in content.decode(errors="replace").splitlines()):
            digest.update(os.fsencode(path.absolute()))
    return digest.hexdigest()[:16]


def _install_arguments(requirements: Requirements, temp: Path) -> list[str]:
    file = requirements.file
    if file.name == PROJECT_FILE:
        return project_dependencies(file)
    if file.name == LOCK_FILE:
        file = _export_lock(file, temp)
    return ["-r", str(file.absolute())]


def _export_lock(lock: Path, temp: Path) -> Path:
    """Return a file of requirements with the versions of a uv.lock, without torch and what only torch needs."""
    exported = temp / REQUIREMENTS_FILE
    argv = ["uv", "export", "--frozen", "--no-hashes", "--no-dev", "--no-emit-project", "--project", str(lock.parent)]
    argv += [word for name in ("torch", "torchvision", "torchaudio") for word in ("--prune", name)]
    completed = subprocess.run([*argv, "-o", str(exported)], capture_output=True, text=True, errors="replace")
    if completed.returncode:
        last_line = (completed.stderr.strip().splitlines() or [f"code {completed.returncode}"])[-1]
        raise ClusterError(f"{lock.name}: uv cannot export it: {last_line}")
    return exported


def main(argv: Sequence[str]) -> int:
    """Install what the project requires and write the path of the Python. Returns 1 on failure, after one line."""
    project, folder, result, name = argv
    result_path = Path(result).absolute()
    try:
        python = ensure_project_environment(Path(project).absolute(), Path(folder), name)
        write_atomic(result_path, python.encode())
    except (ClusterError, OSError) as error:
        print(f"error: {one_line_error(error)}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the job is stopped: what is half made is removed
    sys.exit(main(sys.argv[1:]))
