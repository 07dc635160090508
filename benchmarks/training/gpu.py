"""Measures on a GPU, in one command: our training step compared with a bare step and a plain loop; loader; goodput.

    .venv/bin/python benchmarks/training/gpu.py                  # ResNet-50, bf16, 128 to 288 pixels, about ten minutes
    .venv/bin/python benchmarks/training/gpu.py --sizes 224 --no-compile --batch 512

Batches are synthetic and lie on the GPU: for our step as the loader delivers them, uint8; for the bare step in the
format that it needs. A batch that does not fit is halved. The plain loop is timm's ResNet-50 if timm is installed, else
our network in a loop as torchvision's references write it: NCHW, with accuracy and loss read after every step. The
section is kept in RESULTS.md with its date; without a GPU it says so.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.measure import (
    RESULTS_PATH,
    core_count,
    describe_machine,
    goal_verdict,
    median_with_range,
    write_section,
)

SIZES, BATCH, MODEL, CLASSES = (128, 160, 224, 288), 256, "resnet50", 1000
WARMUP_STEPS, TIMED_STEPS, ROUNDS = 3, 20, 3  # TIMED_STEPS are timed together, in each round
COPY_SHORT_SIDES = (160, 352)
MIN_BATCH = 2  # the smallest batch that is tried
GOAL_RATIO = 0.95  # of our speed to that of the bare step
SECTION = "training/gpu.py"  # of RESULTS.md
NO_GPU_ROW = "| not measured | no GPU on this machine |"
Step = Callable[[], object]


# --- the sides: each makes one training step ----------------------------------------------------------------------


def trainer_step(model: str, size: int, batch: int, use_compile: bool, device: Any, output_folder: Path) -> Step:
    """Return a step of train.engine.trainer whose images lie on the device."""
    import numpy as np
    import torch

    from train.data.loading.loader import Batch
    from train.data.order.batch_sampler import DistributedBatchSampler
    from train.data.order.work import BatchRequest
    from train.distributed.process_group import ProcessGroup
    from train.engine.agent_channel import AgentChannel
    from train.engine.options import parse_run_options
    from train.engine.trainer import MAX_STEPS_BETWEEN_SYNCS, Trainer
    from train.recipe.components import Data, Model
    from train.recipe.schedule import Schedule
    from train.recipe.schema import Phase, Recipe

    recipe = Recipe(
        name="gpu",
        data=Data(name="none", root="none", train=10**6, val=1),
        model=Model(name=model, compile=use_compile),
        gpus=1,
        phases=[Phase(epochs=(0, 1), size=size, batch=batch, lr=0.01)],
    )
    schedule = Schedule(recipe, 10**6, 1)
    group = ProcessGroup(0, 0, 1, 1, device)
    sampler = DistributedBatchSampler(schedule, {}, 0, 0, 1)
    options = parse_run_options(["none", "--out", str(output_folder)])
    trainer = Trainer(options, recipe, group, sampler, CLASSES, AgentChannel())
    trainer.preprocessor.warmed_shapes = {(batch, size, size)}
    images = torch.randint(256, (batch, size, size, 3), dtype=torch.uint8).to(device)
    labels = np.random.default_rng(0).integers(CLASSES, size=batch)
    batches = itertools.repeat(Batch(images, labels, BatchRequest("train", None, np.arange(batch), (size, size))))

    def step() -> None:
        if trainer.meter.steps == MAX_STEPS_BETWEEN_SYNCS:  # a run reads them about once a second
            trainer.time_breakdown.flush()
            trainer.meter.reset()
        trainer.run_step(schedule.epochs[0], 0, batches)

    return step


def bare_step(model: str, size: int, batch: int, use_compile: bool, device: Any, net: Any = None) -> Step:
    """Return a step of forward, loss, backward and update, and nothing else."""
    import torch
    from torch.nn.functional import cross_entropy

    from train.distributed import process_group
    from train.models import registry
    from train.recipe.components import Model

    net = net or registry.build_model(Model(name=model), CLASSES, 0)
    net = net.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch,), device=device)
    precision = process_group.compute_dtype(device)
    run = torch.compile(net, dynamic=False) if use_compile else net

    def step() -> None:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            loss = cross_entropy(run(images).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain_loop_step(model: str, size: int, batch: int, device: Any) -> Step:
    """Return the bare step with timm's network, or without timm a step of a loop in torchvision's style."""
    if importlib.util.find_spec("timm"):
        import timm

        return bare_step(model, size, batch, False, device, timm.create_model(model))
    import torch

    from train.distributed import process_group
    from train.models import registry
    from train.recipe.components import Model

    net = registry.build_model(Model(name=model), CLASSES, 0).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    criterion = torch.nn.CrossEntropyLoss()
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)
    precision = process_group.compute_dtype(device)
    metrics: dict[str, float] = {}

    def step() -> None:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            scores = net(images)
            loss = criterion(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits = scores.topk(min(5, scores.shape[1]), 1).indices.t().eq(labels[None])
        metrics["top1"], metrics["top5"] = (hits[:k].flatten().sum().float().item() for k in (1, 5))
        metrics["loss"] = loss.item()

    return step


# --- measuring ----------------------------------------------------------------------------------------------------


def synchronize(device: Any) -> None:
    """Wait until the GPU has finished all queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_speeds(step_by_side: dict[str, Step], batch: int, device: Any) -> dict[str, list[float]]:
    """Return images per second of each side and round; the sides take turns."""
    speeds: dict[str, list[float]] = {name: [] for name in step_by_side}
    for step in step_by_side.values():
        for _ in range(WARMUP_STEPS):
            step()
    for _ in range(ROUNDS):
        for name, step in step_by_side.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(TIMED_STEPS):
                step()
            synchronize(device)
            speeds[name].append(batch * TIMED_STEPS / (time.perf_counter() - start))
    return speeds


def peak_memory_gb(step: Step, device: Any) -> float:
    """Return the peak memory of a step in GB (1e9 bytes), 0 on a CPU."""
    import torch

    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated() / 1e9


def measure_size(model: str, size: int, batch: int, use_compile: bool, device: Any) -> str:
    """Return a row of the table. The batch is halved until it fits."""
    import torch

    torch.backends.cudnn.benchmark = True
    # torch.compile compiles a function at most 8 times, and then silently runs it uncompiled.
    torch._dynamo.reset()
    mode = "compiled" if use_compile else "eager"
    while True:
        try:
            with tempfile.TemporaryDirectory() as folder:
                step = trainer_step(model, size, batch, use_compile, device, Path(folder))
                memory_gb = peak_memory_gb(step, device)  # before the other sides take memory
                sides = {"ours": step, "bare": bare_step(model, size, batch, use_compile, device)}
                sides |= {} if use_compile else {"plain": plain_loop_step(model, size, batch, device)}
                speeds = measure_speeds(sides, batch, device)
            break
        except torch.cuda.OutOfMemoryError:
            step = sides = None  # type: ignore[assignment]
            if batch // 2 < MIN_BATCH:
                return f"| {size} | {batch} | {mode} | out of memory | | | | |"
            batch //= 2
        except Exception as error:  # such as a missing or failing compiler: the other rows are still worth having
            return f"| {size} | {batch} | {mode} | {type(error).__name__}: {str(error).splitlines()[0]} | | | | |"
        torch.cuda.empty_cache()
    ratio = statistics.median(ours / bare for ours, bare in zip(speeds["ours"], speeds["bare"], strict=True))
    plain_cell = median_with_range(speeds["plain"]) if "plain" in speeds else ""
    return (
        f"| {size} | {batch} | {mode} | {median_with_range(speeds['ours'])} | {median_with_range(speeds['bare'])} | "
        f"{ratio:.2f}, goal {GOAL_RATIO}: {goal_verdict(ratio, GOAL_RATIO)} | {plain_cell} | {memory_gb:.1f} GB |"
    )


def loader_rates(folder: Path, sizes: Sequence[int]) -> Iterator[str]:
    """Yield the speed of the loader on all cores for each size: 160-pixel copies up to 128 pixels, 352 above."""
    from benchmarks.data import loader

    indexes = {short_side: loader.pack_copies(folder / str(short_side)) for short_side in COPY_SHORT_SIDES}
    for size in sizes:
        short_side = COPY_SHORT_SIDES[0] if size <= 128 else COPY_SHORT_SIDES[1]
        speeds = loader.measure_speeds(indexes[short_side], size, {"ours"}, 2)
        yield f"| {short_side} to {size} | {median_with_range(speeds['ours'])} images/s, {core_count()} workers |"


RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="goodput", data=Data(name="drawn", root="none", train=4000, val=10), model=Model(name="{model}"),
    optim=Optim(nesterov=True), machines=1, gpus=1,
    phases=[
        Phase(epochs=(0, 16), size={small}, batch={batch}, lr=(0.1, 0.05), copy=160),
        Phase(epochs=(16, 24), size={large}, batch={half}, lr=(0.05, 0.0), copy=352),
    ],
)
"""


def measure_goodput(
    folder: Path, model: str, sizes: Sequence[int], batch: int, max_steps: int | None, hide_gpu: bool
) -> str:
    """Run `python -m train` once, and return its goodput as text.

    The short run changes size, batch and copy, validates, and writes checkpoints.
    """
    text = RECIPE.format(model=model, small=min(sizes), large=max(sizes), batch=batch, half=max(2, batch // 2))
    (folder / "recipe.py").write_text(text)
    copies = folder / "352-packed-sz"
    copies.mkdir()
    for short_side in COPY_SHORT_SIDES:
        (copies / str(short_side)).symlink_to(folder / f"{short_side}-packed")
    output_folder = folder / "out"
    options = ["--data", str(folder / "352-packed"), "--out", str(output_folder)]
    if max_steps:
        options += ["--max-steps", str(max_steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **({"CUDA_VISIBLE_DEVICES": ""} if hide_gpu else {})}
    argv = [sys.executable, "-m", "train", str(folder / "recipe.py"), *options]
    completed = subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True)
    if completed.returncode:
        return f"the short run failed: {(completed.stderr or completed.stdout).strip().splitlines()[-1]}"
    result = json.loads((output_folder / "result.json").read_text())
    parts = {name: part["seconds"] for name, part in result.get("where", {}).get("parts", {}).items()}
    seconds = result["seconds"]["first step to last"]
    goodput = 100 * result["goodput"]
    return (
        f"{goodput:.1f} % over {result['steps']} steps, {seconds:.1f} s ("
        + ", ".join(f"{name} {part_seconds:.1f}" for name, part_seconds in parts.items())
        + f"), goal 95: {goal_verdict(goodput, 95)}"
    )


def describe_gpu(device: Any) -> str:
    """Return the names and versions of the GPU, CUDA, cuDNN and timm."""
    import torch

    if device.type != "cuda":
        return "No GPU: this run only tries the code"
    timm_version = importlib.util.find_spec("timm") and importlib.import_module("timm").__version__
    return (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, one of them measured; "
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, timm {timm_version or 'not installed'}"
    )


def markdown_rows(options: argparse.Namespace | None = None) -> list[str]:
    """Measure, and return the section as lines of Markdown; without a GPU a line that says so."""
    import torch

    options = options or parse_arguments([])
    if options.device == "cuda" and not torch.cuda.is_available():
        return [f"{describe_machine()}.", "", "| | |", "|---|---|", NO_GPU_ROW]
    device = torch.device(options.device)
    lines = [f"{describe_machine()}. {describe_gpu(device)}. Images/s, median (min-max) of {ROUNDS}.", ""]
    with tempfile.TemporaryDirectory() as folder:
        from benchmarks.data import loader

        work_folder = Path(folder)
        threads = torch.get_num_threads()
        loader.write_copies(options.images, work_folder)
        loader.configure_process()
        rates = list(loader_rates(work_folder, options.sizes))  # forks the workers before CUDA is initialized
        torch.set_num_threads(threads)
        goodput = measure_goodput(
            work_folder, options.model, options.sizes, options.batch, options.max_steps, options.device == "cpu"
        )
        lines += ["| copies to size | the loader |", "|---|---|", *rates, ""]
        lines += [f"Goodput of a short run: {goodput}.", ""]
    plain_title = "timm" if importlib.util.find_spec("timm") else "torchvision's style"
    lines.append(f"| {options.model}, size | batch | | ours | bare step | ours / bare | {plain_title} | ours, peak |")
    lines.append("|---|---|---|---|---|---|---|---|")
    for size, use_compile in itertools.product(options.sizes, (False, True) if options.compile else (False,)):
        lines.append(measure_size(options.model, size, options.batch, use_compile, device))
        print(lines[-1], flush=True)
    return lines


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Compare our training step on a GPU with a bare step and a plain loop."
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="pixels (default: 128 160 224 288)")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"images (default: {BATCH}); halved until it fits")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave out torch.compile, which takes minutes"
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs for the loader: a folder or .tar")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--model", default=MODEL, help=argparse.SUPPRESS)
    parser.add_argument("--max-steps", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Measure, print, and write the section of RESULTS.md. Without a GPU an earlier section is kept."""
    options = parse_arguments()
    lines = ["## On a GPU", "", *markdown_rows(options)]
    print("\n".join(lines))
    has_measured_gpu = NO_GPU_ROW not in lines and options.device == "cuda"
    if has_measured_gpu or f"<!-- {SECTION} -->" not in RESULTS_PATH.read_text():
        write_section(SECTION, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
