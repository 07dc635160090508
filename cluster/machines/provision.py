"""Setting machines up over ssh, before any training starts: code, environment, checks, agent. Safe to do again.

    <folder>/code/<key>         the working tree            <folder>/jobs/<uid>/    the agent's work folder
    <folder>/venv/<key>         the environment             <shared>/<uid>/         the job's shared folder

Everything that runs there for long runs in the job's tmux session; its "setup" window shows what is being done.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.connectors import tmux
from cluster.connectors.hosts_file import Host
from cluster.connectors.ssh import SSHConnector
from cluster.errors import SetupFailed
from cluster.state.run_folder import stop_reason
from cluster.state.spec import JobSpec
from train.distributed.network import slow_pairs

from . import checks, code_archive, python_env, requirements
from .setup_progress import SetupProgress, timed_step

ENVIRONMENT_TIMEOUT_SECONDS = 1800.0  # a torch for GPUs is 3 GB to download
PROBE_TIMEOUT_SECONDS = 90.0
NETWORK_TIMEOUT_SECONDS = 120.0
STOP_POLL_SECONDS = 0.5  # to hear that the job is to stop
MIN_FREE_GB = 2.0
MANY_MACHINES = 16  # machines: beyond that a pair gets one small message, for there are thousands of pairs
SHORT_TEST_ARGUMENTS = ["--bytes", str(1 << 20), "--rounds", "1"]
# Words: the log, the session, and the command that makes it unless it is there.
OPEN_SESSION_SCRIPT = rf"""
log=$1 session=$2
shift 2
mkdir -p "${{log%/*}}" && : >>"$log" || exit 1
tmux -L {tmux.SOCKET_NAME} has-session -t "=$session" 2>/dev/null || "$@" || exit
"""
# Both outputs to the log that the window shows and to us, and the exit code, which a pipe would lose.
LOGGED_COMMAND_SCRIPT = r'log=$1; shift; mkdir -p "${log%/*}"; { "$@" 2>&1; echo "exit code $?"; } | tee -a "$log"'


class Provisioner:
    """The machines of a job while they are set up: Remotes by name, and what is known of each."""

    def __init__(
        self,
        spec: JobSpec,
        hosts: Mapping[str, Host],
        connectors: Mapping[str, SSHConnector],
        setup_progress: SetupProgress,
        stop_path: Path,
    ) -> None:
        self.spec, self.hosts, self.connectors, self.setup_progress = spec, hosts, connectors, setup_progress
        self.stop_path = stop_path  # there is one when the job is to stop

    # --- one machine -------------------------------------------------------------------------------------------------

    def prepare(self, name: str, archive_bytes: bytes, code_hash: str) -> None:
        """Bring code and environment to a machine, and open the job's session there. Raises `ClusterError`."""
        remote, host, board = self.connectors[name], self.hosts[name], self.setup_progress
        with timed_step(board, name, "connected"):
            home = remote.run(["sh", "-c", 'printf %s "$HOME"'], timeout=60).out.decode()
        folder = host.folder.replace("~", home, 1) if host.folder.startswith("~") else host.folder
        board.update(name, folder=folder, work=f"{folder}/jobs/{self.spec.uid}")
        with timed_step(board, name, "code"):
            code, _ = code_archive.upload_code(remote, folder, archive_bytes, code_hash)
            board.update(name, code=code)
        with timed_step(board, name, "environment"):
            self.open_session(name)
            python = host.python.replace("~", home, 1) if host.python.startswith("~/") else host.python
            words = [
                python,
                "-m",
                "cluster.machines.python_env",
                folder,
                *filter(None, [requirements.model_library(self.spec.recipe)]),
            ]
            index = (self.spec.cloud or {}).get("index")  # a torch for cards that the usual one has left behind
            more = {"PIP_EXTRA_INDEX_URL": index, "UV_EXTRA_INDEX_URL": index} if index else {}
            _, said = self.run_logged(name, words, ENVIRONMENT_TIMEOUT_SECONDS, **more)
            found = python_env.parse_output(said.encode(), remote.name)
            board.update(name, python=found["python"])

    def open_session(self, name: str, shell_line: str = ":") -> None:
        """Make the job's tmux session on a machine, with a window that shows the setting up, unless it is there.

        `then` is a line of sh that comes after it. All in one go: each takes three round trips.
        """
        remote, session, log = (
            self.connectors[name],
            self.spec.tmux_session,
            f"{self.setup_progress.rows[name]['work']}/setup.log",
        )
        words = tmux.new_session_argv(session, "setup", ["tail", "-n", "+1", "-F", log])
        made = remote.run(["sh", "-c", f"{OPEN_SESSION_SCRIPT}{shell_line}", "sh", log, session, *words], check=False)
        if made.code:
            why = (
                "tmux is missing; install it: sudo apt-get install tmux"
                if made.code == 127
                else _decode_stderr(made.err)
            )
            raise SetupFailed(f"{remote.name}: {why}")

    def run_logged(self, name: str, argv: Sequence[str], timeout_seconds: float, **variables: str) -> tuple[int, str]:
        """Run one of our modules on a machine, in sight of its setup window. Returns exit code and output."""
        row = self.setup_progress.rows[name]
        env = {"PYTHONPATH": row["code"], "PYTHONSAFEPATH": "1", **variables}
        words = ["sh", "-c", LOGGED_COMMAND_SCRIPT, "sh", f"{row['work']}/setup.log", *argv]
        said = self.connectors[name].run(words, env=env, timeout=timeout_seconds).out.decode(errors="replace")
        text, _, code = said.rpartition("exit code ")
        return int(code), text.strip()

    # --- all machines ------------------------------------------------------------------------------------------------

    def check_machines(self, names: Sequence[str]) -> None:
        """Look at each machine, whether all see one shared folder, and whether their clocks agree.

        What is wrong with a machine goes to the board; a warning is noted there.
        """
        answers = self._probe_machines(names, "--want-gb", str(MIN_FREE_GB))
        gpus = max((len(one["gpus"]) for one in answers.values()), default=0)
        for name, said in answers.items():
            wanted = self.spec.procs if gpus or (self.spec.cloud or {}).get("gpus") else 0
            found = checks.find_problems(said, wanted, MIN_FREE_GB) + checks.check_clock(*said["skew"])
            if not wanted:
                found.append({"level": "warning", "what": "no GPU: training on the processors"})
            self._record_findings(name, found, said)
        seen = self._probe_machines(
            [name for name in answers if name not in self.setup_progress.failure_reasons], "--expect", "all"
        )
        for name in list(answers)[:1]:  # not each its own, as it ends: others may still be looking
            probe = f"{self.shared_folder(name)}/probe/{self.spec.uid}"
            self.connectors[name].run(["sh", "-c", 'rm -f "$1"-*', "sh", probe])
        for one, other in checks.pairs_without_common_folder(seen):
            shared = self.shared_folder(one)
            what = f"machines {one} and {other} do not see the same {shared}; mount one file system there on both"
            self.setup_progress.update(other, reason=what)

    def shared_folder(self, name: str) -> str:
        """The folder that all machines see, as this one names it."""
        assert self.spec.hosts
        return str(self.spec.hosts["shared"] or f"{self.setup_progress.rows[name]['folder']}/shared")

    def job_folder(self, name: str) -> str:
        """The job's own part of it."""
        return f"{self.shared_folder(name)}/{self.spec.uid}"

    def _probe_machines(self, names: Sequence[str], *arguments: str) -> dict[str, dict[str, Any]]:
        """Ask cluster.machines.probe on all machines at once; who does not answer goes to the board."""
        more = [",".join(names) if word == "all" else word for word in arguments]

        def one(name: str) -> dict[str, Any]:
            with timed_step(self.setup_progress, name, "checks"):
                sent = time.time()
                row = self.setup_progress.rows[name]
                argv = [
                    row["python"],
                    "-m",
                    "cluster.machines.probe",
                    "--shared",
                    self.shared_folder(name),
                    "--work",
                    row["work"],
                ]
                code, text = self.run_logged(
                    name, [*argv, "--token", self.spec.uid, "--machine", name, *more], PROBE_TIMEOUT_SECONDS
                )
                if code:
                    raise SetupFailed(f"{self.connectors[name].name}: {(text or 'no words').splitlines()[-1]}")
                said: dict[str, Any] = json.loads(text.splitlines()[-1])
                said["skew"] = checks.clock_skew(sent, time.time(), said["time"])
                return said

        return self.run_on_each(names, one)

    def run_on_each(self, names: Sequence[str], function: Callable[[str], Any]) -> dict[str, Any]:
        """Do something for all at once. An error takes the machine out, with its reason.

        Raises `SetupFailed` as soon as the job is to stop; what has begun is left to itself.
        """
        found: dict[str, Any] = {}

        def one(name: str) -> None:
            try:
                found[name] = function(name)
            except Exception as error:
                self.setup_progress.update(name, reason=_error_line(error, self.connectors[name].name))

        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(STOP_POLL_SECONDS)
                if why := stop_reason(self.stop_path.parent):
                    raise SetupFailed(why)
        return {name: found[name] for name in names if name in found}

    def _record_findings(self, name: str, machine_findings: Sequence[checks.Finding], facts: Mapping[str, Any]) -> None:
        errors = [one["what"] for one in machine_findings if one["level"] == "error"]
        warnings = [one["what"] for one in machine_findings if one["level"] == "warning"]
        self.setup_progress.update(name, notes=warnings, gpus=[one["name"] for one in facts["gpus"]])
        if errors:
            self.setup_progress.update(name, reason="; ".join(errors))

    def measure_network(self, names: Sequence[str]) -> None:
        """Measure the network between all pairs, and an all-reduce, with the library that will train.

        A slow pair and a wrong transport are noted; machines that cannot talk to each other are named, and a card that
        this torch has no code for.
        """
        head = self.setup_progress.rows[names[0]]
        port = self.connectors[names[0]].run([head["python"], "-c", FREE_PORT_PROGRAM]).out.decode().strip()

        def one(name: str) -> str:
            with timed_step(self.setup_progress, name, "network"):
                variables = {
                    "RANK": str(names.index(name)), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(names)),
                    "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": self.setup_progress.rows[names[0]]["address"], "MASTER_PORT": port,
                }  # fmt: skip
                argv = [self.setup_progress.rows[name]["python"], "-m", "train.distributed.network_probe"]
                argv += [
                    "--timeout",
                    f"{NETWORK_TIMEOUT_SECONDS - 20:.0f}",
                    *(SHORT_TEST_ARGUMENTS if len(names) > MANY_MACHINES else []),
                ]
                code, text = self.run_logged(name, argv, NETWORK_TIMEOUT_SECONDS, **variables)
                if code:
                    raise SetupFailed((text or "no words").splitlines()[-1])
                return (text.splitlines() or [""])[-1]

        said = self.run_on_each(names, one)
        if names[0] not in said:
            return
        found = self.setup_progress.data["network"] = json.loads(said[names[0]])
        for name in names if found.get("warning") else []:
            self._add_warning(name, found["warning"])
        for slow in slow_pairs(found.get("pairs", {})):  # "0-2" by rank, or "2" for all of one machine's
            ends = [names[int(rank)] for rank in slow.split("-")]
            for name in ends:
                others = " and ".join(one for one in ends if one != name) or "all others"
                self._add_warning(name, f"slow network to {others}")

    def _add_warning(self, name: str, warning: str) -> None:
        self.setup_progress.update(name, notes=[*self.setup_progress.rows[name]["notes"], warning])

    def write_job_files(self, name: str, local_shared: Path) -> None:
        """Write what was asked of the job, and the mark of this launch, into the shared folder, by one machine."""
        remote, folder = self.connectors[name], self.job_folder(name)
        for file in ("job.json", "recipe.json"):
            remote.write(f"{folder}/{file}", (local_shared / file).read_bytes())
        remote.run(["rm", "-f", f"{folder}/stop"])
        remote.write(f"{folder}/launch", (local_shared / "launch").read_bytes())

    def start_agent(self, name: str, elapsed_seconds: float) -> None:
        """Start a machine's agent in the job's session; one that is at work lets no second in."""
        with timed_step(self.setup_progress, name, "agent"):
            row, session = self.setup_progress.rows[name], self.spec.tmux_session
            argv = ["env", f"PYTHONPATH={row['code']}", "PYTHONSAFEPATH=1", row["python"], "-m", "cluster.agent"]
            argv += [self.job_folder(name), row["work"], name, "--address", row["address"]]
            log = f"{row['work']}/agent.out"  # a word that was said when no one had the terminal
            line = shlex.join([*argv, "--elapsed", f"{elapsed_seconds:.0f}"])
            words = ["sh", "-c", f"{line} 2>&1 | tee -a {shlex.quote(log)}"]
            window = shlex.join(tmux.new_window_argv(session, "agent", words))
            close = shlex.join(["tmux", "-L", tmux.SOCKET_NAME, "kill-window", "-t", f"={session}:setup"])
            self.open_session(name, f"{window} || exit\n{close} 2>/dev/null; :")


FREE_PORT_PROGRAM = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


def _decode_stderr(stderr: bytes) -> str:
    return " ".join(stderr.decode(errors="replace").split())


def _error_line(error: Exception, machine_name: str) -> str:
    """An error in one line, without the machine's name, which stands before it anyway."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix(f"{machine_name}: ")
