"""Tests of the tracker process beside stand-ins of the libraries, which write down how they are called."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.train_records import make_epoch, metrics_line, step_line
from support.trainer_in_process import RandomImages, make_phase, make_recipe, make_trainer
from support.waiting import wait_for

from train.metrics.records import EpochRow
from train.trackers import tracker_process
from train.trackers.tracker_process import TrackerProcess, run_id, start_tracker

NOTE = """
import json, os, time

def note(**row):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(row) + "\\n")

def calls(name):
    with open(os.environ["CALLS"], "a+") as file:
        file.seek(0)
        return [row for row in map(json.loads, file) if row["call"] == name]
"""
WANDB = """
class Run:
    def log(self, values, step):
        if os.environ.get("HANGS"):
            time.sleep(1000)
        note(call="log", values=values, step=step)

    def finish(self, exit_code):
        note(call="finish", exit_code=exit_code)

def init(**arguments):
    print("what wandb prints")
    if "FAILS" in os.environ:
        raise RuntimeError(os.environ["FAILS"])
    note(call="init", silent=os.environ["WANDB_SILENT"], rank=os.environ.get("RANK"), **arguments)
    return Run()
"""
MLFLOW = """
from types import SimpleNamespace
import sys

def Metric(name, value, moment, step):
    return SimpleNamespace(name=name, value=value, step=step)

entities = sys.modules["mlflow.entities"] = SimpleNamespace(Metric=Metric)

def set_tracking_uri(uri):
    note(call="uri", uri=uri)

def set_experiment(name):
    note(call="experiment", name=name)
    return SimpleNamespace(experiment_id="e1")

class MlflowClient:
    def search_runs(self, experiments, query):
        tags = [row["tags"] for row in calls("create_run")]
        named = [tag for tag in tags if query == f"tags.`imgnet.run_id` = '{tag['imgnet.run_id']}'"]
        return [SimpleNamespace(info=SimpleNamespace(run_id="r1"))] if named else []

    def get_metric_history(self, run, name):
        note(call="history", name=name)
        return [SimpleNamespace(step=step) for row in calls("log") for key, _, step in row["metrics"] if key == name]

    def create_run(self, experiment, tags, run_name):
        note(call="create_run", tags=tags, run_name=run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def update_run(self, run, status):
        note(call="update", status=status)

    def log_param(self, run, name, value):
        note(call="param", name=name, value=value)

    def log_batch(self, run, metrics):
        note(call="log", metrics=[(metric.name, metric.value, metric.step) for metric in metrics])

    def set_terminated(self, run, status):
        note(call="end", status=status)
"""


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, in an environment that has the stand-ins."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "wandb.py").write_text(NOTE + WANDB)
    (libraries / "mlflow.py").write_text(NOTE + MLFLOW)
    monkeypatch.syspath_prepend(libraries)
    monkeypatch.setenv("PYTHONPATH", str(libraries))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("IMGNET_JOB", "MLFLOW_TRACKING_URI", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "out/metrics").mkdir(parents=True)
    return tmp_path / "out"


def start(tracker: str, out: Path, attempt: int = 1) -> TrackerProcess:
    started = start_tracker(tracker, out, out, attempt, {"lr": 0.1, "model": "resnet50", "seed": 3})
    assert started
    return started


def append(out: Path, *rows: dict[str, Any], attempt: int = 1, tail: str = "") -> None:
    with (out / f"metrics/{attempt:06d}.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + tail)


def step(images: int, loss: float | None = 1.5, attempt: int = 1) -> dict[str, Any]:
    row = step_line(images, 100.0, attempt=attempt)
    return {**row, "images": images, "scalars": {"loss/train": loss, "accuracy/train_top1": 20.0}}


def validation(images: int, top1: float, attempt: int = 1) -> dict[str, Any]:
    epoch = make_epoch(top1=top1)
    return metrics_line(EpochRow(**vars(epoch), attempt=attempt, time=100.0, step=images, images=images))


def finish(tracker: TrackerProcess, is_complete: bool = True) -> None:
    tracker.end(is_complete)
    tracker.wait()


def calls(out: Path, name: str = "") -> list[dict[str, Any]]:
    path = out.parent / "calls"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["call"] == name or not name]


def test_wandb_run_has_the_settings_and_the_scalars_of_tensorboard(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    tracker = start("wandb", out)
    third = json.dumps(step(48)) + "\n"
    append(out, step(16), step(32, loss=None), tail=third[:20])
    wait_for(lambda: len(calls(out, "log")) == 2)
    append(out, tail=third[20:])
    finish(tracker)
    (begin,) = calls(out, "init")
    assert begin["config"] == {"lr": 0.1, "model": "resnet50", "seed": 3} and begin["resume"] == "allow"
    assert begin["id"] == run_id(out) and begin["project"] == "imgnet-cluster" and begin["rank"] is None
    assert [row["step"] for row in calls(out, "log")] == [16, 32, 48]
    assert calls(out, "log")[0]["values"] == {"loss/train": 1.5, "accuracy/train_top1": 20.0}
    assert calls(out, "log")[1]["values"] == {"accuracy/train_top1": 20.0}
    assert calls(out, "finish") == [{"call": "finish", "exit_code": 0}]
    assert "what wandb prints" in (out / "tracker.log").read_text() and capfd.readouterr().out == ""


def test_later_attempt_goes_on_with_the_run_of_the_earlier_one(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has the unique name of the job. What is measured again is logged once.

    The first attempt has logged the last step of the second epoch, and not its validation.
    """
    monkeypatch.setenv("IMGNET_JOB", "job-3-9073e811")
    tracker = start("mlflow", out)
    append(out, step(16), validation(16, 30.0), step(32))
    finish(tracker, is_complete=False)
    tracker = start("mlflow", out, attempt=2)
    rows = (step(16, attempt=2), validation(16, 30.0, attempt=2), step(32, attempt=2), validation(32, 40.0, attempt=2))
    append(out, *rows, step(48, attempt=2), attempt=2)
    finish(tracker)
    assert [row["tags"]["imgnet.run_id"] for row in calls(out, "create_run")] == ["job-3-9073e811"]
    assert calls(out, "update") == [{"call": "update", "status": "RUNNING"}]
    assert [row["status"] for row in calls(out, "end")] == ["KILLED", "FINISHED"]
    assert calls(out, "uri")[0]["uri"] == f"sqlite:///{out}/mlflow.db"
    assert {row["name"]: row["value"] for row in calls(out, "param")} == {"lr": 0.1, "model": "resnet50", "seed": 3}
    logged = [metric for row in calls(out, "log") for metric in row["metrics"]]
    assert [(value, images) for name, value, images in logged if name == "accuracy/val_top1"] == [
        (30.0, 16),
        (40.0, 32),
    ]
    assert [images for name, _, images in logged if name == "loss/train"] == [16, 32, 48]
    looked_up = [row["name"] for row in calls(out, "history")]
    assert looked_up == ["loss/train", "accuracy/val_top1"], "a history is as long as the run"


def test_tracker_that_hangs_is_killed(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HANGS", "1")
    monkeypatch.setattr(tracker_process, "FINISH_SECONDS", 0.5)
    tracker = start("wandb", out)
    append(out, step(16))
    wait_for(lambda: calls(out, "init"))
    finish(tracker)
    assert tracker.process.poll() is not None and "wandb: it did not end in 0.5 s" in capfd.readouterr().out


def test_error_is_one_line_without_credentials_and_rows_are_kept_for_later(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS", "no route to https://me:s3cr3t@host/api\nTraceback")
    tracker = start("wandb", out)
    append(out, step(16))
    wait_for(lambda: (out / "tracker.log").exists())
    finish(tracker)
    line = "wandb: RuntimeError: no route to https://host/api Traceback; training goes on\n"
    assert capfd.readouterr().out == line


def test_tracker_that_is_not_installed_is_one_line(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker_process, "find_spec", lambda tracker: None)
    assert start_tracker("wandb", out, out, 1, {}) is None
    assert "not installed here; training goes on without it: pip install wandb\n" in capsys.readouterr().out


def test_tracker_dies_with_the_trainer(out: Path) -> None:
    """The pipe of their output is closed when both have ended."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom train.trackers.tracker_process import start_tracker\n"
        "start_tracker('wandb', Path(sys.argv[1]), Path(sys.argv[1]), 1, {})\ntime.sleep(1000)\n"
    )
    root = str(Path(tracker_process.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ["PYTHONPATH"]])}
    with subprocess.Popen([sys.executable, "-c", script, str(out)], stdout=subprocess.PIPE, env=environment) as trainer:
        wait_for(lambda: calls(out, "init"))
        trainer.kill()
        assert trainer.stdout
        trainer.stdout.read()


def test_trainer_logs_its_metrics_and_its_end(out: Path) -> None:
    """The same values as in its metrics, which are those of TensorBoard."""
    images = RandomImages(train=16, val=12)
    trainer = make_trainer(out, make_recipe(make_phase((0, 2), 8, 0.001)), images, plain=False)
    trainer.progress.options = replace(trainer.options, log="wandb")
    trainer.train(images, workers=0)  # type: ignore[arg-type]
    trainer.progress.wait_for_tracker()
    rows = [json.loads(line) for line in (out / "metrics/000001.jsonl").read_text().splitlines()]
    assert [row["step"] for row in calls(out, "log")] == [row["images"] for row in rows if row["kind"] != "start"]
    logged = [row["values"]["accuracy/val_top1"] for row in calls(out, "log") if "accuracy/val_top1" in row["values"]]
    assert logged == [epoch.top1 for epoch in trainer.history] and len(logged) == 2
    assert calls(out, "init")[0]["config"]["recipe"] == "rule" and calls(out, "finish")[0]["exit_code"] == 0
    losses = [row["scalars"]["loss/train"] for row in rows if row["kind"] == "train"]
    report = trainer.agent_channel.last_report
    assert report and report.loss == losses[-1], "the agent, and so `top`, gets the same"
