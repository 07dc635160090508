"""Microseconds of one core per crop, for each way from the bytes of a JPEG to pixels, and its difference from PIL.

    .venv/bin/python benchmarks/data/pixels.py [IMAGES]    # a folder or .tar of JPEG files; default: generated images

Random crops of 0.08 to 1 of the area, half of them mirrored. Copies with a short side of 160 and 352 pixels are made
here, as JPEG of quality 90. The routes run in turn over the same boxes; the figure is processor time, of the fastest of
the passes. Routes whose library is not installed are left out. OpenCV's routes show the alternative that we rejected.
"""

import importlib
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from train.data import decode
from train.data.loading import crop
from train.data.order.rng import random_boxes
from train.data.packing.synthetic import draw_image

CASES = ((160, 128), (352, 224), (352, 288), (None, 224))  # (short side of the copy, None for full size; crop)
IMAGE_COUNT = 200
PASSES = 5
# JPEG bytes, image size, box, whether the crop is mirrored
CropTask = tuple[bytes, decode.ImageSize, decode.Box, bool]
Route = Callable[[list[CropTask], torch.Tensor], None]


def read_source_images(images: Path | None) -> list[bytes]:
    """Return full-size JPEGs: of a folder or a .tar, generated ones for None."""
    if images is None:
        return [draw_image(0, "train", number) for number in range(IMAGE_COUNT)]
    if images.is_dir():
        jpegs = [path.read_bytes() for path in sorted(images.rglob("*.JPEG"))]
    else:
        with tarfile.open(images) as tar:
            jpegs = [tar.extractfile(member).read() for member in tar if member.isfile()]  # type: ignore[union-attr]
    return jpegs[:: max(1, len(jpegs) // IMAGE_COUNT)][:IMAGE_COUNT]


def shrunk_copy(data: bytes, short_side: int | None) -> bytes:
    """Return a JPEG shrunk to a short side in pixels; a smaller JPEG, and any for None, as it is."""
    image = Image.open(BytesIO(data)).convert("RGB")
    if short_side is None or min(image.size) <= short_side:
        return data
    factor = short_side / min(image.size)
    size = round(image.width * factor), round(image.height * factor)
    return decode.encode_jpeg(np.asarray(image.resize(size, Image.Resampling.BICUBIC)), 90)


def make_crop_tasks(images: list[bytes]) -> list[CropTask]:
    """Draw a random box for each image."""
    sizes = [decode.decode_image(data).shape[:2] for data in images]
    heights, widths = zip(*sizes, strict=True)
    boxes, mirrors = random_boxes(0, 0, np.arange(len(images)), widths, heights, 0.08)
    rows = zip(images, sizes, boxes.tolist(), mirrors.tolist(), strict=True)
    return [(data, (size[0], size[1]), tuple(box), mirror) for data, size, box, mirror in rows]


# --- routes -------------------------------------------------------------------------------------------------------


def crop_as_loader(tasks: list[CropTask], out: torch.Tensor) -> None:
    """Crop with the loader's own code."""
    for task, view in zip(tasks, crop.image_views(out), strict=True):
        crop.crop_and_resize(*task, view)


@contextmanager
def without_region_decoder() -> Iterator[None]:
    """Turn off nvimgcodec inside the context, whether it is installed or not."""
    original = decode.region_decoder
    decode.region_decoder = lambda _thread: None  # type: ignore[assignment]
    try:
        yield
    finally:
        decode.region_decoder = original


def crop_as_loader_whole_images(tasks: list[CropTask], out: torch.Tensor) -> None:
    """Crop as the loader does without nvimgcodec: decode whole images."""
    with without_region_decoder():
        crop_as_loader(tasks, out)


def crop_by_interpolate(tasks: list[CropTask], out: torch.Tensor) -> None:
    """Crop with the kernel that the loader uses, called through `torch.nn.functional`."""
    for (data, _, (top, left, height, width), mirror), target in zip(tasks, out, strict=True):
        part = torch.from_numpy(decode.decode_image(data)).permute(2, 0, 1)[
            None, :, top : top + height, left : left + width
        ]
        shape = (target.shape[0], target.shape[1])
        part = torch.nn.functional.interpolate(part, shape, mode="bilinear", antialias=True)[0].permute(1, 2, 0)
        target.copy_(part.flip(1) if mirror else part)


def crop_by_pil(tasks: list[CropTask], out: torch.Tensor) -> None:
    """Crop with PIL: the reference for the differences."""
    for (data, _, (top, left, height, width), mirror), target in zip(tasks, out.numpy(), strict=True):
        image = Image.open(BytesIO(data)).convert("RGB").crop((left, top, left + width, top + height))
        image = image.resize((target.shape[1], target.shape[0]), Image.Resampling.BILINEAR)
        target[:] = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else image


def make_opencv_route(cv2: Any, choose_method: Callable[[int, int, int], int]) -> Route:
    """Return a route that decodes with simplejpeg and resizes with OpenCV.

    `choose_method(height, width, size)` returns OpenCV's interpolation flag.
    """

    def run(tasks: list[CropTask], out: torch.Tensor) -> None:
        for (data, _, (top, left, height, width), mirror), target in zip(tasks, out.numpy(), strict=True):
            part = decode.decode_image(data)[top : top + height, left : left + width]
            shape = (target.shape[1], target.shape[0])
            part = cv2.resize(part, shape, target, 0, 0, choose_method(height, width, shape[0]))
            if mirror:
                target[:] = cv2.flip(part, 1)

    return run


def available_routes() -> dict[str, Route]:
    """Return the routes whose libraries are installed, PIL first."""
    routes: dict[str, Route] = {
        "PIL": crop_by_pil,
        "simplejpeg, torch's interpolate": crop_by_interpolate,
        "ours": crop_as_loader_whole_images,
    }
    if decode.region_decoder(threading.get_native_id()):
        routes["ours with nvimgcodec"] = crop_as_loader
    with suppress(ImportError):
        cv2 = importlib.import_module("cv2")
        cv2.setNumThreads(0)
        routes["simplejpeg, OpenCV LINEAR (aliases)"] = make_opencv_route(cv2, lambda *_: int(cv2.INTER_LINEAR))
        routes["simplejpeg, OpenCV AREA"] = make_opencv_route(
            cv2, lambda height, width, size: int(cv2.INTER_AREA if max(height, width) > size else cv2.INTER_LINEAR)
        )
    return routes


# --- the table ----------------------------------------------------------------------------------------------------


def measure_routes(
    tasks: list[CropTask], size: int, routes_by_name: dict[str, Route]
) -> dict[str, tuple[float, float]]:
    """Return for each route the microseconds per crop, and the mean difference from PIL in gray levels."""
    outs = {name: torch.zeros((len(tasks), size, size, 3), dtype=torch.uint8) for name in routes_by_name}
    best_seconds = dict.fromkeys(routes_by_name, float("inf"))
    for _ in range(PASSES):
        for name, route in routes_by_name.items():
            start = time.process_time()
            route(tasks, outs[name])
            best_seconds[name] = min(best_seconds[name], time.process_time() - start)
    exact = outs["PIL"].short()
    differences = {name: float((out.short() - exact).abs().double().mean()) for name, out in outs.items()}
    return {name: (1e6 * best_seconds[name] / len(tasks), differences[name]) for name in routes_by_name}


def markdown_rows(images: Path | None) -> list[str]:
    """Measure, and return the table as lines of Markdown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        routes = available_routes()
        jpegs = read_source_images(images)
        columns = {}
        for short_side, size in CASES:
            tasks = make_crop_tasks([shrunk_copy(data, short_side) for data in jpegs])
            columns[f"{short_side or 'full'} to {size}"] = measure_routes(tasks, size, routes)
    finally:
        torch.set_num_threads(threads)
    table = [
        f"{len(jpegs)} {'photographs' if images else 'generated images'}; microseconds of one core per crop "
        "(mean difference from PIL in gray levels of 255).",
        "",
        f"| route | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for name in routes:
        cells = (f"{column[name][0]:.0f} ({column[name][1]:.2f})" for column in columns.values())
        table.append(f"| {name} | {' | '.join(cells)} |")
    return table


def main() -> None:
    """Print the table."""
    print("\n".join(markdown_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else None)))


if __name__ == "__main__":
    main()
