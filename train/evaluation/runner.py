"""Evaluates a checkpoint on all validation images, by each crop and size; every image is counted once."""

import base64
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

from train.data.index.open import DataError, Index
from train.data.loading.dataset import copies_root, data_root, open_val_indexes
from train.data.loading.loader import Batch, stream_batches
from train.data.order.center_crop import resized_short_side
from train.data.order.work import BatchRequest, IndexKey
from train.distributed import process_group
from train.distributed.process_group import ProcessGroup, sum_over_processes
from train.engine.inputs import BatchPreprocessor, normalization_of
from train.metrics.accuracy import count_confusion, is_correct, zero_confusion
from train.metrics.confusion import Confusion
from train.metrics.thumbnails import shrink_to_jpeg
from train.recipe.schema import Recipe
from train.tools.errors import TrainingError, first_line
from train.tools.host import threads_per_process
from train.tools.process import disable_malloc_trim
from train.tools.records import encode

from .crops import (
    MULTI_CROP_MIRRORED,
    SQUARES_PER_IMAGE,
    MultiCropDecoder,
    crop_boxes,
    mean_crop_scores,
    plan_eval_batches,
)
from .protocol import (
    CropAnswer,
    EvalOptions,
    EvaluationBegin,
    EvaluationExamples,
    EvaluationRow,
    ExampleImage,
    emit_json_line,
    progress_reporter,
    reserve_stdout,
)
from .ratio_buckets import AspectRatioBuckets
from .trained_network import open_trained

EXAMPLE_PIXELS = 300  # longer side of an example image


@reserve_stdout()
def evaluate_checkpoint(options: EvalOptions) -> None:
    """Evaluate a checkpoint and print the JSON lines of the protocol.

    Raises `TrainingError`, `DataError` or `OSError` with one line that says what is wrong and where.
    """
    # Every process opens the files by itself, before any collective, so each can report what is wrong with them.
    trained = open_trained(options.checkpoint, options.model)
    recipe, description = trained.recipe, trained.description
    if options.val_fraction is not None:
        recipe = replace(recipe, data=replace(recipe.data, val_fraction=options.val_fraction))
    root = data_root(recipe.data, options.data)
    seed = description.seed
    indexes = open_val_indexes(
        recipe, root, copies_root(root, options.copies), scale=options.scale, seed=seed, skip_bad=options.skip_bad
    )
    val_index = indexes["val", None]
    if len(description.classes) != len(val_index.classes):
        raise TrainingError(
            f"{options.checkpoint}: was trained on {len(description.classes)} classes, but {root} has "
            f"{len(val_index.classes)}; name a data set with the same classes: --data DIR"
        )
    model = trained.build()

    group = process_group.join_process_group()
    if group.device.type == "cpu":
        torch.set_num_threads(threads_per_process(group.local_world_size))
        disable_malloc_trim()
    process_group.check_same_on_all_ranks(
        group, f"the names of the images in {val_index.folder}", val_index.names_checksum
    )
    model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    evaluation = Evaluation(options, recipe, group, model, indexes, seed)
    if group.is_first:
        emit_json_line(
            EvaluationBegin(
                kind="begin",
                checkpoint=str(options.checkpoint),
                recipe=recipe.name,
                model=recipe.model.name,
                epoch=description.epoch,
                step=description.step,
                images=len(val_index),
                classes=len(val_index.classes),
                data=str(root),
                device=group.device.type,
                precision=str(evaluation.preprocessor.compute_dtype).removeprefix("torch."),
                procs=group.world_size,
                buckets=evaluation.buckets.summaries,
            )
        )
    evaluation.run()
    process_group.leave_together(group)
    process_group.exit_process(group)


@dataclass(frozen=True)
class EvalPass:
    """One crop at one size: this rank's batches, read from the resized copy `copy` (None: the full-size images)."""

    crop: str
    size: int
    copy: int | None
    requests: list[BatchRequest]

    @property
    def views_per_image(self) -> int:
        """Number of views of each image that the network is shown."""
        if self.crop not in MULTI_CROP_MIRRORED:
            return 1
        return SQUARES_PER_IMAGE * (2 if MULTI_CROP_MIRRORED[self.crop] else 1)


class Evaluation:
    """One rank's share of an evaluation."""

    def __init__(
        self,
        options: EvalOptions,
        recipe: Recipe,
        group: ProcessGroup,
        model: nn.Module,
        indexes: Mapping[IndexKey, Index],
        seed: int,
    ) -> None:
        self.options = options
        self.recipe = recipe
        self.group = group
        self.model = model
        self.indexes = indexes
        self.val_index = indexes["val", None]
        self.decoder = MultiCropDecoder(indexes, seed)
        self.preprocessor = BatchPreprocessor(group.device, normalization=normalization_of(model))
        self.buckets = AspectRatioBuckets(self.val_index)
        self.sizes = options.sizes or (recipe.phases[-1].final_size,)
        self.report_progress = progress_reporter(group.is_first)

    @torch.no_grad()
    def run(self) -> None:
        """Run all passes through one loader, and print a row for each, then the example images."""
        phase = self.recipe.phases[-1]
        pixel_budget = phase.batch * phase.final_size**2
        passes = []
        for crop in self.options.crops:
            for size in self.sizes:
                copy = self.copy_for(size)
                requests = plan_eval_batches(
                    crop, size, self.val_index, copy, pixel_budget, self.group.rank, self.group.world_size
                )
                passes.append(EvalPass(crop, size, copy, requests))

        largest_batch_bytes = 3 * max(pixel_budget, SQUARES_PER_IMAGE * max(self.sizes) ** 2)
        all_requests = chain.from_iterable(eval_pass.requests for eval_pass in passes)
        workers = process_group.loader_process_count(self.group, self.options.workers)
        batches = stream_batches(self.decoder, all_requests, workers, self.group.device, largest_batch_bytes)
        # The start of the loader and of the device belongs to no pass. A rank may have no batch at all.
        first_batch = next(batches, None)
        if first_batch:
            self.predict("center", self.sizes[0], first_batch.images[:1], first_batch.labels[:1])
            batches = chain([first_batch], batches)
        for eval_pass in passes:
            self.run_pass(eval_pass, batches)
        if self.group.is_first and self.options.shown:
            self.print_examples()

    def copy_for(self, size: int) -> int | None:
        """Return the resized copy that images of a size are read from, None for the full-size images.

        It is the copy that the run validated on, if that is on this machine and large enough. Raises `DataError` when
        the full-size images are needed and only their index is here.
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

    def predict(
        self, crop: str, size: int, pixels: torch.Tensor, labels: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores [n, classes] and labels [n] on the device.

        Raises `TrainingError` when the network fails, for example because it does not accept the size.
        """
        try:
            images, device_labels = self.preprocessor.prepare(
                Batch(pixels, labels, BatchRequest("val", None, labels, (size, size)))
            )
            with self.preprocessor.autocast():
                return mean_crop_scores(crop, self.model, images), device_labels
        except RuntimeError as error:  # torch's, for example of a fixed-size classifier, or out of memory
            raise TrainingError(
                f"{crop} at {size} pixels: {self.recipe.model.name} fails: {first_line(error)}"
            ) from error

    def run_pass(self, eval_pass: EvalPass, batches: Iterator[Batch]) -> None:
        """Evaluate one crop at one size and print its row.

        Raises `TrainingError` when the loss is not finite, `RuntimeError` unless every image was counted once.
        """
        start = time.perf_counter()
        done = 0
        own_images = sum(len(request.ids) for request in eval_pass.requests)
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self.group.device)
        # By bucket: images, top-1 correct, top-5 correct.
        counts = torch.zeros(len(self.buckets.summaries), 3, dtype=torch.int64, device=self.group.device)
        confusion = zero_confusion(len(self.val_index.classes), self.group.device)
        for request in eval_pass.requests:
            batch = next(batches)
            scores, labels = self.predict(eval_pass.crop, eval_pass.size, batch.images, batch.labels)
            loss_sum += cross_entropy(scores, labels, reduction="sum")
            top1, top5 = is_correct(scores, labels)
            columns = torch.stack([torch.ones_like(labels), top1.long(), top5.long()], 1)
            buckets = torch.from_numpy(self.buckets.bucket_of_image[request.ids]).to(self.group.device)
            counts.index_add_(0, buckets, columns)
            if confusion is not None:
                count_confusion(confusion, scores, labels)
            done += len(request.ids)
            self.report_progress(f"{eval_pass.crop} at {eval_pass.size}", done, own_images)
        total_loss = sum_over_processes(self.group, loss_sum).item()
        rows = sum_over_processes(self.group, counts).tolist()
        if confusion is not None:
            sum_over_processes(self.group, confusion)
        if not math.isfinite(total_loss):
            raise TrainingError(
                f"{eval_pass.crop} at {eval_pass.size} pixels: the loss is {total_loss:g}: the checkpoint's weights "
                "are not finite, or too large"
            )
        seconds = time.perf_counter() - start
        if [row[0] for row in rows] != [bucket["images"] for bucket in self.buckets.summaries]:
            raise RuntimeError(f"{eval_pass.crop} at {eval_pass.size} did not count every image once")
        if self.group.is_first:
            images = len(self.val_index)
            emit_json_line(
                EvaluationRow(
                    kind="row",
                    crop=eval_pass.crop,
                    size=eval_pass.size,
                    views=eval_pass.views_per_image,
                    copy=eval_pass.copy,
                    top1=100 * sum(row[1] for row in rows) / images,
                    top5=100 * sum(row[2] for row in rows) / images,
                    loss=total_loss / images,
                    images=images,
                    seconds=seconds,
                    buckets=[{"top1": 100 * row[1] / row[0], "top5": 100 * row[2] / row[0]} for row in rows],
                    confusion=None if confusion is None else self.by_class(confusion),
                )
            )

    def by_class(self, counts: torch.Tensor) -> dict[str, object]:
        """Return a `Confusion` as JSON data, from the counts of images by true and predicted class."""
        plain: dict[str, object] = encode(Confusion.from_counts(self.val_index.classes, counts.cpu().numpy()))
        return plain

    def print_examples(self) -> None:
        """Print example images, evenly spaced from the tallest to the widest, with each crop's prediction."""
        size = self.sizes[0]
        ids_by_ratio = self.buckets.ids_by_ratio
        count = min(self.options.shown, len(ids_by_ratio))
        positions = [(2 * number + 1) * len(ids_by_ratio) // (2 * count) for number in range(count)]
        examples = [self.describe_example(int(ids_by_ratio[position]), size) for position in positions]
        emit_json_line(EvaluationExamples(kind="seen", size=size, images=examples))

    def describe_example(self, image_number: int, size: int) -> ExampleImage:
        """Return an image as a small JPEG in base64, with each crop's boxes (see `crop_boxes`) and prediction."""
        copy = self.copy_for(size)
        single_index = self.val_index.take(np.array([image_number]))
        label = int(single_index.labels[0])
        width, height = int(single_index.widths[0]), int(single_index.heights[0])
        jpeg, _ = shrink_to_jpeg(self.indexes["val", copy].read(image_number), EXAMPLE_PIXELS)
        answers: list[CropAnswer] = []
        for crop in self.options.crops:
            (request,) = plan_eval_batches(crop, size, single_index, copy, 1, 0, 1)
            batch = self.decoder.decode_batch(replace(request, ids=np.array([image_number])))
            scores, _ = self.predict(crop, size, batch.images, batch.labels)
            probabilities = scores.softmax(1)[0]
            best = int(probabilities.argmax())
            answers.append(
                {
                    "crop": crop,
                    "boxes": crop_boxes(crop, size, width, height),
                    "class": self.val_index.classes[best],
                    "percent": 100 * float(probabilities[best]),
                    "right": best == label,
                }
            )
        return {
            "name": self.val_index.name(image_number),
            "class": self.val_index.classes[label],
            "answers": answers,
            "jpeg": base64.b64encode(jpeg).decode(),
        }
