"""Evaluation: the accuracies of the run itself, on one and two processes; ratio buckets; one-line errors."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.known import known
from support.trainer_in_process import SINGLE_PROCESS, open_trainer

from train.data.index.open import load_index
from train.data.loading.dataset import open_val_indexes
from train.inference import evaluate as runner
from train.inference import protocol
from train.inference.protocol import CROP_VIEWS, EvalOptions, Evaluation, EvaluationRow
from train.inference.trained_network import open_trained
from train.recipe import Phase
from train.tools import checkpoint_io
from train.tools.agent_protocol import newest_intact_checkpoint
from train.tools.errors import TrainingError
from train.tools.records import decode, encode
from train.weights import network_description
from train.weights.safetensors_file import write_safetensors

PHASES = [Phase(epochs=(0, 2), size=32, batch=8, lr=0.05, min_scale=0.5, rect_val=True)]


@pytest.fixture(scope="module")
def finished_run(runs: Any, tiny: Any) -> Path:
    out: Path = runs.folder / "evaluated"
    runs.run(out, "--gpus", "2", world=2, recipe=runs.recipe(tiny(name="evaluated", phases=PHASES)))
    return out


@pytest.fixture(scope="module")
def checkpoint(finished_run: Path) -> Path:
    return known(newest_intact_checkpoint(finished_run / "checkpoints" / "000001"))


def eval_options(checkpoint: Path | str = "x.pt", **options: Any) -> EvalOptions:
    return EvalOptions(checkpoint=str(checkpoint), workers=0, **options)


def result_in(output: str) -> Evaluation:
    """Return the last message of the process, without what only comes when the evaluation takes long."""
    return decode(Evaluation, json.loads(output.splitlines()[-1])["evaluation"])


@pytest.fixture
def evaluate(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that evaluates in this process, without importing torch again."""
    monkeypatch.setattr(runner, "disable_malloc_trim", lambda: None)

    def evaluate_in_process(checkpoint: Path, **options: Any) -> Evaluation:
        runner.evaluate_checkpoint(eval_options(checkpoint, **options))
        return result_in(capsys.readouterr().out)

    return evaluate_in_process


@pytest.fixture(scope="module")
def evaluation(checkpoint: Path, tiny_data: Path, runs: Any) -> Evaluation:
    """An evaluation by all crops at two sizes, in two processes that its launcher starts."""
    options = eval_options(
        checkpoint, data=str(tiny_data), crops=tuple(CROP_VIEWS), sizes=(32, 64), procs=2, with_examples=True
    )
    text = json.dumps(encode(options))
    code, out, err = runs.run_module("train.inference", "evaluate", text)
    assert code == 0 and "Traceback" not in err, err[-3000:] + out[-500:]
    return result_in(out)


def row_of(evaluation: Evaluation, crop: str, size: int = 32) -> EvaluationRow:
    (row,) = [row for row in evaluation.rows if (row.crop, row.size) == (crop, size)]
    return row


def test_evaluation_matches_the_runs_own_validation(evaluation: Evaluation, finished_run: Path) -> None:
    last_epoch = json.loads((finished_run / "result.json").read_text())["epochs"][-1]
    for crop, ending in (("rect", ""), ("center", "_square")):
        row = row_of(evaluation, crop)
        assert (row.top1, row.top5) == (last_epoch[f"top1{ending}"], last_epoch[f"top5{ending}"])
    assert row_of(evaluation, "rect").loss == pytest.approx(last_epoch["val_loss"], rel=1e-5)


def test_rows_of_buckets_and_classes_add_up_and_examples_have_an_answer_for_each_crop(
    evaluation: Evaluation, checkpoint: Path, tiny_data: Path
) -> None:
    assert (evaluation.procs, evaluation.epoch, evaluation.images) == (2, 2, 20)
    assert evaluation.step == int(checkpoint.stem.removeprefix("step-")) > 0
    assert [(row.crop, row.size) for row in evaluation.rows] == [
        (crop, size) for crop in CROP_VIEWS for size in (32, 64)
    ]
    classes = load_index(tiny_data, "val").classes
    for row in evaluation.rows:
        assert row.seconds > 0 and row.views == {"five": 5, "tta": 10}.get(row.crop, 1)
        assert sum(bucket.images for bucket in row.buckets) == 20 and 1 < len(row.buckets) <= 6
        bounds = [bound for bucket in row.buckets for bound in (bucket.lowest, bucket.highest)]
        assert bounds == sorted(bounds)
        for name in ("top1", "top5"):
            hits = sum(bucket.images * getattr(bucket, name) for bucket in row.buckets)
            assert hits / 20 == pytest.approx(getattr(row, name))
        assert row.confusion and row.confusion.classes == classes and sum(row.confusion.images) == 20
        assert 100 * sum(row.confusion.right) / 20 == pytest.approx(row.top1)
    assert len(evaluation.examples) == 6
    for image in evaluation.examples:
        assert image.true in classes and image.jpeg.startswith(b"\xff\xd8")
        assert [(answer.crop, len(answer.boxes)) for answer in image.answers] == [
            ("center", 1), ("rect", 1), ("five", 5), ("tta", 5)
        ]  # fmt: skip
        assert all(answer.predicted in classes and 0 < answer.percent <= 100 for answer in image.answers)


EQUAL_RATIOS = [(500, 375), (640, 480), (4, 3), (500, 376)]  # 500 / 376 is shown as 1.33 too
TALL = [(375, 500 + 9 * number) for number in range(20)]
WIDE = [(900 + 9 * number, 500) for number in range(20)]


@pytest.mark.parametrize(("sizes", "counts"), [
    ([(width, 100) for width in range(80, 50, -1)], [5] * 6),
    ([*TALL, *EQUAL_RATIOS * 15, *WIDE], [17, 3, 63, 17]),
    ([(300, 400)] * 50, [50]),
])  # fmt: skip
def test_ratio_buckets_are_of_similar_size_and_keep_equal_ratios_together(
    sizes: list[tuple[int, int]], counts: list[int]
) -> None:
    widths, heights = np.array(sizes).T
    index: Any = SimpleNamespace(widths=widths, heights=heights)
    buckets = runner.ratio_buckets(index)
    assert [len(ids) for ids in buckets] == counts
    ratios = (widths / heights)[np.concatenate(buckets)]
    assert ratios.tolist() == sorted(widths / heights)


def test_evaluation_same_on_one_and_two_processes(
    evaluation: Evaluation, checkpoint: Path, tiny_data: Path, evaluate: Any
) -> None:
    options = {"data": str(tiny_data), "crops": ("tta", "rect"), "sizes": (64, 32)}
    result = evaluate(checkpoint, **options)
    assert result.procs == 1 and len(result.rows) == 4
    for row in result.rows:
        expected = row_of(evaluation, row.crop, row.size)
        assert (row.top1, row.top5, row.buckets) == (expected.top1, expected.top5, expected.buckets)
        assert row.loss == pytest.approx(expected.loss, rel=1e-5)


def save_changed(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    """Write a copy of a checkpoint with changed entries into a folder; return its path."""
    folder.mkdir(exist_ok=True)
    checkpoint_io.write_checkpoint(folder, 7, {**checkpoint_io.load_checkpoint(checkpoint), **changes})
    return folder / "step-00000007.pt"


def test_evaluation_on_as_many_other_classes_is_one_line(
    checkpoint: Path, tiny_data: Path, tmp_path: Path, evaluate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels follow the order of the names: of other names, such as ImageNetV2's, every answer would be wrong."""
    shutil.copytree(tiny_data, tmp_path / "renamed")
    name = load_index(tiny_data, "val").classes[0]
    for split in ("train", "val"):
        (tmp_path / "renamed" / split / name).rename(tmp_path / "renamed" / split / "zebra")
    for looks_the_same, form in ((False, ""), (True, r" in this Unicode form \(NFC, NFD\)")):

        def has_other_form(missing: str, names: Sequence[str], answer: bool = looks_the_same) -> bool:
            return answer and missing == name and "zebra" in names

        monkeypatch.setattr(runner, "has_other_unicode_form", has_other_form)
        with pytest.raises(TrainingError, match=f"renamed has 10, without '{name}'{form}; name a data set with"):
            evaluate(checkpoint, data=str(tmp_path / "renamed"))


def test_evaluation_nan_weights_are_an_error(checkpoint: Path, tiny_data: Path, tmp_path: Path, evaluate: Any) -> None:
    model = checkpoint_io.load_checkpoint(checkpoint)["model"]
    model["fc.weight"].fill_(torch.nan)
    path = save_changed(checkpoint, tmp_path, model=model)
    with pytest.raises(TrainingError, match="center at 32 pixels: the loss is nan"):
        evaluate(path, data=str(tiny_data), crops=("center",))


def test_open_trained_names_an_unusable_file(
    finished_run: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_description, "MAX_CLASSES", 20)
    (tmp_path / "cut.pt").write_bytes(checkpoint.read_bytes()[:-1])
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "cut.safetensors").write_bytes((finished_run / "network/model.safetensors").read_bytes()[:-1])
    write_safetensors(tmp_path / "foreign.safetensors", {"a": torch.zeros(1)}, {})
    identity = checkpoint_io.load_checkpoint(checkpoint)["identity"]
    other = {"recipe": {**identity["recipe"], "model": {**identity["recipe"]["model"], "name": "resnet18"}}}
    old = save_changed(checkpoint, tmp_path / "old", identity={"recipe": {"a": 1}})
    network = checkpoint_io.load_checkpoint(checkpoint)["network"]
    crowded = save_changed(checkpoint, tmp_path / "crowded", network={**network, "classes": ["x"] * 21})
    weights = checkpoint_io.load_checkpoint(checkpoint)["model"]
    claims = {  # tensors that a few bytes of a file may hold
        kind: save_changed(checkpoint, tmp_path / kind, model={**weights, "conv1.weight": tensor})
        for kind, tensor in (("repeated", torch.zeros(1).expand(1 << 40)), ("sparse", torch.zeros(9).to_sparse()))
    }
    for path, reason in (
        (tmp_path / "nowhere.pt", "no such checkpoint"),
        (tmp_path, "is a folder"),
        (tmp_path / "cut.pt", "is damaged or cut short"),
        (tmp_path / "text.pt", "is not a checkpoint of this program"),
        (tmp_path / "cut.safetensors", "is cut short, or is no safetensors file"),
        (tmp_path / "foreign.safetensors", "describe no network of this program"),
        (old, "was written by another version of imgnet-cluster"),
        (crowded, "it has 21 classes, at most 20 can be"),
        (claims["repeated"], "no tensor with values of its own"),
        (claims["sparse"], "no tensor with values of its own"),
        (save_changed(checkpoint, tmp_path / "other", identity=other), "its weights do not fit resnet18"),
    ):
        with pytest.raises(TrainingError, match=reason) as caught:
            open_trained(path).build()
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


class FixedSizeNet(torch.nn.Module):
    """A network that accepts 32 pixels only."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ torch.ones(3 * 32 * 32, 10)


@pytest.mark.parametrize("precision, used", [("auto", "auto"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "auto")])
def test_evaluation_computes_in_the_precision_of_the_training(
    precision: str, used: str, tiny: Any, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, top-1 in bfloat16 is not that of the run's own validation in float32."""
    trainer, _ = open_trainer(tiny(phases=PHASES, precision=precision), tiny_data, tmp_path)
    checkpoint_io.write_checkpoint(tmp_path, 0, trainer.state())
    recipe = open_trained(tmp_path / "step-00000000.pt").recipe
    given: dict[str, Any] = {}
    monkeypatch.setattr(runner, "BatchPreprocessor", lambda _, **named: given.update(named))
    runner.Evaluator(
        eval_options(), recipe, SINGLE_PROCESS, FixedSizeNet(), open_val_indexes(recipe, tiny_data, tiny_data), 0
    )
    assert given["precision"] == used


def test_evaluation_size_that_the_network_rejects_is_one_line(tiny: Any, tiny_data: Path) -> None:
    options, recipe = eval_options(crops=("center",), sizes=(64,)), tiny(phases=PHASES)
    indexes = open_val_indexes(recipe, tiny_data, tiny_data)
    with pytest.raises(TrainingError, match="center at 64 pixels: resnet10_tiny fails: ") as caught:
        runner.Evaluator(options, recipe, SINGLE_PROCESS, FixedSizeNet(), indexes, 0).run()
    assert "\n" not in str(caught.value)


def test_copy_for_uses_the_runs_copy_if_large_enough(tiny: Any, tiny_data: Path) -> None:
    recipe = tiny(phases=[Phase(epochs=(0, 1), size=64, batch=8, lr=0.1, copy=80)])
    indexes = open_val_indexes(recipe, tiny_data, tiny_data.parent)  # its folder 80 is the data set itself
    assert set(indexes) == {("val", None), ("val", 80)}
    evaluator = runner.Evaluator(eval_options(), recipe, SINGLE_PROCESS, FixedSizeNet(), indexes, 0)
    copies = [evaluator.copy_for(size) for size in (32, 64, 71, 72, 128)]
    assert copies == [80, 80, 80, None, None]  # int(1.14 * 71) is 80
    assert set(open_val_indexes(recipe, tiny_data, Path("nowhere"))) == {("val", None)}
    assert len(open_val_indexes(recipe, tiny_data, Path("nowhere"), scale=0.1)["val", None]) == 2


def test_reserve_stdout_redirects_other_output_to_stderr(capsys: Any) -> None:
    @protocol.reserve_stdout()
    def print_both() -> None:
        print("hello", end="")
        protocol.emit_json_line({"kind": "row", "top1": 1.0})

    print_both()
    print("after")
    captured = capsys.readouterr()
    assert captured.out == '{"kind": "row", "top1": 1.0}\nafter\n' and captured.err == "hello"
