"""Attempt files: who trains next, and from which checkpoint. Each is created once, by an exclusive link.

    <shared>/attempts/000002.json       members, rendezvous address, resume checkpoint, reason
    <shared>/checkpoints/000002/        what attempt 2 saved, the checkpoint it began with, and the one before that

The first proposer of an attempt wins, and every agent follows the newest attempt. There is no leader, and no store that
could fail. The attempt's number fences off older attempts: the proposer of attempt 3 reads only the folder of attempt 2
and links the checkpoint it chose into the folder of attempt 3, with the one before it in case the trainers cannot read
the newer one. What an older attempt still writes or removes is never read again.
"""

import contextlib
import errno
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from train.tools.agent_protocol import (
    CHECKPOINT_PATTERN,
    RESULT_FILE,
    RESUME_PATTERN,
    attempt_name,
    checkpoint_folder,
    checkpoint_folders,
    checkpoint_step,
)
from train.tools.filesystem import FileVersion, create_once, file_version, is_intact, to_json_bytes
from train.tools.records import DamagedRecord, encode, read_record

from .states import MachineState

PROPOSE_TRIES = 10
PROPOSE_RETRY_SECONDS = 0.05
RESUME_PATH = re.compile(r"(checkpoints/\d+/resume-\d{1,18}-\w+\.pt)?")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One fixed membership of a job, its members in the order of their ranks.

    An attempt without members ends the job in the state `end_state`. `resume` is a checkpoint relative to the shared
    folder, "" for the beginning. The checkpoint of step `resume_before` cannot be read, so only one of an earlier step
    may be taken; None: there is no such checkpoint. The same members have failed `crash_count` times at step
    `crash_step`. `fault_counts` counts each machine's own failures. `proposer` is the id of the machine that proposed
    it, and `time` is by the wall clock of that machine (seconds since 1970). `token` is the secret by which the ranks
    know each other.
    """

    number: int = 0
    launch_id: str = ""
    members: tuple[str, ...] = ()
    master_address: str = "127.0.0.1"
    master_port: int = 0
    token: str = ""
    resume: str = ""
    resume_before: int | None = None
    reason: str = ""
    end_state: MachineState | None = None
    crash_step: int = -1
    crash_count: int = 0
    fault_counts: dict[str, int] = field(default_factory=dict)
    proposer: str = ""
    time: float = 0.0

    def __post_init__(self) -> None:
        if not RESUME_PATH.fullmatch(self.resume):
            raise ValueError(f"resume: {self.resume!r} is not a checkpoint of the shared folder")

    @property
    def machine_names(self) -> tuple[str, ...]:
        """The members' machine names: their ids without the random part that is new at each start of an agent."""
        return tuple(member.partition(".")[0] for member in self.members)

    @property
    def first_step(self) -> int:
        """The step of the checkpoint that the attempt resumes from, 0 for the beginning."""
        return checkpoint_step(Path(self.resume)) if self.resume else 0


def attempt_path(shared: Path, number: int) -> Path:
    """Return the path of an attempt's file."""
    return shared / "attempts" / f"{attempt_name(number)}.json"


def read_attempt(shared: Path, number: int) -> Attempt | None:
    """Return an attempt by number; None when it does not exist or its file is damaged."""
    with contextlib.suppress(DamagedRecord):
        return _read_intact_attempt(shared, number)
    return None


def _read_intact_attempt(shared: Path, number: int) -> Attempt | None:
    """Return an attempt by the number in the name of its file, None without such a file. Raises `DamagedRecord`."""
    path = attempt_path(shared, number)
    attempt = read_record(path, Attempt)
    if attempt and not (attempt.members or attempt.end_state):
        raise DamagedRecord(f"{path}: it has neither members nor an end state")
    return replace(attempt, number=number) if attempt and attempt.number != number else attempt


def newest_attempt(shared: Path, known_attempt: Attempt | None = None) -> Attempt | None:
    """Return the newest attempt, None before the first. The search begins after `known_attempt`.

    Attempts are found by opening one file after another: on NFS a listing or a stat may be stale, an open is not.
    """
    while following := read_attempt(shared, known_attempt.number + 1 if known_attempt else 1):
        known_attempt = following
    return known_attempt


class AttemptHistory:
    """All attempts of a job. Attempt files never change, so each of them is read once.

    When the newest file that was read is not the same file any more, the folder was replaced, and all are read again.
    """

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self._lock = threading.Lock()
        self._attempts: list[Attempt] = []
        self._newest_version: FileVersion | None = None

    def all(self) -> list[Attempt]:
        """Return the attempts in order. A damaged file is taken for a missing one."""
        with self._lock, contextlib.suppress(DamagedRecord):
            self._read_new()
        return list(self._attempts)

    def check(self) -> None:
        """Raise `DamagedRecord` when the file of an attempt is damaged."""
        with self._lock:
            self._read_new()

    def newest(self) -> Attempt | None:
        """Return the newest attempt, None before the first."""
        return next(reversed(self.all()), None)

    def last_training_number(self) -> int:
        """Return the number of the last attempt that has members, 0 when there is none."""
        return next((attempt.number for attempt in reversed(self.all()) if attempt.members), 0)

    def agreed_end(self, launch_id: str) -> Attempt | None:
        """Return the attempt by which the agents of a launch agreed that the job has ended, None while they have not.

        When all agents have left their rented machines, the job has not ended: new machines take their place.
        """
        newest = self.newest()
        if newest and newest.launch_id == launch_id and not newest.members and newest.end_state != MachineState.LEFT:
            return newest
        return None

    def is_finished(self, launch_id: str) -> bool:
        """Return whether the job has its result, or the agents of a launch agreed on its end."""
        return (self.shared / RESULT_FILE).exists() or self.agreed_end(launch_id) is not None

    def _read_new(self) -> None:
        """Read the files that are new since the last call. Raises `DamagedRecord`."""
        if self._attempts and self._version_of_newest() != self._newest_version:
            self._attempts = []
        try:
            while attempt := _read_intact_attempt(self.shared, len(self._attempts) + 1):
                self._attempts.append(attempt)
        finally:
            self._newest_version = self._version_of_newest()

    def _version_of_newest(self) -> FileVersion | None:
        return file_version(attempt_path(self.shared, len(self._attempts)))


def history(shared: Path) -> list[Attempt]:
    """Return all attempts in order."""
    return AttemptHistory(shared).all()


def has_newer_launch(shared: Path, launch_id: str) -> bool:
    """Return whether a later launch of the job has begun. An agent that was suspended meanwhile must not take part."""
    try:
        return (shared / "launch").read_text() != launch_id
    except OSError:  # the file does not exist, or the shared folder cannot be reached for a moment
        return False


def propose(shared: Path, known_attempt: Attempt | None, attempt: Attempt) -> Attempt:
    """Publish an attempt after the newest one, and return the attempt that is in force afterwards.

    The new attempt gets the next number and the newest intact checkpoint of the attempt before it. It is published only
    if the newest attempt is `known_attempt` or belongs to an earlier launch; else another agent was faster, and that
    agent's attempt is returned. Raises `OSError` when the shared folder cannot be written, or the attempt file is
    damaged.
    """
    newest = newest_attempt(shared, known_attempt)
    if newest and newest != known_attempt and newest.launch_id == attempt.launch_id:
        return newest
    if newest and has_newer_launch(shared, attempt.launch_id):
        return newest
    number = newest.number + 1 if newest else 1
    (shared / "attempts").mkdir(parents=True, exist_ok=True)
    for trial in range(PROPOSE_TRIES):
        if published := read_attempt(shared, number):
            return published
        try:
            complete = replace(attempt, number=number, resume=_link_checkpoints(shared, number, attempt.resume_before))
            if attempt.resume_before is not None:
                start = f"from step {complete.first_step}" if complete.resume else "from the beginning"
                complete = replace(complete, reason=f"{attempt.reason}; training goes on {start}")
            if create_once(attempt_path(shared, number), to_json_bytes(encode(complete))):
                _delete_checkpoints_before(shared, number - 1)
        except FileNotFoundError:  # the checkpoint was pruned after it had been chosen: choose again
            if trial == PROPOSE_TRIES - 1:
                raise
            time.sleep(PROPOSE_RETRY_SECONDS)
    message = "is damaged; remove it, then type imgnet-cluster resume"
    raise OSError(errno.EIO, message, str(attempt_path(shared, number)))


def _link_checkpoints(shared: Path, number: int, before_step: int | None) -> str:
    """Link the newest intact checkpoint of the attempt before `number`, and the one before it, for attempt `number`.

    What that attempt saved is newer than what it resumed from. Only checkpoints before `before_step` are taken, if it
    is given. Returns the path of the newest one's link relative to the shared folder, "" when there is no checkpoint.
    Raises `FileNotFoundError` when a checkpoint vanishes meanwhile.
    """
    if number == 1:
        return ""
    previous_folder = checkpoint_folder(shared, number - 1)
    candidates = [
        path
        for pattern in (CHECKPOINT_PATTERN, RESUME_PATTERN)
        for path in sorted(previous_folder.glob(pattern), reverse=True)
        if before_step is None or checkpoint_step(path) < before_step
    ]
    newest = next(filter(is_intact, candidates), None)
    if newest is None:
        return ""
    own_folder = checkpoint_folder(shared, number)
    own_folder.mkdir(parents=True, exist_ok=True)
    link = _link_checkpoint(newest, own_folder)
    earlier = next((path for path in candidates if checkpoint_step(path) < checkpoint_step(newest)), None)
    if earlier:
        _link_checkpoint(earlier, own_folder)
    return str(link.relative_to(shared))


def _link_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Link a checkpoint into the folder of an attempt that may resume from it, under a name that no other link has."""
    link = folder / RESUME_PATTERN.replace("*", f"{checkpoint_step(checkpoint):08d}-{uuid4().hex[:8]}")
    os.link(checkpoint, link)
    return link


def _delete_checkpoints_before(shared: Path, number: int) -> None:
    """Delete the checkpoints of attempts before `number`. A newer attempt has a link to the one still needed."""
    for folder in checkpoint_folders(shared):
        if int(folder.name) < number:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
