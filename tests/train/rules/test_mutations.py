"""The list of mutations stays true: what it would break is still there, once, and the tests it names exist."""

import ast
from pathlib import Path

import pytest
from support import mutations

RULES = Path(__file__).parent
TESTS = {
    f"{path.name.removeprefix('test_')}::{node.name}"
    for path in RULES.glob("test_*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
}


@pytest.mark.parametrize("one", mutations.MUTATIONS, ids=lambda one: one.name)
def test_a_mutation_finds_its_text_exactly_once_and_its_test(one: mutations.Mutation) -> None:
    assert one.stands, f"{one.file}: {one.text!r}"
    assert one.test in TESTS and one.broken != one.text
    ast.parse((mutations.ROOT / one.file).read_text().replace(one.text, one.broken))


def test_names_are_told_apart() -> None:
    names = [one.name for one in mutations.MUTATIONS]
    assert len(set(names)) == len(names) and len({(one.file, one.broken, one.text) for one in mutations.MUTATIONS})


def test_every_rule_is_broken_once() -> None:
    """Every test of a rule is named by a mutation, but for those that only show what a rule is for."""
    showing = {
        "momentum.py::test_the_absorbed_form_needs_the_correction_and_with_it_is_the_form_with_the_rate_outside",
        "mean.py::test_a_mean_of_uneven_workers_means_would_be_another_gradient",
        "batchnorm.py::test_the_running_statistics_move_by_a_tenth",
        "starts.py::test_without_it_a_block_is_not",
        "groups.py::test_there_are_thirty",
    }
    own = {name for name in TESTS if name.startswith("mutations.py")}
    assert TESTS - own - showing == {one.test for one in mutations.MUTATIONS}
