"""Whole runs of `python -m train`: killed and resumed, on one, two and three processes, honest ends, the result."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from train.metrics import thumbnails
from train.recipe import Phase
from train.recipe.schedule import Schedule
from train.tools import checkpoint_io
from train.tools import process as tools_process

STEPS = 4 + 4 + 2 + 4  # 50 images: by 16, 16, 32, 16
SEEN = 4 * 50


def folder(out: Path, attempt: int = 1) -> Path:
    return out / "checkpoints" / f"{attempt:06d}"


def final(out: Path, attempt: int = 1) -> dict[str, Any]:
    path = checkpoint_io.newest_checkpoint(folder(out, attempt))
    assert path is not None
    return checkpoint_io.load_checkpoint(path)


def result(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What training computes: weights, momenta, and every process's running statistics."""
    momenta = {f"momentum {key}": one["momentum_buffer"] for key, one in state["optimizer"]["state"].items()}
    return {**state["model"], **momenta, "statistics": state["statistics"]}


def assert_bit_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["epoch"], one["step"]) == (other["epoch"], other["step"])
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys() and len(mine) > 50
    differ = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not differ
    for name in ("train_loss", "top1", "top5", "top1_square", "val_loss", "lr"):
        assert [row[name] for row in one["history"]] == [row[name] for row in other["history"]], name


@pytest.fixture(scope="session")
def alone(runs: Any) -> Path:
    """One process that accumulates the gradients of two GPUs, undisturbed."""
    out: Path = runs.folder / "alone"
    runs.run(out, "--procs", "1", "--gpus", "2")
    return out


@pytest.fixture(scope="session")
def pair(runs: Any) -> Path:
    """Two processes, undisturbed, started as a person does."""
    out: Path = runs.folder / "pair"
    runs.end(out, runs.start_afresh(out, "--procs", "2"))
    return out


def has_step(out: Path, least: int) -> Callable[[], bool]:
    """Whether there is a checkpoint of that step or a later one (older ones are removed)."""
    return lambda: any(int(path.stem.removeprefix("step-")) >= least for path in folder(out).glob("step-*.pt"))


def is_saving(out: Path) -> Callable[[], bool]:
    """Whether a checkpoint is being written beyond those that were there."""
    before = set(folder(out).glob("*"))

    def check() -> bool:
        return any(path.name.startswith(".step-") for path in folder(out).iterdir() if path not in before)

    return check


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_and_resumed_run_ends_with_the_same_bits(world: int, runs: Any, alone: Path, pair: Path) -> None:
    out = runs.folder / f"killed-{world}"
    argv = ("--gpus", "2", "--save-seconds", "0")
    runs.kill_when(out, has_step(out, 1), *argv, world=world)  # in the middle of an epoch
    runs.kill_when(out, is_saving(out), *argv, world=world)  # in the middle of a write
    runs.kill_when(out, has_step(out, 9), *argv, world=world)  # in the phase of another batch
    said = runs.run(out, *argv, world=world)
    assert said.count("resumed from") == 3
    assert_bit_equal(final(out), final(alone if world == 1 else pair))
    assert result(out)["steps"] == STEPS and result(out)["images"] == SEEN


def test_a_run_killed_before_its_result_was_written_only_writes_it(runs: Any, alone: Path) -> None:
    out = runs.folder / "no-result"
    shutil.copytree(alone, out)
    (out / "result.json").unlink()
    before = sorted(folder(out).iterdir())
    said = runs.run(out, "--gpus", "2")
    assert f"at step {STEPS}" in said
    assert sorted(folder(out).iterdir()) == before
    mine, theirs = result(out), result(alone)
    assert mine["steps"] == STEPS
    for one, other in zip(mine["epochs"], theirs["epochs"], strict=True):
        assert {**one, "where": 0} == {**other, "where": 0}
        for part in ("steps", "waits", "validation", "switches"):  # the last save ended after it was written
            assert one["where"][part] == other["where"][part]
    assert mine["goodput"] == pytest.approx(theirs["goodput"], abs=0.05)


def assert_close(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    """Weights that differ by rounding only, relative to the size of what training changed them by."""
    for name, mine in one["model"].items():
        if mine.is_floating_point() and "running" not in name:
            theirs = other["model"][name]
            assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=0.1), name


def test_two_processes_and_one_that_accumulates_compute_the_same(alone: Path, pair: Path) -> None:
    assert_close(final(pair), final(alone), 1e-3)
    one, two = result(alone), result(pair)
    assert (one["procs"], two["procs"]) == (1, 2)
    for name in ("steps", "images", "schedule", "schedule_gpus"):
        assert one[name] == two[name], name
    for mine, theirs in zip(one["epochs"], two["epochs"], strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-3)
        assert (mine["train_images"], mine["val_images"]) == (50, 20)


def test_a_resume_on_more_processes_keeps_the_global_batch(runs: Any, alone: Path) -> None:
    out = runs.folder / "regrouped"
    runs.kill_when(out, has_step(out, 5), "--gpus", "2", "--save-seconds", "0")
    said = runs.run(out, "--gpus", "3", code=1)
    assert "run with another gpus" in said and "Traceback" not in said
    said = runs.run(out, "--gpus", "2", world=3)
    assert said.count("resumed from") == 1
    got = result(out)
    assert (got["procs"], got["schedule_gpus"], got["steps"], got["images"]) == (3, 2, STEPS, SEEN)
    assert [row["global_batch"] for row in got["epochs"]] == [16, 16, 32, 16]
    assert_close(final(out), final(alone), 1e-3)


def test_another_attempt_goes_on_from_the_last_one_that_saved(runs: Any, pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "attempts"
    shutil.copytree(folder(pair), folder(out))
    shutil.copytree(pair / "logs", out / "logs")
    (folder(out) / f"step-{STEPS:08d}.pt").write_bytes(b"cut short")
    folder(out, 2).mkdir()
    said = runs.run(out, "--attempt", "3", world=2)
    assert "resumed from" in said and "000001/step-00000010.pt at step 10" in said
    assert_bit_equal(final(out, 3), final(pair))
    assert [one.name for one in out.glob("logs/val-*")] == ["val-000001.json"] and len(
        thumbnails.read_thumbnails(out)
    ) == 6
    assert [path.name for path in folder(out, 2).iterdir()] == []


@pytest.mark.parametrize("procs", ["1", "2"])
def test_sigterm_saves_and_ends_with_3_and_a_resume_goes_on(procs: str, runs: Any, tiny: Any, until: Any) -> None:
    """With two processes the signal goes to their parent only."""
    row = Phase(epochs=(0, 10), size=32, batch=8, lr=0.01)
    path, out = runs.recipe(tiny(name=f"long-{procs}", phases=[row])), runs.folder / f"long-{procs}"
    process = runs.start(out, "--procs", procs, "--gpus", "2", "--save-seconds", "0", recipe=path)
    until(lambda: process.poll() is not None or has_step(out, 1)())
    process.send_signal(signal.SIGTERM)
    said = runs.end(out, process, code=3)
    runs.gone(out)
    newest = checkpoint_io.newest_checkpoint(folder(out))
    assert newest is not None and not (out / "result.json").exists()
    saved = int(newest.stem.removeprefix("step-"))
    assert f"asked to end: saved at step {saved}\n" in said
    assert 1 <= saved < 40
    assert f"at step {saved}\n" in runs.run(out, "--gpus", "2", recipe=path)
    assert result(out)["steps"] == 40


def test_a_rate_that_diverges_ends_the_run_and_names_step_and_rate(runs: Any, tiny: Any) -> None:
    out = runs.folder / "diverged"
    rows = [Phase(epochs=(0, 3), size=32, batch=8, lr=1e25)]
    said = runs.run(out, world=2, code=1, recipe=runs.recipe(tiny(name="diverged", phases=rows)))
    assert "the loss is nan at step 2 (epoch 1, rate 1e+25)" in said
    assert not (out / "result.json").exists()
    runs.gone(out)


def test_the_processes_end_when_one_of_them_is_killed(runs: Any, tiny: Any, until: Any) -> None:
    out = runs.folder / "widowed"
    path = runs.recipe(tiny(name="widowed", phases=[Phase(epochs=(0, 100), size=32, batch=8, lr=0.01)]))
    process = runs.start(out, "--procs", "2", "--save-seconds", "0", recipe=path)
    until(lambda: process.poll() is not None or has_step(out, 1)())
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    second = [pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(int(second[0]), signal.SIGKILL)
    assert process.wait(20) != 0
    runs.gone(out)
    assert not (out / "result.json").exists()


def test_the_processes_end_when_their_parent_is_killed(runs: Any, tiny: Any) -> None:
    out = runs.folder / "orphaned"
    path = runs.recipe(tiny(name="orphaned", phases=[Phase(epochs=(0, 100), size=32, batch=8, lr=0.01)]))
    runs.kill_when(out, lambda: len(runs.alive(out)) >= 5 and has_step(out, 1)(), "--procs", "2", recipe=path)


def test_torchrun_starts_it_too(runs: Any) -> None:
    out = runs.folder / "torchrun"
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "train")
    runs.end(out, runs.start_afresh(out, "--max-steps", "4", launcher=launcher))
    assert (result(out)["procs"], result(out)["steps"]) == (2, 4)
    assert result(out)["epochs"][0]["global_batch"] == 16


def test_a_rehearsal_meets_every_phase_on_a_part_of_the_images(runs: Any, tiny: Any) -> None:
    out = runs.folder / "rehearsal"
    runs.run(out, "--scale", "0.5", "--max-steps", "5", "--workers", "0", "--gpus", "2")
    got = result(out)
    assert [row["steps"] for row in got["schedule"]] == [
        row["steps"] for row in Schedule(tiny(), 25, 2, max_steps=5).table()
    ]
    assert [row["epoch"] for row in got["epochs"]] == [1, 2, 3, 4] or got["steps"] == 5
    assert got["steps"] == 5
    assert [row["val_images"] for row in got["epochs"]] == [10] * len(got["epochs"])
    assert [row["view"] for row in got["epochs"]][-1] == "rect" and got["epochs"][0]["view"] == "square"
    assert got["epochs"][-1]["size"] == 64


def test_a_broken_file_is_named_before_the_training_and_may_be_left_out(runs: Any, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(runs.data, data)
    broken = data / "train" / "disc" / "disc_00000003.JPEG"
    broken.write_bytes(broken.read_bytes()[:1000])
    said = runs.run(out, "--data", str(data), "--max-steps", "3", code=1)
    assert f"error: {broken}: " in said and "1 of 50 files" in said and "Traceback" not in said
    broken.rename(broken.with_name(os.fsdecode(b"disc_\xff.JPEG")))  # a name that is no text
    said = runs.run(out, "--data", str(data), "--max-steps", "3", "--skip-bad")
    assert "left out 1 bad files (--skip-bad), the first: disc/disc_" in said
    assert result(out)["steps"] == 3


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(runs: Any, alone: Path, tmp_path: Path) -> None:
    whole = checkpoint_io.newest_checkpoint(folder(alone))
    assert whole is not None
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:-1])
    said = runs.run(tmp_path / "out", "--gpus", "2", "--resume", str(tmp_path / "cut.pt"), code=1)
    assert "cut.pt: is damaged" in said and "Traceback" not in said


def test_the_result_says_what_was_done_and_with_what(alone: Path, tiny: Any) -> None:
    got = result(alone)
    assert (got["recipe"], got["state"], got["procs"], got["seed"]) == ("tiny", "done", 1, 0)
    assert (got["device"], got["precision"]) in {("cpu", "float32"), ("cuda", "bfloat16"), ("cuda", "float16")}
    assert {"python", "torch", "numpy", "imgnet-cluster"} <= got["versions"].keys()
    assert got["versions"]["torch"] == version("torch")
    assert got["git_commit"] is None or len(got["git_commit"].removesuffix("+changes")) == 40
    assert got["schedule"] == json.loads(json.dumps(Schedule(tiny(), 50, 2).table()))
    assert 0 < got["goodput"] <= 1 and got["images_per_second"] > 0
    seconds = got["seconds"]
    assert seconds["attempt"] > seconds["training"] > 0 and seconds["validation"] > 0
    assert [row["epoch"] for row in got["epochs"]] == [1, 2, 3, 4]
    for row in got["epochs"]:
        assert row["seconds"] == pytest.approx(row["train_seconds"] + row["val_seconds"])
        assert row["train_loss"] > 0 and row["val_loss"] > 0
        assert 0 <= row["top1"] <= row["top5"] <= 100 and row["top1"] * 20 / 100 == round(row["top1"] * 20 / 100)
    last = got["epochs"][-1]
    assert [row["view"] for row in got["epochs"]] == ["square", "square", "square", "rect"]
    assert all(got[name] == last[name] for name in ("top1", "top5", "top1_square", "top5_square"))
    assert seconds["training"] == pytest.approx(sum(row["train_seconds"] for row in got["epochs"]))


def assert_adds_up(got: dict[str, Any]) -> None:
    """The parts are the wall time from the first step to the last, run by run and epoch by epoch; none is negative."""
    where, rows = got["where"], [row["where"] for row in got["epochs"]]
    assert where["wall"] == got["seconds"]["first step to last"] > 0
    assert sum(one["seconds"] for one in where["parts"].values()) == pytest.approx(where["wall"], rel=0.01)
    for part, one in where["parts"].items():
        assert one["seconds"] == pytest.approx(sum(row[part] for row in rows)) and min(row[part] for row in rows) >= 0
        assert one["most"] == max(row[part] for row in rows) == rows[one["epoch"] - 1][part]


def test_where_the_time_went_adds_up_and_is_told(runs: Any, alone: Path, pair: Path) -> None:
    for out in (alone, pair, runs.folder / "killed-1", runs.folder / "killed-2"):
        got = result(out)
        assert_adds_up(got)
        assert all(got["where"]["parts"][part]["seconds"] > 0 for part in ("steps", "validation", "checkpoints"))
    assert [row["gap_steps"] is None for row in result(alone)["epochs"]] == [True, False, False, False]
    got = result(alone)
    assert got["where"]["gap"]["steps"] == max(row["gap_steps"] for row in got["epochs"][1:])
    assert list(got["where"]["start"]) == ["starting", "indexing", "joining", "warming"]
    assert 0 < sum(got["where"]["start"].values()) < got["seconds"]["attempt"] + got["where"]["start"]["starting"]
    said = runs.said(alone)
    assert "where the time went" in said and f"goodput {got['goodput']:.1%}" in said


@pytest.mark.parametrize("world", [1, 2])
def test_only_what_is_due_is_validated_and_the_last_epoch_always(world: int, runs: Any, tiny: Any) -> None:
    """Epochs of four steps are shorter than what is asked for ahead, so "near" is decided late, by all alike."""
    rows = [
        Phase(epochs=(0, 2), size=32, batch=8, lr=0.01, validate="last"),
        Phase(epochs=(2, 4), size=32, batch=8, lr=0.01, validate="near"),
        Phase(epochs=(4, 7), size=64, batch=8, lr=0.01, validate="never", rect_val=True),
    ]
    for target, due in ((5.0, [2, 3, 4, 7]), (100.0, [2, 7])):
        out = runs.folder / f"cadence-{world}-{target:g}"
        path = runs.recipe(tiny(name=out.name, phases=rows, target=target))
        said = runs.run(out, "--gpus", "2", "--procs", str(world), recipe=path, world=world)
        got = result(out)
        assert [row["epoch"] for row in got["epochs"] if row["top1"] is not None] == due
        assert all(row["val_images"] in (20, None) for row in got["epochs"])
        assert got["top1"] == got["epochs"][-1]["top1"] and got["epochs"][-1]["view"] == "rect"
        assert said.count(" -      -      -") == len(rows) + 4 - len(due)
        assert_adds_up(got)


def test_a_checkpoint_of_another_version_is_refused_in_one_line(runs: Any, alone: Path, tmp_path: Path) -> None:
    state = final(alone)
    del state["format"]
    checkpoint_io.write_checkpoint(tmp_path, 1, state)
    found = checkpoint_io.newest_checkpoint(tmp_path)
    said = runs.run(tmp_path / "out", "--gpus", "2", "--resume", str(found), code=1)
    assert "error: the checkpoint is of another version of imgnet-cluster" in said and "Traceback" not in said


def test_tensorboard_reads_the_events_with_images_seen_as_x(alone: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(alone / "events"))
    board.Reload()
    top1 = board.Scalars("val/top1")
    assert [event.step for event in top1] == [50, 100, 150, 200]
    assert [event.value for event in top1] == pytest.approx([row["top1"] for row in result(alone)["epochs"]])
    assert board.Scalars("train/loss")[0].step == 16  # the first look is after the first step
    rates = {event.step: event.value for event in board.Scalars("sizes/lr")}
    assert rates[16] == pytest.approx(0.01) and rates[200] == pytest.approx(0.0)
    assert {"sizes/batch_total", "times/images_per_second", "times/step_ms"} <= set(board.Tags()["scalars"])


def test_metrics_are_json_lines_without_nan(alone: Path) -> None:
    lines = [json.loads(line) for line in (alone / "metrics" / "000001.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "epoch"] == [4, 8, 10, STEPS]
    assert all({"attempt", "time", "images"} <= line.keys() for line in lines)


def test_the_agent_beside_it_reads_progress_and_may_ask_for_an_end(runs: Any, tmp_path: Path) -> None:
    """IMGNET_WORK is the agent's folder."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    (work / "ask").touch()
    process = runs.start(out, "--gpus", "2", environment={"IMGNET_WORK": str(work)})
    assert process.wait(60) == 3
    progress = json.loads((work / "progress.json").read_text())
    assert progress["state"] == "saved" and progress["step"] == 1 and progress["steps"] == STEPS
    newest = checkpoint_io.newest_checkpoint(folder(out))
    assert newest is not None and newest.name == "step-00000001.pt"


def test_processes_that_find_different_checkpoints_do_not_train(runs: Any, alone: Path, tmp_path: Path) -> None:
    """As on two machines that share no folder, of which only the first has saved anything."""
    out = tmp_path / "apart"
    shutil.copytree(alone, out)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(tools_process.free_port())}
    how = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    kinds = zip(("auto", "none"), how, strict=True)
    ranks = [runs.start(out, "--gpus", "2", "--resume", kind, environment=one) for kind, one in kinds]
    said = runs.end(out, *ranks, code=None)
    assert "the steps to go on from differ between the machines" in said and "Traceback" not in said
