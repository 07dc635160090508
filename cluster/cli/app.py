"""The command line: parse, call `jobs`, show. Thin, and quick: what a command needs is imported inside it."""

import io
import sys
from typing import TYPE_CHECKING

import click

from cluster.errors import EXIT_INTERRUPTED, EXIT_USAGE

from . import cloud, data_fetch, evaluate, inspect, record, report
from .data import data
from .options import CommandGroup, exit_with_error
from .plan import plan

if TYPE_CHECKING:
    pass


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="imgnet-cluster", prog_name="imgnet-cluster")
def cli() -> None:
    """Train an ImageNet-scale image classifier with one command, on the machines you have or rent.

    \b
    imgnet-cluster launch --local recipes/quickstart.py      draw a data set and train on it, here
    imgnet-cluster attach job-1                              the live tmux session
    imgnet-cluster tensorboard job-1                         its curves
    """


cli.add_command(plan)


for _room in (inspect, evaluate, record, report, cloud):
    for _command in _room.COMMANDS:
        cli.add_command(_command)


for _command in data_fetch.COMMANDS:
    data.add_command(_command)
cli.add_command(data)


def main() -> None:
    """Run the command line; click's own errors are one line too."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # who reads along in a file or a pipe sees each line at once
        sys.stdout.reconfigure(line_buffering=True)
    try:
        sys.exit(cli.main(prog_name="imgnet-cluster", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as help:
        click.echo(help.format_message())
        sys.exit(EXIT_USAGE)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "imgnet-cluster"
        exit_with_error(f"{' '.join(error.format_message().split())} ({where} --help)", EXIT_USAGE)
    except click.Abort:
        exit_with_error("interrupted", EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
