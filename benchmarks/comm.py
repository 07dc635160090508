"""Each way to sum gradients beside the plain one, in the same run: bytes on the card, error, seconds of a step.

    sudo .venv/bin/python benchmarks/comm.py              # about three minutes on two quiet cores; writes its part
    sudo .venv/bin/python benchmarks/comm.py --quick      # once, with a smaller net; writes nothing

Two machines are two network namespaces on a switch (tests/support/network_namespaces.py), whose cards send so many Mbit/s and no more.
All ways take turns in each round, every process with a net of its own for each, so what makes a round slow slows all.
Gloo sums, on a CPU: what NCCL makes of the same hooks on GPUs is not told by this.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent / "tests")]

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measure import machine, ratios, spread, write_part  # noqa: E402
from support import network_namespaces as namespaces  # noqa: E402

from train.distributed import ddp
from train.distributed.process_group import Group  # noqa: E402
from train.forecast.model import between_machines  # noqa: E402
from train.models import registry
from train.recipe import Comm, Model  # noqa: E402

WAYS = {
    "none": Comm(),
    "none, after the backward pass": Comm(overlap=False),
    "none, buckets of 5 MB": Comm(bucket=5),
    "fp16": Comm(hook="fp16"),
    "bf16": Comm(hook="bf16"),
    "hierarchical": Comm(hook="hierarchical"),
    "powersgd, rank 4": Comm(hook="powersgd"),
}
MEGABIT, ROUNDS, SETTLE = 250.0, 5, 3
NET, SIZE, BATCH = "resnet18", 64, 4
GROUPS = ((2, 1), (2, 2))  # machines, processes on each


@dataclass(frozen=True)
class Way:
    """What was measured of one way: bytes of a machine's card in a step, error beside float32, seconds of each step."""

    sent: float
    error: float
    seconds: tuple[float, ...]


def gradients(net: torch.nn.Module) -> torch.Tensor:
    """All of them in one piece."""
    return torch.cat([one.grad.flatten() for one in net.parameters() if one.grad is not None])


class Turns:
    """One process: a net for each way, which take turns on the same images."""

    def __init__(self, group: Group, net: str, rounds: int) -> None:
        self.rounds = rounds
        first = registry.build(Model(name=net), 1000, 0)
        first.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.nets = {name: ddp.wrap(copy.deepcopy(first), way, plain=2) for name, way in WAYS.items()}
        dice = torch.Generator().manual_seed(group.rank)
        self.images = torch.randn(BATCH, 3, SIZE, SIZE, generator=dice).to(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (BATCH,), generator=dice)

    def step(self, name: str) -> tuple[float, int]:
        """Seconds and bytes of one pass through the net and back, until all have the sums."""
        net = self.nets[name]
        net.zero_grad(set_to_none=False)
        dist.barrier()
        before, start = namespaces.sent(), time.perf_counter()
        torch.nn.functional.cross_entropy(net(self.images), self.labels).backward()
        dist.barrier()
        return time.perf_counter() - start, namespaces.sent() - before

    def measure(self) -> dict[str, Way]:
        """Go round; what settles buckets comes first."""
        for _ in range(SETTLE):
            for name in WAYS:
                self.step(name)
        plain = gradients(self.nets["none"]).double()
        errors = {name: float((gradients(net) - plain).norm() / plain.norm()) for name, net in self.nets.items()}
        found = [[self.step(name) for name in WAYS] for _ in range(self.rounds)]
        seconds = {name: tuple(row[number][0] for row in found) for number, name in enumerate(WAYS)}
        sent = {name: statistics.median(row[number][1] for row in found) for number, name in enumerate(WAYS)}
        return {name: Way(sent[name], errors[name], seconds[name]) for name in WAYS}


def rows(machines: int, procs: int, found: dict[str, Way], numbers: int) -> Iterator[str]:
    """Yield the table of one group."""
    yield f"| {machines} machines of {procs} | MB sent | formula | error | seconds a step | plain's / its |"
    yield "|---|---|---|---|---|---|"
    for name, way in found.items():
        formula = between_machines(WAYS[name], 4, machines, procs) * numbers / 1e6
        told = "" if name.startswith("powersgd") else f"{formula:.1f}"
        faster = spread(ratios(found["none"].seconds, way.seconds), 2) if name != "none" else "1"
        yield (f"| {name} | {way.sent / 1e6:.1f} | {told} | {way.error:.1e} | {spread(way.seconds, 2)} | {faster} |")


def table(groups: Sequence[tuple[int, int]], net: str, rounds: int, load: float) -> Iterator[str]:
    """Measure, and yield the part of RESULTS.md."""
    numbers = sum(one.numel() for one in registry.build(Model(name=net), 1000, 0).parameters())
    yield "## Ways to sum gradients"
    yield ""
    yield (
        f"{machine()}, gloo; the load was {load:.1f} before. {net}, {numbers / 1e6:.1f} million parameters, {BATCH} "
        f"images of {SIZE} pixels a process, cards of {MEGABIT:g} Mbit/s. MB sent: what one machine's card counts in a "
        "step; the formula is 2(P-1)/P x S. Error: of one step's gradients, beside plain's. Median (least-most), "
        f"n = {rounds}. Written by `benchmarks/comm.py`."
    )
    for machines, procs in groups:
        with namespaces.switched(machines) as places:
            for place in places:
                namespaces.slow_down(place, MEGABIT)

            def work(group: Group) -> dict[str, Way]:
                return Turns(group, net, rounds).measure()

            answers: list[Any] = namespaces.run_in(places, procs, work, seconds=900)
        yield ""
        yield from rows(machines, procs, answers[0], numbers)


def main() -> int:
    """Measure and print; write the part of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Ways to sum gradients, side by side.")
    parser.add_argument("--quick", action="store_true", help="one round of a small net; writes nothing")
    asked = parser.parse_args()
    if namespaces.missing():
        print(namespaces.missing(), file=sys.stderr)
        return 1
    net, rounds = ("resnet10_tiny", 1) if asked.quick else (NET, ROUNDS)
    lines = list(table(GROUPS, net, rounds, os.getloadavg()[0]))
    print("\n".join(lines))
    if not asked.quick:
        write_part("comm.py", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
