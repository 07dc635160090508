"""The specification of a job: what the user asked for, as plain data, written once as job.json."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, get_type_hints

from cluster.connectors.mounts import mount_of
from train.engine.options import TrainOptions
from train.recipe.schema import Recipe
from train.tools.filesystem import parse_json
from train.tools.records import MALFORMED_DATA_ERRORS, DamagedRecord, damaged, decode

from .membership import MembershipRules
from .recovery_options import RecoveryOptions

# On a network file system a change by another machine is seen up to a second late (nfs(5), acregmin), and each read
# asks a server: heartbeats are slower there, and silence is tolerated for longer.
NETWORK_HEARTBEAT_SECONDS = 1.0
NETWORK_HEARTBEAT_TIMEOUT_SECONDS = 5.0
MAX_MACHINES = 10_000  # of a job, spares included: each has an entry in many tables
MAX_UNIX_TIME = 253_402_300_799  # the year 9999


@dataclass(frozen=True, kw_only=True)
class RentalFacts:
    """What the set-up of machines has to know of their rental. A backend's own rental specification extends it."""

    gpus_per_machine: int = 0  # fewer visible GPUs are a fault of the machine, not a smaller machine
    # Pip index with a torch build for GPUs that the default build no longer supports.
    torch_index_url: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One recipe on one set of machines. Paths are absolute.

    `procs` is the number of trainer processes of each machine. Names that end with `seconds` are in seconds.
    """

    name: str
    recipe: Recipe
    recipe_file: str
    train: TrainOptions
    recovery: RecoveryOptions
    data_source: str = ""  # where each machine fetches its images from, into the folders of `train`; "": they are there
    copies_source: str = ""  # the same for the resized copies, when they do not lie beside the images
    generate_data: bool = False
    backend: str = "local"
    is_one_computer: bool = True  # all machines of the job are one computer and share its processors
    uid: str = ""
    hosts: dict[str, Any] | None = None
    cloud: dict[str, Any] | None = None  # the rented machines, as their backend describes them
    backend_settings: dict[str, object] | None = None  # what other backends need, as their own packages describe it
    machines: int = 1
    procs: int = 1
    max_hours: float | None = None
    limit_name: str = ""  # how messages call the limit in hours, when it follows from another limit (dollars)
    poweroff_grace: float | None = None  # seconds after the limit until a rented machine cuts its own power
    heartbeat_seconds: float = 0.5
    heartbeat_timeout_seconds: float = 2.5
    metadata_address: str = ""
    queue: str = ""  # the queue in which the job waits for its turn; "": none
    parallel: int = 1  # the number of jobs of that queue that run at once
    forecast: dict[str, Any] | None = None  # the forecast made at the launch, as train/forecast describes it
    git_commit: str | None = None
    created: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        machine_count = self.machines + self.recovery.spares
        if not 1 <= self.machines <= machine_count <= MAX_MACHINES:
            raise ValueError(f"machines: a job has 1 to {MAX_MACHINES}, with its spares")
        for name in ("procs", "parallel"):
            if not 1 <= getattr(self, name) <= MAX_MACHINES:
                raise ValueError(f"{name}: must be from 1 to {MAX_MACHINES}")
        if not 0 <= self.created <= MAX_UNIX_TIME:
            raise ValueError("created: must be in seconds since 1970")

    @property
    def machine_names(self) -> tuple[str, ...]:
        """The machines' names, spares included: "0", "1", ..."""
        return tuple(map(str, range(self.machines + self.recovery.spares)))

    @property
    def rental_facts(self) -> RentalFacts:
        """What the set-up of the machines has to know of their rental. Raises `DamagedRecord`."""
        return decode(RentalFacts, self.cloud or {})

    @property
    def poweroff_settings(self) -> tuple[float | None, str]:
        """The last arguments of `Watchdog`: seconds from the limit until the power is cut, and the limit's name."""
        return self.poweroff_grace, self.limit_name

    @property
    def tmux_session(self) -> str:
        """The job's tmux session on its machines. On a shared host "job-3" may be the session of another user."""
        return self.uid if self.hosts else self.name

    @property
    def membership_rules(self) -> MembershipRules:
        """The rules by which the job's machines agree on the members of an attempt."""
        return MembershipRules(
            machine_names=self.machine_names,
            target_size=self.machines,
            min_size=self.recovery.min_machines,
            heartbeat_timeout=self.heartbeat_timeout_seconds,
            loss_timeout=self.recovery.lost_seconds,
            startup_loss_timeout=max(self.recovery.lost_seconds, MembershipRules.startup_loss_timeout),
            stall_timeout=self.recovery.stall_seconds,
            startup_stall_timeout=max(self.recovery.stall_seconds, MembershipRules.startup_stall_timeout),
            is_rented=bool(self.cloud),
        )

    @property
    def schedule_gpus(self) -> int:
        """The number of GPUs that the schedule is computed for."""
        return self.train.gpus or self.machines * self.procs

    @property
    def processes_per_host(self) -> int:
        """The number of trainers that share one computer's processors."""
        return self.procs * (len(self.machine_names) * self.parallel if self.is_one_computer else 1)

    @property
    def threads_per_process(self) -> int | None:
        """CPU threads of a trainer; None when its machine is not shared, so that torch decides."""
        if self.processes_per_host == self.procs:
            return None
        return max(1, (os.cpu_count() or 1) // self.processes_per_host)

    @property
    def loader_workers(self) -> int | None:
        """Loader processes of a trainer; None lets the trainer count the processors of its machine."""
        if self.train.workers is not None or self.processes_per_host == self.procs:
            return self.train.workers
        return min(16, (os.cpu_count() or 1) // self.processes_per_host)

    def resolved_on_machine(self, shared: Path) -> Self:
        """Return the specification as one of the job's machines applies it.

        "~" in paths becomes that machine's home, and trainers on a shared computer get their share of its processors.
        When `shared` is on a network file system, heartbeats are slower.
        """
        is_network = mount_of(shared.resolve()).network
        train = replace(
            self.train,
            data=str(Path(self.train.data).expanduser()),
            copies=str(Path(self.train.copies).expanduser()),
            gpus=self.schedule_gpus,
            workers=self.loader_workers,
            threads=self.threads_per_process,
        )
        return replace(
            self,
            train=train,
            heartbeat_seconds=NETWORK_HEARTBEAT_SECONDS if is_network else self.heartbeat_seconds,
            heartbeat_timeout_seconds=(
                NETWORK_HEARTBEAT_TIMEOUT_SECONDS if is_network else self.heartbeat_timeout_seconds
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `from_json` makes an equal JobSpec."""
        return {**asdict(self), "recipe": self.recipe.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the JobSpec that `to_json` described; keys of a later version are ignored. Raises `DamagedRecord`."""
        if not isinstance(value, Mapping):
            raise DamagedRecord("it describes no job")
        types = get_type_hints(cls)
        try:
            recipe = Recipe.from_json(value["recipe"])
            known = {name: decode(types[name], value[name], name) for name in types.keys() & value.keys() - {"recipe"}}
            return cls(**known, recipe=recipe)
        except KeyError as error:
            raise DamagedRecord(f"it has no {error}") from error
        except MALFORMED_DATA_ERRORS as error:
            raise damaged(error) from error

    @classmethod
    def parse(cls, text: bytes, source: object) -> Self:
        """Return the JobSpec of a job.json. `source` says in a message where it is from. Raises `DamagedRecord`."""
        try:
            return cls.from_json(parse_json(text))
        except ValueError as error:
            raise damaged(error, source) from error
