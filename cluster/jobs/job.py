"""One job: a run folder, and what can be asked of it and done to it."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from cluster.backends import registry
from cluster.backends.base import Backend
from cluster.connectors import tmux
from cluster.errors import BadInput, ClusterError
from cluster.state import attempts
from cluster.state import result as state_status_result
from cluster.state import status as state_status
from cluster.state import timeline as state_timeline
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec
from train.metrics.hparams import flat
from train.recipe.schedule import Schedule, scaled
from train.tools.filesystem import as_json, locked, read_json, replace

from . import queue_state

BOOT_SECONDS = 20.0  # for an agent to say its first word
STOP_SECONDS = 45.0


class Busy(ClusterError):
    """Another command is changing the job."""


class Job:
    """A run folder and what is known of its job. Cheap to make; everything is read when asked for."""

    def __init__(self, run: Path, supervising: bool = False) -> None:
        self.run, self.name, self.folders = run, run.name, Folders(run)
        self.supervising = supervising  # only this one talks to machines that are not this computer

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
        return registry.get(self.spec.backend)

    @property
    def alive(self) -> bool:
        """Whether an agent is at work on it."""
        return self.backend.alive(self.spec, self.folders)

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
    def waiting(self) -> bool:
        """Whether it stands in a queue, and nobody has started it yet."""
        return not queue_state.begun(self.folders, self.spec)

    @property
    def hparams(self) -> dict[str, int | float | str]:
        """Its settings in short, as TensorBoard shows them beside those of others."""
        images = scaled(self.spec.recipe.data.train, self.spec.scale)
        return flat(Schedule(self.spec.recipe, images, self.spec.gpus), self.spec.machines * self.spec.procs)

    @property
    def state(self) -> str:
        """waiting, booting, setup, running, done, failed or stopped."""
        return str(self.status()["state"])

    def status(self) -> dict[str, Any]:
        """Return what is known now: state, reason, attempt, step and steps, epoch, accuracies, speed."""
        with self._whole_files():
            return self._status()

    def _status(self) -> dict[str, Any]:
        known = state_status.status(self.folders, self.spec, self.result)
        if self.waiting:
            return {**known, "state": "waiting", "doing": queue_state.doing(self.folders, self.spec)}
        gone = not self.backend.REMOTE and not self.ended and not self.alive  # first: a dead agent's word is final
        if gone and self.said and not self.booting:  # which could not be settled yet
            trained = (self.folders.shared / "result.json").exists()
            state, reason = state_status.ending(self.folders, self.spec)
            known |= {} if trained else {"state": state, "reason": reason}
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
            why = error.strerror or error
            raise ClusterError(f"{self.run}: {why}; what the job writes cannot come here until then") from error

    @contextlib.contextmanager
    def _whole_files(self) -> Iterator[None]:
        """Turn what a damaged file brings about into a `ClusterError`."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if self.supervising:  # which writes down where it was
                raise
            raise ClusterError(f"{self.run}: a file in it is damaged ({type(error).__name__}: {error})") from error

    def _refresh(self) -> None:
        if self.waiting:
            return queue_state.ensure(self.run.parent, self.spec.queue)
        if self.backend.REMOTE and not self.supervising:
            return self._supervise()
        over = self.said or not self.booting  # before anybody is asked: first words that come meanwhile say it lives
        if not self.backend.step(self.spec, self.folders) and over:
            self._settle()

    def _supervise(self) -> None:
        """Start the supervisor when none is at work: the computer was off, or somebody killed it."""
        last = self.run / ".supervised"
        with contextlib.suppress(Busy), self.locked():
            if not self.alive and not (last.exists() and 0 <= time.time() - last.stat().st_mtime < BOOT_SECONDS):
                last.touch()
                self.backend.launch(self.spec, self.folders)

    def _settle(self) -> None:
        """Write the result of a job whose agent is gone, once nothing of it is left; who comes second does nothing."""
        with contextlib.suppress(Busy), self.locked(seconds=5):
            if not self.ended and (self.supervising or not self.alive):
                silent = self.backend.terminate(self.spec, self.folders)
                state_status_result.settle(self.folders, self.spec, self.backend, silent)

    def fail(self, reason: str) -> None:
        """End a job that cannot start, or was stopped before it did: nothing of it stays on its machines."""
        how = "stopped" if (self.folders.shared / "stop").exists() else "failed"
        with self.locked(seconds=5):
            silent = self.backend.terminate(self.spec, self.folders)
            state_status_result.settle(self.folders, self.spec, self.backend, silent, reason, how)

    @property
    def said(self) -> bool:
        """Whether an agent of the last launch has said anything yet."""
        return bool(state_status.words(self.folders, self.spec))

    @property
    def booting(self) -> bool:
        """Whether the agents of the last launch were started so lately that they may still come."""
        since = state_status.started(self.folders, self.spec)
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
        return state_status.lines(self.run, kind)

    def scalars(self, name: str) -> list[tuple[int, float]]:
        """Return (images seen, value) of a scalar such as "val/top1" or "train/loss", as TensorBoard shows it."""
        short = name.removeprefix("val/") if "top" in name else name.replace("/", "_")
        kind, key = ("epoch", short) if name.startswith("val/") else ("train", name)
        return [(row["images"], row[key]) for row in self.lines(kind) if row.get(key) is not None]

    def log(self, rank: int | None = 0, attempt: int | None = None, machine: str = "0") -> Path:
        """Return the file that a rank of an attempt (default: the last) writes its output to; None: a machine's agent.

        Before the first attempt it is the set-up's.
        """
        if rank is None:
            return self.run / "logs" / f"agent-{machine}.jsonl"
        number = attempt or int(self.status()["attempt"])
        name = f"{number:06d}/rank-{rank}.log" if number else f"setup-{machine}.log"
        return self.run / "logs" / name

    def timeline(self) -> list[dict[str, Any]]:
        """Return a row for each attempt: who, when, why, and what it cost in seconds and steps."""
        return state_timeline.table(self.run, self.folders.shared)

    def machines(self) -> dict[str, dict[str, Any]]:
        """Return what each machine said last, with the seconds of its way to the first step."""
        return state_status.machines(self.folders, self.spec)

    @property
    def head(self) -> str:
        """The machine of rank 0."""
        newest = attempts.newest(self.folders.shared)
        return newest.names[0] if newest and newest.members else "0"

    def attach_command(self, machine: int | None = None) -> list[str]:
        """Return the command that shows the session of a machine on this terminal. Raises `ClusterError`."""
        name = self._named(machine)
        if self.backend.REMOTE:
            return self.ssh_command(int(name), tmux.attach_command(self.spec.session), tty=True)
        if not tmux.mine(self.name, self.run):
            raise ClusterError(f"{self.name} has no tmux session; imgnet-cluster status {self.name}")
        return tmux.attach_command(self.name, f"train-{name}" if len(self.spec.names) > 1 else "")

    def ssh_command(self, machine: int | None, argv: Sequence[str] = (), tty: bool = True) -> list[str]:
        """Return OpenSSH's command for a machine, with the job's own configuration. Raises `ClusterError`."""
        from cluster.connectors.ssh_config import terminal

        config = self.run / "ssh_config"
        if not config.exists():
            raise ClusterError(f"{self.name} runs on this computer; there is nothing to log in to")
        return terminal(config, int(self._named(machine)), argv, tty)

    def _named(self, machine: int | None) -> str:
        name = self.head if machine is None else str(machine)
        if name not in self.spec.names:
            raise BadInput(f"{self.name} has the machines {', '.join(self.spec.names)}; there is no machine {name}")
        return name

    def start(self) -> None:
        """Let the backend start it. Raises `ClusterError`; a job that had ended then still has its result."""
        with self.locked():
            self.take_machines()
            self.start_held()

    def take_machines(self) -> None:
        """Of a hosts file that a queue shares, take those that are free. Raises `ClusterError`: there are too few."""
        chosen = queue_state.with_machines(self.folders, self.spec)
        if chosen != self.spec:
            self.folders.describe(chosen)
            self.spec = chosen

    def start_held(self) -> None:
        """Start it, by one who holds its lock."""
        if self.alive:
            raise ClusterError(f"{self.name} is running; imgnet-cluster attach {self.name}")
        (self.folders.shared / "stop").unlink(missing_ok=True)
        for name in self.spec.names:
            self._away(name).unlink(missing_ok=True)
        before = self.folders.result.read_bytes() if self.ended else b""
        self.folders.result.unlink(missing_ok=True)
        try:
            replace(self.folders.launch, uuid4().hex.encode())
            self.backend.launch(self.spec, self.folders)
        except (ClusterError, OSError):
            if before:
                replace(self.folders.result, before)
            raise
        self.folders.begun.touch()
        deadline = time.monotonic() + (0 if self.backend.REMOTE else BOOT_SECONDS)
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
        if self.waiting and self._leave():
            return
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

    def _leave(self) -> bool:
        """Leave the queue for good. False when it was started meanwhile."""
        with self.locked(BOOT_SECONDS):
            if not self.waiting:
                return False
            if self.folders.launch.exists():  # somebody was killed while starting it
                self.backend.terminate(self.spec, self.folders)
            state_status_result.settle(
                self.folders, self.spec, self.backend, why="stopped while it waited", how="stopped"
            )
            return True

    def lose(self, machine: str, notice: float | None = None, for_good: bool = False) -> None:
        """Take a machine away, for rehearsal: at once, as if its power was cut, or with so many seconds of notice.

        The supervisor starts it again, unless `for_good`. Raises `ClusterError` when there is no such machine at work.
        """
        self.refresh()
        if self.ended or self.waiting:
            raise ClusterError(f"{self.name} is {self.state}; it has no machine that could be lost")
        machine = self._named(int(machine))
        if for_good:
            self._away(machine).touch()
        self.backend.lose(self.spec, self.folders, machine, notice)

    def _away(self, machine: str) -> Path:
        return self.run / f".away-{machine}"

    def kept_away(self, machine: str) -> bool:
        """Whether a machine was lost for good."""
        return self._away(machine).exists()

    def resume(self) -> None:
        """Go on from the newest whole checkpoint. Raises `ClusterError` when it runs, or is done."""
        self.refresh()
        if not self.ended:
            raise ClusterError(f"{self.name} is running; imgnet-cluster attach {self.name}")
        if self.state == "done":
            raise ClusterError(f"{self.name} is done; there is nothing to resume. Run it again: imgnet-cluster launch")
        self.backend.check(self.spec, self.run.parent)
        self.start()
