"""Writes the weights of a run for use outside of it: the best ones while it trains, and in the end all that it leaves.

The best weights lie beside the checkpoints of an attempt, as best-00000123.safetensors after step 123, and are written
before the checkpoint of that step: when a checkpoint knows of a best epoch, the weights of this epoch are there.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from train.recipe.history import EpochResult, best_epoch
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools import agent_protocol, checkpoint_io
from train.tools.agent_protocol import BEST_PATTERN, best_weights_file, checkpoint_folder
from train.tools.files import make_folder_below, write_atomic
from train.tools.records import DamagedRecord, encode
from train.tools.text_files import to_json_bytes

from .network_description import NetworkDescription
from .safetensors_file import verify_file, write_safetensors


def best_writer(folder: Path, description: NetworkDescription, recipe: Recipe) -> Callable[[checkpoint_io.State], None]:
    """Return a function that writes the weights in a checkpoint's state as the best ones, beside the checkpoints."""

    def write(state: checkpoint_io.State) -> None:
        path = folder / best_weights_file(description.step)
        if write_weights(path, network_weights(state), description, recipe):
            checkpoint_io.delete_all_but_newest(path, BEST_PATTERN)

    return write


def network_weights(state: checkpoint_io.State) -> dict[str, torch.Tensor]:
    """Return the network in a checkpoint's state as it was validated: its averaged weights where the run has them."""
    return dict(state.get("average") or state["model"])


def write_weights(
    path: Path, weights: Mapping[str, torch.Tensor], description: NetworkDescription, recipe: Recipe
) -> bool:
    """Write a file of weights with its description; False, and a line, if it cannot hold them. Raises `OSError`."""
    try:
        write_safetensors(path, weights, description.metadata(recipe))
    except ValueError as error:
        print(f"{path.name} is not written: {error}; the weights are in the checkpoints only", flush=True)
        return False
    return True


def publish_network(
    out: Path,
    weights: Mapping[str, torch.Tensor],
    best_weights: Path | None,
    description: NetworkDescription,
    recipe: Recipe,
    confusion: object | None,
) -> None:
    """Write the files of a finished run's network: the last weights, the best ones, and what its classes are.

    `best_weights` is None if they are the last ones, or lost; `confusion` is of the last validation. Raises `OSError`.
    """
    folder = out / agent_protocol.NETWORK_FOLDER
    out.mkdir(parents=True, exist_ok=True)
    make_folder_below(out, agent_protocol.NETWORK_FOLDER)
    for name in agent_protocol.NETWORK_FILES:  # of an earlier run into the same folder
        (folder / name).unlink(missing_ok=True)
    write_weights(folder / agent_protocol.MODEL_FILE, weights, description, recipe)
    if best_weights:
        os.link(best_weights, folder / agent_protocol.BEST_MODEL_FILE)
    write_atomic(folder / agent_protocol.CLASSES_FILE, to_json_bytes(encode(description)))
    if confusion is not None:
        write_atomic(folder / agent_protocol.CONFUSION_FILE, to_json_bytes(encode(confusion)))


def find_best_weights(
    out: Path, attempts: Iterable[int], history: Sequence[EpochResult], schedule: Schedule
) -> Path | None:
    """Return the intact file of the weights of the best validation, None when that was the last one, or it is lost.

    They are looked for in the folders of these attempts, in this order.
    """
    best = best_epoch(history)
    if best is None or best is history[-1]:
        return None
    step = schedule.steps_at(list(history).index(best) + 1, 0)
    for attempt in attempts:
        path = checkpoint_folder(out, attempt) / best_weights_file(step)
        with contextlib.suppress(DamagedRecord, FileNotFoundError):
            verify_file(path)
            return path
    print(f"the weights of the best validation, after epoch {best.epoch}, are lost", flush=True)
    return None
