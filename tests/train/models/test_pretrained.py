"""Pretrained weights from files of all kinds: taken, refused with names, and nothing in them run."""

import pickle
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from train.models import external, pretrained
from train.models.registry import MODEL_BUILDERS, build_model
from train.recipe import Model
from train.tools import checkpoint_io
from train.tools.errors import TrainingError

State = dict[str, torch.Tensor]


def made(classes: int = 6, seed: int = 0, name: str = "resnet10_tiny") -> nn.Module:
    return build_model(Model(name=name), classes, seed)


@pytest.fixture
def theirs() -> State:
    """Weights of another start, statistics included."""
    state = made(seed=1).state_dict()
    for name, one in state.items():
        if "running" in name:
            one += 0.5
    return state


def saved(folder: Path, value: Any, name: str = "w.pt") -> str:
    torch.save(value, folder / name)
    return str(folder / name)


def loaded(file: str, classes: int = 6) -> tuple[State, list[str]]:
    net, said = made(classes), list[str]()
    pretrained.load_pretrained(net, file, said.append)
    return net.state_dict(), said


def equal(one: State, other: State, but: tuple[str, ...] = ()) -> bool:
    names = [name for name in other if not name.startswith(but)] if but else list(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in names)


@pytest.mark.parametrize("kind", [
    lambda state: state,
    lambda state: {"state_dict": state, "epoch": 3},
    lambda state: {"model": state},
    lambda state: {f"module.{name}": one for name, one in state.items()},
    lambda state: {"state_dict": {f"model.{name}": one for name, one in state.items()}},
    lambda state: {f"module._orig_mod.{name}": one for name, one in state.items()},
    lambda state: {name: one.double() if one.is_floating_point() else one for name, one in state.items()},
], ids=["plain", "nested", "model", "module", "lightning", "compiled", "double"])  # fmt: skip
def test_a_state_is_found_whatever_it_is_wrapped_in(kind: Any, theirs: State, tmp_path: Path) -> None:
    found, said = loaded(saved(tmp_path, kind(theirs)))
    assert equal(found, theirs) and not said
    assert found["fc.weight"].dtype == torch.float32


def test_a_checkpoint_of_ours_is_taken_and_a_damaged_one_refused(theirs: State, tmp_path: Path) -> None:
    checkpoint_io.write_checkpoint(tmp_path, 7, {"format": 3, "model": theirs, "optimizer": {}, "epoch": 1})
    (path,) = tmp_path.iterdir()
    assert equal(loaded(str(path))[0], theirs)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TrainingError, match=r"step-00000007\.pt.* is damaged"):
        loaded(str(path))


def test_a_classifier_for_other_classes_stays_at_its_own_start_and_that_is_said(theirs: State, tmp_path: Path) -> None:
    start = made(9).state_dict()
    found, said = loaded(saved(tmp_path, theirs), classes=9)
    assert equal({**found, "fc.weight": theirs["fc.weight"], "fc.bias": theirs["fc.bias"]}, theirs)
    assert torch.equal(found["fc.weight"], start["fc.weight"]) and torch.equal(found["fc.bias"], start["fc.bias"])
    assert len(said) == 1 and "its classifier is for 6 classes, ours for 9: it stays at its own start" in said[0]


def test_a_file_without_the_counters_of_old_norms_is_whole(theirs: State, tmp_path: Path) -> None:
    old = {name: one for name, one in theirs.items() if not name.endswith("num_batches_tracked")}
    assert equal(loaded(saved(tmp_path, old))[0], theirs)


@pytest.mark.parametrize(("change", "said"), [
    (lambda state: [state.pop(name) for name in list(state)[:7]],
     "missing: stem.0.weight, stem.1.weight, stem.1.bias, stem.1.running_mean and 2 more$"),
    (lambda state: state.update(extra=torch.ones(1)), "not known here: extra$"),
    (lambda state: state.update({"stem.1.bias": torch.ones(3)}), "of another shape: stem.1.bias$"),
    (lambda state: state.update({"fc.weight": torch.ones(6, 3)}), "of another shape: fc.weight$"),
    (lambda state: state.pop("fc.bias"), "missing: fc.bias$"),
    (lambda state: [state.clear(), state.update(a=torch.ones(1))], "missing: stem.0.weight, .*; not known here: a$"),
], ids=["missing", "extra", "shape", "deep", "bias", "another"])  # fmt: skip
def test_anything_else_that_does_not_fit_is_named(change: Any, said: str, theirs: State, tmp_path: Path) -> None:
    change(theirs)
    with pytest.raises(TrainingError, match=r"w\.pt is not of this network; " + said) as caught:
        loaded(saved(tmp_path, theirs))
    assert "\n" not in str(caught.value)


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("writer", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_nothing_in_a_file_is_run(writer: Any, tmp_path: Path) -> None:
    """The trainer of 2018 unpickled what it had downloaded (facts/seeds.md 1.9, 6)."""
    writer({"model": Trap(tmp_path / "touched")}, tmp_path / "w.pt")
    with pytest.raises(
        TrainingError, match=r"w\.pt is no file of tensors only, .* is not run here; save the network's"
    ):
        loaded(str(tmp_path / "w.pt"))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(("content", "said"), [
    (b"", r"w\.pt is empty; copy or save it again"),
    (b"PK\x03\x04 half a zip", r"w\.pt cannot be read \(\w+: .*\); is it whole\?"),
    (b"\x80\x02 half a pickle", r"w\.pt cannot be read \(\w+: .*\); is it whole\?|no file of tensors only"),
    (b"some text of several words", r"w\.pt is no file of PyTorch, safetensors or ours; save the network's state_dict"),
    (b"eaglets {", r"w\.pt is no file of PyTorch, safetensors or ours"),
    ([1, 2], "holds no weights by name"),
    ({}, "holds no weights by name"),
    ({"model": {"a": 3}}, "holds no weights by name"),
], ids=["empty", "cut", "cut pickle", "text", "brace", "list", "nothing", "numbers"])  # fmt: skip
def test_what_holds_no_weights_is_refused_in_one_line(content: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        saved(tmp_path, content)
    with pytest.raises(TrainingError, match=said) as caught:
        loaded(str(path))
    assert "\n" not in str(caught.value)


def holding_itself(state: State) -> Any:
    made: dict[str, Any] = {"weights": state}
    made["model"] = made
    return made


def quantized(one: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)


def test_a_file_that_holds_itself_has_an_end(theirs: State, tmp_path: Path) -> None:
    file = saved(tmp_path, holding_itself(theirs))
    with pytest.raises(TrainingError, match=r"w\.pt holds no weights by name"):
        loaded(file)


@pytest.mark.parametrize(("change", "said"), [
    (lambda one: one.to_sparse(), "holds a sparse or nested tensor: fc.weight; save the network's"),
    (lambda one: one.to("meta"), "holds a tensor without values, of the device meta: fc.weight; save the network's"),
    (quantized, "holds a quantized tensor: fc.weight; save the network's"),
    (lambda one: one.to(torch.complex64), "holds complex64 where this network has real numbers: fc.weight; save the"),
    (lambda one: one.long(), "holds int64 where this network has real numbers: fc.weight; save the"),
    (lambda one: one.bool(), "holds bool where this network has real numbers: fc.weight; save the"),
    (lambda one: torch.tensor(1.0), "is not of this network; of another shape: fc.weight$"),
], ids=["sparse", "meta", "quantized", "complex", "integers", "bits", "one number"])  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # of torch, of what it will not support for much longer
def test_tensors_that_are_no_weights_are_refused_in_one_line(
    change: Any, said: str, theirs: State, tmp_path: Path
) -> None:
    file = saved(tmp_path, {**theirs, "fc.weight": change(theirs["fc.weight"])})
    with pytest.raises(TrainingError, match=r"model, weights: .*w\.pt " + said) as caught:
        loaded(file)
    assert "\n" not in str(caught.value)


def test_counters_may_be_of_any_kind_and_complex_weights_go_where_ours_are() -> None:
    real, whole, bent = (torch.zeros(1, dtype=one) for one in (torch.float16, torch.int64, torch.complex64))
    assert (
        pretrained.is_compatible_dtype(real, whole)
        and pretrained.is_compatible_dtype(whole, whole)
        and pretrained.is_compatible_dtype(bent, bent)
    )
    assert pretrained.is_compatible_dtype(real, bent) and not pretrained.is_compatible_dtype(bent, whole)


def test_only_the_classifier_s_own_weight_tells_of_other_classes(theirs: State, tmp_path: Path) -> None:
    """A bias of another length beside a weight that fits is damage."""
    file = saved(tmp_path, {**theirs, "fc.bias": torch.zeros(5)})
    with pytest.raises(TrainingError, match=r"is not of this network; of another shape: fc.bias$"):
        loaded(file)


def test_a_network_whose_classifier_is_not_known_takes_what_fits_and_names_what_does_not(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    state = {name: one + 1 for name, one in net.state_dict().items()}
    pretrained.load_pretrained(net, saved(tmp_path, state))
    assert equal(net.state_dict(), state)
    with pytest.raises(TrainingError, match=r"is not of this network; of another shape: 0.weight, 0.bias$"):
        pretrained.load_pretrained(nn.Sequential(nn.Conv2d(3, 5, 3)), str(tmp_path / "w.pt"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"model, weights: .*/none\.pt: there is no such file on this machine"):
        loaded(str(tmp_path / "none.pt"))


def test_safetensors_are_read_where_they_are_installed(
    theirs: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"\2" + 7 * b"\0" + b"{}"  # the length of a JSON object, and that
    (tmp_path / "w.safetensors").write_bytes(content)
    (tmp_path / "w.pt").write_bytes(content)
    top, part = types.ModuleType("safetensors"), types.ModuleType("safetensors.torch")
    part.load_file = lambda path: theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "safetensors", top)
    monkeypatch.setitem(sys.modules, "safetensors.torch", part)
    for name in ("w.safetensors", "w.pt"):  # by its bytes, whatever it is called
        assert equal(loaded(str(tmp_path / name))[0], theirs)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(TrainingError, match=r"needs safetensors, .* not installed here; pip install safetensors$"):
        loaded(str(tmp_path / "w.safetensors"))


# --- the names of torchvision and timm -------------------------------------------------------------------------------

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def their_names(blocks: tuple[int, ...], convolutions: int) -> list[str]:
    """What torchvision's ResNets call their tensors, in their order, written down from its documentation's layout."""
    found = ["conv1.weight", *(f"bn1.{one}" for one in NORM)]
    for layer, count in enumerate(blocks, 1):
        for place in range(count):
            block = f"layer{layer}.{place}"
            for number in range(1, convolutions + 1):
                found += [f"{block}.conv{number}.weight", *(f"{block}.bn{number}.{one}" for one in NORM)]
            if place == 0 and (layer > 1 or convolutions == 3):
                found += [f"{block}.downsample.0.weight", *(f"{block}.downsample.1.{one}" for one in NORM)]
    return [*found, "fc.weight", "fc.bias"]


@pytest.mark.parametrize(("name", "blocks", "convolutions"), [
    ("resnet18", (2, 2, 2, 2), 2), ("resnet50", (3, 4, 6, 3), 3), ("resnet101", (3, 4, 23, 3), 3),
])  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_resnet_of_torchvision_s_names_is_ours(
    name: str, blocks: tuple[int, ...], convolutions: int, prefix: str, tmp_path: Path
) -> None:
    with torch.device("meta"):
        shapes = [one.shape for one in MODEL_BUILDERS[name](6).state_dict().values()]
    names = their_names(blocks, convolutions)
    assert len(names) == len(shapes)
    file = {f"{prefix}{one}": torch.full(shape, float(place)) for place, (one, shape) in
            enumerate(zip(names, shapes, strict=True))}  # fmt: skip
    net = MODEL_BUILDERS[name](6)
    pretrained.load_pretrained(net, saved(tmp_path, file))
    assert [one.max().item() for one in net.state_dict().values()] == list(range(len(names)))


def test_the_classifier_s_names_are_found_wherever_it_is() -> None:
    assert pretrained.classifier_keys(made()) == ["fc.weight", "fc.bias"]
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    assert pretrained.classifier_keys(net) == []  # not known before it was looked at
    external.check_scores_and_find_classifier(net, "net", 2, 1)
    assert pretrained.classifier_keys(net) == ["1.weight", "1.bias"]
