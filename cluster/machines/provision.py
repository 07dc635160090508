"""Sets machines up over ssh before training: code, environment, checks, agent. Repeating a step does no harm.

    <folder>/code/<hash>        the code              <folder>/jobs/<uid>-<machine>/    the agent's work folder
    <folder>/venv/<key>         the environment       <shared>/<uid>/                   the job's shared folder

<folder> may be the same on several machines, in a home that all of them mount.

Long-running programs run in the job's tmux session on the machine. Its window "setup" shows the log of the set-up.
"""

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

from cluster.connectors import tmux, untrusted
from cluster.connectors.hosts_file import Host
from cluster.connectors.ssh import CommandResult, SSHConnector
from cluster.connectors.ssh_scripts import quote_path
from cluster.errors import ClusterError, SetupFailed
from cluster.script import secret_values
from cluster.state.run_folder import AGENT_OUTPUT, stop_reason
from cluster.state.spec import JobSpec
from cluster.state.states import SetupStep
from train.tools.agent_protocol import RESULT_FILE
from train.tools.records import DamagedRecord, decode_json

from . import checks, code_archive, python_env, requirements
from .mirror import SetupLogCopy
from .setup_progress import SetupProgress, timed_step

ENVIRONMENT_TIMEOUT_SECONDS = 1800.0  # torch for GPUs is a download of 3 GB
PROBE_TIMEOUT_SECONDS = 90.0
FILES_TIMEOUT_SECONDS = 60.0  # for a command that only touches small files
STOP_POLL_SECONDS = 0.5  # between two looks for a stop request
MIN_FREE_GB = 2.0
SETUP_LOG = "setup.log"  # in a machine's work folder
# $1: the log; $2: the session; the rest: the command that makes the session, unless it exists. No other user of the
# machine may enter a job's folders: it could hold their locks, and read the secrets of the attempts.
OPEN_SESSION_SCRIPT = rf"""
log=$1 session=$2
shift 2
mkdir -p -m 700 "${{log%/*}}" && : >>"$log" || exit 1
tmux -L {tmux.SOCKET_NAME} has-session -t "=$session" 2>/dev/null || "$@" || exit
"""
JOB_FILES = ("job.json", "recipe.json", "leader", "launch")
# $1: the job's folder; $2: a file of the launch before; the rest: name and bytes of each file. Their contents are on
# stdin, in the same order.
JOB_FILES_SCRIPT = r"""
mkdir -p -m 700 "$1" && cd "$1" && rm -f stop "$2" || exit
shift 2
set -C  # a file that somebody else places, such as a link, is not written through
while [ $# -gt 0 ]; do
  rm -f ".$1.new" && head -c "$2" >".$1.new" && sync ".$1.new" && mv -f ".$1.new" "$1" || exit
  shift 2
done
sync .
"""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class CheckedMachine:
    """The facts of a machine, and how far its clock is ahead of this computer's, with the uncertainty, in seconds.

    `torch` is the version in its environment. `missing_packages` are the packages that a launch has to install.
    """

    facts: checks.MachineFacts
    clock_skew: tuple[float, float]
    torch: str = ""
    missing_packages: tuple[str, ...] = ()


@dataclass
class Provisioner:
    """Sets up the machines of one job. Works through their connectors and records progress and failures by machine."""

    environment_flags: ClassVar[tuple[str, ...]] = ()  # for `cluster.machines.python_env`
    spec: JobSpec
    hosts: Mapping[str, Host]
    connectors: Mapping[str, SSHConnector]
    setup_progress: SetupProgress
    stop_path: Path  # this file exists when the job is to stop
    while_waiting: Callable[[], None] = lambda: None  # called now and then while machines are being set up
    log_copies: dict[str, SetupLogCopy] = field(default_factory=dict)

    def kept_folder(self, folder: str) -> str:
        """Return the folder of a job's files on a machine, given the one that the hosts file names."""
        return folder

    # --- one machine ----------------------------------------------------------------------------------------------

    def prepare(
        self, name: str, code: Callable[[], code_archive.PackedCode], with_checks: bool
    ) -> CheckedMachine | None:
        """Bring code and environment to a machine and open the job's session there. Raises `ClusterError`.

        `code` is called after the login. Returns the facts, which `check_machines` judges; None without checks.
        """
        connector, host, progress = self.connectors[name], self.hosts[name], self.setup_progress
        address = host.address or connector.route.host
        progress.update(name, address=address)
        with timed_step(progress, name, SetupStep.CONNECTING):
            log = quote_path(f"{self.kept_folder(host.folder)}/jobs/{self.spec.uid}-{name}/{SETUP_LOG}")
            code_folder = quote_path(f"{host.folder}/code")
            script = (
                f'printf "%s\\n" "$HOME"; stat -c %s {log} 2>/dev/null || echo 0; ls -1 {code_folder} 2>/dev/null; :'
            )
            if self.spec.hosts and not (self.spec.hosts.shared or self.spec.cloud):  # a single machine needs no mount
                script = f"mkdir -p {quote_path(self.shared_folder(name))}; {script}"
            result = connector.run(["sh", "-c", script], timeout=FILES_TIMEOUT_SECONDS)
            home_line, log_size, *known_hashes = [*result.out.split(b"\n"), b""]
            home = untrusted.absolute_path(home_line)
        folder = host.folder.replace("~", home, 1) if host.folder.startswith("~") else host.folder
        work = f"{self.kept_folder(folder)}/jobs/{self.spec.uid}-{name}"
        progress.update(name, folder=folder, work=work, was_reached=True)
        run_path = progress.path.parent
        size = untrusted.file_size(log_size)
        self.log_copies[name] = SetupLogCopy(connector, f"{work}/{SETUP_LOG}", size, run_path, name)
        with timed_step(progress, name, SetupStep.CODE):
            archive_bytes, code_hash = code()
            code_path = code_archive.code_folder(folder, code_hash)
            if code_hash.encode() not in known_hashes:
                code_path = code_archive.upload_code(connector, self.kept_folder(folder), archive_bytes, code_hash)
            progress.update(name, code=code_path)
        python = host.python.replace("~", home, 1) if host.python.startswith("~/") else host.python
        return self._make_environment(name, python, with_checks)

    def _make_environment(self, name: str, python: str, with_checks: bool) -> CheckedMachine | None:
        """Open the session, find or make the environment, and check the machine, all by one command."""
        connector, row, progress = self.connectors[name], self.setup_progress.rows[name], self.setup_progress
        rental = self.spec.rental_facts
        library = "" if self.spec.own_command else requirements.model_library(self.spec.recipe)
        packages = (library, rental.torch_requirement)
        argv = [python, "-m", "cluster.machines.python_env", *self.environment_flags, row.folder]
        argv += filter(None, packages)
        if with_checks:
            argv += ["--then", *self._probe_argv(name)]
        index = rental.torch_index_url
        variables = {"PIP_EXTRA_INDEX_URL": index, "UV_EXTRA_INDEX_URL": index} if index else {}
        timeout_seconds = ENVIRONMENT_TIMEOUT_SECONDS + (PROBE_TIMEOUT_SECONDS if with_checks else 0)
        progress.set_step(name, SetupStep.ENVIRONMENT)
        start, sent_at = time.monotonic(), time.time()
        with self.log_copies[name].following():
            result = self.open_session(name, self._logged_line(name, argv, variables), timeout_seconds)
            received_at, seconds = time.time(), time.monotonic() - start
        code, text = _exit_code_and_output(result)
        environment, probe_output = python_env.parse_output(text, connector.name)
        progress.update(name, python=untrusted.absolute_path(environment.python.encode()))
        # The machine says how long the environment took. The checks took the rest.
        environment_seconds = min(max(0.0, environment.seconds), seconds) if with_checks else seconds
        progress.set_step(name, SetupStep.ENVIRONMENT, environment_seconds)
        if not with_checks:
            return None
        progress.set_step(name, SetupStep.CHECKS, seconds - environment_seconds)
        facts = _decode_answer(checks.MachineFacts, code, probe_output)
        skew = checks.clock_skew(sent_at + environment_seconds, received_at, facts.time)
        return CheckedMachine(facts, skew, untrusted.one_line(environment.torch), environment.missing)

    def _probe_argv(self, name: str) -> list[str]:
        row = self.setup_progress.rows[name]
        where = ["--shared", self.shared_folder(name), "--work", row.folder]
        data: list[str] = []
        if not (self.spec.generate_data or self.spec.data_source or self.spec.own_command):
            data = ["--data", self.spec.train.data, "--val-fraction", str(self.spec.recipe.data.val_fraction)]
        return ["cluster.machines.probe", *where, *data, "--token", self.spec.uid, "--machine", name]

    def _logged_line(self, name: str, argv: Sequence[str], variables: Mapping[str, str]) -> str:
        """Return a line of sh that runs a module of this project, with its output in the setup window and to us.

        `variables` are added to the module's environment. The exit code is printed, because that of a pipe is tee's.
        """
        row = self.setup_progress.rows[name]
        env = {"PYTHONPATH": row.code, "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1", **variables}
        words = ["env", *(f"{variable}={value}" for variable, value in env.items()), *argv]
        log = shlex.quote(f"{row.work}/{SETUP_LOG}")
        return f'{{ {shlex.join(words)} 2>&1; echo "exit code $?"; }} | tee -a {log}'

    def open_session(self, name: str, shell_line: str, timeout_seconds: float = FILES_TIMEOUT_SECONDS) -> CommandResult:
        """Make the job's tmux session unless it exists, and run a line of sh, in one trip. Raises `SetupFailed`."""
        connector, session = self.connectors[name], self.spec.tmux_session
        log = f"{self.setup_progress.rows[name].work}/{SETUP_LOG}"
        new_session = tmux.new_session_argv(session, "setup", tmux.tail_argv(log))
        argv = ["sh", "-c", f"{OPEN_SESSION_SCRIPT}{shell_line}", "sh", log, session, *new_session]
        result = connector.run(argv, check=False, timeout=timeout_seconds)
        if result.code == 127:
            raise SetupFailed(f"{connector.name}: tmux is missing; install it: sudo apt-get install tmux")
        if result.code:
            raise SetupFailed(f"{connector.name}: {untrusted.one_line(result.err)}")
        return result

    # --- all machines ---------------------------------------------------------------------------------------------

    def check_machines(self, checked_machines: Mapping[str, CheckedMachine]) -> None:
        """Judge the facts of each machine. An error becomes its failure reason, a warning one of its notes."""
        counts = [len(row.gpus) for row in self.setup_progress.rows.values()]
        max_gpus = max([*counts, *(len(machine.facts.gpus) for machine in checked_machines.values())], default=0)
        has_gpus = max_gpus > 0 or self.spec.rental_facts.gpus_per_machine > 0
        required_gpus = self.spec.procs if has_gpus else 0

        for name, machine in checked_machines.items():
            findings = checks.find_problems(machine.facts, required_gpus, MIN_FREE_GB)
            findings += checks.check_clock(*machine.clock_skew)
            if packages := ", ".join(machine.missing_packages):
                remedy = f"a launch installs them in {self.setup_progress.rows[name].folder}/venv, once"
                findings.append(checks.warning(f"its Python lacks {packages}; {remedy}"))
            if not required_gpus:
                findings.append(checks.warning("no GPU: trains on the CPU"))
            errors, warnings = (
                [untrusted.one_line(finding.what) for finding in findings if finding.level == level]
                for level in ("error", "warning")
            )
            self.setup_progress.update(
                name,
                notes=tuple(warnings),
                gpus=tuple(untrusted.one_line(gpu) for gpu in machine.facts.gpus),
                is_broken=checks.is_broken(machine.facts, required_gpus),
                reason="; ".join(errors),
            )

    def shared_folder(self, name: str) -> str:
        """Return the path of the folder that all machines mount; for a single machine, a folder of its own."""
        assert self.spec.hosts
        row = self.setup_progress.rows.get(name)
        folder = (row and row.folder) or self.hosts[name].folder  # the row has it after the first login
        return str(self.spec.hosts.shared or f"{self.kept_folder(folder)}/shared")

    def job_folder(self, name: str) -> str:
        """Return the path of the job's folder in the shared folder."""
        return f"{self.shared_folder(name)}/{self.spec.uid}"

    def run_on_each(self, names: Sequence[str], function: Callable[[str], Answer]) -> dict[str, Answer]:
        """Call a function for all machines at once, each in a thread, and return what succeeded, by machine.

        An error becomes the machine's failure reason. Raises `SetupFailed` as soon as the job is to stop. The calls are
        then abandoned: they go on to no other step, and `SSHConnector.end_commands` ends the present one.
        """
        results: dict[str, Answer] = {}

        def run_one(name: str) -> None:
            try:
                results[name] = function(name)
            except Exception as error:
                if not self.setup_progress.is_abandoned:
                    # The name of the machine is shown before the reason anyway.
                    text = (str(error) or type(error).__name__).removeprefix(f"{self.connectors[name].name}: ")
                    self.setup_progress.update(name, reason=untrusted.one_line(text))

        threads = [threading.Thread(target=run_one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(STOP_POLL_SECONDS)
                    self.while_waiting()
                    if reason := stop_reason(self.stop_path.parent):
                        raise SetupFailed(reason)
        except BaseException:
            self.setup_progress.is_abandoned = True
            raise
        return {name: results[name] for name in names if name in results}

    def check_shared_folder(self, names: Sequence[str]) -> None:
        """Check that all machines mount one shared folder. A machine that does not see the others' files fails."""

        def check(name: str) -> dict[str, bool]:
            python = self.setup_progress.rows[name].python
            argv = [python, "-m", *self._probe_argv(name), "--expect", ",".join(names)]
            line = self._logged_line(name, argv, {})
            with timed_step(self.setup_progress, name, SetupStep.CHECKS):
                with self.log_copies[name].following():
                    result = self.connectors[name].run(["sh", "-c", line], timeout=PROBE_TIMEOUT_SECONDS)
                return _decode_answer(dict[str, bool], *_exit_code_and_output(result))

        if len(names) > 1:
            answers = self.run_on_each(names, check)
            for first, second in checks.pairs_without_common_folder(answers):
                shared = self.shared_folder(first)
                reason = (
                    f"machines {first} and {second} do not see the same {shared}; mount one file system there on both"
                )
                self.setup_progress.update(second, reason=reason)
        # One machine removes all markers at the end. If each removed its own, another might still be looking for it.
        threading.Thread(target=self.remove_markers, args=(names[0],), daemon=True).start()

    def remove_markers(self, name: str) -> None:
        """Remove the files by which machines find that their folder is the same."""
        marker_prefix = f"{self.shared_folder(name)}/probe/{self.spec.uid}"
        with contextlib.suppress(ClusterError):  # markers that stay do no harm
            self.connectors[name].run(["sh", "-c", 'rm -f "$1"-*', "sh", marker_prefix], timeout=FILES_TIMEOUT_SECONDS)

    def write_job_files(self, name: str, local_shared: Path) -> None:
        """Write the job's spec, recipe and, last, the launch's ID, by which agents begin it, through one machine."""
        names = [file_name for file_name in JOB_FILES if (local_shared / file_name).exists()]  # a command has no recipe
        contents = {file_name: (local_shared / file_name).read_bytes() for file_name in names}
        words = [word for file_name, content in contents.items() for word in (file_name, str(len(content)))]
        outdated = RESULT_FILE if self.spec.train.extended_at else "stop"  # the trainers write it again if it was not
        argv = ["sh", "-c", JOB_FILES_SCRIPT, "sh", self.job_folder(name), outdated, *words]
        self.connectors[name].run(argv, timeout=FILES_TIMEOUT_SECONDS, input=b"".join(contents.values()))

    def start_agent(self, name: str, elapsed_seconds: float) -> None:
        """Start an agent, `elapsed_seconds` into the job's time limit. If one runs already, the second ends itself."""
        with timed_step(self.setup_progress, name, SetupStep.AGENT):
            row, session = self.setup_progress.rows[name], self.spec.tmux_session
            if names := self.spec.own_command and self.spec.own_command.secrets:
                values = secret_values.require(names, secret_values.kept_values(self.spec.uid), self.spec.name)
                argv, content = (
                    ["sh", "-c", secret_values.SEND_SCRIPT, "sh", row.work],
                    secret_values.sent_bytes(values),
                )
                self.connectors[name].run(argv, timeout=FILES_TIMEOUT_SECONDS, input=content)
            argv = ["env", f"PYTHONPATH={row.code}", "PYTHONSAFEPATH=1", row.python, "-m", "cluster.agent"]
            argv += [self.job_folder(name), row.work, name, "--address", row.address]
            argv += ["--elapsed", f"{elapsed_seconds:.0f}"]
            argv += ["--user-project", f"{row.code}/{code_archive.USER_PROJECT_FOLDER}"]
            window_argv = tmux.followed_argv(argv, f"{row.work}/{AGENT_OUTPUT}")
            open_window = shlex.join(tmux.new_window_argv(session, "agent", window_argv))
            close_setup = shlex.join(["tmux", "-L", tmux.SOCKET_NAME, "kill-window", "-t", f"={session}:setup"])
            self.open_session(name, f"{open_window} || exit\n{close_setup} 2>/dev/null; :")


def _exit_code_and_output(result: CommandResult) -> tuple[int, str]:
    """Return exit code and output of a command that ran as a `Provisioner._logged_line`."""
    text, _, code = result.out.decode(errors="replace").rpartition("exit code ")
    return int(code), text.strip()


def _decode_answer(answer_type: type[Answer], code: int, output: str) -> Answer:
    """Return the answer of `cluster.machines.probe`, its last line. Raises `SetupFailed` when it cannot be used."""
    last_line = (output.splitlines() or ["no output"])[-1]
    if code:
        raise SetupFailed(last_line)
    try:
        return decode_json(answer_type, last_line.encode())
    except DamagedRecord as error:
        damage = f"{type(error).__name__}: {untrusted.one_line(str(error))}"
        raise SetupFailed(f"its answer to the checks is damaged ({damage})") from None
