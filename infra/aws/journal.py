"""Journal of intents: one JSON line for each mutating AWS call, synced to disk before the call is made."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from train.tools import host
from train.tools.files import FileVersion, file_version, open_regular, read_file, sync
from train.tools.text_files import parse_json

from .journal_events import (
    InstanceEnded,
    JournalEvent,
    LaunchedMachine,
    LaunchRequest,
    RequestGranted,
    RequestRefused,
    decode_event,
    encode_event,
)

OWNER_ONLY = 0o600  # a recorded request holds the boot host key of its machines
EventT = TypeVar("EventT", bound=JournalEvent)


@dataclass(frozen=True)
class RecordedRequest:
    """A launch request, and its outcome; None while that is unknown."""

    request: LaunchRequest
    outcome: RequestGranted | RequestRefused | None = None

    @property
    def is_granted(self) -> bool:
        """Whether EC2 launched all machines of the request."""
        return isinstance(self.outcome, RequestGranted)

    @property
    def is_refused(self) -> bool:
        """Whether the request has no machines and was given up."""
        return isinstance(self.outcome, RequestRefused)

    @property
    def machines(self) -> tuple[LaunchedMachine, ...]:
        """The machines that EC2 launched for the request."""
        return self.outcome.machines if self.outcome else ()


class Journal:
    """An append-only file of events, a JSON line each. After a crash it tells which calls may have been made.

    It is read again only when it has changed: a supervisor asks for events several times a second.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()  # guards what was read last
        self._events: list[JournalEvent] = []
        self._version: FileVersion | None = None

    def write(self, event: JournalEvent) -> None:
        """Append an event, at the present time, and return when it is on disk.

        Raises `OSError`. The caller must then not make the AWS call.
        """
        self.copy(replace(event, time=host.unix_time()))

    def copy(self, *events: JournalEvent) -> None:
        """Append events of another journal, with the times that they have. Returns when they are on disk.

        Raises `OSError`.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = "\n".join(json.dumps(encode_event(event)) for event in events)
        is_torn = self.path.exists() and self.path.stat().st_size and not self._ends_with_newline()
        with open_regular(self.path, "ab", OWNER_ONLY) as file:
            file.write((("\n" if is_torn else "") + line + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            sync(self.path.parent)

    def _ends_with_newline(self) -> bool:
        """Whether the last line is complete. A full disk or a kill leaves a part of a line."""
        with open_regular(self.path) as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def events(self, event_type: type[EventT], *more_types: type[EventT]) -> list[EventT]:
        """Return the events of the given types, in order. `JournalEvent` stands for all types.

        A torn line is left out. Raises `DamagedRecord` with file and line for a complete line that is no event.
        """
        wanted_types = (event_type, *more_types)
        return [event for event in self._all_events() if isinstance(event, wanted_types)]

    def _all_events(self) -> list[JournalEvent]:
        with self._lock:
            version = file_version(self.path)  # what is appended from here on makes another version
            if version is None or version != self._version:
                self._events = list(self._read())
                self._version = version
            return self._events

    def _read(self) -> Iterator[JournalEvent]:
        if self.path.exists():
            for number, text in enumerate(read_file(self.path).decode(errors="replace").splitlines(), 1):
                try:
                    data = parse_json(text.encode())
                except ValueError:
                    continue
                if isinstance(data, dict):
                    yield decode_event(data, f"{self.path}, line {number}")

    # --- the launch requests of a job, in all regions ----------------------------------------------------------------

    def launch_requests(self) -> list[RecordedRequest]:
        """Return all launch requests in order."""
        requests: dict[int, RecordedRequest] = {}
        for event in self.events(LaunchRequest, RequestGranted, RequestRefused):
            if isinstance(event, LaunchRequest):
                requests[event.number] = RecordedRequest(event)
            elif isinstance(event, RequestGranted | RequestRefused) and event.number in requests:
                requests[event.number] = RecordedRequest(requests[event.number].request, event)
        return list(requests.values())

    @property
    def granted_ids(self) -> list[str]:
        """The IDs of all machines that were ever granted."""
        granted = [recorded for recorded in self.launch_requests() if recorded.is_granted]
        return [machine.id for recorded in granted for machine in recorded.machines]

    @property
    def ended_ids(self) -> set[str]:
        """The IDs of machines whose end is recorded."""
        return {event.id for event in self.events(InstanceEnded)}

    @property
    def alive_ids(self) -> list[str]:
        """The IDs of granted machines whose end is not recorded."""
        ended_ids = self.ended_ids
        return [machine_id for machine_id in self.granted_ids if machine_id not in ended_ids]
