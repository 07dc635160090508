"""The trainer with the guard of NCCL's sums, over Gloo on CPUs: wrong sums are found a step later, and undone."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forked_ranks import join_group, run_ranks
from support.trainer_in_process import (
    PLAIN_PREPROCESSOR,
    SIZE,
    RandomImages,
    linear_classifier,
    make_phase,
    make_recipe,
    make_trainer,
)
from torch import nn

from train.distributed import ddp, process_group, regroup
from train.distributed.batchnorm import RunningStatistics
from train.distributed.guard import StepGuard
from train.distributed.process_group import ProcessGroup
from train.engine import handover
from train.engine.agent_channel import AgentChannel
from train.engine.handover import Handover
from train.engine.validation import run_validation
from train.metrics.time_breakdown import TimeBreakdown
from train.tools.agent_protocol import NOT_TRAINING_YET

IMAGES = RandomImages(train=64)
PHASE = make_phase((0, 1), batch=4, lr=0.01)
STEPS, WRONG_STEP = 8, 4
RECIPES = {"sgd": make_recipe(PHASE, gpus=2, momentum=0.9), "lamb": make_recipe(PHASE, gpus=2, name="lamb")}


class GuardedRun:
    """A rank's trainer with a loss scale that grows every second step. Its group has a guard if there is a token."""

    def __init__(self, group: ProcessGroup, optimizer: str, token: str = "") -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        group = guarded(group, token)
        folder = Path(os.environ["IMGNET_WORK"]) / token
        self.trainer = make_trainer(folder, RECIPES[optimizer], IMAGES, net, group, gpus=2)
        self.trainer.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.states: list[Any] = []  # after each step

    def run(self, before_step: Callable[[int], None] = lambda _: None) -> None:
        """Run the remaining steps."""
        trainer = self.trainer
        (epoch,) = trainer.schedule.epochs
        batches = map(IMAGES.decode_batch, trainer.sampler.train_requests(epoch, trainer.step))
        for step in range(trainer.step, epoch.steps):
            before_step(step)
            trainer.run_step(epoch, step, batches)
            trainer.step += 1
            trainer.is_updating = False
            self.states.append(copied(trainer.state()))
        trainer.group.confirm_sums()


def guarded(group: ProcessGroup, token: str) -> ProcessGroup:
    if not token:
        return group
    guard = StepGuard(group.world_size, group.device, token)
    regroup.before_abort(guard.poison)
    return replace(group, guard=guard)


def copied(value: Any) -> Any:
    """Return a nested state that does not change any more, without what differs between runs."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items() if key not in ("times", "sums", "lr")}
    return [*map(copied, value)] if isinstance(value, list | tuple) else value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return all(map(equal, one, other)) if isinstance(one, list) else bool(one == other)


def spoil(run: GuardedRun, rank: int) -> Callable[[int], None]:
    """Return a function that makes the sums of a step garbage in all ranks, as when rank 1 has aborted its kernels."""

    def before_step(step: int) -> None:
        trainer: Any = run.trainer
        if step == WRONG_STEP:
            wait, group = trainer.running_statistics.wait_for_sum, trainer.group

            def wait_and_spoil() -> None:
                wait()
                trainer.running_statistics.wait_for_sum = wait
                trainer.running_statistics.chunk_sum.fill_(7.0)
                if rank == 1:
                    trainer.group.guard.poison()

            def garble(*_: object) -> None:
                if (trainer.group, trainer.step) == (group, WRONG_STEP):
                    for parameter in trainer.model.parameters():
                        parameter.grad.fill_(9.0)

            trainer.running_statistics.wait_for_sum = wait_and_spoil
            trainer.optimizer.register_step_pre_hook(garble)

    return before_step


def fail(run: GuardedRun) -> Callable[[int], None]:
    """Return a function that makes the backward pass after the step fail: the sums of the step itself are right."""

    def before_step(step: int) -> None:
        if step == WRONG_STEP + 1:

            def raise_error(_: torch.Tensor) -> None:
                handle.remove()
                raise RuntimeError("NCCL communicator was aborted")

            handle = next(run.trainer.model.parameters()).register_hook(raise_error)

    return before_step


@pytest.mark.parametrize(("optimizer", "is_spoiled"), [("sgd", True), ("lamb", True), ("sgd", False)])
def test_a_step_with_wrong_sums_is_undone_and_done_again(optimizer: str, is_spoiled: bool) -> None:
    def work(rank: int, store: Path) -> list[Any]:
        folder = store.with_name(f"work-{rank}")
        folder.mkdir()
        os.environ.update(IMGNET_WORK=str(folder), IMGNET_IN_PLACE="on")
        group = join_group(store, rank, 2, 1)
        undisturbed = GuardedRun(group, optimizer)
        undisturbed.run()
        run, own = GuardedRun(group, optimizer, "first"), Handover(AgentChannel())
        trainer = run.trainer
        own.hold(trainer)
        with pytest.raises(RuntimeError, match="NCCL") as raised:
            run.run(spoil(run, rank) if is_spoiled else fail(run))
        assert equal(run.states[:WRONG_STEP], undisturbed.states[:WRONG_STEP]), "the guard changes nothing"
        assert equal(run.states[WRONG_STEP], undisturbed.states[WRONG_STEP]) != is_spoiled
        assert own.keep(raised.value) and own.kept
        done = WRONG_STEP + (not is_spoiled)
        assert (own.kept.step, trainer.step, trainer.meter.steps) == (done, done, done)
        assert equal(copied(own.kept.state), undisturbed.states[done - 1])

        second = guarded(join_group(store.with_name("second"), rank, 2, 1), "second")
        trainer.begin_attempt(trainer.options, second, trainer.sampler, own.channel)
        state = own.share_state(second)
        trainer.restore(state, has_tensors="model" not in state)
        trainer.wrapped_model = ddp.wrap_ddp(trainer.wrapped_model, trainer.recipe.comm)
        run.run()
        assert equal(run.states[-1], undisturbed.states[-1])
        return [trainer.step, trainer.scaler.get_scale()]

    assert run_ranks(2, work) == [[STEPS, 8.0 * 2 ** (STEPS // 2)]] * 2


def sync_one_step(group: ProcessGroup, folder: Path) -> None:
    trainer = make_trainer(folder, RECIPES["sgd"], IMAGES, linear_classifier(), gpus=2)
    (epoch,) = trainer.schedule.epochs
    trainer.run_step(epoch, 0, map(IMAGES.decode_batch, trainer.sampler.train_requests(epoch)))
    trainer.step, trainer.group = 1, group
    trainer.sync_metrics(epoch)


class ForeignNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.ones(1))


HOST_READS: dict[str, Callable[[ProcessGroup, Path], object]] = {
    "sum": lambda group, _: process_group.read_sum(group, torch.ones(1)),
    "comparison": lambda group, _: process_group.check_same_on_all_ranks(group, "numbers", 1),
    "metrics": sync_one_step,
    "validation": lambda group, _: run_validation(
        group, linear_classifier(), iter(()), 0, 0, PLAIN_PREPROCESSOR, TimeBreakdown(group.device)
    ),
    "foreign norms": lambda group, _: RunningStatistics(group, ForeignNorm()).average_foreign_statistics(),
    "positions": lambda group, _: Handover(AgentChannel()).share_state(group),
    "state": lambda group, _: Handover(AgentChannel())._broadcast(group, 0, torch.ones(1)),
}


@pytest.mark.parametrize("read", HOST_READS)
def test_the_host_reads_no_sum_that_an_abort_may_have_met(
    read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for collective in ("all_gather", "broadcast", "all_reduce"):
        monkeypatch.setattr(f"torch.distributed.{collective}", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    guard = StepGuard(2, torch.device("cpu"), "token")
    guard.poison()
    with pytest.raises(RuntimeError, match=r"^NCCL: the sums of a step are not known to be right"):
        HOST_READS[read](ProcessGroup(0, 0, 2, 2, guard.device, guard=guard), tmp_path)


@pytest.mark.parametrize(("device", "way", "has_made_step", "obstacle"), [
    ("cuda", "on", True, ""),
    ("cuda", "on", False, NOT_TRAINING_YET),
    ("cuda", "auto", True, "the trainers use GPUs"),
    ("cpu", "auto", False, ""),
])  # fmt: skip
def test_state_is_kept_on_gpus_after_the_first_step_where_it_is_asked_for(
    device: str, way: str, has_made_step: bool, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMGNET_IN_PLACE", way)
    group = SimpleNamespace(device=torch.device(device))
    trainer: Any = SimpleNamespace(recipe=RECIPES["sgd"], group=group, has_made_step=has_made_step)
    assert handover.find_obstacle(trainer) == obstacle


def test_a_gpu_that_does_not_work_after_the_abort_keeps_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMGNET_WORK", str(tmp_path))
    monkeypatch.setenv("IMGNET_IN_PLACE", "on")
    monkeypatch.setattr(handover, "find_problem_after_abort", lambda *_: "CUDA error: unspecified launch failure")
    own: Any = Handover(AgentChannel())
    own.trainer = SimpleNamespace(is_updating=False, group=SimpleNamespace(device=torch.device("cuda")))
    assert not own.keep(RuntimeError("NCCL communicator was aborted"))
    assert own.channel.not_in_place == "CUDA error: unspecified launch failure" and not [*tmp_path.iterdir()]


def test_a_second_loss_before_the_first_step_on_a_gpu_keeps_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMGNET_WORK", str(tmp_path))
    monkeypatch.setenv("IMGNET_IN_PLACE", "on")
    own: Any = Handover(AgentChannel())
    own.prepared = SimpleNamespace(group=SimpleNamespace(device=torch.device("cuda")))
    own.kept = SimpleNamespace(step=5)
    own.begin_attempt()
    assert own.channel.not_in_place == NOT_TRAINING_YET and not own.keep(RuntimeError("NCCL: remote error"))
    own.has_left.set()
