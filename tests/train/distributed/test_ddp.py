"""Sums of gradients by each hook, as groups of forked ranks: beside float64, in training, in time, at edges."""

import datetime
import os
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it when it is first used, which would take each rank seconds
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy

from train.distributed import comm_hooks, ddp, process_group
from train.distributed.exact_sum import exact_sum_hook
from train.distributed.process_group import ProcessGroup
from train.recipe import Comm
from train.recipe.components import COMM_HOOKS
from train.tools.errors import TrainingError

CPU = torch.device("cpu")
LATER = 10**6  # steps that PowerSGD is not waited for


def convnet(seed: int = 0) -> nn.Module:
    """Two convolutions that PowerSGD compresses, with their memory laid out as the trainer does."""
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(32, 10)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def batch(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(0, 10, (8,), generator=dice)
    return torch.randn(8, 3, 12, 12, generator=dice) + labels.view(-1, 1, 1, 1) / 5, labels


def back(net: nn.Module, rank: int, step: int = 0, times: float = 1.0) -> float:
    """Forward and back; returns the loss."""
    images, labels = batch(rank, step)
    loss = cross_entropy(net(images), labels)
    (times * loss).backward()
    return loss.item()


def gradients(net: nn.Module) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in net.parameters() if one.grad is not None]).double()


def mean_by_hand(group: ProcessGroup, steps: tuple[int, ...] = (0,)) -> torch.Tensor:
    """The mean over all ranks of the sums over some batches, added up in float64."""
    found = []
    for rank in range(group.world_size):
        net = convnet()
        for step in steps:
            back(net, rank, step)
        found.append(gradients(net))
    return torch.stack(found).mean(0)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def on_two_machines(group: ProcessGroup) -> None:
    """Let the first half of the ranks be one machine, the second the other."""
    os.environ["LOCAL_RANK"] = str(group.rank % (group.world_size // 2))


# --- what comes out -------------------------------------------------------------------------------------------

BOUNDS = {
    "none": (0, 1e-6),
    "hierarchical": (0, 1e-6),
    "fp16": (1e-5, 1e-3),
    "bf16": (1e-4, 8e-3),
    "powersgd": (0, 1e-6),
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("hook", COMM_HOOKS)
def test_the_gradients_are_the_mean_over_all_as_well_as_the_hooks_numbers_can_say(
    hook: str, world: int, in_group: Any
) -> None:
    """In one bucket at first, in several from the second step on; beside the backward pass and after it."""

    def work(group: ProcessGroup) -> Any:
        on_two_machines(group)
        errors = []
        for overlap in (True, False):
            net = ddp.wrap_ddp(convnet(), Comm(hook=hook, bucket=0.01, overlap=overlap), exact_steps=LATER)
            for _ in range(3):
                net.zero_grad(set_to_none=False)
                back(net, group.rank)
                errors.append(error(gradients(net), mean_by_hand(group)))
        return errors, gradients(net).sum().item()

    least, most = BOUNDS[hook]
    answers = in_group(world, work)
    assert all(least <= one <= most for errors, _ in answers for one in errors), answers
    assert len({total for _, total in answers}) == 1  # the same bits everywhere


def test_twenty_steps_of_training_stay_near_those_of_float32(in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        on_two_machines(group)
        ends = {}
        for hook in COMM_HOOKS:
            net = ddp.wrap_ddp(convnet(), Comm(hook=hook, bucket=0.01), exact_steps=2)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for step in range(20):
                optimizer.zero_grad(set_to_none=False)
                loss = back(net, group.rank, step)
                optimizer.step()
            ends[hook] = process_group.sum_over_processes(group, torch.tensor(loss)).item() / group.world_size
        return ends

    for ends in in_group(4, work):
        first = 2.3  # ln 10
        assert ends["none"] < 0.8 * first
        for hook, off in {"hierarchical": 1e-4, "fp16": 3e-3, "bf16": 3e-2, "powersgd": 0.15}.items():
            assert ends[hook] == pytest.approx(ends["none"], abs=off * first), hook


@pytest.mark.parametrize("hook", COMM_HOOKS)
def test_chunks_that_are_accumulated_are_summed_once(hook: str, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        on_two_machines(group)
        errors = []
        for overlap in (True, False):
            net = ddp.wrap_ddp(convnet(), Comm(hook=hook, bucket=0.01, overlap=overlap), exact_steps=LATER)
            for _ in range(2):
                net.zero_grad(set_to_none=False)
                with net.no_sync():
                    back(net, group.rank, 0)
                    back(net, group.rank, 1)
                back(net, group.rank, 2)
            errors.append(error(gradients(net), mean_by_hand(group, (0, 1, 2))))
        return errors

    assert max(max(one) for one in in_group(2, work)) < max(BOUNDS[hook][1], 2e-6)


# --- buckets and time -----------------------------------------------------------------------------------------


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sums and the gradients of the first and last layer, as they come."""
    notes: list[str] = []
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **words: Any) -> Any:
        notes.append(f"sum of {tensor.numel()}")
        return reduce(tensor, *args, **words)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return notes


@pytest.mark.parametrize(("bucket", "overlap", "wanted"), [
    (0.029, True, ["last", "sum of 7274", "first", "sum of 672"]),
    (0.029, False, ["last", "first", "sum of 7274", "sum of 672"]),
    (0.001, False, ["last", "first", "sum of 330", "sum of 6912", "sum of 680", "sum of 24"]),
    (25.0, True, ["last", "first", "sum of 7946"]),
])  # fmt: skip
def test_small_tensors_share_buckets_which_travel_beside_the_backward_pass_or_after_it(
    bucket: float, overlap: bool, wanted: list[str], in_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: ProcessGroup) -> Any:
        net = convnet()
        wrapped = ddp.wrap_ddp(net, Comm(hook="fp16", bucket=bucket, overlap=overlap))
        back(wrapped, group.rank)
        back(wrapped, group.rank)  # DDP has settled its buckets now
        notes = noted(monkeypatch)
        net[6].weight.register_hook(lambda _: notes.append("last"))  # type: ignore[operator, union-attr]
        net[0].weight.register_hook(lambda _: notes.append("first"))  # type: ignore[operator, union-attr]
        back(wrapped, group.rank)
        return notes

    assert in_group(2, work) == [wanted] * 2


def test_without_a_wish_the_buckets_are_ddps_own_with_a_small_first_one() -> None:
    assert ddp.bucket_cap_mib(Comm()) is None
    assert ddp.bucket_cap_mib(Comm(bucket=1.048576)) == 1.0 and ddp.bucket_cap_mib(Comm(bucket=50)) == pytest.approx(
        47.68, abs=0.01
    )


# --- float16's edges ------------------------------------------------------------------------------------------


class Share(nn.Module):
    """A net whose gradients are what it is fed."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def summed(group: ProcessGroup, rows: Any, hook: str = "fp16", scaled: bool = False, theirs: Any = None) -> list[float]:
    """The gradients that come out when each rank has a row of them; `theirs`: by a hook of torch."""
    process_group.compute_dtype = lambda _: torch.float16 if scaled else torch.float32
    net = ddp.wrap_ddp(Share(len(rows[0])), Comm(hook="none" if theirs else hook))
    if theirs:
        net.register_comm_hook(None, theirs)
    net(torch.tensor(rows[group.rank])).backward()
    found: list[float] = net.module.weight.grad.tolist()
    return found


def test_unscaled_gradients_carry_2018s_scale_so_that_small_ones_are_not_nothing(in_group: Any) -> None:
    row = [1e-9, 3e-8, 1e-5, 1.0, 40.0]
    found, _ = in_group(2, lambda group: summed(group, [row, row]))
    naive, _ = in_group(2, lambda group: summed(group, [row, row], theirs=default_hooks.fp16_compress_hook))
    assert found == pytest.approx(row, rel=0.06) and found[1:] == pytest.approx(row[1:], rel=2e-3)
    assert naive[0] == 0 and naive[1] != pytest.approx(row[1], rel=0.2)


@pytest.mark.parametrize("world", [2, 3])
def test_unscaled_gradients_beyond_float16_are_cut_and_not_infinite_and_nan_stays_nan(
    world: int, in_group: Any
) -> None:
    rows = [[57.0, 1e4, -1e8, float("inf"), float("nan")]] * world
    for *found, last in in_group(world, lambda group: summed(group, rows)):
        assert found == pytest.approx([57.0, 58.6, -58.6, 58.6], rel=2e-3) and last != last


def test_with_a_loss_scale_what_fits_as_a_mean_fits_on_the_way_and_the_rest_is_left_to_the_scaler(
    in_group: Any,
) -> None:
    rows = [[100_000.0, 60_000.0, 200_000.0, 1.0], [0.0, 60_000.0, 200_000.0, 1.0]]
    wanted = [50_000.0, 60_000.0, float("inf"), 1.0]
    for found in in_group(2, lambda group: summed(group, rows, scaled=True)):
        assert found == pytest.approx(wanted, rel=1e-3)
    for found in in_group(2, lambda group: summed(group, rows, theirs=default_hooks.fp16_compress_hook)):
        assert found[0] == float("inf") and found[1:] == pytest.approx(wanted[1:], rel=1e-3)


def test_bfloat16_has_neither_edge(in_group: Any) -> None:
    row = [1e-30, 1e30, -7.0]
    for found in in_group(2, lambda group: summed(group, [row, row], hook="bf16")):
        assert found == pytest.approx(row, rel=4e-3)


def steps_made(group: ProcessGroup, scaler: torch.amp.GradScaler, rows: list[list[float]]) -> int:
    """How many steps are not skipped when the gradients are these, step by step."""
    process_group.compute_dtype = lambda _: torch.float16
    net = ddp.wrap_ddp(Share(len(rows[0])), Comm(hook="fp16"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    made = 0
    for row in rows:
        optimizer.zero_grad(set_to_none=False)
        before = net.module.weight.detach().clone()
        scaler.scale(net(torch.tensor(row))).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        made += not torch.equal(before, net.module.weight)
    return made


def test_no_step_is_skipped_for_gradients_that_fit_and_torchs_own_scale_skips_the_first_ones(in_group: Any) -> None:
    rows = [[50.0, 1e-6]] * 3 + [[1e9, 1.0]] + [[20.0, 1e-6]] * 3
    ours = in_group(
        2, lambda group: steps_made(group, ddp.build_grad_scaler(Comm(hook="fp16"), CPU, torch.float16), rows)
    )
    assert ours == [6, 6]  # what does not fit is skipped on all
    theirs = in_group(2, lambda group: steps_made(group, torch.amp.GradScaler("cpu"), rows[:3]))
    assert theirs == [0, 0]


def test_the_loss_scale_is_capped_only_where_the_sums_are_float16_too() -> None:
    one = ddp.build_grad_scaler(Comm(hook="fp16"), CPU, torch.float16)
    one.scale(torch.zeros(1))
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    one.set_growth_factor(4.0)
    one.set_growth_interval(1)
    scales = []
    for gradient in (1.0, float("inf"), 1.0, 1.0):
        weight.grad = torch.tensor([gradient])
        one.step(optimizer)
        one.update()
        scales.append(one.get_scale())
    assert scales == [1024, 512, 1024, 1024]
    state = one.state_dict()
    again = ddp.build_grad_scaler(Comm(hook="fp16"), CPU, torch.float16)
    again.load_state_dict(state)
    assert again.get_scale() == 1024
    assert ddp.build_grad_scaler(Comm(hook="bf16"), CPU, torch.float16).get_scale() == 65536
    for hook in COMM_HOOKS:
        assert not ddp.build_grad_scaler(Comm(hook=hook), CPU, torch.bfloat16).is_enabled()


# --- PowerSGD -------------------------------------------------------------------------------------------------


def test_powersgd_sends_later_what_it_left_out(in_group: Any) -> None:
    """Of one and the same gradient in each step, the mean of what came comes ever nearer."""

    def work(group: ProcessGroup) -> Any:
        net = ddp.wrap_ddp(convnet(), Comm(hook="powersgd", bucket=0.01), exact_steps=3)
        wanted, total, off = mean_by_hand(group), torch.zeros(()), []
        for step in range(33):
            net.zero_grad(set_to_none=False)
            back(net, group.rank)
            if step < 3:
                off.append(error(gradients(net), wanted))
            else:
                total = total + gradients(net)
        return off, error(gradients(net), wanted), error(total / 30, wanted), gradients(net).sum().item()

    answers = in_group(4, work)
    for exactly, once, mean, _ in answers:
        assert max(exactly) < 1e-6  # `plain` steps
        assert 1e-3 < once < 0.5  # compressed
        assert mean < 0.2 * once
    assert len({one[-1] for one in answers}) == 1


def test_powersgd_goes_on_after_a_step_in_which_layers_had_no_gradients(in_group: Any) -> None:
    """A warm-up's black images, a block behind a zero gamma."""

    def work(group: ProcessGroup) -> Any:
        net = ddp.wrap_ddp(convnet(), Comm(hook="powersgd", bucket=0.01), exact_steps=0)
        for step in range(8):
            net.zero_grad(set_to_none=False)
            back(net, group.rank, times=float(step > 4))
        return error(gradients(net), mean_by_hand(group))

    assert max(in_group(2, work)) < 0.8


def test_powersgd_wrapped_anew_begins_with_empty_hands_and_after_the_steps_that_are_left(in_group: Any) -> None:
    """As a resumed attempt does: what was left out is lost, and the exact steps are not gone through again."""

    def work(group: ProcessGroup) -> Any:
        errors = []
        net: Any = convnet()
        for plain in (4, 4 - 6):  # of a run of 40 steps that is resumed at its sixth
            net = ddp.wrap_ddp(net, Comm(hook="powersgd", bucket=0.01), exact_steps=plain)
            for _ in range(6):
                net.zero_grad(set_to_none=False)
                back(net, group.rank)
                errors.append(error(gradients(net), mean_by_hand(group)) < 1e-6)
        return errors

    assert in_group(2, work) == [[*[True] * 4, *[False] * 2, *[True] * 2, *[False] * 4]] * 2


# --- machines -------------------------------------------------------------------------------------------------


def test_groups_by_machine_are_made_once_and_hurry_holds_for_them_too(in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        on_two_machines(group)
        net: Any = convnet()
        for _ in range(3):
            net = ddp.wrap_ddp(net, Comm(hook="hierarchical"))
        groups = list(dist.distributed_c10d._world.pg_map)
        waits = [one._get_backend(CPU).options._timeout for one in groups]
        process_group.tighten_timeouts(group, 4.0)
        mine = ddp.machine_groups(dist.group.WORLD, CPU)
        assert mine
        later = [one._get_backend(CPU).options._timeout for one in groups]
        return mine.machine_ranks, mine.leaders_group is not None, set(waits[1:]), set(later), len(groups)

    soon = datetime.timedelta(seconds=120)
    answers = in_group(4, work)
    assert [one[0] for one in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one[1] for one in answers] == [True, False, True, False]
    assert [one[4] for one in answers] == [3, 2, 3, 2]  # all, this machine's, the leaders'
    assert all(one[2] == {process_group.FIRST_STEP_TIMEOUT} and one[3] == {soon} for one in answers), answers


@pytest.mark.parametrize("local", [lambda rank: 0, lambda rank: rank])
def test_machines_of_one_process_and_one_machine_alone_need_no_groups(local: Any, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        os.environ["LOCAL_RANK"] = str(local(group.rank))
        ddp.wrap_ddp(convnet(), Comm(hook="hierarchical"))
        return ddp.machine_groups(dist.group.WORLD, CPU), len(dist.distributed_c10d._world.pg_map)

    assert in_group(3, work) == [(None, 1)] * 3


def test_machines_of_different_numbers_of_processes_give_the_mean_over_all(in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        os.environ["LOCAL_RANK"] = str([0, 1, 0][group.rank])
        net = ddp.wrap_ddp(convnet(), Comm(hook="hierarchical"))
        back(net, group.rank)
        return error(gradients(net), mean_by_hand(group))

    assert max(in_group(3, work)) < 1e-6


# --- wrapped anew, and refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", COMM_HOOKS)
def test_wrapped_anew_when_other_parameters_want_gradients(hook: str, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        on_two_machines(group)
        inner = convnet()
        net: Any = inner
        found = []
        for frozen in (True, False):
            inner[:6].requires_grad_(not frozen)  # type: ignore[index]
            net = ddp.wrap_ddp(net, Comm(hook=hook, bucket=0.01, overlap=frozen), exact_steps=LATER)
            assert all(one.grad is None for one in inner.parameters())  # else what is frozen now would go on moving
            for _ in range(2):
                net.zero_grad(set_to_none=False)
                back(net, group.rank)
            found.append(gradients(net))
        wanted = mean_by_hand(group)
        return len(found[0]), error(found[0], wanted[-330:]), error(found[1], wanted)

    for count, first, second in in_group(2, work):
        assert count == 330 and max(first, second) < max(BOUNDS[hook][1], 1e-6)


@pytest.mark.parametrize("hook", ["none", "fp16"])
def test_what_no_loss_depends_on_is_told_by_name_and_one_line(hook: str, in_group: Any) -> None:
    """DDP numbers the parameters that learn, in torch.compile's names: a frozen one before it moves no number."""

    def work(group: ProcessGroup) -> list[str]:
        said = []
        for compiled in (False, True):
            net = convnet()
            net.frozen = nn.Linear(2, 2).requires_grad_(False)
            net.side = nn.Linear(2, 2)
            net.forward = net[:7].forward  # type: ignore[index]
            wrapped = ddp.wrap_ddp(torch.compile(net, backend="eager") if compiled else net, Comm(hook=hook))  # type: ignore
            back(wrapped, group.rank)
            with pytest.raises(TrainingError) as caught:
                back(wrapped, group.rank, 1)
            said.append(str(caught.value))
        return said

    wanted = "model: its scores do not depend on side.weight and 1 more, and several processes sum all that learns; "
    for said in in_group(2, work):
        assert said == [wanted + "give what is not used requires_grad=False, or train with --procs 1"] * 2


@pytest.mark.parametrize("hook", [one for one in COMM_HOOKS if one != "none"])
def test_exactness_refuses_every_hook_but_its_own_in_one_line(hook: str) -> None:
    with pytest.raises(TrainingError, match=f"comm, hook: {hook} .*--exact.*comm='none'") as caught:
        ddp.select_hook(Comm(hook=hook), True, CPU, 0)
    assert "\n" not in str(caught.value)
    assert ddp.select_hook(Comm(), True, CPU, 0) == (None, exact_sum_hook)


def test_powersgd_is_refused_where_a_scaler_would_fill_its_memory_with_infinities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group, "compute_dtype", lambda _: torch.float16)
    with pytest.raises(TrainingError, match=r"powersgd needs GPUs with bfloat16.*'fp16'"):
        ddp.select_hook(Comm(hook="powersgd"), False, CPU, 0)
    state, hook = ddp.select_hook(Comm(hook="fp16"), False, CPU, 0)
    assert state.gradient_scale == 1.0 and hook is comm_hooks.half_precision_hook
