"""Checkpoint files of a job on one machine: find the newest and copy it home."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.connectors.local import Machine
from train.tools.filesystem import newest_sealed, replace, unseal

if TYPE_CHECKING:
    pass


PATTERNS = ("step-*.pt", "resume-*.pt")  # what an attempt saved, and what it began with


NAME = re.compile(r"(\d+)/(step|resume)-(\d+)[\w-]*\.pt")


Progress = Callable[[int, int], None]


def newest_in(shared: Path) -> Path | None:
    """Return the newest whole checkpoint in a shared folder: the last attempt's that has any."""
    for attempt in sorted((shared / "checkpoints").glob("[0-9]*"), reverse=True):
        for pattern in PATTERNS:
            if found := newest_sealed(attempt, pattern):
                return found
    return None


def bring(machine: Machine | Any, shared: str, home: Path, progress: Progress) -> Path | None:
    """Bring the newest whole checkpoint of a machine's `shared` folder to that at `home`; None: there is none.

    Raises `ClusterError` when the machine does not answer, `OSError` when the disk here is full.
    """
    there = {name: size for name, size in machine.files(f"{shared}/checkpoints").items() if NAME.fullmatch(name)}
    for name in sorted(there, key=_age, reverse=True):
        target, data = home / "checkpoints" / name, bytearray()
        if not target.exists():
            while len(data) < there[name] and (part := machine.read_from(f"{shared}/checkpoints/{name}", len(data))):
                data += part
                progress(len(data), there[name])
            target.parent.mkdir(parents=True, exist_ok=True)
            replace(target, bytes(data))
        try:
            unseal(target)
            return target
        except ValueError:  # damaged, or replaced by a newer one meanwhile
            target.unlink()
    return None


def _age(name: str) -> tuple[int, bool, int]:
    """The later, the larger: what an attempt saved is newer than what it began with."""
    found = NAME.fullmatch(name)
    assert found
    return int(found[1]), found[2] == "step", int(found[3])
