"""Pretrained weights from a file: ours, a state dict of PyTorch, or safetensors. Nothing in a file is ever run."""

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train.tools import checkpoint_io, filesystem
from train.tools.errors import Expected

from . import registry, resnet

DEEPEST = 5  # dicts within dicts: one that holds itself has no end
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
    if isinstance(net, registry.ResNet):
        found = resnet.our_names(without_prefix(found, {"layer1.0.conv1.weight", *own}))
    found = without_prefix(found, own)
    head = classifier_names(net)
    kinds = [name for name in own if name in found and not of_a_kind(found[name], own[name])]
    if kinds:
        one = found[kinds[0]]
        raise Expected(
            f"model, weights: {path} holds {str(one.dtype).removeprefix('torch.')} where this network has real "
            f"numbers: {some(kinds)}; save the network's state_dict() before it is changed, or convert it"
        )
    first = next((name for name in head if name in found), "")
    if first and found[first].ndim and len(found[first]) != len(own[first]):
        theirs, mine = len(found[first]), len(own[first])
        say(f"{path}: its classifier is for {theirs} classes, ours for {mine}: it stays at its own start")
        found = {name: one for name, one in found.items() if name not in head} | {name: own[name] for name in head}
    missing = [name for name in own if name not in found and not name.endswith(COUNTER)]
    unknown = [name for name in found if name not in own]
    shapes = [name for name in own if name in found and found[name].shape != own[name].shape]
    wrong = {"missing": missing, "not known here": unknown, "of another shape": shapes}
    if said := "; ".join(f"{what}: {some(names)}" for what, names in wrong.items() if names):
        raise Expected(f"model, weights: {path} is not of this network; {said}")
    net.load_state_dict({**own, **found})


def of_a_kind(theirs: torch.Tensor, mine: torch.Tensor) -> bool:
    """Whether their values can be taken for ours: for real numbers no complex ones, and no integers."""
    if theirs.is_complex():
        return mine.is_complex()
    return theirs.is_floating_point() or not mine.is_floating_point()


def some(names: list[str]) -> str:
    """Return the first names, and how many there are beyond them."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def classifier_names(net: nn.Module) -> list[str]:
    """Return the names of the classifier's tensors in the network's state, its weight first; none if it is unknown."""
    last = registry.classifier(net)
    if last is None:
        return []
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
    found = _content(path)
    for _ in range(DEEPEST):
        inner = next((one for one in INSIDE if isinstance(found.get(one), dict)), "") if isinstance(found, dict) else ""
        found = found[inner] if inner else found
    if not isinstance(found, dict) or not found or not all(isinstance(one, torch.Tensor) for one in found.values()):
        raise Expected(f"model, weights: {path} holds no weights by name; save the network's state_dict()")
    for name, one in found.items():
        if what := odd(one):
            raise Expected(
                f"model, weights: {path} holds {what}: {name}; save the network's state_dict() with plain tensors"
            )
    return {str(name): one for name, one in found.items()}


def odd(tensor: torch.Tensor) -> str:
    """Return what keeps a tensor from being copied into a network's; empty for a plain one."""
    if tensor.is_meta:
        return "a tensor without values, of the device meta"
    if tensor.is_quantized:
        return "a quantized tensor"
    return "a sparse or nested tensor" if tensor.layout != torch.strided or tensor.is_nested else ""


def _content(path: Path) -> Any:
    """Read a file as what its first bytes say that it is."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(filesystem.MAGIC))
    except OSError as error:
        raise Expected(f"model, weights: {filesystem.one_line(error)}") from error
    if not size:
        raise Expected(f"model, weights: {path} is empty; copy or save it again")
    if path.suffix == ".safetensors" or (start[8:9] == b"{" and int.from_bytes(start[:8], "little") < size):
        return _safetensors(path)
    if start == filesystem.MAGIC.encode():
        return _torch(path, checkpoint_io.load)
    if start.startswith((b"PK", b"\x80")):  # a zip file, or a pickle as torch wrote it before
        return _torch(path, lambda path: torch.load(path, map_location="cpu", weights_only=True))
    raise Expected(
        f"model, weights: {path} is no file of PyTorch, safetensors or ours; save the network's state_dict() with "
        "torch.save"
    )


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
        raise _damaged(path, error) from error


def _torch(path: Path, load: Callable[[Path], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old protocols of pickle, before the error that says it
            return load(path)
    except pickle.UnpicklingError as error:
        raise Expected(
            f"model, weights: {path} is no file of tensors only, and what else it holds is not run here; save the "
            "network's state_dict()"
        ) from error
    except Exception as error:  # a cut zip file, an archive of TorchScript
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> Expected:
    why = f"{type(error).__name__}: {filesystem.one_line(error)}"
    return Expected(f"model, weights: {path} cannot be read ({why}); is it whole? Copy or save it again")
