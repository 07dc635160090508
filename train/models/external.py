"""Networks of other people: timm's and torchvision's where they are installed, or any function's.

They are made without their pretrained weights, which come from a file (train/models/pretrained.py), and looked at before they
train: scores of the right shape, and images of other sizes than they were made for (train/models/input_size.py).
"""

import difflib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from train.recipe.components import Model
from train.tools import user_code
from train.tools.errors import TrainingError
from train.tools.filesystem import one_line_error

from . import input_size

LogFunction = Callable[[str], object]
CLASSIFIER_ATTRIBUTE = "_imgnet_classifier"  # where a network keeps the name of the layer that makes its scores
# What each calls a start of all residual blocks as the identity.
ZERO_INIT_ARGUMENTS = {"timm": "zero_init_last", "torchvision": "zero_init_residual"}


def build_external_model(model: Model, classes: int, log: LogFunction) -> nn.Module:
    """Return a network that is not ours, as the recipe names it. Raises `Expected` where it cannot be had or used."""
    library, _, name = model.name.partition(":")
    if library in ZERO_INIT_ARGUMENTS:
        net, applied = _build_from_library(library, name, classes, model.zero_gamma)
    else:
        net, applied = (
            _build_from_function(model.name, lambda: user_code.import_function("model, name", model.name)(classes)),
            False,
        )
    if model.zero_gamma and not applied and not _call_user_model(model.name, lambda: zero_init_residual(net)):
        log(f"zero_gamma does not apply to {model.name}: its blocks do not say which norm is their last")
    check_trainable(net, model.name)
    side = input_size.find_native_size(net, model.name)
    check_scores_and_find_classifier(net, model.name, classes, side)
    try:
        how = input_size.accept_any_size(net, side)
    except TrainingError as error:
        how = str(error)
    log(f"{model.name}, made for {side} x {side} pixels: {how}")
    return net


def _build_from_library(library: str, name: str, classes: int, zero_gamma: bool) -> tuple[nn.Module, bool]:
    """A network of a library, and whether it has a word for zero gammas."""
    try:
        module = importlib.import_module(library)
        models = module if library == "timm" else importlib.import_module("torchvision.models")
    except ImportError as error:
        raise TrainingError(
            f"model, name: {library}:{name} needs {error.name or library}, which is not installed here "
            f"({one_line_error(error)}); pip install {library}"
        ) from error
    except Exception as error:  # of libraries that do not fit each other
        raise TrainingError(
            f"model, name: {library} cannot be imported here, {user_code.describe_error(error)}"
        ) from error
    known = list(models.list_models())
    if name.partition(".")[0] not in known:  # timm's names may end in a tag of their pretrained weights
        near = difflib.get_close_matches(name, known, 3)
        meant = f"; did you mean {' or '.join(f'{library}:{one}' for one in near)}?" if near else ""
        listed = f"{models.__name__}.list_models() names those that there are"
        raise TrainingError(f"model, name: {library} has no {name!r} here{meant or f'; {listed}'}")

    def made(**more: Any) -> Any:
        if library == "timm":
            return models.create_model(name, pretrained=False, num_classes=classes, **more)
        return models.get_model(name, weights=None, num_classes=classes, **more)

    def either() -> Any:
        try:
            return made(**{ZERO_INIT_ARGUMENTS[library]: zero_gamma}), True
        except TypeError as error:
            if ZERO_INIT_ARGUMENTS[library] not in str(error):
                raise
            return made(), False

    net, applied = _call_user_model(f"{library}:{name}", either)
    return _require_module(f"{library}:{name}", net), applied


def _call_user_model(name: str, function: Callable[[], Any]) -> Any:
    return user_code.call_user_code("model, name", name, function)


def _build_from_function(name: str, function: Callable[[], Any]) -> nn.Module:
    return _require_module(name, _call_user_model(name, function))


def _require_module(name: str, value: object) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise TrainingError(f"model, name: {name} must return a torch.nn.Module, not {type(value).__name__}")
    return value


def zero_init_residual(net: nn.Module) -> int:
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
def preserve_modes_and_buffers(net: nn.Module) -> Iterator[None]:
    """A context that leaves modes and statistics as they were before it."""
    modes = {module: module.training for module in net.modules()}
    kept = [(buffer, buffer.clone()) for buffer in net.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
        for module, mode in modes.items():
            module.training = mode


def check_trainable(net: nn.Module, name: str) -> None:
    """Raise `Expected` unless there is something to train."""
    parameters = list(net.parameters())
    if not parameters:
        raise TrainingError(
            f"model, name: {name} has no parameters, so nothing of it can be trained; its layers must be attributes "
            "of the module, or lie in a ModuleList"
        )
    if not any(one.requires_grad for one in parameters):
        raise TrainingError(
            f"model, name: {name} has requires_grad=False in all its parameters, so nothing of it can be trained; "
            "leave it True, and say frozen=True in a phase that is to train the classifier only"
        )


def check_scores_and_find_classifier(net: nn.Module, name: str, classes: int, side: int) -> None:
    """Raise `Expected` unless two images become scores [2, classes], as in training, that something can be learned of.

    The network keeps the name of the last layer that took part in them, learns, and has as many outputs: whichever it
    calls last, for in what order layers were registered says nothing.
    """
    called: list[nn.Module] = []
    could = {module: place for place, module in net.named_modules() if output_features(module) == classes}
    hooks = [one.register_forward_hook(lambda module, *_: called.append(module)) for one in could]
    with preserve_modes_and_buffers(net):
        net.train()
        scores = _call_user_model(name, lambda: net(torch.zeros(2, 3, side, side)))
    for hook in hooks:
        hook.remove()
    if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != (2, classes):
        found = f"a tensor of {list(scores.shape)}" if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise TrainingError(
            f"model, name: {name} must make scores [2, {classes}] of two images in training, not {found}; a function "
            "of your own can build it with the right number of classes, and without further outputs"
        )
    learned = params_reached_by_grad(scores)
    if not learned:
        raise TrainingError(
            f"model, name: no parameter of {name} gets a gradient from its scores, so nothing of it can be trained; "
            "look for no_grad() and detach() in it"
        )
    order = [*could, *called]  # a layer whose weights are used without calling it comes before those that are called
    makers = [one for one in order if any(id(parameter) in learned for parameter in one.parameters())]
    object.__setattr__(net, CLASSIFIER_ATTRIBUTE, could[makers[-1]] if makers else None)


def output_features(module: nn.Module) -> int:
    """Return how many values a Linear or a 1x1 convolution makes, 0 for any other layer."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, nn.Conv2d) and set(module.kernel_size) == {1} else 0


def params_reached_by_grad(scores: torch.Tensor) -> set[int]:
    """Return the parameters that get a gradient from scores, by their ids."""
    found, seen, ahead = set[int](), set[Any](), [scores.grad_fn]
    while ahead:
        step = ahead.pop()
        if step is not None and step not in seen:
            seen.add(step)
            found |= {id(step.variable)} if hasattr(step, "variable") else set()
            ahead += [one for one, _ in step.next_functions]
    return found
