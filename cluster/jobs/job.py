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
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from train.metrics.hparams import flat_settings
from train.recipe.schedule import Schedule, scaled_image_count
from train.tools.filesystem import locked, read_json, to_json_bytes, write_atomic

from . import queue_state

AGENT_START_SECONDS = 20.0  # for an agent to say its first word
JOB_STOP_TIMEOUT_SECONDS = 45.0


class JobBusy(ClusterError):
    """Another command is changing the job."""


class Job:
    """A run folder and what is known of its job. Cheap to make; everything is read when asked for."""

    def __init__(self, path: Path, is_supervisor: bool = False) -> None:
        self.path, self.name, self.run_folder = path, path.name, RunFolder(path)
        self.is_supervisor = is_supervisor  # only this one talks to machines that are not this computer

    @cached_property
    def spec(self) -> JobSpec:
        """What was asked. Raises `ClusterError` when job.json is not there or damaged."""
        try:
            return JobSpec.from_json(json.loads(self.run_folder.spec_path.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ClusterError(f"{self.run_folder.spec_path}: {error}; remove the folder to forget the job") from error

    @property
    def backend(self) -> Backend:
        """Where its machines come from."""
        return registry.get_backend(self.spec.backend)

    @property
    def is_alive(self) -> bool:
        """Whether an agent is at work on it."""
        return self.backend.agents_alive(self.spec, self.run_folder)

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, None until the job has ended."""
        found: dict[str, Any] | None = read_json(self.run_folder.result_path)
        return found

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, whichever way."""
        return self.run_folder.result_path.exists()

    @property
    def is_waiting(self) -> bool:
        """Whether it stands in a queue, and nobody has started it yet."""
        return not queue_state.has_left_queue(self.run_folder, self.spec)

    @property
    def hparams(self) -> dict[str, int | float | str]:
        """Its settings in short, as TensorBoard shows them beside those of others."""
        images = scaled_image_count(self.spec.recipe.data.train, self.spec.scale)
        return flat_settings(
            Schedule(self.spec.recipe, images, self.spec.schedule_gpus), self.spec.machines * self.spec.procs
        )

    @property
    def state(self) -> str:
        """waiting, booting, setup, running, done, failed or stopped."""
        return str(self.status()["state"])

    def status(self) -> dict[str, Any]:
        """Return what is known now: state, reason, attempt, step and steps, epoch, accuracies, speed."""
        with self._report_damaged_files():
            return self._read_status()

    def _read_status(self) -> dict[str, Any]:
        known = state_status.job_status(self.run_folder, self.spec, self.result)
        if self.is_waiting:
            return {**known, "state": "waiting", "doing": queue_state.describe_wait(self.run_folder, self.spec)}
        gone = (
            not self.backend.IS_REMOTE and not self.has_ended and not self.is_alive
        )  # first: a dead agent's word is final
        if gone and self.has_agent_status and not self.is_booting:  # which could not be settled yet
            trained = (self.run_folder.shared / "result.json").exists()
            state, reason = state_status.infer_end_state(self.run_folder, self.spec)
            known |= {} if trained else {"state": state, "reason": reason}
        return known

    def refresh(self) -> None:
        """Bring files home and, when the job has ended or its agent is gone, write the result.

        Raises `ClusterError` when that cannot be written here: the disk is full, the folder is read-only.
        """
        try:
            with self._report_damaged_files():
                if not self.has_ended:
                    self._advance()
        except OSError as error:
            why = error.strerror or error
            raise ClusterError(f"{self.path}: {why}; what the job writes cannot come here until then") from error

    @contextlib.contextmanager
    def _report_damaged_files(self) -> Iterator[None]:
        """Turn what a damaged file brings about into a `ClusterError`."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if self.is_supervisor:  # which writes down where it was
                raise
            raise ClusterError(f"{self.path}: a file in it is damaged ({type(error).__name__}: {error})") from error

    def _advance(self) -> None:
        if self.is_waiting:
            return queue_state.ensure_queue_process(self.path.parent, self.spec.queue)
        if self.backend.IS_REMOTE and not self.is_supervisor:
            return self._ensure_supervisor()
        over = (
            self.has_agent_status or not self.is_booting
        )  # before anybody is asked: first words that come meanwhile say it lives
        if not self.backend.poll(self.spec, self.run_folder) and over:
            self._write_result()

    def _ensure_supervisor(self) -> None:
        """Start the supervisor when none is at work: the computer was off, or somebody killed it."""
        last = self.path / ".supervised"
        with contextlib.suppress(JobBusy), self.locked():
            if not self.is_alive and not (
                last.exists() and 0 <= time.time() - last.stat().st_mtime < AGENT_START_SECONDS
            ):
                last.touch()
                self.backend.launch(self.spec, self.run_folder)

    def _write_result(self) -> None:
        """Write the result of a job whose agent is gone, once nothing of it is left; who comes second does nothing."""
        with contextlib.suppress(JobBusy), self.locked(timeout_seconds=5):
            if not self.has_ended and (self.is_supervisor or not self.is_alive):
                silent = self.backend.terminate(self.spec, self.run_folder)
                state_status_result.write_result(self.run_folder, self.spec, self.backend, silent)

    def fail(self, reason: str) -> None:
        """End a job that cannot start, or was stopped before it did: nothing of it stays on its machines."""
        how = "stopped" if (self.run_folder.shared / "stop").exists() else "failed"
        with self.locked(timeout_seconds=5):
            silent = self.backend.terminate(self.spec, self.run_folder)
            state_status_result.write_result(self.run_folder, self.spec, self.backend, silent, reason, how)

    @property
    def has_agent_status(self) -> bool:
        """Whether an agent of the last launch has said anything yet."""
        return bool(state_status.machine_statuses(self.run_folder, self.spec))

    @property
    def is_booting(self) -> bool:
        """Whether the agents of the last launch were started so lately that they may still come."""
        since = state_status.agents_start_time(self.run_folder, self.spec)
        return 0 <= time.time() - since < AGENT_START_SECONDS  # a clock that was set back says no

    def wait(self, timeout_seconds: float | None = None) -> str:
        """Return the final state when the job has ended. Raises `ClusterError` when it has not in so many seconds."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            self.refresh()
            if self.has_ended:
                return self.state
            if deadline is not None and time.monotonic() > deadline:
                raise ClusterError(
                    f"{self.name}: not finished after {timeout_seconds:g} s; imgnet-cluster status {self.name}"
                )
            time.sleep(0.2)

    def metric_rows(self, kind: str) -> list[dict[str, Any]]:
        """Return the metrics' lines of one kind, "train" or "epoch"; a later attempt replaces what it did again."""
        return state_status.read_metrics(self.path, kind)

    def scalars(self, name: str) -> list[tuple[int, float]]:
        """Return (images seen, value) of a scalar such as "val/top1" or "train/loss", as TensorBoard shows it."""
        short = name.removeprefix("val/") if "top" in name else name.replace("/", "_")
        kind, key = ("epoch", short) if name.startswith("val/") else ("train", name)
        return [(row["images"], row[key]) for row in self.metric_rows(kind) if row.get(key) is not None]

    def log_path(self, rank: int | None = 0, attempt: int | None = None, machine: str = "0") -> Path:
        """Return the file that a rank of an attempt (default: the last) writes its output to; None: a machine's agent.

        Before the first attempt it is the set-up's.
        """
        if rank is None:
            return self.path / "logs" / f"agent-{machine}.jsonl"
        number = attempt or int(self.status()["attempt"])
        name = f"{number:06d}/rank-{rank}.log" if number else f"setup-{machine}.log"
        return self.path / "logs" / name

    def timeline(self) -> list[dict[str, Any]]:
        """Return a row for each attempt: who, when, why, and what it cost in seconds and steps."""
        return state_timeline.attempt_rows(self.path, self.run_folder.shared)

    def machine_details(self) -> dict[str, dict[str, Any]]:
        """Return what each machine said last, with the seconds of its way to the first step."""
        return state_status.machine_rows(self.run_folder, self.spec)

    @property
    def rank0_machine(self) -> str:
        """The machine of rank 0."""
        newest = attempts.newest_attempt(self.run_folder.shared)
        return newest.machine_names[0] if newest and newest.members else "0"

    def attach_command(self, machine: int | None = None) -> list[str]:
        """Return the command that shows the session of a machine on this terminal. Raises `ClusterError`."""
        name = self._resolve_machine(machine)
        if self.backend.IS_REMOTE:
            return self.ssh_command(int(name), tmux.attach_argv(self.spec.tmux_session), tty=True)
        if not tmux.is_owned_by(self.name, self.path):
            raise ClusterError(f"{self.name} has no tmux session; imgnet-cluster status {self.name}")
        return tmux.attach_argv(self.name, f"train-{name}" if len(self.spec.machine_names) > 1 else "")

    def ssh_command(self, machine: int | None, argv: Sequence[str] = (), tty: bool = True) -> list[str]:
        """Return OpenSSH's command for a machine, with the job's own configuration. Raises `ClusterError`."""
        from cluster.connectors.ssh_config import openssh_argv

        config = self.path / "ssh_config"
        if not config.exists():
            raise ClusterError(f"{self.name} runs on this computer; there is nothing to log in to")
        return openssh_argv(config, int(self._resolve_machine(machine)), argv, tty)

    def _resolve_machine(self, machine: int | None) -> str:
        name = self.rank0_machine if machine is None else str(machine)
        if name not in self.spec.machine_names:
            raise BadInput(
                f"{self.name} has the machines {', '.join(self.spec.machine_names)}; there is no machine {name}"
            )
        return name

    def start(self) -> None:
        """Let the backend start it. Raises `ClusterError`; a job that had ended then still has its result."""
        with self.locked():
            self.claim_machines()
            self.start_locked()

    def claim_machines(self) -> None:
        """Of a hosts file that a queue shares, take those that are free. Raises `ClusterError`: there are too few."""
        chosen = queue_state.with_free_machines(self.run_folder, self.spec)
        if chosen != self.spec:
            self.run_folder.write_spec(chosen)
            self.spec = chosen

    def start_locked(self) -> None:
        """Start it, by one who holds its lock."""
        if self.is_alive:
            raise ClusterError(f"{self.name} is running; imgnet-cluster attach {self.name}")
        (self.run_folder.shared / "stop").unlink(missing_ok=True)
        for name in self.spec.machine_names:
            self._disabled_marker(name).unlink(missing_ok=True)
        before = self.run_folder.result_path.read_bytes() if self.has_ended else b""
        self.run_folder.result_path.unlink(missing_ok=True)
        try:
            write_atomic(self.run_folder.launch_path, uuid4().hex.encode())
            self.backend.launch(self.spec, self.run_folder)
        except (ClusterError, OSError):
            if before:
                write_atomic(self.run_folder.result_path, before)
            raise
        self.run_folder.started_marker.touch()
        deadline = time.monotonic() + (0 if self.backend.IS_REMOTE else AGENT_START_SECONDS)
        while not self.has_agent_status and time.monotonic() < deadline:
            time.sleep(0.05)

    @contextlib.contextmanager
    def locked(self, timeout_seconds: float = 0) -> Iterator[None]:
        """Hold the job for a change. Raises `Busy` when another command still holds it after so many seconds."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(self.path / ".lock", timeout_seconds))
            except BlockingIOError:
                raise JobBusy(f"{self.name}: another command is changing it just now") from None
            yield

    def stop(self) -> None:
        """Save, end, and return when nothing of it runs any more. Raises `ClusterError` when it has ended already."""
        if self.is_waiting and self._leave_queue():
            return
        self.refresh()
        if self.has_ended:
            raise ClusterError(f"{self.name} is {self.state} already; there is nothing to stop")
        write_atomic(self.run_folder.shared / "stop", to_json_bytes({"time": time.time(), "pid": os.getpid()}))
        deadline = time.monotonic() + JOB_STOP_TIMEOUT_SECONDS
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(0.1)
            self.refresh()
        self.backend.terminate(self.spec, self.run_folder)
        self.wait(10)

    def _leave_queue(self) -> bool:
        """Leave the queue for good. False when it was started meanwhile."""
        with self.locked(AGENT_START_SECONDS):
            if not self.is_waiting:
                return False
            if self.run_folder.launch_path.exists():  # somebody was killed while starting it
                self.backend.terminate(self.spec, self.run_folder)
            state_status_result.write_result(
                self.run_folder, self.spec, self.backend, end_reason="stopped while it waited", end_state="stopped"
            )
            return True

    def kill_machine(self, machine: str, notice_seconds: float | None = None, is_permanent: bool = False) -> None:
        """Take a machine away, for rehearsal: at once, as if its power was cut, or with so many seconds of notice.

        The supervisor starts it again, unless `for_good`. Raises `ClusterError` when there is no such machine at work.
        """
        self.refresh()
        if self.has_ended or self.is_waiting:
            raise ClusterError(f"{self.name} is {self.state}; it has no machine that could be lost")
        machine = self._resolve_machine(int(machine))
        if is_permanent:
            self._disabled_marker(machine).touch()
        self.backend.kill_machine(self.spec, self.run_folder, machine, notice_seconds)

    def _disabled_marker(self, machine: str) -> Path:
        return self.path / f".away-{machine}"

    def is_disabled(self, machine: str) -> bool:
        """Whether a machine was lost for good."""
        return self._disabled_marker(machine).exists()

    def resume(self) -> None:
        """Go on from the newest whole checkpoint. Raises `ClusterError` when it runs, or is done."""
        self.refresh()
        if not self.has_ended:
            raise ClusterError(f"{self.name} is running; imgnet-cluster attach {self.name}")
        if self.state == "done":
            raise ClusterError(f"{self.name} is done; there is nothing to resume. Run it again: imgnet-cluster launch")
        self.backend.check(self.spec, self.path.parent)
        self.start()
