"""Paths inside the run folder of a job."""

from dataclasses import dataclass, replace
from pathlib import Path

from train.tools.filesystem import as_json, read_json
from train.tools.filesystem import replace as write

from .spec import Spec


def stop_reason(shared: Path) -> str:
    """Return why a job is to stop, as <shared>/stop says it, "" while it is not to."""
    if not (shared / "stop").exists():
        return ""
    said = read_json(shared / "stop")
    return str((said.get("reason") if isinstance(said, dict) else "") or "stopped by the user")


@dataclass(frozen=True)
class Folders:
    """Where things lie. `run` is what stays: the home of logs, metrics, events, result.

    `shared` is the folder that all machines of the job see, or, for machines elsewhere, a picture of its small files
    at home. `work` belongs to one machine.
    """

    run: Path

    @property
    def spec(self) -> Path:
        """What was asked."""
        return self.run / "job.json"

    @property
    def begun(self) -> Path:
        """There is one as soon as the job was started: it waits no longer in its queue."""
        return self.run / ".begun"

    @property
    def shared(self) -> Path:
        """Attempts, status, checkpoints, result of the trainers."""
        return self.run / "machine" / "shared"

    def work(self, machine: str = "0") -> Path:
        """What trainers and agent of one machine of this computer tell each other."""
        return self.run / "machine" / "work" / machine

    @property
    def recipe(self) -> Path:
        """The recipe as it is run, resolved to plain data."""
        return self.shared / "recipe.json"

    def describe(self, spec: Spec) -> None:
        """Write down what is asked, job.json last; the machines need not know of queues."""
        write(self.recipe, as_json(spec.recipe.to_json()))
        write(self.shared / "job.json", as_json(replace(spec, queue="").to_json()))
        write(self.spec, as_json(spec.to_json()))

    @property
    def launch(self) -> Path:
        """A new text with every launch, which the agents repeat: whose words are whose needs no clock."""
        return self.shared / "launch"

    @property
    def mark(self) -> str:
        """The text of the last launch, "" before the first."""
        return self.mark_of(self.shared)

    @staticmethod
    def mark_of(shared: Path) -> str:
        """The same, of a shared folder."""
        launch = shared / "launch"
        return launch.read_text() if launch.exists() else ""

    def status(self, machine: str = "0") -> Path:
        """What the agent of a machine said last."""
        return self.shared / "status" / f"{machine}.json"

    @property
    def result(self) -> Path:
        """The job's result; there is one when the job has ended, whichever way."""
        return self.run / "result.json"
