"""Loads pretrained weights: checkpoints of this project, PyTorch state dicts, safetensors. No file is ever executed."""

import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from train.tools import checkpoint_io, errors, sealed_files
from train.tools.errors import TrainingError
from train.weights.safetensors_file import read_safetensors

from . import registry

MAX_NESTING = 5  # dicts within dicts; a dict that contains itself would have no end
# As in our checkpoints, timm's and Lightning's. Where a file of ours or of timm has averaged weights, they are meant.
STATE_DICT_KEYS = ("average", "state_dict_ema", "model", "state_dict", "model_state_dict")
WRAPPER_PREFIXES = ("module.", "model.", "_orig_mod.")  # of DistributedDataParallel, Lightning, torch.compile
MAX_NAMES_SHOWN = 4  # tensor names in an error message
BATCH_COUNTER_SUFFIX = "num_batches_tracked"  # missing in old files; nothing here depends on its value


def load_pretrained(net: nn.Module, file: str, log: Callable[[str], object] = lambda text: None) -> None:
    """Load a file's weights into a network.

    A classifier for another number of classes is not loaded; `log` then receives one line. Raises `TrainingError` when
    the file cannot be read, or when any other tensor is missing, unknown, or of another shape or kind.
    """
    path = Path(file).expanduser()
    own = net.state_dict()
    loaded = strip_wrapper_prefix(read_state_dict(path), own)

    wrong_kind = [name for name in own if name in loaded and not _can_be_copied(loaded[name], own[name])]
    if wrong_kind:
        dtype = str(loaded[wrong_kind[0]].dtype).removeprefix("torch.")
        raise TrainingError(
            f"model, weights: {path} holds {dtype} instead of floating-point weights: {format_names(wrong_kind)}; save "
            "the network's state_dict() before it is converted or quantized, or convert it back"
        )

    head = classifier_keys(net)
    head_key = next((name for name in head if name in loaded), "")
    if head_key and loaded[head_key].ndim and len(loaded[head_key]) != len(own[head_key]):
        log(
            f"{path}: its classifier has {len(loaded[head_key])} classes, this network {len(own[head_key])}: the "
            "classifier keeps its own initial weights"
        )
        without_head = {name: tensor for name, tensor in loaded.items() if name not in head}
        loaded = without_head | {name: own[name] for name in head}

    problems = {
        "missing": [name for name in own if name not in loaded and not name.endswith(BATCH_COUNTER_SUFFIX)],
        "unknown": [name for name in loaded if name not in own],
        "of another shape": [name for name in own if name in loaded and loaded[name].shape != own[name].shape],
    }
    if text := "; ".join(f"{problem}: {format_names(names)}" for problem, names in problems.items() if names):
        raise TrainingError(f"model, weights: {path} does not fit this network; {text}")
    net.load_state_dict({**own, **loaded})


def _can_be_copied(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether the type of a tensor fits: not complex into real, nor integers into real."""
    return target.is_complex() if source.is_complex() else source.is_floating_point() or not target.is_floating_point()


def format_names(names: list[str]) -> str:
    """Return the first names of a list, and the number of those left out."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more


def classifier_keys(net: nn.Module) -> list[str]:
    """Return the state-dict names of the classifier's tensors, its weight first; [] when it is not known."""
    classifier = registry.find_classifier(net)
    if classifier is None:
        return []
    path = next(name for name, module in net.named_modules() if module is classifier)
    return [f"{path}.{name}".removeprefix(".") for name in classifier.state_dict()]


def strip_wrapper_prefix(state: Mapping[str, torch.Tensor], model_keys: Collection[str]) -> dict[str, torch.Tensor]:
    """Remove the prefixes that wrappers put before every name, until one name is among `model_keys`."""
    stripped = dict(state)
    while not stripped.keys() & set(model_keys):
        prefix = next((prefix for prefix in WRAPPER_PREFIXES if all(name.startswith(prefix) for name in stripped)), "")
        if not prefix:
            break
        stripped = {name.removeprefix(prefix): tensor for name, tensor in stripped.items()}
    return stripped


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors by name. Raises `TrainingError` when it holds none, or cannot be read safely."""
    where = f"model, weights: {path}"
    if not path.is_file():
        raise TrainingError(f"{where}: no such file on this machine; put it there, or correct the recipe")
    content = _read_file(path)
    for _ in range(MAX_NESTING):
        if not isinstance(content, dict):
            break
        key = next((key for key in STATE_DICT_KEYS if isinstance(content.get(key), dict) and content[key]), "")
        if not key:
            break
        content = content[key]
    tensors = content if isinstance(content, dict) else {}
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise TrainingError(f"{where} holds no tensors by name; save the network's state_dict()")
    for name, tensor in tensors.items():
        if kind := unsupported_kind(tensor):
            raise TrainingError(f"{where} holds {kind}: {name}; save the network's state_dict() with plain tensors")
    return {str(name): tensor for name, tensor in tensors.items()}


def unsupported_kind(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor whose values cannot be copied into a parameter; "" for a plain tensor."""
    if tensor.is_meta:
        return "a tensor without values, of the device meta"
    if tensor.is_quantized:
        return "a quantized tensor"
    return "a sparse or nested tensor" if tensor.layout != torch.strided or tensor.is_nested else ""


def _read_file(path: Path) -> object:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(9)
        is_sealed = sealed_files.is_sealed(path)
    except OSError as error:
        raise TrainingError(f"model, weights: {errors.one_line_error(error)}") from error
    if not size:
        raise TrainingError(f"model, weights: {path} is empty; copy or save it again")
    # A safetensors file starts with the length of its JSON header, in 8 bytes, and then the header.
    if path.suffix == ".safetensors" or (start[8:9] == b"{" and int.from_bytes(start[:8], "little") < size):
        return _read_with(path, read_safetensors)
    if is_sealed:
        return _read_with(path, checkpoint_io.load_checkpoint)
    if start.startswith((b"PK", b"\x80")):  # a zip archive, or a pickle as older versions of torch wrote
        return _read_with(path, lambda path: torch.load(path, map_location="cpu", weights_only=True))
    raise TrainingError(
        f"model, weights: {path} is not a PyTorch file, a safetensors file or a checkpoint of this program; save the "
        "network's state_dict() with torch.save"
    )


def _read_with(path: Path, reader: Callable[[Path], object]) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickle protocols; the error below says what matters
            return reader(path)
    except Exception as error:  # a truncated zip archive, a TorchScript archive
        if isinstance(error.__cause__ or error, pickle.UnpicklingError):
            raise TrainingError(
                f"model, weights: {path} holds more than tensors, and code from files is never executed here; save "
                "the network's state_dict()"
            ) from error
        cause = f"{type(error).__name__}: {errors.one_line_error(error)}"
        problem = f"cannot be read ({cause}); is it complete? Copy or save it again"
        raise TrainingError(f"model, weights: {path} {problem}") from error
