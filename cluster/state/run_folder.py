"""Paths inside the run folder of a job."""

from dataclasses import dataclass, replace
from pathlib import Path

from train.tools.filesystem import read_json, to_json_bytes
from train.tools.filesystem import write_atomic as write

from .spec import JobSpec


def stop_reason(shared: Path) -> str:
    """Return why a job is to stop, as <shared>/stop says it, "" while it is not to."""
    if not (shared / "stop").exists():
        return ""
    said = read_json(shared / "stop")
    return str((said.get("reason") if isinstance(said, dict) else "") or "stopped by the user")


@dataclass(frozen=True)
class RunFolder:
    """Where things lie. `run` is what stays: the home of logs, metrics, events, result.

    `shared` is the folder that all machines of the job see, or, for machines elsewhere, a picture of its small files
    at home. `work` belongs to one machine.
    """

    path: Path

    @property
    def spec_path(self) -> Path:
        """What was asked."""
        return self.path / "job.json"

    @property
    def started_marker(self) -> Path:
        """There is one as soon as the job was started: it waits no longer in its queue."""
        return self.path / ".begun"

    @property
    def shared(self) -> Path:
        """Attempts, status, checkpoints, result of the trainers."""
        return self.path / "machine" / "shared"

    def work_folder(self, machine: str = "0") -> Path:
        """What trainers and agent of one machine of this computer tell each other."""
        return self.path / "machine" / "work" / machine

    @property
    def recipe_path(self) -> Path:
        """The recipe as it is run, resolved to plain data."""
        return self.shared / "recipe.json"

    def write_spec(self, spec: JobSpec) -> None:
        """Write down what is asked, job.json last; the machines need not know of queues."""
        write(self.recipe_path, to_json_bytes(spec.recipe.to_json()))
        write(self.shared / "job.json", to_json_bytes(replace(spec, queue="").to_json()))
        write(self.spec_path, to_json_bytes(spec.to_json()))

    @property
    def launch_path(self) -> Path:
        """A new text with every launch, which the agents repeat: whose words are whose needs no clock."""
        return self.shared / "launch"

    @property
    def launch_id(self) -> str:
        """The text of the last launch, "" before the first."""
        return self.read_launch_id(self.shared)

    @staticmethod
    def read_launch_id(shared: Path) -> str:
        """The same, of a shared folder."""
        launch = shared / "launch"
        return launch.read_text() if launch.exists() else ""

    def status_path(self, machine: str = "0") -> Path:
        """What the agent of a machine said last."""
        return self.shared / "status" / f"{machine}.json"

    @property
    def result_path(self) -> Path:
        """The job's result; there is one when the job has ended, whichever way."""
        return self.path / "result.json"
