"""Each way to sum gradients beside the plain one, in the same run: bytes on the card, error, seconds of a step.

    sudo .venv/bin/python benchmarks/training/comm.py              # about three minutes on two quiet cores; writes its part
    sudo .venv/bin/python benchmarks/training/comm.py --quick      # once, with a smaller net; writes nothing

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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
import torch._dynamo
import torch.distributed as dist
from support import network_namespaces as namespaces

from benchmarks.measure import describe_machine, median_with_range, ratios, write_section
from train.distributed import ddp
from train.distributed.process_group import ProcessGroup
from train.forecast.model import bytes_between_machines
from train.models import registry
from train.recipe import Comm, Model

COMM_CONFIGS = {
    "none": Comm(),
    "none, after the backward pass": Comm(overlap=False),
    "none, buckets of 5 MB": Comm(bucket=5),
    "fp16": Comm(hook="fp16"),
    "bf16": Comm(hook="bf16"),
    "hierarchical": Comm(hook="hierarchical"),
    "powersgd, rank 4": Comm(hook="powersgd"),
}
LINK_MEGABITS, ROUNDS, WARMUP_ROUNDS = 250.0, 5, 3
MODEL_NAME, IMAGE_PIXELS, BATCH = "resnet18", 64, 4
CLUSTER_SHAPES = ((2, 1), (2, 2))  # machines, processes on each


@dataclass(frozen=True)
class CommMeasurement:
    """What was measured of one way: bytes of a machine's card in a step, error beside float32, seconds of each step."""

    bytes_sent: float
    error: float
    seconds: tuple[float, ...]


def flat_gradients(net: torch.nn.Module) -> torch.Tensor:
    """All of them in one piece."""
    return torch.cat([one.grad.flatten() for one in net.parameters() if one.grad is not None])


class CommComparison:
    """One process: a net for each way, which take turns on the same images."""

    def __init__(self, group: ProcessGroup, model_name: str, rounds: int) -> None:
        self.rounds = rounds
        first = registry.build_model(Model(name=model_name), 1000, 0)
        first.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.nets = {name: ddp.wrap_ddp(copy.deepcopy(first), way, exact_steps=2) for name, way in COMM_CONFIGS.items()}
        dice = torch.Generator().manual_seed(group.rank)
        self.images = torch.randn(BATCH, 3, IMAGE_PIXELS, IMAGE_PIXELS, generator=dice).to(
            memory_format=torch.channels_last
        )
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

    def measure(self) -> dict[str, CommMeasurement]:
        """Go round; what settles buckets comes first."""
        for _ in range(WARMUP_ROUNDS):
            for name in COMM_CONFIGS:
                self.step(name)
        plain = flat_gradients(self.nets["none"]).double()
        errors = {name: float((flat_gradients(net) - plain).norm() / plain.norm()) for name, net in self.nets.items()}
        found = [[self.step(name) for name in COMM_CONFIGS] for _ in range(self.rounds)]
        seconds = {name: tuple(row[number][0] for row in found) for number, name in enumerate(COMM_CONFIGS)}
        sent = {name: statistics.median(row[number][1] for row in found) for number, name in enumerate(COMM_CONFIGS)}
        return {name: CommMeasurement(sent[name], errors[name], seconds[name]) for name in COMM_CONFIGS}


def cluster_shape_rows(
    machines: int, procs: int, measurements: dict[str, CommMeasurement], parameter_count: int
) -> Iterator[str]:
    """Yield the table of one group."""
    yield f"| {machines} machines of {procs} | MB sent | formula | error | seconds a step | plain's / its |"
    yield "|---|---|---|---|---|---|"
    for name, way in measurements.items():
        formula = bytes_between_machines(COMM_CONFIGS[name], 4, machines, procs) * parameter_count / 1e6
        told = "" if name.startswith("powersgd") else f"{formula:.1f}"
        faster = median_with_range(ratios(measurements["none"].seconds, way.seconds), 2) if name != "none" else "1"
        yield (
            f"| {name} | {way.bytes_sent / 1e6:.1f} | {told} | {way.error:.1e} | {median_with_range(way.seconds, 2)} | {faster} |"
        )


def table(
    cluster_shapes: Sequence[tuple[int, int]], model_name: str, rounds: int, load_average: float
) -> Iterator[str]:
    """Measure, and yield the part of RESULTS.md."""
    numbers = sum(one.numel() for one in registry.build_model(Model(name=model_name), 1000, 0).parameters())
    yield "## Ways to sum gradients"
    yield ""
    yield (
        f"{describe_machine()}, gloo; the load was {load_average:.1f} before. {model_name}, {numbers / 1e6:.1f} million parameters, {BATCH} "
        f"images of {IMAGE_PIXELS} pixels a process, cards of {LINK_MEGABITS:g} Mbit/s. MB sent: what one machine's card counts in a "
        "step; the formula is 2(P-1)/P x S. Error: of one step's gradients, beside plain's. Median (least-most), "
        f"n = {rounds}. Written by `benchmarks/training/comm.py`."
    )
    for machines, procs in cluster_shapes:
        with namespaces.switched(machines) as places:
            for place in places:
                namespaces.slow_down(place, LINK_MEGABITS)

            def work(group: ProcessGroup) -> dict[str, CommMeasurement]:
                return CommComparison(group, model_name, rounds).measure()

            answers: list[Any] = namespaces.run_in(places, procs, work, seconds=900)
        yield ""
        yield from cluster_shape_rows(machines, procs, answers[0], numbers)


def main() -> int:
    """Measure and print; write the part of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Ways to sum gradients, side by side.")
    parser.add_argument("--quick", action="store_true", help="one round of a small net; writes nothing")
    asked = parser.parse_args()
    if namespaces.missing():
        print(namespaces.missing(), file=sys.stderr)
        return 1
    net, rounds = ("resnet10_tiny", 1) if asked.quick else (MODEL_NAME, ROUNDS)
    lines = list(table(CLUSTER_SHAPES, net, rounds, os.getloadavg()[0]))
    print("\n".join(lines))
    if not asked.quick:
        write_section("comm.py", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
