"""The options of a launch. Imports only what `launch --help` needs."""

import difflib
from dataclasses import dataclass, field, replace

from cluster.backends.aws.options import AwsOptions
from cluster.errors import BadInput
from cluster.state.recovery import RecoveryOptions
from train.engine.options import TrainOptions
from train.tools.option_fields import OptionError, OptionSet, option_field

# The backends that have options of their own.
BACKEND_OPTIONS: dict[str, type[AwsOptions]] = {"aws": AwsOptions}
# How the command line names the other backends.
BACKEND_FLAGS = {"local": "--local", "ssh": "--hosts"}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(OptionSet):
    """What the user asks for beside the recipe. None: the default.

    `backend` is "local", "ssh" or "aws"; "plan" is for a plan on machines that nothing is known about.
    """

    backend: str = "local"
    machines: int | None = option_field(
        None,
        metavar="N",
        group="Machines",
        minimum=1,
        help="Number of machines. A recipe may have its own phases for each number.  [default: as the recipe says; "
        "--local: 1; --hosts: all that the file lists, without --spares]",
    )
    hosts: str | None = option_field(
        None,
        metavar="FILE",
        group="Machines",
        help="Train on your own machines over ssh. The hosts.toml file lists them.",
    )
    procs: int | None = option_field(
        None,
        metavar="N",
        group="Machines",
        minimum=1,
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
    backend_options: AwsOptions | None = None


def make_launch_options(backend: str = "local", **keywords: object) -> LaunchOptions:
    """Return the options that keyword arguments give, without nesting: `max_steps=7, spares=1, type="p3.2xlarge"`.

    None stands for the default; `hosts` makes the backend "ssh". Raises `BadInput` for an option that does not exist,
    that belongs to another backend, or whose value the command line would refuse.
    """
    values = {name: value for name, value in keywords.items() if value is not None}
    if "hosts" in values:
        backend = "ssh"
    backend_class = BACKEND_OPTIONS.get(backend)
    try:
        options = LaunchOptions.pop_from(values)
        backend_options = backend_class.pop_from(values) if backend_class else None
    except OptionError as error:
        raise BadInput(str(error)) from error
    for name in values:
        _refuse_keyword(name, backend)
    return replace(options, backend=backend, backend_options=backend_options)


def _refuse_keyword(name: str, backend: str) -> None:
    """Raise `BadInput` that says why a launch on this backend has no such option."""
    for backend_class in BACKEND_OPTIONS.values():
        for option in backend_class.launch_options():
            if option.name == name:
                flags = " or ".join(option.all_flags)
                asked = BACKEND_FLAGS.get(backend, f"the backend {backend}")
                raise BadInput(f"{flags}: only for {backend_class.machines_title}, not for {asked}")
    names = [option.name for option in LaunchOptions.launch_options()]
    similar = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"the options are {', '.join(names)}"
    raise BadInput(f"a launch has no option {name!r}; {hint}")
