"""External networks: from libraries and functions; the checks before training, and each error."""

import copy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.error_lines import error_line
from torch import nn

from train.models import freezing, registry
from train.models.registry import build_model, find_classifier
from train.recipe import Model
from train.tools.errors import TrainingError


class Block(nn.Module):
    """A residual block, whose last norm is `bn2`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bn2(self.conv(x))


class LibraryNet(nn.Module):
    """A residual network of one block, as a library might have it."""

    def __init__(self, classes: int, zero: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(4, classes)  # registered first, called last
        self.stem, self.block, self.attention = nn.Conv2d(3, 4, 4, 4), Block(), nn.Conv2d(4, 4, 1)
        if zero:
            nn.init.zeros_(self.block.bn2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.stem(x))
        return self.head((x * self.attention(x)).mean((2, 3)))


class PooledLayers(nn.Sequential):
    """Layers, and the mean of their last feature map."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class ClassifierFirst(nn.Module):
    """Registers its classifier before its body, and an unused second classifier after it.

    The body ends in a convolution with as many channels as there are classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(classes, classes)
        self.body = PooledLayers(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, classes, 1))
        self.spare = nn.Linear(classes, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.fc(x) + 0 * self.spare(x).detach()


def install_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand-ins for torchvision and timm; the arguments with which networks were built."""
    calls: list[dict[str, Any]] = []

    def get_model(name: str, *, num_classes: int, **arguments: Any) -> nn.Module:
        calls.append({"name": name, **arguments})
        is_zero = [value for argument, value in arguments.items() if argument.startswith("zero_init")]
        if name == "plain" and is_zero:
            raise TypeError("plain() got an unexpected keyword argument 'zero_init_residual'")
        if name == "broken":
            raise TypeError("something else")
        return LibraryNet(num_classes, zero=any(is_zero))

    content: dict[str, Any] = {"list_models": lambda: ["resnet50", "resnet18", "plain", "broken"]}
    package = install_module(monkeypatch, "torchvision")
    package.models = install_module(monkeypatch, "torchvision.models", get_model=get_model, **content)  # type: ignore[attr-defined]
    install_module(monkeypatch, "timm", create_model=get_model, **content)
    return calls


def build_and_log(name: str, **settings: Any) -> tuple[Any, list[str]]:
    log: list[str] = []
    return build_model(Model(name=name, **settings), 6, 0, log.append), log


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("zero", [True, False])
def test_build_without_weights_sets_zero_gamma(library: str, zero: bool, calls: list[dict[str, Any]]) -> None:
    net, log = build_and_log(f"{library}:resnet50", zero_gamma=zero)
    expected: dict[str, Any] = {"timm": {"pretrained": False, "zero_init_last": zero}}
    expected["torchvision"] = {"weights": None, "zero_init_residual": zero}
    assert calls == [{"name": "resnet50", **expected[library]}]
    assert net.block.bn2.weight.eq(0 if zero else 1).all() and net.head.out_features == 6
    assert len(log) == 1 and f"{library}:resnet50, designed for 224 x 224 pixels: accepts any size" in log[0]


def test_build_from_library_without_zero_init_argument_logs_it(calls: list[dict[str, Any]]) -> None:
    net, log = build_and_log("torchvision:plain")
    assert net.block.bn2.weight.eq(1).all()
    assert [call["name"] for call in calls] == ["plain", "plain"]
    assert log[0].startswith("zero_gamma has no effect on torchvision:plain: ")


@pytest.mark.parametrize(("content", "message"), [
    ("import a_package_that_is_missing", "not installed here .*; install it: pip install torchvision$"),
    ("raise RuntimeError('no operator nms')", "cannot be imported here, RuntimeError: no operator nms"),
])  # fmt: skip
def test_build_from_library_that_cannot_be_imported_is_one_line(
    content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be missing, or built for another torch."""
    (tmp_path / "torchvision.py").write_text(content)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TrainingError, match=rf"model, name: torchvision.*{message}"):
        build_and_log("torchvision:resnet50")


@pytest.mark.parametrize(("name", "message"), [
    ("broken", "model, name: torchvision:broken fails, TypeError: something else"),
    ("resnet5", "no model 'resnet5' here; did you mean torchvision:resnet50 or "),
    ("zzz", r"no model 'zzz' here; torchvision.models.list_models\(\) lists"),
])  # fmt: skip
def test_name_that_a_library_cannot_build_is_refused(name: str, message: str, calls: list[dict[str, Any]]) -> None:
    with pytest.raises(TrainingError, match=message):
        build_and_log(f"torchvision:{name}")


def test_zero_init_residual_of_user_blocks_with_last_norm(mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "last_norm", property(lambda block: block.bn2), raising=False)
    mine.net = LibraryNet
    net, log = build_and_log("mine:net")
    assert net.block.bn2.weight.eq(0).all() and len(log) == 1
    net, log = build_and_log("mine:net", zero_gamma=False)
    assert net.block.bn2.weight.eq(1).all()
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(build_and_log("mine:net")[0].block(x), x)  # the block is the identity


def test_checks_leave_statistics_and_modes_unchanged(mine: Any) -> None:
    own_net = LibraryNet(6)
    own_net.stem.eval()
    mine.net = lambda classes: own_net
    net, _ = build_and_log("mine:net")
    fresh = nn.BatchNorm2d(4).state_dict()
    state = net.block.bn2.state_dict()
    assert all(torch.equal(state[key], fresh[key]) for key in ("running_mean", "running_var", "num_batches_tracked"))
    assert [name for name, item in net.named_modules() if not item.training] == ["stem"]
    assert all(item.grad is None for item in net.parameters())


def test_find_classifier_is_last_trainable_layer_with_the_classes(mine: Any) -> None:
    def build(builder: Any) -> Any:
        mine.net = builder
        return build_and_log("mine:net")[0]

    for name in ("resnet10_tiny", "alexnet_bn"):
        with torch.device("meta"):
            net: Any = registry.MODEL_BUILDERS[name](6)
        assert find_classifier(net) is net.fc
    net = build(LibraryNet)
    assert find_classifier(net) is net.head  # another layer was registered last
    assert not net.get_parameter("head.bias").any()
    assert build_and_log("mine:net", fc_std=None)[0].head.bias.any()  # keeps its own weights
    net = build(lambda classes: PooledLayers(nn.Conv2d(3, classes, 1), nn.Conv2d(classes, classes, 3, padding=1)))
    assert find_classifier(net) is net[0]
    net = build(FunctionalClassifier)
    assert find_classifier(net) is net.fc
    net = build(ClassifierFirst)
    assert find_classifier(net) is net.fc  # the body's last has as many outputs, and another layer was called later
    assert net.get_parameter("fc.weight").std() < 0.02 < net.get_parameter("spare.weight").std()  # fc_std
    copied = copy.deepcopy(net)
    freezing.Freezer(copied).set_frozen(True)
    trained = [name for name, parameter in copied.named_parameters() if parameter.requires_grad]
    assert find_classifier(copied) is copied.fc and trained == ["fc.weight", "fc.bias"]


class FunctionalClassifier(nn.Module):
    """Uses its classifier's weights without calling it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, classes), PooledLayers(nn.Conv2d(3, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.body(x), self.fc.weight, self.fc.bias)


@pytest.mark.parametrize("builder", [
    lambda classes: PooledLayers(nn.Conv2d(3, classes, 3, padding=1)),
    lambda classes: PooledLayers(nn.Conv2d(3, 4, 1), nn.Conv2d(4, classes, 1).requires_grad_(False)),
])  # fmt: skip
def test_network_without_classifier_has_no_fc_std_and_no_frozen_phase(mine: Any, builder: Any) -> None:
    mine.net = builder
    with pytest.raises(TrainingError, match="fc_std: cannot find the layer of mine:net that makes the 6 scores; set"):
        build_and_log("mine:net")
    net = build_and_log("mine:net", fc_std=None)[0]
    freezer = freezing.Freezer(net)
    freezer.set_frozen(False)
    with pytest.raises(TrainingError, match=r"phases, frozen: PooledLayers has no .*; set frozen=False"):
        freezer.set_frozen(True)


class ChangedScores(LibraryNet):
    """Returns what a function makes of its scores; the function is called with them and whether it is in train mode."""

    def __init__(self, change: Callable[[torch.Tensor, bool], Any]) -> None:
        super().__init__(6)
        self.change = change

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(super().forward(x), self.training)


@pytest.mark.parametrize(("builder", "message"), [
    (lambda classes: 1 / 0, "mine:net fails, ZeroDivisionError: division by zero"),
    (lambda classes: "net", "mine:net must return a torch.nn.Module, not str"),
    (LibraryNet(3), r"mine:net must return scores \[2, 6\] for two images in train mode, not a tensor \[2, 3\]"),
    (ChangedScores(lambda scores, training: (scores, scores) if training else scores),
     r"mine:net must return scores \[2, 6\] .* not tuple"),
    (nn.Sequential(nn.Conv2d(3, 6, 4)), r"mine:net must return scores \[2, 6\] .* tensor \[2, 6, 221, 221\]"),
    (nn.Sequential(PooledLayers(), nn.ConstantPad1d((0, 3), 0.0)),
     "mine:net has no parameters, so it cannot be trained; make its layers attributes"),
    (LibraryNet(6).requires_grad_(False), "mine:net has requires_grad=False in all its parameters"),
    (ChangedScores(lambda scores, _: scores.detach()),
     r"no parameter of mine:net gets a gradient from its scores, .* for no_grad\(\) and detach\(\)"),
    (ChangedScores(lambda *_: sys.exit("on purpose")),
     "mine:net accepts no images of the usual sizes; at 224 x 224 pixels: SystemExit: on purpose"),
])  # fmt: skip
def test_network_that_cannot_be_trained_is_refused_in_one_line(mine: Any, builder: Any, message: str) -> None:
    mine.net = (lambda classes: builder) if isinstance(builder, nn.Module) else builder
    error_line(TrainingError, build_and_log, "mine:net", match=f"^model, name: .*{message}")


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "vit_tiny_patch16_224"])
def test_build_real_timm_models(name: str) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed here")
    net, log = build_and_log(f"timm:{name}")
    classifier = find_classifier(net)
    assert classifier and classifier.bias is not None
    assert classifier.weight.shape[0] == 6 and not classifier.bias.any()
    assert ("only its native input size" in log[-1]) is (name == "vit_tiny_patch16_224")
    if name == "resnet18":
        assert isinstance(net, timm.models.ResNet) and net.layer1[0].bn2.weight.eq(0).all()
