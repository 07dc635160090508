"""`imgnet-cluster eval`: which checkpoint of a job is taken, what the command prints, and its picture."""

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Generator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image
from support.local_connector import LocalConnector

from cluster.backends.ssh import SshBackend
from cluster.cli import evaluate
from cluster.connectors import untrusted
from cluster.errors import ClusterError
from cluster.jobs import checkpoints, evaluation
from cluster.machines import trained_files
from cluster.plots import crops
from train.evaluation.protocol import CropAnswer, Evaluation, EvaluationRow, ExampleImage, RatioBucket

Fixture = Any


# --- which checkpoint is taken --------------------------------------------------------------------------------------


def test_newest_checkpoint_takes_last_attempt_with_a_complete_file(hand_made: Any) -> None:
    run = hand_made()
    for attempt, step, is_complete in ((1, 5, True), (2, 8, True), (2, 9, False)):
        run.write_checkpoint(attempt, step, is_complete)
    (run.run_folder.shared / "checkpoints" / "000003").mkdir()
    path = checkpoints.newest_checkpoint(run.job)
    assert path == run.run_folder.shared / "checkpoints/000002/step-00000008.pt"


def test_newest_checkpoint_of_attempt_without_save_is_its_start(hand_made: Any) -> None:
    run = hand_made()
    path = run.run_folder.shared / run.write_checkpoint(2, 8)
    path.rename(path.with_name("resume-00000008-abc.pt"))
    assert checkpoints.newest_checkpoint(run.job).name == "resume-00000008-abc.pt"


def test_newest_checkpoint_without_any_raises(hand_made: Any) -> None:
    with pytest.raises(ClusterError, match=r"job-1 is \w+ and has saved nothing yet; see: imgnet-cluster status job-1"):
        checkpoints.newest_checkpoint(hand_made().job)


class SlowConnector(LocalConnector):
    """A machine that sends a file in pieces of 40 bytes, and records the reads."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int]] = []

    def read_from(self, path: str, offset: int, limit: int = 40) -> bytes:
        self.reads.append((path.rpartition("/")[2], offset))
        return super().read_from(path, offset, 40)


@pytest.fixture
def remote_shared(hand_made: Any) -> Any:
    """The shared folder of another machine: two attempts, the newest file of the second one damaged."""
    run = hand_made("job-9")
    for attempt, step, is_complete in ((1, 50, True), (2, 7, True), (2, 8, True), (2, 9, False)):
        run.write_checkpoint(attempt, step, is_complete)
    run.write_shared("checkpoints/000002/resume-00000050-abc.pt", "x")
    run.write_shared("checkpoints/000002/notes.txt", "x")
    return run.run_folder.shared


def test_download_checkpoint_newest_complete_file_once(remote_shared: Path, tmp_path: Path) -> None:
    connector = SlowConnector()
    progress: list[tuple[int, int]] = []
    local_shared = tmp_path / "home"
    checkpoint = local_shared / "checkpoints/000002/step-00000008.pt"
    for _ in range(2):
        path = trained_files.download_checkpoint(
            connector, str(remote_shared), local_shared, lambda done, total: progress.append((done, total))
        )
        assert path == checkpoint
        assert path.read_bytes() == (remote_shared / "checkpoints/000002/step-00000008.pt").read_bytes()
    size = checkpoint.stat().st_size
    assert (size, size) in progress and connector.reads.count(("step-00000008.pt", 40)) == 1
    assert [path.name for path in local_shared.rglob("*.pt")] == ["step-00000008.pt"]


@pytest.mark.parametrize("listing, error", [
    ({"000001/step-1.pt": 10**15}, "machine 0: its answer was dropped: it has a checkpoint .* of 1000000 GB"),
    ({"000001/step-1.pt": untrusted.MAX_CHECKPOINT_BYTES}, "No space left"),
    ({"../../000001/step-1.pt": 5, "000001/step-" + "9" * 5000 + ".pt": 5, "000001/x/../step-1.pt": 5}, ""),
    ({"000001/step-1.pt": 5}, ""),
])  # fmt: skip
def test_download_checkpoint_of_a_lying_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: dict[str, int], error: str
) -> None:
    class LyingConnector(LocalConnector):
        name = "machine 0"

        def list_files(self, folder: str, with_hidden: bool = False) -> dict[str, int]:
            return listing

        def read_from(self, path: str, offset: int, limit: int = 0) -> bytes:
            return bytes(1 << 20)  # more than it said

    usage = SimpleNamespace(total=1 << 40, free=1 << 33)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    context = pytest.raises((ClusterError, OSError), match=error) if error else contextlib.nullcontext()
    with context:
        found = trained_files.download_checkpoint(LyingConnector(), "/shared", tmp_path / "run", lambda *_: None)
        assert found is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_download_checkpoint_without_any_returns_none(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    assert trained_files.download_checkpoint(SlowConnector(), missing, tmp_path, lambda *_: None) is None


def test_newest_checkpoint_remote_job_falls_back_to_local_copy(
    hand_made: Any, remote_shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fleet:
        """Machine 0 does not answer, machine 1 was never set up, machine 2 answers until `is_silent`."""

        connectors = dict.fromkeys("012", SlowConnector())
        is_silent = False

        @property
        def provisioner(self) -> "Fleet":
            return self

        def job_folder(self, name: str) -> str:
            if name == "0" or self.is_silent:
                raise ClusterError(f"machine {name}: does not answer")
            return {"2": str(remote_shared)}[name]

    fleet = Fleet()
    monkeypatch.setattr(SshBackend, "open_fleet", lambda ssh_backend: fleet)
    run = hand_made(backend="ssh")
    local_path = run.run_folder.shared / "checkpoints/000002/step-00000008.pt"
    assert checkpoints.newest_checkpoint(run.job) == local_path
    fleet.is_silent = True
    assert checkpoints.newest_checkpoint(run.job) == local_path
    local_path.unlink()
    with pytest.raises(ClusterError, match="its checkpoints are on its machines, and no machine sent one: machine 2"):
        checkpoints.newest_checkpoint(run.job)


# --- the process of the evaluation ----------------------------------------------------------------------------------


def python(program: str) -> list[str]:
    """The command that runs a Python program."""
    return [sys.executable, "-c", program]


def test_run_module_yields_messages_and_raises_errors(sandbox: Fixture) -> None:
    row = 'print(\'{"kind": "row", "n": 1}\', flush=True)'
    messages = evaluation.run_module(python(f"{row}; import time; time.sleep(60)"))
    assert next(messages) == {"kind": "row", "n": 1}
    cast("Generator[object]", messages).close()  # kills the process; the fixture checks that
    error = 'print(\'{"kind": "error", "error": "too small"}\'); raise SystemExit(1)'
    with pytest.raises(ClusterError, match=r"^too small$"):
        list(evaluation.run_module(python(error)))
    with pytest.raises(ClusterError, match="ended with code 7"):
        list(evaluation.run_module(python("raise SystemExit(7)")))


def evaluation_of(*rows: EvaluationRow, recipe: str = "x", examples: tuple[ExampleImage, ...] = ()) -> Evaluation:
    """An evaluation with these rows."""
    return Evaluation(
        checkpoint="x", recipe=recipe, model="x", epoch=3, step=691, images=12, classes=2, data="x", device="cpu",
        precision="float32", procs=1, rows=rows, examples=examples,
    )  # fmt: skip


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(finished: Fixture) -> Any:
    """All crops of the finished job's network, as JSON, with a picture."""
    options = ("--crops", "center,rect,five,tta", "--sizes", "32,48", "--workers", "0", "-o", "json")
    return finished.cli("eval", "job-1", *options, "--plot", "crops.png")


def test_eval_numbers_are_those_of_the_job_result(finished: Fixture, evaluated: Any) -> None:
    assert evaluated.code == 0, evaluated
    report = json.loads(evaluated.out)
    result = finished.job().result
    rows = report["rows"]
    assert [(row["crop"], row["size"]) for row in rows][:3] == [("center", 32), ("center", 48), ("rect", 32)]
    assert (rows[0]["top1"], rows[0]["top5"]) == (result.top1, result.top5)
    assert (report["epoch"], report["images"], report["procs"]) == (3, 20, 1)
    assert report["step"] == finished.job().result.steps > 3
    assert all(sum(bucket["images"] for bucket in row["buckets"]) == 20 for row in rows)
    assert report["checkpoint"].endswith("job-1/network/model.safetensors") and report["plot"] == "crops.png"
    assert not finished.job_pids()


def test_eval_plot_has_a_column_per_crop_and_tight_rows(finished: Fixture, evaluated: Any) -> None:
    page = Image.open(finished.path / "crops.png").convert("L")
    assert page.width == crops.LEFT_MARGIN + 4 * (crops.CELL_PIXELS + crops.CELL_GAP)
    assert count_image_rows(page) == 6 and highest_white_band(page) <= crops.CELL_GAP + crops.ANSWER_HEIGHT


def test_eval_unwritable_plot_still_prints_the_numbers(finished: Fixture, evaluated: Any, tmp_path: Path) -> None:
    checkpoint = json.loads(evaluated.out)["checkpoint"]
    options = ("--data", finished.data, "--crops", "center", "--sizes", "32", "--workers", "0")
    ran = finished.cli("eval", checkpoint, *options, "--plot", tmp_path / "no/x.png")
    assert ran.code == 2 and ran.err == f"error: --plot {tmp_path / 'no/x.png'}: there is no folder {tmp_path / 'no'}\n"
    (tmp_path / "x.png").mkdir()
    ran = finished.cli("eval", checkpoint, *options, "--plot", tmp_path / "x.png")
    assert ran.code == 1 and "top-1" in ran.out and f"--plot {tmp_path / 'x.png'}: " in ran.err, ran


def test_eval_finds_the_job_from_the_runs_folder(finished: Fixture, evaluated: Any) -> None:
    options = ("--crops", "center", "--sizes", "32", "--workers", "0", "-o", "json")
    runs_folder = finished.path / "runs"
    ran = finished.cli("eval", "job-1", *options, cwd=runs_folder, env={"IMGNET_RUNS": str(runs_folder)})
    assert ran.code == 0 and json.loads(ran.out)["rows"][0]["top1"] == json.loads(evaluated.out)["rows"][0]["top1"], ran


def row_darkness(page: Any) -> list[bool]:
    """For each line of pixels below the header, whether it has a pixel that is not white."""
    return [min(page.crop((0, y, page.width, y + 1)).tobytes()) < 255 for y in range(crops.HEADER_HEIGHT, page.height)]


def count_image_rows(page: Any) -> int:
    """The number of images below each other: bands that are not white and higher than a line of text."""
    return sum(len(list(band)) > crops.ANSWER_HEIGHT for is_dark, band in groupby(row_darkness(page)) if is_dark)


def highest_white_band(page: Any) -> int:
    """The height of the highest white band below the header, in pixels."""
    return max(len(list(band)) for is_dark, band in groupby(row_darkness(page)) if not is_dark)


def test_eval_of_a_checkpoint_file_prints_a_table(finished: Fixture, evaluated: Any, tmp_path: Path) -> None:
    report = json.loads(evaluated.out)
    shutil.copy(report["checkpoint"], tmp_path / "kept.safetensors")
    ran = finished.cli(
        "eval", tmp_path / "kept.safetensors", "--data", finished.data, "--sizes", "32", "--workers", "0"
    )
    assert ran.code == 0, ran
    cells = [line.split() for line in ran.out.splitlines()]
    assert ["center", "32", "1", f"{report['rows'][0]['top1']:.3f}"] in [line_cells[:4] for line_cells in cells]
    assert f"3 epochs done, step {report['step']}; 20 images" in ran.out
    assert "classes of the lowest accuracy, center at 32:" in ran.out
    assert "rect at 32 above center, in points, by width / height:" in ran.out
    assert cells[-1][:2] == ["all", "20"]


def test_gains_of_rect_have_ratio_ranges_and_one_decimal(capsys: Any) -> None:
    def row(crop: str, size: int, *percents: float) -> EvaluationRow:
        """A row with these top-1 and top-5 accuracies: of a tall bucket, of a wide one, and of all images."""
        tall1, tall5, wide1, wide5, top1, top5 = percents
        buckets = (
            RatioBucket(lowest=0.7512, highest=0.8, images=10, top1=tall1, top5=tall5),
            RatioBucket(lowest=4 / 3, highest=4 / 3, images=2, top1=wide1, top5=wide5),
        )
        return EvaluationRow(
            crop=crop, size=size, views=1, copy=None, images=12, top1=top1, top5=top5, loss=1.0, seconds=1.0,
            buckets=buckets, confusion=None,
        )  # fmt: skip

    rows = (row("rect", 64, 52.345, 59.96, 0, 70.06, 38.74, 60), row("rect", 96, *[1] * 6))
    evaluate._print_results(evaluation_of(row("center", 64, 40, 60, 100, 70, 40, 60), *rows))
    out = capsys.readouterr().out
    assert "3 epochs done, step 691;" in out and "rect at 96 above" not in out
    assert [line.split() for line in out.splitlines()[-3:]] == [
        ["0.75-0.80", "10", "+12.3", "+0.0"],
        ["1.33", "2", "-100.0", "+0.1"],
        ["all", "12", "-1.3", "+0.0"],
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("job-7",), 102, "no such job"),
        (("nowhere.pt",), 2, "nowhere.pt: there is no such file"),
        (("home",), 2, "is neither a job nor a checkpoint"),
        (("job-1", "--crops", "middle"), 2, "choose from center, rect, five, tta"),
        (("job-1", "--sizes", "224,8"), 2, "whole numbers from 16 to 4096"),
        (("job-1", "--sizes", ""), 2, "whole numbers from 16 to 4096"),
        (("job-1", "--plot", "x.jpg"), 2, "ends in .png"),
        (("job-1", "--procs", "0"), 2, "--procs"),
        ((), 102, "there is no job in"),
    ],
)
def test_eval_bad_input_is_refused_in_one_line(
    sandbox: Fixture, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ran = sandbox.cli("eval", *arguments)
    assert ran.code == code and message in ran.err and ran.err.count("\n") == 1 and not ran.out, ran


# --- the picture --------------------------------------------------------------------------------------------------


def test_dim_outside_boxes_keeps_the_inside() -> None:
    image = crops.dim_outside_boxes(Image.new("RGB", (100, 50), "#204060"), [[0.2, 0.1, 0.6, 0.5]])
    assert image.getpixel((30, 25)) == (0x20, 0x40, 0x60)
    assert min(cast("tuple[int, ...]", image.getpixel((80, 25)))) > 0x20 + 100
    assert image.getpixel((10, 10)) == (0xFF, 0xCC, 0x00) == image.getpixel((59, 39))


def gray_jpeg(width: int, height: int) -> bytes:
    """A gray image as a JPEG file."""
    stream = io.BytesIO()
    Image.new("RGB", (width, height), "#808080").save(stream, "JPEG")
    return stream.getvalue()


def example(jpeg: bytes, **predicted: str) -> ExampleImage:
    """An image of a cat, with the predicted class of each crop."""
    answers = [
        CropAnswer(crop=crop, boxes=((0, 0, 1, 1),), predicted=name, percent=50.0) for crop, name in predicted.items()
    ]
    return ExampleImage(true="cat", answers=tuple(answers), jpeg=jpeg)


def rows_of(*names: str, sizes: tuple[int, ...] = (96,)) -> list[EvaluationRow]:
    return [
        EvaluationRow(
            crop=crop, size=size, views=1, copy=None, images=1, top1=0, top5=0, loss=0, seconds=0, buckets=(),
            confusion=None,
        )
        for crop in names
        for size in sizes
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [(96,), (96, 128)])
def test_draw_crops_header_explains_colors_and_fits(sizes: tuple[int, ...], tmp_path: Path) -> None:
    result = evaluation_of(*rows_of("center", sizes=sizes), recipe="a long name of a recipe " * 4)
    header = "".join(text.get_text() for text in crops.crops_figure(result).axes[0].texts)
    assert "Drawn at 96 pixels" in header and ("the first of --sizes" in header) == (len(sizes) > 1)
    crops.draw_crops(tmp_path / "y.png", result)
    page = Image.open(tmp_path / "y.png").convert("L")
    assert min(page.crop((page.width - 8, 0, page.width, page.height)).tobytes()) == 255


def test_draw_crops_row_height_follows_the_image(tmp_path: Path) -> None:
    images = [example(gray_jpeg(*size), center="cat") for size in ((60, 20), (400, 100), (30, 60))]
    crops.draw_crops(tmp_path / "x.png", evaluation_of(*rows_of("center"), examples=tuple(images)))
    page = Image.open(tmp_path / "x.png").convert("L")
    below = 3 * (crops.ANSWER_HEIGHT + crops.CELL_GAP)
    assert (
        page.height
        == crops.HEADER_HEIGHT + round(crops.CELL_PIXELS / 3) + crops.CELL_PIXELS // 4 + crops.CELL_PIXELS + below
    )
    assert count_image_rows(page) == 3 and highest_white_band(page) <= crops.CELL_GAP + crops.ANSWER_HEIGHT


def test_draw_crops_right_and_wrong_answers_have_colors(tmp_path: Path) -> None:
    image = example(gray_jpeg(40, 40), center="dog", rect="cat")
    crops.draw_crops(tmp_path / "x.png", evaluation_of(*rows_of("center", "rect"), examples=(image,)))
    page = Image.open(tmp_path / "x.png").convert("RGB")
    top = crops.HEADER_HEIGHT + crops.CELL_PIXELS
    second_column = crops.LEFT_MARGIN + crops.CELL_PIXELS + crops.CELL_GAP // 2
    left, right = (page.crop((x, top, x + crops.CELL_PIXELS, page.height)) for x in (crops.LEFT_MARGIN, second_column))

    def colors(part: Any) -> set[Any]:
        return {color for _, color in part.getcolors(1 << 16)}

    red, green = (0xD1, 0x49, 0x5B), (0x2A, 0x9D, 0x5C)
    assert red in colors(left) and green in colors(right)
    assert green not in colors(left) and red not in colors(right)
