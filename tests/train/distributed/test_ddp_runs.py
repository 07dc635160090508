"""Whole runs with each way to sum gradients: to the end, killed and resumed, refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from train.recipe import Comm
from train.tools import checkpoint_io, process

WAYS = {
    "fp16": Comm(hook="fp16"), "bf16": Comm(hook="bf16", overlap=False), "hierarchical": Comm(hook="hierarchical"),
    "powersgd": Comm(hook="powersgd", bucket=0.2),
}  # fmt: skip
OPTIONS = ("--workers", "0", "--gpus", "2")


def losses(out: Path) -> list[float]:
    return [one["train_loss"] for one in json.loads((out / "result.json").read_text())["epochs"]]


@pytest.fixture(scope="module")
def plain(runs: Any, tiny: Any) -> list[float]:
    out = runs.folder / "comm-none"
    runs.run(out, *OPTIONS, world=2, recipe=runs.recipe(tiny(name="comm-none")))
    return losses(out)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_comes_to_its_end_and_near_that_of_float32(way: str, plain: list[float], runs: Any, tiny: Any) -> None:
    out, recipe = runs.folder / f"comm-{way}", runs.recipe(tiny(name=f"comm-{way}", comm=WAYS[way]))
    world = 4 if way == "hierarchical" else 2  # two machines of two
    place = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(process.free_port())
    ranks = [
        runs.start(out, *OPTIONS, recipe=recipe, environment={**place, "RANK": str(r), "LOCAL_RANK": str(r % 2)})
        for r in range(world)
    ]
    runs.end(out, *ranks)
    assert losses(out) == pytest.approx(plain, rel=0.02 if way != "powersgd" else 0.1)
    assert way == "hierarchical" or losses(out) != plain  # it was at work


def test_powersgd_goes_on_after_a_kill(plain: list[float], runs: Any, tiny: Any) -> None:
    """With what it left out lost: near, and not the same."""
    out, recipe = runs.folder / "comm-killed", runs.recipe(tiny(name="comm-killed", comm=WAYS["powersgd"]))
    argv, folder = (*OPTIONS, "--save-seconds", "0"), out / "checkpoints/000001"
    reached = lambda: any(int(path.stem.removeprefix("step-")) >= 6 for path in folder.glob("step-*.pt"))
    runs.kill_when(out, reached, *argv, world=2, recipe=recipe)
    said = runs.run(out, *argv, "--attempt", "2", world=2, recipe=recipe)
    assert "resumed from" in said and losses(out) == pytest.approx(plain, rel=0.1)
    last = checkpoint_io.newest_checkpoint(out / "checkpoints/000002")
    assert last and "powersgd" in json.dumps(checkpoint_io.load_checkpoint(last)["identity"])


def test_an_exact_run_refuses_a_hook_that_rounds(runs: Any, tiny: Any) -> None:
    out, recipe = runs.folder / "comm-exact", runs.recipe(tiny(name="comm-exact", comm="fp16"))
    said = runs.run(out, *OPTIONS, "--exact", world=2, recipe=recipe, code=None)
    assert "comm, hook: fp16 rounds as it likes, and --exact must not; take comm='none'" in said
    assert "Traceback" not in said
