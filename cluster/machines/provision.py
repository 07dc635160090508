"""Sets machines up over ssh before training: code, environment, checks, agent. Repeating a step does no harm.

    <folder>/code/<hash>        the working tree            <folder>/jobs/<uid>/    the agent's work folder
    <folder>/venv/<key>         the environment             <shared>/<uid>/         the job's shared folder

Long-running programs run in the job's tmux session on the machine. Its window "setup" shows the log of the set-up.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cluster.connectors import tmux, untrusted
from cluster.connectors.hosts_file import Host
from cluster.connectors.ssh import SSHConnector
from cluster.errors import SetupFailed
from cluster.state.run_folder import AGENT_OUTPUT, stop_reason
from cluster.state.spec import JobSpec
from cluster.state.states import SetupStep
from train.distributed.network import slow_pairs
from train.tools.records import DamagedRecord, decode_json

from . import checks, code_archive, python_env, requirements
from .setup_progress import SetupProgress, timed_step

ENVIRONMENT_TIMEOUT_SECONDS = 1800.0  # torch for GPUs is a download of 3 GB
PROBE_TIMEOUT_SECONDS = 90.0
NETWORK_TIMEOUT_SECONDS = 120.0
STOP_POLL_SECONDS = 0.5  # between two looks for a stop request
MIN_FREE_GB = 2.0
MANY_MACHINES = 16  # with more machines there are hundreds of pairs, so each pair exchanges one small message only
SHORT_TEST_ARGUMENTS = ["--bytes", str(1 << 20), "--rounds", "1"]
# $1: the log; $2: the session; the rest: the command that makes the session, unless it exists.
OPEN_SESSION_SCRIPT = rf"""
log=$1 session=$2
shift 2
mkdir -p "${{log%/*}}" && : >>"$log" || exit 1
tmux -L {tmux.SOCKET_NAME} has-session -t "=$session" 2>/dev/null || "$@" || exit
"""
# Writes stdout and stderr both to the log, which the setup window shows, and to us. The exit code is printed, because
# the exit code of a pipe is that of tee.
LOGGED_COMMAND_SCRIPT = r'log=$1; shift; mkdir -p "${log%/*}"; { "$@" 2>&1; echo "exit code $?"; } | tee -a "$log"'
Answer = TypeVar("Answer")
FREE_PORT_PROGRAM = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


class Provisioner:
    """Sets up the machines of one job. Works through their connectors and records progress and failures by machine."""

    def __init__(
        self,
        spec: JobSpec,
        hosts: Mapping[str, Host],
        connectors: Mapping[str, SSHConnector],
        setup_progress: SetupProgress,
        stop_path: Path,
    ) -> None:
        self.spec = spec
        self.hosts = hosts
        self.connectors = connectors
        self.setup_progress = setup_progress
        self.stop_path = stop_path  # this file exists when the job is to stop

    # --- one machine ----------------------------------------------------------------------------------------------

    def prepare(self, name: str, archive_bytes: bytes, code_hash: str) -> None:
        """Bring code and environment to a machine and open the job's session there. Raises `ClusterError`."""
        connector, host, progress = self.connectors[name], self.hosts[name], self.setup_progress
        with timed_step(progress, name, SetupStep.CONNECTED):
            home = untrusted.absolute_path(connector.run(["sh", "-c", 'printf %s "$HOME"'], timeout=60).out)
        folder = host.folder.replace("~", home, 1) if host.folder.startswith("~") else host.folder
        work = f"{folder}/jobs/{self.spec.uid}"
        progress.update(name, lambda row: replace(row, folder=folder, work=work))
        with timed_step(progress, name, SetupStep.CODE):
            code_folder, _ = code_archive.upload_code(connector, folder, archive_bytes, code_hash)
            progress.update(name, lambda row: replace(row, code=code_folder))
        with timed_step(progress, name, SetupStep.ENVIRONMENT):
            self.open_session(name)
            python = host.python.replace("~", home, 1) if host.python.startswith("~/") else host.python
            library = requirements.model_library(self.spec.recipe)
            argv = [python, "-m", "cluster.machines.python_env", folder, *([library] if library else [])]
            index = self.spec.rental_facts.torch_index_url
            variables = {"PIP_EXTRA_INDEX_URL": index, "UV_EXTRA_INDEX_URL": index} if index else {}
            _, stdout = self.run_logged(name, argv, ENVIRONMENT_TIMEOUT_SECONDS, **variables)
            python_path = python_env.parse_output(stdout.encode(), connector.name)
            found_python = untrusted.absolute_path(python_path.encode())
            progress.update(name, lambda row: replace(row, python=found_python))

    def open_session(self, name: str, shell_line: str = ":") -> None:
        """Make the job's tmux session on a machine unless it exists, with a window that shows the set-up log.

        `shell_line` is a line of sh that runs afterwards. Both go in one command, since each takes three round trips.
        Raises `SetupFailed`.
        """
        connector, session = self.connectors[name], self.spec.tmux_session
        log = f"{self.setup_progress.rows[name].work}/setup.log"
        new_session = tmux.new_session_argv(session, "setup", ["tail", "-n", "+1", "-F", log])
        argv = ["sh", "-c", f"{OPEN_SESSION_SCRIPT}{shell_line}", "sh", log, session, *new_session]
        result = connector.run(argv, check=False)
        if result.code == 127:
            raise SetupFailed(f"{connector.name}: tmux is missing; install it: sudo apt-get install tmux")
        if result.code:
            raise SetupFailed(f"{connector.name}: {_decode_stderr(result.err)}")

    def run_logged(self, name: str, argv: Sequence[str], timeout_seconds: float, **variables: str) -> tuple[int, str]:
        """Run a module of this project on a machine, with its output in the setup window. Returns exit code and output.

        `variables` are added to the module's environment.
        """
        row = self.setup_progress.rows[name]
        env = {"PYTHONPATH": row.code, "PYTHONSAFEPATH": "1", **variables}
        logged_argv = ["sh", "-c", LOGGED_COMMAND_SCRIPT, "sh", f"{row.work}/setup.log", *argv]
        result = self.connectors[name].run(logged_argv, env=env, timeout=timeout_seconds)
        text, _, code = result.out.decode(errors="replace").rpartition("exit code ")
        return int(code), text.strip()

    # --- all machines ---------------------------------------------------------------------------------------------

    def check_machines(self, names: Sequence[str]) -> None:
        """Check each machine, whether all of them mount one shared folder, and their clocks.

        An error becomes the machine's failure reason, a warning one of its notes.
        """
        facts_by_machine = self._probe_machines(names, checks.MachineFacts)
        max_gpus = max((len(facts.gpus) for facts, _, _ in facts_by_machine.values()), default=0)
        has_gpus = max_gpus > 0 or self.spec.rental_facts.gpus_per_machine > 0
        required_gpus = self.spec.procs if has_gpus else 0

        for name, (facts, sent_at, received_at) in facts_by_machine.items():
            findings = checks.find_problems(facts, required_gpus, MIN_FREE_GB)
            findings += checks.check_clock(*checks.clock_skew(sent_at, received_at, facts.time))
            if not required_gpus:
                findings.append(checks.Finding("warning", "no GPU: trains on the CPU"))
            self._record_findings(name, findings, facts)
        usable = [name for name in facts_by_machine if name not in self.setup_progress.failure_reasons]
        answers = self._probe_machines(usable, checks.SeenMarkers, "--expect", ",".join(usable))
        # One machine removes all markers at the end. If each removed its own, another might still be looking for it.
        for name in list(facts_by_machine)[:1]:
            marker_prefix = f"{self.shared_folder(name)}/probe/{self.spec.uid}"
            self.connectors[name].run(["sh", "-c", 'rm -f "$1"-*', "sh", marker_prefix])
        for first, second in checks.pairs_without_common_folder({name: seen for name, (seen, _, _) in answers.items()}):
            shared = self.shared_folder(first)
            reason = f"machines {first} and {second} do not see the same {shared}; mount one file system there on both"
            self.setup_progress.set_failure_reason(second, reason)

    def shared_folder(self, name: str) -> str:
        """Return the path of the folder that all machines mount; for a single machine, a folder of its own."""
        assert self.spec.hosts
        return str(self.spec.hosts.shared or f"{self.setup_progress.rows[name].folder}/shared")

    def job_folder(self, name: str) -> str:
        """Return the path of the job's folder in the shared folder."""
        return f"{self.shared_folder(name)}/{self.spec.uid}"

    def _probe_machines(
        self, names: Sequence[str], answer_type: type[Answer], *arguments: str
    ) -> dict[str, tuple[Answer, float, float]]:
        """Run `cluster.machines.probe` on all machines at once.

        Returns by machine the answer, and the moments when the probe was started and when its answer had come. A
        machine that gives no answer gets a failure reason.
        """

        def probe(name: str) -> tuple[Answer, float, float]:
            with timed_step(self.setup_progress, name, SetupStep.CHECKS):
                row = self.setup_progress.rows[name]
                argv = [row.python, "-m", "cluster.machines.probe"]
                argv += ["--shared", self.shared_folder(name), "--work", row.work]
                argv += ["--token", self.spec.uid, "--machine", name, *arguments]
                sent_at = time.time()
                code, text = self.run_logged(name, argv, PROBE_TIMEOUT_SECONDS)
                if code:
                    raise SetupFailed(f"{self.connectors[name].name}: {(text or 'no output').splitlines()[-1]}")
                received_at = time.time()
                try:
                    answer = decode_json(answer_type, (text.splitlines() or [""])[-1].encode())
                except DamagedRecord as error:
                    raise SetupFailed(_describe_damage("the checks", error)) from None
                return answer, sent_at, received_at

        return self.run_on_each(names, probe)

    def run_on_each(self, names: Sequence[str], function: Callable[[str], Answer]) -> dict[str, Answer]:
        """Call a function for all machines at once, each in a thread, and return what succeeded, by machine.

        An error becomes the machine's failure reason. Raises `SetupFailed` as soon as the job is to stop; calls that
        have begun are abandoned.
        """
        results: dict[str, Answer] = {}

        def run_one(name: str) -> None:
            try:
                results[name] = function(name)
            except Exception as error:
                self.setup_progress.set_failure_reason(name, _error_line(error, self.connectors[name].name))

        threads = [threading.Thread(target=run_one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(STOP_POLL_SECONDS)
                if reason := stop_reason(self.stop_path.parent):
                    raise SetupFailed(reason)
        return {name: results[name] for name in names if name in results}

    def _record_findings(self, name: str, findings: Sequence[checks.Finding], facts: checks.MachineFacts) -> None:
        errors = [untrusted.one_line(finding.what) for finding in findings if finding.level == "error"]
        warnings = [untrusted.one_line(finding.what) for finding in findings if finding.level == "warning"]
        gpus = tuple(untrusted.one_line(gpu.name) for gpu in facts.gpus)
        self.setup_progress.update(name, lambda row: replace(row, notes=tuple(warnings), gpus=gpus))
        if errors:
            self.setup_progress.set_failure_reason(name, "; ".join(errors))

    def measure_network(self, names: Sequence[str]) -> None:
        """Measure the network between all pairs of machines, and an all-reduce, with the library that will train.

        A slow pair and a wrong transport become notes. A machine that cannot reach the others, or whose GPU this torch
        has no kernels for, gets a failure reason.
        """
        rank0 = names[0]
        rank0_row = self.setup_progress.rows[rank0]
        port = untrusted.port_number(self.connectors[rank0].run([rank0_row.python, "-c", FREE_PORT_PROGRAM]).out)
        arguments = ["--timeout", f"{NETWORK_TIMEOUT_SECONDS - 20:.0f}"]
        if len(names) > MANY_MACHINES:
            arguments += SHORT_TEST_ARGUMENTS

        def measure(name: str) -> str:
            with timed_step(self.setup_progress, name, SetupStep.NETWORK):
                variables = {
                    "RANK": str(names.index(name)),
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": str(len(names)),
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": rank0_row.address,
                    "MASTER_PORT": port,
                }
                argv = [self.setup_progress.rows[name].python, "-m", "train.distributed.network_probe", *arguments]
                code, text = self.run_logged(name, argv, NETWORK_TIMEOUT_SECONDS, **variables)
                if code:
                    raise SetupFailed((text or "no output").splitlines()[-1])
                return (text.splitlines() or [""])[-1]

        last_lines = self.run_on_each(names, measure)
        if rank0 not in last_lines:
            return
        try:
            measurement = json.loads(last_lines[rank0])
            warning = untrusted.one_line(measurement.get("warning") or "")
            # "0-2" is a slow pair of ranks; "2" means that all connections of rank 2 are slow.
            names_of_slow_pairs = [
                [names[int(rank)] for rank in slow_pair.split("-")]
                for slow_pair in slow_pairs(measurement.get("pairs", {}))
            ]
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            self.setup_progress.set_failure_reason(rank0, _describe_damage("the network test", error))
            return
        self.setup_progress.update_record(lambda record: replace(record, network=measurement))
        if warning:
            for name in names:
                self._add_warning(name, warning)
        for slow_names in names_of_slow_pairs:
            for name in slow_names:
                peers = " and ".join(peer for peer in slow_names if peer != name) or "all others"
                self._add_warning(name, f"slow network to {peers}")

    def _add_warning(self, name: str, warning: str) -> None:
        self.setup_progress.update(name, lambda row: replace(row, notes=(*row.notes, warning)))

    def write_job_files(self, name: str, local_shared: Path) -> None:
        """Write the job's spec, its recipe and the ID of this launch into the shared folder, through one machine."""
        connector, folder = self.connectors[name], self.job_folder(name)
        for file_name in ("job.json", "recipe.json"):
            connector.write(f"{folder}/{file_name}", (local_shared / file_name).read_bytes())
        connector.run(["rm", "-f", f"{folder}/stop"])
        connector.write(f"{folder}/launch", (local_shared / "launch").read_bytes())

    def start_agent(self, name: str, elapsed_seconds: float) -> None:
        """Start a machine's agent in the job's session. If an agent runs there already, the second one ends itself.

        `elapsed_seconds` is how much of the job's time limit has passed.
        """
        with timed_step(self.setup_progress, name, SetupStep.AGENT):
            row, session = self.setup_progress.rows[name], self.spec.tmux_session
            argv = ["env", f"PYTHONPATH={row.code}", "PYTHONSAFEPATH=1", row.python, "-m", "cluster.agent"]
            argv += [self.job_folder(name), row.work, name, "--address", row.address]
            argv += ["--elapsed", f"{elapsed_seconds:.0f}"]
            window_argv = tmux.followed_argv(argv, f"{row.work}/{AGENT_OUTPUT}")
            open_window = shlex.join(tmux.new_window_argv(session, "agent", window_argv))
            close_setup = shlex.join(["tmux", "-L", tmux.SOCKET_NAME, "kill-window", "-t", f"={session}:setup"])
            self.open_session(name, f"{open_window} || exit\n{close_setup} 2>/dev/null; :")


def _describe_damage(what: str, error: Exception) -> str:
    """Return that a machine's answer cannot be used, as the reason of its failure."""
    return f"its answer to {what} is damaged ({type(error).__name__}: {untrusted.one_line(str(error))})"


def _decode_stderr(stderr: bytes) -> str:
    return untrusted.one_line(stderr)


def _error_line(error: Exception, machine_name: str) -> str:
    """Return an error as one line without the machine's name, which is shown before it anyway."""
    text = str(error) or type(error).__name__
    return untrusted.one_line(text.removeprefix(f"{machine_name}: "))
