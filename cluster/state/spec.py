"""What was asked of a job: plain data, written once as job.json, and the folders of a run."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from train.recipe.schema import Recipe

from .membership import Rules
from .mounts import mount_of


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One recipe on one set of machines. Paths are absolute; `gpus` is the number the schedule is computed for."""

    name: str
    recipe: Recipe
    recipe_file: str
    data: str
    copies: str
    source: str = ""  # whence each machine fetches its images to `data` and `copies` first, "": they are there
    source_copies: str = ""  # the same of the copies, when they are not beside it
    draw: bool = False
    backend: str = "local"
    uid: str = ""
    hosts: dict[str, Any] | None = None
    cloud: dict[str, Any] | None = None  # what is rented where, as cluster/backends/aws/rental_spec.py has it
    machines: int = 1
    spares: int = 0
    min_machines: int = 1
    procs: int = 1
    gpus: int = 1
    max_steps: int | None = None
    max_hours: float | None = None
    limit: str = ""  # what to call that limit, when it comes of another
    late: float | None = None  # seconds after it until a rented machine cuts its power
    scale: float = 1.0
    target: str = ""  # such as top5=93: training ends when a validation has reached it
    save_seconds: float = 30.0
    lost_seconds: float = 5.0
    stall_seconds: float = 120.0
    beat: float = 0.5
    silence: float = 2.5
    standby: bool = False
    metadata: str = ""
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
    def names(self) -> tuple[str, ...]:
        """The machines' names: "0" to the last spare."""
        return tuple(map(str, range(self.machines + self.spares)))

    @property
    def after(self) -> tuple[float | None, str]:
        """What comes after the limit, as `Guard` wants it: seconds until the power goes, the limit's name."""
        return self.late, self.limit

    @property
    def session(self) -> str:
        """The job's tmux session on its machines. On other people's machines job-3 may be anybody's."""
        return self.uid if self.hosts else self.name

    @property
    def rules(self) -> Rules:
        """The rules by which its machines agree."""
        return Rules(
            names=self.names, want=self.machines, least=self.min_machines, silence=self.silence,
            lost=self.lost_seconds, early=max(self.lost_seconds, Rules.early), stall=self.stall_seconds,
            late=max(self.stall_seconds, Rules.late), rented=bool(self.cloud),
        )  # fmt: skip

    @property
    def neighbours(self) -> int:
        """How many trainers share a computer's processors."""
        return self.procs * (1 if self.hosts else len(self.names) * self.parallel)

    @property
    def threads(self) -> int | None:
        """Threads of a trainer on a CPU; None: its machine is its own."""
        return max(1, (os.cpu_count() or 1) // self.neighbours) if self.neighbours > self.procs else None

    @property
    def loader_workers(self) -> int | None:
        """Loader processes of a trainer; None lets it count the processors of its machine."""
        if self.workers is not None or self.neighbours == self.procs:
            return self.workers
        return min(16, (os.cpu_count() or 1) // self.neighbours)

    def on_machine(self, shared: Path) -> Self:
        """Return it as one of its machines means it: paths, and slower beats when `shared` is on a network.

        There what another machine wrote is seen up to a second late (nfs(5), acregmin), and each look asks a server.
        """
        data, copies = (str(Path(one).expanduser()) for one in (self.data, self.copies))
        beat, silence = (1.0, 5.0) if mount_of(shared.resolve())["network"] else (self.beat, self.silence)
        return replace(self, data=data, copies=copies, beat=beat, silence=silence)

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `from_json` makes an equal Spec."""
        return {**asdict(self), "recipe": self.recipe.to_json()}  # hosts is plain data already

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` described; keys of a later version are left out."""
        known = {one.name for one in fields(cls)}
        values = {key: one for key, one in value.items() if key in known}
        return cls(**{**values, "recipe": Recipe.from_json(value["recipe"])})
