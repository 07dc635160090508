"""The sides that benchmarks/training/gpu.py compares: our training step, a bare step, a plain loop; and timing."""

import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from train.data.loading.loader import Batch
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.work import BatchRequest
from train.distributed import process_group
from train.distributed.cuda_graphs import CudaGraphs
from train.distributed.process_group import ProcessGroup
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_run_options
from train.engine.trainer import MAX_STEPS_BETWEEN_SYNCS, Trainer
from train.models import registry
from train.optim import factory
from train.recipe.components import Data, Model
from train.recipe.schedule import Schedule
from train.recipe.schema import Phase, Recipe

CLASSES = 1000
WARMUP_STEPS = 3
Step = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """What a step is measured with: network, images, precision, device."""

    model: str
    size: int
    batch: int
    precision: str
    device: torch.device
    use_compile: bool = False
    kernel_search: bool = False
    graphs: bool = False


def our_trainer(setting: Setting, output_folder: Path) -> Trainer:
    """Return a trainer that has met the shape of its batches, without data."""
    recipe = Recipe(
        name="gpu",
        data=Data(name="none", root="none", train=10**6, val=1),
        model=Model(name=setting.model, compile=setting.use_compile),
        gpus=1,
        precision=setting.precision,
        kernel_search=setting.kernel_search,
        graphs="on" if setting.graphs else "off",
        phases=[Phase(epochs=(0, 1), size=setting.size, batch=setting.batch, lr=0.01)],
    )
    sampler = DistributedBatchSampler(Schedule(recipe, 10**6, 1), {}, 0, 0, 1)
    options = parse_run_options(["none", "--out", str(output_folder)])
    classes = [str(number) for number in range(CLASSES)]
    group = ProcessGroup(0, 0, 1, 1, setting.device)
    trainer = Trainer(options, recipe, group, sampler, classes, AgentChannel())
    shape = setting.batch, setting.size, setting.size
    trainer.preprocessor.warmed_shapes = {shape}
    trainer.freezer.set_train_mode()
    trainer.capture_graphs([shape], trainer.freezer.set_train_mode, trainer.group)
    graphs = getattr(trainer.capture_graphs, "__self__", None)
    if isinstance(graphs, CudaGraphs) and graphs.problem:  # else steps without graphs would be measured
        kind = torch.cuda.OutOfMemoryError if "out of memory" in graphs.problem else RuntimeError
        raise kind(f"graphs: {graphs.problem}")
    return trainer


def our_step(setting: Setting, output_folder: Path, batches: Iterator[Batch] | None = None) -> Step:
    """Return a step of the trainer. Without `batches`, its images lie on the device, as the loader delivers them."""
    trainer = our_trainer(setting, output_folder)
    if batches is None:
        size, batch = setting.size, setting.batch
        images = torch.randint(256, (batch, size, size, 3), dtype=torch.uint8).to(setting.device)
        labels = np.random.default_rng(0).integers(CLASSES, size=batch)
        batches = itertools.repeat(Batch(images, labels, BatchRequest("train", None, np.arange(batch), (size, size))))

    def step() -> None:
        if trainer.meter.steps == MAX_STEPS_BETWEEN_SYNCS:  # a run reads them about once a second
            trainer.time_breakdown.flush()
            trainer.meter.reset()
        trainer.run_step(trainer.schedule.epochs[0], 0, batches)

    return step


def bare_step(setting: Setting, net: nn.Module | None = None, wrap: Callable[[nn.Module], Any] | None = None) -> Step:
    """Return a step of forward, loss, backward and update, and nothing else. `wrap` replaces the network's forward."""
    net = net or registry.build_model(Model(name=setting.model), CLASSES, 0)
    net.to(setting.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    fused = True if factory.can_fuse(net) else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=fused)
    shape = (setting.batch, 3, setting.size, setting.size)
    images = torch.randn(shape, device=setting.device).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (setting.batch,), device=setting.device)
    dtype = process_group.compute_dtype(setting.device, setting.precision)
    scaler = torch.amp.GradScaler(setting.device.type, enabled=dtype == torch.float16)
    run = wrap(net) if wrap else torch.compile(net, dynamic=False) if setting.use_compile else net

    def step() -> None:
        with torch.autocast(setting.device.type, dtype, enabled=dtype != torch.float32):
            loss = cross_entropy(run(images).float(), labels)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def bare_graph_step(setting: Setting) -> Step:
    """Return the bare step as one CUDA graph, its update included; on a CPU the bare step."""
    step = bare_step(setting)
    if setting.device.type != "cuda":
        return step
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_STEPS):
            step()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def plain_loop_name() -> str:
    """Return which plain loop is at hand."""
    return "timm" if importlib.util.find_spec("timm") else "torchvision's style"


def plain_loop_step(setting: Setting) -> Step:
    """Return the bare step with timm's network, or without timm a step of a loop in torchvision's style.

    That loop is NCHW, and reads accuracy and loss after every step. Raises what timm raises, such as for a network that
    it does not know.
    """
    if importlib.util.find_spec("timm"):
        import timm

        return bare_step(setting, timm.create_model(setting.model))
    net = registry.build_model(Model(name=setting.model), CLASSES, 0).to(setting.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    images = torch.randn(setting.batch, 3, setting.size, setting.size, device=setting.device)
    labels = torch.randint(CLASSES, (setting.batch,), device=setting.device)
    dtype = process_group.compute_dtype(setting.device, setting.precision)
    metrics: dict[str, float] = {}

    def step() -> None:
        with torch.autocast(setting.device.type, dtype, enabled=dtype != torch.float32):
            scores = net(images)
            loss = criterion(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits = scores.topk(min(5, scores.shape[1]), 1).indices.t().eq(labels[None])
        metrics["top1"], metrics["top5"] = (hits[:k].flatten().sum().float().item() for k in (1, 5))
        metrics["loss"] = loss.item()

    return step


# --- timing -----------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def images_per_second(
    steps: dict[str, Step], setting: Setting, timed_steps: int, rounds: int
) -> dict[str, list[float]]:
    """Return images per second of each side and round; the sides take turns."""
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(WARMUP_STEPS):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            synchronize(setting.device)
            start = time.perf_counter()
            for _ in range(timed_steps):
                step()
            synchronize(setting.device)
            speeds[name].append(setting.batch * timed_steps / (time.perf_counter() - start))
    return speeds


def launch_milliseconds(step: Step, device: torch.device, timed_steps: int) -> float:
    """Return the median time in which the host queues a step; the GPU's queue is empty before each."""
    seconds = []
    for _ in range(timed_steps):
        synchronize(device)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def peak_memory_gb(step: Step, device: torch.device) -> float:
    """Return the peak memory of a step in GB (1e9 bytes), 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated() / 1e9


def temporary_folder() -> Path:
    """Return a new folder that is left to the system to remove."""
    return Path(tempfile.mkdtemp(prefix="imgnet-gpu-"))
