"""Pretrained weights from a file: ours, a state dict of PyTorch, or safetensors. Nothing in a file is ever run."""

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoint, files, models, resnets
from .report import Expected

INSIDE = ("model", "state_dict", "model_state_dict")  # where checkpoints of ours, of timm and of Lightning keep them
PREFIXES = ("module.", "model.", "_orig_mod.")  # of DistributedDataParallel, Lightning, torch.compile
SHOWN = 4  # names in a message
COUNTER = "num_batches_tracked"  # old files do not have it, and nothing depends on it here


def load(net: nn.Module, file: str, say: Callable[[str], object] = lambda text: None) -> None:
    """Give the network the weights of a file. `say` is told in a line what of the file was not used.

    A classifier for another number of classes stays at its own start. Raises `Expected` when the file cannot be read,
    or anything else in it is missing, unknown or of another shape.
    """
    path = Path(file).expanduser()
    own, found = net.state_dict(), read(path)
    if isinstance(net, models.ResNet):
        found = resnets.our_names(without_prefix(found, {"layer1.0.conv1.weight", *own}))
    found = without_prefix(found, own)
    head = classifier_names(net)
    if any(name in found and found[name].shape[:1] != own[name].shape[:1] for name in head):
        theirs, mine = (len(one[head[0]]) for one in (found, own)) if head[0] in found else (0, 0)
        say(f"{path}: its classifier is for {theirs} classes, ours for {mine}: it stays at its own start")
        found = {name: one for name, one in found.items() if name not in head} | {name: own[name] for name in head}
    missing = [name for name in own if name not in found and not name.endswith(COUNTER)]
    unknown = [name for name in found if name not in own]
    shapes = [name for name in own if name in found and found[name].shape != own[name].shape]
    wrong = {"missing": missing, "not known here": unknown, "of another shape": shapes}
    if said := "; ".join(f"{what}: {some(names)}" for what, names in wrong.items() if names):
        raise Expected(f"model, weights: {path} is not of this network; {said}")
    net.load_state_dict({**own, **found})


def some(names: list[str]) -> str:
    """Return the first names, and how many there are beyond them."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def classifier_names(net: nn.Module) -> list[str]:
    """Return the names of the classifier's tensors in the network's state, its weight first."""
    last = models.classifier(net)
    place = next(name for name, module in net.named_modules() if module is last)
    return [f"{place}.{name}".removeprefix(".") for name in last.state_dict()]


def without_prefix(state: Mapping[str, torch.Tensor], own: Any) -> dict[str, torch.Tensor]:
    """Return a state without the prefix that wrappers put before each name, where no name is our own as it is."""
    found = dict(state)
    while not found.keys() & set(own):
        prefix = next((one for one in PREFIXES if all(name.startswith(one) for name in found)), "")
        if not prefix:
            break
        found = {name.removeprefix(prefix): one for name, one in found.items()}
    return found


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name. Raises `Expected` when there are none that can be read safely."""
    if not path.is_file():
        raise Expected(f"model, weights: {path}: there is no such file on this machine")
    found = _safetensors(path) if path.suffix == ".safetensors" else _torch(path)
    while isinstance(found, dict) and (inner := next((one for one in INSIDE if isinstance(found.get(one), dict)), "")):
        found = found[inner]
    if not isinstance(found, dict) or not found or not all(isinstance(one, torch.Tensor) for one in found.values()):
        raise Expected(f"model, weights: {path} holds no weights by name; save the network's state_dict()")
    return {str(name): one for name, one in found.items()}


def _safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise Expected(
            f"model, weights: {path} needs safetensors, which is not installed here; pip install safetensors"
        ) from error
    try:
        return load_file(path)
    except Exception as error:  # its own kinds are not importable everywhere
        raise Expected(f"model, weights: {path} cannot be read, {files.one_line(error)}") from error


def _torch(path: Path) -> Any:
    with path.open("rb") as file:
        sealed = file.read(len(files.MAGIC)) == files.MAGIC.encode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old protocols of pickle, before the error that says it
            return checkpoint.load(path) if sealed else torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Expected(
            f"model, weights: {path} is no file of tensors only, and what else it holds is not run here; save the "
            "network's state_dict()"
        ) from error
    except Exception as error:  # a cut zip file, an archive of TorchScript
        raise Expected(f"model, weights: {path} cannot be read, {files.one_line(error)}") from error
