"""What has to be known to use a trained network: its classes and how an image becomes its input. Imports no torch.

A run ends with these files in the folder `agent_protocol.NETWORK_FOLDER`:

    model.safetensors         the weights after the last epoch
    model-best.safetensors    those of the validation with the highest top-1, unless that was the last
    classes.json              a `NetworkDescription`, for people and for other programs
    confusion.json            which classes the last validation took for which (train/metrics/confusion.py)

The files of weights have the same description in their metadata, and the recipe, so each of them suffices alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from train.data.order.center_crop import resized_short_side
from train.data.order.rect_val import rect_crop_shape
from train.recipe.history import EpochResult
from train.recipe.schema import Recipe
from train.tools.records import DamagedRecord, damaged, decode_json, encode
from train.tools.text_files import parse_json, to_json_bytes

DESCRIPTION_KEY = "imgnet-cluster"  # in the metadata of a file of weights
RECIPE_KEY = "recipe"
# The file may come from a machine that somebody else controls.
MAX_SIDE_PIXELS = 10_000
MAX_CLASSES = 5_000_000


class Crop(StrEnum):
    """Which part of an image the network sees in validation."""

    SQUARE = "square"  # the centre square
    RECT = "rect"  # the centre rectangle (train/data/order/rect_val.py)


@dataclass(frozen=True, kw_only=True)
class NetworkDescription:
    """A trained network: what it was trained as, how far, its classes, and how an image becomes its input.

    `classes` are in the order of the scores. An image is resized until its short side has `resize_short_side` pixels,
    cropped in its centre to `image_size` pixels (of a rectangle, the short side), scaled from 0 to 1, reduced by `mean`
    and divided by `std`, which are of red, green and blue. `epoch` and `step` count what is done. `top1` and `top5` are
    the percentages of the validation after this epoch, None when it was not validated.
    """

    recipe: str
    model: str
    epoch: int
    step: int
    seed: int
    top1: float | None = None
    top5: float | None = None
    image_size: int
    crop: Crop
    resize_short_side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        sides = (self.image_size, self.resize_short_side)
        if not all(0 < side <= MAX_SIDE_PIXELS for side in sides) or not all(deviation > 0 for deviation in self.std):
            raise ValueError(
                f"no image can be made its input: sizes {sides} (at most {MAX_SIDE_PIXELS}), std {self.std}"
            )
        if not 0 < len(self.classes) <= MAX_CLASSES:
            raise ValueError(f"it has {len(self.classes)} classes, at most {MAX_CLASSES} can be")

    @classmethod
    def of_run(
        cls,
        recipe: Recipe,
        classes: Sequence[str],
        epoch: int,
        step: int,
        validated: EpochResult | None,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> Self:
        """Return the description of a network after some epochs and steps, both from the start of the run.

        `validated` is the epoch after which exactly these weights were validated, None when they were not. An image
        becomes the input as in this validation, or else as in those of the last phase.
        """
        size, is_rect = recipe.phases[-1].final_size, recipe.phases[-1].rect_val
        if validated and validated.view:  # the best weights may be of a phase with smaller images
            size, is_rect = validated.size, validated.view == Crop.RECT
        side = min(rect_crop_shape(1, 1, size)) if is_rect else size
        return cls(
            recipe=recipe.name,
            model=recipe.model.name,
            epoch=epoch,
            step=step,
            seed=recipe.seed,
            top1=validated.top1 if validated else None,
            top5=validated.top5 if validated else None,
            image_size=side,
            crop=Crop.RECT if is_rect else Crop.SQUARE,
            resize_short_side=resized_short_side(side),
            mean=(mean[0], mean[1], mean[2]),
            std=(std[0], std[1], std[2]),
            classes=tuple(classes),
        )

    def metadata(self, recipe: Recipe) -> dict[str, str]:
        """Return the metadata of a file of weights. "format" tells other programs that the tensors are PyTorch's."""
        return {
            "format": "pt",
            DESCRIPTION_KEY: to_json_bytes(encode(self)).decode(),
            RECIPE_KEY: to_json_bytes(recipe.to_json()).decode(),
        }


def parse_metadata(metadata: Mapping[str, str], path: Path) -> tuple[NetworkDescription, Recipe]:
    """Return the description and the recipe in the metadata of a file of weights. Raises `DamagedRecord`."""
    if not {DESCRIPTION_KEY, RECIPE_KEY} <= metadata.keys():
        raise DamagedRecord(f"{path}: its metadata describe no network of this program; use a file that a job left")
    description = decode_json(NetworkDescription, metadata[DESCRIPTION_KEY].encode(), path)
    try:
        return description, Recipe.from_json(parse_json(metadata[RECIPE_KEY].encode()))
    except ValueError as error:
        raise damaged(error, path) from error
