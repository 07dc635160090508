"""The peers of loader.py: FFCV, and the classic pipeline of PIL and a per-item DataLoader. Runs in benchmarks/.venv.

Started by loader.py, asked by lines of JSON on stdin, answers by lines on stdout: {"feed": "ffcv", "folder": DIR of
JPEG files, "size": 128, "images": 8000} makes one pass over so many images and says its seconds; the first pass of a
folder and size also makes the .beton and compiles, outside the seconds. {"pixels": FILE} compares FFCV's pixels with
PIL's over the boxes of an .npz. A pass is timed from asking for the first batch until the last one is there.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

BATCH = 128
MIN_SCALE = 0.08
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CORE_COUNT = len(os.sched_getaffinity(0))
TimedPass = Callable[[], float]


def jpeg_files(folder: Path) -> list[Path]:
    """The JPEG files of <folder>/train, sorted by class and name."""
    return sorted((folder / "train").glob("*/*.JPEG"))


def timed_pass(loader: Any, images: int) -> float:
    """Seconds for all batches of a loader. Raises `RuntimeError` when they are not so many images."""
    start, seen = time.perf_counter(), 0
    for pixels, _ in loader:
        seen += len(pixels)
    seconds = time.perf_counter() - start
    if seen != images:
        raise RuntimeError(f"{seen} images came, not {images}")
    return seconds


def ffcv_pass(folder: Path, size: int, images: int) -> TimedPass:
    """FFCV on the same JPEG bytes: random resized crop, flip, ToTensor; uint8 batches, shuffled."""
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    beton, count = write_beton(folder)
    crop = RandomResizedCropRGBImageDecoder((size, size), scale=(MIN_SCALE, 1.0))
    loader = Loader(
        str(beton), batch_size=BATCH, num_workers=CORE_COUNT, order=OrderOption.RANDOM, os_cache=True, drop_last=False,
        indices=np.resize(np.arange(count, dtype="uint64"), images),
        pipelines={"image": [crop, RandomHorizontalFlip(), ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )  # fmt: skip
    return lambda: timed_pass(loader, images)


def write_beton(folder: Path) -> tuple[Path, int]:
    """Write <folder>.beton with the files' own bytes, once. Returns it and how many images it has."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields import rgb_image as field
    from ffcv.writer import DatasetWriter

    # Its field would decode and encode again. Its type must be the very class, by which a reader knows it.
    def encode(self: Any, destination: Any, data: Any, malloc: Any) -> None:
        with Image.open(data) as image:
            destination["mode"] = field.IMAGE_MODES["jpg"]
            destination["width"], destination["height"] = image.size
        stored = np.fromfile(data, np.uint8)
        destination["data_ptr"], storage = malloc(stored.nbytes)
        storage[:] = stored

    found, path = jpeg_files(folder), folder.with_suffix(".beton")
    rows = [(str(one), number) for number, one in enumerate(found)]
    if not path.exists():
        RGBImageField.encode = encode
        fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
        with open(os.devnull, "w") as nothing:  # noqa: PTH123
            kept, sys.stderr = sys.stderr, nothing  # its progress bar
            DatasetWriter(str(path), fields, num_workers=CORE_COUNT).from_indexed_dataset(rows)
            sys.stderr = kept
    return path, len(found)


class PilDataset(torch.utils.data.Dataset[Any]):
    """PIL: open, random resized crop, flip, ToTensor, Normalize, one image at a time."""

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        self.paths, self.size = [str(one) for one in paths], size
        self.mean, self.std = (torch.tensor(one).view(3, 1, 1) for one in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        """Return the normalised floats [3, size, size] and a label."""
        with open(self.paths[number], "rb") as file:  # noqa: PTH123
            image = Image.open(file).convert("RGB")
        left, top, width, height = random_box(*image.size)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return pixels.sub_(self.mean).div_(self.std), number


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """A crop as torchvision's RandomResizedCrop draws it: left, top, width, height."""
    for _ in range(10):
        area = width * height * random.uniform(MIN_SCALE, 1)
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h


def classic_pass(folder: Path, size: int, images: int) -> TimedPass:
    """The classic pipeline: per-item DataLoader, a worker per core, kept between passes."""
    found = jpeg_files(folder)
    loader = DataLoader(
        PilDataset([found[number % len(found)] for number in range(images)], size), batch_size=BATCH, shuffle=True,
        num_workers=CORE_COUNT, persistent_workers=True, worker_init_fn=limit_to_one_thread, multiprocessing_context="fork",
    )  # fmt: skip
    return lambda: timed_pass(loader, images)


def limit_to_one_thread(_: int) -> None:
    """Workers have a core each."""
    torch.set_num_threads(1)


@cache
def prepared_pass(feed: str, folder: str, size: int, images: int) -> TimedPass:
    """The feed, made once and warmed by one pass."""
    work = {"ffcv": ffcv_pass, "classic": classic_pass}[feed](Path(folder), size, images)
    work()
    return work


def pixel_difference(boxes_path: str) -> float:
    """The mean difference of FFCV's resize from PIL's over paths and boxes (top, left, height, width) at a size."""
    from ffcv.libffcv import resize_crop

    with np.load(boxes_path) as asked:
        paths, boxes, size = asked["paths"], asked["boxes"], int(asked["size"])
    found = []
    for path, (top, left, height, width) in zip(paths, boxes.tolist(), strict=True):
        image = Image.open(str(path)).convert("RGB")
        whole, out = np.array(image), np.empty((size, size, 3), np.uint8)
        resize_crop(whole, top, top + height, left, left + width, out)
        crop = image.crop((left, top, left + width, top + height))
        exact = np.array(crop.resize((size, size), Image.Resampling.BILINEAR))
        found.append(np.abs(out.astype(int) - exact).mean())
    return float(np.mean(found))


def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = pixel_difference(asked["pixels"]) if "pixels" in asked else prepared_pass(**asked)()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
