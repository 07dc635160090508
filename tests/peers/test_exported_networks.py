"""Exported ResNets in torchvision's and timm's own classes: names and shapes fit, scores and answers are the same."""

import json
from pathlib import Path

import pytest
import torch
from support.peers import peer_python, run_script

from train.data.packing.synthetic import draw_sample_set
from train.inference import export, predict
from train.inference.protocol import ExportOptions, PredictOptions
from train.models import resnet
from train.models.registry import MODEL_BUILDERS
from train.recipe import SAMPLE, Model, Phase, Recipe
from train.weights.network_description import NetworkDescription
from train.weights.safetensors_file import write_safetensors

CLASSES = 10
IMAGES = 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A ResNet-18 that tells the classes of a few images apart, as a run leaves it, and these images."""
    folder = tmp_path_factory.mktemp("trained")
    draw_sample_set(folder / "images", train=10, val=IMAGES)
    images = sorted((folder / "images/val").glob("*/*"))
    classes = sorted(path.name for path in (folder / "images/val").iterdir())
    recipe = Recipe(
        name="exported",
        data=SAMPLE,
        model=Model(name="resnet18"),
        phases=[Phase(epochs=(0, 1), size=96, batch=8, lr=0.1)],
    )
    description = NetworkDescription.of_run(
        recipe, epoch=1, step=1, validated=None, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), classes=classes
    )
    torch.manual_seed(0)
    net = MODEL_BUILDERS["resnet18"](len(classes))
    assert isinstance(net, resnet.ResNet)
    inputs = torch.cat([predict.validation_pixels(path.read_bytes(), description) for path in images])
    inputs = (inputs.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    with torch.no_grad():
        net.train()
        net(inputs)  # statistics of these images
        net.eval()
        features = []
        net.fc.register_forward_pre_hook(lambda module, arguments: features.append(arguments[0]))
        net(inputs)
        answers = torch.tensor([[path.parent.name == name for name in classes] for path in images]).float()
        net.fc.weight.copy_(torch.linalg.lstsq(features[0], answers, driver="gelsd").solution.T)
        net.fc.bias.zero_()
    write_safetensors(folder / "model.safetensors", net.state_dict(), description.metadata(recipe))
    return folder / "model.safetensors", images


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_exported_network_answers_each_image_alike_without_this_project(
    library: str, request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peer_python("torch", library)  # before any work
    source, images = request.getfixturevalue("trained")
    exported = tmp_path / "exported.safetensors"
    export.export_network(ExportOptions(source=str(source), file=str(exported)))
    theirs = run_script("classify_exported.py", library, exported, *images, module=library)
    capfd.readouterr()
    predict.predict_images(PredictOptions(source=str(source), images=tuple(map(str, images))))
    ours = [json.loads(line)["answers"][0]["class"] for line in capfd.readouterr().out.splitlines()]
    assert theirs == ours
    right = sum(path.parent.name == name for path, name in zip(images, ours, strict=True))
    assert right > 0.8 * len(images), "the answers are those of a network that has learned nothing"
