"""One command for a machine with a GPU: our step by size, beside a bare one and a plain loop's; loader; goodput.

    .venv/bin/python benchmarks/training/gpu.py                  # ResNet-50, bf16, 128 to 288 pixels, about ten minutes
    .venv/bin/python benchmarks/training/gpu.py --sizes 224 --no-compile --batch 512

Batches are synthetic and lie on the GPU: ours as the loader hands them over, uint8; the bare step's as it needs them.
A batch that does not fit is halved. "Plain" is timm's ResNet-50 where timm is installed, else our network in a loop as
torchvision's references write it: NCHW, accuracy and loss read after every step. Its rows are kept in RESULTS.md with
their date; without a GPU the row says so.
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
WARMUP_STEPS, TIMED_STEPS, ROUNDS = 3, 20, 3  # steps before the clock, steps timed together, and how often
COPY_SHORT_SIDES = (160, 352)  # their short sides
MIN_BATCH = 2  # images of the smallest batch that is tried
GOAL_RATIO = 0.95  # ours beside the bare step
NO_GPU_ROW = "| not measured | no GPU on this machine |"
Step = Callable[[], object]


# --- the sides: each makes one training step ----------------------------------------------------------------------


def trainer_step(model: str, size: int, batch: int, use_compile: bool, device: Any, output_folder: Path) -> Step:
    """A step of train.engine.trainer, its images on the device."""
    import numpy as np
    import torch

    from train.data.loading.loader import Batch
    from train.data.order.batch_sampler import DistributedBatchSampler
    from train.data.order.work import BatchRequest
    from train.distributed.process_group import ProcessGroup
    from train.engine.agent_channel import AgentChannel
    from train.engine.options import parse_train_options
    from train.engine.trainer import MAX_STEPS_BETWEEN_SYNCS, Trainer
    from train.recipe.components import Data, Model
    from train.recipe.schedule import Schedule
    from train.recipe.schema import Phase, Recipe

    recipe = Recipe(
        name="gpu", data=Data(name="none", root="none", train=10**6, val=1), model=Model(name=model, compile=use_compile),
        gpus=1, phases=[Phase(epochs=(0, 1), size=size, batch=batch, lr=0.01)],
    )  # fmt: skip
    schedule = Schedule(recipe, 10**6, 1)
    group, feed = ProcessGroup(0, 0, 1, 1, device), DistributedBatchSampler(schedule, {}, 0, 0, 1)
    trainer = Trainer(
        parse_train_options(["none", "--out", str(output_folder)]), recipe, group, feed, CLASSES, AgentChannel()
    )
    trainer.preprocessor.warmed_shapes = {(batch, size, size)}
    images = torch.randint(256, (batch, size, size, 3), dtype=torch.uint8).to(device)
    labels = np.random.default_rng(0).integers(CLASSES, size=batch)
    batches = itertools.repeat(Batch(images, labels, BatchRequest("train", None, np.arange(batch), (size, size))))

    def step() -> None:
        if trainer.meter.steps == MAX_STEPS_BETWEEN_SYNCS:  # read once a second in a run
            trainer.time_breakdown.flush()
            trainer.meter.reset()
        trainer.run_step(schedule.epochs[0], 0, batches)

    return step


def bare_step(model: str, size: int, batch: int, use_compile: bool, device: Any, net: Any = None) -> Step:
    """Forward, loss, backward and update, and nothing else."""
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
    """timm's network in the bare step, or a loop in torchvision's style."""
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
    images, labels = torch.randn(batch, 3, size, size, device=device), torch.randint(CLASSES, (batch,), device=device)
    precision = process_group.compute_dtype(device)
    seen: dict[str, float] = {}

    def step() -> None:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            scores = net(images)
            loss = criterion(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = scores.topk(min(5, scores.shape[1]), 1).indices.t().eq(labels[None])
        seen["top1"], seen["top5"] = (best[:k].flatten().sum().float().item() for k in (1, 5))
        seen["loss"] = loss.item()

    return step


# --- measuring ----------------------------------------------------------------------------------------------------


def synchronize(device: Any) -> None:
    """Until the GPU has done what it was asked."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_speeds(step_by_side: dict[str, Step], batch: int, device: Any) -> dict[str, list[float]]:
    """Images a second of each side in turn."""
    found: dict[str, list[float]] = {name: [] for name in step_by_side}
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
            found[name].append(batch * TIMED_STEPS / (time.perf_counter() - start))
    return found


def peak_memory_gb(step: Step, device: Any) -> float:
    """Peak memory of a step, GB."""
    import torch

    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated() / 1e9


def measure_size(model: str, size: int, batch: int, use_compile: bool, device: Any) -> str:
    """One row of the table; the batch is halved until it fits."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch._dynamo.reset()  # it compiles the same function 8 times at most, and then goes on without a word
    while True:
        try:
            with tempfile.TemporaryDirectory() as folder:
                step = trainer_step(model, size, batch, use_compile, device, Path(folder))
                gb = peak_memory_gb(step, device)  # before the others are there
                sides = {"ours": step, "bare": bare_step(model, size, batch, use_compile, device)}
                sides |= {} if use_compile else {"plain": plain_loop_step(model, size, batch, device)}
                found = measure_speeds(sides, batch, device)
            break
        except torch.cuda.OutOfMemoryError:
            step = sides = None  # type: ignore[assignment]
            if batch // 2 < MIN_BATCH:
                return f"| {size} | {batch} | {compile_label(use_compile)} | out of memory | | | | |"
            batch //= 2
        except Exception as error:  # a compiler that is not there, or fails: the other rows are still worth having
            return f"| {size} | {batch} | {compile_label(use_compile)} | {type(error).__name__}: {str(error).splitlines()[0]} | | | | |"
        torch.cuda.empty_cache()
    ratio = statistics.median(a / b for a, b in zip(found["ours"], found["bare"], strict=True))
    beside = median_with_range(found["plain"]) if "plain" in found else ""
    return (
        f"| {size} | {batch} | {compile_label(use_compile)} | {median_with_range(found['ours'])} | {median_with_range(found['bare'])} | "
        f"{ratio:.2f}, goal {GOAL_RATIO}: {goal_verdict(ratio, GOAL_RATIO)} | {beside} | {gb:.1f} GB |"
    )


def compile_label(use_compile: bool) -> str:
    """The word for a table."""
    return "compiled" if use_compile else "eager"


def loader_rates(folder: Path, sizes: Sequence[int]) -> Iterator[str]:
    """What the loader of this machine gives, all cores, copies of 160 up to 128 pixels and of 352 above."""
    from benchmarks.data import loader

    indexes = {short: loader.pack_copies(folder / str(short)) for short in COPY_SHORT_SIDES}
    for size in sizes:
        short = COPY_SHORT_SIDES[0] if size <= 128 else COPY_SHORT_SIDES[1]
        found = loader.measure_speeds(indexes[short], size, {"ours"}, 2)
        yield f"| {short} to {size} | {median_with_range(found['ours'])} images/s, {core_count()} workers |"


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
    """One short run by `python -m train`: a switch of size, batch and copy, validations and checkpoints."""
    text = RECIPE.format(model=model, small=min(sizes), large=max(sizes), batch=batch, half=max(2, batch // 2))
    (folder / "recipe.py").write_text(text)
    copies = folder / "352-packed-sz"
    copies.mkdir()
    for short in COPY_SHORT_SIDES:
        (copies / str(short)).symlink_to(folder / f"{short}-packed")
    out = folder / "out"
    words = [
        "--data",
        str(folder / "352-packed"),
        "--out",
        str(out),
        *(["--max-steps", str(max_steps)] if max_steps else []),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **({"CUDA_VISIBLE_DEVICES": ""} if hide_gpu else {})}
    argv = [sys.executable, "-m", "train", str(folder / "recipe.py"), *words]
    done = subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        return f"the short run failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    result = json.loads((out / "result.json").read_text())
    parts = {name: one["seconds"] for name, one in result.get("where", {}).get("parts", {}).items()}
    seconds = result["seconds"]["first step to last"]
    return (
        f"{100 * result['goodput']:.1f} % over {result['steps']} steps, {seconds:.1f} s ("
        + ", ".join(f"{name} {part:.1f}" for name, part in parts.items())
        + f"), goal 95: {goal_verdict(100 * result['goodput'], 95)}"
    )


def describe_gpu(device: Any) -> str:
    """The GPU and what drives it."""
    import torch

    if device.type != "cuda":
        return "no GPU: this tries the code only"
    timm = importlib.util.find_spec("timm") and importlib.import_module("timm").__version__
    return (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, one of them measured; "
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, timm {timm or 'not installed'}"
    )


def markdown_rows(options: argparse.Namespace | None = None) -> list[str]:
    """Measure all; markdown lines, one that says why where there is no GPU."""
    import torch

    options = options or parse_arguments([])
    if options.device == "cuda" and not torch.cuda.is_available():
        return [f"{describe_machine()}.", "", "| | |", "|---|---|", NO_GPU_ROW]
    lines = [
        f"{describe_machine()}. {describe_gpu(torch.device(options.device))}. Images/s, median (least-most) of {ROUNDS}.",
        "",
    ]
    with tempfile.TemporaryDirectory() as folder:
        from benchmarks.data import loader

        place, threads = Path(folder), torch.get_num_threads()
        loader.write_copies(options.images, place)
        loader.configure_process()
        rates = list(loader_rates(place, options.sizes))  # workers are forked before CUDA begins
        torch.set_num_threads(threads)
        lines += ["| copies to size | the loader |", "|---|---|", *rates, ""]
        run = (options.model, options.sizes, options.batch, options.max_steps, options.device == "cpu")
        lines += [f"Goodput of a short run: {measure_goodput(place, *run)}.", ""]
    device = torch.device(options.device)
    name = "timm" if importlib.util.find_spec("timm") else "torchvision's style"
    lines += [f"| {options.model}, size | batch | | ours | bare step | ours / bare | {name} | ours, peak |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for size, compile in itertools.product(options.sizes, (False, True) if options.compile else (False,)):
        lines.append(measure_size(options.model, size, options.batch, compile, device))
        print(lines[-1], flush=True)
    return lines


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Our training step on a GPU beside a bare one and a plain loop.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="pixels (default: 128 160 224 288)")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"images (default: {BATCH}), halved where too many")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out torch.compile: minutes")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs for the loader: a folder or .tar")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--model", default=MODEL, help=argparse.SUPPRESS)
    parser.add_argument("--max-steps", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Measure, print, and write the part of RESULTS.md; what an earlier machine with a GPU measured is kept without."""
    options = parse_arguments()
    lines = ["## On a GPU", "", *markdown_rows(options)]
    print("\n".join(lines))
    if (NO_GPU_ROW not in lines and options.device == "cuda") or "<!-- gpu.py -->" not in RESULTS_PATH.read_text():
        write_section("gpu.py", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
