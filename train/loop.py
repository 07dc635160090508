"""The loop. One stream of batches goes through it from the first step to the last validation.

for each epoch: for each step: rate, chunks, one all-reduce, one update
                about once a second: sums and questions over all processes (the only host sync)
                batch-norm statistics averaged, validation, checkpoint
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from . import checkpoint, distributed, exact, files, hparams, models, optim
from .data.loader import Batch, Images, stream
from .distributed import Group
from .evaluate import Accuracy, evaluate
from .feed import Feed
from .ids import Ids
from .metrics import Log, Meter, Network, Times
from .options import Options
from .recipe import Recipe
from .report import Expected, Report
from .result import Sums, epoch_row, stretch_values
from .schedule import Epoch
from .warm import warm

LONGEST_STRETCH = 50  # steps between two looks at the sums
LOOK_SECONDS = 1.0
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
        self.net: nn.Module = self.model
        self.optimizer = optim.build(self.model, recipe.optim)
        self.precision = distributed.precision(group.device)
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=self.precision == torch.float16)
        self.mean, self.std = (torch.tensor(one, device=group.device).view(1, 3, 1, 1) * 255 for one in (MEAN, STD))
        self.meter, self.times, self.network = (
            Meter(group.device, LONGEST_STRETCH),
            Times(group.device),
            Network(),
        )
        self.epoch, self.step, self.saved_at, self.hurried = 0, 0, time.monotonic(), False
        self.ids = Ids(options.notes, options.attempt, group.rank) if options.log_ids else None
        self.history: list[dict[str, Any]] = []
        self.sums, self.mark = Sums(), 0.0  # of this epoch
        self.goodput = 0.0

    # --- where we stand, and going on from there -----------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Steps from the start of the run."""
        return self.schedule.steps_at(self.epoch, self.step)

    @property
    def images_seen(self) -> int:
        """Training images that all processes together took from the start of the run."""
        return self.schedule.images_at(self.epoch, self.step)

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on with the run that goes on from it."""
        return {
            "recipe": self.recipe.to_json(),
            "seed": self.feed.seed,
            "images": self.schedule.images,
            "gpus": self.schedule.gpus,
            "max_steps": self.schedule.max_steps,
        }

    def state(self) -> dict[str, Any]:
        """Everything that a later attempt needs. Called on all processes: the batch-norm statistics are gathered."""
        return {
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
        state = self.state()
        if self.group.first and (wait or not self.saver.busy):
            self.saver.save(self.steps_done, state)
            self.saved_at = time.monotonic()

    # --- the run -------------------------------------------------------------------------------------------------

    def train(self, images: Images, workers: int) -> None:
        """Carry the schedule out from where we stand. Raises `Asked`, `Diverged`, `Expected`, `OSError` (disk full)."""
        if self.group.first:
            attempt = self.options.attempt
            self.saver = checkpoint.Saver(self.options.out / "checkpoints" / f"{attempt:06d}")
            self.log = Log(self.options.notes, attempt, self.images_seen, self.schedule.steps)
            hparams.begin(self.log.board, hparams.flat(self.schedule, self.group.world))
        phases = [epoch.row.phase for epoch in self.schedule.epochs[self.epoch :]]
        largest = max((3 * one.batch * one.size**2 for one in phases), default=1)
        batches = stream(images, self.feed.works(self.epoch, self.step), workers, self.group.device, largest)
        epochs = self.schedule.epochs[-1].number + 1
        self.report.say("warming", steps=self.schedule.steps, step=self.steps_done, epochs=epochs)
        if self.group.world > 1:
            # Nothing is copied from rank 0: the weights are the same by seed or checkpoint, the statistics are not.
            self.net = DistributedDataParallel(
                self.model, forward_sync_buffers=False, init_sync=False, gradient_as_bucket_view=True
            )
            if self.options.exact:
                self.net.register_comm_hook(None, exact.plain_sum)
        if phases:  # else a run that was killed between its last save and its result
            shapes = dict.fromkeys((one.batch, one.size) for one in phases)
            warm(self.net, self.optimizer, list(shapes), self.group.device, self.autocast, self.report.tick)
            batches = chain([next(batches)], batches)  # the loader's start belongs to the warm-up, not to a step
        for epoch in self.schedule.epochs[self.epoch :]:
            self.one_epoch(epoch, batches)
        self.goodput = self.times.goodput()
        if self.group.first:
            self.saver.wait()
            hparams.end(self.log.board)
            self.log.close()

    def one_epoch(self, epoch: Epoch, batches: Iterator[Batch]) -> None:
        """Train, validate and save one epoch, or what is left of it."""
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
        found = self.validate(epoch, batches)
        self.history.append(epoch_row(epoch, self.sums, found, time.perf_counter() - self.mark))
        self.epoch, self.step, self.sums = self.epoch + 1, 0, Sums()
        self.say_epoch(self.history[-1])
        self.save(wait=self.epoch == len(self.schedule.epochs))  # the last one is what the run leaves

    def one_step(self, epoch: Epoch, step: int, batches: Iterator[Batch]) -> None:
        """One update. The loss is the mean over the global batch (Goyal et al. 2017, remark 3)."""
        optim.set_rate(self.optimizer, epoch.rate(step))
        count, images = self.feed.count(epoch, step), epoch.images(step)
        # DDP divides the summed gradients by the number of processes; the factor takes that back.
        factor = 1 if self.options.exact else self.group.world
        used: set[int] = set()
        start = self.times.begin()
        for number in range(1, count + 1):
            batch = self.times.wait(batches)
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
        self.optimizer.zero_grad(set_to_none=self.net is self.model)  # DDP's gradients are views of its buckets
        self.times.end(start, (count, *batch.images.shape), "train")
        self.meter.end_step()

    def quiet(self, unless: bool) -> Any:
        """A context in which gradients are only added up here, not over the processes."""
        return contextlib.nullcontext() if unless or self.net is self.model else self.net.no_sync()  # type: ignore[operator]

    def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [n, h, w, 3] to normalised [n, 3, h, w] in channels-last memory, on the device."""
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
        self.say_stretch(epoch, sums, seconds, waited)
        if asked:
            self.save(wait=True)
            if first:
                self.saver.wait()
                self.log.close()
            distributed.barrier(self.group)  # nobody leaves before the file is there
            raise Asked
        if save:
            self.save()
        return max(1, min(LONGEST_STRETCH, round(LOOK_SECONDS / seconds))) if seconds else 1

    def validate(self, epoch: Epoch, batches: Iterator[Batch]) -> dict[str, Accuracy]:
        """Validate by every view the phase asks for."""
        self.report.say("validating")
        images = len(self.feed.indexes["val", None])
        found = {
            view: evaluate(
                self.group,
                self.model,
                batches,
                len(works),
                images,
                self.prepare,
                self.autocast,
                self.times,
                self.report.tick,
            )
            for view, works in self.feed.views(epoch).items()
        }
        self.times.settle()
        if not all(math.isfinite(one.loss) for one in found.values()):
            raise Diverged(f"the validation loss is not a number after epoch {epoch.number + 1}; lower the rate")
        return found

    def say_stretch(self, epoch: Epoch, sums: Sums, seconds: float, waited: float) -> None:
        """Tell the agent and the log about the last steps."""
        rate, speed = epoch.rate(self.step - 1), sums.images / sums.seconds
        self.report.say(
            "training",
            often=True,
            step=self.steps_done,
            epoch=epoch.number + 1,
            images_per_second=speed,
            lr=rate,
        )
        if self.group.first:
            values = stretch_values(epoch, sums, rate, self.recipe.optim.momentum, self.group.world)
            values |= {"times/step_ms": 1000 * seconds, "times/data_ms": 1000 * waited}
            values |= {"memory/gb": distributed.memory_gb(self.group.device), **self.network.rates()}
            self.log.stretch(self.steps_done, self.images_seen, epoch.number + 1, values)

    def say_epoch(self, row: dict[str, Any]) -> None:
        """Tell the agent and the log about an epoch."""
        self.report.say("training", top1=row["top1"], top5=row["top5"], step=self.steps_done)
        if self.group.first:
            self.log.epoch(self.steps_done, self.images_seen, row)
