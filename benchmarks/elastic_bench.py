"""What the trials of trials.py share: images, undisturbed runs, and the process from which others are forked."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import elastic_faults

from cluster.connectors.local import python
from train.recipe import Data, Model, Optim, Phase, Recipe
from train.tools import process
from train.tools.filesystem import as_json

HERE = Path(__file__).resolve().parent
IMAGES, VAL = 60, 20


class Bench:
    """What the trials share: images, undisturbed runs, and the process from which others are forked."""

    def __init__(self, folder: Path, fork: bool, small: bool = False) -> None:
        self.folder, self.fork, self.small = folder, fork, small
        self.starting, self.computing = threading.Lock(), threading.Lock()
        self.data = folder / "data"
        self.server: subprocess.Popen[bytes] | None = None
        (folder / "site").mkdir(parents=True)
        paths = [str(HERE.parent), str(HERE)]
        (folder / "site" / "sitecustomize.py").write_text(
            f"import sys\nsys.path[:0] = {paths!r}\nimport elastic_faults\nelastic_faults.arm()\n"
        )
        if not self.data.exists():
            from train.data.packing.synthetic import draw_set

            draw_set(self.data, train=IMAGES, val=VAL)

    @property
    def recipe(self) -> Recipe:
        """A few steps an epoch, for some hundred steps in all."""
        return Recipe(
            name="trial", data=Data(name="drawn", root=str(self.data), train=IMAGES, val=VAL),
            model=Model(name="resnet10_tiny"), optim=Optim(nesterov=True), machines=1, gpus=1,
            phases=[Phase(epochs=(0, 6 if self.small else 20), size=32, batch=2, lr=0.01)],
        )  # fmt: skip

    def environment(self, folder: Path, **more: str) -> dict[str, str]:
        """Return what a trial's processes get: nothing of the caller's tmux, and one thread each."""
        own = {"TMUX_TMPDIR": str(folder), "HOME": str(folder), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        site = os.pathsep.join([str(self.folder / "site"), str(HERE.parent)])
        return {**os.environ, **own, "PYTHONPATH": site, **more}

    def start(self, argv: list[str], folder: Path, log: Path, environment: dict[str, str]) -> None:
        """Start an agent; it dies with us."""
        if not self.fork:
            words = python(elastic_faults.AGENT, *argv)
            words[1] = f"PYTHONPATH={environment['PYTHONPATH']}"
            with log.open("ab") as out:
                subprocess.Popen(
                    words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True, preexec_fn=process.die_with_parent,
                )  # fmt: skip
            return
        with self.starting:
            if self.server is None:
                self.server = subprocess.Popen(
                    [sys.executable, str(HERE / "elastic_faults.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    cwd=self.folder, env=self.environment(self.folder), preexec_fn=process.die_with_parent,
                )  # fmt: skip
            asked = {"argv": argv, "environment": environment, "folder": str(folder), "log": str(log)}
            assert self.server.stdin and self.server.stdout
            self.server.stdin.write(json.dumps(asked).encode() + b"\n")
            self.server.stdin.flush()
            self.server.stdout.readline()

    def undisturbed(self, gpus: int) -> Path:
        """Return the last checkpoint of one process that nobody disturbed."""
        out = self.folder / f"alone-{gpus}"
        with self.computing:
            if not (out / "result.json").exists():
                recipe = self.folder / "recipe.json"
                recipe.write_bytes(as_json(self.recipe.to_json()))
                words = ["--out", str(out), "--exact", "--gpus", str(gpus), "--workers", "0", "--save-seconds", "99"]
                subprocess.run(
                    python("train", str(recipe), *words), check=True, capture_output=True, cwd=self.folder,
                    env=self.environment(self.folder), preexec_fn=process.die_with_parent,
                )  # fmt: skip
        return last_checkpoint(out, 1)

    def close(self) -> None:
        """End the process from which others are forked."""
        if self.server:
            process.kill([self.server])


def last_checkpoint(out: Path, attempt: int) -> Path:
    """Return an attempt's last checkpoint, its own before what it began with. Raises `IndexError` when it has none."""
    found = (out / "checkpoints" / f"{attempt:06d}").glob("*.pt")
    return sorted(found, key=lambda one: (one.stem.split("-")[1], one.name.startswith("step-")))[-1]
