"""Adapts networks with a fixed input size to images of any size.

A network that flattens its last feature map into a Linear takes images of one size only. At any other size, the Linear
is applied as a sliding window over the feature map, that is, as a convolution whose kernel has the size of the native
map; the layers behind it run at each position, and the scores are averaged over the positions (Simonyan and Zisserman
2014, section 3.2). A map that is smaller than the native one in a direction is first enlarged to it, by adaptive
pooling. At the native size the scores are equal bit for bit. No layer is renamed and no weight is reshaped.

A network that ends in global pooling takes any size already. One that depends on its size in another way, such as a
transformer with a table of positions, is left as it is; a recipe with other sizes is then refused.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d
from torch.utils.hooks import RemovableHandle

from train.tools import user_code
from train.tools.errors import TrainingError

CANDIDATE_SIZES = (224, 227, 256, 299, 288, 192, 160, 128, 96, 64, 32, 28)  # usual native sizes, the likeliest first


def find_native_size(net: nn.Module, name: str) -> int:
    """Return the side in pixels of a square image that a network accepts, timm's or usual. Raises `TrainingError`."""
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
    """Make a network accept other sizes, and return how. Raises `TrainingError`, and changes nothing, if impossible."""
    shapes = (native_size + 32, native_size), (native_size, native_size + 64)  # a tall and a wide rectangle
    if not any(forward_error(net, *shape) for shape in shapes):
        return "accepts any size, because it pools before its classifier"
    sliding = _SlidingClassifier.find(net, native_size)
    sliding.install(net)
    for shape in shapes:
        if error := forward_error(net, *shape):
            sliding.remove()
            raise TrainingError(f"the model accepts only its native input size: {error}")
    return (
        "accepts other sizes, because its first Linear is applied to larger feature maps as a convolution of "
        f"{sliding.native_height} x {sliding.native_width}, and the scores are averaged over the positions"
    )


def check_shapes(net: nn.Module, name: str, shapes: Iterable[tuple[int, int]]) -> None:
    """Raise `TrainingError` when the network fails on one of the shapes (height, width) that a run will use."""
    for height, width in sorted(set(shapes)):
        if error := forward_error(net, height, width):
            raise TrainingError(
                f"model, name: {name} accepts no images of {height} x {width} pixels ({error}); use its native size in "
                "every phase and no rectangles, or use another model"
            )


class _SlidingClassifier:
    """Applies a network's first Linear as a sliding window over feature maps that are larger than the native one.

    `feature_module` makes the map, of `native_height` x `native_width` at the native size; `linear` takes it flattened.
    """

    def __init__(self, feature_module: nn.Module, linear: nn.Linear, native_height: int, native_width: int) -> None:
        self.feature_module = feature_module
        self.linear = linear
        self.native_height = native_height
        self.native_width = native_width
        self.feature_shape = torch.Size(())
        self.window_count = 1
        self.hook_handles: list[RemovableHandle] = []

    @classmethod
    def find(cls, net: nn.Module, side: int) -> "_SlidingClassifier":
        """Find the feature map and its Linear by an image of noise. Raises `TrainingError` without such a pair."""
        last_map: list[tuple[nn.Module, torch.Tensor]] = []
        matches: list[_SlidingClassifier] = []
        reason = "it flattens no feature map into a Linear"

        def record_map(module: nn.Module, _: object, output: object) -> None:
            if isinstance(output, torch.Tensor) and output.ndim == 4:
                last_map[:] = [(module, output)]

        def compare_input(linear: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            nonlocal reason
            assert isinstance(linear, nn.Linear)
            if matches or not last_map or inputs[0].ndim != 2:
                return
            feature_module, maps = last_map[0]
            flat = maps.flatten(1)
            if maps.shape[2:].numel() == 1 or flat.shape != inputs[0].shape:
                return
            if torch.equal(flat, inputs[0]) or torch.equal(flat.relu(), inputs[0]):
                matches.append(cls(feature_module, linear, *maps.shape[2:]))
            else:
                reason = "more than a ReLU stands between its last feature map and the Linear behind it"

        linears = [module for module in net.modules() if isinstance(module, nn.Linear)]
        hooks = [module.register_forward_hook(record_map) for module in net.modules()]
        hooks += [linear.register_forward_pre_hook(compare_input) for linear in linears]
        parameter = next(net.parameters())
        try:
            with preserve_modes_and_buffers(net), torch.no_grad():
                net.eval()
                net(torch.randn(1, 3, side, side, device=parameter.device, dtype=parameter.dtype))
        finally:
            for hook in hooks:
                hook.remove()
        if not matches:
            raise TrainingError(f"the model accepts only its native input size: {reason}")
        return matches[0]

    def install(self, net: nn.Module) -> None:
        """Register the hooks that make the network accept other sizes."""
        self.hook_handles = [
            self.feature_module.register_forward_hook(self._record_shape),
            self.linear.register_forward_pre_hook(self._unfold_windows),
            net.register_forward_hook(self._average_windows),
        ]

    def remove(self) -> None:
        """Remove the hooks again."""
        for handle in self.hook_handles:
            handle.remove()

    def _record_shape(self, _: nn.Module, __: object, output: torch.Tensor) -> None:
        self.feature_shape = output.shape

    def _unfold_windows(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """Turn flattened maps [n, c h w] into all windows of the native size, [n positions, c height width]."""
        (flat,) = inputs
        images, channels, height, width = self.feature_shape
        if flat.shape != (images, channels * height * width):
            raise RuntimeError("it flattens by a fixed number of features")
        self.window_count = 1
        if (height, width) == (self.native_height, self.native_width):
            return None
        maps = flat.reshape(self.feature_shape)
        if height < self.native_height or width < self.native_width:
            maps = adaptive_avg_pool2d(maps, (max(height, self.native_height), max(width, self.native_width)))
        windows = maps.unfold(2, self.native_height, 1)
        windows = windows.unfold(3, self.native_width, 1)  # [n, c, down, right, height, width]
        self.window_count = windows.shape[2] * windows.shape[3]
        return (windows.permute(0, 2, 3, 1, 4, 5).reshape(images * self.window_count, -1),)

    def _average_windows(self, _: nn.Module, __: object, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.window_count == 1 else scores.view(-1, self.window_count, scores.shape[-1]).mean(1)
