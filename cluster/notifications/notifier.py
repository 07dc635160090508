"""Tells users what happens to a job: finds events in its files, and sends each one once to every target.

The process that holds the lock is the one that sends; normally it is the job's supervisor. An event is written to the
journal before it is sent. When the process is killed between the sending and the outcome, the next one sends again,
with the same "id".
"""

import contextlib
import logging
import time
from uuid import uuid4

from cluster.state.run_folder import Run, RunFolder
from cluster.state.status import JobResult
from train.tools.files import is_locked, locked
from train.tools.records import read_record

from .delivery import Delivery
from .events import REPEATED_KINDS, Event, Notification, SupervisorView, describe, end_key, find_events
from .journal import Journal, JournalRow, read_rows

logger = logging.getLogger(__name__)

NOTIFIER_LOCK = ".notifier.lock"  # in the run folder
FINISH_SECONDS = 60.0  # after the end of the job, for what is not delivered yet
FINISH_POLL_SECONDS = 0.1
# A machine that lies could invent events all the time. What waits is told later, as one event.
MAX_HOURLY_EVENTS = 60


class Notifier:
    """The notifications of one job. No method blocks for long, and none raises: the job must not depend on it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.targets = {delivery.fingerprint: delivery for delivery in map(Delivery, run.spec.notify)}
        self.journal: Journal | None = None  # None: another process sends
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

    def finish(self, view: SupervisorView) -> None:
        """Deliver what is left after the end of the job, for at most a minute."""
        deadline = time.monotonic() + FINISH_SECONDS
        self.update(view)
        while self.journal and any(each.waiting for each in self.targets.values()) and time.monotonic() <= deadline:
            time.sleep(FINISH_POLL_SECONDS)
            self.update(view)
        for delivery in self.targets.values() if self.journal else ():
            for notification, error in delivery.abandon():
                self._record_outcome(delivery, notification, error)
        self._lock.close()
        self.journal = None

    def _take_over(self) -> bool:
        """Return whether this process is the one that sends. What an earlier one left is sent now."""
        if self.journal is None:
            try:
                self._lock.enter_context(locked(self.run.folder.path / NOTIFIER_LOCK, 0))
            except BlockingIOError:
                return False
            self.journal = Journal(self.run.folder.path)
            for fingerprint, delivery in self.targets.items():
                delivery.waiting.extend(self.journal.pending(fingerprint))
        return True

    def _record_new_events(self, view: SupervisorView) -> None:
        assert self.journal
        result = read_record(self.run.folder.result_path, JobResult)
        told_keys = {key for row in self.journal.rows for key in row.keys}
        for event in find_events(self.run, view, result, told_keys):
            if event.kind in REPEATED_KINDS and self.journal.count_of_last_hour(time.time()) >= MAX_HOURLY_EVENTS:
                self._log_once(
                    f"there were {MAX_HOURLY_EVENTS} notifications within an hour; others wait, but for the job's end"
                )
                continue
            self._record_event(event, result.dollars if result else view.dollars)

    def _record_event(self, event: Event, dollars: float) -> None:
        assert self.journal
        now = time.time()
        known_dollars = dollars if self.run.spec.cloud else None
        notification = describe(event, self.run, uuid4().hex[:12], now, known_dollars)
        targets = tuple(self.targets)
        self.journal.append(
            JournalRow(id=notification.id, keys=event.keys, targets=targets, notification=notification, time=now)
        )
        for delivery in self.targets.values():
            delivery.waiting.append(notification)

    def _record_outcome(self, delivery: Delivery, notification: Notification, error: str) -> None:
        assert self.journal
        row = JournalRow(
            id=notification.id, target=delivery.fingerprint, to=delivery.label, error=error, time=time.time()
        )
        self.journal.append(row)
        if error:
            self._log_once(f"a notification could not be delivered to {delivery.label}: {error}")

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
