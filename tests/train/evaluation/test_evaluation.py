"""Examinations as a process: the numbers of the run itself, on one and two processes, and errors in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from train.data.index.open import DataError, load_index
from train.evaluation import __main__, protocol, ratio_buckets, runner
from train.evaluation.protocol import CROPS, parse_crops, parse_sizes
from train.recipe import Model, Phase
from train.tools import checkpoint_io

ROWS = [Phase(epochs=(0, 2), size=32, batch=8, lr=0.05, min_scale=0.5, rect_val=True)]


@pytest.fixture(scope="module")
def trained(runs: Any, tiny: Any) -> Path:
    """The run's folder, of two processes and two epochs."""
    out: Path = runs.folder / "examined"
    runs.run(out, "--gpus", "2", world=2, recipe=runs.recipe(tiny(name="examined", phases=ROWS)))
    return out


def newest(out: Path) -> Path:
    path = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
    assert path is not None
    return path


def run(*words: Any, code: int = 0) -> list[dict[str, Any]]:
    """Examine as a person does; what was told."""
    clean = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ran = subprocess.run(
        [sys.executable, "-m", "train.evaluation.__main__", *map(str, words)], capture_output=True, text=True, timeout=120,
        env={**clean, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    assert ran.returncode == code, ran.stderr[-3000:] + ran.stdout[-500:]
    assert "Traceback" not in ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture
def here(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Examine in this process, without the seconds of an import; what was told."""
    monkeypatch.setattr(runner, "disable_malloc_trim", lambda: None)
    threads = torch.get_num_threads()

    def call(*words: Any) -> list[dict[str, Any]]:
        runner.evaluate_checkpoint(__main__.parse_eval_options([str(one) for one in (*words, "--workers", "0")]))
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    yield call
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def told(trained: Path, tiny_data: Path) -> list[dict[str, Any]]:
    """All crops at two sizes, by two processes."""
    return run(newest(trained), "--data", tiny_data, "--crops", ",".join(CROPS), "--sizes", "32,64", "--procs", "2",
               "--workers", "0", "--shown", "3")  # fmt: skip


def row(told: list[dict[str, Any]], crop: str, size: int = 32) -> dict[str, Any]:
    (found,) = [one for one in told if one["kind"] == "row" and (one["crop"], one["size"]) == (crop, size)]
    return found


def test_the_numbers_are_those_of_the_run_s_own_validation(told: list[dict[str, Any]], trained: Path) -> None:
    last = json.loads((trained / "result.json").read_text())["epochs"][-1]
    for crop, ending in (("rect", ""), ("center", "_square")):
        mine = row(told, crop)
        assert (mine["top1"], mine["top5"]) == (last[f"top1{ending}"], last[f"top5{ending}"])
    assert row(told, "rect")["loss"] == pytest.approx(last["val_loss"], rel=1e-5)


def test_a_row_for_each_crop_and_size_with_every_image_counted_once_by_bucket(
    told: list[dict[str, Any]], trained: Path
) -> None:
    begin, *rows, seen = told
    assert (begin["kind"], seen["kind"], begin["procs"], begin["epoch"], begin["images"]) == ("begin", "seen", 2, 2, 20)
    assert begin["step"] == int(newest(trained).stem.removeprefix("step-")) > 0
    assert [(one["crop"], one["size"]) for one in rows] == [(crop, size) for crop in CROPS for size in (32, 64)]
    counts = [one["images"] for one in begin["buckets"]]
    assert sum(counts) == 20 and 1 < len(counts) <= 6
    ends = [one[end] for one in begin["buckets"] for end in ("from", "ratio", "to")]
    assert ends == sorted(ends)
    for one in rows:
        parts = zip(counts, one["buckets"], strict=True)
        assert sum(count * part["top1"] / 100 for count, part in parts) == pytest.approx(20 * one["top1"] / 100)
        assert one["seconds"] > 0 and one["views"] == {"five": 5, "tta": 10}.get(one["crop"], 1)


def buckets(*ratios: tuple[int, int]) -> ratio_buckets.AspectRatioBuckets:
    """Those of images of such widths and heights."""
    widths, heights = np.array(ratios).T
    return ratio_buckets.AspectRatioBuckets(type("Sizes", (), {"widths": widths, "heights": heights})())


def test_images_of_distinct_ratios_are_in_six_buckets_of_as_many() -> None:
    found = buckets(*((width, 100) for width in range(80, 50, -1)))
    assert [one["images"] for one in found.summaries] == [5] * 6 and found.bucket_of_image.tolist() == sorted(
        found.bucket_of_image, reverse=True
    )
    assert (found.summaries[0]["from"], found.summaries[0]["to"], found.summaries[-1]["to"]) == (0.51, 0.55, 0.8)
    assert found.summaries[0]["ratio"] == pytest.approx(0.53)


def test_images_of_one_ratio_are_in_one_bucket() -> None:
    same = [(500, 375), (640, 480), (4, 3), (500, 376)]  # the last one is 1.33 too, as it is shown
    mixed = [*same * 15, *((375, 500 + 9 * one) for one in range(20)), *((900 + 9 * one, 500) for one in range(20))]
    found = buckets(*mixed)
    assert len({*found.bucket_of_image[:60]}) == 1
    assert sum(one["images"] for one in found.summaries) == 100 and 3 <= len(found.summaries) <= 6
    assert [one["images"] for one in found.summaries if one["from"] < 1.34 and one["to"] > 1.32] == [60]
    assert all(one["to"] < other["from"] for one, other in zip(found.summaries, found.summaries[1:], strict=False))


@pytest.mark.parametrize("images", [1, 2, 50])
def test_where_all_have_the_same_ratio_there_is_one_bucket(images: int) -> None:
    found = buckets(*[(300, 400)] * images)
    assert found.summaries == [{"ratio": 0.75, "from": 0.75, "to": 0.75, "images": images}] and set(
        found.bucket_of_image
    ) == {0}


def test_the_step_is_that_of_the_run_wherever_in_an_epoch_it_was_saved(trained: Path, tmp_path: Path) -> None:
    state, recipe = runner.open_checkpoint(newest(trained))
    steps = int(newest(trained).stem.removeprefix("step-"))
    assert state["step"] == 0 and steps > 2 and runner.global_step(state, recipe) == steps
    state, recipe = runner.open_checkpoint(changed(trained, tmp_path, epoch=1, step=2))
    assert runner.global_step(state, recipe) == steps // 2 + 2


def test_one_process_finds_the_same(told: list[dict[str, Any]], trained: Path, tiny_data: Path, here: Any) -> None:
    words = ("--data", tiny_data, "--crops", "tta,rect", "--sizes", "64,32", "--shown", "0")
    alone = here(newest(trained), *words)
    assert alone[-1]["kind"] == "row" and len(alone) == 5 and alone[0]["procs"] == 1
    for one in alone[1:]:
        other = row(told, one["crop"], one["size"])
        assert (one["top1"], one["top5"]) == (other["top1"], other["top5"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["buckets"] == other["buckets"]


def test_what_is_shown_is_an_image_with_the_answer_of_each_crop(told: list[dict[str, Any]], tiny_data: Path) -> None:
    index = load_index(tiny_data, "val")
    assert told[-1]["size"] == 32 and len(told[-1]["images"]) == 3
    for one in told[-1]["images"]:
        assert one["name"] in index.names() and one["name"].startswith(one["class"])
        assert [each["crop"] for each in one["answers"]] == list(CROPS)
        for each in one["answers"]:
            assert each["right"] == (each["class"] == one["class"]) and 0 < each["percent"] <= 100
            assert len(each["boxes"]) == (5 if each["crop"] in ("five", "tta") else 1)


def test_the_size_is_the_last_phase_s_when_none_is_said(trained: Path, tiny_data: Path, here: Any) -> None:
    told = here(newest(trained), "--data", tiny_data, "--crops", "center", "--shown", "0")
    assert [one["size"] for one in told[1:]] == [32]


def changed(trained: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the checkpoint in which something is otherwise."""
    checkpoint_io.write_checkpoint(tmp_path, 7, {**checkpoint_io.load_checkpoint(newest(trained)), **changes})
    return tmp_path / "step-00000007.pt"


def test_statistics_that_processes_had_apart_are_averaged(trained: Path, tmp_path: Path) -> None:
    state = checkpoint_io.load_checkpoint(newest(trained))
    one = state["statistics"][0]
    path = changed(trained, tmp_path, statistics=torch.stack([one, one + 2]))
    state, recipe = runner.open_checkpoint(path)
    model = runner.load_network(path, state, recipe, 10, Path("some"))
    found = torch.cat([each.flatten() for each in runner.batchnorm.running_statistics(model)])
    torch.testing.assert_close(found, one + 1)


def test_another_number_of_classes_is_one_line(trained: Path, tiny_data: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for folder in sorted((tiny_data / split).iterdir())[:4]:
            if folder.is_dir():
                shutil.copytree(folder, tmp_path / "few" / split / folder.name)
    (error,) = run(newest(trained), "--data", tmp_path / "few", "--procs", "2", code=1)[:1]
    assert error["kind"] == "error"
    assert "was trained on 10 classes" in error["error"] and "few has 4; say --data DIR" in error["error"]


def test_weights_that_are_no_numbers_are_no_result(trained: Path, tiny_data: Path, tmp_path: Path, here: Any) -> None:
    model = checkpoint_io.load_checkpoint(newest(trained))["model"]
    path = changed(trained, tmp_path, model={**model, "fc.weight": torch.full_like(model["fc.weight"], torch.nan)})
    with pytest.raises(runner.TrainingError, match="center at 32 pixels: the loss is nan"):
        here(path, "--data", tiny_data, "--crops", "center", "--sizes", "32", "--shown", "0")


def bad_checkpoints(trained: Path, tmp_path: Path) -> dict[str, Path]:
    whole = newest(trained).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:-1])
    (tmp_path / "text.pt").write_text("hello")
    identity = checkpoint_io.load_checkpoint(newest(trained))["identity"]
    recipe = {**identity["recipe"], "model": {**identity["recipe"]["model"], "name": "resnet18"}}
    return {
        "there is no such checkpoint": tmp_path / "nowhere.pt",
        "is a folder": tmp_path,
        "its checksum does not fit": tmp_path / "cut.pt",
        "is not a checkpoint of this program": tmp_path / "text.pt",
        "was written by another version of imgnet-cluster": changed(trained, tmp_path / "old", identity={"recipe": {"a": 1}}),
        "its weights are not those of resnet18": changed(
            trained, tmp_path / "other", identity={**identity, "recipe": recipe}
        ),
    }


def test_a_checkpoint_that_cannot_be_used_is_named_with_the_reason(
    trained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    for name in ("old", "other"):
        (tmp_path / name).mkdir()
    for why, path in bad_checkpoints(trained, tmp_path).items():
        with pytest.raises(runner.TrainingError, match=why) as caught:
            state, recipe = runner.open_checkpoint(path)
            runner.load_network(path, state, recipe, 10, tiny_data)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_data_is_one_line(trained: Path, tmp_path: Path, here: Any) -> None:
    with pytest.raises(DataError, match="nowhere: there is no such data folder"):
        here(newest(trained), "--data", tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "middle", "center,,rect"])
def test_an_unknown_crop_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--crops: .* is unknown; known are center, rect, five, tta"):
        parse_crops(text)


@pytest.mark.parametrize("text", ["", "15", "224,x", "-32", "22.4", "224256", "9999999999999"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--sizes: must be whole numbers from 16 to 4096"):
        parse_sizes(text)


def test_crops_and_sizes_are_taken_in_their_order_and_once() -> None:
    assert parse_crops("rect, center,rect") == ("rect", "center") and parse_sizes("288,224,288") == (288, 224)


def test_wrong_usage_is_code_2(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.parse_eval_options(["x.pt", "--sizes", "3"])
    assert "must be whole numbers" in capsys.readouterr().err


class Fixed(torch.nn.Module):
    """A network that takes 32 pixels only."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ torch.ones(3 * 32 * 32, 10)


def test_a_size_that_the_network_does_not_take_is_one_line(tiny: Any, tiny_data: Path) -> None:
    options = __main__.parse_eval_options(["x.pt", "--crops", "center", "--sizes", "64", "--workers", "0"])
    recipe = tiny(phases=ROWS, model=Model(name="resnet10_tiny"))
    indexes = runner.open_val_indexes(recipe, tiny_data, tiny_data)
    group = runner.ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
    with pytest.raises(runner.TrainingError, match="center at 64 pixels: resnet10_tiny fails: ") as caught:
        runner.Evaluation(options, recipe, group, Fixed(), indexes, 0).run()
    assert "\n" not in str(caught.value)


def test_the_copy_of_the_last_phase_is_read_where_it_is_there_and_large_enough(tiny: Any, tiny_data: Path) -> None:
    options = __main__.parse_eval_options(["x.pt"])
    recipe = tiny(phases=[Phase(epochs=(0, 1), size=64, batch=8, lr=0.1, copy=80)])
    indexes = runner.open_val_indexes(recipe, tiny_data, tiny_data.parent)  # whose folder 80 is the set itself
    assert set(indexes) == {("val", None), ("val", 80)}
    group = runner.ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
    made = runner.Evaluation(options, recipe, group, Fixed(), indexes, 0)
    assert [made.copy_for(size) for size in (32, 64, 70, 71, 128)] == [80, 80, 80, None, None]
    assert set(runner.open_val_indexes(recipe, tiny_data, Path("nowhere"))) == {("val", None)}
    assert len(runner.open_val_indexes(recipe, tiny_data, Path("nowhere"), scale=0.1)["val", None]) == 2


def test_what_a_network_prints_is_no_line_of_ours(capsys: Any) -> None:
    @protocol.reserve_stdout()
    def work() -> None:
        print("hello", end="")
        protocol.emit_json_line("row", top1=1.0)

    work()
    print("after")
    said = capsys.readouterr()
    assert said.out == '{"kind": "row", "top1": 1.0}\nafter\n' and said.err == "hello"
