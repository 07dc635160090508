"""Attempt files: who trains next and from where. Made once, by an exclusive link; the newest is obeyed.

    <shared>/attempts/000002.json       members, head, resume checkpoint, reason
    <shared>/checkpoints/000002/        what attempt 2 saved, and what it began with

Whoever proposes first wins, and everyone obeys; there is no leader and nothing that can die. An attempt's number is the
fence: the proposer of attempt 3 looks only into the folder of attempt 2, and puts a link to its choice into the folder
of attempt 3. What an older attempt still writes, or removes, is never looked at again.
"""

import contextlib
import errno
import os
import shutil
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from uuid import uuid4

from train.tools.filesystem import create_once, newest_intact_file, read_json, to_json_bytes

CHECKPOINT_PATTERN = "step-*.pt"
PROPOSE_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One gathering of machines, in the order of their ranks. Without members it is the end of the job, as `state`.

    `resume` is a checkpoint relative to the shared folder, "" for the beginning. `crashes` failures of these very
    members came at step `step`; `faults` counts each machine's own.
    """

    number: int = 0
    launch_id: str = ""
    members: tuple[str, ...] = ()
    master_address: str = "127.0.0.1"
    master_port: int = 0
    resume: str = ""
    reason: str = ""
    end_state: str = ""
    crash_step: int = -1
    crash_count: int = 0
    fault_counts: dict[str, int] = field(default_factory=dict)
    proposer: str = ""
    time: float = 0.0

    @property
    def machine_names(self) -> tuple[str, ...]:
        """The members' machine names: an id is a name and a word that is new with every start of its agent."""
        return tuple(one.partition(".")[0] for one in self.members)

    @property
    def first_step(self) -> int:
        """The step it goes on from."""
        return int(self.resume.rpartition("/")[2].split("-")[1]) if self.resume else 0


def read_attempt(shared: Path, number: int) -> Attempt | None:
    """Return an attempt by number, None when there is none."""
    said = read_json(attempt_path(shared, number))
    if not isinstance(said, dict):
        return None
    known = {one.name for one in fields(Attempt)}
    values = {key: one for key, one in said.items() if key in known}
    return Attempt(**{**values, "members": tuple(said["members"])})


def newest_attempt(shared: Path, known_attempt: Attempt | None = None) -> Attempt | None:
    """Return the newest attempt, None before the first; `known` saves looking from the start.

    Found by opening: on NFS neither a listing nor a stat must be fresh, an open is.
    """
    while following := read_attempt(shared, known_attempt.number + 1 if known_attempt else 1):
        known_attempt = following
    return known_attempt


def agreed_end(shared: Path, launch_id: str) -> Attempt | None:
    """Return the attempt by which the agents of a launch agreed that the job is over, None while they have not.

    That all have left their rented machines is no such end: others take their place.
    """
    last = newest_attempt(shared)
    return last if last and last.launch_id == launch_id and not last.members and last.end_state != "left" else None


def is_finished(shared: Path, launch_id: str) -> bool:
    """Whether a job has its result, or the agents of a launch agreed on its end."""
    return (shared / "result.json").exists() or agreed_end(shared, launch_id) is not None


def history(shared: Path) -> list[Attempt]:
    """Return all attempts in order."""
    found: list[Attempt] = []
    while one := read_attempt(shared, len(found) + 1):
        found.append(one)
    return found


def last_training_attempt_number(shared: Path, last_attempt: Attempt | None) -> int:
    """Return the number of the last attempt up to this one that machines made, and not an agreement on an end; or 0."""
    while last_attempt and not last_attempt.members:
        last_attempt = read_attempt(shared, last_attempt.number - 1)
    return last_attempt.number if last_attempt else 0


def propose(shared: Path, known_attempt: Attempt | None, attempt: Attempt) -> Attempt:
    """Publish an attempt after the newest, which must be `known` or of an earlier launch: else somebody was faster.

    It gets its number and the newest whole checkpoint before it. Returns the attempt that is in force afterwards.
    Raises `OSError` when the shared folder cannot be written.
    """
    before = newest_attempt(shared, known_attempt)
    if before and before != known_attempt and before.launch_id == attempt.launch_id:
        return before
    if before and has_newer_launch(shared, attempt.launch_id):
        return before
    number = before.number + 1 if before else 1
    (shared / "attempts").mkdir(parents=True, exist_ok=True)
    for again in range(PROPOSE_TRIES):
        if stands := read_attempt(shared, number):
            return stands
        try:
            whole = replace(attempt, number=number, resume=_link_resume_checkpoint(shared, number))
            if create_once(attempt_path(shared, number), to_json_bytes(asdict(whole))):
                _delete_checkpoints_before(shared, number - 1)
        except FileNotFoundError:  # the checkpoint was pruned under our eyes: look again
            if again == PROPOSE_TRIES - 1:
                raise
            time.sleep(0.05)
    raise OSError(errno.EIO, "is damaged; remove it, then imgnet-cluster resume", str(attempt_path(shared, number)))


def has_newer_launch(shared: Path, launch_id: str) -> bool:
    """Whether a later launch has begun: a machine that stood still meanwhile has no say in it."""
    try:
        return (shared / "launch").read_text() != launch_id
    except OSError:  # not there, or away for a moment
        return False


def _link_resume_checkpoint(shared: Path, number: int) -> str:
    """Give attempt `number` a checkpoint of its own to begin with: the newest whole one of the attempt before it."""
    if number == 1:
        return ""
    folders = [shared / "checkpoints" / f"{one:06d}" for one in (number - 1, number)]
    before = read_attempt(shared, number - 1)
    saved = newest_intact_file(folders[0], CHECKPOINT_PATTERN) or (
        shared / before.resume if before and before.resume else None
    )
    if saved is None:
        return ""
    folders[1].mkdir(parents=True, exist_ok=True)
    step = saved.stem.split("-")[1]
    mine = folders[1] / f"resume-{step}-{uuid4().hex[:8]}.pt"
    os.link(saved, mine)
    return str(mine.relative_to(shared))


def _delete_checkpoints_before(shared: Path, number: int) -> None:
    """Remove the checkpoints before attempt `number`: a newer attempt has a link to what was still wanted."""
    for folder in (shared / "checkpoints").glob("[0-9]*"):
        if int(folder.name) < number:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def attempt_path(shared: Path, number: int) -> Path:
    """Return the file of an attempt."""
    return shared / "attempts" / f"{number:06d}.json"
