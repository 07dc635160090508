"""Rules for the tests themselves."""

import re
from pathlib import Path

from support.gate import PROCESS_FILES, SMOKE_TESTS

FOLDER = Path(__file__).parent
ELAPSED = r"time\.(time|monotonic|perf_counter)\(\) - [\w.\[\]]+"
UPPER_BOUND = re.compile(rf"{ELAPSED}\)* <|> (abs\()?{ELAPSED}")


def test_no_test_has_an_upper_bound_on_elapsed_real_time() -> None:
    """A busy computer would break it. Tests wait for events, or move a clock of their own."""
    bad = ["time.time() - a < 5", "0 <= time.monotonic() - a <= 5", "5 > abs(time.perf_counter() - a)"]
    good = ["time.time() - a > 5", "5 <= time.monotonic() - a", "clock.now() - a < 5", "time.monotonic() < deadline"]
    assert [line for line in bad + good if UPPER_BOUND.search(line)] == bad
    places = [
        f"{path.relative_to(FOLDER)}:{number}"
        for path in sorted(FOLDER.rglob("*.py"))
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UPPER_BOUND.search(line)
    ]
    assert not places, "wait for the event instead, with support.waiting.wait_for"


def test_gate_names_files_and_tests_that_exist() -> None:
    """A renamed file would silently lose its mark."""
    assert [path for path in PROCESS_FILES if not (FOLDER / path).exists()] == []
    functions = [test.partition("[")[0].split("::") for test in SMOKE_TESTS]
    assert [name for path, name in functions if f"def {name}(" not in (FOLDER / path).read_text()] == []
