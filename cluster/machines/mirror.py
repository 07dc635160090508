"""Copies the small files of a job's shared folder to the run folder, through whichever machine answers.

One question at most is under way to each machine, and its answer is used whenever it comes: a slow link carries each
byte once. A machine is passed over when it is silent, or so slow that somebody seems to hold this computer up.

Before the agents run, `SetupLogCopy` brings the log of a machine's set-up.
"""

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from cluster.connectors import untrusted
from cluster.connectors.ssh import SSHConnector, Unreachable
from cluster.connectors.untrusted import ArrivalFolder, BadAnswer, NewBytes
from cluster.errors import ClusterError
from cluster.state.heartbeats import parse_status
from cluster.state.run_folder import RunFolder, install_log_path
from cluster.state.states import MachineState
from train.tools.agent_protocol import LOG_FOLDERS, RESULT_FILE
from train.tools.files import locked
from train.tools.text_files import is_valid_json

SILENCE_SECONDS = 2.0  # of a machine, before the next one is asked
MAX_ANSWER_SECONDS = 10.0  # of one call for an answer that comes bit by bit, before the next machine is asked
ANSWER_POLL_SECONDS = 0.05
PULL_SECONDS = 2.0  # for how long one call goes on asking while there is more
UNREACHABLE_RETRY_SECONDS = 10.0  # how long a machine that did not answer is asked last
QUESTION_BYTES = 1 << 19  # what an answer may have: a slow link brings that in seconds
SETUP_LOG_SECONDS = 5.0  # between two looks at the log of a machine that is being set up
SETUP_LOG_BYTES = 1 << 20  # of one look
FOREIGN_STATUS_SECONDS = 10.0  # for so long a status of another launch counts as new
LAUNCH_ID_PATTERN = re.compile(r"[0-9a-f]{32}", re.ASCII)
LAST_LOOK_SECONDS = 5.0  # for the last look, which a set-up waits for


class SetupLogCopy:
    """Copies the log of a machine's set-up over ssh into the run folder, also while a command of the set-up writes it.

    It has `remote_size` bytes of earlier launches. Errors are ignored: the set-up itself reports what is wrong.
    """

    def __init__(self, connector: SSHConnector, remote_path: str, remote_size: int, run_path: Path, name: str) -> None:
        self.connector = connector
        self.remote_path = remote_path
        self.arrivals = ArrivalFolder(run_path)
        self.path = str(install_log_path(run_path, name).relative_to(run_path))
        # Up to there the machine's log is copied. The copy is longer when the machine before had the same name.
        self.position = 0
        self.lock = threading.Lock()
        with contextlib.suppress(OSError):
            self.position = min(remote_size, self.arrivals.append(self.path, 0, b""))

    def pull(self) -> None:
        """Copy what is new in the log."""
        with self.lock, contextlib.suppress(ClusterError, OSError):
            data = self.connector.read_from(self.remote_path, self.position, SETUP_LOG_BYTES)
            self.arrivals.append(self.path, self.arrivals.append(self.path, 0, b""), data)
            self.position += len(data)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Copy the log now and then while a command writes it, and when the command has ended."""
        is_over = threading.Event()

        def follow() -> None:
            while not is_over.wait(SETUP_LOG_SECONDS):
                self.pull()
            self.pull()

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            is_over.set()
            follower.join(LAST_LOOK_SECONDS)  # the machine may be cut off, or answer bit by bit


@dataclass
class Question:
    """A question under way to a machine. The answer continues files at `known_sizes`. Times are monotonic seconds."""

    name: str
    known_sizes: Mapping[str, int]
    asked_at: float = field(default_factory=time.monotonic)
    last_heard: float = 0.0

    def heard(self) -> None:
        """Note that a part of the answer has come."""
        self.last_heard = time.monotonic()


class AnswerUnderWay(Exception):
    """The only answers come too slowly to wait for them now. They are used when they are complete."""


def read_newer_launch(connector: SSHConnector, job_folder: str, own_id: str) -> tuple[str, str]:
    """Return the ID of another launch in a job's folder ("": none), and its computer. Raises `ClusterError`."""
    launch_id = connector.read_from(f"{job_folder}/launch", 0).decode(errors="replace")
    leader = untrusted.one_line(connector.read_from(f"{job_folder}/leader", 0)) or "another computer"
    is_newer = launch_id != own_id and LAUNCH_ID_PATTERN.fullmatch(launch_id)
    return launch_id if is_newer else "", leader


@dataclass
class Mirror:
    """Keeps copies of one job's files. `connectors` may be replaced meanwhile; `job_folder(machine)` is their folder.

    `report_bad_answer` is called with the name of a machine whose answer broke a rule, and the line that says so.
    """

    folders: RunFolder
    connectors: Mapping[str, SSHConnector]
    job_folder: Callable[[str], str]
    usable_machines: Callable[[], Sequence[str]]  # another one may not see the folder: it would have nothing new
    pool: ThreadPoolExecutor
    report_bad_answer: Callable[[str, str], None]
    last_responder: str = ""  # the machine that answered last; it is asked first
    last_failure: dict[str, float] = field(default_factory=dict)  # when each machine last failed to answer
    questions: dict[str, tuple[Question, Future[tuple[NewBytes, bytes]]]] = field(default_factory=dict)
    local_sizes: dict[str, int] | None = None  # sizes of the files that only grow; None: not known
    refused_sizes: dict[str, int] = field(default_factory=dict)  # where files without a place here are asked for again
    last_status: dict[str, tuple[bytes, float]] = field(default_factory=dict)  # of each file, and when it changed
    last_status_asked_at: float = 0.0

    def __post_init__(self) -> None:
        self.shared_path = str(self.folders.shared.relative_to(self.folders.path))
        self.arrivals = ArrivalFolder(self.folders.path)

    def pull(self) -> bool:
        """Copy what is new, as much as comes within a few seconds. Returns whether that is all there was at the call.

        Raises `Unreachable` when no machine answers, `OSError` for a full disk or a link. Bad answers are dropped.
        """
        start = time.monotonic()
        while True:
            try:
                answer = self._next_answer()
            except AnswerUnderWay:
                return False
            if answer is None:
                return True
            question, new_bytes, result = answer
            self._write(question, new_bytes, result)
            if new_bytes.is_complete and question.asked_at >= start:
                return True
            if time.monotonic() > start + PULL_SECONDS:
                if not new_bytes.is_complete:
                    self._ask(question.name)  # the link has work until the next call
                return False

    def newer_launch(self, is_over: bool) -> tuple[str, str]:
        """Return what `read_newer_launch` does. Asks only if statuses are of another launch, or this one `is_over`."""
        own_id, long_ago = self.folders.launch_id, time.monotonic() - FOREIGN_STATUS_SECONDS
        statuses = [parse_status(text) for text, changed_at in self.last_status.values() if changed_at > long_ago]
        name = self.last_responder
        if not name or not (is_over or any(status and status.launch != own_id for status in statuses)):
            return "", ""
        return read_newer_launch(self.connectors[name], self.job_folder(name), own_id)

    # --- questions ------------------------------------------------------------------------------------------------

    def machine_order(self) -> list[str]:
        """The machines in the order in which to ask: first the one that answered last, at the end those that failed."""
        now = time.monotonic()

        def rank(name: str) -> tuple[bool, bool, int]:
            failed_recently = now - self.last_failure.get(name, -math.inf) < UNREACHABLE_RETRY_SECONDS
            return name != self.last_responder, failed_recently, int(name)

        return sorted(self.usable_machines(), key=rank)

    def note_failure(self, name: str) -> None:
        """Ask a machine last for a while."""
        self.last_failure[name] = time.monotonic()
        if self.last_responder == name:
            self.last_responder = ""

    def _next_answer(self) -> tuple[Question, NewBytes, bytes] | None:
        """Return the next answer of any machine; None when those that answered broke a rule.

        Asks one after the other. Raises `AnswerUnderWay` if some are only slow, else the last error if none answers.
        """
        last_error: ClusterError | None = None
        was_answer_bad = is_under_way = False
        for name in self.machine_order():
            self._ask(name)
            start = time.monotonic()
            while name in self.questions:
                question, _ = self.questions[name]
                quiet_since = max(start, question.last_heard)
                futures = [future for _, future in self.questions.values()]
                wait(futures, ANSWER_POLL_SECONDS, return_when=FIRST_COMPLETED)
                for answered, future in [entry for entry in self.questions.values() if entry[1].done()]:
                    del self.questions[answered.name]
                    try:
                        new_bytes, result = future.result()
                        self.last_responder = answered.name
                        return answered, new_bytes, result
                    except BadAnswer as error:
                        was_answer_bad = True
                        self.report_bad_answer(answered.name, str(error))
                    except ClusterError as error:
                        last_error = error
                    self.note_failure(answered.name)
                if time.monotonic() - quiet_since > SILENCE_SECONDS:
                    last_error = Unreachable(f"{self.connectors[name].name}: does not answer")
                    self.note_failure(name)
                    break
                if time.monotonic() - start > MAX_ANSWER_SECONDS:
                    is_under_way = True
                    self.note_failure(name)
                    break
        if is_under_way:
            raise AnswerUnderWay
        if was_answer_bad:
            return None
        raise last_error or Unreachable("this job has no machines")

    def _ask(self, name: str) -> None:
        if name in self.questions:
            return
        if self.local_sizes is None:
            self.local_sizes = self._read_local_sizes()
        known_sizes = {**self.local_sizes, **self.refused_sizes}
        question = Question(name, known_sizes)
        self.questions[name] = question, self.pool.submit(self._fetch, question)

    def _fetch(self, question: Question) -> tuple[NewBytes, bytes]:
        """Return the answer, and the trainers' result when a status says that the job is done."""
        connector, job_folder = self.connectors[question.name], self.job_folder(question.name)
        new_bytes = connector.read_new_bytes(
            job_folder, tuple(self.connectors), question.known_sizes, QUESTION_BYTES, question.heard
        )
        is_done = any(
            (status := parse_status(data)) and status.state == MachineState.DONE
            for path, data in new_bytes.contents.items()
            if path.startswith("status/")
        )
        return new_bytes, connector.read_from(f"{job_folder}/{RESULT_FILE}", 0) if is_done else b""

    # --- files ----------------------------------------------------------------------------------------------------

    def _read_local_sizes(self) -> dict[str, int]:
        """Return the sizes of local files that only grow, or are made once: the offsets from which to copy more."""
        attempt_files = ArrivalFolder(self.folders.shared).sizes(["attempts"])
        return self.arrivals.sizes(LOG_FOLDERS) | attempt_files

    def _write(self, question: Question, new_bytes: NewBytes, result: bytes) -> None:
        """Write an answer into the run folder, its statuses only if no later question was answered before."""
        sizes = self._read_local_sizes() if self.local_sizes is None else self.local_sizes
        self.local_sizes = None  # a full disk may take a part of a write: the sizes are read again then
        is_newest = question.asked_at > self.last_status_asked_at
        now = time.monotonic()
        self.arrivals.require_space(sum(map(len, new_bytes.contents.values())))
        with locked(self.folders.path / ".home.lock"):
            for path, data in new_bytes.contents.items():
                is_log = path.startswith(LOG_FOLDERS)
                if is_log and path not in sizes and not self.arrivals.has_place(path):
                    rule = f"has the file {path}, of which a part was a file or a folder of another kind before"
                    label = self.connectors[question.name].name
                    self.report_bad_answer(question.name, str(BadAnswer(rule, label)))
                    self.refused_sizes[path] = question.known_sizes.get(path, 0) + len(data)
                    continue
                if is_log:
                    sizes[path] = self.arrivals.append(path, question.known_sizes.get(path, 0), data)
                elif path.startswith("attempts"):
                    self._create(path, data)
                    sizes[path] = len(data)
                elif is_newest and is_valid_json(data) and data != self.last_status.get(path, (b"", 0.0))[0]:
                    self._write_status(path, data, now)
            if result and is_valid_json(result):
                self._create(RESULT_FILE, result)
        self.last_status_asked_at = max(question.asked_at, self.last_status_asked_at)
        self.local_sizes = sizes

    def _write_status(self, path: str, data: bytes, now: float) -> None:
        """Write the status of a machine. One that no reader could use is left out: it would stop the supervisor."""
        if parse_status(data):
            self.arrivals.overwrite(f"{self.shared_path}/{path}", data)
            self.last_status[path] = data, now
        elif connector := self.connectors.get(name := Path(path).stem):
            self.report_bad_answer(name, str(BadAnswer(f"has a {path} that is no status", connector.name)))

    def _create(self, path: str, data: bytes) -> None:
        self.arrivals.create(f"{self.shared_path}/{path}", lambda file: file.write(data))
