"""Rules for the tests themselves."""

import ast
from collections.abc import Iterator
from pathlib import Path

from support.gate import PROCESS_FILES, SMOKE_TESTS

REAL_CLOCKS = {"time.monotonic", "time.perf_counter", "time.time"}


def bounds_of_elapsed_time(source: str) -> Iterator[int]:
    """Yield the lines in which a difference to the time now is compared with an upper bound."""
    for comparison in ast.walk(ast.parse(source)):
        if not isinstance(comparison, ast.Compare):
            continue
        values = [comparison.left, *comparison.comparators]
        for left, operator, right in zip(values[:-1], comparison.ops, values[1:], strict=True):
            smaller = left if isinstance(operator, ast.Lt | ast.LtE) else right
            is_ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            if is_ordered and any(is_elapsed_time(node) for node in ast.walk(smaller)):
                yield comparison.lineno


def is_elapsed_time(node: ast.AST) -> bool:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Call)):
        return False
    return ast.unparse(node.left.func) in REAL_CLOCKS


def test_no_test_has_an_upper_bound_on_elapsed_real_time() -> None:
    """A busy computer would break it. Tests wait for events, or move a clock of their own."""
    bad = ["time.time() - a < 5", "0 <= time.monotonic() - a <= 5", "5 > abs(time.perf_counter() - a)"]
    good = ["time.time() - a > 5", "5 <= time.monotonic() - a", "clock.now() - a < 5", "time.monotonic() < deadline"]
    assert [line for line in bad + good if list(bounds_of_elapsed_time(line))] == bad
    folder = Path(__file__).parent
    places = [
        f"{path.relative_to(folder)}:{line}"
        for path in sorted(folder.rglob("*.py"))
        if any(clock in path.read_text() for clock in REAL_CLOCKS)
        for line in bounds_of_elapsed_time(path.read_text())
    ]
    assert not places, "wait for the event instead, with support.waiting.wait_for"


def test_gate_names_files_and_tests_that_exist() -> None:
    """A renamed file would silently lose its mark."""
    folder = Path(__file__).parent
    assert [path for path in PROCESS_FILES if not (folder / path).exists()] == []
    functions = [test.partition("[")[0].split("::") for test in SMOKE_TESTS]
    assert [name for path, name in functions if f"def {name}(" not in (folder / path).read_text()] == []
