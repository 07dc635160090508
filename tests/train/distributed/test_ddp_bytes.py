"""Bytes per step of each hook, counted on the interfaces of network namespaces (needs root)."""

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

pytestmark = pytest.mark.skipif(bool(namespaces.why_unavailable()), reason=namespaces.why_unavailable())

ROWS, COLUMNS, STEPS, ROUNDS = 500, 2000, 4, 3
NUMBERS = ROWS * COLUMNS
TOLERANCE = 0.02  # relative: headers and acknowledgements of TCP, IP and Ethernet
COMMS = (
    Comm(),
    Comm(hook="fp16"),
    Comm(hook="bf16"),
    Comm(hook="hierarchical"),
    Comm(hook="none", overlap=False, bucket=1),
    Comm(hook="powersgd"),
)


def bytes_sent_at_rest() -> int:
    """Return the bytes that this machine has sent, once all ranks are here and nothing is in flight."""
    dist.barrier()
    last = -1
    while (current := namespaces.sent_bytes()) != last:
        last = current
        time.sleep(0.05)
    dist.barrier()  # no rank sends while another still counts
    return current


def measure_bytes(group: ProcessGroup) -> list[float]:
    """Return the bytes that this machine's processes together send per step, for each of `COMMS`.

    The lowest of some rounds: TCP sends again what a busy computer is slow to acknowledge.
    """
    bytes_by_comm = []
    for comm in COMMS:
        net = ddp.wrap_ddp(nn.Linear(COLUMNS, ROWS, bias=False), comm, exact_steps=2)
        inputs = torch.ones(1, COLUMNS)

        def steps(count: int, net: nn.Module = net, inputs: torch.Tensor = inputs) -> float:
            sent_before = bytes_sent_at_rest()
            for _ in range(count):
                net.zero_grad(set_to_none=False)
                net(inputs).sum().backward()
            return (bytes_sent_at_rest() - sent_before) / count

        steps(3)
        bytes_by_comm.append(min(steps(STEPS) for _ in range(ROUNDS)))
    return bytes_by_comm


@pytest.mark.rehearsal
@pytest.mark.parametrize(("machines", "procs"), [(2, 1), (2, 2), (3, 1)])
def test_hook_bytes_per_step_match_the_formula(machines: int, procs: int) -> None:
    world = machines * procs
    with namespaces.switched_machines(machines) as namespaces_by_machine:
        answers: list[Any] = namespaces.run_on_machines(namespaces_by_machine, procs, measure_bytes)
    ring, by_machine = 2 * (world - 1) / world * NUMBERS, 2 * (machines - 1) / machines * NUMBERS
    low_rank_share = comm_hooks.POWERSGD_RANK * (ROWS + COLUMNS) / NUMBERS
    expected = [4 * ring, 2 * ring, 2 * ring, 4 * by_machine, 4 * ring, 4 * ring * low_rank_share]
    for bytes_by_comm in answers:
        assert bytes_by_comm[:5] == pytest.approx(expected[:5], rel=TOLERANCE), [
            value / NUMBERS for value in bytes_by_comm
        ]
        assert bytes_by_comm[5] == pytest.approx(
            expected[5], rel=0.25
        )  # so few bytes that each message's overhead counts
    for comm, bytes_a_step in zip(COMMS[:4], expected, strict=False):
        assert (
            bytes_between_machines(comm, machines, procs) * NUMBERS == bytes_a_step
        )  # the forecast uses the same formula
    assert procs == 1 or answers[0][3] < 0.7 * answers[0][0]
