"""Reports the facts of a machine that matter to a job: `python -m cluster.machines.probe`.

Runs on the machine and prints one JSON object. The caller runs it twice on every machine: the first time each machine
leaves a marker file in the shared folder, the second time (--expect) each looks for the markers of all the others.
`cluster.machines.checks` judges the facts. What may hang (drivers, file servers) is asked in a process with a deadline.

Needs the standard library only: `check --ssh` asks machines on which nothing is installed yet.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import pwd
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from uuid import uuid4

from cluster.state.run_folder import SHARED_FOLDER
from train.tools import host
from train.tools.errors import one_line_error
from train.tools.files import open_below

from .checks import MachineFacts, OtherJob, SharedFolder, WorkFolder

NVIDIA_SMI_TIMEOUT_SECONDS = 20.0
FOLDER_TIMEOUT_SECONDS = 20.0
MARKER_TIMEOUT_SECONDS = 5.0
TMUX_TIMEOUT_SECONDS = 10.0
AGENT_MODULE = "cluster.agent"
MAX_OTHER_JOBS = 10  # in the answer


def main(argv: Sequence[str] | None = None) -> int:
    """Print the facts as one JSON object; with --expect, only which marker files this machine sees."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster.machines.probe", description="Print the facts of this machine as JSON."
    )
    parser.add_argument("--shared", type=Path, required=True, help="the folder that all machines mount")
    parser.add_argument("--work", type=Path, required=True, help="this machine's own work folder")
    parser.add_argument("--data", default="", help="the folder of the images, if it is there before the job starts")
    parser.add_argument("--val-fraction", type=float, default=0.0, help="the part of train/ that is held out")
    parser.add_argument("--token", required=True, help="common part of the names of the marker files of this check")
    parser.add_argument("--machine", required=True, help="this machine's name in the job")
    parser.add_argument("--expect", default="", help="machines whose marker files to look for, such as a,b,c")
    args = parser.parse_args(argv)
    marker = args.shared / "probe" / f"{args.token}-{args.machine}"
    if args.expect:
        marker_names = {name: f"{args.token}-{name}" for name in args.expect.split(",")}
        seen: dict[str, bool] = {}
        with contextlib.suppress(OSError):  # the folder that does not answer has been reported before
            seen = call_with_timeout(args.shared, lambda: find_markers(marker.parent, marker_names))
        print(json.dumps(seen), flush=True)
        return 0
    data_error = query_data_folder(Path(args.data).expanduser(), args.val_fraction) if args.data else ""
    own_facts, other_jobs = gather_facts(args.shared, args.work, marker), find_other_jobs(args.token)
    facts = dataclasses.replace(own_facts, data_error=data_error, other_jobs=other_jobs)
    print(json.dumps(dataclasses.asdict(facts)), flush=True)
    return 0


def gather_facts(shared: Path, work: Path, marker: Path) -> MachineFacts:
    """Return the facts of this machine. Leaves a marker file in the shared folder for the other machines to see."""
    gpus, complaint = query_gpus()
    memory = host.read_memory()
    tmux_code, tmux_version = run_with_timeout(["tmux", "-V"], TMUX_TIMEOUT_SECONDS)
    try:
        facts = call_with_timeout(shared, lambda: dataclasses.asdict(folder_facts(shared, marker)))
        shared_facts = SharedFolder(**facts)
    except OSError as error:
        shared_facts = SharedFolder(path=str(shared), error=str(error))
    work_disk = next((folder for folder in (work, *work.absolute().parents) if folder.exists()), Path("/"))
    is_writable = os.access(work_disk, os.W_OK | os.X_OK)
    free_gb = round(shutil.disk_usage(work_disk).free / 1e9, 1)
    return MachineFacts(
        cpus=host.usable_cpu_count(),
        memory_gb=round(memory.total_gb, 1) if memory else 0.0,
        work=WorkFolder(path=str(work), writable=is_writable, free_gb=free_gb),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        python=platform.python_version(),
        tmux=None if tmux_code != 0 else tmux_version.split()[-1],
        gpus=gpus,
        nvidia=complaint,
        shared=shared_facts,
        time=time.time(),
    )


# --- other jobs ---------------------------------------------------------------------------------------------------


def find_other_jobs(own_uid: str, proc: Path = Path("/proc")) -> tuple[OtherJob, ...]:
    """Return the jobs with an agent on this machine, except `own_uid`; under hidepid only those of this user."""
    jobs: dict[str, OtherJob] = {}
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # the process has ended, or is no agent
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            job_folder = PurePath(words[words.index(AGENT_MODULE, 1) + 1])
            uid = job_folder.name
            if job_folder.parts[-2:] == SHARED_FOLDER:  # of a job that was launched on this machine: its run folder
                uid = str(job_folder.parents[1])
            if words[words.index(AGENT_MODULE, 1) - 1] == "-m" and uid != own_uid:
                jobs[uid] = OtherJob(uid=uid, user=_user_name(folder.stat().st_uid))
    return tuple(jobs.values())[:MAX_OTHER_JOBS]


def _user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


# --- this machine -------------------------------------------------------------------------------------------------


def run_with_timeout(argv: Sequence[str], timeout_seconds: float) -> tuple[int | None, str]:
    """Return exit code and output of a command. The code is 127 if it cannot be started, None after the timeout.

    After the timeout the command is killed but not waited for: a process in a broken driver cannot be killed.
    """
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        return 127, one_line_error(error)
    try:
        stdout, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return None, ""
    return process.returncode, stdout.decode(errors="replace").strip()


def query_data_folder(path: Path, val_fraction: float) -> str:
    """Return why the images cannot be used, as far as the names of folders tell; "" if they can."""

    def find_error() -> str:
        if not path.is_dir():
            return f"{path}: there is no such data folder"
        with contextlib.suppress(ImportError):  # numpy: the environment is not made yet
            from train.data.index.open import DataError, check_layout

            try:
                check_layout(path, val_fraction)
            except DataError as error:
                return str(error)
        return ""

    try:
        return str(call_with_timeout(path, find_error))
    except OSError as error:
        return str(error)


def query_gpus() -> tuple[tuple[str, ...], str]:
    """Return the names of the GPUs that nvidia-smi lists, and what is wrong: "", "missing", "hangs", or its message."""
    code, output = run_with_timeout(host.gpu_query_command(("name", "uuid")), NVIDIA_SMI_TIMEOUT_SECONDS)
    if code in (None, 127):
        return (), "missing" if code else "hangs"
    names: list[str] = []
    complaints: list[str] = []
    for line in output.splitlines():
        name, *cells = host.gpu_query_cells(line)
        is_gpu = len(cells) == 1 and cells[0].startswith("GPU-")
        (names if is_gpu else complaints).append(name if is_gpu else line)
    return tuple(names), " ".join(complaints)[:300]


# --- the shared folder --------------------------------------------------------------------------------------------


def call_with_timeout(folder: Path, function: Callable[[], object]) -> Any:  # Any: what JSON can hold
    """Call a function that looks at a folder, in a forked process, and return its answer.

    A lost file server blocks only that. Raises `OSError` with the function's error, or that the folder does not answer.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        # The caller waits until no process has this stdout open. It must not wait for a child that hangs.
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        try:
            try:
                outcome = function(), ""
            except Exception as error:
                outcome = None, one_line_error(error)
            with os.fdopen(writer, "w") as file:
                json.dump(outcome, file)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        if select.select([file], [], [], FOLDER_TIMEOUT_SECONDS)[0]:
            answer, problem = json.loads(file.read())
            os.waitpid(pid, 0)
            if problem:
                raise OSError(problem)
            return answer
    os.kill(pid, signal.SIGKILL)  # not waited for: it may be in a system call that cannot be interrupted
    advice = "is its file server running? mount it again"
    raise OSError(f"{folder}: no answer in {FOLDER_TIMEOUT_SECONDS:g} s; {advice}")


def folder_facts(shared: Path, marker: Path) -> SharedFolder:
    """Return mount, write time and hard links of the shared folder; leave the marker there. Raises `OSError`."""
    if not shared.is_dir():
        problem = "is not a folder" if shared.exists() else "does not exist on this machine; mount it, or make it"
        return SharedFolder(path=str(shared), error=f"{shared}: {problem}")
    with open_below(shared, marker.relative_to(shared).as_posix(), os.O_WRONLY | os.O_TRUNC) as file:
        file.write(f"{marker.name}\n".encode())
    unique_prefix = f".{marker.name}.{uuid4().hex}"
    test_file = marker.with_name(f"{unique_prefix}.test")
    second_name = marker.with_name(f"{unique_prefix}.link")
    try:
        with test_file.open("wb") as file:
            file.write(bytes(1 << 16))
            file.flush()
            written = time.monotonic()
            os.fsync(file.fileno())
        synced = time.monotonic()
        supports_links = can_hard_link(test_file, second_name)
    finally:
        test_file.unlink(missing_ok=True)
        second_name.unlink(missing_ok=True)
    return SharedFolder(
        **vars(host.mount_of(shared.resolve())),
        path=str(shared),
        link=supports_links,
        fsync_ms=round((synced - written) * 1e3, 3),
    )


def can_hard_link(path: Path, second_name: Path) -> bool:
    """Whether a hard link can be made, and made only once. The first proposal of an attempt wins by such a link."""
    try:
        os.link(path, second_name)
        os.link(path, second_name)
    except FileExistsError:
        return path.samefile(second_name)
    except OSError:
        return False
    return False


def find_markers(folder: Path, marker_names: Mapping[str, str]) -> dict[str, bool]:
    """Return by machine whether its marker is seen. Looks for some seconds: NFS remembers that a file was missing."""
    seen = dict.fromkeys(marker_names, False)
    deadline = time.monotonic() + MARKER_TIMEOUT_SECONDS
    while True:
        for machine, name in marker_names.items():
            with contextlib.suppress(OSError):
                seen[machine] = seen[machine] or (folder / name).read_text() == f"{name}\n"
        if all(seen.values()) or time.monotonic() > deadline:
            return seen
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
