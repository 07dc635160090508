"""From a JPEG's bytes to uint8 pixels in a batch: decode, crop, resize, mirror; training and validation alike.

Resized by torch's antialiased kernel for uint8: its pixels are PIL's to 0.02 of 255 on average, shrinking or enlarging.
It is called with `out`, into the batch and in the batch's order of memory. Through `torch.nn.functional.interpolate` it
answers channel by channel, and to put those side by side again takes longer than the resize (160 to 128 pixels: 81 us
in all, so 43; 352 to 224: 224, so 110). OpenCV's linear resize aliases, and takes 33 and 100 us.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from train.data.decode import Box, ImageSize, Pixels, decode_region
from train.data.order.rect_val import RESIZE_TO_CROP_RATIO

MAX_STRIP_RATIO = 64  # times as long as broad: what is enlarged of an image of which all would be
MAX_ENLARGED_PIXELS = 2**24  # pixels, or more
_resize_antialiased: Any = torch._C._nn._upsample_bilinear2d_aa  # what torch.nn.functional.interpolate calls


def image_views(batch: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a view [1, 3, h, w] of each image of a batch [n, h, w, 3], as the functions here fill it."""
    return torch.split(batch.permute(0, 3, 1, 2), 1)


def crop_and_resize(data: bytes, size: ImageSize, box: Box, mirror: bool, out: torch.Tensor) -> None:
    """Fill a row with a box of an image of `size`, mirrored or not. Raises `BadImage`."""
    _resize_antialiased(_as_image_tensor(decode_region(data, size, box)), out.shape[2:], False, None, None, out=out)
    if mirror:
        out.copy_(out.flip(3))


def center_crop(data: bytes, size: ImageSize, out: torch.Tensor) -> None:
    """Fill a row with the middle of an image whose short side was made MARGIN times the crop's. Raises `BadImage`.

    What lies below and right of the crop is not resized, nor decoded where that can be helped; what lies above and
    left is, for torch can only start at an image's corner.
    """
    shape = (out.shape[2], out.shape[3])
    above, before, *kept = _middle_of_long_strip(size, enlarged_size(size, shape))
    size, file = (kept[0], kept[1]), size
    whole = enlarged_size(size, shape)
    top, left = ((full - cut) // 2 for full, cut in zip(whole, shape, strict=True))
    if whole == size:
        out.copy_(_as_image_tensor(decode_region(data, file, (above + top, before + left, *shape))))
        return
    # The image is made up to the crop's end only, of so many of the source's pixels.
    ends = (top + shape[0], left + shape[1])
    (height, rows_needed), (width, columns_needed) = map(_resize_extent, ends, whole, size)
    part = _as_image_tensor(decode_region(data, file, (above, before, rows_needed, columns_needed)))
    corner = torch.empty((1, height, width, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    scales = (full / source for full, source in zip(whole, size, strict=True))
    _resize_antialiased(part, (height, width), False, *scales, out=corner)
    out.copy_(corner[:, :, top : ends[0], left : ends[1]])


def _middle_of_long_strip(size: ImageSize, resized_size: ImageSize) -> Box:
    """The whole image; of a strip of one pixel by thousands its middle, which a crop fits in: the rest enlarged would
    take gigabytes.
    """
    if math.prod(resized_size) < MAX_ENLARGED_PIXELS:
        return 0, 0, *size
    height, width = (min(one, MAX_STRIP_RATIO * min(size)) for one in size)
    return (size[0] - height) // 2, (size[1] - width) // 2, height, width


def five_crop(data: bytes, size: ImageSize, outs: Sequence[torch.Tensor]) -> None:
    """Fill five rows with the corners and the middle of an image, enlarged as for `centre`. Raises `BadImage`."""
    shape = (outs[0].shape[2], outs[0].shape[3])
    box = _middle_of_long_strip(size, enlarged_size(size, shape))
    part = _as_image_tensor(decode_region(data, size, box))
    whole = enlarged_size((box[2], box[3]), shape)
    if whole != (box[2], box[3]):
        large = torch.empty((1, *whole, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        part = _resize_antialiased(part, whole, False, None, None, out=large)
    for row, (top, left) in zip(outs, five_crop_corners(whole, shape), strict=True):
        row.copy_(part[:, :, top : top + shape[0], left : left + shape[1]])


def five_crop_corners(image_size: ImageSize, shape: ImageSize) -> list[tuple[int, int]]:
    """Return (top, left) of the four corners and the middle for a crop of a shape."""
    bottom, right = (full - cut for full, cut in zip(image_size, shape, strict=True))
    return [(0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2)]


def enlarged_size(size: ImageSize, shape: ImageSize) -> ImageSize:
    """Return the whole image's size when its short side is MARGIN times the crop's; never less than the crop."""
    factor = max(round(min(shape) * RESIZE_TO_CROP_RATIO) / min(size), shape[0] / size[0], shape[1] / size[1])
    return max(shape[0], round(size[0] * factor)), max(shape[1], round(size[1] * factor))


def _resize_extent(end: int, resized_length: int, source_length: int) -> tuple[int, int]:
    """How many pixels to make of how many, so that the first `end` are those of `source` pixels made `resized`.

    The kernel reaches one pixel further, of the larger kind. Of as many as it is to make it would make copies.
    """
    scale = source_length / resized_length
    needed = min(source_length, math.ceil(end * scale + max(1, scale)) + 1)
    return (
        _resize_extent(end + 1, resized_length, source_length)
        if needed == end and source_length != resized_length
        else (end, needed)
    )


def _as_image_tensor(pixels: Pixels) -> torch.Tensor:
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None])
