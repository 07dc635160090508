"""Set-up progress of a job's machines: one row per machine, kept in <run folder>/machines.json for other commands."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from train.tools.filesystem import read_json, to_json_bytes, write_atomic

WRITE_DELAY_SECONDS = 0.2  # collects changes between two writes: 64 machines make 30 changes a second
MACHINE_SETUP_STEPS = ("booting", "connected", "code", "environment", "checks", "network", "agent")


class SetupProgress:
    """The content of machines.json. May be changed from several threads.

    A row, by machine name, has: host, current step, reason of a failure ("" for none), notes, seconds of each step, and
    the paths of code and Python on the machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.pending_write: threading.Timer | None = None
        content = read_json(path)
        self.data: dict[str, Any] = content if isinstance(content, dict) else {}
        self.data.setdefault("launch", "")
        self.rows: dict[str, dict[str, Any]] = self.data.setdefault("machines", {})

    def start_launch(self, launch_id: str, hosts: dict[str, str]) -> None:
        """Start all rows anew for a launch. `hosts` are host names by machine."""
        with self.lock:
            self.data["launch"] = launch_id
            self.data["ready"] = False
            for name, host in hosts.items():
                self.rows[name] = {"host": host, "step": "", "reason": "", "notes": [], "seconds": {}}
        self._write()

    def set_step(self, name: str, step: str, seconds: float | None = None) -> None:
        """Record that a machine is at a step, or, with `seconds`, how long the step took."""
        with self.lock:
            row = self.rows[name]
            row["step"] = step
            if seconds is not None:
                row["seconds"][step] = round(row["seconds"].get(step, 0.0) + seconds, 3)
        self._write_soon()

    def update(self, name: str, **values: Any) -> None:
        """Set values of a machine's row, such as notes, python, code, folder, address. Writes a reason at once."""
        with self.lock:
            self.rows[name].update(values)
        if "reason" in values:
            self._write()
        else:
            self._write_soon()

    def mark_ready(self) -> None:
        """Record that all usable machines are set up and their agents started. Raises `OSError` if the disk is full."""
        self.data |= {"ready": True, "finished": time.time()}
        self._write()

    @property
    def failure_reasons(self) -> dict[str, str]:
        """The reason of the failure of each machine that cannot be used."""
        return {name: str(row["reason"]) for name, row in self.rows.items() if row["reason"]}

    def _write_soon(self) -> None:
        """Write all changes within `WRITE_DELAY_SECONDS`.

        A supervisor that is killed before that loses nothing: the next one sets the machines up again anyway.
        """
        with self.lock:
            if not self.pending_write:
                self.pending_write = threading.Timer(WRITE_DELAY_SECONDS, self._write_now)
                self.pending_write.daemon = True
                self.pending_write.start()

    def _write_now(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full: `mark_ready` will raise that
            self._write()

    def _write(self) -> None:
        with self.lock:
            if self.pending_write:
                self.pending_write.cancel()
            self.pending_write = None
            write_atomic(self.path, to_json_bytes({**self.data, "time": time.time()}), durable=False)


class timed_step:
    """A context in which a machine is at a set-up step. Records the seconds if the step succeeds."""

    def __init__(self, setup_progress: SetupProgress, machine_name: str, step: str) -> None:
        self.setup_progress = setup_progress
        self.machine_name = machine_name
        self.step = step

    def __enter__(self) -> None:
        self.started = time.monotonic()
        self.setup_progress.set_step(self.machine_name, self.step)

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is None:
            self.setup_progress.set_step(self.machine_name, self.step, time.monotonic() - self.started)
