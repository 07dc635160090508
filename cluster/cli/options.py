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

from cluster.errors import ERROR, INTERRUPTED, ClusterError

Command = Callable[..., Any]


class Number(click.FloatRange):
    """A number in a range; NaN and infinity are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Fails as click's types do."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number in any range", param, ctx)
        return float(number)


output = click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print.")
yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


class Group(click.Group):
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
            fail(str(error), error.code)
        except KeyboardInterrupt:
            fail("interrupted", INTERRUPTED)
        except BrokenPipeError:  # `imgnet-cluster ls | head`
            drop_output()
            sys.exit(ERROR)
        except OSError as error:
            from train.tools.filesystem import one_line

            drop_output()
            fail(one_line(error), ERROR)


def drop_output() -> None:
    """Let what is still to be written go nowhere: Python tries once more at its end, and would complain."""
    with contextlib.suppress(OSError, ValueError):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(text: str, code: int) -> NoReturn:
    """Print one line on stderr and exit."""
    click.echo(f"error: {text}", err=True)
    sys.exit(code)


def data_errors(command: Command) -> Command:
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
    from train.tools.filesystem import finite

    click.echo(json.dumps(finite(value), indent=1))


machines_option = click.option(
    "--machines", type=click.IntRange(1), help="How many machines; picks the recipe's table for it."
)


def schedule_options(command: Command) -> Command:
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
                type=Number(0, 1, min_open=True),
                default=1.0,
                help="A rehearsal on this fraction of the images.",
            ),
            click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Another seed than the recipe's."),
            click.option("--only", multiple=True, metavar="NAME", help="Which recipe, when the file yields several."),
        ]
    ):
        command = option(command)
    return command


def recovery_options(command: Command) -> Command:
    """Options about several machines, and losing some of them."""
    for option in reversed(
        [
            click.option("--spares", type=click.IntRange(0), default=0, help="So many more, ready to step in."),
            click.option(
                "--min-machines", type=click.IntRange(1), default=1, show_default=True,
                help="Go on with so many; wait for a replacement with fewer.",
            ),
            click.option(
                "--lost-seconds", type=Number(1), default=5.0, show_default=True,
                help="A machine that is silent counts as lost when steps have stood still for so long.",
            ),
            click.option(
                "--stall-seconds", type=Number(5), default=120.0, show_default=True,
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


def counted(number: int, noun: str) -> str:
    """Return "1 file" or "2 files"."""
    return f"{number} {noun}{'s' * (number != 1)}"


RENTING = ("type", "market", "regions", "zones", "max_dollars", "ami", "group", "address")


def renting_options(command: Command) -> Command:
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
                "--max-price-total", "max_dollars", type=Number(0, min_open=True), metavar="DOLLARS",
                help="Save and end when all machines together have cost so much.",
            ),
            click.option("--ami", metavar="AMI", help="An image of your own."),
            click.option("--no-group", "group", flag_value=False, default=True, help="Not in one placement group."),
            click.option("--from", "address", metavar="CIDR", help="Whom ssh is open to. [default: this computer]"),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


class Bar:
    """A progress bar on a terminal, a line now and then elsewhere, both on stderr; called with (done, total).

    `said` is how a number is written.
    """

    def __init__(self, title: str, said: Callable[[int], str] = str) -> None:
        self.title, self.said, self.shown = title, said, -1

    def __enter__(self) -> "Bar":
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show a state."""
        percent = 100 * done // max(total, 1)
        step = 1 if sys.stderr.isatty() else 10
        if percent // step == self.shown:
            return
        self.shown = percent // step
        line = f"{self.title}: {self.said(done)} of {self.said(total)} ({percent} %)"
        click.echo(f"\r{line}" if sys.stderr.isatty() else line, err=True, nl=not sys.stderr.isatty())

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty() and self.shown >= 0:
            click.echo(err=True)
