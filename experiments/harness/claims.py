"""The parts of an experiment: arms that differ in one thing, and claims about them, fixed before any measurement."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from experiments.harness.images import ImageSet, prepare_cifar
from train.recipe import Recipe

MARGIN_POINTS = 1.0  # points of top-1 within which two arms count as equally good; set before the first run


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: a recipe and a number of GPUs.

    `gpus` is what `python -m train --gpus` gets: the number of chunks of a step. One processor computes all of them.
    """

    name: str
    recipe: Recipe
    gpus: int = 1


@dataclass(frozen=True)
class ClaimSide:
    """One side of a comparison: the values of `metric` in the rows of an arm; of several arms, the best one by mean."""

    arms: tuple[str, ...]
    metric: str = "top1"


def make_side(*arms: str, metric: str = "top1") -> ClaimSide:
    """Return a side from the names of its arms."""
    return ClaimSide(arms, metric)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim that `first` is higher than `second`; with a `margin`, that it is at most `margin` points lower.

    `text` is the claim as a sentence without its period. `source` is what was published about it, with numbers. With
    `cheaper`, the report also says how much work and time the first side took compared with the second.
    """

    text: str
    first: ClaimSide
    second: ClaimSide
    margin: float | None = None
    source: str = ""
    cheaper: bool = False


@dataclass(frozen=True)
class ImageSources:
    """Where the images of the experiments come from (None: not available), and the folder to work in."""

    data: Path | None
    photographs: Path | None
    work: Path


def cifar_images(sources: ImageSources, _: int) -> ImageSet:
    """Return the part of CIFAR-10 that all seeds share."""
    assert sources.data is not None
    return prepare_cifar(sources.data, sources.work)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Arms and the claims about them.

    Attributes:
        name: Name of the experiment, its module and its picture.
        title: Heading of its section, with its number.
        description: What differs, and what is held equal.
        arms: The arms; the first is the reference of the table.
        claims: The claims about the arms.
        required_source: The field of `ImageSources` that the experiment needs.
        images: Returns the images of a seed.
        seeds_factor: How many times as many seeds are run as the command line asks for.
    """

    name: str
    title: str
    description: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    required_source: str = "data"
    images: Callable[[ImageSources, int], ImageSet] = field(default=cifar_images)
    seeds_factor: int = 1
