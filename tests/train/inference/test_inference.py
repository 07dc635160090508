"""Exports and predictions of a trained network.

Exported networks: names, formats, and that plain PyTorch computes the same scores with them, to the last bit.
Predictions: what the network sees of a photo, its answers, and files that are no images.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from train.data.decode import NOT_AN_IMAGE
from train.data.index.open import load_index
from train.data.loading.loader import BatchDecoder
from train.data.order.rect_val import plan_rect_validation, plan_square_validation
from train.data.order.work import BatchRequest
from train.inference import __main__, export, predict
from train.inference.protocol import FileFormat
from train.inference.trained_network import open_trained
from train.models.registry import build_model
from train.recipe import Model, Phase, Recipe
from train.tools.errors import TrainingError
from train.weights.network_description import NetworkDescription
from train.weights.safetensors_file import read_safetensors, write_safetensors

CLASSES = ("airplane", "bird", "ship")


def describe_network(recipe: Recipe, classes: tuple[str, ...] = CLASSES) -> NetworkDescription:
    return NetworkDescription.of_run(
        recipe, epoch=4, step=40, validated=None, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), classes=classes
    )


@pytest.fixture
def write_trained(tmp_path: Path) -> Callable[..., Path]:
    """Write a network as a run leaves it, with statistics that are not those of a fresh one. Returns the file."""

    def write(recipe: Recipe, classes: tuple[str, ...] = CLASSES) -> Path:
        state = build_model(recipe.model, len(classes), 1).state_dict()
        for name, tensor in state.items():
            if "running" in name:
                tensor += 0.25
        path = tmp_path / "model.safetensors"
        write_safetensors(path, state, describe_network(recipe, classes).metadata(recipe))
        return path

    return write


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command line in this process; return its exit code and its messages."""

    def exit_instead(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", exit_instead)

    def run(task: str, source: Path, *files: Path, **options: str) -> tuple[int, list[dict[str, Any]]]:
        named = {"file": str(files[0])} if task == "export" else {"images": list(map(str, files))}
        try:
            code = __main__.main([task, json.dumps({"source": str(source), **named, **options})])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_exported_resnet_has_torchvisions_names(tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path) -> None:
    source = write_trained(tiny(model=Model(name="resnet18")))
    code, (message,) = run_main("export", source, tmp_path / "out.safetensors")
    assert code == 0 and "torchvision.models.get_model('resnet18', num_classes=3)" in message["load_line"]
    exported = read_safetensors(tmp_path / "out.safetensors")
    assert {"conv1.weight", "bn1.weight", "layer4.1.bn2.running_var"} <= exported.keys()


@pytest.mark.parametrize(("model", "expected"), [
    ("timm:resnet50", "import safetensors.torch, timm; net = timm.create_model('resnet50', num_classes=7)"),
    ("torchvision:vgg11", "import safetensors.torch, torchvision; net = torchvision.models.get_model('vgg11', "),
    ("mine.nets:small", "import safetensors.torch, mine.nets; net = mine.nets.small(7); net.load_state_dict("),
])  # fmt: skip
def test_load_line_builds_a_librarys_own_network(model: str, expected: str) -> None:
    line = export.load_line(Model(name=model), Path("x.safetensors"), 7, FileFormat.SAFETENSORS)
    assert line.startswith(expected) and line.endswith(")")


def test_export_of_a_blurred_network_computes_the_same(
    tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path
) -> None:
    source = write_trained(tiny(model=Model(name="resnet18", blurpool=True)))
    code, (message,) = run_main("export", source, tmp_path / "again.safetensors")
    assert code == 0 and open_trained(tmp_path / "again.safetensors").description == open_trained(source).description
    images, loaded = torch.randn(2, 3, 64, 96), dict[str, nn.Module]()
    exec(message["load_line"], {}, loaded)  # torchvision's class has no blur
    with torch.no_grad():
        scores = [net.eval()(images) for net in (open_trained(source).build(), loaded["net"])]
    assert torch.equal(*scores)


def test_exports_of_the_same_network_share_the_file_of_classes(
    tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path
) -> None:
    source = write_trained(tiny())
    classes_file = tmp_path / "out.classes.json"
    for name in ("out.safetensors", "out.pt"):
        assert run_main("export", source, tmp_path / name)[0] == 0 and classes_file.is_file()
    classes = classes_file.read_text()
    for changed in ("{}", classes.replace('"epoch": ', '"epoch": 9')):
        classes_file.write_text(changed)
        code, (message,) = run_main("export", source, tmp_path / "out.pt")
        assert code == 1 and "describes another network, or this one after another step; remove" in message["error"]
        assert classes_file.read_text() == changed != classes


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about itself
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


@pytest.mark.parametrize("is_rect", [False, True], ids=["square", "rect"])
@pytest.mark.parametrize("size", [48, 64, 100])
def test_validation_pixels_are_those_of_validation(size: int, is_rect: bool, tiny: Any, tiny_data: Path) -> None:
    index = load_index(tiny_data, "val")
    recipe = tiny(phases=[Phase(epochs=(0, 1), size=size, batch=8, lr=0.1, rect_val=is_rect)])
    if is_rect:
        plan = plan_rect_validation(index.widths, index.heights, size, 4, 0, 1)
    else:
        plan = plan_square_validation(len(index), size, 4, 0, 1)
    decoder = BatchDecoder({("val", None): index}, 0)
    for shape, ids in plan:
        batch = decoder.decode_batch(BatchRequest("val", None, ids, shape))
        for number, expected in zip(ids.tolist(), batch.images, strict=True):
            pixels = predict.validation_pixels(index.read(number), describe_network(recipe))
            assert torch.equal(pixels[0], expected)


def test_predict_gives_the_answers_of_the_network(
    tiny: Any, write_trained: Any, run_main: Any, tiny_data: Path, tmp_path: Path
) -> None:
    index = load_index(tiny_data, "val")
    source = write_trained(tiny(), index.classes)
    trained = open_trained(source)
    model, description = trained.build().eval(), trained.description
    images = [tiny_data / "val" / index.name(number) for number in (0, 7)]
    (tmp_path / "text.jpg").write_text("no image")
    files = [*images, tmp_path / "text.jpg", tmp_path / "none.jpg"]
    code, messages = run_main("predict", source, *files)
    assert code == 0 and [message["file"] for message in messages] == list(map(str, files))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (description.mean, description.std))
    for message, path in zip(messages, images, strict=False):
        pixels = predict.validation_pixels(path.read_bytes(), description)
        with torch.no_grad():
            probabilities = model((pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std).softmax(1)[0]
        best = probabilities.topk(5)
        assert [answer["class"] for answer in message["answers"]] == [index.classes[i] for i in best.indices]
        percents = [answer["percent"] for answer in message["answers"]]
        np.testing.assert_allclose(percents, 100 * best.values.numpy(), rtol=1e-4)
        assert not message["error"]
    assert messages[2]["error"] == f"{files[2]}: {NOT_AN_IMAGE}" and not messages[2]["answers"]
    assert messages[3]["error"] == f"{files[3]}: No such file or directory"


def test_file_that_lies_about_its_classes_fills_no_memory(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A classifier for them is not built in memory before the shapes are known to fit."""
    recipe = tiny()
    description = replace(describe_network(recipe), classes=("",) * 200_000)
    weights = {"weight": torch.zeros(1, 128)}
    write_safetensors(tmp_path / "m.safetensors", weights, description.metadata(recipe))
    trained = open_trained(tmp_path / "m.safetensors")
    devices: list[str] = []

    def build(_: object, classes: int, seed: int) -> torch.nn.Module:
        network = torch.nn.Module()
        network.weight = torch.nn.Parameter(torch.empty(classes, 128))
        devices.append(network.weight.device.type)
        return network

    monkeypatch.setattr("train.models.registry.build_model", build)
    with pytest.raises(TrainingError, match=r"weight is 1x128, not 200000x128"):
        trained.build()
    assert devices == ["meta"]


def test_export_onnx_without_its_packages_is_one_line(
    tiny: Any, write_trained: Any, run_main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_trained(tiny())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "out.classes.json").write_text("of another network, which must not hide the reason")
    code, (message,) = run_main("export", source, tmp_path / "out.onnx", format="onnx")
    assert code == 1 and "not installed here; install: pip install onnx onnxscript" in message["error"]
    assert not (tmp_path / "out.onnx").exists()
