"""Networks with a fixed input size: adapted to other sizes and unchanged at their own, or refused with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from train.models import input_size
from train.models.registry import build_model
from train.recipe import Model
from train.tools.errors import TrainingError

NATIVE_SIZE = 32
CLASSES = 5


def feature_layers(stride: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, stride, stride), nn.BatchNorm2d(6), nn.ReLU())


class Vgg(nn.Module):
    """Flattens in `forward`, as most networks do."""

    def __init__(self, flatten: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.flatten(x, 1)) -> None:
        super().__init__()
        self.features, self.flatten = feature_layers(), flatten
        self.classifier = nn.Sequential(
            nn.Linear(6 * 4 * 4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.flatten(self.features(x)))


class SqueezeAndExcitation(nn.Module):
    """Has another Linear before the flattened one, and a dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.squeeze, self.fc = feature_layers(), nn.Linear(6, 6), nn.Linear(6 * 4 * 4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = x * torch.sigmoid(self.squeeze(x.mean((2, 3))))[:, :, None, None]
        return self.fc(nn.functional.dropout(x, training=self.training).flatten(1))


class PositionTable(nn.Module):
    """Has a transformer's table of positions: one row per position of the native size."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.fc = nn.Conv2d(3, 6, 8, 8), nn.Linear(6, CLASSES)
        self.table = nn.Parameter(torch.zeros(16, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc((self.patches(x).flatten(2).mT + self.table).mean(1))


FLATTENING_NETS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(feature_layers(), nn.Flatten(), nn.Linear(96, CLASSES)),
    "pooled half": lambda: nn.Sequential(feature_layers(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, CLASSES)),
    "vgg": Vgg,
    "view of its batch": lambda: Vgg(lambda x: x.view(x.size(0), -1)),
    "relu between": lambda: Vgg(lambda x: nn.functional.relu(x).reshape(len(x), -1)),
}


def seeded_net(builder: Callable[[], nn.Module]) -> nn.Module:
    """Return a network whose running statistics are not those of a new one, in float64 and eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = builder().double()
        for _ in range(2):
            net(torch.randn(4, 3, NATIVE_SIZE, NATIVE_SIZE, dtype=torch.float64))
        return net.eval()


def random_images(height: int, width: int, images: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randn(images, 3, height, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", FLATTENING_NETS)
def test_accept_any_size_same_bits_at_native_size_and_the_mean_over_windows_of_larger_images(name: str) -> None:
    """The reference cuts each window out of the image and classifies it at the native size."""
    net, adapted = seeded_net(FLATTENING_NETS[name]), seeded_net(FLATTENING_NETS[name])
    state = {key: item.clone() for key, item in adapted.state_dict().items()}
    message = input_size.accept_any_size(adapted, NATIVE_SIZE)
    assert "convolution of 4 x 4" in message and "averaged" in message and "\n" not in message
    assert adapted.state_dict().keys() == state.keys()
    assert all(torch.equal(item, state[key]) for key, item in adapted.state_dict().items())
    for height, width in ((40, 32), (72, 56), (33, 39)):
        images = random_images(height, width)
        windows = [
            net(images[:, :, 8 * top : 8 * top + NATIVE_SIZE, 8 * left : 8 * left + NATIVE_SIZE])
            for top in range(height // 8 - 3)
            for left in range(width // 8 - 3)
        ]  # the stride is 8 and nothing is padded, so windows of the map are windows of the image
        torch.testing.assert_close(adapted(images), torch.stack(windows).mean(0), rtol=1e-12, atol=1e-12)
    for mode in (False, True):
        results = []
        for item in (net, adapted):
            item.train(mode)
            torch.manual_seed(0)  # for dropout
            scores = item(random_images(NATIVE_SIZE, NATIVE_SIZE, 3))
            scores.square().sum().backward()
            results.append([scores, *(parameter.grad for parameter in item.parameters())])
        assert all(torch.equal(item, other) for item, other in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(24, 32), (16, 80), (8, 8)])
def test_accept_any_size_smaller_map_is_enlarged(shape: tuple[int, int]) -> None:
    net, adapted = seeded_net(Vgg), seeded_net(Vgg)
    input_size.accept_any_size(adapted, NATIVE_SIZE)
    images = random_images(*shape)
    features = net.features(images)  # type: ignore[operator]
    height, width = (max(4, side // 8) for side in shape)
    features = nn.functional.adaptive_avg_pool2d(features, (height, width))
    scores = [net.classifier(features[..., left : left + 4].flatten(1)) for left in range(width - 3)]  # type: ignore[operator]
    torch.testing.assert_close(adapted(images), torch.stack(scores).mean(0))


@pytest.mark.parametrize(("builder", "message"), [
    (PositionTable, "it flattens no feature map into a Linear"),
    (SqueezeAndExcitation, "more than a ReLU stands between"),
    (lambda: Vgg(lambda x: x.permute(0, 2, 3, 1).flatten(1)), "more than a ReLU stands between"),
    (lambda: Vgg(lambda x: x.view(-1, 96)), "accepts only its native input size: "),
])  # fmt: skip
def test_accept_any_size_refuses_fixed_size_networks_unchanged(builder: Any, message: str) -> None:
    net = seeded_net(builder)
    scores_before = net(random_images(NATIVE_SIZE, NATIVE_SIZE))
    with pytest.raises(TrainingError, match=message):
        input_size.accept_any_size(net, NATIVE_SIZE)
    assert torch.equal(net(random_images(NATIVE_SIZE, NATIVE_SIZE)), scores_before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_find_native_size_of_timm_and_of_others() -> None:
    net = seeded_net(Vgg)
    assert input_size.find_native_size(net, "mine:vgg") == NATIVE_SIZE
    assert input_size.find_native_size(build_model(Model(name="resnet10_tiny"), 2, 0), "x") == 224
    net.default_cfg = {"input_size": (3, 32, 32)}  # type: ignore[assignment]
    assert input_size.find_native_size(net, "timm:vgg") == NATIVE_SIZE
