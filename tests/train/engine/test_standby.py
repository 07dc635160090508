"""A process that has loaded all it can and waits to be told which trainer to be."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Standby:
    """A waiting process, and what it says."""

    def __init__(self, runs: Any, folder: Path, *argv: str) -> None:
        self.folder, self.out = folder, folder / "out"
        folder.mkdir()
        self.words = [
            str(runs.recipe(runs_recipe())),
            "--out",
            str(self.out),
            "--max-steps",
            "3",
            "--workers",
            "0",
            *argv,
        ]
        with (folder / "standby.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "train.engine.standby", str(folder / "ready"), *self.words],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=runs.environment, cwd=folder,
            )  # fmt: skip

    def tell(self, *argv: str, **environment: str) -> None:
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        asked = {
            "argv": [*self.words, *argv], "environment": {**place, "IMGNET_WORK": str(self.folder), **environment},
            "log": str(self.folder / "rank-0.log"),
        }  # fmt: skip
        assert self.process.stdin
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.close()

    def said(self, name: str = "rank-0.log") -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def runs_recipe() -> Any:
    from train.recipe.components import Data, Model
    from train.recipe.schema import Phase, Recipe

    return Recipe(
        name="standby", data=Data(name="sample", root="nowhere", train=50, val=20), model=Model(name="resnet10_tiny"),
        gpus=1, phases=[Phase(epochs=(0, 2), size=32, batch=8, lr=0.01)],
    )  # fmt: skip


@pytest.fixture
def stand_by(runs: Any, tmp_path: Path, until: Any) -> Iterator[Callable[..., Standby]]:
    """Start a standby and wait until it is ready; nothing of it is left."""
    made: list[Standby] = []

    def make(*argv: str, name: str = "one") -> Standby:
        made.append(Standby(runs, tmp_path / name, *argv))
        one = made[-1]
        until(lambda: (one.folder / "ready").exists() or one.process.poll() is not None)
        assert one.process.poll() is None, one.said("standby.log")
        return one

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()


def test_it_becomes_the_trainer_it_is_told_to_be(stand_by: Any, tiny_data: Path, until: Any) -> None:
    one = stand_by("--data", str(tiny_data))
    assert not one.out.exists() and not (one.folder / "progress.json").exists(), "before that it does nothing"
    one.tell("--attempt", "7", "--resume", "none", OF_THE_ATTEMPT="yes")
    assert one.process.wait(60) == 0, one.said()
    result = json.loads((one.out / "result.json").read_text())
    assert (result["steps"], result["procs"], result["recipe"]) == (3, 1, "standby")
    assert "done: top-1" in one.said() and "done" not in one.said("standby.log")
    assert json.loads((one.folder / "progress.json").read_text())["state"] == "done"
    assert list((one.out / "checkpoints/000007").glob("step-*.pt"))


def test_it_looks_through_the_images_before_and_not_again(stand_by: Any, tiny_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    one = stand_by("--data", str(data))
    before = sorted(path for path in data.rglob(".*"))
    one.tell("--attempt", "1", "--resume", "none")
    assert one.process.wait(60) == 0, one.said()
    assert "indexing" not in one.said() and sorted(path for path in data.rglob(".*")) == before


def test_when_nobody_needs_it_it_ends(stand_by: Any, tiny_data: Path) -> None:
    one = stand_by("--data", str(tiny_data))
    one.process.stdin.close()
    assert one.process.wait(30) == 0 and not one.out.exists()


def test_data_that_cannot_be_used_are_reported_by_the_trainer(stand_by: Any, tmp_path: Path) -> None:
    one = stand_by("--data", str(tmp_path / "nowhere"))
    one.tell("--attempt", "1", "--resume", "none")
    assert one.process.wait(60) == 1
    left = json.loads((one.folder / "failed-0.json").read_text())
    assert left["fault"] == "final" and str(tmp_path / "nowhere") in left["reason"]
    assert "error: " in one.said() and "Traceback" not in one.said()


def test_it_dies_with_whoever_started_it(runs: Any, tiny_data: Path, tmp_path: Path, until: Any) -> None:
    words = [
        sys.executable,
        "-m",
        "train.engine.standby",
        str(tmp_path / "ready"),
        "none.json",
        "--out",
        str(tmp_path / "out"),
    ]
    code = f"import subprocess, time; print(subprocess.Popen({words!r}).pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=runs.environment) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        until(lambda: (tmp_path / "ready").exists(), 60)
        parent.kill()
    until(lambda: gone(pid), 10)
