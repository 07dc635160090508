"""A job's files on their way home: followed by offset, each byte once, at any number of restarts.

A machine's agent brings what its trainers write on its own disk to the shared folder (`Courier`); whoever looks at the
job brings it from there home (`bring_home`). The length of what has arrived is the offset, so there is no state to
lose; at home a lock, which the kernel takes back from the dead, keeps two followers from appending the same bytes.
"""

from pathlib import Path

from train.tools.filesystem import locked

from .local import Connector

SYNCED_FOLDERS = ("events", "metrics", "logs", "ids")  # they only grow


class LogShipper:
    """Appends what is new in a machine's work folder to the shared one. No other machine writes the same files."""

    def __init__(self, work_folder: Path, shared_folder: Path) -> None:
        self.work_folder, self.shared_folder = work_folder, shared_folder
        self.sent_offsets: dict[Path, int] = {}

    def ship_new_bytes(self) -> int:
        """Return the number of bytes that were new. Raises `OSError`; the next call goes on where this one stopped."""
        brought = 0
        for folder in SYNCED_FOLDERS:
            for source in (self.work_folder / folder).rglob("*"):
                if not source.is_file() or source.name.startswith("."):
                    continue
                target = self.shared_folder / source.relative_to(self.work_folder)
                offset = self.sent_offsets.get(source)
                if offset is None or source.stat().st_size > offset:
                    brought += self._append_new_bytes(source, target)
        return brought

    def _append_new_bytes(self, source: Path, target: Path) -> int:
        target.parent.mkdir(parents=True, exist_ok=True)
        self.sent_offsets.pop(source, None)  # until the write has gone well: a full disk takes a part
        with source.open("rb") as file, target.open("ab") as out:
            offset = out.seek(0, 2)
            file.seek(offset)
            data = file.read()
            out.write(data)
        self.sent_offsets[source] = offset + len(data)
        return len(data)


def pull_logs(machine: Connector, shared_folder: str, run_folder: Path) -> int:
    """Append what is new in the followed folders of `shared` to those of `home`. Returns the number of bytes.

    Raises `OSError` when the disk at home is full; the next call goes on where this one stopped.
    """
    brought = 0
    with locked(run_folder / ".home.lock"):
        for folder in SYNCED_FOLDERS:
            for name, size in machine.list_files(f"{shared_folder}/{folder}").items():
                brought += _pull_file(machine, f"{shared_folder}/{folder}/{name}", run_folder / folder / name, size)
    return brought


def _pull_file(machine: Connector, source: str, target: Path, size: int) -> int:
    start = offset = target.stat().st_size if target.exists() else 0
    if offset >= size and target.exists():
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("ab") as file:
        while offset < size and (data := machine.read_from(source, offset)):
            file.write(data)
            offset += len(data)
    return offset - start
