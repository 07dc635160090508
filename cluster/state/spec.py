"""What was asked of a job: plain data, written once as job.json, and the folders of a run."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from train.recipe.schema import Recipe

from .membership import MembershipRules
from .mounts import mount_of


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One recipe on one set of machines. Paths are absolute; `gpus` is the number the schedule is computed for."""

    name: str
    recipe: Recipe
    recipe_file: str
    data: str
    copies: str
    data_source: str = ""  # whence each machine fetches its images to `data` and `copies` first, "": they are there
    copies_source: str = ""  # the same of the copies, when they are not beside it
    generate_data: bool = False
    backend: str = "local"
    uid: str = ""
    hosts: dict[str, Any] | None = None
    cloud: dict[str, Any] | None = None  # what is rented where, as cluster/backends/aws/rental_spec.py has it
    machines: int = 1
    spares: int = 0
    min_machines: int = 1
    procs: int = 1
    schedule_gpus: int = 1
    max_steps: int | None = None
    max_hours: float | None = None
    limit_name: str = ""  # what to call that limit, when it comes of another
    poweroff_grace: float | None = None  # seconds after it until a rented machine cuts its power
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
    queue: str = ""  # whose turn it waits for, and how many of that queue run at once
    parallel: int = 1
    log_ids: bool = False
    exact: bool = False
    forecast: dict[str, Any] | None = None  # of its launch, as train/forecast has it
    git_commit: str | None = None
    created: float = field(default_factory=time.time)

    @property
    def machine_names(self) -> tuple[str, ...]:
        """The machines' names: "0" to the last spare."""
        return tuple(map(str, range(self.machines + self.spares)))

    @property
    def poweroff_settings(self) -> tuple[float | None, str]:
        """What comes after the limit, as `Guard` wants it: seconds until the power goes, the limit's name."""
        return self.poweroff_grace, self.limit_name

    @property
    def tmux_session(self) -> str:
        """The job's tmux session on its machines. On other people's machines job-3 may be anybody's."""
        return self.uid if self.hosts else self.name

    @property
    def membership_rules(self) -> MembershipRules:
        """The rules by which its machines agree."""
        return MembershipRules(
            machine_names=self.machine_names, target_size=self.machines, min_size=self.min_machines, heartbeat_timeout=self.heartbeat_timeout_seconds,
            loss_timeout=self.lost_seconds, startup_loss_timeout=max(self.lost_seconds, MembershipRules.startup_loss_timeout), stall_timeout=self.stall_seconds,
            startup_stall_timeout=max(self.stall_seconds, MembershipRules.startup_stall_timeout), is_rented=bool(self.cloud),
        )  # fmt: skip

    @property
    def processes_per_host(self) -> int:
        """How many trainers share a computer's processors."""
        return self.procs * (1 if self.hosts else len(self.machine_names) * self.parallel)

    @property
    def threads_per_process(self) -> int | None:
        """Threads of a trainer on a CPU; None: its machine is its own."""
        return (
            max(1, (os.cpu_count() or 1) // self.processes_per_host) if self.processes_per_host > self.procs else None
        )

    @property
    def loader_workers(self) -> int | None:
        """Loader processes of a trainer; None lets it count the processors of its machine."""
        if self.workers is not None or self.processes_per_host == self.procs:
            return self.workers
        return min(16, (os.cpu_count() or 1) // self.processes_per_host)

    def resolved_on_machine(self, shared: Path) -> Self:
        """Return it as one of its machines means it: paths, and slower beats when `shared` is on a network.

        There what another machine wrote is seen up to a second late (nfs(5), acregmin), and each look asks a server.
        """
        data, copies = (str(Path(one).expanduser()) for one in (self.data, self.copies))
        beat, silence = (
            (1.0, 5.0)
            if mount_of(shared.resolve())["network"]
            else (self.heartbeat_seconds, self.heartbeat_timeout_seconds)
        )
        return replace(self, data=data, copies=copies, heartbeat_seconds=beat, heartbeat_timeout_seconds=silence)

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `from_json` makes an equal Spec."""
        return {**asdict(self), "recipe": self.recipe.to_json()}  # hosts is plain data already

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` described; keys of a later version are left out."""
        known = {one.name for one in fields(cls)}
        values = {key: one for key, one in value.items() if key in known}
        return cls(**{**values, "recipe": Recipe.from_json(value["recipe"])})
