"""Runs the processes of a script in containers (`--image IMAGE`), one for each rank, through the program docker.

The container has the folders of the job at the same paths as the machine, the machine's network and shared memory, and
the same variables. Their values are in the environment of `docker`, which the option `-e NAME` passes on, so no command
line has them. A container is named after job, machine and rank; what a killed agent leaves behind is removed later.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from cluster.errors import BadInput
from train.tools import process

DOCKER = "docker"
IMAGE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
MAX_IMAGE_CHARACTERS = 400
ANSWER_SECONDS = 30.0  # for a command that moves no image
LABEL = "imgnet-cluster.machine"  # of all containers of a machine of a job
NVIDIA_RUNTIME = "nvidia"
NOT_STARTED = 125  # the exit code of `docker run` when docker itself fails
# These of the machine mean nothing in the image, or would hide its programs.
LEFT_OUT_VARIABLES = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


class ContainerError(BadInput):
    """Docker is missing or refuses. The text is one line."""


def check_image(image: str) -> None:
    """Raise `ContainerError` for a text that cannot name an image: one with spaces, or an option."""
    if len(image) > MAX_IMAGE_CHARACTERS or not IMAGE_PATTERN.fullmatch(image):
        raise ContainerError(f"--image {image[:100]!r}: is not the name of an image, such as pytorch/pytorch:latest")


def _run_docker(*arguments: str, seconds: float | None = ANSWER_SECONDS) -> str:
    """Return what a docker command prints. Raises `ContainerError`."""
    try:
        completed = subprocess.run(
            [DOCKER, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            preexec_fn=process.die_with_parent,
        )
    except OSError as error:
        raise ContainerError(
            f"docker cannot be started: {error.strerror}; install Docker on this machine, or leave out --image"
        ) from None
    except subprocess.TimeoutExpired:
        raise ContainerError(f"docker {arguments[0]} does not answer within {seconds:.0f} s") from None
    if completed.returncode:
        raise ContainerError(f"docker {arguments[0]}: {_reason(completed.stderr, completed.returncode)}")
    return completed.stdout


def _reason(stderr: str, code: int) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = next((line for line in lines if "denied" in line or "error" in line.lower()), lines[-1] if lines else "")
    if "permission denied" in text.lower() and "socket" in text.lower():
        return "this user may not use it; add the user to the group docker: sudo usermod -aG docker $USER"
    return text[:300] or f"ended with code {code}"


def find_error(log: str) -> str:
    """Return the line in which `docker run` said why it failed, which advice follows; "" if there is none."""
    return next((line for line in reversed(log.splitlines()) if line.startswith("docker: ")), "")


def prepare(image: str) -> bool:
    """Pull an image (takes long) if missing; return whether docker has NVIDIA's runtime. Raises `ContainerError`."""
    check_image(image)
    if not shutil.which(DOCKER):
        raise ContainerError("docker is missing on this machine; install Docker there, or leave out --image")
    runtimes = _run_docker("info", "--format", "{{json .Runtimes}}")
    try:
        _run_docker("image", "inspect", "--format", "{{.Id}}", image)
    except ContainerError:
        try:
            _run_docker("pull", "--quiet", image, seconds=None)
        except ContainerError as error:
            raise ContainerError(f"the image {image} cannot be pulled: {error}") from None
    with contextlib.suppress(ValueError):
        return NVIDIA_RUNTIME in json.loads(runtimes)
    return False


def container_name(job_uid: str, machine: str, rank: int) -> str:
    """Return the name of the container of a rank."""
    return f"imgnet-{job_uid}-{machine}-{rank}"


def main() -> int:
    """Make image argv[1] present; write to file argv[2] whether NVIDIA's runtime is here. Returns 1 on failure."""
    image, result = sys.argv[1:]
    try:
        Path(result).write_text("nvidia" if prepare(image) else "")
    except (ContainerError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1
    return 0


def run_argv(
    image: str,
    argv: Sequence[str],
    *,
    name: str,
    machine_label: str,
    workdir: Path,
    mounts: Iterable[Path],
    read_only_mounts: Iterable[Path],
    variables: Collection[str],
    given_variables: Collection[str],
    has_nvidia: bool,
) -> list[str]:
    """Return the command line of `docker run` for a process, without values; `given_variables` mean the image."""
    words = [DOCKER, "run", "--rm", "--init", "--name", name, "--label", f"{LABEL}={machine_label}"]
    words += ["--network", "host", "--ipc", "host"]
    words += ["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", str(workdir), "--stop-timeout", "30"]
    for folder in dict.fromkeys(mounts):
        words += ["--volume", f"{folder}:{folder}"]
    for folder in dict.fromkeys(read_only_mounts):
        words += ["--volume", f"{folder}:{folder}:ro"]
    if has_nvidia:
        words += ["--runtime", NVIDIA_RUNTIME, "--gpus", "all"]
        words += ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]  # as NVIDIA advises; not every docker may
    for variable in sorted(variables):
        if variable in given_variables or variable not in LEFT_OUT_VARIABLES:
            words += ["--env", variable]
    # An image knows neither name nor home folder of this user; libraries keep their caches there.
    words += [] if "HOME" in given_variables else ["--env", f"HOME={workdir}"]
    return [*words, "--env", "USER", image, *argv]


def remove_containers(machine_label: str) -> None:
    """Kill and remove all containers of a machine of a job, also ended ones. Does nothing without docker."""
    with contextlib.suppress(ContainerError):
        if containers := _run_docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}={machine_label}").split():
            _run_docker("rm", "--force", *containers)


if __name__ == "__main__":
    sys.exit(main())
