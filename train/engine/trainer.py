"""The loop. One stream of batches goes through it from the first step to the last validation.

for each epoch: for each step: rate, chunks, one all-reduce, one update
                about once a second: sums and questions over all processes (the only host sync)
                batch-norm statistics averaged, validation where it is due, checkpoint
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from train.data.loading.loader import Batch, BatchDecoder, stream_batches
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.usage_log import UsageLog
from train.distributed import batchnorm, ddp, exact_sum, process_group
from train.distributed.process_group import ProcessGroup
from train.metrics.accuracy import Accuracy
from train.metrics.meters import StepMeter
from train.metrics.rows import StepTotals, epoch_row
from train.metrics.time_breakdown import TimeBreakdown
from train.models import freezing, input_size, registry
from train.optim import factory
from train.optim import losses as optim_losses
from train.recipe.schedule import Epoch
from train.recipe.schema import Recipe
from train.recipe.validation_policy import should_validate
from train.tools import checkpoint_io
from train.tools.errors import TrainingError
from train.tools.provenance import package_versions

from . import resume_check
from .agent_channel import AgentChannel
from .inputs import IMAGENET_NORMALIZATION, BatchPreprocessor, normalization_of, seed_dropout
from .options import TrainOptions
from .progress import ProgressReporter
from .validation import run_validation
from .warmup import batch_shapes, compile_per_shape, image_sizes, warm_up

MAX_STEPS_BETWEEN_SYNCS = 50  # steps between two looks at the sums
SYNC_SECONDS = 1.0
CHECKPOINT_FORMAT = 3  # of a checkpoint's state


class Diverged(TrainingError):
    """The loss is not a number any more."""


class StopRequested(Exception):
    """The agent or a SIGTERM asked for an end; everything is saved."""


class Trainer:
    """One process's share of one attempt: the model, where it stands, and what it measured."""

    def __init__(
        self,
        options: TrainOptions,
        recipe: Recipe,
        group: ProcessGroup,
        sampler: DistributedBatchSampler,
        num_classes: int,
        agent_channel: AgentChannel,
    ) -> None:
        self.options, self.recipe, self.group, self.agent_channel = options, recipe, group, agent_channel
        self.sampler, self.schedule = sampler, sampler.schedule
        say = partial(print, flush=True) if group.is_first else str
        self.model = registry.build_model(recipe.model, num_classes, sampler.seed, say)
        self.model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if options.exact:
            exact_sum.make_gradients_exact(self.model)
        self.freezer = freezing.Freezer(self.model)
        self.preprocessor = BatchPreprocessor(
            group.device, torch.float64 if options.exact else torch.float32, normalization_of(self.model)
        )
        if self.preprocessor.normalization != IMAGENET_NORMALIZATION:
            say(f"pixels are normalised as {recipe.model.name} has it: {self.preprocessor.normalization}")
        self.wrapped_model: nn.Module = (
            compile_per_shape(self.model) if recipe.model.compile and not options.exact else self.model
        )
        self.optimizer, self.loss = (
            factory.build_optimizer(self.model, recipe.optim),
            optim_losses.build_loss(recipe.optim),
        )
        self.scaler = ddp.build_grad_scaler(recipe.comm, group.device, self.preprocessor.compute_dtype)
        self.meter, self.time_breakdown = StepMeter(group.device, MAX_STEPS_BETWEEN_SYNCS), TimeBreakdown(group.device)
        self.progress = ProgressReporter(options, self.schedule, group, agent_channel, self.time_breakdown)
        self.epoch_index, self.step, self.last_save_time, self.timeout_tightened = 0, 0, time.monotonic(), False
        self.run_start_time = time.time()  # of the run: its first attempt's start of loading, where that is known
        self.usage_log = UsageLog(options.log_dir, options.attempt, group.rank) if options.log_ids else None
        self.history: list[dict[str, Any]] = []
        self.epoch_totals, self.interval_start = StepTotals(), 0.0  # of this epoch
        self.goodput, self.time_summary = 0.0, self.time_breakdown.breakdown()

    # --- where we stand, and going on from there -----------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Steps from the start of the run."""
        return self.schedule.steps_at(self.epoch_index, self.step)

    @property
    def is_distributed(self) -> bool:
        """Whether the net's gradients are summed over several processes."""
        return self.group.world_size > 1

    @property
    def images_seen(self) -> int:
        """Training images that all processes together took from the start of the run."""
        return self.schedule.images_at(self.epoch_index, self.step)

    @property
    def target_reached(self) -> bool:
        """Whether a validation has reached the target at which training is to stop: the same on all processes."""
        target = self.options.target
        return target is not None and target.first_epoch_reaching(self.history) is not None

    @property
    def run_info(self) -> dict[str, Any]:
        """What this attempt is, for its first line of metrics."""
        return {
            "begun": self.run_start_time,
            "train_images": self.schedule.images,
            "val_images": len(self.sampler.indexes["val", None]),
            "world": self.group.world_size,
            "gpus": self.schedule.gpus,
            "device": self.group.device.type,
            "processor": process_group.device_name(self.group.device),
            "precision": str(self.preprocessor.compute_dtype).removeprefix("torch."),
            "versions": package_versions(),
        }

    def state(self) -> dict[str, Any]:
        """Everything that a later attempt needs. Called on all processes: the batch-norm statistics are gathered."""
        return {
            "format": CHECKPOINT_FORMAT,
            "identity": resume_check.run_fingerprint(self.recipe, self.schedule),
            "epoch": self.epoch_index,
            "step": self.step,
            "statistics": batchnorm.gather_running_statistics(self.group, self.model),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "history": self.history,
            "sums": asdict(self.epoch_totals),
            "times": self.time_breakdown.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state. Raises `Expected` when it belongs to another run."""
        if state.get("format") != CHECKPOINT_FORMAT:
            raise TrainingError(
                "the checkpoint is of another version of imgnet-cluster; go on with that, or --resume none"
            )
        resume_check.check_same_run(state["identity"], resume_check.run_fingerprint(self.recipe, self.schedule))
        self.model.load_state_dict(state["model"])
        batchnorm.restore_running_statistics(self.group, self.model, state["statistics"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:  # a GPU that computes in bfloat16 has none
            self.scaler.load_state_dict(state["scaler"])
        self.time_breakdown.restore(state["times"])
        self.epoch_index, self.step = state["epoch"], state["step"]
        self.history, self.epoch_totals = state["history"], StepTotals(**state["sums"])

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint of this moment in the background; later, while the last is being written, or `wait`."""
        with self.time_breakdown.measure("checkpoints"):
            state = self.state()
            if self.group.is_first and (wait or not self.saver.is_writing):
                self.saver.save(self.steps_done, state, urgent=wait)
                self.last_save_time = time.monotonic()

    # --- the run -------------------------------------------------------------------------------------------------

    def train(self, decoder: BatchDecoder, workers: int) -> None:
        """Carry the schedule out from where we stand. Raises `Asked`, `Diverged`, `Expected`, `OSError` (disk full)."""
        if self.group.is_first:
            self.saver = checkpoint_io.CheckpointWriter(
                self.options.out / "checkpoints" / f"{self.options.attempt:06d}"
            )
        self.progress.start_attempt(self.steps_done, self.images_seen, self.run_info)
        ahead = () if self.target_reached else self.schedule.epochs[self.epoch_index :]
        largest = max(
            (3 * one.scheduled_phase.phase.batch * one.scheduled_phase.phase.size**2 for one in ahead), default=1
        )
        works = self.sampler.all_requests(len(self.schedule.epochs) - len(ahead), self.step, self.history)
        batches = stream_batches(decoder, works, workers, self.group.device, largest)
        epochs = self.schedule.epochs[-1].number + 1
        self.agent_channel.report_state("warming", steps=self.schedule.steps, step=self.steps_done, epochs=epochs)
        if not isinstance(self.model, registry.ResNet):
            input_size.check_shapes(self.model, self.recipe.model.name, image_sizes(self.sampler, ahead))
        for epoch in ahead:  # none: a run that was killed between its last save and its result
            if epoch is ahead[0] or epoch.scheduled_phase.phase.frozen != self.freezer.frozen:
                batches = self.wrap_and_warm_up(freezing.epochs_until_freezing_changes(ahead, epoch), batches)
            self.run_epoch(epoch, batches)
            if self.target_reached:
                break
        self.time_summary, self.goodput = self.time_breakdown.summary(), self.time_breakdown.goodput()
        if self.group.is_first:
            self.saver.wait()
        self.progress.finish(self.time_summary, self.goodput)

    def wrap_and_warm_up(self, epochs: Sequence[Epoch], batches: Iterator[Batch]) -> Iterator[Batch]:
        """Make ready for epochs that train the same parts of the net: sums over processes, every shape met once."""
        self.freezer.set_frozen(epochs[0].scheduled_phase.phase.frozen)
        if self.is_distributed:
            plain = self.schedule.steps // 10 - self.steps_done  # of PowerSGD, as torch advises
            self.wrapped_model = ddp.wrap_ddp(
                self.wrapped_model, self.recipe.comm, exact=self.options.exact, exact_steps=plain
            )
        self.freezer.set_train_mode()
        train, val = batch_shapes(self.sampler, epochs)
        warm_up(
            self.wrapped_model,
            self.model,
            train,
            val,
            self.group.device,
            self.preprocessor.autocast,
            self.agent_channel.tick,
        )
        self.preprocessor.warmed_shapes |= {*train, *val}
        batches = chain([next(batches)], batches)  # the loader's start belongs to the warm-up, not to a step
        self.time_breakdown.startup_seconds = (
            self.time_breakdown.startup_seconds or self.agent_channel.seconds_by_state()
        )
        return batches

    def run_epoch(self, epoch: Epoch, batches: Iterator[Batch]) -> None:
        """Train, validate and save one epoch, or what is left of it."""
        self.freezer.set_train_mode()
        self.time_breakdown.begin_epoch(epoch.number + 1)
        self.interval_start, stretch = time.perf_counter(), 1
        for step in range(self.step, epoch.steps):
            begun = time.perf_counter()
            self.run_step(epoch, step, batches)
            self.step = step + 1
            if self.meter.steps >= stretch or self.step == epoch.steps:
                stretch = self.sync_metrics(epoch)
            if not self.timeout_tightened:
                self.timeout_tightened = True
                process_group.tighten_timeouts(self.group, time.perf_counter() - begun)
        if not epoch.scheduled_phase.phase.frozen:
            batchnorm.average_running_statistics(self.group, self.model)
        found = self.validate(epoch, batches) if should_validate(self.schedule, self.epoch_index, self.history) else {}
        row = epoch_row(epoch, self.epoch_totals, found, time.perf_counter() - self.interval_start)
        now = time.time()
        self.history.append(row | {"at": now, "clock": now - self.run_start_time} | self.time_breakdown.end_epoch())
        self.epoch_index, self.step, self.epoch_totals = self.epoch_index + 1, 0, StepTotals()
        self.progress.report_epoch(self.steps_done, self.images_seen, self.history[-1])
        self.save(
            wait=self.target_reached or self.epoch_index == len(self.schedule.epochs)
        )  # the last one is what the run leaves

    def run_step(self, epoch: Epoch, step: int, batches: Iterator[Batch]) -> None:
        """One update. The loss is the mean over the global batch (Goyal et al. 2017, remark 3)."""
        factory.set_lr(self.optimizer, epoch.lr_at(step))
        count, images = self.sampler.chunk_count(epoch, step), epoch.images_in_step(step)
        # DDP divides the summed gradients by the number of processes; the factor takes that back.
        factor = 1 if self.options.exact else self.group.world_size
        used: set[int] = set()
        self.time_breakdown.begin_step("train")
        for number in range(1, count + 1):
            while (batch := self.time_breakdown.next_batch(batches)).request.split != "train":
                pass  # asked for before it was known that this validation is not due
            inputs, labels = self.preprocessor.prepare(batch)
            share = batch.request.sample_weight
            if self.usage_log and share:
                used.update(batch.request.ids.tolist())
                if number == count:
                    self.usage_log.record_step(epoch.first_step + step, epoch.number, used)
            seed_dropout(
                self.sampler.seed, epoch.first_step + step, self.group.rank + (number - 1) * self.group.world_size
            )
            with self.no_sync(unless=number == count):
                with self.preprocessor.autocast():
                    scores = self.wrapped_model(inputs).to(self.preprocessor.score_dtype)
                loss = share * self.loss(scores, labels).sum()
                self.scaler.scale(loss * (factor / images)).backward()  # type: ignore[no-untyped-call]
            self.meter.add(loss.detach(), scores.detach(), labels, share)
            self.agent_channel.tick()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.is_distributed)  # DDP's gradients are views of its buckets
        self.time_breakdown.end_step("train", (count, *batch.images.shape))
        self.meter.end_step()

    def no_sync(self, unless: bool) -> Any:
        """A context in which gradients are only added up here, not over the processes."""
        return contextlib.nullcontext() if unless or not self.is_distributed else self.wrapped_model.no_sync()  # type: ignore[operator]

    def sync_metrics(self, epoch: Epoch) -> int:
        """Sum the last steps over all processes, log them, and do what was asked. Returns steps until the next look.

        Raises `Diverged` with the step and its rate, and `Asked` when everything is saved.
        """
        count, first = self.meter.steps, self.group.is_first
        self.time_breakdown.flush()
        seconds, waited = self.time_breakdown.pop_recent_medians()
        due = first and time.monotonic() - self.last_save_time > self.options.save_seconds and not self.saver.is_writing
        flags = torch.tensor([self.agent_channel.stop_requested(), due, seconds * first], dtype=torch.float64)
        own = torch.cat([self.meter.losses[:count], self.meter.correct, flags.to(self.group.device)])
        *losses, top1, top5, asked, save, seconds = process_group.sum_over_processes(self.group, own).tolist()
        self.meter.reset()
        steps = range(self.step - count, self.step)
        for step, loss in zip(steps, losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(
                    f"the loss is {loss} at step {epoch.first_step + step + 1} (epoch {epoch.number + 1}, "
                    f"rate {epoch.lr_at(step):.4g}); lower the rate or lengthen the warm-up"
                )
        now, images = time.perf_counter(), sum(epoch.images_in_step(step) for step in steps)
        sums = StepTotals(sum(losses), top1, top5, images, now - self.interval_start)
        self.epoch_totals, self.interval_start = self.epoch_totals + sums, now
        rate = epoch.lr_at(self.step - 1)
        self.progress.report_interval(epoch, self.steps_done, self.images_seen, rate, sums, seconds, waited)
        if asked:
            self.save(wait=True)
            if first:
                self.saver.wait()
            self.progress.close()
            process_group.barrier(self.group)  # nobody leaves before the file is there
            raise StopRequested
        if save:
            self.save()
        return max(1, min(MAX_STEPS_BETWEEN_SYNCS, round(SYNC_SECONDS / seconds))) if seconds else 1

    def validate(self, epoch: Epoch, batches: Iterator[Batch]) -> dict[str, Accuracy]:
        """Validate by every view the phase asks for."""
        self.agent_channel.report_state("validating")
        images, hooks = (
            len(self.sampler.indexes["val", None]),
            (self.preprocessor, self.time_breakdown, self.agent_channel.tick),
        )
        with self.time_breakdown.measure("validation"):
            found = {
                view: run_validation(self.group, self.model, batches, len(works), images, *hooks)
                for view, works in self.sampler.val_requests(epoch).items()
            }
        self.time_breakdown.flush()
        if not all(math.isfinite(one.loss) for one in found.values()):
            raise Diverged(f"the validation loss is not a number after epoch {epoch.number + 1}; lower the rate")
        return found
