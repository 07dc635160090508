"""Finds or makes a Python environment with the project's requirements on this machine.

    python3 -m cluster.machines.python_env [--find] FOLDER [PACKAGE...] [--then MODULE [ARGUMENT...]]

Runs on the machine with any python3. If that Python has every package, it is used as it is. Otherwise the virtual
environment FOLDER/venv/<key> is made once and kept for later jobs. A torch that came with the machine is used if its
version matches, because deep-learning images ship one built for their GPUs. Prints its progress, and one line of JSON
at the end. Then runs the module of --then with the environment's Python, so that nobody has to ask this machine again.
With --find nothing is made: the line of JSON says what is missing, and --then gets this Python.
"""

import json
import sys

# This comes before imports that an older Python lacks, such as tomllib. The whole file has to parse on Python 3.7.
# Not a comparison with sys.version_info: ruff would remove that as outdated.
if sys.hexversion < 0x030B0000:
    _TOO_OLD_MESSAGE = (
        "{} is Python {}, and 3.11 or newer is needed: sudo apt-get install python3.11 python3.11-venv".format(
            sys.executable, ".".join(map(str, sys.version_info[:3]))
        )
    )
    print(json.dumps({"python": "", "why": _TOO_OLD_MESSAGE}))
    sys.exit(1)

import argparse
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import ClusterError
from train.tools.errors import one_line_error
from train.tools.files import PROJECT_ROOT, locked, write_atomic
from train.tools.process import die_with_parent
from train.tools.records import DamagedRecord, decode_json

PYPROJECT = PROJECT_ROOT / "pyproject.toml"
COMPLETE_MARKER = ".complete"  # written last: a venv without this file is incomplete
NOT_ON_MACHINES = ("jinja2", "matplotlib")  # for reports and plots, which no machine makes
MIN_FREE_BYTES = 50_000_000  # with less free space, a failed installation is blamed on the disk
# (pattern in the output of pip, uv or venv, explanation); the first match counts.
ERROR_EXPLANATIONS = (
    (
        r"No space left|Disk quota exceeded",
        "the disk is full (torch for GPUs takes 8 GB); free some space, or set another `folder` in hosts.toml",
    ),
    (
        r"ensurepip is not\s+available|No module named '?(venv|ensurepip)",
        "this Python cannot make a venv; Debian, Ubuntu: sudo apt-get install {package}",
    ),
    (
        r"name resolution|service not known|resolve host|dns error|unreachable|connection (refused|reset|aborted)|"
        r"NewConnectionError|timed out|ProxyError|error sending request|could not connect|SSLError",
        "no way from here to the package index; set HTTPS_PROXY or a mirror (PIP_INDEX_URL, UV_DEFAULT_INDEX) "
        "on the machine, or install the packages for {python}",
    ),
)


@dataclass(frozen=True)
class Environment:
    """A Python environment: path of its Python ("": none), and the version of its torch.

    `missing` are the packages that it lacks, with --find. `why` says why it was chosen, or why there is none. `seconds`
    is the time that the search took.
    """

    python: str = ""
    torch: str = ""
    missing: tuple[str, ...] = ()
    why: str = ""
    seconds: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Find or make the environment and print it as JSON. Returns 1 on failure."""
    parser = argparse.ArgumentParser(
        prog="python3 -m cluster.machines.python_env", description="Find or make a Python environment for trainers."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder in which venv/<key> is made")
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help="further packages that a recipe needs, such as timm"
    )
    parser.add_argument("--find", action="store_true", help="make nothing; say which packages are missing")
    parser.add_argument("--then", nargs=argparse.REMAINDER, default=[], metavar="...", help="a module to run then")
    start = time.monotonic()
    then: list[str] = []
    environment = Environment()
    try:
        args = parser.parse_args(argv)
        then = args.then
        environment = ensure_environment(args.folder, project_requirements() + args.packages, args.find)
    except ClusterError as error:
        environment = Environment(why=str(error))
    except OSError as error:
        message = one_line_error(error)
        environment = Environment(why="; ".join(filter(None, [message, _explain_error([message])])))
    print(json.dumps({**vars(environment), "seconds": round(time.monotonic() - start, 3)}), flush=True)
    if environment.python and then:
        os.execv(environment.python, [environment.python, "-m", *then])
    return 0 if environment.python else 1


def parse_output(text: str, machine_name: str) -> tuple[Environment, str]:
    """Return the environment that `main` printed, and the output of --then. Raises `ClusterError` without one."""
    lines = text.strip().splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith('{"python": '):
            with contextlib.suppress(DamagedRecord):
                environment = decode_json(Environment, line.encode())
                if not environment.python:
                    raise ClusterError(f"{machine_name}: {environment.why}")
                return environment, "\n".join(lines[number:])
    last_line = lines[-1] if lines else "the command printed nothing"
    raise ClusterError(
        f"{machine_name}: no Python environment was found or made: {last_line}; "
        "check that the machine's Python runs: python3 --version; if hosts.toml names another: python = PROGRAM"
    )


def project_requirements(pyproject: Path = PYPROJECT) -> list[str]:
    """Return the packages that a machine needs, from pyproject.toml. Raises `ClusterError` when it lists none."""
    try:
        dependencies = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{pyproject} does not list the dependencies: {one_line_error(error)}") from None
    requirements = [str(dependency) for dependency in dependencies]
    return [requirement for requirement in requirements if package_name(requirement) not in NOT_ON_MACHINES]


def ensure_environment(folder: Path, required_packages: Sequence[str], find_only: bool = False) -> Environment:
    """Return an environment that has all required packages, and make it if needed.

    With `find_only` none is made: this Python is returned, with what it lacks. Raises `ClusterError`, `OSError`.
    """
    missing = [requirement for requirement in required_packages if not is_installed(requirement)]
    if not missing:
        return _describe_environment(sys.executable, "this Python has all required packages")
    print(f"{sys.executable} ({platform.python_version()}) lacks {', '.join(missing)}", flush=True)
    missing_names = {package_name(requirement) for requirement in missing}
    required_names = dict.fromkeys(package_name(requirement) for requirement in required_packages)
    pinned_packages = [f"{name}=={installed_version(name)}" for name in required_names if name not in missing_names]
    torch = next((package for package in pinned_packages if package_name(package) == "torch"), "")
    venv = folder.resolve() / "venv" / venv_key(required_packages, torch)
    if not find_only:
        venv.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if find_only else venv_lock(venv):
        if is_complete(venv):
            return _describe_environment(venv_python(venv), "made by an earlier job")
        if find_only:
            if not (shutil.which("uv") or _has_pip_for_others() or importlib.util.find_spec("ensurepip")):
                raise ClusterError(_explain_error(["No module named ensurepip"]))
            return replace(_describe_environment(sys.executable, "lacks packages"), missing=tuple(missing))
        if venv.exists():
            print(f"{venv} is incomplete: making it again", flush=True)
            shutil.rmtree(venv)
        if torch:
            make_venv(venv, missing, pinned_packages, with_system_packages=True)
        else:
            make_venv(venv, required_packages)
        return _describe_environment(venv_python(venv), f"made, with this machine's own {torch}" if torch else "made")


def is_complete(venv: Path) -> bool:
    """Whether a venv is complete and its Python starts. It does not when the Python that it was made from is gone.

    Raises other `OSError`s: a venv is not removed because this user may start no more processes now.
    """
    with contextlib.suppress(FileNotFoundError):
        argv = [venv_python(venv), "-c", ""]
        return (venv / COMPLETE_MARKER).exists() and subprocess.run(argv, capture_output=True).returncode == 0
    return False


def is_installed(requirement: str) -> bool:
    """Whether this Python has the package and version of a requirement such as "torch>=2.13,<2.14".

    A requirement whose marker excludes this system counts as installed. Without `packaging`, of which pip has a copy,
    nothing does: such a Python lacks required packages anyway.
    """
    for module in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        with contextlib.suppress(ImportError):
            requirements = importlib.import_module(module)
            break
    else:
        return False
    parsed = requirements.Requirement(requirement)
    if parsed.marker and not parsed.marker.evaluate():
        return True
    version = installed_version(parsed.name)
    return version is not None and bool(parsed.specifier.contains(version, prereleases=True))


def package_name(requirement: str) -> str:
    """Return the package name of a requirement, such as "torch" for "torch>=2.13,<2.14"."""
    name = re.match(r"[\w.-]*\w", requirement)
    return name[0] if name else requirement


def installed_version(name: str) -> str | None:
    """Return the version of a package of this Python, None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def venv_key(required_packages: Sequence[str], torch: str) -> str:
    """Return the folder name of the venv for these packages, this Python, and the own torch of the machine or ""."""
    parts = [*sorted(required_packages), platform.python_version(), sys.prefix, torch]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def make_venv(
    venv: Path, packages: Sequence[str], pinned_packages: Sequence[str] = (), with_system_packages: bool = False
) -> None:
    """Make a venv and install packages into it, with uv if that is on PATH, otherwise with venv and pip.

    `with_system_packages` makes this Python's packages visible in it; the installation must not replace the versions of
    `pinned_packages`, such as "torch==2.13.0". Raises `ClusterError` when a command fails.
    """
    temp = venv.with_name(f".{venv.name}.tmp")  # not in /tmp, which may be small
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir()
    # If this Python is a venv itself, --system-site-packages would only show the packages of the Python below it.
    is_venv = sys.prefix != sys.base_prefix
    flags = ["--system-site-packages"] if with_system_packages and not is_venv else []
    try:
        install_argv = _make_empty_venv(venv, temp, flags)
        if with_system_packages and is_venv:
            _show_packages_of_this_python(venv, map(package_name, pinned_packages))
        if pinned_packages:
            constraints = temp / "constraints"
            constraints.write_text("".join(f"{package}\n" for package in pinned_packages))
            install_argv += ["-c", str(constraints)]
        if packages:
            _run_command([*install_argv, *packages], temp)
        write_atomic(venv / COMPLETE_MARKER, b"")
    except BaseException:  # a part of an environment is of no use, and has gigabytes
        shutil.rmtree(venv, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _make_empty_venv(venv: Path, temp: Path, flags: Sequence[str]) -> list[str]:
    """Make a venv without packages and return the command that installs into it, less the packages."""
    uv = shutil.which("uv")
    if uv:
        _run_command([uv, "venv", "--python", sys.executable, *flags, str(venv)], temp)
        return [uv, "pip", "install", "--python", venv_python(venv)]
    quiet_flags = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    if _has_pip_for_others():  # needs no ensurepip, which Python of Debian, and of images that derive from it, lacks
        _run_command([sys.executable, "-m", "venv", "--without-pip", *flags, str(venv)], temp)
        return [sys.executable, "-m", "pip", "--python", venv_python(venv), "install", *quiet_flags]
    _run_command([sys.executable, "-m", "venv", *flags, str(venv)], temp)
    return [venv_python(venv), "-m", "pip", "install", *quiet_flags]


def _has_pip_for_others() -> bool:
    """Whether this Python has a pip that can install into another: 22.3 or newer."""
    numbers = re.findall(r"\d+", installed_version("pip") or "0")[:2]
    return [int(number) for number in numbers] >= [22, 3]


def _show_packages_of_this_python(venv: Path, pinned_names: Iterable[str]) -> None:
    """Show this Python's packages in a venv, after its own; the pinned ones also to uv, which follows no .pth."""
    folders = [path for path in sys.path if path.endswith("-packages")]
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    distributions = [found for name in pinned_names for found in importlib.metadata.distributions(name=name)]
    for site_packages in venv.glob("lib/python3*/site-packages"):
        (site_packages / "_machine.pth").write_text("".join(lines))
        for found in distributions:
            folder = Path(str(found.locate_file(""))) / f"{found.name}-{found.version}.dist-info"
            with contextlib.suppress(FileExistsError):
                (site_packages / folder.name).symlink_to(folder)


def _run_command(argv: Sequence[str], temp: Path) -> None:
    """Run a command and pass on its output as it comes. Raises `ClusterError` with an explanation when it fails."""
    print(f"$ {' '.join(argv)}", flush=True)
    # These would make pip see our own packages, or install elsewhere than into the venv.
    hidden_variables = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX")
    env = {name: value for name, value in os.environ.items() if name not in hidden_variables}
    lines = []
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Without PIP_USER, `user = true` in ~/.config/pip/pip.conf counts, with which pip refuses a venv.
        env={**env, "TMPDIR": str(temp), "PYTHONUNBUFFERED": "1", "PIP_USER": "0"},
        preexec_fn=die_with_parent,  # our death releases the lock, so the installer must end too
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        if shutil.disk_usage(temp).free < MIN_FREE_BYTES:  # ensurepip does not print this reason
            lines.append("No space left on device")
        # The output from its first error on, in one line. uv marks an error with a multiplication sign.
        errors = (number for number, line in enumerate(lines) if re.match(r"error|\u00d7", line, re.IGNORECASE))
        quote = " ".join(" ".join(lines[next(errors, -1) :]).split())[:400]
        explanation = _explain_error(lines) or f"ended with code {process.returncode}: {quote}"
        raise ClusterError(f"{' '.join(argv[:3])}: {explanation}")


def _explain_error(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    for pattern, explanation in ERROR_EXPLANATIONS:
        if re.search(pattern, text, re.IGNORECASE):
            return explanation.format(package=package, python=sys.executable)
    return ""


def venv_python(venv: Path) -> str:
    """Return the path of a venv's Python."""
    return str(venv / "bin" / "python")


def _describe_environment(python: str, why: str) -> Environment:
    """Return the result of `ensure_environment`, with the version of torch that this Python would import."""
    print_version = "from importlib.metadata import version; print(version('torch'))"
    completed = subprocess.run([python, "-c", print_version], capture_output=True, text=True)
    return Environment(python, completed.stdout.strip(), why=why)


@contextlib.contextmanager
def venv_lock(venv: Path) -> Iterator[None]:
    """Hold the lock of one venv; print a line if another job holds it. The kernel releases it when its holder dies."""
    lock_path = venv.with_name(f".{venv.name}.lock")
    with contextlib.ExitStack() as exit_stack:
        try:
            exit_stack.enter_context(locked(lock_path, 0))
        except BlockingIOError:
            print(f"another job is making {venv}: waiting for it", flush=True)
            exit_stack.enter_context(locked(lock_path))
        yield


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the job is stopped: what is half made is removed
    sys.exit(main())
