"""What changes a training image after its crop: one operation of TrivialAugmentWide, and the user's own function.

TrivialAugmentWide (Müller and Hutter 2021, "TrivialAugment", table 1) has the operations, magnitudes and pixels of
torchvision's, with its default arguments, on images of PIL. What a shear, a shift or a rotation moves into the image is
black.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

from train.data.decode import Pixels
from train.tools import user_code
from train.tools.errors import TrainingError

Operation = Callable[[Image.Image, float], Image.Image]
STEPS = 31  # magnitudes of an operation
NO_MAGNITUDE = (0.0,)


def _affine(matrix: Callable[[float], Sequence[float]]) -> Operation:
    """Return the operation that takes the pixel at (x, y) from (a x + b y + c, d x + e y + f)."""
    return lambda image, magnitude: image.transform(image.size, Image.Transform.AFFINE, matrix(magnitude))


def _enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, magnitude: kind(image).enhance(1 + magnitude)


def _up_to(largest: float) -> list[float]:
    return torch.linspace(0, largest, STEPS).tolist()  # rounded to float32, as torchvision has them


# In torchvision's order: the operation, its magnitudes, and whether they are negated at random.
OPERATIONS: tuple[tuple[Operation, Sequence[float], bool], ...] = (
    (lambda image, _: image, NO_MAGNITUDE, False),
    (_affine(lambda shear: (1, shear, 0, 0, 1, 0)), _up_to(0.99), True),
    (_affine(lambda shear: (1, 0, 0, shear, 1, 0)), _up_to(0.99), True),
    (_affine(lambda shift: (1, 0, -int(shift), 0, 1, 0)), _up_to(32), True),
    (_affine(lambda shift: (1, 0, 0, 0, 1, -int(shift))), _up_to(32), True),
    (lambda image, degrees: image.rotate(degrees), _up_to(135), True),
    (_enhance(ImageEnhance.Brightness), _up_to(0.99), True),
    (_enhance(ImageEnhance.Color), _up_to(0.99), True),
    (_enhance(ImageEnhance.Contrast), _up_to(0.99), True),
    (_enhance(ImageEnhance.Sharpness), _up_to(0.99), True),
    (lambda image, bits: ImageOps.posterize(image, int(bits)), [8 - round(step / 5) for step in range(STEPS)], False),
    (lambda image, level: ImageOps.solarize(image, level), _up_to(255)[::-1], False),  # type: ignore[arg-type]
    (lambda image, _: ImageOps.autocontrast(image), NO_MAGNITUDE, False),
    (lambda image, _: ImageOps.equalize(image), NO_MAGNITUDE, False),
)


def trivial_augment(pixels: Pixels, generator: np.random.Generator) -> Pixels:
    """Apply one operation to an image. The generator draws the operation, its magnitude and its sign."""
    operation, magnitudes, is_signed = OPERATIONS[int(generator.integers(len(OPERATIONS)))]
    magnitude = magnitudes[int(generator.integers(len(magnitudes)))]
    if is_signed and generator.integers(2):
        magnitude = -magnitude
    return np.asarray(operation(Image.fromarray(pixels), magnitude))


class OwnTransform:
    """The function of the user that a recipe names as its `transform`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.function = user_code.import_function("transform", name)

    def __call__(self, pixels: Pixels, generator: np.random.Generator) -> Pixels:
        """Return what the function makes of an image, which it may change in place. Raises `TrainingError`."""
        shape = pixels.shape
        value: object = user_code.call_user_code("transform", self.name, lambda: self.function(pixels, generator))
        if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape == shape:
            return value
        actual = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TrainingError(f"transform: {self.name} must return a numpy array uint8 {list(shape)}, not {actual}")
