"""The standby process, which loads everything and waits to become a trainer."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_for

from train.recipe import Phase, Recipe

pytestmark = pytest.mark.rehearsal  # whole processes, which take long


class StandbyProcess:
    """A standby process of a run, and its output."""

    def __init__(self, runs: Any, folder: Path, recipe: Recipe, *argv: str) -> None:
        self.folder, self.out = folder, folder / "out"
        folder.mkdir()
        options = ("--max-steps", "3", "--workers", "0", *argv)
        self.argv = [str(runs.recipe(recipe)), "--out", str(self.out), *options]
        with (folder / "standby.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "train.engine.standby", str(folder / "ready"), *self.argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=runs.environment,
                cwd=folder,
            )

    def become(self, *argv: str, **environment: str) -> None:
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        request = {
            "argv": [*self.argv, *argv],
            "environment": {**variables, "IMGNET_WORK": str(self.folder), **environment},
            "log": str(self.folder / "rank-0.log"),
        }
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.close()

    def output(self, name: str = "rank-0.log") -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def start_standby(runs: Any, tiny: Any, tmp_path: Path) -> Iterator[Callable[..., StandbyProcess]]:
    """Returns a function that starts a standby and waits until it is ready; all are killed after the test."""
    standbys: list[StandbyProcess] = []
    recipe = tiny(name="standby", gpus=1, phases=[Phase(epochs=(0, 2), size=32, batch=8, lr=0.01)])

    def start(*argv: str) -> StandbyProcess:
        standbys.append(standby := StandbyProcess(runs, tmp_path / "one", recipe, *argv))
        wait_for(lambda: (standby.folder / "ready").exists() or standby.process.poll() is not None)
        assert standby.process.poll() is None, standby.output("standby.log")
        return standby

    yield start
    for standby in standbys:
        standby.process.kill()
        standby.process.wait()


def test_standby_becomes_the_requested_trainer(start_standby: Any, tiny_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    standby = start_standby("--data", str(data))
    assert not standby.out.exists() and not (standby.folder / "progress.json").exists(), "until then it writes nothing"
    index_files = sorted(data.rglob(".*"))
    standby.become("--attempt", "7", "--resume", "none", OF_THE_ATTEMPT="yes")
    assert standby.process.wait(120) == 0, standby.output()
    assert "indexing" not in standby.output() and sorted(data.rglob(".*")) == index_files, "it has indexed the images"
    result = json.loads((standby.out / "result.json").read_text())
    assert (result["steps"], result["procs"], result["recipe"]) == (3, 1, "standby")
    assert "done: top-1" in standby.output() and "done" not in standby.output("standby.log")
    assert json.loads((standby.folder / "progress.json").read_text())["state"] == "done"
    assert list((standby.out / "checkpoints/000007").glob("step-*.pt"))


def test_standby_trainer_reports_unusable_data(start_standby: Any, tmp_path: Path) -> None:
    standby = start_standby("--data", str(tmp_path / "nowhere"))
    standby.become("--attempt", "1", "--resume", "none")
    assert standby.process.wait(120) == 1
    failure = json.loads((standby.folder / "failed-0.json").read_text())
    assert failure["fault"] == "input" and str(tmp_path / "nowhere") in failure["reason"]
    assert "error: " in standby.output() and "Traceback" not in standby.output()


def test_standby_dies_with_its_parent(runs: Any, tmp_path: Path) -> None:
    """The pipe of their output is closed when both have ended."""
    ready = tmp_path / "ready"
    argv = [sys.executable, "-m", "train.engine.standby", str(ready), "none.json", "--out", str(tmp_path / "out")]
    code = f"import subprocess, time; subprocess.Popen({argv!r}); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=runs.environment) as parent:
        wait_for(ready.exists)
        parent.kill()
        assert parent.stdout
        parent.stdout.read()


def test_standby_exits_when_stdin_is_closed(start_standby: Any, tiny_data: Path) -> None:
    standby = start_standby("--data", str(tiny_data))
    standby.process.stdin.close()
    assert standby.process.wait(120) == 0 and not standby.out.exists()
