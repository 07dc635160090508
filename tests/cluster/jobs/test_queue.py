"""The queue of a sweep: so many at a time, each once, whoever is killed; a failed one stops nobody."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.backends import local, ssh
from cluster.errors import BadInput, ClusterError
from cluster.jobs import queue, queue_state, store, submit
from cluster.jobs.job import Job
from train.tools.filesystem import locked

Fixture = Any
SWEEP = """\
from dataclasses import replace
from {base} import recipe

def recipes():
    for name, root, end in {rows!r}:
        data, phase = replace(recipe.data, root=root), replace(recipe.phases[0], epochs=(0, end))
        yield replace(recipe, name=name, data=data, phases=[phase])
"""


def sweep(place: Fixture, *rows: tuple[str, Any, int]) -> list[Any]:
    """The plans of a recipe file with recipes(): names, where their images lie, epochs."""
    base = Path(place.recipe()).stem
    path = place.path / "sweep.py"
    path.write_text(SWEEP.format(base=base, rows=[(name, str(root), end) for name, root, end in rows]))
    return [submit.plan(one, recipe_file=str(path)) for one in submit.load_recipes(str(path))]


def waits(job: Any) -> tuple[str, str]:
    """How a job stands."""
    status = job.status()
    return status["state"], status["doing"]


# --- as it is ------------------------------------------------------------------------------------------------------


@pytest.mark.rehearsal
def test_a_sweep_goes_on_over_a_killed_queue_a_stopped_job_and_one_that_cannot_start(place: Fixture) -> None:
    shifting = place.path / "shifting"
    shifting.symlink_to(place.data)
    rows = ("long", place.data, 2000), ("gone", shifting, 1), ("unwanted", place.data, 1), ("last", place.data, 1)
    long, gone, unwanted, last = made = queue.enqueue(sweep(place, *rows))
    assert [job.name for job in made] == ["job-1", "job-2", "job-3", "job-4"]
    place.wait_for(lambda: not long.is_waiting)
    shifting.unlink()
    name, runs = long.spec.queue, place.path / "runs"
    assert [one.lstrip("=") for one in place.tmux("list-sessions", "-F", "#S").split()] == ["job-1", f"queue-{name}"]
    assert waits(gone) == ("waiting", "waiting for job-1")
    assert waits(last) == ("waiting", "waiting for job-1, job-2, job-3")

    unwanted.stop()
    assert unwanted.has_ended and unwanted.state == "stopped" and unwanted.result["reason"] == "stopped while it waited"
    with pytest.raises(ClusterError, match="stopped already"):
        unwanted.stop()

    (first,) = place.programs("-m cluster.jobs.queue")
    words = [sys.executable, "-m", "cluster.jobs.queue", str(runs), name]
    second = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0 and "another process is at work" in second.stderr
    mark = long.run_folder.launch_id
    os.kill(first, signal.SIGKILL)
    place.wait_for(lambda: not place.pids("-m cluster.jobs.queue"))
    place.wait_for(lambda: not place.tmux("list-sessions", "-f", "#{m:queue-*,#S}"))  # tmux sees a moment later
    queue_state.queue_start_marker(runs, name).touch()
    last.refresh()
    assert not place.tmux("list-sessions", "-f", "#{m:queue-*,#S}"), "started again and again"
    os.utime(queue_state.queue_start_marker(runs, name), (1, 1))
    gone.refresh()
    place.wait_for(lambda: place.pids("-m cluster.jobs.queue"))

    place.wait_for_step(long)
    assert long.run_folder.launch_id == mark and last.is_waiting
    long.stop()
    assert last.wait(120) == "done" and last.result["attempts"] == 1
    assert gone.state == "failed" and f"{shifting}: there is no such data folder" in gone.result["reason"]
    assert [job.state for job in made] == ["stopped", "failed", "stopped", "done"]
    place.wait_for(lambda: not place.at_work())
    assert sorted(path.name for path in runs.iterdir()) == ["job-1", "job-2", "job-3", "job-4"]
    events = [json.loads(line)["state"] for line in last.log_path(None).read_text().splitlines()]
    assert events.count("setup") == 1


# --- who is started, and how often, with a backend that only notes it -------------------------------------------------


class Noted:
    """Waiting jobs on this computer; what is started is written down, and lives until it is said to be over."""

    def __init__(self, place: Any, patch: pytest.MonkeyPatch) -> None:
        self.runs, self.file = place.path / "runs", place.path / "started"
        patch.setattr(local, "launch", self.launch)
        patch.setattr(local, "alive", lambda spec, folders: folders.run.name in self.started and not self.over(folders))
        patch.setattr(local, "check", lambda spec, runs: None)

    def launch(self, spec: Any, folders: Any) -> None:
        """Note it, and speak as an agent does."""
        with self.file.open("a") as file:
            file.write(f"{folders.run.name}\n")
        said = {"state": "training", "time": time.time(), "launch": folders.mark}
        folders.status().parent.mkdir(exist_ok=True)
        folders.status().write_text(json.dumps(said))

    @property
    def started(self) -> list[str]:
        """The names of those that were started, in that order."""
        return self.file.read_text().split() if self.file.exists() else []

    def over(self, folders: Any) -> bool:
        """Whether its agent has gone."""
        return (folders.run / "over").exists()

    def jobs(self, hand_made: Fixture, count: int, parallel: int = 1, **changes: Any) -> list[Job]:
        """Make jobs of one queue."""
        return [
            hand_made(f"job-{number}", queue="q", parallel=parallel, **changes).job for number in range(1, count + 1)
        ]

    def step(self) -> bool:
        """What the queue's process does again and again."""
        return queue.advance_queue(self.runs, "q")


@pytest.fixture
def noted(place: Fixture, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Nothing is really started."""
    return Noted(place, monkeypatch)


def test_so_many_are_at_work_at_a_time_in_the_order_of_their_numbers(noted: Noted, hand_made: Fixture) -> None:
    made = noted.jobs(hand_made, 11, parallel=2)
    other = hand_made("job-12", queue="other").job
    for _ in range(3):
        assert noted.step()
        assert noted.started == ["job-1", "job-2"]
    for number in (2, 1, 4, 3):
        (made[number - 1].path / "over").touch()
        assert noted.step()
    assert noted.started == [f"job-{number}" for number in range(1, 7)]
    for job in made:
        (job.path / "over").touch()
    for _ in made:
        noted.step()
    assert not noted.step() and all(job.has_ended for job in made)
    assert noted.started == [job.name for job in made] and other.waiting


def test_a_job_is_begun_by_one_only(noted: Noted, hand_made: Fixture, crowd: Callable[..., list[Any]]) -> None:
    noted.jobs(hand_made, 3, parallel=3)
    assert crowd(6, lambda _: noted.step()) == [True] * 6
    noted.step()  # who came second to a lock left the job to the next round
    assert sorted(noted.started) == ["job-1", "job-2", "job-3"]


@pytest.mark.parametrize("place_of_death", ["check", "before", "after"])
def test_a_start_that_was_cut_short_is_made_good_and_not_made_twice(
    noted: Noted, hand_made: Fixture, monkeypatch: pytest.MonkeyPatch, place_of_death: str
) -> None:
    (job,) = noted.jobs(hand_made, 1)

    def die(*words: Any) -> None:
        if place_of_death == "after":
            noted.launch(*words)
        os._exit(9)

    pid = os.fork()
    if not pid:
        monkeypatch.setattr(local, "check" if place_of_death == "check" else "launch", die)
        noted.step()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert job.is_waiting and job.state == "waiting"
    noted.step()
    assert noted.started == ["job-1"] and not job.is_waiting and job.state == "running"
    noted.step()
    assert noted.started == ["job-1"]


def test_one_that_was_stopped_or_resumed_is_not_started_by_the_queue(noted: Noted, hand_made: Fixture) -> None:
    one, two, three = noted.jobs(hand_made, 3)
    noted.step()
    two.stop()
    three.stop()
    three.resume()
    assert noted.started == ["job-1", "job-3"] and not three.has_ended
    (one.path / "over").touch()
    noted.step()
    assert noted.started == ["job-1", "job-3"] and two.state == "stopped"
    with pytest.raises(ClusterError, match="job-2 is stopped; it has no machine"):
        two.kill_machine("0")


def test_who_was_late_to_stop_or_to_begin_a_job_does_nothing(noted: Noted, hand_made: Fixture) -> None:
    one, two = noted.jobs(hand_made, 2)
    noted.step()
    assert not one._leave_queue() and not one.has_ended
    two.stop()
    queue.start_queued_job(two)
    assert noted.started == ["job-1"] and two.state == "stopped"


def test_what_cannot_start_fails_with_its_reason_and_the_next_goes_on(
    noted: Noted, hand_made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three, four = noted.jobs(hand_made, 4)
    two.run_folder.spec_path.write_text('{"queue": "q"}')

    def launch(spec: Any, folders: Any) -> None:
        if spec.name in ("job-1", "job-3"):
            raise {"job-1": ClusterError("no tmux here"), "job-3": OSError(28, "No space left", "/disk")}[spec.name]
        noted.launch(spec, folders)

    monkeypatch.setattr(local, "launch", launch)
    noted.step()
    assert [(one.state, one.status()["reason"]) for one in (one, three)] == [
        ("failed", "no tmux here"), ("failed", "/disk: No space left")
    ]  # fmt: skip
    assert noted.started == ["job-4"] and four.state == "running"


def test_a_waiting_job_names_whom_it_waits_for(noted: Noted, hand_made: Fixture) -> None:
    made = noted.jobs(hand_made, 6)
    said = [waits(job)[1].removeprefix("waiting for ") for job in made]
    assert said == [
        "its turn", "job-1", "job-1, job-2", "job-1, job-2, job-3", "job-1, job-2, 2 more", "job-1, job-2, 3 more"
    ]  # fmt: skip
    made[0].stop()
    assert waits(made[2]) == ("waiting", "waiting for job-2")


def test_of_many_who_look_at_waiting_jobs_one_starts_the_queue(
    place: Fixture, noted: Noted, hand_made: Fixture, crowd: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = noted.jobs(hand_made, 4), place.path / "calls"

    def start(*words: Any) -> None:
        with calls.open("a") as file:
            file.write(f"{words[0]} {words[1]} {' '.join(words[3][-4:])}\n")

    monkeypatch.setattr(queue_state.tmux, "start", start)
    crowd(4, lambda number: made[number].refresh())
    made[0].refresh()
    assert calls.read_text() == f"queue-q {noted.runs} -m cluster.jobs.queue {noted.runs} q\n"
    os.utime(queue_state.queue_start_marker(noted.runs, "q"), (1, 1))
    with locked(queue_state.queue_lock_path(noted.runs, "q")):
        made[0].refresh()
    assert calls.read_text().count("\n") == 1
    made[0].refresh()
    assert calls.read_text().count("\n") == 2


def test_jobs_that_run_beside_each_other_share_the_processors(
    hand_made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    spec = hand_made(procs=2).spec
    assert (spec.threads, spec.loader_workers) == (None, None)
    beside = replace(spec, parallel=3, queue="q")
    assert (beside.threads, beside.loader_workers) == (2, 2)


# --- making a queue ------------------------------------------------------------------------------------------------


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Queues that were asked for; their jobs count as begun."""
    asked: list[str] = []

    def ensure(runs: Path, name: str) -> None:
        asked.append(name)
        queue_state.queue_run_folders(runs, name)[0].started_marker.touch()

    monkeypatch.setattr(queue_state, "ensure", ensure)
    return asked


def hosts_file(place: Fixture, count: int) -> str:
    """A file that names so many machines."""
    path = place.path / "hosts.toml"
    path.write_text(f'shared = "/shared"\nmachines = {[f"gpu{number}" for number in range(count)]!r}\n')
    return str(path)


def names(spec: Any) -> list[str]:
    """The machines of a job."""
    return [one["host"] for one in spec.hosts["machines"]]


def test_each_job_of_a_queue_gets_machines_that_no_other_is_at_work_on(
    place: Fixture, unstarted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "launch", lambda spec, folders: None)
    (recipe,) = submit.load_recipes(place.recipe())
    options = {"hosts": hosts_file(place, 7), "machines": 2, "spares": 1, "data": "/data", "procs": 1}
    plans = [submit.plan(replace(recipe, name=f"r{number}"), **options) for number in range(4)]
    assert queue.resolve_parallel(plans) == 2
    for parallel in (3, 0):
        with pytest.raises(BadInput, match="--parallel") as caught:
            queue.enqueue(plans, parallel)
        assert "\n" not in str(caught.value) and not (place.path / "runs").exists()

    one, two, three, four = made = queue.enqueue(plans)
    assert unstarted == [one.spec.queue] and {job.spec.parallel for job in made} == {2}
    assert {len(names(job.spec)) for job in made} == {7}
    one.run_folder.started_marker.unlink()
    for _ in range(2):
        queue.advance_queue(place.path / "runs", unstarted[0])
    assert [names(Job(job.path).spec) for job in (one, two)] == [["gpu0", "gpu1", "gpu2"], ["gpu3", "gpu4", "gpu5"]]
    assert three.is_waiting and len(names(Job(three.path).spec)) == 7
    there = json.loads((two.run_folder.shared / "job.json").read_text())
    assert there["queue"] == "" and [host["host"] for host in there["hosts"]["machines"]] == ["gpu3", "gpu4", "gpu5"]

    four.stop()
    with pytest.raises(ClusterError, match="job-4 wants 3 machines, 1 are free; wait for job-1, job-2, or stop one"):
        four.resume()
    assert four.has_ended and four.state == "stopped"
    one.run_folder.result_path.write_text("{}")
    queue.advance_queue(place.path / "runs", unstarted[0])
    assert names(Job(three.path).spec) == ["gpu0", "gpu1", "gpu2"]


def test_a_job_outside_of_a_queue_has_the_first_machines_of_its_file(place: Fixture) -> None:
    (recipe,) = submit.load_recipes(place.recipe())
    plan = submit.plan(recipe, hosts=hosts_file(place, 4), machines=2, data="/data", procs=1)
    job = submit.create_job(plan.spec)
    assert names(plan.spec) == ["gpu0", "gpu1", "gpu2", "gpu3"] and names(job.spec) == ["gpu0", "gpu1"]
    assert not job.is_waiting and job.state == "booting"


def test_a_queue_that_cannot_begin_leaves_no_job(place: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = sweep(place, ("a", place.data, 1), ("b", place.data, 1))
    with pytest.raises(BadInput, match="nothing to queue"):
        queue.enqueue([])
    with pytest.raises(ClusterError, match="no such data folder"):
        queue.enqueue([plans[0], replace(plans[1], spec=replace(plans[1].spec, data="/nowhere"))])
    assert not (place.path / "runs").exists()

    def ensure(runs: Path, name: str) -> None:
        assert len(queue_state.queue_run_folders(runs, name)) == 2
        raise ClusterError("no tmux here")

    monkeypatch.setattr(queue_state, "ensure", ensure)
    with pytest.raises(ClusterError, match="no tmux here"):
        queue.enqueue(plans)
    assert store.all_jobs() == [] and not list((place.path / "runs").iterdir())


def test_on_this_computer_one_runs_at_a_time_unless_it_has_no_gpu(
    place: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = sweep(place, ("a", place.data, 1), ("b", place.data, 1))
    assert queue.resolve_parallel(plans) == 1 and queue.resolve_parallel(plans, 2) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(BadInput, match=r"--parallel 2: the jobs would share this computer's GPUs \(2\)"):
        queue.resolve_parallel(plans, 2)
