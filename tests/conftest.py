"""A place of its own for each test: folder, home, tmux server. What a job leaves running there fails the test."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
DEADLINE = 120.0  # a quiet machine needs a twentieth of it

STRANGE = ("IMGNET_RUNS", "TMUX", "PYTHONPATH", "PYTHONUNBUFFERED")  # what a user's shell need not have

RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name={name!r},
    data=Data(name="drawn", root={data!r}, train=60, val=20),
    model=Model(name="resnet10_tiny"),
    optim=Optim(nesterov=True),
    machines=1,
    gpus=1,
    phases=[Phase(epochs=(0, {epochs}), size=32, batch=8, lr={lr})],
)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole jobs belong to the rehearsal."""
    for one in items:
        if "end_to_end" in one.path.parts:
            one.add_marker("rehearsal")


@dataclass(frozen=True)
class Ran:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


def wait_for(condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """Return what the condition gave as soon as it is true; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(
                f"not true after {seconds:g} s: {condition.__qualname__}, line {condition.__code__.co_firstlineno}"
            )
        time.sleep(0.02)
    return found


class Place:
    """A folder to work in, with a home and a tmux server that no other test shares."""

    wait_for = staticmethod(wait_for)
    command = COMMAND

    def __init__(self, path: Path, data: Path) -> None:
        self.path, self.data = path, data
        self.tmux_folder = tempfile.mkdtemp(prefix="imgt-", dir="/tmp")  # a socket's path has 107 characters at most
        (path / "home").mkdir(parents=True)
        kept = {name: text for name, text in os.environ.items() if name not in STRANGE}
        own = {"TMUX_TMPDIR": self.tmux_folder, "HOME": str(path / "home"), "OMP_WAIT_POLICY": "PASSIVE"}
        own |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_EC2_METADATA_DISABLED": "true"}  # nothing reaches AWS
        self.env = {**kept, **own, "TERM": "xterm"}
        self.started: list[subprocess.Popen[bytes]] = []

    # --- commands --------------------------------------------------------------------------------------------------

    def cli(
        self, *words: str, timeout: float = DEADLINE, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> Ran:
        """Run the installed command to its end."""
        done = subprocess.run(
            [COMMAND, *map(str, words)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            cwd=cwd or self.path,
            env={**self.env, **(env or {})},
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str, cwd: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start the installed command in a group of its own; its output goes to <path>/said-<n>."""
        with (self.path / f"said-{len(self.started)}").open("wb") as file:
            one = subprocess.Popen(
                [COMMAND, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=cwd or self.path,
                env=self.env,
                start_new_session=True,
            )
        self.started.append(one)
        return one

    def said(self, number: int = 0) -> str:
        """What the n-th started command has printed."""
        return (self.path / f"said-{number}").read_text()

    def tmux(self, *words: str) -> str:
        """Ask this place's tmux server."""
        return subprocess.run(
            ["tmux", "-L", "imgnet", *words], capture_output=True, text=True, env=self.env, timeout=20
        ).stdout

    # --- jobs ------------------------------------------------------------------------------------------------------

    def recipe(self, epochs: int = 2, name: str = "tiny", lr: Any = 0.05) -> str:
        """Write a recipe file: 8 steps an epoch, about 0.1 s."""
        path = self.path / f"{name}_{epochs}.py"
        path.write_text(RECIPE.format(name=name, epochs=epochs, data=str(self.data), lr=lr))
        return str(path)

    def launch(self, epochs: int, *options: str) -> Any:
        """Launch a job without following it, and return it; its agent has spoken."""
        ran = self.cli("launch", "--local", "-d", *options, self.recipe(epochs))
        assert ran.code == 0, ran
        return self.job(int(ran.out.split(" launched")[0].rsplit("job-", 1)[1]))

    def job(self, number: int = 1) -> Any:
        """The job of a number, as the Python API sees it."""
        from cluster.jobs.submit import Job

        return Job(self.path / "runs" / f"job-{number}")

    def wait_for_step(self, job: Any, step: int = 8) -> None:
        """Wait until this many steps are trained."""
        wait_for(lambda: (job.status()["step"] or 0) >= step and job.status()["doing"] in ("training", "validating"))

    # --- processes -------------------------------------------------------------------------------------------------

    def pids(self, *words: str) -> list[int]:
        """The living processes of this place whose command line has all these words; a zombie has no environment."""
        return sorted(self._lines(*words))

    def programs(self, *words: str) -> list[int]:
        """Those of `pids` that are no forks of another: one that is just about to become another program has its
        parent's command line, and was taken for a second one of them now and then.
        """
        found, forks = self._lines(*words), set()
        for pid, line in found.items():
            with contextlib.suppress(OSError):  # it is gone
                if found.get(self.parent(pid)) == line:
                    forks.add(pid)
        return sorted(found.keys() - forks)

    def _lines(self, *words: str) -> dict[int, str]:
        mark, found = f"TMUX_TMPDIR={self.tmux_folder}".encode(), {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words and "tmux" not in words and "tmux -Limgnet" in line:
                        continue  # the server's own command line names the first session's command
                    if mark in (entry / "environ").read_bytes().split(b"\0") and all(word in line for word in words):
                        found[int(entry.name)] = line
        return found

    def parent(self, pid: int) -> int:
        """A process's parent."""
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def children(self, pid: int) -> list[int]:
        """All processes below one."""
        from train.tools.process import descendant_pids

        return descendant_pids(pid)

    def agent(self) -> int:
        """The one agent of this place."""
        (pid,) = self.programs("-m cluster.agent")
        return pid

    def trainers(self) -> list[int]:
        """The agent's children that train, without the loader workers, which are theirs."""
        agents, found = self.programs("-m cluster.agent"), []
        for pid in self.pids("-m train "):
            with contextlib.suppress(OSError):
                if self.parent(pid) in agents:
                    found.append(pid)
        return found

    def workers(self) -> list[int]:
        """The trainers' loader workers."""
        trainers, found = self.trainers(), []
        for pid in self.pids("-m train "):
            with contextlib.suppress(OSError):
                if self.parent(pid) in trainers:
                    found.append(pid)
        return found

    def at_work(self) -> list[int]:
        """Whatever of a job runs here: agents, trainers, workers, supervisors, windows. Not the tmux server."""
        return [pid for pid in self.pids() if pid not in self.pids("tmux")]

    def close(self) -> list[str]:
        """End the tmux server and what was started here. Returns the processes that outlived it."""
        for one in self.started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        subprocess.run(["tmux", "-L", "imgnet", "kill-server"], capture_output=True, env=self.env, timeout=20)
        deadline = time.monotonic() + 15
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        lines = []
        for pid in left:
            with contextlib.suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.tmux_folder, ignore_errors=True)
        return lines


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 60 and 20 drawn images in ten classes. Not to be changed."""
    from train.data.packing.synthetic import draw_sample_set

    folder = tmp_path_factory.mktemp("drawn") / "data"
    draw_sample_set(folder, train=60, val=20)
    return folder


@pytest.fixture
def place(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place of this test's own; the test itself is in it too: folder, environment."""
    one = Place(tmp_path / "place", images)
    monkeypatch.chdir(one.path)
    for name in ("IMGNET_RUNS", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TMUX_TMPDIR", "HOME", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, one.env[name])
    yield one
    left = one.close()
    assert not left, f"still running after the tmux server had ended: {left}"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[Place]:
    """A place where job-1, of two processes, has run to its end, followed by the command. For looking, not changing."""
    one = Place(tmp_path_factory.mktemp("finished") / "place", images)
    try:
        launched = one.start("launch", "--local", "--procs", "2", "--save-seconds", "0", one.recipe(3))
        one.windows = set()  # type: ignore[attr-defined]
        while launched.poll() is None:
            one.windows |= set(one.tmux("list-windows", "-t", "=job-1", "-F", "#W").split())  # type: ignore[attr-defined]
            time.sleep(0.05)
        one.code, one.after = launched.returncode, one.at_work()  # type: ignore[attr-defined]
        yield one
    finally:
        left = one.close()
    assert not left, f"still running after the tmux server had ended: {left}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB of its own. Only root may make one; without it the test is skipped."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no disk of our own: mounting one takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
