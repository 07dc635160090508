"""Safetensors files (https://github.com/huggingface/safetensors) with a checksum. Nothing in such a file is executed.

The format has no checksum, so our files have one in their metadata: the SHA-256 of the whole file, with zeros in its
own place. Importing this module does not import torch.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from train.tools.errors import first_line
from train.tools.files import write_atomic_with
from train.tools.records import DamagedRecord
from train.tools.sealed_files import sha256_of_range

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 1 << 24  # enough for thousands of tensors and classes; parsed, it takes twenty times the memory
SHA256_KEY = "sha256"  # in the metadata, as the first of them
BLANK_SHA256 = "0" * 64  # in its place while the file is hashed
LENGTH_BYTES = 8  # before the header: its length, little endian
ALIGNMENT = 8  # of the values in the file


def write_safetensors(path: Path, tensors: Mapping[str, "torch.Tensor"], metadata: Mapping[str, str]) -> None:
    """Write named tensors atomically, with a checksum. Raises `OSError`, `ValueError` for what it cannot hold."""
    from safetensors.torch import save

    try:
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        content = memoryview(save(copies))  # of copies: the library refuses tensors that share memory
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"a safetensors file cannot hold it: {first_line(error)}") from error
    data_start = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    entries = json.loads(bytes(content[LENGTH_BYTES:data_start]))
    blank_header = header_bytes(entries, metadata)  # the library would write the metadata in random order
    sha256 = hashlib.sha256(blank_header)
    sha256.update(content[data_start:])
    header = blank_header.replace(BLANK_SHA256.encode(), sha256.hexdigest().encode(), 1)
    write_atomic_with(path, lambda file: file.writelines((header, content[data_start:])))


def header_bytes(entries: Mapping[str, object], metadata: Mapping[str, str]) -> bytes:
    """Return what comes before the values of a file, with `BLANK_SHA256` in the place of the checksum."""
    content = {"__metadata__": {SHA256_KEY: BLANK_SHA256, **metadata}, **entries}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_metadata(path: Path) -> dict[str, str]:
    """Return a file's metadata. Raises `OSError`, and `DamagedRecord` unless the tensors fill the file exactly."""
    with path.open("rb") as file:
        if int.from_bytes(file.read(LENGTH_BYTES), "little") > MAX_HEADER_BYTES:
            raise DamagedRecord(f"{path}: is cut short, or is no safetensors file")
    try:
        with safe_open(str(path), "np") as reader:
            return reader.metadata() or {}
    except SafetensorError as error:
        raise DamagedRecord(f"{path}: is cut short, or is no safetensors file: {first_line(error)}") from error


def verify_file(path: Path) -> dict[str, str]:
    """Return the metadata of a file of ours whose checksum is right. Raises `OSError`, `DamagedRecord` for others."""
    metadata = read_metadata(path)
    stated = metadata.get(SHA256_KEY, "")
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        header = length + file.read(int.from_bytes(length, "little"))
        blank_header = header.replace(stated.encode(), BLANK_SHA256.encode(), 1)
        digest = sha256_of_range(file, path.stat().st_size - len(header), blank_header)
    if stated != digest:
        raise DamagedRecord(f"{path}: is damaged: its checksum does not match its content")
    return metadata


def read_safetensors(path: Path) -> dict[str, "torch.Tensor"]:
    """Return the tensors of a file by name. Raises `DamagedRecord` for a damaged file, and `OSError`."""
    from safetensors.torch import load

    read_metadata(path)
    try:
        return load(path.read_bytes())
    except (SafetensorError, KeyError) as error:  # a type of values that torch does not have
        raise DamagedRecord(f"{path}: cannot be read: {first_line(error)}") from error
