"""The header of a safetensors file, by which it can be checked without torch: where each tensor lies, and metadata.

    8 bytes   length n of the header, little endian
    n bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}},
              then spaces up to a multiple of 8
    the rest  the values of all tensors, row by row, without gaps

The format is that of https://github.com/huggingface/safetensors (README, "Format"). It has no checksum, so our files
have one in their metadata: the SHA-256 of the whole file, with zeros in its own place.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from train.tools.records import DamagedRecord, damaged, decode, encode
from train.tools.sealed_files import sha256_of_range
from train.tools.text_files import parse_json

MAX_HEADER_BYTES = 1 << 24  # enough for thousands of tensors and classes; parsed, it takes twenty times the memory
METADATA_NAME = "__metadata__"
SHA256_KEY = "sha256"  # in the metadata, as the first of them
BLANK_SHA256 = "0" * 64  # in its place while the file is hashed
LENGTH_BYTES = 8  # before the header
MAX_LENGTH = 2**40  # of a dimension
MAX_DIMENSIONS = 64  # torch's own limit; the product of more numbers, of a damaged header, could take hours
ALIGNMENT = 8  # of the values in the file
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "C64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "F8_E4M3", "F8_E5M2", "BOOL"), 1),
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies: the first byte of its values and the one after the last, counted from the first value."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class SafetensorsHeader:
    """The header of a file, and the offset at which the values begin."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_start: int


def read_header(path: Path) -> SafetensorsHeader:
    """Return the header of a safetensors file.

    Raises `DamagedRecord` unless the tensors that it names fill the rest of the file exactly, and `OSError`.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        data_start = LENGTH_BYTES + length
        if not 2 <= length <= MAX_HEADER_BYTES or data_start > size:
            raise DamagedRecord(f"{path}: is cut short, or is no safetensors file")
        text = file.read(length)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise damaged(error, path) from error
    if not isinstance(content, dict):
        raise DamagedRecord(f"{path}: its header is no JSON object")
    metadata = decode(dict[str, str], content.pop(METADATA_NAME, {}), path)
    entries = decode(dict[str, TensorEntry], content, path)
    _check_entries(path, entries, size - data_start)
    return SafetensorsHeader(entries=entries, metadata=metadata, data_start=data_start)


def _check_entries(path: Path, entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """Raise `DamagedRecord` unless each tensor has its size, and all of them lie one after the other."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in DTYPE_BYTES:
            raise DamagedRecord(f"{path}: {name} has values of type {entry.dtype}, which is not supported")
        begin, end = entry.data_offsets
        if len(entry.shape) > MAX_DIMENSIONS:
            raise DamagedRecord(f"{path}: {name} has {len(entry.shape)} dimensions, the limit is {MAX_DIMENSIONS}")
        is_possible = all(0 <= length <= MAX_LENGTH for length in entry.shape)
        if not is_possible or end - begin != DTYPE_BYTES[entry.dtype] * math.prod(entry.shape):
            raise DamagedRecord(f"{path}: {name} of shape {list(entry.shape)} does not take bytes {begin} to {end}")
        if begin != position:
            raise DamagedRecord(f"{path}: {name} begins at byte {begin}, not at {position}")
        position = end
    if position != data_bytes:
        raise DamagedRecord(f"{path}: has {data_bytes} bytes of values, and its tensors take {position}")


def verify_file(path: Path) -> SafetensorsHeader:
    """Return the header of a file of ours that is what its checksum says, read without much memory.

    Raises `DamagedRecord` for any other file, and `OSError`.
    """
    header = read_header(path)
    with path.open("rb") as file:
        stated = header.metadata.get(SHA256_KEY, "")
        start = file.read(header.data_start).replace(stated.encode(), BLANK_SHA256.encode(), 1)
        digest = sha256_of_range(file, path.stat().st_size - header.data_start, start)
    if stated != digest:
        raise DamagedRecord(f"{path}: is damaged: its checksum does not match its content")
    return header


def header_bytes(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return what comes before the values of a file, with `BLANK_SHA256` in the place of the checksum."""
    content = {METADATA_NAME: {SHA256_KEY: BLANK_SHA256, **metadata}, **encode(entries)}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
