"""A run's settings in one flat row, and the events in which TensorBoard's HParams plugin finds them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train.metrics import hparams
from train.recipe import Data, Model, Optim, Phase, Recipe
from train.recipe.schedule import Schedule

SETTINGS = {"recipe": "r", "lr": 0.5, "epochs": 8, "nesterov": 1}


def row(start: int, end: int, lr: Any, batch: int = 64, size: int = 32, shape: str = "linear") -> Phase:
    """A phase of which only what is given matters."""
    return Phase(epochs=(start, end), size=size, batch=batch, lr=lr, shape=shape)


def schedule(*rows: Phase, gpus: int = 2, **changes: Any) -> Schedule:
    """The schedule of a recipe for two GPUs, with these rows."""
    recipe = Recipe(
        name="r", data=Data(name="d", root="/d", train=6400, val=20), model=Model(name="resnet18"), gpus=2, phases=rows
    )
    return Schedule(replace(recipe, **changes), 6400, gpus)


def test_the_row_tells_the_highest_rate_and_what_a_sweep_is_likely_to_change() -> None:
    optim = Optim(momentum=0.8, nesterov=True, weight_decay=5e-5, label_smoothing=0.1)
    rows = row(0, 2, (0.1, 0.4)), row(2, 6, (0.4, 0.2), batch=128, size=64), row(6, 8, (0.2, 0.0), batch=96)
    assert hparams.flat_settings(schedule(*rows, optim=optim, seed=7), 3) == {
        "recipe": "r", "model": "resnet18", "lr": pytest.approx(0.4), "warmup_epochs": 2, "epochs": 8,
        "batch_first": 128, "batch_largest": 256, "size_largest": 64, "optimizer": "sgd", "loss": "cross_entropy",
        "momentum": 0.8, "weight_decay": 5e-5,
        "nesterov": 1, "label_smoothing": 0.1, "seed": 7, "world": 3,
    }  # fmt: skip


def test_rates_and_batches_are_those_of_the_gpus_that_there_are() -> None:
    found = hparams.flat_settings(schedule(row(0, 8, (0.4, 0.0)), gpus=8), 8)
    assert (found["lr"], found["batch_first"], found["world"]) == (pytest.approx(1.6), 512, 8)


@pytest.mark.parametrize(
    "rows, epochs",
    [
        ([row(0, 8, 0.1)], 0),
        ([row(0, 8, (0.1, 0.0), shape="cosine")], 0),
        ([row(0, 5, (0.0, 0.1)), row(5, 8, 0.1)], 5),
        ([row(0, 2, (0.0, 0.1)), row(2, 5, (0.1, 0.3)), row(5, 8, (0.3, 0.0))], 5),
        ([row(0, 3, 0.4, batch=512, shape="gradual_warmup"), row(3, 8, 0.4, batch=512)], 3),
        ([row(0, 3, 0.4, batch=512, shape="constant_warmup"), row(3, 8, 0.4, batch=512)], 3),
        ([row(0, 5, 0.1), row(5, 8, (0.0, 0.1))], 0),
    ],
)
def test_the_warm_up_is_the_first_phases_as_long_as_they_rise(rows: list[Phase], epochs: int) -> None:
    assert hparams.flat_settings(schedule(*rows), 2)["warmup_epochs"] == epochs


def test_the_events_tell_settings_and_end_in_the_run_s_own_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard import SummaryWriter

    def found() -> dict[str, Any]:
        board = EventAccumulator(str(tmp_path))
        board.Reload()
        try:
            content = board.PluginTagToContent("hparams")
        except KeyError:
            return {}
        return {tag: HParamsPluginData.FromString(one) for tag, one in content.items()}

    with SummaryWriter(str(tmp_path), purge_step=0) as board:
        hparams.write_settings(board, SETTINGS)
        board.flush()
        assert set(found()) == {"_hparams_/experiment", "_hparams_/session_start_info"}
        board.add_scalar("val/top1", 12.5, 100)
        hparams.write_session_end(board)
    said = found()
    start = said["_hparams_/session_start_info"].session_start_info.hparams
    values = {name: one.string_value if name == "recipe" else one.number_value for name, one in start.items()}
    assert values == SETTINGS and "_hparams_/session_end_info" in said
    experiment = said["_hparams_/experiment"].experiment
    assert [one.name.tag for one in experiment.metric_infos] == ["val/top1", "val/top5"]
    assert len(list(tmp_path.iterdir())) == 1  # no run of their own
