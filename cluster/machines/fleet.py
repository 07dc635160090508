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
from cluster.connectors.log_sync import FOLLOWED
from cluster.connectors.ssh import Remote, Unreachable
from cluster.connectors.ssh_config import ssh_config
from cluster.errors import ClusterError, SetupFailed
from cluster.state import attempts
from cluster.state.locks import AGENT
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec
from train.tools.filesystem import is_json, locked, overwrite, replace

from . import code_archive
from .provision import Machines
from .setup_progress import Board

PICTURE = ("status", "attempts")  # rewritten in place, or made once
POLL_SECONDS = 2.0  # for one machine to answer, before another is asked
AWAY_SECONDS = 10.0  # until one that did not answer is asked again
ASK_SECONDS = 2.0  # between two questions to a silent machine
PATIENCE = 15.0  # with a machine that cannot be reached
SILENT_SECONDS = 3.0  # without a new word in its status
STOP_SECONDS = 30.0  # from a stop until machines that do not answer are left to hear it by themselves
RESULT = "result.json"
Answer = TypeVar("Answer")


class Fleet:
    """The machines of one job. Made in the supervisor, and by a command that acts on a machine.

    `greet` is called with a machine's name before it is set up: one that was just rented has to boot first. The job's
    time limit counts from `since` (seconds since 1970), None: from its launch.
    """

    def __init__(
        self,
        spec: Spec,
        folders: Folders,
        *,
        patience: float = PATIENCE,
        greet: Callable[[str], None] | None = None,
        since: float | None = None,
    ) -> None:
        assert spec.hosts
        self.spec, self.folders, self.patience, self.since = spec, folders, patience, since
        self.greet = greet or (lambda name: None)
        self.hosts = dict(zip(spec.names, Hosts.from_json(spec.hosts).machines, strict=False))
        self.remotes = {name: self._remote(name) for name in self.hosts}
        self.board = Board(folders.run / "machines.json")
        self.machines = Machines(spec, self.hosts, self.remotes, self.board, folders.shared / "stop")
        self.pool = ThreadPoolExecutor(max_workers=2 * len(self.hosts) + 4)
        self.away: dict[str, float] = {}  # who did not answer, and when
        self.last = ""  # who answered last
        self.have: dict[str, int] = {}  # sizes of the files at home, once they are known
        self.texts: dict[str, tuple[bytes, float]] = {}  # each status as it was last seen to change, and when
        self.known: dict[str, bool] = {}  # whether an agent is at work, as the machine itself said last
        self.asked: dict[str, float] = {}
        self.asking: dict[str, Future[bool]] = {}
        self.away_since: dict[str, float] = {}  # who could not be asked
        self.starting: dict[str, Future[None]] = {}
        self.stopped = False

    def _remote(self, name: str) -> Remote:
        host = self.hosts[name]
        return Remote(host, f"machine {name} ({host.host})", self.patience)

    def move(self, name: str, host: Host) -> None:
        """From now on another machine has this name, or the same another key."""
        self.hosts[name] = host
        before, self.remotes[name] = self.remotes[name], self._remote(name)
        threading.Thread(target=before.close, daemon=True).start()  # it may hang
        self.board.put(name, host=host.host, reason="")
        ssh_config(Hosts(None, tuple(self.hosts.values())), self.folders.run / "ssh_config")

    # --- setting up --------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Set all machines up for the launch that the run folder asks for, unless that is done. Raises `SetupFailed`.

        Spares may fail; machines that are wanted may not, and are named.
        """
        mark = self.folders.mark
        if self.board.said["launch"] == mark and self.board.said.get("ready"):
            return
        self.board.begin(mark, {name: host.host for name, host in self.hosts.items()})
        hosts = Hosts.from_json(self.spec.hosts or {})
        config = self.pool.submit(ssh_config, hosts, self.folders.run / "ssh_config")  # asks ssh for each machine
        self.packed = code_archive.pack()
        self._all(self._prepare)
        if self.board.said.pop("adopted", False):  # its agents are at work; who does not answer may be, too
            for name in self.board.failed:
                self.board.put(name, reason="")
            return self.board.finish()
        self._enough()
        config.result()
        self.machines.check(self._usable())
        self._enough()
        gpus = any(self.board.rows[name].get("gpus") for name in self._usable())
        if self.spec.probe and (len(self._usable()) > 1 or gpus):
            self.machines.network(self._usable())
            self._enough()
        self.machines.deliver(self._usable()[0], self.folders.shared)
        self._all(lambda name: self.machines.start(name, self.elapsed))
        self._enough()
        self.board.finish()

    def _prepare(self, name: str) -> None:
        self.greet(name)
        self.board.put(name, address=self.hosts[name].address or self.remotes[name].route.host)
        self.machines.prepare(name, *self.packed)

    def _usable(self) -> list[str]:
        return [name for name in self.hosts if name not in self.board.failed]

    def _all(self, function: Callable[[str], None]) -> None:
        self.machines.each(self._usable(), function)

    def _enough(self) -> None:
        if len(self._usable()) < self.spec.machines:
            raise SetupFailed("; ".join(f"{self.remotes[one].name}: {why}" for one, why in self.board.failed.items()))

    # --- home --------------------------------------------------------------------------------------------------------

    def bring(self) -> None:
        """Bring home what is new. Raises `Unreachable` when no machine answers, `OSError`: the disk here is full."""
        have = self.have or self._sizes()
        found, result = self._ask_any(lambda name: self._changes(name, have))
        self.have = {}  # until all has been written: a full disk takes a part
        home, now = self.folders.shared, time.monotonic()
        with locked(self.folders.run / ".home.lock"):
            for path, data in found.items():
                kind = PurePosixPath(path).parts[0]
                if kind in FOLLOWED:
                    have[path] = _append(self.folders.run / path, data)
                elif kind == "attempts":
                    replace(_folder(home / path), data, durable=False)
                    have[path] = len(data)
                elif is_json(data) and data != self.texts.get(path, (b"", 0.0))[0]:
                    overwrite(_folder(home / path), data)  # as its machine does; a rename takes ten times as long
                    self.texts[path] = data, now
            if result and is_json(result):
                replace(home / RESULT, result, durable=False)
        self.have = have

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of the files at home that only grow, or are made once: from there on they are brought."""
        run, home = self.folders.run, self.folders.shared
        files = [path for folder in FOLLOWED for path in (run / folder).rglob("*") if path.is_file()]
        have = {str(path.relative_to(run)): path.stat().st_size for path in files}
        return have | {f"attempts/{path.name}": path.stat().st_size for path in (home / "attempts").glob("*.json")}

    def _changes(self, name: str, have: Mapping[str, int]) -> tuple[dict[str, bytes], bytes]:
        remote, shared = self.remotes[name], self.machines.job_folder(name)
        found = remote.changes(shared, (*FOLLOWED, *PICTURE), have)
        done = any(b'"done"' in data for path, data in found.items() if path.startswith("status/"))
        return found, remote.read_from(f"{shared}/{RESULT}", 0) if done else b""

    def _ask_any(self, question: Callable[[str], Answer]) -> Answer:
        """Ask one machine after the other by name, the last that answered first, and wait for none of them for long."""
        last: ClusterError | None = None
        now = time.monotonic()

        def place(name: str) -> tuple[bool, bool, int]:
            return name != self.last, now - self.away.get(name, -1e9) < AWAY_SECONDS, int(name)

        for name in sorted(self.hosts, key=place):
            try:
                answer = self.pool.submit(question, name).result(POLL_SECONDS)
                self.last = name
                return answer
            except Late:
                last = Unreachable(f"{self.remotes[name].name}: does not answer")
            except ClusterError as error:
                last = error
            self.last, self.away[name] = "", time.monotonic()
        raise last or Unreachable("no machines")

    def push(self) -> None:
        """Bring a request to stop from the run folder to the machines."""
        stop = self.folders.shared / "stop"
        if stop.exists() and not self.stopped:
            content = stop.read_bytes()
            self._ask_any(lambda name: self.remotes[name].write(f"{self.machines.job_folder(name)}/stop", content))
            self.stopped = True

    # --- who is alive ------------------------------------------------------------------------------------------------

    def alive(self) -> bool:
        """Whether any agent is or may be at work: False only when every machine has said that it has none.

        Once the job is decided, machines that cannot be reached are not waited for.
        """
        self._look()
        working = [name for name in self._asked_for() if self.known.get(name, True)]
        if self.over():  # the others have said all there is; who is away will find that out
            working = [name for name in working if name not in self.away_since]
        return bool(self.starting and not self.over()) or bool(working)

    def over(self) -> bool:
        """Whether the job is decided: a result, an end that its agents agreed on, or a stop of a while ago: that was
        asked for, or that a machine has reached by its limit.
        """
        home, stop = self.folders.shared, self.folders.shared / "stop"
        stopped = stop.exists() and time.time() - stop.stat().st_mtime > STOP_SECONDS
        return attempts.decided(home, self.folders.mark) or stopped or self._stopped_itself()

    def _stopped_itself(self) -> bool:
        long_ago, mark = time.monotonic() - STOP_SECONDS, self.folders.mark
        words = [json.loads(text) for text, seen in self.texts.values() if seen < long_ago and b'"stopped"' in text]
        return any(one.get("ended") and (one["state"], one.get("launch")) == ("stopped", mark) for one in words)

    def dead(self) -> list[str]:
        """Return the machines that have said that no agent is at work there."""
        self._look()
        return [name for name in self._asked_for() if not self.known.get(name, True) and name not in self.starting]

    def _asked_for(self) -> list[str]:
        return [name for name in self.hosts if name not in self.board.failed]

    def _look(self) -> None:
        """Ask those machines whose status stands still; answers come when they come."""
        now = time.monotonic()
        for name in [one for one, future in self.starting.items() if future.done()]:
            future = self.starting.pop(name)
            if future.exception():
                print(f"{time.strftime('%H:%M:%S')} {future.exception()}", flush=True)
            self.known.pop(name, None)
        for name in [one for one, asking in self.asking.items() if asking.done()]:
            asking = self.asking.pop(name)
            if asking.exception():
                self.away_since.setdefault(name, now)
            else:
                self.known[name] = asking.result()
                self.away_since.pop(name, None)
        for name in self.hosts:
            text, seen = self.texts.get(f"status/{name}.json", (b"", 0.0))
            if now - seen < SILENT_SECONDS and b'"ended": true' not in text:
                self.known[name] = True
                self.away_since.pop(name, None)
            elif name not in self.asking and now - self.asked.get(name, 0.0) > ASK_SECONDS:
                self.asked[name] = now
                self.asking[name] = self.pool.submit(self._has_agent, name)

    def _has_agent(self, name: str) -> bool:
        """Ask a machine whether an agent holds the lock of its work folder. Raises `ClusterError`, `Unreachable`."""
        lock = f"{self.board.rows[name]['work']}/{AGENT}"
        words = ["sh", "-c", 'test -e "$1" && ! flock -n -s "$1" true', "sh", lock]
        return self.remotes[name].run(words, check=False, timeout=10).code == 0

    def replace(self, name: str) -> None:
        """Set a machine up again, in the background, and start its agent."""
        if name not in self.starting:
            self.starting[name] = self.pool.submit(self._again, name)

    @property
    def elapsed(self) -> float:
        """Seconds of the job's time limit that are over."""
        return max(0.0, time.time() - (self.since or self.folders.launch.stat().st_mtime))

    def _again(self, name: str) -> None:
        self.packed = code_archive.pack()
        self._prepare(name)
        self.machines.start(name, self.elapsed)

    def lose(self, name: str, notice: float | None) -> None:
        """Kill a machine's agent with all that it started, or leave it a notice. Raises `ClusterError`."""
        row, remote = self.board.rows[name], self.remotes[name]
        if not self._has_agent(name):
            raise ClusterError(f"{remote.name} has no agent at work; imgnet-cluster status {self.spec.name}")
        if notice is not None:
            content = json.dumps({"reason": "a rehearsal took it away", "seconds": notice})
            remote.write(f"{row['work']}/notice", content.encode())
            return
        said = json.loads((self.folders.shared / "status" / f"{name}.json").read_text())
        remote.run(["sh", "-c", 'grep -qs cluster.agent "/proc/$1/cmdline" && kill -9 "$1"', "sh", str(said["pid"])])

    # --- the end -----------------------------------------------------------------------------------------------------

    def terminate(self) -> list[str]:
        """End the job's session on every machine that answers. Returns the names of those that do not."""

        def end(name: str) -> None:
            words = ["tmux", "-L", tmux.SOCKET, "kill-session", "-t", f"={self.spec.session}"]
            self.remotes[name].run(words, check=False, timeout=10)

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
        threads = [threading.Thread(target=remote.close, daemon=True) for remote in self.remotes.values()]
        for one in threads:
            one.start()
        for one in threads:
            one.join(1.0)


def _append(path: Path, data: bytes) -> int:
    """Returns how long the file is then."""
    with _folder(path).open("ab") as file:
        file.write(data)
        return file.tell()


def _folder(path: Path) -> Path:
    """The path, whose folder is there now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
