"""Typed records as JSON: what one process writes, another one reads, perhaps on another machine.

A record is a dataclass with fields of plain types, enumerations, other records, tuples, dicts and optional values.
Records are checked when they are read: a file may be torn, edited, or written by a machine that is not trusted.
"""

from pathlib import Path
from typing import Any, TypeVar

from .filesystem import read_json

RecordT = TypeVar("RecordT")


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
    except (msgspec.ValidationError, ValueError, TypeError, KeyError) as error:
        prefix = f"{source}: " if source else ""
        raise DamagedRecord(f"{prefix}{error}") from error


def encode(record: object) -> Any:  # Any: JSON of any shape
    """Return a record as plain data for JSON, from which `decode` makes an equal record."""
    import msgspec

    return msgspec.to_builtins(record)


def read_record(path: Path, record_type: type[RecordT]) -> RecordT | None:
    """Return the record in a JSON file; None when there is no such file, or only a torn or empty one.

    Raises `DamagedRecord` for complete JSON that is not such a record.
    """
    data = read_json(path)
    return None if data is None else decode(record_type, data, path)
