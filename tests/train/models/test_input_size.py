"""Networks with a fixed input size: adapted to other sizes and unchanged at their own, or refused with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, relu

from train.models import input_size
from train.models.registry import build_model
from train.recipe import Model
from train.tools.errors import TrainingError

NATIVE_SIZE = 32
CLASSES = 5


class Vgg(nn.Module):
    """Flattens in `forward`, as most networks do."""

    def __init__(self, flatten: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.flatten(x, 1)) -> None:
        super().__init__()
        self.features, self.flatten = nn.Sequential(nn.Conv2d(3, 6, 8, 8), nn.BatchNorm2d(6), nn.ReLU()), flatten
        self.classifier = nn.Sequential(nn.Linear(6 * 4 * 4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.flatten(self.features(x)))


class SharedRelu(Vgg):
    """Calls one module on maps of several sizes; the last of them is the last map."""

    def __init__(self) -> None:
        super().__init__(lambda x: self.relu(x).flatten(1))
        self.relu, self.stem = nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.relu(self.stem(x)))


class Checked(Vgg):
    """Refuses images of another size, as transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[2:] == (NATIVE_SIZE, NATIVE_SIZE), "wrong size"
        return super().forward(x)


def seeded_net(builder: Callable[[], nn.Module]) -> Any:
    """Return a network whose running statistics are not those of a new one, in float64 and eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = builder().double()
        for _ in range(2):
            net(torch.randn(4, 3, NATIVE_SIZE, NATIVE_SIZE, dtype=torch.float64))
        return net.eval()


@pytest.mark.parametrize("builder", [
    Vgg, SharedRelu, lambda: Vgg(lambda x: x.view(x.size(0), -1)), lambda: Vgg(lambda x: x.view(-1, 96)),
    lambda: Vgg(lambda x: relu(x).permute(0, 2, 3, 1).flatten(1)),
])  # fmt: skip
def test_accept_any_size_pools_the_last_map_and_changes_nothing_at_the_native_size(builder: Any) -> None:
    net, adapted = seeded_net(builder), seeded_net(builder)
    message = input_size.accept_any_size(adapted, NATIVE_SIZE)
    assert "its last feature map is pooled to its native 4 x 4" in message and "\n" not in message
    state = net.state_dict()
    assert adapted.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in adapted.state_dict().items())
    for height, width in ((72, 56), (33, 39), (24, 32), (8, 8)):
        images = torch.randn(2, 3, height, width, dtype=torch.float64)
        stem = relu(net.stem(images)) if builder is SharedRelu else images
        expected = net.classifier(net.flatten(adaptive_avg_pool2d(net.features(stem), 4)))
        torch.testing.assert_close(adapted(images), expected)
    images = torch.randn(3, 3, NATIVE_SIZE, NATIVE_SIZE, dtype=torch.float64)
    for is_training in (False, True):
        scores = []
        for each in (net.train(is_training), adapted.train(is_training)):
            torch.manual_seed(0)  # for dropout
            scores.append(each(images))
        assert torch.equal(*scores)


@pytest.mark.parametrize(("builder", "message"), [
    (Checked, "AssertionError: wrong size"),
    (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * NATIVE_SIZE**2, CLASSES)), "RuntimeError: "),
])  # fmt: skip
def test_accept_any_size_refuses_fixed_size_networks_unchanged(builder: Any, message: str) -> None:
    net = seeded_net(builder)
    with pytest.raises(TrainingError, match=f"the model accepts only its native input size: {message}"):
        input_size.accept_any_size(net, NATIVE_SIZE)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_find_native_size_of_timm_and_of_others() -> None:
    net = seeded_net(Vgg)
    assert input_size.find_native_size(net, "mine:vgg") == NATIVE_SIZE
    assert input_size.find_native_size(build_model(Model(name="resnet10_tiny"), 2, 0), "x") == 224
    net.default_cfg = {"input_size": (3, 32, 32)}
    assert input_size.find_native_size(net, "timm:vgg") == NATIVE_SIZE
