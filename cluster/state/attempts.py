"""Attempt files: who trains next, and from which checkpoint. Each is created once, by an exclusive link.

    <shared>/attempts/000002.json       members, rendezvous address, resume checkpoint, reason
    <shared>/checkpoints/000002/        what attempt 2 saved, the checkpoint it began with, and the one before that

The first proposer of an attempt wins, and every agent follows the newest attempt. There is no leader, and no service
such as etcd that could fail. The number of the attempt fences off older attempts: the proposer of attempt 3 reads only
the folder of attempt 2 and links the checkpoint it chose into the folder of attempt 3, with the one before it in case
the trainers cannot read the newer one. What an older attempt still writes or removes is never read again.
"""

import contextlib
import errno
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from cluster.script import snapshot
from train.tools.agent_protocol import (
    BEST_PATTERN,
    CHECKPOINT_PATTERN,
    CHECKPOINTS_FOLDER,
    RESULT_FILE,
    RESUME_PATTERN,
    Fault,
    attempt_name,
    checkpoint_files,
    checkpoint_folder,
    checkpoint_folders,
    checkpoint_step,
)
from train.tools.files import FileVersion, create_once, file_version, make_folder_below, open_regular
from train.tools.records import DamagedRecord, History, encode, read_record, require_unix_time
from train.tools.sealed_files import is_intact
from train.tools.text_files import to_json_bytes

from .heartbeats import machine_name
from .states import MachineState

PROPOSE_TRIES = 10
MAX_ATTEMPT_BYTES = 1_000_000  # of one file: the members of a job with 10,000 machines have a quarter of that
PROPOSE_RETRY_SECONDS = 0.05
RESUME_PATH = re.compile(r"(checkpoints/\d+/resume-\d{1,18}-\w+(\.pt)?)?")  # a folder when it is a command's
MEMBER_ID = re.compile(r"[\w-]{1,40}(\.[\w-]{1,40})?", re.ASCII)  # the file may come from a machine that lies


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One fixed membership of a job, its members in the order of their ranks.

    An attempt without members ends the job in the state `end_state`; `fault` says whose fault a failure was, and
    `failed_rank` which rank of the attempt before failed, None where that is not known. `resume` is a checkpoint
    relative to the shared folder, "" for the beginning. With a `live_step` the trainers go on in place at this step:
    those that have kept their state send it to the others, and nobody reads the checkpoint. The checkpoint of step
    `resume_before` cannot be read, so only one of an earlier step may be taken; None: there is no such checkpoint. The
    same members have failed `crash_count` times at step `crash_step`. Before this attempt, `failed_regroups` in a row
    that went on in place failed before their first step, and lost no machine. `fault_counts` counts each machine's own
    failures, and `left_out` has the ids of the members of the attempt before that failed by their own fault too often.
    `time` is by the wall clock of the machine that proposed it (seconds since 1970). `token` is the secret by which the
    ranks know each other, and `addresses` are all those from which their machines may connect; (): they are not known.
    """

    number: int = 0
    launch_id: str = ""
    members: tuple[str, ...] = ()
    master_address: str = "127.0.0.1"
    master_port: int = 0
    token: str = ""
    addresses: tuple[str, ...] = ()
    resume: str = ""
    live_step: int | None = None
    resume_before: int | None = None
    reason: str = ""
    end_state: MachineState | None = None
    fault: Fault = Fault.NONE
    failed_regroups: int = 0
    crash_step: int = -1
    crash_count: int = 0
    failed_rank: int | None = None
    fault_counts: dict[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    time: float = 0.0

    def __post_init__(self) -> None:
        if not RESUME_PATH.fullmatch(self.resume):
            raise ValueError(f"resume: {self.resume!r} is not a checkpoint of the shared folder")
        if not all(map(MEMBER_ID.fullmatch, self.members)):
            raise ValueError("members: not all of them are ids of agents")
        require_unix_time(self.time)

    @property
    def machine_names(self) -> tuple[str, ...]:
        """The members' machine names: their ids without the part that is new at each start of an agent."""
        return tuple(sys.intern(machine_name(member)) for member in self.members)

    @property
    def first_step(self) -> int:
        """The step that the attempt goes on from, 0 for the beginning."""
        return self.checkpoint_step if self.live_step is None else self.live_step

    @property
    def checkpoint_step(self) -> int:
        """The step of the checkpoint that the attempt resumes from, 0 for the beginning and for a command."""
        return int(self.resume.split("-")[1].removesuffix(".pt")) if self.resume.endswith(".pt") else 0


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
    attempt = read_record(path, Attempt, MAX_ATTEMPT_BYTES)
    if attempt and not (attempt.members or attempt.end_state):
        raise DamagedRecord(f"{path}: it has neither members nor an end state")
    return replace(attempt, number=number) if attempt and attempt.number != number else attempt


def _attempt_bytes(shared: Path, number: int) -> int | None:
    """Return the size of an attempt's file, at most that of an intact one; None without such a file."""
    try:
        with open_regular(attempt_path(shared, number)) as file:
            return min(MAX_ATTEMPT_BYTES, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        return None
    except OSError:  # whoever reads it says what is wrong
        return 0


def newest_attempt(shared: Path, known_attempt: Attempt | None = None) -> Attempt | None:
    """Return the newest attempt, None before the first. The search begins after `known_attempt`.

    Attempts are found by opening one file after another: on NFS a listing or a stat may be stale, an open is not.
    """
    while following := read_attempt(shared, known_attempt.number + 1 if known_attempt else 1):
        known_attempt = following
    return known_attempt


class AttemptHistory:
    """The attempts of a job, only the newest if there are thousands. Attempt files never change: each is read once.

    What only agents need is left out: addresses, and the faults of machines. When the newest file that was read is not
    the same file any more, the folder was replaced, and all are read again.
    """

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._history: History[Attempt] = History()
        self._newest_number = 0
        self._newest_version: FileVersion | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the oldest attempts are left out: there are too many of them."""
        return self._history.is_cut

    def all(self) -> list[Attempt]:
        """Return the attempts in order. A damaged file is taken for a missing one."""
        with self._lock, contextlib.suppress(DamagedRecord):
            self._read_new()
        return list(self._history.rows)

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
        """Read the files that are new since the last call, of thousands only the newest. Raises `DamagedRecord`."""
        if self._newest_number and self._version_of_newest() != self._newest_version:
            self._forget()
        new_files: History[tuple[int, int]] = History()  # number and bytes
        number = self._newest_number + 1
        while (size := _attempt_bytes(self.shared, number)) is not None:
            new_files.append((number, size), size)
            number += 1
        self._history.is_cut |= new_files.is_cut
        for number, size in new_files.rows:
            if (attempt := _read_intact_attempt(self.shared, number)) is None:
                break
            self._newest_number = attempt.number
            self._newest_version = self._version_of_newest()
            kept = replace(
                attempt, members=tuple(map(sys.intern, attempt.members)), addresses=(), fault_counts={}, left_out=()
            )
            self._history.append(kept, size)

    def _version_of_newest(self) -> FileVersion | None:
        return file_version(attempt_path(self.shared, self._newest_number))


def has_newer_launch(shared: Path, launch_id: str) -> bool:
    """Return whether a later launch of the job has begun. An agent that was suspended meanwhile must not take part."""
    try:
        return (shared / "launch").read_text() != launch_id
    except OSError:  # the file does not exist, or the shared folder cannot be reached for a moment
        return False


def propose(shared: Path, known_attempt: Attempt | None, attempt: Attempt) -> Attempt:
    """Publish an attempt after the newest one, and return the attempt that is in force afterwards.

    The new attempt gets the next number and the newest intact checkpoint of the attempt before it. If that attempt has
    checkpoints, but none that can be read, the new one ends the job as failed. It is published only if the newest
    attempt is `known_attempt` or belongs to an earlier launch; else another agent was faster, and that agent's attempt
    is returned. Raises `OSError` when the shared folder cannot be written, or the attempt file is damaged.
    """
    newest = newest_attempt(shared, known_attempt)
    if newest and newest != known_attempt and newest.launch_id == attempt.launch_id:
        return newest
    if newest and has_newer_launch(shared, attempt.launch_id):
        return newest
    number = newest.number + 1 if newest else 1
    make_folder_below(shared, "attempts")
    for trial in range(PROPOSE_TRIES):
        if published := read_attempt(shared, number):
            return published
        try:
            complete = _with_checkpoint(shared, replace(attempt, number=number))
            if create_once(attempt_path(shared, number), to_json_bytes(encode(complete))):
                _delete_checkpoints_before(shared, number - 1)
        except FileNotFoundError:  # the checkpoint was pruned after it had been chosen: choose again
            if trial == PROPOSE_TRIES - 1:
                raise
            time.sleep(PROPOSE_RETRY_SECONDS)
    message = "is damaged; remove it, then type imgnet-cluster resume"
    raise OSError(errno.EIO, message, str(attempt_path(shared, number)))


def _with_checkpoint(shared: Path, attempt: Attempt) -> Attempt:
    """Return an attempt with the checkpoint that it resumes from: the newest intact one of the attempt before it.

    It is linked into the attempt's own folder, with the one before it, and with the best weights. When none of the
    checkpoints can be read, the job ends as failed: to train again from the beginning costs as much as before, so the
    user decides. The damaged files are linked too, so that a resume meets them again. Trainers that go on in place read
    no checkpoint, so the newest one is not checked. Raises `FileNotFoundError` when a checkpoint vanishes meanwhile.
    """
    if attempt.number == 1:
        return attempt
    if version := snapshot.link_newest(shared, attempt.number):  # the checkpoint folder of a command
        return replace(attempt, resume=version.relative_to(shared).as_posix())
    previous_folder = checkpoint_folder(shared, attempt.number - 1)
    existing = [
        path
        for pattern in (CHECKPOINT_PATTERN, RESUME_PATTERN)  # what it saved is newer than what it resumed from
        for path in reversed(checkpoint_files(previous_folder, pattern))
    ]
    if not existing:
        return attempt
    before_step = attempt.resume_before
    candidates = [path for path in existing if before_step is None or checkpoint_step(path) < before_step]
    goes_on_in_place = attempt.live_step is not None
    newest = next((path for path in candidates if goes_on_in_place or is_intact(path)), None)
    own_folder = checkpoint_folder(shared, attempt.number)
    make_folder_below(shared, own_folder.relative_to(shared).as_posix())
    for best_weights in checkpoint_files(previous_folder, BEST_PATTERN):
        with contextlib.suppress(FileExistsError):  # another proposer of this attempt has linked them
            os.link(best_weights, own_folder / best_weights.name)
    if newest is None:
        for path in existing:
            with contextlib.suppress(PermissionError):  # not a file
                _link_checkpoint(path, own_folder)
        return _without_readable_checkpoint(shared, attempt, existing)
    link = _link_checkpoint(newest, own_folder)
    earlier = next((path for path in candidates if checkpoint_step(path) < checkpoint_step(newest)), None)
    if earlier:
        _link_checkpoint(earlier, own_folder)
    complete = replace(attempt, resume=str(link.relative_to(shared)))
    if complete.live_step is not None and complete.live_step < complete.checkpoint_step:
        reason = f"{attempt.reason}; not in place: there is a checkpoint of a later step"
        complete = replace(complete, live_step=None, reason=reason)
    if before_step is None:
        return complete
    return replace(complete, reason=f"{attempt.reason}; training goes on from step {complete.first_step}")


def _without_readable_checkpoint(shared: Path, attempt: Attempt, damaged: Sequence[Path]) -> Attempt:
    """Return the attempt that ends the job because no checkpoint can be read. One that ends it anyway stays."""
    if not attempt.members:
        return attempt
    steps = ", ".join(str(step) for step in sorted({checkpoint_step(path) for path in damaged}))
    cause = f"{attempt.reason}; " if attempt.resume_before is not None else ""
    reason = (
        f"{cause}no checkpoint can be read, all are damaged (of step {steps}); training does not start again from step "
        f"0 by itself: restore a file in {checkpoint_folder(shared, attempt.number)}, or delete "
        f"{shared / CHECKPOINTS_FOLDER} to begin again, then type imgnet-cluster resume"
    )
    return replace(attempt, members=(), end_state=MachineState.FAILED, reason=reason, resume_before=None)


def _link_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Link a checkpoint into the folder of an attempt that may resume from it, under a name that no other link has."""
    link = folder / RESUME_PATTERN.replace("*", f"{checkpoint_step(checkpoint):08d}-{uuid4().hex[:8]}")
    os.link(checkpoint, link)
    return link


def _delete_checkpoints_before(shared: Path, number: int) -> None:
    """Delete the checkpoints of attempts before `number`. A newer attempt has a link to the one still needed."""
    if (shared / CHECKPOINTS_FOLDER).is_symlink():  # somebody else placed it
        return
    for folder in checkpoint_folders(shared):
        if int(folder.name) < number:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
