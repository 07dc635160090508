"""A packed index of ImageNet's size: opened, ordered, cut into rectangles, held by two processes, beside a list.

The peer is what torchvision's ImageFolder keeps: a Python list of (path, label), here read from a pickle. Memory is of
whole processes, from /proc/<pid>/smaps_rollup: `own` is anonymous memory, that of nobody else; `mapped` are pages of
the index file, which all processes of a machine have in common.
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


def write_index(root: Path, images: int = IMAGES) -> None:
    """Write the index of a set without images, and beside it the peer's list of samples."""
    import numpy as np

    from train.data.index.base import names_crc32, stems_sha256
    from train.data.index.packed import INDEX_FILE, NAMES_FILE, ROW_DTYPE, file_crc32
    from train.data.manifest import MANIFEST_FILE, PackedManifest
    from train.tools.filesystem import to_json_bytes, write_atomic

    folder = root / "train"
    folder.mkdir(parents=True)
    dice = np.random.default_rng(0)
    rows = np.zeros(images, ROW_DTYPE)
    rows["label"] = np.sort(dice.integers(0, 1000, images))
    ratios = np.exp(dice.normal(0.2, 0.3, images)).clip(0.2, 5)
    short = dice.integers(200, 600, images)
    rows["width"], rows["height"] = (short * np.maximum(ratios, 1)), (short / np.minimum(ratios, 1))
    rows["length"] = 110_000
    np.save(folder / INDEX_FILE, rows)
    classes = [f"n{number:08d}" for number in range(1000)]
    names = [f"{classes[label]}/{classes[label]}_{n}.JPEG" for n, label in enumerate(rows["label"].tolist())]
    (folder / NAMES_FILE).write_text("".join(f"{one}\n" for one in names))
    files: dict[str, dict[str, Any]] = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": ""} for name in (INDEX_FILE, NAMES_FILE)
    }
    files[INDEX_FILE]["crc32"] = file_crc32(folder / INDEX_FILE)
    manifest = PackedManifest(
        split="train", short_side=None, images=images, classes=classes, stems_digest=stems_sha256(names),
        names_checksum=names_crc32(names), files=files, packing_info={}, fetched="index",
    )  # fmt: skip
    write_atomic(folder / MANIFEST_FILE, to_json_bytes(manifest.to_json()))
    samples = [(f"/data/imagenet/train/{name}", int(label)) for name, label in zip(names, rows["label"], strict=True)]
    (root / "samples.pickle").write_bytes(pickle.dumps(samples))


# --- what one process does, in a process of its own ---------------------------------------------------------------


def memory_mb() -> dict[str, float]:
    """This process's own memory, and what it maps of files that others have too, in MB."""
    found = {line.split()[0]: int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if " kB" in line}  # noqa: PTH123, SIM115
    return {"own": found["Anonymous:"] / 1e3, "mapped": (found["Rss:"] - found["Anonymous:"]) / 1e3}


def median_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of a call, the median, and its last answer."""
    found, answer = [], None
    for _ in range(ROUNDS):
        del answer
        begun = time.perf_counter()
        answer = call()
        found.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(found), answer


def measure_packed_index(root: Path) -> dict[str, Any]:
    """Open, order, take batches, cut into rectangles."""
    from train.data.index.open import load_index
    from train.data.order.rect_val import plan_rect_validation
    from train.data.order.rng import permutation

    before = memory_mb()
    said: dict[str, Any] = {}
    said["open"], index = median_ms(lambda: load_index(root, "train"))
    said["opened"] = memory_since(before)
    said["order"], order = median_ms(lambda: permutation(0, 3, len(index)))
    at = len(order) // 2
    said["batch"], _ = median_ms(lambda: index.labels[order[at : at + 256]])
    said["ordered"] = memory_since(before)
    said["held"] = worker_memory_mb(
        lambda: sum(int(index.labels[order[at : at + 256]].sum()) for at in range(0, len(order), 256))
    )
    said["used"] = memory_since(before)
    blocks = sys.getallocatedblocks()
    said["rectangles"], plan = median_ms(lambda: plan_rect_validation(index.widths, index.heights, 288, 256, 0, 1))
    said["objects"], said["batches"] = sys.getallocatedblocks() - blocks, len(plan)
    said["planned"] = memory_since(before)
    said["resume"], _ = median_ms(lambda: first_resumed_batch(index))
    return said


def first_resumed_batch(index: Any) -> Any:
    """The first batch of a run that goes on in the middle of its second epoch."""
    from train.data.order.batch_sampler import DistributedBatchSampler
    from train.recipe.components import Data, Model
    from train.recipe.schedule import Schedule
    from train.recipe.schema import Phase, Recipe

    phases = [Phase(epochs=(0, 3), size=128, batch=256, lr=0.1, min_scale=0.3)]
    data = Data(name="some", root="some", train=len(index), val=50_000)
    schedule = Schedule(Recipe(name="some", data=data, model=Model(name="resnet50"), phases=phases), len(index), 8)
    feed = DistributedBatchSampler(schedule, {("train", None): index}, 0, 3, 8)
    return next(feed.train_requests(schedule.epochs[1], 300))


def measure_sample_list(root: Path) -> dict[str, Any]:
    """The list of samples from its pickle, and torch's order of it."""
    import random

    before = memory_mb()
    said: dict[str, Any] = {}
    said["open"], samples = median_ms(lambda: pickle.loads((root / "samples.pickle").read_bytes()))
    said["opened"] = memory_since(before)

    def order() -> list[int]:
        numbers = list(range(len(samples)))
        random.Random(3).shuffle(numbers)
        return numbers

    said["order"], kept = median_ms(order)
    said["ordered"] = memory_since(before)
    said["held"] = worker_memory_mb(lambda: sum(samples[number][1] for number in kept))
    said["used"] = memory_since(before)
    return said


def worker_memory_mb(use: Callable[[], Any]) -> dict[str, float]:
    """What a worker forked from here makes its own when it has gone through the set once."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        lines = [Path("/proc/self/smaps_rollup").read_text()]
        use()
        lines.append(Path("/proc/self/smaps_rollup").read_text())
        dirty = [sum(int(o.split()[1]) for o in one.splitlines() if "Private_Dirty" in o) / 1e3 for one in lines]
        os.write(writer, json.dumps(dirty[1] - dirty[0]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = json.loads(file.read())
    os.waitpid(child, 0)
    return {"worker": said}


def memory_since(before: dict[str, float]) -> dict[str, float]:
    """What the process has more than before."""
    gc.collect()
    return {name: value - before[name] for name, value in memory_mb().items()}


def measure_ranks(root: Path, ranks: int = 2) -> dict[str, float]:
    """Memory of ranks that hold index and order at the same time: resident, and each page shared out (Pss)."""
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(ranks)
    ]
    said = []
    for one in children:
        assert one.stdout
        one.stdout.readline()
    for one in children:  # all hold it now
        assert one.stdin and one.stdout
        one.stdin.write("\n")
        one.stdin.flush()
        said.append(json.loads(one.stdout.readline()))
    for one in children:
        one.communicate()
    return {name: statistics.mean(one[name] for one in said) for name in said[0]}


def rank_main(root: Path) -> None:
    """Hold index and order; say what the mapping of the index takes when told that the others have theirs too."""
    from train.data.index.open import load_index
    from train.data.order.rng import permutation

    index = load_index(root, "train")
    order = permutation(0, 0, len(index))
    touched = sum(int(index.labels[order[at : at + 256]].sum()) for at in range(0, len(order), 256))
    print(touched, flush=True)
    sys.stdin.readline()
    found: dict[str, float] = {}
    mine = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            mine = line.endswith("index.npy")
        elif mine and words[0] in ("Rss:", "Pss:"):
            found[words[0]] = found.get(words[0], 0) + int(words[1]) / 1e3
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


def run_part(part: str, root: Path) -> dict[str, Any]:
    """Run a part in a process of its own."""
    ran = subprocess.run([sys.executable, __file__, part, str(root)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def markdown_rows(images: int = IMAGES) -> list[str]:
    """Return the table of a measurement, as markdown."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "set"
        write_index(root, images)
        mine, theirs, shared = run_part("ours", root), run_part("peer", root), measure_ranks(root)
    return [
        f"| {images:,} images | packed index | list of (path, label) | bound |",
        "|---|---|---|---|",
        f"| open | {mine['open']:.0f} ms | {theirs['open']:.0f} ms | 50 ms |",
        f"| own memory after it | {mine['opened']['own']:.1f} MB | {theirs['opened']['own']:.0f} MB | 60 MB |",
        f"| an epoch's order | {mine['order']:.0f} ms | {theirs['order']:.0f} ms | 200 ms |",
        f"| own memory with an order | {mine['ordered']['own']:.1f} MB | {theirs['ordered']['own']:.0f} MB | 60 MB |",
        f"| to the first batch of a resume in mid-epoch | {mine['resume']:.0f} ms | | 200 ms |",
        f"| what a forked worker makes its own in one epoch | {mine['held']['worker']:.1f} MB | "
        f"{theirs['held']['worker']:.0f} MB | |",
        f"| labels of a batch of 256 | {1e3 * mine['batch']:.0f} us | | |",
        f"| index mapped by each of 2 ranks; shared out | {shared['Rss:']:.1f} MB; {shared['Pss:']:.1f} MB | | 60 MB |",
        f"| rectangles of all | {mine['rectangles']:.0f} ms, {mine['batches']:,} batches | | |",
        f"| own memory with order and rectangles | {mine['planned']['own']:.1f} MB, {mine['objects']:,} Python objects "
        "| | 60 MB |",
    ]


def main() -> int:
    """Print the table; with a part's name and a folder, be the process that measures it."""
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
