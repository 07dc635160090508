"""docs/cli.md: the page is what the commands say, and every command and option says what it is."""

from collections.abc import Iterator
from pathlib import Path

import click
from cli_page import make_context, render_page

from cluster.cli.app import cli

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def commands_below(group: click.Group) -> Iterator[click.Command]:
    """Yield all commands of a group, and those of the groups below it."""
    for command in group.commands.values():
        yield command
        if isinstance(command, click.Group):
            yield from commands_below(command)


def test_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == render_page(), "python docs/tools/cli_page.py docs/cli.md"


def test_every_command_and_option_says_what_it_is() -> None:
    for command in commands_below(cli):
        assert "..." not in command.get_short_help_str(limit=61), f"{command.name}: the first sentence is cut off"
        assert all(option.help for option in command.params if isinstance(option, click.Option)), command.name


def test_help_lists_every_command_under_a_heading() -> None:
    sections = cli.commands_by_section(make_context(cli))
    assert sorted(name for names in sections.values() for name in names) == sorted(cli.commands)
    lines = cli.get_help(make_context(cli)).splitlines()
    for title, names in sections.items():
        first = lines.index(f"{title}:") + 1
        assert [line.split()[0] for line in lines[first : first + len(names)]] == names, "a sentence is wrapped"
