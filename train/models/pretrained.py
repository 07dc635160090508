"""Pretrained weights from a file: ours, a state dict of PyTorch, or safetensors. Nothing in a file is ever run."""

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train.tools import checkpoint_io, filesystem
from train.tools.errors import TrainingError

from . import registry, resnet

MAX_NESTING = 5  # dicts within dicts: one that holds itself has no end
STATE_DICT_KEYS = (
    "model",
    "state_dict",
    "model_state_dict",
)  # where checkpoints of ours, of timm and of Lightning keep them
WRAPPER_PREFIXES = ("module.", "model.", "_orig_mod.")  # of DistributedDataParallel, Lightning, torch.compile
MAX_NAMES_SHOWN = 4  # names in a message
BATCH_COUNTER_SUFFIX = "num_batches_tracked"  # old files do not have it, and nothing depends on it here


def load_pretrained(net: nn.Module, file: str, log: Callable[[str], object] = lambda text: None) -> None:
    """Give the network the weights of a file. `say` is told in a line what of the file was not used.

    A classifier for another number of classes stays at its own start. Raises `Expected` when the file cannot be read,
    or anything else in it is missing, unknown or of another shape.
    """
    path = Path(file).expanduser()
    own, found = net.state_dict(), read_state_dict(path)
    if isinstance(net, registry.ResNet):
        found = resnet.convert_torchvision_keys(strip_wrapper_prefix(found, {"layer1.0.conv1.weight", *own}))
    found = strip_wrapper_prefix(found, own)
    head = classifier_keys(net)
    kinds = [name for name in own if name in found and not is_compatible_dtype(found[name], own[name])]
    if kinds:
        one = found[kinds[0]]
        raise TrainingError(
            f"model, weights: {path} holds {str(one.dtype).removeprefix('torch.')} where this network has real "
            f"numbers: {format_names(kinds)}; save the network's state_dict() before it is changed, or convert it"
        )
    first = next((name for name in head if name in found), "")
    if first and found[first].ndim and len(found[first]) != len(own[first]):
        theirs, mine = len(found[first]), len(own[first])
        log(f"{path}: its classifier is for {theirs} classes, ours for {mine}: it stays at its own start")
        found = {name: one for name, one in found.items() if name not in head} | {name: own[name] for name in head}
    missing = [name for name in own if name not in found and not name.endswith(BATCH_COUNTER_SUFFIX)]
    unknown = [name for name in found if name not in own]
    shapes = [name for name in own if name in found and found[name].shape != own[name].shape]
    wrong = {"missing": missing, "not known here": unknown, "of another shape": shapes}
    if said := "; ".join(f"{what}: {format_names(names)}" for what, names in wrong.items() if names):
        raise TrainingError(f"model, weights: {path} is not of this network; {said}")
    net.load_state_dict({**own, **found})


def is_compatible_dtype(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether their values can be taken for ours: for real numbers no complex ones, and no integers."""
    if source.is_complex():
        return target.is_complex()
    return source.is_floating_point() or not target.is_floating_point()


def format_names(names: list[str]) -> str:
    """Return the first names, and how many there are beyond them."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more


def classifier_keys(net: nn.Module) -> list[str]:
    """Return the names of the classifier's tensors in the network's state, its weight first; none if it is unknown."""
    last = registry.find_classifier(net)
    if last is None:
        return []
    place = next(name for name, module in net.named_modules() if module is last)
    return [f"{place}.{name}".removeprefix(".") for name in last.state_dict()]


def strip_wrapper_prefix(state: Mapping[str, torch.Tensor], model_keys: Any) -> dict[str, torch.Tensor]:
    """Return a state without the prefix that wrappers put before each name, where no name is our own as it is."""
    found = dict(state)
    while not found.keys() & set(model_keys):
        prefix = next((one for one in WRAPPER_PREFIXES if all(name.startswith(one) for name in found)), "")
        if not prefix:
            break
        found = {name.removeprefix(prefix): one for name, one in found.items()}
    return found


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name. Raises `Expected` when there are none that can be read safely."""
    if not path.is_file():
        raise TrainingError(f"model, weights: {path}: there is no such file on this machine")
    found = _read_file(path)
    for _ in range(MAX_NESTING):
        inner = (
            next((one for one in STATE_DICT_KEYS if isinstance(found.get(one), dict)), "")
            if isinstance(found, dict)
            else ""
        )
        found = found[inner] if inner else found
    if not isinstance(found, dict) or not found or not all(isinstance(one, torch.Tensor) for one in found.values()):
        raise TrainingError(f"model, weights: {path} holds no weights by name; save the network's state_dict()")
    for name, one in found.items():
        if what := unsupported_kind(one):
            raise TrainingError(
                f"model, weights: {path} holds {what}: {name}; save the network's state_dict() with plain tensors"
            )
    return {str(name): one for name, one in found.items()}


def unsupported_kind(tensor: torch.Tensor) -> str:
    """Return what keeps a tensor from being copied into a network's; empty for a plain one."""
    if tensor.is_meta:
        return "a tensor without values, of the device meta"
    if tensor.is_quantized:
        return "a quantized tensor"
    return "a sparse or nested tensor" if tensor.layout != torch.strided or tensor.is_nested else ""


def _read_file(path: Path) -> Any:
    """Read a file as what its first bytes say that it is."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(filesystem.CHECKSUM_MAGIC))
    except OSError as error:
        raise TrainingError(f"model, weights: {filesystem.one_line_error(error)}") from error
    if not size:
        raise TrainingError(f"model, weights: {path} is empty; copy or save it again")
    if path.suffix == ".safetensors" or (start[8:9] == b"{" and int.from_bytes(start[:8], "little") < size):
        return _read_safetensors(path)
    if start == filesystem.CHECKSUM_MAGIC.encode():
        return _read_torch_file(path, checkpoint_io.load_checkpoint)
    if start.startswith((b"PK", b"\x80")):  # a zip file, or a pickle as torch wrote it before
        return _read_torch_file(path, lambda path: torch.load(path, map_location="cpu", weights_only=True))
    raise TrainingError(
        f"model, weights: {path} is no file of PyTorch, safetensors or ours; save the network's state_dict() with "
        "torch.save"
    )


def _read_safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise TrainingError(
            f"model, weights: {path} needs safetensors, which is not installed here; pip install safetensors"
        ) from error
    try:
        return load_file(path)
    except Exception as error:  # its own kinds are not importable everywhere
        raise _damaged_error(path, error) from error


def _read_torch_file(path: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old protocols of pickle, before the error that says it
            return reader(path)
    except pickle.UnpicklingError as error:
        raise TrainingError(
            f"model, weights: {path} is no file of tensors only, and what else it holds is not run here; save the "
            "network's state_dict()"
        ) from error
    except Exception as error:  # a cut zip file, an archive of TorchScript
        raise _damaged_error(path, error) from error


def _damaged_error(path: Path, error: Exception) -> TrainingError:
    why = f"{type(error).__name__}: {filesystem.one_line_error(error)}"
    return TrainingError(f"model, weights: {path} cannot be read ({why}); is it whole? Copy or save it again")
