"""A set of images small enough to be trained on in a second, and a recipe for it."""

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
"""Stands for the trainer: notes that it began, waits while it is held, and ends as its seed is told to."""
import json, os, pathlib, signal, sys, time

words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
out, seed, told = pathlib.Path(words["--out"]), words["--seed"], pathlib.Path(os.environ["STUB"])
with (told / "began").open("a") as file:
    file.write(f"{seed} {os.getpid()}\\n")
busy = told / f"busy-{os.getpid()}"
busy.touch()
while (told / f"hold-{seed}").exists():
    time.sleep(0.01)
busy.unlink()
if (told / f"say-{seed}").exists():
    print((told / f"say-{seed}").read_text())
    sys.exit(1)
epoch = {"train_images": 20, "size": 16, "train_seconds": 1.0, "train_top1": 50.0, "train_loss": 1.0}
result = {"epochs": [epoch], "top1": 60.0, "top1_square": 60.0, "steps": 3, "images": 20, "where": {"wall": 1.0}}
(out / "result.json").write_text(json.dumps(result))
'''


@pytest.fixture(scope="session")
def blots(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    """Ten bright and ten dark blots to train on, four to validate. Not to be changed."""
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("blots")
    for split, count in (("train", 10), ("val", 2)):
        for kind, least in (("bright", 150), ("dark", 0)):
            (root / split / kind).mkdir(parents=True)
            for number in range(count):
                with io.BytesIO() as file:
                    pixels = rng.integers(least, least + 100, (20, 20, 3), np.uint8)
                    Image.fromarray(pixels).save(file, "JPEG")
                    (root / split / kind / f"{number}.jpg").write_bytes(file.getvalue())
    return ImageSet(root, "blots", 2)


@pytest.fixture(scope="session")
def arm() -> Callable[..., Arm]:
    """An arm by its name, its rate and its epochs."""

    def make(name: str = "a", lr: float = 0.05, epochs: int = 2, **more: Any) -> Arm:
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
        return Arm(name=name, recipe=recipe, **more)

    return make


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """What stands for `python -m train`; it is told by files in the folder `told`."""
    (tmp_path / "told").mkdir()
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("STUB", str(tmp_path / "told"))
    return sys.executable, str(tmp_path / "stub.py")
