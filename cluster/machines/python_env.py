"""A Python on this machine that has what the project needs: `python3 -m cluster.machines.python_env FOLDER [PACKAGE...]`.

Runs on the machine, with whatever python3 is there. That one is used as it is when it has everything. Otherwise
FOLDER/venv/<key> is made, once, and kept between jobs. A torch that came with the machine is used if its version fits:
images for deep learning ship one built for their GPUs. Prints what it does, and one line of JSON at the end.
"""

import json
import sys

# Before anything that an older Python cannot read; not as a comparison of tuples, which ruff takes for outdated.
if sys.hexversion < 0x030B0000:
    _TOO_OLD_MESSAGE = (
        "{} is Python {}, and 3.11 or newer is needed: sudo apt-get install python3.11 python3.11-venv".format(
            sys.executable, ".".join(map(str, sys.version_info[:3]))
        )
    )
    print(json.dumps({"python": None, "made": False, "seconds": 0, "torch": None, "why": _TOO_OLD_MESSAGE}))
    sys.exit(1)

import argparse
import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError
from train.tools.filesystem import locked, one_line_error, write_atomic
from train.tools.process import die_with_parent

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
COMPLETE_MARKER = ".complete"  # written last: a venv without it is half made
NOT_ON_MACHINES = ("matplotlib",)  # draws reports: no machine needs it
MIN_FREE_BYTES = 50_000_000  # bytes: with less free than that it is the disk
# What the words of pip, uv and venv mean, the first that fits.
ERROR_EXPLANATIONS = (
    (
        r"No space left|Disk quota exceeded",
        "the disk is full (a torch for GPUs takes 8 GB); free some of it, or name another folder",
    ),
    (
        r"ensurepip is not\s+available|No module named '?(venv|ensurepip)",
        "this Python cannot make a venv; Debian, Ubuntu: sudo apt-get install {package}",
    ),
    (
        r"name resolution|service not known|resolve host|dns error|unreachable|connection (refused|reset|aborted)|"
        r"NewConnectionError|timed out|ProxyError|error sending request|could not connect|SSLError",
        "no way from here to the package index; give the machine one (HTTPS_PROXY, or a mirror: PIP_INDEX_URL, "
        "UV_DEFAULT_INDEX), or install the packages for {python}",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Find or make the environment; print {"python", "made", "seconds", "torch", "why"}. 1 when there is none."""
    parser = argparse.ArgumentParser(
        prog="python3 -m cluster.machines.python_env", description="An environment for trainers."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="holds venv/<key>")
    parser.add_argument("more", nargs="*", metavar="PACKAGE", help="what a recipe needs besides, such as timm")
    start, found = time.monotonic(), dict[str, Any](python=None, made=False, torch=None)
    try:
        asked = parser.parse_args(argv)
        found = ensure_environment(asked.folder, project_requirements() + asked.more)
    except ClusterError as error:
        found["why"] = str(error)
    except OSError as error:
        found["why"] = "; ".join(filter(None, [one_line_error(error), _explain_error([one_line_error(error)])]))
    print(json.dumps({**found, "seconds": round(time.monotonic() - start, 1)}), flush=True)
    return 0 if found["python"] else 1


def parse_output(stdout: bytes, machine_name: str) -> dict[str, Any]:
    """Return what `main` printed last. Raises `ClusterError` that begins with `where` when that is no environment."""
    last = (stdout.decode(errors="replace").strip().splitlines() or [""])[-1]
    try:
        found: dict[str, Any] = json.loads(last)
        why = found["why"]
    except (ValueError, KeyError, TypeError):
        raise ClusterError(
            f"{machine_name}: no environment for Python was found or made: {last or 'it said nothing'}"
        ) from None
    if not found.get("python"):
        raise ClusterError(f"{machine_name}: {why}")
    return found


def project_requirements(pyproject: Path = PYPROJECT) -> list[str]:
    """Return what a machine needs to run the project, as pyproject.toml says it. Raises `ClusterError` when that is not
    there.
    """
    try:
        needs = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{pyproject} does not say what is needed: {one_line_error(error)}") from None
    return [str(one) for one in needs if package_name(str(one)) not in NOT_ON_MACHINES]


def ensure_environment(folder: Path, required_packages: Sequence[str]) -> dict[str, Any]:
    """Return a Python that has all of `needs`, made if need be. Raises `ClusterError` or `OSError` when that fails."""
    missing = [one for one in required_packages if not is_installed(one)]
    if not missing:
        return _describe_environment(sys.executable, False, "this Python has all that is needed")
    print(f"{sys.executable} ({platform.python_version()}) lacks {', '.join(missing)}", flush=True)
    kept = [
        f"{package_name(one)}=={_installed_version(package_name(one))}"
        for one in required_packages
        if one not in missing
    ]
    torch = next((one for one in kept if package_name(one) == "torch"), "")
    venv = folder.resolve() / "venv" / venv_key(required_packages, torch)
    venv.parent.mkdir(parents=True, exist_ok=True)
    with _venv_lock(venv):
        if (venv / COMPLETE_MARKER).exists() and _python_runs(_venv_python(venv)):
            return _describe_environment(_venv_python(venv), False, "made by an earlier job")
        if venv.exists():
            print(f"{venv} is not whole: made once more", flush=True)
            shutil.rmtree(venv)
        if torch:
            make_venv(venv, missing, kept, with_system_packages=True)
        else:
            make_venv(venv, required_packages)
        return _describe_environment(
            _venv_python(venv), True, f"made, with this machine's own {torch}" if torch else "made"
        )


def is_installed(requirement: str) -> bool:
    """Whether this Python has a package of a fitting version, as "torch>=2.13,<2.14" says it."""
    version = _installed_version(package_name(requirement))
    with contextlib.suppress(ImportError):
        asked = _import_packaging().Requirement(requirement)
        if asked.marker and not asked.marker.evaluate():
            return True
        return version is not None and bool(asked.specifier.contains(version, prereleases=True))
    specifiers = requirement.partition(";")[0][len(package_name(requirement)) :].partition("]")
    return version is not None and version_matches(version, specifiers[2] or specifiers[0])


def version_matches(version: str, specifiers: str) -> bool:
    """Whether a version fits; of PEP 440 what pyproject.toml may need, for a Python without pip. Unknown: it does not.

    A pre-release comes before its release, and what follows "+" does not count.
    """
    return all(_matches_specifier(version, one.strip()) for one in specifiers.split(",") if one.strip())


def _matches_specifier(version: str, specifier: str) -> bool:
    parts = re.fullmatch(r"(~=|===?|!=|<=?|>=?)\s*v?(\d[\w.+]*?)(\.\*)?", specifier)
    if not parts:
        return False
    sign, text, star = parts.groups()
    mine, theirs = _version_sort_key(version), _version_sort_key(text)
    count = len(text.split(".")) - (sign == "~=")
    alike = _version_sort_key(".".join(text.split(".")[:count]))[0][:count] == mine[0][:count]
    same = alike if star else mine == theirs
    answers = {"==": same, "===": same, "!=": not same, "<": mine < theirs, "<=": mine <= theirs, ">": mine > theirs}
    return {**answers, ">=": mine >= theirs, "~=": mine >= theirs and alike}[sign]


def _version_sort_key(version: str) -> tuple[tuple[int, ...], bool]:
    """A version as something that can be compared: eight numbers, and whether it is a release."""
    plain = version.partition("+")[0]
    release = re.match(r"v?(\d+(?:\.\d+)*)", plain)
    numbers = [int(one) for one in release[1].split(".")] if release else []
    return tuple((numbers + [0] * 8)[:8]), not re.search(r"\d[._-]?(a|b|rc|alpha|beta|pre|dev)", plain)


def package_name(requirement: str) -> str:
    """Return the name in a requirement, "torch" in "torch>=2.13,<2.14"."""
    found = re.match(r"[\w.-]*\w", requirement)
    return found[0] if found else requirement


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_packaging() -> Any:
    """The module that knows requirements, pip's own if need be. Raises ImportError where there is neither."""
    try:
        return importlib.import_module("packaging.requirements")
    except ImportError:
        return importlib.import_module("pip._vendor.packaging.requirements")


def venv_key(required_packages: Sequence[str], torch: str) -> str:
    """Return the name of the venv for these needs, this Python, and this torch of the machine ("" for none)."""
    parts = [*sorted(required_packages), platform.python_version(), sys.prefix, torch]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def make_venv(
    venv: Path, packages: Sequence[str], pinned_packages: Sequence[str] = (), with_system_packages: bool = False
) -> None:
    """Make a venv that has `needs`. With `system` it sees this Python's packages, and `kept` ("torch==2.13.0") stay.

    With uv where that is on PATH, else with venv and pip. Raises `ClusterError` when that fails.
    """
    temp = venv.with_name(f".{venv.name}.tmp")  # /tmp may be small
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir()
    child = sys.prefix != sys.base_prefix  # a venv itself: the new one would see only the base of both
    try:
        install = _make_empty_venv(venv, temp, ["--system-site-packages"] if with_system_packages and not child else [])
        if with_system_packages and child:
            _add_site_folders(venv, [path for path in sys.path if path.endswith("-packages")])
        if pinned_packages:
            (temp / "constraints").write_text("".join(f"{one}\n" for one in pinned_packages))
            install += ["-c", str(temp / "constraints")]
        if packages:
            _run_command([*install, *packages], temp)
        write_atomic(venv / COMPLETE_MARKER, b"")
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _make_empty_venv(venv: Path, temp: Path, flags: Sequence[str]) -> list[str]:
    """Make a venv with nothing in it; return the words that install into it."""
    uv = shutil.which("uv")
    if uv:
        _run_command([uv, "venv", "--python", sys.executable, *flags, str(venv)], temp)
        return [uv, "pip", "install", "--python", _venv_python(venv)]
    _run_command([sys.executable, "-m", "venv", *flags, str(venv)], temp)
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return [_venv_python(venv), "-m", "pip", "install", *quiet]


def _add_site_folders(venv: Path, folders: Sequence[str]) -> None:
    """Let a venv see packages of other folders, after its own."""
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    for packages in venv.glob("lib/python3*/site-packages"):
        (packages / "_machine.pth").write_text("".join(lines))


def _run_command(argv: Sequence[str], temp: Path) -> None:
    """Run a command, its output to ours as it comes. Raises `ClusterError` with what it means when it fails."""
    print(f"$ {' '.join(argv)}", flush=True)
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # our own folders are not for pip to see
    env = {name: text for name, text in os.environ.items() if name not in hidden}
    said = []
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**env, "TMPDIR": str(temp), "PYTHONUNBUFFERED": "1"},
        preexec_fn=die_with_parent,  # the lock dies with us, so must who writes under it
    ) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line.strip())
    if process.returncode:
        if shutil.disk_usage(temp).free < MIN_FREE_BYTES:  # ensurepip keeps the reason to itself
            said.append("No space left on device")
        raise ClusterError(
            f"{' '.join(argv[:3])}: {_explain_error(said) or _first_error_line(said, process.returncode)}"
        )


def _explain_error(lines: Sequence[str]) -> str:
    """What these words of other programs mean, "" when they are none that we know."""
    text, package = "\n".join(lines), f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    for pattern, meaning in ERROR_EXPLANATIONS:
        if re.search(pattern, text, re.IGNORECASE):
            return meaning.format(package=package, python=sys.executable)
    return ""


def _first_error_line(lines: Sequence[str], exit_code: int) -> str:
    """What a program said from its first error on, in one line."""
    first = next((n for n, line in enumerate(lines) if re.match(r"error|\u00d7", line, re.IGNORECASE)), -1)
    return f"ended with code {exit_code}: {' '.join(' '.join(lines[first:]).split())[:400]}"


def _venv_python(venv: Path) -> str:
    return str(venv / "bin" / "python")


def _python_runs(python: str) -> bool:
    """Whether it does: the Python that a venv was made of may be gone."""
    with contextlib.suppress(OSError):
        return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    return False


def _describe_environment(python: str, was_made: bool, why: str) -> dict[str, Any]:
    """The answer, with the version of the torch that this Python would import."""
    ask = "from importlib.metadata import version; print(version('torch'))"
    torch = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()
    return {"python": python, "made": was_made, "torch": torch or None, "why": why}


@contextlib.contextmanager
def _venv_lock(venv: Path) -> Iterator[None]:
    """Hold the lock of one venv, and say so when that means to wait. The kernel takes it back from the dead."""
    lock = venv.with_name(f".{venv.name}.lock")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(lock, 0))
        except BlockingIOError:
            print(f"another job is making {venv}: waiting for it", flush=True)
            held.enter_context(locked(lock))
        yield


if __name__ == "__main__":
    sys.exit(main())
