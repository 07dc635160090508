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

from train.data.loading.loader import Batch, Images, stream
from train.data.order.batch_sampler import Feed
from train.data.order.usage_log import Ids
from train.distributed import batchnorm, ddp, exact_sum, process_group
from train.distributed.process_group import Group
from train.metrics.accuracy import Accuracy
from train.metrics.meters import Meter
from train.metrics.rows import Sums, epoch_row
from train.metrics.time_breakdown import Times
from train.models import freezing, input_size, registry
from train.optim import factory
from train.optim import losses as optim_losses
from train.recipe.schedule import Epoch
from train.recipe.schema import Recipe
from train.recipe.validation_policy import validates
from train.tools import checkpoint_io
from train.tools.errors import Expected
from train.tools.provenance import versions

from . import resume_check
from .agent_channel import Report
from .inputs import IMAGENET, Inputs, draw_anew, pixels_of
from .options import Options
from .progress import News
from .validation import evaluate
from .warmup import compiled, shapes, sides, warm

LONGEST_STRETCH = 50  # steps between two looks at the sums
LOOK_SECONDS = 1.0
FORMAT = 3  # of a checkpoint's state


class Diverged(Expected):
    """The loss is not a number any more."""


class Asked(Exception):
    """The agent or a SIGTERM asked for an end; everything is saved."""


class Trainer:
    """One process's share of one attempt: the model, where it stands, and what it measured."""

    def __init__(
        self,
        options: Options,
        recipe: Recipe,
        group: Group,
        feed: Feed,
        classes: int,
        report: Report,
    ) -> None:
        self.options, self.recipe, self.group, self.report = options, recipe, group, report
        self.feed, self.schedule = feed, feed.schedule
        say = partial(print, flush=True) if group.first else str
        self.model = registry.build(recipe.model, classes, feed.seed, say)
        self.model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if options.exact:
            exact_sum.round_gradients(self.model)
        self.freezer = freezing.Freezer(self.model)
        self.inputs = Inputs(group.device, torch.float64 if options.exact else torch.float32, pixels_of(self.model))
        if self.inputs.pixels != IMAGENET:
            say(f"pixels are normalised as {recipe.model.name} has it: {self.inputs.pixels}")
        self.net: nn.Module = compiled(self.model) if recipe.model.compile and not options.exact else self.model
        self.optimizer, self.loss = factory.build(self.model, recipe.optim), optim_losses.build(recipe.optim)
        self.scaler = ddp.scaler(recipe.comm, group.device, self.inputs.precision)
        self.meter, self.times = Meter(group.device, LONGEST_STRETCH), Times(group.device)
        self.news = News(options, self.schedule, group, report, self.times)
        self.epoch, self.step, self.saved_at, self.hurried = 0, 0, time.monotonic(), False
        self.begun = time.time()  # of the run: its first attempt's start of loading, where that is known
        self.ids = Ids(options.notes, options.attempt, group.rank) if options.log_ids else None
        self.history: list[dict[str, Any]] = []
        self.sums, self.mark = Sums(), 0.0  # of this epoch
        self.goodput, self.where = 0.0, self.times.where()

    # --- where we stand, and going on from there -----------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Steps from the start of the run."""
        return self.schedule.steps_at(self.epoch, self.step)

    @property
    def many(self) -> bool:
        """Whether the net's gradients are summed over several processes."""
        return self.group.world > 1

    @property
    def images_seen(self) -> int:
        """Training images that all processes together took from the start of the run."""
        return self.schedule.images_at(self.epoch, self.step)

    @property
    def reached(self) -> bool:
        """Whether a validation has reached the target at which training is to stop: the same on all processes."""
        target = self.options.target
        return target is not None and target.hit(self.history) is not None

    @property
    def facts(self) -> dict[str, Any]:
        """What this attempt is, for its first line of metrics."""
        return {
            "begun": self.begun,
            "train_images": self.schedule.images,
            "val_images": len(self.feed.indexes["val", None]),
            "world": self.group.world,
            "gpus": self.schedule.gpus,
            "device": self.group.device.type,
            "processor": process_group.named(self.group.device),
            "precision": str(self.inputs.precision).removeprefix("torch."),
            "versions": versions(),
        }

    def state(self) -> dict[str, Any]:
        """Everything that a later attempt needs. Called on all processes: the batch-norm statistics are gathered."""
        return {
            "format": FORMAT,
            "identity": resume_check.of(self.recipe, self.schedule),
            "epoch": self.epoch,
            "step": self.step,
            "statistics": batchnorm.gather_statistics(self.group, self.model),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "history": self.history,
            "sums": asdict(self.sums),
            "times": self.times.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state. Raises `Expected` when it belongs to another run."""
        if state.get("format") != FORMAT:
            raise Expected("the checkpoint is of another version of imgnet-cluster; go on with that, or --resume none")
        resume_check.check(state["identity"], resume_check.of(self.recipe, self.schedule))
        self.model.load_state_dict(state["model"])
        batchnorm.restore_statistics(self.group, self.model, state["statistics"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:  # a GPU that computes in bfloat16 has none
            self.scaler.load_state_dict(state["scaler"])
        self.times.restore(state["times"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.history, self.sums = state["history"], Sums(**state["sums"])

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint of this moment in the background; later, while the last is being written, or `wait`."""
        with self.times.within("checkpoints"):
            state = self.state()
            if self.group.first and (wait or not self.saver.busy):
                self.saver.save(self.steps_done, state, urgent=wait)
                self.saved_at = time.monotonic()

    # --- the run -------------------------------------------------------------------------------------------------

    def train(self, images: Images, workers: int) -> None:
        """Carry the schedule out from where we stand. Raises `Asked`, `Diverged`, `Expected`, `OSError` (disk full)."""
        if self.group.first:
            self.saver = checkpoint_io.Saver(self.options.out / "checkpoints" / f"{self.options.attempt:06d}")
        self.news.begin(self.steps_done, self.images_seen, self.facts)
        ahead = () if self.reached else self.schedule.epochs[self.epoch :]
        largest = max((3 * one.row.phase.batch * one.row.phase.size**2 for one in ahead), default=1)
        works = self.feed.works(len(self.schedule.epochs) - len(ahead), self.step, self.history)
        batches = stream(images, works, workers, self.group.device, largest)
        epochs = self.schedule.epochs[-1].number + 1
        self.report.say("warming", steps=self.schedule.steps, step=self.steps_done, epochs=epochs)
        if not isinstance(self.model, registry.ResNet):
            input_size.check(self.model, self.recipe.model.name, sides(self.feed, ahead))
        for epoch in ahead:  # none: a run that was killed between its last save and its result
            if epoch is ahead[0] or epoch.row.phase.frozen != self.freezer.frozen:
                batches = self.prepare(freezing.stretch(ahead, epoch), batches)
            self.one_epoch(epoch, batches)
            if self.reached:
                break
        self.where, self.goodput = self.times.summary(), self.times.goodput()
        if self.group.first:
            self.saver.wait()
        self.news.end(self.where, self.goodput)

    def prepare(self, epochs: Sequence[Epoch], batches: Iterator[Batch]) -> Iterator[Batch]:
        """Make ready for epochs that train the same parts of the net: sums over processes, every shape met once."""
        self.freezer.set(epochs[0].row.phase.frozen)
        if self.many:
            plain = self.schedule.steps // 10 - self.steps_done  # of PowerSGD, as torch advises
            self.net = ddp.wrap(self.net, self.recipe.comm, exact=self.options.exact, plain=plain)
        self.freezer.mode()
        train, val = shapes(self.feed, epochs)
        warm(self.net, self.model, train, val, self.group.device, self.inputs.autocast, self.report.tick)
        self.inputs.warmed |= {*train, *val}
        batches = chain([next(batches)], batches)  # the loader's start belongs to the warm-up, not to a step
        self.times.start = self.times.start or self.report.so_far()
        return batches

    def one_epoch(self, epoch: Epoch, batches: Iterator[Batch]) -> None:
        """Train, validate and save one epoch, or what is left of it."""
        self.freezer.mode()
        self.times.begin_epoch(epoch.number + 1)
        self.mark, stretch = time.perf_counter(), 1
        for step in range(self.step, epoch.steps):
            begun = time.perf_counter()
            self.one_step(epoch, step, batches)
            self.step = step + 1
            if self.meter.steps >= stretch or self.step == epoch.steps:
                stretch = self.look(epoch)
            if not self.hurried:
                self.hurried = True
                process_group.hurry(self.group, time.perf_counter() - begun)
        if not epoch.row.phase.frozen:
            batchnorm.average_statistics(self.group, self.model)
        found = self.validate(epoch, batches) if validates(self.schedule, self.epoch, self.history) else {}
        row = epoch_row(epoch, self.sums, found, time.perf_counter() - self.mark)
        now = time.time()
        self.history.append(row | {"at": now, "clock": now - self.begun} | self.times.end_epoch())
        self.epoch, self.step, self.sums = self.epoch + 1, 0, Sums()
        self.news.epoch(self.steps_done, self.images_seen, self.history[-1])
        self.save(wait=self.reached or self.epoch == len(self.schedule.epochs))  # the last one is what the run leaves

    def one_step(self, epoch: Epoch, step: int, batches: Iterator[Batch]) -> None:
        """One update. The loss is the mean over the global batch (Goyal et al. 2017, remark 3)."""
        factory.set_rate(self.optimizer, epoch.rate(step))
        count, images = self.feed.count(epoch, step), epoch.images(step)
        # DDP divides the summed gradients by the number of processes; the factor takes that back.
        factor = 1 if self.options.exact else self.group.world
        used: set[int] = set()
        self.times.begin("train")
        for number in range(1, count + 1):
            while (batch := self.times.wait(batches)).work.split != "train":
                pass  # asked for before it was known that this validation is not due
            inputs, labels = self.inputs.prepare(batch)
            share = batch.work.share
            if self.ids and share:
                used.update(batch.work.ids.tolist())
                if number == count:
                    self.ids.note(epoch.first_step + step, epoch.number, used)
            draw_anew(self.feed.seed, epoch.first_step + step, self.group.rank + (number - 1) * self.group.world)
            with self.quiet(unless=number == count):
                with self.inputs.autocast():
                    scores = self.net(inputs).to(self.inputs.dtype)
                loss = share * self.loss(scores, labels).sum()
                self.scaler.scale(loss * (factor / images)).backward()  # type: ignore[no-untyped-call]
            self.meter.add(loss.detach(), scores.detach(), labels, share)
            self.report.tick()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.many)  # DDP's gradients are views of its buckets
        self.times.end("train", (count, *batch.images.shape))
        self.meter.end_step()

    def quiet(self, unless: bool) -> Any:
        """A context in which gradients are only added up here, not over the processes."""
        return contextlib.nullcontext() if unless or not self.many else self.net.no_sync()  # type: ignore[operator]

    def look(self, epoch: Epoch) -> int:
        """Sum the last steps over all processes, log them, and do what was asked. Returns steps until the next look.

        Raises `Diverged` with the step and its rate, and `Asked` when everything is saved.
        """
        count, first = self.meter.steps, self.group.first
        self.times.settle()
        seconds, waited = self.times.stretch()
        due = first and time.monotonic() - self.saved_at > self.options.save_seconds and not self.saver.busy
        flags = torch.tensor([self.report.asked(), due, seconds * first], dtype=torch.float64)
        own = torch.cat([self.meter.losses[:count], self.meter.hits, flags.to(self.group.device)])
        *losses, top1, top5, asked, save, seconds = process_group.total(self.group, own).tolist()
        self.meter.reset()
        steps = range(self.step - count, self.step)
        for step, loss in zip(steps, losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(
                    f"the loss is {loss} at step {epoch.first_step + step + 1} (epoch {epoch.number + 1}, "
                    f"rate {epoch.rate(step):.4g}); lower the rate or lengthen the warm-up"
                )
        now, images = time.perf_counter(), sum(epoch.images(step) for step in steps)
        sums = Sums(sum(losses), top1, top5, images, now - self.mark)
        self.sums, self.mark = self.sums + sums, now
        rate = epoch.rate(self.step - 1)
        self.news.stretch(epoch, self.steps_done, self.images_seen, rate, sums, seconds, waited)
        if asked:
            self.save(wait=True)
            if first:
                self.saver.wait()
            self.news.close()
            process_group.barrier(self.group)  # nobody leaves before the file is there
            raise Asked
        if save:
            self.save()
        return max(1, min(LONGEST_STRETCH, round(LOOK_SECONDS / seconds))) if seconds else 1

    def validate(self, epoch: Epoch, batches: Iterator[Batch]) -> dict[str, Accuracy]:
        """Validate by every view the phase asks for."""
        self.report.say("validating")
        images, hooks = len(self.feed.indexes["val", None]), (self.inputs, self.times, self.report.tick)
        with self.times.within("validation"):
            found = {
                view: evaluate(self.group, self.model, batches, len(works), images, *hooks)
                for view, works in self.feed.views(epoch).items()
            }
        self.times.settle()
        if not all(math.isfinite(one.loss) for one in found.values()):
            raise Diverged(f"the validation loss is not a number after epoch {epoch.number + 1}; lower the rate")
        return found
