"""Tests of the report in a headless browser: empty console, fits a phone, light and dark scheme, not blank."""

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

pytestmark = pytest.mark.rehearsal  # whole processes, which take long

Fixture = Any
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
def pages(hand_made: Fixture, tmp_path: Path) -> Callable[[str], str]:
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
    return lambda name: reports.render_report(jobs_by_name[name])


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_page_is_visible_in_both_schemes_with_empty_console(
    browser: Fixture, pages: Fixture, size: tuple[int, int], tmp_path: Path
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


@pytest.mark.parametrize("name", ["one", "two", "new", "large"])
def test_page_fits_its_screen_and_numbers_fit_their_tiles(browser: Fixture, pages: Fixture, name: str) -> None:
    page = pages(name)
    for size in (PHONE, DESK, (1200, 900)):
        output, console = browser(page, size, "--dump-dom")
        title = re.search(r"<title>(\d+) (\d+)(.*)</title>", output)
        assert title and console == "", console
        page_width, screen_width, bad_numbers = title.groups()
        assert not bad_numbers, "numbers that break, or stick out of their tiles"
        assert int(page_width) <= int(screen_width) == size[0], (name, size)
