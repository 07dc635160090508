"""Three machines of one job, on this computer, by the installed command: some are lost, told to leave, frozen; the
parameters at the end are those of a run that nobody disturbed, bit for bit, and no image was used twice or left out.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.state import attempts as state_attempts
from cluster.state import status
from train.data.order import usage_log
from train.tools import checkpoint_io

EPOCHS, IMAGES, BATCH = 50, 60, 4
STEPS = IMAGES // (3 * BATCH)  # of an epoch
RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="several",
    data=Data(name="drawn", root={data!r}, train={images}, val=20),
    model=Model(name="resnet10_tiny"),
    optim=Optim(nesterov=True),
    machines=1,
    gpus=3,
    phases=[Phase(epochs=(0, {epochs}), size=32, batch={batch}, lr=0.02)],
)
"""
OPTIONS = ("--keep-batch", "--exact", "--workers", "0", "--save-seconds", "1")


@dataclass
class Several:
    """A job of three machines, and what is done to them."""

    place: Any
    job: Any

    def words(self) -> dict[str, dict[str, Any]]:
        return status.machine_statuses(self.job.folders, self.job.spec)

    def newest(self) -> state_attempts.Attempt:
        return state_attempts.newest_attempt(self.job.folders.shared) or state_attempts.Attempt()

    def pid(self, machine: str) -> int:
        return int(self.words()[machine]["pid"])

    def kill(self, *machines: str) -> None:
        for pid in [self.pid(one) for one in machines]:
            os.kill(pid, signal.SIGKILL)

    def tell(self) -> str:
        lines = [f"{one.number} {one.machine_names} {one.reason} from {one.first_step}" for one in self.attempts()]
        return "\n".join([*lines, json.dumps({name: one.get("state") for name, one in self.words().items()})])

    def attempts(self) -> list[state_attempts.Attempt]:
        return state_attempts.history(self.job.folders.shared)

    def wait(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        """Wait for a condition; the job must not end before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert not self.job.ended, f"ended: {self.job.result['reason']}\n{self.tell()}"
            assert time.monotonic() < deadline, self.tell()
            time.sleep(0.05)

    def wait_for_steps(self, count: int, *machines: str, after: int = 0) -> None:
        """Wait until these machines, and no others, have made some steps together, in an attempt after `after`."""

        def trains() -> bool:
            newest, words = self.newest(), self.words()
            return (
                newest.number > after
                and sorted(newest.machine_names) == sorted(machines)
                and all(words.get(one, {}).get("attempt") == newest.number for one in machines)
                and all(words[one]["at"] >= newest.first_step + count for one in machines)
            )

        self.wait(trains)


@pytest.fixture
def recipe(place: Any) -> str:
    return write_recipe(place)


def write_recipe(place: Any) -> str:
    path = place.path / "several.py"
    path.write_text(RECIPE.format(data=str(place.data), images=IMAGES, epochs=EPOCHS, batch=BATCH))
    return str(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, images: Path, several_places: Any) -> dict[str, Any]:
    """What one process alone ends with, that takes all three chunks of a step itself."""
    place = several_places(tmp_path_factory.mktemp("alone") / "place", images)
    ran = place.cli("launch", "--local", *OPTIONS, write_recipe(place))
    assert ran.code == 0, ran
    return final(place.job())


@pytest.fixture(scope="module")
def several_places() -> Iterator[Callable[..., Any]]:
    """Make places that live as long as this file's tests."""
    made: list[Any] = []

    def make(path: Path, images: Path) -> Any:
        from conftest import Place

        made.append(Place(path, images))
        return made[-1]

    yield make
    left = [line for one in made for line in one.close()]
    assert not left


@pytest.fixture
def several(place: Any, recipe: str) -> Several:
    """A job of three machines that train."""
    options = ("--machines", "3", "--log-ids", "--lost-seconds", "2")
    ran = place.cli("launch", "--local", "-d", *options, *OPTIONS, recipe)
    assert ran.code == 0, ran
    made = Several(place, place.job())
    os.utime(made.job.folders.launch, (time.time() - 60,) * 2)  # else the supervisor gives the agents 20 s to come
    made.wait_for_steps(3, "0", "1", "2")
    return made


def final(job: Any) -> dict[str, Any]:
    """The parameters and momenta at the end."""
    folder = job.folders.shared / "checkpoints" / f"{job.result['attempts']:06d}"
    path = checkpoint_io.newest_checkpoint(folder)
    assert path is not None
    state = checkpoint_io.load_checkpoint(path)
    momenta = {f"momentum {key}": one["momentum_buffer"] for key, one in state["optimizer"]["state"].items()}
    counted = ("running_mean", "running_var", "num_batches_tracked")  # of each process's own chunks
    weights = {name: one for name, one in state["model"].items() if not name.endswith(counted)}
    assert len(momenta) > 20
    return {**weights, **momenta}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    import torch

    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def assert_undisturbed(several: Several, undisturbed: dict[str, Any]) -> None:
    """The job is done, with every image once in every epoch, the bits of the undisturbed run, and nothing left."""
    job = several.job
    assert job.result["state"] == "done", several.tell()
    first_steps = {one.number: one.first_step for one in several.attempts() if one.members}
    assert usage_log.find_usage_errors(job.run / "ids", first_steps, IMAGES, dict.fromkeys(range(EPOCHS), STEPS)) == []
    assert differing(final(job), undisturbed) == []
    assert len(job.result["epochs"]) == EPOCHS and job.result["steps"] == EPOCHS * STEPS
    several.place.wait_for(lambda: not several.place.at_work(), 30)


def test_machines_are_lost_told_to_leave_and_frozen_and_the_job_ends_as_if_nothing_had_been(
    several: Several, undisturbed: dict[str, Any]
) -> None:
    place, job = several.place, several.job
    ran = place.cli("lose", "job-1", "--machine", "1")
    assert ran.code == 0 and "machine 1 of job-1 is lost" in ran.out, ran
    several.wait_for_steps(1, "0", "2", after=1)
    several.wait_for_steps(3, "0", "1", "2", after=2)  # the supervisor has started it again

    number = several.newest().number
    assert place.cli("lose", "job-1", "--machine", "2", "--notice", "60", "--for-good").code == 0
    several.wait_for_steps(3, "0", "1", after=number)
    left = several.newest()
    assert "machine 2 left" in left.reason

    victim, number = several.newest().machine_names[1], several.newest().number
    agent = several.pid(victim)
    frozen = [place.parent(agent), agent, *place.children(agent)]  # tmux would wake its panes
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    several.wait_for_steps(1, *({"0", "1"} - {victim}), after=number)
    for pid in reversed(frozen):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert job.wait(60) == "done"
    assert {name: one["state"] for name, one in several.words().items()} == {"0": "done", "1": "done", "2": "left"}
    assert_undisturbed(several, undisturbed)

    rows = job.result["timeline"]
    assert [row["attempt"] for row in rows] == list(range(1, len(rows) + 1)) and rows[0]["reason"] == "start"
    by_reason = {row["reason"]: row for row in rows}
    assert by_reason[left.reason]["steps_lost"] == 0, "a planned change loses no step"
    stepped = [row for row in rows[1:] if row["last_step"] is not None]  # another may follow before it makes a step
    assert len(stepped) >= 4 and all(0 < row["pause"] < 60 for row in stepped)


def test_two_lost_at_once_no_supervisor_and_none_left_at_all_and_a_resume_ends_it_well(
    several: Several, undisturbed: dict[str, Any]
) -> None:
    place = several.place
    assert several.newest().machine_names[0] == "0", "the head is one of them"
    several.kill("0", "1")
    several.wait_for_steps(1, "2", after=1)
    assert several.attempts()[1].reason == "machines 0, 1 lost"
    several.wait_for_steps(3, "0", "1", "2", after=2)

    (supervisor,) = place.programs("-m cluster.jobs.supervisor")
    os.kill(supervisor, signal.SIGKILL)
    number, at = several.newest().number, max(one["at"] for one in several.words().values())
    several.wait(lambda: min(one["at"] for one in several.words().values()) > at + 2)
    assert several.newest().number == number, "the end of the supervisor has changed something"

    several.kill("0", "1", "2")
    place.wait_for(lambda: not place.pids("-m train"), 10)
    shown = place.cli("status", "--exit-code")
    assert shown.code == 100 and "imgnet-cluster resume job-1" in shown.out, shown
    assert json.loads(place.cli("ls", "-o", "json").out)[0]["state"] == "failed"
    place.wait_for(lambda: not place.at_work(), 30)
    resumed = place.cli("resume", "job-1")
    assert resumed.code == 0 and "job-1 done" in resumed.out, resumed
    assert_undisturbed(several, undisturbed)
