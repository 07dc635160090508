"""What was told about a job, notifications.jsonl in its run folder: events before they are sent, then the outcomes."""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from train.tools.files import open_regular
from train.tools.records import DamagedRecord, decode_line, encode
from train.tools.text_files import read_lines

from .events import Notification

JOURNAL_FILE = "notifications.jsonl"


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


@dataclass
class Journal:
    """The rows of the file. Rows that cannot be written, on a full disk, are known to this process only."""

    run_path: Path
    rows: list[JournalRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = read_rows(self.run_path)

    def append(self, row: JournalRow) -> None:
        """Add a row."""
        self.rows.append(row)
        with contextlib.suppress(OSError), open_regular(self.run_path / JOURNAL_FILE, "ab") as file:
            file.write(json.dumps(encode(row)).encode() + b"\n")

    def count_of_last_hour(self, now: float) -> int:
        """Return how many events were recorded within an hour of `now` (seconds since 1970)."""
        return sum(row.notification is not None and abs(now - row.time) < 3600 for row in self.rows)

    def pending(self, target: str) -> list[Notification]:
        """Return the notifications that a target was to get and that have no outcome there."""
        settled = {row.id for row in self.rows if row.target == target}
        return [
            row.notification
            for row in self.rows
            if row.notification and target in row.targets and row.id not in settled
        ]


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
