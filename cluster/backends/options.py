"""The options that only one backend has, and how the command line chooses it. Light: `launch --help` imports this."""

from dataclasses import dataclass
from typing import ClassVar

from train.tools.option_fields import OptionSet, option_field


@dataclass(frozen=True, kw_only=True)
class BackendOptions(OptionSet):
    """Options of a launch on one backend. Subclasses declare them with `option_field`.

    A launch on the backend is requested by the flag `--NAME`: by an option that is declared with this flag and takes a
    value, else by a switch, whose help text is `switch_help`.
    """

    machines_title: ClassVar[str] = "its machines"  # "--type: only for {machines_title}"
    switch_help: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class LocalOptions(BackendOptions):
    """A launch on this computer has no options of its own."""

    machines_title: ClassVar[str] = "this computer"
    switch_help: ClassVar[str] = "Train on this computer. With --machines N it acts as N machines."


@dataclass(frozen=True, kw_only=True)
class SshOptions(BackendOptions):
    """Which machines of the user's own to train on."""

    machines_title: ClassVar[str] = "your own machines"

    hosts: str | None = option_field(
        None,
        "--ssh",
        metavar="FILE",
        is_fixed=True,
        group="Machines",
        help="Train on your own machines over ssh. The hosts.toml file lists them.",
    )
