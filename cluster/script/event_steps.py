"""Finds the newest step in TensorBoard event files while they grow. Needs no TensorBoard.

An event file is a sequence of records: length (8 bytes), its checksum (4), an Event message of protobuf, its checksum
(4). Of the message only field 2 is read, which is the step.
"""

import contextlib
import struct
from pathlib import Path

from train.tools.files import open_regular

HEADER = struct.Struct("<QI")
CHECKSUM_BYTES = 4
STEP_FIELD = 2
MAX_HEAD_BYTES = 64  # of a record: wall time and step are its first fields
MAX_FILES = 200  # that are followed; of more, the last by name, which has the time in it
MAX_STEP = 10**15


class EventSteps:
    """The newest step of all event files below a folder. Each byte is looked at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets: dict[Path, int] = {}
        self.step: int | None = None
        self.record_count = 0  # of all files

    def poll(self) -> None:
        """Read what is new. Files that cannot be read, and damaged ones, are left out from there on."""
        paths: list[Path] = []
        with contextlib.suppress(OSError):  # a folder was removed meanwhile
            paths = sorted(self.folder.rglob("*tfevents*"))
        for path in paths[-MAX_FILES:]:
            with contextlib.suppress(OSError):
                if path.stat().st_size > self.offsets.get(path, 0):
                    self._read_new(path)

    def _read_new(self, path: Path) -> None:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            offset = self.offsets.get(path, 0)
            while offset + HEADER.size <= size:
                file.seek(offset)
                (length, _) = HEADER.unpack(file.read(HEADER.size))
                end = offset + HEADER.size + length + CHECKSUM_BYTES
                if end > size:  # the record is not complete, or the file is damaged
                    break
                step = read_step(file.read(min(length, MAX_HEAD_BYTES)))
                if step:  # the first record of a file, its version, has none
                    self.step = step if self.step is None else max(step, self.step)
                self.record_count += 1
                offset = end
            self.offsets[path] = offset


def read_step(message: bytes) -> int | None:
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
