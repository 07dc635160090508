"""The report of jobs: its facts, its page, what it makes of hostile names, of little, and of nothing."""

import html.parser
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.report_reader import BEGIN, agent, done, draw_val, epoch, home, lost, step, thumbnails

from cluster import report as reports
from cluster.errors import ClusterError
from cluster.plots import curves, svg
from cluster.report import activity, sample_images, summary
from cluster.report import facts as report_facts
from cluster.report.html import Html, table, tag
from train.metrics import text as metrics_text
from train.recipe import IMAGENET, Optim

Fixture = Any
HOSTILE = "</title></style><script>alert(1)</script>\"'><img src=x onerror=alert(2)> & $\\frac{ --> ]]>"


class Reader(html.parser.HTMLParser):
    """A page as a browser reads it: elements, attributes, texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def titles(page: str) -> list[str]:
    return [one for one in re.findall(r"<figcaption>(.*?)</figcaption>", page)]


@pytest.fixture
def run(hand_made: Fixture, tmp_path: Path) -> Any:
    """A job of two machines that lost one of them, got it back, and is done."""
    found = hand_made(machines=2)
    thumbnails(found, draw_val(tmp_path / "data", "cat", "dog"))
    lost(found)
    done(found)
    return found


# --- facts ----------------------------------------------------------------------------------------------------------


def test_a_lost_machine_is_lost_from_its_last_word_until_it_is_back(run: Any) -> None:
    said = report_facts.collect_facts(run.job)
    assert said["losses"] == [("1", 13.0)]
    assert [one for one in said["lives"]["1"] if one[0] == "lost"] == [("lost", 13.0, 17.0)]
    assert said["lives"]["1"][0] == ("getting ready", 0.0, 4.0) and said["lives"]["1"][-1] == ("training", 21.0, 32.0)
    assert [(one["attempt"], one["seconds"], one["machines"]) for one in said["timeline"]] == [
        (1, 3.0, ["0", "1"]), (2, 15.0, ["0"]), (3, 20.0, ["0", "1"])
    ]  # fmt: skip
    assert [(one["at"], one["images"], one["top1"]) for one in said["epochs"]] == [(25.0, 60, 10.0), (32.0, 120, 20.0)]


def test_what_a_later_attempt_did_again_is_drawn_once(run: Any) -> None:
    assert [one["images"] for one in report_facts.collect_facts(run.job)["train"]] == [8, 32, 48, 56, 96]


def test_the_time_between_two_launches_is_not_time_at_work() -> None:
    clock = activity.WorkClock(
        {"0": [("training", 100.0, 160.0), ("lost", 160.0, 900.0), ("training", 1000.0, 1030.0)]}
    )
    assert [clock.seconds_at(one) for one in (50, 100, 130, 160, 500, 1000, 1010, 2000)] == [
        0,
        0,
        30,
        60,
        60,
        60,
        70,
        90,
    ]


def test_a_machine_that_stays_away_is_lost_to_the_end_and_a_spare_is_not(hand_made: Fixture) -> None:
    run = hand_made(machines=2, spares=1)
    agent(run, "0", ("training", 0), ("done", 50))
    agent(run, "1", ("training", 0), ("gone", 20))
    agent(run, "2", ("waiting", 0), ("done", 49))
    run.attempt(1, "0.a", "1.b", time=BEGIN)
    run.attempt(2, "0.a", time=BEGIN + 21)
    done(run)
    said = report_facts.collect_facts(run.job)
    assert said["lives"]["1"][-1] == ("lost", 20.0, 50.0) and said["losses"] == [("1", 20.0)]
    assert said["lives"]["2"] == [("waiting", 0.0, 49.0)]


def test_a_long_curve_is_thinned_and_keeps_its_end_and_its_mean() -> None:
    rows = [{"images": one, "at": one, "loss": float(one % 2), "speed": None, "lr": one} for one in range(10_001)]
    found = report_facts.downsample(rows, 100)
    assert len(found) == 100 and found[-1]["images"] == 10_000 and found[-1]["lr"] == 10_000
    assert all(0.49 < one["loss"] < 0.51 and one["speed"] is None for one in found)


def test_a_damaged_file_is_one_line(run: Any) -> None:
    run.folders.result_path.write_text('{"state": "done", "epochs": 3}')
    with pytest.raises(ClusterError, match="is damaged") as error:
        reports.render_report([run.job])
    assert "\n" not in str(error.value)


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_has_everything_in_it_and_asks_nobody(run: Any) -> None:
    page = reports.render_report([run.job])
    assert titles(page) == [
        "Accuracy over time", "Accuracy over images", "Loss over images", "Learning rate over images",
        "Side and global batch over images", "Images per second over time", "Machines over time",
        "Where the seconds of each epoch went", "Forecast and what it took",
    ]  # fmt: skip
    read = Reader(page)
    for word in (
        "20.00 %",
        "52.00 %",
        "87.0 %",
        "machine 1 lost",
        "cat",
        "2.13.0",
        "16.0, -6 %",
        "before it 1.2: group 1.2",
    ):
        assert word in read.text, word
    assert len(page) < 1_000_000
    assert not re.search(r"https?:|//\w", re.sub(r"base64,[\w+/=]+", "", page))
    assert not read.tags.keys() & {"script", "link", "iframe", "object", "base", "form"}
    for name, value in read.attributes:
        assert not name.startswith("on"), name
        assert name not in ("src", "href") or str(value).startswith(("data:image/jpeg;base64,", "#")), value
    assert not re.search(r"@import|url\((?!#)", page)


def test_a_page_of_the_largest_runs_stays_below_a_megabyte(hand_made: Fixture) -> None:
    run = hand_made(machines=64)
    for name in run.spec.machine_names:
        states = [(("training", "validating")[one % 2], 10.0 * one) for one in range(180)]
        agent(run, name, *states, ("done", 1800))
    run.attempt(1, *(f"{name}.a" for name in run.spec.machine_names), time=BEGIN)
    rows = [step(one, BEGIN + one / 5) for one in range(9000)]
    home(run, "metrics/000001.jsonl", *rows, *(epoch(one, BEGIN + 20.0 * one) for one in range(1, 91)))
    done(run)
    assert 100_000 < len(reports.render_report([run.job])) < 1_000_000


def test_the_drawings_name_colours_of_the_page_and_point_only_at_what_is_there(run: Any) -> None:
    page = reports.render_report([run.job])
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 10
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', page)) <= set(ids)
    drawn = "".join(re.findall(r"<svg viewBox.*?</svg>", page, re.DOTALL))
    assert not re.findall(r"#[0-9a-fA-F]{6}\b", drawn) and "font-family" not in drawn
    named = set(re.findall(r"var\(--(\w+)\)", page)) - {"key"}
    assert named <= set(re.findall(r"--(\w+):", page)) and {"ink", "grid", "s1"} <= named


def test_nothing_is_drawn_between_two_attempts(run: Any) -> None:
    [line] = curves._speed_curves([report_facts.collect_facts(run.job)], ("seconds", 1.0))
    assert [(at, math.isnan(speed)) for at, speed in line.points] == [
        (5.0, False), (17.0, True), (17.0, False), (19.0, False), (22.0, True), (22.0, False), (28.0, False)
    ]  # fmt: skip


def test_when_the_target_was_reached_stands_above(run: Any) -> None:
    told = {"metric": "top5", "goal": 52, "reached": True, "epoch": 2, "minutes": 0.48, "best": 52.0}
    done(run, target=told)
    text = Reader(reports.render_report([run.job])).text
    assert "top-5 of 52 % reached in epoch 2, 0.48 minutes after the start of loading" in text and "0.48\n" in text


def test_a_matplotlibrc_of_the_user_changes_nothing(run: Any) -> None:
    import matplotlib

    said = report_facts.collect_facts(run.job)
    with svg.matplotlib_settings():
        plain = [one.svg for one in curves.training_charts([said])]
    with matplotlib.rc_context({"font.size": 40, "axes.grid": False, "text.usetex": True}), svg.matplotlib_settings():
        assert [one.svg for one in curves.training_charts([said])] == plain


def test_hostile_names_are_texts(hand_made: Fixture, tmp_path: Path) -> None:
    data = draw_val(tmp_path / "data", HOSTILE.replace("/", "\u2044"), "$x_{", "b\udcffd")
    first = hand_made()
    plain = HOSTILE.replace("/", "").replace("\\", "")  # of a recipe's name
    recipe = replace(first.spec.recipe, name=plain, data=replace(first.spec.recipe.data, name=HOSTILE))
    run = hand_made("job-2", machines=2, recipe=recipe, recipe_file=HOSTILE, git_commit=HOSTILE)
    thumbnails(run, data)
    lost(run)
    run.attempt(2, "0.a", time=BEGIN + 15, reason=HOSTILE)
    done(run, reason=HOSTILE, recipe=plain, versions={HOSTILE: HOSTILE})
    run.folders.path.joinpath("machines.json").write_text(json.dumps({"machines": {"0": {"host": HOSTILE}}}))
    page = reports.render_report([run.job])
    read = Reader(page)
    assert "script" not in read.tags and not any(name.startswith("on") for name, _ in read.attributes)
    assert read.tags["title"] == read.tags["style"] == read.tags["main"] == 1
    assert read.text.count(HOSTILE) >= 5 and "alert(1)" in read.text and "$x_{" in read.text
    assert page.encode("utf-8")


def test_markup_escapes_all_but_its_own() -> None:
    assert tag("p", "<b>", Html("<i>"), None, class_='"x') == '<p class="&quot;x">&lt;b&gt;<i></p>'
    assert "&lt;u&gt;" in table(("<u>",), [("\x00\ud800<td>",)]) and "\ud800" not in table(("a",), [("\ud800",)])


def test_of_a_job_that_has_just_been_launched_there_is_a_page(hand_made: Fixture) -> None:
    run = hand_made()
    page = reports.render_report([run.job])
    assert titles(page) == [] and "Nothing was trained yet." in page and "None was kept" in page
    assert "0 to 2" in page  # what is planned


def test_before_the_first_validation_there_are_curves_and_no_accuracy(hand_made: Fixture) -> None:
    run = hand_made(forecast={"minutes": 3.0, "terms": {"compute": 60.0}, "source": "presets", "start": {}})
    home(run, "metrics/000001.jsonl", step(1, BEGIN), step(2, BEGIN + 1), epoch(1, BEGIN + 2, top1=None, top5=None))
    run.says("training", step=2, steps=16)
    page = reports.render_report([run.job])
    assert "No validation yet." in page and "Loss over images" in titles(page)
    assert not [one for one in titles(page) if "Accuracy" in one]
    assert "3 minutes in all (constants: presets)" in page and "Forecast" in titles(page)


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_job_that_did_not_end_well_says_why(hand_made: Fixture, state: str) -> None:
    run = hand_made()
    home(run, "metrics/000001.jsonl", step(1, BEGIN))
    done(run, state=state, reason="because of <that>", epochs=[], where=None, goodput=None, top1=None, top5=None)
    page = reports.render_report([run.job])
    assert "because of &lt;that&gt;" in page and f'class="state {state}"' in page


def test_a_run_of_an_older_version_has_a_page(hand_made: Fixture) -> None:
    run = hand_made()
    old = [{key: one for key, one in epoch(n, 0.0).items() if key not in ("where", "kind", "time")} for n in (1, 2)]
    done(run, epochs=old, forecast=None, against=None, where=None, schedule=None)
    agent(run, "0", ("training", 0), ("done", 30))
    page = reports.render_report([run.job])
    assert {"Accuracy over time", "Where the seconds of each epoch went"} <= set(titles(page))
    assert [one["at"] for one in report_facts.collect_facts(run.job)["epochs"]] == [11.5, 23.0]


def test_several_jobs_stand_side_by_side_and_the_same_images_once(run: Any, hand_made: Fixture) -> None:
    recipe = replace(run.spec.recipe, seed=11)
    second = hand_made("job-2", recipe=recipe)
    (second.folders.path / "logs").mkdir(exist_ok=True)
    shutil.copy(run.folders.path / "logs/val-000001.json", second.folders.path / "logs")
    home(second, "metrics/000001.jsonl", step(1, BEGIN), step(9, BEGIN + 9), epoch(1, BEGIN + 10))
    done(second)
    page = reports.render_report([run.job, second.job])
    assert titles(page).count("Accuracy over time") == 1 and titles(page).count("Machines over time") == 1
    assert re.search(r"<td[^>]*>seed</td><td[^>]*>0</td><td[^>]*>11</td>", page)
    assert "momentum" not in page.partition("Training</h2>")[0]  # they have it in common
    assert "job-2 top-5" in page and "the same as job-1's" in Reader(page).text
    assert 'aria-label="Machines over time"' in page and page.count("<h2>job-2: ") == 4
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def differences(*runs: Any) -> dict[str, list[str]]:
    """The first table of a page of several jobs: what stands in each row."""
    found = reports.render_report([one.job for one in runs]).partition("<h2>")[0]
    assert re.search(r'<div class="card"><div class="scroll" tabindex="0"><table>', found)
    rows = [Reader(one).texts for one in re.findall(r"<tr>(.*?)</tr>", re.sub(r"></td>", ">-</td>", found))]
    assert len({name for name, *_ in rows}) == len(rows), "a row stands there twice"
    return {name: values for name, *values in rows}


def test_jobs_differ_in_words_and_by_what_they_train_on_and_from(hand_made: Fixture) -> None:
    first = hand_made()
    recipe = first.spec.recipe
    phases = [replace(recipe.phases[0], frozen=True, rect_train=True, epochs=(0, 3))]
    second = hand_made(
        "job-2",
        recipe=replace(
            recipe, data=replace(recipe.data, name="mine", train=1000), phases=phases, optim=Optim(nesterov=True),
            model=replace(recipe.model, weights="old.pt"), comm="bf16",
        ),
        scale=0.5,
    )  # fmt: skip
    done(second, state="failed", reason="nothing <but> this", epochs=[], top1=None, top5=None)
    rows = differences(first, second)
    assert rows["data"] == ["drawn, 60 to train on, 20 to validate", "mine, 500 to train on, 10 to validate"]
    assert rows["training"] == [
        metrics_text.describe_training(first.spec.recipe),
        metrics_text.describe_training(second.spec.recipe),
    ]
    for word in ("nesterov", "old.pt", "bf16", "frozen", "rectangles"):
        assert word in rows["training"][1] and word not in rows["training"][0], word
    assert rows["epochs planned"] == ["2", "3"] and rows["epochs run"] == ["0", "0"]
    assert rows["why"][1] == "nothing <but> this"
    assert not any("_" in name or name in ("lr", "nesterov", "batch first", "epochs", "world") for name in rows)


def test_how_long_a_warm_up_is_stands_there_only_where_it_is_known(hand_made: Fixture) -> None:
    first = hand_made()
    [phase] = first.spec.recipe.phases
    warm = [replace(phase, epochs=(0, 1), lr=(0.0, 0.05)), replace(phase, epochs=(1, 2))]
    second = hand_made("job-2", recipe=replace(first.spec.recipe, phases=warm))
    assert differences(first, second)["epochs of warm-up"] == ["0", "1"]
    cycle = hand_made("job-3", recipe=replace(first.spec.recipe, phases=[replace(phase, shape="one_cycle")]))
    assert "epochs of warm-up" not in differences(second, cycle)


def test_provenance_counts_images_machines_and_processes_and_says_how_it_trains(hand_made: Fixture) -> None:
    small = hand_made(scale=0.1)
    said = dict(report_facts.collect_facts(small.job)["provenance"])
    assert said["images"] == "6 to train on, 2 to validate: a rehearsal with 0.1 of all"
    assert said["processes"] == "1 machine x 1 process, schedule for 1 GPU"
    assert said["training"] == metrics_text.describe_training(small.spec.recipe)
    large = hand_made("job-2", machines=2, procs=8, schedule_gpus=16)
    large = hand_made("job-3", machines=2, procs=8, schedule_gpus=16, recipe=replace(large.spec.recipe, data=IMAGENET))
    said = dict(report_facts.collect_facts(large.job)["provenance"])
    assert said["images"] == "1,281,167 to train on, 50,000 to validate"
    assert said["processes"] == "2 machines x 8 processes, schedule for 16 GPUs"


def test_minutes_that_are_compared_have_as_many_digits(run: Any) -> None:
    facts = report_facts.collect_facts(run.job)
    for took, told, shown in ((10.84, 11.0, ("10.8", "11.0")), (4.7, 0.907, ("4.70", "0.91"))):
        status = {**facts["status"], "seconds": 60 * took}
        found = summary.headline_values({**facts, "status": status, "forecast": {"minutes": told}})
        assert (found["minutes"], found["forecast, min"]) == shown


def test_a_forecast_is_said_once_and_beside_what_it_took(run: Any) -> None:
    read = Reader(reports.render_report([run.job]))
    assert "in all 25.0 seconds (constants: presets); it took 27.0 (-7 %)" in read.text
    assert len([one for one in read.texts if "16.0" in one and "-6 %" in one]) == 1
    assert "Forecast against actual" not in read.text


def test_why_an_attempt_began_is_there_in_full(run: Any) -> None:
    reason = "model, name: timm:resnet18 needs timm, which is not here (No module named 'timm'); " + 20 * "and more "
    run.attempt(3, "0.a", time=BEGIN + 20, reason=reason.strip())
    page = reports.render_report([run.job])
    assert reason.strip() in Reader(page).texts
    assert "steps lost" in page and "steps lost" not in reports.render_report([alone(run)])


def alone(run: Any) -> Any:
    """The same job before anything was lost: columns of nothing are left out."""
    for number in (2, 3):
        (run.folders.shared / f"attempts/{number:06d}.json").unlink()
    return run.job


def test_each_line_of_a_legend_can_be_seen(run: Any, hand_made: Fixture) -> None:
    assert (
        curves.short_piece_ends([(5.0, 1.0)], 1.0) == [0]
        and curves.short_piece_ends([(0.0, 1.0), (5.0, 1.0)], 1.0) == []
    )
    assert curves.short_piece_ends([(0.0, 1.0), (0.5, 1.0)], 1.0) == [1]
    nan = math.nan
    assert curves.short_piece_ends([(0.0, 1.0), (9.0, 1.0), (9.0, nan), (9.0, 2.0), (9.0, nan)], 1.0) == [3]
    short, none = hand_made("job-2"), hand_made("job-3")
    home(short, "metrics/000001.jsonl", step(1, BEGIN))
    with svg.matplotlib_settings():
        found = curves.training_charts([report_facts.collect_facts(one.job) for one in (run, short, none)])
    for chart in found:
        assert "job-3" not in "".join(key.name for key in chart.legend), chart.title
        if "job-2" in "".join(key.name for key in chart.legend):  # of one point
            assert re.search(r"<use [^>]*var\(--s2\)", chart.svg), chart.title
    [sizes] = [one for one in found if one.title.startswith("Side")]
    assert [one.name for one in sizes.legend] == ["job-1", "job-2"]
    assert len(re.findall(r"<use [^>]*var\(--s2\)", sizes.svg)) == 2


def test_what_rented_machines_cost_stands_there_and_over_time(hand_made: Fixture) -> None:
    run = hand_made(backend="aws", cloud={"places": []}, hosts={"machines": []})
    place = {"region": "us-east-1", "zone": "us-east-1a", "type": "g5.xlarge", "market": "spot", "price": 3.6}
    request = {"BlockDeviceMappings": [{"Ebs": {"VolumeSize": 100}}], "NetworkInterfaces": [{}]}
    home(
        run, "cloud.jsonl",
        {"time": BEGIN, "what": "ask", "number": 1, "place": place, "names": ["0"], "request": request},
        {"time": BEGIN, "what": "granted", "number": 1, "machines": [{"id": "i-1", "name": "0", "launched": BEGIN}]},
        {"time": BEGIN + 1000, "what": "gone", "id": "i-1", "name": "0", "ended": BEGIN + 1000, "why": "ended by us"},
    )  # fmt: skip
    done(run, dollars=1.0)
    said = report_facts.collect_facts(run.job)["dollars"]
    assert said["total"] == pytest.approx(1.003, abs=0.001) and said["over"][0][1] < said["over"][-1][1]
    assert said["over"][-1] == (1000.0, pytest.approx(said["total"]))
    page = reports.render_report([run.job])
    assert "Dollars spent over time" in titles(page) and "g5.xlarge" in page and "$1.00" in page


# --- validation images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (240, 240), (1200, 300)])
def test_the_box_is_what_the_validation_crops(size: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    from train.data.loading import crop
    from train.data.order import rect_val

    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    shape = rect_val.rect_crop_shape(width, height, 128)
    batch = torch.empty((1, *shape, 3), dtype=torch.uint8)
    crop.center_crop(data.getvalue(), (height, width), crop.image_views(batch)[0])
    left, top, wide, high = sample_images.centre_crop_box(size, shape)
    seen = batch[0].numpy().astype(float)
    for channel, begin, share in ((0, left, wide), (1, top, high)):
        assert seen[..., channel].min() == pytest.approx(255 * begin, abs=2.5)
        assert seen[..., channel].max() == pytest.approx(255 * (begin + share), abs=2.5)


def test_images_are_seen_as_the_schedules_row_validates_them(run: Any) -> None:
    found = sample_images.sample_images(run.folders.path, {"size": 64, "rect_val": True})
    assert len(found) == 6 and found[0]["size"] == (48, 80) and found[-1]["size"] == (90, 60)
    assert found[-1]["pixels"] == (96, 64) and found[-1]["square"] != found[-1]["rectangle"]
    square = sample_images.sample_images(run.folders.path, {"size": 64, "rect_val": False})
    assert square[0]["rectangle"] is None and square[0]["pixels"] == (64, 64)


def test_the_caption_says_that_a_rectangle_does_not_hold_all_of_a_tall_image(run: Any, hand_made: Fixture) -> None:
    assert "the square (solid)" in reports.render_report([run.job])
    phases = [replace(run.spec.recipe.phases[0], rect_val=True)]
    second = hand_made("job-2", recipe=replace(run.spec.recipe, phases=phases))
    (second.folders.path / "logs").mkdir(exist_ok=True)
    shutil.copy(run.folders.path / "logs/val-000001.json", second.folders.path / "logs")
    assert "at most 1.5 times as long as broad, so that part of a very tall" in reports.render_report([second.job])


@pytest.mark.parametrize("what", ["nothing", "half a file", "no list", "no JPEG"])
def test_without_images_a_line_says_so(run: Any, what: str) -> None:
    path = run.folders.path / "logs/val-000001.json"
    whole = path.read_bytes()
    path.unlink()
    if what != "nothing":
        path.write_bytes({"half a file": whole[:500], "no list": b"7", "no JPEG": b'[{"jpeg": "\'><script>"}]'}[what])
    assert "no trainer came as far" in Reader(reports.render_report([run.job])).text


# --- who writes it --------------------------------------------------------------------------------------------------


def test_the_command_writes_into_the_run_folder_or_where_it_is_told(place: Fixture, run: Any) -> None:
    ran = place.cli("report")
    assert ran.code == 0 and ran.out.strip() == str(run.folders.path / "report.html"), ran
    assert "machine 1 lost" in (run.folders.path / "report.html").read_text()
    assert place.cli("report", "1", "job-1", "-o", "here.html").out.strip() == "here.html"
    assert "side by side" not in (place.path / "here.html").read_text()  # the same job twice is one
    assert place.cli("report", "job-7").code == 102
    ran = place.cli("report", "job-1", "-o", "no/such/folder.html")
    assert ran.code == 1 and ran.err.startswith("error: ") and ran.err.count("\n") == 1


def test_several_jobs_have_their_page_beside_them(place: Fixture, run: Any, hand_made: Fixture) -> None:
    done(hand_made("job-2"))
    ran = place.cli("report", "2", "1")
    assert ran.code == 0 and ran.out.strip() == str(place.path / "runs/report.html"), ran
    assert "2 runs side by side" in (place.path / "runs/report.html").read_text()


def supervise(place: Fixture, run: Any) -> int:
    words = [sys.executable, "-m", "cluster.jobs.supervisor", str(run.folders.path)]
    return subprocess.run(words, cwd=place.path, env=place.env, timeout=60, capture_output=True).returncode


def test_the_supervisor_leaves_a_report_when_the_job_has_ended(place: Fixture, hand_made: Fixture) -> None:
    run = hand_made()
    run.says("failed", reason="the disk & the rest", ended=True)
    assert supervise(place, run) == 0 and run.job.state == "failed"
    assert "the disk &amp; the rest" in (run.folders.path / "report.html").read_text()
    assert not (run.folders.path / "supervisor.log").read_text()


def test_a_report_that_cannot_be_written_takes_nothing_from_the_job(place: Fixture, hand_made: Fixture) -> None:
    run = hand_made()
    run.says("stopped", reason="stopped by the user", ended=True)
    (run.folders.path / "report.html").mkdir()
    assert supervise(place, run) == 0 and run.job.state == "stopped"
    said = (run.folders.path / "supervisor.log").read_text()
    assert "no report was written" in said and said.count("\n") == 1 and "Traceback" not in said


def test_a_report_that_takes_for_ever_is_given_up(hand_made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.jobs import supervisor

    run = hand_made()
    done(run)
    monkeypatch.setattr(supervisor, "REPORT_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(supervisor, "module_command", lambda *_: ["sleep", "600"])
    supervisor.write_job_report(run.job)
    assert "the report took longer than" in (run.folders.path / "supervisor.log").read_text()
