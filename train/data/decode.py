"""One image from bytes to pixels, the same way in preparation, training and validation.

simplejpeg first (libjpeg-turbo, 1.4 to 1.8 times PIL); what it refuses (a PNG named .JPEG, bytes before the end
marker) goes to PIL, which decodes to the same pixels. EXIF orientation is not applied: ImageNet's readers do not.
"""

from io import BytesIO
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ..files import one_line

JPEG = b"\xff\xd8"  # how one begins
Pixels = NDArray[np.uint8]


class BadImage(Exception):
    """A file that no decoder takes; the text says why, without the file's name."""


def decode(data: bytes) -> Pixels:
    """Return uint8 RGB pixels [height, width, 3]. Raises `BadImage`."""
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, "RGB"))
    except ValueError as error:
        return _decode_other(data, str(error))


def _decode_other(data: bytes, why: str) -> Pixels:
    if not data:
        raise BadImage("the file is empty")
    try:
        with Image.open(BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):  # which convert() would clip to white
                raise BadImage(f"{image.format} with more than 8 bits a channel (mode {image.mode})")
            return np.array(image.convert("RGB"))
    except UnidentifiedImageError as error:
        raise BadImage(why.replace("\n", " ") if data[:2] == JPEG else "not an image") from error
    except BadImage:
        raise
    except Exception as error:  # of a damaged file PIL's readers may raise anything
        raise BadImage(one_line(error) or type(error).__name__) from error


def encode(pixels: Any, quality: int) -> bytes:
    """Return uint8 RGB pixels [height, width, 3] as a baseline 4:2:0 JPEG."""
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=quality, colorspace="RGB", colorsubsampling="420"
    )
    return data
