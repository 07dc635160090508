"""Decoding of one image from bytes to pixels, the same way in preparation, training and validation.

simplejpeg comes first (libjpeg-turbo, 1.4 to 1.8 times as fast as PIL). Files that it refuses, such as a PNG named
.JPEG or a JPEG with extra bytes before its end marker, go to PIL, which decodes to the same pixels. PIL gets only the
formats of `PIL_FORMATS`: for others, such as EPS, it would start other programs. A JPEG that has lost a part of its
data is refused: decoders fill the rest with gray or noise. As by ImageNet's readers, EXIF orientation is not applied.
"""

import re
import warnings
from io import SEEK_END, BytesIO
from typing import BinaryIO

import numpy as np
import simplejpeg
from numpy.typing import ArrayLike, NDArray
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from train.tools.errors import one_line_error

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"  # the markers that a JPEG file begins and ends with
JPEG_SCAN = b"\xff\xda"  # the marker of a scan, and with the header after it (ITU T.81, B.2.3)
SCAN_HEADER = re.compile(JPEG_SCAN + rb"\0[\x08\x0a\x0c\x0e][\1-\4]")
MAX_JPEG_SIDE = 65500  # pixels: the longest side of a JPEG file. No copy could be made of a longer image.
MAX_PIXELS = 178_956_970  # of one image, as PIL has it: a file of kilobytes can claim to be an image of gigabytes
warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # PIL's own limit is twice the one of this warning
MAX_SCANS = 100  # of a progressive JPEG, which has about ten: each goes over all pixels, so a small file can take hours
# Of one text or color profile in a PNG: as much as PIL allows for all of them together, not the sixtieth part.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
HEADER_BYTES, TAIL_BYTES = 1 << 16, 64  # read of a file for the size of its image
PIL_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
NOT_AN_IMAGE = "not an image (JPEG, PNG, WebP, BMP, GIF or TIFF)"
JPEG_WARNING = "Corrupt JPEG data: "  # libjpeg's words before what has happened to the data of pixels
WARNING_AT_END = re.compile(r"(\d+) extraneous bytes before marker 0xd9|Premature end of JPEG file")

Pixels = NDArray[np.uint8]  # [height, width, 3], RGB
ImageSize = tuple[int, int]  # height, width
Box = tuple[int, int, int, int]  # top, left, height, width


class BadImage(Exception):
    """A file that cannot be decoded. The text says why, without the file's name."""


def decode_image(data: bytes) -> Pixels:
    """Return uint8 RGB pixels [height, width, 3]. Raises `BadImage`."""
    if data.count(JPEG_SCAN) > MAX_SCANS and (scans := len(SCAN_HEADER.findall(data))) > MAX_SCANS:
        raise BadImage(f"{scans} scans are too many for a JPEG")
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(width, height)
        return np.asarray(simplejpeg.decode_jpeg(data, "RGB"))
    except ValueError as error:
        _refuse_lost_pixels(data, str(error))
        return _decode_with_pil(data, str(error))


def size_in_header(file: BinaryIO) -> ImageSize | None:
    """Return the size that an image's header states, None where only decoding tells it, or what is wrong."""
    head = file.read(HEADER_BYTES)
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(head)
        file.seek(-min(TAIL_BYTES, file.seek(0, SEEK_END)), SEEK_END)
        if not file.read().rstrip(b"\0").endswith(JPEG_END):
            return None
    except ValueError:
        if head.startswith(JPEG_START):  # PIL would warn of what libjpeg ignores
            return None
        try:
            with Image.open(file, formats=PIL_FORMATS) as image:
                width, height = (0, 0) if image.mode.startswith(("I", "F")) else image.size
        except Exception:  # PIL's readers may raise any exception on a damaged file
            return None
    is_possible = 0 < min(height, width) <= max(height, width) <= MAX_JPEG_SIDE and width * height <= MAX_PIXELS
    return (height, width) if is_possible else None


def _refuse_lost_pixels(data: bytes, warning: str) -> None:
    """Raise `BadImage` if libjpeg's first warning of a JPEG, or the one after it, tells of lost pixels.

    Bytes too many before the end marker, and a missing end marker, are harmless by themselves. But libjpeg does not
    tell what else is wrong, and zeros in the place of lost data decode to pixels too.
    """
    if at_end := WARNING_AT_END.search(warning):
        end = data.rfind(JPEG_END) - int(at_end[1]) if at_end[1] else len(data)
        kept = data[:end].rstrip(b"\0")
        try:
            simplejpeg.decode_jpeg(kept + b"\0" * kept.endswith(b"\xff") + JPEG_END, "RGB")
            return
        except ValueError as error:
            warning = "" if WARNING_AT_END.search(str(error)) else str(error)
    if JPEG_WARNING in warning:
        raise BadImage(f"a part of its pixels is lost ({warning.partition(JPEG_WARNING)[2]})")


def _check_size(width: int, height: int) -> None:
    if max(width, height) > MAX_JPEG_SIDE:
        raise BadImage(f"{width} x {height} pixels do not fit into a JPEG file")
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width} x {height} pixels are more than {MAX_PIXELS}")


def decode_region(data: bytes, size: ImageSize, box: Box) -> Pixels:
    """Return pixels [height, width, 3] inside a box. Raises `BadImage`, also for an image of another size."""
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
