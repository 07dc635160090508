"""Bytes of a step by each hook, as the cards of small networks count them (network namespaces: root only)."""

import time
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it when it is first used, which would take each rank seconds
import torch.distributed as dist
from support import network_namespaces as namespaces
from torch import nn

from train.distributed import comm_hooks, ddp
from train.distributed.process_group import ProcessGroup
from train.forecast.model import bytes_between_machines
from train.recipe import Comm

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())

ROWS, COLUMNS, STEPS, ROUNDS = 500, 2000, 4, 3
NUMBERS = ROWS * COLUMNS
SAMENESS = 0.02  # of the formula: what TCP, IP and Ethernet add, acknowledgements among it
KINDS = (
    Comm(), Comm(hook="fp16"), Comm(hook="bf16"), Comm(hook="hierarchical"), Comm(hook="none", overlap=False, bucket=1),
    Comm(hook="powersgd"),
)  # fmt: skip


def settled() -> int:
    """What this machine's card has sent, once all have come here and nothing is on its way any more."""
    dist.barrier()
    last = -1
    while (now := namespaces.sent()) != last:
        last = now
        time.sleep(0.05)
    dist.barrier()  # nobody sends on while another still looks
    return now


def counted(group: ProcessGroup) -> list[float]:
    """What this machine's card sends in a step, by kind, the processes of a machine together: the least of some rounds,
    for what a busy computer is slow to acknowledge TCP sends again.
    """
    found = []
    for kind in KINDS:
        net = ddp.wrap_ddp(nn.Linear(COLUMNS, ROWS, bias=False), kind, exact_steps=2)
        inputs = torch.ones(1, COLUMNS)

        def steps(count: int, net: nn.Module = net, inputs: torch.Tensor = inputs) -> float:
            before = settled()
            for _ in range(count):
                net.zero_grad(set_to_none=False)
                net(inputs).sum().backward()
            return (settled() - before) / count

        steps(3)
        found.append(min(steps(STEPS) for _ in range(ROUNDS)))
    return found


@pytest.mark.rehearsal
@pytest.mark.parametrize(("machines", "procs"), [(2, 1), (2, 2), (3, 1)])
def test_a_machines_card_sends_what_the_formula_says(machines: int, procs: int) -> None:
    world = machines * procs
    with namespaces.switched(machines) as places:
        answers: list[Any] = namespaces.run_in(places, procs, counted)
    ring, by_machine = 2 * (world - 1) / world * NUMBERS, 2 * (machines - 1) / machines * NUMBERS
    slim = comm_hooks.POWERSGD_RANK * (ROWS + COLUMNS) / NUMBERS
    wanted = [4 * ring, 2 * ring, 2 * ring, 4 * by_machine, 4 * ring, 4 * ring * slim]
    for found in answers:
        assert found[:5] == pytest.approx(wanted[:5], rel=SAMENESS), [one / NUMBERS for one in found]
        assert found[5] == pytest.approx(wanted[5], rel=0.25)  # so few that every message counts
    for kind, bytes_a_step in zip(KINDS[:4], wanted, strict=False):
        assert (
            bytes_between_machines(kind, 4, machines, procs) * NUMBERS == bytes_a_step
        )  # what the forecast reckons with
    assert procs == 1 or answers[0][3] < 0.7 * answers[0][0]
