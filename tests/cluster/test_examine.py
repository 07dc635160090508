"""`eval`: which checkpoint of a job, what the command says, and its picture."""

import base64
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cluster import checkpoints, crops, examine
from cluster.errors import ClusterError
from cluster.machine import Machine

Fixture = Any


# --- which checkpoint ---------------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_of_the_last_attempt_that_has_one_is_taken(hand_made: Any) -> None:
    made = hand_made()
    for attempt, step, whole in ((1, 5, True), (2, 8, True), (2, 9, False)):
        made.checkpoint(attempt, step, whole)
    (made.folders.shared / "checkpoints" / "000003").mkdir()
    found = checkpoints.newest(made.job)
    assert found == made.folders.shared / "checkpoints/000002/step-00000008.pt"


def test_an_attempt_that_has_not_saved_yet_has_what_it_began_with(hand_made: Any) -> None:
    made = hand_made()
    path = made.folders.shared / made.checkpoint(2, 8)
    path.rename(path.with_name("resume-00000008-abc.pt"))
    assert checkpoints.newest(made.job).name == "resume-00000008-abc.pt"


def test_a_job_that_has_saved_nothing_says_so(hand_made: Any) -> None:
    with pytest.raises(ClusterError, match=r"job-1 is \w+ and has saved nothing yet; imgnet-cluster status job-1"):
        checkpoints.newest(hand_made().job)


class Elsewhere(Machine):
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
        found = checkpoints.bring(machine, str(there), home, lambda *how: told.append(how))
        assert found == home / "checkpoints/000002/step-00000008.pt"
        assert found.read_bytes() == (there / "checkpoints/000002/step-00000008.pt").read_bytes()
    size = found.stat().st_size
    assert (size, size) in told and len([one for one in machine.asked if one == ("step-00000008.pt", 40)]) == 1
    assert [path.name for path in home.rglob("*.pt")] == ["step-00000008.pt"]


def test_from_a_machine_without_any_none_is_brought(tmp_path: Path) -> None:
    assert checkpoints.bring(Elsewhere(), str(tmp_path / "nowhere"), tmp_path, lambda *_: None) is None


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
    made = hand_made(backend="hosts")
    home = made.folders.shared / "checkpoints/000002/step-00000008.pt"
    assert checkpoints.newest(made.job) == home
    silent = True
    assert checkpoints.newest(made.job) == home
    home.unlink()
    with pytest.raises(
        ClusterError, match="its checkpoints stay on its machines, and these do not give one: machine 2"
    ):
        checkpoints.newest(made.job)


# --- what is told -------------------------------------------------------------------------------------------------


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_lines_come_as_they_are_told_and_an_error_is_the_command_s(place: Fixture) -> None:
    told = 'print(\'{"kind": "row", "n": 1}\', flush=True)'
    rows = examine.examine(script(f"{told}; import time; time.sleep(60)"))
    assert next(rows) == {"kind": "row", "n": 1}
    rows.close()  # what runs is ended
    with pytest.raises(ClusterError, match=r"^too small$"):
        list(examine.examine(script('print(\'{"kind": "error", "error": "too small"}\'); raise SystemExit(1)')))
    with pytest.raises(ClusterError, match="ended with code 7"):
        list(examine.examine(script("raise SystemExit(7)")))


def rows() -> list[dict[str, Any]]:
    def row(crop: str, size: int, *tops: float) -> dict[str, Any]:
        buckets = [{"top1": top, "top5": top + 1} for top in tops]
        return {"crop": crop, "size": size, "top1": sum(tops) / 2, "top5": sum(tops) / 2 + 1, "buckets": buckets}

    return [row("center", 224, 40, 60), row("rect", 288, 1, 2), row("rect", 224, 44, 59), row("five", 224, 9, 9)]


def test_the_gain_is_that_of_rectangles_above_the_centre_of_the_same_size_by_bucket() -> None:
    buckets = [{"ratio": 0.7, "images": 10}, {"ratio": 1.3, "images": 10}]
    assert examine.gains(rows(), buckets) == [
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
    assert [one["size"] for one in said["gains"]] == [32, 48]
    assert said["checkpoint"].endswith(".pt") and said["plot"] == "crops.png"
    assert not finished.at_work()


def test_the_picture_has_a_row_for_each_image_and_a_column_for_each_crop(finished: Fixture, evaluated: Any) -> None:
    image = Image.open(finished.path / "crops.png")
    assert image.size[0] == crops.LEFT + 4 * (crops.CELL + crops.GAP)
    assert image.size[1] == crops.TOP + 6 * (crops.CELL + crops.TEXT + crops.GAP)


def test_a_checkpoint_by_its_name_and_as_a_table(finished: Fixture, evaluated: Any, tmp_path: Path) -> None:
    shutil.copy(json.loads(evaluated.out)["checkpoint"], tmp_path / "kept.pt")
    ran = finished.cli("eval", tmp_path / "kept.pt", "--data", finished.data, "--sizes", "32", "--workers", "0")
    assert ran.code == 0, ran
    top1 = f"{json.loads(evaluated.out)['rows'][0]['top1']:.3f}"
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["center", "32", "1", top1] in [one[:4] for one in lines]
    assert "rect at 32 above center, in points, by width / height:" in ran.out
    assert lines[-1][:2] == ["all", "20"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("job-7",), 102, "no such job"),
        (("nowhere.pt",), 2, "is neither a job nor a checkpoint"),
        (("home",), 2, "is neither a job nor a checkpoint"),
        (("job-1", "--crops", "middle"), 2, "known are center, rect, five, tta"),
        (("job-1", "--sizes", "224,8"), 2, "whole numbers of 16 or more"),
        (("job-1", "--sizes", ""), 2, "whole numbers of 16 or more"),
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
    found = crops.marked(Image.new("RGB", (100, 50), "#204060"), [[0.2, 0.1, 0.6, 0.5]])
    assert found.getpixel((30, 25)) == (0x20, 0x40, 0x60)
    assert min(found.getpixel((80, 25))) > 0x20 + 100  # type: ignore[type-var]
    assert found.getpixel((10, 10)) == (0xFF, 0xCC, 0x00) == found.getpixel((59, 39))


def test_a_right_answer_and_a_wrong_one_have_their_colours(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (40, 40), "#808080").save(stream, "JPEG")
    answers = [
        {"crop": crop, "boxes": [[0, 0, 1, 1]], "class": name, "percent": 50.0, "right": name == "cat"}
        for crop, name in (("center", "dog"), ("rect", "cat"))
    ]
    one = {
        "name": "cat/1.JPEG",
        "class": "cat",
        "jpeg": base64.b64encode(stream.getvalue()).decode(),
        "answers": answers,
    }
    crops.draw(tmp_path / "x.png", "title", [one])
    page = Image.open(tmp_path / "x.png").convert("RGB")
    words = crops.TOP + crops.CELL
    middle = crops.LEFT + crops.CELL + crops.GAP // 2
    left, right = (page.crop((x, words, x + crops.CELL, page.height)) for x in (crops.LEFT, middle))

    def colours(part: Any) -> set[Any]:
        return {colour for _, colour in part.getcolors(1 << 16)}

    assert (0xD1, 0x49, 0x5B) in colours(left) and (0x2A, 0x9D, 0x5C) in colours(right)
    assert (0x2A, 0x9D, 0x5C) not in colours(left) and (0xD1, 0x49, 0x5B) not in colours(right)
