"""Draw the built-in sample: ten classes of shapes and textures, laid out as ImageNet is.

It lets every part of a training run be tried without a download. A tiny residual network
learns it in ten epochs, yet colour does not give the class away: it is drawn before, and
independently of, the shape. Each image shows one object over a mottled ground with small
blobs and lines. The object is turned by any angle, 35 to 80 % of the short side across (most
often 65), and in the centre square. A mirrored image keeps its class. Files are baseline
JPEG of quality 90, RGB 4:2:0, and 1.5 % of them one-channel grey. Sizes follow ImageNet's
spread (width x height in pixels, mean 476x408): 500x375 42 %, 375x500 7 %, 500x333 20 %,
333x500 4 %, 500x500 7 %, and 20 % with width:height from 0.5 to 2 and the long side from 250
to 1000 (both log-uniform).
"""

import ctypes
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageDraw

from train.tools.filesystem import locked, write_atomic

FloatArray = npt.NDArray[np.floating]
Rng = np.random.Generator
DrawTask = tuple[int, str, int, Path]  # seed, split, number, where to write

CLASSES: tuple[str, ...] = (
    *("checkers", "crescent", "cross", "disc", "dots"),
    *("ring", "square", "star", "stripes", "triangle"),
)
SPLITS = ("train", "val")
SAMPLE_VERSION = 1  # raise it when draw() changes, so that an older set is not taken for a new one

_COMMON_SIZES = ((500, 375), (375, 500), (500, 333), (333, 500), (500, 500))
_SIZE_PROBABILITIES = (0.42, 0.07, 0.20, 0.04, 0.07, 0.20)  # the last: any size and aspect
_LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114])
_MIN_LUMA_CONTRAST = 70.0  # least luma step, of 255, so that a grey image shows its object as well
_IMAGES_PER_CHUNK = 50  # images in one task of a worker, about a quarter of a second


def draw_image(seed: int, split: str, number: int) -> bytes:
    """Return the JPEG bytes of image `number`, a pure function of the arguments.

    Its class is CLASSES[number % 10]. Bytes repeat under the same versions of the libraries.
    Raises ValueError for a split other than train and val, and a negative seed or number.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be train or val, not {split!r}")
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    size, ground = _random_size(rng), rng.uniform(20, 235, 3)
    body = _contrasting_colour(rng, ground)
    ink = _contrasting_colour(rng, body)
    image = _mottled_image(rng, size, ground, 10)
    _draw_clutter(rng, image)
    _place_object(rng, image, CLASSES[number % len(CLASSES)], [body, ink])
    return _encode_with_grain(rng, image)


def draw_sample_set(
    root: Path, *, seed: int = 0, train: int = 4000, val: int = 1000,
    workers: int | None = None, progress: Callable[[int, int], None] | None = None,
) -> int:  # fmt: skip
    """Write `train` + `val` images below `root`; return how many files are new (Linux only).

    The layout is root/train/CLASS/CLASS_00000012.JPEG, likewise val; sample.json comes last
    and marks a complete set. A run that was stopped resumes: whole files stay, its parameters
    wait in .sample.json. A second call at the same time waits for the first. `workers` is the number
    of processes (default: the cores this process may use); `progress` gets (files there,
    files in all) in this process about every 50 images.

    Raises ValueError for another sample or other classes in `root` or a number out of range,
    and OSError where a file cannot be written. No process outlives the call.
    """
    if min(seed, train, val, 0 if workers is None else workers - 1) < 0:
        raise ValueError("seed, train and val must be at least 0, and workers at least 1")
    mark = {"seed": seed, "train": train, "val": val, "version": SAMPLE_VERSION}
    if _is_complete(root, mark):
        return 0
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / ".sample.lock"):
        return 0 if _is_complete(root, mark) else _draw_missing_images(root, mark, workers, progress)


def _draw_missing_images(
    root: Path, parameters: dict[str, int], workers: int | None, progress: Callable[[int, int], None] | None
) -> int:
    _prepare_folders(root)
    pending = root / ".sample.json"
    pending.write_text(json.dumps(parameters) + "\n", encoding="ascii")
    jobs = [job for job in _draw_tasks(root, parameters) if not job[-1].exists()]
    total, report = parameters["train"] + parameters["val"], progress or (lambda done, total: None)
    _run_in_pool(jobs, workers, lambda done: report(total - len(jobs) + done, total))
    pending.replace(root / "sample.json")
    return len(jobs)


def _is_complete(root: Path, parameters: dict[str, int]) -> bool:
    for name in ("sample.json", ".sample.json"):
        try:
            found = json.loads((root / name).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):  # none, or one cut short by a kill
            continue
        if found != parameters:
            raise ValueError(f"{root} holds a sample drawn with {found}, not {parameters}")
        if name == "sample.json":
            return True
    return False


def _prepare_folders(root: Path) -> None:
    """Make all class folders, however few the images, and clear what a killed run left."""
    for part in (root / split for split in SPLITS):
        for folder in (part / name for name in CLASSES):
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".*"):
                leftover.unlink()
        others = {entry.name for entry in part.iterdir()} - set(CLASSES)
        if others:
            raise ValueError(f"{part} holds {min(others)!r}, which is not of the sample")


def _draw_tasks(root: Path, parameters: dict[str, int]) -> Iterator[DrawTask]:
    for split in SPLITS:
        for number in range(parameters[split]):
            name = CLASSES[number % len(CLASSES)]
            path = root / split / name / f"{name}_{number:08d}.JPEG"
            yield parameters["seed"], split, number, path


def _run_in_pool(tasks: list[DrawTask], workers: int | None, report: Callable[[int], object]) -> None:
    # A fork starts at once and, unlike a spawn, never imports the caller's __main__ again.
    fork, count = multiprocessing.get_context("fork"), len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(workers or count, fork, _init_draw_worker, (os.getpid(),))
    try:
        for done, _ in enumerate(pool.map(_write_image, tasks, chunksize=_IMAGES_PER_CHUNK), 1):
            if done % _IMAGES_PER_CHUNK == 0 or done == len(tasks):
                report(done)
    except BrokenProcessPool as error:
        raise ChildProcessError("a drawing process was killed; say it again: what is drawn stays") from error
    finally:  # after an error or Ctrl-C as well: drop what waits, see every worker end
        pool.shutdown(wait=True, cancel_futures=True)


def _init_draw_worker(parent_pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C for all
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def _write_image(task: DrawTask) -> None:
    seed, split, number, path = task
    write_atomic(path, draw_image(seed, split, number), durable=False)


def _random_size(rng: Rng) -> tuple[int, int]:
    kind = int(rng.choice(len(_SIZE_PROBABILITIES), p=_SIZE_PROBABILITIES))
    if kind < len(_COMMON_SIZES):
        return _COMMON_SIZES[kind]
    aspect, long = 2.0 ** rng.uniform(-1, 1), 500 * 2.0 ** rng.uniform(-1, 1)
    return round(long * min(1, aspect)), round(long * min(1, 1 / aspect))


def _contrasting_colour(rng: Rng, other: FloatArray) -> FloatArray:
    """Return the first of 64 random colours that stands out from `other`, or the best."""
    choices: list[FloatArray] = list(rng.uniform(20, 235, (64, 3)))
    return max(choices, key=lambda one: min(_MIN_LUMA_CONTRAST, abs((one - other) @ _LUMA_WEIGHTS)))


def _mottled_image(rng: Rng, size: tuple[int, int], colour: FloatArray, spread: float) -> Image.Image:
    """Return a mottled image: a slope of colour, and noise drawn coarse and blown up."""
    columns, rows = (max(2, round(12 * side / min(size))) for side in size)
    slopes = rng.normal(0, 2 * spread, (2, 1, 1, 3))
    down, across = (np.linspace(-0.5, 0.5, count)[:, None] for count in (rows, columns))
    field = colour + slopes[0] * down[:, None] + slopes[1] * across
    field = np.clip(field + rng.normal(0, spread, field.shape), 0, 255)
    return Image.fromarray(field.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)


def _draw_clutter(rng: Rng, image: Image.Image) -> None:
    pen, short = ImageDraw.Draw(image), min(image.size)
    for _ in range(rng.integers(3, 9)):  # all too small to pass for an object
        colour = tuple(rng.integers(20, 236, 3).tolist())
        x, y = rng.uniform(0, 1, 2) * image.size
        if rng.random() < 0.5:
            wide, high = rng.uniform(0.01, 0.04, 2) * short
            pen.ellipse((x - wide, y - high, x + wide, y + high), colour)
        else:
            dx, dy = rng.uniform(-0.4, 0.4, 2) * short
            pen.line((x, y, x + dx, y + dy), colour, round(short * rng.uniform(0.004, 0.015)))


def _place_object(rng: Rng, image: Image.Image, class_name: str, colours: list[FloatArray]) -> None:
    side = round(min(image.size) * rng.triangular(0.35, 0.65, 0.80))
    room = 0.48 * min(image.size) - side / 2
    left, top = (round((full - side) / 2 + rng.uniform(-room, room)) for full in image.size)
    turn, detail = rng.uniform(0, 2 * math.pi), rng.random()
    line = np.linspace(-1, 1, side, dtype=np.float32)
    across, down = math.cos(turn) * line, math.sin(turn) * line
    x, y = across - down[:, None], across[:, None] + down
    for colour, depth in zip(colours, _shape_depths(class_name, x, y, detail), strict=False):
        soft = np.clip(depth * (side / 2) + 0.5, 0, 1) * 255  # one pixel of soft edge
        mask = Image.fromarray(soft.astype(np.uint8))
        image.paste(_mottled_image(rng, (side, side), colour, 8), (left, top), mask)


def _shape_depths(class_name: str, x: FloatArray, y: FloatArray, detail: float) -> list[FloatArray]:
    """Return how deep, in radii, each point lies in the body and (some classes) its ink."""
    disc: FloatArray = 1 - np.hypot(x, y)
    plain = {"triangle": (3, 0), "square": (4, 0), "star": (5, 1)}
    if class_name in plain:
        return [_polygon_depth(x, y, *plain[class_name])]
    if class_name == "disc":
        return [disc]
    if class_name == "ring":
        return [np.minimum(disc, 0.5 - 0.18 * detail - disc)]
    if class_name == "crescent":
        return [np.minimum(disc, np.hypot(x - 0.4 - 0.15 * detail, y) - 0.8)]
    if class_name == "cross":
        near, far = np.sort(np.abs([x, y]), axis=0)
        return [np.minimum(0.2 + 0.1 * detail - near, 0.95 - far)]
    body = disc if detail < 0.5 else _polygon_depth(x, y, 4, 0)
    cell = 0.38 + 0.1 * (2 * detail % 1)
    wave, weft = np.sin(x * (math.pi / cell)), np.sin(y * (math.pi / cell))
    ink = {"stripes": wave, "checkers": wave * weft, "dots": wave + weft - 1}[class_name]
    return [body, np.minimum(body, ink * (cell / math.pi))]


def _polygon_depth(x: FloatArray, y: FloatArray, sides: int, ignored_sides: int) -> FloatArray:
    """Return the depth in a regular polygon, or its star: all lines but `spared` hold."""
    angles = np.arange(sides) * (2 * math.pi / sides)
    reach = math.cos(math.pi * (1 + ignored_sides) / sides)
    lines = [reach - x * math.cos(angle) - y * math.sin(angle) for angle in angles]
    return np.asarray(np.sort(np.stack(lines), axis=0)[ignored_sides])


def _encode_with_grain(rng: Rng, image: Image.Image) -> bytes:
    """Add the grain of a photograph, without which the files would be far too small."""
    pixels = np.asarray(image).astype(np.int16)
    grain = int(rng.integers(3, 10))
    pixels += rng.integers(-grain, grain, (*pixels.shape[:2], 1), np.int16, endpoint=True)
    noisy = np.clip(pixels, 0, 255).astype(np.uint8)
    kind = ("RGB", "420")
    if rng.random() < 0.015:
        noisy, kind = (noisy @ _LUMA_WEIGHTS).astype(np.uint8)[:, :, None], ("GRAY", "Gray")
    data: bytes = simplejpeg.encode_jpeg(noisy, 90, *kind)
    return data
