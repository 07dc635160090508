"""Which images go to which process at which step: the whole run as one stream of `Work`, from any position.

A step's images are cut into chunks of one GPU's batch; chunk j belongs to process j mod world. With fewer processes
than chunks each takes several (gradient accumulation); a process without a chunk, in a last step that is not full, goes
through the first one with a share of 0, because its peers wait for it in the all-reduce.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.index.open import Index
from train.recipe.schedule import Epoch, Schedule, split_step
from train.recipe.schema import Phase
from train.recipe.validation_policy import should_validate

from . import rect_train
from .rect_val import CropShape, plan_rect_validation, plan_square_validation
from .rng import permutation
from .work import BatchRequest, IndexKey

BatchPlan = list[tuple[CropShape, NDArray[np.int64]]]


@dataclass(frozen=True)
class DistributedBatchSampler:
    """The order of a run for one process: `seed`, the schedule, the images, and this process's rank of `world`."""

    schedule: Schedule
    indexes: Mapping[IndexKey, Index]
    seed: int
    rank: int
    world_size: int

    def chunks(self, epoch: Epoch, step: int, order: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], float]]:
        """This process's chunks of a step: image numbers, and the share with which each image counts.

        Batch norm needs two values: an image that is alone in its chunk is taken twice, each with half a share.
        """
        start = step * epoch.scheduled_phase.global_batch
        ids = order[start : start + epoch.images_in_step(step)]
        cut = [ids[part] for part in split_step(len(ids), epoch.scheduled_phase.phase.batch)]
        mine = [(part, 1.0) for part in cut[self.rank :: self.world_size]] or [(cut[0], 0.0)]
        return [(np.repeat(part, 2), share / 2) if len(part) == 1 else (part, share) for part, share in mine]

    def chunk_count(self, epoch: Epoch, step: int) -> int:
        """How many chunks this process takes of a step."""
        cut = split_step(epoch.images_in_step(step), epoch.scheduled_phase.phase.batch)
        return max(1, len(cut[self.rank :: self.world_size]))

    def train_requests(self, epoch: Epoch, first_step: int = 0) -> Iterator[BatchRequest]:
        """The epoch's training batches of this process, from a step on."""
        phase = epoch.scheduled_phase.phase
        order, shapes = self.epoch_order(epoch)
        for step in range(first_step, epoch.steps):
            for ids, share in self.chunks(epoch, step, order):
                yield BatchRequest(
                    "train", phase.copy, ids, shapes[step], epoch.number, phase.min_scale, share, phase.augment
                )

    def epoch_order(self, epoch: Epoch) -> tuple[NDArray[np.int64], Sequence[CropShape]]:
        """All image numbers in the epoch's order, and the shape of each step, the same on all processes."""
        phase, batch = epoch.scheduled_phase.phase, epoch.scheduled_phase.global_batch
        if phase.rect_train:
            return rect_train.rect_epoch_order(self.seed, epoch.number, self._aspect_codes, batch, phase.size)
        return permutation(self.seed, epoch.number, self.schedule.images), [(phase.size, phase.size)] * epoch.steps

    def step_shapes(self, epoch: Epoch, step: int) -> Sequence[CropShape]:
        """The shapes that a step of epochs like this one may have."""
        phase = epoch.scheduled_phase.phase
        if phase.rect_train:
            return rect_train.possible_step_shapes(
                self._aspect_codes, phase.size, epoch.images_in_step(step) == epoch.scheduled_phase.global_batch
            )
        return [(phase.size, phase.size)]

    @cached_property
    def _aspect_codes(self) -> rect_train.AspectCodes:
        index = self.indexes["train", None]
        return rect_train.encode_aspect_ratios(index.widths, index.heights)

    def val_requests(self, epoch: Epoch) -> dict[str, list[BatchRequest]]:
        """The validation batches of this process by view: "square", and "rect" first where the phase asks for it."""
        phase = epoch.scheduled_phase.phase
        return {
            view: [BatchRequest("val", phase.copy, ids, shape, epoch.number) for shape, ids in plan]
            for view, plan in self.val_plans(phase).items()
        }

    @cached_property
    def _val_plan_cache(self) -> dict[tuple[int, int, bool], dict[str, BatchPlan]]:
        return {}

    def val_plans(self, phase: Phase) -> dict[str, BatchPlan]:
        """What `views` is made from. Made once for all epochs like this one: 50,000 rectangles take 60 ms."""
        key = (phase.size, phase.batch, phase.rect_val)
        if key not in self._val_plan_cache:
            index = self.indexes["val", None]
            share = (phase.size, phase.batch, self.rank, self.world_size)
            found = {"rect": plan_rect_validation(index.widths, index.heights, *share)} if phase.rect_val else {}
            self._val_plan_cache[key] = {**found, "square": plan_square_validation(len(index), *share)}
        return self._val_plan_cache[key]

    def all_requests(
        self, first_epoch_index: int, first_step: int, history: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[BatchRequest]:
        """Everything from a position on: each epoch's training, then its validation if it has one.

        Whether it has one may depend on `history`, the rows of the epochs that are done, which grows meanwhile. We are
        asked ahead of time: until it is known, validation is handed out, and whoever trains passes it over.
        """
        for place in range(first_epoch_index, len(self.schedule.epochs)):
            epoch = self.schedule.epochs[place]
            yield from self.train_requests(epoch, first_step)
            for work in chain.from_iterable(self.val_requests(epoch).values()):
                if should_validate(self.schedule, place, history) is False:
                    break
                yield work
            first_step = 0
