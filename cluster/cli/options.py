"""What all commands share: grouped options, errors as one line with an exit code, JSON output."""

import functools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from cluster.display.terminal import clean_output, cut_text, discard
from cluster.errors import EXIT_ERROR, EXIT_INTERRUPTED, BadInput, ClusterError

if TYPE_CHECKING:
    from cluster.backends.aws.admin import AwsAdministration
    from train.tools.option_fields import Option

CommandFunction = Callable[..., Any]  # Any: each command has its own parameters
CommandT = TypeVar("CommandT", bound=CommandFunction)
RowT = TypeVar("RowT")

DEFAULT_BACKEND = "aws"
TYPED_SOURCE = click.core.ParameterSource.COMMANDLINE
CONFIGURED_SOURCES = (click.core.ParameterSource.ENVIRONMENT, click.core.ParameterSource.DEFAULT_MAP)
OUTPUT_FORMATS = ("table", "json")
# The headings of `--help`, in this order. Those of backends of other packages come after them.
OPTION_GROUPS = (
    "Options", "Machines", "Command", "Slurm", "AWS", "Data", "Training", "Recovery", "Limits", "Notifications",
    "Forecast", "Output",
)  # fmt: skip


class FiniteFloatRange(click.FloatRange):
    """A number in a range. NaN and infinity are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # Any: text too
        """Return the number. Fails as click's types do."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return float(number)


class NumberList(click.ParamType[tuple[int, ...]]):
    """Whole numbers within limits, comma-separated: a tuple without repetitions."""

    name = "numbers"

    def __init__(self, minimum: int, maximum: int, example: str) -> None:
        self.minimum, self.maximum, self.example = minimum, maximum, example

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers. Fails as click's types do."""
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isdecimal() and self.minimum <= int(word) <= self.maximum for word in words):
            limits = f"from {self.minimum} to {self.maximum}"
            self.fail(f"must be whole numbers {limits}, with commas, such as {self.example}, not {value!r}", param, ctx)
        return tuple(dict.fromkeys(map(int, words)))


class GroupedOption(click.Option):
    """An option that names the group under which `--help` shows it.

    An option with a `config_name` takes its default from the environment and the configuration file: that is the
    keyword of the launch option whose default it takes. `show` returns a value as people may see it.
    """

    def __init__(
        self,
        declarations: Sequence[str],
        *,
        help_group: str,
        config_name: str = "",
        show: Callable[[object], object] = lambda value: value,
        **attributes: Any,  # Any: as click.Option takes them
    ) -> None:
        if config_name:
            flag = next(name for name in declarations if name.startswith("--")).partition("/")[0]
            attributes["envvar"] = "IMGNET_" + flag.removeprefix("--").replace("-", "_").upper()
        super().__init__(declarations, **attributes)
        self.help_group = help_group
        self.config_name = config_name
        self.show = show

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the name of the option in a message: its environment variable when the value comes from there."""
        if ctx and self.name and ctx.get_parameter_source(self.name) is click.core.ParameterSource.ENVIRONMENT:
            return str(self.envvar)
        return super().get_error_hint(ctx)

    def value_from_envvar(self, ctx: click.Context) -> Any:  # Any: as click has it
        """Return the value in the environment variable. IMGNET_NO_GROUP=1 means --no-group, whose value is False."""
        value = super().value_from_envvar(ctx)
        is_given = click.types.BoolParamType.str_to_bool(value) if value is not None and self.is_bool_flag else None
        return value if is_given is None else is_given == (self.flag_value is not False)

    def get_help_extra(self, ctx: click.Context) -> Any:  # Any: as click has it
        """Return the default and the like for `--help`; a configured default is shown by `text`: it may be a secret."""
        extra = super().get_help_extra(ctx)
        if self.config_name and self.configured(ctx):
            extra.pop("default", None)
        return extra

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return names and text for `--help`. The text names the configured value, if there is one."""
        record = super().get_help_record(ctx)
        if record and self.config_name and (found := self.configured(ctx)):
            return record[0], f"{record[1]}  [{found[1]}: {found[0]}]"
        return record

    def configured(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return value and source, an environment variable or the configuration file; None where neither has one."""
        from cluster.planning.config_file import config_path

        value, source = self.consume_value(ctx, {})
        if source not in CONFIGURED_SOURCES or (isinstance(self.flag_value, str) and value != self.flag_value):
            return None
        is_variable = source is click.core.ParameterSource.ENVIRONMENT
        return self.text(value), str(self.envvar if is_variable else config_path())

    def text(self, value: object) -> str:
        """Return a value of the option as text; of one without a value, whether the flag is given."""
        if isinstance(value, bool):
            return "yes" if value == (self.flag_value is not False) else "no"
        shown = self.show(value)
        return ", ".join(map(str, shown)) if isinstance(shown, tuple | list) else str(shown)


def grouped_option(
    help_group: str, *declarations: str, **attributes: object
) -> Callable[[CommandFunction], CommandFunction]:
    """Return a decorator like `click.option` whose option is shown under a heading of `--help`."""
    return click.option(*declarations, cls=GroupedOption, help_group=help_group, **attributes)


flag = functools.partial(grouped_option, is_flag=True)


class DeferredOptions(click.Option):
    """Stands for options that a `GroupedCommand` makes when it is first used, so that other commands start faster."""

    def __init__(self, declarations: object, make_options: Callable[[], list[GroupedOption]]) -> None:
        self.make_options = make_options  # nothing else is set: click never sees this as an option


def deferred_options(make_options: Callable[[], list[GroupedOption]]) -> Callable[[CommandT], CommandT]:
    """Return a decorator like `click.option` for several options. The function may import what takes time."""
    return click.option(cls=DeferredOptions, make_options=make_options)


class GroupedCommand(click.Command):
    """A command whose `--help` shows the options under headings, and whose options may have configured defaults.

    The headings are in the order of `OPTION_GROUPS`. Within a group, options are listed in the order of their
    declaration: the common ones first. Only a command that rents or creates something is refused when the configuration
    file is wrong. A `FaultTolerantCommand` and `--help` go on with a warning, without the wrong lines.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the arguments and options in the order of their declaration. Deferred ones are made now."""
        made = (param.make_options() if isinstance(param, DeferredOptions) else [param] for param in self.params)
        self.params = [param for params in made for param in params]
        return super().get_params(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises `BadInput` for two switches of one option, and for a wrong configuration file.

        For an option `--NAME` of a backend that cannot be used, the error says why.
        """
        options = {
            param.config_name: param for param in self.get_params(ctx) if isinstance(param, GroupedOption)
        }  # options that are switches of one keyword overwrite each other: one of them is enough
        if any(options) and not ctx.resilient_parsing:
            from cluster.planning.config_file import config_path, read_config, refuse

            if config_path().exists():
                asks_for_help = any(option in args for option in ctx.help_option_names)
                callers = [context.command for context in (ctx, ctx.parent) if context]  # `config` parses a launch
                is_tolerant = any(isinstance(command, FaultTolerantCommand) for command in callers)
                only_warn = is_tolerant or asks_for_help
                on_fault = (lambda fault: warn(f"{fault}; it does not count here")) if only_warn else refuse
                ctx.default_map = {
                    option.name: value[0] if isinstance(value, tuple) and not option.multiple else value
                    for name, value in read_config(on_fault).items()
                    if (option := options.get(name))
                }
        switches: dict[str | None, str] = {}
        try:
            for param in self.make_parser(ctx).parse_args(args=[*args])[2]:  # all that were typed, in their order
                is_switch = isinstance(getattr(param, "flag_value", None), str)
                if is_switch and (other := switches.setdefault(param.name, param.opts[0])) != param.opts[0]:
                    raise BadInput(f"give only one of {other} and {param.opts[0]}")
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from cluster.backends import catalog

            if reason := catalog.why_unusable(error.option_name.removeprefix("--")):
                raise click.UsageError(f"{error.option_name}: {reason}", ctx) from error
            raise

    def options_by_group(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """Return the options under their headings, without empty groups."""
        groups: dict[str, list[click.Option]] = {name: [] for name in OPTION_GROUPS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                default_group = "Output" if param is self.get_help_option(ctx) else "Options"
                groups.setdefault(getattr(param, "help_group", default_group), []).append(param)
        return {name: options for name, options in groups.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help text, group by group."""
        for name, options in self.options_by_group(ctx).items():
            records = [record for option in options if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class FaultTolerantCommand(GroupedCommand):
    """A command that must work also when the configuration file is wrong: it shows jobs, or ends them."""


class CommandGroup(click.Group):
    """A group of commands in the order of a job's life. Turns every foreseen error into one line with its exit code.

    `sections` are the headings of `--help`, each with the names of its commands; without them there is one list.
    """

    def __init__(self, *args: Any, **attributes: Any) -> None:  # Any: as click.Group takes them
        super().__init__(*args, **attributes)
        self.sections: dict[str, list[str]] = {}

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Add commands under a heading of `--help`."""
        for command in commands:
            self.add_command(command)
            self.sections.setdefault(title, []).append(str(command.name))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands that users call, in the order of their definition."""
        return [name for name, command in self.commands.items() if not command.hidden]

    def commands_by_section(self, ctx: click.Context) -> dict[str, list[str]]:
        """Return the names of the commands under their headings."""
        return self.sections or {"Commands": self.list_commands(ctx)}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands into the help text, each with the whole first sentence of its help."""
        name_width = max(map(len, self.commands), default=0)
        for title, names in self.commands_by_section(ctx).items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(name_width), self.commands[name].get_short_help_str(limit=1000)) for name in names]
                )

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
                from train.tools.errors import one_line_error

                discard(sys.stdout)
                exit_with_error(one_line_error(error), EXIT_ERROR)


def exit_with_error(text: str, code: int) -> NoReturn:
    """Print one line on stderr and exit."""
    click.echo(f"error: {cut_text(text)}", err=True)
    sys.exit(code)


def warn(text: object) -> None:
    """Print a warning in one line on stderr. The command goes on."""
    click.echo(f"warning: {cut_text(str(text))}", err=True)


def print_json(value: object) -> None:
    """Print a value, which may have records in it, as JSON on stdout."""
    from train.tools.records import encode
    from train.tools.text_files import replace_nonfinite

    click.echo(json.dumps(replace_nonfinite(encode(value)), indent=1))


def print_rows(rows: Sequence[RowT], output: str, show: Callable[[Sequence[RowT]], None]) -> None:
    """Print rows as JSON on stdout, or show them as a table."""
    if output == "json":
        return print_json(rows)
    show(rows)


def pluralize(number: int, noun: str) -> str:
    """Return "1 file", "2,000 files" or "2 classes"."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"


class CheckedType(click.ParamType[object]):
    """The type of a declared option: its own check, so that Python and the command line refuse the same values."""

    name = "value"

    def __init__(self, option: "Option") -> None:
        self.option = option

    def split_envvar_value(self, rv: str) -> list[str]:
        """Return the values in an environment variable. Where a value may have spaces, each has a line of its own."""
        return rv.splitlines() if self.option.parse else rv.split()

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Return the value of the option. Fails as click's types do."""
        try:
            return self.option.convert(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def click_options(
    options: "Iterable[Option]", is_configurable: bool = False, shows_default: bool = True
) -> list[GroupedOption]:
    """Return declared options as those of the command line: several for an option whose values have flags.

    If they are configurable, their defaults may be in the environment and the configuration file. `shows_default` says
    whether their help names the default.
    """
    made: list[GroupedOption] = []
    for option in options:
        config_name = option.name if is_configurable else ""
        make = functools.partial(GroupedOption, help_group=option.group, config_name=config_name, show=option.show)
        help_text = option.full_help(shows_default)
        if option.kind is bool:
            is_pair = "/" in option.flags[0]
            flag: dict[str, Any] = {} if is_pair else {"is_flag": True, "flag_value": not option.default}  # for click
            made.append(make([*option.flags, option.name], default=None, help=help_text, **flag))
        elif not option.switches:
            made.append(
                make(
                    [*option.flags, option.name],
                    type=CheckedType(option),
                    multiple=option.is_multiple,
                    metavar=option.metavar,
                    help=help_text,
                )
            )
        for value, text in option.switches.items():
            help_text = f"{text}  [default]" if shows_default and value == option.default else text
            made.append(make([f"--{value}", option.name], flag_value=value, default=None, help=help_text))
    return made


def launch_options(
    *names: str, is_configurable: bool = True, shows_default: bool = True, **own_help: str
) -> Callable[[CommandT], CommandT]:
    """Return a decorator for options of `launch`: of these names, and of those in `own_help` with another help text."""

    def make() -> list[GroupedOption]:
        from cluster.backends import catalog
        from cluster.planning.launch_options import LaunchOptions

        declared = [*LaunchOptions.launch_options(*names, *own_help)]
        if len(declared) < len(names) + len(own_help):  # the others are of backends, to look for which takes time
            for options_class in catalog.usable_options().values():
                declared += options_class.launch_options(*names, *own_help)
        options = click_options(declared, is_configurable, shows_default)
        for option in options:
            option.help = own_help.get(str(option.name), option.help)
        return options

    return deferred_options(make)


def given_options(
    options: Mapping[str, object], sources: "Sequence[click.core.ParameterSource]" = (TYPED_SOURCE, *CONFIGURED_SOURCES)
) -> dict[str, object]:
    """Return the options of a command that are typed or configured. The dataclasses have the defaults of all others."""
    ctx = click.get_current_context()
    return {name: value for name, value in options.items() if ctx.get_parameter_source(name) in sources}


def typed_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a command that the user typed."""
    return given_options(options, (TYPED_SOURCE,))


def configured_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a command that were not typed, but are set by the environment or the configuration file."""
    return given_options(options, CONFIGURED_SOURCES)


output_option = grouped_option(
    "Output", "-o", "--output", type=click.Choice(OUTPUT_FORMATS), default="table", help="Output format."
)
yes_option = flag("Output", "-y", "--yes", help="Do not ask for confirmation.")
dry_run_option = flag("Output", "--dry-run", "--dryrun", help="Show what would be done, and change nothing.")
only_option = grouped_option(
    "Training", "--only", multiple=True, metavar="NAME", help="Recipe to use, if the file has several."
)


def confirm_or_abort(question: str, assume_yes: bool) -> None:
    """Ask for confirmation on stderr, which is seen when stdout is redirected. Exits when the answer is no.

    Raises `BadInput` when there is no terminal and `assume_yes` is not set.
    """
    if assume_yes:
        return
    if not sys.stdin.isatty():
        raise BadInput(f"{question} There is no terminal to confirm on; pass -y")
    if not click.confirm(question, default=False, err=True):
        click.echo("nothing was done", err=True)
        sys.exit(EXIT_ERROR)


def open_cloud() -> "AwsAdministration":
    """Return what manages AWS without a job, and show on stderr what it does."""
    from cluster.backends.aws.admin import AwsAdministration
    from train.tools import process_log

    process_log.log_to_user()
    return AwsAdministration()


def network_ids(vpc: str | None, subnets: Sequence[str]) -> tuple[str, ...]:
    """Return the IDs of the user's network and subnets, () for the network of the stack."""
    return (*filter(None, [vpc]), *subnets)


regions_option = grouped_option(
    "AWS",
    "--region",
    "regions",
    multiple=True,
    metavar="REGION",
    config_name="regions",
    help="AWS region. Can be given several times.  [default: all regions that the account may use]",
)


def ask_regions(cloud: "AwsAdministration", regions: Sequence[str], ask: Callable[[str], RowT]) -> dict[str, RowT]:
    """Ask several regions at the same time, and return the answers by region.

    Typed regions (`regions_option`) are the only ones; else all that the account may use are asked. Raises what `ask`
    raises of a typed or a configured region, or of one that this folder's jobs use; of any other, that is a warning.
    """
    from concurrent.futures import ThreadPoolExecutor

    from cluster.jobs import billing
    from infra.errors import CloudError

    needed = cloud.resolve_regions(regions)
    others: list[str] = []
    refused: dict[str, BaseException] = {}
    if not typed_options({"regions": regions}):
        own_specs = [job.spec for job in billing.rented_jobs() if job.spec.backend == cloud.backend]
        needed += sorted({region for spec in own_specs for region in cloud.regions_of(spec)})
        try:
            others = [region for region in cloud.enabled_regions(needed[0]) if region not in needed]
        except CloudError as error:
            refused["other regions"] = error
    with ThreadPoolExecutor(8) as pool:
        answers = {region: pool.submit(ask, region) for region in dict.fromkeys([*needed, *others])}
    found = {}
    for region, answer in answers.items():
        if region in others and isinstance(refusal := answer.exception(), CloudError):
            refused[region] = refusal
        else:
            found[region] = answer.result()
    if refused:
        warn(f"{', '.join(refused)}: could not be asked; {next(iter(refused.values()))}")
    return found


def describe_regions(regions: Collection[str]) -> str:
    """Return regions for a message: their names, or their number if they are four or more."""
    return ", ".join(regions) if len(regions) < 4 else f"any of {len(regions)} regions"
