"""What the trainer's tests share: a tiny drawn set, a tiny recipe, whole runs as processes, groups of forked ranks."""

import contextlib
import json
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
from support.forked_ranks import in_group

from train.data.decode import decode_image, encode_jpeg
from train.data.packing.pack import shrink_to_short_side
from train.data.packing.synthetic import draw_sample_set
from train.recipe import Data, Model, Optim, Phase, Recipe
from train.tools import filesystem
from train.tools import process as tools_process

__all__ = ["in_group"]

REPO = Path(__file__).resolve().parents[2]
IMAGES, VAL = 50, 20
DEADLINE = 120.0


def tiny_recipe(**changes: Any) -> Recipe:
    """Four epochs in three phases; 50 images on 2 GPUs of 8 leave a last step of 2 images, one chunk for two ranks."""
    values: dict[str, Any] = {
        "name": "tiny",
        "data": Data(name="sample", root="nowhere", train=IMAGES, val=VAL),
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


def wait_for(condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """Return what the condition gave as soon as it is true; fail at the deadline."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not true after {seconds:g} s: {condition}"
        time.sleep(0.001)
    return found


def session_of(pid: str) -> int:
    """A process's session; 0 for a zombie, which is as good as gone."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 0 if state == "Z" else int(fields[2])


class Forked:
    """A trainer forked by warm_start.py: what of `Popen` the tests use."""

    def __init__(self, ask: Callable[..., Any], *how: Any) -> None:
        self.ask, self.returncode = ask, None
        self.pid: int = ask("start", *how)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float = DEADLINE) -> int:
        wait_for(lambda: self.poll() is not None, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Runs:
    """Starts trainers, forked from one warm process or as `python -m train`, and ends whatever is left of them."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.folder = data, folder
        self.started: list[tuple[Any, Path]] = []
        script = REPO / "tests/support/warm_start.py"
        clean = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "IMGNET_WORK")}
        passive = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin starve whatever else runs here
        self.environment = {**clean, **passive, "PYTHONPATH": str(REPO)}
        self.server = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
            env=self.environment,
        )

    def ask(self, *order: Any) -> Any:
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(json.dumps(order) + "\n")
        return json.loads(self.server.stdout.readline())

    def recipe(self, recipe: Recipe) -> Path:
        path = self.folder / f"{recipe.name}.json"
        filesystem.write_atomic(path, filesystem.to_json_bytes(recipe.to_json()))  # others may be reading it
        return path

    def words(self, out: Path, argv: tuple[str, ...], recipe: Path | None) -> list[str]:
        """The trainer's command line."""
        data = [] if "--data" in argv else ["--data", str(self.data)]
        return [str(recipe or self.recipe(tiny_recipe())), *data, "--out", str(out), *argv]

    def start(
        self, out: Path, *argv: str, recipe: Path | None = None, environment: dict[str, str] | None = None
    ) -> Forked:
        """Fork one run; its output is appended to <out>.log."""
        words = self.words(out, argv, recipe)
        process = Forked(self.ask, words, environment or {}, str(self.folder), str(self.log(out)))
        self.started.append((process, out))
        return process

    def start_ranks(self, world: int, out: Path, *argv: str, **how: Any) -> list[Forked]:
        """Fork the processes of one run, as an agent starts them."""
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(tools_process.free_port())}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        return [self.start(out, *argv, environment={**place, **rank}, **how) for rank in ranks]

    def start_afresh(self, out: Path, *argv: str, launcher: tuple[str, ...] = ("train",)) -> "subprocess.Popen[bytes]":
        """Start `python -m train` or `python -m <launcher> -m train`, as a person does."""
        with self.log(out).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *launcher, *self.words(out, argv, None)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                env=self.environment,
            )
        self.started.append((process, out))
        return process

    def log(self, out: Path) -> Path:
        return out.with_name(out.name + ".log")

    def said(self, out: Path) -> str:
        return self.log(out).read_text(errors="replace") if self.log(out).exists() else ""

    def end(self, out: Path, *processes: Any, code: int | None = 0) -> str:
        """Wait for the end of a run, check its exit code (None: any but 0) and return what it said.

        When one process fails the others are killed, as an agent does.
        """
        wait_for(lambda: None not in [one.poll() for one in processes] or any(one.poll() for one in processes))
        got = next((one.returncode for one in processes if one.returncode), 0)
        for one in processes:
            if one.poll() is None:
                one.send_signal(signal.SIGKILL)
                one.wait(DEADLINE)
        assert got == code if code is not None else got, f"exit code {got}:\n{self.said(out)[-4000:]}"
        return self.said(out)

    def run(self, out: Path, *argv: str, code: int | None = 0, world: int = 1, **how: Any) -> str:
        """Fork one run, wait for its end and return what it said."""
        started = self.start_ranks(world, out, *argv, **how) if world > 1 else [self.start(out, *argv, **how)]
        return self.end(out, *started, code=code)

    def kill_when(self, out: Path, ready: Callable[[], object], *argv: str, world: int = 1, **how: Any) -> None:
        """Start a run and kill all its processes, at once and without warning, as soon as a condition holds."""
        started = self.start_ranks(world, out, *argv, **how) if world > 1 else [self.start(out, *argv, **how)]

        def ready_now() -> object:
            codes = [one.poll() for one in started]
            assert codes == [None] * world, f"ended too early, {codes}:\n{self.said(out)[-4000:]}"
            return ready()

        wait_for(ready_now)
        for one in started:
            one.send_signal(signal.SIGKILL)
        assert [one.wait() for one in started] == [-signal.SIGKILL] * world
        self.gone(out)

    def alive(self, out: Path) -> list[int]:
        """The living processes of a run: those that name its folder, and the sessions of those forked for it."""
        sessions = {process.pid for process, theirs in self.started if theirs == out}
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (session := session_of(entry.name)):
                    named = str(out).encode() in (entry / "cmdline").read_bytes().split(b"\0")
                    if named or session in sessions:
                        found.append(int(entry.name))
        return found

    def gone(self, out: Path) -> None:
        """Wait until nothing of a run is left."""
        wait_for(lambda: not self.alive(out), 20)

    def clean(self) -> None:
        try:
            for out in {out for _, out in self.started}:
                for pid in self.alive(out):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for process, _ in self.started:
                process.wait(10)
        finally:
            self.server.kill()
            self.server.communicate()


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of somebody's own, by the name "mine"."""
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn set of 50 and 20 images, shrunk so that it is read at once. Session-wide: copy it before changing it."""
    root = tmp_path_factory.mktemp("tiny") / "80"
    draw_sample_set(root, train=IMAGES, val=VAL)
    for path in root.rglob("*.JPEG"):
        path.write_bytes(encode_jpeg(shrink_to_short_side(decode_image(path.read_bytes()), 80), 90))
    return root


@pytest.fixture(scope="session")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Whole runs; none of their processes outlives the session."""
    made = Runs(tiny_data, tmp_path_factory.mktemp("runs"))
    try:
        yield made
    finally:
        made.clean()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Recipe]:
    """A tiny recipe, with changes."""
    return tiny_recipe


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Wait for a condition, with a deadline."""
    return wait_for


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made.perf_counter)
    return made
