"""What a run measures of itself."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from train.metrics.accuracy import count_correct
from train.metrics.log_writer import MetricsLog
from train.metrics.meters import NetworkMeter, StepMeter

CPU = torch.device("cpu")


def test_hits_are_the_labels_that_come_first_and_among_the_first_five() -> None:
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4], [4, 5, 6, 7, 8, 9], [0, 1, 0, 0, 0, 0]])
    for labels, expected in (([0, 5, 1], (3, 3)), ([4, 1, 1], (1, 3)), ([5, 0, 1], (1, 1))):
        top1, top5 = count_correct(scores, torch.tensor(labels))
        assert (top1.item(), top5.item()) == expected
        assert top1.dtype == top5.dtype == torch.int64


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_with_fewer_than_five_classes_every_label_is_among_the_first_five(classes: int) -> None:
    scores = torch.eye(classes)
    top1, top5 = count_correct(scores, torch.arange(classes))
    assert (top1, top5) == (classes, classes)
    top1, top5 = count_correct(scores, torch.arange(classes).roll(1))
    assert (top1, top5) == (0 if classes > 1 else 1, classes)


def test_a_meter_sums_losses_by_step_and_hits_over_the_stretch() -> None:
    meter = StepMeter(CPU, 4)
    good, bad = torch.tensor([[9.0, 1, 2, 3, 4, 5, 6]]), torch.tensor([[1.0, 2, 3, 4, 5, 6, 9]])
    label = torch.tensor([0])
    meter.add(torch.tensor(1.5), good, label, 1.0)
    meter.add(torch.tensor(0.25), good, label, 1.0)  # a second chunk of the same step
    meter.end_step()
    meter.add(torch.tensor(3.0), bad, label, 1.0)
    meter.add(torch.tensor(0.0), good, label, 0.0)  # a filler
    meter.add(torch.tensor(1.0), good.repeat(2, 1), label.repeat(2), 0.5)  # one image twice
    meter.end_step()
    assert meter.steps == 2
    assert meter.losses.tolist() == [1.75, 4.0, 0, 0] and meter.correct.tolist() == [3, 3]
    meter.reset()
    assert (meter.steps, meter.losses.abs().sum(), meter.correct.abs().sum()) == (0, 0, 0)


def test_network_rates_are_the_bytes_of_all_cards_but_the_loopback(
    clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(lo: int, eth: int, ib: int) -> str:
        rows = {"lo": lo, "eth0": eth, "ib0": ib}
        return "head\nhead\n" + "\n".join(f"  {n}: {v} 1 2 3 4 5 6 7 {10 * v} 1 2" for n, v in rows.items()) + "\n"

    real, texts = Path.read_text, itertools.chain([table(5, 1000, 2000), table(10**12, 2000 + 10**9, 3000)])

    def read(path: Path, *how: Any) -> str:
        return next(texts) if str(path) == "/proc/net/dev" else real(path, *how)

    monkeypatch.setattr(Path, "read_text", read)
    network = NetworkMeter()
    clock.now += 2
    rates = network.rates()
    sent = (10**9 + 2000) * 8 / 1e9 / 2
    assert rates == {"net/receive_gbit": pytest.approx(sent), "net/send_gbit": pytest.approx(10 * sent)}


def test_a_machine_s_own_network_can_be_read() -> None:
    assert all(rate >= 0 for rate in NetworkMeter().rates().values())


def test_a_log_keeps_scalars_by_images_and_lines_of_strict_json(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, 3, 0, 100)
    for images in (100, 200):
        log.write_scalars(images, {"train/loss": images / 100, "sizes/lr": 0.5})
        log.write_line("train", step=images, loss=math.nan, top=[math.inf, 1])
    log.flush()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics" / "000003.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["attempt"], one["step"], one["loss"], one["top"]) for one in lines] == [
        ("train", 3, 100, None, [None, 1]), ("train", 3, 200, None, [None, 1])
    ]  # fmt: skip
    board = EventAccumulator(str(tmp_path / "events"))
    board.Reload()
    assert [(one.step, one.value) for one in board.Scalars("train/loss")] == [(100, 1.0), (200, 2.0)]


def test_a_later_attempt_hides_what_the_earlier_one_drew_beyond_its_start(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = MetricsLog(tmp_path, 1, 0, 100)
    for images in (100, 200, 300):
        first.write_scalars(images, {"x": 1.0})
    first.close()
    second = MetricsLog(tmp_path, 2, 200, 100)
    second.write_scalars(250, {"x": 2.0})
    second.close()
    board = EventAccumulator(str(tmp_path / "events"))
    board.Reload()
    assert [one.value for one in board.Scalars("x") if one.step > 200] == [2.0]
    assert {path.name for path in (tmp_path / "metrics").iterdir()} == {"000001.jsonl", "000002.jsonl"}


def test_an_attempt_hides_what_came_after_its_start_and_not_what_stands_there(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt, start, points in ((1, 0, (50, 100, 150)), (2, 100, (120,))):
        log = MetricsLog(tmp_path, attempt, start, 10)
        for images in points:
            log.write_scalars(images, {"val/top1": attempt})
        log.tensorboard.close()
    curves = EventAccumulator(str(tmp_path / "events"))
    curves.Reload()
    assert [(one.step, one.value) for one in curves.Scalars("val/top1")] == [(50, 1), (100, 1), (120, 2)]
