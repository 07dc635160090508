"""The report in a real browser: nothing on its console, nothing broader than a phone, dark and light, not blank."""

import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.report_reader import done, draw_val, epoch, home, lost, step, thumbnails

from cluster import report as reports
from cluster.report import page
from cluster.report.html import table, tag
from cluster.report.page import CONTENT_SECURITY_POLICY
from cluster.report.style import CSS

Fixture = Any
PHONE, DESK = (390, 844), (1280, 900)
LIGHT, DARK = 1, 0
# A browser's window is 500 pixels broad at least: a phone is a frame in it.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><style>* {{ margin: 0; border: 0 }}</style>
<iframe width="{}" height="{}" srcdoc="{}"></iframe><script>
onload = () => {{
  const it = frames[0]
  const bad = [...it.document.querySelectorAll('.tile b')].filter(b => {{
    const text = it.document.createRange()
    text.selectNodeContents(b)
    const style = it.getComputedStyle(b), edge = b.parentElement.getBoundingClientRect().right
    const {{ height, right }} = text.getBoundingClientRect()
    return height > 1.7 * parseFloat(style.fontSize) || right > edge - 1
  }}).map(b => b.textContent)
  document.title = `${{it.document.documentElement.scrollWidth}} ${{it.innerWidth}}` + (bad.length ? ': ' + bad : '')
}}
</script>"""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture
def browser(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Open a page in a headless browser of a size: (what it printed, what stood on the console)."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no browser is installed here; Debian: sudo apt-get install chromium")

    def look(page: str, size: tuple[int, int], *words: str, scheme: int = LIGHT) -> tuple[str, str]:
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME.format(*size, escape(page)))
        more = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--virtual-time-budget=2000",
            "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={max(500, size[0])},{size[1]}", f"--blink-settings=preferredColorScheme={scheme}", *words,
            frame.as_uri(),
        ]  # fmt: skip
        ran = subprocess.run([program, *more], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout, "\n".join(line for line in ran.stderr.splitlines() if "CONSOLE" in line)

    return look


@pytest.fixture
def pages(hand_made: Fixture, tmp_path: Path) -> Callable[[str], str]:
    """Reports, by name: of a job with a lost machine, of two jobs, of one that has only just begun, of a long one."""
    data = draw_val(tmp_path / "data", "cat", "a class with a long_name_that_has_no_place_to_break_in_it_at_all")
    first, second, third, large = (hand_made(f"job-{n}", machines=max(1, 3 - n)) for n in (1, 2, 3, 4))
    for one in (first, second, third):
        thumbnails(one, data)
    for run in (first, second):
        lost(run)
        done(run, reason="a reason" if run is first else "R" * 300, versions={"torch": "2.13.0+" + "v" * 120})
    home(third, "metrics/000001.jsonl", step(1, 1.8e9))
    home(large, "metrics/000001.jsonl", step(1, 1.8e9), epoch(1, 1.8e9 + 10, top1=100.0, top5=100.0))
    large.write_status("training", step=98_765, steps=1_234_567, seconds=123_456.0)
    found = {"one": [first.job], "two": [first.job, second.job], "new": [third.job], "large": [large.job]}
    return lambda name: reports.render_report(found[name])


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_a_page_is_seen_in_the_dark_and_in_the_light_and_says_nothing_on_the_console(
    browser: Fixture, pages: Fixture, size: tuple[int, int], tmp_path: Path
) -> None:
    page = pages("one")
    for scheme in (LIGHT, DARK):
        shot = tmp_path / f"{scheme}.png"
        _, console = browser(page, size, f"--screenshot={shot}", scheme=scheme)
        assert console == ""
        with Image.open(shot) as image:
            seen = image.convert("RGB").crop((0, 0, *size))
        grey, colours = seen.convert("L").histogram(), seen.getcolors(1 << 20) or []
        bright = sum(grey[160:]) / sum(grey)
        assert bright > 0.8 if scheme == LIGHT else bright < 0.2, "the colours of the other scheme"
        assert sum(grey[96:160]) > 0.002 * sum(grey) and len(colours) > 200, "a blank picture"


@pytest.mark.parametrize("name", ["one", "two", "new", "large"])
def test_no_page_is_too_broad_for_its_screen_and_no_number_for_its_tile(
    browser: Fixture, pages: Fixture, name: str
) -> None:
    page = pages(name)
    for size in (PHONE, DESK, (1200, 900)):
        out, console = browser(page, size, "--dump-dom")
        found = re.search(r"<title>(\d+) (\d+)(.*)</title>", out)
        assert found and console == "", console
        assert not found[3], "numbers that break, or stick out of their tiles"
        assert int(found[1]) <= int(found[2]) == size[0], (name, size)


def test_a_table_that_goes_on_at_the_right_is_seen_to(browser: Fixture, tmp_path: Path) -> None:
    seen = {}
    for name, columns in (("fits", 2), ("goes on", 40)):
        body = tag("main", page.card(table([" "] * columns, [["wide"] * columns] * 3)))
        shot = tmp_path / "shot.png"
        _, console = browser(f"<!doctype html><style>{CSS}</style>{body}", PHONE, f"--screenshot={shot}")
        assert console == ""
        with Image.open(shot) as image:  # the height of an empty heading: main's padding, the card's, and some
            row = image.convert("L").crop((0, 30, 390, 31)).tobytes()
        seen[name] = row[100] - min(row[330:368])
    assert seen["fits"] == 0 and seen["goes on"] > 20, seen


def test_these_tests_would_hear_the_console_and_see_what_is_too_broad(browser: Fixture) -> None:
    wide = '<div style="width: 3000px">x</div><script>console.error("heard")</script>'
    out, console = browser(f"<!doctype html><body style='margin: 0'>{wide}", PHONE, "--dump-dom")
    assert "heard" in console and "<title>3000 390</title>" in out
    tile = '<div class="tile" style="width: 60px"><b>100.00 %</b></div>'
    for style in ("", "<style>b { white-space: nowrap }</style>"):  # it breaks, it sticks out
        out, _ = browser(f"<!doctype html>{style}{tile}", PHONE, "--dump-dom")
        assert "390: 100.00 %</title>" in out
    policy = f'<!doctype html><meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'
    for asking in ("<script>1</script>", '<img src="http://127.0.0.1:9/x.png">', '<link rel=stylesheet href="x.css">'):
        _, console = browser(policy + asking, PHONE, "--dump-dom")
        assert "Content Security Policy" in console, asking  # of ours it says nothing: they ask for nothing
