"""Options and JSON output of the evaluation process. Does not import torch."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TextIO, TypedDict

from train.tools.filesystem import replace_nonfinite

CROPS = {
    "center": "the center square, as in ordinary validation",
    "rect": "the center rectangle, as long as the image's aspect ratio allows in steps of 32 pixels, at most 1.5 to 1",
    "five": "the four corners and the center; mean of the softmax",
    "tta": "these five and their mirror images (Krizhevsky et al. 2012)",
}
MIN_SIZE_PIXELS, MAX_SIZE_PIXELS = 16, 4096
PROGRESS_SECONDS = 1.0  # shortest time between two messages about the progress

_protocol_stdout: TextIO | None = None  # the real stdout, while `reserve_stdout` has redirected it


@dataclass(frozen=True)
class EvalOptions:
    """Which checkpoint to evaluate, by which crops and sizes, and on which images.

    Without `sizes`, the image size of the recipe's last phase is used. `val_fraction` replaces that of the recipe, for
    images without val/. `model` is the name that the network must have.
    """

    checkpoint: Path
    crops: tuple[str, ...]
    sizes: tuple[int, ...]
    data: Path | None
    copies: Path | None
    val_fraction: float | None
    scale: float
    procs: int | None
    workers: int | None
    skip_bad: bool
    shown: int
    model: str | None


# Images of similar aspect ratio (width / height): the mean ratio, the lowest, the highest, and their number.
RatioBucket = TypedDict("RatioBucket", {"ratio": float, "from": float, "to": float, "images": int})


class AccuracyPercents(TypedDict):
    """Accuracies in percent."""

    top1: float
    top5: float


class EvaluationBegin(TypedDict):
    """The first message: what is evaluated, on which images and where.

    `buckets` are the groups of images of similar aspect ratio.
    """

    kind: Literal["begin"]
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
    buckets: list[RatioBucket]


class EvaluationRow(AccuracyPercents):
    """The accuracy by one crop at one size, of all images and of each bucket.

    `copy` is the copy that was read. `confusion` is a `train.metrics.confusion.Confusion` as JSON data, None for a set
    of very many classes.
    """

    kind: Literal["row"]
    crop: str
    size: int
    views: int
    copy: int | None
    loss: float
    images: int
    seconds: float
    buckets: list[AccuracyPercents]
    confusion: dict[str, object] | None


# What the network answers for an image under a crop: the predicted class and its probability. `boxes` is what it sees.
CropAnswer = TypedDict(
    "CropAnswer", {"crop": str, "boxes": list[list[float]], "class": str, "percent": float, "right": bool}
)
# An example image with its true class, the answers for each crop, and the image itself in base64.
ExampleImage = TypedDict("ExampleImage", {"name": str, "class": str, "answers": list[CropAnswer], "jpeg": str})


class EvaluationExamples(TypedDict):
    """The last message, if asked for: some images at one size."""

    kind: Literal["seen"]
    size: int
    images: list[ExampleImage]


class EvaluationProgress(TypedDict):
    """Progress of one crop at one size: how many of its images the first process has evaluated."""

    kind: Literal["progress"]
    what: str
    done: int
    total: int


EvaluationMessage = EvaluationBegin | EvaluationRow | EvaluationExamples | EvaluationProgress


def parse_crops(text: str) -> tuple[str, ...]:
    """Parse names of `CROPS`, separated by commas. Raises `ValueError` with a line for the user."""
    crops = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for crop in crops:
        if crop not in CROPS:
            raise ValueError(f"--crops: {crop!r} is unknown; choose from {', '.join(CROPS)}")
    return crops


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes in pixels, separated by commas. Raises `ValueError` with a line for the user."""
    try:
        sizes = tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < MIN_SIZE_PIXELS or max(sizes) > MAX_SIZE_PIXELS:
        raise ValueError(
            f"--sizes: must be whole numbers from {MIN_SIZE_PIXELS} to {MAX_SIZE_PIXELS} with commas, such as 224,256, "
            f"not {text!r}"
        )
    return sizes


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


def progress_reporter(is_first_process: bool) -> Callable[[str, int, int], None]:
    """Return a function (description, done, total) that emits progress, in the first process only.

    A message comes for every percent, but not more often than every `PROGRESS_SECONDS`.
    """
    last_time = time.monotonic()
    last_percent = ("", 0)

    def report(description: str, done: int, total: int) -> None:
        nonlocal last_time, last_percent
        percent = description, 100 * done // total
        if is_first_process and percent != last_percent and time.monotonic() - last_time > PROGRESS_SECONDS:
            last_time, last_percent = time.monotonic(), percent
            emit_json_line(EvaluationProgress(kind="progress", what=description, done=done, total=total))

    return report


def exit_with_error(text: str) -> NoReturn:
    """Emit an "error" line and exit with code 1, without waiting for loader processes or for peers in a collective."""
    emit_json_line({"kind": "error", "error": text})
    os._exit(1)
