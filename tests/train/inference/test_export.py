"""Exported networks: names, formats, and that plain PyTorch computes the same scores with them, to the last bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from train.evaluation.trained_network import TrainedNetwork, open_trained
from train.inference import export
from train.inference.protocol import ParameterNames
from train.models.registry import build_model
from train.recipe import Model
from train.tools.errors import TrainingError
from train.weights.safetensors_file import read_safetensors


def test_export_writes_weights_and_classes(tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path) -> None:
    source = write_trained(tiny())
    code, (message,) = run_main("export", source, tmp_path / "out.pt", format="torch")
    assert code == 0 and message["kind"] == "exported" and message["classes"] == 3
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = open_trained(source).weights
    assert exported.keys() == expected.keys() and all(torch.equal(exported[name], expected[name]) for name in expected)
    description = json.loads((tmp_path / "out.classes.json").read_text())
    assert description["classes"] == ["airplane", "bird", "ship"] and description["mean"] == [0.5, 0.4, 0.3]
    assert (description["image_size"], description["crop"], description["resize_short_side"]) == (64, "rect", 72)


@pytest.mark.parametrize("names", ["torchvision", "timm"])
def test_export_names_of_a_library(names: str, tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path) -> None:
    source = write_trained(tiny(model=Model(name="resnet18")))
    code, (message,) = run_main("export", source, tmp_path / "out.safetensors", names=names)
    assert code == 0 and message["model"] == "resnet18"
    exported = read_safetensors(tmp_path / "out.safetensors")
    assert list(exported)[:2] == ["conv1.weight", "bn1.weight"] and "layer4.1.bn2.running_var" in exported
    own = open_trained(source).weights
    assert all(torch.equal(tensor, other) for tensor, other in zip(exported.values(), own.values(), strict=True))


@pytest.mark.parametrize(
    ("model", "names", "is_plain"),
    [("timm:resnet50", "timm", True), ("torchvision:vgg11", "torchvision", True), ("timm:vit", "torchvision", False)],
)
def test_named_weights_of_a_librarys_own_network(
    model: str, names: str, is_plain: bool, tiny: Any, describe: Any
) -> None:
    recipe = tiny(model=Model(name=model))
    weights = {"blocks.0.weight": torch.ones(2)}
    trained = TrainedNetwork(path=Path("w"), weights=weights, recipe=recipe, description=describe(recipe))
    if is_plain:
        assert list(export.named_weights(trained, ParameterNames(names))) == ["blocks.0.weight"]
    else:
        with pytest.raises(TrainingError, match=rf"--names {names}: {names} has no {model}; leave the option out"):
            export.named_weights(trained, ParameterNames(names))


def test_export_of_a_blurred_network_computes_the_same_and_refuses_names_of_plain_ones(
    tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path
) -> None:
    source = write_trained(tiny(model=Model(name="resnet18", blurpool=True)))
    assert run_main("export", source, tmp_path / "again.safetensors")[0] == 0
    assert open_trained(tmp_path / "again.safetensors").description == open_trained(source).description
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        scores = [open_trained(path).build()(images) for path in (source, tmp_path / "again.safetensors")]
    assert torch.equal(*scores)
    with pytest.raises(TrainingError, match=r"--names timm: the resnet18 of timm has no blur"):
        export.named_weights(open_trained(source), ParameterNames.TIMM)


def test_exports_of_the_same_network_share_the_file_of_classes(
    tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path
) -> None:
    source = write_trained(tiny())
    classes_file = tmp_path / "out.classes.json"
    for name in ("out.safetensors", "out.pt"):
        assert run_main("export", source, tmp_path / name)[0] == 0 and classes_file.is_file()
    classes_file.write_text("{}")
    code, (message,) = run_main("export", source, tmp_path / "out.pt")
    assert code == 1 and message["error"].startswith(f"{classes_file}: exists already, and describes another network")
    assert classes_file.read_text() == "{}"


def test_export_onnx_without_its_packages_is_one_line(
    tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_trained(tiny())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "out.classes.json").write_text("of another network, which must not hide the reason")
    code, (message,) = run_main("export", source, tmp_path / "out.onnx", format="onnx")
    assert code == 1 and "not installed here; install: pip install onnx onnxscript" in message["error"]
    assert not (tmp_path / "out.onnx").exists()


def test_export_onnx_computes_the_same_scores(tiny: Any, write_trained: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    source = write_trained(tiny())
    trained = open_trained(source)
    export.write_onnx(trained, tmp_path / "out.onnx")
    session = runtime.InferenceSession(str(tmp_path / "out.onnx"))
    images = torch.randn(5, 3, 64, 64)
    (scores,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(scores), trained.build()(images), rtol=1e-3, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "out.onnx"]


@pytest.mark.parametrize("command", ["export", "predict"])
def test_a_file_does_not_choose_which_function_runs(
    command: str, mine: Any, tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path
) -> None:
    """What came from a machine, or from the internet, names the function that builds its network."""
    calls: list[int] = []

    def build(classes: int) -> torch.nn.Module:
        calls.append(classes)
        return build_model(Model(name="resnet10_tiny"), classes, 1)

    mine.build = build
    source = write_trained(tiny(model=Model(name="mine:build")))
    calls.clear()
    code, (message,) = run_main(command, source, tmp_path / "target.safetensors")
    assert code == 1 and message["error"].endswith("so name it: --model mine:build") and not calls
    code, (message,) = run_main(command, source, tmp_path / "target.safetensors", model="resnet18")
    assert code == 1 and message["error"].endswith("is of the network mine:build, not resnet18") and not calls
    assert run_main(command, source, tmp_path / "target.safetensors", model="mine:build")[0] == 0
