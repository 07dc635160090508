"""A job's machines over ssh, as its supervisor sees them: sets them up, brings files home, asks who is alive.

The run folder at home holds a picture of the shared folder's small files, so that all that only looks needs no network.
Two files go the other way: `launch` and `stop`. A machine that cannot be reached is never taken for gone.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from pathlib import Path, PurePosixPath
from typing import TypeVar

from cluster.connectors import tmux
from cluster.connectors.hosts_file import Host, Hosts
from cluster.connectors.log_sync import SYNCED_FOLDERS
from cluster.connectors.ssh import SSHConnector, Unreachable
from cluster.connectors.ssh_config import write_ssh_config
from cluster.errors import ClusterError, SetupFailed
from cluster.state import attempts
from cluster.state.locks import AGENT_LOCK
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from train.tools.filesystem import is_valid_json, locked, overwrite_in_place, write_atomic

from . import code_archive
from .provision import Provisioner
from .setup_progress import SetupProgress

MIRRORED = ("status", "attempts")  # rewritten in place, or made once
QUERY_TIMEOUT_SECONDS = 2.0  # for one machine to answer, before another is asked
UNREACHABLE_RETRY_SECONDS = 10.0  # until one that did not answer is asked again
LIVENESS_QUERY_SECONDS = 2.0  # between two questions to a silent machine
FLEET_RECONNECT_SECONDS = 15.0  # with a machine that cannot be reached
STATUS_STALE_SECONDS = 3.0  # without a new word in its status
STOP_GRACE_SECONDS = 30.0  # from a stop until machines that do not answer are left to hear it by themselves
RESULT_FILE = "result.json"
Answer = TypeVar("Answer")


class Fleet:
    """The machines of one job. Made in the supervisor, and by a command that acts on a machine.

    `greet` is called with a machine's name before it is set up: one that was just rented has to boot first. The job's
    time limit counts from `since` (seconds since 1970), None: from its launch.
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
        self.spec, self.folders, self.reconnect_seconds, self.limit_start = (
            spec,
            folders,
            reconnect_seconds,
            limit_start,
        )
        self.wait_until_ready = wait_until_ready or (lambda name: None)
        self.hosts = dict(zip(spec.machine_names, Hosts.from_json(spec.hosts).machines, strict=False))
        self.connectors = {name: self._make_connector(name) for name in self.hosts}
        self.setup_progress = SetupProgress(folders.path / "machines.json")
        self.provisioner = Provisioner(spec, self.hosts, self.connectors, self.setup_progress, folders.shared / "stop")
        self.pool = ThreadPoolExecutor(max_workers=2 * len(self.hosts) + 4)
        self.last_query_failure: dict[str, float] = {}  # who did not answer, and when
        self.last_responder = ""  # who answered last
        self.local_sizes: dict[str, int] = {}  # sizes of the files at home, once they are known
        self.last_status: dict[str, tuple[bytes, float]] = {}  # each status as it was last seen to change, and when
        self.agent_running: dict[str, bool] = {}  # whether an agent is at work, as the machine itself said last
        self.liveness_asked_at: dict[str, float] = {}
        self.liveness_queries: dict[str, Future[bool]] = {}
        self.unreachable_since: dict[str, float] = {}  # who could not be asked
        self.restarting: dict[str, Future[None]] = {}
        self.stop_request_sent = False

    def _make_connector(self, name: str) -> SSHConnector:
        host = self.hosts[name]
        return SSHConnector(host, f"machine {name} ({host.host})", self.reconnect_seconds)

    def replace_host(self, name: str, host: Host) -> None:
        """From now on another machine has this name, or the same another key."""
        self.hosts[name] = host
        before, self.connectors[name] = self.connectors[name], self._make_connector(name)
        threading.Thread(target=before.close, daemon=True).start()  # it may hang
        self.setup_progress.update(name, host=host.host, reason="")
        write_ssh_config(Hosts(None, tuple(self.hosts.values())), self.folders.path / "ssh_config")

    # --- setting up --------------------------------------------------------------------------------------------------

    def set_up_machines(self) -> None:
        """Set all machines up for the launch that the run folder asks for, unless that is done. Raises `SetupFailed`.

        Spares may fail; machines that are wanted may not, and are named.
        """
        mark = self.folders.launch_id
        if self.setup_progress.data["launch"] == mark and self.setup_progress.data.get("ready"):
            return
        self.setup_progress.start_launch(mark, {name: host.host for name, host in self.hosts.items()})
        hosts = Hosts.from_json(self.spec.hosts or {})
        config = self.pool.submit(
            write_ssh_config, hosts, self.folders.path / "ssh_config"
        )  # asks ssh for each machine
        self.code_archive = code_archive.pack_code()
        self._for_each_usable(self._prepare_machine)
        if self.setup_progress.data.pop("adopted", False):  # its agents are at work; who does not answer may be, too
            for name in self.setup_progress.failure_reasons:
                self.setup_progress.update(name, reason="")
            return self.setup_progress.mark_ready()
        self._require_enough_machines()
        config.result()
        self.provisioner.check_machines(self._usable_machines())
        self._require_enough_machines()
        gpus = any(self.setup_progress.rows[name].get("gpus") for name in self._usable_machines())
        if self.spec.probe and (len(self._usable_machines()) > 1 or gpus):
            self.provisioner.measure_network(self._usable_machines())
            self._require_enough_machines()
        self.provisioner.write_job_files(self._usable_machines()[0], self.folders.shared)
        self._for_each_usable(lambda name: self.provisioner.start_agent(name, self.elapsed_seconds))
        self._require_enough_machines()
        self.setup_progress.mark_ready()

    def _prepare_machine(self, name: str) -> None:
        self.wait_until_ready(name)
        self.setup_progress.update(name, address=self.hosts[name].address or self.connectors[name].route.host)
        self.provisioner.prepare(name, *self.code_archive)

    def _usable_machines(self) -> list[str]:
        return [name for name in self.hosts if name not in self.setup_progress.failure_reasons]

    def _for_each_usable(self, function: Callable[[str], None]) -> None:
        self.provisioner.run_on_each(self._usable_machines(), function)

    def _require_enough_machines(self) -> None:
        if len(self._usable_machines()) < self.spec.machines:
            raise SetupFailed(
                "; ".join(
                    f"{self.connectors[one].name}: {why}" for one, why in self.setup_progress.failure_reasons.items()
                )
            )

    # --- home --------------------------------------------------------------------------------------------------------

    def pull_files(self) -> None:
        """Bring home what is new. Raises `Unreachable` when no machine answers, `OSError`: the disk here is full."""
        have = self.local_sizes or self._read_local_sizes()
        found, result = self._query_any(lambda name: self._fetch_new_bytes(name, have))
        self.local_sizes = {}  # until all has been written: a full disk takes a part
        home, now = self.folders.shared, time.monotonic()
        with locked(self.folders.path / ".home.lock"):
            for path, data in found.items():
                kind = PurePosixPath(path).parts[0]
                if kind in SYNCED_FOLDERS:
                    have[path] = _append_bytes(self.folders.path / path, data)
                elif kind == "attempts":
                    write_atomic(_make_parent(home / path), data, durable=False)
                    have[path] = len(data)
                elif is_valid_json(data) and data != self.last_status.get(path, (b"", 0.0))[0]:
                    overwrite_in_place(
                        _make_parent(home / path), data
                    )  # as its machine does; a rename takes ten times as long
                    self.last_status[path] = data, now
            if result and is_valid_json(result):
                write_atomic(home / RESULT_FILE, result, durable=False)
        self.local_sizes = have

    def _read_local_sizes(self) -> dict[str, int]:
        """Return the sizes of the files at home that only grow, or are made once: from there on they are brought."""
        run, home = self.folders.path, self.folders.shared
        files = [path for folder in SYNCED_FOLDERS for path in (run / folder).rglob("*") if path.is_file()]
        have = {str(path.relative_to(run)): path.stat().st_size for path in files}
        return have | {f"attempts/{path.name}": path.stat().st_size for path in (home / "attempts").glob("*.json")}

    def _fetch_new_bytes(self, name: str, known_sizes: Mapping[str, int]) -> tuple[dict[str, bytes], bytes]:
        remote, shared = self.connectors[name], self.provisioner.job_folder(name)
        found = remote.read_new_bytes(shared, (*SYNCED_FOLDERS, *MIRRORED), known_sizes)
        done = any(b'"done"' in data for path, data in found.items() if path.startswith("status/"))
        return found, remote.read_from(f"{shared}/{RESULT_FILE}", 0) if done else b""

    def _query_any(self, question: Callable[[str], Answer]) -> Answer:
        """Ask one machine after the other by name, the last that answered first, and wait for none of them for long."""
        last: ClusterError | None = None
        now = time.monotonic()

        def place(name: str) -> tuple[bool, bool, int]:
            return (
                name != self.last_responder,
                now - self.last_query_failure.get(name, -1e9) < UNREACHABLE_RETRY_SECONDS,
                int(name),
            )

        for name in sorted(self.hosts, key=place):
            try:
                answer = self.pool.submit(question, name).result(QUERY_TIMEOUT_SECONDS)
                self.last_responder = name
                return answer
            except Late:
                last = Unreachable(f"{self.connectors[name].name}: does not answer")
            except ClusterError as error:
                last = error
            self.last_responder, self.last_query_failure[name] = "", time.monotonic()
        raise last or Unreachable("no machines")

    def push_stop_request(self) -> None:
        """Bring a request to stop from the run folder to the machines."""
        stop = self.folders.shared / "stop"
        if stop.exists() and not self.stop_request_sent:
            content = stop.read_bytes()
            self._query_any(
                lambda name: self.connectors[name].write(f"{self.provisioner.job_folder(name)}/stop", content)
            )
            self.stop_request_sent = True

    # --- who is alive ------------------------------------------------------------------------------------------------

    def agents_alive(self) -> bool:
        """Whether any agent is or may be at work: False only when every machine has said that it has none.

        Once the job is decided, machines that cannot be reached are not waited for.
        """
        self._update_liveness()
        working = [name for name in self._monitored_machines() if self.agent_running.get(name, True)]
        if self.is_over():  # the others have said all there is; who is away will find that out
            working = [name for name in working if name not in self.unreachable_since]
        return bool(self.restarting and not self.is_over()) or bool(working)

    def is_over(self) -> bool:
        """Whether the job is decided: a result, an end that its agents agreed on, or a stop of a while ago: that was
        asked for, or that a machine has reached by its limit.
        """
        home, stop = self.folders.shared, self.folders.shared / "stop"
        stopped = stop.exists() and time.time() - stop.stat().st_mtime > STOP_GRACE_SECONDS
        return attempts.is_finished(home, self.folders.launch_id) or stopped or self._has_stopped_by_itself()

    def _has_stopped_by_itself(self) -> bool:
        long_ago, mark = time.monotonic() - STOP_GRACE_SECONDS, self.folders.launch_id
        words = [
            json.loads(text) for text, seen in self.last_status.values() if seen < long_ago and b'"stopped"' in text
        ]
        return any(one.get("ended") and (one["state"], one.get("launch")) == ("stopped", mark) for one in words)

    def dead_machines(self) -> list[str]:
        """Return the machines that have said that no agent is at work there."""
        self._update_liveness()
        return [
            name
            for name in self._monitored_machines()
            if not self.agent_running.get(name, True) and name not in self.restarting
        ]

    def _monitored_machines(self) -> list[str]:
        return [name for name in self.hosts if name not in self.setup_progress.failure_reasons]

    def _update_liveness(self) -> None:
        """Ask those machines whose status stands still; answers come when they come."""
        now = time.monotonic()
        for name in [one for one, future in self.restarting.items() if future.done()]:
            future = self.restarting.pop(name)
            if future.exception():
                print(f"{time.strftime('%H:%M:%S')} {future.exception()}", flush=True)
            self.agent_running.pop(name, None)
        for name in [one for one, asking in self.liveness_queries.items() if asking.done()]:
            asking = self.liveness_queries.pop(name)
            if asking.exception():
                self.unreachable_since.setdefault(name, now)
            else:
                self.agent_running[name] = asking.result()
                self.unreachable_since.pop(name, None)
        for name in self.hosts:
            text, seen = self.last_status.get(f"status/{name}.json", (b"", 0.0))
            if now - seen < STATUS_STALE_SECONDS and b'"ended": true' not in text:
                self.agent_running[name] = True
                self.unreachable_since.pop(name, None)
            elif (
                name not in self.liveness_queries
                and now - self.liveness_asked_at.get(name, 0.0) > LIVENESS_QUERY_SECONDS
            ):
                self.liveness_asked_at[name] = now
                self.liveness_queries[name] = self.pool.submit(self._has_agent, name)

    def _has_agent(self, name: str) -> bool:
        """Ask a machine whether an agent holds the lock of its work folder. Raises `ClusterError`, `Unreachable`."""
        lock = f"{self.setup_progress.rows[name]['work']}/{AGENT_LOCK}"
        words = ["sh", "-c", 'test -e "$1" && ! flock -n -s "$1" true', "sh", lock]
        return self.connectors[name].run(words, check=False, timeout=10).code == 0

    def restart_agent(self, name: str) -> None:
        """Set a machine up again, in the background, and start its agent."""
        if name not in self.restarting:
            self.restarting[name] = self.pool.submit(self._restart, name)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of the job's time limit that are over."""
        return max(0.0, time.time() - (self.limit_start or self.folders.launch_path.stat().st_mtime))

    def _restart(self, name: str) -> None:
        self.code_archive = code_archive.pack_code()
        self._prepare_machine(name)
        self.provisioner.start_agent(name, self.elapsed_seconds)

    def kill_machine(self, name: str, notice_seconds: float | None) -> None:
        """Kill a machine's agent with all that it started, or leave it a notice. Raises `ClusterError`."""
        row, remote = self.setup_progress.rows[name], self.connectors[name]
        if not self._has_agent(name):
            raise ClusterError(f"{remote.name} has no agent at work; imgnet-cluster status {self.spec.name}")
        if notice_seconds is not None:
            content = json.dumps({"reason": "a rehearsal took it away", "seconds": notice_seconds})
            remote.write(f"{row['work']}/notice", content.encode())
            return
        said = json.loads((self.folders.shared / "status" / f"{name}.json").read_text())
        remote.run(["sh", "-c", 'grep -qs cluster.agent "/proc/$1/cmdline" && kill -9 "$1"', "sh", str(said["pid"])])

    # --- the end -----------------------------------------------------------------------------------------------------

    def terminate(self) -> list[str]:
        """End the job's session on every machine that answers. Returns the names of those that do not."""

        def end(name: str) -> None:
            words = ["tmux", "-L", tmux.SOCKET_NAME, "kill-session", "-t", f"={self.spec.tmux_session}"]
            self.connectors[name].run(words, check=False, timeout=10)

        futures = {name: self.pool.submit(end, name) for name in self.hosts}
        silent = []
        for name, future in futures.items():
            try:
                future.result(20)
            except (ClusterError, Late):
                silent.append(name)
        return silent

    def close(self) -> None:
        """End the connections; what hangs is left behind."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        threads = [threading.Thread(target=remote.close, daemon=True) for remote in self.connectors.values()]
        for one in threads:
            one.start()
        for one in threads:
            one.join(1.0)


def _append_bytes(path: Path, data: bytes) -> int:
    """Returns how long the file is then."""
    with _make_parent(path).open("ab") as file:
        file.write(data)
        return file.tell()


def _make_parent(path: Path) -> Path:
    """The path, whose folder is there now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
