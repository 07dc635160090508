"""What all commands share: grouped options, errors as one line with an exit code, JSON output."""

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from cluster.errors import EXIT_ERROR, EXIT_INTERRUPTED, ClusterError

CommandFunction = Callable[..., Any]

# The headings of `--help`, in this order.
OPTION_GROUPS = ("Machines", "AWS", "Data", "Training", "Recovery", "Limits", "Forecast", "Output")


class FiniteFloatRange(click.FloatRange):
    """A number in a range. NaN and infinity are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Fails as click's types do."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return float(number)


class GroupedOption(click.Option):
    """An option that names the group under which `--help` shows it.

    Raises `ValueError` when the group is none of `OPTION_GROUPS`.
    """

    def __init__(self, *args: Any, help_group: str, **attributes: Any) -> None:
        if help_group not in OPTION_GROUPS:
            raise ValueError(f"{help_group!r} is not a group of options; the groups are {', '.join(OPTION_GROUPS)}")
        super().__init__(*args, **attributes)
        self.help_group = help_group


def grouped_option(help_group: str, *declarations: str, **attributes: Any) -> Callable[[Any], Any]:
    """Return a decorator like `click.option` whose option is shown under a heading of `--help`."""
    return click.option(*declarations, cls=GroupedOption, help_group=help_group, **attributes)


class GroupedCommand(click.Command):
    """A command whose `--help` shows the options under headings, in the order of `OPTION_GROUPS`.

    Within a group, options are listed in the order of their declaration: the common ones first.
    """

    def options_by_group(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """Return the options under their headings, without empty groups.

        An option without a group is shown under "Output"; click's own `--help` is the only one.
        """
        groups: dict[str, list[click.Option]] = {name: [] for name in OPTION_GROUPS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                groups[param.help_group if isinstance(param, GroupedOption) else "Output"].append(param)
        return {name: options for name, options in groups.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help text, group by group."""
        for name, options in self.options_by_group(ctx).items():
            records = [record for option in options if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class CommandGroup(click.Group):
    """A group of commands in the order of a job's life. Turns every foreseen error into one line with its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of their definition."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Errors that the user can fix become one line on stderr."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                # A write error must show up here: while the interpreter shuts down it could no longer be reported.
                sys.stdout.flush()
        except ClusterError as error:
            exit_with_error(str(error), error.exit_code)
        except KeyboardInterrupt:
            exit_with_error("interrupted", EXIT_INTERRUPTED)
        except BrokenPipeError:  # the reader has closed the pipe: `imgnet-cluster ls | head`
            discard_stdout()
            sys.exit(EXIT_ERROR)
        except OSError as error:
            from train.tools.filesystem import one_line_error

            discard_stdout()
            exit_with_error(one_line_error(error), EXIT_ERROR)


def discard_stdout() -> None:
    """Send the rest of stdout to /dev/null: at exit Python writes its buffer once more and would report an error."""
    with contextlib.suppress(OSError, ValueError):  # stdout has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_with_error(text: str, code: int) -> NoReturn:
    """Print one line on stderr and exit."""
    click.echo(f"error: {text}", err=True)
    sys.exit(code)


def translate_data_errors(command: CommandFunction) -> CommandFunction:
    """Decorate a command so that errors of a data set become `ClusterError`."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from train.data.index.open import DataError

        try:
            return command(*args, **kwargs)
        except (DataError, ValueError) as error:
            raise ClusterError(str(error)) from error

    return wrapped


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    from train.tools.filesystem import replace_nonfinite

    click.echo(json.dumps(replace_nonfinite(value), indent=1))


def pluralize(number: int, noun: str) -> str:
    """Return "1 file" or "2 files"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _add_options(command: CommandFunction, options: list[Callable[[Any], Any]]) -> CommandFunction:
    """Decorate a command with options that `--help` shows in this order: click reverses the order of decorators."""
    for option in reversed(options):
        command = option(command)
    return command


output_option = grouped_option(
    "Output",
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Output format.",
)
yes_option = grouped_option("Output", "-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
dry_run_option = grouped_option(
    "Output", "--dry-run", "--dryrun", is_flag=True, help="Show what would be done, and change nothing."
)
machines_option = grouped_option(
    "Machines",
    "--machines",
    metavar="N",
    type=click.IntRange(1),
    help="Number of machines. A recipe may have its own phases for each number.  [default: as the recipe says; "
    "--local: 1; --hosts: all that the file lists, without --spares]",
)


def schedule_options(command: CommandFunction) -> CommandFunction:
    """Add the options of `plan` and `launch` that change what is trained. Each of them declares `--machines` itself."""
    return _add_options(
        command,
        [
            grouped_option(
                "Machines",
                "--procs",
                metavar="N",
                type=click.IntRange(1),
                help="Training processes per machine.  [default: one per GPU, else 1]",
            ),
            grouped_option(
                "Data",
                "--data",
                metavar="DIR",
                help="Folder with train/<class>/*.JPEG and val/<class>/*.JPEG, a packed set, or s3://bucket/prefix. "
                'The word "sample" generates the built-in set.  [default: as the recipe says]',
            ),
            grouped_option(
                "Training", "--only", multiple=True, metavar="NAME", help="Recipe to use, if the file has several."
            ),
            grouped_option(
                "Training",
                "--seed",
                metavar="N",
                type=click.IntRange(0, 2**63 - 1),
                help="Replace the seed of the recipe.",
            ),
            grouped_option(
                "Training",
                "--scale",
                metavar="FRACTION",
                type=FiniteFloatRange(0, 1, min_open=True),
                default=1.0,
                help="Train on this fraction of the images, for a rehearsal.",
            ),
            grouped_option(
                "Training",
                "--max-steps",
                metavar="N",
                type=click.IntRange(1),
                help="Train at most this many steps, distributed over the phases.",
            ),
            grouped_option(
                "Training",
                "--keep-batch",
                is_flag=True,
                help="Keep the recipe's global batch on another number of GPUs, by gradient accumulation.",
            ),
        ],
    )


def recovery_options(command: CommandFunction) -> CommandFunction:
    """Add the options about several machines and the loss of some of them."""
    return _add_options(
        command,
        [
            grouped_option(
                "Recovery",
                "--spares",
                metavar="N",
                type=click.IntRange(0),
                default=0,
                show_default=True,
                help="Number of standby machines. They take over when a machine is lost.",
            ),
            grouped_option(
                "Recovery",
                "--min-machines",
                metavar="N",
                type=click.IntRange(1),
                default=1,
                show_default=True,
                help="Keep training with at least this many machines; pause with fewer.",
            ),
            grouped_option(
                "Recovery",
                "--standby/--no-standby",
                default=None,
                help="Keep a second set of processes waiting on each machine, with torch imported. It makes recovery "
                "faster.  [default: on with several machines]",
            ),
            grouped_option(
                "Recovery",
                "--lost-seconds",
                metavar="SECONDS",
                type=FiniteFloatRange(1),
                default=5.0,
                show_default=True,
                help="Give up a machine that sends no heartbeat when no step has completed for this long.",
            ),
            grouped_option(
                "Recovery",
                "--stall-seconds",
                metavar="SECONDS",
                type=FiniteFloatRange(5),
                default=120.0,
                show_default=True,
                help="If no step completes for this long while all machines respond, dump stack traces into the logs "
                "and restart from the last checkpoint.",
            ),
            grouped_option(
                "Recovery",
                "--probe/--no-probe",
                default=True,
                help="Measure the network between the machines before training.  [default: on]",
            ),
            grouped_option(
                "Training",
                "--exact",
                is_flag=True,
                help="Compute the same bits on any number of processes. Slow; meant for tests.",
            ),
            grouped_option(
                "Data",
                "--log-ids",
                is_flag=True,
                help="Log the IDs of the images of each step, to check that each is used once per epoch.",
            ),
        ],
    )


# The parameters that `rental_options` declares. They are fields of `RentalOptions` in cluster/backends/aws/plan.py.
RENTAL_OPTION_NAMES = (
    "type",
    "market",
    "regions",
    "zones",
    "max_dollars",
    "ami",
    "use_placement_group",
    "ssh_address",
)


def rental_options(command: CommandFunction) -> CommandFunction:
    """Add the options about machines rented from AWS."""
    return _add_options(
        command,
        [
            grouped_option(
                "AWS",
                "--type",
                metavar="TYPE",
                help="EC2 instance type.  [default: the first type of the recipe that is offered]",
            ),
            grouped_option(
                "AWS",
                "--spot",
                "market",
                flag_value="spot",
                default="spot",
                help="Spot instances (interruptible).  [default]",
            ),
            grouped_option(
                "AWS",
                "--on-demand",
                "market",
                flag_value="on-demand",
                help="On-demand instances (not interruptible).",
            ),
            grouped_option(
                "AWS",
                "--spot-then-on-demand",
                "market",
                flag_value="spot-then-on-demand",
                help="Spot instances; on-demand instances when there is no spot capacity.",
            ),
            grouped_option(
                "AWS",
                "--region",
                "regions",
                multiple=True,
                metavar="REGION",
                help="AWS region. Several are tried in the given order.  [default: from the AWS configuration]",
            ),
            grouped_option(
                "AWS",
                "--zone",
                "zones",
                multiple=True,
                metavar="ZONE",
                help="Use only this availability zone. Can be given several times.",
            ),
            grouped_option(
                "AWS",
                "--from",
                "ssh_address",
                metavar="CIDR",
                help="Address range that may connect by ssh.  [default: this computer]",
            ),
            grouped_option(
                "AWS",
                "--ami",
                metavar="AMI",
                help="Machine image (AMI) of your own.  [default: AWS's newest deep-learning image]",
            ),
            grouped_option(
                "AWS",
                "--no-group",
                "use_placement_group",
                flag_value=False,
                default=True,
                help="Do not put the machines into one placement group.",
            ),
            grouped_option(
                "Limits",
                "--max-price-total",
                "max_dollars",
                type=FiniteFloatRange(0, min_open=True),
                metavar="DOLLARS",
                help="Stop when all machines together have cost this much (saves a checkpoint first).",
            ),
        ],
    )
