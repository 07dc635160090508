"""What a trainer keeps when its process group ends, and how the processes of the next attempt come to one state."""

import json
import os
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forked_ranks import join_group, run_ranks
from support.trainer_in_process import SINGLE_PROCESS, SIZE, RandomImages, make_phase, make_recipe, make_trainer
from support.waiting import wait_for
from torch import nn
from torch.distributed import DistNetworkError

from train.distributed import ddp, regroup
from train.distributed.process_group import ProcessGroup, check_same_on_all_ranks, join_process_group
from train.distributed.rendezvous import wait_for_listener
from train.engine import handover, trainer
from train.engine import run as run_module
from train.engine.agent_channel import AgentChannel
from train.engine.handover import Handover, KeptState, keep_state
from train.recipe.components import Comm
from train.tools import checkpoint_io
from train.tools.agent_protocol import TrainerState, checkpoint_folder, newest_intact_checkpoint
from train.tools.errors import HandoverFailed
from train.tools.process import free_port

IMAGES = RandomImages(train=48)
RECIPE = make_recipe(make_phase((0, 1), batch=8, lr=0.1), momentum=0.9)
PEER_FAILURE = RuntimeError("[pair.cc:537] gloo: Connection closed by peer [127.0.0.1]:24723")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work" / "000001"
    folder.mkdir(parents=True)
    monkeypatch.setenv("IMGNET_WORK", str(folder))
    monkeypatch.setenv("IMGNET_IN_PLACE", "1")
    return folder


class Run:
    """A trainer whose process group ends within a step."""

    trainer: Any

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        for name in ("running_mean", "running_var"):  # as a norm has them that is not torch's own
            net.register_buffer(name, torch.rand(4))
        self.trainer = make_trainer(folder, RECIPE, IMAGES, net)
        self.trainer.progress = SimpleNamespace(close=lambda: None)
        (self.epoch,) = self.trainer.schedule.epochs
        self.batches = map(IMAGES.decode_batch, self.trainer.sampler.train_requests(self.epoch))
        self.handover = Handover(AgentChannel())
        self.handover.begin_attempt()
        self.handover.hold(self.trainer)

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.trainer.run_step(self.epoch, self.trainer.step, self.batches)
            self.trainer.step += 1
            self.trainer.is_updating = False

    def keep_two_steps(self, work: Path) -> None:
        self.run_steps(2)
        assert self.handover.keep(PEER_FAILURE)
        (work / "kept-0.json").unlink()
        self.handover.begin_attempt()

    def fail_in_step(self, place: str) -> None:
        """Begin a step, and fail in it as a collective does."""

        def fail(*_: object) -> None:
            raise PEER_FAILURE

        if place == "second sum of foreign norms":
            statistics, waits = self.trainer.running_statistics, iter([lambda: None, fail])
            statistics.group = replace(SINGLE_PROCESS, world_size=2)
            with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="gloo"):
                patch.setattr(
                    regroup, "start_sum", lambda values: SimpleNamespace(sum=values.fill_(9), wait=next(waits))
                )
                statistics.average_foreign_statistics()
            return
        if place == "backward":
            handle = next(self.trainer.model.parameters()).register_hook(fail)
        elif place == "sum of statistics":
            self.trainer.running_statistics.work = SimpleNamespace(wait=fail)
            handle = None
        else:
            handle = self.trainer.optimizer.register_step_post_hook(fail)
        with pytest.raises(RuntimeError, match="gloo"):
            self.trainer.run_step(self.epoch, self.trainer.step, self.batches)
        if handle:
            handle.remove()


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {path: tensor for key, value in items for path, tensor in flat(value, f"{prefix}/{key}").items()}


@pytest.mark.parametrize("place", ["backward", "sum of statistics", "second sum of foreign norms"])
def test_a_step_that_fails_leaves_no_trace_in_the_kept_state(place: str, work: Path, tmp_path: Path) -> None:
    undisturbed, run = Run(tmp_path / "undisturbed"), Run(tmp_path / "failing")
    undisturbed.run_steps(3)
    run.run_steps(3)
    run.fail_in_step(place)
    assert run.handover.keep(PEER_FAILURE)
    kept = run.handover.kept
    assert kept and (kept.position, kept.step) == ((0, 3), 3)
    expected, actual = flat(undisturbed.trainer.state()), flat(kept.state)
    assert len(expected) == 17 and expected.keys() == actual.keys()
    assert not [name for name, value in expected.items() if not torch.equal(value, actual[name])]
    report = json.loads((work / "kept-0.json").read_text())
    assert (report["step"], report["has_saved"]) == (3, False) and "Connection closed by peer" in report["reason"]


@pytest.mark.parametrize(("error", "variable", "why"), [
    (PEER_FAILURE, "", "within an update"),
    (ValueError("own"), "", "own failure"),
    (RuntimeError("CUDA error: Broken pipe"), "", "failure of the own GPU"),
    (PEER_FAILURE, "IMGNET_WORK", "no agent"),
    (PEER_FAILURE, "IMGNET_IN_PLACE", "not asked for"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_nothing_is_kept(
    error: Exception, variable: str, why: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    run = Run(tmp_path)
    run.run_steps(1)
    if why == "within an update":
        run.fail_in_step("update")
    assert not run.handover.keep(error) and not (work / "kept-0.json").exists()
    expected = "an update had begun" if why == "within an update" else "training had not begun" if variable else ""
    assert run.handover.channel.not_in_place == expected


@pytest.mark.parametrize("hook", ["powersgd", "hierarchical"])
def test_sums_with_a_memory_or_groups_of_their_own_start_again(hook: str, work: Path, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.recipe = replace(RECIPE, comm=Comm(hook=hook))
    run.handover.channel.report_state(TrainerState.JOINING)
    run.handover.hold(run.trainer)
    assert not run.handover.keep(PEER_FAILURE)
    assert json.loads((work / "progress.json").read_text())["not_in_place"] == f"{hook} sums the gradients"


def test_on_a_gpu_nothing_is_kept_in_the_first_step_of_other_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort within the first backward pass of a DDP may crash the process."""
    monkeypatch.setattr(ddp, "wrap_ddp", lambda net, *_, **__: net)
    monkeypatch.setattr(trainer, "warm_up", lambda *_: None)
    monkeypatch.setattr(trainer, "batch_shapes", lambda *_: ([], []))
    recipe = make_recipe(*(make_phase((n, n + 1), batch=8, lr=0.1, frozen=n == 1) for n in range(3)))
    run: Any = make_trainer(tmp_path, recipe, IMAGES)
    run.group, run.preprocessor = replace(SINGLE_PROCESS, world_size=2), SimpleNamespace(warmed_shapes={1})
    run.preprocessor.compute_dtype = torch.float32
    held: list[bool] = []
    run.hold_state = lambda: held.append(run.has_made_step)
    for epoch in run.schedule.epochs:
        run.has_made_step = True
        run.begin_phase(epoch)
        assert run.has_made_step == (epoch.number == 0)
    assert held == [False, False]


@pytest.mark.parametrize("waits", [False, True])
def test_a_slow_checkpoint_costs_no_kept_state(
    waits: bool, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent kills a trainer that does not answer in some seconds, also one that waits for the file before."""
    run, is_over = Run(tmp_path), threading.Event()
    monkeypatch.setattr(checkpoint_io, "write_checkpoint", lambda *_: is_over.wait(10))
    run.run_steps(2)
    run.trainer.save()
    error = PEER_FAILURE
    if waits:
        threading.Timer(0.2, (work / "abort").touch).start()
        with pytest.raises(RuntimeError, match="the agent has ended the attempt") as raised:
            run.trainer.save(wait=True)
        error = raised.value
    assert run.handover.keep(error) and run.trainer.saver.is_writing
    is_over.set()
    assert json.loads((work / "kept-0.json").read_text())["step"] == 2


def test_a_state_that_waits_long_for_the_next_attempt_is_saved(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "SAVE_SECONDS", 0.1)
    run, folder = Run(tmp_path), checkpoint_folder(tmp_path, 7)
    run.run_steps(2)
    assert run.handover.keep(PEER_FAILURE)
    run.handover.channel.read_next_request = lambda: newest_intact_checkpoint(folder)  # type: ignore[method-assign, assignment, return-value]
    path: Any = run.handover.wait_for_request(folder)
    assert checkpoint_io.load_checkpoint(path)["step"] == 2


@pytest.mark.parametrize(("has_best", "step", "saved"), [(True, 0, []), (True, 3, []), (False, 0, [True])])
def test_best_weights_are_written_again_only_if_nobody_writes_them(
    has_best: bool, step: int, saved: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "best_epoch", lambda history: history[-1])
    calls: list[bool] = []
    own: Any = SimpleNamespace(
        options=SimpleNamespace(keeps_best=True),
        schedule=SimpleNamespace(epochs=range(4), steps_at=lambda *_: 7),
        saver=SimpleNamespace(has_best=lambda step: has_best and step == 7),
        save=lambda wait, is_best: calls.append(is_best),
        **{"history": ["the best"], "epoch_index": 1, "step": step, "ends_here": False},
    )
    run_module.save_inherited(own)
    assert calls == saved and own.is_early_save_due
    own.saver.has_best, own.step = (lambda _: False), 3
    with pytest.raises(HandoverFailed, match="the best validation is lost"):
        run_module.save_inherited(own)


def test_metrics_of_steps_that_no_process_has_summed_are_estimated(tmp_path: Path) -> None:
    """With one process the estimate is exact; what a failed step has added is no part of it, nor the wait in it."""
    run = Run(tmp_path)
    run.trainer.interval_start = time.perf_counter()
    run.run_steps(3)
    seconds = time.perf_counter() - run.trainer.interval_start
    losses, hits = run.trainer.meter.losses.sum().item(), run.trainer.meter.correct.sum(0).tolist()
    run.fail_in_step("sum of statistics")
    keep_state(run.trainer)
    totals = run.trainer.epoch_totals
    assert 0 < totals.seconds <= seconds
    assert totals.loss == pytest.approx(losses) and totals.images == 24 and [totals.top1, totals.top5] == hits


POSITIONS = [(1, 0), (0, 9), None, (1, 0)]  # finished epochs, finished steps of the next; None: a new process


@pytest.mark.parametrize("piece_bytes", [handover.PIECE_BYTES, 100])
def test_all_processes_take_the_state_of_the_one_that_stands_furthest(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "PIECE_BYTES", piece_bytes)

    def work(rank: int, store: Path) -> float:
        handover = Handover(AgentChannel())
        group = join_group(store, rank, len(POSITIONS), 1)
        with pytest.raises(HandoverFailed, match="no process has kept the state to go on from"):
            handover.share_state(group)
        position = POSITIONS[rank]
        if position:
            state: Any = {"weights": torch.full((3,), rank + 1.0, dtype=torch.float64), "step": rank}
            handover.kept = KeptState(state, position, step=9)
        shared: Any = handover.share_state(group)
        return float(shared["weights"].sum()) + int(shared["step"])

    assert run_ranks(len(POSITIONS), work) == [3.0] * 4


@pytest.mark.parametrize(("weights", "expected"), [
    ((1.0, 1.0, 1.0), [None, None, None]),
    ((1.0, 1.0, 2.0), [None, None, 1.0]),
    ((1.0, 1.0, None), [None, None, 1.0]),  # a new process
])  # fmt: skip
def test_tensors_are_sent_only_where_they_differ(weights: tuple[float | None, ...], expected: list[Any]) -> None:
    def work(rank: int, store: Path) -> float | None:
        own = Handover(AgentChannel())
        weight = weights[rank]
        if weight is not None:
            optimizer = {"state": {0: torch.full((2, 3), weight)}, "param_groups": [{"lr": rank / 8}]}
            own.kept = KeptState(
                {"model": {"w": torch.full((3,), weight)}, "optimizer": optimizer, "step": 9}, (0, 9), 9
            )
        shared: Any = own.share_state(join_group(store, rank, 3, 1))
        assert shared["step"] == 9 and ("optimizer" in shared) == ("model" in shared)
        return float(shared["model"]["w"][0]) if "model" in shared else None

    assert run_ranks(3, work) == expected


def test_a_state_that_has_changed_on_its_way_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: {"model": torch.zeros(3)})

    def work(rank: int, store: Path) -> Any:
        own = Handover(AgentChannel())
        group = join_group(store, rank, 2, 1)
        if rank == 0:
            own.kept = KeptState({"model": torch.ones(3)}, (0, 9), 9)
            return own.share_state(group)
        with pytest.raises(HandoverFailed, match="the state that was received is not that which was sent"):
            own.share_state(group)
        return {}

    assert run_ranks(2, work) == [{}, {}]


@pytest.mark.parametrize("wait", [
    lambda own, group: own.share_state(group),
    lambda own, group: own._broadcast(group, 0, torch.ones(1)),
    lambda _, group: check_same_on_all_ranks(group, "numbers", 1),
])  # fmt: skip
def test_a_process_that_waits_within_a_message_keeps_its_state_on_request(
    wait: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection has ended, and Gloo has not told the operation that had begun to receive from it."""
    endless = SimpleNamespace(get_future=torch.futures.Future)
    for collective in ("all_gather", "broadcast", "all_reduce"):
        monkeypatch.setattr(f"torch.distributed.{collective}", lambda *_, async_op=False: endless)
    own = Handover(AgentChannel())
    own.kept = KeptState({}, (0, 5), step=5)
    own.begin_attempt()
    (work / "abort").touch()
    with pytest.raises(RuntimeError) as raised:
        wait(own, ProcessGroup(0, 0, 2, 1, torch.device("cpu")))
    assert own.keep(raised.value)
    assert json.loads((work / "kept-0.json").read_text())["step"] == 5


def test_connections_that_a_process_opens_after_the_request_to_abort_end_too(work: Path) -> None:
    """The request comes before it has any: it has only begun to join."""
    own = Handover(AgentChannel())
    (work / "abort").touch()
    own.begin_attempt()
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait_for(lambda: own.was_aborted)
        with socket.create_connection(server.getsockname(), timeout=20) as client:
            assert client.recv(1) == b""
    own._leave()


def test_the_head_whose_new_process_is_lost_before_it_joins_goes_on_with_another() -> None:
    """The head waits in the store that it holds itself, until its agent asks it to abort."""
    ports = [free_port(), free_port()]

    def work(rank: int, store: Path) -> float:
        own = Handover(AgentChannel())
        for number, port in enumerate(ports[rank:], rank):
            folder = store.with_name(f"attempt-{number}-{rank}")
            folder.mkdir()
            os.environ.update(IMGNET_WORK=str(folder), IMGNET_IN_PLACE="1", IMGNET_TOKEN=f"of attempt {number}")
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            own.channel.begin_attempt()
            if rank == 0 and number == 0:
                own.kept = KeptState({"weights": torch.ones(3)}, (0, 5), step=5)
            own.begin_attempt()
            if number == 1:
                shared: Any = own.share_state(join_process_group())
                return float(shared["weights"].sum())
            threading.Timer(0.2, (folder / "abort").touch).start()
            with pytest.raises(RuntimeError) as raised:
                join_process_group(lambda: own.was_aborted)
            assert own.keep(raised.value)
        raise AssertionError

    assert run_ranks(2, work, seconds=30) == [3.0, 3.0]


def test_a_process_that_waits_for_a_lost_head_keeps_its_state_on_request(work: Path, tmp_path: Path) -> None:
    """The head of the new group dies before it listens. No other process can say so, but the agent does."""
    run = Run(tmp_path)
    run.keep_two_steps(work)
    run.handover.channel.report_state(TrainerState.JOINING)
    assert json.loads((work / "progress.json").read_text())["not_in_place"] == "", "else it would be killed"
    (work / "abort").touch()
    with socket.socket() as closed_port, pytest.raises(DistNetworkError) as raised:
        closed_port.bind(("127.0.0.1", 0))
        port = closed_port.getsockname()[1]
        wait_for_listener("127.0.0.1", port, timedelta(seconds=50), lambda: run.handover.was_aborted)
    assert run.handover.keep(raised.value)
    assert json.loads((work / "kept-0.json").read_text())["step"] == 2
