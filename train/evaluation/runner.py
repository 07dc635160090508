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
from train.data.loading.dataset import copies_root, data_root, open_val_indexes
from train.data.loading.loader import Batch, stream_batches
from train.data.order.rect_val import RESIZE_TO_CROP_RATIO
from train.data.order.work import BatchRequest, IndexKey
from train.distributed import batchnorm, process_group
from train.distributed.process_group import ProcessGroup, sum_over_processes
from train.engine.inputs import BatchPreprocessor, normalization_of
from train.metrics.accuracy import is_correct
from train.metrics.thumbnails import shrink_to_jpeg
from train.models import registry
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools import checkpoint_io
from train.tools.errors import TrainingError
from train.tools.process import disable_malloc_trim

from .crops import (
    MULTI_CROP_MIRRORED,
    SQUARES_PER_IMAGE,
    MultiCropDecoder,
    crop_boxes,
    mean_crop_scores,
    plan_eval_batches,
)
from .protocol import EvalOptions, emit_json_line, progress_printer, reserve_stdout
from .ratio_buckets import AspectRatioBuckets

EXAMPLE_PIXELS = 300  # pixels of the longer side of an image that is shown


@reserve_stdout()
def evaluate_checkpoint(options: EvalOptions) -> None:
    """Carry it out and print what was found. Raises `Expected`, `DataError`, `OSError` with one line."""
    state, recipe = open_checkpoint(options.checkpoint)
    root = data_root(recipe.data, options.data)
    seed = state["identity"]["seed"]
    indexes = open_val_indexes(
        recipe, root, copies_root(root, options.copies), scale=options.scale, seed=seed, skip_bad=options.skip_bad
    )
    val = indexes["val", None]
    model = load_network(
        options.checkpoint, state, recipe, len(val.classes), root
    )  # what is wrong so far, all find alone
    group = process_group.join_process_group()
    if group.device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // group.local_world_size))
        disable_malloc_trim()
    process_group.check_same_on_all_ranks(group, f"the names of the images in {val.folder}", val.names_checksum)
    model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    exam = Evaluation(options, recipe, group, model, indexes, seed)
    if group.is_first:
        emit_json_line(
            "begin", checkpoint=str(options.checkpoint), recipe=recipe.name, model=recipe.model.name,
            epoch=state["epoch"], step=global_step(state, recipe), images=len(val), classes=len(val.classes),
            data=str(root), device=group.device.type, precision=str(exam.preprocessor.compute_dtype).removeprefix("torch."),
            procs=group.world_size, buckets=exam.buckets.summaries,
        )  # fmt: skip
    exam.run()
    process_group.barrier(group)
    process_group.exit_process(group)


def open_checkpoint(path: Path) -> tuple[dict[str, Any], Recipe]:
    """Return a checkpoint's state and recipe. Raises `Expected` when it is none of ours, or damaged."""
    try:
        state = checkpoint_io.load_checkpoint(path)
    except FileNotFoundError as error:
        raise TrainingError(
            f"{path}: there is no such checkpoint, or a newer one has replaced it; look again"
        ) from error
    except (ValueError, IsADirectoryError) as error:
        raise TrainingError(f"{path}: is a folder; name a file in it" if path.is_dir() else str(error)) from error
    try:
        said = state["identity"]["recipe"]
        return state, Recipe.from_json({**said, "target": said.get("target") or 100.0})  # a phase may want to have one
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainingError(f"{path}: is of another version of imgnet-cluster: {error}") from error


def global_step(state: Mapping[str, Any], recipe: Recipe) -> int:
    """Return after how many steps of the whole run a checkpoint was saved; its own `step` begins anew in each epoch."""
    run = state["identity"]
    return Schedule(recipe, run["images"], run["gpus"], run["max_steps"]).steps_at(state["epoch"], state["step"])


def load_network(path: Path, state: Mapping[str, Any], recipe: Recipe, num_classes: int, root: Path) -> nn.Module:
    """Return the recipe's network with the weights of a checkpoint. Raises `Expected` where they are another's.

    Running statistics that the processes had apart, in the middle of an epoch, are averaged as before a validation.
    """
    model = registry.build_model(replace(recipe.model, weights=None, fc_std=None, compile=False), num_classes, 0)
    mine, saved = model.state_dict(), state["model"]
    if mine.keys() != saved.keys():
        raise TrainingError(f"{path}: its weights are not those of {recipe.model.name} as it is made here")
    for name, one in mine.items():
        if one.shape == saved[name].shape:
            continue
        if one.shape[:1] == (num_classes,) and one.shape[1:] == saved[name].shape[1:]:
            raise TrainingError(
                f"{path}: was trained on {len(saved[name])} classes, {root} has {num_classes}; say --data DIR with those"
            )
        shapes = " and ".join("x".join(map(str, shape)) for shape in (saved[name].shape, one.shape))
        raise TrainingError(f"{path}: its weights are not those of {recipe.model.name} here: {name} is {shapes}")
    model.load_state_dict(saved)
    stored = state["statistics"]
    if not torch.equal(stored, stored[:1].expand_as(stored)):
        with torch.no_grad():
            batchnorm.copy_flat_into(stored.mean(0), batchnorm.running_statistics(model))
    return model.eval()


@dataclass(frozen=True)
class EvalPass:
    """One crop at one size: `copy` is read, in these batches."""

    crop: str
    size: int
    copy: int | None
    requests: list[BatchRequest]

    @property
    def views_per_image(self) -> int:
        """How often the network looks at an image."""
        return SQUARES_PER_IMAGE * (1 + MULTI_CROP_MIRRORED[self.crop]) if self.crop in MULTI_CROP_MIRRORED else 1


class Evaluation:
    """One process's share of an examination."""

    def __init__(
        self,
        options: EvalOptions,
        recipe: Recipe,
        group: ProcessGroup,
        model: nn.Module,
        indexes: Mapping[IndexKey, Index],
        seed: int,
    ) -> None:
        self.options, self.recipe, self.group, self.model = options, recipe, group, model
        self.indexes, self.val_index, self.decoder = indexes, indexes["val", None], MultiCropDecoder(indexes, seed)
        self.preprocessor, self.buckets = (
            BatchPreprocessor(group.device, normalization=normalization_of(model)),
            AspectRatioBuckets(indexes["val", None]),
        )
        self.report_progress, self.sizes = progress_printer(group.is_first), options.sizes or (recipe.phases[-1].size,)

    @torch.no_grad()
    def run(self) -> None:
        """Take one pass after the other through one loader, and print a row for each."""
        phase = self.recipe.phases[-1]
        pixels, own = phase.batch * phase.size**2, (self.group.rank, self.group.world_size)
        passes = []
        for crop in self.options.crops:
            for size in self.sizes:
                copy = self.copy_for(size)
                passes.append(
                    EvalPass(crop, size, copy, plan_eval_batches(crop, size, self.val_index, copy, pixels, *own))
                )
        largest = 3 * max(pixels, SQUARES_PER_IMAGE * max(self.sizes) ** 2)
        works = chain.from_iterable(one.requests for one in passes)
        workers = process_group.loader_process_count(self.group, self.options.workers)
        batches = stream_batches(self.decoder, works, workers, self.group.device, largest)
        if first := [one for one in [next(batches, None)] if one]:  # the loader's start belongs to no pass
            self.predict("center", self.sizes[0], first[0].images[:1], first[0].labels[:1])
        batches = chain(first, batches)
        for one in passes:
            self.run_pass(one, batches)
        if self.group.is_first and self.options.shown:
            self.print_examples()

    def copy_for(self, size: int) -> int | None:
        """Return the copy that a size is read from: the one the run validated on, where it is there and large enough.

        Raises `DataError` when the full-size images are wanted, and only their index is here.
        """
        phase = self.recipe.phases[-1]
        copy, enough = phase.copy, size <= phase.size or round(size * RESIZE_TO_CROP_RATIO) <= (phase.copy or 0)
        if copy is not None and enough and ("val", copy) in self.indexes:
            return copy
        if not self.val_index.has_images:
            raise DataError(
                f"{self.val_index.folder}: has the index and no images, from which {size} pixels are cut; fetch all: "
                f"imgnet-cluster data fetch SOURCE {self.val_index.folder.parent}"
            )
        return None

    def predict(self, crop: str, size: int, pixels: torch.Tensor, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and labels on the device. Raises `Expected` where the network does not take the size."""
        try:
            images, found = self.preprocessor.prepare(
                Batch(pixels, labels, BatchRequest("val", None, labels, (size, size)))
            )
            with self.preprocessor.autocast():
                return mean_crop_scores(crop, self.model, images), found
        except RuntimeError as error:  # of torch: a fixed-size classifier, no memory
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TrainingError(f"{crop} at {size} pixels: {self.recipe.model.name} fails: {why}") from error

    def run_pass(self, eval_pass: EvalPass, batches: Iterator[Batch]) -> None:
        """Examine one crop at one size. Raises `RuntimeError` when an image was left out or counted twice."""
        begun, done, mine = time.perf_counter(), 0, sum(len(work.ids) for work in eval_pass.requests)
        losses = torch.zeros(1, dtype=torch.float64, device=self.group.device)
        counts = torch.zeros(len(self.buckets.summaries), 3, dtype=torch.int64, device=self.group.device)
        for work in eval_pass.requests:
            batch = next(batches)
            scores, labels = self.predict(eval_pass.crop, eval_pass.size, batch.images, batch.labels)
            losses += cross_entropy(scores, labels, reduction="sum")
            first, five = is_correct(scores, labels)
            rows = torch.stack([torch.ones_like(labels), first.long(), five.long()], 1)
            counts.index_add_(0, torch.from_numpy(self.buckets.bucket_of_image[work.ids]).to(self.group.device), rows)
            done += len(work.ids)
            self.report_progress(f"{eval_pass.crop} at {eval_pass.size}", done, mine)
        loss, sums = sum_over_processes(self.group, losses).item(), sum_over_processes(self.group, counts).tolist()
        if not math.isfinite(loss):
            raise TrainingError(
                f"{eval_pass.crop} at {eval_pass.size} pixels: the loss is {loss:g}: weights are no numbers, or too large"
            )
        seconds = time.perf_counter() - begun
        if [row[0] for row in sums] != [row["images"] for row in self.buckets.summaries]:
            raise RuntimeError(f"{eval_pass.crop} at {eval_pass.size} did not count every image once")
        if self.group.is_first:
            images = len(self.val_index)
            tops = {f"top{k}": 100 * sum(row[place] for row in sums) / images for k, place in ((1, 1), (5, 2))}
            emit_json_line(
                "row", crop=eval_pass.crop, size=eval_pass.size, views=eval_pass.views_per_image, copy=eval_pass.copy, **tops, loss=loss / images,
                images=images, seconds=seconds,
                buckets=[{"top1": 100 * row[1] / row[0], "top5": 100 * row[2] / row[0]} for row in sums],
            )  # fmt: skip

    def print_examples(self) -> None:
        """Print what each crop sees of a few images, from the tallest to the widest, and its answer."""
        size, order = self.sizes[0], self.buckets.ids_by_ratio
        count = min(self.options.shown, len(order))
        numbers = [int(order[(2 * place + 1) * len(order) // (2 * count)]) for place in range(count)]
        emit_json_line("seen", size=size, images=[self.describe_example(number, size) for number in numbers])

    def describe_example(self, image_number: int, size: int) -> dict[str, Any]:
        """Return an image as a small JPEG, with each crop's parts of it (top, left, height, width, of 1) and answer."""
        copy, one = self.copy_for(size), self.val_index.take(np.array([image_number]))
        label, width, height = (int(column[0]) for column in (one.labels, one.widths, one.heights))
        jpeg, _ = shrink_to_jpeg(self.indexes["val", copy].read(image_number), EXAMPLE_PIXELS)
        answers = []
        for crop in self.options.crops:
            (work,) = plan_eval_batches(crop, size, one, copy, 1, 0, 1)
            batch = self.decoder.decode_batch(replace(work, ids=np.array([image_number])))
            chances = self.predict(crop, size, batch.images, batch.labels)[0].softmax(1)[0]
            best = int(chances.argmax())
            answers.append(
                {
                    "crop": crop, "boxes": crop_boxes(crop, size, width, height), "class": self.val_index.classes[best],
                    "percent": 100 * float(chances[best]), "right": best == label,
                }
            )  # fmt: skip
        told = {"name": self.val_index.name(image_number), "class": self.val_index.classes[label], "answers": answers}
        return {**told, "jpeg": base64.b64encode(jpeg).decode()}
