"""Whole runs with each communication hook: to the end, killed and resumed, refused."""

from pathlib import Path
from typing import Any

import pytest
from support.run_outputs import read_result

from train.recipe import Comm
from train.tools import process

COMMS = {
    "fp16": Comm(hook="fp16"),
    "bf16": Comm(hook="bf16", overlap=False),
    "hierarchical": Comm(hook="hierarchical"),
    "powersgd": Comm(hook="powersgd", bucket=0.2),
}
OPTIONS = ("--workers", "0", "--gpus", "2")


def train_losses(out: Path) -> list[float]:
    return [epoch["train_loss"] for epoch in read_result(out)["epochs"]]


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
