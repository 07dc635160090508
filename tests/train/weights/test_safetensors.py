"""Files of the safetensors format: round trips, damage, and foreign files."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.error_lines import error_line

from train.tools.records import DamagedRecord
from train.weights.safetensors_file import SHA256_KEY, read_safetensors, verify_file, write_safetensors

Tensors = dict[str, torch.Tensor]


def sample_tensors() -> Tensors:
    """Tensors of all types and of unusual shapes and memory orders."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn((2, 3, 5), generator=generator)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool)
    by_type = {f"of {dtype}": (10 * numbers).abs().to(dtype) for dtype in dtypes}
    shapes = {
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "planar": torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        "slice": numbers[:, 1],
        'a "name" \N{SNOWMAN}': numbers[0],
    }
    return {**by_type, **shapes}


def assert_same(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(tensors[name]) == bytes_of(tensor), name


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    write_safetensors(path, sample_tensors(), {"format": "pt", "note": "of a test"})
    return path


def test_write_safetensors_reads_back_every_bit(file: Path) -> None:
    assert_same(read_safetensors(file), sample_tensors())
    metadata = verify_file(file)
    assert metadata["note"] == "of a test" and len(metadata[SHA256_KEY]) == 64
    content = file.read_bytes()
    write_safetensors(file, sample_tensors(), {"format": "pt", "note": "of a test"})
    assert file.read_bytes() == content, "the bytes follow from the tensors and the metadata"
    assert [path.name for path in file.parent.iterdir()] == ["w.safetensors"]


def test_verify_file_detects_any_changed_byte_and_cut_and_added_bytes(file: Path) -> None:
    whole = file.read_bytes()
    places = random.Random(0).sample(range(len(whole)), 500)
    changed = (whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in places)
    cut = (whole[:length] for length in range(0, len(whole), 7))
    for content in (*changed, *cut, whole + b"\0", b"\0" + whole):
        file.write_bytes(content)
        with pytest.raises(DamagedRecord, match=r"w\.safetensors: "):
            verify_file(file)


def with_header(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], *offsets: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize("content", [
    b"", ((1 << 24) + 1).to_bytes(8, "little") + bytes(1 << 25),
    with_header({"a": entry("F32", [3], 0, 8)}), with_header({"a": entry("F32", [2**62, 2**62], 0, 8)}),
])  # fmt: skip
def test_file_that_is_none_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    error_line(DamagedRecord, read_safetensors, tmp_path / "x", match="x: is cut short, or is no safetensors file")


def test_type_that_torch_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(with_header({"a": entry("F6_E2M3", [4], 0, 3)}, bytes(3)))
    with pytest.raises(DamagedRecord, match="x: cannot be read: "):
        read_safetensors(tmp_path / "x")


def test_tensors_that_share_memory_are_written_each(tmp_path: Path) -> None:
    weight = torch.arange(3.0)
    write_safetensors(tmp_path / "x", {"encoder": weight, "decoder": weight}, {})
    assert_same(read_safetensors(tmp_path / "x"), {"decoder": weight, "encoder": weight})


def test_read_header_of_a_foreign_file_has_no_checksum(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(with_header({"a": entry("F32", [2], 0, 8)}))
    assert torch.equal(read_safetensors(tmp_path / "x")["a"], torch.zeros(2))
    with pytest.raises(DamagedRecord, match="checksum"):
        verify_file(tmp_path / "x")
