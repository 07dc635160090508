"""Other people's networks: from libraries, from functions; what is looked at before they train, and each refusal."""

import copy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
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


class Named(Block):
    """Says which norm is its last, as ours do."""

    @property
    def last_norm(self) -> nn.Module:
        return self.bn2


class Net(nn.Module):
    """A residual network of one block, as a library has it."""

    def __init__(self, classes: int, block: type[Block] = Block, zero: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(4, classes)  # not the last to be registered
        self.stem, self.block, self.attention = nn.Conv2d(3, 4, 4, 4), block(), nn.Conv2d(4, 4, 1)
        if zero:
            nn.init.zeros_(self.block.bn2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.stem(x))
        return self.head((x * self.attention(x)).mean((2, 3)))


class Pooled(nn.Sequential):
    """Layers, and the mean of their last map."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class HeadFirst(nn.Module):
    """Registers its classifier before its body, which ends in a convolution of as many channels as there are classes,
    and a second classifier that nobody uses.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(classes, classes)
        self.body = Pooled(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, classes, 1))
        self.spare = nn.Linear(classes, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.fc(x) + 0 * self.spare(x).detach()


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A small stand-in with torchvision's three functions, and what it was asked."""
    asked: list[dict[str, Any]] = []

    def get_model(name: str, *, weights: None, num_classes: int, **more: Any) -> nn.Module:
        asked.append({"name": name, "weights": weights, **more})
        if name == "plain":
            if more:
                raise TypeError(f"plain() got an unexpected keyword argument '{next(iter(more))}'")
            return Net(num_classes)
        if name == "broken":
            raise TypeError("something else")
        return Net(num_classes, zero=more["zero_init_residual"])

    names = ["resnet50", "resnet18", "plain", "broken"]
    top = module(monkeypatch, "torchvision")
    top.models = module(monkeypatch, "torchvision.models", get_model=get_model, list_models=lambda: names)  # type: ignore[attr-defined]
    return asked


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The same for timm."""
    asked: list[dict[str, Any]] = []

    def create_model(name: str, *, pretrained: bool, num_classes: int, **more: Any) -> nn.Module:
        asked.append({"name": name, "pretrained": pretrained, **more})
        return Net(num_classes, zero=more["zero_init_last"])

    module(
        monkeypatch, "timm", create_model=create_model, list_models=lambda: ["resnet50", "resnet50d"], __version__="1"
    )
    return asked


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module(monkeypatch, "mine")


def said_of(name: str, **how: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    return build_model(Model(name=name, **how), 6, 0, said.append), said


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("zero", [True, False])
def test_a_library_makes_its_network_without_weights_and_sets_its_own_zero_gammas(
    library: str, zero: bool, request: pytest.FixtureRequest
) -> None:
    asked = request.getfixturevalue(library)
    net, said = said_of(f"{library}:resnet50", zero_gamma=zero)
    words: dict[str, Any] = {"timm": {"pretrained": False, "zero_init_last": zero}}
    words["torchvision"] = {"weights": None, "zero_init_residual": zero}
    assert asked == [{"name": "resnet50", **words[library]}]
    assert net.block.bn2.weight.eq(0 if zero else 1).all() and net.head.out_features == 6
    assert said == [
        f"{library}:resnet50, made for 224 x 224 pixels: takes any size by itself, it pools before it classifies"
    ]


def test_a_network_that_has_no_word_for_it_is_made_all_the_same_and_that_is_said(torchvision: Any) -> None:
    net, said = said_of("torchvision:plain")
    assert net.block.bn2.weight.eq(1).all()
    assert [one["name"] for one in torchvision] == ["plain", "plain"]
    assert said[0].startswith("zero_gamma does not apply to torchvision:plain: ")
    assert len(said_of("torchvision:plain", zero_gamma=False)[1]) == 1


def test_timm_s_names_may_have_a_tag(timm: Any) -> None:
    said_of("timm:resnet50.a1_in1k")
    assert timm[0]["name"] == "resnet50.a1_in1k"


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_installed_says_what_to_type(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        TrainingError, match=f"{library}:resnet50 needs .*not installed here .*pip install {library}$"
    ) as one:
        said_of(f"{library}:resnet50")
    assert "\n" not in str(one.value)


def test_a_name_that_is_unknown_is_answered_with_those_like_it(torchvision: Any) -> None:
    with pytest.raises(TrainingError, match="torchvision has no 'resnet5' here; did you mean torchvision:resnet50 or "):
        said_of("torchvision:resnet5")
    with pytest.raises(
        TrainingError, match=r"no 'zzz' here; torchvision.models.list_models\(\) names those that there are"
    ):
        said_of("torchvision:zzz")


@pytest.mark.parametrize(("make", "said"), [
    (lambda classes: 1 / 0, "model, name: mine:net fails, ZeroDivisionError: division by zero"),
    (lambda classes: "net", "mine:net must return a torch.nn.Module, not str"),
    (lambda classes: Net(3), r"mine:net must make scores \[2, 6\] of two images in training, not a tensor of \[2, 3\]"),
    (lambda classes: Pair(classes), r"must make scores \[2, 6\] .* not tuple"),
    (lambda classes: nn.Sequential(nn.Conv2d(3, 6, 4)), r"must make scores \[2, 6\] .* of \[2, 6, 221, 221\]"),
])  # fmt: skip
def test_a_function_that_makes_no_classifier_is_refused_in_one_line(mine: Any, make: Any, said: str) -> None:
    mine.net = make
    with pytest.raises(TrainingError, match=said) as caught:
        said_of("mine:net")
    assert "\n" not in str(caught.value)


class Pair(Net):
    """With a second output in training, as GoogLeNet."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = super().forward(x)
        return (scores, scores) if self.training else scores


def test_a_function_that_is_not_there_is_one_line(mine: Any) -> None:
    with pytest.raises(TrainingError, match="model, name: mine has no function net"):
        said_of("mine:net")


def test_a_failure_of_a_library_is_one_line(torchvision: Any) -> None:
    with pytest.raises(TrainingError, match="model, name: torchvision:broken fails, TypeError: something else"):
        said_of("torchvision:broken")


def test_blocks_of_one_s_own_are_silenced_where_they_name_their_last_norm(mine: Any) -> None:
    mine.net = lambda classes: Net(classes, Named)
    net, said = said_of("mine:net")
    assert net.block.bn2.weight.eq(0).all() and len(said) == 1
    net, said = said_of("mine:net", zero_gamma=False)
    assert net.block.bn2.weight.eq(1).all()
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(said_of("mine:net")[0].block(x), x)  # the identity


def test_looking_at_it_leaves_statistics_and_modes_as_they_were(mine: Any) -> None:
    mine.net = lambda classes: Net(classes)
    net, _ = said_of("mine:net")
    fresh = nn.BatchNorm2d(4).state_dict()
    own = net.block.bn2.state_dict()
    assert all(torch.equal(own[key], fresh[key]) for key in ("running_mean", "running_var", "num_batches_tracked"))
    assert all(one.training for one in net.modules()) and all(one.grad is None for one in net.parameters())


def test_the_same_seed_gives_the_same_weights_everywhere(mine: Any) -> None:
    mine.net = lambda classes: Net(classes)
    before = torch.get_rng_state()
    one, same, other = (build_model(Model(name="mine:net", fc_std=None), 6, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert registry.weights_crc32(one) == registry.weights_crc32(same) != registry.weights_crc32(other)


@pytest.mark.parametrize("std", [0.01, 0.2, None])
def test_the_classifier_starts_with_the_recipe_s_spread_or_as_it_starts_itself(mine: Any, std: float | None) -> None:
    mine.net = lambda classes: Net(classes)
    net = build_model(Model(name="mine:net", fc_std=std), 500, 0)
    if std is None:
        assert net.head.weight.abs().max() <= 0.5 and net.head.bias.any()  # type: ignore[union-attr]
    else:
        assert net.head.weight.std().item() == pytest.approx(std, rel=0.1)  # type: ignore[union-attr, operator]
        assert not net.head.bias.any()  # type: ignore[union-attr, operator]


def test_where_no_layer_is_the_classifier_the_recipe_must_not_ask_for_its_spread(mine: Any) -> None:
    mine.net = lambda classes: Pooled(nn.Conv2d(3, classes, 3, padding=1))
    with pytest.raises(
        TrainingError, match="fc_std: the layer that makes the 6 scores of mine:net is not found; fc_std=None"
    ):
        said_of("mine:net")
    said_of("mine:net", fc_std=None)


def test_the_classifier_is_the_last_layer_that_learns_and_makes_as_many_scores_as_there_are_classes(mine: Any) -> None:
    for name in ("resnet10_tiny", "alexnet_bn"):
        with torch.device("meta"):
            net = registry.MODEL_BUILDERS[name](6)
        assert find_classifier(net) is net.fc
    mine.net = Net
    net = said_of("mine:net")[0]
    assert find_classifier(net) is net.head  # though another layer was registered last
    mine.net = HeadFirst
    net = said_of("mine:net")[0]
    assert find_classifier(net) is net.fc  # though the body's last makes as many, and another was called later
    assert net.fc.weight.std() < 0.02 < net.spare.weight.std()  # fc_std is the classifier's
    other = copy.deepcopy(net)
    freezing.Freezer(other).set_frozen(True)
    assert find_classifier(other) is other.fc
    assert [name for name, one in other.named_parameters() if one.requires_grad] == ["fc.weight", "fc.bias"]
    mine.net = lambda classes: Pooled(nn.Conv2d(3, classes, 1), nn.Conv2d(classes, classes, 3, padding=1))
    net = said_of("mine:net")[0]
    assert find_classifier(net) is net[0]
    mine.net = lambda classes: Functional(classes)
    net = said_of("mine:net")[0]
    assert find_classifier(net) is net.fc


class Functional(nn.Module):
    """Uses its classifier's weights without calling it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, classes), Pooled(nn.Conv2d(3, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.body(x), self.fc.weight, self.fc.bias)


@pytest.mark.parametrize("make", [
    lambda classes: Pooled(nn.Conv2d(3, classes, 3, padding=1)),
    lambda classes: Pooled(nn.Conv2d(3, 4, 1), nn.Conv2d(4, classes, 3, padding=1)),
    lambda classes: Pooled(nn.Conv2d(3, 4, 1), nn.Conv2d(4, classes, 1).requires_grad_(False)),
], ids=["none", "of others", "does not learn"])  # fmt: skip
def test_where_there_is_none_a_frozen_phase_is_one_line(mine: Any, make: Any) -> None:
    mine.net = make
    net = said_of("mine:net", fc_std=None)[0]
    assert find_classifier(net) is None
    freezer = freezing.Freezer(net)
    freezer.set_frozen(False)
    with pytest.raises(
        TrainingError, match=r"phases, frozen: Pooled has no Linear .*; frozen=False trains all"
    ) as caught:
        freezer.set_frozen(True)
    assert "\n" not in str(caught.value)


class Detached(Net):
    """Nothing of it is learned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize(("make", "said"), [
    (lambda classes: Plain(classes), "mine:net has no parameters, so nothing of it can be trained; its layers must be"),
    (lambda classes: Net(classes).requires_grad_(False), "mine:net has requires_grad=False in all its parameters"),
    (Detached, r"no parameter of mine:net gets a gradient from its scores, .* look for no_grad\(\) and detach\(\)"),
])  # fmt: skip
def test_a_network_of_which_nothing_can_be_trained_is_refused_in_one_line(mine: Any, make: Any, said: str) -> None:
    mine.net = make
    with pytest.raises(TrainingError, match="model, name: .*" + said) as caught:
        said_of("mine:net")
    assert "\n" not in str(caught.value)


class Plain(nn.Module):
    """Has no parameters."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))[:, :1].repeat(1, self.classes)


class Leaving(Net):
    """Ends the program when it is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.exit("so there")


@pytest.mark.parametrize(("make", "said"), [
    (lambda classes: sys.exit(0), "mine:net fails, SystemExit: 0, test_external.py line "),
    (lambda classes: sys.exit(), "mine:net fails, SystemExit, test_external.py line "),
    (Leaving, "mine:net takes no images of the usual sizes; at 224 x 224 pixels: SystemExit: so there, test_external"),
])  # fmt: skip
def test_a_function_that_ends_the_program_is_one_line_and_not_the_end(mine: Any, make: Any, said: str) -> None:
    mine.net = make
    with pytest.raises(TrainingError, match="model, name: " + said):
        said_of("mine:net")


@pytest.mark.parametrize(("text", "said"), [
    ("import sys\nsys.exit(0)", r"ends the program when it is imported \(SystemExit: 0, leaving.py line 2\); what"),
    ("\nimport json\njson.loads('no')", r"cannot be imported here \(JSONDecodeError: .*, leaving.py line 3\); start"),
])  # fmt: skip
def test_a_module_that_ends_the_program_or_fails_says_in_which_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TrainingError, match="model, name: leaving " + said) as caught:
        said_of("leaving:net")
    assert "\n" not in str(caught.value)


def test_a_library_that_is_broken_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchvision is beside another torch than its own."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        TrainingError, match="torchvision cannot be imported here, RuntimeError: operator torchvision::nms"
    ):
        said_of("torchvision:resnet50")


def test_a_network_of_one_size_is_freed_and_that_is_said_or_why_not(mine: Any) -> None:
    mine.net = lambda classes: nn.Sequential(
        nn.Conv2d(3, 4, 16, 16), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, classes)
    )
    net, said = said_of("mine:net")
    assert said[-1].startswith("mine:net, made for 32 x 32 pixels: its first Linear is laid over larger maps")
    assert net(torch.zeros(2, 3, 64, 48)).shape == (2, 6)
    mine.net = lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, classes))
    said = said_of("mine:net")[1]
    assert said[-1] == "mine:net, made for 64 x 64 pixels: it is bound to its size: it flattens no map into a Linear"


@pytest.mark.parametrize("name", ["resnet18", "regnetx_002", "vgg11", "vit_tiny_patch16_224", "convnext_atto"])
def test_timm_s_own(name: str) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed here")
    net, said = said_of(f"timm:{name}")
    assert find_classifier(net).weight.shape[0] == 6 and not find_classifier(net).bias.any()
    assert ("bound to its size" in said[-1]) is (name == "vit_tiny_patch16_224")
    if name == "resnet18":
        assert isinstance(net, timm.models.ResNet) and net.layer1[0].bn2.weight.eq(0).all()
