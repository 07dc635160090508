"""Predictions: what the network sees of a photo, its answers, and files that are no images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from train.data.decode import NOT_AN_IMAGE
from train.data.index.open import load_index
from train.data.loading.loader import BatchDecoder
from train.data.order.rect_val import plan_rect_validation, plan_square_validation
from train.data.order.work import BatchRequest
from train.evaluation import trained_network
from train.inference import predict
from train.recipe import Phase
from train.tools.errors import TrainingError
from train.weights.safetensors_file import write_safetensors


@pytest.mark.parametrize("is_rect", [False, True], ids=["square", "rect"])
@pytest.mark.parametrize("size", [48, 64, 100])
def test_validation_pixels_are_those_of_validation(
    size: int, is_rect: bool, tiny: Any, describe: Any, tiny_data: Path
) -> None:
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
            pixels = predict.validation_pixels(index.read(number), describe(recipe))
            assert torch.equal(pixels[0], expected)


def test_predict_gives_the_answers_of_the_network(
    tiny: Any, write_trained: Any, run_main: Any, tiny_data: Path, tmp_path: Path
) -> None:
    index = load_index(tiny_data, "val")
    source = write_trained(tiny(), index.classes)
    trained = trained_network.open_trained(source)
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
    tiny: Any, describe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A classifier for them is not built in memory before the shapes are known to fit."""
    recipe = tiny()
    description = replace(describe(recipe), classes=("",) * 200_000)
    weights = {"weight": torch.zeros(1, 128)}
    write_safetensors(tmp_path / "m.safetensors", weights, description.metadata(recipe))
    trained = trained_network.open_trained(tmp_path / "m.safetensors")
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
