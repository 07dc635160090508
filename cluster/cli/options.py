"""What all commands share: errors as one line with an exit code, JSON on stdout, a progress bar on stderr."""

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


class FiniteFloatRange(click.FloatRange):
    """A number in a range; NaN and infinity are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Fails as click's types do."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number in any range", param, ctx)
        return float(number)


output_option = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print."
)
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


class CommandGroup(click.Group):
    """Commands in the order of a job's life, and every foreseen error as one line with its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order they were defined."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; turn what a user can mend into one line on stderr."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # what cannot be written is known here, not in the interpreter's last moments
        except ClusterError as error:
            exit_with_error(str(error), error.exit_code)
        except KeyboardInterrupt:
            exit_with_error("interrupted", EXIT_INTERRUPTED)
        except BrokenPipeError:  # `imgnet-cluster ls | head`
            discard_stdout()
            sys.exit(EXIT_ERROR)
        except OSError as error:
            from train.tools.filesystem import one_line_error

            discard_stdout()
            exit_with_error(one_line_error(error), EXIT_ERROR)


def discard_stdout() -> None:
    """Let what is still to be written go nowhere: Python tries once more at its end, and would complain."""
    with contextlib.suppress(OSError, ValueError):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_with_error(text: str, code: int) -> NoReturn:
    """Print one line on stderr and exit."""
    click.echo(f"error: {text}", err=True)
    sys.exit(code)


def translate_data_errors(command: CommandFunction) -> CommandFunction:
    """Turn a data set's errors into the command line's."""

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


machines_option = click.option(
    "--machines", type=click.IntRange(1), help="How many machines; picks the recipe's table for it."
)


def schedule_options(command: CommandFunction) -> CommandFunction:
    """Options that change what is run; shared by plan and launch, which each have --machines besides."""
    for option in reversed(
        [
            click.option(
                "--procs", type=click.IntRange(1), help="Processes on each machine. [default: one per GPU, else 1]"
            ),
            click.option(
                "--data",
                metavar="DIR",
                help='train/<class>/*.JPEG and val/..., packed or not; s3://...; "sample" draws a built-in set.',
            ),
            click.option("--keep-batch", is_flag=True, help="Keep the recipe's global batch: accumulate gradients."),
            click.option(
                "--max-steps", type=click.IntRange(1), help="So many steps in all, shared out over the phases."
            ),
            click.option(
                "--scale",
                type=FiniteFloatRange(0, 1, min_open=True),
                default=1.0,
                help="A rehearsal on this fraction of the images.",
            ),
            click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Another seed than the recipe's."),
            click.option("--only", multiple=True, metavar="NAME", help="Which recipe, when the file yields several."),
        ]
    ):
        command = option(command)
    return command


def recovery_options(command: CommandFunction) -> CommandFunction:
    """Options about several machines, and losing some of them."""
    for option in reversed(
        [
            click.option("--spares", type=click.IntRange(0), default=0, help="So many more, ready to step in."),
            click.option(
                "--min-machines", type=click.IntRange(1), default=1, show_default=True,
                help="Go on with so many; wait for a replacement with fewer.",
            ),
            click.option(
                "--lost-seconds", type=FiniteFloatRange(1), default=5.0, show_default=True,
                help="A machine that is silent counts as lost when steps have stood still for so long.",
            ),
            click.option(
                "--stall-seconds", type=FiniteFloatRange(5), default=120.0, show_default=True,
                help="After so long without a step, though nobody is silent: stacks into the logs, from the last save.",
            ),
            click.option(
                "--standby/--no-standby", default=None,
                help="A second set of processes per machine that waits for a loss. [default: with several machines]",
            ),
            click.option("--probe/--no-probe", default=True, help="Measure the network between the machines first."),
            click.option("--log-ids", is_flag=True, help="Write down which images each step used."),
            click.option("--exact", is_flag=True, help="The same bits on any number of processes, slowly: for tests."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


def pluralize(number: int, noun: str) -> str:
    """Return "1 file" or "2 files"."""
    return f"{number} {noun}{'s' * (number != 1)}"


RENTAL_OPTION_NAMES = ("type", "market", "regions", "zones", "max_dollars", "ami", "group", "address")


def rental_options(command: CommandFunction) -> CommandFunction:
    """Options about machines rented from AWS."""
    for option in reversed(
        [
            click.option("--type", metavar="TYPE", help="This EC2 type. [default: the first of the recipe's there is]"),
            click.option("--spot", "market", flag_value="spot", default="spot", help="Interruptible. [default]"),
            click.option("--on-demand", "market", flag_value="on-demand", help="Machines that nobody takes away."),
            click.option(
                "--spot-then-on-demand", "market", flag_value="spot-then-on-demand",
                help="Those when no others are there."
            ),
            click.option("--region", "regions", multiple=True, metavar="REGION", help="Where; several in order."),
            click.option("--zone", "zones", multiple=True, metavar="ZONE", help="Only in these zones."),
            click.option(
                "--max-price-total", "max_dollars", type=FiniteFloatRange(0, min_open=True), metavar="DOLLARS",
                help="Save and end when all machines together have cost so much.",
            ),
            click.option("--ami", metavar="AMI", help="An image of your own."),
            click.option("--no-group", "group", flag_value=False, default=True, help="Not in one placement group."),
            click.option("--from", "address", metavar="CIDR", help="Whom ssh is open to. [default: this computer]"),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


class ProgressBar:
    """A progress bar on a terminal, a line now and then elsewhere, both on stderr; called with (done, total).

    `said` is how a number is written.
    """

    def __init__(self, title: str, format_count: Callable[[int], str] = str) -> None:
        self.title, self.format_count, self.last_shown_step = title, format_count, -1

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show a state."""
        percent = 100 * done // max(total, 1)
        step = 1 if sys.stderr.isatty() else 10
        if percent // step == self.last_shown_step:
            return
        self.last_shown_step = percent // step
        line = f"{self.title}: {self.format_count(done)} of {self.format_count(total)} ({percent} %)"
        click.echo(f"\r{line}" if sys.stderr.isatty() else line, err=True, nl=not sys.stderr.isatty())

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty() and self.last_shown_step >= 0:
            click.echo(err=True)
