"""DDP and its communication hooks in groups of forked ranks: precision, training, order of sums, float16's limits."""

import datetime
import os
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it at first use, which would take each forked rank seconds
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from train.distributed import ddp, process_group
from train.distributed.process_group import ProcessGroup
from train.recipe import Comm
from train.recipe.components import COMM_HOOKS
from train.tools.errors import TrainingError

CPU = torch.device("cpu")
NEVER_COMPRESS = 10**6  # exact steps: more than any test takes


def convnet(seed: int = 0) -> nn.Module:
    """Return a network of two convolutions that PowerSGD compresses, in channels-last memory as the trainer's."""
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(32, 10)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def batch(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(0, 10, (8,), generator=generator)
    return torch.randn(8, 3, 12, 12, generator=generator) + labels.view(-1, 1, 1, 1) / 5, labels


def forward_backward(net: nn.Module, rank: int, step: int = 0, factor: float = 1.0) -> float:
    """Run forward and backward on a rank's batch; return the loss."""
    images, labels = batch(rank, step)
    loss = cross_entropy(net(images), labels)
    (factor * loss).backward()
    return loss.item()


def gradients(net: nn.Module) -> torch.Tensor:
    return torch.cat(
        [parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None]
    ).double()


def reference_mean(group: ProcessGroup, steps: tuple[int, ...] = (0,)) -> torch.Tensor:
    """Return the mean over all ranks of the gradients' sums over some steps, in float64."""
    gradients_by_rank = []
    for rank in range(group.world_size):
        net = convnet()
        for step in steps:
            forward_backward(net, rank, step)
        gradients_by_rank.append(gradients(net))
    return torch.stack(gradients_by_rank).mean(0)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def pretend_two_machines(group: ProcessGroup) -> None:
    os.environ["LOCAL_RANK"] = str(group.rank % (group.world_size // 2))


# --- precision ------------------------------------------------------------------------------------------------

ERROR_BOUNDS = dict.fromkeys(("auto", "none", "hierarchical", "powersgd"), (0.0, 1e-6))
ERROR_BOUNDS |= {"fp16": (1e-5, 1e-3), "bf16": (1e-4, 8e-3)}


@pytest.mark.parametrize(
    ("hook", "local_ranks"), [*((hook, (0, 1, 0, 1)) for hook in COMM_HOOKS), ("hierarchical", (0, 1, 0))]
)
def test_hook_gradients_are_the_mean_within_the_hooks_precision(
    hook: str, local_ranks: tuple[int, ...], in_group: Any
) -> None:
    """The first step uses one bucket, later ones several; with and without overlap; chunks are summed once."""
    world = len(local_ranks)

    def work(group: ProcessGroup) -> Any:
        os.environ["LOCAL_RANK"] = str(local_ranks[group.rank])
        errors = []
        for overlap in (True, False):
            net = ddp.wrap_ddp(convnet(), Comm(hook=hook, bucket=0.01, overlap=overlap), exact_steps=NEVER_COMPRESS)
            for _ in range(3):
                net.zero_grad(set_to_none=False)
                with net.no_sync():
                    forward_backward(net, group.rank, 0)
                forward_backward(net, group.rank, 1)
                errors.append(relative_error(gradients(net), reference_mean(group, (0, 1))))
        return errors, gradients(net).sum().item()

    lowest, highest = ERROR_BOUNDS[hook]
    answers = in_group(world, work)
    assert all(lowest <= value <= highest for errors, _ in answers for value in errors), answers
    assert len({total for _, total in answers}) == 1  # the same bits on all ranks


# --- buckets and order ----------------------------------------------------------------------------------------


def record_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record all-reduces in a list, to which the test adds the gradients of the first and last layer."""
    events: list[str] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        events.append(f"sum of {tensor.numel()}")
        return original(tensor, *args, **arguments)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return events


@pytest.mark.parametrize(("bucket", "overlap", "expected"), [
    (0.029, True, ["last", "sum of 7274", "first", "sum of 672"]),
    (0.029, False, ["last", "first", "sum of 7274", "sum of 672"]),
    (0.001, False, ["last", "first", "sum of 330", "sum of 6912", "sum of 680", "sum of 24"]),
    (25.0, True, ["last", "first", "sum of 7946"]),
])  # fmt: skip
def test_buckets_are_summed_during_or_after_the_backward_pass(
    bucket: float, overlap: bool, expected: list[str], in_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: ProcessGroup) -> Any:
        net = convnet()
        wrapped = ddp.wrap_ddp(net, Comm(hook="fp16", bucket=bucket, overlap=overlap))
        forward_backward(wrapped, group.rank)
        forward_backward(wrapped, group.rank)  # DDP has fixed its buckets now
        events = record_events(monkeypatch)
        net.get_parameter("6.weight").register_hook(lambda _: events.append("last"))
        net.get_parameter("0.weight").register_hook(lambda _: events.append("first"))
        forward_backward(wrapped, group.rank)
        return events

    assert in_group(2, work) == [expected] * 2


# --- float16's limits -----------------------------------------------------------------------------------------


class GradientFromInput(nn.Module):
    """A network whose gradient is its input."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("hook", "dtype", "rows", "expected"), [
    pytest.param("fp16", torch.float32, [[1e-9, 1.0, 40.0]] * 2, [pytest.approx(1e-9, rel=0.06), 1.0, 40.0],
                 id="fp16, small"),
    pytest.param("fp16", torch.float32, [[57.0, 1e4, -1e8, INF, NAN]] * 3, [57.0, 58.6, -58.6, 58.6, NAN],
                 id="fp16, large are clipped"),
    pytest.param("fp16", torch.float16, [[1e5, 6e4, 2e5, 1.0], [0.0, 6e4, 2e5, 1.0]], [5e4, 6e4, INF, 1.0],
                 id="fp16 with a loss scale overflows only if the mean does"),
    pytest.param("bf16", torch.float32, [[1e-30, 1e30, -7.0]] * 2,
                 [pytest.approx(value, rel=4e-3) for value in (1e-30, 1e30, -7.0)], id="bf16"),
])  # fmt: skip
def test_half_precision_hook_sums_small_and_large_gradients(
    hook: str, dtype: torch.dtype, rows: list[list[float]], expected: list[Any], in_group: Any
) -> None:
    """Each rank has one row of gradients."""

    def work(group: ProcessGroup) -> Any:
        net = ddp.wrap_ddp(GradientFromInput(len(rows[0])), Comm(hook=hook), dtype)
        net(torch.tensor(rows[group.rank])).backward()
        return net.module.weight.grad.tolist()

    within = [pytest.approx(value, rel=2e-3, nan_ok=True) if isinstance(value, float) else value for value in expected]
    assert in_group(len(rows), work) == [within] * len(rows)


def test_build_grad_scaler_caps_only_with_fp16_hook() -> None:
    scaler = ddp.build_grad_scaler(Comm(hook="fp16"), CPU, torch.float16)
    scaler.scale(torch.zeros(1))
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.set_growth_factor(4.0)
    scaler.set_growth_interval(1)
    scales = []
    for gradient in (1.0, float("inf"), 1.0, 1.0):
        weight.grad = torch.tensor([gradient])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024, 512, 1024, 1024]
    assert ddp.build_grad_scaler(Comm(hook="bf16"), CPU, torch.float16).get_scale() == 65536
    for hook in COMM_HOOKS:
        assert not ddp.build_grad_scaler(Comm(hook=hook), CPU, torch.bfloat16).is_enabled()


# --- PowerSGD -------------------------------------------------------------------------------------------------


def test_powersgd_sends_the_remainder_in_later_steps(in_group: Any) -> None:
    """With the same gradient in each step, the mean over the steps approaches it."""

    def work(group: ProcessGroup) -> Any:
        net = ddp.wrap_ddp(convnet(), Comm(hook="powersgd", bucket=0.01), exact_steps=3)
        expected, total, exact_errors = reference_mean(group), torch.zeros(()), []
        for step in range(33):
            net.zero_grad(set_to_none=False)
            forward_backward(net, group.rank)
            if step < 3:
                exact_errors.append(relative_error(gradients(net), expected))
            else:
                total = total + gradients(net)
        return (
            exact_errors,
            relative_error(gradients(net), expected),
            relative_error(total / 30, expected),
            gradients(net).sum().item(),
        )

    answers = in_group(4, work)
    for exact_step_errors, single_error, mean_error, _ in answers:
        assert max(exact_step_errors) < 1e-6  # `exact_steps`
        assert 1e-3 < single_error < 0.5  # compressed
        assert mean_error < 0.2 * single_error
    assert len({answer[-1] for answer in answers}) == 1


def test_powersgd_wrapped_again_starts_with_empty_memory(in_group: Any) -> None:
    """As in a resumed attempt: the remainder is lost, and the exact steps are not repeated."""

    def work(group: ProcessGroup) -> Any:
        is_exact = []
        net: Any = convnet()
        for exact_steps in (4, 4 - 6):  # a run of 40 steps, resumed at its sixth
            net = ddp.wrap_ddp(net, Comm(hook="powersgd", bucket=0.01), exact_steps=exact_steps)
            for _ in range(6):
                net.zero_grad(set_to_none=False)
                forward_backward(net, group.rank)
                is_exact.append(relative_error(gradients(net), reference_mean(group)) < 1e-6)
        return is_exact

    assert in_group(2, work) == [[*[True] * 4, *[False] * 2, *[True] * 2, *[False] * 4]] * 2


# --- machines -------------------------------------------------------------------------------------------------


def test_machine_groups_are_created_once_and_get_tight_timeouts(in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        pretend_two_machines(group)
        net: Any = convnet()
        for _ in range(3):
            net = ddp.wrap_ddp(net, Comm(hook="hierarchical"))
        # torch 2.15 deprecates this function: a call of it fails there, and here.
        dist.distributed_c10d._set_pg_timeout = None  # type: ignore[assignment]
        groups = list(dist.distributed_c10d._world.pg_map)
        timeouts = [item._get_backend(CPU).options._timeout for item in groups]
        process_group.tighten_timeouts(group, 4.0)
        own_groups = ddp.machine_groups(dist.group.WORLD, CPU)
        assert own_groups
        tightened = [item._get_backend(CPU).options._timeout for item in groups]
        return own_groups.machine_ranks, len(groups), set(timeouts[1:]), set(tightened)

    timeouts = {process_group.FIRST_STEP_TIMEOUT}, {datetime.timedelta(seconds=120)}
    assert in_group(4, work) == [  # a leader has the world, its machine's group and the leaders'; the others two
        ([0, 1], 3, *timeouts), ([0, 1], 2, *timeouts), ([2, 3], 3, *timeouts), ([2, 3], 2, *timeouts),
    ]  # fmt: skip


# --- wrapped again, and refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["none", "powersgd", "hierarchical"])
def test_wrap_ddp_again_when_other_parameters_need_gradients(hook: str, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        pretend_two_machines(group)
        inner = convnet()
        net: Any = inner
        results = []
        for frozen in (True, False):
            inner[:6].requires_grad_(not frozen)  # type: ignore[index]
            net = ddp.wrap_ddp(net, Comm(hook=hook, bucket=0.01, overlap=frozen), exact_steps=NEVER_COMPRESS)
            assert all(
                parameter.grad is None for parameter in inner.parameters()
            )  # otherwise frozen parameters would keep moving
            for _ in range(2):
                net.zero_grad(set_to_none=False)
                forward_backward(net, group.rank)
            results.append(gradients(net))
        expected = reference_mean(group)
        return len(results[0]), relative_error(results[0], expected[-330:]), relative_error(results[1], expected)

    for count, first, second in in_group(2, work):
        assert count == 330 and max(first, second) < max(ERROR_BOUNDS[hook][1], 1e-6)


@pytest.mark.parametrize("hook", ["none", "fp16"])
def test_ddp_names_an_unused_parameter_in_one_line(hook: str, in_group: Any) -> None:
    """DDP counts trainable parameters only, and torch.compile prefixes their names."""

    def work(group: ProcessGroup) -> list[str]:
        messages = []
        for compiled in (False, True):
            net = convnet()
            net.frozen = nn.Linear(2, 2).requires_grad_(False)
            net.side = nn.Linear(2, 2)
            net.forward = net[:7].forward  # type: ignore[index]
            wrapped = ddp.wrap_ddp(torch.compile(net, backend="eager") if compiled else net, Comm(hook=hook))  # type: ignore
            forward_backward(wrapped, group.rank)
            with pytest.raises(TrainingError) as caught:
                forward_backward(wrapped, group.rank, 1)
            messages.append(str(caught.value))
        return messages

    expected = (
        "model: its scores do not depend on side.weight and 1 more, and with several processes every trainable "
        "parameter needs a gradient; set requires_grad=False on unused parameters, or train with --procs 1"
    )
    for messages in in_group(2, work):
        assert messages == [expected] * 2


@pytest.mark.parametrize(("hook", "exact", "dtype", "message"), [
    *((hook, True, torch.float32, f"--exact does not work with {hook}, which rounds; set comm='none'")
      for hook in COMM_HOOKS if hook not in ("auto", "none")),
    ("powersgd", False, torch.float16, "powersgd does not work with float16; .*'fp16'"),
])  # fmt: skip
def test_unusable_hook_is_refused_in_one_line(hook: str, exact: bool, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(TrainingError, match=f"comm, hook: {message}"):
        ddp.select_hook(Comm(hook=hook), exact, CPU, dtype, 0)
