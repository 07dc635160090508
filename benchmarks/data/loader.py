"""The whole feed on all cores, beside the bare loop, FFCV and the classic pipeline, pass by pass in turn.

    .venv/bin/python benchmarks/data/loader.py --images DIR           # photographs: a folder or a .tar; two to three minutes
    sh benchmarks/peers.sh                                       # first, for FFCV and the classic pipeline

Every side reads the same JPEG bytes: 160-px copies cropped to 128 and 352-px copies to 224, crops of 0.08 to 1 of the
area, flips. Some hundred photographs are repeated to a set of 4,000, so that memory's caches do not hold it. Between
its passes our stream holds batches of one image only, and a pass is timed from empty to empty, as the peers' are.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
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
    core_count,
    describe_machine,
    goal_verdict,
    median_with_range,
    ratios,
    seconds_of,
)

GOAL_BY_SIZES = {(160, 128): 1.2, (352, 224): 1.4}  # (copy, crop) and the goal beside FFCV
PASS_IMAGES_PER_CORE = {128: 6000, 224: 2000}  # images of a pass for each core: some seconds
SET_IMAGES, CLASSES, BATCH, MIN_SCALE, ROUNDS = 4000, 10, 128, 0.08, 5
BARE_GOAL, CLASSIC_GOAL, PIXEL_GOAL, COMPARED_IMAGES = 0.85, 2.0, 0.15, 200


# --- the images ---------------------------------------------------------------------------------------------------


def read_images(images: Path | None) -> Iterator[bytes]:
    """The bytes of the images in a folder (of any depth) or a .tar, of 400 drawn ones when None."""
    if images is None:
        from train.data.packing.synthetic import draw_sample_set

        with tempfile.TemporaryDirectory() as folder:
            draw_sample_set(Path(folder), train=400, val=10)
            yield from read_images(Path(folder) / "train")
    elif images.is_dir():
        for path in sorted(one for one in images.rglob("*") if one.suffix.lower() in (".jpeg", ".jpg")):
            yield path.read_bytes()
    else:
        with tarfile.open(images) as tar:
            for member in tar:
                if member.isfile() and (file := tar.extractfile(member)):
                    yield file.read()


def write_copies(images: Path | None, folder: Path) -> int:
    """Write <place>/<short>/train/<class>/<number>.JPEG of ENTRIES images, and val/. Returns how many differ."""
    from train.data.decode import decode_image, encode_jpeg
    from train.data.packing.pack import COPY_JPEG_QUALITY, shrink_to_short_side

    whole = [decode_image(data) for _, data in zip(range(SET_IMAGES), read_images(images), strict=False)]
    for short, _ in GOAL_BY_SIZES:
        written = [encode_jpeg(shrink_to_short_side(one, short), COPY_JPEG_QUALITY) for one in whole]
        for number in range(SET_IMAGES):
            path = folder / str(short) / "train" / f"class{number % CLASSES}" / f"{number:05d}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(written[number % len(written)])
        for name in range(CLASSES):
            path = folder / str(short) / "val" / f"class{name}" / "0.JPEG"
            path.parent.mkdir(parents=True)
            path.write_bytes(written[name % len(written)])
    return len(whole)


def pack_copies(folder: Path) -> Any:
    """Pack the same images, their bytes as they are. Returns the index."""
    from train.data.index.open import load_index
    from train.data.packing.pack import pack_set

    target = folder.with_name(f"{folder.name}-packed")
    pack_set(folder, {None: target})
    return load_index(target, "train")


# --- the sides ----------------------------------------------------------------------------------------------------


def make_requests(set_size: int, images: int, size: int) -> list[Any]:
    """The batches of a pass over `images` images of a set of `count`, in a random order, other boxes in each."""
    from train.data.order.rng import permutation
    from train.data.order.work import BatchRequest

    rounds = [permutation(0, number, set_size) for number in range(-(-images // set_size))]
    ids = np.concatenate(rounds)[:images]
    parts = [ids[start : start + BATCH] for start in range(0, images, BATCH)]
    return [BatchRequest("train", None, part, (size, size), number, MIN_SCALE) for number, part in enumerate(parts)]


class LoaderPasses:
    """Our stream, its workers kept between passes."""

    def __init__(self, index: Any, size: int, images: int) -> None:
        import torch

        from train.data.loading.loader import BatchDecoder, stream_batches

        self.pending_requests: deque[Any] = deque()
        self.pass_requests, self.idle_request = (
            make_requests(len(index), images, size),
            make_requests(len(index), 1, size)[0],
        )
        maker = BatchDecoder({("train", None): index}, 0)
        self.batches = stream_batches(
            maker, self.next_requests(), core_count(), torch.device("cpu"), BATCH * 3 * size**2
        )

    def next_requests(self) -> Iterator[Any]:
        """What the stream is to make: a pass, or one image at a time while nobody waits."""
        while True:
            yield self.pending_requests.popleft() if self.pending_requests else self.idle_request

    def run_pass(self) -> None:
        """One pass."""
        self.pending_requests.extend(self.pass_requests)
        left = len(self.pass_requests)
        while left:
            left -= len(next(self.batches).request.ids) > 1

    def close(self) -> None:
        """End the workers."""
        del self.batches


def bare_loop(index: Any, size: int, images: int) -> Callable[[], None]:
    """Decode, crop and resize by our own route on as many threads: the bytes in memory, the boxes drawn before."""
    import torch

    from train.data.loading.crop import crop_and_resize
    from train.data.order.rng import random_boxes

    data = [index.read(number) for number in range(len(index))]
    items: list[Any] = []
    for work in make_requests(len(index), images, size):
        widths, heights = index.widths[work.ids], index.heights[work.ids]
        boxes, mirrors = random_boxes(0, work.epoch, work.ids, widths, heights, MIN_SCALE)
        sizes, cuts = zip(heights.tolist(), widths.tolist(), strict=True), map(tuple, boxes.tolist())
        items += zip(work.ids.tolist(), sizes, cuts, mirrors.tolist(), strict=True)

    def share(first: int) -> None:
        target = torch.empty((1, 3, size, size), dtype=torch.uint8, memory_format=torch.channels_last)
        for number, shape, box, mirror in items[first :: core_count()]:
            crop_and_resize(data[number], shape, box, mirror, target)

    def run() -> None:
        with ThreadPoolExecutor(core_count()) as pool:
            for _ in pool.map(share, range(core_count())):
                pass

    return run


class PeerProcess:
    """The process in benchmarks/.venv that runs FFCV and the classic pipeline; a context manager."""

    def __enter__(self) -> "PeerProcess":
        # What they print beside their answers would spoil the table; their errors are shown.
        self.process = subprocess.Popen(
            [str(PEERS_PYTHON), str(ROOT / "benchmarks" / "data" / "baseline_loaders.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def ask(self, **question: Any) -> float:
        """Return the answer. Raises `RuntimeError` when the process ended instead."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("benchmarks/data/baseline_loaders.py ended; what it said stands above")
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


def measure_speeds(
    index: Any,
    size: int,
    side_names: Collection[str],
    rounds: int,
    folder: Path | None = None,
    peers: PeerProcess | None = None,
) -> dict[str, list[float]]:
    """Images a second of each side that is wanted, a pass each in turn; the first round is not counted."""
    images = PASS_IMAGES_PER_CORE.get(size, PASS_IMAGES_PER_CORE[224]) * core_count()
    half = images // 2  # the classic one is slow
    feed, loop, where = (
        LoaderPasses(index, size, images),
        bare_loop(index, size, images),
        {"folder": str(folder), "size": size},
    )
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: images / seconds_of(feed.run_pass),
        "bare": lambda: images / seconds_of(loop),
    }
    if peers:
        sides["FFCV"] = lambda: images / peers.ask(feed="ffcv", images=images, **where)
        sides["classic"] = lambda: half / peers.ask(feed="classic", images=half, **where)
    found: dict[str, list[float]] = {name: [] for name in sides if name in side_names}
    for number in range(rounds + 1):
        for name, speed in found.items():
            one = sides[name]()
            if number:
                speed.append(one)
    feed.close()
    return found


def pixel_differences(
    index: Any, folder: Path, size: int, peers: PeerProcess | None, work_folder: Path
) -> dict[str, float]:
    """The mean difference in grey levels from PIL's antialiased crop over the same boxes, ours and FFCV's."""
    from PIL import Image

    from train.data.loading.loader import BatchDecoder
    from train.data.order.rng import random_boxes
    from train.data.order.work import BatchRequest

    ids = np.arange(min(COMPARED_IMAGES, len(index)))
    batch = BatchDecoder({("train", None): index}, 0).decode_batch(
        BatchRequest("train", None, ids, (size, size), 0, MIN_SCALE)
    )
    boxes, flips = random_boxes(0, 0, ids, index.widths[ids], index.heights[ids], MIN_SCALE)
    found = []
    for number, (top, left, height, width), flip in zip(ids, boxes.tolist(), flips, strict=True):
        image = Image.open(BytesIO(index.read(int(number)))).convert("RGB")
        image = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
        exact = np.array(image)[:, ::-1] if flip else np.array(image)
        found.append(np.abs(batch.images[int(number)].numpy().astype(int) - exact).mean())
    answer = {"ours": float(np.mean(found))}
    if peers:
        paths = [str(one) for one in sorted((folder / "train").glob("*/*.JPEG"))[: len(ids)]]
        np.savez(work_folder / "boxes.npz", paths=np.array(paths), boxes=boxes, size=size)
        answer["FFCV"] = peers.ask(pixels=str(work_folder / "boxes.npz"))
    return answer


def configure_process() -> None:
    """What our workers have, for the bare loop too: one thread for each, and a malloc that keeps its memory."""
    import torch

    from train.tools.process import disable_malloc_trim

    torch.set_num_threads(1)
    disable_malloc_trim()


def markdown_rows(images: Path | None = None, rounds: int = ROUNDS) -> list[str]:
    """Measure all; markdown lines."""
    configure_process()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = Path(folder)
        peers = stack.enter_context(PeerProcess()) if PEERS_PYTHON.exists() else None
        different, measured = write_copies(images, place), []
        for short, size in GOAL_BY_SIZES:
            files = place / str(short)
            index = pack_copies(files)
            off = pixel_differences(index, files, size, peers, place)
            measured.append((measure_speeds(index, size, SIDE_TITLES, rounds, files, peers), off))
    photographs = f"{different} {'photographs' if images else 'drawn images'} repeated to {SET_IMAGES}"
    return [
        f"{photographs}; {core_count()} workers on each side, batches of {BATCH}, crops of {MIN_SCALE} to 1; "
        f"ours decodes by {decoder_name()}. Median (least-most) of {rounds} passes in turn.",
        *([] if peers else ["", f"{NO_PEERS_MESSAGE}; ours and the bare loop only."]),
        "",
        f"| images/s | {' | '.join(f'{short}-px copies to {size}' for short, size in GOAL_BY_SIZES)} |",
        f"|---|{'---|' * len(GOAL_BY_SIZES)}",
        *table(measured),
    ]


def decoder_name() -> str:
    """What our route decodes with here."""
    from train.data.decode import region_decoder

    return "simplejpeg, whole images" if region_decoder(0) is None else "nvimgcodec, the crop only"


SIDE_TITLES = {
    "ours": "ours, the whole feed",
    "bare": "bare loop: decode, crop, resize",
    "FFCV": "FFCV 1.0.2, the same JPEG bytes",
    "classic": "PIL, ToTensor, Normalize, DataLoader",
}


def table(measurements: Sequence[tuple[dict[str, list[float]], dict[str, float]]]) -> Iterator[str]:
    """Yield the rows: speeds, ratios with their goals, pixels."""
    sides = list(measurements[0][0])
    for name in sides:
        yield f"| {SIDE_TITLES[name]} | {' | '.join(median_with_range(speed[name]) for speed, _ in measurements)} |"
    goals = {"bare": (BARE_GOAL,) * 2, "FFCV": tuple(GOAL_BY_SIZES.values()), "classic": (CLASSIC_GOAL,) * 2}
    for name in sides[1:]:
        cells = []
        for (speed, _), goal in zip(measurements, goals[name], strict=True):
            ratio = ratios(speed["ours"], speed[name])
            cells.append(f"{median_with_range(ratio, 2)}, goal {goal}: {goal_verdict(statistics.median(ratio), goal)}")
        yield f"| ours / {name} | {' | '.join(cells)} |"
    cells = [
        f"{off['ours']:.2f}, goal {PIXEL_GOAL}: {goal_verdict(off['ours'], PIXEL_GOAL, at_most=True)}"
        for _, off in measurements
    ]
    yield f"| ours off PIL's antialiased crop, grey levels of 255 | {' | '.join(cells)} |"
    if "FFCV" in measurements[0][1]:
        cells = [f"{off['FFCV']:.2f}" for _, off in measurements]
        yield f"| FFCV off it | {' | '.join(cells)} |"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The whole feed beside the bare loop, FFCV and the classic pipeline.")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs: a folder or .tar (else drawn ones)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"passes of each side (default: {ROUNDS})")
    options = parser.parse_args()
    print(f"{describe_machine()}; load {os.getloadavg()[0]:.1f} before\n")
    print("\n".join(markdown_rows(options.images, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
