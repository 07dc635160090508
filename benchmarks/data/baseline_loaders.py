"""The peers of loader.py: FFCV, and the classic pipeline of PIL and a per-image DataLoader. Runs in benchmarks/.venv.

loader.py starts this program and sends one request per line of JSON on stdin; each answer is one line on stdout.

    {"feed": "ffcv" | "classic", "folder": DIR of JPEG files, "size": 128, "images": 8000}

makes one pass over that many images and answers its seconds. The first pass of a folder and size also writes the .beton
file and compiles; that time is not in the seconds. A pass is timed from the request for the first batch until the last
batch has arrived.

    {"pixels": FILE}

answers the mean difference of FFCV's pixels from PIL's over the boxes of an .npz file.
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
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
CORE_COUNT = len(os.sched_getaffinity(0))
TimedPass = Callable[[], float]


def jpeg_files(folder: Path) -> list[Path]:
    """Return the JPEG files of <folder>/train, sorted by class and name."""
    return sorted((folder / "train").glob("*/*.JPEG"))


def timed_pass(loader: Any, images: int) -> float:
    """Return the seconds for all batches of a loader. Raises `RuntimeError` for another number of images."""
    start = time.perf_counter()
    images_seen = 0
    for pixels, _ in loader:
        images_seen += len(pixels)
    seconds = time.perf_counter() - start
    if images_seen != images:
        raise RuntimeError(f"the loader returned {images_seen} images, not {images}")
    return seconds


def ffcv_pass(folder: Path, size: int, images: int) -> TimedPass:
    """FFCV on the same JPEG bytes: random resized crop, flip, ToTensor; shuffled uint8 batches."""
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    beton_path, image_count = write_beton(folder)
    crop = RandomResizedCropRGBImageDecoder((size, size), scale=(MIN_SCALE, 1.0))
    loader = Loader(
        str(beton_path),
        batch_size=BATCH,
        num_workers=CORE_COUNT,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        indices=np.resize(np.arange(image_count, dtype="uint64"), images),
        pipelines={"image": [crop, RandomHorizontalFlip(), ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )
    return lambda: timed_pass(loader, images)


def write_beton(folder: Path) -> tuple[Path, int]:
    """Write <folder>.beton with the bytes of the JPEG files, unless it exists. Return its path and image count."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields import rgb_image as field
    from ffcv.writer import DatasetWriter

    # FFCV's own `encode` would decode the JPEG and encode it again. The method is replaced on the class instead of in a
    # subclass, because FFCV's reader recognizes the field by its exact type.
    def encode(self: Any, destination: Any, data: Any, malloc: Any) -> None:
        with Image.open(data) as image:
            destination["mode"] = field.IMAGE_MODES["jpg"]
            destination["width"], destination["height"] = image.size
        stored_bytes = np.fromfile(data, np.uint8)
        destination["data_ptr"], storage = malloc(stored_bytes.nbytes)
        storage[:] = stored_bytes

    paths = jpeg_files(folder)
    beton_path = folder.with_suffix(".beton")
    samples = [(str(path), number) for number, path in enumerate(paths)]
    if not beton_path.exists():
        RGBImageField.encode = encode
        fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
        with open(os.devnull, "w") as devnull:  # noqa: PTH123 - a device, not a file of ours
            original_stderr, sys.stderr = sys.stderr, devnull  # hides FFCV's progress bar
            DatasetWriter(str(beton_path), fields, num_workers=CORE_COUNT).from_indexed_dataset(samples)
            sys.stderr = original_stderr
    return beton_path, len(paths)


class PilDataset(torch.utils.data.Dataset[Any]):
    """Opens one image at a time with PIL: random resized crop, flip, ToTensor, Normalize."""

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        self.paths = [str(path) for path in paths]
        self.size = size
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        """Return the normalised pixels, float32 [3, size, size], and a label."""
        with open(self.paths[number], "rb") as file:  # noqa: PTH123 - as torchvision does
            image = Image.open(file).convert("RGB")
        left, top, width, height = random_box(*image.size)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return pixels.sub_(self.mean).div_(self.std), number


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a crop as torchvision's RandomResizedCrop does; return left, top, width and height."""
    for _ in range(10):
        area = width * height * random.uniform(MIN_SCALE, 1)
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h


def classic_pass(folder: Path, size: int, images: int) -> TimedPass:
    """The classic pipeline: a per-image DataLoader with one worker per core, kept between passes."""
    paths = jpeg_files(folder)
    loader = DataLoader(
        PilDataset([paths[number % len(paths)] for number in range(images)], size),
        batch_size=BATCH,
        shuffle=True,
        num_workers=CORE_COUNT,
        persistent_workers=True,
        worker_init_fn=limit_to_one_thread,
        multiprocessing_context="fork",
    )
    return lambda: timed_pass(loader, images)


def limit_to_one_thread(_: int) -> None:
    """Initialize a worker: there is one worker per core, so each uses one thread."""
    torch.set_num_threads(1)


@cache
def prepared_pass(feed: str, folder: str, size: int, images: int) -> TimedPass:
    """Return a pass of "ffcv" or "classic", made once and warmed up by one run."""
    run_pass = {"ffcv": ffcv_pass, "classic": classic_pass}[feed](Path(folder), size, images)
    run_pass()
    return run_pass


def pixel_difference(boxes_path: str) -> float:
    """Return the mean difference of FFCV's resize from PIL's, in gray levels.

    The .npz file holds `paths`, `boxes` (top, left, height, width) and the target `size`.
    """
    from ffcv.libffcv import resize_crop

    with np.load(boxes_path) as arrays:
        paths, boxes, size = arrays["paths"], arrays["boxes"], int(arrays["size"])
    differences = []
    for path, (top, left, height, width) in zip(paths, boxes.tolist(), strict=True):
        image = Image.open(str(path)).convert("RGB")
        whole = np.array(image)
        resized = np.empty((size, size, 3), np.uint8)
        resize_crop(whole, top, top + height, left, left + width, resized)
        crop = image.crop((left, top, left + width, top + height))
        exact = np.array(crop.resize((size, size), Image.Resampling.BILINEAR))
        differences.append(np.abs(resized.astype(int) - exact).mean())
    return float(np.mean(differences))


def main() -> None:
    """Answer requests until stdin ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = pixel_difference(request["pixels"]) if "pixels" in request else prepared_pass(**request)()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
