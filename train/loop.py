"""The loop. One stream of batches goes through it from the first step to the last validation.

for each epoch: for each step: rate, chunks, one all-reduce, one update
                about once a second: sums and questions over all processes (the only host sync)
                batch-norm statistics averaged, validation where it is due, checkpoint
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from . import checkpoint, distributed, exact, files, models, optim
from .cadence import validates
from .data.loader import Batch, Images, stream
from .distributed import Group
from .evaluate import Accuracy, evaluate
from .feed import Feed
from .ids import Ids
from .metrics import Meter
from .news import News
from .options import Options
from .recipe import Recipe
from .report import Expected, Report
from .result import Sums, epoch_row
from .schedule import Epoch
from .times import Times
from .warm import compiled, shapes, warm

LONGEST_STRETCH = 50  # steps between two looks at the sums
LOOK_SECONDS = 1.0
FORMAT = 2  # of a checkpoint's state
MEAN, STD = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # of ImageNet's pixels; all ResNets since 2015 use them


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
        self.model = models.build(recipe.model, classes, feed.seed)
        self.model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if options.exact:
            exact.round_gradients(self.model)
        self.dtype = torch.float64 if options.exact else torch.float32
        self.net: nn.Module = compiled(self.model) if recipe.model.compile and not options.exact else self.model
        self.optimizer = optim.build(self.model, recipe.optim)
        self.precision = distributed.precision(group.device)
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=self.precision == torch.float16)
        self.mean, self.std = (torch.tensor(one, device=group.device).view(1, 3, 1, 1) * 255 for one in (MEAN, STD))
        self.meter, self.times = Meter(group.device, LONGEST_STRETCH), Times(group.device)
        self.news = News(options, self.schedule, group, report, self.times)
        self.warmed: set[tuple[int, ...]] = set()
        self.epoch, self.step, self.saved_at, self.hurried = 0, 0, time.monotonic(), False
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
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on with the run that goes on from it; not on being compiled."""
        return {
            "recipe": replace(self.recipe, model=replace(self.recipe.model, compile=False)).to_json(),
            "seed": self.feed.seed,
            "images": self.schedule.images,
            "gpus": self.schedule.gpus,
            "max_steps": self.schedule.max_steps,
        }

    def state(self) -> dict[str, Any]:
        """Everything that a later attempt needs. Called on all processes: the batch-norm statistics are gathered."""
        return {
            "format": FORMAT,
            "identity": files.plain(self.identity),
            "epoch": self.epoch,
            "step": self.step,
            "statistics": distributed.gather_statistics(self.group, self.model),
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
        mine = files.plain(self.identity)
        for name in mine:
            if state["identity"][name] != mine[name]:
                raise Expected(
                    f"the checkpoint is of a run with another {name}; resume with the recipe and options of that run"
                )
        self.model.load_state_dict(state["model"])
        distributed.restore_statistics(self.group, self.model, state["statistics"])
        self.optimizer.load_state_dict(state["optimizer"])
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
            self.saver = checkpoint.Saver(self.options.out / "checkpoints" / f"{self.options.attempt:06d}")
        self.news.begin(self.images_seen)
        ahead = self.schedule.epochs[self.epoch :]
        largest = max((3 * one.row.phase.batch * one.row.phase.size**2 for one in ahead), default=1)
        works = self.feed.works(self.epoch, self.step, self.history)
        batches = stream(images, works, workers, self.group.device, largest)
        epochs = self.schedule.epochs[-1].number + 1
        self.report.say("warming", steps=self.schedule.steps, step=self.steps_done, epochs=epochs)
        if self.group.world > 1:
            # Nothing is copied from rank 0: the weights are the same by seed or checkpoint, the statistics are not.
            self.net = DistributedDataParallel(
                self.net, forward_sync_buffers=False, init_sync=False, gradient_as_bucket_view=True
            )
            if self.options.exact:
                self.net.register_comm_hook(None, exact.plain_sum)
        if ahead:  # else a run that was killed between its last save and its result
            train, val = shapes(self.feed, ahead)
            warm(self.net, self.model, train, val, self.group.device, self.autocast, self.report.tick)
            self.warmed = {*train, *val}
            batches = chain([next(batches)], batches)  # the loader's start belongs to the warm-up, not to a step
        self.times.start = self.times.start or self.report.so_far()
        for epoch in ahead:
            self.one_epoch(epoch, batches)
        self.where, self.goodput = self.times.summary(), self.times.goodput()
        if self.group.first:
            self.saver.wait()
        self.news.end(self.where, self.goodput)

    def one_epoch(self, epoch: Epoch, batches: Iterator[Batch]) -> None:
        """Train, validate and save one epoch, or what is left of it."""
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
                distributed.hurry(self.group, time.perf_counter() - begun)
        distributed.average_statistics(self.group, self.model)
        found = self.validate(epoch, batches) if validates(self.schedule, self.epoch, self.history) else {}
        row = epoch_row(epoch, self.sums, found, time.perf_counter() - self.mark)
        self.history.append(row | self.times.end_epoch())
        self.epoch, self.step, self.sums = self.epoch + 1, 0, Sums()
        self.news.epoch(self.steps_done, self.images_seen, self.history[-1])
        self.save(wait=self.epoch == len(self.schedule.epochs))  # the last one is what the run leaves

    def one_step(self, epoch: Epoch, step: int, batches: Iterator[Batch]) -> None:
        """One update. The loss is the mean over the global batch (Goyal et al. 2017, remark 3)."""
        optim.set_rate(self.optimizer, epoch.rate(step))
        count, images = self.feed.count(epoch, step), epoch.images(step)
        # DDP divides the summed gradients by the number of processes; the factor takes that back.
        factor = 1 if self.options.exact else self.group.world
        used: set[int] = set()
        self.times.begin("train")
        for number in range(1, count + 1):
            while (batch := self.times.wait(batches)).work.split != "train":
                pass  # asked for before it was known that this validation is not due
            inputs, labels = self.prepare(batch)
            share = batch.work.share
            if self.ids and share:
                used.update(batch.work.ids.tolist())
                if number == count:
                    self.ids.note(epoch.first_step + step, epoch.number, used)
            with self.quiet(unless=number == count):
                with self.autocast():
                    scores = self.net(inputs).to(self.dtype)
                loss = share * cross_entropy(
                    scores,
                    labels,
                    reduction="sum",
                    label_smoothing=self.recipe.optim.label_smoothing,
                )
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

    def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [n, h, w, 3] to normalised [n, 3, h, w] in channels-last memory, on the device.

        Kernels are searched for shapes that the warm-up has met, so for none again: a rest of few images takes what
        cuDNN thinks best.
        """
        torch.backends.cudnn.benchmark = tuple(batch.images.shape[:3]) in self.warmed
        images = batch.images.to(self.group.device, non_blocking=True).permute(0, 3, 1, 2)
        labels = torch.from_numpy(batch.labels).to(self.group.device, non_blocking=True)
        return images.to(self.dtype).sub_(self.mean).div_(self.std), labels

    def autocast(self) -> Any:
        """Half precision where the GPU has it, nothing on a CPU."""
        return torch.autocast(self.group.device.type, self.precision, enabled=self.precision != torch.float32)

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
        *losses, top1, top5, asked, save, seconds = distributed.total(self.group, own).tolist()
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
            distributed.barrier(self.group)  # nobody leaves before the file is there
            raise Asked
        if save:
            self.save()
        return max(1, min(LONGEST_STRETCH, round(LOOK_SECONDS / seconds))) if seconds else 1

    def validate(self, epoch: Epoch, batches: Iterator[Batch]) -> dict[str, Accuracy]:
        """Validate by every view the phase asks for."""
        self.report.say("validating")
        images, hooks = len(self.feed.indexes["val", None]), (self.prepare, self.autocast, self.times, self.report.tick)
        with self.times.within("validation"):
            found = {
                view: evaluate(self.group, self.model, batches, len(works), images, *hooks)
                for view, works in self.feed.views(epoch).items()
            }
        self.times.settle()
        if not all(math.isfinite(one.loss) for one in found.values()):
            raise Diverged(f"the validation loss is not a number after epoch {epoch.number + 1}; lower the rate")
        return found
