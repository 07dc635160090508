"""How far a script is, without its help: from the lines that it prints, its TensorBoard events, or a file it touches.

- `--progress 'step (?P<step>\\d+)'` is searched in the lines of rank 0. The newest line that matches counts.
- The steps of TensorBoard scalars below `IMGNET_EVENTS`.
- The file `IMGNET_PROGRESS`: a number in it is the step; also without one, each touch is a sign of life.

Without any of them nothing is known but that the processes live.
"""

import contextlib
import re
import signal
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from train.tools.agent_protocol import TrainingNumbers
from train.tools.files import file_version, open_regular, read_file

INTEGER_GROUPS = ("step", "steps", "epoch", "epochs")
NUMBER_GROUPS = ("loss", "lr", "images_per_second")
MAX_PATTERN_CHARACTERS = 500
MAX_LINE_CHARACTERS = 500  # of a line; what follows is not searched
MAX_POLL_BYTES = 1 << 18  # of a log, at one look; of more, the newest are taken
MATCH_SECONDS = 0.25  # for all lines of one look
MAX_DIGITS = 15
MAX_PROGRESS_FILE_BYTES = 100
EVENT_HEADER = struct.Struct("<QI")
CHECKSUM_BYTES = 4
STEP_FIELD = 2
MAX_EVENT_HEAD_BYTES = 64  # of a record: wall time and step are its first fields
MAX_EVENT_FILES = 200  # that are followed; of more, the last by name, which has the time in it
MAX_STEP = 10**15
LINE_END = re.compile(r"[\r\n]+")  # a progress bar ends its states by a carriage return


class BadPattern(ValueError):
    """The pattern of --progress cannot be used. The text is one line."""


class _OutOfTime(Exception):
    """The search for a pattern took too long."""


@dataclass(frozen=True, kw_only=True)
class ScriptNumbers(TrainingNumbers):
    """What a script has told of its progress. `signs` grows with each sign of life."""

    signs: int = 0


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return the compiled pattern of --progress. Raises `BadPattern`."""
    if len(text) > MAX_PATTERN_CHARACTERS:
        raise BadPattern(f"--progress: the pattern has more than {MAX_PATTERN_CHARACTERS} characters")
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadPattern(f"--progress {text!r}: is not a regular expression: {error}") from None
    names = set(pattern.groupindex)
    known = (*INTEGER_GROUPS, *NUMBER_GROUPS)
    if "step" not in names:
        raise BadPattern(f"--progress {text!r}: has no group `step`; write for example 'step (?P<step>\\d+)'")
    if unknown := sorted(names - set(known)):
        raise BadPattern(f"--progress {text!r}: the group {unknown[0]} is none of {', '.join(known)}")
    return pattern


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `_OutOfTime` when the `with` block has used this many seconds of CPU time, even during a search by `re`.

    CPU time: the ranks may keep the processors busy. Signals reach the main thread: in others there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def parse_integer(text: str) -> int | None:
    """Return a whole number such as 1200 or 1,200, None for another text."""
    digits = text.strip().replace(",", "").replace("_", "")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS
    return int(digits) if is_number else None


def _parse_number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        number = float(text)
        return number if abs(number) < 1e300 else None  # neither NaN nor infinity
    return None


class ScriptProgress:
    """Follows one attempt of a script. `problem` is one line about the pattern when its search took too long.

    `log` is of rank 0, `touched` is `IMGNET_PROGRESS`. With `counts_output` each output is a sign of life.
    """

    def __init__(
        self, log: Path, events: Path, touched: Path, pattern: re.Pattern[str] | None, counts_output: bool = False
    ) -> None:
        self.log = log
        self.touched = touched
        self.pattern = pattern
        self.counts_output = counts_output
        self.problem = ""
        self.numbers = ScriptNumbers()
        self._events = EventSteps(events)
        self._events.poll()  # those of earlier attempts
        self._events.step = None
        self._records = self._events.record_count
        self._offset = 0
        self._rest = ""  # a line that is not complete
        self._touched_version = file_version(touched)

    def poll(self) -> ScriptNumbers:
        """Return the newest numbers. What cannot be read is left out."""
        with contextlib.suppress(OSError):
            self._poll_log()
        self._events.poll()
        if self._events.record_count > self._records:
            self._records = self._events.record_count
            self._note(ScriptNumbers(step=None if self.pattern else self._events.step))
        with contextlib.suppress(OSError):
            version = file_version(self.touched)
            if version and version != self._touched_version:
                self._touched_version = version
                text = read_file(self.touched, MAX_PROGRESS_FILE_BYTES).decode(errors="replace")
                self._note(ScriptNumbers(step=None if self.pattern else parse_integer(text)))
        return self.numbers

    def _note(self, new: ScriptNumbers) -> None:
        """Count a sign of life, and take the numbers that are known."""
        old = self.numbers
        known = {name: value for name, value in vars(new).items() if value is not None and name != "signs"}
        self.numbers = replace(old, **known, signs=old.signs + 1)

    def _poll_log(self) -> None:
        with open_regular(self.log) as file:
            size = file.seek(0, 2)
            if size <= self._offset:
                return
            if size - self._offset > MAX_POLL_BYTES:
                self._offset, self._rest = size - MAX_POLL_BYTES, ""
            file.seek(self._offset)
            data = file.read(MAX_POLL_BYTES)
        self._offset += len(data)
        if self.counts_output:
            self._note(ScriptNumbers())
        *lines, self._rest = LINE_END.split(self._rest + data.decode(errors="replace"))
        self._rest = self._rest[:MAX_LINE_CHARACTERS]
        if self.pattern and (numbers := self._search(self.pattern, lines)):
            self._note(numbers)

    def _search(self, pattern: re.Pattern[str], lines: list[str]) -> ScriptNumbers | None:
        try:
            with time_limit(MATCH_SECONDS):
                for line in reversed(lines):
                    if match := pattern.search(line[:MAX_LINE_CHARACTERS]):
                        numbers: dict[str, Any] = {  # Any: of the type of the field; None for what is no number
                            name: parse_integer(text) if name in INTEGER_GROUPS else _parse_number(text)
                            for name, text in match.groupdict("").items()
                        }
                        return ScriptNumbers(**numbers)
        except _OutOfTime:
            self.pattern = None
            self.counts_output = True
            self.problem = (
                f"--progress {pattern.pattern!r} takes too long on this output and is no longer searched; leave out a "
                "repeat inside of a repeat, such as (a+)+"
            )
        return None


@dataclass
class EventSteps:
    """The newest step of all TensorBoard event files below a folder, while they grow. Each byte is looked at once.

    An event file is a sequence of records: length (8 bytes), its checksum (4), an Event message of protobuf, its
    checksum (4). Of the message only field 2 is read, which is the step.
    """

    folder: Path
    offsets: dict[Path, int] = field(default_factory=dict)
    step: int | None = None
    record_count: int = 0  # of all files

    def poll(self) -> None:
        """Read what is new. Files that cannot be read, and damaged ones, are left out from there on."""
        paths: list[Path] = []
        with contextlib.suppress(OSError):  # a folder was removed meanwhile
            paths = sorted(self.folder.rglob("*tfevents*"))
        for path in paths[-MAX_EVENT_FILES:]:
            with contextlib.suppress(OSError):
                if path.stat().st_size > self.offsets.get(path, 0):
                    self._read_new(path)

    def _read_new(self, path: Path) -> None:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            offset = self.offsets.get(path, 0)
            while offset + EVENT_HEADER.size <= size:
                file.seek(offset)
                (length, _) = EVENT_HEADER.unpack(file.read(EVENT_HEADER.size))
                end = offset + EVENT_HEADER.size + length + CHECKSUM_BYTES
                if end > size:  # the record is not complete, or the file is damaged
                    break
                step = _read_step(file.read(min(length, MAX_EVENT_HEAD_BYTES)))
                if step:  # the first record of a file, its version, has none
                    self.step = step if self.step is None else max(step, self.step)
                self.record_count += 1
                offset = end
            self.offsets[path] = offset


def _read_step(message: bytes) -> int | None:
    """Return the step in the beginning of an Event message, None when it has none there."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        field, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _read_varint(message, position)
            if field == STEP_FIELD:
                return value if value <= MAX_STEP else None
        elif wire_type == 1:
            position += 8
        elif wire_type == 5:
            position += 4
        else:
            return None  # the scalars begin: the step comes before them
    return None


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it. A number that is cut off counts as it is."""
    value = shift = 0
    while position < len(message) and shift < 64:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if byte < 0x80:
            break
    return value, position
