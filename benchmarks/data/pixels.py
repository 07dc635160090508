"""Microseconds of one core for one crop, by every route from a JPEG's bytes to pixels, and how near each is to PIL.

    python benchmarks/data/pixels.py [IMAGES]     a folder or a tar of JPEG files; without, drawn ones

Random crops of 0.08 to 1 of the area, half of them mirrored; copies with a short side of 160 and 352 pixels are made
here, as JPEG of quality 90. The routes run in turn over the same boxes, in processor time, the best of the passes.
Routes whose library is not installed are left out: OpenCV's are here to show what was not taken.
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

CASES = ((160, 128), (352, 224), (352, 288), (None, 224))  # short side of the copy (None: full size), crop
IMAGE_COUNT = 200  # images
PASSES = 5
CropTask = tuple[bytes, decode.ImageSize, decode.Box, bool]
Route = Callable[[list[CropTask], torch.Tensor], None]


def read_source_images(images: Path | None) -> list[bytes]:
    """Full-size JPEGs: of a folder, of a tar, or drawn."""
    if images is None:
        return [draw_image(0, "train", number) for number in range(IMAGE_COUNT)]
    if images.is_dir():
        found = [path.read_bytes() for path in sorted(images.rglob("*.JPEG"))]
    else:
        with tarfile.open(images) as tar:
            found = [tar.extractfile(one).read() for one in tar if one.isfile()]  # type: ignore[union-attr]
    return found[:: max(1, len(found) // IMAGE_COUNT)][:IMAGE_COUNT]


def shrunk_copy(data: bytes, short_side: int | None) -> bytes:
    """The JPEG with its short side at so many pixels; a smaller one as it is."""
    image = Image.open(BytesIO(data)).convert("RGB")
    if short_side is None or min(image.size) <= short_side:
        return data
    factor = short_side / min(image.size)
    size = round(image.width * factor), round(image.height * factor)
    return decode.encode_jpeg(np.asarray(image.resize(size, Image.Resampling.BICUBIC)), 90)


def make_crop_tasks(images: list[bytes]) -> list[CropTask]:
    """A box for each image."""
    sizes = [decode.decode_image(data).shape[:2] for data in images]
    heights, widths = zip(*sizes, strict=True)
    boxes, mirrors = random_boxes(0, 0, np.arange(len(images)), widths, heights, 0.08)
    rows = zip(images, sizes, boxes.tolist(), mirrors.tolist(), strict=True)
    return [(data, (size[0], size[1]), tuple(box), mirror) for data, size, box, mirror in rows]


# --- routes -------------------------------------------------------------------------------------------------------


def crop_as_loader(tasks: list[CropTask], out: torch.Tensor) -> None:
    """As the loader does it."""
    for job, row in zip(tasks, crop.image_views(out), strict=True):
        crop.crop_and_resize(*job, row)


@contextmanager
def without_region_decoder() -> Iterator[None]:
    """Without the extra nvimgcodec, whether it is installed or not."""
    kept = decode.region_decoder
    decode.region_decoder = lambda _thread: None  # type: ignore[assignment]
    try:
        yield
    finally:
        decode.region_decoder = kept


def crop_as_loader_whole_images(tasks: list[CropTask], out: torch.Tensor) -> None:
    """As the loader does it where nothing is installed beside it."""
    with without_region_decoder():
        crop_as_loader(tasks, out)


def crop_by_interpolate(tasks: list[CropTask], out: torch.Tensor) -> None:
    """The same kernel through `torch.nn.functional`."""
    for (data, _, (top, left, height, width), mirror), target in zip(tasks, out, strict=True):
        part = torch.from_numpy(decode.decode_image(data)).permute(2, 0, 1)[
            None, :, top : top + height, left : left + width
        ]
        shape = (target.shape[0], target.shape[1])
        part = torch.nn.functional.interpolate(part, shape, mode="bilinear", antialias=True)[0].permute(1, 2, 0)
        target.copy_(part.flip(1) if mirror else part)


def crop_by_pil(tasks: list[CropTask], out: torch.Tensor) -> None:
    """What the others are compared with."""
    for (data, _, (top, left, height, width), mirror), target in zip(tasks, out.numpy(), strict=True):
        image = Image.open(BytesIO(data)).convert("RGB").crop((left, top, left + width, top + height))
        image = image.resize((target.shape[1], target.shape[0]), Image.Resampling.BILINEAR)
        target[:] = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else image


def make_opencv_route(cv2: Any, choose_method: Callable[[int, int, int], int]) -> Route:
    """simplejpeg, then OpenCV's resize by method(height, width, size)."""

    def run(todo: list[CropTask], out: torch.Tensor) -> None:
        for (data, _, (top, left, height, width), mirror), target in zip(todo, out.numpy(), strict=True):
            part = decode.decode_image(data)[top : top + height, left : left + width]
            shape = (target.shape[1], target.shape[0])
            part = cv2.resize(part, shape, target, 0, 0, choose_method(height, width, shape[0]))
            if mirror:
                target[:] = cv2.flip(part, 1)

    return run


def available_routes() -> dict[str, Route]:
    """What can run here, PIL first."""
    found: dict[str, Route] = {
        "PIL": crop_by_pil,
        "simplejpeg, torch's interpolate": crop_by_interpolate,
        "ours": crop_as_loader_whole_images,
    }
    if decode.region_decoder(threading.get_native_id()):
        found["ours with nvimgcodec"] = crop_as_loader
    with suppress(ImportError):
        cv2 = importlib.import_module("cv2")
        cv2.setNumThreads(0)
        found["simplejpeg, OpenCV LINEAR (aliases)"] = make_opencv_route(cv2, lambda *_: int(cv2.INTER_LINEAR))
        found["simplejpeg, OpenCV AREA"] = make_opencv_route(
            cv2, lambda height, width, size: int(cv2.INTER_AREA if max(height, width) > size else cv2.INTER_LINEAR)
        )
    return found


# --- the table ----------------------------------------------------------------------------------------------------


def measure_routes(
    tasks: list[CropTask], size: int, routes_by_name: dict[str, Route]
) -> dict[str, tuple[float, float]]:
    """Microseconds of a crop by route, and the mean difference from PIL in grey levels."""
    outs = {name: torch.zeros((len(tasks), size, size, 3), dtype=torch.uint8) for name in routes_by_name}
    best = dict.fromkeys(routes_by_name, float("inf"))
    for _ in range(PASSES):
        for name, route in routes_by_name.items():
            start = time.process_time()
            route(tasks, outs[name])
            best[name] = min(best[name], time.process_time() - start)
    exact = outs["PIL"].short()
    off = {name: float((out.short() - exact).abs().double().mean()) for name, out in outs.items()}
    return {name: (1e6 * best[name] / len(tasks), off[name]) for name in routes_by_name}


def markdown_rows(images: Path | None) -> list[str]:
    """The table in markdown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found, full = available_routes(), read_source_images(images)
        columns = {}
        for short, size in CASES:
            todo = make_crop_tasks([shrunk_copy(data, short) for data in full])
            columns[f"{short or 'full'} to {size}"] = measure_routes(todo, size, found)
    finally:
        torch.set_num_threads(threads)
    table = [
        f"{len(full)} {'photographs' if images else 'drawn images'}; us of one core a crop (mean difference from PIL).",
        "",
        f"| route | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for name in found:
        cells = (f"{column[name][0]:.0f} ({column[name][1]:.2f})" for column in columns.values())
        table.append(f"| {name} | {' | '.join(cells)} |")
    return table


def main() -> None:
    """Print the table."""
    print("\n".join(markdown_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else None)))


if __name__ == "__main__":
    main()
