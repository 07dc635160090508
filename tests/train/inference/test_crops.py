"""The crops of an evaluation: which parts of an image the network sees, and one prediction from several views."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from train.data.index.open import load_index
from train.data.loading.loader import BatchDecoder
from train.data.order.work import BatchRequest
from train.inference.evaluate import SQUARES_PER_IMAGE, mean_crop_scores, plan_eval_batches
from train.inference.protocol import CROP_VIEWS


@pytest.fixture(scope="module")
def decoder(tiny_data: Path) -> BatchDecoder:
    return BatchDecoder({("val", None): load_index(tiny_data, "val")}, 0)


def squares_by_pil(data: bytes, size: int) -> list[Any]:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    short = int(1.14 * size)
    width, height = (short * side // min(image.size) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    right, bottom = image.width - size, image.height - size
    corners = [(0, 0), (right, 0), (0, bottom), (right, bottom), (round(right / 2), round(bottom / 2))]
    return [np.asarray(image.crop((left, top, left + size, top + size)), int) for left, top in corners]


@pytest.mark.parametrize("size", [32, 64, 96])
def test_decode_five_matches_pil(size: int, decoder: BatchDecoder) -> None:
    index, ids = decoder.indexes["val", None], np.array([3, 0, 11])
    batch = decoder.decode_batch(BatchRequest("val", None, ids, (size, size), squares=5))
    assert batch.images.shape == (15, size, size, 3) and batch.labels.tolist() == index.labels[ids].tolist()
    squares_by_image = batch.images.numpy().astype(int).reshape(3, SQUARES_PER_IMAGE, size, size, 3)
    for squares, image_id in zip(squares_by_image, ids.tolist(), strict=True):
        for square, expected in zip(squares, squares_by_pil(index.read(image_id), size), strict=True):
            assert np.abs(square - expected).max() <= 2


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("crop", CROP_VIEWS)
def test_plan_eval_batches_each_image_in_one_batch_of_one_rank(crop: str, world: int, decoder: BatchDecoder) -> None:
    index = decoder.indexes["val", None]
    for pixel_budget in (1, 64 * 64 * 7, 10**9):
        requests = [
            request
            for rank in range(world)
            for request in plan_eval_batches(crop, 64, index, 48, pixel_budget, rank, world)
        ]
        assert sorted(image_id for request in requests for image_id in request.ids.tolist()) == list(range(20))
        assert {(request.copy, request.squares) for request in requests} == {(48, 5 if crop in ("five", "tta") else 1)}
        assert all(len(each.ids) == 1 or np.prod(each.batch_shape) / 3 <= 1.5 * pixel_budget for each in requests)
        assert crop == "rect" or {request.shape for request in requests} == {(64, 64)}


@pytest.mark.parametrize("crop", CROP_VIEWS)
def test_mean_crop_scores_is_mean_softmax_of_all_views(crop: str) -> None:

    def first_pixels(images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, 0, :7]

    scores_of: Any = first_pixels
    pixels = torch.randn(4 * (5 if crop in ("five", "tta") else 1), 3, 9, 9) * 3
    probabilities = mean_crop_scores(crop, scores_of, pixels).softmax(1)
    parts = [pixels] if crop != "tta" else [pixels, pixels.flip(3)]
    all_probabilities = torch.stack([scores_of(part).double().softmax(1) for part in parts])  # [1 or 2, 4 x 5, 7]
    expected = all_probabilities.view(len(parts), 4, -1, 7).mean((0, 2))
    torch.testing.assert_close(probabilities.double(), expected, rtol=1e-5, atol=1e-7)
