"""Options and JSON output of the processes that export a network and that classify images. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypedDict

TOP_ANSWERS = 5  # for each image


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


class Exported(TypedDict):
    """The message of an export: the files that were written, what the network is, and Python that loads it, or ""."""

    kind: Literal["exported"]
    file: str
    classes_file: str
    model: str
    tensors: int
    parameters: int
    classes: int
    epoch: int
    top1: float | None
    image_size: int
    load_line: str


# One of the most likely classes of an image.
Answer = TypedDict("Answer", {"class": str, "percent": float})


class Prediction(TypedDict):
    """The message about one image: its most likely classes, or why it cannot be read."""

    kind: Literal["prediction"]
    file: str
    answers: list[Answer]
    error: str
