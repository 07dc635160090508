"""Tells users what happens to a job: finds events in its files, and sends each one once to every target.

The process that holds the lock is the one that sends; normally it is the job's supervisor. An event is written to the
journal before it is sent. When the process is killed before the outcome, the next one sends again, with the same "id".
"""

import contextlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from cluster.state.run_folder import Run, RunFolder
from cluster.state.status import JobResult
from train.tools.files import is_locked, locked, open_regular
from train.tools.records import DamagedRecord, decode_line, encode, read_record
from train.tools.text_files import read_lines

from .delivery import Delivery
from .events import REPEATED_KINDS, Notification, SupervisorView, describe, end_key, find_events

logger = logging.getLogger(__name__)

JOURNAL_FILE = "notifications.jsonl"  # in the run folder: events before they are sent, then the outcomes
NOTIFIER_LOCK = ".notifier.lock"  # in the run folder
FINISH_SECONDS = 60.0  # after the end of the job, for what is not delivered yet
FINISH_POLL_SECONDS = 0.1
# A machine that lies could invent events all the time. What waits is told later, as one event.
MAX_HOURLY_EVENTS = 60


@dataclass(frozen=True, kw_only=True)
class JournalRow:
    """An event that is about to be sent (`notification`, its `keys` and `targets`), or the outcome at one target.

    Targets are named by their fingerprints. `error` is "" when the target `to` got the notification.
    """

    id: str
    keys: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    notification: Notification | None = None
    target: str = ""
    to: str = ""
    error: str = ""
    time: float = 0.0


def read_rows(run_path: Path) -> list[JournalRow]:
    """Return the rows of a job. Damaged lines are skipped: at worst something is told twice."""
    rows = []
    with contextlib.suppress(OSError):
        for line in read_lines(run_path / JOURNAL_FILE):
            with contextlib.suppress(DamagedRecord):
                rows.append(decode_line(JournalRow, line))
    return rows


def describe_trouble(run_path: Path) -> str:
    """Return why the last notification could not be delivered, for each target; "" when it was."""
    last_rows = {row.target: row for row in read_rows(run_path) if row.target}
    return "; ".join(f"{row.to}: {row.error}" for row in last_rows.values() if row.error)


class Notifier:
    """The notifications of one job. No method blocks for long, and none raises: the job must not depend on it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.targets = {delivery.fingerprint: delivery for delivery in map(Delivery, run.spec.notify)}
        self.rows: list[JournalRow] | None = None  # of the journal; None: another process sends
        self._lock = contextlib.ExitStack()
        self._known_errors: set[str] = set()

    def update(self, view: SupervisorView) -> None:
        """Find new events and go on with the deliveries."""
        if not self.targets:
            return
        try:
            if self._take_over():
                self._record_new_events(view)
                for delivery in self.targets.values():
                    if outcome := delivery.poll():
                        self._record_outcome(delivery, *outcome)
        except Exception as error:  # damaged files are reported by the supervisor
            self._log_once(f"notifications: {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Deliver what is left after the end of the job, for at most a minute."""
        deadline, deliveries = time.monotonic() + FINISH_SECONDS, self.targets.values()
        self.update(SupervisorView())
        while self.rows is not None and any(each.waiting for each in deliveries) and time.monotonic() <= deadline:
            time.sleep(FINISH_POLL_SECONDS)
            self.update(SupervisorView())
        for delivery in deliveries if self.rows is not None else ():
            for notification, error in delivery.abandon():
                self._record_outcome(delivery, notification, error)
        self._lock.close()
        self.rows = None

    def _take_over(self) -> bool:
        """Return whether this process is the one that sends. What an earlier one left is sent now."""
        if self.rows is None:
            try:
                self._lock.enter_context(locked(self.run.folder.path / NOTIFIER_LOCK, 0))
            except BlockingIOError:
                return False
            self.rows = read_rows(self.run.folder.path)
            for fingerprint, delivery in self.targets.items():
                settled = {row.id for row in self.rows if row.target == fingerprint}
                pending = [row for row in self.rows if fingerprint in row.targets and row.id not in settled]
                delivery.waiting.extend(row.notification for row in pending if row.notification)
        return True

    def _record_new_events(self, view: SupervisorView) -> None:
        assert self.rows is not None
        result = read_record(self.run.folder.result_path, JobResult)
        told_keys = {key for row in self.rows for key in row.keys}
        for event in find_events(self.run, view, result, told_keys):
            last_hour = [row for row in self.rows if row.notification and abs(time.time() - row.time) < 3600]
            if event.kind in REPEATED_KINDS and len(last_hour) >= MAX_HOURLY_EVENTS:
                self._log_once(
                    f"there were {MAX_HOURLY_EVENTS} notifications within an hour; others wait, but for the job's end"
                )
                continue
            dollars = (result.dollars if result else view.dollars) if self.run.spec.cloud else None
            sent = describe(event, self.run, uuid4().hex[:12], time.time(), dollars)
            targets = tuple(self.targets)
            self._append(JournalRow(id=sent.id, keys=event.keys, targets=targets, notification=sent, time=sent.time))
            for delivery in self.targets.values():
                delivery.waiting.append(sent)

    def _record_outcome(self, delivery: Delivery, notification: Notification, error: str) -> None:
        self._append(
            JournalRow(
                id=notification.id, target=delivery.fingerprint, to=delivery.label, error=error, time=time.time()
            )
        )
        if error:
            self._log_once(f"a notification could not be delivered to {delivery.label}: {error}")

    def _append(self, row: JournalRow) -> None:
        """Add a row to the journal. One that cannot be written, on a full disk, is known to this process only."""
        assert self.rows is not None
        self.rows.append(row)
        with contextlib.suppress(OSError), open_regular(self.run.folder.path / JOURNAL_FILE, "ab") as file:
            file.write(json.dumps(encode(row)).encode() + b"\n")

    def _log_once(self, message: str) -> None:
        if message not in self._known_errors:
            self._known_errors.add(message)
            logger.warning(message)


def has_untold_end(run: Run) -> bool:
    """Whether users were not told of the end of an ended job, and no process is about to tell them."""
    folder: RunFolder = run.folder
    if not run.spec.notify or not folder.launch_id or is_locked(folder.path / NOTIFIER_LOCK):
        return False
    rows = read_rows(folder.path)
    told = {row.id: row.targets for row in rows if end_key(folder.launch_id) in row.keys}
    settled = {(row.id, row.target) for row in rows if row.target}
    return not told or any((id, target) not in settled for id, targets in told.items() for target in targets)
