"""A trainer process that goes on in place: it keeps its state when its process group ends, and joins the next attempt.

When another process is gone, or when this one was asked to save because the members change, the process leaves the
group and tells its agent at which step it stands. The agents agree on the next attempt. Then each process that has kept
its state gets a `StandbyRequest`, as a standby process does, and joins the new group. The process that stands furthest
sends its state, which those take that have another one, or none: network, optimizer and loader of the others stay as
they are.

What is kept is what a checkpoint holds. An update changes the weights only after the gradients have been summed over
all processes; a process that a failure meets within an update keeps nothing, and is started again. A GPU may have
updated the weights by wrong sums meanwhile: then the process goes back by a step (train/distributed/guard.py). With
NCCL a process keeps its state only after the first step of an attempt, and of a phase that trains other layers.
"""

import contextlib
import gc
import hashlib
import io
import math
import threading
import time
import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from train.distributed import regroup
from train.distributed.gpu import find_problem_after_abort
from train.distributed.process_group import ProcessGroup
from train.metrics.rows import StepTotals
from train.recipe.schedule import Epoch, split_step
from train.tools import checkpoint_io
from train.tools.agent_protocol import NOT_TRAINING_YET, StandbyRequest
from train.tools.checkpoint_io import State
from train.tools.errors import HandoverFailed, is_peer_failure, last_line

from .agent_channel import AgentChannel
from .trainer import Trainer

POLL_SECONDS = 0.05
SAVE_SECONDS = 10.0  # that a process waits with its state until it writes a checkpoint
GPU_SECONDS = 2.0  # after an abort, for a GPU to end its work; the agent waits at least `KEEP_SECONDS`
TENSOR_FIELDS = ("model", "average", "optimizer", "scaler")  # of a state: nearly all of its bytes
PIECE_BYTES = 2**26  # of the state, which is sent in pieces: the agent sees progress after each of them


@dataclass(frozen=True)
class KeptState:
    """The state of a run at a position: (finished epochs, finished steps of the current one), `step` steps in all."""

    state: State
    position: tuple[int, int]
    step: int

    @cached_property
    def mark(self) -> tuple[int, ...]:
        """The position, and a digest of all tensors. Two processes with the same mark hold the same state."""
        return *self.position, digest(tensors_of(self.state))


class Handover:
    """What one process keeps from one attempt for the next."""

    def __init__(self, channel: AgentChannel, prepared: Trainer | None = None) -> None:
        self.channel = channel
        self.kept: KeptState | None = None
        self.prepared = prepared  # for the next attempt: it has a network, and no group yet or any more
        self.trainer: Trainer | None = None  # from the moment at which it holds the state of its position
        self.was_aborted = False
        self.has_left = threading.Event()  # a new one for each attempt
        self.lock = threading.Lock()

    def begin_attempt(self) -> None:
        """Watch from now on whether the agent wants the collectives of this attempt to end."""
        self.trainer = None
        self.was_aborted = False
        self.has_left = threading.Event()
        if self.kept and not self.is_on_gpu:
            self.channel.not_in_place = ""
        if self.channel.may_keep_state:
            threading.Thread(target=self._watch, args=(self.has_left,), daemon=True).start()

    @property
    def is_on_gpu(self) -> bool:
        """Whether the trainer that waits for its first step in the next attempt has a GPU."""
        return self.prepared is not None and self.prepared.group.device.type == "cuda"

    def hold(self, trainer: Trainer) -> None:
        """Keep the state of this trainer from now on, if the run can go on in place.

        To be called before the first step of an attempt, after it, and likewise where other layers are trained.
        """
        if self.channel.may_keep_state:
            self.channel.report_obstacle(find_obstacle(trainer))
            self.trainer = None if self.channel.not_in_place else trainer
            if self.trainer and not gc.get_freeze_count():
                gc.freeze()  # torch has some 280,000 objects, which `wait_for_request` need not walk
        self.kept = self.prepared = None

    def _watch(self, has_left: threading.Event) -> None:
        """Abort the collectives when the agent wants it or NCCL has failed, until this process has left the group.

        That is done again and again: a process that is still joining opens further connections after the first time.
        """
        while not has_left.wait(POLL_SECONDS):
            if self.channel.abort_requested() or regroup.has_failed():
                with self.lock:
                    if has_left.is_set():
                        return
                    if self.was_aborted:
                        regroup.shut_down_connections()
                    else:
                        self.was_aborted = True
                        regroup.abort_collectives()

    def keep(self, error: Exception | None) -> bool:
        """Leave the group after an error, or None after a requested save. Returns whether the state could be kept.

        If so, the agent has been told.
        """
        if not self.channel.may_keep_state or self.channel.sigterm_received:
            return False
        reason = ""
        if error is not None:
            is_from_abort = self.was_aborted and type(error) is RuntimeError
            if not (is_from_abort or isinstance(error, HandoverFailed) or is_peer_failure(type(error), str(error))):
                return False
            reason = last_line(str(error).strip()) or type(error).__name__
        if self.trainer is not None and self.trainer.is_updating:
            self.channel.refuse_to_keep_state("an update had begun")
            return False
        if self.trainer is None and (self.kept is None or self.is_on_gpu):
            return False
        self._leave()
        if self.trainer is not None:
            if problem := find_problem_after_abort(self.trainer.group.device, GPU_SECONDS):
                self.channel.refuse_to_keep_state(problem)
                return False
            self.kept = keep_state(self.trainer)
            self.prepared = self.trainer
        assert self.kept is not None
        self.channel.report_kept_state(self.kept.step, has_saved=error is None, reason=reason)
        if self.trainer is not None:
            self.trainer.leave_attempt()
            if error is not None:
                with contextlib.suppress(OSError):  # the process that writes in the next attempt will report it
                    self.trainer.progress.close()
        if error is not None:
            stack = "".join(traceback.format_exception(error))
            print(self.channel.move_stack_to_file(stack, reason), end="", flush=True)
        self.trainer = None
        return True

    def _leave(self) -> None:
        with self.lock:
            self.has_left.set()
            regroup.leave_group()

    def wait_for_request(self, folder: Path) -> StandbyRequest:
        """Return the agent's request to join the next attempt. An agent that does not want this process kills it.

        If that takes long, the kept state is written to the checkpoint folder of the last attempt, in case of a stop.
        """
        gc.collect()  # ends what refers to the group of the last attempt
        regroup.destroy_left_groups()
        if self.kept:  # while the agents agree
            _ = self.kept.mark
            if self.prepared and self.prepared.usage_log:
                self.prepared.usage_log.record_plan(self.prepared.sampler.planned_usage(*self.kept.position))
        save_time = math.inf if self.channel.local_rank else time.monotonic() + SAVE_SECONDS
        while (request := self.channel.read_next_request()) is None:
            time.sleep(POLL_SECONDS / 2)
            if self.kept and self.prepared and time.monotonic() > save_time and not self.prepared.saver.is_writing:
                save_time = math.inf
                with contextlib.suppress(OSError):
                    writer = checkpoint_io.CheckpointWriter()
                    writer.begin_attempt(folder)
                    writer.save(self.kept.step, self.kept.state)
        return request

    def share_state(self, group: ProcessGroup) -> State:
        """Return the state of the process that stands furthest, without its tensors where this process has the same.

        All processes must call it, also those without a state. Raises `HandoverFailed` when no process has kept its
        state, or when the tensors have changed on their way.
        """
        own_mark = self.kept.mark if self.kept else (-1, -1, 0)
        marks = [torch.tensor(own_mark, device=group.device) for _ in range(group.world_size)]
        if group.world_size > 1:
            work = dist.all_gather(marks, marks[group.rank].clone(), async_op=True)
            regroup.until_abort(work, group.device).wait()
            group.confirm_sums()
        furthest = max(mark[:2].tolist() for mark in marks)
        if furthest[0] < 0:
            raise HandoverFailed("no process has kept the state to go on from")
        source = next(rank for rank, mark in enumerate(marks) if mark[:2].tolist() == furthest)
        own_state = self.kept.state if self.kept and group.rank == source else {}
        state = self._send(group, source, {name: own_state[name] for name in own_state.keys() - TENSOR_FIELDS})
        if any(not torch.equal(mark, marks[source]) for mark in marks):
            tensors = self._send(group, source, tensors_of(own_state))
            if own_mark != tuple(marks[source].tolist()):
                if digest(tensors) != marks[source][2]:
                    raise HandoverFailed("the state that was received is not that which was sent")
                state |= tensors
        return state

    def _send(self, group: ProcessGroup, source: int, part: State) -> State:
        """Return in all processes the part of a state that the process of rank `source` gives."""
        if group.world_size == 1:
            return part
        payload = b""
        if group.rank == source:
            stream = io.BytesIO()
            torch.save(checkpoint_io.copy_to_cpu(part), stream)
            payload = stream.getvalue()
        size = torch.tensor([len(payload)])
        self._broadcast(group, source, size)
        content = torch.frombuffer(bytearray(payload or int(size.item())), dtype=torch.uint8)
        for start in range(0, len(content), PIECE_BYTES):
            self._broadcast(group, source, content[start : start + PIECE_BYTES])
            self.channel.tick()
        if group.rank == source:
            return part
        received: State = torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
        return received

    def _broadcast(self, group: ProcessGroup, source: int, values: torch.Tensor) -> None:
        on_device = values.to(group.device)
        regroup.until_abort(dist.broadcast(on_device, source, async_op=True), group.device).wait()
        group.confirm_sums()
        values.copy_(on_device)


def tensors_of(state: State) -> State:
    """Return the part of a state that is sent only to those processes that need it."""
    return {name: state[name] for name in TENSOR_FIELDS if name in state}


def digest(value: object) -> int:
    """Return a checksum of the tensors in a nested value. Numbers, such as the learning rate, are left out."""
    hasher = hashlib.blake2b(digest_size=7)

    def add(part: object) -> None:
        if isinstance(part, torch.Tensor):
            hasher.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        elif isinstance(part, dict | list | tuple):
            for each in part.values() if isinstance(part, dict) else part:
                add(each)

    add(value)
    return int.from_bytes(hasher.digest(), "big")


def find_obstacle(trainer: Trainer) -> str:
    """Return why a run cannot go on in place, "" when it can. Some hooks have a memory or groups of their own."""
    hook, device = trainer.recipe.comm.hook, trainer.group.device
    if not regroup.goes_on_in_place(device):
        return "the trainers use GPUs"
    if hook in ("powersgd", "hierarchical"):
        return f"{hook} sums the gradients"
    # An abort within the first backward pass may crash the process (PyTorch's issue 149418).
    return NOT_TRAINING_YET if device.type == "cuda" and not trainer.has_made_step else ""


def keep_state(trainer: Trainer) -> KeptState:
    """Return the state of a trainer after its last finished step; a step that it has begun is forgotten.

    With NCCL a step is finished when its sums are known to be right. The metrics of the steps since the last sums over
    all processes are estimated from those of this process.
    """
    if trainer.group.guard and trainer.group.guard.go_back():
        trainer.step -= 1
        trainer.meter.steps -= 1
    trainer.running_statistics.abandon_step()
    end = trainer.time_breakdown.abandon_step()
    trainer.epoch_totals += estimate_totals(trainer, end)
    return KeptState(trainer.state(), (trainer.epoch_index, trainer.step), trainer.steps_done)


def estimate_totals(trainer: Trainer, end: float) -> StepTotals:
    """Return the sums over the last steps and all processes, as if the others had had the losses and hits of this one.

    The sums of a process that is gone are gone with it. `end` is when the last step ended, by `time.perf_counter`.
    """
    count = trainer.meter.steps
    if not count:
        return StepTotals()
    epoch = trainer.schedule.epochs[trainer.epoch_index]
    steps = range(trainer.step - count, trainer.step)
    images = sum(map(epoch.images_in_step, steps))
    own_images = sum(own_image_count(trainer, epoch, step) for step in steps)
    scale = images / own_images if own_images else 0.0
    top1, top5 = (min(scale * hits, images) for hits in trainer.meter.correct[:count].sum(0).tolist())
    seconds = end - trainer.interval_start
    trainer_loss = scale * float(trainer.meter.losses[:count].sum())
    return StepTotals(trainer_loss, top1, top5, images, seconds)


def own_image_count(trainer: Trainer, epoch: Epoch, step: int) -> int:
    """Return how many images of a step were this process's."""
    parts = split_step(epoch.images_in_step(step), epoch.scheduled_phase.phase.batch)
    return sum(part.stop - part.start for part in parts[trainer.group.rank :: trainer.group.world_size])
