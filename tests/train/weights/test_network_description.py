"""The description of a network: what of the recipe it takes over, and how it travels in a file of weights."""

from pathlib import Path
from typing import Any

import pytest
from support.train_records import make_epoch

from train.data.order.center_crop import resized_size
from train.data.order.rect_val import rect_crop_shape
from train.recipe import Phase
from train.tools.records import DamagedRecord, decode
from train.weights.network_description import Crop, NetworkDescription, parse_metadata

KNOWN: dict[str, Any] = {
    "epoch": 3,
    "step": 40,
    "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.2, 0.2),
    "classes": ["airplane", "ship"],
}


def test_of_run_takes_the_view_of_the_last_phase(tiny: Any) -> None:
    phases = [
        Phase(epochs=(0, 1), size=96, batch=8, lr=0.1),
        Phase(epochs=(1, 2), size=200, batch=8, lr=0.1, rect_val=True),
    ]
    rect = NetworkDescription.of_run(tiny(phases=phases), validated=make_epoch(top1=71.5, top5=90.0), **KNOWN)
    assert (rect.crop, rect.image_size, rect.top1, rect.top5) == (Crop.RECT, 192, 71.5, 90.0)
    shape = rect_crop_shape(300, 200, 200)
    assert min(shape) == rect.image_size and min(resized_size((200, 300), shape)) == rect.resize_short_side
    square = NetworkDescription.of_run(tiny(phases=phases[:1]), validated=None, **KNOWN)
    assert (square.crop, square.image_size, square.resize_short_side, square.top1) == (Crop.SQUARE, 96, 109, None)
    assert (square.model, square.recipe, square.classes) == ("resnet10_tiny", "tiny", ("airplane", "ship"))


def test_parse_metadata_reads_what_was_written_and_refuses_that_of_another_program(tiny: Any) -> None:
    description = NetworkDescription.of_run(tiny(), validated=None, **KNOWN | {"classes": ["\udcff", "b\n"]})
    metadata = description.metadata(tiny())
    assert parse_metadata(metadata, Path()) == (description, tiny())
    for changes in ({"recipe": "{}"}, {"recipe": "{"}, {"imgnet-cluster": "{}"}, {"imgnet-cluster": "7"}, None):
        with pytest.raises(DamagedRecord, match=r"w\.safetensors: ") as caught:
            parse_metadata({"format": "pt"} if changes is None else {**metadata, **changes}, Path("w.safetensors"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [
    {"image_size": 10**9}, {"image_size": 0}, {"resize_short_side": -1}, {"std": (1.0, 0.0, 1.0)}, {"classes": ()},
])  # fmt: skip
def test_description_that_fits_no_image_is_refused(changes: dict[str, Any]) -> None:
    """It comes with the network, from machines: an image of a billion pixels a side would fill the memory."""
    values: dict[str, Any] = {
        "recipe": "r", "model": "resnet18", "epoch": 1, "step": 1, "seed": 1, "image_size": 224, "crop": "square",
        "resize_short_side": 256, "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), "classes": ("cat", "dog"),
    }  # fmt: skip
    decode(NetworkDescription, values)
    with pytest.raises(DamagedRecord):
        decode(NetworkDescription, {**values, **changes})
