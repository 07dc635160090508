"""What README and ARCHITECTURE say is there: the commands parse, the files exist, the numbers are the code's."""

import re
import shlex
from pathlib import Path

import click
import pytest

from cluster import errors
from cluster.cli.app import cli

ROOT = Path(__file__).resolve().parents[2]
README, ARCHITECTURE = ((ROOT / name).read_text() for name in ("README.md", "ARCHITECTURE.md"))
FOREIGN = {"--nproc-per-node", "--out"}  # torchrun's, and the trainer's own


def typed(program: str, text: str) -> list[str]:
    """What a reader is told to type: lines that begin with the program, and quotations that do."""
    lines = re.findall(rf"^ +({program} [^#\n]+?)(?: *#.*)?$", text, re.MULTILINE)
    return lines + re.findall(rf"`({program} [^`]+)`", text)


def parse(words: list[str]) -> list[click.Command]:
    """Take the words as the command line would, to the last option, and run nothing; the commands on the way."""
    command, found, (name, *rest) = cli, [cli], words
    while isinstance(command, click.Group):
        name, command, rest = command.resolve_command(click.Context(command, info_name=name), rest)
        found.append(command)
    command.make_context(name, rest)
    return found


def commands(group: click.Group = cli, before: str = "") -> dict[str, click.Command]:
    """All commands by the words that call them."""
    found = {}
    for name, one in group.commands.items():
        found |= commands(one, f"{before}{name} ") if isinstance(one, click.Group) else {before + name: one}
    return found


@pytest.mark.parametrize("line", typed("imgnet-cluster", README + ARCHITECTURE))
def test_a_command_in_the_readme_can_be_typed(line: str) -> None:
    assert len(parse(shlex.split(line))) > 1


def test_the_check_above_refuses_what_cannot_be_typed() -> None:
    for line in ("imgnet-cluster lunch x.py", "imgnet-cluster launch --lokal x.py", "imgnet-cluster data resize a"):
        with pytest.raises(click.UsageError):
            parse(shlex.split(line))


@pytest.mark.parametrize("line", typed("make", README))
def test_a_target_of_make_in_the_readme_is_in_the_makefile(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("command", commands())
def test_every_command_is_named_in_the_readme(command: str) -> None:
    assert re.search(rf"(imgnet-cluster |`){command}\b", README)


def test_every_option_in_the_readme_is_one_of_ours() -> None:
    known = {word for one in commands().values() for option in one.params for word in option.opts} | {"--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named <= known | FOREIGN


def paths(text: str) -> set[str]:
    """The files and folders of this project that a text names."""
    found = set(re.findall(r"(?<![\w/.-])(?:cluster|infra|recipes|train|tests|benchmarks|\.ci)/[\w./-]*", text))
    found |= set(re.findall(r"(?<![\w/])[A-Z]+\.md\b", text))
    for folder, names in re.findall(r"^\| `([\w/]+/)([\w, /]+)`", text, re.MULTILINE):  # the table of rooms
        found |= {folder + name for name in names.split(", ")}
    return {one.rstrip(".") for one in found}


@pytest.mark.parametrize("path", sorted(paths(README) | paths(ARCHITECTURE)))
def test_a_file_that_the_documents_name_exists(path: str) -> None:
    assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists()


def test_the_exit_codes_of_the_readme_are_those_of_the_code() -> None:
    section = README.split("## Exit codes")[1].split("##")[0]
    told = {int(one) for one in re.findall(r"\b(\d+) [a-z]", section)}
    assert told == {value for value in vars(errors).values() if isinstance(value, int)}
