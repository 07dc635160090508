"""Copies files that only grow, such as logs and metrics, from the machines to the run folder, each byte exactly once.

A machine's agent copies what its trainers write on the local disk to the shared folder (`LogShipper`). From there the
files are copied to the run folder: by `pull_logs` on this computer, by `Mirror.pull` (cluster/machines/mirror.py) over
ssh. The length of the copy is the offset to continue from, so there is no further state to lose at a restart. In
the run folder a lock keeps two processes from appending the same bytes; the kernel releases it when its holder dies.
"""

import os
from pathlib import Path

from train.tools.agent_protocol import LOG_FOLDERS
from train.tools.filesystem import locked, open_regular
from train.tools.shared_files import open_below

from .local import Connector
from .untrusted import MAX_FILE_BYTES, ArrivalFolder, is_mirrored_path, is_obstructed, parent_folders


class LogShipper:
    """Appends new bytes of a machine's work folder to the shared folder. No other machine writes the same files.

    Other users may write to the shared folder: a symbolic link there is an error.
    """

    def __init__(self, work_folder: Path, shared_folder: Path) -> None:
        self.work_folder = work_folder
        self.shared_folder = shared_folder
        self.sent_offsets: dict[Path, int] = {}

    def ship_new_bytes(self) -> int:
        """Append what is new and return the number of bytes. Raises `OSError`; the next call continues from there."""
        shipped_bytes = 0
        for folder in LOG_FOLDERS:
            for source in (self.work_folder / folder).rglob("*"):
                if not source.is_file() or source.name.startswith("."):
                    continue
                sent_offset = self.sent_offsets.get(source)
                if sent_offset is None or source.stat().st_size > sent_offset:
                    shipped_bytes += self._append_new_bytes(source)
        return shipped_bytes

    def _append_new_bytes(self, source: Path) -> int:
        path = source.relative_to(self.work_folder).as_posix()
        # A full disk may take a part of the write. Forget the offset until all is written.
        self.sent_offsets.pop(source, None)
        with (
            open_regular(source) as source_file,
            open_below(self.shared_folder, path, os.O_WRONLY | os.O_APPEND) as target_file,
        ):
            offset = target_file.seek(0, os.SEEK_END)
            source_file.seek(offset)
            data = source_file.read()
            target_file.write(data)
        self.sent_offsets[source] = offset + len(data)
        return len(data)


def pull_logs(machine: Connector, shared_folder: str, run_folder: Path) -> int:
    """Append what is new in the shared folder's logs to the run folder's. Returns the number of new bytes.

    Files with other names than `untrusted` allows, links, what is longer than it allows, and files where the run folder
    has a folder, or the other way round, are left out. Raises
    `OSError` when the disk of the run folder is nearly full; the next call continues from there.
    """
    pulled_bytes = 0
    arrivals = ArrivalFolder(run_folder)
    with locked(run_folder / ".home.lock"):
        local_sizes = arrivals.sizes(LOG_FOLDERS)
        folders = {folder for path in local_sizes for folder in parent_folders(path)}
        for path, size in ArrivalFolder(Path(shared_folder)).sizes(LOG_FOLDERS).items():
            is_in_the_way = path not in local_sizes and is_obstructed(path, local_sizes, folders)
            if is_mirrored_path(path) and size > local_sizes.get(path, -1) and not is_in_the_way:
                end = min(size, MAX_FILE_BYTES)
                source = f"{shared_folder}/{path}"
                pulled_bytes += _pull_file(machine, source, arrivals, path, local_sizes.get(path, 0), end)
    return pulled_bytes


def _pull_file(machine: Connector, source: str, arrivals: ArrivalFolder, path: str, start: int, size: int) -> int:
    """Append a file's bytes from the end of the local copy up to `size`; creates the copy of an empty file too."""
    offset = arrivals.append(path, start, b"")
    while offset < size and (data := machine.read_from(source, offset)):
        offset = arrivals.append(path, offset, data)
    return offset - start
