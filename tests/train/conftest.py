"""Fixtures of the trainer's tests: a tiny data set, a tiny recipe, whole runs as processes, groups of forked ranks."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_server import CommandServer, ForkedCommand
from support.forked_ranks import in_group
from support.ssh_machines import command_line, process_table, send_signal
from support.waiting import DEADLINE_SECONDS, PATIENCE, wait_for

from train.data.decode import decode_image, encode_jpeg
from train.data.packing.pack import shrink_to_short_side
from train.data.packing.synthetic import draw_sample_set
from train.recipe import Data, Model, Optim, Phase, Recipe
from train.tools import files, text_files
from train.tools import process as tools_process

__all__ = ["in_group"]

REPO = Path(__file__).resolve().parents[2]
TRAIN_IMAGES, VAL_IMAGES = 50, 20


def tiny_recipe(**changes: Any) -> Recipe:
    """Return a recipe of four epochs in three phases for 2 GPUs, with changes.

    50 images in batches of 8 per GPU leave 2 images for the last step of an epoch: one chunk for two ranks.
    """
    values: dict[str, Any] = {
        "name": "tiny",
        "data": Data(name="sample", root="nowhere", train=TRAIN_IMAGES, val=VAL_IMAGES),
        "model": Model(name="resnet10_tiny"),
        "optim": Optim(nesterov=True, bias_decay=False, label_smoothing=0.1),
        "gpus": 2,
        "phases": [
            Phase(epochs=(0, 2), size=32, batch=8, lr=(0.01, 0.02), min_scale=0.35),
            Phase(epochs=(2, 3), size=32, batch=16, lr=0.02, min_scale=0.35),
            Phase(epochs=(3, 4), size=64, batch=8, lr=(0.02, 0.0), min_scale=0.5, rect_val=True),
        ],
    }
    return Recipe(**{**values, **changes})


class Runs:
    """Starts training runs and ends whatever is left of them.

    Trainers are forked from one process that has imported torch, or started as `python -m train`. The output of a run
    with the folder `out` is appended to the file <out>.log beside it.
    """

    def __init__(self, data: Path, folder: Path) -> None:
        self.data = data
        self.folder = folder
        self.started: list[tuple[Any, Path]] = []  # processes, with the folder of their run
        job_variables = ("RANK", "WORLD_SIZE", "IMGNET_WORK")
        inherited = {name: value for name, value in os.environ.items() if name not in job_variables}
        # Spinning OpenMP threads would starve everything else that runs here.
        self.environment = {**inherited, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(REPO)}
        self.server = CommandServer("torch._dynamo", "train.engine.run", environment=self.environment)

    def recipe(self, recipe: Recipe) -> Path:
        """Write a recipe as a JSON file and return its path. Atomic, because another run may be reading the file."""
        path = self.folder / f"{recipe.name}.json"
        files.write_atomic(path, text_files.to_json_bytes(recipe.to_json()))
        return path

    def words(self, out: Path, options: tuple[str, ...], recipe: Path | None) -> list[str]:
        """Return the trainer's arguments; without --data the tiny data set, without a recipe the tiny one."""
        data = [] if "--data" in options else ["--data", str(self.data)]
        return [str(recipe or self.recipe(tiny_recipe())), *data, "--out", str(out), *options]

    def start(
        self, out: Path, *options: str, recipe: Path | None = None, environment: dict[str, str] | None = None
    ) -> ForkedCommand:
        words, variables = self.words(out, options, recipe), {**self.environment, **(environment or {})}
        with self.log(out).open("ab") as log, Path(os.devnull).open() as nothing:
            streams = (nothing.fileno(), log.fileno(), log.fileno())
            process = self.server.start(words, self.folder, variables, streams, "train")
        self.started.append((process, out))
        return process

    def run_module(self, module: str, *argv: str) -> tuple[int, str, str]:
        """Fork `python -m MODULE` and wait for its end. Returns its exit code, what it printed, and its errors."""
        return self.server.run(argv, self.folder, self.environment, DEADLINE_SECONDS * PATIENCE, module)

    @staticmethod
    def ranks(world: int) -> list[dict[str, str]]:
        return tools_process.rank_environments(world, 0, world, "127.0.0.1", tools_process.free_port())

    def start_ranks(self, world: int, out: Path, *options: str, **start_arguments: Any) -> list[ForkedCommand]:
        """Fork all ranks of one run, as the agent does; a world of one without the variables of a rank."""
        variables_by_rank = self.ranks(world) if world > 1 else [{}]
        return [self.start(out, *options, environment=variables, **start_arguments) for variables in variables_by_rank]

    def start_afresh(
        self, out: Path, *options: str, launcher: tuple[str, ...] = ("train",)
    ) -> "subprocess.Popen[bytes]":
        """Start `python -m train`, or `python -m <launcher> -m train`, as a user does."""
        argv = [sys.executable, "-m", *launcher, *self.words(out, options, None)]
        foreign = os.environ.keys() - self.environment.keys()
        process = tools_process.start_process(
            argv, self.log(out), self.environment, folder=self.folder, without=foreign
        )
        self.started.append((process, out))
        return process

    def log(self, out: Path) -> Path:
        return out.with_name(out.name + ".log")

    def said(self, out: Path) -> str:
        return self.log(out).read_text(errors="replace") if self.log(out).exists() else ""

    def end(self, out: Path, *processes: Any, code: int | None = 0) -> str:
        """Wait for the end of a run, check its exit code (None: any but 0), and return its output.

        When one process fails, the others are killed, as the agent does.
        """

        def is_over() -> bool:
            exit_codes = [process.poll() for process in processes]
            return None not in exit_codes or any(exit_codes)

        wait_for(is_over)
        exit_code = next((process.returncode for process in processes if process.returncode), 0)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(DEADLINE_SECONDS)
        is_expected = exit_code == code if code is not None else exit_code != 0
        assert is_expected, f"exit code {exit_code}:\n{self.said(out)[-4000:]}"
        return self.said(out)

    def run(self, out: Path, *options: str, code: int | None = 0, world: int = 1, **start_arguments: Any) -> str:
        """Fork a run of `world` ranks, wait for its end and return its output."""
        return self.end(out, *self.start_ranks(world, out, *options, **start_arguments), code=code)

    def kill_when(
        self, out: Path, ready: Callable[[], object], *options: str, world: int = 1, **start_arguments: Any
    ) -> None:
        """Start a run, and kill all its processes at the same moment with SIGKILL as soon as a condition holds."""
        processes = self.start_ranks(world, out, *options, **start_arguments)

        def is_ready() -> object:
            exit_codes = [process.poll() for process in processes]
            assert exit_codes == [None] * world, f"ended too early, {exit_codes}:\n{self.said(out)[-4000:]}"
            return ready()

        wait_for(is_ready, poll_seconds=0.001)  # a state such as a half-written file does not last
        for process in processes:
            process.send_signal(signal.SIGKILL)
        assert [process.wait() for process in processes] == [-signal.SIGKILL] * world
        self.gone(out)

    def alive(self, out: Path) -> list[int]:
        """Return the living processes of a run: those that name its folder, and those of the sessions forked for it."""
        sessions = {process.pid for process, folder in self.started if folder == out}
        pids = []
        for pid in process_table():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) in sessions or str(out) in command_line(pid).split(" "):
                    pids.append(pid)
        return pids

    def gone(self, out: Path) -> None:
        wait_for(lambda: not self.alive(out))

    def clean(self) -> None:
        """Kill all that is left, and the process that forks."""
        try:
            for out in {out for _, out in self.started}:
                send_signal(self.alive(out), signal.SIGKILL)
            for process, _ in self.started:
                process.wait(120)
        finally:
            self.server.close()


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty module of the user, importable as `mine`. Tests set functions on it, named "mine:..." in recipes."""
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic set of 50 and 20 images, small enough to be read at once. Shared: copy it before changing it."""
    root = tmp_path_factory.mktemp("tiny") / "80"
    draw_sample_set(root, train=TRAIN_IMAGES, val=VAL_IMAGES)
    for path in root.rglob("*.JPEG"):
        path.write_bytes(encode_jpeg(shrink_to_short_side(decode_image(path.read_bytes()), 80), 90))
    return root


@pytest.fixture(scope="session")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Whole training runs; none of their processes outlives the session."""
    runs = Runs(tiny_data, tmp_path_factory.mktemp("runs"))
    try:
        yield runs
    finally:
        runs.clean()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Recipe]:
    """`tiny_recipe`: a tiny recipe, with changes."""
    return tiny_recipe


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A clock in place of time.perf_counter that moves only when a test sets `now`, in seconds."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock
