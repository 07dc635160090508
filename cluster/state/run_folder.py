"""A run: one job as its files describe it, the paths inside its run folder, and the locks that show who is alive."""

import contextlib
import hashlib
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self
from uuid import uuid4

from train.metrics.records import KIND_MARKERS, EpochRow, StepRow, parse_row, read_metrics_file
from train.metrics.step_search import first_and_last_step
from train.tools import host
from train.tools.agent_protocol import LOGS_FOLDER, NETWORK_FOLDER, metrics_files
from train.tools.files import is_locked, is_visible, read_file, write_atomic
from train.tools.process_log import SUPERVISOR_LOG
from train.tools.records import MAX_HISTORY_BYTES, GrowingFile, damaged, read_record
from train.tools.text_files import read_json, to_json_bytes

from .attempts import AttemptHistory
from .heartbeats import StateChange, parse_state_change
from .spec import JobSpec, RequestedLimits

# The kernel releases a lock when its holder dies, so a lock file shows whether a process lives.
AGENT_LOCK = "agent.lock"  # in an agent's work folder; while the agent lives, it has its process ID
AGENT_OUTPUT = "agent.out"  # in an agent's work folder: what it prints
SUPERVISOR_LOCK = ".supervisor.lock"  # in the run folder
JOB_LOCK = ".lock"  # in the run folder; held by whoever changes the job
RUNS_ENV_VAR = "IMGNET_RUNS"
MAX_LAUNCH_ID_BYTES = 1000
MAX_STATE_LOG_BYTES = 2_000_000  # of one machine: 20,000 changes of state
SHARED_FOLDER = ("machine", "shared")  # in the run folder
JOB_NAME = re.compile("job-[1-9][0-9]*")
REHEARSED_NOTICE = "rehearsed spot notice (imgnet-cluster rehearse-loss)"  # the reason of a notice that a user sends


def lock_holder(path: Path) -> int | None:
    """Return the process of this computer that holds a lock file; None without one, and until it has written its ID."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text()) if is_locked(path) else None
    return None


def runs_folder() -> Path:
    """Return the folder of all run folders: $IMGNET_RUNS, else ./runs."""
    return Path(os.environ.get(RUNS_ENV_VAR) or "runs").absolute()


def run_folders(runs_folder: Path) -> "list[RunFolder]":
    """Return the run folders with a job.json, oldest first. Those without one are of launches that were killed."""
    paths = [spec_path.parent for spec_path in runs_folder.glob("job-*/job.json")]
    return sorted((RunFolder(path) for path in paths if JOB_NAME.fullmatch(path.name)), key=lambda each: each.number)


def agent_log_path(folder: Path, machine: str) -> Path:
    """Return the log of a machine's agent, in a shared folder or a run folder."""
    return folder / LOGS_FOLDER / f"agent-{machine}.jsonl"


def setup_log_path(folder: Path, machine: str) -> Path:
    """Return the log in which a machine's agent prepares the images, in a shared folder or a run folder."""
    return folder / LOGS_FOLDER / f"setup-{machine}.log"


def install_log_path(folder: Path, machine: str) -> Path:
    """Return the copy of the log of a machine's set-up over ssh, before its agent starts, in a run folder."""
    return folder / LOGS_FOLDER / f"install-{machine}.log"


def stop_reason(shared: Path) -> str:
    """Return why the job was asked to stop, as <shared>/stop says, or "" when it was not asked."""
    if not is_visible(shared / "stop"):
        return ""
    request = read_json(shared / "stop")
    return str((request.get("reason") if isinstance(request, dict) else "") or "stopped by the user")


def _effective_ends(first_images: Iterable[int | None]) -> list[float]:
    """Return for each attempt the number of images from which on its rows do not count: later attempts did them again.

    `first_images` has the images of the first row of each attempt, None for one without a row.
    """
    ends: list[float] = []
    end = math.inf
    for images in reversed(list(first_images)):
        ends.append(end)
        end = end if images is None else min(end, images)
    return ends[::-1]


class PathBelow:
    """A path below a run folder, as an attribute of `RunFolder`."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, folder: "RunFolder", _: object = None) -> Path:
        return folder.path.joinpath(*self.parts)


@dataclass(frozen=True)
class RunFolder:
    """The paths of one job. `path` is the run folder, which keeps its logs, metrics, event files and result.

    `shared` is the folder that all machines of the job see. For machines elsewhere it is a local mirror of the small
    files of their shared folder. `work_folder` belongs to one machine of this computer.
    """

    path: Path

    spec_path = PathBelow("job.json")  # the job's specification
    notify_path = PathBelow("notify.json")  # the targets of notifications, which never leave this computer
    user_project = PathBelow("user_project")  # the copy of the user's project; the trainers import from it
    recipe_path = PathBelow(*SHARED_FOLDER, "recipe.json")  # the recipe as it is run, resolved to plain data
    started_marker = PathBelow(".begun")  # exists once the job was started and no longer waits in its queue
    setup_record_path = PathBelow("machines.json")  # the set-up of the machines
    journal_path = PathBelow("cloud.jsonl")  # the journal of rented machines; without it, nothing was ever rented
    supervisor_log_path = PathBelow(SUPERVISOR_LOG)
    network_folder = PathBelow(NETWORK_FOLDER)  # the trained network and its classes, once the job is done
    result_path = PathBelow("result.json")  # exists once the job has ended, in whatever state
    # Attempts, machine statuses, checkpoints, and the result of the trainers.
    shared = PathBelow(*SHARED_FOLDER)
    # The random ID of the last launch. Agents copy it into their status files, so that a status of an earlier launch is
    # recognized without comparing clocks.
    launch_path = PathBelow(*SHARED_FOLDER, "launch")
    leader_path = PathBelow(*SHARED_FOLDER, "leader")  # the computer and the run folder of that launch, for people
    stop_path = PathBelow(*SHARED_FOLDER, "stop")  # exists when the job is to save and end

    @property
    def number(self) -> int:
        """The number of the job: 3 for "job-3"."""
        return int(self.path.name.removeprefix("job-"))

    @property
    def tmux_session(self) -> str:
        """The name of the job's tmux session on this computer, where jobs of other folders may have the same ID."""
        return f"{self.path.name}-{hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:8]}"

    def work_folder(self, machine: str = "0") -> Path:
        """Return the folder through which trainers and agent of one machine of this computer communicate."""
        return self.path / "machine" / "work" / machine

    def disabled_marker(self, machine: str) -> Path:
        """Return the file that exists when a machine was killed for good and must not be replaced."""
        return self.path / f".away-{machine}"

    def join_marker(self, machine: str) -> Path:
        """Return the file that exists while a machine is to join the running job, until its agent runs or it failed."""
        return self.path / f".join-{machine}"

    def write_spec(self, spec: JobSpec) -> None:
        """Write the specification, its recipe, and the targets of notifications, which only this user may read.

        job.json comes last: an interrupted job has none. The machines' copy lacks the queue, which is not theirs.
        """
        if spec.notify or self.notify_path.exists():
            write_atomic(self.notify_path, to_json_bytes(spec.notify), mode=0o600)
        if not spec.own_command:
            write_atomic(self.recipe_path, to_json_bytes(spec.recipe.to_json()))
        write_atomic(self.shared / "job.json", to_json_bytes(replace(spec, queue="").to_json()))
        write_atomic(self.spec_path, to_json_bytes(spec.to_json()))

    def read_limits(self) -> RequestedLimits | None:
        """Return the limits of job.json, which `extend` may have changed, if there is one. Raises `DamagedRecord`."""
        return read_record(self.spec_path, RequestedLimits)

    @property
    def launch_id(self) -> str:
        """The ID of the last launch, "" before the first."""
        return self.read_launch_id(self.shared)

    def begin_launch(self) -> None:
        """Give the job a new launch, led from this computer. Raises `OSError`."""
        write_atomic(self.leader_path, f"{socket.gethostname()}:{self.path}".encode())
        write_atomic(self.launch_path, uuid4().hex.encode())

    @staticmethod
    def read_launch_id(shared: Path) -> str:
        """Return the ID of the last launch from a shared folder, "" before the first. Raises `DamagedRecord`."""
        path = shared / "launch"
        try:
            return read_file(path, MAX_LAUNCH_ID_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise damaged(error, path) from error

    @cached_property
    def attempts(self) -> AttemptHistory:
        """The attempts of the job."""
        return AttemptHistory(self.shared)

    def request_stop(self, reason: str = "") -> None:
        """Ask the agents to save and end; "": the user wants it. Raises `OSError`."""
        request = {"time": time.time(), "pid": os.getpid(), "reason": reason}
        write_atomic(self.stop_path, to_json_bytes(request))

    def end_reason(self) -> str:
        """Return why the job is to end: a stop request, or because it is over; "" while it goes on."""
        is_finished = self.attempts.is_finished(self.launch_id)
        return stop_reason(self.shared) or ("the job is over" if is_finished else "")

    @cached_property
    def _state_logs(self) -> dict[str, GrowingFile[StateChange]]:
        return {}

    def state_log(self, machine: str) -> Sequence[StateChange]:
        """Return the last changes of state of a machine's agents. Each line of their log is read once."""
        if machine not in self._state_logs:
            self._state_logs[machine] = GrowingFile(
                agent_log_path(self.path, machine), b"time", parse_state_change, MAX_STATE_LOG_BYTES
            )
        return self._state_logs[machine].rows()

    @cached_property
    def _epoch_files(self) -> dict[Path, GrowingFile[EpochRow]]:
        return {}

    def epochs(self) -> list[EpochRow]:
        """Return the finished epochs, of ten thousand only the newest; repeated ones once. Each line is read once."""
        parse = partial(parse_row, row_type=EpochRow)
        kept_bytes = 0
        rows_by_attempt: list[list[EpochRow]] = []
        for path in reversed(metrics_files(self.path)):
            if kept_bytes > MAX_HISTORY_BYTES:
                self._epoch_files.pop(path, None)
                continue
            file = self._epoch_files.setdefault(path, GrowingFile(path, KIND_MARKERS[EpochRow], parse))
            rows_by_attempt.insert(0, file.rows())
            kept_bytes += file.history.bytes
        ends = _effective_ends(rows[0].images if rows else None for rows in rows_by_attempt)
        return [row for rows, end in zip(rows_by_attempt, ends, strict=True) for row in rows if row.images < end]

    @property
    def is_history_cut(self) -> bool:
        """Whether attempts, epochs or changes of state that were read are too many, so that the oldest are left out."""
        epoch_histories = [file.history for file in self._epoch_files.values()]
        are_epochs_cut = sum(history.bytes for history in epoch_histories) > MAX_HISTORY_BYTES
        are_states_cut = any(file.history.is_cut for file in self._state_logs.values())
        return self.attempts.is_cut or are_epochs_cut or are_states_cut or any(each.is_cut for each in epoch_histories)

    def steps(self) -> Iterator[StepRow]:
        """Yield the metrics of the steps, about one row a second. Steps repeated by a later attempt appear once."""
        paths = metrics_files(self.path)
        step_ends = [first_and_last_step(path) for path in paths]
        ends = _effective_ends(found.first.images if found else None for found in step_ends)
        for path, end in zip(paths, ends, strict=True):
            yield from (row for row in read_metrics_file(path, StepRow) if row.images < end)

    def status_path(self, machine: str = "0") -> Path:
        """Return the status file of a machine's agent."""
        return self.shared / "status" / f"{machine}.json"


@dataclass(frozen=True)
class Run:
    """The specification of a job, its run folder, and the clock by which it is timed (seconds since 1970)."""

    spec: JobSpec
    folder: RunFolder
    clock: Callable[[], float] = host.unix_time

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the run in a run folder. Raises `OSError` without a job.json, `DamagedRecord` for a damaged one."""
        folder = RunFolder(path)
        spec = JobSpec.parse(read_file(folder.spec_path), folder.spec_path)
        notify = read_record(folder.notify_path, tuple[str, ...])
        return cls(replace(spec, notify=notify) if notify else spec, folder)

    @property
    def handle(self) -> str:
        """What a hint calls the job: the name from its user, else its ID; outside of its runs folder, its path."""
        path = self.folder.path
        if path.parent == runs_folder():
            return self.spec.given_name or self.spec.name
        is_below = path.parent.is_relative_to(Path.cwd()) and path.parent != Path.cwd()
        return str(path.relative_to(Path.cwd()) if is_below else path)
