"""Compares the ways to sum gradients between machines in the same run: bytes sent, error, seconds per step.

    sudo .venv/bin/python benchmarks/training/comm.py            # three minutes on two quiet cores; writes its section
    sudo .venv/bin/python benchmarks/training/comm.py --quick    # once, with a smaller network; writes nothing

Two machines are two network namespaces on a switch (tests/support/network_namespaces.py), whose network interfaces send
at a limited rate. All configurations take turns in each round, and each process has a model of its own for each, so
whatever makes a round slow slows all configurations. The sums are made by Gloo on a CPU; these figures do not show how
NCCL performs with the same hooks on GPUs.
"""

import argparse
import copy
import os
import statistics
import subprocess
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
LINK_MEGABITS, ROUNDS, WARMUP_ROUNDS = 250.0, 5, 3  # DDP arranges its buckets in the warm-up rounds
MODEL_NAME, IMAGE_PIXELS, BATCH = "resnet18", 64, 4
CLUSTER_SHAPES = ((2, 1), (2, 2))  # (machines, processes on each)


@dataclass(frozen=True)
class CommMeasurement:
    """One configuration: bytes that a machine sends per step, error relative to plain, seconds of each step."""

    bytes_sent: float
    error: float
    seconds: tuple[float, ...]


def flat_gradients(net: torch.nn.Module) -> torch.Tensor:
    """Return all gradients of a network as one vector."""
    return torch.cat([param.grad.flatten() for param in net.parameters() if param.grad is not None])


class CommComparison:
    """One process of the comparison: a network per configuration; they take turns on the same images."""

    def __init__(self, group: ProcessGroup, model_name: str, rounds: int) -> None:
        self.rounds = rounds
        net = registry.build_model(Model(name=model_name), 1000, 0)
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.nets = {
            name: ddp.wrap_ddp(copy.deepcopy(net), config, exact_steps=2) for name, config in COMM_CONFIGS.items()
        }
        generator = torch.Generator().manual_seed(group.rank)
        images = torch.randn(BATCH, 3, IMAGE_PIXELS, IMAGE_PIXELS, generator=generator)
        self.images = images.to(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (BATCH,), generator=generator)

    def step(self, name: str) -> tuple[float, int]:
        """Run forward and backward until all processes have the sums. Return seconds and bytes sent."""
        net = self.nets[name]
        net.zero_grad(set_to_none=False)
        dist.barrier()
        bytes_before = namespaces.sent_bytes()
        start = time.perf_counter()
        torch.nn.functional.cross_entropy(net(self.images), self.labels).backward()  # type: ignore[no-untyped-call]
        dist.barrier()
        return time.perf_counter() - start, namespaces.sent_bytes() - bytes_before

    def measure(self) -> dict[str, CommMeasurement]:
        """Warm up, then measure each configuration once per round."""
        for _ in range(WARMUP_ROUNDS):
            for name in COMM_CONFIGS:
                self.step(name)
        plain = flat_gradients(self.nets["none"]).double()
        errors = {name: float((flat_gradients(net) - plain).norm() / plain.norm()) for name, net in self.nets.items()}
        steps_by_round = [{name: self.step(name) for name in COMM_CONFIGS} for _ in range(self.rounds)]
        return {
            name: CommMeasurement(
                bytes_sent=statistics.median(steps[name][1] for steps in steps_by_round),
                error=errors[name],
                seconds=tuple(steps[name][0] for steps in steps_by_round),
            )
            for name in COMM_CONFIGS
        }


def slow_down(holder: int) -> None:
    """Limit the rate at which the network card of a machine sends; `holder` is the process of its namespace."""
    limit = ["tbf", "rate", f"{LINK_MEGABITS:g}mbit", "burst", "64kb", "latency", "1s"]
    command = ["tc", "qdisc", "add", "dev", namespaces.INTERFACE, "root", *limit]
    subprocess.run(["nsenter", "-t", str(holder), "-n", *command], check=True)


def cluster_shape_rows(
    machines: int, procs: int, measurements: dict[str, CommMeasurement], parameter_count: int
) -> Iterator[str]:
    """Yield the table of one cluster shape."""
    processes = "1 process" if procs == 1 else f"{procs} processes"
    yield f"| {machines} machines with {processes} | MB sent | formula | error | seconds per step | plain / this |"
    yield "|---|---|---|---|---|---|"
    for name, measurement in measurements.items():
        formula_mb = bytes_between_machines(COMM_CONFIGS[name], machines, procs) * parameter_count / 1e6
        formula_cell = "" if name.startswith("powersgd") else f"{formula_mb:.1f}"
        speedups = ratios(measurements["none"].seconds, measurement.seconds)
        speedup_cell = median_with_range(speedups, 2) if name != "none" else "1"
        yield (
            f"| {name} | {measurement.bytes_sent / 1e6:.1f} | {formula_cell} | {measurement.error:.1e} | "
            f"{median_with_range(measurement.seconds, 2)} | {speedup_cell} |"
        )


def table(
    cluster_shapes: Sequence[tuple[int, int]], model_name: str, rounds: int, load_average: float
) -> Iterator[str]:
    """Measure, and yield the section of RESULTS.md."""
    model = registry.build_model(Model(name=model_name), 1000, 0)
    parameter_count = sum(param.numel() for param in model.parameters())
    yield "## Ways to sum gradients"
    yield ""
    yield (
        f"{describe_machine()}, gloo; the load was {load_average:.1f} before. {model_name}, "
        f"{parameter_count / 1e6:.1f} million parameters, {BATCH} images of {IMAGE_PIXELS} pixels per process, links "
        f"of {LINK_MEGABITS:g} Mbit/s. MB sent: by one machine's network interface per step; the formula is "
        "2(P-1)/P x S. Error: of the gradients of one step, relative to plain (none). Median (min-max), "
        f"n = {rounds}. Written by `benchmarks/training/comm.py`."
    )
    for machines, procs in cluster_shapes:
        with namespaces.switched_machines(machines) as holders:
            for holder in holders:
                slow_down(holder)

            def compare(group: ProcessGroup) -> dict[str, CommMeasurement]:
                return CommComparison(group, model_name, rounds).measure()

            measurements_by_rank: list[Any] = namespaces.run_on_machines(holders, procs, compare, seconds=900)
        yield ""
        yield from cluster_shape_rows(machines, procs, measurements_by_rank[0], parameter_count)


def main() -> int:
    """Measure and print; without --quick write the section of RESULTS.md. Return 1 if namespaces cannot be made."""
    parser = argparse.ArgumentParser(description="Compare the ways to sum gradients.")
    parser.add_argument("--quick", action="store_true", help="one round with a small network; writes nothing")
    options = parser.parse_args()
    if reason := namespaces.why_unavailable():
        print(reason, file=sys.stderr)
        return 1
    model_name, rounds = ("resnet10_tiny", 1) if options.quick else (MODEL_NAME, ROUNDS)
    lines = list(table(CLUSTER_SHAPES, model_name, rounds, os.getloadavg()[0]))
    print("\n".join(lines))
    if not options.quick:
        write_section("training/comm.py", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
