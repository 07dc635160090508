"""Accuracy, meters and the metrics log."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.train_records import make_epoch

from train.metrics.log_writer import MetricsLog
from train.metrics.meters import NetworkMeter, StepMeter
from train.metrics.records import StepRow, read_metrics_file

CPU = torch.device("cpu")


def test_step_meter_sums_losses_by_step_and_hits_by_interval() -> None:
    meter = StepMeter(CPU, 4)
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
    assert meter.losses.tolist() == [1.75, 4.0, 0, 0] and meter.correct.tolist() == [3, 3]
    meter.reset()
    assert (meter.steps, meter.losses.abs().sum(), meter.correct.abs().sum()) == (0, 0, 0)


def test_network_meter_counts_all_cards_but_the_loopback(
    clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(lo: int, eth: int, ib: int) -> str:
        rows = {"lo": lo, "eth0": eth, "ib0": ib}
        return (
            "head\nhead\n"
            + "\n".join(f"  {card}: {received} 1 2 3 4 5 6 7 {10 * received} 1 2" for card, received in rows.items())
            + "\n"
        )

    read_text = Path.read_text
    tables = iter([table(5, 1000, 2000), table(10**12, 2000 + 10**9, 3000)])

    def read_fake_table(path: Path, *arguments: Any) -> str:
        return next(tables) if str(path) == "/proc/net/dev" else read_text(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read_fake_table)
    network = NetworkMeter()
    clock.now += 2
    rates = network.rates()
    received = (10**9 + 2000) * 8 / 1e9 / 2
    assert rates == {"net/receive_gbit": pytest.approx(received), "net/send_gbit": pytest.approx(10 * received)}


SCALARS = {"sizes/lr": 0.5, "times/images_per_second": 7.0}


def test_metrics_log_writes_scalars_by_images_and_strict_json(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("x")] == [(100, 1.0), (200, 2.0)]
    assert [(point.step, point.value) for point in events.Scalars("accuracy/val_top1")] == [(300, 12.5)]


def test_metrics_log_later_attempt_keeps_points_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # File names end in a counter of the process and are read in alphabetical order, where 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    for attempt, start, points in ((1, 0, (50, 100, 150)), (2, 100, (120,))):
        log = MetricsLog(tmp_path, attempt, start, 10)
        for images in points:
            log.write_scalars(images, {"accuracy/val_top1": attempt})
        log.tensorboard.close()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("accuracy/val_top1")] == [(50, 1), (100, 1), (120, 2)]
