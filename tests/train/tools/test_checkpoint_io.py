"""Checkpoint files: round trip, choice of the newest intact file, and errors of the background thread."""

import io
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from train.tools import checkpoint_io, sealed_files
from train.tools.agent_protocol import best_weights_file, newest_intact_checkpoint


def make_state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "model": {"weight": torch.full((3, 4), float(step)), "count": torch.tensor(step)},
        "history": [{"top1": 1.5, "view": "rect"}, None],
        "pair": (1, [torch.arange(3)]),
    }


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def writer_of(folder: Path) -> checkpoint_io.CheckpointWriter:
    writer = checkpoint_io.CheckpointWriter()
    writer.begin_attempt(folder)
    return writer


def save_steps(folder: Path, *steps: int) -> None:
    writer = writer_of(folder)
    for step in steps:
        writer.save(step, make_state(step))
    writer.wait()


def test_checkpoint_is_a_file_of_plain_torch(tmp_path: Path) -> None:
    """The checksum at its end is no part of the zip archive, which other programs find all the same."""
    save_steps(tmp_path, 7)
    (path,) = tmp_path.iterdir()
    saved = make_state(7)
    loads = (torch.load(path, weights_only=True, mmap=mmap) for mmap in (False, True))
    for loaded in (checkpoint_io.load_checkpoint(path), *loads):
        assert loaded.keys() == saved.keys() and loaded["history"] == saved["history"]
        assert torch.equal(loaded["model"]["weight"], saved["model"]["weight"]) and loaded["model"]["count"] == 7
        assert loaded["pair"][0] == 1 and torch.equal(loaded["pair"][1][0], torch.arange(3))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_save_copies_the_state_at_the_call(tmp_path: Path) -> None:
    weights = torch.zeros(1000, 1000)
    writer = writer_of(tmp_path)
    nested = {"a": weights, "b": [{"c": weights}], "d": (weights,)}
    writer.save(1, nested)
    copy = checkpoint_io.copy_to_cpu(nested)
    weights += 1
    nested["e"] = weights
    writer.wait()
    for loaded in (copy, checkpoint_io.load_checkpoint(tmp_path / "step-00000001.pt")):
        assert loaded.keys() == {"a", "b", "d"}
        assert all(tensor.abs().max() == 0 for tensor in (loaded["a"], loaded["b"][0]["c"], loaded["d"][0]))


def test_write_checkpoint_removes_damaged_files_of_later_steps(tmp_path: Path) -> None:
    """When all checkpoints are damaged, the run starts again at step 0, below them."""
    for step in (10, 14):
        (tmp_path / f"step-{step:08d}.pt").write_bytes(b"damaged")
    for step in (1, 2, 3):
        save_steps(tmp_path, step)
        newest = newest_intact_checkpoint(tmp_path)
        assert newest is not None and checkpoint_io.load_checkpoint(newest)["step"] == step
    assert file_names(tmp_path) == ["step-00000002.pt", "step-00000003.pt"], "the newest two are kept"


def compressed_checkpoint() -> bytes:
    """A checkpoint whose archive is compressed: torch would unpack gigabytes of a small file."""
    stored, compressed = io.BytesIO(), io.BytesIO()
    torch.save({"weights": torch.zeros(9)}, stored)
    with zipfile.ZipFile(stored) as source, zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return compressed.getvalue()


PAYLOADS = (b"", b"no pickle", b"PK\3\4" + bytes(100), b"\x80\2}q\0.", compressed_checkpoint())


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_load_checkpoint_sealed_but_unreadable_is_said_in_our_words(payload: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.pt"
    path.write_bytes(sealed_files.with_checksum(payload))
    with pytest.raises(ValueError, match=r"step-00000001\.pt: cannot be read: ") as caught:
        checkpoint_io.load_checkpoint(path)
    assert "torch.load" not in str(caught.value) and "\n" not in str(caught.value)


def test_save_writes_first_what_the_checkpoint_refers_to(tmp_path: Path) -> None:
    seen: list[tuple[int, list[str]]] = []
    writer = writer_of(tmp_path)
    writer.save(1, make_state(1), write_first=lambda state: seen.append((state["step"], file_names(tmp_path))))
    writer.wait()
    assert seen == [(1, [])] and file_names(tmp_path) == ["step-00000001.pt"]

    def fail(state: dict[str, Any]) -> None:
        raise OSError("no space")

    writer.save(2, make_state(2), write_first=fail)
    with pytest.raises(OSError, match="no space"):
        writer.wait()
    assert file_names(tmp_path) == ["step-00000001.pt"], "a checkpoint whose best weights are missing"


@pytest.mark.parametrize("event", ["the file is complete", "", "the folder is deleted"])
def test_what_is_written_while_an_attempt_ends_belongs_to_the_next_one(event: str, tmp_path: Path) -> None:
    first, second = (tmp_path / "checkpoints" / name for name in ("000001", "000002"))
    may_write, writer = threading.Event(), writer_of(first)

    def write_best(_: object) -> None:
        may_write.wait(20)
        (first / best_weights_file(7)).touch()

    writer.save(7, make_state(7), write_first=write_best)
    if event == "the file is complete":
        may_write.set()
        writer.wait()
    elif event:  # after a second loss
        shutil.rmtree(first)
    writer.begin_attempt(second)
    assert writer.has_best(7) and not writer.has_best(6)
    may_write.set()
    writer.wait()
    is_there = event != "the folder is deleted"
    assert writer.has_best(7) == is_there
    assert file_names(second) == (["best-00000007.safetensors", "step-00000007.pt"] if is_there else [])


def test_writer_full_disk_raises_and_keeps_the_checkpoint_before(small_disk: Path) -> None:
    writer = writer_of(small_disk)
    writer.save(1, {"x": torch.zeros(2_000)})
    writer.wait()
    writer.save(2, {"x": torch.zeros(80_000)})
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    assert file_names(small_disk) == ["step-00000001.pt"]
    newest = newest_intact_checkpoint(small_disk)
    assert newest is not None and len(checkpoint_io.load_checkpoint(newest)["x"]) == 2_000
