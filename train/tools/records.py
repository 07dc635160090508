"""Typed records as JSON: what one process writes, another one reads, perhaps on another machine.

A record is a dataclass with fields of plain types, enumerations, other records, tuples, dicts and optional values.
Records are checked when they are read: a file may be torn, edited, or written by a machine that is not trusted. Of a
history that grows without end, `History` and `GrowingFile` keep the newest rows.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar, cast

from .errors import one_line_error
from .files import MAX_FILE_BYTES, FileVersion, file_version, open_regular, read_file
from .text_files import line_blocks, lines_with, parse_json

if TYPE_CHECKING:
    import msgspec

RecordT = TypeVar("RecordT")
RowT = TypeVar("RowT")
MAX_HISTORY_BYTES = 8_000_000  # of rows that are kept in memory, where they take up to twenty times as much
COMPARED_BYTES = 200  # before the offset from which a file is read on
MAX_INTEGER = 2**63 - 1  # in a line of a long file
# What code that reads a record raises when its data has a form that this program never writes.
MALFORMED_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
MAX_UNIX_TIME = 253_402_300_799  # the year 9999
MAX_PROBLEM_CHARACTERS = 300  # of a message: it may quote a value


class DamagedRecord(ValueError):
    """JSON data that does not describe the expected record. The message names the field."""


def require_unix_time(seconds: float, name: str = "time") -> None:
    """Raise `ValueError` unless a field of a record is a time that can be shown as a date."""
    if not 0 <= seconds <= MAX_UNIX_TIME:
        raise ValueError(f"{name}: must be in seconds since 1970")


def decode(record_type: type[RecordT], data: object, source: object = "") -> RecordT:
    """Return the record that plain JSON data describes. Unknown fields are ignored; whole numbers pass as floats.

    `record_type` may be any type that a field may have, such as `list[Row]`. `source` says in the message where the
    data is from. Raises `DamagedRecord` for a wrong type, an unknown value of an enumeration, or a missing field.
    """
    import msgspec  # imported here, because most commands start without reading a record

    try:
        return msgspec.convert(data, record_type)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise damaged(error, source) from error


def damaged(error: Exception, source: object = "") -> DamagedRecord:
    """Return the error that data from `source` is damaged, with the reason in one line."""
    problem = one_line_error(error)
    if isinstance(error, OSError):  # its text begins with the file
        source, problem = source or error.filename, error.strerror or problem
    if len(problem) > MAX_PROBLEM_CHARACTERS:
        problem = f"{problem[: MAX_PROBLEM_CHARACTERS // 2]} ... {problem[-MAX_PROBLEM_CHARACTERS // 2 :]}"
    return DamagedRecord(f"{source}: {problem}" if source else problem)


def encode(record: object) -> Any:  # Any: JSON of any shape
    """Return a record as plain data for JSON, from which `decode` makes an equal record."""
    import msgspec

    return msgspec.to_builtins(record)


def decode_json(record_type: type[RecordT], text: bytes, source: object = "") -> RecordT:
    """Return the record that a JSON text describes. Raises `DamagedRecord`."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise damaged(error, source) from error
    return decode(record_type, data, source)


def decode_line(record_type: type[RecordT], line: bytes) -> RecordT:
    """Return the record in a line of a long file. Takes a tenth of the time of `decode_json`: skips unknown fields.

    Raises `DamagedRecord`.
    """
    try:
        record: RecordT = _line_decoder(cast(Hashable, record_type)).decode(line)
    except (ValueError, RecursionError) as error:
        raise damaged(error) from error
    for value in vars(record).values():
        if type(value) is int and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise DamagedRecord("it has a number that is too long")
    return record


@cache
def _line_decoder(record_type: Hashable) -> "msgspec.json.Decoder[Any]":  # Any: of the type
    import msgspec

    return msgspec.json.Decoder(record_type)


def read_record(path: Path, record_type: type[RecordT], max_bytes: int = MAX_FILE_BYTES) -> RecordT | None:
    """Return the record in a JSON file, None when there is no such file. Raises `DamagedRecord` for any other file."""
    try:
        text = read_file(path, max_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damaged(error, path) from error
    return decode_json(record_type, text, path)


def read_intact(path: Path, record_type: type[RecordT]) -> RecordT | None:
    """Return the record in a JSON file, None when there is no such file, or it is damaged."""
    with contextlib.suppress(DamagedRecord):
        return read_record(path, record_type)
    return None


class History(Generic[RowT]):
    """The newest rows of a history, whose files have at most `max_bytes`, so that its length cannot fill the memory."""

    def __init__(self, max_bytes: int = MAX_HISTORY_BYTES) -> None:
        self.max_bytes = max_bytes
        self.rows: deque[RowT] = deque()
        self.bytes = 0
        self.is_cut = False  # whether some were forgotten
        self._sizes: deque[int] = deque()

    def append(self, row: RowT, size: int) -> None:
        """Add a row that has `size` bytes in its file."""
        self.rows.append(row)
        self._sizes.append(size)
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.rows.popleft()
            self.bytes -= self._sizes.popleft()
            self.is_cut = True


class GrowingFile(Generic[RowT]):
    """The newest rows of a file of lines that only grows. Each line is read once, however often they are asked for.

    `parse_line` returns None for a line that is no row; all rows contain `marker`. Of the lines with it the last
    `max_bytes` are kept. A file that was replaced or truncated is read anew.
    """

    def __init__(
        self, path: Path, marker: bytes, parse_line: Callable[[bytes], RowT | None], max_bytes: int = MAX_HISTORY_BYTES
    ) -> None:
        self.path = path
        self.marker = marker
        self.parse_line = parse_line
        self.max_bytes = max_bytes
        self._forget()

    def _forget(self) -> None:
        self._version: FileVersion | None = None
        self.history: History[RowT] = History(self.max_bytes)
        self._read_bytes = 0  # all of them are complete lines
        self._last_bytes = b""  # those before: in a file that was replaced they are others
        self._unfinished_row: RowT | None = None  # of a last line without its newline: more of it may follow

    def rows(self) -> list[RowT]:
        """Return all rows, none when the file does not exist. Raises other `OSError`s."""
        version = file_version(self.path)
        if version is None:
            self._forget()
        elif version != self._version:
            with contextlib.suppress(FileNotFoundError), open_regular(self.path) as file:
                self._read_new(file)
            self._version = version
        return [*self.history.rows, *([] if self._unfinished_row is None else [self._unfinished_row])]

    def _read_new(self, file: BinaryIO) -> None:
        file.seek(self._read_bytes - len(self._last_bytes))
        if file.read(len(self._last_bytes)) != self._last_bytes:
            self._forget()
            file.seek(0)
        self._unfinished_row = None
        # Lines that are forgotten at once are not parsed.
        new_lines: History[bytes] = History(self.max_bytes)
        read_bytes, last_bytes = self._read_bytes, self._last_bytes
        for block, end in line_blocks(file):
            if block.endswith(b"\n"):
                read_bytes, last_bytes = end, block[-COMPARED_BYTES:]
                for line in lines_with(self.marker, block):
                    new_lines.append(line, len(line))
            elif self.marker in block:
                self._unfinished_row = self.parse_line(block)
        for line in new_lines.rows:
            if (row := self.parse_line(line)) is not None:
                self.history.append(row, len(line))
        self.history.is_cut |= new_lines.is_cut
        self._read_bytes, self._last_bytes = read_bytes, last_bytes
