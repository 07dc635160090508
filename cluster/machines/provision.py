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
from cluster.connectors.ssh import Remote
from cluster.errors import SetupFailed
from cluster.state.run_folder import stop_reason
from cluster.state.spec import Spec
from train.distributed.network import slow_pairs

from . import checks, code_archive, python_env, requirements
from .setup_progress import Board, Timed

ENVIRONMENT_SECONDS = 1800.0  # a torch for GPUs is 3 GB to download
PROBE_SECONDS = 90.0
NETWORK_SECONDS = 120.0
STOP_SECONDS = 0.5  # to hear that the job is to stop
WANT_GB = 2.0
MANY = 16  # machines: beyond that a pair gets one small message, for there are thousands of pairs
FEW = ["--bytes", str(1 << 20), "--rounds", "1"]
# Words: the log, the session, and the command that makes it unless it is there.
OPEN = rf"""
log=$1 session=$2
shift 2
mkdir -p "${{log%/*}}" && : >>"$log" || exit 1
tmux -L {tmux.SOCKET} has-session -t "=$session" 2>/dev/null || "$@" || exit
"""
# Both outputs to the log that the window shows and to us, and the exit code, which a pipe would lose.
SHOWN = r'log=$1; shift; mkdir -p "${log%/*}"; { "$@" 2>&1; echo "exit code $?"; } | tee -a "$log"'


class Machines:
    """The machines of a job while they are set up: Remotes by name, and what is known of each."""

    def __init__(
        self, spec: Spec, hosts: Mapping[str, Host], remotes: Mapping[str, Remote], board: Board, stop: Path
    ) -> None:
        self.spec, self.hosts, self.remotes, self.board = spec, hosts, remotes, board
        self.stop = stop  # there is one when the job is to stop

    # --- one machine -------------------------------------------------------------------------------------------------

    def prepare(self, name: str, packed: bytes, key: str) -> None:
        """Bring code and environment to a machine, and open the job's session there. Raises `ClusterError`."""
        remote, host, board = self.remotes[name], self.hosts[name], self.board
        with Timed(board, name, "connected"):
            home = remote.run(["sh", "-c", 'printf %s "$HOME"'], timeout=60).out.decode()
        folder = host.folder.replace("~", home, 1) if host.folder.startswith("~") else host.folder
        board.put(name, folder=folder, work=f"{folder}/jobs/{self.spec.uid}")
        with Timed(board, name, "code"):
            code, _ = code_archive.place(remote, folder, packed, key)
            board.put(name, code=code)
        with Timed(board, name, "environment"):
            self.open_session(name)
            python = host.python.replace("~", home, 1) if host.python.startswith("~/") else host.python
            words = [
                python,
                "-m",
                "cluster.machines.python_env",
                folder,
                *filter(None, [requirements.library(self.spec.recipe)]),
            ]
            index = (self.spec.cloud or {}).get("index")  # a torch for cards that the usual one has left behind
            more = {"PIP_EXTRA_INDEX_URL": index, "UV_EXTRA_INDEX_URL": index} if index else {}
            _, said = self.shown(name, words, ENVIRONMENT_SECONDS, **more)
            found = python_env.read(said.encode(), remote.name)
            board.put(name, python=found["python"])

    def open_session(self, name: str, then: str = ":") -> None:
        """Make the job's tmux session on a machine, with a window that shows the setting up, unless it is there.

        `then` is a line of sh that comes after it. All in one go: each takes three round trips.
        """
        remote, session, log = self.remotes[name], self.spec.session, f"{self.board.rows[name]['work']}/setup.log"
        words = tmux.session_words(session, "setup", ["tail", "-n", "+1", "-F", log])
        made = remote.run(["sh", "-c", f"{OPEN}{then}", "sh", log, session, *words], check=False)
        if made.code:
            why = "tmux is missing; install it: sudo apt-get install tmux" if made.code == 127 else _text(made.err)
            raise SetupFailed(f"{remote.name}: {why}")

    def shown(self, name: str, argv: Sequence[str], seconds: float, **variables: str) -> tuple[int, str]:
        """Run one of our modules on a machine, in sight of its setup window. Returns exit code and output."""
        row = self.board.rows[name]
        env = {"PYTHONPATH": row["code"], "PYTHONSAFEPATH": "1", **variables}
        words = ["sh", "-c", SHOWN, "sh", f"{row['work']}/setup.log", *argv]
        said = self.remotes[name].run(words, env=env, timeout=seconds).out.decode(errors="replace")
        text, _, code = said.rpartition("exit code ")
        return int(code), text.strip()

    # --- all machines ------------------------------------------------------------------------------------------------

    def check(self, names: Sequence[str]) -> None:
        """Look at each machine, whether all see one shared folder, and whether their clocks agree.

        What is wrong with a machine goes to the board; a warning is noted there.
        """
        answers = self._probe(names, "--want-gb", str(WANT_GB))
        gpus = max((len(one["gpus"]) for one in answers.values()), default=0)
        for name, said in answers.items():
            wanted = self.spec.procs if gpus or (self.spec.cloud or {}).get("gpus") else 0
            found = checks.judge(said, wanted, WANT_GB) + checks.clock(*said["skew"])
            if not wanted:
                found.append({"level": "warning", "what": "no GPU: training on the processors"})
            self._note(name, found, said)
        seen = self._probe([name for name in answers if name not in self.board.failed], "--expect", "all")
        for name in list(answers)[:1]:  # not each its own, as it ends: others may still be looking
            probe = f"{self.shared(name)}/probe/{self.spec.uid}"
            self.remotes[name].run(["sh", "-c", 'rm -f "$1"-*', "sh", probe])
        for one, other in checks.same_folder(seen):
            shared = self.shared(one)
            what = f"machines {one} and {other} do not see the same {shared}; mount one file system there on both"
            self.board.put(other, reason=what)

    def shared(self, name: str) -> str:
        """The folder that all machines see, as this one names it."""
        assert self.spec.hosts
        return str(self.spec.hosts["shared"] or f"{self.board.rows[name]['folder']}/shared")

    def job_folder(self, name: str) -> str:
        """The job's own part of it."""
        return f"{self.shared(name)}/{self.spec.uid}"

    def _probe(self, names: Sequence[str], *words: str) -> dict[str, dict[str, Any]]:
        """Ask cluster.machines.probe on all machines at once; who does not answer goes to the board."""
        more = [",".join(names) if word == "all" else word for word in words]

        def one(name: str) -> dict[str, Any]:
            with Timed(self.board, name, "checks"):
                sent = time.time()
                row = self.board.rows[name]
                argv = [
                    row["python"],
                    "-m",
                    "cluster.machines.probe",
                    "--shared",
                    self.shared(name),
                    "--work",
                    row["work"],
                ]
                code, text = self.shown(
                    name, [*argv, "--token", self.spec.uid, "--machine", name, *more], PROBE_SECONDS
                )
                if code:
                    raise SetupFailed(f"{self.remotes[name].name}: {(text or 'no words').splitlines()[-1]}")
                said: dict[str, Any] = json.loads(text.splitlines()[-1])
                said["skew"] = checks.skew(sent, time.time(), said["time"])
                return said

        return self.each(names, one)

    def each(self, names: Sequence[str], function: Callable[[str], Any]) -> dict[str, Any]:
        """Do something for all at once. An error takes the machine out, with its reason.

        Raises `SetupFailed` as soon as the job is to stop; what has begun is left to itself.
        """
        found: dict[str, Any] = {}

        def one(name: str) -> None:
            try:
                found[name] = function(name)
            except Exception as error:
                self.board.put(name, reason=_line(error, self.remotes[name].name))

        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(STOP_SECONDS)
                if why := stop_reason(self.stop.parent):
                    raise SetupFailed(why)
        return {name: found[name] for name in names if name in found}

    def _note(self, name: str, found: Sequence[checks.Finding], said: Mapping[str, Any]) -> None:
        errors = [one["what"] for one in found if one["level"] == "error"]
        warnings = [one["what"] for one in found if one["level"] == "warning"]
        self.board.put(name, notes=warnings, gpus=[one["name"] for one in said["gpus"]])
        if errors:
            self.board.put(name, reason="; ".join(errors))

    def network(self, names: Sequence[str]) -> None:
        """Measure the network between all pairs, and an all-reduce, with the library that will train.

        A slow pair and a wrong transport are noted; machines that cannot talk to each other are named, and a card that
        this torch has no code for.
        """
        head = self.board.rows[names[0]]
        port = self.remotes[names[0]].run([head["python"], "-c", FREE_PORT]).out.decode().strip()

        def one(name: str) -> str:
            with Timed(self.board, name, "network"):
                variables = {
                    "RANK": str(names.index(name)), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(names)),
                    "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": self.board.rows[names[0]]["address"], "MASTER_PORT": port,
                }  # fmt: skip
                argv = [self.board.rows[name]["python"], "-m", "train.distributed.network_probe"]
                argv += ["--timeout", f"{NETWORK_SECONDS - 20:.0f}", *(FEW if len(names) > MANY else [])]
                code, text = self.shown(name, argv, NETWORK_SECONDS, **variables)
                if code:
                    raise SetupFailed((text or "no words").splitlines()[-1])
                return (text.splitlines() or [""])[-1]

        said = self.each(names, one)
        if names[0] not in said:
            return
        found = self.board.said["network"] = json.loads(said[names[0]])
        for name in names if found.get("warning") else []:
            self._warn(name, found["warning"])
        for slow in slow_pairs(found.get("pairs", {})):  # "0-2" by rank, or "2" for all of one machine's
            ends = [names[int(rank)] for rank in slow.split("-")]
            for name in ends:
                others = " and ".join(one for one in ends if one != name) or "all others"
                self._warn(name, f"slow network to {others}")

    def _warn(self, name: str, what: str) -> None:
        self.board.put(name, notes=[*self.board.rows[name]["notes"], what])

    def deliver(self, name: str, home: Path) -> None:
        """Write what was asked of the job, and the mark of this launch, into the shared folder, by one machine."""
        remote, folder = self.remotes[name], self.job_folder(name)
        for file in ("job.json", "recipe.json"):
            remote.write(f"{folder}/{file}", (home / file).read_bytes())
        remote.run(["rm", "-f", f"{folder}/stop"])
        remote.write(f"{folder}/launch", (home / "launch").read_bytes())

    def start(self, name: str, elapsed: float) -> None:
        """Start a machine's agent in the job's session; one that is at work lets no second in."""
        with Timed(self.board, name, "agent"):
            row, session = self.board.rows[name], self.spec.session
            argv = ["env", f"PYTHONPATH={row['code']}", "PYTHONSAFEPATH=1", row["python"], "-m", "cluster.agent"]
            argv += [self.job_folder(name), row["work"], name, "--address", row["address"]]
            log = f"{row['work']}/agent.out"  # a word that was said when no one had the terminal
            line = shlex.join([*argv, "--elapsed", f"{elapsed:.0f}"])
            words = ["sh", "-c", f"{line} 2>&1 | tee -a {shlex.quote(log)}"]
            window = shlex.join(tmux.window_words(session, "agent", words))
            close = shlex.join(["tmux", "-L", tmux.SOCKET, "kill-window", "-t", f"={session}:setup"])
            self.open_session(name, f"{window} || exit\n{close} 2>/dev/null; :")


FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


def _text(err: bytes) -> str:
    return " ".join(err.decode(errors="replace").split())


def _line(error: Exception, name: str) -> str:
    """An error in one line, without the machine's name, which stands before it anyway."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix(f"{name}: ")
