"""Checkpoint files: round trip, choice of the newest intact file, and errors of the background thread."""

import os
import pickle
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.train_records import make_epoch

from train.distributed.batchnorm import RunningStatistics
from train.distributed.process_group import ProcessGroup
from train.metrics.time_breakdown import TimeBreakdown
from train.tools import checkpoint_io, filesystem


def make_state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "model": {"weight": torch.full((3, 4), float(step)), "count": torch.tensor(step)},
        "history": [{"top1": 1.5, "view": "rect"}, None],
        "pair": (1, [torch.arange(3)]),
    }


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_steps(folder: Path, *steps: int) -> None:
    writer = checkpoint_io.CheckpointWriter(folder)
    for step in steps:
        writer.save(step, make_state(step))
    writer.wait()


def test_load_checkpoint_returns_the_saved_state(tmp_path: Path) -> None:
    save_steps(tmp_path, 7)
    (path,) = tmp_path.iterdir()
    assert path.name == "step-00000007.pt"
    loaded = checkpoint_io.load_checkpoint(path)
    saved = make_state(7)
    assert loaded.keys() == saved.keys()
    assert torch.equal(loaded["model"]["weight"], saved["model"]["weight"])
    assert loaded["model"]["count"] == 7 and loaded["history"] == saved["history"]
    assert loaded["pair"][0] == 1 and torch.equal(loaded["pair"][1][0], torch.arange(3))


def test_checkpoint_is_a_file_of_plain_torch(tmp_path: Path) -> None:
    """The checksum at its end is no part of the zip archive, which other programs find all the same."""
    save_steps(tmp_path, 7)
    (path,) = tmp_path.iterdir()
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert torch.equal(loaded["model"]["weight"], make_state(7)["model"]["weight"]) and loaded["step"] == 7
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert filesystem.is_sealed(path)


def test_save_copies_the_state_at_the_call(tmp_path: Path) -> None:
    weights = torch.zeros(1000, 1000)
    writer = checkpoint_io.CheckpointWriter(tmp_path)
    nested = {"a": weights, "b": [{"c": weights}], "d": (weights,)}
    writer.save(1, nested)
    copy = checkpoint_io.copy_to_cpu(nested)
    weights += 1
    nested["e"] = weights
    writer.wait()
    for loaded in (copy, checkpoint_io.load_checkpoint(tmp_path / "step-00000001.pt")):
        assert loaded.keys() == {"a", "b", "d"}
        assert all(tensor.abs().max() == 0 for tensor in (loaded["a"], loaded["b"][0]["c"], loaded["d"][0]))


def test_writer_keeps_the_newest_two_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 10, 9_999, 10_000)
    assert file_names(tmp_path) == ["step-00009999.pt", "step-00010000.pt"]


def test_newest_checkpoint_skips_damaged_and_temporary_files(tmp_path: Path) -> None:
    assert checkpoint_io.newest_checkpoint(tmp_path) is None
    assert checkpoint_io.newest_checkpoint(tmp_path / "none") is None
    save_steps(tmp_path, 3, 4)
    assert checkpoint_io.newest_checkpoint(tmp_path) == tmp_path / "step-00000004.pt"
    damaged = bytearray((tmp_path / "step-00000004.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "step-00000004.pt").write_bytes(damaged)
    assert checkpoint_io.newest_checkpoint(tmp_path) == tmp_path / "step-00000003.pt"
    (tmp_path / ".step-00000009.pt.0123").write_bytes(b"half")
    assert checkpoint_io.newest_checkpoint(tmp_path) == tmp_path / "step-00000003.pt"


def test_write_checkpoint_removes_damaged_files_of_later_steps(tmp_path: Path) -> None:
    """When all checkpoints are damaged, the run starts again at step 0, below them."""
    for step in (10, 14):
        (tmp_path / f"step-{step:08d}.pt").write_bytes(b"damaged")
    for step in (1, 2, 3):
        save_steps(tmp_path, step)
        newest = checkpoint_io.newest_checkpoint(tmp_path)
        assert newest is not None and checkpoint_io.load_checkpoint(newest)["step"] == step


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"", lambda content: b"PK" + content])
def test_load_checkpoint_damaged_names_the_file(damage: Any, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    path = tmp_path / "step-00000001.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"step-00000001\.pt: is "):
        checkpoint_io.load_checkpoint(path)


class MaliciousPickle:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_load_checkpoint_refuses_a_pickle_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step-00000001.pt"
    checkpoint_io.write_checkpoint(tmp_path, 1, {"x": MaliciousPickle()})
    with pytest.raises(ValueError, match="cannot be read") as caught:
        checkpoint_io.load_checkpoint(path)
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert not Path("harm").exists()


@pytest.mark.parametrize("payload", [b"", b"no pickle", b"PK\3\4" + bytes(100), b"\x80\2}q\0."], ids=repr)
def test_load_checkpoint_sealed_but_unreadable_is_said_in_our_words(payload: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.pt"
    path.write_bytes(filesystem.with_checksum(payload))
    with pytest.raises(ValueError, match=r"step-00000001\.pt: cannot be read: ") as caught:
        checkpoint_io.load_checkpoint(path)
    assert "torch.load" not in str(caught.value) and "\n" not in str(caught.value)


def test_save_writes_first_what_the_checkpoint_refers_to(tmp_path: Path) -> None:
    seen: list[tuple[int, list[str]]] = []
    writer = checkpoint_io.CheckpointWriter(tmp_path)
    writer.save(1, make_state(1), write_first=lambda state: seen.append((state["step"], file_names(tmp_path))))
    writer.wait()
    assert seen == [(1, [])] and file_names(tmp_path) == ["step-00000001.pt"]

    def fail(state: dict[str, Any]) -> None:
        raise OSError("no space")

    writer.save(2, make_state(2), write_first=fail)
    with pytest.raises(OSError, match="no space"):
        writer.wait()
    assert file_names(tmp_path) == ["step-00000001.pt"], "a checkpoint whose best weights are missing"


def test_save_waits_for_the_checkpoint_before(tmp_path: Path) -> None:
    writer = checkpoint_io.CheckpointWriter(tmp_path)
    for step in range(1, 8):
        writer.save(step, make_state(step))
        if step > 1:
            assert (tmp_path / f"step-{step - 1:08d}.pt").exists()
    writer.wait()


def test_trainer_skips_a_save_while_one_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.engine.trainer import Trainer

    gate = threading.Event()
    written: list[int] = []

    def write_slowly(folder: Path, step: int, state: dict[str, Any]) -> None:
        assert gate.wait(120)
        written.append(step)

    monkeypatch.setattr(checkpoint_io, "write_checkpoint", write_slowly)
    writer = checkpoint_io.CheckpointWriter(tmp_path)
    trainer = SimpleNamespace(
        group=SimpleNamespace(is_first=True),
        saver=writer,
        state=dict,
        last_save_time=0.0,
        time_breakdown=TimeBreakdown(torch.device("cpu")),
    )
    assert not writer.is_writing
    for step in (8, 16, 24):
        trainer.steps_done = step
        Trainer.save(trainer)  # type: ignore[arg-type]
        assert writer.is_writing
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    trainer.steps_done = 32
    Trainer.save(trainer, wait=True)  # type: ignore[arg-type]
    writer.wait()
    opener.join()
    assert written == [8, 32] and not writer.is_writing
    trainer.steps_done = 40
    Trainer.save(trainer)  # type: ignore[arg-type]
    writer.wait()
    assert written == [8, 32, 40]


@pytest.mark.parametrize("keeps_best", [True, False])
@pytest.mark.parametrize(("top1", "is_best"), [(60.0, True), (50.0, True), (40.0, False), (None, False)])
@pytest.mark.parametrize("epoch_index", range(3))
def test_run_epoch_waits_for_the_disk_after_the_last_epoch_and_keeps_the_best(
    epoch_index: int, top1: float | None, is_best: bool, keeps_best: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.engine import trainer as engine_trainer

    monkeypatch.setattr(engine_trainer, "epoch_result", lambda *_: make_epoch(top1=top1))
    monkeypatch.setattr(engine_trainer, "should_validate", lambda *_: True)
    saves: list[tuple[bool, bool]] = []
    trainer = SimpleNamespace(
        epoch_index=epoch_index,
        step=0,
        epoch_totals=None,
        history=[make_epoch(top1=50.0)],
        group=SimpleNamespace(is_first=True),
        running_statistics=RunningStatistics(ProcessGroup(0, 0, 1, 1, torch.device("cpu")), torch.nn.Linear(2, 2)),
        schedule=SimpleNamespace(epochs=range(3)),
        validate=lambda *_: {},
        progress=SimpleNamespace(report_epoch=lambda *_: None),
        save=lambda wait, is_best: saves.append((wait, is_best)),
        options=SimpleNamespace(keeps_best=keeps_best),
        time_breakdown=TimeBreakdown(torch.device("cpu")),
        steps_done=0,
        images_seen=0,
        run_start_time=0.0,
        target_reached=False,
        freezer=SimpleNamespace(set_train_mode=lambda: None),
    )
    scheduled_phase = SimpleNamespace(phase=SimpleNamespace(frozen=False))
    epoch = SimpleNamespace(number=0, steps=0, scheduled_phase=scheduled_phase)
    engine_trainer.Trainer.run_epoch(trainer, epoch, iter([]))  # type: ignore[arg-type]
    is_last = epoch_index == 2
    assert saves == [(is_last, keeps_best and is_best and not is_last)]
    assert (trainer.epoch_index, trainer.step) == (epoch_index + 1, 0)


def test_urgent_save_keeps_the_thread_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []
    monkeypatch.setattr(
        checkpoint_io, "write_checkpoint", lambda *_: priorities.append(os.getpriority(os.PRIO_PROCESS, 0))
    )
    writer = checkpoint_io.CheckpointWriter(tmp_path)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for step, urgent in ((1, False), (2, True)):
        writer.save(step, {}, urgent)
    writer.wait()
    assert priorities == [min(19, own + 5), own] and os.getpriority(os.PRIO_PROCESS, 0) == own


def test_writer_raises_at_the_next_call_when_the_folder_is_gone(tmp_path: Path) -> None:
    writer = checkpoint_io.CheckpointWriter(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    writer.save(1, make_state(1))
    with pytest.raises(FileNotFoundError):
        writer.save(2, make_state(2))
    with pytest.raises(FileNotFoundError):
        writer.wait()


def test_writer_full_disk_raises_and_keeps_the_checkpoint_before(small_disk: Path) -> None:
    writer = checkpoint_io.CheckpointWriter(small_disk)
    writer.save(1, {"x": torch.zeros(2_000)})
    writer.wait()
    writer.save(2, {"x": torch.zeros(80_000)})
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    assert file_names(small_disk) == ["step-00000001.pt"]
    newest = checkpoint_io.newest_checkpoint(small_disk)
    assert newest is not None and len(checkpoint_io.load_checkpoint(newest)["x"]) == 2_000
