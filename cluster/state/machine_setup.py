"""The record of the set-up of a job's machines, machines.json in the run folder. The supervisor writes it."""

from dataclasses import dataclass, field
from typing import Any

from .states import SetupStep


@dataclass(frozen=True, kw_only=True)
class MachineSetup:
    """The set-up of one machine: its step, why it failed ("": it has not), and what was found on it.

    `seconds` has the time of each step. `folder`, `work`, `code` and `python` are paths on the machine; "" is not known
    yet. `gpus` are the names of its GPUs.
    """

    host: str = ""
    step: SetupStep = SetupStep.NONE
    reason: str = ""
    notes: tuple[str, ...] = ()
    seconds: dict[SetupStep, float] = field(default_factory=dict)
    address: str = ""
    folder: str = ""
    work: str = ""
    code: str = ""
    python: str = ""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SetupRecord:
    """The set-up of all machines for one launch.

    `is_adopted`: another computer launched the job, so its agents run already. `finished` and `time` (of writing) are
    in seconds since 1970.
    """

    launch: str = ""
    is_ready: bool = False
    is_adopted: bool = False
    finished: float = 0.0
    time: float = 0.0
    network: dict[str, Any] | None = None  # Any: the report of train.distributed.network_probe, kept for people
    machines: dict[str, MachineSetup] = field(default_factory=dict)
