"""The specification of a job: what the user asked for, as plain data, written once as job.json."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from cluster.connectors.mounts import mount_of
from train.recipe.schema import Recipe
from train.tools.records import decode

from .membership import MembershipRules

# On a network file system a change by another machine is seen up to a second late (nfs(5), acregmin), and each read
# asks a server: heartbeats are slower there, and silence is tolerated for longer.
NETWORK_HEARTBEAT_SECONDS = 1.0
NETWORK_HEARTBEAT_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class RentalFacts:
    """What the set-up of machines has to know of their rental. A backend's own rental specification extends it."""

    gpus_per_machine: int = 0  # fewer visible GPUs are a fault of the machine, not a smaller machine
    # Pip index with a torch build for GPUs that the default build no longer supports.
    torch_index_url: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One recipe on one set of machines. Paths are absolute.

    `procs` is the number of trainer processes of each machine. `schedule_gpus` is the number of GPUs that the schedule
    is computed for. Names that end with `seconds` are in seconds.
    """

    name: str
    recipe: Recipe
    recipe_file: str
    data: str
    copies: str
    data_source: str = ""  # where each machine fetches its images from, into `data` and `copies`; "": they are there
    copies_source: str = ""  # the same for the resized copies, when they do not lie beside the images
    generate_data: bool = False
    backend: str = "local"
    uid: str = ""
    hosts: dict[str, Any] | None = None
    cloud: dict[str, Any] | None = None  # the rented machines, as cluster/backends/aws/rental_spec.py describes them
    machines: int = 1
    spares: int = 0
    min_machines: int = 1
    procs: int = 1
    schedule_gpus: int = 1
    max_steps: int | None = None
    max_hours: float | None = None
    limit_name: str = ""  # how messages call the limit in hours, when it follows from another limit (dollars)
    poweroff_grace: float | None = None  # seconds after the limit until a rented machine cuts its own power
    scale: float = 1.0
    target: str = ""  # such as top5=93: training ends when a validation has reached it
    save_seconds: float = 30.0
    lost_seconds: float = 5.0
    stall_seconds: float = 120.0
    heartbeat_seconds: float = 0.5
    heartbeat_timeout_seconds: float = 2.5
    standby: bool = False
    metadata_address: str = ""
    probe: bool = True
    skip_bad: bool = False
    workers: int | None = None
    queue: str = ""  # the queue in which the job waits for its turn; "": none
    parallel: int = 1  # the number of jobs of that queue that run at once
    log_ids: bool = False
    exact: bool = False
    forecast: dict[str, Any] | None = None  # the forecast made at the launch, as train/forecast describes it
    git_commit: str | None = None
    created: float = field(default_factory=time.time)

    @property
    def machine_names(self) -> tuple[str, ...]:
        """The machines' names, spares included: "0", "1", ..."""
        return tuple(map(str, range(self.machines + self.spares)))

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
            min_size=self.min_machines,
            heartbeat_timeout=self.heartbeat_timeout_seconds,
            loss_timeout=self.lost_seconds,
            startup_loss_timeout=max(self.lost_seconds, MembershipRules.startup_loss_timeout),
            stall_timeout=self.stall_seconds,
            startup_stall_timeout=max(self.stall_seconds, MembershipRules.startup_stall_timeout),
            is_rented=bool(self.cloud),
        )

    @property
    def processes_per_host(self) -> int:
        """The number of trainers that share one computer's processors."""
        return self.procs * (1 if self.hosts else len(self.machine_names) * self.parallel)

    @property
    def threads_per_process(self) -> int | None:
        """CPU threads of a trainer; None when its machine is not shared, so that torch decides."""
        if self.processes_per_host == self.procs:
            return None
        return max(1, (os.cpu_count() or 1) // self.processes_per_host)

    @property
    def loader_workers(self) -> int | None:
        """Loader processes of a trainer; None lets the trainer count the processors of its machine."""
        if self.workers is not None or self.processes_per_host == self.procs:
            return self.workers
        return min(16, (os.cpu_count() or 1) // self.processes_per_host)

    def resolved_on_machine(self, shared: Path) -> Self:
        """Return the specification as one of the job's machines applies it.

        "~" in paths becomes that machine's home. When `shared` is on a network file system, heartbeats are slower.
        """
        is_network = mount_of(shared.resolve()).network
        return replace(
            self,
            data=str(Path(self.data).expanduser()),
            copies=str(Path(self.copies).expanduser()),
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
        """Return the JobSpec that `to_json` described; keys of a later version are ignored.

        Raises `KeyError`, `TypeError` or `ValueError` when required fields are missing or the recipe is not valid.
        """
        names = {spec_field.name for spec_field in fields(cls)}
        known = {key: entry for key, entry in value.items() if key in names}
        return cls(**{**known, "recipe": Recipe.from_json(value["recipe"])})
