"""A trained network in a file: a checkpoint of a run, or the weights that it left. Nothing in the file is executed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from train.models import registry
from train.recipe.schema import Recipe
from train.recipe.validators import MODEL_LIBRARIES
from train.tools import checkpoint_io
from train.tools.agent_protocol import MODEL_FILE
from train.tools.errors import TrainingError, one_line_error
from train.tools.records import DamagedRecord, decode
from train.weights.network_description import NetworkDescription, parse_metadata
from train.weights.run_files import network_weights
from train.weights.safetensors_file import read_safetensors, verify_file

SAFETENSORS_SUFFIX = ".safetensors"
# For more, a network of ours is built without memory first: a file that lies could let a layer fill the memory.
MAX_UNCHECKED_CLASSES = 100_000


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """The weights in a file, the recipe of their run, and what is known of them."""

    path: Path
    weights: Mapping[str, torch.Tensor]
    recipe: Recipe
    description: NetworkDescription

    def build(self) -> nn.Module:
        """Return the network with its weights, in eval mode. Raises `TrainingError` when they do not fit."""
        classes = len(self.description.classes)
        recipe_model = replace(self.recipe.model, weights=None, fc_std=None, compile=False)
        if classes > MAX_UNCHECKED_CLASSES and ":" not in recipe_model.name:
            with torch.device("meta"):
                self._require_shapes(registry.build_model(recipe_model, classes, 0))
        model = registry.build_model(recipe_model, classes, 0)
        self._require_shapes(model)
        model.load_state_dict(self.weights)
        return model.eval()

    def _require_shapes(self, model: nn.Module) -> None:
        own = model.state_dict()
        problem = f"{self.path}: its weights do not fit {self.recipe.model.name}"
        if own.keys() != self.weights.keys():
            raise TrainingError(f"{problem} as this version builds it")
        for name, tensor in own.items():
            if tensor.shape != self.weights[name].shape:
                saved, expected = ("x".join(map(str, each.shape)) for each in (self.weights[name], tensor))
                raise TrainingError(f"{problem} here: {name} is {saved}, not {expected}")


def precision_of(recipe: Recipe) -> str:
    """Return the precision of a network's training; "auto" for "bf16": a GPU without it can be used too."""
    return "auto" if recipe.precision == "bf16" else recipe.precision


def open_trained(path: Path, model_name: str | None = None) -> TrainedNetwork:
    """Open a checkpoint or a file of weights of a run. Raises `TrainingError` when it is missing, damaged or not ours.

    A file names what builds its network. It must not choose a function that runs here, whoever wrote it: `model_name`
    is what the caller knows of the network. Without it, only networks of this project and of libraries are built.
    """
    if path.is_dir():
        raise TrainingError(f"{path}: is a folder; name a file in it, such as {MODEL_FILE}")
    try:
        if path.suffix == SAFETENSORS_SUFFIX:
            description, recipe = parse_metadata(verify_file(path), path)
            weights = read_safetensors(path)
            trained = TrainedNetwork(path=path, weights=weights, recipe=recipe, description=description)
        else:
            trained = _open_checkpoint(path)
    except FileNotFoundError as error:
        raise TrainingError(
            f"{path}: no such checkpoint; a newer one may have replaced it: list the folder again"
        ) from error
    except ValueError as error:  # damaged
        raise TrainingError(str(error)) from error
    except OSError as error:
        raise TrainingError(one_line_error(error)) from error
    own_name = trained.recipe.model.name
    library, colon, _ = own_name.partition(":")
    if model_name is None and colon and library not in MODEL_LIBRARIES:
        raise TrainingError(
            f"{path}: its network is made by {own_name}; a file may not choose which function runs, so name it: "
            f"--model {own_name}"
        )
    if model_name is not None and own_name != model_name:
        raise TrainingError(f"{path}: is of the network {own_name}, not {model_name}")
    return trained


def _open_checkpoint(path: Path) -> TrainedNetwork:
    state = checkpoint_io.load_checkpoint(path)
    try:
        recipe_json = state["identity"]["recipe"]
        # A checkpoint keeps no target, but a phase with validate="near" requires one. Older ones keep no precision.
        recipe_json |= {"target": recipe_json.get("target") or 100.0, "precision": state.get("precision", "auto")}
        recipe = Recipe.from_json(recipe_json)
        description = decode(NetworkDescription, state["network"], path)
        weights = network_weights(state)
        if not all(map(_has_values, weights.values())):
            raise ValueError("a parameter is no tensor with values of its own")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedRecord(f"{path}: was written by another version of imgnet-cluster: {error}") from error
    return TrainedNetwork(path=path, weights=weights, recipe=recipe, description=description)


def _has_values(weight: object) -> bool:
    """Return whether a weight is a dense tensor in memory, all of whose values were in the file."""
    if not isinstance(weight, torch.Tensor) or weight.device.type != "cpu" or weight.layout is not torch.strided:
        return False
    return weight.nbytes <= weight.untyped_storage().nbytes()
