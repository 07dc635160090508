"""The options of a launch on a Slurm cluster. Light: `launch --help` imports this."""

from dataclasses import dataclass
from typing import ClassVar

from cluster.backends.options import BackendOptions
from train.tools.option_fields import option_field


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
