"""One image from bytes to pixels, the same way in preparation, training and validation.

simplejpeg first (libjpeg-turbo, 1.4 to 1.8 times PIL); what it refuses (a PNG named .JPEG, bytes before the end
marker) goes to PIL, which decodes to the same pixels. EXIF orientation is not applied: ImageNet's readers do not.

Where the extra `nvimgcodec` is installed, a part of an image is decoded without the rest: the same pixels, bit for bit,
in half the time for a tenth of the image and in all of it for PART of it. It reads the file no further than it must, so
damage that only a checksum would show stays unseen; a file that was cut short is told by its end.
"""

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from train.tools.filesystem import one_line_error

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"  # how one begins, and ends
MAX_JPEG_SIDE = 65500  # pixels a side that a JPEG file can have: a longer image could have no copy
MAX_REGION_FRACTION = (
    0.7  # of an image's pixels: from there on decoding all of them and cutting is as fast, at 160 pixels as at 352
)
Pixels = NDArray[np.uint8]
ImageSize = tuple[int, int]  # height, width
Box = tuple[int, int, int, int]  # top, left, height, width


class BadImage(Exception):
    """A file that no decoder takes; the text says why, without the file's name."""


def decode_image(data: bytes) -> Pixels:
    """Return uint8 RGB pixels [height, width, 3]. Raises `BadImage`."""
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, "RGB"))
    except ValueError as error:
        return _decode_with_pil(data, str(error))


def decode_region(data: bytes, size: ImageSize, box: Box) -> Pixels:
    """Return the pixels of a box of an image that must be of `size`. Raises `BadImage`, also when it is not."""
    top, left, height, width = box
    part = _try_decode_region(data, size, box)
    if part is not None:
        return part
    pixels = decode_image(data)
    if pixels.shape[:2] != size:
        found, expected = (f"{one[1]}x{one[0]}" for one in (pixels.shape, size))
        raise BadImage(f"has {found} pixels and not {expected}")
    return pixels[top : top + height, left : left + width]


def _decode_with_pil(data: bytes, simplejpeg_error: str) -> Pixels:
    if not data:
        raise BadImage("the file is empty")
    try:
        with Image.open(BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):  # which convert() would clip to white
                raise BadImage(f"{image.format} with more than 8 bits a channel (mode {image.mode})")
            if max(image.size) > MAX_JPEG_SIDE:
                raise BadImage(f"{image.width} x {image.height} pixels do not fit into a JPEG file")
            return np.array(image.convert("RGB"))
    except UnidentifiedImageError as error:
        raise BadImage(simplejpeg_error.replace("\n", " ") if data[:2] == JPEG_START else "not an image") from error
    except BadImage:
        raise
    except Exception as error:  # of a damaged file PIL's readers may raise anything
        raise BadImage(one_line_error(error) or type(error).__name__) from error


def _try_decode_region(data: bytes, size: ImageSize, box: Box) -> Pixels | None:
    """The pixels of a box of a plain JPEG, decoded without the rest; None: decode the whole, which knows what is wrong.

    CMYK is left to the whole too: nvimgcodec's black is one grey level off.
    """
    decoder = region_decoder(threading.get_native_id())
    if decoder is None or box[2] * box[3] > MAX_REGION_FRACTION * size[0] * size[1]:
        return None
    if not (data.startswith(JPEG_START) and data.endswith(JPEG_END)):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return decoder(data, box) if (height, width) == size and colours in ("YCbCr", "Gray", "RGB") else None


@functools.lru_cache(maxsize=64)
def region_decoder(_thread_id: int) -> Callable[[bytes, Box], Pixels | None] | None:
    """Return what decodes a box, for a thread by its number in the system; None where nvimgcodec is not installed."""
    try:
        with _silence_stderr():  # it says on stderr that this machine has no nvJPEG, which nobody asked for
            nvimgcodec: Any = importlib.import_module("nvidia.nvimgcodec")
            cpu = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
            decoder = nvimgcodec.Decoder(
                device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY, backends=cpu, max_num_cpu_threads=1
            )
            params = nvimgcodec.DecodeParams(apply_exif_orientation=False)
    except (ImportError, AttributeError, RuntimeError):
        return None

    def region(data: bytes, box: Box) -> Pixels | None:
        top, left, height, width = box
        part = nvimgcodec.Region(top, left, top + height, left + width)
        try:
            image = decoder.decode(nvimgcodec.CodeStream(data).get_sub_code_stream(0, part), params=params)
        except RuntimeError:
            return None
        return None if image is None else np.asarray(image.cpu())

    return region


@contextlib.contextmanager
def _silence_stderr() -> Iterator[None]:
    """Nothing reaches the process's stderr in here, not from C either."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def encode_jpeg(pixels: Any, quality: int) -> bytes:
    """Return uint8 RGB pixels [height, width, 3] as a baseline 4:2:0 JPEG."""
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=quality, colorspace="RGB", colorsubsampling="420"
    )
    return data
