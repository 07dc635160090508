"""A job's machines over ssh, as its supervisor sees them: sets them up, copies files, and tracks which agents run.

Small files of the shared folder are mirrored to the local run folder, so commands that only read need no network. Two
files are copied from here to the shared folder: `launch` and `stop`. A machine that cannot be reached does not count as
lost.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from cluster.connectors import tmux
from cluster.connectors.hosts_file import Host, Hosts
from cluster.connectors.ssh import SSHConnector, Unreachable
from cluster.connectors.ssh_config import write_ssh_config
from cluster.errors import ClusterError, SetupFailed
from cluster.state import attempts
from cluster.state.heartbeats import parse_status
from cluster.state.run_folder import AGENT_LOCK, RunFolder
from cluster.state.spec import JobSpec
from cluster.state.states import MachineState
from train.tools.agent_protocol import LOG_FOLDERS, RESULT_FILE
from train.tools.filesystem import is_valid_json, locked, overwrite_in_place, write_atomic

from .code_archive import pack_code
from .provision import Provisioner
from .setup_progress import SetupProgress

logger = logging.getLogger(__name__)

MIRRORED = ("status", "attempts")  # status files are rewritten in place, attempt files are made once
QUERY_TIMEOUT_SECONDS = 2.0  # for one machine to answer, before the next one is asked
UNREACHABLE_RETRY_SECONDS = 10.0  # how long a machine that did not answer is asked last
LIVENESS_QUERY_SECONDS = 2.0  # between two questions to a machine whose status does not change
FLEET_RECONNECT_SECONDS = 15.0  # how long to try to reach a machine
STATUS_STALE_SECONDS = 3.0  # without a change of its status, a machine is asked whether its agent runs
# From a stop request until the job counts as over although some machines do not answer.
STOP_GRACE_SECONDS = 30.0
# Sends the signal $2 to the process that holds the lock file $1, if any.
SIGNAL_AGENT_SCRIPT = '[ -e "$1" ] && ! flock -n -s "$1" true && kill -"$2" "$(cat "$1")"'
Answer = TypeVar("Answer")


class Fleet:
    """The machines of one job. Used by the supervisor, and by commands that act on one machine.

    `wait_until_ready` is called with a machine's name before it is set up: a machine that was just rented has to boot
    first. The job's time limit counts from `limit_start` (Unix time in seconds; None: from the launch).
    """

    def __init__(
        self,
        spec: JobSpec,
        folders: RunFolder,
        *,
        reconnect_seconds: float = FLEET_RECONNECT_SECONDS,
        wait_until_ready: Callable[[str], None] | None = None,
        limit_start: float | None = None,
    ) -> None:
        assert spec.hosts
        self.spec = spec
        self.folders = folders
        self.reconnect_seconds = reconnect_seconds
        self.limit_start = limit_start
        self.wait_until_ready = wait_until_ready or (lambda name: None)
        self.hosts = dict(zip(spec.machine_names, Hosts.from_json(spec.hosts).machines, strict=False))
        self.connectors = {name: self._make_connector(name) for name in self.hosts}
        self.setup_progress = SetupProgress(folders.path / "machines.json")
        self.provisioner = Provisioner(spec, self.hosts, self.connectors, self.setup_progress, folders.shared / "stop")
        self.pool = ThreadPoolExecutor(max_workers=2 * len(self.hosts) + 4)
        self.code_archive = (b"", "")  # the packed code and its hash, made when machines are set up

        self.last_responder = ""  # the machine that answered the last query; it is asked first
        self.last_query_failure: dict[str, float] = {}  # when each machine last failed to answer a query
        self.local_sizes: dict[str, int] = {}  # sizes of the mirrored files; empty: not known
        self.last_status: dict[str, tuple[bytes, float]] = {}  # each status file's last content, and when it changed

        self.agent_running: dict[str, bool] = {}  # whether an agent runs, as the machine last reported
        self.liveness_asked_at: dict[str, float] = {}
        self.liveness_queries: dict[str, Future[bool]] = {}
        self.unreachable_since: dict[str, float] = {}  # machines whose last liveness query failed
        self.restarting: dict[str, Future[None]] = {}
        self.stop_request_sent = False

    def _make_connector(self, name: str) -> SSHConnector:
        host = self.hosts[name]
        return SSHConnector(host, f"machine {name} ({host.host})", self.reconnect_seconds)

    def replace_host(self, name: str, host: Host) -> None:
        """Use another host for a machine from now on, or the same host with other keys."""
        self.hosts[name] = host
        old_connector = self.connectors[name]
        self.connectors[name] = self._make_connector(name)
        threading.Thread(target=old_connector.close, daemon=True).start()  # closing may hang
        self.setup_progress.update(name, lambda row: replace(row, host=host.host, reason=""))
        write_ssh_config(Hosts(None, tuple(self.hosts.values())), self.folders.path / "ssh_config")

    # --- setting up -----------------------------------------------------------------------------------------------

    def set_up_machines(self) -> None:
        """Set up all machines for the run folder's launch and start their agents, unless that is done already.

        Raises `SetupFailed`, naming the machines and reasons, if fewer machines are usable than the job needs. Spares
        may fail.
        """
        launch_id = self.folders.launch_id
        if self.setup_progress.record.launch == launch_id and self.setup_progress.record.is_ready:
            return
        self.setup_progress.start_launch(launch_id, {name: host.host for name, host in self.hosts.items()})
        hosts = Hosts.from_json(self.spec.hosts or {})
        # In the background, because it runs `ssh -G` for each machine.
        ssh_config = self.pool.submit(write_ssh_config, hosts, self.folders.path / "ssh_config")
        self.code_archive = pack_code()
        self._for_each_usable(self._prepare_machine)
        if self.setup_progress.record.is_adopted:
            self.setup_progress.update_record(lambda record: replace(record, is_adopted=False))
            # The agents of an adopted job are running already, perhaps also on machines that do not answer.
            for name in self.setup_progress.failure_reasons:
                self.setup_progress.set_failure_reason(name, "")
            return self.setup_progress.mark_ready()
        self._require_enough_machines()
        ssh_config.result()
        self.provisioner.check_machines(self._usable_machines())
        self._require_enough_machines()
        has_gpus = any(self.setup_progress.rows[name].gpus for name in self._usable_machines())
        if self.spec.recovery.probe and (len(self._usable_machines()) > 1 or has_gpus):
            self.provisioner.measure_network(self._usable_machines())
            self._require_enough_machines()
        self.provisioner.write_job_files(self._usable_machines()[0], self.folders.shared)
        self._for_each_usable(lambda name: self.provisioner.start_agent(name, self.elapsed_seconds))
        self._require_enough_machines()
        self.setup_progress.mark_ready()

    def _prepare_machine(self, name: str) -> None:
        self.wait_until_ready(name)
        address = self.hosts[name].address or self.connectors[name].route.host
        self.setup_progress.update(name, lambda row: replace(row, address=address))
        self.provisioner.prepare(name, *self.code_archive)

    def _usable_machines(self) -> list[str]:
        """Return the names of the machines whose set-up has not failed."""
        return [name for name in self.hosts if name not in self.setup_progress.failure_reasons]

    def _for_each_usable(self, function: Callable[[str], None]) -> None:
        self.provisioner.run_on_each(self._usable_machines(), function)

    def _require_enough_machines(self) -> None:
        if len(self._usable_machines()) < self.spec.machines:
            reasons = self.setup_progress.failure_reasons.items()
            raise SetupFailed("; ".join(f"{self.connectors[name].name}: {reason}" for name, reason in reasons))

    # --- mirroring files ------------------------------------------------------------------------------------------

    def pull_files(self) -> None:
        """Copy what is new in the shared folder to the run folder.

        Raises `Unreachable` when no machine answers, `OSError` when the local disk is full.
        """
        sizes = self.local_sizes or self._read_local_sizes()
        new_bytes, result = self._query_any(lambda name: self._fetch_new_bytes(name, sizes))
        # A full disk may take a part of a write. Forget the sizes until all is written.
        self.local_sizes = {}
        shared, now = self.folders.shared, time.monotonic()
        with locked(self.folders.path / ".home.lock"):
            for path, data in new_bytes.items():
                folder = PurePosixPath(path).parts[0]
                if folder in LOG_FOLDERS:
                    sizes[path] = _append_bytes(self.folders.path / path, data)
                elif folder == "attempts":
                    write_atomic(_make_parent(shared / path), data, durable=False)
                    sizes[path] = len(data)
                elif is_valid_json(data) and data != self.last_status.get(path, (b"", 0.0))[0]:
                    # In place, as the agent writes it: a rename takes ten times as long.
                    overwrite_in_place(_make_parent(shared / path), data)
                    self.last_status[path] = data, now
            if result and is_valid_json(result):
                write_atomic(shared / RESULT_FILE, result, durable=False)
        self.local_sizes = sizes

    def _read_local_sizes(self) -> dict[str, int]:
        """Return the sizes of local files that only grow, or are made once: the offsets from which to copy more."""
        run_folder = self.folders.path
        files = [path for folder in LOG_FOLDERS for path in (run_folder / folder).rglob("*") if path.is_file()]
        sizes = {str(path.relative_to(run_folder)): path.stat().st_size for path in files}
        attempt_files = (self.folders.shared / "attempts").glob("*.json")
        return sizes | {f"attempts/{path.name}": path.stat().st_size for path in attempt_files}

    def _fetch_new_bytes(self, name: str, known_sizes: Mapping[str, int]) -> tuple[dict[str, bytes], bytes]:
        """Return the new bytes of each file, and the trainers' result when a status says that the job is done."""
        connector, job_folder = self.connectors[name], self.provisioner.job_folder(name)
        new_bytes = connector.read_new_bytes(job_folder, (*LOG_FOLDERS, *MIRRORED), known_sizes)
        is_done = any(
            (status := parse_status(data)) and status.state == MachineState.DONE
            for path, data in new_bytes.items()
            if path.startswith("status/")
        )
        return new_bytes, connector.read_from(f"{job_folder}/{RESULT_FILE}", 0) if is_done else b""

    def _query_any(self, query: Callable[[str], Answer]) -> Answer:
        """Return the answer of the first machine that answers a query within `QUERY_TIMEOUT_SECONDS`.

        Asks one machine after the other: first the one that answered last, at the end those that recently failed.
        Raises the last `ClusterError` if none answers.
        """
        last_error: ClusterError | None = None
        now = time.monotonic()

        def rank(name: str) -> tuple[bool, bool, int]:
            failed_recently = now - self.last_query_failure.get(name, -1e9) < UNREACHABLE_RETRY_SECONDS
            return name != self.last_responder, failed_recently, int(name)

        for name in sorted(self.hosts, key=rank):
            try:
                answer = self.pool.submit(query, name).result(QUERY_TIMEOUT_SECONDS)
                self.last_responder = name
                return answer
            except FutureTimeout:
                last_error = Unreachable(f"{self.connectors[name].name}: does not answer")
            except ClusterError as error:
                last_error = error
            self.last_responder = ""
            self.last_query_failure[name] = time.monotonic()
        raise last_error or Unreachable("this job has no machines")

    def push_stop_request(self) -> None:
        """Copy a stop request from the run folder to the machines' shared folder, once."""
        stop_path = self.folders.shared / "stop"
        if stop_path.exists() and not self.stop_request_sent:
            content = stop_path.read_bytes()
            self._query_any(
                lambda name: self.connectors[name].write(f"{self.provisioner.job_folder(name)}/stop", content)
            )
            self.stop_request_sent = True

    # --- liveness -------------------------------------------------------------------------------------------------

    def agents_alive(self) -> bool:
        """Whether any agent runs or may run: False only when every machine has reported that none runs.

        Once the job is over, machines that cannot be reached are not waited for.
        """
        self._update_liveness()
        running = [name for name in self._usable_machines() if self.agent_running.get(name, True)]
        if self.is_over():  # the other machines have reported everything; these will learn it by themselves
            running = [name for name in running if name not in self.unreachable_since]
        return bool(self.restarting and not self.is_over()) or bool(running)

    def is_over(self) -> bool:
        """Whether the job's outcome is decided.

        That is so with a result, with an end that the agents agreed on, and `STOP_GRACE_SECONDS` after a stop that was
        requested, or that a machine began when its time limit had passed.
        """
        shared, stop_path = self.folders.shared, self.folders.shared / "stop"
        was_stopped = stop_path.exists() and time.time() - stop_path.stat().st_mtime > STOP_GRACE_SECONDS
        return attempts.is_finished(shared, self.folders.launch_id) or was_stopped or self._has_stopped_by_itself()

    def _has_stopped_by_itself(self) -> bool:
        """Whether an agent of this launch ended as STOPPED more than `STOP_GRACE_SECONDS` ago."""
        long_ago, launch_id = time.monotonic() - STOP_GRACE_SECONDS, self.folders.launch_id
        old_statuses = [parse_status(text) for text, changed_at in self.last_status.values() if changed_at < long_ago]
        return any(
            status.ended and status.state == MachineState.STOPPED and status.launch == launch_id
            for status in old_statuses
            if status
        )

    def dead_machines(self) -> list[str]:
        """Return the machines that have reported that no agent runs there, without those that are being restarted."""
        self._update_liveness()
        return [
            name
            for name in self._usable_machines()
            if not self.agent_running.get(name, True) and name not in self.restarting
        ]

    def _update_liveness(self) -> None:
        """Ask the machines whose status does not change whether their agent runs. Does not wait for the answers."""
        now = time.monotonic()
        for name in [name for name, restart in self.restarting.items() if restart.done()]:
            restart = self.restarting.pop(name)
            if restart.exception():
                logger.warning("%s", restart.exception())
            self.agent_running.pop(name, None)
        for name in [name for name, query in self.liveness_queries.items() if query.done()]:
            query = self.liveness_queries.pop(name)
            if query.exception():
                self.unreachable_since.setdefault(name, now)
            else:
                self.agent_running[name] = query.result()
                self.unreachable_since.pop(name, None)
        for name in self.hosts:
            text, changed_at = self.last_status.get(f"status/{name}.json", (b"", 0.0))
            is_due = now - self.liveness_asked_at.get(name, 0.0) > LIVENESS_QUERY_SECONDS
            status = parse_status(text)
            if now - changed_at < STATUS_STALE_SECONDS and not (status and status.ended):
                self.agent_running[name] = True
                self.unreachable_since.pop(name, None)
            elif name not in self.liveness_queries and is_due:
                self.liveness_asked_at[name] = now
                self.liveness_queries[name] = self.pool.submit(self._has_agent, name)

    def _has_agent(self, name: str) -> bool:
        """Ask a machine whether an agent holds the lock of its work folder. Raises `ClusterError`, `Unreachable`."""
        lock = f"{self.setup_progress.rows[name].work}/{AGENT_LOCK}"
        argv = ["sh", "-c", 'test -e "$1" && ! flock -n -s "$1" true', "sh", lock]
        return self.connectors[name].run(argv, check=False, timeout=10).code == 0

    def restart_agent(self, name: str) -> None:
        """Set a machine up again and start its agent, in the background. Does nothing if that is under way."""
        if name not in self.restarting:
            self.restarting[name] = self.pool.submit(self._restart, name)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of the job's time limit that have passed."""
        return max(0.0, time.time() - (self.limit_start or self.folders.launch_path.stat().st_mtime))

    def _restart(self, name: str) -> None:
        self.code_archive = pack_code()
        self._prepare_machine(name)
        self.provisioner.start_agent(name, self.elapsed_seconds)

    def kill_machine(self, name: str, notice_seconds: float | None) -> None:
        """Kill a machine's agent, whose trainers end with it, or leave it a spot notice. Raises `ClusterError`."""
        row, connector = self.setup_progress.rows[name], self.connectors[name]
        if not self._has_agent(name):
            raise ClusterError(f"{connector.name} has no agent at work; see: imgnet-cluster status {self.spec.name}")
        if notice_seconds is not None:
            notice = json.dumps({"reason": "a rehearsal took it away", "seconds": notice_seconds})
            connector.write(f"{row.work}/notice", notice.encode())
            return
        connector.run(["sh", "-c", SIGNAL_AGENT_SCRIPT, "sh", f"{row.work}/{AGENT_LOCK}", "KILL"])

    # --- the end --------------------------------------------------------------------------------------------------

    def terminate(self) -> list[str]:
        """Ask the agents to save and end, and end the job's tmux session, on every machine that answers.

        Returns the names of those that do not answer.
        """

        def end_job(name: str) -> None:
            row = self.setup_progress.rows.get(name)
            if row:
                lock = f"{row.work}/{AGENT_LOCK}"
                self.connectors[name].run(
                    ["sh", "-c", SIGNAL_AGENT_SCRIPT, "sh", lock, "TERM"], check=False, timeout=10
                )
            argv = ["tmux", "-L", tmux.SOCKET_NAME, "kill-session", "-t", f"={self.spec.tmux_session}"]
            self.connectors[name].run(argv, check=False, timeout=10)

        futures = {name: self.pool.submit(end_job, name) for name in self.hosts}
        silent_machines = []
        for name, future in futures.items():
            try:
                future.result(20)
            except (ClusterError, FutureTimeout):
                silent_machines.append(name)
        return silent_machines

    def close(self) -> None:
        """Close the connections. Waits at most a second for each that hangs."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        threads = [threading.Thread(target=connector.close, daemon=True) for connector in self.connectors.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(1.0)


def _append_bytes(path: Path, data: bytes) -> int:
    """Append to a file and return its new size."""
    with _make_parent(path).open("ab") as file:
        file.write(data)
        return file.tell()


def _make_parent(path: Path) -> Path:
    """Create the path's folder and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
