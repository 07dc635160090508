"""The options that only one backend has, and how the command line chooses it. Light: `launch --help` imports this."""

from dataclasses import dataclass
from typing import ClassVar

from train.tools.option_fields import Option, OptionSet, option_field


@dataclass(frozen=True, kw_only=True)
class BackendOptions(OptionSet):
    """Options of a launch on one backend. Subclasses declare them with `option_field`.

    One of them has the flag `--NAME` and chooses the backend: a switch, or an option that takes a value.
    """

    machines_title: ClassVar[str] = "its machines"  # "--type: only for {machines_title}"

    @classmethod
    def choice(cls, backend: str) -> Option | None:
        """Return the option that chooses the backend, None when there is none."""
        return next((option for option in cls.launch_options() if f"--{backend}" in option.flags), None)


@dataclass(frozen=True, kw_only=True)
class LocalOptions(BackendOptions):
    """A launch on this computer has no other options of its own."""

    machines_title: ClassVar[str] = "this computer"

    on_local: bool | None = option_field(
        None,
        "--local",
        is_fixed=True,
        group="Machines",
        help="Train on this computer. With --machines N it acts as N machines.",
    )


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


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(BackendOptions):
    """Which nodes to ask Slurm for, and for how long."""

    machines_title: ClassVar[str] = "the nodes of a Slurm cluster"

    on_slurm: bool | None = option_field(
        None,
        "--slurm",
        is_fixed=True,
        group="Machines",
        help="Train on nodes of the Slurm cluster of which this computer is a login node.",
    )
    partition: str | None = option_field(
        None, metavar="NAME", group="Slurm", help="Partition of the nodes.", default_text="that of the cluster"
    )
    time_limit: str | None = option_field(
        None,
        "--time",
        metavar="TIME",
        group="Slurm",
        help="Slurm's time limit, such as 90 (minutes), 4:00:00 or 2-00:00:00. The job saves a checkpoint two "
        "minutes before.",
        default_text="--max-hours plus 5 minutes, else the limit of the partition",
    )
    gpus_per_node: int | None = option_field(
        None,
        metavar="N",
        group="Slurm",
        minimum=0,
        help="GPUs of each node; 0 on nodes without GPUs.",
        default_text="one per training process",
    )
    sbatch_arguments: tuple[str, ...] = option_field(
        (),
        "--sbatch",
        metavar="ARGUMENT",
        group="Slurm",
        help="Further argument of sbatch, such as --sbatch=--account=vision. Can be given several times.",
    )
