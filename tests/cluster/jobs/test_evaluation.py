"""`eval`: which checkpoint of a job, what the command says, and its picture."""

import base64
import io
import json
import shutil
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from cluster.cli import evaluate
from cluster.connectors.local import Connector
from cluster.errors import ClusterError
from cluster.jobs import checkpoints, evaluation
from cluster.machines import checkpoint_files
from cluster.plots import crops

Fixture = Any


# --- which checkpoint ---------------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_of_the_last_attempt_that_has_one_is_taken(hand_made: Any) -> None:
    made = hand_made()
    for attempt, step, whole in ((1, 5, True), (2, 8, True), (2, 9, False)):
        made.checkpoint(attempt, step, whole)
    (made.folders.shared / "checkpoints" / "000003").mkdir()
    found = checkpoints.newest_checkpoint(made.job)
    assert found == made.folders.shared / "checkpoints/000002/step-00000008.pt"


def test_an_attempt_that_has_not_saved_yet_has_what_it_began_with(hand_made: Any) -> None:
    made = hand_made()
    path = made.folders.shared / made.checkpoint(2, 8)
    path.rename(path.with_name("resume-00000008-abc.pt"))
    assert checkpoints.newest_checkpoint(made.job).name == "resume-00000008-abc.pt"


def test_a_job_that_has_saved_nothing_says_so(hand_made: Any) -> None:
    with pytest.raises(ClusterError, match=r"job-1 is \w+ and has saved nothing yet; imgnet-cluster status job-1"):
        checkpoints.newest_checkpoint(hand_made().job)


class Elsewhere(Connector):
    """A machine that gives a file in pieces of 40 bytes; what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def read_from(self, path: str, offset: int, limit: int = 40) -> bytes:
        self.asked.append((path.rpartition("/")[2], offset))
        return super().read_from(path, offset, 40)


@pytest.fixture
def there(hand_made: Any) -> Any:
    """The shared folder of another machine: two attempts, the newest file of the second damaged."""
    made = hand_made("job-9")
    for attempt, step, whole in ((1, 50, True), (2, 7, True), (2, 8, True), (2, 9, False)):
        made.checkpoint(attempt, step, whole)
    made.shared("checkpoints/000002/resume-00000050-abc.pt", "x")
    made.shared("checkpoints/000002/notes.txt", "x")
    return made.folders.shared


def test_the_newest_whole_one_is_brought_home_once(there: Path, tmp_path: Path) -> None:
    machine, told, home = Elsewhere(), [], tmp_path / "home"
    for _ in range(2):
        found = checkpoint_files.download_checkpoint(machine, str(there), home, lambda *how: told.append(how))
        assert found == home / "checkpoints/000002/step-00000008.pt"
        assert found.read_bytes() == (there / "checkpoints/000002/step-00000008.pt").read_bytes()
    size = found.stat().st_size
    assert (size, size) in told and len([one for one in machine.asked if one == ("step-00000008.pt", 40)]) == 1
    assert [path.name for path in home.rglob("*.pt")] == ["step-00000008.pt"]


def test_from_a_machine_without_any_none_is_brought(tmp_path: Path) -> None:
    assert (
        checkpoint_files.download_checkpoint(Elsewhere(), str(tmp_path / "nowhere"), tmp_path, lambda *_: None) is None
    )


def test_of_a_job_elsewhere_that_runs_the_machines_are_asked_and_home_will_do_when_they_are_silent(
    hand_made: Any, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fleet:
        """Machine 0 is silent, machine 1 was never set up, machine 2 answers."""

        remotes, machines = dict.fromkeys("012", Elsewhere()), None

        def job_folder(self, name: str) -> str:
            if name == "0" or silent:
                raise ClusterError(f"machine {name}: does not answer")
            return {"2": str(there)}[name]

    fleet, silent = Fleet(), False
    fleet.machines = fleet  # type: ignore[assignment]
    monkeypatch.setattr(checkpoints, "_fleet", lambda job: fleet)
    made = hand_made(backend="ssh")
    home = made.folders.shared / "checkpoints/000002/step-00000008.pt"
    assert checkpoints.newest_checkpoint(made.job) == home
    silent = True
    assert checkpoints.newest_checkpoint(made.job) == home
    home.unlink()
    with pytest.raises(
        ClusterError, match="its checkpoints stay on its machines, and these do not give one: machine 2"
    ):
        checkpoints.newest_checkpoint(made.job)


# --- what is told -------------------------------------------------------------------------------------------------


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_lines_come_as_they_are_told_and_an_error_is_the_command_s(place: Fixture) -> None:
    told = 'print(\'{"kind": "row", "n": 1}\', flush=True)'
    rows = evaluation.run_evaluation(script(f"{told}; import time; time.sleep(60)"))
    assert next(rows) == {"kind": "row", "n": 1}
    rows.close()  # what runs is ended
    with pytest.raises(ClusterError, match=r"^too small$"):
        list(
            evaluation.run_evaluation(script('print(\'{"kind": "error", "error": "too small"}\'); raise SystemExit(1)'))
        )
    with pytest.raises(ClusterError, match="ended with code 7"):
        list(evaluation.run_evaluation(script("raise SystemExit(7)")))


def rows() -> list[dict[str, Any]]:
    def row(crop: str, size: int, *tops: float) -> dict[str, Any]:
        buckets = [{"top1": top, "top5": top + 1} for top in tops]
        return {"crop": crop, "size": size, "top1": sum(tops) / 2, "top5": sum(tops) / 2 + 1, "buckets": buckets}

    return [row("center", 224, 40, 60), row("rect", 288, 1, 2), row("rect", 224, 44, 59), row("five", 224, 9, 9)]


def test_the_gain_is_that_of_rectangles_above_the_centre_of_the_same_size_by_bucket() -> None:
    buckets = [{"ratio": 0.7, "images": 10}, {"ratio": 1.3, "images": 10}]
    assert evaluation.rect_gains(rows(), buckets) == [
        {
            "size": 224,
            "top1": 1.5,
            "top5": 1.5,
            "buckets": [
                {"ratio": 0.7, "images": 10, "top1": 4, "top5": 4},
                {"ratio": 1.3, "images": 10, "top1": -1, "top5": -1},
            ],
        }
    ]


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(finished: Fixture) -> Any:
    """All crops of the finished job's network, as JSON, with a picture."""
    words = ("--crops", "center,rect,five,tta", "--sizes", "32,48", "--workers", "0", "-o", "json")
    return finished.cli("eval", "job-1", *words, "--plot", "crops.png")


def test_a_job_s_numbers_are_those_of_its_own_result(finished: Fixture, evaluated: Any) -> None:
    assert evaluated.code == 0, evaluated
    said, result = json.loads(evaluated.out), finished.job().result
    assert [(one["crop"], one["size"]) for one in said["rows"]][:3] == [("center", 32), ("center", 48), ("rect", 32)]
    assert (said["rows"][0]["top1"], said["rows"][0]["top5"]) == (result["top1"], result["top5"])
    assert (said["epoch"], said["images"], said["procs"]) == (3, 20, 1)
    assert said["step"] == int(Path(said["checkpoint"]).stem.rpartition("-")[2]) > 3
    for gain in said["gains"]:
        told = [(one["from"], one["to"], one["images"]) for one in gain["buckets"]]
        assert told == [(one["from"], one["to"], one["images"]) for one in said["buckets"]]
    assert [one["size"] for one in said["gains"]] == [32, 48]
    assert said["checkpoint"].endswith(".pt") and said["plot"] == "crops.png"
    assert not finished.at_work()


def test_the_picture_has_a_column_for_each_crop_and_rows_without_white_between(
    finished: Fixture, evaluated: Any
) -> None:
    image = Image.open(finished.path / "crops.png").convert("L")
    assert image.width == crops.LEFT_MARGIN + 4 * (crops.CELL_PIXELS + crops.CELL_GAP)
    assert bands(image) == 6 and white(image) <= crops.CELL_GAP + crops.ANSWER_HEIGHT


def test_a_picture_that_cannot_be_written_costs_no_numbers(finished: Fixture, evaluated: Any, tmp_path: Path) -> None:
    path = json.loads(evaluated.out)["checkpoint"]
    words = ("--data", finished.data, "--crops", "center", "--sizes", "32", "--workers", "0")
    ran = finished.cli("eval", path, *words, "--plot", tmp_path / "no/x.png")
    assert ran.code == 2 and ran.err == f"error: --plot {tmp_path / 'no/x.png'}: there is no folder {tmp_path / 'no'}\n"
    (tmp_path / "x.png").mkdir()
    ran = finished.cli("eval", path, *words, "--plot", tmp_path / "x.png")
    assert ran.code == 1 and "top-1" in ran.out and f"--plot {tmp_path / 'x.png'}: " in ran.err, ran


def test_a_job_is_found_from_the_folder_of_the_runs_too(finished: Fixture, evaluated: Any) -> None:
    words = ("--crops", "center", "--sizes", "32", "--workers", "0", "-o", "json")
    ran = finished.cli(
        "eval", "job-1", *words, cwd=finished.path / "runs", env={"IMGNET_RUNS": str(finished.path / "runs")}
    )
    assert ran.code == 0 and json.loads(ran.out)["rows"][0]["top1"] == json.loads(evaluated.out)["rows"][0]["top1"], ran


def bands(page: Any) -> int:
    """How many images are below each other on a page: what is not white and higher than words."""
    lines = [min(page.crop((0, y, page.width, y + 1)).tobytes()) < 255 for y in range(crops.HEADER_HEIGHT, page.height)]
    return sum(len(list(part)) > crops.ANSWER_HEIGHT for dark, part in groupby(lines) if dark)


def white(page: Any) -> int:
    """The height of the highest white band below the page's head."""
    lines = [min(page.crop((0, y, page.width, y + 1)).tobytes()) < 255 for y in range(crops.HEADER_HEIGHT, page.height)]
    return max(len(list(part)) for dark, part in groupby(lines) if not dark)


def test_a_checkpoint_by_its_name_and_as_a_table(finished: Fixture, evaluated: Any, tmp_path: Path) -> None:
    shutil.copy(json.loads(evaluated.out)["checkpoint"], tmp_path / "kept.pt")
    ran = finished.cli("eval", tmp_path / "kept.pt", "--data", finished.data, "--sizes", "32", "--workers", "0")
    assert ran.code == 0, ran
    top1 = f"{json.loads(evaluated.out)['rows'][0]['top1']:.3f}"
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["center", "32", "1", top1] in [one[:4] for one in lines]
    assert f"3 epochs done, step {json.loads(evaluated.out)['step']}; 20 images" in ran.out
    assert "rect at 32 above center, in points, by width / height:" in ran.out
    assert lines[-1][:2] == ["all", "20"]


def test_the_gains_stand_beside_each_group_s_ratios_with_one_decimal(capsys: Any) -> None:
    begin = dict.fromkeys(("recipe", "model", "classes", "data", "checkpoint", "device", "precision", "procs"), "x")
    parts = [
        {"ratio": 0.77, "from": 0.7512, "to": 0.8, "images": 10, "top1": 12.345, "top5": -0.04},
        {"ratio": 4 / 3, "from": 4 / 3, "to": 4 / 3, "images": 2, "top1": -100.0, "top5": 0.06},
    ]
    gain = {"size": 64, "top1": -1.26, "top5": 0.0, "buckets": parts}
    evaluate._print_results({**begin, "epoch": 3, "step": 691, "images": 12}, [], [gain])
    out = capsys.readouterr().out
    assert "3 epochs done, step 691;" in out
    assert [line.split() for line in out.splitlines()[-3:]] == [
        ["0.75-0.80", "10", "+12.3", "+0.0"],
        ["1.33", "2", "-100.0", "+0.1"],
        ["all", "12", "-1.3", "+0.0"],
    ]


def test_the_help_promises_no_whole_image(place: Fixture) -> None:
    told = " ".join(place.cli("eval", "--help").out.split())
    assert "in steps of 32 pixels, but at most 1.5 times its short side" in told and "whole" not in told


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("job-7",), 102, "no such job"),
        (("nowhere.pt",), 2, "is neither a job nor a checkpoint"),
        (("home",), 2, "is neither a job nor a checkpoint"),
        (("job-1", "--crops", "middle"), 2, "known are center, rect, five, tta"),
        (("job-1", "--sizes", "224,8"), 2, "whole numbers from 16 to 4096"),
        (("job-1", "--sizes", ""), 2, "whole numbers from 16 to 4096"),
        (("job-1", "--plot", "x.jpg"), 2, "ends in .png"),
        (("job-1", "--procs", "0"), 2, "--procs"),
        ((), 2, "JOB|CHECKPOINT"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], code: int, said: str, place: Fixture) -> None:
    ran = place.cli("eval", *words)
    assert ran.code == code and said in ran.err and ran.err.count("\n") == 1 and not ran.out, ran


# --- the picture --------------------------------------------------------------------------------------------------


def test_what_is_not_seen_is_dimmed_and_what_is_seen_is_as_it_was() -> None:
    found = crops.dim_outside_boxes(Image.new("RGB", (100, 50), "#204060"), [[0.2, 0.1, 0.6, 0.5]])
    assert found.getpixel((30, 25)) == (0x20, 0x40, 0x60)
    assert min(found.getpixel((80, 25))) > 0x20 + 100  # type: ignore[type-var]
    assert found.getpixel((10, 10)) == (0xFF, 0xCC, 0x00) == found.getpixel((59, 39))


def grey(width: int, height: int) -> str:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), "#808080").save(stream, "JPEG")
    return base64.b64encode(stream.getvalue()).decode()


@pytest.mark.parametrize("several", [False, True])
def test_the_head_says_at_which_size_and_what_the_colours_mean_and_fits(
    several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda pen, place, words, *_, **how: told.append(words))
    crops.draw_crops(tmp_path / "x.png", "a long name of a recipe " * 4, 96, [], several)
    head = " ".join("".join(told).split())
    assert "Drawn at 96 pixels" in head and ("the first of --sizes" in head) == several
    assert "its probability; green: right, red: wrong" in head and "Yellow frame: what the network sees" in head
    monkeypatch.undo()
    crops.draw_crops(tmp_path / "y.png", "a long name of a recipe " * 4, 96, [], several)
    page = Image.open(tmp_path / "y.png").convert("L")
    assert min(page.crop((page.width - 8, 0, page.width, page.height)).tobytes()) == 255


def test_each_row_is_as_high_as_its_image_which_fills_its_cell(tmp_path: Path) -> None:
    answers = [{"crop": "center", "boxes": [[0, 0, 1, 1]], "class": "cat", "percent": 50.0, "right": True}]
    shown = [{"class": "cat", "jpeg": grey(*size), "answers": answers} for size in ((60, 20), (400, 100), (30, 60))]
    crops.draw_crops(tmp_path / "x.png", "title", 96, shown)
    page = Image.open(tmp_path / "x.png").convert("L")
    below = 3 * (crops.ANSWER_HEIGHT + crops.CELL_GAP)
    assert (
        page.height
        == crops.HEADER_HEIGHT + round(crops.CELL_PIXELS / 3) + crops.CELL_PIXELS // 4 + crops.CELL_PIXELS + below
    )
    assert bands(page) == 3 and white(page) <= crops.CELL_GAP + crops.ANSWER_HEIGHT


def test_a_right_answer_and_a_wrong_one_have_their_colours(tmp_path: Path) -> None:
    answers = [
        {"crop": crop, "boxes": [[0, 0, 1, 1]], "class": name, "percent": 50.0, "right": name == "cat"}
        for crop, name in (("center", "dog"), ("rect", "cat"))
    ]
    one = {
        "name": "cat/1.JPEG",
        "class": "cat",
        "jpeg": grey(40, 40),
        "answers": answers,
    }
    crops.draw_crops(tmp_path / "x.png", "title", 96, [one])
    page = Image.open(tmp_path / "x.png").convert("RGB")
    words = crops.HEADER_HEIGHT + crops.CELL_PIXELS
    middle = crops.LEFT_MARGIN + crops.CELL_PIXELS + crops.CELL_GAP // 2
    left, right = (page.crop((x, words, x + crops.CELL_PIXELS, page.height)) for x in (crops.LEFT_MARGIN, middle))

    def colours(part: Any) -> set[Any]:
        return {colour for _, colour in part.getcolors(1 << 16)}

    assert (0xD1, 0x49, 0x5B) in colours(left) and (0x2A, 0x9D, 0x5C) in colours(right)
    assert (0x2A, 0x9D, 0x5C) not in colours(left) and (0xD1, 0x49, 0x5B) not in colours(right)
