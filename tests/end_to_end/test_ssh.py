"""Real machines over real ssh, by the installed command: powered off, frozen, cut from us, looked after by another."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ssh_machines import Testbed, testbed

from cluster.jobs.submit import Job
from cluster.state import attempts, status
from train.tools import checkpoint_io

__all__ = ["testbed"]  # a fixture

EPOCHS = 50
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="hosts",
    data=Data(name="drawn", root={data!r}, train=60, val=20),
    model=Model(name="resnet10_tiny"),
    optim=Optim(nesterov=True),
    machines=1,
    gpus=4,
    phases=[Phase(epochs=(0, {epochs}), size=32, batch=4, lr=0.02)],
)
"""
OPTIONS = (
    "--procs",
    "1",
    "--keep-batch",
    "--exact",
    "--log-ids",
    "--workers",
    "0",
    "--save-seconds",
    "1",
    "--no-probe",
)


class Over:
    """A place of the user's, and the machines of a testbed."""

    def __init__(self, place: Any, bed: Testbed) -> None:
        self.place, self.bed = place, bed
        self.hosts = str(bed.write_hosts_toml(place.path / "hosts.toml"))
        self.recipe = place.path / "hosts.py"
        self.recipe.write_text(RECIPE.format(data=str(place.data), epochs=EPOCHS))

    def launch(self, *options: str) -> Job:
        ran = self.place.cli("launch", "--hosts", self.hosts, "-d", "-y", *OPTIONS, *options, str(self.recipe))
        assert ran.code == 0, ran
        return self.place.job()  # type: ignore[no-any-return]

    def wait(self, condition: Callable[[], Any], job: Job, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{self.tell(job)}"
            time.sleep(0.1)

    def tell(self, job: Job) -> str:
        log = job.path / "supervisor.log"
        return "\n".join([str(job.timeline()), str(job.status()), log.read_text() if log.exists() else ""])

    def wait_for_steps(self, job: Job, attempt: int, steps: int = 6) -> None:
        """Wait until an attempt, or a later one, has made so many steps, as it is seen from home."""

        def trains() -> bool:
            newest = attempts.newest_attempt(job.run_folder.shared)
            if newest is None or newest.number < attempt or not newest.members:
                return False
            words = status.machine_statuses(job.run_folder, job.spec)
            mine = [one for one in words.values() if one["attempt"] == newest.number]
            return any(one["at"] >= newest.first_step + steps for one in mine)

        self.wait(lambda: trains() or job.has_ended, job)
        assert not job.has_ended, self.tell(job)


@pytest.fixture
def over(place: Any, testbed: Callable[..., Testbed]) -> Callable[[int], Over]:
    return lambda count: Over(place, testbed(count))


def parameters(shared: Path) -> dict[str, Any]:
    """The weights and momenta of the last checkpoint; statistics are each process's own."""
    last = checkpoint_io.newest_checkpoint(sorted((shared / "checkpoints").iterdir())[-1])
    assert last
    state = checkpoint_io.load_checkpoint(last)
    momenta = {f"momentum {key}": one["momentum_buffer"] for key, one in state["optimizer"]["state"].items()}
    weights = {key: one for key, one in state["model"].items() if not key.endswith(BUFFERS)}
    return {**weights, **momenta}


def test_the_head_loses_its_power_and_a_machine_freezes_and_the_run_ends_with_the_same_bits(
    place: Any, over: Callable[[int], Over]
) -> None:
    here = over(4)
    job = here.launch("--machines", "4", "--lost-seconds", "3")
    here.wait_for_steps(job, 1)
    here.bed.machines[0].power_off()
    here.wait_for_steps(job, 2)
    assert attempts.newest_attempt(job.run_folder.shared).machine_names[0] != "0"  # type: ignore[union-attr]
    here.bed.machines[0].boot()
    here.wait_for_steps(job, 3)
    here.bed.machines[2].freeze()
    here.wait_for_steps(job, 4)
    assert "2" not in attempts.newest_attempt(job.run_folder.shared).machine_names  # type: ignore[union-attr]
    here.bed.machines[2].thaw()
    assert job.wait(120) == "done", here.tell(job)
    result = job.result or {}
    assert result["ids_wrong"] == [] and len(result["epochs"]) == EPOCHS and result["attempts"] >= 4
    assert next(row["machines"] for row in result["timeline"]) == ["0", "1", "2", "3"]
    assert set(result["setup"]) == {"0", "1", "2", "3"}
    assert result["setup"]["1"].keys() >= {"connected", "code", "agent"}
    undisturbed = place.cli("launch", "--local", *OPTIONS, str(here.recipe))
    assert undisturbed.code == 0, undisturbed
    alone = place.job(2).folders.shared
    theirs, ours = parameters(next(here.bed.shared.glob("job-1-*"))), parameters(alone)
    assert theirs.keys() == ours.keys() and len(ours) > 40
    assert not [name for name, one in ours.items() if not one.equal(theirs[name])]


def test_whoever_looks_may_come_and_go_and_a_healthy_machine_that_we_cannot_see_is_left_alone(
    place: Any, over: Callable[[int], Over]
) -> None:
    here = over(2)
    job = here.launch("--machines", "2")
    here.wait_for_steps(job, 1)
    for one in here.bed.machines:
        one.unplug()
    (supervisor,) = place.programs("-m cluster.jobs.supervisor")
    os.kill(supervisor, signal.SIGKILL)
    assert place.cli("status", "--exit-code").code == 101  # starts another
    place.wait_for(lambda: place.pids("-m cluster.jobs.supervisor"), 10)
    for one in here.bed.machines:
        one.plug()
    step = job.status()["step"]
    here.wait(lambda: job.has_ended or job.status()["step"] > step, job)
    assert len(attempts.history(job.run_folder.shared)) == 1, here.tell(job)
    said = place.cli("ssh", "job-1", "--machine", "1", "--", "sh", "-c", "echo $HOME")
    assert said.out.strip() == str(here.bed.machines[1].home), said
    other = place.path / "elsewhere"
    other.mkdir()
    adopted = place.cli("adopt", "--hosts", here.hosts, cwd=other)
    assert adopted.code == 0 and job.spec.uid in adopted.out, adopted
    again = place.cli("adopt", "--hosts", here.hosts, cwd=other)
    assert again.code == 1 and "is here already" in again.err
    theirs = Job(next((other / "runs").iterdir()))
    here.wait(lambda: (theirs.status()["step"] or 0) > 0, theirs)
    assert place.cli("stop", theirs.name, cwd=other).code == 0
    here.wait(lambda: job.has_ended and theirs.has_ended, job)
    assert job.state == theirs.state == "stopped"
    resumed = place.cli("resume", "job-1")
    assert resumed.code == 0, resumed
    assert (job.result or {})["ids_wrong"] == [] and job.state == "done"
    for path in (job.path / "logs").rglob("rank-*.log"):
        end = next(here.bed.shared.glob("job-1-*")) / path.relative_to(job.path)
        assert path.read_bytes() == end.read_bytes()
    assert not [one for machine in here.bed.machines for one in machine.left()]


def test_machines_that_cannot_be_used_are_named_before_anything_is_started(
    place: Any, over: Callable[[int], Over]
) -> None:
    here = over(3)
    here.bed.machines[1].unplug()
    text = Path(here.hosts).read_text()
    Path(here.hosts).write_text(text.replace(here.bed.machines[2].host_key, here.bed.machines[0].host_key))
    ran = place.cli("launch", "--hosts", here.hosts, "-y", *OPTIONS, "--machines", "3", str(here.recipe))
    assert ran.code == 100 and "Traceback" not in ran.out + ran.err
    reason = json.loads((place.path / "runs/job-1/result.json").read_text())["reason"]
    assert "machine 1 (127.1.0.2)" in reason and "machine 2 (127.1.0.3)" in reason and "CHANGED" in reason
    assert "machine 0" not in reason
    assert not [one for machine in here.bed.machines for one in machine.left()]


def test_several_machines_without_a_shared_folder_are_refused_in_one_line(
    place: Any, over: Callable[[int], Over]
) -> None:
    here = over(2)
    here.bed.write_hosts_toml(Path(here.hosts), shared=None)
    ran = place.cli("launch", "--hosts", here.hosts, "-y", str(here.recipe))
    assert ran.code == 2 and ran.err.count("\n") == 1 and "shared" in ran.err
