"""Adapts networks with a fixed input size to images of any size.

A network that flattens its last feature map into a Linear takes images of one size only. At any other size, that map is
brought to its native number of positions by adaptive average pooling, as torchvision's VGG does it. At the native size
nothing changes. No layer is renamed and no weight is reshaped.

A network that ends in global pooling takes any size already. One that checks the size of its images is left as it is; a
recipe with other sizes is then refused.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

from train.tools import user_code
from train.tools.errors import TrainingError

CANDIDATE_SIZES = (224, 227, 256, 299, 288, 192, 160, 128, 96, 64, 32, 28)  # usual native sizes, the likeliest first


def find_native_size(net: nn.Module, name: str) -> int:
    """Return the side in pixels of a square image that the network accepts: timm's stated size, else a usual one.

    Raises `TrainingError` when it accepts none of them.
    """
    config = getattr(net, "default_cfg", None) or getattr(net, "pretrained_cfg", None) or {}
    stated_shape = config.get("input_size") if isinstance(config, dict) else None  # timm's, (channels, h, w)
    stated_sizes = [int(stated_shape[-1])] if stated_shape else []
    first_error = ""
    for side in [*stated_sizes, *CANDIDATE_SIZES]:
        error = forward_error(net, side, side)
        if not error:
            return side
        first_error = first_error or f"at {side} x {side} pixels: {error}"
    raise TrainingError(f"model, name: {name} accepts no images of the usual sizes; {first_error}")


def forward_error(net: nn.Module, height: int, width: int) -> str:
    """Return why the network fails on one image of this shape, in one line; "" when it does not fail."""
    parameter = next(net.parameters())
    with preserve_modes_and_buffers(net), torch.no_grad():
        net.eval()
        try:
            scores = net(torch.zeros(1, 3, height, width, device=parameter.device, dtype=parameter.dtype))
        except (Exception, SystemExit) as error:  # user code may raise anything
            return user_code.describe_error(error)
    if isinstance(scores, torch.Tensor) and len(scores) != 1:
        return f"one image becomes {len(scores)} rows of scores"
    return ""


@contextmanager
def preserve_modes_and_buffers(net: nn.Module) -> Iterator[None]:
    """Restore each module's train/eval mode and all buffers (running statistics) at the end of the context."""
    modes = {module: module.training for module in net.modules()}
    saved_buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, saved in saved_buffers:
                buffer.copy_(saved)
        for module, mode in modes.items():
            module.training = mode


def accept_any_size(net: nn.Module, native_size: int) -> str:
    """Make a network accept rectangles and other sizes than its native one. Returns how, in one line.

    Raises `TrainingError` with the reason when the network accepts its native size only; it is then unchanged.
    """
    shapes = (native_size + 32, native_size), (native_size, native_size + 64)  # a tall and a wide rectangle
    errors = [forward_error(net, *shape) for shape in shapes]
    if not any(errors):
        return "accepts any size, because it pools before its classifier"
    if last_map := _find_last_map(net, native_size):
        module, size = last_map

        def pool(_: nn.Module, __: object, features: torch.Tensor) -> torch.Tensor:
            return features if features.shape[2:] == size else adaptive_avg_pool2d(features, size)

        hook = module.register_forward_hook(pool)
        errors = [forward_error(net, *shape) for shape in shapes]
        if not any(errors):
            height, width = size
            return f"accepts other sizes, because its last feature map is pooled to its native {height} x {width}"
        hook.remove()
    raise TrainingError(f"the model accepts only its native input size: {next(filter(None, errors))}")


def _find_last_map(net: nn.Module, side: int) -> tuple[nn.Module, tuple[int, int]] | None:
    """Return the module that makes the last feature map, and the map's height and width at a size; None without one.

    A module that is called several times does not count: its earlier maps have other sizes.
    """
    calls, map_sizes = Counter[nn.Module](), dict[nn.Module, tuple[int, int]]()

    def record(module: nn.Module, _: object, output: object) -> None:
        calls[module] += 1
        if isinstance(output, torch.Tensor) and output.ndim == 4:
            map_sizes[module] = output.shape[2], output.shape[3]

    hooks = [module.register_forward_hook(record) for module in net.modules() if module is not net]
    forward_error(net, side, side)
    for hook in hooks:
        hook.remove()
    called_once = [(module, size) for module, size in map_sizes.items() if calls[module] == 1]
    return called_once[-1] if called_once else None


def check_shapes(net: nn.Module, name: str, shapes: Iterable[tuple[int, int]]) -> None:
    """Raise `TrainingError` when the network fails on one of the shapes (height, width) that a run will use."""
    for height, width in sorted(set(shapes)):
        if error := forward_error(net, height, width):
            raise TrainingError(
                f"model, name: {name} accepts no images of {height} x {width} pixels ({error}); use its native size in "
                "every phase and no rectangles, or use another model"
            )
