"""What all trials of trials.py share: the images, the undisturbed reference runs, and the fork server."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.elastic.step_log import STEPS_FOLDER, loss_module
from train.recipe import Data, Model, Optim, Phase, Recipe
from train.tools import process
from train.tools.text_files import to_json_bytes

ROOT = Path(__file__).resolve().parents[2]
TRAIN_IMAGES, VAL_IMAGES = 60, 20


class TrialBench:
    """The images, reference runs and fork server of a set of trials.

    With `small`, trials are shorter; with `regroups` they are long enough for that many. `in_place` is the option of a
    launch.
    """

    def __init__(self, folder: Path, small: bool = False, in_place: bool = True, regroups: int = 0) -> None:
        self.folder, self.small, self.in_place = folder, small, in_place
        self.epochs = regroups or (6 if small else 20)
        self.start_lock = threading.Lock()
        self.reference_lock = threading.Lock()
        self.data = folder / "data"
        self.fork_server: subprocess.Popen[bytes] | None = None
        (folder / "site").mkdir(parents=True, exist_ok=True)
        # A process is slow if the folder in which it runs has a pace: trials have one, the reference runs have none.
        (folder / "site" / "slow_loss.py").write_text(loss_module("pace", STEPS_FOLDER))
        if not self.data.exists():
            from train.data.packing.synthetic import draw_sample_set

            draw_sample_set(self.data, train=TRAIN_IMAGES, val=VAL_IMAGES)

    @property
    def recipe(self) -> Recipe:
        """A recipe with a few steps per epoch and some hundred steps in all."""
        return Recipe(
            name="trial",
            data=Data(name="drawn", root=str(self.data), train=TRAIN_IMAGES, val=VAL_IMAGES),
            model=Model(name="resnet10_tiny"),
            optim=Optim(nesterov=True, loss="slow_loss:cross_entropy"),
            machines=1,
            gpus=1,
            phases=[Phase(epochs=(0, self.epochs), size=32, batch=2, lr=0.01)],
        )

    def environment(self, folder: Path, **extra: str) -> dict[str, str]:
        """Return the environment of a trial's processes: not the caller's tmux server, and one thread each."""
        own = {"TMUX_TMPDIR": str(folder), "HOME": str(folder), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        path = os.pathsep.join([str(self.folder / "site"), str(ROOT)])  # with the slow loss
        return {**os.environ, **own, "PYTHONPATH": path, **extra}

    def start(self, argv: list[str], folder: Path, log: Path, environment: dict[str, str]) -> None:
        """Start an agent with these arguments, forked from a process that has imported torch (faults.py)."""
        with self.start_lock:
            if self.fork_server is None:
                self.fork_server = subprocess.Popen(
                    [sys.executable, str(ROOT / "benchmarks" / "elastic" / "faults.py")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd=self.folder,
                    env=self.environment(self.folder),
                    preexec_fn=process.die_with_parent,
                )
            request = {"argv": argv, "environment": environment, "folder": str(folder), "log": str(log)}
            assert self.fork_server.stdin and self.fork_server.stdout
            self.fork_server.stdin.write(json.dumps(request).encode() + b"\n")
            self.fork_server.stdin.flush()
            self.fork_server.stdout.readline()

    def reference_folder(self, gpus: int) -> Path:
        """Return the folder of an undisturbed run of one process, which computes as `gpus` GPUs would."""
        output_folder = self.folder / f"alone-{gpus}"
        with self.reference_lock:
            if not (output_folder / "result.json").exists():
                output_folder.mkdir(exist_ok=True)
                recipe_path = self.folder / "recipe.json"
                recipe_path.write_bytes(to_json_bytes(self.recipe.to_json()))
                options = ["--exact", "--gpus", str(gpus), "--workers", "0", "--save-seconds", "99"]
                command = [sys.executable, "-P", "-m", "train", str(recipe_path), "--out", str(output_folder)]
                subprocess.run(
                    [*command, *options],
                    check=True,
                    capture_output=True,
                    cwd=output_folder,
                    env=self.environment(self.folder),
                    preexec_fn=process.die_with_parent,
                )
        return output_folder

    def close(self) -> None:
        """End the fork server."""
        if self.fork_server:
            self.fork_server.kill()  # it leads no group
            self.fork_server.wait()


def last_checkpoint(output_folder: Path, attempt: int) -> Path:
    """Return the last checkpoint of an attempt. Raises `IndexError` if it has none.

    At the same step a checkpoint that the attempt wrote comes before the one that it resumed from.
    """
    paths = (output_folder / "checkpoints" / f"{attempt:06d}").glob("*.pt")
    return sorted(paths, key=lambda path: (path.stem.split("-")[1], path.name.startswith("step-")))[-1]


def checkpoint_differences(path: Path, other_path: Path) -> list[str]:
    """Return the weights, batch-norm statistics and momenta that differ in any bit, one line each."""
    import torch

    from train.tools import checkpoint_io

    state = checkpoint_io.load_checkpoint(path)
    other = checkpoint_io.load_checkpoint(other_path)
    differences = []
    if (state["epoch"], state["step"]) != (other["epoch"], other["step"]):
        differences.append("another last step")
    pairs = {name: (state["model"][name], value) for name, value in other["model"].items()}
    for number, buffers in other["optimizer"]["state"].items():
        own_buffers = state["optimizer"]["state"][number]
        pairs[f"momentum {number}"] = own_buffers["momentum_buffer"], buffers["momentum_buffer"]
    return differences + [f"{name} differs" for name, (a, b) in pairs.items() if not torch.equal(a, b)]
