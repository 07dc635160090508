"""The safetensors format: round trips, damage, foreign files, and the files of the format's own library."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.peers import run_script

from train.tools.records import DamagedRecord
from train.weights.safetensors_file import TORCH_DTYPES, read_safetensors, write_safetensors
from train.weights.safetensors_header import DTYPE_BYTES, SHA256_KEY, read_header, verify_file

Tensors = dict[str, torch.Tensor]


def sample_tensors() -> Tensors:
    """Tensors of all types and of unusual shapes and memory orders."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn((2, 3, 5), generator=generator)
    by_type = {f"of {name}": (10 * numbers).abs().to(dtype) for name, dtype in TORCH_DTYPES.items()}
    shapes = {
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "planar": torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        "slice": numbers[:, 1],
        'a "name" \N{SNOWMAN}': numbers[0],
    }
    return {**by_type, **shapes}


def assert_same(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(tensors) == list(expected)
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


def test_write_safetensors_reads_back_every_bit_in_order(file: Path) -> None:
    assert_same(read_safetensors(file), sample_tensors())
    header = verify_file(file)
    assert header.metadata["note"] == "of a test" and len(header.metadata[SHA256_KEY]) == 64
    for entry in header.entries.values():
        assert entry.data_offsets[0] % DTYPE_BYTES[entry.dtype] == 0 and header.data_start % 8 == 0
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is cut short, or is no safetensors file"),
        (b"\xff" * 8, "is cut short, or is no safetensors file"),
        (with_header([1]), "is no JSON object"),
        (with_header(b"{" * 1000), "x: "),
        (with_header({"a": 3}), "x: "),
        (with_header({"a": entry("F32", [2], 0)}), "x: "),
        (with_header({"a": entry("F33", [2], 0, 8)}), "a has values of type F33"),
        (with_header({"a": entry("F32", [3], 0, 8)}), r"a of shape \[3\] does not take bytes 0 to 8"),
        (with_header({"a": entry("F32", [-1, -2], 0, 8)}), "does not take bytes"),
        (with_header({"a": entry("F32", [2**62, 2**62], 0, 8)}), "does not take bytes"),
        (with_header({"a": entry("U8", [0, 2**62], 0, 0)}), "does not take bytes"),
        (with_header({"a": entry("U8", [10**18] * 65, 0, 0)}), "a has 65 dimensions, the limit is 64"),
        (with_header({"a": entry("F32", [1], 4, 8)}), "a begins at byte 4, not at 0"),
        (with_header({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}), "b begins at byte 4, not at 8"),
        (with_header({"a": entry("F32", [1], 0, 4)}), "has 8 bytes of values, and its tensors take 4"),
        (with_header({"a": entry("F32", [4], 0, 16)}), "has 8 bytes of values, and its tensors take 16"),
        (with_header({"a": entry("F32", [2], 0, 8), "__metadata__": {"a": 1}}), "x: "),
    ],
)
def test_read_header_refuses_what_does_not_fit(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DamagedRecord, match=message) as caught:
        read_header(tmp_path / "x")
    assert "\n" not in str(caught.value)


def test_read_header_of_a_foreign_file_has_no_checksum(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(with_header({"a": entry("F32", [2], 0, 8)}))
    assert torch.equal(read_safetensors(tmp_path / "x")["a"], torch.zeros(2))
    with pytest.raises(DamagedRecord, match="checksum"):
        verify_file(tmp_path / "x")


def test_files_equal_those_of_the_formats_own_library(tmp_path: Path) -> None:
    tensors = sample_tensors()
    write_safetensors(tmp_path / "ours.safetensors", tensors, {"format": "pt"})
    torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "tensors.pt")
    arguments = (tmp_path / "tensors.pt", tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors")
    metadata = run_script("safetensors_files.py", *arguments, module="safetensors")
    assert metadata == read_header(tmp_path / "ours.safetensors").metadata
    theirs = read_safetensors(tmp_path / "theirs.safetensors")
    assert_same({name: theirs[name] for name in tensors}, tensors)
