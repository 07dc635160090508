"""The networks: their size, any shape of image, first weights, where a bottleneck strides."""

import pytest
import torch
from torch import nn

from train.forecast import MODEL_COSTS as CARDS
from train.models.alexnet import AlexNet
from train.models.registry import MODEL_BUILDERS, BasicBlock, Bottleneck, ResNet, build_model
from train.recipe import MODELS, Model

SMALL = ["resnet10_tiny", "resnet10_cifar", "resnet18"]
PARAMETERS = {  # with 1000 classes, as torchvision and the papers count them
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    # Krizhevsky et al. 2012's 60,965,224, without 1,376 biases of convolutions, with 6 norms of 1,632 channels
    "alexnet_bn": 60_965_224 - 1_376 + 2 * 1_632,
}


def made(name: str, classes: int = 10, seed: int = 0, **how: float) -> ResNet:
    return build_model(Model(name=name, **how), classes, seed)  # type: ignore[arg-type]


def test_every_model_that_a_recipe_may_name_can_be_made() -> None:
    assert tuple(MODEL_BUILDERS) == MODELS


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_the_papers_say(name: str) -> None:
    with torch.device("meta"):
        net = MODEL_BUILDERS[name](1000)
    assert sum(one.numel() for one in net.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shape", [(32, 32), (33, 47), (64, 96), (160, 32), (32, 161)])
def test_images_of_any_shape_become_scores(name: str, shape: tuple[int, int]) -> None:
    net = made(name, classes=7).eval()
    with torch.no_grad():
        assert net(torch.zeros(2, 3, *shape)).shape == (2, 7)


def test_resnet50_takes_squares_and_rectangles_in_training_too() -> None:
    net = made("resnet50", classes=3)
    for shape in ((32, 32), (64, 96)):
        scores = net(torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0)))
        assert scores.shape == (2, 3) and scores.isfinite().all()


def test_a_resnet_shrinks_an_image_32_times() -> None:
    net = MODEL_BUILDERS["resnet18"](10).eval()
    assert net.stages(net.stem(torch.zeros(1, 3, 64, 96))).shape[2:] == (2, 3)


def test_a_bottleneck_strides_in_its_3x3() -> None:
    strides = [
        (block.conv1.stride, block.conv2.stride, block.conv3.stride, block.conv2.kernel_size)
        for block in MODEL_BUILDERS["resnet50"](10).stages
        if isinstance(block, Bottleneck)
    ]
    assert len(strides) == 16
    for number, stride in enumerate(strides):
        two = (2, 2) if number in (3, 7, 13) else (1, 1)
        assert stride == ((1, 1), two, (1, 1), (3, 3))


@pytest.mark.parametrize("name", ["resnet10_tiny", "resnet18", "resnet50"])
@pytest.mark.parametrize("zero", [True, False])
def test_zero_gamma_silences_the_last_norm_of_each_block_and_no_other(name: str, zero: bool) -> None:
    net = made(name, zero_gamma=zero)
    last = {block.last_norm for block in net.modules() if isinstance(block, BasicBlock | Bottleneck)}
    norms = [one for one in net.modules() if isinstance(one, nn.BatchNorm2d)]
    assert len(norms) > len(last) > 0
    for norm in norms:
        assert norm.weight.eq(0 if zero and norm in last else 1).all() and norm.bias.eq(0).all()


@pytest.mark.parametrize("std", [0.01, 0.05])
def test_the_classifier_starts_with_the_asked_spread(std: float) -> None:
    fc = made("resnet18", classes=1000, fc_std=std).fc
    assert fc.weight.std().item() == pytest.approx(std, rel=0.01) and abs(fc.weight.mean().item()) < std / 100
    assert fc.bias.eq(0).all()


def test_convolutions_start_with_the_spread_that_keeps_the_gradient() -> None:
    """He et al. 2015: sqrt(2 / fan out)."""
    for module in made("resnet18").modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 20_000:
            out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx((2 / out) ** 0.5, rel=0.05)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = (made("resnet10_tiny", seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert not torch.equal(one["stem.0.weight"], other["stem.0.weight"])


# --- AlexNet with batch norm -----------------------------------------------------------------------------------------


def test_alexnet_has_a_norm_behind_each_convolution_and_one_behind_pool5() -> None:
    """Jia et al. 2018, section 3.2, figure 3."""
    with torch.device("meta"):
        parts = [type(one).__name__ for one in AlexNet(10).features]
    whole, pool = ["Conv2d", "BatchNorm2d", "ReLU"], ["MaxPool2d"]
    assert parts == [*whole, *pool, *whole, *pool, *whole, *whole, *whole, *pool, "BatchNorm2d"]


@pytest.mark.parametrize("size", [224, 227])
def test_alexnet_s_pool5_has_6_by_6_places_at_the_sizes_of_its_time(size: int) -> None:
    with torch.device("meta"):
        net = AlexNet(10)
        assert net.features(torch.zeros(2, 3, size, size)).shape == (2, 256, 6, 6)
        assert net(torch.zeros(2, 3, size, size)).shape == (2, 10)


def test_alexnet_is_equal_bit_for_bit_at_224_and_takes_other_shapes() -> None:
    net = build_model(Model(name="alexnet_bn"), 7, 0).eval()
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(net(x), net.fc(net.hidden(net.features(x).flatten(1))))
        for shape in ((63, 63), (128, 160), (288, 224)):
            assert net(torch.zeros(1, 3, *shape)).shape == (1, 7)


@pytest.mark.parametrize("name", [name for name in PARAMETERS])
def test_the_forecast_knows_the_convolutions_outputs_and_the_parameters(name: str) -> None:
    """Work beside ResNet-50's: elements that the convolutions write for an image of 224 pixels."""

    def written(name: str) -> int:
        with torch.device("meta"):
            net, found = MODEL_BUILDERS[name](1000), [0]
        for one in net.modules():
            if isinstance(one, nn.Conv2d):
                one.register_forward_hook(lambda _, __, out: found.append(out[0].numel()))
        with torch.device("meta"):
            net(torch.zeros(2, 3, 224, 224))
        return sum(found)

    work, parameters = CARDS[name]
    assert parameters == PARAMETERS[name]
    assert work == pytest.approx(written(name) / written("resnet50"), abs=0.0006)
