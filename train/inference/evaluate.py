"""Evaluates a trained network on all validation images, by each crop and size; every image is counted once.

The crops, of which each shows the network another part of an image, are named in the help of `imgnet-cluster eval`. The
prediction from several squares is the mean of their softmaxes, as in Krizhevsky et al. 2012, section 4.1. Its corners
are those of the image's center square, here they are those of the whole resized image. fast.ai's TTA of 2018 draws four
of its crops at random; here they are fixed, so that the results are exact.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

from train.data.index.open import DataError, Index, has_other_unicode_form
from train.data.loading.crop import five_crop_corners
from train.data.loading.dataset import copies_root, data_root, open_val_indexes
from train.data.loading.loader import Batch, BatchDecoder, BatchStream
from train.data.order.center_crop import resized_short_side, resized_size
from train.data.order.rect_val import plan_rect_validation, plan_square_validation, rect_crop_shape
from train.data.order.work import BatchRequest, IndexKey
from train.distributed import process_group
from train.distributed.process_group import ProcessGroup, sum_over_processes
from train.engine.inputs import BatchPreprocessor, normalization_of
from train.metrics.accuracy import has_top5, top_guesses
from train.metrics.confusion import MAX_CLASSES, Confusion
from train.metrics.thumbnails import choose_images, shrink_to_jpeg
from train.recipe.schema import Recipe
from train.tools.errors import TrainingError, first_line
from train.tools.host import threads_per_process
from train.tools.process import disable_malloc_trim
from train.tools.records import encode

from . import protocol
from .protocol import CROP_VIEWS, EvalOptions, EvaluationRow, RatioBucket, emit_json_line
from .trained_network import open_trained, precision_of

SQUARES_PER_IMAGE = 5  # of a crop of several views; a crop of more views than that mirrors them too
EXAMPLE_PIXELS = 300  # longer side of an example image
PROGRESS_SECONDS = 1.0  # between two messages of the first process: how many of its images, over all passes, are done
MAX_BUCKETS = 6  # of about equally many images each, as fast.ai's notebook of 2018 compares crops
RATIO_DIGITS = 2  # digits of a ratio that are shown; images that agree in them are in the same bucket
# The columns of the answers for images: how often an image was counted, whether its answer is a top-1 and a top-5 hit,
# the predicted class, and its probability.
COUNT, IS_TOP1, IS_TOP5, PREDICTED, PROBABILITY = range(5)


@protocol.reserve_stdout()
def evaluate_checkpoint(options: EvalOptions) -> None:
    """Evaluate a checkpoint and print the messages. Raises `TrainingError`, `DataError` or `OSError` of one line."""
    # Every process opens the files by itself, before any collective, so each can report what is wrong with them.
    trained = open_trained(Path(options.checkpoint), options.model)
    recipe, description = trained.recipe, trained.description
    if options.val_fraction is not None:
        recipe = replace(recipe, data=replace(recipe.data, val_fraction=options.val_fraction))
    root = data_root(recipe.data, Path(options.data) if options.data else None)
    copies = copies_root(root, Path(options.copies) if options.copies else None)
    seed = description.seed
    indexes = open_val_indexes(recipe, root, copies, scale=options.scale, seed=seed, skip_bad=options.skip_bad)
    val_index = indexes["val", None]
    if description.classes != val_index.classes:  # other names have another order, and so other labels
        name = next((name for name in description.classes if name not in val_index.classes), "")
        form = " in this Unicode form (NFC, NFD)" if has_other_unicode_form(name, val_index.classes) else ""
        missing = f", without {name!r}{form}" if name else ""
        raise TrainingError(
            f"{options.checkpoint}: was trained on {len(description.classes)} classes, but {root} has "
            f"{len(val_index.classes)}{missing}; name a data set with the same classes: --data DIR"
        )
    model = trained.build()

    group = process_group.join_process_group()
    if group.device.type == "cpu":
        torch.set_num_threads(threads_per_process(group.local_world_size))
        disable_malloc_trim()
    compared = f"the names of the images in {val_index.folder}"
    process_group.check_same_on_all_ranks(group, compared, val_index.names_checksum)
    model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    evaluator = Evaluator(options, recipe, group, model, indexes, seed)
    rows = evaluator.run()
    if group.is_first:
        evaluation = protocol.Evaluation(
            checkpoint=options.checkpoint,
            recipe=recipe.name,
            model=recipe.model.name,
            epoch=description.epoch,
            step=description.step,
            images=len(val_index),
            classes=len(val_index.classes),
            data=str(root),
            device=group.device.type,
            precision=str(evaluator.preprocessor.compute_dtype).removeprefix("torch."),
            procs=group.world_size,
            rows=tuple(rows),
            examples=evaluator.examples() if options.with_examples else (),
        )
        emit_json_line({"kind": "evaluation", "evaluation": encode(evaluation)})
    process_group.leave_together(group)
    process_group.exit_process(group)


@dataclass
class Evaluator:
    """One process's share of an evaluation. `answers` has a row for each image, by crop and size."""

    options: EvalOptions
    recipe: Recipe
    group: ProcessGroup
    model: nn.Module
    indexes: Mapping[IndexKey, Index]
    seed: int

    def __post_init__(self) -> None:
        self.answers: dict[tuple[str, int], NDArray[np.float64]] = {}
        self.val_index = self.indexes["val", None]
        self.buckets = ratio_buckets(self.val_index)
        self.preprocessor = BatchPreprocessor(
            self.group.device, normalization=normalization_of(self.model), precision=precision_of(self.recipe)
        )
        self.sizes = self.options.sizes or (self.recipe.phases[-1].final_size,)
        self.images_done, self.last_progress = 0, time.monotonic()

    @torch.no_grad()
    def run(self) -> list[EvaluationRow]:
        """Evaluate by all crops at all sizes, through one loader, and return a row for each."""
        phase, group = self.recipe.phases[-1], self.group
        pixel_budget = phase.batch * phase.final_size**2
        passes = {
            (crop, size): plan_eval_batches(
                crop, size, self.val_index, self.copy_for(size), pixel_budget, group.rank, group.world_size
            )
            for crop, size in product(self.options.crops, self.sizes)
        }
        all_requests = [request for requests in passes.values() for request in requests]
        self.images_total = sum(len(request.ids) for request in all_requests)
        largest_batch_bytes = 3 * max(pixel_budget, SQUARES_PER_IMAGE * max(self.sizes) ** 2)
        decoder = BatchDecoder(self.indexes, self.seed)
        workers = process_group.loader_process_count(group, self.options.workers)
        batches: Iterator[Batch] = BatchStream(decoder, iter(all_requests), workers, group.device, largest_batch_bytes)
        # The start of the loader and of the device belongs to no pass. A rank may have no batch at all.
        if first_batch := next(batches, None):
            one_image = replace(first_batch, images=first_batch.images[:1], labels=first_batch.labels[:1])
            self.predict("center", self.sizes[0], one_image)
            batches = chain([first_batch], batches)
        return [self.evaluate(crop, size, islice(batches, len(requests))) for (crop, size), requests in passes.items()]

    def copy_for(self, size: int) -> int | None:
        """Return the resized copy that images of a size are read from, None for the full-size images.

        It is the copy that the run validated on, if it is here and large enough. Raises `DataError` without either.
        """
        phase = self.recipe.phases[-1]
        copy = phase.copy
        is_large_enough = size <= phase.final_size or resized_short_side(size) <= (copy or 0)
        if copy is not None and is_large_enough and ("val", copy) in self.indexes:
            return copy
        if not self.val_index.has_images:
            raise DataError(
                f"{self.val_index.folder}: has the index and no images, and {size} pixels need the full-size images; "
                f"fetch them: imgnet-cluster data fetch SOURCE {self.val_index.folder.parent}"
            )
        return None

    def predict(self, crop: str, size: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores [n, classes] and labels [n]. Raises `TrainingError` when the network fails, as for its size."""
        try:
            images, labels = self.preprocessor.prepare(batch)
            with self.preprocessor.autocast():
                return mean_crop_scores(crop, self.model, images), labels
        except RuntimeError as error:  # torch's, for example of a fixed-size classifier, or out of memory
            name = self.recipe.model.name
            raise TrainingError(f"{crop} at {size} pixels: {name} fails: {first_line(error)}") from error

    def evaluate(self, crop: str, size: int, batches: Iterator[Batch]) -> EvaluationRow:
        """Evaluate one crop at one size. Each process has its own batches; all get the answers for all images.

        Raises `TrainingError` when the loss is not finite, `RuntimeError` unless every image was counted once.
        """
        start, device, image_count = time.perf_counter(), self.group.device, len(self.val_index)
        loss_sum = torch.zeros(1, dtype=torch.float64, device=device)
        answer_sums = torch.zeros(image_count, PROBABILITY + 1, dtype=torch.float64, device=device)
        for batch in batches:
            scores, labels = self.predict(crop, size, batch)
            loss_sum += cross_entropy(scores, labels, reduction="sum")
            best = top_guesses(scores)
            is_hit = best == labels[:, None]
            probability = scores.softmax(1).gather(1, best[:, :1])[:, 0]
            columns = (torch.ones_like(labels), is_hit[:, 0], is_hit.any(1), best[:, 0], probability)
            ids = torch.from_numpy(batch.request.ids).to(device)
            answer_sums.index_add_(0, ids, torch.stack([column.double() for column in columns], 1))
            self.images_done += len(ids)
            if self.group.is_first and time.monotonic() - self.last_progress > PROGRESS_SECONDS:
                self.last_progress = time.monotonic()
                emit_json_line({"kind": "progress", "done": self.images_done, "total": self.images_total})
        loss = sum_over_processes(self.group, loss_sum).item() / image_count
        answers = sum_over_processes(self.group, answer_sums).cpu().numpy()  # an image is 0 in the other processes
        if not math.isfinite(loss):
            raise TrainingError(
                f"{crop} at {size} pixels: the loss is {loss:g}: the checkpoint's weights are not finite, or too large"
            )
        if not (answers[:, COUNT] == 1).all():
            raise RuntimeError(f"{crop} at {size} did not count every image once")
        self.answers[crop, size] = answers
        all_images = self.bucket(np.concatenate(self.buckets), answers)
        return EvaluationRow(
            crop=crop,
            size=size,
            views=CROP_VIEWS[crop],
            copy=self.copy_for(size),
            images=image_count,
            top1=all_images.top1,
            top5=all_images.top5,
            loss=loss,
            seconds=time.perf_counter() - start,
            buckets=tuple(self.bucket(ids, answers) for ids in self.buckets),
            confusion=self.confusion(answers) if self.group.is_first else None,
        )

    def confusion(self, answers: NDArray[np.float64]) -> Confusion | None:
        """Return which classes the network took for which, None for too many classes."""
        classes = self.val_index.classes
        if len(classes) > MAX_CLASSES:
            return None
        counts = np.zeros((len(classes), len(classes)), np.int64)
        np.add.at(counts, (self.val_index.labels, answers[:, PREDICTED].astype(np.int64)), 1)
        return Confusion.from_counts(classes, counts)

    def bucket(self, ids: NDArray[np.int64], answers: NDArray[np.float64]) -> RatioBucket:
        """Return the accuracy of images, whose IDs are sorted by their ratio, in percent."""
        lowest, highest = (float(self.val_index.widths[id] / self.val_index.heights[id]) for id in (ids[0], ids[-1]))
        top1, top5 = (100 * float(answers[ids, column].sum()) / len(ids) for column in (IS_TOP1, IS_TOP5))
        has_five = has_top5(len(self.val_index.classes))
        return RatioBucket(lowest=lowest, highest=highest, images=len(ids), top1=top1, top5=top5 if has_five else None)

    def examples(self) -> tuple[protocol.ExampleImage, ...]:
        """Return images of different shapes, with the answers at the first size."""
        index, size = self.val_index, self.sizes[0]
        examples = []
        for image_id in choose_images(index):
            jpeg, _ = shrink_to_jpeg(self.indexes["val", self.copy_for(size)].read(image_id), EXAMPLE_PIXELS)
            answers = []
            for crop in self.options.crops:
                answer = self.answers[crop, size][image_id]
                boxes = crop_boxes(crop, size, int(index.widths[image_id]), int(index.heights[image_id]))
                predicted, percent = index.classes[int(answer[PREDICTED])], 100 * float(answer[PROBABILITY])
                answers.append(protocol.CropAnswer(crop=crop, boxes=boxes, predicted=predicted, percent=percent))
            true = index.classes[index.labels[image_id]]
            examples.append(protocol.ExampleImage(true=true, answers=tuple(answers), jpeg=jpeg))
        return tuple(examples)


def ratio_buckets(index: Index) -> list[NDArray[np.int64]]:
    """Return the image IDs from tallest to widest, in at most `MAX_BUCKETS` buckets. Equal rounded ratios share one."""
    ratios = np.asarray(index.widths) / np.asarray(index.heights)
    ids_by_ratio = np.argsort(ratios, kind="stable")
    rounded = np.round(ratios[ids_by_ratio], RATIO_DIGITS)
    bounds = np.quantile(rounded, np.linspace(0, 1, MAX_BUCKETS + 1)[1:-1])
    buckets = np.split(ids_by_ratio, np.searchsorted(rounded, bounds))
    return [bucket for bucket in buckets if len(bucket)]


def plan_eval_batches(
    crop: str, size: int, index: Index, copy: int | None, pixel_budget: int, rank: int, world_size: int
) -> list[BatchRequest]:
    """Return this rank's batches of a crop. Every image is in exactly one batch of one rank.

    `index` is that of the full-size images, `copy` the resized copy that is read. A batch has about `pixel_budget`
    pixels, and at least one image.
    """
    squares = min(CROP_VIEWS[crop], SQUARES_PER_IMAGE)
    batch_size = max(1, pixel_budget // (size * size * squares))
    if crop == "rect":
        plan = plan_rect_validation(index.widths, index.heights, size, batch_size, rank, world_size)
    else:
        plan = plan_square_validation(len(index), size, batch_size, rank, world_size)
    return [BatchRequest("val", copy, ids, shape, squares=squares) for shape, ids in plan]


def mean_crop_scores(crop: str, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return scores [n, classes], one row per image.

    For a crop of several squares, `images` holds the squares of n images, and the softmax of a row is the mean of the
    softmaxes of its squares. For a single square the scores are the model's own.
    """
    scores: list[torch.Tensor] = [model(images).float()]
    if CROP_VIEWS[crop] == 1:
        return scores[0]
    if CROP_VIEWS[crop] > SQUARES_PER_IMAGE:
        scores.append(model(images.flip(3)).float())
    views = torch.cat([part.log_softmax(1).view(-1, SQUARES_PER_IMAGE, part.shape[1]) for part in scores], 1)
    return torch.logsumexp(views, 1) - math.log(views.shape[1])


def crop_boxes(crop: str, size: int, width: int, height: int) -> tuple[protocol.Box, ...]:
    """Return the boxes of an image that a crop shows."""
    shape = rect_crop_shape(width, height, size) if crop == "rect" else (size, size)
    resized = resized_size((height, width), shape)
    corners = five_crop_corners(resized, shape)
    if CROP_VIEWS[crop] == 1:
        corners = corners[-1:]  # the last of the five is the center
    return tuple(
        (top / resized[0], left / resized[1], shape[0] / resized[0], shape[1] / resized[1]) for top, left in corners
    )
