"""What the trials of trials.py share: images, undisturbed runs, and the process from which others are forked."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.elastic import faults
from cluster.connectors.local import module_command
from train.recipe import Data, Model, Optim, Phase, Recipe
from train.tools import process
from train.tools.filesystem import to_json_bytes

ROOT = Path(__file__).resolve().parents[2]
TRAIN_IMAGES, VAL_IMAGES = 60, 20


class TrialBench:
    """What the trials share: images, undisturbed runs, and the process from which others are forked."""

    def __init__(self, folder: Path, fork: bool, small: bool = False) -> None:
        self.folder, self.fork, self.small = folder, fork, small
        self.start_lock, self.reference_lock = threading.Lock(), threading.Lock()
        self.data = folder / "data"
        self.fork_server: subprocess.Popen[bytes] | None = None
        (folder / "site").mkdir(parents=True)
        paths = [str(ROOT)]
        (folder / "site" / "sitecustomize.py").write_text(
            f"import sys\nsys.path[:0] = {paths!r}\nfrom benchmarks.elastic import faults\nfaults.install_faults()\n"
        )
        if not self.data.exists():
            from train.data.packing.synthetic import draw_sample_set

            draw_sample_set(self.data, train=TRAIN_IMAGES, val=VAL_IMAGES)

    @property
    def recipe(self) -> Recipe:
        """A few steps an epoch, for some hundred steps in all."""
        return Recipe(
            name="trial", data=Data(name="drawn", root=str(self.data), train=TRAIN_IMAGES, val=VAL_IMAGES),
            model=Model(name="resnet10_tiny"), optim=Optim(nesterov=True), machines=1, gpus=1,
            phases=[Phase(epochs=(0, 6 if self.small else 20), size=32, batch=2, lr=0.01)],
        )  # fmt: skip

    def environment(self, folder: Path, **extra: str) -> dict[str, str]:
        """Return what a trial's processes get: nothing of the caller's tmux, and one thread each."""
        own = {"TMUX_TMPDIR": str(folder), "HOME": str(folder), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        site = os.pathsep.join([str(self.folder / "site"), str(ROOT)])
        return {**os.environ, **own, "PYTHONPATH": site, **extra}

    def start(self, argv: list[str], folder: Path, log: Path, environment: dict[str, str]) -> None:
        """Start an agent; it dies with us."""
        if not self.fork:
            words = module_command(faults.AGENT_MODULE, *argv)
            words[1] = f"PYTHONPATH={environment['PYTHONPATH']}"
            with log.open("ab") as out:
                subprocess.Popen(
                    words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True, preexec_fn=process.die_with_parent,
                )  # fmt: skip
            return
        with self.start_lock:
            if self.fork_server is None:
                self.fork_server = subprocess.Popen(
                    [sys.executable, str(ROOT / "benchmarks" / "elastic" / "faults.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    cwd=self.folder, env=self.environment(self.folder), preexec_fn=process.die_with_parent,
                )  # fmt: skip
            asked = {"argv": argv, "environment": environment, "folder": str(folder), "log": str(log)}
            assert self.fork_server.stdin and self.fork_server.stdout
            self.fork_server.stdin.write(json.dumps(asked).encode() + b"\n")
            self.fork_server.stdin.flush()
            self.fork_server.stdout.readline()

    def reference_checkpoint(self, gpus: int) -> Path:
        """Return the last checkpoint of one process that nobody disturbed."""
        out = self.folder / f"alone-{gpus}"
        with self.reference_lock:
            if not (out / "result.json").exists():
                recipe = self.folder / "recipe.json"
                recipe.write_bytes(to_json_bytes(self.recipe.to_json()))
                words = ["--out", str(out), "--exact", "--gpus", str(gpus), "--workers", "0", "--save-seconds", "99"]
                subprocess.run(
                    module_command("train", str(recipe), *words), check=True, capture_output=True, cwd=self.folder,
                    env=self.environment(self.folder), preexec_fn=process.die_with_parent,
                )  # fmt: skip
        return last_checkpoint(out, 1)

    def close(self) -> None:
        """End the process from which others are forked."""
        if self.fork_server:
            process.kill_process_groups([self.fork_server])


def last_checkpoint(out: Path, attempt: int) -> Path:
    """Return an attempt's last checkpoint, its own before what it began with. Raises `IndexError` when it has none."""
    found = (out / "checkpoints" / f"{attempt:06d}").glob("*.pt")
    return sorted(found, key=lambda one: (one.stem.split("-")[1], one.name.startswith("step-")))[-1]
