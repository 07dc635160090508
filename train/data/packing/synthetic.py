"""The built-in sample set: drawn images of ten classes of shapes and textures, in ImageNet's layout.

With it every part of a training run can be tried without a download. A tiny residual network learns it in ten epochs.
Color does not give the class away, because it is drawn before, and independently of, the shape. Each image shows one
object over a mottled background with small blobs and lines. The object is rotated by any angle, measures 35 to 80 % of
the short side (most often 65 %), and lies in the center square. A mirrored image keeps its class.

Files are baseline JPEG of quality 90, RGB 4:2:0, and 1.5 % of them grayscale. Sizes follow ImageNet's distribution
(width x height in pixels, mean 476x408): 500x375 42 %, 375x500 7 %, 500x333 20 %, 333x500 4 %, 500x500 7 %, and 20 %
with width:height from 0.5 to 2 and the long side from 250 to 1000 (both log-uniform).
"""

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageDraw

from train.data.manifest import SPLITS
from train.tools.files import SHARED_LOCK, locked, write_atomic
from train.tools.host import usable_cpu_count
from train.tools.process import die_with_parent
from train.tools.process_log import Progress, no_progress

FloatArray = npt.NDArray[np.floating]
Rng = np.random.Generator
DrawTask = tuple[int, str, int, Path]  # seed, split, number, where to write

CLASSES = ("checkers", "crescent", "cross", "disc", "dots", "ring", "square", "star", "stripes", "triangle")
SAMPLE_VERSION = 1  # increase it when draw_image() changes, so that an older set is not taken for a new one

_COMMON_SIZES = ((500, 375), (375, 500), (500, 333), (333, 500), (500, 500))
_SIZE_PROBABILITIES = (0.42, 0.07, 0.20, 0.04, 0.07, 0.20)  # of the common sizes; the last is for any other size
_LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114])
_MIN_LUMA_CONTRAST = 70.0  # of 255: between object and background, so that a grayscale image shows its object too
_IMAGES_PER_CHUNK = 50  # in one task of a worker: about a quarter of a second


def draw_image(seed: int, split: str, number: int) -> bytes:
    """Return image `number`, of class CLASSES[number % 10], as JPEG. Only arguments and libraries determine it."""
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    size = _random_size(rng)
    background_color = rng.uniform(20, 235, 3)
    body_color = _contrasting_color(rng, background_color)
    ink_color = _contrasting_color(rng, body_color)
    image = _mottled_image(rng, size, background_color, 10)
    _draw_clutter(rng, image)
    _place_object(rng, image, CLASSES[number % len(CLASSES)], [body_color, ink_color])
    return _encode_with_grain(rng, image)


def draw_sample_set(
    root: Path, *, seed: int = 0, train: int = 4000, val: int = 1000, progress: Progress = no_progress
) -> int:
    """Draw `train` + `val` images into `root` (Linux only). Returns the number of new files.

    The layout is root/train/CLASS/CLASS_00000012.JPEG, and the same for val. sample.json is written last and marks a
    complete set. An interrupted call resumes: complete files stay, and its parameters are kept in .sample.json. A
    second call at the same time waits for the first. There is a process for each core; none outlives the call.
    `progress` gets (files present, files in all). Raises `ValueError` for another sample in `root`, and `OSError`.
    """
    parameters = {"seed": seed, "train": train, "val": val, "version": SAMPLE_VERSION}
    if _is_complete(root, parameters):
        return 0
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / ".sample.lock", permissions=SHARED_LOCK):
        return 0 if _is_complete(root, parameters) else _draw_missing_images(root, parameters, progress)


def _draw_missing_images(root: Path, parameters: dict[str, int], progress: Progress) -> int:
    _prepare_folders(root)
    pending = root / ".sample.json"
    pending.write_text(json.dumps(parameters) + "\n", encoding="ascii")
    numbered = [(split, number) for split in SPLITS for number in range(parameters[split])]
    all_tasks = [(parameters["seed"], split, number, _image_path(root, split, number)) for split, number in numbered]
    tasks = [task for task in all_tasks if not task[-1].exists()]

    def report(drawn: int) -> None:
        progress(len(all_tasks) - len(tasks) + drawn, len(all_tasks))

    _run_in_pool(tasks, report)
    pending.replace(root / "sample.json")
    return len(tasks)


def _is_complete(root: Path, parameters: dict[str, int]) -> bool:
    """Return whether the sample is complete. Raises `ValueError` for a sample of other parameters."""
    for name in ("sample.json", ".sample.json"):
        try:
            existing = json.loads((root / name).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):  # absent, or cut short by a kill
            continue
        if existing != parameters:
            differences = ", ".join(
                f"{key} {existing.get(key)} instead of {value}"
                for key, value in parameters.items()
                if existing.get(key) != value
            )
            raise ValueError(
                f"{root} holds a sample drawn with {differences}; give another folder, or remove it: rm -r {root}"
            )
        if name == "sample.json":
            return True
    return False


def _prepare_folders(root: Path) -> None:
    """Create all class folders, however few the images, and remove temporary files of a killed call."""
    for split in SPLITS:
        for class_name in CLASSES:
            class_folder = root / split / class_name
            class_folder.mkdir(parents=True, exist_ok=True)
            for leftover in class_folder.glob(".*"):
                leftover.unlink()
        foreign_names = {path.name for path in (root / split).iterdir()} - set(CLASSES)
        if foreign_names:
            raise ValueError(
                f"{root / split} holds {min(foreign_names)!r}, which is not a class of the generated sample; "
                "give another folder"
            )


def _image_path(root: Path, split: str, number: int) -> Path:
    class_name = CLASSES[number % len(CLASSES)]
    return root / split / class_name / f"{class_name}_{number:08d}.JPEG"


def _run_in_pool(tasks: list[DrawTask], report: Callable[[int], object]) -> None:
    # A fork starts at once and, unlike a spawn, does not import the caller's __main__ again.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(usable_cpu_count(), fork, _init_draw_worker, (os.getpid(),))
    try:
        for done, _ in enumerate(pool.map(_write_image, tasks, chunksize=_IMAGES_PER_CHUNK), 1):
            if done % _IMAGES_PER_CHUNK == 0 or done == len(tasks):
                report(done)
    except BrokenProcessPool as error:
        raise ChildProcessError("a drawing process was killed; run the command again: finished images stay") from error
    finally:  # after an error or Ctrl-C too: cancel waiting tasks, and wait until every worker has ended
        pool.shutdown(wait=True, cancel_futures=True)


def _init_draw_worker(parent_pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent_pid)


def _write_image(task: DrawTask) -> None:
    seed, split, number, path = task
    write_atomic(path, draw_image(seed, split, number), durable=False)


def _random_size(rng: Rng) -> tuple[int, int]:
    """Return (width, height) with ImageNet's distribution."""
    kind = int(rng.choice(len(_SIZE_PROBABILITIES), p=_SIZE_PROBABILITIES))
    if kind < len(_COMMON_SIZES):
        return _COMMON_SIZES[kind]
    aspect = 2.0 ** rng.uniform(-1, 1)
    long_side = 500 * 2.0 ** rng.uniform(-1, 1)
    return round(long_side * min(1, aspect)), round(long_side * min(1, 1 / aspect))


def _contrasting_color(rng: Rng, other: FloatArray) -> FloatArray:
    """Return the first of 64 random colors with _MIN_LUMA_CONTRAST to `other`, or the one with most contrast."""
    candidates: list[FloatArray] = list(rng.uniform(20, 235, (64, 3)))
    return max(candidates, key=lambda color: min(_MIN_LUMA_CONTRAST, abs((color - other) @ _LUMA_WEIGHTS)))


def _mottled_image(rng: Rng, size: tuple[int, int], color: FloatArray, spread: float) -> Image.Image:
    """Return an image of (width, height) with a color gradient and coarse noise, both resized up."""
    columns, rows = (max(2, round(12 * side / min(size))) for side in size)
    slopes = rng.normal(0, 2 * spread, (2, 1, 1, 3))
    down, across = (np.linspace(-0.5, 0.5, count)[:, None] for count in (rows, columns))
    field = color + slopes[0] * down[:, None] + slopes[1] * across
    field = np.clip(field + rng.normal(0, spread, field.shape), 0, 255)
    return Image.fromarray(field.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)


def _draw_clutter(rng: Rng, image: Image.Image) -> None:
    """Draw a few blobs and lines that are too small to pass for an object."""
    pen = ImageDraw.Draw(image)
    short_side = min(image.size)
    for _ in range(rng.integers(3, 9)):
        color = tuple(rng.integers(20, 236, 3).tolist())
        x, y = rng.uniform(0, 1, 2) * image.size
        if rng.random() < 0.5:
            half_width, half_height = rng.uniform(0.01, 0.04, 2) * short_side
            pen.ellipse((x - half_width, y - half_height, x + half_width, y + half_height), color)
        else:
            dx, dy = rng.uniform(-0.4, 0.4, 2) * short_side
            pen.line((x, y, x + dx, y + dy), color, round(short_side * rng.uniform(0.004, 0.015)))


def _place_object(rng: Rng, image: Image.Image, class_name: str, colors: list[FloatArray]) -> None:
    """Draw the object of a class at a random size, position and angle: its body and, for some classes, its ink."""
    side = round(min(image.size) * rng.triangular(0.35, 0.65, 0.80))
    room = 0.48 * min(image.size) - side / 2
    left, top = (round((full - side) / 2 + rng.uniform(-room, room)) for full in image.size)
    angle = rng.uniform(0, 2 * math.pi)
    detail = rng.random()
    line = np.linspace(-1, 1, side, dtype=np.float32)
    across, down = math.cos(angle) * line, math.sin(angle) * line
    x, y = across - down[:, None], across[:, None] + down
    for color, depth in zip(colors, _shape_depths(class_name, x, y, detail), strict=False):
        opacity = np.clip(depth * (side / 2) + 0.5, 0, 1) * 255  # the edge is one pixel wide
        mask = Image.fromarray(opacity.astype(np.uint8))
        image.paste(_mottled_image(rng, (side, side), color, 8), (left, top), mask)


def _shape_depths(class_name: str, x: FloatArray, y: FloatArray, detail: float) -> list[FloatArray]:
    """Return how deep each point lies inside the shape and, for some classes, inside the pattern on the shape.

    Depths are in radii, and negative outside. `detail` from 0 to 1 varies the shape within its class.
    """
    disc: FloatArray = 1 - np.hypot(x, y)
    polygons = {"triangle": (3, 0), "square": (4, 0), "star": (5, 1)}
    if class_name in polygons:
        return [_polygon_depth(x, y, *polygons[class_name])]
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
    """Return how deep each point lies inside a regular polygon, in radii; negative outside.

    A point that lies beyond at most `ignored_sides` of the sides is inside: with one of five, the polygon is a star.
    """
    angles = np.arange(sides) * (2 * math.pi / sides)
    reach = math.cos(math.pi * (1 + ignored_sides) / sides)
    lines = [reach - x * math.cos(angle) - y * math.sin(angle) for angle in angles]
    return np.asarray(np.sort(np.stack(lines), axis=0)[ignored_sides])


def _encode_with_grain(rng: Rng, image: Image.Image) -> bytes:
    """Encode as JPEG with the grain of a photograph, without which the files would be far too small."""
    pixels = np.asarray(image).astype(np.int16)
    grain = int(rng.integers(3, 10))
    pixels += rng.integers(-grain, grain, (*pixels.shape[:2], 1), np.int16, endpoint=True)
    noisy = np.clip(pixels, 0, 255).astype(np.uint8)
    kind = ("RGB", "420")
    if rng.random() < 0.015:
        noisy, kind = (noisy @ _LUMA_WEIGHTS).astype(np.uint8)[:, :, None], ("GRAY", "Gray")
    data: bytes = simplejpeg.encode_jpeg(noisy, 90, *kind)
    return data
