"""Writes and reads the tensors of a safetensors file. Nothing in such a file is ever executed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from train.tools.files import write_atomic_with

from .safetensors_header import BLANK_SHA256, DTYPE_BYTES, TensorEntry, header_bytes, read_header

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write named tensors atomically, with a checksum in the metadata.

    Raises `ValueError` for a tensor that the format cannot hold, and `OSError`.
    """
    values: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
            kind = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).removeprefix("torch.")
            raise ValueError(f"{name} is a tensor of {kind}, which a safetensors file cannot hold")
        values[name] = tensor.detach().cpu().contiguous()
    # The largest types come first, so that each tensor begins at a multiple of its own type's size.
    order = sorted(values, key=lambda name: -DTYPE_BYTES[DTYPE_NAMES[values[name].dtype]])
    entries: dict[str, TensorEntry] = {}
    position = 0
    for name in order:
        tensor = values[name]
        end = position + tensor.numel() * tensor.element_size()
        entries[name] = TensorEntry(
            dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), data_offsets=(position, end)
        )
        position = end
    blank_header = header_bytes({name: entries[name] for name in tensors}, metadata)
    sha256 = hashlib.sha256(blank_header)
    for name in order:
        sha256.update(_as_bytes(values[name]))
    header = blank_header.replace(BLANK_SHA256.encode(), sha256.hexdigest().encode(), 1)

    def write(file: BinaryIO) -> None:
        file.write(header)
        for name in order:
            file.write(_as_bytes(values[name]))

    write_atomic_with(path, write)


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name, in the order of the header.

    Raises `DamagedRecord` for a damaged file, and `OSError`.
    """
    header = read_header(path)
    content = bytearray(path.stat().st_size - header.data_start)
    with path.open("rb") as file:
        file.seek(header.data_start)
        file.readinto(content)
    tensors = {}
    for name, entry in header.entries.items():
        begin, end = entry.data_offsets
        dtype = TORCH_DTYPES[entry.dtype]
        count = (end - begin) // DTYPE_BYTES[entry.dtype]
        values = (
            torch.frombuffer(content, dtype=dtype, count=count, offset=begin) if count else torch.empty(0).to(dtype)
        )
        tensors[name] = values.reshape(entry.shape)
    return tensors
