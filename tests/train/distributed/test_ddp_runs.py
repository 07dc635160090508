"""Whole runs with each communication hook: to the end, killed and resumed, refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from train.recipe import Comm
from train.tools import checkpoint_io, process

COMMS = {
    "fp16": Comm(hook="fp16"),
    "bf16": Comm(hook="bf16", overlap=False),
    "hierarchical": Comm(hook="hierarchical"),
    "powersgd": Comm(hook="powersgd", bucket=0.2),
}
OPTIONS = ("--workers", "0", "--gpus", "2")


def train_losses(out: Path) -> list[float]:
    return [epoch["train_loss"] for epoch in json.loads((out / "result.json").read_text())["epochs"]]


@pytest.fixture(scope="module")
def float32_losses(runs: Any, tiny: Any) -> list[float]:
    out = runs.folder / "comm-none"
    runs.run(out, *OPTIONS, world=2, recipe=runs.recipe(tiny(name="comm-none")))
    return train_losses(out)


@pytest.mark.parametrize("name", COMMS)
def test_run_with_hook_ends_near_the_float32_run(name: str, float32_losses: list[float], runs: Any, tiny: Any) -> None:
    out, recipe = runs.folder / f"comm-{name}", runs.recipe(tiny(name=f"comm-{name}", comm=COMMS[name]))
    world = 4 if name == "hierarchical" else 2  # two machines of two
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(process.free_port())
    ranks = [
        runs.start(out, *OPTIONS, recipe=recipe, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)})
        for rank in range(world)
    ]
    runs.end(out, *ranks)
    assert train_losses(out) == pytest.approx(float32_losses, rel=0.02 if name != "powersgd" else 0.1)
    assert name == "hierarchical" or train_losses(out) != float32_losses  # the hook was used


def test_run_with_powersgd_resumes_after_a_kill(float32_losses: list[float], runs: Any, tiny: Any) -> None:
    """PowerSGD's remainder is lost, so the losses are near and not equal."""
    out, recipe = runs.folder / "comm-killed", runs.recipe(tiny(name="comm-killed", comm=COMMS["powersgd"]))
    options, folder = (*OPTIONS, "--save-seconds", "0"), out / "checkpoints/000001"

    def reached() -> bool:
        return any(int(path.stem.removeprefix("step-")) >= 6 for path in folder.glob("step-*.pt"))

    runs.kill_when(out, reached, *options, world=2, recipe=recipe)
    output = runs.run(out, *options, "--attempt", "2", world=2, recipe=recipe)
    assert "resumed from" in output and train_losses(out) == pytest.approx(float32_losses, rel=0.1)
    last = checkpoint_io.newest_checkpoint(out / "checkpoints/000002")
    assert last and "powersgd" in json.dumps(checkpoint_io.load_checkpoint(last)["identity"])


def test_exact_run_refuses_a_hook_that_rounds(runs: Any, tiny: Any) -> None:
    out, recipe = runs.folder / "comm-exact", runs.recipe(tiny(name="comm-exact", comm="fp16"))
    output = runs.run(out, *OPTIONS, "--exact", world=2, recipe=recipe, code=None)
    assert "comm, hook: --exact does not work with fp16, which rounds; set comm='none'" in output
    assert "Traceback" not in output
