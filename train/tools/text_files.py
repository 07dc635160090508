"""Files of text: lines, and JSON."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .files import open_regular, read_file

MAX_LINE_BYTES = 4_000_000  # of a file of lines, which may have any number of them
BLOCK_BYTES = 4096  # that are read at a time where only some lines of a file are needed
CHUNK_BYTES = 1 << 18  # that are read at a time of a file of lines that is read as a whole
MAX_INTEGER_DIGITS = 20
# JSON with such a number is parsed with checks, which take longer.
LARGE_NUMBER_PATTERN = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{20}")


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their newlines, without lines of more than `MAX_LINE_BYTES`.

    The last line may be incomplete. A missing file yields nothing. Raises other `OSError`s.
    """
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        yield from lines_from_here(file)


def lines_from_here(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file from its position on, like `read_lines`."""
    while line := file.readline(MAX_LINE_BYTES):
        is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        rest = b"" if is_whole else line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
        if is_whole:
            yield line


def line_blocks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of an open file from its position on in large blocks, each with the offset of its end.

    Lines of more than `MAX_LINE_BYTES` are left out. The last block may be an unfinished line.
    """
    rest = b""
    is_too_long = False
    while chunk := file.read(CHUNK_BYTES):
        lines, newline, unfinished = chunk.rpartition(b"\n")
        if newline:
            block = rest + lines + newline
            if is_too_long:
                block = block.partition(b"\n")[2]
            if block:
                yield block, file.tell() - len(unfinished)
            rest, is_too_long = b"", False
        rest = b"" if is_too_long else rest + unfinished
        if len(rest) >= MAX_LINE_BYTES:
            rest, is_too_long = b"", True
    if rest:
        yield rest, file.tell()


def lines_with(marker: bytes, block: bytes) -> Iterator[bytes]:
    """Yield the lines of a block that contain a text. The others take almost no time."""
    found = block.find(marker)
    while found >= 0:
        begin = block.rfind(b"\n", 0, found) + 1
        end = block.find(b"\n", found) + 1 or len(block)
        yield block[begin:end]
        found = block.find(marker, end)


def lines_backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file from its end, without their newlines. Reads no more blocks than are needed.

    The first of them may be incomplete. Empty lines and those of more than `MAX_LINE_BYTES` are left out.
    """
    begin = file.seek(0, os.SEEK_END)
    rest = b""  # the known part of a line whose beginning is not read yet
    is_too_long = False
    while begin > 0:
        end, begin = begin, max(0, begin - BLOCK_BYTES)
        file.seek(begin)
        head, *lines = (file.read(end - begin) + rest).split(b"\n")
        for line in reversed(lines):
            if line and not is_too_long:
                yield line
            is_too_long = False
        is_too_long = is_too_long or len(head) >= MAX_LINE_BYTES
        rest = b"" if is_too_long else head
    if rest:
        yield rest


def last_line(path: Path) -> str:
    """Return the last line of a log, or the last state of a progress bar; "" when there is none."""
    with contextlib.suppress(OSError, IndexError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 500))
        return file.read().decode(errors="replace").replace("\r", "\n").strip().splitlines()[-1]
    return ""


def to_json_bytes(value: object) -> bytes:
    """Return a value as indented JSON text that ends in a newline. NaN and infinity become null: JSON has neither."""
    return (json.dumps(replace_nonfinite(value), indent=1) + "\n").encode()


def is_valid_json(data: bytes) -> bool:
    """Return whether a text is complete JSON. A file that is rewritten in place may be read in a torn state."""
    with contextlib.suppress(ValueError):
        parse_json(data)
        return True
    return False


def parse_json(text: bytes) -> Any:  # Any: JSON of any shape
    """Return the value of a JSON text. Raises `ValueError`, also for deep nesting and numbers not finite or too big."""
    checks: dict[str, Any] = {"parse_constant": _refuse_number}  # Any: json.loads has arguments of other types too
    if LARGE_NUMBER_PATTERN.search(text):
        checks |= {"parse_float": _parse_finite_float, "parse_int": _parse_short_integer}
    try:
        return json.loads(text.decode(), **checks)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _parse_finite_float(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)


def _parse_short_integer(text: str) -> int:
    return int(text) if len(text) <= MAX_INTEGER_DIGITS else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:MAX_INTEGER_DIGITS]} is not a finite number, or too long")


def json_roundtrip(value: object) -> Any:  # Any: JSON of any shape
    """Return a value as JSON would give it back: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))


def replace_nonfinite(value: object) -> object:
    """Return nested dicts and lists with None in place of each NaN and infinity. Tuples become lists."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path: Path) -> Any | None:  # Any: JSON of any shape
    """Return the value in a JSON file, None when the file is missing, unreadable or no JSON."""
    with contextlib.suppress(OSError, ValueError):
        return parse_json(read_file(path))
    return None


def read_json_lines(path: Path, *required_keys: str) -> Iterator[dict[str, Any]]:  # Any: JSON of any shape
    """Yield the JSON objects of a file with one object per line that have all required keys.

    Lines that are damaged, or not complete yet, are skipped. A missing file yields nothing. Raises other `OSError`s.
    """
    for line in read_lines(path):
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict) and row.keys() >= {*required_keys}:
                yield row
