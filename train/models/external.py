"""Builds networks that this project does not define: timm's, torchvision's, or those of a function of the user.

They are built without pretrained weights, which come from a file (train/models/pretrained.py). Before training, each is
tried once: its scores must have the right shape, and it is adapted to other image sizes if possible (input_size.py).
"""

import difflib
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn

from train.recipe.components import Model
from train.tools import user_code
from train.tools.errors import TrainingError, one_line_error

from . import input_size

NAME_FIELD = "model, name"  # of the recipe, in errors
LogFunction = Callable[[str], object]
CLASSIFIER_ATTRIBUTE = "_imgnet_classifier"  # attribute of a network: the name of the layer that makes its scores
# Each library's name for the argument that starts all residual blocks as the identity (gamma 0 in their last norm).
ZERO_INIT_ARGUMENTS = {"timm": "zero_init_last", "torchvision": "zero_init_residual"}


def build_external_model(model: Model, classes: int, log: LogFunction) -> nn.Module:
    """Build and check the external network that a recipe names.

    `log` receives one line about each setting that does not apply, and one about the image sizes the network accepts.
    Raises `TrainingError` when it cannot be built or cannot be trained.
    """
    library, _, name = model.name.partition(":")
    if library in ZERO_INIT_ARGUMENTS:
        value, zero_gamma_applied = _build_from_library(library, name, classes, model.zero_gamma)
    else:
        function = user_code.import_function(NAME_FIELD, model.name)
        value = user_code.call_user_code(NAME_FIELD, model.name, lambda: function(classes))
        zero_gamma_applied = False
    if not isinstance(value, nn.Module):
        raise TrainingError(f"model, name: {model.name} must return a torch.nn.Module, not {type(value).__name__}")
    net = value
    if model.zero_gamma and not zero_gamma_applied:
        zeroed_blocks = user_code.call_user_code(NAME_FIELD, model.name, lambda: zero_init_residual(net))
        if not zeroed_blocks:
            log(f"zero_gamma has no effect on {model.name}: its blocks do not tell which norm is their last")
    check_trainable(net, model.name)
    native_size = input_size.find_native_size(net, model.name)
    check_scores_and_find_classifier(net, model.name, classes, native_size)
    try:
        size_note = input_size.accept_any_size(net, native_size)
    except TrainingError as error:
        size_note = str(error)
    log(f"{model.name}, designed for {native_size} x {native_size} pixels: {size_note}")
    return net


def _build_from_library(library: str, name: str, classes: int, zero_gamma: bool) -> tuple[object, bool]:
    """Return what a library builds, and whether the library has applied `zero_gamma` (or its absence) itself."""
    try:
        module = importlib.import_module(library)
        models = module if library == "timm" else importlib.import_module("torchvision.models")
    except ImportError as error:
        raise TrainingError(
            f"model, name: {library}:{name} needs {error.name or library}, which is not installed here "
            f"({one_line_error(error)}); install it: pip install {library}"
        ) from error
    except Exception as error:  # for example a torchvision that was built for another torch
        reason = user_code.describe_error(error)
        raise TrainingError(f"model, name: {library} cannot be imported here, {reason}") from error
    _check_library_has_model(library, models, name)

    def build(**arguments: object) -> object:
        if library == "timm":
            return models.create_model(name, pretrained=False, num_classes=classes, **arguments)
        return models.get_model(name, weights=None, num_classes=classes, **arguments)

    zero_init = ZERO_INIT_ARGUMENTS[library]

    def build_with_zero_gamma_if_known() -> tuple[object, bool]:
        try:
            return build(**{zero_init: zero_gamma}), True
        except TypeError as error:
            if zero_init not in str(error):
                raise
            return build(), False

    return user_code.call_user_code(NAME_FIELD, f"{library}:{name}", build_with_zero_gamma_if_known)


def _check_library_has_model(library: str, models: ModuleType, name: str) -> None:
    known_names = list(models.list_models())
    if name.partition(".")[0] in known_names:  # timm's names may end in a tag of their pretrained weights
        return
    similar_names = difflib.get_close_matches(name, known_names, 3)
    if similar_names:
        hint = f"did you mean {' or '.join(f'{library}:{similar}' for similar in similar_names)}?"
    else:
        hint = f"{models.__name__}.list_models() lists the known ones"
    raise TrainingError(f"model, name: {library} has no model {name!r} here; {hint}")


def zero_init_residual(net: nn.Module) -> int:
    """Zero gamma in each block's last norm (`last_norm`, or timm's `zero_init_last`), and return their number."""
    block_count = 0
    for module in net.modules():
        last_norm = getattr(module, "last_norm", None)
        timm_method = getattr(module, "zero_init_last", None)
        if isinstance(last_norm, nn.Module) and isinstance(last_norm.weight, nn.Parameter):
            nn.init.zeros_(last_norm.weight)
            block_count += 1
        elif callable(timm_method):
            timm_method()
            block_count += 1
    return block_count


def check_trainable(net: nn.Module, name: str) -> None:
    """Raise `TrainingError` unless the network has a parameter that requires a gradient."""
    parameters = list(net.parameters())
    if not parameters:
        raise TrainingError(
            f"model, name: {name} has no parameters, so it cannot be trained; make its layers attributes of the "
            "module, or put them into an nn.ModuleList"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise TrainingError(
            f"model, name: {name} has requires_grad=False in all its parameters, so it cannot be trained; keep "
            "requires_grad=True, and set frozen=True in phases that train only the classifier"
        )


def check_scores_and_find_classifier(net: nn.Module, name: str, classes: int, side: int) -> None:
    """Check that two images give trainable scores [2, classes] in train mode, and record the classifier's name.

    The classifier is the layer that was called last, not registered last, among those that have `classes` outputs and
    contribute, with a gradient, to the scores. Its name, or None, is kept in the network's `CLASSIFIER_ATTRIBUTE`.
    Raises `TrainingError` when the scores have another shape, or none of them depends on a parameter.
    """
    candidates = {module: path for path, module in net.named_modules() if output_features(module) == classes}
    called: list[nn.Module] = []
    hooks = [candidate.register_forward_hook(lambda module, *_: called.append(module)) for candidate in candidates]
    with input_size.preserve_modes_and_buffers(net):
        net.train()
        scores = user_code.call_user_code(NAME_FIELD, name, lambda: net(torch.zeros(2, 3, side, side)))
    for hook in hooks:
        hook.remove()
    if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != (2, classes):
        actual = f"a tensor {list(scores.shape)}" if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise TrainingError(
            f"model, name: {name} must return scores [2, {classes}] for two images in train mode, not {actual}; a "
            "function of your own can build it with the right number of classes and without auxiliary outputs"
        )
    reached_ids = params_reached_by_grad(scores)
    if not reached_ids:
        raise TrainingError(
            f"model, name: no parameter of {name} gets a gradient from its scores, so it cannot be trained; "
            "look for no_grad() and detach() in it"
        )
    # Candidates that were never called come first: their weights may be used without a call.
    in_order = [*candidates, *called]
    contributing = [module for module in in_order if reached_ids.intersection(map(id, module.parameters()))]
    object.__setattr__(net, CLASSIFIER_ATTRIBUTE, candidates[contributing[-1]] if contributing else None)


def output_features(module: nn.Module) -> int:
    """Return the number of outputs of a Linear or a 1x1 convolution, 0 for any other layer."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, nn.Conv2d) and set(module.kernel_size) == {1} else 0


def params_reached_by_grad(scores: torch.Tensor) -> set[int]:
    """Return the ids of the parameters that get a gradient from the scores, by walking the autograd graph."""
    parameter_ids = set[int]()
    visited = set[object]()
    pending = [scores.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            parameter_ids.add(id(node.variable))
        pending += [next_node for next_node, _ in node.next_functions]
    return parameter_ids
