"""The parts of benchmarks/training/gpu.py. Each measures one thing on a GPU, and emits a row as soon as it has it."""

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.data.loader import read_images
from benchmarks.measure import goal_verdict, median_with_range, ratios
from benchmarks.training import gpu_steps
from benchmarks.training.gpu_steps import CLASSES, Setting, Step
from train.data.index.open import load_index
from train.data.loading.loader import BatchDecoder, BatchStream
from train.data.order.rng import permutation
from train.data.order.work import BatchRequest
from train.data.packing.pack import pack_set
from train.data.packing.synthetic import draw_sample_set
from train.distributed import ddp
from train.engine import warmup
from train.models import registry
from train.recipe.components import Comm, Model
from train.tools import checkpoint_io
from train.tools.agent_protocol import metrics_files
from train.tools.errors import first_line
from train.tools.host import usable_cpu_count

ROOT = Path(__file__).resolve().parents[2]
MIN_BATCH = 2  # the smallest batch that is tried
MODEL = "resnet50"
# Images per second of ResNet-50 on one H100 by (batch, size): of our step alone, and from JPEG copies to the update.
STEP_GOALS = {(64, 128): 9_000, (128, 96): 15_000}
FEED_GOALS = {(256, 224): 4_900, (256, 128): 13_000}
START_GOAL = 15  # seconds from the launch to the first step, of a second start
Emit = Callable[[str, str, Mapping[str, float]], None]  # what, the result as text, its numbers
Peer = tuple[Callable[[Setting], Step], float]  # what our step is compared with, and the goal for ours over it

RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="{name}", data=Data(name="drawn", root="none", train=4000, val=10), model=Model(name="{model}"{small}),
    optim=Optim(nesterov=True), machines=1, gpus=1,
    phases=[
        Phase(epochs=(0, {half}), size={first}, batch={batch}, lr=(0.1, 0.05), copy=160, validate="last"),
        Phase(epochs=({half}, {epochs}), size={last}, batch={batch}, lr=(0.05, 0.0), copy=160, validate="last"),
    ],
)
"""
# A short relative of airbench94 (Jordan 2024, 2404.00498: 94 % in 3.83 s on an A100 with a network of its own).
CIFAR_RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="cifar", data=Data(name="cifar10", root="none", train=50_000, val=10_000),
    model=Model(name="resnet18", zero_gamma=False), machines=1, gpus=1,
    optim=Optim(nesterov=True, weight_decay=5e-4, bias_decay=False, label_smoothing=0.1),
    phases=[
        Phase(epochs=(0, 3), size=64, batch=512, lr=(0.05, 0.8), min_scale=0.5),
        Phase(epochs=(3, 15), size=64, batch=512, lr=(0.8, 0.0), min_scale=0.5),
    ],
)
"""


@dataclass(frozen=True)
class Scale:
    """How much is measured: on a GPU, or as a rehearsal on a CPU (`--dry-run`)."""

    device: torch.device
    model: str
    shapes: tuple[tuple[int, int], ...]  # (batch, size) of the table of steps
    copies: tuple[tuple[int, int], ...]  # (short side of the copy, size)
    precisions: tuple[str, ...]
    timed_steps: int
    rounds: int
    set_images: int
    repeats: int  # of the set, where a run needs longer epochs
    epochs: int
    searched_shapes: tuple[tuple[int, int], ...]  # (batch, size) of the recipes, for --search

    def setting(self, batch: int, size: int, precision: str = "auto", use_compile: bool = False) -> Setting:
        """Return the setting of a step."""
        return Setting(self.model, size, batch, precision, self.device, use_compile)


ON_A_GPU = Scale(
    torch.device("cuda", 0), MODEL, ((256, 224), (256, 128), (128, 128), (64, 128), (128, 96)),
    ((160, 128), (352, 224)), ("bf16", "fp16"), 20, 3, 4000, 8, 16,
    ((512, 128), (256, 128), (128, 128), (64, 128), (256, 96), (128, 96), (256, 224), (128, 288)),
)  # fmt: skip
REHEARSAL = Scale(
    torch.device("cpu"), "resnet10_tiny", ((4, 32), (2, 48)), ((160, 32),), ("auto",), 1, 1, 40, 2, 2,
    ((4, 32), (2, 48)),
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Where a part finds its images, and where it may write. `cifar` is CIFAR-10 as JPEG files, if given."""

    folder: Path
    images: Path | None
    cifar: Path | None

    @property
    def data(self) -> Path:
        """The images, in one folder per class; their copies lie beside it."""
        return self.folder / "set"


# --- the data, and runs of the trainer --------------------------------------------------------------------------------


def prepare(scale: Scale, work: Work, emit: Emit) -> None:
    """Draw the images, or take those of --images; make copies, and a longer set of the same images."""
    start = time.perf_counter()
    if work.images:
        for number, data in enumerate(itertools.islice(read_images(work.images), scale.set_images)):
            split = "val" if number % 10 == 9 else "train"
            path = work.data / split / f"class{number // 10 % 10}" / f"{number:05d}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    else:
        draw_sample_set(work.data, train=scale.set_images, val=max(10, scale.set_images // 10))
    longer = work.folder / "longer"
    for path in sorted(work.data.glob("*/*/*.JPEG")):
        for number in range(scale.repeats if path.parts[-3] == "train" else 1):
            link = longer / path.parts[-3] / path.parts[-2] / f"{number}-{path.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)
    pack_set(work.data, {side: work.folder / "set-sz" / str(side) for side in {side for side, _ in scale.copies}})
    pack_set(longer, {160: work.folder / "longer-sz" / "160"})
    emit("images and their copies", f"{time.perf_counter() - start:.1f} s, {usable_cpu_count()} cores", {})


def trainer_command(recipe: Path, data: Path, out: Path, *options: str) -> list[str]:
    """Return the command line of a run with one process."""
    words = ["train", recipe, "--data", data, "--out", out, "--procs", 1, *options]
    return [sys.executable, "-m", *map(str, words)]


def write_recipe(path: Path, scale: Scale, *, epochs: int) -> Path:
    """Write a recipe with two sizes, each for half of the epochs."""
    (batch, first), (_, last) = scale.shapes[-2], scale.shapes[0]
    small = ", zero_gamma=False" if scale.model == "resnet10_tiny" else ""
    settings = {"name": path.stem, "model": scale.model, "small": small}
    numbers = {"first": first, "last": last, "batch": batch, "half": epochs // 2, "epochs": epochs}
    path.write_text(RECIPE.format(**settings, **numbers))
    return path


def run_to_end(argv: list[str]) -> str:
    """Run a command and return its output. Raises `RuntimeError` with the last line of its errors."""
    completed = subprocess.run(argv, capture_output=True, text=True)
    if completed.returncode:
        lines = (completed.stderr or completed.stdout).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {completed.returncode}")
    return completed.stdout


def run_and_kill(argv: list[str], out: Path) -> float:
    """Run a trainer until its first checkpoint is whole, kill it, and return the seconds until it is gone."""
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True) as process:
        while not list(out.glob("checkpoints/*/*.pt")):
            if process.poll() is not None:
                assert process.stderr is not None
                raise RuntimeError(f"ended before its first checkpoint: {process.stderr.read()[-300:]!r}")
            time.sleep(0.01)
        start = time.perf_counter()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return time.perf_counter() - start


def recovery(scale: Scale, work: Work, emit: Emit) -> None:
    """Two starts in parts, the first one with whatever is not in memory yet; from a kill to a new process's step."""
    recipe, gone = write_recipe(work.folder / "recovery.py", scale, epochs=2), 0.0
    for name in ("first start", "second start"):
        out = work.folder / name.replace(" ", "-")
        argv = trainer_command(recipe, work.data, out, "--save-seconds", "0", "--max-steps", "12")
        clock = time.time()
        gone = run_and_kill(argv, out)
        checkpoint = checkpoint_io.load_checkpoint(next(out.glob("checkpoints/*/*.pt")))
        first = first_step_time(out, clock) - clock
        parts = {"start to first step": first, **checkpoint["times"]["startup_seconds"]}
        text = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items())
        emit(name, f"{text}; goal {START_GOAL}: {goal_verdict(first, START_GOAL, True)}", parts)
    start, clock = time.perf_counter(), time.time()
    run_to_end(argv)
    whole = time.perf_counter() - start
    first = first_step_time(out, clock) - clock
    text = f"killed to gone {gone:.1f} s, start to first step {first:.1f} s; to the end {whole:.1f} s"
    emit("kill to next step, without agents", text, {"killed to gone": gone, "start to first step": first})


def first_step_time(out: Path, since: float) -> float:
    """Return when a run noted its first steps after a time."""
    rows = [json.loads(line) for path in metrics_files(out) for line in path.read_text().splitlines()]
    return float(min(row["time"] for row in rows if row["kind"] == "train" and row["time"] > since))


def goodput(scale: Scale, work: Work, emit: Emit) -> None:
    """The goodput of a run that changes size, validates, and writes checkpoints."""
    out = work.folder / "goodput"
    recipe = write_recipe(work.folder / "goodput.py", scale, epochs=scale.epochs)
    limit = () if scale.device.type == "cuda" else ("--max-steps", "6")
    run_to_end(trainer_command(recipe, work.folder / "longer", out, *limit))
    result = json.loads((out / "result.json").read_text())
    parts = {name: part["seconds"] for name, part in result["where"]["parts"].items()}
    share, seconds = 100 * result["goodput"], result["seconds"]["first step to last without losses"]
    text = ", ".join(f"{name} {part:.1f}" for name, part in parts.items())
    verdict = goal_verdict(share, 97)
    emit("goodput", f"{share:.1f} % of {seconds:.0f} s ({text}), goal 97: {verdict}", {"goodput": share, **parts})


def cifar(scale: Scale, work: Work, emit: Emit) -> None:
    """CIFAR-10 to 94 %."""
    if work.cifar is None:
        emit("CIFAR-10 to 94 %", "not measured: give the JPEG files by --cifar DIR", {})
        return
    recipe, out = work.folder / "cifar.py", work.folder / "cifar"
    recipe.write_text(CIFAR_RECIPE)
    limit = () if scale.device.type == "cuda" else ("--max-steps", "4")
    run_to_end(trainer_command(recipe, work.cifar, out, "--target", "top1=94", *limit))
    result = json.loads((out / "result.json").read_text())
    seconds = result["seconds"]["first step to last without losses"]
    emit("CIFAR-10 to 94 %", f"{result['top1']:.2f} % after {seconds:.1f} s", {"top1": result["top1"], "s": seconds})


# --- steps ------------------------------------------------------------------------------------------------------------


def with_fitting_batch(setting: Setting, measure: Callable[[Setting], None]) -> None:
    """Call a function; halve the batch as long as it does not fit into the memory."""
    while True:
        try:
            measure(setting)
            return
        except torch.cuda.OutOfMemoryError:
            if setting.batch // 2 < MIN_BATCH:
                raise
            setting = replace(setting, batch=setting.batch // 2)
        torch.cuda.empty_cache()


def step_name(setting: Setting) -> str:
    """Return the name of a row."""
    return f"{setting.model}, {setting.batch} at {setting.size} px, {setting.precision}"


def absolute_verdict(goals: Mapping[tuple[int, int], int], setting: Setting, speed: float) -> list[str]:
    """Return the verdict on images per second, as a list; nothing where there is no goal."""
    goal = goals.get((setting.batch, setting.size)) if setting.model == MODEL else None
    return [f"goal {goal} images/s: {goal_verdict(speed, goal)}"] if goal else []


def compare_sides(scale: Scale, setting: Setting, emit: Emit, peers: Mapping[str, Peer]) -> None:
    """Emit the speed of our step beside others', and how long the host takes to queue it."""
    folder = gpu_steps.temporary_folder()
    ours = gpu_steps.our_step(setting, folder)
    memory_gb = gpu_steps.peak_memory_gb(ours, setting.device)  # before the other sides take memory
    sides = {"ours": ours, **{name: build(setting) for name, (build, _) in peers.items()}}
    speeds = gpu_steps.images_per_second(sides, setting, scale.timed_steps, scale.rounds)
    launch = gpu_steps.launch_milliseconds(ours, setting.device, scale.timed_steps)
    shutil.rmtree(folder)
    texts = [f"{name} {median_with_range(values)} images/s" for name, values in speeds.items()]
    numbers = {name: statistics.median(values) for name, values in speeds.items()}
    texts[1:1] = absolute_verdict(STEP_GOALS, setting, numbers["ours"])
    for name, (_, goal) in peers.items():
        ratio = statistics.median(ratios(speeds["ours"], speeds[name]))
        texts.append(f"ours / {name} {ratio:.2f}, goal {goal}: {goal_verdict(ratio, goal)}")
        numbers[f"ours / {name}"] = ratio
    texts += [f"queued in {launch:.1f} ms", f"{memory_gb:.1f} GB"]
    emit(step_name(setting), "; ".join(texts), {**numbers, "launch_ms": launch, "memory_gb": memory_gb})


def eager(scale: Scale, work: Work, emit: Emit) -> None:
    """Our step beside a bare step, by shape and precision."""
    peers: dict[str, Peer] = {"bare step": (gpu_steps.bare_step, 0.97)}
    for (batch, size), precision in itertools.product(scale.shapes, scale.precisions):
        setting = scale.setting(batch, size, precision)
        with_fitting_batch(setting, lambda setting: compare_sides(scale, setting, emit, peers))


def graphs(scale: Scale, work: Work, emit: Emit) -> None:
    """Our step with CUDA graphs beside ours without them, and beside a bare step that is one graph."""

    def without(setting: Setting) -> Step:
        return gpu_steps.our_step(replace(setting, graphs=False), gpu_steps.temporary_folder())

    peers: dict[str, Peer] = {"bare graph": (gpu_steps.bare_graph_step, 0.97), "no graphs": (without, 1.0)}
    for (batch, size), precision in itertools.product(scale.shapes, scale.precisions):
        setting = replace(scale.setting(batch, size, precision), graphs=True)
        with_fitting_batch(setting, lambda setting: compare_sides(scale, setting, emit, peers))


def peer(scale: Scale, work: Work, emit: Emit) -> None:
    """Our step beside a plain loop."""
    setting = scale.setting(*scale.shapes[0])
    peers: dict[str, Peer] = {gpu_steps.plain_loop_name(): (gpu_steps.plain_loop_step, 1.1)}
    with_fitting_batch(setting, lambda setting: compare_sides(scale, setting, emit, peers))


def compiled(scale: Scale, work: Work, emit: Emit) -> None:
    """torch.compile at one shape: seconds to compile, and speed."""
    for precision in scale.precisions:
        setting = scale.setting(*scale.shapes[0], precision, use_compile=True)
        torch._dynamo.reset()
        folder = gpu_steps.temporary_folder()
        start = time.perf_counter()
        ours = gpu_steps.our_step(setting, folder)
        ours()
        gpu_steps.synchronize(setting.device)
        seconds = time.perf_counter() - start
        speeds = gpu_steps.images_per_second({"ours": ours}, setting, scale.timed_steps, scale.rounds)["ours"]
        text = f"first step {seconds:.1f} s; {median_with_range(speeds)} images/s"
        emit(f"{step_name(setting)}, compiled", text, {"first_s": seconds, "speed": statistics.median(speeds)})


def warm_up(scale: Scale, work: Work, emit: Emit) -> None:
    """Seconds to warm up each shape, without a search for kernels."""
    setting = scale.setting(*scale.shapes[0])
    trainer = gpu_steps.our_trainer(setting, gpu_steps.temporary_folder())
    for batch, size in scale.shapes:
        trainer.preprocessor.warmed_shapes.clear()
        start = time.perf_counter()
        warmup.warm_up(trainer.wrapped_model, trainer.model, [(batch, size, size)], [], trainer.preprocessor)
        gpu_steps.synchronize(setting.device)
        seconds = time.perf_counter() - start
        emit(f"warm-up of {batch} at {size} px", f"{seconds:.2f} s", {"s": seconds})


def search(setting: Setting, scale: Scale, work: Work, emit: Emit) -> None:
    """Our step with cuDNN's search for kernels or without, and after both what the search gains."""
    start = time.perf_counter()
    step = gpu_steps.our_step(setting, gpu_steps.temporary_folder())
    step()
    gpu_steps.synchronize(setting.device)
    first_seconds = time.perf_counter() - start
    speeds = gpu_steps.images_per_second({"": step}, setting, scale.timed_steps, scale.rounds)[""]
    text, speed = f"{median_with_range(speeds)} images/s; first step {first_seconds:.1f} s", statistics.median(speeds)
    numbers = {"speed": speed, "first_s": first_seconds}
    path = work.folder / f"unsearched {step_name(setting)}"
    if not setting.kernel_search:
        path.write_text(str(speed))
    elif path.exists():
        numbers["gain"] = gain = 100 * (speed / float(path.read_text()) - 1)
        text += f"; gain {gain:.1f} %, goal 3: {goal_verdict(gain, 3)}"
    emit(f"{step_name(setting)}, {'searched' if setting.kernel_search else 'unsearched'}", text, numbers)


def search_parts(scale: Scale) -> dict[str, "Part"]:
    """Return the parts of --search. In one process, a search after an unsearched step reuses the plan of that step."""
    return {
        f"search-{batch}x{size}-{precision}-{state}": Part(
            "Search for kernels", partial(search, replace(setting, kernel_search=state == "on")), 90
        )
        for (batch, size), precision in itertools.product(scale.searched_shapes, scale.precisions)
        for setting in [scale.setting(batch, size, precision)]
        for state in ("off", "on")
    }


def hooks(scale: Scale, work: Work, emit: Emit) -> None:
    """DistributedDataParallel with each hook, in a group of one process."""
    setting = scale.setting(*scale.shapes[min(2, len(scale.shapes) - 1)], scale.precisions[0])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if setting.device.type == "cuda":
        torch.cuda.set_device(setting.device)
    backend = "nccl" if setting.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sides = {"no group": gpu_steps.bare_step(setting)}
    for hook in ("none", "fp16", "bf16", "powersgd"):
        net = registry.build_model(Model(name=setting.model), CLASSES, 0)
        sides[hook] = gpu_steps.bare_step(
            setting, net, lambda net, hook=hook: ddp.wrap_ddp(net, Comm(hook=hook), exact_steps=2)
        )
    speeds = gpu_steps.images_per_second(sides, setting, scale.timed_steps, scale.rounds)
    for name, values in speeds.items():
        milliseconds = 1000 * setting.batch / statistics.median(values)
        emit(f"{step_name(setting)}, {backend}, hook {name}", f"{milliseconds:.2f} ms a step", {"ms": milliseconds})
    dist.destroy_process_group()


def feed(scale: Scale, work: Work, emit: Emit) -> None:
    """The loader, the copy to the GPU and our step together, beside our step on images that lie on the GPU."""
    workers = usable_cpu_count()
    for short_side, size in scale.copies:
        index = load_index(work.folder / "set-sz" / str(short_side), "train")
        batch = min(scale.shapes[0][0], len(index))
        decoder, requests = BatchDecoder({("train", None): index}, 0), endless_requests(len(index), batch, size)
        batches = BatchStream(decoder, requests, workers, scale.device, 3 * batch * size**2)  # of all settings
        for has_graphs, precision in itertools.product((True, False), scale.precisions):
            setting = replace(scale.setting(batch, size, precision), graphs=has_graphs)
            resident = gpu_steps.our_step(setting, gpu_steps.temporary_folder())
            expected = gpu_steps.images_per_second({"": resident}, setting, scale.timed_steps, scale.rounds)[""]
            step = gpu_steps.our_step(setting, gpu_steps.temporary_folder(), batches)
            speeds = gpu_steps.images_per_second({"": step}, setting, 2 * scale.timed_steps, scale.rounds)[""]
            speed = statistics.median(speeds)
            waits = 100 * max(0.0, 1 - speed / statistics.median(expected))
            texts = [f"{median_with_range(speeds)} images/s", *absolute_verdict(FEED_GOALS, setting, speed)]
            texts.append(f"waits {waits:.1f} %, goal 2: {goal_verdict(waits, 2, True)}")
            side = f"{precision}, {'graphs' if has_graphs else 'no graphs'}"
            what = f"{short_side} px copies to {size} px, {side}, {workers} workers"
            emit(what, "; ".join(texts), {"waits": waits, "speed": speed})


def endless_requests(set_size: int, batch: int, size: int) -> Iterator[BatchRequest]:
    """Yield requests of random batches without end."""
    for epoch in itertools.count():
        order = permutation(0, epoch, set_size)
        for start in range(0, set_size - batch + 1, batch):
            yield BatchRequest("train", None, order[start : start + batch], (size, size), epoch, 0.08)


def describe_error(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {first_line(error)}"


@dataclass(frozen=True)
class Part:
    """One part: its title, what it runs, and its limit in seconds on a GPU."""

    title: str
    run: Callable[[Scale, Work, Emit], None]
    seconds: int


# In the order of their worth: the first five end within 10 minutes, as one command on a lent GPU may take.
PARTS = {
    "graphs": Part("Our step with CUDA graphs", graphs, 150),
    "eager": Part("Our step and a bare step", eager, 120),
    "prepare": Part("Images", prepare, 70),
    "feed": Part("From copies to the GPU", feed, 140),
    "recovery": Part("Starts, and kill to next step", recovery, 90),
    "goodput": Part("Goodput", goodput, 150),
    "peer": Part("Our step and a plain loop", peer, 60),
    "warm-up": Part("Warm-up by shape", warm_up, 60),
    "hooks": Part("Hooks in a group of one", hooks, 60),
    "cifar": Part("CIFAR-10", cifar, 120),
    "compile": Part("torch.compile", compiled, 150),
}
