"""ResNets and mixed images against torchvision's; BlurPool, LARS and LAMB against timm's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.peers import run_script
from torch import nn

from train.models import resnet
from train.models.registry import build_model
from train.models.resnet import BlurredConvolution
from train.optim import factory
from train.optim.losses import build_loss
from train.optim.mixing import Mixer
from train.recipe import Model, Optim


def test_tensors_have_torchvisions_names_shapes_and_order() -> None:
    names = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
    shapes = run_script("torchvision_resnet.py", "shapes", *names, module="torchvision")
    for name in names:
        with torch.device("meta"):
            ours = resnet.RESNET_BUILDERS[name](1000).state_dict()
        assert [(key, list(value.shape)) for key, value in ours.items()] == list(shapes[name].items())


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_scores_gradients_and_statistics_equal_torchvisions(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn((2, 3, *shape), generator=generator) for shape in ((96, 96), (64, 96), (128, 128))]
    torch.save(images, tmp_path / "images.pt")
    arguments = ("run", name, tmp_path / "images.pt", tmp_path / "theirs.pt")
    run_script("torchvision_resnet.py", *arguments, module="torchvision")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    net = resnet.RESNET_BUILDERS[name](1000)
    net.load_state_dict(theirs["weights"])
    net.eval()
    with torch.no_grad():
        for batch, scores in zip(images, theirs["eval_scores"], strict=True):
            torch.testing.assert_close(net(batch), scores)
    net.train()
    train_scores = net(images[0])
    torch.testing.assert_close(train_scores.detach(), theirs["train_scores"])
    train_scores.logsumexp(1).sum().backward()
    for ours, key in ((dict(net.named_parameters()), "gradients"), (dict(net.named_buffers()), "buffers")):
        for name_of_tensor, tensor in ours.items():
            actual = tensor.grad if key == "gradients" else tensor
            torch.testing.assert_close(actual, theirs[key][name_of_tensor], rtol=1e-4, atol=1e-5)


def test_blurpool_equals_timms_with_padding_by_zeros(tmp_path: Path) -> None:
    """A blurred convolution that only samples every second pixel is the BlurPool of the paper."""
    images = torch.randn((2, 16, 9, 12), generator=torch.Generator().manual_seed(0))
    torch.save(images, tmp_path / "images.pt")
    run_script("timm_parts.py", "blurpool", tmp_path / "images.pt", tmp_path / "theirs.pt", module="timm")
    sampling = nn.Conv2d(16, 16, 1, 2, bias=False)
    with torch.no_grad():
        sampling.weight.copy_(torch.eye(16)[:, :, None, None])
        ours = BlurredConvolution(sampling)(images)
    torch.testing.assert_close(ours, torch.load(tmp_path / "theirs.pt", weights_only=True))


@pytest.mark.parametrize("middle", [(10, 7), (0, 11)])  # (x, y) of CutMix's rectangle; the second reaches over edges
def test_mixed_images_and_losses_equal_torchvisions(middle: tuple[int, int], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images, scores = (torch.randn(shape, generator=generator) for shape in ((5, 3, 12, 20), (5, 4)))
    labels, share = torch.tensor([0, 3, 1, 1, 2]), 0.7
    torch.save(
        {"images": images, "labels": labels, "scores": scores, "share": share, "middle": middle}, tmp_path / "case.pt"
    )
    run_script("torchvision_mixing.py", tmp_path / "case.pt", tmp_path / "theirs.pt", module="torchvision")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    for name in ("mixup", "cutmix"):
        optim = Optim(**{name: 1.0})  # type: ignore[arg-type]
        mixer, mixed = Mixer(optim), images.clone()
        draws = [*([0] if name == "mixup" else [0, *middle])]
        rng = SimpleNamespace(beta=lambda *_: share, integers=lambda _, draws=draws: draws.pop(0))
        with mock.patch("numpy.random.default_rng", lambda _, rng=rng: rng):
            mixer.mix(mixed, (0, 0, 0))
        torch.testing.assert_close(mixed, theirs[name][0])
        torch.testing.assert_close(mixer.losses(build_loss(optim), scores, labels), theirs[name][1])


STEPS = 50
LARS: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
CASES: dict[str, tuple[Optim, dict[str, Any]]] = {
    "lars": (Optim(name="lars", **LARS), {**LARS, "eps": 0.0}),
    "lars nesterov": (Optim(name="lars", nesterov=True, **LARS), {**LARS, "eps": 0.0, "nesterov": True}),
    # timm's default clips the norm of all gradients, which is no part of LAMB.
    "lamb": (Optim(name="lamb", weight_decay=0.02), {"weight_decay": 0.02, "eps": 1e-6, "max_grad_norm": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_timms_after_50_steps(name: str, tmp_path: Path) -> None:
    """On the tensors of a small ResNet in float64, at a rate that changes in each step."""
    optim, options = CASES[name]
    net = build_model(Model(name="resnet10_tiny"), 10, seed=0).double()
    optimizer = factory.build_optimizer(net, optim)
    parameters = list(net.parameters())
    adapted = {id(parameter) for group in optimizer.param_groups if group["adapt"] for parameter in group["params"]}
    generator = torch.Generator().manual_seed(1)
    rates = [0.1 + 2.0 * torch.rand((), generator=generator).item() for _ in range(STEPS)]
    gradients = [
        [torch.randn(parameter.shape, generator=generator, dtype=torch.float64) for parameter in parameters]
        for _ in range(STEPS)
    ]
    case = {
        "name": optim.name,
        "options": options,
        "weights": [parameter.detach().clone() for parameter in parameters],
        "decays": [id(parameter) in adapted for parameter in parameters],
        "rates": rates,
        "gradients": gradients,
    }
    torch.save(case, tmp_path / "case.pt")
    run_script("timm_parts.py", "optimizer", tmp_path / "case.pt", tmp_path / "theirs.pt", module="timm")
    for rate, step_gradients in zip(rates, gradients, strict=True):
        factory.set_lr(optimizer, rate)
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    for ours, theirs in zip(parameters, torch.load(tmp_path / "theirs.pt", weights_only=True), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-12)
