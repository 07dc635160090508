"""What the trainer's tests share: a tiny drawn set, a tiny recipe, whole runs as processes, groups of forked ranks."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from train.data.sample import draw_set
from train.recipe import Data, Model, Optim, Phase, Recipe

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


def group_of(out: Path) -> list[int]:
    """The living processes whose command line names the folder: trainers, and the loader workers forked from them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(out).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


class Runs:
    """Starts `python -m train` and ends whatever is left of it."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.folder, self.started = data, folder, []  # type: ignore[var-annotated]

    def recipe(self, recipe: Recipe) -> Path:
        path = self.folder / f"{recipe.name}.json"
        path.write_text(json.dumps(recipe.to_json()))
        return path

    def start(
        self,
        out: Path,
        *argv: str,
        recipe: Path | None = None,
        launcher: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> Any:
        """Start one run in a session of its own; its output is appended to <out>.log."""
        command = [sys.executable, "-m", *launcher, *(("-m",) if launcher else ()), "train"]
        recipe = recipe or self.recipe(tiny_recipe())
        options = [] if "--data" in argv else ["--data", str(self.data)]
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "IMGNET_WORK")}
        with self.log(out).open("ab") as log:
            process = subprocess.Popen(
                [*command, str(recipe), *options, "--out", str(out), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                env={**clean, "PYTHONPATH": str(REPO), **(environment or {})},
            )
        self.started.append((process, out))
        return process

    def log(self, out: Path) -> Path:
        return out.with_name(out.name + ".log")

    def run(self, out: Path, *argv: str, code: int | None = 0, **how: Any) -> str:
        """Start a run, wait for its end, check its exit code (None: any but 0) and return its output."""
        process = self.start(out, *argv, **how)
        got = process.wait(DEADLINE)
        said = self.log(out).read_text(errors="replace")
        assert got == code if code is not None else got != 0, f"exit code {got}:\n{said[-4000:]}"
        return said

    def kill_when(self, out: Path, ready: Callable[[], object], *argv: str, **how: Any) -> None:
        """Start a run and kill all of it, at once and without warning, as soon as a condition holds."""
        process = self.start(out, *argv, **how)
        end = time.monotonic() + DEADLINE
        while not ready():
            assert process.poll() is None, f"ended too early:\n{self.log(out).read_text()[-4000:]}"
            assert time.monotonic() < end, "the condition never held"
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE)
        assert process.returncode == -signal.SIGKILL
        self.gone(out)

    def gone(self, out: Path) -> None:
        """Wait until nothing of a run is left."""
        end = time.monotonic() + 20
        while group_of(out):
            assert time.monotonic() < end, f"still there: {group_of(out)}"
            time.sleep(0.01)

    def clean(self) -> None:
        for process, out in self.started:
            for pid in group_of(out):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn set of 50 and 20 images. Session-wide: copy it before changing it."""
    root = tmp_path_factory.mktemp("tiny") / "data"
    draw_set(root, train=IMAGES, val=VAL)
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
def alive() -> Callable[[Path], list[int]]:
    """The processes of a run."""
    return group_of


def _be_rank(function: Any, rank: int, world: int, store: Path, line: Any) -> None:
    import torch
    import torch.distributed as dist

    from train.distributed import Group

    torch.set_num_threads(1)  # a forked child must not wait for threads that only its parent has
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        line.send((True, function(Group(rank, rank, world, world, torch.device("cpu")))))
    except BaseException as error:
        line.send((False, f"rank {rank}: {type(error).__name__}: {error}"))
    finally:
        line.close()
        os._exit(0)


@pytest.fixture
def in_group(tmp_path: Path) -> Callable[[int, Any], list[Any]]:
    """Run function(group) in so many forked processes that form a real group; return their answers by rank."""
    count = iter(range(1000))

    def run(world: int, function: Any) -> list[Any]:
        fork, store = multiprocessing.get_context("fork"), tmp_path / f"store-{next(count)}"
        lines = [fork.Pipe(duplex=False) for _ in range(world)]
        ranks = [fork.Process(target=_be_rank, args=(function, r, world, store, lines[r][1])) for r in range(world)]
        try:
            for one in ranks:
                one.start()
            answers = []
            for reader, _ in lines:
                assert reader.poll(60), "a rank does not answer"
                answers.append(reader.recv())
        finally:
            for one in ranks:
                one.kill()
                one.join()
        assert all(good for good, _ in answers), [what for good, what in answers if not good]
        return [what for _, what in answers]

    return run
