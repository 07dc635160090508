"""A sandbox for a test: a folder with a home and a tmux server of its own, in which it runs the installed command.

What a test starts there carries the sandbox's TMUX_TMPDIR in its environment, so that every process of the sandbox is
found, whatever its parent. Whatever still runs when the sandbox is closed fails the test.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.jobs.job import Job
from train.tools.process import start_process

from .command_server import QUICK_START, can_fork, command_server
from .ssh_machines import command_line, pids_with_variable, process_table, send_signal
from .waiting import DEADLINE_SECONDS, PATIENCE, WaitTimeout, wait_for

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
CLOSE_SECONDS = 60.0  # for processes to end after their tmux server: a supervisor may be writing the report

# Variables of the shell that runs the tests; a user's shell need not have them.
UNINHERITED_VARIABLES = ("IMGNET_RUNS", "XDG_CONFIG_HOME", "TMUX", "PYTHONPATH", "PYTHONUNBUFFERED")

ENDLESS = 4000  # epochs: more than any test waits for. Such jobs train slowly and leave the processors to others
ENDLESS_PACE = (0, 0.2)  # see `write_slow_loss`: ten times what a step computes

RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name={name!r},
    data=Data(name="drawn", root={data!r}, train=60, val=20),
    model=Model(name="resnet10_tiny"),
    optim=Optim(nesterov=True{loss}),
    machines=1,
    gpus={gpus},
    phases=[Phase(epochs=(0, {epochs}), size=32, batch={batch}, lr={lr})],
)
"""

# With this loss a job is slow until the test is through with it, so that it cannot end before.
SLOW_LOSS = """\
import time
from pathlib import Path

from torch.nn import functional

PACE = Path({pace!r})
calls = 0


def pause():
    try:
        fast_calls, seconds = PACE.read_text().split()
    except (FileNotFoundError, ValueError):
        return 0.0
    return float(seconds) if calls > int(fast_calls) else 0.0


def cross_entropy(scores, labels):
    global calls
    calls += 1
    start = time.monotonic()
    while time.monotonic() < start + pause():
        time.sleep(0.01)
    return functional.cross_entropy(scores, labels, reduction="none")
"""


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str


class Sandbox:
    """A folder to work in, with a home and a tmux server that no other test shares. `data` is a data set of images."""

    wait_for = staticmethod(wait_for)
    command = COMMAND

    def __init__(self, path: Path, data: Path) -> None:
        self.path = path
        self.data = data
        self.tmux_folder = tempfile.mkdtemp(prefix="imgt-", dir="/tmp")  # a socket's path has 107 characters at most
        (path / "home").mkdir(parents=True)
        self.env = {
            **{name: value for name, value in os.environ.items() if name not in UNINHERITED_VARIABLES},
            "TMUX_TMPDIR": self.tmux_folder,
            "HOME": str(path / "home"),
            "OMP_WAIT_POLICY": "PASSIVE",
            "AWS_ENDPOINT_URL": "http://127.0.0.1:9",  # the discard port: no request reaches AWS
            "AWS_EC2_METADATA_DISABLED": "true",
            "IMGNET_NO_REPORT": "1",  # a report takes seconds
            "TERM": "xterm",
            "PYTHONPATH": QUICK_START,
        }
        self.started: list[subprocess.Popen[bytes]] = []

    # --- commands --------------------------------------------------------------------------------------------------

    def cli(
        self,
        *arguments: Any,
        timeout: float = DEADLINE_SECONDS,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> CommandResult:
        """Run a command to its end. `env` is added to the sandbox's environment."""
        environment = {**self.env, **(env or {})}
        timeout *= PATIENCE
        if can_fork(environment):
            words = [*map(str, arguments)]
            return CommandResult(*command_server().run(words, cwd or self.path, environment, timeout))
        argv, place = [COMMAND, *map(str, arguments)], cwd or self.path
        completed = subprocess.run(
            argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout, cwd=place, env=environment
        )
        return CommandResult(completed.returncode, completed.stdout, completed.stderr)

    def start(self, *arguments: Any, cwd: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start the installed command in a process group of its own. `output` returns what it prints."""
        output, foreign = self.path / f"output-{len(self.started)}", os.environ.keys() - self.env.keys()
        argv = [COMMAND, *map(str, arguments)]
        self.started.append(start_process(argv, output, self.env, folder=cwd or self.path, without=foreign))
        return self.started[-1]

    def output(self, index: int = 0) -> str:
        """Return what the command that was started at this position has printed so far, stdout and stderr together."""
        return (self.path / f"output-{index}").read_text()

    def tmux(self, *arguments: str) -> str:
        return subprocess.run(
            ["tmux", "-L", "imgnet", *arguments], capture_output=True, text=True, env=self.env, timeout=20
        ).stdout

    # --- jobs ------------------------------------------------------------------------------------------------------

    def write_slow_loss(self, folder: Path, fast_calls: int, seconds: float) -> str:
        """Write the loss `slow_loss:cross_entropy` into a folder, and return this name of it.

        Each process calls it `fast_calls` times at full speed; then each call takes `seconds` longer, until
        `train_fast`. A step is one call, with `--exact` one for each process of the whole job that it stands for.
        """
        pace = self.path / "pace"
        pace.write_text(f"{fast_calls} {seconds}")
        folder.mkdir(exist_ok=True)
        (folder / "slow_loss.py").write_text(SLOW_LOSS.format(pace=str(pace)))
        return "slow_loss:cross_entropy"

    def train_fast(self) -> None:
        (self.path / "pace").unlink()

    def write_recipe(
        self,
        epochs: int = 2,
        name: str = "tiny",
        lr: Any = 0.05,
        pace: tuple[int, float] | None = None,
        gpus: int = 1,
        batch: int = 8,
    ) -> str:
        """Write a recipe file and return its path. An epoch has 8 steps, 4 of two processes, and takes about 0.2 s.

        With a `pace`, trainers are slow as `write_slow_loss` says.
        """
        pace = ENDLESS_PACE if epochs == ENDLESS and pace is None else pace
        # The project is a folder of its own: one that contains the home folder is not copied.
        folder = self.path / "project" if pace else self.path
        loss = f', loss="{self.write_slow_loss(folder, *pace)}"' if pace else ""
        path = folder / f"{name}_{epochs}.py"
        values = {"name": name, "epochs": epochs, "data": str(self.data), "lr": lr, "loss": loss}
        path.write_text(RECIPE.format(**values, gpus=gpus, batch=batch))
        return str(path)

    def launch(self, epochs: int, *options: str, pace: tuple[int, float] | None = None) -> Job:
        result = self.cli("launch", "--local", "-d", *options, self.write_recipe(epochs, pace=pace))
        assert result.code == 0, result
        return self.job(int(result.out.split(" launched")[0].rsplit("job-", 1)[1]))

    def job(self, number: int = 1) -> Job:
        return Job(self.path / "runs" / f"job-{number}")

    def wait_for_step(self, job: Job, step: int = 8) -> None:
        """Wait until a job has trained `step` steps and still trains. Fails at once when it has ended."""

        def has_trained() -> bool:
            status = job.status()
            assert not job.has_ended, status
            return (status.step or 0) >= step and status.doing in ("training", "validating")

        wait_for(has_trained, describe=job.status)

    # --- processes -------------------------------------------------------------------------------------------------

    def pids(self, *words: str) -> list[int]:
        """Return the living processes of the sandbox whose command line contains all `words`.

        A zombie is not among them, for it has no environment.
        """
        return sorted(self._command_lines(*words))

    def program_pids(self, *words: str) -> list[int]:
        """Return the processes of `pids` without forks that have not become another program yet.

        Between fork and exec a process has its parent's command line, and would be counted as a second one.
        """
        lines = self._command_lines(*words)
        parents = {pid: parent for pid, (parent, *_) in process_table().items()}
        return sorted(pid for pid, line in lines.items() if lines.get(parents.get(pid, 0)) != line)

    def _command_lines(self, *words: str) -> dict[int, str]:
        pids = pids_with_variable("TMUX_TMPDIR", self.tmux_folder, process_table())
        lines = {pid: f"{line} " for pid in pids if (line := command_line(pid))}
        if words and "tmux" not in words:  # the tmux server's own command line contains that of the first session
            lines = {pid: line for pid, line in lines.items() if "tmux -Limgnet" not in line}
        return {pid: line for pid, line in lines.items() if all(word in line for word in words)}

    def parent_pid(self, pid: int) -> int:
        return process_table()[pid][0]

    def agent_pid(self) -> int:
        (pid,) = self.program_pids("-m cluster.agent")
        return pid

    def trainer_pids(self) -> list[int]:
        """Return the trainers.

        They are children of agents. Loader workers have the same command line, but are children of trainers.
        """
        agent_pids, table = self.program_pids("-m cluster.agent"), process_table()
        return [pid for pid in self.pids("-m train ") if pid in table and table[pid][0] in agent_pids]

    def job_pids(self) -> list[int]:
        """Return the processes of all jobs: agents, trainers, workers, supervisors, windows; not the tmux server."""
        return sorted({*self.pids()} - {*self.pids("tmux")})

    def close(self) -> list[str]:
        """Kill the tmux server, the agents and the started commands.

        Then kill what outlives these, and return its command lines.
        """
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        send_signal(self.program_pids("-m cluster.agent"), signal.SIGKILL)
        subprocess.run(["tmux", "-L", "imgnet", "kill-server"], capture_output=True, env=self.env, timeout=120)
        with contextlib.suppress(WaitTimeout):
            wait_for(lambda: not self.pids(), CLOSE_SECONDS)
        leftovers = self._command_lines()
        send_signal([*leftovers], signal.SIGKILL)
        shutil.rmtree(self.tmux_folder, ignore_errors=True)
        return list(leftovers.values())


class FinishedSandbox(Sandbox):
    """A sandbox whose only job has ended, and what was seen of it while it ran."""

    launch_exit_code: int
    tmux_windows: set[str]
    pids_at_end: list[int]

    def run_job(self, *options: str) -> None:
        """Launch a job, follow it to its end, and note which tmux windows it had and what still ran at its end."""
        self.tmux_windows = set()
        for name in ("IMGNET_NO_REPORT", "PYTHONPATH"):
            del self.env[name]
        launch = self.start("launch", "--local", *options)
        while launch.poll() is None:
            self.tmux_windows |= set(self.tmux("list-windows", "-F", "#W").split())
            time.sleep(0.05)
        self.launch_exit_code = launch.returncode
        self.pids_at_end = self.job_pids()
