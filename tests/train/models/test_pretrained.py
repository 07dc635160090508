"""Pretrained weights from files of all formats: loaded, or refused with the reason; nothing in a file is executed."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.error_lines import error_line
from torch import nn

from train.models import pretrained
from train.models.registry import build_model
from train.recipe import Model
from train.tools import checkpoint_io
from train.tools.errors import TrainingError
from train.weights.safetensors_file import write_safetensors

State = dict[str, torch.Tensor]


def build_tiny(classes: int = 6, seed: int = 0, name: str = "resnet10_tiny") -> nn.Module:
    return build_model(Model(name=name), classes, seed)


@pytest.fixture
def other_state() -> State:
    state = build_tiny(seed=1).state_dict()
    for name, tensor in state.items():
        if "running" in name:
            tensor += 0.5
    return state


def save_file(folder: Path, value: Any, name: str = "w.pt") -> str:
    torch.save(value, folder / name)
    return str(folder / name)


def load_file(file: str, classes: int = 6) -> tuple[State, list[str]]:
    net, log = build_tiny(classes), list[str]()
    pretrained.load_pretrained(net, file, log.append)
    return net.state_dict(), log


def states_equal(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in other)


@pytest.mark.parametrize("wrap", [
    lambda state: {"model": state, "epoch": 3},
    lambda state: {"state_dict": {f"model.{name}": tensor for name, tensor in state.items()}},  # Lightning
    lambda state: {f"module._orig_mod.{name}": tensor for name, tensor in state.items()},  # DDP, torch.compile
    lambda state: {name: tensor.double() if tensor.ndim else tensor for name, tensor in state.items()},
    lambda state: {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")},
])  # fmt: skip
def test_load_pretrained_finds_a_wrapped_state_dict(wrap: Any, other_state: State, tmp_path: Path) -> None:
    loaded_state, log = load_file(save_file(tmp_path, wrap(other_state)))
    assert states_equal(loaded_state, other_state) and not log
    assert loaded_state["fc.weight"].dtype == torch.float32


def test_load_pretrained_from_our_checkpoint_unless_damaged(other_state: State, tmp_path: Path) -> None:
    checkpoint_io.write_checkpoint(tmp_path, 7, {"format": 3, "model": other_state, "optimizer": {}, "epoch": 1})
    (path,) = tmp_path.iterdir()
    assert states_equal(load_file(str(path))[0], other_state)
    whole = path.read_bytes()
    for damaged, reason in (
        (whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:], "is damaged"),
        (whole[:-1000], "cannot be read"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(TrainingError, match=rf"step-00000007\.pt.* {reason}"):
            load_file(str(path))


def test_load_pretrained_skips_classifier_of_other_classes(other_state: State, tmp_path: Path) -> None:
    start = build_tiny(9).state_dict()
    loaded_state, log = load_file(save_file(tmp_path, other_state), classes=9)
    assert states_equal(loaded_state, {**other_state, "fc.weight": start["fc.weight"], "fc.bias": start["fc.bias"]})
    assert len(log) == 1 and "its classifier has 6 classes, this network 9: the classifier keeps its own" in log[0]


@pytest.mark.parametrize(("change", "message"), [
    (lambda state: [state.pop(name) for name in list(state)[:7]], "missing: conv1.weight, .* and 2 more$"),
    (lambda state: state.update(extra=torch.ones(1)), "unknown: extra$"),
    (lambda state: state.update({"bn1.bias": torch.ones(3)}), "of another shape: bn1.bias$"),
    (lambda state: state.update({"fc.weight": torch.ones(6, 3)}), "of another shape: fc.weight$"),
    (lambda state: state.update({"fc.bias": torch.zeros(5)}), "of another shape: fc.bias$"),  # but not fc.weight
    (lambda state: [state.clear(), state.update(a=torch.ones(1))], "missing: conv1.weight, .*; unknown: a$"),
])  # fmt: skip
def test_load_pretrained_names_tensors_that_do_not_fit(
    change: Any, message: str, other_state: State, tmp_path: Path
) -> None:
    change(other_state)
    with pytest.raises(TrainingError, match=r"w\.pt does not fit this network; " + message) as caught:
        load_file(save_file(tmp_path, other_state))
    assert "\n" not in str(caught.value)


class TouchOnUnpickle:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("writer", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_load_pretrained_executes_nothing(writer: Any, tmp_path: Path) -> None:
    """The trainer of 2018 (diux-dev/imagenet18) unpickled what it had downloaded."""
    writer({"model": TouchOnUnpickle(tmp_path / "touched")}, tmp_path / "w.pt")
    with pytest.raises(TrainingError, match=r"w\.pt holds more than tensors, and code .* never executed here"):
        load_file(str(tmp_path / "w.pt"))
    assert not (tmp_path / "touched").exists()


CONTAINS_ITSELF: dict[str, Any] = {"weights": {"a": torch.ones(1)}}
CONTAINS_ITSELF["model"] = CONTAINS_ITSELF


@pytest.mark.parametrize(("content", "message"), [
    (b"", r"w\.pt is empty"),
    (b"PK\x03\x04 half a zip", r"w\.pt cannot be read \(\w+: .*\); is it complete\?"),
    (b"\x80\x02 half a pickle", r"w\.pt cannot be read \(\w+: .*\); is it complete\?|holds more than tensors"),
    (b"some text of several words", r"w\.pt is not a PyTorch file, a safetensors file or a checkpoint"),
    ({"model": {"a": 3}}, "holds no tensors by name"),
    (CONTAINS_ITSELF, "holds no tensors by name"),
    (None, r"w\.pt: no such file on this machine; put it there, or correct the recipe$"),
])  # fmt: skip
def test_load_pretrained_file_without_weights_is_one_line(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file(tmp_path, content)
    error_line(TrainingError, load_file, str(path), match=message)


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensor: tensor.to_sparse(), "holds a sparse or nested tensor: fc.weight"),
    (lambda tensor: tensor.to("meta"), "holds a tensor without values, of the device meta: fc.weight"),
    (quantized, "holds a quantized tensor: fc.weight"),
    (lambda tensor: tensor.to(torch.complex64), "holds complex64 instead of floating-point weights: fc.weight"),
    (lambda tensor: tensor.long(), "holds int64 instead of floating-point weights: fc.weight"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # deprecation warnings of torch
def test_load_pretrained_bad_tensor_is_one_line(change: Any, message: str, other_state: State, tmp_path: Path) -> None:
    file = save_file(tmp_path, {**other_state, "fc.weight": change(other_state["fc.weight"])})
    error_line(TrainingError, load_file, file, match=r"model, weights: .*w\.pt " + message)


def test_load_pretrained_safetensors(other_state: State, tmp_path: Path) -> None:
    for name in ("w.safetensors", "w.pt"):  # recognized by its bytes or by its name
        write_safetensors(tmp_path / name, other_state, {})
        assert states_equal(load_file(str(tmp_path / name))[0], other_state)
    (tmp_path / "w.safetensors").write_bytes((tmp_path / "w.pt").read_bytes()[:-1])
    with pytest.raises(TrainingError, match=r"w\.safetensors cannot be read \(DamagedRecord: .*is it complete\?"):
        load_file(str(tmp_path / "w.safetensors"))
