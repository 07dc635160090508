"""Whole runs of `python -m train` on one to three processes: killed, resumed, stopped; and their results."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.run_outputs import damage_pixels, final_state, has_step, read_result
from support.waiting import wait_for

from train.metrics import thumbnails
from train.recipe import Phase
from train.tools import checkpoint_io, sealed_files
from train.tools.agent_protocol import checkpoint_folder, newest_intact_checkpoint

pytestmark = pytest.mark.rehearsal  # whole processes, which take long

STEPS = 4 + 4 + 2 + 4  # 50 images in global batches of 16, 16, 32 and 16
IMAGES_SEEN = 4 * 50


def trained_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what training computes: weights, running statistics and momenta."""
    momenta = {f"momentum {key}": each["momentum_buffer"] for key, each in state["optimizer"]["state"].items()}
    return {**state["model"], **momenta}


def assert_bit_equal(state: dict[str, Any], expected_state: dict[str, Any]) -> None:
    assert (state["epoch"], state["step"]) == (expected_state["epoch"], expected_state["step"])
    tensors, expected = trained_tensors(state), trained_tensors(expected_state)
    assert tensors.keys() == expected.keys() and len(tensors) > 50
    differing = [name for name in tensors if not torch.equal(tensors[name], expected[name])]
    assert not differing
    for name in ("train_loss", "top1", "top5", "top1_square", "val_loss", "lr"):
        assert [row[name] for row in state["history"]] == [row[name] for row in expected_state["history"]], name


@pytest.fixture(scope="session")
def alone(runs: Any) -> Path:
    out: Path = runs.folder / "alone"
    runs.run(out, "--procs", "1", "--gpus", "2")
    return out


@pytest.fixture(scope="session")
def pair(runs: Any) -> Path:
    out: Path = runs.folder / "pair"
    runs.end(out, runs.start_afresh(out, "--procs", "2"))
    return out


def is_saving(out: Path) -> Callable[[], bool]:
    before = set(checkpoint_folder(out, 1).glob("*"))

    def check() -> bool:
        return any(path.name.startswith(".step-") for path in checkpoint_folder(out, 1).iterdir() if path not in before)

    return check


@pytest.mark.parametrize("world", [2])
def test_run_killed_and_resumed_ends_with_the_same_bits(world: int, runs: Any, pair: Path) -> None:
    """Rectangles, frozen phases and other optimizers: tests/train/rules/test_resume.py."""
    out, argv = runs.folder / "killed", ("--gpus", "2", "--save-seconds", "0")
    runs.kill_when(out, has_step(out, 1), *argv, world=world)  # in the middle of an epoch
    runs.kill_when(out, is_saving(out), *argv, world=world)  # in the middle of a write
    runs.kill_when(out, has_step(out, 9), *argv, world=world)  # in the phase of another batch
    assert runs.run(out, *argv, world=world).count("resumed from") == 3
    assert_bit_equal(final_state(out), final_state(pair))
    assert read_result(out)["steps"] == STEPS and read_result(out)["images"] == IMAGES_SEEN
    assert_time_adds_up(read_result(out))


def test_run_attempt_resumes_from_the_last_attempt_that_saved(runs: Any, pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "attempts"
    shutil.copytree(checkpoint_folder(pair, 1), checkpoint_folder(out, 1))
    shutil.copytree(pair / "logs", out / "logs")
    (checkpoint_folder(out, 1) / f"step-{STEPS:08d}.pt").write_bytes(b"cut short")
    checkpoint_folder(out, 2).mkdir()
    output = runs.run(out, "--attempt", "3", world=2)
    assert "resumed from" in output and "000001/step-00000010.pt at step 10" in output
    assert read_result(out)["steps"] == STEPS
    assert [path.name for path in out.glob("logs/val-*")] == ["val-000001.json"]
    assert len(thumbnails.read_thumbnails(out)) == 6
    assert [path.name for path in checkpoint_folder(out, 2).iterdir()] == []


def test_run_sigterm_saves_exits_with_3_and_can_resume(runs: Any, tiny: Any) -> None:
    """The signal is sent to the parent of two processes only."""
    phase = Phase(epochs=(0, 10), size=32, batch=8, lr=0.01)
    path, out = runs.recipe(tiny(name="long", phases=[phase])), runs.folder / "long"
    process = runs.start(out, "--procs", "2", "--gpus", "2", "--save-seconds", "0", recipe=path)
    wait_for(lambda: process.poll() is not None or has_step(out, 1)())
    process.send_signal(signal.SIGTERM)
    output = runs.end(out, process, code=3)
    runs.gone(out)
    newest = newest_intact_checkpoint(checkpoint_folder(out, 1))
    assert newest is not None and not (out / "result.json").exists()
    saved_step = int(newest.stem.removeprefix("step-"))
    assert f"stopped on request: saved at step {saved_step}\n" in output and 1 <= saved_step < 40
    assert f"at step {saved_step}\n" in runs.run(out, "--gpus", "2", recipe=path)
    assert read_result(out)["steps"] == 40


def test_run_ends_when_the_parent_is_killed(runs: Any, tiny: Any) -> None:
    out = runs.folder / "orphaned"
    path = runs.recipe(tiny(name="orphaned", phases=[Phase(epochs=(0, 100), size=32, batch=8, lr=0.01)]))
    runs.kill_when(out, lambda: len(runs.alive(out)) >= 5 and has_step(out, 1)(), "--procs", "2", recipe=path)


def test_run_under_torchrun(runs: Any) -> None:
    out = runs.folder / "torchrun"
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "train")
    runs.end(out, runs.start_afresh(out, "--max-steps", "4", launcher=launcher))
    assert (read_result(out)["procs"], read_result(out)["steps"]) == (2, 4)
    assert read_result(out)["epochs"][0]["global_batch"] == 16


def test_run_refuses_checkpoints_that_it_cannot_use(runs: Any, alone: Path, tmp_path: Path) -> None:
    """By name each is an error of one line. With --resume auto the one before it is taken."""
    shutil.copytree(checkpoint_folder(alone, 1), checkpoint_folder(tmp_path / "out", 1))
    intact = newest_intact_checkpoint(checkpoint_folder(tmp_path / "out", 1))
    assert intact is not None
    damaged, unreadable = tmp_path / "cut.pt", intact.with_name("step-99999999.pt")
    damaged.write_bytes(intact.read_bytes()[:-1])
    unreadable.write_bytes(sealed_files.with_checksum(b"no pickle"))
    state = checkpoint_io.load_checkpoint(intact)
    del state["format"]
    checkpoint_io.write_checkpoint(tmp_path, 1, state)
    for path, message in (
        (damaged, f"error: {damaged}: is damaged"),
        (unreadable, f"error: {unreadable}: cannot be read"),
        (tmp_path / "step-00000001.pt", "error: the checkpoint was written by another version of imgnet-cluster"),
    ):
        output = runs.run(tmp_path / "other", "--gpus", "2", "--resume", str(path), code=1)
        assert message in output and "Traceback" not in output
    output = runs.run(tmp_path / "out", "--gpus", "2")
    assert f"{unreadable}: cannot be read" in output and "the one before it is taken" in output
    assert f"resumed from {intact}" in output


def test_broken_images_are_replaced_alike_on_any_number_of_processes_and_after_a_resume(
    runs: Any, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(runs.data, data)
    broken = [data / "train/disc/disc_00000003.JPEG", data / "train/ring/ring_00000015.JPEG"]
    for path in broken:
        damage_pixels(path)
    options, states = ("--data", str(data), "--gpus", "2", "--exact"), []
    for name, world in (("one", 1), ("two", 2), ("resumed", 2)):
        out = tmp_path / name
        if name == "resumed":
            shutil.copytree(checkpoint_folder(tmp_path / "one", 1), checkpoint_folder(out, 1))
            (checkpoint_folder(out, 1) / f"step-{STEPS:08d}.pt").unlink()
        output = runs.run(out, *options, world=world)
        assert ("resumed from" in output) == (name == "resumed")
        told = output.count(f"{broken[0]}: a part of its pixels is lost")
        assert told in ((0,) if name == "resumed" else (1, 2)), "once a process, and not again"
        assert "broken images replaced so far: 2, such as" in output.partition("done: top-1")[2]
        assert read_result(out)["broken_images"] == 2
        states.append(final_state(out))
    expected = trained_tensors(states[0])
    for state in states[1:]:
        assert all(torch.equal(value, expected[name]) for name, value in trained_tensors(state).items())
        for first, other in zip(states[0]["history"], state["history"], strict=True):
            assert (first["val_loss"], first["top1"]) == (other["val_loss"], other["top1"])
        assert state["broken_images"] == states[0]["broken_images"]
    output = runs.run(tmp_path / "strict", *options, "--max-bad", "1", code=1)
    assert f"error: {data}: broken images" in output and "more than --max-bad 1" in output
    assert "Traceback" not in output


def assert_time_adds_up(summary: dict[str, Any]) -> None:
    """Check that the parts add up to the wall time from first to last step, over the run and by epoch."""
    breakdown, rows = summary["where"], [row["where"] for row in summary["epochs"]]
    assert breakdown["wall"] == summary["seconds"]["first step to last without losses"] > 0
    seconds = {part: part_time["seconds"] for part, part_time in breakdown["parts"].items()}
    assert sum(seconds.values()) == pytest.approx(breakdown["wall"], rel=0.01)
    assert seconds == pytest.approx({part: sum(row[part] for row in rows) for part in seconds})
    assert min(min(row.values()) for row in rows) >= 0


def test_run_validates_by_the_phases_policies(runs: Any, tiny: Any) -> None:
    """Epochs of four steps are shorter than the loader's lead, so validate="near" is decided late, on all ranks."""
    phases = [
        Phase(epochs=(0, 2), size=32, batch=8, lr=0.01, validate="last"),
        Phase(epochs=(2, 4), size=32, batch=8, lr=0.01, validate="near"),
        Phase(epochs=(4, 7), size=64, batch=8, lr=0.01, validate="never", rect_val=True),
    ]
    for target, validated_epochs in ((5.0, [2, 3, 4, 7]), (100.0, [2, 7])):
        out = runs.folder / f"cadence-{target:g}"
        path = runs.recipe(tiny(name=out.name, phases=phases, target=target))
        output = runs.run(out, "--gpus", "2", recipe=path, world=2)
        summary = read_result(out)
        assert [row["epoch"] for row in summary["epochs"] if row["top1"] is not None] == validated_epochs
        assert all(row["val_images"] in (20, None) for row in summary["epochs"])
        assert summary["top1"] == summary["epochs"][-1]["top1"] and summary["epochs"][-1]["view"] == "rect"
        assert output.count(" -      -      -") == len(phases) + 4 - len(validated_epochs)
        assert summary["target"]["reached"] == (target == 5.0) and not summary["target"]["stops"]
        assert_time_adds_up(summary)


def test_run_ranks_with_different_checkpoints_fail(runs: Any, alone: Path, tmp_path: Path) -> None:
    """As on two machines without a shared folder, of which only the first has written checkpoints."""
    out = tmp_path / "apart"
    shutil.copytree(alone, out)
    ranks = [
        runs.start(out, "--gpus", "2", "--resume", resume, environment=environment)
        for resume, environment in zip(("auto", "none"), runs.ranks(2), strict=True)
    ]
    output = runs.end(out, *ranks, code=None)
    assert "the steps to resume from differ between the machines" in output and "Traceback" not in output


def test_run_that_finds_its_disk_full_may_be_tried_again(runs: Any, small_disk: Path, tmp_path: Path) -> None:
    environment = {"IMGNET_WORK": str(tmp_path)}
    output = runs.end(small_disk, runs.start(small_disk, environment=environment), code=1)
    assert "No space left on device" in output and "Traceback" not in output
    failure = json.loads((tmp_path / "failed-0.json").read_text())
    assert failure["fault"] == "own" and "No space left on device" in failure["reason"]
    runs.gone(small_disk)
