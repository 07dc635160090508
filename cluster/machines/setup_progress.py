"""Set-up progress of a job's machines, kept in <run folder>/machines.json for other commands."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.errors import SetupFailed
from cluster.state.states import SetupStep
from cluster.state.supervisor_records import MachineSetup, SetupRecord
from train.tools.files import write_atomic
from train.tools.records import DamagedRecord, encode, read_record
from train.tools.text_files import to_json_bytes

MAX_NAMED_MACHINES = 8  # in a line about several machines


def fold_by_machine(lines: Iterable[tuple[str, str]], hosts: Mapping[str, str]) -> list[str]:
    """Return each line of (machine, line) once, after the names of its machines. `hosts` are by machine."""
    machines_by_line: dict[str, list[str]] = {}
    for machine, line in lines:
        machines_by_line.setdefault(line, []).append(machine)
    folded = []
    for line, machines in machines_by_line.items():
        host, more = hosts[machines[0]], len(machines) - MAX_NAMED_MACHINES
        title = f"machine {machines[0]} ({host})" if host else f"machine {machines[0]}"
        if len(machines) > 1:
            title = f"machines {', '.join(machines[:MAX_NAMED_MACHINES])}" + (f" and {more} more" if more > 0 else "")
        folded.append(f"{title}: {line}")
    return folded


class SetupProgress:
    """The content of machines.json. May be changed from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.is_abandoned = False  # nobody waits any longer for the threads that set machines up
        self.record = SetupRecord()
        with contextlib.suppress(DamagedRecord):  # the machines are then set up again
            self.record = read_record(path, SetupRecord) or self.record

    @property
    def rows(self) -> Mapping[str, MachineSetup]:
        """The set-up of each machine, by name."""
        return self.record.machines

    def start_launch(self, launch_id: str, hosts: Mapping[str, str]) -> None:
        """Start all rows anew for a launch. `hosts` are host names by machine.

        The other computer of an adopted job has reached all its machines. A resume sets up again where agents ran.
        """
        with self.lock:
            self.is_abandoned = False
            old_rows = {name: self.rows.get(name, MachineSetup()) for name in hosts}
            is_resume = self.record.is_ready and self.record.launch != launch_id
            machines = {
                name: MachineSetup(
                    host=host,
                    was_reached=self.record.is_adopted or old_rows[name].was_reached,
                    restarted=time.time() if is_resume else old_rows[name].restarted,
                )
                for name, host in hosts.items()
            }
            self.record = replace(self.record, launch=launch_id, is_ready=False, leader="", machines=machines)
        self._write()

    def set_step(self, name: str, step: SetupStep, seconds: float | None = None) -> None:
        """Note a machine's step, or its `seconds`. Raises `SetupFailed` in threads of an abandoned set-up."""
        if self.is_abandoned:
            raise SetupFailed("the set-up was given up")

        def change(_: str, row: MachineSetup) -> MachineSetup:
            if seconds is None:
                return replace(row, step=step)
            step_seconds = round(row.seconds.get(step, 0.0) + seconds, 3)
            return replace(row, step=step, seconds={**row.seconds, step: step_seconds})

        self._update_rows([name], change)

    def update(self, name: str, **fields: Any) -> None:  # Any: as `MachineSetup` has them
        """Replace fields of a machine's row. An empty `reason` says that it can be used again."""
        self._update_rows([name], lambda _, row: replace(row, **fields))

    def add_note(self, name: str, note: str) -> None:
        """Add a note to a machine's row."""
        self._update_rows([name], lambda _, row: replace(row, notes=(*row.notes, note)))

    def _update_rows(self, names: Iterable[str], change: Callable[[str, MachineSetup], MachineSetup]) -> None:
        with self.lock:
            changed = {name: change(name, self.rows[name]) for name in names}
            self.record = replace(self.record, machines={**self.rows, **changed})
        with contextlib.suppress(OSError):  # the disk is full: `mark_ready` will raise that
            self._write()

    def update_record(self, **fields: Any) -> None:  # Any: as `SetupRecord` has them
        """Replace fields of the record, without writing it yet."""
        with self.lock:
            self.record = replace(self.record, **fields)

    def begin_row(self, name: str, host: str) -> None:
        """Begin the row of a machine anew: it joins the running job."""
        with self.lock:
            row = MachineSetup(host=host, restarted=time.time())
            self.record = replace(self.record, machines={**self.rows, name: row})

    def note_reach(self, unreachable: Collection[str]) -> None:
        """Record since when this computer cannot reach these machines, and that it reaches the others."""
        since = {name: time.time() if name in unreachable else 0.0 for name in self.rows}
        changed = [name for name, row in self.rows.items() if bool(row.unreachable_since) != bool(since[name])]
        if changed:
            self._update_rows(changed, lambda name, row: replace(row, unreachable_since=since[name]))

    def follow_launch(self, launch_id: str, leader: str) -> None:
        """Record that another computer has launched the job again and leads it. Raises `OSError`."""
        text = f"{leader} leads the job since {time.strftime('%H:%M %Z')}; this computer follows"
        self.update_record(launch=launch_id, leader=text)
        self.mark_ready()

    def mark_ready(self) -> None:
        """Record that all usable machines are set up and their agents started. Raises `OSError` if the disk is full."""
        self.update_record(is_ready=True, finished=time.time())
        self._write()

    @property
    def failure_reasons(self) -> dict[str, str]:
        """The reason of the failure of each machine that cannot be used."""
        return {name: row.reason for name, row in self.rows.items() if row.reason}

    def _write(self) -> None:
        with self.lock:
            write_atomic(self.path, to_json_bytes(encode(replace(self.record, time=time.time()))), durable=False)


@contextlib.contextmanager
def timed_step(setup_progress: SetupProgress, machine_name: str, step: SetupStep) -> Iterator[None]:
    """Record that a machine is at a set-up step and, if the step succeeds, its seconds."""
    start = time.monotonic()
    setup_progress.set_step(machine_name, step)
    yield
    setup_progress.set_step(machine_name, step, time.monotonic() - start)
