"""Typed records as JSON: what one process writes, another one reads, perhaps on another machine.

A record is a dataclass with fields of plain types, enumerations, other records, tuples, dicts and optional values.
Records are checked when they are read: a file may be torn, edited, or written by a machine that is not trusted.
"""

from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .filesystem import one_line_error, parse_json, read_file

if TYPE_CHECKING:
    import msgspec

RecordT = TypeVar("RecordT")
MAX_INTEGER = 2**63 - 1  # in a line of a long file
# What code that reads a record raises when its data has a form that this program never writes.
MALFORMED_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
MAX_PROBLEM_CHARACTERS = 300  # of a message: it may quote a value


class DamagedRecord(ValueError):
    """JSON data that does not describe the expected record. The message names the field."""


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


def read_record(path: Path, record_type: type[RecordT]) -> RecordT | None:
    """Return the record in a JSON file, None when there is no such file.

    Raises `DamagedRecord` for a file that cannot be read, is torn, or holds no such record.
    """
    try:
        text = read_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damaged(error, path) from error
    return decode_json(record_type, text, path)
