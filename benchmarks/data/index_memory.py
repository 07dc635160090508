"""Measures a packed index of ImageNet's size: opening, epoch order, rectangles, memory; compared with a Python list.

The peer is what torchvision's ImageFolder keeps: a Python list of (path, label), read from a pickle here. Memory is
that of whole processes, from /proc/<pid>/smaps_rollup: `own` is anonymous memory, which belongs to one process alone;
`mapped` are pages of the index file, which all processes of a machine share.

    .venv/bin/python benchmarks/data/index_memory.py
"""

import gc
import json
import os
import pickle
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
    from train.tools.filesystem import write_atomic

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


def memory_mb() -> dict[str, float]:
    """Return this process's own memory, and what it maps of files that other processes map too, in MB."""
    lines = [line.split() for line in SMAPS_ROLLUP.read_text().splitlines() if " kB" in line]
    kilobytes = {words[0]: int(words[1]) for words in lines}
    return {"own": kilobytes["Anonymous:"] / 1e3, "mapped": (kilobytes["Rss:"] - kilobytes["Anonymous:"]) / 1e3}


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


def measure_packed_index(root: Path) -> dict[str, Any]:
    """Measure our index: open, order an epoch, take a batch, read all labels in a worker, plan rectangles, resume."""
    from train.data.index.open import load_index
    from train.data.order.rect_val import plan_rect_validation
    from train.data.order.rng import permutation

    before = memory_mb()
    measured: dict[str, Any] = {}
    measured["open"], index = median_ms(lambda: load_index(root, "train"))
    measured["opened"] = memory_since(before)
    measured["order"], order = median_ms(lambda: permutation(0, 3, len(index)))
    middle = len(order) // 2
    measured["batch"], _ = median_ms(lambda: index.labels[order[middle : middle + 256]])
    measured["ordered"] = memory_since(before)
    measured["held"] = worker_memory_mb(
        lambda: sum(int(index.labels[order[start : start + 256]].sum()) for start in range(0, len(order), 256))
    )
    measured["used"] = memory_since(before)
    allocated_blocks = sys.getallocatedblocks()
    measured["rectangles"], plan = median_ms(lambda: plan_rect_validation(index.widths, index.heights, 288, 256, 0, 1))
    measured["objects"] = sys.getallocatedblocks() - allocated_blocks
    measured["batches"] = len(plan)
    measured["planned"] = memory_since(before)
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


def measure_sample_list(root: Path) -> dict[str, Any]:
    """Measure the peer: the list of samples from its pickle, shuffled as a list of indexes."""
    import random

    before = memory_mb()
    measured: dict[str, Any] = {}
    measured["open"], samples = median_ms(lambda: pickle.loads((root / "samples.pickle").read_bytes()))
    measured["opened"] = memory_since(before)

    def shuffled_indexes() -> list[int]:
        indexes = list(range(len(samples)))
        random.Random(3).shuffle(indexes)
        return indexes

    measured["order"], order = median_ms(shuffled_indexes)
    measured["ordered"] = memory_since(before)
    measured["held"] = worker_memory_mb(lambda: sum(samples[number][1] for number in order))
    measured["used"] = memory_since(before)
    return measured


def worker_memory_mb(function: Callable[[], Any]) -> dict[str, float]:
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
        private_mb = json.loads(file.read())
    os.waitpid(child, 0)
    return {"worker": private_mb}


def memory_since(before: dict[str, float]) -> dict[str, float]:
    """Return how much more memory the process has than before, in MB."""
    gc.collect()
    return {name: value - before[name] for name, value in memory_mb().items()}


def measure_ranks(root: Path, ranks: int = 2) -> dict[str, float]:
    """Return the memory of ranks that hold index and order at the same time, in MB, as the mean of the ranks.

    "Rss:" is resident memory; "Pss:" divides each page by the number of processes that map it.
    """
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(ranks)
    ]
    for child in children:
        assert child.stdout
        child.stdout.readline()
    answers = []
    for child in children:  # by now all of them hold index and order
        assert child.stdin and child.stdout
        child.stdin.write("\n")
        child.stdin.flush()
        answers.append(json.loads(child.stdout.readline()))
    for child in children:
        child.communicate()
    return {name: statistics.mean(answer[name] for answer in answers) for name in answers[0]}


def rank_main(root: Path) -> None:
    """Hold index and order; once all ranks do and the parent sends a line, print the memory of the mapped index."""
    from train.data.index.open import load_index
    from train.data.order.rng import permutation

    index = load_index(root, "train")
    order = permutation(0, 0, len(index))
    label_sum = sum(int(index.labels[order[start : start + 256]].sum()) for start in range(0, len(order), 256))
    print(label_sum, flush=True)
    sys.stdin.readline()
    megabytes: dict[str, float] = {}
    is_index_mapping = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # the first line of a mapping, with its file
            is_index_mapping = line.endswith("index.npy")
        elif is_index_mapping and words[0] in ("Rss:", "Pss:"):
            megabytes[words[0]] = megabytes.get(words[0], 0) + int(words[1]) / 1e3
    print(json.dumps(megabytes), flush=True)
    sys.stdin.readline()


def run_part(part: str, root: Path) -> dict[str, Any]:
    """Run a part of this script in a process of its own and return its measurements."""
    completed = subprocess.run([sys.executable, __file__, part, str(root)], capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(completed.stdout)
    return measured


def markdown_rows(images: int = IMAGES) -> list[str]:
    """Measure, and return the table as lines of Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "set"
        write_index(root, images)
        ours = run_part("ours", root)
        peer = run_part("peer", root)
        ranks = measure_ranks(root)
    return [
        f"| {images:,} images | packed index | list of (path, label) | bound |",
        "|---|---|---|---|",
        f"| open | {ours['open']:.0f} ms | {peer['open']:.0f} ms | 50 ms |",
        f"| own memory when open | {ours['opened']['own']:.1f} MB | {peer['opened']['own']:.0f} MB | 60 MB |",
        f"| order of an epoch | {ours['order']:.0f} ms | {peer['order']:.0f} ms | 200 ms |",
        f"| own memory with the order | {ours['ordered']['own']:.1f} MB | {peer['ordered']['own']:.0f} MB | 60 MB |",
        f"| first batch of a resume in mid-epoch | {ours['resume']:.0f} ms | | 200 ms |",
        f"| memory that becomes private to a forked worker in one epoch | {ours['held']['worker']:.1f} MB | "
        f"{peer['held']['worker']:.0f} MB | |",
        f"| labels of a batch of 256 | {1e3 * ours['batch']:.0f} us | | |",
        f"| index mapped by each of 2 ranks: Rss; Pss | {ranks['Rss:']:.1f} MB; {ranks['Pss:']:.1f} MB | | 60 MB |",
        f"| rectangles of all images | {ours['rectangles']:.0f} ms, {ours['batches']:,} batches | | |",
        f"| own memory with order and rectangles | {ours['planned']['own']:.1f} MB, {ours['objects']:,} Python objects "
        "| | 60 MB |",
    ]


def main() -> int:
    """Print the table; with the name of a part and a folder, be the process that measures this part."""
    if len(sys.argv) == 3:
        part, root = sys.argv[1], Path(sys.argv[2])
        if part == "rank":
            rank_main(root)
        else:
            print(json.dumps({"ours": measure_packed_index, "peer": measure_sample_list}[part](root)))
        return 0
    print("\n".join(markdown_rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
