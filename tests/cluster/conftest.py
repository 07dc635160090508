"""What the tests of `cluster` share: hand-made run folders, a disk that is full, a terminal, a crowd of processes."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import pty
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from train.recipe import Data, Model, Phase, Recipe
from train.tools.filesystem import with_checksum

TINY = Recipe(
    name="tiny",
    data=Data(name="drawn", root="nowhere", train=60, val=20),
    model=Model(name="resnet10_tiny"),
    gpus=1,
    phases=[Phase(epochs=(0, 2), size=32, batch=8, lr=0.05)],
)


class HandMade:
    """A run folder that no command made: an hour old, as if its machine had gone down."""

    def __init__(self, run: Path, **changes: Any) -> None:
        self.folders = RunFolder(run)
        values = {"name": run.name, "recipe": TINY, "recipe_file": "", "data": "/nowhere", "copies": "/nowhere-sz"}
        self.spec = JobSpec(**{**values, "created": time.time() - 3600, **changes})
        self.folders.shared.mkdir(parents=True)
        for name in self.spec.machine_names:
            self.folders.work_folder(name).mkdir(parents=True)
        for path in (self.folders.spec_path, self.folders.shared / "job.json"):
            path.write_text(json.dumps(self.spec.to_json()))
        self.folders.recipe_path.write_text(json.dumps(self.spec.recipe.to_json()))

    @property
    def job(self) -> Any:
        from cluster.jobs.submit import Job

        return Job(self.folders.path)

    def shared(self, path: str, content: str | bytes) -> Path:
        """Write a file of the shared folder."""
        file = self.folders.shared / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def says(self, state: str, machine: str = "0", **more: Any) -> None:
        """Let the agent of a machine have spoken."""
        said = {"state": state, "time": time.time(), **more}
        self.shared(f"status/{machine}.json", json.dumps(said))

    def history(self, *states: tuple[str, float], machine: str = "0") -> None:
        """Let the log of a machine's agent tell these states at these times."""
        lines = [json.dumps({"time": at, "attempt": 1, "state": state}) for state, at in states]
        self.shared(f"logs/agent-{machine}.jsonl", "".join(line + "\n" for line in lines))

    def attempt(self, number: int, *members: str, **more: Any) -> None:
        """Let this attempt have been agreed on."""
        text = json.dumps({"number": number, "members": members, "time": time.time(), **more})
        self.shared(f"attempts/{number:06d}.json", text)

    def metrics(self, attempt: int, *rows: dict[str, Any], tail: str = "") -> None:
        """Let an attempt have written these rows."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        self.shared(f"metrics/{attempt:06d}.jsonl", text + tail)

    def checkpoint(self, attempt: int, step: int, whole: bool = True) -> str:
        """Leave a checkpoint; returns its path below the shared folder."""
        name = f"checkpoints/{attempt:06d}/step-{step:08d}.pt"
        sealed = with_checksum(f"{attempt} {step}".encode() * 100)
        self.shared(name, sealed if whole else sealed[:-1])
        return name

    @contextlib.contextmanager
    def agent_at_work(self, machine: str = "0") -> Iterator[None]:
        """Hold the lock of a machine's agent, as a living agent does."""
        with (self.folders.work_folder(machine) / "agent.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@pytest.fixture
def hand_made(place: Any) -> Callable[..., HandMade]:
    """Make a run folder of this place, whose commands and tmux server are the place's: hand_made("job-1", procs=2)."""
    return lambda name="job-1", **changes: HandMade(place.path / "runs" / name, **changes)


def fill(disk: Path) -> None:
    """Write until nothing more fits."""
    with contextlib.suppress(OSError), (disk / "filling").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A disk without any room."""
    fill(small_disk)
    return small_disk


@pytest.fixture
def on_terminal(place: Any) -> Callable[..., tuple[int, str]]:
    """Run the command on a terminal of its own, with these keys typed: (exit code, all that the terminal showed)."""

    def run(*words: str, typed: bytes = b"", cwd: Path | None = None, **env: str) -> tuple[int, str]:
        mine, its = pty.openpty()
        both = {**place.env, "COLUMNS": "200", **env}
        one = subprocess.Popen(
            [place.command, *words], stdin=its, stdout=its, stderr=its, cwd=cwd or place.path, env=both,
            start_new_session=True,
        )  # fmt: skip
        os.close(its)
        if typed:
            os.write(mine, typed)
        shown, deadline = b"", time.monotonic() + 60
        try:
            while time.monotonic() < deadline and select.select([mine], [], [], 60)[0]:
                shown += os.read(mine, 1 << 16)
        except OSError as error:  # how Linux says that the other end is closed
            assert error.errno == errno.EIO
        finally:
            os.close(mine)
        return one.wait(60), shown.decode(errors="replace").replace("\r\n", "\n")

    return run


@pytest.fixture
def crowd() -> Callable[..., list[Any]]:
    """Let so many processes call a function with their number at the same moment; return what each gave."""

    def call(count: int, function: Callable[[int], Any]) -> list[Any]:
        fork = multiprocessing.get_context("fork")
        gate, answers = fork.Barrier(count), fork.SimpleQueue()

        def one(number: int) -> None:
            try:
                gate.wait(30)
                answers.put((True, function(number)))
            except BaseException as error:
                answers.put((False, repr(error)))
            os._exit(0)

        group = [fork.Process(target=one, args=(number,)) for number in range(count)]
        for process in group:
            process.start()
        found = [answers.get() for _ in group]
        for process in group:
            process.join()
        assert all(good for good, _ in found), [what for good, what in found if not good]
        return [what for _, what in found]

    return call
