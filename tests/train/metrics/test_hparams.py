"""The settings of a run as a flat row, and the events from which TensorBoard's HParams plugin reads them."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer_in_process import make_phase, make_recipe

from train.metrics import hparams
from train.recipe import Phase
from train.recipe.schedule import Schedule

SETTINGS: dict[str, int | float | str] = {"recipe": "r", "lr": 0.5, "epochs": 8, "nesterov": 1}


def test_flat_settings_has_the_highest_rate_and_what_sweeps_vary() -> None:
    optim: dict[str, Any] = {"momentum": 0.8, "nesterov": True, "weight_decay": 5e-5, "label_smoothing": 0.1}
    phases = (
        make_phase((0, 2), 64, (0.1, 0.4)),
        make_phase((2, 6), 128, (0.4, 0.2), size=64),
        make_phase((6, 8), 96, (0.2, 0.0)),
    )
    assert hparams.flat_settings(Schedule(make_recipe(*phases, gpus=2, seed=7, **optim), 6400, 2), 3) == {
        "recipe": "rule", "model": "resnet10_tiny", "lr": pytest.approx(0.4), "warmup_epochs": 2, "epochs": 8,
        "batch_first": 128, "batch_largest": 256, "size_largest": 64, "optimizer": "sgd", "loss": "cross_entropy",
        "momentum": 0.8, "weight_decay": 5e-5,
        "nesterov": 1, "label_smoothing": 0.1, "seed": 7, "world": 3,
    }  # fmt: skip


@pytest.mark.parametrize("phases, epochs", [
    ([make_phase((0, 8), 64, 0.1)], 0),
    ([make_phase((0, 2), 64, (0.0, 0.1)), make_phase((2, 5), 64, (0.1, 0.3)), make_phase((5, 8), 64, (0.3, 0.0))], 5),
    ([make_phase((0, 3), 512, 0.4, shape="constant_warmup"), make_phase((3, 8), 512, 0.4)], 3),
    ([make_phase((0, 5), 64, 0.1), make_phase((5, 8), 64, (0.0, 0.1))], 0),
])  # fmt: skip
def test_warmup_epochs_counts_the_rising_first_phases(phases: list[Phase], epochs: int) -> None:
    assert hparams.flat_settings(Schedule(make_recipe(*phases, gpus=2), 6400, 2), 2)["warmup_epochs"] == epochs


def test_write_settings_and_session_end_in_the_run_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path), purge_step=0) as writer:
        hparams.write_settings(writer, SETTINGS)
        hparams.write_session_end(writer)
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    contents = accumulator.PluginTagToContent("hparams")
    # Without "_hparams_/experiment", TensorBoard puts the settings that differ between runs first.
    assert set(contents) == {"_hparams_/session_start_info", "_hparams_/session_end_info"}
    start = HParamsPluginData.FromString(contents["_hparams_/session_start_info"]).session_start_info.hparams
    values = {name: value.string_value if name == "recipe" else value.number_value for name, value in start.items()}
    assert values == SETTINGS and len(list(tmp_path.iterdir())) == 1, "they do not make a run of their own"
