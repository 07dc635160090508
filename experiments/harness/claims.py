"""What an experiment is: arms that differ in one thing, and what is claimed of them before anything is measured."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from experiments.harness.images import ImageSet, prepare_cifar
from train.recipe import Recipe

MARGIN_POINTS = 1.0  # points of top-1 within which two arms count as equally good, set before the first run


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: a recipe, on so many GPUs as `python -m train --gpus` means them: chunks of a step."""

    name: str
    recipe: Recipe
    gpus: int = 1


@dataclass(frozen=True)
class ClaimSide:
    """One side of a comparison: the values of `field` in an arm's rows; of several arms, the one of the best mean."""

    arms: tuple[str, ...]
    metric: str = "top1"


def make_side(*arms: str, metric: str = "top1") -> ClaimSide:
    """Return a side by the names of its arms."""
    return ClaimSide(arms, metric)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That `first` is higher than `second`; with `margin` that it is not lower by more points than this.

    `text` says it as a sentence without its end. `source` is what was published of it, with numbers. With `cheaper` the
    sentence also says how much work and time the first side took of the second's.
    """

    text: str
    first: ClaimSide
    second: ClaimSide
    margin: float | None = None
    source: str = ""
    cheaper: bool = False


@dataclass(frozen=True)
class ImageSources:
    """Where images come from, None where they are not at hand, and the folder to work in."""

    data: Path | None
    photographs: Path | None
    work: Path


def cifar_images(sources: ImageSources, _: int) -> ImageSet:
    """Return the part of CIFAR-10 that all seeds share."""
    assert sources.data is not None
    return prepare_cifar(sources.data, sources.work)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Arms and claims. `name` is that of its script and its picture; `about` what is held equal, and why.

    `images` gives the images of a seed, found at the sources' field `needs`. `repeats` times as many seeds are run as
    asked for.
    """

    name: str
    title: str
    description: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    required_source: str = "data"
    images: Callable[[ImageSources, int], ImageSet] = field(default=cifar_images)
    seeds_factor: int = 1

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        named = {name for claim in self.claims for one in (claim.first, claim.second) for name in one.arms}
        if len(set(names)) < len(names) or not named <= set(names):
            raise ValueError(f"{self.name}: two arms of one name, or a claim of an arm that is not there")
