"""Decoding of one image from bytes to pixels, the same way in preparation, training and validation.

simplejpeg comes first (libjpeg-turbo, 1.4 to 1.8 times as fast as PIL). Files that it refuses, such as a PNG named
.JPEG or a JPEG with extra bytes before its end marker, go to PIL, which decodes to the same pixels. PIL gets only the
formats of `PIL_FORMATS`: for others, such as EPS, it would start other programs. A JPEG that ends before its last pixel
is refused, because decoders fill the rest with gray. EXIF orientation is not applied, because ImageNet's readers do not
apply it.
"""

from io import BytesIO

import numpy as np
import simplejpeg
from numpy.typing import ArrayLike, NDArray
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from train.tools.errors import one_line_error

JPEG_START = b"\xff\xd8"  # the marker that a JPEG file begins with
MAX_JPEG_SIDE = 65500  # pixels: the longest side of a JPEG file. No copy could be made of a longer image.
MAX_PIXELS = 178_956_970  # of one image, as PIL has it: a file of kilobytes can claim to be an image of gigabytes
# Of one text or color profile in a PNG: as much as PIL allows for all of them together, not the sixtieth part.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
PIL_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
NOT_AN_IMAGE = "not an image (JPEG, PNG, WebP, BMP, GIF or TIFF)"
LOST_PIXELS = "premature end of data segment"  # libjpeg's words for a JPEG whose data ends before its last pixel

Pixels = NDArray[np.uint8]  # [height, width, 3], RGB
ImageSize = tuple[int, int]  # height, width
Box = tuple[int, int, int, int]  # top, left, height, width


class BadImage(Exception):
    """A file that cannot be decoded. The text says why, without the file's name."""


def decode_image(data: bytes) -> Pixels:
    """Return uint8 RGB pixels [height, width, 3]. Raises `BadImage`."""
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(width, height)
        return np.asarray(simplejpeg.decode_jpeg(data, "RGB"))
    except ValueError as error:
        if LOST_PIXELS in str(error):
            raise BadImage(f"a part of its pixels is lost ({LOST_PIXELS})") from None
        return _decode_with_pil(data, str(error))


def _check_size(width: int, height: int) -> None:
    if max(width, height) > MAX_JPEG_SIDE:
        raise BadImage(f"{width} x {height} pixels do not fit into a JPEG file")
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width} x {height} pixels are more than {MAX_PIXELS}")


def decode_region(data: bytes, size: ImageSize, box: Box) -> Pixels:
    """Return the pixels [height, width, 3] inside a box of an image.

    Raises `BadImage` for a file that cannot be decoded, and for an image whose size is not `size`.
    """
    pixels = decode_image(data)
    if pixels.shape[:2] != size:
        raise BadImage(f"has {pixels.shape[1]}x{pixels.shape[0]} pixels, expected {size[1]}x{size[0]}")
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def _decode_with_pil(data: bytes, simplejpeg_error: str) -> Pixels:
    if not data:
        raise BadImage("the file is empty")
    try:
        with Image.open(BytesIO(data), formats=PIL_FORMATS) as image:
            _check_size(*image.size)
            if image.mode.startswith(("I", "F")):  # convert() would clip these to white
                raise BadImage(f"{image.format} with more than 8 bits per channel (mode {image.mode})")
            in_colors = image.convert("RGBA") if image.mode == "P" else image  # else PIL warns of transparent ones
            return np.array(in_colors.convert("RGB"))
    except UnidentifiedImageError as error:
        raise BadImage(simplejpeg_error.replace("\n", " ") if data[:2] == JPEG_START else NOT_AN_IMAGE) from error
    except (BadImage, MemoryError):  # too little memory is no fault of the file
        raise
    except Exception as error:  # PIL's readers may raise any exception on a damaged file
        raise BadImage(one_line_error(error) or type(error).__name__) from error


def encode_jpeg(pixels: ArrayLike, quality: int) -> bytes:
    """Return uint8 RGB pixels [height, width, 3] as a baseline 4:2:0 JPEG file."""
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=quality, colorspace="RGB", colorsubsampling="420"
    )
    return data
