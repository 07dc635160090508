"""Networks that flatten the last feature map into a Linear take images of one size only; here they get free of it.

At any other size the Linear is laid over the feature map as a convolution as large as the native map is, everything
behind it is done at each position, and the scores are averaged over the positions (Simonyan and Zisserman 2014, section
3.2). A map that is smaller in a direction is first stretched to the native one, as adaptive pooling does. At the native
size nothing is touched: the scores are equal bit for bit. Nothing is renamed, no weight is reshaped.

A network that ends in a pooling takes any size already. One that knows its size in another way, such as a transformer
with a table of positions, is left as it is, and the recipe's other sizes are refused.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

from train.tools import user_code
from train.tools.errors import TrainingError

CANDIDATE_SIZES = (
    224,
    227,
    256,
    299,
    288,
    192,
    160,
    128,
    96,
    64,
    32,
    28,
)  # that networks are made for, the likely ones first


def find_native_size(net: nn.Module, name: str) -> int:
    """Return the side in pixels of square images that the network takes. Raises `Expected` when none is found."""
    config = getattr(net, "default_cfg", None) or getattr(net, "pretrained_cfg", None) or {}
    told = config.get("input_size") if isinstance(config, dict) else None  # timm's
    first, likely = "", [int(told[-1])] if told else []
    for side in [*likely, *CANDIDATE_SIZES]:
        error = forward_error(net, side, side)
        if not error:
            return side
        first = first or f"at {side} x {side} pixels: {error}"
    raise TrainingError(f"model, name: {name} takes no images of the usual sizes; {first}")


def forward_error(net: nn.Module, height: int, width: int) -> str:
    """Return why a network does not take an image of a shape, in one line; empty when it does."""
    one = next(net.parameters())
    with _eval_mode(net), torch.no_grad():
        try:
            scores = net(torch.zeros(1, 3, height, width, device=one.device, dtype=one.dtype))
        except (Exception, SystemExit) as error:  # whatever somebody's network may raise
            return user_code.describe_error(error)
    if isinstance(scores, torch.Tensor) and len(scores) != 1:
        return f"one image becomes {len(scores)} rows of scores"
    return ""


@contextmanager
def _eval_mode(net: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def probe_shapes(side: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes that tell whether a network is free: a rectangle of each kind."""
    return (side + 32, side), (side, side + 64)


def accept_any_size(net: nn.Module, native_size: int) -> str:
    """Make a network of this native side take larger images and rectangles too, and return how, in one line.

    Raises `Expected` with the reason where it stays bound to its size.
    """
    if not any(forward_error(net, *shape) for shape in probe_shapes(native_size)):
        return "takes any size by itself, it pools before it classifies"
    grid = _SlidingClassifier.find(net, native_size)
    grid.install(net)
    for shape in probe_shapes(native_size):
        if error := forward_error(net, *shape):
            grid.remove()
            raise TrainingError(f"it is bound to its size: {error}")
    return (
        f"its first Linear is laid over larger maps as a convolution of {grid.native_height} x {grid.native_width}, and the scores "
        "are averaged over its positions"
    )


def check_shapes(net: nn.Module, name: str, shapes: Iterable[tuple[int, int]]) -> None:
    """Raise `Expected` when the network does not take one of the shapes (height, width) that a run will meet."""
    for height, width in sorted(set(shapes)):
        if error := forward_error(net, height, width):
            raise TrainingError(
                f"model, name: {name} takes no images of {height} x {width} pixels ({error}); use its own size in "
                "every phase, without rectangles, or another model"
            )


class _SlidingClassifier:
    """The Linear behind the flattened map: which module made the map, and how large it is at the native size."""

    def __init__(self, feature_module: nn.Module, linear: nn.Linear, native_height: int, native_width: int) -> None:
        self.feature_module, self.linear, self.native_height, self.native_width = (
            feature_module,
            linear,
            native_height,
            native_width,
        )
        self.feature_shape, self.window_count = torch.Size(()), 1
        self.hook_handles: list[Any] = []

    @classmethod
    def find(cls, net: nn.Module, side: int) -> "_SlidingClassifier":
        """Find it by an image of noise. Raises `Expected` where there is none, or more than ReLU stands between."""
        last: list[tuple[nn.Module, torch.Tensor]] = []
        found: list[_SlidingClassifier] = []
        reason = ["it flattens no map into a Linear"]

        def made(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.ndim == 4:
                last[:] = [(module, output)]

        def taken(linear: nn.Module, inputs: Any) -> None:
            assert isinstance(linear, nn.Linear)
            if found or not last or inputs[0].ndim != 2:
                return
            module, maps = last[0]
            flat = maps.flatten(1)
            if maps.shape[2:].numel() == 1 or flat.shape != inputs[0].shape:
                return
            if torch.equal(flat, inputs[0]) or torch.equal(flat.relu(), inputs[0]):
                found.append(cls(module, linear, *maps.shape[2:]))
            else:
                reason[0] = "more than a ReLU stands between its last map and the Linear behind it"

        hooks = [one.register_forward_hook(made) for one in net.modules()]
        hooks += [one.register_forward_pre_hook(taken) for one in net.modules() if isinstance(one, nn.Linear)]
        first = next(net.parameters())
        try:
            with _eval_mode(net), torch.no_grad():
                net(torch.randn(1, 3, side, side, device=first.device, dtype=first.dtype))
        finally:
            for one in hooks:
                one.remove()
        if not found:
            raise TrainingError(f"it is bound to its size: {reason[0]}")
        return found[0]

    def install(self, net: nn.Module) -> None:
        """From now on the network is free."""
        self.hook_handles = [
            self.feature_module.register_forward_hook(self._record_shape),
            self.linear.register_forward_pre_hook(self._unfold_windows),
            net.register_forward_hook(self._average_windows),
        ]

    def remove(self) -> None:
        """Take that back."""
        for one in self.hook_handles:
            one.remove()

    def _record_shape(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        self.feature_shape = output.shape

    def _unfold_windows(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """Turn flattened maps [n, c h w] into all windows of the native size [n positions, c height width]."""
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
        windows = maps.unfold(2, self.native_height, 1).unfold(
            3, self.native_width, 1
        )  # n, c, down, right, height, width
        self.window_count = windows.shape[2] * windows.shape[3]
        return (windows.permute(0, 2, 3, 1, 4, 5).reshape(images * self.window_count, -1),)

    def _average_windows(self, _: nn.Module, __: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.window_count == 1 else scores.view(-1, self.window_count, scores.shape[-1]).mean(1)
