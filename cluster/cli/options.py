"""What all commands share: grouped options, errors as one line with an exit code, JSON output."""

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cluster.display.terminal import clean_output, cut_text, discard
from cluster.errors import EXIT_ERROR, EXIT_INTERRUPTED, ClusterError

if TYPE_CHECKING:
    from cluster.backends.rentals import CloudAdministration
    from train.tools.option_fields import Option, OptionSet

CommandFunction = Callable[..., Any]  # Any: each command has its own parameters

DEFAULT_BACKEND = "aws"
# The headings of `--help`, in this order. Those of backends of other packages come after them.
OPTION_GROUPS = ("Machines", "Slurm", "AWS", "Data", "Training", "Recovery", "Limits", "Forecast", "Output")


class FiniteFloatRange(click.FloatRange):
    """A number in a range. NaN and infinity are refused."""

    def convert(
        self,
        value: Any,  # Any: a text or a number
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Return the number. Fails as click's types do."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return float(number)


class GroupedOption(click.Option):
    """An option that names the group under which `--help` shows it."""

    def __init__(self, *args: Any, help_group: str, **attributes: Any) -> None:  # Any: as click.Option takes them
        super().__init__(*args, **attributes)
        self.help_group = help_group


def grouped_option(
    help_group: str, *declarations: str, **attributes: object
) -> Callable[[CommandFunction], CommandFunction]:
    """Return a decorator like `click.option` whose option is shown under a heading of `--help`."""
    return click.option(*declarations, cls=GroupedOption, help_group=help_group, **attributes)


class DeferredOptions(click.Option):
    """Stands for options of a `GroupedCommand` that are made when it is first used: other commands start without."""

    def __init__(self, declarations: object, make_options: Callable[[], list[GroupedOption]]) -> None:
        self.make_options = make_options  # and no more: click never sees this as an option


def deferred_options(make_options: Callable[[], list[GroupedOption]]) -> Callable[[Any], Any]:
    """Return a decorator like `click.option` for several options. The function may import what takes time."""
    return click.option(cls=DeferredOptions, make_options=make_options)


class GroupedCommand(click.Command):
    """A command whose `--help` shows the options under headings, in the order of `OPTION_GROUPS`.

    Within a group, options are listed in the order of their declaration: the common ones first.
    """

    _params: list[click.Parameter]

    @property
    def params(self) -> list[click.Parameter]:
        """The arguments and options in the order of their declaration. Deferred ones are made now."""
        self._params = [
            made_param
            for param in self._params
            for made_param in (param.make_options() if isinstance(param, DeferredOptions) else [param])
        ]
        return self._params

    @params.setter
    def params(self, declared_params: list[click.Parameter]) -> None:
        """Keep what is declared. click sets it."""
        self._params = declared_params

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. For an option `--NAME` of a backend that cannot be used, the error says why."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from cluster.backends import catalog

            if reason := catalog.why_unusable(error.option_name.removeprefix("--")):
                raise click.UsageError(f"{error.option_name}: {reason}", ctx) from error
            raise

    def options_by_group(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """Return the options under their headings, without empty groups.

        An option without a group is shown under "Output"; click's own `--help` is the only one.
        """
        groups: dict[str, list[click.Option]] = {name: [] for name in OPTION_GROUPS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                help_group = param.help_group if isinstance(param, GroupedOption) else "Output"
                groups.setdefault(help_group, []).append(param)
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

    def invoke(self, ctx: click.Context) -> object:
        """Run a command. Errors that the user can fix become one line on stderr."""
        with clean_output():
            try:
                try:
                    return super().invoke(ctx)
                finally:
                    # A write error must show up here: while the interpreter shuts down it could no longer be reported.
                    sys.stdout.flush()
            except ClusterError as error:
                exit_with_error(str(error), error.exit_code)
            except ValueError as error:
                from train.tools.records import DamagedRecord

                if not isinstance(error, DamagedRecord):
                    raise
                exit_with_error(f"{error}; restore the file, or delete its run folder to forget the job", EXIT_ERROR)
            except KeyboardInterrupt:
                exit_with_error("interrupted", EXIT_INTERRUPTED)
            except BrokenPipeError:  # the reader of a log has closed the pipe: `imgnet-cluster logs -f | head`
                discard(sys.stdout)
                sys.exit(EXIT_ERROR)
            except OSError as error:
                from train.tools.filesystem import one_line_error

                discard(sys.stdout)
                exit_with_error(one_line_error(error), EXIT_ERROR)


def exit_with_error(text: str, code: int) -> NoReturn:
    """Print one line on stderr and exit."""
    click.echo(f"error: {cut_text(text)}", err=True)
    sys.exit(code)


def warn(text: object) -> None:
    """Print one line on stderr about what is wrong while the command goes on."""
    click.echo(f"warning: {cut_text(str(text))}", err=True)


def translate_data_errors(command: CommandFunction) -> CommandFunction:
    """Decorate a command so that errors of a data set become `ClusterError`."""

    @functools.wraps(command)
    def wrapped(*args: object, **kwargs: object) -> object:
        from train.data.index.open import DataError

        try:
            return command(*args, **kwargs)
        except (DataError, ValueError) as error:
            raise ClusterError(str(error)) from error

    return wrapped


def print_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    from train.tools.filesystem import replace_nonfinite

    click.echo(json.dumps(replace_nonfinite(value), indent=1))


def pluralize(number: int, noun: str) -> str:
    """Return "1 file" or "2 files"."""
    return f"{number} {noun}{'s' * (number != 1)}"


class CheckedType(click.ParamType[object]):
    """The type of a declared option: its own check, so that Python and the command line refuse the same values."""

    name = "value"

    def __init__(self, option: "Option") -> None:
        self.option = option

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Return the value of the option. Fails as click's types do."""
        try:
            return self.option.convert(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def dataclass_options(options_class: "type[OptionSet]", *names: str) -> list[GroupedOption]:
    """Return the options of a dataclass, or those with these names, in the declared order."""
    return [
        click_option
        for option in options_class.launch_options()
        if not names or option.name in names
        for click_option in _click_options(option)
    ]


def _click_options(option: "Option") -> Iterator[GroupedOption]:
    """Yield the options of the command line for one option: several when each of its values has a flag."""
    make = functools.partial(GroupedOption, help_group=option.group)
    if option.switches:
        for value, help_text in option.switches.items():
            yield make([f"--{value}", option.name], flag_value=value, default=None, help=help_text)
    elif option.kind is bool:
        is_pair = "/" in option.flags[0]
        flag: dict[str, Any] = {} if is_pair else {"is_flag": True, "flag_value": not option.default}
        yield make([*option.flags, option.name], default=None, help=option.full_help, **flag)
    else:
        yield make(
            [*option.flags, option.name],
            type=CheckedType(option),
            multiple=option.is_multiple,
            metavar=option.metavar,
            help=option.full_help,
        )


def given_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return those of a command's options that the user typed. The defaults of the others are in the dataclasses."""
    ctx = click.get_current_context()
    return {
        name: value
        for name, value in options.items()
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }


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
only_option = grouped_option(
    "Training", "--only", multiple=True, metavar="NAME", help="Recipe to use, if the file has several."
)


cloud_option = grouped_option(
    "Machines", "--backend", metavar="NAME", help=f"Backend that rents from the cloud.  [default: {DEFAULT_BACKEND}]"
)


def open_cloud(backend: str | None) -> "CloudAdministration":
    """Return the cloud of a backend, and show on stderr what it does. Raises `BadInput`."""
    from cluster.backends import registry
    from train.tools import process_log

    process_log.log_to_user()
    return registry.open_cloud(backend or DEFAULT_BACKEND)
