"""One job: a run folder, and what can be asked of it and done to it."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from train.files import as_json, locked, read_json, replace

from . import backends, events, settle
from .backends import Backend
from .errors import ClusterError
from .spec import Folders, Spec

BOOT_SECONDS = 20.0  # for an agent to say its first word
STOP_SECONDS = 45.0


class Busy(ClusterError):
    """Another command is changing the job."""


class Job:
    """A run folder and what is known of its job. Cheap to make; everything is read when asked for."""

    def __init__(self, run: Path) -> None:
        self.run, self.name, self.folders = run, run.name, Folders(run)

    @cached_property
    def spec(self) -> Spec:
        """What was asked. Raises `ClusterError` when job.json is not there or damaged."""
        try:
            return Spec.from_json(json.loads(self.folders.spec.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
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
        """booting, setup, running, done, failed or stopped."""
        return str(self.status()["state"])

    def status(self) -> dict[str, Any]:
        """Return what is known now: state, reason, attempt, step and steps, epoch, accuracies, speed."""
        with self._whole_files():
            return self._status()

    def _status(self) -> dict[str, Any]:
        known = settle.status(self.folders, self.spec, self.result)
        gone = not self.ended and not self.alive  # asked first: what a dead agent said is final
        said = settle.agent_status(self.folders) if gone else {}
        if said and not said.get("ended"):
            known |= {"state": "failed", "reason": settle.silence(self.folders)}  # which could not be settled yet
        return known

    def refresh(self) -> None:
        """Bring files home and, when the job has ended or its agent is gone, write the result.

        Raises `ClusterError` when that cannot be written here: the disk is full, the folder is read-only.
        """
        try:
            with self._whole_files():
                if not self.ended:
                    self._refresh()
        except OSError as error:
            raise ClusterError(
                f"{self.run}: {error.strerror or error}; what the job writes cannot come here until that is mended"
            ) from error

    @contextlib.contextmanager
    def _whole_files(self) -> Iterator[None]:
        """Turn what a damaged file brings about into a `ClusterError`."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ClusterError(f"{self.run}: a file in it is damaged ({type(error).__name__}: {error})") from error

    def _refresh(self) -> None:
        alive = self.alive  # asked first: what a dead agent wrote is complete
        events.bring_home(self.backend.machines(self.spec)[0], str(self.folders.shared), self.run)
        if not alive and (self.said or not self.booting):
            self._settle()

    def _settle(self) -> None:
        """Write the result of a job whose agent is gone, once nothing of it is left; who comes second does nothing."""
        with contextlib.suppress(Busy), self.locked(seconds=5):
            if not self.ended and not self.alive:
                self.backend.terminate(self.spec, self.folders)
                settle.settle(self.folders, self.spec, self.backend)

    @property
    def said(self) -> bool:
        """Whether the agent of the last launch has said anything yet."""
        return bool(settle.agent_status(self.folders))

    @property
    def booting(self) -> bool:
        """Whether the last launch is so fresh that its agent may still come."""
        launch = self.folders.launch
        since = launch.stat().st_mtime if launch.exists() else self.spec.created
        return 0 <= time.time() - since < BOOT_SECONDS  # a clock that was set back says no

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
        """Return the file that a rank of an attempt (default: the last) writes its output to; None: the agent's.

        Before the first attempt it is the set-up's.
        """
        if rank is None:
            return self.run / "logs" / "agent-0.jsonl"
        number = attempt or int(self.status()["attempt"])
        if not number:
            return self.run / "logs" / "setup-0.log"
        return self.run / "logs" / f"{number:06d}" / f"rank-{rank}.log"

    def start(self) -> None:
        """Let the backend start it. Raises `ClusterError`; a job that had ended then still has its result."""
        with self.locked():
            if self.alive:
                raise ClusterError(f"{self.name} is running; imgnet-cluster attach {self.name}")
            (self.folders.shared / "stop").unlink(missing_ok=True)
            before = self.folders.result.read_bytes() if self.ended else b""
            self.folders.result.unlink(missing_ok=True)
            replace(self.folders.launch, uuid4().hex.encode())
            try:
                self.backend.launch(self.spec, self.folders)
            except ClusterError:
                if before:
                    replace(self.folders.result, before)
                raise
            deadline = time.monotonic() + BOOT_SECONDS
            while not self.said and time.monotonic() < deadline:
                time.sleep(0.05)

    @contextlib.contextmanager
    def locked(self, seconds: float = 0) -> Iterator[None]:
        """Hold the job for a change. Raises `Busy` when another command still holds it after so many seconds."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(self.run / ".lock", seconds))
            except BlockingIOError:
                raise Busy(f"{self.name}: another command is changing it just now") from None
            yield

    def stop(self) -> None:
        """Save, end, and return when nothing of it runs any more. Raises `ClusterError` when it has ended already."""
        self.refresh()
        if self.ended:
            raise ClusterError(f"{self.name} is {self.state} already; there is nothing to stop")
        replace(self.folders.shared / "stop", as_json({"time": time.time(), "pid": os.getpid()}))
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
        self.backend.check(self.spec, self.run.parent)
        self.start()
