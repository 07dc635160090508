"""Measures a packed index of ImageNet's size: opening, epoch order, memory; compared with a Python list.

The peer is what torchvision's ImageFolder keeps: a Python list of (path, label), read from a pickle here. Memory is
the anonymous memory of a whole process, from /proc/<pid>/smaps_rollup. Pages of the index file are not in it: all
processes of a machine share these.

    .venv/bin/python benchmarks/data/index_memory.py
"""

import gc
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

IMAGES = 1_281_167
ROUNDS = 5
SMAPS_ROLLUP = Path("/proc/self/smaps_rollup")


def write_index(root: Path, images: int = IMAGES) -> None:
    """Write the index of a data set without images, and beside it the peer's list of samples."""
    import numpy as np

    from train.data.index.base import names_crc32, stems_sha256
    from train.data.index.packed import ROW_DTYPE, file_crc32
    from train.data.manifest import INDEX_FILE, MANIFEST_FILE, NAMES_FILE, FileEntry, Manifest, PackingInfo
    from train.tools.files import write_atomic

    folder = root / "train"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = np.zeros(images, ROW_DTYPE)
    rows["label"] = np.sort(rng.integers(0, 1000, images))
    aspect_ratios = np.exp(rng.normal(0.2, 0.3, images)).clip(0.2, 5)
    short_sides = rng.integers(200, 600, images)
    rows["width"] = short_sides * np.maximum(aspect_ratios, 1)
    rows["height"] = short_sides / np.minimum(aspect_ratios, 1)
    rows["length"] = 110_000
    np.save(folder / INDEX_FILE, rows)
    classes = [f"n{number:08d}" for number in range(1000)]
    names = [f"{classes[label]}/{classes[label]}_{n}.JPEG" for n, label in enumerate(rows["label"].tolist())]
    (folder / NAMES_FILE).write_text("".join(f"{name}\n" for name in names))
    files = {
        name: FileEntry(bytes=(folder / name).stat().st_size, sha256="", crc32=file_crc32(folder / name))
        for name in (INDEX_FILE, NAMES_FILE)
    }
    manifest = Manifest(
        split="train",
        short_side=None,
        images=images,
        classes=classes,
        stems_digest=stems_sha256(names),
        names_checksum=names_crc32(names),
        files=files,
        packing_info=PackingInfo(),
        fetched="index",
    )
    write_atomic(folder / MANIFEST_FILE, manifest.to_bytes())
    samples = [(f"/data/imagenet/train/{name}", int(label)) for name, label in zip(names, rows["label"], strict=True)]
    (root / "samples.pickle").write_bytes(pickle.dumps(samples))


# --- measurements, each in a process of its own -------------------------------------------------------------------


def own_memory_mb() -> float:
    """Return the memory that belongs to this process alone, in MB, after a garbage collection."""
    gc.collect()
    (line,) = [line for line in SMAPS_ROLLUP.read_text().splitlines() if line.startswith("Anonymous:")]
    return int(line.split()[1]) / 1e3


def median_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the median milliseconds of a call, and what the last call returned."""
    milliseconds = []
    value = None
    for _ in range(ROUNDS):
        del value
        start = time.perf_counter()
        value = call()
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return statistics.median(milliseconds), value


def measure_packed_index(root: Path) -> dict[str, float]:
    """Measure our index: open it, order an epoch, read all labels in a worker, resume in mid-epoch."""
    from train.data.index.open import load_index
    from train.data.order.rng import permutation

    before = own_memory_mb()
    measured: dict[str, float] = {}
    measured["open"], index = median_ms(lambda: load_index(root, "train"))
    measured["memory when open"] = own_memory_mb() - before
    measured["order"], order = median_ms(lambda: permutation(0, 3, len(index)))
    measured["memory with the order"] = own_memory_mb() - before
    measured["memory of a worker"] = worker_memory_mb(
        lambda: sum(int(index.labels[order[start : start + 256]].sum()) for start in range(0, len(order), 256))
    )
    measured["resume"], _ = median_ms(lambda: first_resumed_batch(index))
    return measured


def first_resumed_batch(index: Any) -> Any:
    """Return the first batch of a run that resumes in the middle of its second epoch."""
    from train.data.order.batch_sampler import DistributedBatchSampler
    from train.recipe.components import Data, Model
    from train.recipe.schedule import Schedule
    from train.recipe.schema import Phase, Recipe

    phases = [Phase(epochs=(0, 3), size=128, batch=256, lr=0.1, min_scale=0.3)]
    data = Data(name="some", root="some", train=len(index), val=50_000)
    schedule = Schedule(Recipe(name="some", data=data, model=Model(name="resnet50"), phases=phases), len(index), 8)
    sampler = DistributedBatchSampler(schedule, {("train", None): index}, 0, 3, 8)
    return next(sampler.train_requests(schedule.epochs[1], 300))


def measure_sample_list(root: Path) -> dict[str, float]:
    """Measure the peer: the list of samples from its pickle, shuffled as a list of indexes."""
    before = own_memory_mb()
    measured: dict[str, float] = {}
    measured["open"], samples = median_ms(lambda: pickle.loads((root / "samples.pickle").read_bytes()))
    measured["memory when open"] = own_memory_mb() - before

    def shuffled_indexes() -> list[int]:
        indexes = list(range(len(samples)))
        random.Random(3).shuffle(indexes)
        return indexes

    measured["order"], order = median_ms(shuffled_indexes)
    measured["memory with the order"] = own_memory_mb() - before
    measured["memory of a worker"] = worker_memory_mb(lambda: sum(samples[number][1] for number in order))
    return measured


def worker_memory_mb(function: Callable[[], Any]) -> float:
    """Return the MB that become private to a worker forked from this process while it runs a function.

    Reading Python objects changes their reference counts, which copies their pages into the worker.
    """
    reader, writer = os.pipe()
    if not (child := os.fork()):
        texts = [SMAPS_ROLLUP.read_text()]
        function()
        texts.append(SMAPS_ROLLUP.read_text())
        before, after = (
            sum(int(line.split()[1]) for line in text.splitlines() if "Private_Dirty" in line) / 1e3 for text in texts
        )
        os.write(writer, json.dumps(after - before).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        private_mb = float(file.read())
    os.waitpid(child, 0)
    return private_mb


def run_part(part: str, root: Path) -> dict[str, float]:
    """Run a part of this script in a process of its own and return its measurements."""
    completed = subprocess.run([sys.executable, __file__, part, str(root)], capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(completed.stdout)
    return measured


def markdown_rows(images: int = IMAGES) -> list[str]:
    """Measure, and return the table as lines of Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "set"
        write_index(root, images)
        ours = run_part("ours", root)
        peer = run_part("peer", root)
    opened, ordered, worker = "memory when open", "memory with the order", "memory of a worker"
    return [
        f"| {images:,} images | packed index | list of (path, label) | bound |",
        "|---|---|---|---|",
        f"| open | {ours['open']:.0f} ms | {peer['open']:.0f} ms | 50 ms |",
        f"| own memory when open | {ours[opened]:.1f} MB | {peer[opened]:.0f} MB | 60 MB |",
        f"| order of an epoch | {ours['order']:.0f} ms | {peer['order']:.0f} ms | 200 ms |",
        f"| own memory with the order | {ours[ordered]:.1f} MB | {peer[ordered]:.0f} MB | 60 MB |",
        f"| first batch of a resume in mid-epoch | {ours['resume']:.0f} ms | | 200 ms |",
        f"| memory that becomes private to a forked worker in one epoch | {ours[worker]:.1f} MB | "
        f"{peer[worker]:.0f} MB | |",
    ]


def main() -> None:
    """Print the table; with the name of a part and a folder, be the process that measures this part."""
    if len(sys.argv) == 3:
        measure = {"ours": measure_packed_index, "peer": measure_sample_list}[sys.argv[1]]
        print(json.dumps(measure(Path(sys.argv[2]))))
    else:
        print("\n".join(markdown_rows()))


if __name__ == "__main__":
    main()
