"""Fixtures of the tests of `cluster`: hand-made run folders, a full disk, a terminal, several processes at once."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import pty
import select
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_server import can_fork, command_server
from support.forked_ranks import run_ranks
from support.sandbox import Sandbox
from support.small_disk import fill
from support.specs import TINY, make_spec

from cluster.state.run_folder import RunFolder
from train.tools.sealed_files import with_checksum


class HandMadeRun:
    """A run folder written by a test, not by a command. The job is an hour old, as if its machine had gone down."""

    def __init__(self, run: Path, **changes: Any) -> None:
        self.run_folder = RunFolder(run)
        values = {"name": run.name, "recipe": TINY, "data": "/nowhere", "copies": "/nowhere-sz"}
        self.spec = make_spec(**{**values, "created": time.time() - 3600, **changes})
        self.run_folder.shared.mkdir(parents=True)
        for name in self.spec.machine_names:
            self.run_folder.work_folder(name).mkdir(parents=True)
        for path in (self.run_folder.spec_path, self.run_folder.shared / "job.json"):
            path.write_text(json.dumps(self.spec.to_json()))
        self.run_folder.recipe_path.write_text(json.dumps(self.spec.workload.to_json()))

    @property
    def job(self) -> Any:
        from cluster.jobs.submit import Job

        return Job(self.run_folder.path)

    def write_shared(self, path: str, content: str | bytes) -> Path:
        file = self.run_folder.shared / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def write_status(self, state: str, machine: str = "0", **more: Any) -> None:
        status = {"id": f"{machine}.test", "state": state, "time": time.time(), **more}
        self.write_shared(f"status/{machine}.json", json.dumps(status))

    def write_state_log(self, *states: tuple[str, float], machine: str = "0") -> None:
        """Write the state log of a machine's agent from (state, time) pairs."""
        lines = [json.dumps({"time": begin, "attempt": 1, "state": state}) for state, begin in states]
        self.write_shared(f"logs/agent-{machine}.jsonl", "".join(line + "\n" for line in lines))

    def copy_logs(self) -> None:
        """Copy the logs and metrics of the shared folder into the run folder, as the supervisor does."""
        for folder in ("logs", "metrics"):
            if (self.run_folder.shared / folder).exists():
                shutil.copytree(self.run_folder.shared / folder, self.run_folder.path / folder, dirs_exist_ok=True)

    def write_attempt(self, number: int, *members: str, resume_step: int = 0, **more: Any) -> None:
        """Write an attempt file. The attempt goes on from the checkpoint of `resume_step`, 0 for none."""
        if resume_step:
            more["resume"] = f"checkpoints/{number:06d}/resume-{resume_step:08d}-abcd.pt"
        text = json.dumps({"number": number, "members": members, "time": time.time(), **more})
        self.write_shared(f"attempts/{number:06d}.json", text)

    def write_metrics(self, attempt: int, *rows: dict[str, Any], tail: str = "") -> None:
        """Write the metrics of an attempt; `tail` is added as it is, such as half a line."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        self.write_shared(f"metrics/{attempt:06d}.jsonl", text + tail)

    def write_checkpoint(self, attempt: int, step: int, whole: bool = True) -> str:
        """Write a checkpoint, damaged unless `whole`; return its path relative to the shared folder."""
        name = f"checkpoints/{attempt:06d}/step-{step:08d}.pt"
        content = with_checksum(f"{attempt} {step}".encode() * 100)
        self.write_shared(name, content if whole else content[:-1])
        return name

    @contextlib.contextmanager
    def hold_agent_lock(self, machine: str = "0") -> Iterator[None]:
        """Hold the lock of a machine's agent, as a living agent does."""
        with (self.run_folder.work_folder(machine) / "agent.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@pytest.fixture
def hand_made(sandbox: Sandbox) -> Callable[..., HandMadeRun]:
    """Make a run folder in this test's sandbox, with its commands and tmux server: hand_made("job-1", procs=2)."""
    return lambda name="job-1", **changes: HandMadeRun(sandbox.path / "runs" / name, **changes)


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    fill(small_disk)
    return small_disk


@pytest.fixture
def on_terminal(sandbox: Sandbox) -> Callable[..., tuple[int, str]]:
    """Run a command on a terminal of its own with these keys typed. Returns (exit code, all text on the terminal)."""

    def run(*words: str, typed: bytes = b"", cwd: Path | None = None, **env: str) -> tuple[int, str]:
        own_fd, command_fd = pty.openpty()
        environment = {**sandbox.env, "COLUMNS": "200", **env}
        assert can_fork(environment), "the command needs an interpreter of its own"
        command = command_server().start(words, cwd or sandbox.path, environment, (command_fd,) * 3)
        os.close(command_fd)
        if typed:
            os.write(own_fd, typed)
        output, deadline = b"", time.monotonic() + 120
        try:
            while time.monotonic() < deadline and select.select([own_fd], [], [], 120)[0]:
                output += os.read(own_fd, 1 << 16)
        except OSError as error:  # Linux reports in this way that the command has closed the terminal
            assert error.errno == errno.EIO
        finally:
            os.close(own_fd)
        with command:
            exit_code = command.wait(120)
        return exit_code, output.decode(errors="replace").replace("\r\n", "\n")

    return run


@pytest.fixture
def run_in_processes() -> Callable[..., list[Any]]:
    """Call a function in several processes at the same moment, with the number of each; return all results."""

    def call(count: int, function: Callable[[int], Any]) -> list[Any]:
        barrier = multiprocessing.get_context("fork").Barrier(count)

        def call_together(number: int, _: Path) -> Any:
            barrier.wait(120)
            return function(number)

        return run_ranks(count, call_together, seconds=120)

    return call
