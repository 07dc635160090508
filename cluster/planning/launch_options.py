"""The options of a launch, as the command line and Python give them. Imports only what `launch --help` needs."""

import re
from dataclasses import dataclass, field, replace

from cluster.backends import catalog
from cluster.backends.backend_options import BackendOptions
from cluster.backends.catalog import UNKNOWN_MACHINES
from cluster.errors import BadInput
from cluster.notifications.targets import describe_target, parse_target
from cluster.state.job_names import check_name
from cluster.state.recovery_options import RecoveryOptions
from train.engine.options import TrainOptions
from train.tools.option_fields import OptionError, OptionSet, option_field


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(OptionSet):
    """The options of a launch, None for the default. `backend_options` are those that only this backend has."""

    backend: str = "local"
    machines: int | None = option_field(
        None,
        metavar="N",
        group="Machines",
        minimum=1,
        help="Number of machines. A recipe may have its own phases for each number.",
        default_text="as the recipe says; --local: 1; --ssh: all that the file lists, without --spares",
    )
    procs: int | None = option_field(
        None,
        metavar="N",
        group="Machines",
        minimum=1,
        maximum=1000,
        help="Training processes per machine.",
        default_text="one per GPU, else 1",
    )
    data: str | None = option_field(
        None,
        metavar="DIR",
        is_fixed=True,
        group="Data",
        help="Folder with train/<class>/*.JPEG and val/<class>/*.JPEG, a packed set, or s3://bucket/prefix. The "
        'word "sample" generates the built-in set.',
        default_text="as the recipe says",
    )
    fetch: str | None = option_field(
        None,
        metavar="DIR",
        is_fixed=True,
        group="Data",
        help="Copy the packed data set to this folder on each machine's own disk before training.",
        default_text="no copy; for s3:// on rented machines: ~/.imgnet/data",
    )
    name: str = option_field(
        "",
        metavar="NAME",
        parse=check_name,
        is_fixed=True,
        group="Output",
        help="Name for the job, beside its ID such as job-3. All commands that take a job accept it.",
    )
    max_hours: float | None = option_field(
        None,
        metavar="HOURS",
        group="Limits",
        minimum=0,
        maximum=100_000,  # 11 years: much more, and dates can no longer be computed
        is_minimum_open=True,
        help="Stop after this many hours (saves a checkpoint first).",
        default_text="2 on rented machines, all of a capacity block, else no limit",
    )
    notify: tuple[str, ...] = option_field(
        (),
        metavar="COMMAND|URL",
        group="Notifications",
        parse=parse_target,
        describe=describe_target,
        help="Tell when the job ends, loses a machine or gets it back, and when it nears or reaches a limit: run this "
        "command, or post to this https:// webhook. Can be given several times; 'none' tells nobody.",
    )
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    backend_options: BackendOptions = field(default_factory=BackendOptions)


def parse_epochs(text: str) -> str:
    """Return a number of epochs, such as "+10" or "30", without leading zeros. Raises `ValueError` for other texts."""
    if not re.fullmatch(r"\+?0*[1-9][0-9]{0,5}", text, re.ASCII):
        raise ValueError(f"{text!r} is neither +N, for N more epochs, nor a total such as 30")
    return f"{'+' * text.startswith('+')}{int(text)}"


@dataclass(frozen=True, kw_only=True)
class MoreEpochs(OptionSet):
    """The options by which a resume adds epochs to a job."""

    epochs: str = option_field(
        "",
        metavar="+N|TOTAL",
        parse=parse_epochs,
        group="Training",
        help="Add N epochs to the schedule of the job, also of one that is done; without +, the total of epochs. "
        "Added epochs train as the last phase does, at the learning rate of its last step.",
    )
    lr: float | None = option_field(
        None,
        metavar="LR",
        group="Training",
        minimum=0,
        is_minimum_open=True,
        help="With --epochs: the learning rate of the added epochs, stated as in the recipe.",
    )


def make_launch_options(backend: str | None = None, **keywords: object) -> LaunchOptions:
    """Return the options that keyword arguments give, without nesting: `max_steps=7, spares=1, types=["p4d.24xlarge"]`.

    None stands for the default. Without `backend`, an option that chooses a backend does so (`hosts="hosts.toml"`), and
    else the job runs on this computer. Raises `BadInput` for an option that is unknown, of another backend, or wrong.
    """
    values = {name: value for name, value in keywords.items() if value is not None}
    backend = backend or choose_backend(values, "local")
    options_class = BackendOptions if backend == UNKNOWN_MACHINES else catalog.options_class(backend)
    known = {option.name for cls in (LaunchOptions, options_class) for option in cls.launch_options()}
    for name in values.keys() - known:
        refuse_keyword(name, backend)
    try:
        options = LaunchOptions().changed(values)
        return replace(options, backend=backend, backend_options=options_class().changed(values))
    except OptionError as error:
        raise BadInput(str(error)) from error


def choose_backend(keywords: dict[str, object], default: str) -> str:
    """Return the backend that the keywords choose, and remove the switches from them. Raises `BadInput` for several."""
    chosen = []
    for name, options_class in catalog.usable_options().items():
        choice = options_class.choice(name)
        if choice and keywords.get(choice.name) not in (None, False):
            chosen.append(name)
        if choice and choice.kind is bool:
            keywords.pop(choice.name, None)
    if len(chosen) > 1:
        flags = " and ".join(f"--{name}" for name in chosen)
        otherwise = f"; without any, the job runs on --{default}" if default else ""
        raise BadInput(f"give only one of {flags}{otherwise}")
    return chosen[0] if chosen else default


def add_configured(
    typed: dict[str, object], configured: dict[str, object], default: str
) -> tuple[str, dict[str, object]]:
    """Return backend and keywords: typed before configured ones, without those of other backends. Raises `BadInput`."""
    backend = choose_backend(typed, "") or choose_backend(configured, default)
    options_classes = (LaunchOptions, catalog.options_class(backend))
    names = {option.name for options_class in options_classes for option in options_class.launch_options()}
    return backend, {name: value for name, value in configured.items() if name in names} | typed


def refuse_keyword(name: str, backend: str) -> None:
    """Raise `BadInput` that says why a launch on this backend has no such option."""
    for options_class in catalog.usable_options().values():
        for option in options_class.launch_options():
            if option.name == name:
                flags = " or ".join(option.all_flags)
                asked = "a plan" if backend == UNKNOWN_MACHINES else f"--{backend}"
                raise BadInput(f"{flags}: only for {options_class.machines_title}, not for {asked}")
    import difflib  # only needed for this message

    names = [option.name for option in LaunchOptions.launch_options()]
    similar = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"the options are {', '.join(names)}"
    raise BadInput(f"a launch has no option {name!r}; {hint}")
