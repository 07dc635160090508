"""Tests of the HTML report: facts, page, hostile names, jobs with little data, who writes it, and a browser's view."""

import html.parser
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image
from support import aws_journal
from support.report_reader import BEGIN, agent, done, draw_val, epoch, home, lost, step, thumbnails

from cluster.connectors.hosts_file import Hosts
from cluster.report import charts
from cluster.report import facts as report_facts
from cluster.report.page import render_report
from cluster.report.tables import cost_table
from cluster.state.states import MachineState
from infra.aws.journal_events import InstanceEnded
from infra.aws.launch_request import Place
from train.data.index.open import load_index
from train.metrics.records import StepRow
from train.metrics.thumbnails import write_class_thumbnails

HOSTILE = "</title></style><script>alert(1)</script>\"'><img src=x onerror=alert(2)> & $\\frac{ --> ]]>"


class Reader(html.parser.HTMLParser):
    """Parser that collects the elements, attributes and texts of a page, as a browser reads it."""

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


def chart_titles(page: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", page)


@pytest.fixture
def run(hand_made: Any, tmp_path: Path) -> Any:
    run = hand_made(machines=2, git_commit=f"{'a' * 40}+changes")
    thumbnails(run, draw_val(tmp_path / "data", "cat", "dog"))
    lost(run)
    done(run)
    return run


# --- facts ----------------------------------------------------------------------------------------------------------


def test_collect_facts_lost_machine_is_lost_until_it_is_back(run: Any) -> None:
    facts = report_facts.collect_facts(run.job)
    assert facts.losses == [("1", 13.0)]
    spans = facts.activity["1"]
    assert [span for span in spans if span[0] == "lost"] == [("lost", 13.0, 17.0)]
    assert spans[0] == ("setup", 0.0, 4.0) and spans[-1] == ("training", 21.0, 32.0)
    attempts = [(row.attempt, row.at, row.machines) for row in facts.timeline]
    assert attempts == [(1, 3.0, ("0", "1")), (2, 15.0, ("0",)), (3, 20.0, ("0", "1"))]
    epochs = [(epoch.time, epoch.images, epoch.top1) for epoch in facts.epochs]
    assert epochs == [(25.0, 60, 10.0), (32.0, 120, 20.0)]
    assert [step.images for step in facts.steps] == [8, 32, 48, 56, 96], "repeated steps appear once"


def test_work_clock_leaves_out_time_between_stop_and_resume() -> None:
    training, lost = MachineState.TRAINING, MachineState.LOST
    clock = report_facts.WorkClock({"0": [(training, 100.0, 160.0), (lost, 160.0, 900.0), (training, 1000.0, 1030.0)]})
    moments = (50, 100, 130, 160, 500, 1000, 1010, 2000)
    assert [clock.seconds_at(moment) for moment in moments] == [0, 0, 30, 60, 60, 60, 70, 90]


def test_collect_facts_machine_lost_for_good_is_lost_to_the_end(hand_made: Any) -> None:
    run = hand_made(machines=2, spares=1)
    agent(run, "0", ("training", 0), ("done", 50))
    agent(run, "1", ("training", 0), ("lost", 20))
    agent(run, "2", ("waiting", 0), ("done", 49))
    run.write_attempt(1, "0.a", "1.b", time=BEGIN)
    run.write_attempt(2, "0.a", time=BEGIN + 21)
    done(run)
    facts = report_facts.collect_facts(run.job)
    assert facts.activity["1"][-1] == ("lost", 20.0, 50.0) and facts.losses == [("1", 20.0)]
    assert facts.activity["2"] == [("waiting", 0.0, 49.0)]  # the spare was never a member


def test_machine_that_is_replaced_before_the_next_attempt_was_lost_and_one_that_was_resumed_was_not(
    hand_made: Any,
) -> None:
    run = hand_made()
    agent(run, "0", ("setup", 0), ("training", 4), ("lost", 13), ("setup", 30), ("training", 41), ("failed", 50))
    run.write_attempt(1, "0.a", time=BEGIN + 3)
    run.write_attempt(2, "0.b", time=BEGIN + 40)
    run.write_attempt(3, end_state="failed", time=BEGIN + 46)
    run.write_attempt(4, "0.c", time=BEGIN + 900, launch_id="of a resume")
    done(run, state="failed")
    assert report_facts.collect_facts(run.job).losses == [("0", 13.0)]
    labels = re.findall(r"> (\d)</text>", render_report([run.job]))
    assert labels == ["1", "2", "4"], "the row of the end is no start of an attempt"


def test_step_points_keep_end_and_mean() -> None:
    rows = [
        StepRow(
            attempt=1, time=number, step=number, images=number, epoch=1,
            scalars={"loss/train": number % 2, "sizes/lr": number, "sizes/image": None},
        )
        for number in range(10_001)
    ]  # fmt: skip
    kept = report_facts.step_points(rows, report_facts.WorkClock({"0": [(MachineState.TRAINING, 0.0, 10_001.0)]}), 100)
    assert len(kept) == 100 and (kept[-1].images, kept[-1].time, kept[-1].lr) == (10_000, 10_000, 10_000)
    assert all(0.49 < point.loss < 0.51 for point in kept)
    assert all(math.isnan(point.image_size) and math.isnan(point.images_per_second) for point in kept)


# --- the page -------------------------------------------------------------------------------------------------------


def test_render_report_page_is_complete_and_self_contained(run: Any) -> None:
    target = {"metric": "top5", "goal": 52, "stops": False, "reached": True, "epoch": 2, "minutes": 0.48, "best": 52.0}
    done(run, target=target)
    with matplotlib.rc_context({"font.size": 40, "axes.grid": False, "text.usetex": True}):  # a matplotlibrc
        page = render_report([run.job])
    assert chart_titles(page) == [
        "Accuracy over time", "Accuracy over images", "Loss over images", "Learning rate over images",
        "Image size and global batch over images", "Images per second over time", "Machines over time",
        "Time of each epoch by part", "Forecast and actual time",
    ]  # fmt: skip
    reader = Reader(page)
    for text in (
        "20.00 %",
        "52.00 %",
        "87.0 %",
        "machine 1 lost",
        "cat",
        "2.13.0",
        "16.0, -6 %",
        "before the first step, in seconds: 1.2 (trainers connect 1.2)",
        "total: forecast 25.0 seconds (constants: presets), actual 27.0 (-7 %)",
        "the square (solid)",
        f"{'a' * 40}, with files that are not committed",
        "2 machines x 1 process, schedule for 1 GPU",
        "top-5 of 52 % reached in epoch 2, 0.48 minutes after the start of loading",
    ):
        assert text in reader.text, text
    assert len(page) < 1_000_000
    assert not re.search(r"https?:|//\w", re.sub(r"base64,[\w+/=]+", "", page))
    assert not reader.tags.keys() & {"script", "link", "iframe", "object", "base", "form"}
    for name, value in reader.attributes:
        assert not name.startswith("on"), name
        assert name not in ("src", "href") or str(value).startswith(("data:image/jpeg;base64,", "#")), value
    assert not re.search(r"@import|url\((?!#)", page)


def test_render_report_shows_the_most_confused_classes_with_images(run: Any, tmp_path: Path) -> None:
    confusion = {"classes": ["lynx", "<i>fox", "emu"], "images": [10, 9, 9], "right": [4, 9, 9], "pairs": [[0, 1, 6]]}
    (run.run_folder.path / "network").mkdir()
    (run.run_folder.path / "network" / "confusion.json").write_text(json.dumps(confusion))
    index = load_index(draw_val(tmp_path / "animals", "<i>fox", "lynx", "emu"), "val")
    page = render_report([run.job])
    assert "Most frequent errors" in page and "Classes of the lowest accuracy" in page
    assert ">40.0<" in page and ">60.0<" in page and "taken for &lt;i&gt;fox" not in page
    write_class_thumbnails(index, [2, 0], run.run_folder.path, 1)
    page = render_report([run.job])
    assert "lynx taken for &lt;i&gt;fox" in page and "6 of the class, 60.0 %" in page
    assert page.count('alt="validation image, lynx"') == page.count('alt="validation image, &lt;i&gt;fox"') == 1


def test_render_report_hostile_names_stay_text(hand_made: Any, tmp_path: Path) -> None:
    data = draw_val(tmp_path / "data", HOSTILE.replace("/", "\u2044"), "$x_{", "b\udcffd")
    first = hand_made()
    recipe_name = HOSTILE.replace("/", "").replace("\\", "")  # a recipe refuses names with these characters
    recipe = replace(first.spec.recipe, name=recipe_name, data=replace(first.spec.recipe.data, name=HOSTILE))
    run = hand_made("job-2", machines=2, recipe=recipe, recipe_file=HOSTILE, git_commit=HOSTILE)
    thumbnails(run, data)
    lost(run)
    run.write_attempt(2, "0.a", time=BEGIN + 15, reason=HOSTILE)
    done(run, state="failed", reason=HOSTILE, recipe=recipe_name, versions={HOSTILE: HOSTILE})
    run.run_folder.path.joinpath("machines.json").write_text(json.dumps({"machines": {"0": {"host": HOSTILE}}}))
    page = render_report([run.job])
    reader = Reader(page)
    assert "script" not in reader.tags and not any(name.startswith("on") for name, _ in reader.attributes)
    assert reader.tags["title"] == reader.tags["style"] == reader.tags["main"] == 1
    assert ("class", "state failed") in reader.attributes
    assert reader.text.count(HOSTILE) >= 5 and "alert(1)" in reader.text and "$x_{" in reader.text
    assert page.encode("utf-8")


def test_render_report_of_a_job_that_begins_has_what_there_is(hand_made: Any) -> None:
    run = hand_made(forecast={"minutes": 1740.0, "terms": {"compute": 60.0}, "source": "presets", "start": {}})
    page = render_report([run.job])
    assert chart_titles(page) == ["Forecast"] and "1740 minutes in total (constants: presets)" in page
    assert "Training has not started yet." in page and "There are none: no trainer" in page
    assert ">0-2<" in page  # the planned schedule
    home(run, "metrics/000001.jsonl", step(1, BEGIN), step(2, BEGIN + 1), epoch(1, BEGIN + 2, top1=None, top5=None))
    run.write_status("training", step=2, steps=16)
    page = render_report([run.job])
    assert "No validation yet." in page and "Loss over images" in chart_titles(page)
    assert not [title for title in chart_titles(page) if "Accuracy" in title]


def test_render_report_several_jobs_share_charts_and_images(run: Any, hand_made: Any) -> None:
    recipe = replace(run.spec.recipe, seed=11)
    second = hand_made("job-2", recipe=recipe)
    (second.run_folder.path / "logs").mkdir(exist_ok=True)
    shutil.copy(run.run_folder.path / "logs/val-000001.json", second.run_folder.path / "logs")
    home(second, "metrics/000001.jsonl", step(1, BEGIN), step(9, BEGIN + 9), epoch(1, BEGIN + 10))
    done(second)
    page = render_report([run.job, second.job])
    assert chart_titles(page).count("Accuracy over time") == 1 and chart_titles(page).count("Machines over time") == 1
    assert re.search(r"<td[^>]*>seed</td><td[^>]*>0</td><td[^>]*>11</td>", page)
    assert "momentum" not in page.partition("Training</h2>")[0]  # the jobs have it in common
    assert "job-2 top-5" in page and "the same as job-1's" in Reader(page).text
    assert 'aria-label="Machines over time"' in page and page.count("<h2>job-2: ") == 4
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 10
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', page)) <= set(ids)
    drawings = "".join(re.findall(r"<svg viewBox.*?</svg>", page, re.DOTALL))
    assert not re.findall(r"#[0-9a-fA-F]{6}\b", drawings) and "font-family" not in drawings, "CSS says both"
    used_variables = set(re.findall(r"var\(--(\w+)\)", page)) - {"key"}
    assert used_variables <= set(re.findall(r"--(\w+):", page)) and {"ink", "grid", "s1"} <= used_variables


def test_the_curves_of_ten_jobs_look_different(hand_made: Any) -> None:
    runs = [hand_made(f"job-{number}") for number in range(1, 11)]
    for run in runs:
        home(run, "metrics/000001.jsonl", step(1, BEGIN), step(9, BEGIN + 9), epoch(1, BEGIN + 10))
        run.write_status("training", step=9, steps=16)
    for chart in charts.training_charts([report_facts.collect_facts(run.job) for run in runs]):
        assert len({(entry.color, entry.symbol) for entry in chart.legend}) == len(chart.legend) >= 10


def test_render_report_rented_job_shows_cost_over_time(hand_made: Any) -> None:
    run = hand_made(backend="aws", cloud={"places": []}, hosts=Hosts(None, ()))
    place = Place(region="us-east-1", zone="us-east-1a", type="g5.xlarge", market="spot", price=3.6)
    aws_journal.write_journal(
        run.run_folder.path / "cloud.jsonl",
        aws_journal.launch_request(1, place, ["0"], BEGIN, has_overhead=True),
        aws_journal.request_granted(1, ("i-1", "0", BEGIN), time=BEGIN),
        InstanceEnded(time=BEGIN + 1000, id="i-1", name="0", ended=BEGIN + 1000, reason="ended by us"),
    )
    done(run, dollars=1.0)
    facts = report_facts.collect_facts(run.job)
    assert facts.cost.dollars == pytest.approx(1.003, abs=0.001)
    assert facts.dollars_over_time[0][1] < facts.dollars_over_time[-1][1]
    assert facts.dollars_over_time[-1] == (1000.0, pytest.approx(facts.cost.dollars))
    assert cost_table(facts.cost).caption.endswith(" in total")
    note = " in total, 0.5000 of them for traffic and what belongs to no machine"
    assert cost_table(replace(facts.cost, nat_dollars=0.5)).caption.endswith(note)
    page = render_report([run.job])
    assert "Cost over time" in chart_titles(page) and "g5.xlarge" in page and "$1.00" in page


# --- validation images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (240, 240), (1200, 300)])
def test_center_crop_box_is_what_center_crop_reads(size: tuple[int, int]) -> None:
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
    left, top, box_width, box_height = report_facts.center_crop_box(size, shape)
    crop_pixels = batch[0].numpy().astype(float)
    for channel, begin, length in ((0, left, box_width), (1, top, box_height)):
        assert crop_pixels[..., channel].min() == pytest.approx(255 * begin, abs=2.5)
        assert crop_pixels[..., channel].max() == pytest.approx(255 * (begin + length), abs=2.5)


def test_render_report_shows_the_rectangle_that_the_last_phase_sees(hand_made: Any, tmp_path: Path) -> None:
    run = hand_made()
    phases = [replace(run.spec.recipe.phases[0], size=64, rect_val=True)]
    run = hand_made("job-2", recipe=replace(run.spec.recipe, phases=phases))
    thumbnails(run, draw_val(tmp_path / "data", "cat", "dog"))
    page = render_report([run.job])
    assert "at most 1.5 times as long as it is wide, so that parts of a very tall" in page
    assert "90 wide, 60 high; seen as 96 x 64" in page and page.count('class="square"') == 6


def test_render_report_unreadable_images_are_one_line(run: Any) -> None:
    (run.run_folder.path / "logs/val-000001.json").write_text("""[{"jpeg": "'><script>"}]""")
    assert "There are none: no trainer" in Reader(render_report([run.job])).text


# --- who writes it --------------------------------------------------------------------------------------------------


def test_report_command_writes_run_folder_or_output(sandbox: Any, run: Any, hand_made: Any) -> None:
    completed = sandbox.cli("report")
    assert completed.code == 0 and completed.out.strip() == str(run.run_folder.path / "report.html"), completed
    assert "machine 1 lost" in (run.run_folder.path / "report.html").read_text()
    assert sandbox.cli("report", "1", "job-1", "-o", "here.html").out.strip() == "here.html"
    assert "side by side" not in (sandbox.path / "here.html").read_text()  # the same job twice is one
    assert sandbox.cli("report", "job-7").code == 102
    done(hand_made("job-2"))
    assert sandbox.cli("report", "2", "1").out.strip() == str(sandbox.path / "runs/report.html")
    assert "2 runs side by side" in (sandbox.path / "runs/report.html").read_text()
    completed = sandbox.cli("report", "job-1", "-o", "no/such/folder.html")
    assert completed.code == 1 and completed.err.startswith("error: ") and completed.err.count("\n") == 1


@pytest.mark.parametrize("is_writable", [True, False])
def test_supervisor_writes_report_when_job_has_ended_and_its_failure_harms_nothing(
    sandbox: Any, hand_made: Any, is_writable: bool
) -> None:
    run = hand_made()
    run.write_status("failed", reason="the disk & the rest", ended=True)
    report, log = run.run_folder.path / "report.html", run.run_folder.path / "report.log"
    if not is_writable:
        report.mkdir()
    argv = [sys.executable, "-m", "cluster.jobs.supervisor", str(run.run_folder.path)]
    environment = {name: value for name, value in sandbox.env.items() if name != "IMGNET_NO_REPORT"}
    completed = subprocess.run(argv, cwd=sandbox.path, env=environment, timeout=60, capture_output=True)
    assert completed.returncode == 0 and run.job.state == "failed"
    if is_writable:
        assert "the disk &amp; the rest" in report.read_text() and not log.read_text()
    else:
        assert "no report was written" in log.read_text() and log.read_text().count("\n") == 1


def test_write_job_report_gives_up_after_timeout(
    hand_made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cluster.jobs import supervisor

    run = hand_made()
    done(run)
    monkeypatch.setattr(supervisor, "REPORT_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(supervisor, "module_command", lambda *_: ["sleep", "600"])
    supervisor.write_job_report(run.job)
    assert "the report took longer than" in caplog.text


# --- in a headless browser -----------------------------------------------------------------------------------------

PHONE, DESK = (390, 844), (1280, 900)
LIGHT, DARK = 1, 0
# A browser window is at least 500 pixels wide, so the page is shown in a frame of the size of the screen. The script
# writes the widths of page and screen into the title, and each number that breaks or sticks out of its tile.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><style>* {{ margin: 0; border: 0 }}</style>
<iframe width="{}" height="{}" srcdoc="{}"></iframe><script>
onload = () => {{
  const page = frames[0]
  const bad = [...page.document.querySelectorAll('.tile b')].filter(b => {{
    const text = page.document.createRange()
    text.selectNodeContents(b)
    const style = page.getComputedStyle(b), edge = b.parentElement.getBoundingClientRect().right
    const {{ height, right }} = text.getBoundingClientRect()
    return height > 1.7 * parseFloat(style.fontSize) || right > edge - 1
  }}).map(b => b.textContent)
  const pageWidth = page.document.documentElement.scrollWidth
  document.title = `${{pageWidth}} ${{page.innerWidth}}` + (bad.length ? ': ' + bad : '')
}}
</script>"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture
def browser(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Open a page in a headless browser with a screen of a size; return its output and the lines of its console."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no browser is installed here; Debian: sudo apt-get install chromium")

    def open_page(page: str, size: tuple[int, int], *options: str, scheme: int = LIGHT) -> tuple[str, str]:
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME.format(*size, escape(page)))
        argv = [
            program,
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--virtual-time-budget=2000",
            "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={max(500, size[0])},{size[1]}", f"--blink-settings=preferredColorScheme={scheme}", *options,
            frame.as_uri(),
        ]  # fmt: skip
        completed = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout, "\n".join(line for line in completed.stderr.splitlines() if "CONSOLE" in line)

    return open_page


@pytest.fixture
def pages(hand_made: Any, tmp_path: Path) -> Callable[[str], str]:
    """Return a report by name: a job that lost a machine, two jobs, a job that has just begun, a job of many steps."""
    data = draw_val(tmp_path / "data", "cat", "a class with a long_name_that_has_no_place_to_break_in_it_at_all")
    first, second, third, large = (hand_made(f"job-{number}", machines=max(1, 3 - number)) for number in (1, 2, 3, 4))
    for run in (first, second, third):
        thumbnails(run, data)
    for run in (first, second):
        lost(run)
        done(run, reason="a reason" if run is first else "R" * 300, versions={"torch": "2.13.0+" + "v" * 120})
    home(third, "metrics/000001.jsonl", step(1, 1.8e9))
    home(large, "metrics/000001.jsonl", step(1, 1.8e9), epoch(1, 1.8e9 + 10, top1=100.0, top5=100.0))
    large.write_status("training", step=98_765, steps=1_234_567, seconds=123_456.0)
    jobs_by_name = {"one": [first.job], "two": [first.job, second.job], "new": [third.job], "large": [large.job]}
    return lambda name: render_report(jobs_by_name[name])


@pytest.mark.rehearsal
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_page_is_visible_in_both_schemes_with_empty_console(
    browser: Any, pages: Any, size: tuple[int, int], tmp_path: Path
) -> None:
    page = pages("one")
    for scheme in (LIGHT, DARK):
        screenshot = tmp_path / f"{scheme}.png"
        _, console = browser(page, size, f"--screenshot={screenshot}", scheme=scheme)
        assert console == ""
        with Image.open(screenshot) as image:
            screen = image.convert("RGB").crop((0, 0, *size))
        histogram = screen.convert("L").histogram()
        bright_fraction = sum(histogram[160:]) / sum(histogram)
        is_scheme_right = bright_fraction > 0.8 if scheme == LIGHT else bright_fraction < 0.2
        assert is_scheme_right, "the page has the colors of the other scheme"
        has_mid_tones = sum(histogram[96:160]) > 0.002 * sum(histogram)
        assert has_mid_tones and len(screen.getcolors(1 << 20) or []) > 200, "the page is blank"


@pytest.mark.rehearsal
@pytest.mark.parametrize("name", ["one", "two", "new", "large"])
def test_page_fits_its_screen_and_numbers_fit_their_tiles(browser: Any, pages: Any, name: str) -> None:
    page = pages(name)
    for size in (PHONE, DESK, (1200, 900)):
        output, console = browser(page, size, "--dump-dom")
        title = re.search(r"<title>(\d+) (\d+)(.*)</title>", output)
        assert title and console == "", console
        page_width, screen_width, bad_numbers = title.groups()
        assert not bad_numbers, "numbers that break, or stick out of their tiles"
        assert int(page_width) <= int(screen_width) == size[0], (name, size)
