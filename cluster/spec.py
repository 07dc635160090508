"""What was asked of a job: plain data, written once as job.json, and the folders of a run."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One recipe on one set of machines. Paths are absolute; `gpus` is the number the schedule is computed for."""

    name: str
    recipe: Recipe
    recipe_file: str
    data: str
    copies: str
    draw: bool = False
    backend: str = "local"
    machines: int = 1
    procs: int = 1
    gpus: int = 1
    max_steps: int | None = None
    max_hours: float | None = None
    scale: float = 1.0
    save_seconds: float = 60.0
    skip_bad: bool = False
    workers: int | None = None
    git_commit: str | None = None
    created: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `from_json` makes an equal Spec."""
        return {**asdict(self), "recipe": self.recipe.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` described; keys of a later version are left out."""
        known = {one.name for one in fields(cls)}
        values = {key: one for key, one in value.items() if key in known}
        return cls(**{**values, "recipe": Recipe.from_json(value["recipe"])})


@dataclass(frozen=True)
class Folders:
    """Where things lie. `run` is what stays: the home of logs, metrics, events, result. `shared` is what all machines
    of the job see, `work` belongs to one machine; of a local job both lie in the run folder.
    """

    run: Path

    @property
    def spec(self) -> Path:
        """What was asked."""
        return self.run / "job.json"

    @property
    def recipe(self) -> Path:
        """The recipe as it is run, resolved to plain data."""
        return self.shared / "recipe.json"

    @property
    def shared(self) -> Path:
        """Attempts, status, checkpoints, and the trainers' own logs, metrics, events, result."""
        return self.run / "machine" / "shared"

    @property
    def work(self) -> Path:
        """What trainers and agent of one machine tell each other."""
        return self.run / "machine" / "work"

    @property
    def launch(self) -> Path:
        """A new text with every launch, which the agent repeats: whose words are whose needs no clock."""
        return self.shared / "launch"

    @property
    def mark(self) -> str:
        """The text of the last launch, "" before the first."""
        return self.launch.read_text() if self.launch.exists() else ""

    def status(self, machine: str = "0") -> Path:
        """What the agent of a machine said last."""
        return self.shared / "status" / f"{machine}.json"

    @property
    def result(self) -> Path:
        """The job's result; there is one when the job has ended, whichever way."""
        return self.run / "result.json"
