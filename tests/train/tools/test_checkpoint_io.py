"""Checkpoints: what was saved comes back, the newest whole one is taken, errors are heard."""

import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from train.metrics.time_breakdown import TimeBreakdown
from train.tools import checkpoint_io


def state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "model": {"weight": torch.full((3, 4), float(step)), "count": torch.tensor(step)},
        "history": [{"top1": 1.5, "view": "rect"}, None],
        "pair": (1, [torch.arange(3)]),
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved(folder: Path, *steps: int) -> None:
    saver = checkpoint_io.CheckpointWriter(folder)
    for step in steps:
        saver.save(step, state(step))
    saver.wait()


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    (path,) = tmp_path.iterdir()
    assert path.name == "step-00000007.pt"
    got, before = checkpoint_io.load_checkpoint(path), state(7)
    assert got.keys() == before.keys()
    assert torch.equal(got["model"]["weight"], before["model"]["weight"])
    assert got["model"]["count"] == 7 and got["history"] == before["history"]
    assert got["pair"][0] == 1 and torch.equal(got["pair"][1][0], torch.arange(3))


def test_what_is_saved_is_the_moment_of_the_call(tmp_path: Path) -> None:
    weights, saver = torch.zeros(1000, 1000), checkpoint_io.CheckpointWriter(tmp_path)
    nest = {"a": weights, "b": [{"c": weights}], "d": (weights,)}
    saver.save(1, nest)
    copy = checkpoint_io.copy_to_cpu(nest)
    weights += 1
    nest["e"] = weights
    saver.wait()
    for got in (copy, checkpoint_io.load_checkpoint(tmp_path / "step-00000001.pt")):
        assert got.keys() == {"a", "b", "d"}
        assert all(one.abs().max() == 0 for one in (got["a"], got["b"][0]["c"], got["d"][0]))


def test_parameters_are_saved_as_plain_tensors() -> None:
    copy = checkpoint_io.copy_to_cpu({"p": torch.nn.Parameter(torch.ones(2))})["p"]
    assert not copy.requires_grad and type(copy) is torch.Tensor


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 10, 9_999, 10_000)
    assert names(tmp_path) == ["step-00009999.pt", "step-00010000.pt"]


def test_a_second_save_of_the_same_step_replaces_the_first(tmp_path: Path) -> None:
    checkpoint_io.write_checkpoint(tmp_path, 5, state(1))
    checkpoint_io.write_checkpoint(tmp_path, 5, state(2))
    assert names(tmp_path) == ["step-00000005.pt"]
    assert checkpoint_io.load_checkpoint(tmp_path / "step-00000005.pt")["step"] == 2


def test_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    assert (
        checkpoint_io.newest_checkpoint(tmp_path) is None and checkpoint_io.newest_checkpoint(tmp_path / "none") is None
    )
    saved(tmp_path, 3, 4)
    assert checkpoint_io.newest_checkpoint(tmp_path) == tmp_path / "step-00000004.pt"
    damaged = bytearray((tmp_path / "step-00000004.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "step-00000004.pt").write_bytes(damaged)
    assert checkpoint_io.newest_checkpoint(tmp_path) == tmp_path / "step-00000003.pt"
    (tmp_path / ".step-00000009.pt.0123").write_bytes(b"half")
    assert checkpoint_io.newest_checkpoint(tmp_path) == tmp_path / "step-00000003.pt"


def test_a_new_checkpoint_is_kept_beside_damaged_ones_of_later_steps(tmp_path: Path) -> None:
    """After all of them were damaged the run begins again, below them."""
    for step in (10, 14):
        (tmp_path / f"step-{step:08d}.pt").write_bytes(b"damaged")
    for step in (1, 2, 3):
        saved(tmp_path, step)
        newest = checkpoint_io.newest_checkpoint(tmp_path)
        assert newest is not None and checkpoint_io.load_checkpoint(newest)["step"] == step


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda whole: b"", lambda whole: b"PK" + whole])
def test_a_damaged_one_is_refused_by_name(damage: Any, tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"step-00000001\.pt: is "):
        checkpoint_io.load_checkpoint(path)


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step-00000001.pt"
    checkpoint_io.write_checkpoint(tmp_path, 1, {"x": Harm()})
    with pytest.raises(pickle.UnpicklingError):
        checkpoint_io.load_checkpoint(path)
    assert not Path("harm").exists()


def test_wait_returns_when_the_file_is_there_and_leaves_no_thread(tmp_path: Path) -> None:
    before, saver = threading.active_count(), checkpoint_io.CheckpointWriter(tmp_path / "made" / "here")
    saver.save(1, state(1))
    saver.wait()
    assert names(saver.folder) == ["step-00000001.pt"]
    assert threading.active_count() == before
    saver.wait()


def test_a_save_waits_for_the_one_before_it(tmp_path: Path) -> None:
    saver = checkpoint_io.CheckpointWriter(tmp_path)
    for step in range(1, 8):
        saver.save(step, state(step))
        if step > 1:
            assert (tmp_path / f"step-{step - 1:08d}.pt").exists()
    saver.wait()


def test_while_one_is_being_written_the_steps_do_not_wait_but_an_end_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.engine.trainer import Trainer

    gate, written = threading.Event(), []

    def slow(folder: Path, step: int, state: dict[str, Any]) -> None:
        assert gate.wait(30)
        written.append(step)

    monkeypatch.setattr(checkpoint_io, "write", slow)
    saver = checkpoint_io.CheckpointWriter(tmp_path)
    times = TimeBreakdown(torch.device("cpu"))
    trainer = SimpleNamespace(group=SimpleNamespace(first=True), saver=saver, state=dict, saved_at=0.0, times=times)
    assert not saver.is_writing
    for step in (8, 16, 24):
        trainer.steps_done = step
        Trainer.save(trainer)  # type: ignore[arg-type]
        assert saver.is_writing
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    trainer.steps_done = 32
    Trainer.save(trainer, wait=True)  # type: ignore[arg-type]
    saver.wait()
    opener.join()
    assert written == [8, 32] and not saver.is_writing
    trainer.steps_done = 40
    Trainer.save(trainer)  # type: ignore[arg-type]
    saver.wait()
    assert written == [8, 32, 40]


@pytest.mark.parametrize("number", range(3))
def test_only_the_end_of_the_last_epoch_waits_for_a_slow_disk(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.engine import trainer as engine_trainer

    monkeypatch.setattr(engine_trainer.distributed, "average_statistics", lambda *_: None)
    monkeypatch.setattr(engine_trainer, "epoch_row", lambda *_: {})
    monkeypatch.setattr(engine_trainer, "validates", lambda *_: True)
    saved: list[bool] = []
    trainer = SimpleNamespace(
        epoch=number, step=0, sums=None, history=[], group=None, model=None, schedule=SimpleNamespace(epochs=range(3)),
        validate=lambda *_: {}, news=SimpleNamespace(epoch=lambda *_: None), save=lambda wait: saved.append(wait),
        times=TimeBreakdown(torch.device("cpu")), steps_done=0, images_seen=0, begun=0.0, reached=False,
        freezer=SimpleNamespace(mode=lambda: None),
    )  # fmt: skip
    row = SimpleNamespace(phase=SimpleNamespace(frozen=False))
    engine_trainer.Trainer.run_epoch(trainer, SimpleNamespace(number=0, steps=0, row=row), iter([]))  # type: ignore[arg-type]
    assert saved == [number == 2] and (trainer.epoch, trainer.step) == (number + 1, 0)


def test_only_a_file_that_somebody_waits_for_is_written_at_full_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(checkpoint_io, "write", lambda *_: found.append(os.getpriority(os.PRIO_PROCESS, 0)))
    saver, own = checkpoint_io.CheckpointWriter(tmp_path), os.getpriority(os.PRIO_PROCESS, 0)
    for step, urgent in ((1, False), (2, True)):
        saver.save(step, {}, urgent)
    saver.wait()
    assert found == [min(19, own + 5), own] and os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_folder_that_vanished_is_an_error_at_the_next_call(tmp_path: Path) -> None:
    saver = checkpoint_io.CheckpointWriter(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    saver.save(1, state(1))
    with pytest.raises(FileNotFoundError):
        saver.save(2, state(2))
    with pytest.raises(FileNotFoundError):
        saver.wait()


def test_a_full_disk_is_an_error_at_the_next_call_and_keeps_what_was_there(small_disk: Path) -> None:
    saver = checkpoint_io.CheckpointWriter(small_disk)
    saver.save(1, {"x": torch.zeros(2_000)})
    saver.wait()
    saver.save(2, {"x": torch.zeros(80_000)})
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    assert names(small_disk) == ["step-00000001.pt"]
    newest = checkpoint_io.newest_checkpoint(small_disk)
    assert newest is not None and len(checkpoint_io.load_checkpoint(newest)["x"]) == 2_000
