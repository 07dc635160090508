"""Crops from a JPEG's bytes to uint8 pixels in a batch: decode, crop, resize, mirror; for training and validation.

The resize is torch's antialiased uint8 kernel. Its pixels agree with PIL's to 0.02 of 255 on average, shrinking or
enlarging. The kernel is called with `out`, so it writes into the batch, in the batch's memory order. Called through
`torch.nn.functional.interpolate` it returns planar channels, and interleaving them again takes longer than the resize:
81 instead of 43 us in all from 160 to 128 pixels, 224 instead of 110 us from 352 to 224. OpenCV's linear resize
aliases, and takes 33 and 100 us.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from train.data.decode import Box, ImageSize, Pixels, decode_region
from train.data.order.center_crop import center_corner, resized_size

# A very long and thin image is enlarged only in its middle, which is this many times as long as the image is thin.
MAX_STRIP_RATIO = 64
MAX_ENLARGED_PIXELS = 2**24  # images that would be enlarged to this many pixels count as such strips
_resize_antialiased: Any = torch._C._nn._upsample_bilinear2d_aa  # what torch.nn.functional.interpolate calls


def image_views(batch: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a view [1, 3, h, w] of each image of a batch [n, h, w, 3], as the functions of this module fill it."""
    return torch.split(batch.permute(0, 3, 1, 2), 1)


def crop_and_resize(data: bytes, size: ImageSize, box: Box, mirror: bool, out: torch.Tensor) -> None:
    """Fill `out` [1, 3, h, w] with a box of an image of `size`, resized, and mirrored if asked. Raises `BadImage`."""
    _resize_antialiased(_as_image_tensor(decode_region(data, size, box)), out.shape[2:], False, None, None, out=out)
    if mirror:
        out.copy_(out.flip(3))


def center_crop(data: bytes, size: ImageSize, out: torch.Tensor) -> None:
    """Fill `out` [1, 3, h, w] with the center crop of the image, resized to `resized_size`.

    What lies below and right of the crop is neither resized nor, where possible, decoded. What lies above and left of
    it is, because the kernel can only start at an image's corner. Raises `BadImage`.
    """
    crop_shape = (out.shape[2], out.shape[3])
    strip_top, strip_left, *strip = _middle_of_long_strip(size, resized_size(size, crop_shape))
    source_size = (strip[0], strip[1])
    whole_size = resized_size(source_size, crop_shape)
    top, left = center_corner(whole_size, crop_shape)
    if whole_size == source_size:
        box = (strip_top + top, strip_left + left, *crop_shape)
        out.copy_(_as_image_tensor(decode_region(data, size, box)))
        return
    # The image is resized only up to the end of the crop, from as many source pixels as that takes.
    bottom, right = top + crop_shape[0], left + crop_shape[1]
    height, rows_needed = _resize_extent(bottom, whole_size[0], source_size[0])
    width, columns_needed = _resize_extent(right, whole_size[1], source_size[1])
    source = _as_image_tensor(decode_region(data, size, (strip_top, strip_left, rows_needed, columns_needed)))
    resized = torch.empty((1, height, width, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    scales = (full / length for full, length in zip(whole_size, source_size, strict=True))
    _resize_antialiased(source, (height, width), False, *scales, out=resized)
    out.copy_(resized[:, :, top:bottom, left:right])


def _middle_of_long_strip(size: ImageSize, whole_size: ImageSize) -> Box:
    """Return the box of the whole image, or of the middle of a long strip.

    A strip of one pixel by thousands, enlarged as a whole, would take gigabytes. The crop fits into its middle.
    """
    if math.prod(whole_size) < MAX_ENLARGED_PIXELS:
        return 0, 0, *size
    height, width = (min(side, MAX_STRIP_RATIO * min(size)) for side in size)
    return (size[0] - height) // 2, (size[1] - width) // 2, height, width


def five_crop(data: bytes, size: ImageSize, outs: Sequence[torch.Tensor]) -> None:
    """Fill five tensors with the corners and the center of an image resized as in `center_crop`. Raises `BadImage`."""
    crop_shape = (outs[0].shape[2], outs[0].shape[3])
    box = _middle_of_long_strip(size, resized_size(size, crop_shape))
    image = _as_image_tensor(decode_region(data, size, box))
    whole_size = resized_size((box[2], box[3]), crop_shape)
    if whole_size != (box[2], box[3]):
        resized = torch.empty((1, *whole_size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        image = _resize_antialiased(image, whole_size, False, None, None, out=resized)
    for out, (top, left) in zip(outs, five_crop_corners(whole_size, crop_shape), strict=True):
        out.copy_(image[:, :, top : top + crop_shape[0], left : left + crop_shape[1]])


def five_crop_corners(image_size: ImageSize, shape: ImageSize) -> list[tuple[int, int]]:
    """Return (top, left) of crops of a shape at the four corners and at the center of an image."""
    bottom, right = (full - cut for full, cut in zip(image_size, shape, strict=True))
    return [(0, 0), (0, right), (bottom, 0), (bottom, right), center_corner(image_size, shape)]


def _resize_extent(end: int, resized_length: int, source_length: int) -> tuple[int, int]:
    """Return (n, m): n pixels made of the first m source pixels begin with the same `end` pixels as the whole resize.

    The whole resize makes `resized_length` pixels of `source_length`. The kernel reaches one pixel further than a
    pixel's own extent, a source or a resized pixel, whichever is larger. n = m is avoided where it is not the whole,
    because the kernel copies an input that has the size of the output.
    """
    scale = source_length / resized_length
    needed = min(source_length, math.ceil(end * scale + max(1, scale)) + 1)
    if needed == end and source_length != resized_length:
        return _resize_extent(end + 1, resized_length, source_length)
    return end, needed


def _as_image_tensor(pixels: Pixels) -> torch.Tensor:
    """Return pixels [h, w, 3] as a view [1, 3, h, w]."""
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None])
