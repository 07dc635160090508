"""Meters, numbers of intervals, epochs and runs, the metrics log, the settings in TensorBoard, confusion matrices."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.train_records import make_epoch
from support.trainer_in_process import make_phase, make_recipe

from train.engine.progress import MetricsLog
from train.metrics import hparams, meters
from train.metrics.confusion import ConfusedPair, Confusion
from train.metrics.records import StepRow, read_metrics_file
from train.recipe.schedule import Schedule
from train.tools.records import DamagedRecord, decode, encode


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_step_meter_sums_losses_and_hits_by_step() -> None:
    meter = meters.StepMeter(torch.device("cpu"), 4)
    correct = torch.tensor([[9.0, 1, 2, 3, 4, 5, 6]])
    wrong = torch.tensor([[1.0, 2, 3, 4, 5, 6, 9]])
    label = torch.tensor([0])
    meter.add(torch.tensor(1.5), correct, label, 1.0)
    meter.add(torch.tensor(0.25), correct, label, 1.0)  # a second chunk of the same step
    meter.end_step()
    meter.add(torch.tensor(3.0), wrong, label, 1.0)
    meter.add(torch.tensor(0.0), correct, label, 0.0)  # a chunk that only fills the step
    meter.add(
        torch.tensor(1.0), correct.repeat(2, 1), label.repeat(2), 0.5
    )  # one image, repeated to fill a chunk of two
    meter.end_step()
    assert meter.steps == 2
    assert meter.losses.tolist() == [1.75, 4.0, 0, 0]
    assert meter.correct.tolist() == [[2, 2], [1, 1], [0, 0], [0, 0]]
    meter.reset()
    assert (meter.steps, meter.losses.abs().sum(), meter.correct.abs().sum()) == (0, 0, 0)


SCALARS = {"sizes/lr": 0.5, "times/images_per_second": 7.0}


def test_metrics_log_writes_scalars_by_images_and_strict_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 3, 0, 100)
    for images in (100, 200):
        log.write_scalars(images, {"x": images / 100, "sizes/lr": 0.5})
        log.write_interval(images, images, 1, {**SCALARS, "loss/train": math.nan, "accuracy/train_top1": math.inf})
    log.write_epoch(200, 300, make_epoch(top1=12.5))
    log.close()
    *lines, epoch = map(json.loads, (tmp_path / "metrics" / "000003.jsonl").read_text().splitlines())
    assert (epoch["kind"], epoch["images"], epoch["top1"]) == ("epoch", 300, 12.5)
    expected = {**SCALARS, "loss/train": None, "accuracy/train_top1": None}
    assert [(line["kind"], line["attempt"], line["step"], line["scalars"]) for line in lines] == [
        ("train", 3, 100, expected), ("train", 3, 200, expected)
    ]  # fmt: skip
    assert [row.images for row in read_metrics_file(tmp_path / "metrics" / "000003.jsonl", StepRow)] == [100, 200]

    events = read_events(tmp_path / "events")
    assert [(point.step, point.value) for point in events.Scalars("x")] == [(100, 1.0), (200, 2.0)]
    assert [(point.step, point.value) for point in events.Scalars("accuracy/val_top1")] == [(300, 12.5)]


def test_metrics_log_later_attempt_keeps_points_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer import event_file_writer

    # File names end in a counter of the process and are read in alphabetical order, where 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    for attempt, start, points in ((1, 0, (50, 100, 150)), (2, 100, (120,))):
        log = MetricsLog(tmp_path, attempt, start, 10)
        for images in points:
            log.write_scalars(images, {"accuracy/val_top1": attempt})
        log.tensorboard.close()
    points = read_events(tmp_path / "events").Scalars("accuracy/val_top1")
    assert [(point.step, point.value) for point in points] == [(50, 1), (100, 1), (120, 2)]


def test_flat_settings_has_the_highest_rate_and_what_sweeps_vary() -> None:
    optim: dict[str, Any] = {"momentum": 0.8, "nesterov": True, "weight_decay": 5e-5, "label_smoothing": 0.1}
    phases = (
        make_phase((0, 2), 64, (0.1, 0.4)),
        make_phase((2, 6), 128, (0.4, 0.2), size=64),
        make_phase((6, 8), 96, (0.2, 0.0)),
    )
    assert hparams.flat_settings(Schedule(make_recipe(*phases, gpus=2, seed=7, **optim), 6400, 2), 3) == {
        "recipe": "rule", "model": "resnet10_tiny", "lr": pytest.approx(0.4), "warmup_epochs": 2, "epochs": 8,
        "batch_first": 128, "batch_largest": 256, "size_largest": 64, "optimizer": "sgd", "loss": "cross_entropy",
        "momentum": 0.8, "weight_decay": 5e-5,
        "nesterov": 1, "label_smoothing": 0.1, "seed": 7, "world": 3,
    }  # fmt: skip


def test_from_counts_keeps_every_error_and_names_the_worst() -> None:
    counts = np.array([[8, 2, 0, 0], [1, 5, 0, 4], [0, 0, 0, 0], [0, 0, 1, 9]])
    confusion = Confusion.from_counts(("cat", "dog", "fox", "wolf"), counts)
    pairs = ((1, 3, 4), (0, 1, 2), (1, 0, 1), (3, 2, 1))
    expected = Confusion(classes=("cat", "dog", "fox", "wolf"), images=(10, 10, 0, 10), right=(8, 5, 0, 9), pairs=pairs)
    assert confusion == expected == decode(Confusion, encode(confusion))
    worst_classes = [(row.name, row.top1) for row in confusion.worst_classes(5)]
    assert worst_classes == [("dog", 50.0), ("cat", 80.0), ("wolf", 90.0)]
    assert confusion.most_confused(1) == [ConfusedPair(true="dog", predicted="wolf", images=4, share=40.0)]
    assert confusion.confused_labels(2) == [1, 3, 0]


@pytest.mark.parametrize("changes", [
    {"images": [1]}, {"right": []}, {"pairs": [[0, 9, 1]]}, {"pairs": [[-1, 0, 1]]}, {"pairs": [[0, 1]]},
    {"classes": ["a" * 1001, "b"]},
])  # fmt: skip
def test_damaged_confusion_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DamagedRecord):
        decode(Confusion, {**encode(Confusion.from_counts(("a", "b"), np.diag([3, 4]))), **changes})
