"""Classifies image files with a trained network. Images are resized and cropped as in validation."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from train.data.decode import BadImage, decode_image
from train.data.loading.crop import center_crop, image_views
from train.data.loading.loader import Batch
from train.data.order.rect_val import rect_crop_shape
from train.data.order.work import BatchRequest
from train.engine.inputs import BatchPreprocessor, Normalization
from train.tools.errors import TrainingError, first_line, one_line_error
from train.tools.files import read_file
from train.tools.host import threads_per_process
from train.weights.network_description import Crop, NetworkDescription

from .protocol import TOP_ANSWERS, PredictOptions, emit_json_line, reserve_stdout
from .trained_network import open_trained, precision_of


@reserve_stdout()
def predict_images(options: PredictOptions) -> None:
    """Print for each image its most likely classes, or what is wrong. Raises `TrainingError` for a bad network."""
    trained = open_trained(Path(options.source), options.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(threads_per_process(1))  # torch's own default knows no quota of a container
    model = trained.build().to(device)
    normalization = Normalization(trained.description.mean, trained.description.std)
    preprocessor = BatchPreprocessor(device, normalization=normalization, precision=precision_of(trained.recipe))
    for path in map(Path, options.images):
        answers: list[dict[str, object]] = []
        error = ""
        try:
            answers = classify(path, model, trained.description, preprocessor)
        except (BadImage, OSError) as image_error:
            error = f"{path}: {image_error}" if isinstance(image_error, BadImage) else one_line_error(image_error)
        emit_json_line({"kind": "prediction", "file": str(path), "answers": answers, "error": error})


@torch.no_grad()
def classify(
    path: Path, model: nn.Module, description: NetworkDescription, preprocessor: BatchPreprocessor
) -> list[dict[str, object]]:
    """Return the likeliest classes of an image ("class", "percent"). Raises `BadImage`, `OSError`, `TrainingError`."""
    pixels = validation_pixels(read_file(path), description)
    labels = np.zeros(1, dtype=np.int64)
    request = BatchRequest("val", None, labels, (pixels.shape[1], pixels.shape[2]))
    images, _ = preprocessor.prepare(Batch(pixels, labels, request))
    try:
        with preprocessor.autocast():
            probabilities = model(images).float().softmax(1)[0]
    except RuntimeError as error:  # torch's, for example out of memory
        raise TrainingError(f"{path}: {description.model} fails: {first_line(error)}") from error
    top = probabilities.topk(min(TOP_ANSWERS, len(description.classes)))
    return [
        {"class": description.classes[index], "percent": 100 * probability}
        for probability, index in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]


def validation_pixels(data: bytes, description: NetworkDescription) -> torch.Tensor:
    """Return what validation shows of an image to the network: uint8 [1, height, width, 3]. Raises `BadImage`."""
    height, width = decode_image(data).shape[:2]
    side = description.image_size
    shape = rect_crop_shape(width, height, side) if description.crop is Crop.RECT else (side, side)
    pixels = torch.empty((1, *shape, 3), dtype=torch.uint8)
    center_crop(data, (height, width), image_views(pixels)[0])
    return pixels
