"""A job's machines over ssh, as its supervisor sees them: sets them up, copies files, and tracks which agents run.

Small files of the shared folder are mirrored to the local run folder, so commands that only read need no network. Two
files are copied from here to the shared folder: `launch` and `stop`. A machine out of reach does not count as lost.
"""

import contextlib
import json
import logging
import math
import shlex
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from functools import partial

from cluster.connectors import tmux, untrusted
from cluster.connectors.hosts_file import Host
from cluster.connectors.ssh import SSHConnector
from cluster.connectors.ssh_config import write_ssh_config
from cluster.connectors.ssh_scripts import quote_path
from cluster.errors import ClusterError, SetupFailed
from cluster.state.heartbeats import parse_status
from cluster.state.run_folder import AGENT_LOCK, AGENT_OUTPUT, JOB_LOCK, REHEARSED_NOTICE, Run, RunFolder
from cluster.state.spec import JobSpec
from cluster.state.states import MachineState
from cluster.state.status import machine_statuses
from train.tools import host
from train.tools.files import locked
from train.tools.text_files import to_json_bytes

from .code_archive import PackedCode, pack_code
from .mirror import Mirror
from .provision import CheckedMachine, Provisioner
from .setup_progress import SetupProgress, fold_by_machine

logger = logging.getLogger(__name__)

LIVENESS_QUERY_SECONDS = 2.0  # between two questions to a machine whose status does not change
REACH_QUERY_SECONDS = 15.0  # and to another, which may train on out of reach of this computer; at least
REACH_QUERIES_PER_SECOND = 4.0  # to all such machines together: each costs milliseconds here
FLEET_RECONNECT_SECONDS = 15.0  # how long to try to reach a machine
STATUS_STALE_SECONDS = 3.0  # without a change of its status, a machine is asked whether its agent runs
# From a stop request until the job counts as over although some machines do not answer.
STOP_GRACE_SECONDS = 30.0
STOP_MACHINES = 3  # to which a stop request is sent at once
STOP_PUSH_SECONDS = 2.0  # for one of them to take it, before more are asked
JOB_LOCK_SECONDS = 30.0  # for a command that changes the job, before a machine joins it
STOPPED_PATIENCE_SECONDS = 10.0  # for the last files of a job that was to stop; its user waits
# Whether a process holds the lock file $1.
HAS_AGENT_SCRIPT = '[ -e "$1" ] && ! flock -n -s "$1" true'
# Sends the signal $2 to the process that holds the lock file $1, if any.
SIGNAL_AGENT_SCRIPT = f'{HAS_AGENT_SCRIPT} && kill -"$2" "$(cat "$1")"'
# Asks the agent with the work folder $work to save and end, also one that is only starting, and ends the tmux session
# $session.
END_JOB_SCRIPT = f"""
if [ -n "$work" ]; then
  set -- "$work/{AGENT_LOCK}" TERM
  {SIGNAL_AGENT_SCRIPT} || for f in $(grep -lsF cluster.agent /proc/[0-9]*/cmdline); do
    grep -qsF -e "$work" "$f" && {{ pid=${{f#/proc/}}; kill "${{pid%/*}}"; }}
  done
fi
tmux -L {tmux.SOCKET_NAME} kill-session -t "=$session"
:
"""


class Fleet:
    """The machines of one job. Used by the supervisor, and by commands that act on one machine.

    `wait_until_ready` is called with a machine's name before it is set up: a rented one has to boot. `while_waiting` is
    called repeatedly meanwhile. The job's time limit counts from `limit_start` (Unix time; None: from the launch).
    """

    def __init__(
        self,
        spec: JobSpec,
        folders: RunFolder,
        *,
        reconnect_seconds: float = FLEET_RECONNECT_SECONDS,
        wait_until_ready: Callable[[str], None] = lambda name: None,
        while_waiting: Callable[[], None] = lambda: None,
        limit_start: float | None = None,
    ) -> None:
        assert spec.hosts
        self.spec = spec
        self.folders = folders
        self.reconnect_seconds = reconnect_seconds
        self.limit_start = limit_start
        self.wait_until_ready = wait_until_ready
        self.hosts = dict(zip(spec.machine_names, spec.hosts.machines, strict=False))
        self.connectors = {name: self._make_connector(name) for name in self.hosts}
        self.setup_progress = SetupProgress(folders.setup_record_path)
        self.provisioner = Provisioner(
            spec, self.hosts, self.connectors, self.setup_progress, folders.stop_path, while_waiting
        )
        self.pool = ThreadPoolExecutor(max_workers=2 * len(self.hosts) + 4)
        self.pack_code = partial(pack_code, project=folders.user_project)

        job_folder, usable = self.provisioner.job_folder, self._usable_machines
        self.mirror = Mirror(folders, self.connectors, job_folder, usable, self.pool, self._report_bad_answer)
        self.bad_answers: dict[str, str] = {}  # by machine: how its answer broke a rule
        self.former_received_bytes = 0  # over connections that others have replaced
        self.last_pull_start: float | None = None  # when no agent was at work any more

        self.agent_running: dict[str, bool] = {}  # whether an agent runs, as the machine last reported
        self.liveness_asked_at: dict[str, float] = {}
        self.liveness_queries: dict[str, Future[bool]] = {}
        self.unreachable_since: dict[str, float] = {}  # machines whose last liveness query failed
        self.fresh: set[str] = set()  # machines whose status has just changed
        self.restarting: dict[str, Future[None]] = {}
        self.joining = {*spec.joining}  # machines that are to join the job, when the user asks for it
        self.stop_request_sent = False
        self.stop_seen_at = math.inf  # when the stop request was first seen here, in monotonic seconds
        self.stop_pushes: dict[str, Future[None]] = {}

    def _make_connector(self, name: str) -> SSHConnector:
        host = self.hosts[name]
        label = f"machine {name} ({host.host})"
        return SSHConnector(host, label, self.reconnect_seconds, self.spec.uid, self.folders.launch_id)

    def replace_host(self, name: str, host: Host) -> None:
        """Use another host for a machine from now on, or the same host with other keys, which do not end a connection.

        `write_ssh_config` has to follow.
        """
        old_host, self.hosts[name] = self.hosts[name], host
        self.setup_progress.update(name, host=host.host, reason="")
        if replace(old_host, host_key=host.host_key, jump_host_key=host.jump_host_key) == host:
            return self.connectors[name].change_keys(host)
        old_connector = self.connectors[name]
        self.former_received_bytes += old_connector.received_bytes
        self.connectors[name] = self._make_connector(name)
        threading.Thread(target=old_connector.close, daemon=True).start()  # closing may hang

    @property
    def received_bytes(self) -> int:
        """What has come from the machines over ssh."""
        return self.former_received_bytes + sum(connector.received_bytes for connector in self.connectors.values())

    def write_ssh_config(self) -> None:
        """Write the OpenSSH configuration with which commands reach the machines now. Raises `ClusterError`."""
        routes = [connector.route for connector in self.connectors.values()]
        write_ssh_config(routes, self.folders.path / "ssh_config")

    # --- setting up -----------------------------------------------------------------------------------------------

    def set_up_machines(self) -> None:
        """Set up all machines for the run folder's launch and start their agents, unless that is done already.

        Raises `SetupFailed` with a line for each reason if fewer machines are usable than the job needs. Spares may
        fail.
        """
        launch_id = self.folders.launch_id
        if self.setup_progress.record.launch == launch_id and self.setup_progress.record.is_ready:
            return
        for connector in self.connectors.values():
            connector.launch = launch_id
        self.setup_progress.start_launch(launch_id, {name: host.host for name, host in self.hosts.items()})
        # In the background, because it runs `ssh -G` for each machine.
        ssh_config = self.pool.submit(self.write_ssh_config)
        code = self.pool.submit(self.pack_code)  # the machines log in meanwhile
        with_checks = not self.setup_progress.record.is_adopted
        checked_machines = self.provisioner.run_on_each(
            self._usable_machines(), lambda name: self._prepare_machine(name, code.result, with_checks)
        )
        if self.setup_progress.record.is_adopted:
            # The agents of an adopted job are running already, perhaps also on machines that do not answer.
            for name in self.setup_progress.failure_reasons:
                self.setup_progress.update(name, reason="")
            self.setup_progress.update_record(is_adopted=False)
            return self.setup_progress.mark_ready()
        self._require_enough_machines()
        ssh_config.result()
        self.provisioner.check_machines({name: machine for name, machine in checked_machines.items() if machine})
        self._require_enough_machines()
        self.provisioner.check_shared_folder(self._usable_machines())
        self._require_enough_machines()
        while usable := self._usable_machines():  # through the first one that can do it
            if self.provisioner.run_on_each(
                usable[:1], lambda name: self.provisioner.write_job_files(name, self.folders.shared)
            ):
                break
            self._require_enough_machines()
        self.provisioner.run_on_each(
            self._usable_machines(), lambda name: self.provisioner.start_agent(name, self.elapsed_seconds)
        )
        self._require_enough_machines()
        self.setup_progress.mark_ready()

    def _prepare_machine(self, name: str, code: Callable[[], PackedCode], with_checks: bool) -> CheckedMachine | None:
        self.wait_until_ready(name)
        return self.provisioner.prepare(name, code, with_checks)

    def _usable_machines(self) -> list[str]:
        """Return the names of the machines whose set-up has not failed, without those that are to join the job."""
        return [name for name in self.hosts if name not in {*self.setup_progress.failure_reasons, *self.joining}]

    @property
    def broken_machines(self) -> dict[str, str]:
        """The machines whose GPUs do not answer, with the reason of each."""
        return {name: row.reason for name, row in self.setup_progress.rows.items() if row.is_broken and row.reason}

    @property
    def shortage_reason(self) -> str:
        """Why the job cannot start even if all machines that are being set up become usable; "" if it may start."""
        usable = len(self._usable_machines())
        if self.setup_progress.record.is_ready or usable >= self.spec.machines:
            return ""
        return f"only {usable} of the {self.spec.machines} machines that the job needs can be used"

    def _require_enough_machines(self) -> None:
        if len(self._usable_machines()) < self.spec.machines:
            hosts = {name: host.host for name, host in self.hosts.items()}
            raise SetupFailed("\n".join(fold_by_machine(self.setup_progress.failure_reasons.items(), hosts)))

    # --- files ----------------------------------------------------------------------------------------------------

    def pull_files(self) -> None:
        """Copy what is new in the shared folder to the run folder. Raises as `Mirror.pull` does."""
        self.mirror.pull()

    def pull_last_files(self, patience_seconds: float = math.inf) -> bool:
        """Copy what the last agent wrote before it ended, as much as comes within a few seconds.

        Returns whether all is here, or given up after a stop request or `patience_seconds`. Raises as `Mirror.pull`.
        """
        now = time.monotonic()
        if self.mirror.pull():
            self._pull_last_words()
            return True
        if self.last_pull_start is None:
            self.last_pull_start = now
            logger.info("no agent is running any more; the last files are being copied")
        if self.folders.stop_path.exists():
            patience_seconds = min(patience_seconds, STOPPED_PATIENCE_SECONDS)
        if now < self.last_pull_start + patience_seconds:
            return False
        name = self.mirror.last_responder
        folder = self.provisioner.job_folder(name) if name else self.spec.uid
        logger.warning("the logs here are not complete; the rest stays on the machines, in %s", folder)
        return True

    def _pull_last_words(self) -> None:
        """If no agent has written a status, copy the last line that each one printed: it says why the agent ended."""
        if machine_statuses(Run(self.spec, self.folders)):
            return
        for name in self._usable_machines():
            with contextlib.suppress(ClusterError):
                output = quote_path(f"{self.setup_progress.rows[name].work}/{AGENT_OUTPUT}")
                line = untrusted.one_line(self.connectors[name].run_repeatable('tail -n 1 "$f"', f=output))
                copy = self.folders.work_folder(name) / AGENT_OUTPUT
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(line)

    def explain_end(self) -> str:
        """Return why nothing is known about the job when all answers of its machines broke a rule, else ""."""
        return "" if self.mirror.last_status else "; ".join(self.bad_answers.values())

    def _report_bad_answer(self, name: str, line: str) -> None:
        """Log once that a machine's answer broke a rule, and note it for `status`."""
        if name not in self.bad_answers:
            self.bad_answers[name] = line
            logger.warning("%s", line)
            note = line.removeprefix(f"{self.connectors[name].name}: ")
            with contextlib.suppress(KeyError):  # not set up yet
                self.setup_progress.add_note(name, note)

    def push_stop_request(self) -> None:
        """Copy a stop request from the run folder to the machines' shared folder, once.

        On connections of its own, to more machines each call until one has it. Raises `ClusterError` if all refuse.
        """
        stop_path = self.folders.stop_path
        if self.stop_request_sent or not stop_path.exists():
            return
        content = stop_path.read_bytes()
        more_names = [name for name in self.mirror.machine_order() if name not in self.stop_pushes]
        for name in more_names[:STOP_MACHINES]:
            self.stop_pushes[name] = self.pool.submit(self._write_stop_request, name, content)
        with contextlib.suppress(FutureTimeout):
            for future in as_completed(self.stop_pushes.values(), STOP_PUSH_SECONDS):
                if not future.exception():
                    self.stop_request_sent = True
                    return
        failed = [name for name, future in self.stop_pushes.items() if future.done()]
        errors = [self.stop_pushes.pop(name).exception() for name in failed]
        if errors and not self.stop_pushes:
            raise errors[-1] or AssertionError("a push that succeeded")

    def forget_stop_request(self) -> None:
        """Begin anew with stop requests: the job has a new launch."""
        self.stop_request_sent, self.stop_seen_at, self.stop_pushes = False, math.inf, {}

    def _write_stop_request(self, name: str, content: bytes) -> None:
        with contextlib.closing(self._make_connector(name)) as connector:
            connector.write(f"{self.provisioner.job_folder(name)}/stop", content)

    # --- liveness -------------------------------------------------------------------------------------------------

    def agents_alive(self) -> bool:
        """Whether any agent runs or may run: False only when every machine has reported that none runs.

        Once the job is over, machines that cannot be reached are not waited for.
        """
        self._update_liveness()
        running = [name for name in self._usable_machines() if self.agent_running.get(name, True)]
        if self.is_over():  # the other machines have reported everything; these will learn it by themselves
            running = [name for name in running if name in self.fresh or name not in self.unreachable_since]
        are_alive = bool(self.restarting and not self.is_over()) or bool(running)
        if are_alive:
            self.last_pull_start = None
        return are_alive

    def is_over(self) -> bool:
        """Whether the outcome is decided: a result, an agreed end, or `STOP_GRACE_SECONDS` since a stop or limit."""
        long_ago, launch_id = time.monotonic() - STOP_GRACE_SECONDS, self.folders.launch_id
        if self.folders.stop_path.exists():
            self.stop_seen_at = min(self.stop_seen_at, time.monotonic())
        has_stopped_by_itself = any(
            changed_at < long_ago
            and (status := parse_status(text))
            and (status.ended, status.state, status.launch) == (True, MachineState.STOPPED, launch_id)
            for text, changed_at in self.mirror.last_status.values()
        )
        return self.stop_seen_at < long_ago or has_stopped_by_itself or self.folders.attempts.is_finished(launch_id)

    def dead_machines(self) -> list[str]:
        """Return the machines that have reported that no agent runs there, without those that are being restarted."""
        self._update_liveness()
        return [
            name
            for name in self._usable_machines()
            if not self.agent_running.get(name, True) and name not in self.restarting
        ]

    def _update_liveness(self) -> None:
        """Ask the machines whether their agent runs, often if their status does not change. Waits for no answer."""
        now = time.monotonic()
        reach_seconds = max(REACH_QUERY_SECONDS, len(self.hosts) / REACH_QUERIES_PER_SECOND)
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
            text, changed_at = self.mirror.last_status.get(f"status/{name}.json", (b"", 0.0))
            status = parse_status(text)
            self.fresh.discard(name)
            if now - changed_at < STATUS_STALE_SECONDS and not (status and status.ended):
                self.agent_running[name] = True
                self.fresh.add(name)
            wait_seconds = reach_seconds if name in self.fresh else LIVENESS_QUERY_SECONDS
            if name not in self.liveness_queries and now - self.liveness_asked_at.get(name, 0.0) > wait_seconds:
                self.liveness_asked_at[name] = now
                self.liveness_queries[name] = self.pool.submit(self.has_agent, name)
        self.setup_progress.note_reach(self.unreachable_since)

    def has_agent(self, name: str) -> bool:
        """Ask a machine whether an agent holds the lock of its work folder. Raises `ClusterError`, `Unreachable`."""
        argv = ["sh", "-c", HAS_AGENT_SCRIPT, "sh", self._lock_path(name)]
        return self.connectors[name].run(argv, check=False, timeout=10).code == 0

    def _lock_path(self, name: str) -> str:
        return f"{self.setup_progress.rows[name].work}/{AGENT_LOCK}"

    def restart_agent(self, name: str) -> None:
        """Set a machine up again and start its agent, in the background. Does nothing if that is under way."""
        if name not in self.restarting:
            self.restarting[name] = self.pool.submit(self._restart, name)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of the job's time limit that have passed."""
        return max(0.0, host.unix_time() - (self.limit_start or self.folders.launch_path.stat().st_mtime))

    def _restart(self, name: str) -> None:
        self.setup_progress.update(name, seconds={}, restarted=time.time())
        self._prepare_machine(name, self.pack_code, with_checks=False)
        self.provisioner.start_agent(name, self.elapsed_seconds)

    def join_machines(self) -> None:
        """Set up the machines that are to join the running job (`RunFolder.join_marker`), in the background."""
        for name in self.hosts:
            if name not in self.restarting and self.folders.join_marker(name).exists():
                self.joining.add(name)
                self.restarting[name] = self.pool.submit(self._join, name)

    def _join(self, name: str) -> None:
        self.setup_progress.begin_row(name, self.hosts[name].host)
        try:
            self.provisioner.run_on_each([name], self._take_in)
        except SetupFailed as error:  # the job is to stop
            self.setup_progress.update(name, reason=str(error))
        self.folders.join_marker(name).unlink(missing_ok=True)
        outcome = self.setup_progress.rows[name].reason or "was set up and joins the job"
        logger.info("%s: %s", self.connectors[name].name, outcome)

    def _take_in(self, name: str) -> None:
        """Set a machine up as a launch does, and start its agent if it fits the others. Raises `ClusterError`."""
        self.write_ssh_config()
        machine = self._prepare_machine(name, self.pack_code, with_checks=True)
        assert machine
        self.provisioner.check_machines({name: machine})
        row, *others = (self.setup_progress.rows[each] for each in (name, *self._usable_machines()))
        folder, connector = self.provisioner.job_folder(name), self.connectors[name]
        if row.reason:
            raise SetupFailed(row.reason)
        if row.gpus and not any(other.gpus for other in others):
            raise SetupFailed("has GPUs, and the other machines train on CPUs")
        if row.code.rpartition("/")[2] not in {other.code.rpartition("/")[2] for other in others}:
            raise SetupFailed("imgnet-cluster has changed here since the start of the job; stop the job, and resume it")
        if connector.read_from(f"{folder}/launch", 0) != self.folders.launch_id.encode():
            raise SetupFailed(f"does not see {folder}, as the others do; mount the same file system there")
        self.provisioner.remove_markers(name)
        with locked(self.folders.path / JOB_LOCK, JOB_LOCK_SECONDS):  # the job does not end meanwhile
            if self.folders.end_reason() or self.folders.result_path.exists():
                raise SetupFailed("the job is over, or ends")
            spec = Run.read(self.folders.path).spec.with_joined(name)
            connector.write(f"{folder}/job.json", to_json_bytes(replace(spec, queue="").to_json()))
            self.provisioner.start_agent(name, self.elapsed_seconds)
            self.joining.discard(name)
            self.folders.join_marker(name).unlink(missing_ok=True)
            self.folders.write_spec(spec)  # the supervisor starts anew

    def kill_machine(self, name: str, notice_seconds: float | None) -> None:
        """Kill a machine's agent, whose trainers end with it, or leave it a spot notice. Raises `ClusterError`."""
        row, connector = self.setup_progress.rows[name], self.connectors[name]
        if not self.has_agent(name):
            job = Run(self.spec, self.folders).handle
            raise ClusterError(f"{connector.name} has no running agent; see: imgnet-cluster status {job}")
        if notice_seconds is not None:
            notice = json.dumps({"reason": REHEARSED_NOTICE, "seconds": notice_seconds})
            connector.write(f"{row.work}/notice", notice.encode())
            return
        connector.run(["sh", "-c", SIGNAL_AGENT_SCRIPT, "sh", self._lock_path(name), "KILL"], timeout=10)

    # --- the end --------------------------------------------------------------------------------------------------

    def terminate(self) -> list[str]:
        """End what runs of the job on every machine that answers: the set-up, the tmux session, and the agents, which
        are asked to save first.

        Returns the names of those that do not answer, without machines that this job has never reached.
        """
        rows = self.setup_progress.rows

        def end_job(name: str) -> None:
            variables = {"work": rows[name].work if name in rows else "", "session": self.spec.tmux_session}
            quoted = {variable: shlex.quote(value) for variable, value in variables.items()}
            self.connectors[name].end_commands(END_JOB_SCRIPT, **quoted)

        futures = {name: self.pool.submit(end_job, name) for name in self.hosts}
        silent_machines = []
        for name, future in futures.items():
            try:
                future.result(20)
            except (ClusterError, FutureTimeout):
                if name in rows and rows[name].was_reached:
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
