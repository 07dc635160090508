"""Copies files that only grow, such as logs and metrics, from the machines to the run folder, each byte exactly once.

A machine's agent copies what its trainers write on the local disk to the shared folder (`LogShipper`). From there the
files are copied to the run folder: by `pull_logs` on this computer, by `Mirror.pull` (cluster/machines/mirror.py) over
ssh. The length of the copy is the offset to continue from, so there is no further state to lose at a restart. In
the run folder a lock keeps two processes from appending the same bytes; the kernel releases it when its holder dies.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from train.tools.agent_protocol import LOG_FOLDERS
from train.tools.files import locked, open_below, open_regular

from .untrusted import MAX_FILE_BYTES, ArrivalFolder, is_mirrored_path

PART_BYTES = 1 << 24  # that are in memory at once


@dataclass
class LogShipper:
    """Appends new bytes of a machine's work folder to the shared folder. No other machine writes the same files.

    Other users may write to the shared folder: a symbolic link there is an error.
    """

    work_folder: Path
    shared_folder: Path
    sent_offsets: dict[str, int] = field(default_factory=dict)

    def ship_new_bytes(self) -> None:
        """Append the new bytes of all logs. An `OSError` of one is raised at the end, and the next call tries again."""
        last_error: OSError | None = None
        for path, size in ArrivalFolder(self.work_folder).sizes(LOG_FOLDERS).items():
            if not Path(path).name.startswith(".") and size > self.sent_offsets.get(path, -1):
                try:
                    self._append_new_bytes(path)
                except OSError as error:
                    last_error = error
        if last_error:
            raise last_error

    def _append_new_bytes(self, path: str) -> None:
        with (
            open_regular(self.work_folder / path) as source,
            open_below(self.shared_folder, path, os.O_WRONLY | os.O_APPEND) as target,
        ):
            offset = target.seek(0, os.SEEK_END)
            source.seek(offset)
            while data := source.read(PART_BYTES):
                target.write(data)
                offset += len(data)
        self.sent_offsets[path] = offset


def pull_logs(shared_folder: Path, run_folder: Path) -> None:
    """Append what is new in the shared folder's logs to the run folder's.

    Files with other names than `untrusted` allows, links, what is longer than it allows, and files that have no place
    in the run folder are left out. Raises `OSError` when its disk is nearly full; the next call goes on from there.
    """
    arrivals = ArrivalFolder(run_folder)
    with locked(run_folder / ".home.lock"):
        local_sizes = arrivals.sizes(LOG_FOLDERS)
        for path, size in ArrivalFolder(shared_folder).sizes(LOG_FOLDERS).items():
            end = min(size, MAX_FILE_BYTES)
            if is_mirrored_path(path) and end > local_sizes.get(path, -1) and arrivals.has_place(path):
                with open_regular(shared_folder / path) as source:
                    offset = source.seek(arrivals.append(path, 0, b""))
                    while offset < end and (data := source.read(PART_BYTES)):
                        offset = arrivals.append(path, offset, data)
