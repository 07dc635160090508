"""The options of a launch. Imports only what `launch --help` needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.backends import catalog
from cluster.backends.catalog import UNKNOWN_MACHINES
from cluster.backends.options import BackendOptions
from cluster.errors import BadInput
from cluster.state.spec import MAX_MACHINES, RecoveryOptions
from train.engine.options import TrainOptions
from train.tools.option_fields import Option, OptionError, OptionSet, option_field


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(OptionSet):
    """What the user asks for beside the recipe. None: the default.

    `backend` is a name in the registry, or `UNKNOWN_MACHINES`. `backend_options` are the options that only it has.
    """

    backend: str = "local"
    machines: int | None = option_field(
        None,
        metavar="N",
        group="Machines",
        minimum=1,
        maximum=MAX_MACHINES,
        help="Number of machines. A recipe may have its own phases for each number.  [default: as the recipe says; "
        "--local: 1; --ssh: all that the file lists, without --spares]",
    )
    procs: int | None = option_field(
        None,
        metavar="N",
        group="Machines",
        minimum=1,
        maximum=MAX_MACHINES,
        help="Training processes per machine.  [default: one per GPU, else 1]",
    )
    data: str | None = option_field(
        None,
        metavar="DIR",
        group="Data",
        help="Folder with train/<class>/*.JPEG and val/<class>/*.JPEG, a packed set, or s3://bucket/prefix. "
        'The word "sample" generates the built-in set.  [default: as the recipe says]',
    )
    fetch: str | None = option_field(
        None,
        metavar="DIR",
        group="Data",
        help="Copy the packed data set to this folder on each machine's own disk before training.  [default: no copy; "
        "for s3:// on rented machines: ~/.imgnet/data]",
    )
    max_hours: float | None = option_field(
        None,
        metavar="HOURS",
        group="Limits",
        minimum=0,
        is_minimum_open=True,
        help="Stop after this many hours (saves a checkpoint first).  [default: 2 on rented machines, else no limit]",
    )
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    backend_options: BackendOptions = field(default_factory=BackendOptions)


def make_launch_options(backend: str | None = None, **keywords: object) -> LaunchOptions:
    """Return the options that keyword arguments give, without nesting: `max_steps=7, spares=1, type="p3.2xlarge"`.

    None stands for the default. Without `backend`, an option that chooses a backend does so (`hosts="hosts.toml"`), and
    else the job runs on this computer. Raises `BadInput` for an option that does not exist, that belongs to another
    backend, or whose value the command line would refuse.
    """
    values = {name: value for name, value in keywords.items() if value is not None}
    backend = backend or _chosen_backend(values) or "local"
    options_class = BackendOptions if backend == UNKNOWN_MACHINES else catalog.options_class(backend)
    try:
        options = LaunchOptions.pop_from(values)
        backend_options = options_class.pop_from(values)
    except OptionError as error:
        raise BadInput(str(error)) from error
    for name in values:
        _refuse_keyword(name, backend)
    return replace(options, backend=backend, backend_options=backend_options)


def selecting_option(backend: str) -> Option | None:
    """Return the option of a backend whose flag is `--NAME`, and which so chooses the backend. None: a switch does."""
    for option in catalog.options_class(backend).launch_options():
        if f"--{backend}" in option.all_flags:
            return option
    return None


def _chosen_backend(values: Mapping[str, object]) -> str | None:
    for name in catalog.BUILTIN_OPTIONS:
        option = selecting_option(name)
        if option and option.name in values:
            return name
    return None


def _refuse_keyword(name: str, backend: str) -> None:
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
