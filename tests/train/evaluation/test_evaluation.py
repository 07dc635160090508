"""Evaluation: the accuracies of the run itself, on one and two processes; ratio buckets; one-line errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from train.data.index.open import DataError, load_index
from train.data.loading.dataset import open_val_indexes
from train.distributed.process_group import ProcessGroup
from train.evaluation import __main__, protocol, ratio_buckets, runner
from train.evaluation.protocol import CROPS, parse_crops, parse_sizes
from train.evaluation.trained_network import open_trained
from train.metrics.confusion import Confusion
from train.recipe import Model, Phase
from train.tools import checkpoint_io
from train.tools.errors import TrainingError
from train.tools.records import decode

PHASES = [Phase(epochs=(0, 2), size=32, batch=8, lr=0.05, min_scale=0.5, rect_val=True)]


@pytest.fixture(scope="module")
def finished_run(runs: Any, tiny: Any) -> Path:
    """Folder of a finished run of two processes and two epochs."""
    out: Path = runs.folder / "evaluated"
    runs.run(out, "--gpus", "2", world=2, recipe=runs.recipe(tiny(name="evaluated", phases=PHASES)))
    return out


def newest_checkpoint(out: Path) -> Path:
    path = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
    assert path is not None
    return path


def without_progress(output: str) -> list[dict[str, Any]]:
    """Return the events without those that only come when the evaluation takes long."""
    events = [json.loads(line) for line in output.splitlines()]
    return [event for event in events if event["kind"] != "progress"]


@pytest.fixture
def evaluate(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that evaluates in this process, without importing torch again, and returns the events."""
    monkeypatch.setattr(runner, "disable_malloc_trim", lambda: None)

    def evaluate_in_process(*arguments: Any) -> list[dict[str, Any]]:
        runner.evaluate_checkpoint(
            __main__.parse_eval_options([str(argument) for argument in (*arguments, "--workers", "0")])
        )
        return without_progress(capsys.readouterr().out)

    return evaluate_in_process


@pytest.fixture(scope="module")
def events(finished_run: Path, tiny_data: Path, runs: Any) -> list[dict[str, Any]]:
    """Events of an evaluation by all crops at two sizes, in two processes that its launcher starts."""
    process = runs.start_module(
        "train.evaluation",
        newest_checkpoint(finished_run),
        "--data",
        tiny_data,
        "--crops",
        ",".join(CROPS),
        "--sizes",
        "32,64",
        "--procs",
        "2",
        "--workers",
        "0",
        "--shown",
        "3",
        environment={},
        out=runs.folder / "evaluation",
    )
    code, out, err = process.result()
    assert code == 0 and "Traceback" not in err, err[-3000:] + out[-500:]
    return without_progress(out)


def row_of(events: list[dict[str, Any]], crop: str, size: int = 32) -> dict[str, Any]:
    (row,) = [event for event in events if event["kind"] == "row" and (event["crop"], event["size"]) == (crop, size)]
    return row


def test_evaluation_matches_the_runs_own_validation(events: list[dict[str, Any]], finished_run: Path) -> None:
    last_epoch = json.loads((finished_run / "result.json").read_text())["epochs"][-1]
    for crop, ending in (("rect", ""), ("center", "_square")):
        row = row_of(events, crop)
        assert (row["top1"], row["top5"]) == (last_epoch[f"top1{ending}"], last_epoch[f"top5{ending}"])
    assert row_of(events, "rect")["loss"] == pytest.approx(last_epoch["val_loss"], rel=1e-5)


def test_evaluation_row_per_crop_and_size_counts_each_image_once(
    events: list[dict[str, Any]], finished_run: Path
) -> None:
    begin, *rows, seen = events
    assert (begin["kind"], seen["kind"], begin["procs"], begin["epoch"], begin["images"]) == ("begin", "seen", 2, 2, 20)
    assert begin["step"] == int(newest_checkpoint(finished_run).stem.removeprefix("step-")) > 0
    assert [(item["crop"], item["size"]) for item in rows] == [(crop, size) for crop in CROPS for size in (32, 64)]
    counts = [item["images"] for item in begin["buckets"]]
    assert sum(counts) == 20 and 1 < len(counts) <= 6
    bounds = [item[bound] for item in begin["buckets"] for bound in ("from", "ratio", "to")]
    assert bounds == sorted(bounds)
    for item in rows:
        bucket_rows = zip(counts, item["buckets"], strict=True)
        assert sum(count * bucket["top1"] / 100 for count, bucket in bucket_rows) == pytest.approx(
            20 * item["top1"] / 100
        )
        assert item["seconds"] > 0 and item["views"] == {"five": 5, "tta": 10}.get(item["crop"], 1)


def ratio_buckets_of(*ratios: tuple[int, int]) -> ratio_buckets.AspectRatioBuckets:
    """Return the buckets of images of these widths and heights."""
    widths, heights = np.array(ratios).T
    return ratio_buckets.AspectRatioBuckets(type("Sizes", (), {"widths": widths, "heights": heights})())


def test_ratio_buckets_distinct_ratios_fill_six_equal_buckets() -> None:
    buckets = ratio_buckets_of(*((width, 100) for width in range(80, 50, -1)))
    assert [bucket["images"] for bucket in buckets.summaries] == [5] * 6 and buckets.bucket_of_image.tolist() == sorted(
        buckets.bucket_of_image, reverse=True
    )
    assert (buckets.summaries[0]["from"], buckets.summaries[0]["to"], buckets.summaries[-1]["to"]) == (0.51, 0.55, 0.8)
    assert buckets.summaries[0]["ratio"] == pytest.approx(0.53)


def test_ratio_buckets_equal_ratios_share_a_bucket() -> None:
    equal_ratios = [(500, 375), (640, 480), (4, 3), (500, 376)]  # 500 / 376 is shown as 1.33 too
    mixed = [
        *equal_ratios * 15,
        *((375, 500 + 9 * item) for item in range(20)),
        *((900 + 9 * item, 500) for item in range(20)),
    ]
    buckets = ratio_buckets_of(*mixed)
    assert len({*buckets.bucket_of_image[:60]}) == 1
    assert sum(item["images"] for item in buckets.summaries) == 100 and 3 <= len(buckets.summaries) <= 6
    assert [item["images"] for item in buckets.summaries if item["from"] < 1.34 and item["to"] > 1.32] == [60]
    assert all(
        item["to"] < next_bucket["from"]
        for item, next_bucket in zip(buckets.summaries, buckets.summaries[1:], strict=False)
    )


@pytest.mark.parametrize("images", [1, 2, 50])
def test_ratio_buckets_one_ratio_is_one_bucket(images: int) -> None:
    buckets = ratio_buckets_of(*[(300, 400)] * images)
    assert buckets.summaries == [{"ratio": 0.75, "from": 0.75, "to": 0.75, "images": images}] and set(
        buckets.bucket_of_image
    ) == {0}


def test_evaluation_by_class_adds_up_to_the_accuracy(events: list[dict[str, Any]], tiny_data: Path) -> None:
    classes = load_index(tiny_data, "val").classes
    for row in [event for event in events if event["kind"] == "row"]:
        confusion = decode(Confusion, row["confusion"])
        assert confusion.classes == classes and sum(confusion.images) == 20
        assert 100 * sum(confusion.right) / 20 == pytest.approx(row["top1"])
        assert sum(images for _, _, images in confusion.pairs) == 20 - sum(confusion.right)


def test_evaluation_of_the_weights_that_a_run_leaves(
    finished_run: Path, tiny_data: Path, evaluate: Any, events: list[dict[str, Any]]
) -> None:
    arguments = ("--data", tiny_data, "--crops", "rect", "--sizes", "32", "--shown", "0")
    begin, row = evaluate(finished_run / "network" / "model.safetensors", *arguments)
    assert (begin["epoch"], begin["step"]) == (events[0]["epoch"], events[0]["step"])
    assert (row["top1"], row["confusion"]) == (row_of(events, "rect")["top1"], row_of(events, "rect")["confusion"])


def test_evaluation_refuses_another_network_than_the_named_one(finished_run: Path, evaluate: Any) -> None:
    with pytest.raises(TrainingError, match="is of the network resnet10_tiny, not resnet18"):
        evaluate(newest_checkpoint(finished_run), "--model", "resnet18")


def test_evaluation_same_on_one_and_two_processes(
    events: list[dict[str, Any]], finished_run: Path, tiny_data: Path, evaluate: Any
) -> None:
    arguments = ("--data", tiny_data, "--crops", "tta,rect", "--sizes", "64,32", "--shown", "0")
    single_events = evaluate(newest_checkpoint(finished_run), *arguments)
    assert single_events[-1]["kind"] == "row" and len(single_events) == 5 and single_events[0]["procs"] == 1
    for row in single_events[1:]:
        expected = row_of(events, row["crop"], row["size"])
        assert (row["top1"], row["top5"]) == (expected["top1"], expected["top5"])
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["buckets"] == expected["buckets"]


def test_evaluation_examples_have_a_prediction_per_crop(events: list[dict[str, Any]], tiny_data: Path) -> None:
    index = load_index(tiny_data, "val")
    assert events[-1]["size"] == 32 and len(events[-1]["images"]) == 3
    for image in events[-1]["images"]:
        assert image["name"] in index.names() and image["name"].startswith(image["class"])
        assert [answer["crop"] for answer in image["answers"]] == list(CROPS)
        for answer in image["answers"]:
            assert answer["right"] == (answer["class"] == image["class"]) and 0 < answer["percent"] <= 100
            assert len(answer["boxes"]) == (5 if answer["crop"] in ("five", "tta") else 1)


def test_evaluation_default_size_is_the_last_phases(finished_run: Path, tiny_data: Path, evaluate: Any) -> None:
    events = evaluate(newest_checkpoint(finished_run), "--data", tiny_data, "--crops", "center", "--shown", "0")
    assert [event["size"] for event in events[1:]] == [32]


def save_changed(finished_run: Path, tmp_path: Path, **changes: Any) -> Path:
    """Write a copy of the run's checkpoint with changed entries; return its path."""
    checkpoint_io.write_checkpoint(
        tmp_path, 7, {**checkpoint_io.load_checkpoint(newest_checkpoint(finished_run)), **changes}
    )
    return tmp_path / "step-00000007.pt"


def test_evaluation_other_number_of_classes_is_one_line(
    finished_run: Path, tiny_data: Path, tmp_path: Path, runs: Any
) -> None:
    for split in ("train", "val"):
        for folder in sorted((tiny_data / split).iterdir())[:4]:
            if folder.is_dir():
                shutil.copytree(folder, tmp_path / "few" / split / folder.name)
    ranks = runs.start_module_ranks(
        2, "train.evaluation", newest_checkpoint(finished_run), "--data", tmp_path / "few", out=tmp_path / "rank"
    )
    (code, out, err), (_, _, other_err) = [rank.result() for rank in ranks]
    assert code == 1 and "Traceback" not in err + other_err, err + other_err
    error = without_progress(out)[0]
    assert error["kind"] == "error"
    assert "was trained on 10 classes" in error["error"] and "few has 4; name a data set" in error["error"]


def test_evaluation_nan_weights_are_an_error(
    finished_run: Path, tiny_data: Path, tmp_path: Path, evaluate: Any
) -> None:
    model = checkpoint_io.load_checkpoint(newest_checkpoint(finished_run))["model"]
    path = save_changed(
        finished_run, tmp_path, model={**model, "fc.weight": torch.full_like(model["fc.weight"], torch.nan)}
    )
    with pytest.raises(TrainingError, match="center at 32 pixels: the loss is nan"):
        evaluate(path, "--data", tiny_data, "--crops", "center", "--sizes", "32", "--shown", "0")


def bad_checkpoints(finished_run: Path, tmp_path: Path) -> dict[str, Path]:
    intact = newest_checkpoint(finished_run).read_bytes()
    (tmp_path / "cut.pt").write_bytes(intact[:-1])
    (tmp_path / "text.pt").write_text("hello")
    identity = checkpoint_io.load_checkpoint(newest_checkpoint(finished_run))["identity"]
    recipe = {**identity["recipe"], "model": {**identity["recipe"]["model"], "name": "resnet18"}}
    return {
        "no such checkpoint": tmp_path / "nowhere.pt",
        "is a folder": tmp_path,
        "is damaged or cut short": tmp_path / "cut.pt",
        "is not a checkpoint of this program": tmp_path / "text.pt",
        "was written by another version of imgnet-cluster": save_changed(
            finished_run, tmp_path / "old", identity={"recipe": {"a": 1}}
        ),
        "its weights do not fit resnet18": save_changed(
            finished_run, tmp_path / "other", identity={**identity, "recipe": recipe}
        ),
    }


def test_open_trained_names_an_unusable_file(finished_run: Path, tmp_path: Path) -> None:
    for name in ("old", "other"):
        (tmp_path / name).mkdir()
    for reason, path in bad_checkpoints(finished_run, tmp_path).items():
        with pytest.raises(TrainingError, match=reason) as caught:
            open_trained(path).build()
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_evaluation_missing_data_is_one_line(finished_run: Path, tmp_path: Path, evaluate: Any) -> None:
    with pytest.raises(DataError, match="nowhere: there is no such data folder"):
        evaluate(newest_checkpoint(finished_run), "--data", tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "middle", "center,,rect"])
def test_parse_crops_unknown_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--crops: .* is unknown; choose from center, rect, five, tta"):
        parse_crops(text)


@pytest.mark.parametrize("text", ["", "15", "224,x", "-32", "22.4", "224256", "9999999999999"])
def test_parse_sizes_bad_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--sizes: must be whole numbers from 16 to 4096"):
        parse_sizes(text)


def test_parse_crops_and_sizes_keep_order_without_duplicates() -> None:
    assert parse_crops("rect, center,rect") == ("rect", "center") and parse_sizes("288,224,288") == (288, 224)


def test_parse_eval_options_wrong_usage_exits_with_2(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.parse_eval_options(["x.pt", "--sizes", "3"])
    assert "must be whole numbers" in capsys.readouterr().err


class FixedSizeNet(torch.nn.Module):
    """A network that accepts 32 pixels only."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ torch.ones(3 * 32 * 32, 10)


def test_evaluation_size_that_the_network_rejects_is_one_line(tiny: Any, tiny_data: Path) -> None:
    options = __main__.parse_eval_options(["x.pt", "--crops", "center", "--sizes", "64", "--workers", "0"])
    recipe = tiny(phases=PHASES, model=Model(name="resnet10_tiny"))
    indexes = open_val_indexes(recipe, tiny_data, tiny_data)
    group = ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
    with pytest.raises(TrainingError, match="center at 64 pixels: resnet10_tiny fails: ") as caught:
        runner.Evaluation(options, recipe, group, FixedSizeNet(), indexes, 0).run()
    assert "\n" not in str(caught.value)


def test_copy_for_uses_the_runs_copy_if_large_enough(tiny: Any, tiny_data: Path) -> None:
    options = __main__.parse_eval_options(["x.pt"])
    recipe = tiny(phases=[Phase(epochs=(0, 1), size=64, batch=8, lr=0.1, copy=80)])
    indexes = open_val_indexes(recipe, tiny_data, tiny_data.parent)  # its folder 80 is the data set itself
    assert set(indexes) == {("val", None), ("val", 80)}
    group = ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
    evaluation = runner.Evaluation(options, recipe, group, FixedSizeNet(), indexes, 0)
    assert [evaluation.copy_for(size) for size in (32, 64, 71, 72, 128)] == [
        80,
        80,
        80,
        None,
        None,
    ]  # int(1.14 * 71) is 80
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


def test_progress_is_a_message_for_each_percent(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command shows it as a bar."""
    monkeypatch.setattr(protocol, "PROGRESS_SECONDS", -1.0)
    for is_first in (False, True):
        report = protocol.progress_reporter(is_first)
        for done in (100, 101, 200):
            report("five at 96", done, 10_000)
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(message["what"], message["done"], message["total"]) for message in messages] == [
        ("five at 96", 100, 10_000),
        ("five at 96", 200, 10_000),
    ]
