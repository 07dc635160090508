"""What a machine is and has, and what stands in a job's way: `python -m cluster.machines.probe`, asked by the caller.

Runs on the machine and prints one JSON object. The caller asks every machine twice: the first time each leaves a file
in the shared folder, the second time (`--expect`) each looks for the files of all others. What that means: findings.
Whatever may hang (a GPU, a file server) is asked in a process of its own, with a deadline. 1 GB is 1e9 bytes.
"""

import argparse
import contextlib
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from cluster.state.mounts import mount_of
from train.distributed.network import interface_addresses
from train.tools.filesystem import one_line_error

from .checks import find_problems

NVIDIA_SMI_TIMEOUT_SECONDS, FOLDER_TIMEOUT_SECONDS, MARKER_TIMEOUT_SECONDS = 20.0, 20.0, 5.0
GPU_QUERY_FIELDS = ("name", "memory.total", "driver_version", "uuid", "compute_cap")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what this machine is and what was found, as one JSON object; with --expect only what is seen."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster.machines.probe", description="What this machine is and has."
    )
    parser.add_argument("--shared", type=Path, required=True, help="the folder that all machines see")
    parser.add_argument("--work", type=Path, required=True, help="the folder of this machine alone")
    parser.add_argument("--token", required=True, help="names the files of this probing")
    parser.add_argument("--machine", default=socket.gethostname(), help="this machine's name among all")
    parser.add_argument("--want-gb", type=float, default=0.0, help="free space that the work folder must have")
    parser.add_argument("--procs", type=int, default=0, help="GPUs that are asked for, 0 for none")
    parser.add_argument("--expect", default="", help="machines whose files must be seen: a,b,c")
    parser.add_argument("--clean", action="store_true", help="remove the file of this probing at the end")
    args = parser.parse_args(argv)
    mark, said = args.shared / "probe" / f"{args.token}-{args.machine}", dict[str, Any](findings=[])
    if args.expect:
        names = {name: f"{args.token}-{name}" for name in args.expect.split(",")}
        said["shared"] = {
            "path": str(args.shared),
            "seen": call_with_timeout(FOLDER_TIMEOUT_SECONDS, lambda: find_markers(mark.parent, names)) or {},
        }
    elif not args.clean:
        said = gather_facts(args.shared, args.work, mark)
        said["findings"] = find_problems(said, args.procs, args.want_gb)
    if args.clean:
        call_with_timeout(FOLDER_TIMEOUT_SECONDS, lambda: remove_marker(mark))
    print(json.dumps({"hostname": socket.gethostname(), **said, "time": time.time()}), flush=True)
    return 0


def gather_facts(shared: Path, work: Path, marker: Path) -> dict[str, Any]:
    """Return what this machine is and has; `mark` is left in the shared folder for the others to see."""
    gpus, complaint = query_gpus()
    no_tmux, tmux = run_with_timeout(["tmux", "-V"], 10)
    folder = call_with_timeout(FOLDER_TIMEOUT_SECONDS, lambda: folder_facts(shared, marker))
    if folder is None:
        folder = {
            "error": f"{shared}: no answer in {FOLDER_TIMEOUT_SECONDS:g} s; is its server there? mount it once more"
        }
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": memory_gb(Path("/proc/meminfo").read_text()),
        "free_gb": {"work": free_gb(work), "shared": folder.pop("free_gb", None)},
        "work": {"path": str(work), "writable": os.access(nearest_existing(work), os.W_OK | os.X_OK)},
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        "python": platform.python_version(),
        "tmux": None if no_tmux != 0 else tmux.split()[-1],
        "gpus": gpus,
        "nvidia": complaint,
        "shared": {"path": str(shared), **folder},
        "address": interface_addresses(),
    }


# --- this machine -------------------------------------------------------------------------------------------------


def memory_gb(meminfo: str) -> float:
    """Return this machine's memory in GB, from the text of /proc/meminfo."""
    total = next((line.split()[1] for line in meminfo.splitlines() if line.startswith("MemTotal:")), "0")
    return round(int(total) * 1024 / 1e9, 1)


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that is there."""
    return next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))


def free_gb(path: Path) -> float:
    """Return the free GB where the path is, or will be."""
    return round(shutil.disk_usage(nearest_existing(path)).free / 1e9, 1)


def run_with_timeout(argv: Sequence[str], timeout_seconds: float) -> tuple[int | None, str]:
    """Return exit code and output of a command; code 127 when it is not there, None when it was not over in time.

    It is killed then, but not waited for: what waits for a broken driver cannot be killed.
    """
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        return 127, one_line_error(error)
    try:
        out, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return None, ""
    return process.returncode, out.decode(errors="replace").strip()


def query_gpus() -> tuple[list[dict[str, Any]], str]:
    """Return the GPUs that nvidia-smi names, and what is wrong: "", "missing", "hangs", or what else it says."""
    for wanted in (GPU_QUERY_FIELDS, GPU_QUERY_FIELDS[:-1]):  # an older driver does not know compute_cap
        words = ["nvidia-smi", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader,nounits"]
        code, said = run_with_timeout(words, NVIDIA_SMI_TIMEOUT_SECONDS)
        if code in (None, 127):
            return [], "missing" if code else "hangs"
        if "not a valid field" not in said:
            break
    rows = {line: [cell.strip() for cell in line.split(",")] for line in said.splitlines()}
    good = [row for row in rows.values() if len(row) == len(wanted) and row[3].startswith("GPU-")]
    return [_parse_gpu(row) for row in good], " ".join(line for line, row in rows.items() if row not in good)[:300]


def _parse_gpu(cells: Sequence[str]) -> dict[str, Any]:
    mib = int(cells[1]) if cells[1].isdigit() else 0  # [N/A]: memory that the GPU shares with the processor
    known = dict(zip(("name", "memory_gb", "driver", "uuid", "compute"), [*cells, ""], strict=False))
    return {**known, "memory_gb": round(mib * (1 << 20) / 1e9, 1)}


# --- the shared folder --------------------------------------------------------------------------------------------


def call_with_timeout(timeout_seconds: float, function: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return what a function gives in a process of its own, None when it is late: a lost file server holds who asks.

    An error is given as {"error": its text}.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        for stream in (0, 1, 2):  # whoever waits for the end of our output must not wait for what hangs
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        try:
            _write_answer(writer, function)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        if select.select([file], [], [], timeout_seconds)[0]:
            said = file.read()
            os.waitpid(pid, 0)
            return dict(json.loads(said))
    os.kill(pid, signal.SIGKILL)  # and is not waited for
    return None


def _write_answer(writer: int, function: Callable[[], dict[str, Any]]) -> None:
    with os.fdopen(writer, "w") as file:
        try:
            answer = function()
        except Exception as error:
            answer = {"error": one_line_error(error)}
        json.dump(answer, file)


def folder_facts(shared: Path, marker: Path) -> dict[str, Any]:
    """Return what the shared folder is and can do, and leave the mark there. Raises OSError when it cannot be used."""
    if not shared.is_dir():
        what = "is not a folder" if shared.exists() else "is not there on this machine; mount it, or make it"
        return {"error": f"{shared}: {what}"}
    marker.parent.mkdir(exist_ok=True)
    marker.write_text(f"{marker.name}\n")
    test, other = (marker.with_name(f".{marker.name}.{uuid4().hex}.{kind}") for kind in ("test", "link"))
    try:
        start = time.monotonic()
        with test.open("wb") as file:
            file.write(bytes(1 << 16))
            file.flush()
            written = time.monotonic()
            os.fsync(file.fileno())
        synced = time.monotonic()
        link = can_hard_link(test, other)
    finally:
        for one in (test, other):
            one.unlink(missing_ok=True)
    times = {"write_ms": round((written - start) * 1e3, 3), "fsync_ms": round((synced - written) * 1e3, 3)}
    mount = mount_of(shared.resolve(), Path("/proc/self/mountinfo").read_text())
    return {**mount, **times, "link": link, "free_gb": free_gb(shared)}


def can_hard_link(path: Path, second_name: Path) -> bool:
    """Whether a second name can be made for a file, and only once: attempts are made that way."""
    try:
        os.link(path, second_name)
        os.link(path, second_name)
    except FileExistsError:
        return path.samefile(second_name)
    except OSError:
        return False
    return False


def find_markers(folder: Path, marker_names: Mapping[str, str]) -> dict[str, bool]:
    """Return by machine whether its file is there. Asked until it is: NFS may know for a while that it is not."""
    seen, deadline = dict.fromkeys(marker_names, False), time.monotonic() + MARKER_TIMEOUT_SECONDS
    while True:
        for machine, name in marker_names.items():
            with contextlib.suppress(OSError):
                seen[machine] = seen[machine] or (folder / name).read_text() == f"{name}\n"
        if all(seen.values()) or time.monotonic() > deadline:
            return seen
        time.sleep(0.1)


def remove_marker(marker: Path) -> dict[str, Any]:
    """Remove a mark, and the folder of marks when it was the last."""
    marker.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        marker.parent.rmdir()
    return {}


if __name__ == "__main__":
    sys.exit(main())
