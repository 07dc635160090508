"""Brings what a job trained into its run folder: its newest checkpoint, and the network of a finished job."""

import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import BinaryIO

from cluster.connectors.ssh import SSHConnector
from cluster.connectors.untrusted import MAX_CHECKPOINT_BYTES, ArrivalFolder, BadAnswer, checkpoint_age
from cluster.errors import ClusterError
from cluster.script import snapshot
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from cluster.state.states import MachineState
from train.tools.agent_protocol import (
    CHECKPOINT_PATTERN,
    CHECKPOINTS_FOLDER,
    NETWORK_FILES,
    NETWORK_FOLDER,
    RESULT_FILE,
    RESUME_PATTERN,
    checkpoint_folders,
    newest_intact_checkpoint,
)
from train.tools.files import open_regular, read_file, write_atomic_with
from train.tools.process_log import Progress
from train.tools.sealed_files import verify_checksum
from train.tools.text_files import is_valid_json
from train.weights.safetensors_file import verify_file

# Below <shared>/checkpoints/<attempt>/: what the attempt saved, and what it resumed from.
CHECKPOINT_PATTERNS = (CHECKPOINT_PATTERN, RESUME_PATTERN)
WEIGHTS_SUFFIX = ".safetensors"
VERSION_TRIES = 5  # to copy a version that a running command replaces meanwhile
MAX_DESCRIPTION_BYTES = 1 << 24  # of the other files of a network; parsed, they take twenty times the memory


def newest_local_checkpoint(shared: Path) -> Path | None:
    """Return the newest intact checkpoint in a shared folder, from the last attempt that has one."""
    for attempt_folder in reversed(checkpoint_folders(shared)):
        for pattern in CHECKPOINT_PATTERNS:
            if checkpoint := newest_intact_checkpoint(attempt_folder, pattern):
                return checkpoint
    return None


def has_final_files(spec: JobSpec, folder: RunFolder) -> bool:
    """Whether the machines have what the job has made in the end: a network, or the last checkpoints of a command.

    Without a result a run trains on: its network is that of before. A stopped command's checkpoints stay for `resume`.
    """
    if spec.own_command is None:
        return (folder.shared / RESULT_FILE).exists()
    end = folder.attempts.agreed_end(folder.launch_id)
    return end is not None and end.end_state in (MachineState.DONE, MachineState.FAILED)


def download_checkpoint(
    machine: SSHConnector, remote_shared: str, local_shared: Path, progress: Progress
) -> Path | None:
    """Copy the newest intact checkpoint of a machine's shared folder to the local one; None if there is none.

    `progress` gets bytes and size. Raises `ClusterError` for no answer or a bad size, `OSError` for a full disk.
    """
    sizes = machine.list_files(f"{remote_shared}/{CHECKPOINTS_FOLDER}")
    ages = {name: age for name in sizes if (age := checkpoint_age(name))}
    local_shared.mkdir(parents=True, exist_ok=True)
    arrivals = ArrivalFolder(local_shared)
    for name in sorted(ages, key=ages.__getitem__, reverse=True):
        path, size = f"{CHECKPOINTS_FOLDER}/{name}", sizes[name]
        source, target = f"{remote_shared}/{path}", local_shared / path
        if not target.exists():
            if size > MAX_CHECKPOINT_BYTES:
                limit = f"the limit is {MAX_CHECKPOINT_BYTES / 1e9:.0f} GB"
                raise BadAnswer(f"has a checkpoint {name} of {size / 1e9:.0f} GB; {limit}", machine.name)
            arrivals.require_space(size)
            arrivals.create(path, partial(_download, machine, source, size, progress))
        try:
            verify_checksum(target)
            return target
        except ValueError:  # damaged, or replaced by a newer checkpoint during the download
            target.unlink()
    return None


def download_version(machine: SSHConnector, remote_shared: str, local_shared: Path, progress: Progress) -> Path | None:
    """Copy the newest version of a command's checkpoint folder to the local shared folder; None if there is none.

    The copy gets its name when it is complete; a call after an interrupted one takes over the files that are here.
    Older versions here are removed. Links arrive as the files that they lead to. `progress` is called with the bytes
    received so far and those of the version. Raises as `download_checkpoint` does.
    """
    for _ in range(VERSION_TRIES):
        versions = snapshot.group_by_version(machine.list_files(f"{remote_shared}/{CHECKPOINTS_FOLDER}"))
        if not versions:
            return None
        name, sizes = versions[-1]
        target = local_shared / CHECKPOINTS_FOLDER / name
        if target.is_dir() or _download_version(machine, remote_shared, local_shared, name, sizes, progress):
            snapshot.remove_other_versions(local_shared, target)
            return target
    raise ClusterError("its checkpoint folder changes faster than it is copied; try again")


def _download_version(
    machine: SSHConnector, remote_shared: str, local_shared: Path, name: str, sizes: dict[str, int], progress: Progress
) -> bool:
    """Copy the files of a version; return whether it is complete, not replaced by a newer one meanwhile."""
    attempt, _, version = name.partition("/")
    unfinished = f"{CHECKPOINTS_FOLDER}/{attempt}/{snapshot.UNFINISHED_PREFIX}{version}"
    local_shared.mkdir(parents=True, exist_ok=True)
    arrivals = ArrivalFolder(local_shared)
    total, done = sum(sizes.values()), 0
    if max(sizes.values()) > MAX_CHECKPOINT_BYTES:
        raise BadAnswer(f"has a checkpoint file of {max(sizes.values()) / 1e9:.0f} GB", machine.name)
    present = arrivals.sizes([unfinished])
    arrivals.require_space(sum(size for path, size in sizes.items() if present.get(f"{unfinished}/{path}") != size))
    for path, size in sorted(sizes.items()):
        source, target = f"{remote_shared}/{CHECKPOINTS_FOLDER}/{name}/{path}", f"{unfinished}/{path}"
        if present.get(target) != size:
            part_progress = partial(_add_to_progress, progress, done, total)
            arrivals.create(target, partial(_download, machine, source, size, part_progress))
        done += size
        progress(done, total)
    arrived = arrivals.sizes([unfinished])
    if any(arrived.get(f"{unfinished}/{path}") != size for path, size in sizes.items()):
        shutil.rmtree(local_shared / unfinished, ignore_errors=True)
        return False
    for path in arrived.keys() - {f"{unfinished}/{path}" for path in sizes}:
        (local_shared / path).unlink()
    (local_shared / unfinished).rename(local_shared / CHECKPOINTS_FOLDER / name)
    return True


def _add_to_progress(progress: Progress, offset: int, total: int, done: int, _: int) -> None:
    progress(offset + done, total)


def download_network(machine: SSHConnector, remote_shared: str, run_folder: Path, progress: Progress) -> None:
    """Copy the files of a finished run's network from a machine's shared folder to the run folder.

    Intact files that are here stay. Only the known names are asked for. `progress` is as in `download_checkpoint`.
    Raises `ClusterError` when no answer comes or it is too large or damaged, `OSError` when the local disk is full.
    """
    sizes = machine.list_files(f"{remote_shared}/{NETWORK_FOLDER}")
    arrivals = ArrivalFolder(run_folder)
    for name in NETWORK_FILES:
        path = f"{NETWORK_FOLDER}/{name}"
        size = sizes.get(name)
        if size is None or is_intact_network_file(run_folder / path):
            continue
        max_bytes = MAX_CHECKPOINT_BYTES if name.endswith(WEIGHTS_SUFFIX) else MAX_DESCRIPTION_BYTES
        if size > max_bytes:
            raise BadAnswer(f"has a file {name} of {size / 1e9:.3g} GB", machine.name)
        arrivals.require_space(size)
        arrivals.create(path, partial(_download, machine, f"{remote_shared}/{path}", size, progress))
        if not is_intact_network_file(run_folder / path):
            (run_folder / path).unlink()
            raise BadAnswer(f"sent a damaged {name}", machine.name)


def download_final_files(
    spec: JobSpec, machine: SSHConnector, remote_shared: str, home: RunFolder, progress: Progress
) -> None:
    """Copy the network of a finished run, or the last checkpoints of a command. Raises as `download_network` does."""
    if spec.own_command:
        download_version(machine, remote_shared, home.shared, progress)
    else:
        download_network(machine, remote_shared, home.path, progress)


def run_in_time(download: Callable[[], object], limit_seconds: float) -> None:
    """Run a download in a thread for `limit_seconds`. Raises its error, or `ClusterError` when it is too slow."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            download()
            outcome.set_result(None)
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    with contextlib.suppress(FutureTimeout):
        return outcome.result(limit_seconds)
    raise ClusterError(f"not complete after {limit_seconds:.0f} s")


def is_intact_network_file(path: Path) -> bool:
    """Whether a file of a network exists and is whole: weights by their checksum, other files as JSON."""
    with contextlib.suppress(OSError, ValueError):
        if path.name.endswith(WEIGHTS_SUFFIX):
            verify_file(path)
            return True
        return is_valid_json(read_file(path, MAX_DESCRIPTION_BYTES))
    return False


def link_network(shared: Path, run_folder: Path) -> None:
    """Give the files of a finished run's network a name in the run folder, on whose disk they are. Raises `OSError`."""
    for name in NETWORK_FILES:
        source, target = shared / NETWORK_FOLDER / name, run_folder / NETWORK_FOLDER / name
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            if not stat.S_ISREG(source.lstat().st_mode) or target.exists():
                continue
            target.parent.mkdir(exist_ok=True)
            try:
                os.link(source, target, follow_symlinks=False)
            except PermissionError:  # a file system without hard links
                ArrivalFolder(run_folder).require_space(source.stat().st_size)
                with open_regular(source) as file:
                    write_atomic_with(target, partial(shutil.copyfileobj, file))


def _download(machine: SSHConnector, source: str, size: int, progress: Progress, file: BinaryIO) -> None:
    """Write the first `size` bytes of a machine's file into a local one, fewer if the machine has fewer."""
    done = 0
    while done < size and (part := machine.read_from(source, done)):
        file.write(part[: size - done])
        done += len(part)
        progress(min(done, size), size)
