"""Which images each rank takes at each step: the whole run as one stream of batch requests, from any position.

A step's images are cut into chunks of one GPU's batch; chunk j belongs to rank j mod world size. With fewer ranks than
chunks each rank takes several (gradient accumulation). In a last step that is not full a rank may have no chunk: it
then repeats the first chunk with weight 0, because the other ranks wait for it in the all-reduce.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from train.data.index.open import Index
from train.recipe.history import EpochResult
from train.recipe.schedule import Epoch, Schedule, ScheduledPhase, split_step
from train.recipe.validation_policy import should_validate

from . import rect_train
from .rect_val import CropShape, plan_rect_validation, plan_square_validation
from .rng import permutation
from .usage_log import UsageRow
from .work import BatchRequest, IndexKey

PLANNED_STEPS = 200  # more than a machine does while the lines of its log are on their way
BatchPlan = list[tuple[CropShape, NDArray[np.int64]]]  # (shape, image IDs) of each batch


@dataclass(frozen=True)
class DistributedBatchSampler:
    """The batches of a run for one rank."""

    schedule: Schedule
    indexes: Mapping[IndexKey, Index]
    seed: int
    rank: int
    world_size: int

    def chunks(self, epoch: Epoch, step: int, order: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], float]]:
        """Return this rank's chunks of a step as (image IDs, weight of each image).

        Batch norm needs two values: an image that is alone in its chunk is taken twice, with half the weight each.
        """
        start = step * epoch.scheduled_phase.global_batch
        ids = order[start : start + epoch.images_in_step(step)]
        step_chunks = [ids[part] for part in split_step(len(ids), epoch.scheduled_phase.phase.batch)]
        rank_chunks = [(chunk, 1.0) for chunk in step_chunks[self.rank :: self.world_size]] or [(step_chunks[0], 0.0)]
        return [
            (np.repeat(chunk, 2), weight / 2) if len(chunk) == 1 else (chunk, weight) for chunk, weight in rank_chunks
        ]

    def global_chunk_count(self, epoch: Epoch, step: int) -> int:
        """Return the number of chunks of a step, on all ranks together."""
        return len(split_step(epoch.images_in_step(step), epoch.scheduled_phase.phase.batch))

    def chunk_count(self, epoch: Epoch, step: int) -> int:
        """Return the number of this rank's chunks in a step, at least 1: without a chunk it repeats the first."""
        return max(1, len(range(self.rank, self.global_chunk_count(epoch, step), self.world_size)))

    def train_requests(self, epoch: Epoch, first_step: int = 0) -> Iterator[BatchRequest]:
        """Yield this rank's training batches of an epoch, from a step on."""
        phase = epoch.scheduled_phase.phase
        order, shapes = self.epoch_order(epoch)
        for step in range(first_step, epoch.steps):
            for ids, weight in self.chunks(epoch, step, order):
                yield BatchRequest(
                    "train", phase.copy, ids, shapes[step], epoch.number, phase.min_scale, weight, phase.augment
                )

    def epoch_order(self, epoch: Epoch) -> tuple[NDArray[np.int64], Sequence[CropShape]]:
        """Return all image IDs in the epoch's order, and the shape of each step. Both are the same on all ranks."""
        size = epoch.scheduled_phase.size
        if epoch.scheduled_phase.phase.rect_train:
            return rect_train.rect_epoch_order(
                self.seed, epoch.number, self._aspect_codes, epoch.scheduled_phase.global_batch, size
            )
        return permutation(self.seed, epoch.number, self.schedule.images), [(size, size)] * epoch.steps

    def planned_usage(self, epoch_index: int, step: int) -> Iterator[UsageRow]:
        """Yield the images of each rank in the last `PLANNED_STEPS` steps of this epoch and of the one before it.

        `step` is the number of finished steps of the epoch with this index.
        """
        for index in range(max(0, epoch_index - 1), min(epoch_index + 1, len(self.schedule.epochs))):
            epoch = self.schedule.epochs[index]
            end = step if index == epoch_index else epoch.steps
            order, _ = self.epoch_order(epoch)
            for rank in range(self.world_size):
                sampler = replace(self, rank=rank)
                for number in range(max(0, end - PLANNED_STEPS), end):
                    chunks = sampler.chunks(epoch, number, order)
                    ids = {int(image_id) for chunk, weight in chunks if weight for image_id in chunk}
                    yield UsageRow(step=epoch.first_step + number, epoch=epoch.number, ids=tuple(ids), rank=rank)

    def step_shapes(self, epoch: Epoch, step: int) -> Sequence[CropShape]:
        """Return all image shapes that step number `step` can have in the epochs of the same scheduled phase."""
        size = epoch.scheduled_phase.size
        if epoch.scheduled_phase.phase.rect_train:
            return rect_train.possible_step_shapes(
                self._aspect_codes, size, epoch.images_in_step(step) == epoch.scheduled_phase.global_batch
            )
        return [(size, size)]

    @cached_property
    def _aspect_codes(self) -> rect_train.AspectCodes:
        index = self.indexes["train", None]
        return rect_train.encode_aspect_ratios(index.widths, index.heights)

    def val_requests(self, epoch: Epoch) -> dict[str, list[BatchRequest]]:
        """Return this rank's validation batches by view: "square", and before it "rect" where the phase asks for it."""
        phase = epoch.scheduled_phase.phase
        return {
            view: [BatchRequest("val", phase.copy, ids, shape, epoch.number) for shape, ids in plan]
            for view, plan in self.val_plans(epoch.scheduled_phase).items()
        }

    @cached_property
    def _val_plan_cache(self) -> dict[tuple[int, int, bool], dict[str, BatchPlan]]:
        return {}

    def val_plans(self, scheduled_phase: ScheduledPhase) -> dict[str, BatchPlan]:
        """Return this rank's validation plan by view, cached by size, batch and view: 50,000 images take 60 ms."""
        size, phase = scheduled_phase.size, scheduled_phase.phase
        key = (size, phase.batch, phase.rect_val)
        if key not in self._val_plan_cache:
            index = self.indexes["val", None]
            arguments = (size, phase.batch, self.rank, self.world_size)
            plans = {"rect": plan_rect_validation(index.widths, index.heights, *arguments)} if phase.rect_val else {}
            self._val_plan_cache[key] = {**plans, "square": plan_square_validation(len(index), *arguments)}
        return self._val_plan_cache[key]

    def all_requests(
        self, first_epoch_index: int, first_step: int, history: Sequence[EpochResult] = ()
    ) -> Iterator[BatchRequest]:
        """Yield every batch from a position on: each epoch's training, then its validation if it has one.

        Whether an epoch is validated may depend on `history`, the rows of the finished epochs, which grows meanwhile.
        While the answer is not known yet, as the loader asks ahead, validation batches are yielded; the trainer skips
        those it does not need.
        """
        for epoch_index in range(first_epoch_index, len(self.schedule.epochs)):
            epoch = self.schedule.epochs[epoch_index]
            yield from self.train_requests(epoch, first_step)
            for request in chain.from_iterable(self.val_requests(epoch).values()):
                if should_validate(self.schedule, epoch_index, history) is False:
                    break
                yield request
            first_step = 0
