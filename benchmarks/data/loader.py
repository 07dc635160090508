"""Images per second of the whole data loading on all cores, compared with a bare loop, FFCV and PIL with DataLoader.

    sh benchmarks/peers.sh                                    # once, installs FFCV and the classic pipeline
    .venv/bin/python benchmarks/data/loader.py --images DIR   # photographs: a folder or a .tar; two to three minutes

Every side reads the same JPEG bytes: 160-pixel copies cropped to 128 and 352-pixel copies cropped to 224, crops of 0.08
to 1 of the area, flips. Some hundred photographs are repeated to a set of 4,000, so that the set does not fit into the
CPU's caches. The sides run one pass each in turn. Between its passes our stream decodes batches of a single image only,
and a pass is timed from an empty to an empty pipeline, as the passes of the peers are.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.measure import (
    NO_PEERS_MESSAGE,
    PEERS_PYTHON,
    describe_machine,
    goal_verdict,
    median_with_range,
    ratios,
    seconds_of,
)
from experiments.harness import images as image_sources
from train.tools.host import usable_cpu_count

GOAL_BY_SIZES = {(160, 128): 1.2, (352, 224): 1.4}  # (short side of the copy, crop): goal of ours / FFCV
PASS_IMAGES_PER_CORE = {128: 6000, 224: 2000}  # by crop size; a pass takes some seconds
SET_IMAGES, CLASSES, BATCH, MIN_SCALE, ROUNDS = 4000, 10, 128, 0.08, 5
BARE_GOAL, CLASSIC_GOAL, PIXEL_GOAL, COMPARED_IMAGES = 0.85, 2.0, 0.15, 200


# --- the images ---------------------------------------------------------------------------------------------------


def read_images(images: Path | None) -> Iterator[bytes]:
    """Yield the bytes of the images in a folder (at any depth) or a .tar; of 400 generated images for None."""
    if images is None:
        from train.data.packing.synthetic import draw_sample_set

        with tempfile.TemporaryDirectory() as folder:
            draw_sample_set(Path(folder), train=400, val=10)
            yield from read_images(Path(folder) / "train")
    else:
        yield from (content for _, content in image_sources.read_images(images))


def write_copies(images: Path | None, folder: Path) -> int:
    """Write SET_IMAGES copies to <folder>/<short side>/train/<class>/<number>.JPEG, and some to val/.

    Return the number of different images, which are repeated.
    """
    from train.data.decode import decode_image, encode_jpeg
    from train.data.packing.pack import shrink_to_short_side
    from train.data.packing.shard_writer import COPY_JPEG_QUALITY

    originals = [decode_image(data) for _, data in zip(range(SET_IMAGES), read_images(images), strict=False)]
    for short_side, _ in GOAL_BY_SIZES:
        jpegs = [encode_jpeg(shrink_to_short_side(image, short_side), COPY_JPEG_QUALITY) for image in originals]
        for number in range(SET_IMAGES):
            path = folder / str(short_side) / "train" / f"class{number % CLASSES}" / f"{number:05d}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpegs[number % len(jpegs)])
        for number in range(CLASSES):
            path = folder / str(short_side) / "val" / f"class{number}" / "0.JPEG"
            path.parent.mkdir(parents=True)
            path.write_bytes(jpegs[number % len(jpegs)])
    return len(originals)


def pack_copies(folder: Path) -> Any:
    """Pack the images of a folder without encoding them again. Return the index of the packed set."""
    from train.data.index.open import load_index
    from train.data.packing.pack import pack_set

    target = folder.with_name(f"{folder.name}-packed")
    pack_set(folder, {None: target})
    return load_index(target, "train")


# --- the sides ----------------------------------------------------------------------------------------------------


def make_requests(set_size: int, images: int, size: int) -> list[Any]:
    """Return the batch requests of a pass over `images` images of a set, in random order, with new boxes per batch."""
    from train.data.order.rng import permutation
    from train.data.order.work import BatchRequest

    orders = [permutation(0, number, set_size) for number in range(-(-images // set_size))]
    ids = np.concatenate(orders)[:images]
    batches = [ids[start : start + BATCH] for start in range(0, images, BATCH)]
    return [
        BatchRequest("train", None, batch_ids, (size, size), number, MIN_SCALE)
        for number, batch_ids in enumerate(batches)
    ]


class LoaderPasses:
    """Passes of our batch stream; its workers live on between passes."""

    def __init__(self, index: Any, size: int, images: int) -> None:
        import torch

        from train.data.loading.loader import BatchDecoder, BatchStream

        self.pending_requests: deque[Any] = deque()
        self.pass_requests = make_requests(len(index), images, size)
        self.idle_request = make_requests(len(index), 1, size)[0]
        decoder = BatchDecoder({("train", None): index}, 0)
        self.batches = BatchStream(
            decoder, self.next_requests(), usable_cpu_count(), torch.device("cpu"), BATCH * 3 * size**2
        )

    def next_requests(self) -> Iterator[Any]:
        """Yield what the stream decodes next: the requests of a pass, or single images between passes."""
        while True:
            yield self.pending_requests.popleft() if self.pending_requests else self.idle_request

    def run_pass(self) -> None:
        """Run one pass and return when its last batch has arrived."""
        self.pending_requests.extend(self.pass_requests)
        batches_left = len(self.pass_requests)
        while batches_left:
            batches_left -= len(next(self.batches).request.ids) > 1

    def close(self) -> None:
        """End the workers."""
        del self.batches


def bare_loop(index: Any, size: int, images: int) -> Callable[[], None]:
    """Return a function that decodes, crops and resizes by our own code on as many threads as we use workers.

    All bytes are in memory, and the boxes are drawn beforehand.
    """
    import torch

    from train.data.loading.crop import crop_and_resize
    from train.data.order.rng import random_boxes

    jpegs = [index.read(number) for number in range(len(index))]
    crops: list[Any] = []  # (image number, (height, width), box, whether it is mirrored)
    for request in make_requests(len(index), images, size):
        widths, heights = index.widths[request.ids], index.heights[request.ids]
        boxes, mirrors = random_boxes(0, request.epoch, request.ids, widths, heights, MIN_SCALE)
        sizes = zip(heights.tolist(), widths.tolist(), strict=True)
        crops += zip(request.ids.tolist(), sizes, map(tuple, boxes.tolist()), mirrors.tolist(), strict=True)

    def run_thread(first: int) -> None:
        target = torch.empty((1, 3, size, size), dtype=torch.uint8, memory_format=torch.channels_last)
        for number, image_size, box, mirror in crops[first :: usable_cpu_count()]:
            crop_and_resize(jpegs[number], image_size, box, mirror, target)

    def run() -> None:
        with ThreadPoolExecutor(usable_cpu_count()) as pool:
            for _ in pool.map(run_thread, range(usable_cpu_count())):
                pass

    return run


class PeerProcess:
    """The process in benchmarks/.venv that runs FFCV and the classic pipeline; a context manager."""

    def __enter__(self) -> "PeerProcess":
        # stdout is a pipe: it carries the answers, and messages of the peers would spoil the table. Errors are shown.
        self.process = subprocess.Popen(
            [str(PEERS_PYTHON), str(ROOT / "benchmarks" / "data" / "baseline_loaders.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def ask(self, **request: Any) -> float:
        """Send a request and return its answer. Raises `RuntimeError` if the process has ended."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("benchmarks/data/baseline_loaders.py ended without an answer; its messages are above")
        return float(json.loads(answer))

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# --- measuring ----------------------------------------------------------------------------------------------------


def measure_speeds(index: Any, size: int, folder: Path, peers: PeerProcess | None) -> dict[str, list[float]]:
    """Return images per second of each side, one pass each in turn; the first round is not counted."""
    images = PASS_IMAGES_PER_CORE.get(size, PASS_IMAGES_PER_CORE[224]) * usable_cpu_count()
    classic_images = images // 2  # the classic pipeline is slow
    passes = LoaderPasses(index, size, images)
    loop = bare_loop(index, size, images)
    peer_arguments = {"folder": str(folder), "size": size}
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: images / seconds_of(passes.run_pass),
        "bare": lambda: images / seconds_of(loop),
    }
    if peers:
        sides["FFCV"] = lambda: images / peers.ask(feed="ffcv", images=images, **peer_arguments)
        sides["classic"] = lambda: classic_images / peers.ask(feed="classic", images=classic_images, **peer_arguments)
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(ROUNDS + 1):
        for name, side_speeds in speeds.items():
            speed = sides[name]()
            if round_number:
                side_speeds.append(speed)
    passes.close()
    return speeds


def pixel_differences(
    index: Any, folder: Path, size: int, peers: PeerProcess | None, work_folder: Path
) -> dict[str, float]:
    """Return the mean difference of our crops and of FFCV's from PIL's antialiased crops, in gray levels of 255."""
    from PIL import Image

    from train.data.loading.loader import BatchDecoder
    from train.data.order.rng import random_boxes
    from train.data.order.work import BatchRequest

    ids = np.arange(min(COMPARED_IMAGES, len(index)))
    batch = BatchDecoder({("train", None): index}, 0).decode_batch(
        BatchRequest("train", None, ids, (size, size), 0, MIN_SCALE)
    )
    boxes, flips = random_boxes(0, 0, ids, index.widths[ids], index.heights[ids], MIN_SCALE)
    differences = []
    for number, (top, left, height, width), flip in zip(ids, boxes.tolist(), flips, strict=True):
        image = Image.open(BytesIO(index.read(int(number)))).convert("RGB")
        image = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
        exact = np.array(image)[:, ::-1] if flip else np.array(image)
        differences.append(np.abs(batch.images[int(number)].numpy().astype(int) - exact).mean())
    difference_by_side = {"ours": float(np.mean(differences))}
    if peers:
        paths = [str(path) for path in sorted((folder / "train").glob("*/*.JPEG"))[: len(ids)]]
        np.savez(work_folder / "boxes.npz", paths=np.array(paths), boxes=boxes, size=size)
        difference_by_side["FFCV"] = peers.ask(pixels=str(work_folder / "boxes.npz"))
    return difference_by_side


def configure_process() -> None:
    """Configure this process, and so the bare loop, as our workers: one torch thread, a malloc that keeps memory."""
    import torch

    from train.tools.process import disable_malloc_trim

    torch.set_num_threads(1)
    disable_malloc_trim()


def markdown_rows(images: Path | None = None) -> list[str]:
    """Measure all sides, and return the section as lines of Markdown."""
    configure_process()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work_folder = Path(folder)
        peers = stack.enter_context(PeerProcess()) if PEERS_PYTHON.exists() else None
        image_count = write_copies(images, work_folder)
        measurements = []
        for short_side, size in GOAL_BY_SIZES:
            copies = work_folder / str(short_side)
            index = pack_copies(copies)
            differences = pixel_differences(index, copies, size, peers, work_folder)
            measurements.append((measure_speeds(index, size, copies, peers), differences))
    source = f"{image_count} {'photographs' if images else 'generated images'} repeated to {SET_IMAGES}"
    column_titles = " | ".join(f"{short_side}-px copies to {size}" for short_side, size in GOAL_BY_SIZES)
    return [
        f"{source}; {usable_cpu_count()} workers on each side, batches of {BATCH}, crops of {MIN_SCALE} to 1 of the "
        f"area; median (min-max) of {ROUNDS} passes in turn.",
        *([] if peers else ["", f"{NO_PEERS_MESSAGE}; only ours and the bare loop."]),
        "",
        f"| images/s | {column_titles} |",
        f"|---|{'---|' * len(GOAL_BY_SIZES)}",
        *table(measurements),
    ]


SIDE_TITLES = {
    "ours": "ours, the whole data loading",
    "bare": "bare loop: decode, crop, resize",
    "FFCV": "FFCV 1.0.2, the same JPEG bytes",
    "classic": "PIL, ToTensor, Normalize, DataLoader",
}


def table(measurements: Sequence[tuple[dict[str, list[float]], dict[str, float]]]) -> Iterator[str]:
    """Yield the rows: speeds, ratios with their goals, pixel differences. `measurements` has an entry per column."""
    sides = list(measurements[0][0])
    for name in sides:
        yield f"| {SIDE_TITLES[name]} | {' | '.join(median_with_range(speeds[name]) for speeds, _ in measurements)} |"
    goals = {"bare": (BARE_GOAL,) * 2, "FFCV": tuple(GOAL_BY_SIZES.values()), "classic": (CLASSIC_GOAL,) * 2}
    for name in sides[1:]:
        cells = []
        for (speeds, _), goal in zip(measurements, goals[name], strict=True):
            ratio = ratios(speeds["ours"], speeds[name])
            cells.append(f"{median_with_range(ratio, 2)}, goal {goal}: {goal_verdict(statistics.median(ratio), goal)}")
        yield f"| ours / {name} | {' | '.join(cells)} |"
    cells = [
        f"{differences['ours']:.2f}, goal {PIXEL_GOAL}: {goal_verdict(differences['ours'], PIXEL_GOAL, at_most=True)}"
        for _, differences in measurements
    ]
    yield f"| ours, difference from PIL's antialiased crop in gray levels of 255 | {' | '.join(cells)} |"
    if "FFCV" in measurements[0][1]:
        cells = [f"{differences['FFCV']:.2f}" for _, differences in measurements]
        yield f"| FFCV, the same difference | {' | '.join(cells)} |"


def main() -> int:
    """Measure, and print the section."""
    parser = argparse.ArgumentParser(description="Compare our data loading with a bare loop, FFCV and PIL.")
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="photographs: a folder or .tar (default: generated images)"
    )
    options = parser.parse_args()
    print(f"{describe_machine()}; load {os.getloadavg()[0]:.1f} before\n")
    print("\n".join(markdown_rows(options.images)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
