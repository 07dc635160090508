"""docs/cli.md: the page is what the commands say, and names every command and option."""

import re
from pathlib import Path

import click
import pytest
from cli_page import escape_cell, help_paragraphs, make_context, options_by_group, render_page, usage

from cluster.cli.app import cli

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def all_contexts(context: click.Context) -> list[click.Context]:
    """The contexts of all commands of a group, and of the groups below it."""
    contexts = []
    assert isinstance(context.command, click.Group)
    for command in context.command.commands.values():
        contexts.append(make_context(command, context))
        if isinstance(command, click.Group):
            contexts += all_contexts(contexts[-1])
    return contexts


CONTEXTS = all_contexts(make_context(cli))


def section(context: click.Context) -> str:
    """The part of the page about one command, without its subcommands."""
    heading = context.command_path.removeprefix("imgnet-cluster ")
    match = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert match, f"docs/cli.md has no section {heading!r}"
    return match[1]


def test_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == render_page(), "python docs/tools/cli_page.py docs/cli.md"


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.command_path)
def test_page_section_has_usage_help_and_every_option(context: click.Context) -> None:
    text = section(context)
    assert f"\n{usage(context)}\n" in text
    assert all(paragraph in text for paragraph in help_paragraphs(context.command))
    options = [param for param in context.command.params if isinstance(param, click.Option)]
    assert [
        option for options in options_by_group(context).values() for option in options if option not in options
    ] == []
    for option in options:
        assert option.help and all(name in text for name in option.opts), option.opts


def test_escape_cell_keeps_text_readable_as_markdown() -> None:
    assert escape_cell("train/<class>/*.JPEG,  a|b") == "train/&lt;class>/\\*.JPEG, a\\|b"


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.command_path)
def test_first_help_sentence_fits_the_list_of_commands(context: click.Context) -> None:
    """click cuts a longer one off with three dots."""
    first_paragraph = next(help_paragraphs(context.command))
    assert first_paragraph.endswith(".") and not first_paragraph.endswith("...")
    assert "..." not in context.command.get_short_help_str(limit=61)


def test_help_lists_every_command_under_a_heading_with_its_whole_sentence() -> None:
    context = make_context(cli)
    sections = cli.commands_by_section(context)
    assert list(sections) == ["Start", "Plan and run", "Look at jobs", "Results", "AWS", "Data"], (
        "a command is in none of them"
    )
    assert sorted(name for names in sections.values() for name in names) == sorted(cli.commands)
    lines = cli.get_help(context).splitlines()
    for title, names in sections.items():
        first = lines.index(f"{title}:") + 1
        assert [line.split()[0] for line in lines[first : first + len(names)]] == names, "no sentence is wrapped"
        for name, line in zip(names, lines[first:], strict=False):
            assert line.endswith(cli.commands[name].get_short_help_str(limit=1000)) and "..." not in line
