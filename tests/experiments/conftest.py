"""Fixtures of the tests of the experiments: a tiny image set, arms that train on it, and a stand-in for the trainer."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from experiments.harness.claims import Arm
from experiments.harness.images import ImageSet
from train.recipe import Data, Model, Optim, Phase, Recipe

STUB = '''
"""Stand-in for the trainer: notes that it started, waits while its seed is held, and fails if its seed has an error.

Files in the folder $STUB_CONTROL: "started" has a line (seed, PID) for each start, "running-PID" exists while it runs,
"hold-SEED" makes it wait, "error-SEED" makes it fail with this text.
"""
import json, os, pathlib, sys, time

options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
out = pathlib.Path(options["--out"])
seed = options["--seed"]
control = pathlib.Path(os.environ["STUB_CONTROL"])
with (control / "started").open("a") as file:
    file.write(f"{seed} {os.getpid()}\\n")
running = control / f"running-{os.getpid()}"
running.touch()
while (control / f"hold-{seed}").exists():
    time.sleep(0.01)
running.unlink()
if (control / f"error-{seed}").exists():
    print((control / f"error-{seed}").read_text())
    sys.exit(1)
epoch = {"train_images": 20, "size": 16, "train_seconds": 1.0, "train_top1": 50.0, "train_loss": 1.0}
result = {"epochs": [epoch], "top1": 60.0, "top1_square": 60.0, "steps": 3, "images": 20, "where": {"wall": 1.0}}
(out / "result.json").write_text(json.dumps(result))
'''


@pytest.fixture(scope="session")
def blots(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    """Images of noise, bright or dark: ten of each class for training, two for validation. Read-only."""
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("blots")
    for split, count in (("train", 10), ("val", 2)):
        for class_name, min_value in (("bright", 150), ("dark", 0)):
            (root / split / class_name).mkdir(parents=True)
            for number in range(count):
                with io.BytesIO() as file:
                    pixels = rng.integers(min_value, min_value + 100, (20, 20, 3), np.uint8)
                    Image.fromarray(pixels).save(file, "JPEG")
                    (root / split / class_name / f"{number}.jpg").write_bytes(file.getvalue())
    return ImageSet(root, "blots", 2)


@pytest.fixture(scope="session")
def arm() -> Callable[..., Arm]:
    """Make an arm from its name, learning rate and number of epochs."""

    def make_arm(name: str = "a", lr: float = 0.05, epochs: int = 2, **arm_fields: Any) -> Arm:
        phase = Phase(epochs=(0, epochs), size=16, batch=8, lr=lr, validate="never")
        recipe = Recipe(
            name="blots",
            data=Data(name="blots", root="none", train=20, val=4),
            model=Model(name="resnet10_tiny"),
            optim=Optim(nesterov=True),
            machines=1,
            gpus=1,
            phases=[phase],
        )
        return Arm(name=name, recipe=recipe, **arm_fields)

    return make_arm


@pytest.fixture
def stub_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The command of a stand-in for `python -m train`, which files in the folder `control` direct."""
    (tmp_path / "control").mkdir()
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("STUB_CONTROL", str(tmp_path / "control"))
    return sys.executable, str(tmp_path / "stub.py")
