"""Options and messages of `python -m train.inference`: evaluation, export, predictions. Does not import torch."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TextIO

from train.metrics.confusion import Confusion
from train.tools.text_files import replace_nonfinite

# The crops by name, each with its views: how often the network sees an image, each time another part or a mirror image.
CROP_VIEWS = {"center": 1, "rect": 1, "five": 5, "tta": 10}
TOP_ANSWERS = 5  # for each image

Box = tuple[float, float, float, float]  # top, left, height, width, as fractions of an image

_protocol_stdout: TextIO | None = None  # the real stdout, while `reserve_stdout` has redirected it


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Which file of weights to evaluate, by which crops and sizes, and on which images.

    Without `sizes`, the image size of the recipe's last phase is used. "" and None stand for what the recipe says.
    `model` is the name that the network must have. `with_examples` asks for the answers about a few images.
    """

    checkpoint: str
    crops: tuple[str, ...] = ("center", "rect")
    sizes: tuple[int, ...] = ()
    data: str = ""
    copies: str = ""
    val_fraction: float | None = None
    scale: float = 1.0
    procs: int | None = None
    workers: int | None = None
    skip_bad: bool = False
    with_examples: bool = False
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class RatioBucket:
    """Accuracy in percent for ratios (width / height) `lowest` to `highest`. No top-5 with at most five classes."""

    images: int
    top1: float
    top5: float | None
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """The accuracy in percent by one crop at one size, over all images and by their aspect ratio.

    `copy` is the short side of the copy read, None for full size. `confusion` is None for very many classes.
    """

    crop: str
    size: int
    views: int
    copy: int | None
    images: int
    top1: float
    top5: float | None
    loss: float
    seconds: float
    buckets: tuple[RatioBucket, ...]
    confusion: Confusion | None


@dataclass(frozen=True, kw_only=True)
class CropAnswer:
    """What the network answers for an image under a crop. `boxes` are the parts of the image that it sees."""

    crop: str
    boxes: tuple[Box, ...]
    predicted: str
    percent: float


@dataclass(frozen=True, kw_only=True)
class ExampleImage:
    """An image, its true class, and the answer for each crop at the first of the sizes."""

    true: str
    answers: tuple[CropAnswer, ...]
    jpeg: bytes


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was evaluated, on which images and where, with a row for each crop and size."""

    checkpoint: str
    recipe: str
    model: str
    epoch: int
    step: int
    images: int
    classes: int
    data: str
    device: str
    precision: str
    procs: int
    rows: tuple[EvaluationRow, ...]
    examples: tuple[ExampleImage, ...]


class FileFormat(StrEnum):
    """The format of an exported network."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"  # torch.save of a state dict
    ONNX = "onnx"


FORMAT_SUFFIXES = {FileFormat.SAFETENSORS: ".safetensors", FileFormat.TORCH: ".pt", FileFormat.ONNX: ".onnx"}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Which network to write, where, and in which form. `model`, if given, is the name that the network must have."""

    source: str
    file: str
    format: FileFormat = FileFormat.SAFETENSORS
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Which network classifies which image files. `model`, if given, is the name that the network must have."""

    source: str
    images: tuple[str, ...]
    model: str | None = None


def emit_json_line(message: Mapping[str, object]) -> None:
    """Print one JSON line to stdout, which carries nothing else."""
    print(json.dumps(replace_nonfinite(message)), file=_protocol_stdout or sys.stdout, flush=True)


@contextlib.contextmanager
def reserve_stdout() -> Iterator[None]:
    """Redirect to stderr what other code prints, such as a user's network; `emit_json_line` still writes to stdout."""
    global _protocol_stdout
    _protocol_stdout = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _protocol_stdout = None
