"""docs/cli.md: every command of `imgnet-cluster` with its usage, help text and options, as click knows them."""

import inspect
from collections.abc import Iterator, Mapping, Sequence

import click
from page_output import write_page

from cluster.cli.app import cli
from cluster.cli.options import CommandGroup, GroupedCommand

PROGRAM = "imgnet-cluster"
PAGE_HEAD = """\
# The commands

Every command prints this help with `-h` or `--help`. Data goes to stdout, messages to stderr; errors are one line. The
exit codes are listed in the [README](../README.md#exit-codes). This page is written by
`python docs/tools/cli_page.py docs/cli.md`, and a test compares it with the code.
"""


def make_context(command: click.Command, parent: click.Context | None = None) -> click.Context:
    """Return a context in which a command can describe itself."""
    return click.Context(command, info_name=command.name if parent else PROGRAM, parent=parent, show_default=True)


def escape_cell(text: str) -> str:
    """Return plain text as the cell of a Markdown table."""
    for character, replacement in (("&", "&amp;"), ("<", "&lt;"), ("*", "\\*"), ("_", "\\_"), ("|", "\\|")):
        text = text.replace(character, replacement)
    return " ".join(text.split())


def code_cell(text: str) -> str:
    """Return text as code in the cell of a Markdown table."""
    return "`" + text.replace("|", "\\|") + "`"


def usage(context: click.Context) -> str:
    """Return the usage line, such as "imgnet-cluster stop [OPTIONS] JOB"."""
    return " ".join([context.command_path, *context.command.collect_usage_pieces(context)])


def help_paragraphs(command: click.Command) -> Iterator[str]:
    r"""Yield the paragraphs of a command's help text. Those that click prints unchanged (\b) become code blocks."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield "```text\n" + paragraph.removeprefix("\b\n") + "\n```"
        else:
            yield " ".join(paragraph.split())


def options_by_group(context: click.Context) -> Mapping[str, Sequence[click.Option]]:
    """Return the options of a command under the headings of its `--help`, without `--help` itself."""
    command = context.command
    if isinstance(command, GroupedCommand):
        groups = command.options_by_group(context)
    else:
        groups = {"Options": [param for param in command.get_params(context) if isinstance(param, click.Option)]}
    help_option = command.get_help_option(context)
    without_help = {
        name: [option for option in options if option is not help_option] for name, options in groups.items()
    }
    return {name: options for name, options in without_help.items() if options}


def options_tables(context: click.Context) -> Iterator[str]:
    """Yield a table for each group of a command's options."""
    for name, options in options_by_group(context).items():
        yield f"| {name} | |\n|---|---|"
        for option in options:
            record = option.get_help_record(context)
            if record:
                names, text = record
                yield f"| {code_cell(names)} | {escape_cell(text)} |"
        yield ""


def command_section(context: click.Context, level: int = 2) -> Iterator[str]:
    """Yield the section of a command: heading, usage, help text, options; then those of its subcommands."""
    path = context.command_path.removeprefix(f"{PROGRAM} ")
    yield f"{'#' * level} {path}\n"
    yield f"```text\n{usage(context)}\n```\n"
    for paragraph in help_paragraphs(context.command):
        yield paragraph + "\n"
    yield from options_tables(context)
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            yield from command_section(make_context(context.command.commands[name], context), level + 1)


def commands_tables(context: click.Context, group: CommandGroup) -> Iterator[str]:
    """Yield a table for each section of a group's commands, with the first sentence of their help."""
    for title, names in group.commands_by_section(context).items():
        yield f"| {title} | |\n|---|---|"
        for name in names:
            first_paragraph = next(help_paragraphs(group.commands[name]))
            yield f"| [{name}](#{name}) | {escape_cell(first_paragraph)} |"
        yield ""


def render_page() -> str:
    """Return the whole page."""
    context = make_context(cli)
    lines = [PAGE_HEAD, *commands_tables(context, cli)]
    for name in cli.list_commands(context):
        lines += command_section(make_context(cli.commands[name], context))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    write_page(render_page())
