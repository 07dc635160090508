"""The list of mutations is up to date: each quoted text occurs once in its file, and each named test exists."""

import ast
from pathlib import Path

import pytest
from support import mutations

RULES = Path(__file__).parent
OTHERS = {mutations.ROOT / mutation.node.partition("::")[0] for mutation in mutations.MUTATIONS}
TESTS = {
    f"{path.relative_to(mutations.ROOT)}::{node.name}"
    for path in OTHERS | {*RULES.glob("test_*.py")}
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
}


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_quotes_a_unique_text_and_an_existing_test(mutation: mutations.Mutation) -> None:
    assert mutation.text_is_unique, f"{mutation.file}: {mutation.text!r}"
    assert mutation.node in TESTS and mutation.broken != mutation.text
    ast.parse((mutations.ROOT / mutation.file).read_text().replace(mutation.text, mutation.broken))


def test_every_rule_has_a_mutation_of_its_own_name() -> None:
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(set(names)) == len(names)
    rules = {name for name in TESTS if "/rules/" in name and "/test_mutations.py" not in name}
    assert rules <= {mutation.node for mutation in mutations.MUTATIONS}
