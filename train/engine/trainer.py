"""The training loop of one process (rank): from the first step to the last validation.

    train                     the rest of the schedule, from the trainer's position
      begin_phase             DistributedDataParallel; the first shape of batch is run once; first also the largest
      run_epoch               all steps of an epoch; validation, checkpoint
        run_step              learning rate, forward and backward for each chunk, sums of gradients and
                              batch-norm statistics over all ranks, one update
        sync_metrics          about once a second: sums over all ranks; the only time the host waits for the device
        validate              accuracy over all validation images

A *step* takes one global batch. A *chunk* is the part of it that one GPU of the schedule sees at once; a rank with
several chunks per step accumulates their gradients. One stream of batches, asked for ahead of time, feeds the loop from
the first step to the last validation.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from train.data.loading.broken_images import BrokenImages
from train.data.loading.loader import Batch, BatchDecoder, BatchStream
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.usage_log import UsageLog
from train.distributed import ddp, exact_sum, process_group
from train.distributed.batchnorm import RunningStatistics
from train.distributed.cuda_graphs import open_graphs
from train.distributed.process_group import ProcessGroup, read_sum
from train.metrics.accuracy import Accuracy, zero_confusion
from train.metrics.meters import StepMeter
from train.metrics.rows import StepTotals, epoch_result
from train.metrics.time_breakdown import TimeBreakdown, TimeState
from train.metrics.time_table import TimePart
from train.models import freezing, input_size, registry
from train.models.resnet import ResNet
from train.optim import factory, mixing
from train.optim import losses as optim_losses
from train.optim.weight_average import WeightAverage
from train.recipe import target
from train.recipe.history import EpochResult, best_epoch
from train.recipe.schedule import Epoch
from train.recipe.schema import Recipe
from train.recipe.validation_policy import should_validate
from train.tools import agent_protocol, checkpoint_io
from train.tools.agent_protocol import TrainerState
from train.tools.errors import Diverged
from train.tools.host import unix_time
from train.tools.records import decode, encode
from train.weights import run_files
from train.weights.network_description import NetworkDescription

from . import resume_check
from .agent_channel import AgentChannel, StopRequested
from .inputs import IMAGENET_NORMALIZATION, BatchPreprocessor, normalization_of, seed_dropout
from .options import RunOptions
from .progress import ProgressReporter
from .validation import run_validation
from .warmup import batch_shapes, compile_per_shape, image_sizes, largest_train_shape, warm_up

MAX_STEPS_BETWEEN_SYNCS = 50  # also the capacity of the meter that keeps the steps' losses on the device
SYNC_SECONDS = 1.0  # target interval between two calls of `sync_metrics`


class Trainer:
    """One rank's share of a run: the model, the position in the schedule, and the measurements of an attempt.

    The position is `epoch_index`, the number of finished epochs, and `step`, the number of finished steps of the
    current epoch. All ranks hold the same position at all times. A trainer that goes on in place begins another
    attempt: the model, the optimizer and the loader's workers stay, and all that belongs to the process group is new.
    """

    def __init__(
        self,
        options: RunOptions,
        recipe: Recipe,
        group: ProcessGroup,
        sampler: DistributedBatchSampler,
        classes: Sequence[str],
        agent_channel: AgentChannel,
    ) -> None:
        self.recipe = recipe
        self.classes = tuple(classes)
        self.schedule = sampler.schedule
        self.model = registry.build_model(recipe.model, len(classes), sampler.seed, group.log)
        self.model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if options.exact:
            exact_sum.make_gradients_exact(self.model)
        self.running_statistics = RunningStatistics(group, self.model, options.exact)
        self.freezer = freezing.Freezer(self.model)
        use_compile = recipe.model.compile and not options.exact
        self.wrapped_model: nn.Module = compile_per_shape(self.model) if use_compile else self.model
        score_dtype = torch.float64 if options.exact else torch.float32
        normalization = normalization_of(self.model)
        precision = recipe.precision, recipe.kernel_search
        self.preprocessor = BatchPreprocessor(group.device, score_dtype, normalization, *precision)
        if normalization != IMAGENET_NORMALIZATION:
            group.log(f"pixels are normalized as {recipe.model.name} expects: {normalization}")
        self.capture_graphs = open_graphs(recipe, self.model, self.preprocessor, group, options.exact, options.log_dir)

        self.optimizer = factory.build_optimizer(self.model, recipe.optim)
        self.loss = optim_losses.build_loss(recipe.optim)
        self.mixer = mixing.Mixer(recipe.optim)
        buffers, decay = self.running_statistics.norm_buffers, sampler.schedule.ema_decay
        self.average = WeightAverage(self.model, buffers, decay, self.running_statistics.write_to_norms)
        self.comm = recipe.comm  # `run.join_and_train` replaces "auto", when it knows the network
        self.scaler = ddp.build_grad_scaler(recipe.comm, group.device, self.preprocessor.compute_dtype)

        self.batches: BatchStream | None = None
        self.remove_gradient_hook: Callable[[], None] = lambda: None
        self.saver = checkpoint_io.CheckpointWriter()
        self.hold_state: Callable[[], None] = lambda: None  # is called before and after the first step under each DDP
        self.confusion_counts: torch.Tensor | None = None  # of the last validation by its main view
        self.epoch_index = self.step = 0
        self.history: list[EpochResult] = []  # of earlier attempts too
        self.run_start_time = unix_time()  # `run.run_attempt` replaces it: when the first attempt began to load
        self.begin_attempt(options, group, sampler, agent_channel)

    def begin_attempt(
        self, options: RunOptions, group: ProcessGroup, sampler: DistributedBatchSampler, agent_channel: AgentChannel
    ) -> None:
        """Take part in an attempt, before `restore` and `train`. The model keeps its weights."""
        self.options, self.group, self.sampler, self.agent_channel = options, group, sampler, agent_channel
        self.running_statistics.group = group
        self.meter = StepMeter(group.device, MAX_STEPS_BETWEEN_SYNCS)
        self.epoch_totals = StepTotals()  # of the current epoch, up to the last sync
        self.interval_start = 0.0  # perf_counter at the last sync
        self.time_breakdown = TimeBreakdown(group.device)
        self.time_summary = self.time_breakdown.table()  # final value: see `train`
        self.goodput = 0.0
        self.progress = ProgressReporter(options, self.schedule, group, agent_channel, self.time_breakdown)
        if group.is_first:
            folder = agent_protocol.checkpoint_folder(options.out, options.attempt)
            self.saver.begin_attempt(folder, agent_channel.tick)
        sum_up = partial(read_sum, group)
        self.broken_images = BrokenImages(sampler.indexes, self.recipe.max_bad, sum_up, group.log)
        self.usage_log: UsageLog | None = None
        self.save_requests = 0  # ranks whose agents have asked for a checkpoint in this attempt
        self.is_early_save_due = False
        self.last_save_time = time.monotonic()
        self.has_made_step = False  # in this attempt, and under this DDP
        self.is_updating = False  # weights or statistics belong partly to the last step and partly to the next

    def leave_attempt(self) -> None:
        """Drop what refers to the process group, so that the group can be destroyed."""
        if isinstance(self.wrapped_model, ddp.DDP):
            self.wrapped_model = self.wrapped_model.module
        self.remove_gradient_hook()
        self.model.zero_grad()

    # --- the run -------------------------------------------------------------------------------------------------

    def train(self, decoder: BatchDecoder, workers: int) -> None:
        """Train from the current position to the end of the schedule, or until its validations end it.

        `workers` is the number of loader processes. Raises `StopRequested`, `Diverged`, `TrainingError`, or `OSError`
        when a checkpoint cannot be written.
        """
        position, val_images = (self.steps_done, self.images_seen), len(self.sampler.indexes["val", None])
        self.progress.start_attempt(*position, self.run_start_time, val_images, self.preprocessor.compute_dtype)
        if self.options.log_ids:
            self.usage_log = UsageLog(self.options.log_dir, self.options.attempt, self.group.rank)

        # No epoch remains when a run was killed between its last checkpoint and its result.
        epochs = () if self.ends_here else self.schedule.epochs[self.epoch_index :]
        scheduled = [epoch.scheduled_phase for epoch in epochs]
        largest_batch_bytes = max((3 * each.phase.batch * each.size**2 for each in scheduled), default=1)
        requests = self.sampler.all_requests(len(self.schedule.epochs) - len(epochs), self.step, self.history)
        if self.batches:
            self.batches.replace_requests(requests)
        else:
            self.batches = BatchStream(decoder, requests, workers, self.group.device, largest_batch_bytes)
        batches = self.broken_images.watch(self.batches)

        steps, epoch_count = self.schedule.steps, self.schedule.epochs[-1].number + 1
        self.agent_channel.report_state(TrainerState.WARMING, steps=steps, step=self.steps_done, epochs=epoch_count)
        if not isinstance(self.model, ResNet):
            input_size.check_shapes(self.model, self.recipe.model.name, image_sizes(self.sampler, epochs))

        for epoch in epochs:
            self.time_breakdown.begin_epoch(epoch.number + 1)
            if epoch is epochs[0]:
                batches = self.begin_run(epochs, batches)
            elif epoch.scheduled_phase != self.schedule.epochs[self.epoch_index - 1].scheduled_phase:
                with self.time_breakdown.measure(TimePart.SWITCHES):
                    self.begin_phase(epoch)
            self.run_epoch(epoch, batches)
            if self.ends_here:
                break

        self.time_summary = self.time_breakdown.summary()
        self.goodput = self.time_breakdown.goodput()
        self.saver.wait()
        self.progress.finish(self.time_summary)

    def begin_run(self, epochs: Sequence[Epoch], batches: Iterator[Batch]) -> Iterator[Batch]:
        """Prepare for the remaining epochs, and fetch the first batch, which counts as no part of a step."""
        self.begin_phase(epochs[0], is_first=True)
        largest = largest_train_shape(self.sampler, epochs, self.recipe.model.compile)
        warm_up(self.wrapped_model, self.model, [largest], [], self.preprocessor, self.agent_channel.tick)
        batches = chain([*islice(batches, 1)], batches)  # none: no image of the last validation is this rank's
        if not self.time_breakdown.measured.startup_seconds:
            self.time_breakdown.measured.startup_seconds = self.agent_channel.seconds_by_state()
        return batches

    def begin_phase(self, epoch: Epoch, is_first: bool = False) -> None:
        """Prepare for a phase: freeze, wrap with DDP, warm up the shapes of batch that were not met before."""
        frozen = epoch.scheduled_phase.phase.frozen
        if is_first or frozen != self.freezer.frozen:
            self.preprocessor.warmed_shapes.clear()
            self.freezer.set_frozen(frozen)
            if self.is_distributed:
                self.has_made_step = False
                self.hold_state()
                # PowerSGD sums exactly for the first tenth of the run, as torch's documentation advises.
                exact_steps = self.schedule.steps // 10 - self.steps_done
                comm, dtype, exact = self.comm, self.preprocessor.compute_dtype, self.options.exact
                self.wrapped_model = ddp.wrap_ddp(self.wrapped_model, comm, dtype, exact=exact, exact_steps=exact_steps)
                self.remove_gradient_hook()
                self.remove_gradient_hook = ddp.on_gradients_ready(self.model, self.time_breakdown.gradients_ready)
        self.freezer.set_train_mode()
        shapes = batch_shapes(self.sampler, [epoch], self.recipe.model.compile)
        warm_up(self.wrapped_model, self.model, *shapes, self.preprocessor, self.agent_channel.tick)
        self.capture_graphs(shapes[0], self.freezer.set_train_mode, self.group)

    def run_epoch(self, epoch: Epoch, batches: Iterator[Batch]) -> None:
        """Train the remaining steps of an epoch, validate if the phase asks for it, and write a checkpoint."""
        self.freezer.set_train_mode()
        self.running_statistics.begin()
        self.interval_start = time.perf_counter()
        steps_until_sync = 1
        for step in range(self.step, epoch.steps):
            step_start = time.perf_counter()
            self.run_step(epoch, step, batches)
            self.step = step + 1
            self.is_updating = False
            if self.meter.steps >= steps_until_sync or self.step == epoch.steps:
                steps_until_sync = self.sync_metrics(epoch)
            if not self.has_made_step:
                self.has_made_step = True
                process_group.tighten_timeouts(self.group, time.perf_counter() - step_start)
                self.hold_state()

        self.running_statistics.write_to_norms()
        if not epoch.scheduled_phase.phase.frozen:
            self.running_statistics.average_foreign_statistics()
        is_validated = should_validate(self.schedule, self.epoch_index, self.history)
        accuracies = self.validate(epoch, batches) if is_validated else {}
        seconds = time.perf_counter() - self.interval_start
        result = epoch_result(epoch, self.epoch_totals, accuracies, seconds, len(self.classes))
        now = unix_time()
        times = self.time_breakdown.end_epoch()
        clock = target.seconds_of_run(now, self.run_start_time, self.history)
        if clock is None:
            self.group.log(f"epoch {epoch.number + 1}: {target.CLOCK_JUMPED}: the time of the run is not known")
        self.history.append(replace(result, at=now, clock=clock, **vars(times)))

        self.epoch_index += 1
        self.step = 0
        self.epoch_totals = StepTotals()
        self.progress.report_epoch(self.steps_done, self.images_seen, self.history[-1])
        # The last checkpoint is the run's result, so it is written even if that means waiting.
        is_last = self.ends_here or self.epoch_index == len(self.schedule.epochs)
        # The weights of the last epoch are kept in any case.
        is_best = self.options.keeps_best and not is_last and best_epoch(self.history) is self.history[-1]
        self.save(wait=is_last, is_best=is_best)

    def run_step(self, epoch: Epoch, step: int, batches: Iterator[Batch]) -> None:
        """Make one update from one global batch.

        The loss is the mean over all images of the global batch (Goyal et al. 2017, remark 3), however they are split
        into chunks and over ranks: each chunk contributes the sum of its images' losses, divided by `images`.
        """
        factory.set_lr(self.optimizer, epoch.lr_at(step))
        chunk_count = self.sampler.chunk_count(epoch, step)
        images = epoch.images_in_step(step)
        run_step_index = epoch.first_step + step
        # DDP divides the summed gradients by the number of processes; the factor takes that back.
        factor = 1 if self.options.exact else self.group.world_size
        used_ids: set[int] = set()
        self.time_breakdown.begin_step("train")
        for number in range(1, chunk_count + 1):
            batch = self.time_breakdown.next_batch(batches)
            while batch.request.split != "train":  # requested before it was known that this epoch is not validated
                batch = self.time_breakdown.next_batch(batches)
            inputs, labels = self.preprocessor.prepare(batch)
            weight = batch.request.sample_weight  # 0 for a repeated chunk, 0.5 for an image that is taken twice
            if self.usage_log and weight:
                used_ids.update(batch.request.ids.tolist())
                if number == chunk_count:
                    self.usage_log.record_step(run_step_index, epoch.number, used_ids)
            chunk_key = (self.sampler.seed, run_step_index, self.group.rank + (number - 1) * self.group.world_size)
            seed_dropout(*chunk_key)
            self.mixer.mix(inputs, chunk_key)
            with ddp.without_sums(self.wrapped_model, unless=number == chunk_count):
                with self.preprocessor.autocast():
                    scores = self.wrapped_model(inputs).to(self.preprocessor.score_dtype)
                self.running_statistics.add_chunk(counts=weight > 0)
                if number == chunk_count:
                    self.running_statistics.start_sum()
                loss = weight * self.mixer.losses(self.loss, scores, labels).sum()
                self.scaler.scale(loss * (factor / images)).backward()  # type: ignore[no-untyped-call]
            if number == chunk_count:
                self.time_breakdown.gradients_summed()
            self.meter.add(loss.detach(), scores.detach(), labels, weight)
            self.agent_channel.tick()
        self.running_statistics.wait_for_sum()
        if self.group.guard:
            changing = map(vars, (self.optimizer, self.scaler, self.running_statistics))
            self.group.guard.check_step(*changing, self.average.averages, [*self.model.buffers()])
        self.is_updating = True  # no process can hold up this one from here on, until the step is counted
        self.running_statistics.end_step(self.sampler.global_chunk_count(epoch, step))
        factory.update_weights(self.optimizer, self.scaler, self.recipe.optim.clip)
        self.average.update(run_step_index + 1)
        # Under DDP the gradients are views of its buckets, so they are zeroed in place.
        self.optimizer.zero_grad(set_to_none=not self.is_distributed)
        self.time_breakdown.end_step("train", (chunk_count, *batch.images.shape))
        self.meter.end_step()

    def sync_metrics(self, epoch: Epoch) -> int:
        """Sum the last steps' metrics over all ranks, log them, and act on requests to save or to stop.

        All ranks call it after the same step, so they agree on both. Returns the number of steps until the next call.
        Raises `Diverged` with the step and its learning rate, and `StopRequested` when the checkpoint is written.
        """
        is_first, channel = self.group.is_first, self.agent_channel
        step_count = self.meter.steps
        self.time_breakdown.flush()
        step_seconds, wait_seconds = self.time_breakdown.pop_recent_medians()
        is_late = time.monotonic() - self.last_save_time > self.options.save_seconds
        save_is_due = is_first and (self.is_early_save_due or is_late) and not self.saver.is_writing

        # One all-reduce for everything. Rank 0 alone contributes the step time and the wish to save, each rank its own
        # share of the time in which it did not wait for others.
        busy_shares = torch.zeros(self.group.world_size, dtype=torch.float64)
        busy_shares[self.group.rank] = self.time_breakdown.busy_share()
        loss_scale = ddp.loss_scale(self.scaler, self.group.device) * is_first
        requests = [channel.stop_requested(), channel.save_requested(), save_is_due, len(self.broken_images.new)]
        flags = torch.tensor([*requests, step_seconds * is_first], dtype=torch.float64)
        flags = torch.cat([flags, busy_shares]).to(self.group.device)
        local_sums = torch.cat([self.meter.losses[:step_count], self.meter.correct.sum(0), loss_scale, flags])
        sums = read_sum(self.group, local_sums).tolist()
        losses, sums = sums[:step_count], sums[step_count:]
        top1, top5, loss_scale, stop_votes, save_requests, save_votes, new_broken, step_seconds, *busy = sums
        self.meter.reset()

        steps = range(self.step - step_count, self.step)
        optim_losses.check_finite(losses, epoch, steps.start)
        ddp.check_loss_scale(loss_scale, f"step {self.steps_done} (epoch {epoch.number + 1})")
        self.broken_images.agree(new_broken)

        now = time.perf_counter()
        totals = StepTotals(sum(losses), top1, top5, sum(map(epoch.images_in_step, steps)), now - self.interval_start)
        self.epoch_totals += totals
        self.interval_start = now
        first_rank_here = self.group.rank - self.group.local_rank
        self.progress.report_interval(
            epoch,
            self.steps_done,
            self.images_seen,
            epoch.lr_at(self.step - 1),
            totals,
            step_seconds,
            wait_seconds,
            loss_scale if self.scaler.is_enabled() else None,
            len(self.broken_images.known),
            tuple(busy[first_rank_here : first_rank_here + self.group.local_world_size]),
        )

        if stop_votes:
            self.save(wait=True)
            self.saver.wait()
            self.progress.close()
            process_group.leave_together(self.group)  # no rank exits before the checkpoint is on disk
            raise StopRequested
        if save_votes:
            self.save()
            self.is_early_save_due = False
        if save_requests > self.save_requests:  # another machine may be taken away soon
            self.save_requests = save_requests
            self.is_early_save_due = True
        steps_until_sync = SYNC_SECONDS / step_seconds if step_seconds else 1
        return int(max(1, min(MAX_STEPS_BETWEEN_SYNCS, round(steps_until_sync))))

    def validate(self, epoch: Epoch, batches: Iterator[Batch]) -> dict[str, Accuracy]:
        """Return the accuracy of each view that the phase asks for: "square", and "rect" before it.

        Raises `Diverged` when a validation loss is not a finite number.
        """
        self.agent_channel.report_state(TrainerState.VALIDATING)
        requests_by_view = self.sampler.val_requests(epoch)  # the main view first
        self.confusion_counts = zero_confusion(len(self.classes), self.group.device)
        with self.time_breakdown.measure(TimePart.VALIDATION), self.average.in_model():
            accuracies = {
                view: run_validation(
                    self.group,
                    self.model,
                    batches,
                    len(requests),
                    len(self.sampler.indexes["val", None]),
                    self.preprocessor,
                    self.time_breakdown,
                    self.agent_channel.tick,
                    self.confusion_counts if view == next(iter(requests_by_view)) else None,
                )
                for view, requests in requests_by_view.items()
            }
        self.time_breakdown.flush()
        self.broken_images.agree()
        if not all(math.isfinite(accuracy.loss) for accuracy in accuracies.values()):
            raise Diverged(
                f"the validation loss is not a number after epoch {epoch.number + 1}; lower the learning rate"
            )
        return accuracies

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, wait: bool = False, is_best: bool = False) -> None:
        """Write a checkpoint in the background, and before it the weights if the last validation `is_best`.

        Rank 0 writes, and not while an earlier one is being written, unless `wait` or `is_best`: then this one follows.
        """
        with self.time_breakdown.measure(TimePart.CHECKPOINTS):
            if self.group.is_first and (wait or is_best or not self.saver.is_writing):
                first = run_files.best_writer(self.saver.folder, self.description, self.recipe) if is_best else None
                self.saver.save(self.steps_done, self.state(), urgent=wait, write_first=first)
                self.last_save_time = time.monotonic()

    def state(self) -> dict[str, Any]:  # Any: the tensors of model and optimizer lie in it
        """Return everything that a later attempt needs. A change of it may need another `CHECKPOINT_FORMAT`."""
        self.running_statistics.write_to_norms()
        return {
            "format": resume_check.CHECKPOINT_FORMAT,
            "identity": resume_check.run_fingerprint(self.recipe, self.schedule),
            "epoch": self.epoch_index,
            "step": self.step,
            "precision": self.recipe.precision,  # no part of the identity
            "network": encode(self.description),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "history": encode(self.history),
            "sums": asdict(self.epoch_totals),
            "broken_images": sorted(map(list, self.broken_images.known), key=str),
            "times": encode(self.time_breakdown.state()),
        }

    def restore(self, state: dict[str, Any], has_tensors: bool = False) -> None:  # Any: as in `state`
        """Continue from a checkpoint's state. Raises `TrainingError` when it belongs to another run or version."""
        resume_check.check_version(state.get("format"))
        resume_check.check_same_run(state["identity"], resume_check.run_fingerprint(self.recipe, self.schedule))
        if not has_tensors:
            resume_check.load_weights(self.model, state["model"])
            self.average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            if state["scaler"]:  # empty when the checkpoint comes from a GPU that computes in bfloat16
                self.scaler.load_state_dict(state["scaler"])
        self.running_statistics.begin()
        self.confusion_counts = None  # of another position, or summed over a group that broke meanwhile
        self.time_breakdown.restore(decode(TimeState, state["times"], "the checkpoint's times"))
        self.epoch_index, self.step = state["epoch"], state["step"]
        self.history = decode(list[EpochResult], state["history"], "the checkpoint's history")
        self.epoch_totals = StepTotals(**state["sums"])
        self.broken_images.known = {(split, copy, number) for split, copy, number in state.get("broken_images", ())}

    # --- where training stands -----------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Finished steps of the whole run."""
        return self.schedule.steps_at(self.epoch_index, self.step)

    @property
    def images_seen(self) -> int:
        """Training images that all ranks together have taken since the start of the run."""
        return self.schedule.images_at(self.epoch_index, self.step)

    @property
    def description(self) -> NetworkDescription:
        """What the network is at this position."""
        validated = self.history[-1] if self.history and not self.step else None
        position = (self.epoch_index, self.steps_done, validated)
        return NetworkDescription.of_run(self.recipe, self.classes, *position, **vars(self.preprocessor.normalization))

    @property
    def is_distributed(self) -> bool:
        """Whether gradients are summed over several processes."""
        return self.group.world_size > 1

    @property
    def ends_here(self) -> bool:
        """Whether the validations so far end training, before the end of the schedule. The same on all ranks."""
        return target.ends_training(self.options.target, self.recipe.patience, self.history, self.options.extended_at)
