"""Networks that were made for one size: free of it, and equal bit for bit at it; or refused with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from train.models import input_size
from train.models.registry import build_model
from train.recipe import Model
from train.tools.errors import TrainingError

SIDE = 32
CLASSES = 5


def maps(stride: int = 8) -> nn.Sequential:
    """Images to 6 channels, a place for each stride x stride pixels."""
    return nn.Sequential(nn.Conv2d(3, 6, stride, stride), nn.BatchNorm2d(6), nn.ReLU())


class Vgg(nn.Module):
    """Flattens in `forward`, as most do."""

    def __init__(self, flatten: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.flatten(x, 1)) -> None:
        super().__init__()
        self.features, self.flatten = maps(), flatten
        self.classifier = nn.Sequential(
            nn.Linear(6 * 4 * 4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.flatten(self.features(x)))


class Attending(nn.Module):
    """A Linear of its own before the flattening, as squeeze-and-excitation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.squeeze, self.fc = maps(), nn.Linear(6, 6), nn.Linear(6 * 4 * 4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = x * torch.sigmoid(self.squeeze(x.mean((2, 3))))[:, :, None, None]
        return self.fc(nn.functional.dropout(x, training=self.training).flatten(1))


class Positions(nn.Module):
    """A transformer's table of positions: one row for each place of the native size."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.table, self.fc = (
            nn.Conv2d(3, 6, 8, 8),
            nn.Parameter(torch.zeros(16, 6)),
            nn.Linear(6, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc((self.patches(x).flatten(2).mT + self.table).mean(1))


FLAT: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(maps(), nn.Flatten(), nn.Linear(96, CLASSES)),
    "pooled half": lambda: nn.Sequential(maps(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, CLASSES)),
    "vgg": Vgg,
    "view of its batch": lambda: Vgg(lambda x: x.view(x.size(0), -1)),
    "relu between": lambda: Vgg(lambda x: nn.functional.relu(x).reshape(len(x), -1)),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """With weights and statistics that are not those of a fresh network."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = make().double()
        for _ in range(2):
            net(torch.randn(4, 3, SIDE, SIDE, dtype=torch.float64))
        return net.eval()


def pixels(height: int, width: int, images: int = 2) -> torch.Tensor:
    made = torch.Generator().manual_seed(height * width)
    return torch.randn(images, 3, height, width, generator=made, dtype=torch.float64)


@pytest.mark.parametrize("name", FLAT)
def test_at_its_native_size_the_scores_are_equal_bit_for_bit_and_so_are_gradients(name: str) -> None:
    net, free = seeded(FLAT[name]), seeded(FLAT[name])
    state = {key: one.clone() for key, one in free.state_dict().items()}
    said = input_size.accept_any_size(free, SIDE)
    assert "convolution of 4 x 4" in said and "averaged" in said and "\n" not in said
    assert free.state_dict().keys() == state.keys()
    assert all(torch.equal(one, state[key]) for key, one in free.state_dict().items())
    for mode in (False, True):
        found = []
        for one in (net, free):
            one.train(mode)
            torch.manual_seed(0)  # of dropout
            scores = one(pixels(SIDE, SIDE, 3))
            scores.square().sum().backward()
            found.append([scores, *(parameter.grad for parameter in one.parameters())])
        assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("shape", [(64, 64), (40, 32), (32, 96), (72, 56), (33, 39)])
def test_at_larger_sizes_it_is_the_mean_over_all_windows_of_the_map(name: str, shape: tuple[int, int]) -> None:
    """Independently: cut each window out of the map and classify it as an image of the native size."""
    net, free = seeded(FLAT[name]), seeded(FLAT[name])
    input_size.accept_any_size(free, SIDE)
    images = pixels(*shape)
    deep = shape[0] // 8 - 3, shape[1] // 8 - 3
    windows = [
        net(images[:, :, 8 * top : 8 * top + SIDE, 8 * left : 8 * left + SIDE])
        for top in range(deep[0])
        for left in range(deep[1])
    ]  # the network's strides are 8 and nothing is padded: a window of the map is that of the image
    torch.testing.assert_close(free(images), torch.stack(windows).mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(16, 16), (24, 32), (16, 80), (8, 8)])
def test_a_smaller_map_is_stretched_to_the_native_one(shape: tuple[int, int]) -> None:
    net, free = seeded(Vgg), seeded(Vgg)
    input_size.accept_any_size(free, SIDE)
    images = pixels(*shape)
    map = net.features(images)  # type: ignore[operator]
    high, wide = (max(4, one // 8) for one in shape)
    map = nn.functional.adaptive_avg_pool2d(map, (high, wide))
    rows = [net.classifier(map[..., left : left + 4].flatten(1)) for left in range(wide - 3)]  # type: ignore[operator]
    torch.testing.assert_close(free(images), torch.stack(rows).mean(0))


def test_sizes_may_follow_each_other_in_any_order_also_in_training() -> None:
    free = seeded(Vgg).train()
    input_size.accept_any_size(free, SIDE)
    before = free.eval()(pixels(SIDE, SIDE)).clone()
    free.train()
    for shape in ((64, 32), (SIDE, SIDE), (16, 48)):
        scores = free(pixels(*shape, 4))
        assert scores.shape == (4, CLASSES)
        scores.sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in free.parameters())
    assert not torch.equal(free.eval()(pixels(SIDE, SIDE)), before)  # only the statistics have moved on


@pytest.mark.parametrize("name", ["resnet10_tiny", "alexnet_bn"])
def test_ours_pool_and_are_free_already(name: str) -> None:
    net = build_model(Model(name=name), CLASSES, 0)
    assert "takes any size by itself" in input_size.accept_any_size(net, 64)
    assert not net._forward_hooks


@pytest.mark.parametrize(("make", "said"), [
    (Positions, "it flattens no map into a Linear"),
    (Attending, "more than a ReLU stands between"),
    (lambda: Vgg(lambda x: x.permute(0, 2, 3, 1).flatten(1)), "more than a ReLU stands between"),
    (lambda: Vgg(lambda x: x.view(-1, 96)), "bound to its size: "),
])  # fmt: skip
def test_what_stays_bound_to_its_size_is_refused_with_the_reason_and_left_as_it_was(make: Any, said: str) -> None:
    net = seeded(make)
    before = net(pixels(SIDE, SIDE))
    with pytest.raises(TrainingError, match=said):
        input_size.accept_any_size(net, SIDE)
    assert torch.equal(net(pixels(SIDE, SIDE)), before)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in net.modules())


def test_the_native_size_is_found_and_the_modes_of_all_modules_stay() -> None:
    net = seeded(Vgg)
    net.train()
    net.features[1].eval()  # type: ignore[index]
    modes = [one.training for one in net.modules()]
    assert input_size.find_native_size(net, "mine:vgg") == SIDE
    assert [one.training for one in net.modules()] == modes
    assert input_size.find_native_size(build_model(Model(name="resnet10_tiny"), 2, 0), "x") == 224
    net.default_cfg = {"input_size": (3, 32, 32)}  # type: ignore[assignment]
    assert input_size.find_native_size(net, "timm:vgg") == SIDE


def test_a_network_of_no_usual_size_says_what_it_said() -> None:
    with pytest.raises(
        TrainingError, match="mine:x takes no images of the usual sizes; at 224 x 224 pixels: RuntimeError: "
    ):
        input_size.find_native_size(nn.Sequential(nn.Flatten(), nn.Linear(10, 2)), "mine:x")


def test_a_recipe_s_other_sizes_are_refused_before_the_first_step() -> None:
    net = seeded(Positions)
    input_size.check_shapes(net, "mine:x", [(SIDE, SIDE)])
    with pytest.raises(
        TrainingError, match=r"mine:x takes no images of 32 x 40 pixels \(RuntimeError: .*own size in every"
    ):
        input_size.check_shapes(net, "mine:x", [(SIDE, SIDE), (32, 40)])
