"""A job's files on their way home: followed by offset, each byte once, at any number of restarts.

The length of what is at home is the offset, so there is no state to lose; a lock, which the kernel takes back from the
dead, keeps two followers from appending the same bytes.
"""

from pathlib import Path

from train.files import locked

from .machine import Machine

FOLLOWED = ("events", "metrics", "logs")  # they only grow


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
