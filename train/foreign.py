"""Networks of other people: timm's and torchvision's where they are installed, or any function's.

They are made without their pretrained weights, which come from a file (train/weights.py), and looked at before they
train: scores of the right shape, and images of other sizes than they were made for (train/size_free.py).
"""

import difflib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from . import callables, size_free
from .files import one_line
from .recipe import Model
from .report import Expected

Say = Callable[[str], object]
# What each calls a start of all residual blocks as the identity.
SILENT = {"timm": "zero_init_last", "torchvision": "zero_init_residual"}


def make(model: Model, classes: int, say: Say) -> nn.Module:
    """Return a network that is not ours, as the recipe names it. Raises `Expected` where it cannot be had or used."""
    library, _, name = model.name.partition(":")
    if library in SILENT:
        net, applied = _of_library(library, name, classes, model.zero_gamma)
    else:
        net, applied = _called(model.name, lambda: callables.find("model, name", model.name)(classes)), False
    if model.zero_gamma and not applied and not silence(net):
        say(f"zero_gamma does not apply to {model.name}: its blocks do not say which norm is their last")
    side = size_free.native(net, model.name)
    check_scores(net, model.name, classes, side)
    try:
        how = size_free.free(net, side)
    except Expected as error:
        how = str(error)
    say(f"{model.name}, made for {side} x {side} pixels: {how}")
    return net


def _of_library(library: str, name: str, classes: int, zero_gamma: bool) -> tuple[nn.Module, bool]:
    """A network of a library, and whether it has a word for zero gammas."""
    try:
        module = importlib.import_module(library)
        models = module if library == "timm" else importlib.import_module("torchvision.models")
    except ImportError as error:
        raise Expected(
            f"model, name: {library}:{name} needs {error.name or library}, which is not installed here "
            f"({one_line(error)}); pip install {library}"
        ) from error
    known = list(models.list_models())
    if name.partition(".")[0] not in known:  # timm's names may end in a tag of their pretrained weights
        near = difflib.get_close_matches(name, known, 3)
        meant = f"; did you mean {' or '.join(f'{library}:{one}' for one in near)}?" if near else ""
        listed = f"{models.__name__}.list_models() names those that there are"
        raise Expected(f"model, name: {library} has no {name!r} here{meant or f'; {listed}'}")

    def made(**more: Any) -> Any:
        if library == "timm":
            return models.create_model(name, pretrained=False, num_classes=classes, **more)
        return models.get_model(name, weights=None, num_classes=classes, **more)

    def either() -> Any:
        try:
            return made(**{SILENT[library]: zero_gamma}), True
        except TypeError as error:
            if SILENT[library] not in str(error):
                raise
            return made(), False

    net, applied = _tried(f"{library}:{name}", either)
    return _module(f"{library}:{name}", net), applied


def _tried(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Expected:
        raise
    except Exception as error:  # whatever somebody's network may raise becomes one line; the log has the trace
        raise Expected(f"model, name: {name} fails, {type(error).__name__}: {one_line(error)}") from error


def _called(name: str, make: Callable[[], Any]) -> nn.Module:
    return _module(name, _tried(name, make))


def _module(name: str, found: object) -> nn.Module:
    if not isinstance(found, nn.Module):
        raise Expected(f"model, name: {name} must return a torch.nn.Module, not {type(found).__name__}")
    return found


def silence(net: nn.Module) -> int:
    """Start the last norm of each residual block at 0 and return how many there are: of blocks that have it as
    `last_norm`, as ours, or have timm's method `zero_init_last`.
    """
    found = 0
    for module in net.modules():
        last, method = getattr(module, "last_norm", None), getattr(module, "zero_init_last", None)
        if isinstance(last, nn.Module) and isinstance(last.weight, nn.Parameter):
            nn.init.zeros_(last.weight)
            found += 1
        elif callable(method):
            method()
            found += 1
    return found


@contextmanager
def untouched(net: nn.Module) -> Iterator[None]:
    """A context that leaves modes and statistics as they were before it."""
    modes = {module: module.training for module in net.modules()}
    kept = [(buffer, buffer.clone()) for buffer in net.buffers()]
    try:
        with torch.no_grad():
            yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)
        for module, mode in modes.items():
            module.training = mode


def check_scores(net: nn.Module, name: str, classes: int, side: int) -> None:
    """Raise `Expected` unless two images become scores [2, classes], as in training."""
    with untouched(net):
        net.train()
        scores = _tried(name, lambda: net(torch.zeros(2, 3, side, side)))
    if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != (2, classes):
        found = f"a tensor of {list(scores.shape)}" if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise Expected(
            f"model, name: {name} must make scores [2, {classes}] of two images in training, not {found}; a function "
            "of your own can build it with the right number of classes, and without further outputs"
        )
