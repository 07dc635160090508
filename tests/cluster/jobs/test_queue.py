"""The queue of a sweep: a given number of jobs at a time, each started once, also when processes are killed."""

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
from support.known import known
from support.specs import changed_spec

from cluster.backends.local import LocalBackend
from cluster.backends.ssh import SshBackend
from cluster.errors import BadInput, ClusterError
from cluster.jobs import queue, queue_state, store, submit
from cluster.jobs.job import Job
from cluster.planning.launch_options import make_launch_options
from cluster.state.run_folder import RunFolder
from train.tools.files import locked

SWEEP = """\
from dataclasses import replace
from {base} import recipe

def recipes():
    for name, root, end in {rows!r}:
        data, phase = replace(recipe.data, root=root), replace(recipe.phases[0], epochs=(0, end))
        yield replace(recipe, name=name, data=data, phases=[phase])
"""


def sweep(sandbox: Any, *rows: tuple[str, Any, int]) -> list[Any]:
    """The plans of a recipe file with recipes(), given as (name, folder of the images, epochs)."""
    base = Path(sandbox.write_recipe()).stem
    path = sandbox.path / "sweep.py"
    path.write_text(SWEEP.format(base=base, rows=[(name, str(root), end) for name, root, end in rows]))
    return [submit.plan(recipe, recipe_file=str(path)) for recipe in submit.load_recipes(str(path))]


# --- with real processes --------------------------------------------------------------------------------------------


@pytest.mark.rehearsal
def test_queue_survives_kill_stopped_job_and_failing_job(sandbox: Any) -> None:
    gone_folder = sandbox.path / "gone"
    gone_folder.symlink_to(sandbox.data)
    rows = ("long", sandbox.data, 2000), ("gone", gone_folder, 1), ("unwanted", sandbox.data, 1)
    jobs = queue.enqueue(sweep(sandbox, *rows, ("last", sandbox.data, 1)))
    long, gone, unwanted, last = jobs
    sandbox.wait_for(lambda: not long.is_waiting)
    gone_folder.unlink()
    queue_id, launch_id, runs_folder = long.spec.queue, long.run_folder.launch_id, sandbox.path / "runs"
    assert (last.status().state, last.status().doing) == ("waiting", "waiting for job-1, job-2, job-3")
    unwanted.stop()
    assert unwanted.state == "stopped" and known(unwanted.result).reason == "stopped while it waited"

    (first,) = sandbox.program_pids("-m cluster.jobs.queue")
    argv = [sys.executable, "-m", "cluster.jobs.queue", str(runs_folder), queue_id]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0 and "another process is running" in second.stderr
    os.kill(first, signal.SIGKILL)
    sandbox.wait_for(lambda: not sandbox.pids("-m cluster.jobs.queue"))
    sandbox.wait_for(lambda: not sandbox.tmux("list-sessions", "-f", "#{m:queue-*,#S}"))  # tmux sees a moment later
    os.utime(queue_state.queue_start_marker(runs_folder, queue_id), (1, 1))
    gone.refresh()
    sandbox.wait_for_step(long)
    assert long.run_folder.launch_id == launch_id and last.is_waiting
    long.stop()
    assert last.wait(120) == "done"
    assert gone.state == "failed" and f"{gone_folder}: there is no such data folder" in known(gone.result).reason
    sandbox.wait_for(lambda: not sandbox.job_pids())


# --- which jobs are started, and how often, with a backend that only records it ---------------------------------------


class RecordingBackend:
    """Replaces functions of the local backend: launches are recorded, and an agent lives until `over` exists."""

    def __init__(self, sandbox: Any, patch: pytest.MonkeyPatch) -> None:
        self.runs_folder = sandbox.path / "runs"
        self.record = sandbox.path / "started"
        patch.setattr(LocalBackend, "launch", lambda local_backend: self.launch(local_backend.run.folder))
        patch.setattr(LocalBackend, "agents_alive", lambda local_backend: self.agents_alive(local_backend.run.folder))
        patch.setattr(LocalBackend, "check", lambda local_backend, spec, runs_folder: None)

    def launch(self, run_folder: RunFolder) -> None:
        with self.record.open("a") as file:
            file.write(f"{run_folder.path.name}\n")
        status = {"id": "0.a", "state": "training", "time": time.time(), "launch": run_folder.launch_id}
        run_folder.status_path().parent.mkdir(exist_ok=True)
        run_folder.status_path().write_text(json.dumps(status))

    def agents_alive(self, run_folder: RunFolder) -> bool:
        return run_folder.path.name in self.started and not (run_folder.path / "over").exists()

    @property
    def started(self) -> list[str]:
        return self.record.read_text().split() if self.record.exists() else []

    def make_jobs(self, hand_made: Any, count: int, parallel: int = 1) -> list[Job]:
        return [hand_made(f"job-{number}", queue="q", parallel=parallel).job for number in range(1, count + 1)]

    def advance(self) -> bool:
        return queue.advance_queue(self.runs_folder, "q")


def end_job(job: Job) -> None:
    (job.path / "over").touch()


@pytest.fixture
def backend(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> RecordingBackend:
    return RecordingBackend(sandbox, monkeypatch)


def test_advance_queue_starts_parallel_jobs_in_order(backend: RecordingBackend, hand_made: Any) -> None:
    jobs = backend.make_jobs(hand_made, 11, parallel=2)
    job_of_other_queue = hand_made("job-12", queue="other").job
    for _ in range(3):
        assert backend.advance()
        assert backend.started == ["job-1", "job-2"]
    for number in (2, 1, 4, 3):
        end_job(jobs[number - 1])
        assert backend.advance()
    assert backend.started == [f"job-{number}" for number in range(1, 7)]
    for job in jobs:
        end_job(job)
    for _ in jobs:
        backend.advance()
    assert not backend.advance() and all(job.has_ended for job in jobs)
    assert backend.started == [job.name for job in jobs] and job_of_other_queue.is_waiting


def test_advance_queue_concurrent_calls_start_each_job_once(
    backend: RecordingBackend, hand_made: Any, run_in_processes: Callable[..., list[Any]]
) -> None:
    backend.make_jobs(hand_made, 3, parallel=3)
    assert run_in_processes(6, lambda _: backend.advance()) == [True] * 6
    backend.advance()  # a call that found a job locked left it to the next call
    assert sorted(backend.started) == ["job-1", "job-2", "job-3"]


@pytest.mark.parametrize("killed_at", ["check", "before launch", "after launch"])
def test_advance_queue_killed_start_is_completed_once(
    backend: RecordingBackend, hand_made: Any, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    (job,) = backend.make_jobs(hand_made, 1)

    def die(*args: Any) -> None:
        if killed_at == "after launch":
            (local_backend,) = args
            backend.launch(local_backend.run.folder)
        os._exit(9)

    pid = os.fork()
    if not pid:
        monkeypatch.setattr(LocalBackend, "check" if killed_at == "check" else "launch", die)
        backend.advance()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert job.is_waiting and job.state == "waiting"
    backend.advance()
    assert backend.started == ["job-1"] and not job.is_waiting and job.state == "running"
    backend.advance()
    assert backend.started == ["job-1"]


def test_advance_queue_skips_stopped_and_resumed_jobs(backend: RecordingBackend, hand_made: Any) -> None:
    first, second, third = backend.make_jobs(hand_made, 3)
    backend.advance()
    second.stop()
    third.stop()
    third.resume()
    assert backend.started == ["job-1", "job-3"] and not third.has_ended
    end_job(first)
    backend.advance()
    assert backend.started == ["job-1", "job-3"] and second.state == "stopped"
    with pytest.raises(ClusterError, match="job-2 is stopped; it has no machine"):
        second.kill_machine("0")


def test_advance_queue_failing_start_is_told_and_does_not_block_next(
    backend: RecordingBackend, hand_made: Any, sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = sandbox.path / "told"
    first, damaged, third, fourth = backend.make_jobs(hand_made, 4)
    first.run_folder.write_spec(replace(first.spec, notify=(f'echo "$IMGNET_EVENT_TEXT" >> {told}',)))
    damaged.run_folder.spec_path.write_text('{"queue": "q"}')
    errors = {"job-1": ClusterError("no tmux here"), "job-3": OSError(28, "No space left", "/disk")}

    def launch(local_backend: LocalBackend) -> None:
        if local_backend.run.spec.name in errors:
            raise errors[local_backend.run.spec.name]
        backend.launch(local_backend.run.folder)

    monkeypatch.setattr(LocalBackend, "launch", launch)
    backend.advance()
    assert (first.state, first.status().reason) == ("failed", "no tmux here")
    assert "failed: no tmux here" in told.read_text()
    assert (third.state, third.status().reason) == ("failed", "/disk: No space left")
    assert backend.started == ["job-4"] and fourth.state == "running"


def test_refresh_concurrent_calls_start_one_queue_process(
    sandbox: Any,
    backend: RecordingBackend,
    hand_made: Any,
    run_in_processes: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = backend.make_jobs(hand_made, 4)
    calls = sandbox.path / "calls"
    runs_folder = backend.runs_folder

    def start_session(name: str, run_folder: Path, window: str, argv: list[str]) -> None:
        with calls.open("a") as file:
            file.write(f"{name} {run_folder} {' '.join(argv[-4:])}\n")

    monkeypatch.setattr("cluster.connectors.tmux.start_session", start_session)
    run_in_processes(4, lambda number: jobs[number].refresh())
    jobs[0].refresh()
    assert calls.read_text() == f"queue-q {runs_folder} -m cluster.jobs.queue {runs_folder} q\n"
    os.utime(queue_state.queue_start_marker(runs_folder, "q"), (1, 1))
    with locked(queue_state.queue_lock_path(runs_folder, "q")):
        jobs[0].refresh()
    assert calls.read_text().count("\n") == 1
    jobs[0].refresh()
    assert calls.read_text().count("\n") == 2


def test_spec_parallel_jobs_share_the_processors(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    spec = hand_made(procs=2).spec
    assert (spec.threads_per_process, spec.loader_workers) == (None, None)
    parallel_spec = replace(spec, parallel=3, queue="q")
    assert (parallel_spec.threads_per_process, parallel_spec.loader_workers) == (2, 2)


# --- creating a queue ------------------------------------------------------------------------------------------------


def host_names(spec: Any) -> list[str]:
    return [machine.host for machine in spec.host_list]


def test_queue_gives_each_job_machines_of_its_own(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, str]] = []
    monkeypatch.setattr(queue_state, "ensure_queue_process", lambda *call: calls.append(call))
    monkeypatch.setattr(queue_state, "QUEUE_START_SECONDS", 0.0)
    monkeypatch.setattr(SshBackend, "launch", lambda ssh_backend: None)
    hosts_file = sandbox.path / "hosts.toml"
    hosts_file.write_text(f'shared = "/shared"\nmachines = {[f"gpu{number}" for number in range(7)]!r}\n')
    (recipe,) = submit.load_recipes(sandbox.write_recipe())
    options = make_launch_options(hosts=str(hosts_file), machines=2, spares=1, data="/data", procs=1)
    plans = [submit.plan(replace(recipe, name=f"r{number}"), options) for number in range(4)]
    runs_folder = sandbox.path / "runs"
    assert queue.resolve_parallel(plans) == 2
    for parallel in (3, 0):
        with pytest.raises(BadInput, match="--parallel") as caught:
            queue.enqueue(plans, parallel)
        assert "\n" not in str(caught.value) and not runs_folder.exists()

    jobs = queue.enqueue(plans)
    first, second, third, fourth = jobs
    assert calls == [(runs_folder, first.spec.queue)] and {job.spec.parallel for job in jobs} == {2}
    assert {len(host_names(job.spec)) for job in jobs} == {7}
    for _ in range(2):
        queue.advance_queue(*calls[0])
    assert host_names(Job(first.path).spec) == ["gpu0", "gpu1", "gpu2"]
    assert host_names(Job(second.path).spec) == ["gpu3", "gpu4", "gpu5"]
    assert third.is_waiting and len(host_names(Job(third.path).spec)) == 7
    shared_spec = json.loads((second.run_folder.shared / "job.json").read_text())
    assert shared_spec["queue"] == ""
    assert [machine["host"] for machine in shared_spec["hosts"]["machines"]] == ["gpu3", "gpu4", "gpu5"]

    fourth.stop()
    with pytest.raises(ClusterError, match="job-4 needs 3 machines, 1 is free; wait for job-1, job-2, or stop one"):
        fourth.resume()
    assert fourth.has_ended and fourth.state == "stopped"
    first.run_folder.result_path.write_text("{}")
    queue.advance_queue(*calls[0])
    assert host_names(Job(third.path).spec) == ["gpu0", "gpu1", "gpu2"]


def test_enqueue_failure_leaves_no_job(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = sweep(sandbox, ("a", sandbox.data, 1), ("b", sandbox.data, 1))
    with pytest.raises(BadInput, match="no recipes to queue"):
        queue.enqueue([])
    with pytest.raises(ClusterError, match="no such data folder"):
        queue.enqueue([plans[0], replace(plans[1], spec=changed_spec(plans[1].spec, data="/nowhere"))])
    assert not (sandbox.path / "runs").exists()

    def ensure_queue_process(runs_folder: Path, queue_id: str) -> None:
        assert len(queue_state.queued_runs(runs_folder, queue_id)) == 2
        raise ClusterError("no tmux here")

    monkeypatch.setattr(queue_state, "ensure_queue_process", ensure_queue_process)
    with pytest.raises(ClusterError, match="no tmux here"):
        queue.enqueue(plans)
    assert store.all_jobs() == [] and not list((sandbox.path / "runs").iterdir())


def test_resolve_parallel_local_needs_a_gpu_for_each_process(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = sweep(sandbox, ("a", sandbox.data, 1), ("b", sandbox.data, 1))
    assert queue.resolve_parallel(plans) == 1 and queue.resolve_parallel(plans, 2) == 2
    with pytest.raises(BadInput, match=r"^--parallel: must be from 1 to 10000, not 20000$"):
        queue.enqueue(plans, 20_000)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert queue.resolve_parallel(plans, 2) == 2
    with_two = [replace(plan, spec=replace(plan.spec, procs=2)) for plan in plans]
    with pytest.raises(BadInput, match=r"^--parallel 2: .* has 2; pass --procs 1, or leave --parallel out$"):
        queue.resolve_parallel(with_two, 2)
    with_four = [replace(plan, spec=replace(plan.spec, procs=4)) for plan in plans]
    assert queue.resolve_parallel(with_four, 2) == 2, "they train on the CPU"


def test_local_jobs_that_run_at_once_get_gpus_of_their_own(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,GPU-2,3,4")
    plans = sweep(sandbox, *((name, sandbox.data, 1) for name in ("a", "b", "c")))
    jobs = [submit.create_job(replace(plan.spec, procs=procs)) for plan, procs in zip(plans, (2, 2, 6), strict=True)]
    first, second, large = jobs
    for job in jobs:
        job.claim_machines()
        job.run_folder.launch_path.write_text("started")
    assert first.spec.gpus_of_computer == ("0", "1") and second.spec.gpus_of_computer == ("GPU-2", "3")
    assert large.spec.gpus_of_computer == ()
    first.run_folder.result_path.write_text("{}")
    large.run_folder.spec_path.write_text(json.dumps(replace(large.spec, procs=3).to_json()))
    again = Job(large.path)
    again.claim_machines()
    assert again.spec.gpus_of_computer == ("0", "1", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    again.claim_machines()
    assert again.spec.gpus_of_computer is None
