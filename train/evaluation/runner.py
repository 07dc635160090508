"""An examination: a saved network on all validation images, by each crop and size, every image counted once."""

import base64
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from train.data.index.open import DataError, Index
from train.data.loading.dataset import copies_of, open_val, root_of
from train.data.loading.loader import Batch, stream
from train.data.order.rect_val import MARGIN
from train.data.order.work import Key, Work
from train.distributed import batchnorm, process_group
from train.distributed.process_group import Group, total
from train.engine.inputs import Inputs, pixels_of
from train.metrics.accuracy import found
from train.metrics.thumbnails import small
from train.models import registry
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools import checkpoint_io
from train.tools.errors import Expected
from train.tools.process import keep_memory

from .crops import SEVERAL, SQUARES, Views, answer, plan, seen
from .protocol import Options, emit, only_ours, progress
from .ratio_buckets import Buckets

THUMBNAIL = 300  # pixels of the longer side of an image that is shown


@only_ours()
def examine(options: Options) -> None:
    """Carry it out and print what was found. Raises `Expected`, `DataError`, `OSError` with one line."""
    state, recipe = open_checkpoint(options.checkpoint)
    root = root_of(recipe.data, options.data)
    seed = state["identity"]["seed"]
    indexes = open_val(
        recipe, root, copies_of(root, options.copies), scale=options.scale, seed=seed, skip_bad=options.skip_bad
    )
    val = indexes["val", None]
    model = network(options.checkpoint, state, recipe, len(val.classes), root)  # what is wrong so far, all find alone
    group = process_group.join()
    if group.device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // group.local_world))
        keep_memory()
    process_group.same_everywhere(group, f"the names of the images in {val.folder}", val.fingerprint)
    model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    exam = Exam(options, recipe, group, model, indexes, seed)
    if group.first:
        emit(
            "begin", checkpoint=str(options.checkpoint), recipe=recipe.name, model=recipe.model.name,
            epoch=state["epoch"], step=step_of(state, recipe), images=len(val), classes=len(val.classes),
            data=str(root), device=group.device.type, precision=str(exam.inputs.precision).removeprefix("torch."),
            procs=group.world, buckets=exam.buckets.told,
        )  # fmt: skip
    exam.run()
    process_group.barrier(group)
    process_group.leave(group)


def open_checkpoint(path: Path) -> tuple[dict[str, Any], Recipe]:
    """Return a checkpoint's state and recipe. Raises `Expected` when it is none of ours, or damaged."""
    try:
        state = checkpoint_io.load(path)
    except FileNotFoundError as error:
        raise Expected(f"{path}: there is no such checkpoint, or a newer one has replaced it; look again") from error
    except (ValueError, IsADirectoryError) as error:
        raise Expected(f"{path}: is a folder; name a file in it" if path.is_dir() else str(error)) from error
    try:
        said = state["identity"]["recipe"]
        return state, Recipe.from_json({**said, "target": said.get("target") or 100.0})  # a phase may want to have one
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Expected(f"{path}: is of another version of imgnet-cluster: {error}") from error


def step_of(state: Mapping[str, Any], recipe: Recipe) -> int:
    """Return after how many steps of the whole run a checkpoint was saved; its own `step` begins anew in each epoch."""
    run = state["identity"]
    return Schedule(recipe, run["images"], run["gpus"], run["max_steps"]).steps_at(state["epoch"], state["step"])


def network(path: Path, state: Mapping[str, Any], recipe: Recipe, classes: int, root: Path) -> nn.Module:
    """Return the recipe's network with the weights of a checkpoint. Raises `Expected` where they are another's.

    Running statistics that the processes had apart, in the middle of an epoch, are averaged as before a validation.
    """
    model = registry.build(replace(recipe.model, weights=None, fc_std=None, compile=False), classes, 0)
    mine, saved = model.state_dict(), state["model"]
    if mine.keys() != saved.keys():
        raise Expected(f"{path}: its weights are not those of {recipe.model.name} as it is made here")
    for name, one in mine.items():
        if one.shape == saved[name].shape:
            continue
        if one.shape[:1] == (classes,) and one.shape[1:] == saved[name].shape[1:]:
            raise Expected(
                f"{path}: was trained on {len(saved[name])} classes, {root} has {classes}; say --data DIR with those"
            )
        shapes = " and ".join("x".join(map(str, shape)) for shape in (saved[name].shape, one.shape))
        raise Expected(f"{path}: its weights are not those of {recipe.model.name} here: {name} is {shapes}")
    model.load_state_dict(saved)
    stored = state["statistics"]
    if not torch.equal(stored, stored[:1].expand_as(stored)):
        with torch.no_grad():
            batchnorm.scatter(stored.mean(0), batchnorm.statistics(model))
    return model.eval()


@dataclass(frozen=True)
class Pass:
    """One crop at one size: `copy` is read, in these batches."""

    crop: str
    size: int
    copy: int | None
    works: list[Work]

    @property
    def views(self) -> int:
        """How often the network looks at an image."""
        return SQUARES * (1 + SEVERAL[self.crop]) if self.crop in SEVERAL else 1


class Exam:
    """One process's share of an examination."""

    def __init__(
        self, options: Options, recipe: Recipe, group: Group, model: nn.Module, indexes: Mapping[Key, Index], seed: int
    ) -> None:
        self.options, self.recipe, self.group, self.model = options, recipe, group, model
        self.indexes, self.val, self.images = indexes, indexes["val", None], Views(indexes, seed)
        self.inputs, self.buckets = Inputs(group.device, pixels=pixels_of(model)), Buckets(indexes["val", None])
        self.say, self.sizes = progress(group.first), options.sizes or (recipe.phases[-1].size,)

    @torch.no_grad()
    def run(self) -> None:
        """Take one pass after the other through one loader, and print a row for each."""
        phase = self.recipe.phases[-1]
        pixels, own = phase.batch * phase.size**2, (self.group.rank, self.group.world)
        passes = []
        for crop in self.options.crops:
            for size in self.sizes:
                copy = self.copy_for(size)
                passes.append(Pass(crop, size, copy, plan(crop, size, self.val, copy, pixels, *own)))
        largest = 3 * max(pixels, SQUARES * max(self.sizes) ** 2)
        works = chain.from_iterable(one.works for one in passes)
        workers = process_group.workers(self.group, self.options.workers)
        batches = stream(self.images, works, workers, self.group.device, largest)
        if first := [one for one in [next(batches, None)] if one]:  # the loader's start belongs to no pass
            self.look("center", self.sizes[0], first[0].images[:1], first[0].labels[:1])
        batches = chain(first, batches)
        for one in passes:
            self.take(one, batches)
        if self.group.first and self.options.shown:
            self.show()

    def copy_for(self, size: int) -> int | None:
        """Return the copy that a size is read from: the one the run validated on, where it is there and large enough.

        Raises `DataError` when the full-size images are wanted, and only their index is here.
        """
        phase = self.recipe.phases[-1]
        copy, enough = phase.copy, size <= phase.size or round(size * MARGIN) <= (phase.copy or 0)
        if copy is not None and enough and ("val", copy) in self.indexes:
            return copy
        if not self.val.has_bytes:
            raise DataError(
                f"{self.val.folder}: has the index and no images, from which {size} pixels are cut; fetch all: "
                f"imgnet-cluster data fetch SOURCE {self.val.folder.parent}"
            )
        return None

    def look(self, crop: str, size: int, pixels: torch.Tensor, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and labels on the device. Raises `Expected` where the network does not take the size."""
        try:
            images, found = self.inputs.prepare(Batch(pixels, labels, Work("val", None, labels, (size, size))))
            with self.inputs.autocast():
                return answer(crop, self.model, images), found
        except RuntimeError as error:  # of torch: a fixed-size classifier, no memory
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Expected(f"{crop} at {size} pixels: {self.recipe.model.name} fails: {why}") from error

    def take(self, one: Pass, batches: Iterator[Batch]) -> None:
        """Examine one crop at one size. Raises `RuntimeError` when an image was left out or counted twice."""
        begun, done, mine = time.perf_counter(), 0, sum(len(work.ids) for work in one.works)
        losses = torch.zeros(1, dtype=torch.float64, device=self.group.device)
        counts = torch.zeros(len(self.buckets.told), 3, dtype=torch.int64, device=self.group.device)
        for work in one.works:
            batch = next(batches)
            scores, labels = self.look(one.crop, one.size, batch.images, batch.labels)
            losses += cross_entropy(scores, labels, reduction="sum")
            first, five = found(scores, labels)
            rows = torch.stack([torch.ones_like(labels), first.long(), five.long()], 1)
            counts.index_add_(0, torch.from_numpy(self.buckets.of[work.ids]).to(self.group.device), rows)
            done += len(work.ids)
            self.say(f"{one.crop} at {one.size}", done, mine)
        loss, sums = total(self.group, losses).item(), total(self.group, counts).tolist()
        if not math.isfinite(loss):
            raise Expected(
                f"{one.crop} at {one.size} pixels: the loss is {loss:g}: weights are no numbers, or too large"
            )
        seconds = time.perf_counter() - begun
        if [row[0] for row in sums] != [row["images"] for row in self.buckets.told]:
            raise RuntimeError(f"{one.crop} at {one.size} did not count every image once")
        if self.group.first:
            images = len(self.val)
            tops = {f"top{k}": 100 * sum(row[place] for row in sums) / images for k, place in ((1, 1), (5, 2))}
            emit(
                "row", crop=one.crop, size=one.size, views=one.views, copy=one.copy, **tops, loss=loss / images,
                images=images, seconds=seconds,
                buckets=[{"top1": 100 * row[1] / row[0], "top5": 100 * row[2] / row[0]} for row in sums],
            )  # fmt: skip

    def show(self) -> None:
        """Print what each crop sees of a few images, from the tallest to the widest, and its answer."""
        size, order = self.sizes[0], self.buckets.order
        count = min(self.options.shown, len(order))
        numbers = [int(order[(2 * place + 1) * len(order) // (2 * count)]) for place in range(count)]
        emit("seen", size=size, images=[self.shown(number, size) for number in numbers])

    def shown(self, number: int, size: int) -> dict[str, Any]:
        """Return an image as a small JPEG, with each crop's parts of it (top, left, height, width, of 1) and answer."""
        copy, one = self.copy_for(size), self.val.take(np.array([number]))
        label, width, height = (int(column[0]) for column in (one.labels, one.widths, one.heights))
        jpeg, _ = small(self.indexes["val", copy].read(number), THUMBNAIL)
        answers = []
        for crop in self.options.crops:
            (work,) = plan(crop, size, one, copy, 1, 0, 1)
            batch = self.images.make(replace(work, ids=np.array([number])))
            chances = self.look(crop, size, batch.images, batch.labels)[0].softmax(1)[0]
            best = int(chances.argmax())
            answers.append(
                {
                    "crop": crop, "boxes": seen(crop, size, width, height), "class": self.val.classes[best],
                    "percent": 100 * float(chances[best]), "right": best == label,
                }
            )  # fmt: skip
        told = {"name": self.val.name(number), "class": self.val.classes[label], "answers": answers}
        return {**told, "jpeg": base64.b64encode(jpeg).decode()}
