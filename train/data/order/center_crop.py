"""The center crop of validation: the size that an image is resized to, and where the crop lies in it.

The geometry is that of torchvision's Resize(int(size * 1.14)) and CenterCrop(size), with which the runs of 2018 and
most published models were evaluated: accuracies are comparable to the pixel. Imports no torch.
"""

from fractions import Fraction

RESIZE_TO_CROP_RATIO = 1.14  # short side before the crop / that of the crop (256 / 224; 1.10 to 1.14 measured best)

ImageSize = tuple[int, int]  # height, width


def resized_short_side(crop_side: int) -> int:
    """Return the short side of a resized image for a crop with this short side."""
    return int(crop_side * RESIZE_TO_CROP_RATIO)


def resized_size(size: ImageSize, shape: ImageSize) -> ImageSize:
    """Return the size to resize an image to before a crop of this shape is cut from it.

    The short side becomes `resized_short_side`; the long side is rounded down. An image that is smaller than the crop,
    which validation has not, is enlarged until the crop fits; torchvision would pad it with black.
    """
    fitting = (Fraction(wanted, own) for wanted, own in zip(shape, size, strict=True))
    factor = max(Fraction(resized_short_side(min(shape)), min(size)), *fitting)
    return int(size[0] * factor), int(size[1] * factor)


def center_corner(size: ImageSize, shape: ImageSize) -> tuple[int, int]:
    """Return (top, left) of a crop in the middle of an image. A half is rounded to the even number."""
    return round((size[0] - shape[0]) / 2), round((size[1] - shape[1]) / 2)
