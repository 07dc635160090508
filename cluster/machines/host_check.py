"""Checks machines at the same time, as a launch would, and leaves nothing on them.

The check is the set-up of a job (`cluster.machines.provision`) with three differences: files that a set-up keeps on a
machine are in a scratch folder that is removed at the end; no environment is made, no tmux session and agent started.
"""

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

from cluster.connectors.ssh import CommandResult, SSHConnector
from cluster.connectors.ssh_scripts import quote_path
from cluster.errors import ClusterError, SetupFailed
from cluster.state.spec import JobSpec

from . import code_archive
from .checks import MachineFacts
from .provision import CheckedMachine, Provisioner
from .setup_progress import SetupProgress

RECONNECT_SECONDS = 4.0  # how long to try to reach a machine
# Of the folder $m, the folder $f and the folders above $f, prints those that do not exist. The deepest comes first.
MISSING_FOLDERS_SCRIPT = r"""
[ -d "$m" ] || printf '%s\n' "$m"
while [ -n "$f" ] && [ ! -d "$f" ]; do printf '%s\n' "$f"; f=${f%/*}; done
"""
# Removes the scratch folder $s, the markers of this check, and the folders that it made, unless they have files by now.
CLEAN_UP_SCRIPT = r"""
rm -f "$m/$t"-*
rm -rf "$s"
printf '%s' "$made" | while read -r folder; do rmdir "$folder" 2>/dev/null; done
[ ! -e "$s" ]
"""


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """The result of the check of one machine. An error prevents a launch on it, a warning hampers it.

    `facts` is None when the machine did not answer. `torch` is the version that is there, "" if it must be installed.
    """

    machine: str
    host: str
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    facts: MachineFacts | None
    torch: str


class HostCheck(Provisioner):
    """A check of the machines of a specification. `folder` is an empty local folder for its files."""

    environment_flags: ClassVar[tuple[str, ...]] = ("--find",)

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        hosts_file = spec.hosts
        assert hosts_file
        spec = replace(spec, name="check", uid=f"check-{uuid4().hex[:12]}")
        hosts = dict(zip(spec.machine_names, hosts_file.machines, strict=False))
        connectors = {
            name: SSHConnector(
                replace(host, folder=f"{host.folder}/{spec.uid}"), f"machine {name} ({host.host})", RECONNECT_SECONDS
            )
            for name, host in hosts.items()
        }
        super().__init__(spec, hosts, connectors, SetupProgress(folder / "machines.json"), folder / "stop")
        self.missing_folders: dict[str, str] = {}  # by machine that answered: the folders that the check makes

    def run(self) -> list[HostReport]:
        """Check all machines and return a report for each. Raises `ClusterError` if the code cannot be packed here."""
        code = code_archive.pack_code()
        self.setup_progress.start_launch(self.spec.uid, {name: host.host for name, host in self.hosts.items()})
        checked_machines: dict[str, CheckedMachine] = {}
        try:
            answers = self.run_on_each([*self.hosts], lambda name: self.prepare(name, lambda: code, with_checks=True))
            checked_machines = {name: machine for name, machine in answers.items() if machine}
            self.check_machines(checked_machines)
            failed = self.setup_progress.failure_reasons
            if usable := [name for name in checked_machines if name not in failed]:
                self.check_shared_folder(usable)
        finally:
            self._clean_up()
        return [
            HostReport(
                machine=name,
                host=row.host,
                errors=(row.reason,) if row.reason else (),
                warnings=row.notes,
                facts=checked_machines[name].facts if name in checked_machines else None,
                torch=checked_machines[name].torch if name in checked_machines else "",
            )
            for name, row in self.setup_progress.rows.items()
        ]

    # --- what differs from the set-up of a job ------------------------------------------------------------------------

    def kept_folder(self, folder: str) -> str:
        """Return the scratch folder on a machine, which is removed at the end."""
        return f"{folder}/{self.spec.uid}"

    def prepare(
        self, name: str, code: Callable[[], code_archive.PackedCode], with_checks: bool
    ) -> CheckedMachine | None:
        """Note the folders that the check is going to create on a machine, then prepare the machine as for a job."""
        connector = self.connectors[name]
        variables = {"f": quote_path(self.hosts[name].folder), "m": quote_path(self._marker_folder(name))}
        self.missing_folders[name] = connector.run_repeatable(MISSING_FOLDERS_SCRIPT, **variables).decode()
        return super().prepare(name, code, with_checks)

    def open_session(self, name: str, shell_line: str, timeout_seconds: float | None = None) -> CommandResult:
        """Run a line of sh on a machine, without a session. Raises `SetupFailed`."""
        work = self.setup_progress.rows[name].work
        argv = ["sh", "-c", f'mkdir -p "$1" || exit 1\n{shell_line}', "sh", work]
        result = self.connectors[name].run(argv, check=False, timeout=timeout_seconds)
        if result.code:
            raise SetupFailed(f"{self.connectors[name].name}: {result.err.decode(errors='replace')}")
        return result

    def _logged_line(self, name: str, argv: Sequence[str], variables: Mapping[str, str]) -> str:
        return super()._logged_line(name, argv, {**variables, "PYTHONDONTWRITEBYTECODE": "1"})

    def _marker_folder(self, name: str) -> str:
        return f"{self.shared_folder(name)}/probe"

    def remove_markers(self, name: str) -> None:
        """Do nothing: `_clean_up` removes the markers on each machine, which may have different shared folders."""

    def _clean_up(self) -> None:
        """End what runs, remove what was made, on all machines that answered, and close the connections."""

        def remove(name: str) -> None:
            with contextlib.closing(self.connectors[name]) as connector:
                try:
                    connector.end_commands(
                        CLEAN_UP_SCRIPT,
                        s=quote_path(connector.host.folder),
                        m=quote_path(self._marker_folder(name)),
                        t=self.spec.uid,
                        made=shlex.quote(self.missing_folders[name]),
                    )
                except ClusterError as error:
                    remedy = f"remove it: rm -rf {connector.host.folder}"
                    note = f"{connector.host.folder} stays there ({error}); {remedy}"
                    self.setup_progress.add_note(name, note)

        with ThreadPoolExecutor(max_workers=max(1, len(self.missing_folders))) as pool:
            for future in [pool.submit(remove, name) for name in self.missing_folders]:
                future.result()
