"""The command line: parses the arguments, calls `cluster.jobs` and prints the result.

Start-up must stay fast: a command imports what it needs inside its function, so `--help` and completion load no large
package.
"""

import sys

import click

from cluster.display.terminal import prepare_standard_streams
from cluster.errors import EXIT_INTERRUPTED, EXIT_USAGE

from . import cloud, data, data_fetch, evaluate, inspect, launch, plan, record, report
from .options import CommandGroup, exit_with_error


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="imgnet-cluster", prog_name="imgnet-cluster")
def cli() -> None:
    """Train an image classifier with one command, on your own machines or on rented ones.

    \b
    imgnet-cluster launch --local recipes/quickstart.py      train on a generated data set, on this computer
    imgnet-cluster attach job-1                              show the live tmux session
    imgnet-cluster tensorboard job-1                         show the curves
    """


cli.add_command(plan.plan)
for module in (launch, inspect, evaluate, record, report, cloud):
    for command in module.COMMANDS:
        cli.add_command(command)
for command in data_fetch.COMMANDS:
    data.data.add_command(command)
cli.add_command(data.data)


def main() -> None:
    """Run the command line and exit. Usage errors that click finds are one line too."""
    prepare_standard_streams()
    try:
        sys.exit(cli.main(prog_name="imgnet-cluster", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as help:
        click.echo(help.format_message())
        sys.exit(EXIT_USAGE)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        command_path = context.command_path if context else "imgnet-cluster"
        message = " ".join(error.format_message().split())
        exit_with_error(f"{message} ({command_path} --help)", EXIT_USAGE)
    except click.Abort:
        exit_with_error("interrupted", EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
