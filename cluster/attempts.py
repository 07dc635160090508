"""Attempt files: who trains next and from where. Made once, by an exclusive link; the newest is obeyed.

    <shared>/attempts/000002.json       members, resume checkpoint, reason
    <shared>/checkpoints/000002/        what attempt 2 saved; only the proposer of attempt 3 looks here

What an older attempt still writes is never read: its number is the fence.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from train.files import as_json, newest_sealed, publish, read_json

PATTERN = "step-*.pt"


@dataclass(frozen=True)
class Attempt:
    """One gathering of machines. `resume` is a checkpoint relative to the shared folder, "" for the beginning."""

    number: int
    members: tuple[str, ...]
    resume: str
    reason: str
    time: float


def newest(shared: Path) -> Attempt | None:
    """Return the newest attempt, None before the first. Found by opening: on NFS only an open is fresh."""
    found, number = None, 1
    while said := read_json(_path(shared, number)):
        found = Attempt(**{**said, "members": tuple(said["members"])})
        number += 1
    return found


def propose(shared: Path, members: tuple[str, ...], reason: str) -> Attempt:
    """Make the next attempt, which resumes from the newest whole checkpoint, and return what is in force afterwards."""
    before = newest(shared)
    number, resume = 1, ""
    if before:
        number, resume = before.number + 1, before.resume
        saved = newest_sealed(shared / "checkpoints" / f"{before.number:06d}", PATTERN)
        resume = str(saved.relative_to(shared)) if saved else resume
    (shared / "attempts").mkdir(parents=True, exist_ok=True)
    publish(_path(shared, number), as_json(asdict(Attempt(number, members, resume, reason, time.time()))))
    winner = newest(shared)
    assert winner is not None
    return winner


def _path(shared: Path, number: int) -> Path:
    return shared / "attempts" / f"{number:06d}.json"
