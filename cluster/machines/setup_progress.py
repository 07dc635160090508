"""The progress of machines that are being set up: one row each, kept in <run>/machines.json for whoever looks."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from train.tools.filesystem import read_json, to_json_bytes, write_atomic

WRITE_DELAY_SECONDS = 0.2  # between two writes: 64 machines change it 30 times a second
MACHINE_SETUP_STEPS = ("booting", "connected", "code", "environment", "checks", "network", "agent")


class SetupProgress:
    """Rows by machine name: host, step, reason, notes, seconds of each step, and where code and Python are there."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.pending_write: threading.Timer | None = None
        said = read_json(path)
        self.data: dict[str, Any] = said if isinstance(said, dict) else {}
        self.data.setdefault("launch", "")
        self.rows: dict[str, dict[str, Any]] = self.data.setdefault("machines", {})

    def start_launch(self, launch_id: str, hosts: dict[str, str]) -> None:
        """Start anew for a launch."""
        with self.lock:
            self.data["launch"], self.data["ready"] = launch_id, False
            for name, host in hosts.items():
                self.rows[name] = {"host": host, "step": "", "reason": "", "notes": [], "seconds": {}}
        self._write()

    def set_step(self, name: str, step: str, seconds: float | None = None) -> None:
        """Say what a machine is at, or with `seconds` how long that took."""
        with self.lock:
            row = self.rows[name]
            row["step"] = step
            if seconds is not None:
                row["seconds"][step] = round(row["seconds"].get(step, 0.0) + seconds, 3)
        self._write_soon()

    def update(self, name: str, **values: Any) -> None:
        """Keep more about a machine: reason, notes, python, code, folder, address."""
        with self.lock:
            self.rows[name].update(values)
        if "reason" in values:
            self._write()
        else:
            self._write_soon()

    def mark_ready(self) -> None:
        """All machines that can be are set up, and their agents at work."""
        self.data |= {"ready": True, "finished": time.time()}
        self._write()

    @property
    def failure_reasons(self) -> dict[str, str]:
        """The machines that cannot be used, with the reason."""
        return {name: str(row["reason"]) for name, row in self.rows.items() if row["reason"]}

    def _write_soon(self) -> None:
        """Write what has changed within a moment. A supervisor that is killed before that sets up again anyway."""
        with self.lock:
            if not self.pending_write:
                self.pending_write = threading.Timer(WRITE_DELAY_SECONDS, self._write_now)
                self.pending_write.daemon = True
                self.pending_write.start()

    def _write_now(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full: who calls `finish` is told
            self._write()

    def _write(self) -> None:
        with self.lock:
            if self.pending_write:
                self.pending_write.cancel()
            self.pending_write = None
            write_atomic(self.path, to_json_bytes({**self.data, "time": time.time()}), durable=False)


class timed_step:
    """A step of a machine, as a context: begins it, and notes its seconds when it went well."""

    def __init__(self, setup_progress: SetupProgress, machine_name: str, step: str) -> None:
        self.setup_progress, self.machine_name, self.step = setup_progress, machine_name, step

    def __enter__(self) -> None:
        self.started = time.monotonic()
        self.setup_progress.set_step(self.machine_name, self.step)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.setup_progress.set_step(self.machine_name, self.step, time.monotonic() - self.started)
