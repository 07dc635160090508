"""The verbs: plan, launch, find, stop, resume. What the command line does is a function here first."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from train.files import as_json, read_json
from train.files import replace as replace_file
from train.provenance import git_commit
from train.recipe import SAMPLE, Recipe
from train.recipe_file import RecipeError, load
from train.schedule import Schedule

from . import backends, events, settle
from .backends import Backend
from .errors import BadInput, ClusterError, NoSuchJob
from .machine import gpu_count
from .spec import Folders, Spec

RUNS = "IMGNET_RUNS"
FINAL = ("done", "failed", "stopped")
BOOT_SECONDS = 20.0  # for an agent to say its first word
STOP_SECONDS = 45.0


class Job:
    """A run folder and what is known of its job. Cheap to make; everything is read when asked for."""

    def __init__(self, run: Path) -> None:
        self.run, self.name, self.folders = run, run.name, Folders(run)

    @cached_property
    def spec(self) -> Spec:
        """What was asked. Raises `ClusterError` when job.json is not there or damaged."""
        try:
            return Spec.from_json(json.loads(self.folders.spec.read_text()))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ClusterError(f"{self.folders.spec}: {error}; remove the folder to forget the job") from error

    @property
    def backend(self) -> Backend:
        """Where its machines come from."""
        return backends.get(self.spec.backend)

    @property
    def alive(self) -> bool:
        """Whether an agent is at work on it."""
        return self.backend.alive(self.folders)

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, None until the job has ended."""
        found: dict[str, Any] | None = read_json(self.folders.result)
        return found

    @property
    def ended(self) -> bool:
        """Whether the job has ended, whichever way."""
        return self.folders.result.exists()

    @property
    def state(self) -> str:
        """planned, booting, setup, running, done, failed or stopped."""
        return str(self.status()["state"])

    def status(self) -> dict[str, Any]:
        """Return what is known now: state, reason, attempt, step and steps, epoch, accuracies, speed."""
        return settle.status(self.folders, self.spec, self.result)

    def refresh(self) -> None:
        """Bring files home and, when the job has ended or its agent is gone, write the result."""
        if self.ended:
            return
        alive = self.alive  # asked first: what a dead agent wrote is complete
        events.bring_home(self.backend.machines(self.spec)[0], str(self.folders.shared), self.run)
        if not alive and time.time() - self.launched > (0 if self.said else BOOT_SECONDS):
            settle.settle(self.folders, self.spec, self.backend)

    @property
    def said(self) -> bool:
        """Whether the agent of the last launch has said anything yet."""
        status = settle.agent_status(self.folders)
        return bool(status) and float(status["time"]) >= self.launched

    @property
    def launched(self) -> float:
        """When the job was last launched or resumed, in seconds since 1970."""
        with contextlib.suppress(FileNotFoundError):
            return (self.run / ".launched").stat().st_mtime
        return self.spec.created

    def wait(self, seconds: float | None = None) -> str:
        """Return the final state when the job has ended. Raises `ClusterError` when it has not in so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self.refresh()
            if self.ended:
                return self.state
            if deadline is not None and time.monotonic() > deadline:
                raise ClusterError(f"{self.name}: not finished after {seconds:g} s; imgnet-cluster status {self.name}")
            time.sleep(0.2)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the metrics' lines of one kind, "train" or "epoch"; a later attempt replaces what it did again."""
        return settle.lines(self.run, kind)

    def scalars(self, name: str) -> list[tuple[int, float]]:
        """Return (images seen, value) of a scalar such as "val/top1" or "train/loss", as TensorBoard shows it."""
        short = name.removeprefix("val/") if "top" in name else name.replace("/", "_")
        kind, key = ("epoch", short) if name.startswith("val/") else ("train", name)
        return [(row["images"], row[key]) for row in self.lines(kind) if key in row]

    def log(self, rank: int | None = 0, attempt: int | None = None) -> Path:
        """Return the file that a rank of an attempt (default: the last) writes its output to; None: the agent's."""
        if rank is None:
            return self.run / "logs" / "agent-0.jsonl"
        number = attempt or int(self.status()["attempt"] or 1)
        return self.run / "logs" / f"{number:06d}" / f"rank-{rank}.log"

    def start(self) -> None:
        """Let the backend start it. Raises `ClusterError`."""
        with self.locked():
            if self.alive:
                raise ClusterError(f"{self.name} is running; imgnet-cluster attach {self.name}")
            (self.folders.shared / "stop").unlink(missing_ok=True)
            self.folders.result.unlink(missing_ok=True)
            (self.run / ".launched").touch()
            self.backend.launch(self.spec, self.folders)
            deadline = time.monotonic() + BOOT_SECONDS
            while not self.said and time.monotonic() < deadline:
                time.sleep(0.05)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the job for a change; a second one at the same time is refused with `ClusterError`."""
        with (self.run / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ClusterError(f"{self.name}: another command is changing it just now") from None
            yield

    def stop(self) -> None:
        """Save, end, and return when nothing of it runs any more. Raises `ClusterError` when it has ended already."""
        self.refresh()
        if self.ended:
            raise ClusterError(f"{self.name} is {self.state} already; there is nothing to stop")
        replace_file(self.folders.shared / "stop", as_json({"time": time.time(), "pid": os.getpid()}))
        deadline = time.monotonic() + STOP_SECONDS
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.1)
            self.refresh()
        self.backend.terminate(self.spec, self.folders)
        self.wait(10)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint. Raises `ClusterError` when it runs, or is done."""
        self.refresh()
        if not self.ended:
            raise ClusterError(f"{self.name} is running; imgnet-cluster attach {self.name}")
        if self.state == "done":
            raise ClusterError(
                f"{self.name} is done; there is nothing to resume. To run it again: imgnet-cluster launch"
            )
        self.backend.check(self.spec)
        self.start()


# --- many jobs -----------------------------------------------------------------------------------------------------


def runs() -> Path:
    """Return the folder of all run folders: $IMGNET_RUNS, else ./runs."""
    return Path(os.environ.get(RUNS) or "runs").absolute()


def all_jobs() -> list[Job]:
    """Return the jobs of this folder, oldest first."""
    found = [path for path in runs().glob("job-*") if path.name[4:].isdigit() and path.is_dir()]
    return [Job(path) for path in sorted(found, key=lambda path: int(path.name[4:]))]


def find(name: str | None = None) -> Job:
    """Return the job called "job-3" or "3", without a name the newest. Raises `NoSuchJob`."""
    jobs = all_jobs()
    if name is None and jobs:
        return jobs[-1]
    for job in jobs:
        if name in (job.name, job.name.removeprefix("job-")):
            return job
    known = (
        f"there are {jobs[0].name} to {jobs[-1].name}"
        if len(jobs) > 1
        else f"there is {jobs[0].name}"
        if jobs
        else "there are none"
    )
    raise NoSuchJob(f"{name or 'no job'}: there is no such job in {runs()} ({known})")


def _make_folder() -> Path:
    """Claim the next number. mkdir fails for the second of two that start at once, who takes the one after."""
    runs().mkdir(parents=True, exist_ok=True)
    number = max((int(job.name[4:]) for job in all_jobs()), default=0) + 1
    while True:
        try:
            (runs() / f"job-{number}").mkdir()
            return runs() / f"job-{number}"
        except FileExistsError:
            number += 1


# --- before a job --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a launch would do: the Spec but for its name, the schedule, and the lines that a person should read."""

    spec: Spec
    schedule: Schedule
    notes: tuple[str, ...]


def plan(
    recipe: Recipe,
    *,
    recipe_file: str = "",
    backend: str = "local",
    machines: int | None = None,
    procs: int | None = None,
    data: str | Path | None = None,
    copies: str | Path | None = None,
    keep_batch: bool = False,
    max_steps: int | None = None,
    max_hours: float | None = None,
    scale: float = 1.0,
    save_seconds: float = 60.0,
    skip_bad: bool = False,
    workers: int | None = None,
    seed: int | None = None,
) -> Plan:
    """Work a launch out without starting anything. Raises `BadInput`."""
    recipe = recipe.at(machines or 1) if backend == "local" else recipe.at(machines or recipe.machines)
    recipe = recipe if seed is None else replace(recipe, seed=seed)
    draw = str(data) == "sample" or (data is None and recipe.data == SAMPLE)
    if draw:
        recipe = replace(recipe, data=SAMPLE)
    root = Path(recipe.data.root if data is None or draw else data).expanduser().absolute()
    beside = Path(copies).expanduser().absolute() if copies else root.with_name(root.name + "-sz")
    machines = 1 if backend == "local" else machines or recipe.machines
    procs = procs or (gpu_count() or 1 if backend == "local" else recipe.gpus)
    gpus = recipe.nominal_gpus if keep_batch else machines * procs
    images = max(1, -int(-(count_images(root / "train") or recipe.data.train) * scale // 1))
    try:
        schedule = Schedule(recipe, images, gpus, max_steps)
    except ValueError as error:
        raise BadInput(str(error)) from error
    spec = Spec(
        name="", recipe=recipe, recipe_file=recipe_file, data=str(root), copies=str(beside), draw=draw, backend=backend,
        machines=machines, procs=procs, gpus=gpus, max_steps=max_steps, max_hours=max_hours, scale=scale,
        save_seconds=save_seconds, skip_bad=skip_bad, workers=workers,
    )  # fmt: skip
    notes = [schedule.note] if schedule.note else []
    if gpus != machines * procs:
        notes.append(f"{machines * procs} processes share the work of {gpus} GPUs: gradients are accumulated")
    return Plan(spec, schedule, tuple(notes))


def count_images(folder: Path) -> int:
    """Return the number of files in the class folders, 0 when the folder is not there."""
    with contextlib.suppress(OSError):
        return sum(
            1 for one in os.scandir(folder) if one.is_dir() for file in os.scandir(one) if not file.name.startswith(".")
        )
    return 0


def load_recipes(name: str) -> list[Recipe]:
    """Return the recipes of a file. Raises `BadInput` with one line."""
    try:
        return load(name)
    except RecipeError as error:
        raise BadInput(str(error)) from error


def launch(recipe: str | Path | Recipe | Plan, **options: Any) -> Job:
    """Start a job and return it as soon as its agent is at work. `options` are those of `plan`.

    Raises `BadInput`, `ClusterError`; a job that could not start leaves a state that `ls` shows, and nothing that runs.
    """
    if isinstance(recipe, str | Path):
        found = load_recipes(str(recipe))
        if len(found) > 1:
            raise BadInput(f"{recipe}: has {len(found)} recipes; launch them one by one")
        recipe = plan(found[0], recipe_file=str(recipe), **options)
    elif isinstance(recipe, Recipe):
        recipe = plan(recipe, **options)
    backend = backends.get(recipe.spec.backend)
    backend.check(recipe.spec)
    job = _create(recipe.spec)
    job.start()
    return job


def _create(spec: Spec) -> Job:
    """Make the run folder with what was asked. Raises `ClusterError` when the disk is full or read-only."""
    try:
        run = _make_folder()
        spec = replace(spec, name=run.name, git_commit=git_commit())
        folders = Folders(run)
        folders.shared.mkdir(parents=True)
        replace_file(folders.recipe, as_json(spec.recipe.to_json()))
        replace_file(folders.spec, as_json(spec.to_json()))
    except OSError as error:
        raise ClusterError(f"{error.filename or runs()}: {error.strerror or error}; nothing was started") from error
    return Job(run)
