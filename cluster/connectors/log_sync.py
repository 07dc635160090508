"""A job's files on their way home: followed by offset, each byte once, at any number of restarts.

A machine's agent brings what its trainers write on its own disk to the shared folder (`Courier`); whoever looks at the
job brings it from there home (`bring_home`). The length of what has arrived is the offset, so there is no state to
lose; at home a lock, which the kernel takes back from the dead, keeps two followers from appending the same bytes.
"""

from pathlib import Path

from train.tools.filesystem import locked

from .local import Machine

FOLLOWED = ("events", "metrics", "logs", "ids")  # they only grow


class Courier:
    """Appends what is new in a machine's work folder to the shared one. No other machine writes the same files."""

    def __init__(self, work: Path, shared: Path) -> None:
        self.work, self.shared = work, shared
        self.sent: dict[Path, int] = {}

    def bring(self) -> int:
        """Return the number of bytes that were new. Raises `OSError`; the next call goes on where this one stopped."""
        brought = 0
        for folder in FOLLOWED:
            for source in (self.work / folder).rglob("*"):
                if not source.is_file() or source.name.startswith("."):
                    continue
                target = self.shared / source.relative_to(self.work)
                offset = self.sent.get(source)
                if offset is None or source.stat().st_size > offset:
                    brought += self._append(source, target)
        return brought

    def _append(self, source: Path, target: Path) -> int:
        target.parent.mkdir(parents=True, exist_ok=True)
        self.sent.pop(source, None)  # until the write has gone well: a full disk takes a part
        with source.open("rb") as file, target.open("ab") as out:
            offset = out.seek(0, 2)
            file.seek(offset)
            data = file.read()
            out.write(data)
        self.sent[source] = offset + len(data)
        return len(data)


def bring_home(machine: Machine, shared: str, home: Path) -> int:
    """Append what is new in the followed folders of `shared` to those of `home`. Returns the number of bytes.

    Raises `OSError` when the disk at home is full; the next call goes on where this one stopped.
    """
    brought = 0
    with locked(home / ".home.lock"):
        for folder in FOLLOWED:
            for name, size in machine.files(f"{shared}/{folder}").items():
                brought += _append(machine, f"{shared}/{folder}/{name}", home / folder / name, size)
    return brought


def _append(machine: Machine, source: str, target: Path, size: int) -> int:
    start = offset = target.stat().st_size if target.exists() else 0
    if offset >= size and target.exists():
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("ab") as file:
        while offset < size and (data := machine.read_from(source, offset)):
            file.write(data)
            offset += len(data)
    return offset - start
