"""The crops of an examination: which parts of an image the network sees, and one answer out of several."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from train.data import decode
from train.data.index.open import DataError, load_index
from train.data.loading.loader import BatchDecoder, stream_batches
from train.data.order.rect_val import RESIZE_TO_CROP_RATIO, rect_crop_shape
from train.data.order.work import BatchRequest
from train.evaluation.crops import (
    MULTI_CROP_MIRRORED,
    SQUARES_PER_IMAGE,
    MultiCropDecoder,
    MultiCropRequest,
    crop_boxes,
    mean_crop_scores,
    plan_eval_batches,
)
from train.evaluation.protocol import CROPS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images(tiny_data: Path) -> MultiCropDecoder:
    return MultiCropDecoder({("val", None): load_index(tiny_data, "val")}, 0)


def squares_by_pil(data: bytes, size: int) -> list[Any]:
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    factor = round(size * RESIZE_TO_CROP_RATIO) / min(whole.size)
    whole = whole.resize((round(whole.width * factor), round(whole.height * factor)), Image.Resampling.BILINEAR)
    right, bottom = whole.width - size, whole.height - size
    places = [(0, 0), (right, 0), (0, bottom), (right, bottom), (right // 2, bottom // 2)]
    return [np.asarray(whole.crop((left, top, left + size, top + size)), int) for left, top in places]


@pytest.mark.parametrize("size", [32, 64, 96])
def test_five_are_the_corners_and_the_middle_of_the_image_as_pil_makes_them(
    size: int, images: MultiCropDecoder
) -> None:
    index, ids = images.indexes["val", None], np.array([3, 0, 11])
    batch = images.decode_batch(MultiCropRequest("val", None, ids, (size, size)))
    assert batch.images.shape == (15, size, size, 3) and batch.labels.tolist() == index.labels[ids].tolist()
    found = batch.images.numpy().astype(int).reshape(3, SQUARES_PER_IMAGE, size, size, 3)
    for mine, number in zip(found, ids.tolist(), strict=True):
        for one, expected in zip(mine, squares_by_pil(index.read(number), size), strict=True):
            assert np.abs(one - expected).max() <= 2


@pytest.mark.parametrize("size", [32, 73, 96])
def test_the_last_of_five_is_the_centre_crop(size: int, images: MultiCropDecoder) -> None:
    ids = np.arange(20)
    several = images.decode_batch(MultiCropRequest("val", None, ids, (size, size))).images.view(
        20, SQUARES_PER_IMAGE, size, size, 3
    )
    centre = images.decode_batch(BatchRequest("val", None, ids, (size, size))).images
    assert (several[:, -1].int() - centre.int()).abs().max() <= 1


@pytest.mark.parametrize(("height", "width"), [(1, 3000), (3000, 1), (40, 2000), (1, 1), (33, 500)])
def test_an_image_of_any_size_has_five_squares(height: int, width: int, tmp_path: Path) -> None:
    (tmp_path / "val" / "one").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    (tmp_path / "val" / "one" / "x.JPEG").write_bytes(decode.encode_jpeg(pixels, 90))
    batch = MultiCropDecoder({("val", None): load_index(tmp_path, "val")}, 0).decode_batch(
        MultiCropRequest("val", None, np.array([0]), (32, 32))
    )
    assert batch.images.shape == (5, 32, 32, 3)


def test_workers_make_the_same_squares_and_plain_batches_beside_them(images: MultiCropDecoder) -> None:
    index = images.indexes["val", None]
    works = [work for crop in CROPS for work in plan_eval_batches(crop, 32, index, None, 8 * 32 * 32, 0, 1)]
    here, there = (list(stream_batches(images, iter(works), workers, CPU, 3 * 8 * 32 * 32)) for workers in (0, 2))
    assert len(here) == len(there) == len(works)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.images, other.images) and one.labels.tolist() == other.labels.tolist()


def test_a_file_that_has_changed_is_named_with_its_place(tiny_data: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_data, tmp_path / "set")
    images = MultiCropDecoder({("val", None): load_index(tmp_path / "set", "val")}, 0)
    path = Path(images.indexes["val", None].location(4))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=f"{path.name}: .*changed since"):
        images.decode_batch(MultiCropRequest("val", None, np.array([4]), (32, 32)))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("crop", CROPS)
def test_every_image_is_in_one_batch_of_one_rank(crop: str, world: int, images: MultiCropDecoder) -> None:
    index = images.indexes["val", None]
    for pixels in (1, 64 * 64 * 7, 10**9):
        works = [work for rank in range(world) for work in plan_eval_batches(crop, 64, index, 48, pixels, rank, world)]
        assert sorted(number for work in works for number in work.ids.tolist()) == list(range(20))
        assert {work.copy for work in works} == {48} and all(
            isinstance(work, MultiCropRequest) == (crop in MULTI_CROP_MIRRORED) for work in works
        )
        assert all(len(work.ids) == 1 or np.prod(work.batch_shape) / 3 <= 1.5 * pixels for work in works)
        assert crop == "rect" or {work.shape for work in works} == {(64, 64)}


class Looks(nn.Module):
    """Scores that are read off an image's first pixels; counts how many images it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.shown += len(images)
        return images[:, 0, 0, :7]


@pytest.mark.parametrize(("crop", "views"), [("center", 1), ("rect", 1), ("five", 5), ("tta", 10)])
def test_the_answer_is_the_mean_of_the_softmax_of_all_views_each_seen_once(crop: str, views: int) -> None:
    pixels = torch.randn(4 * (5 if crop in MULTI_CROP_MIRRORED else 1), 3, 9, 9) * 3
    model = Looks()
    found = mean_crop_scores(crop, model, pixels).softmax(1)
    assert model.shown == 4 * views
    parts = [pixels] if crop != "tta" else [pixels, pixels.flip(3)]
    chances = torch.stack([Looks()(part).double().softmax(1) for part in parts])  # [1 or 2, 4 x 5, 7]
    expected = chances.view(len(parts), 4, -1, 7).mean((0, 2))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_the_answer_of_one_view_is_the_network_s_own() -> None:
    pixels = torch.randn(3, 3, 9, 9)
    assert torch.equal(mean_crop_scores("center", Looks(), pixels), Looks()(pixels))


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (300, 300), (800, 300)])
def test_what_is_seen_is_inside_the_image_and_in_the_crop_s_shape(width: int, height: int) -> None:
    for crop in CROPS:
        boxes = crop_boxes(crop, 224, width, height)
        assert len(boxes) == (5 if crop in MULTI_CROP_MIRRORED else 1)
        for top, left, high, wide in boxes:
            assert 0 <= top <= top + high <= 1 + 1e-9 and 0 <= left <= left + wide <= 1 + 1e-9
            shape = rect_crop_shape(width, height, 224) if crop == "rect" else (224, 224)
            assert (wide * width) / (high * height) == pytest.approx(shape[1] / shape[0], rel=0.01)
    (center,), (rect,) = crop_boxes("center", 224, width, height), crop_boxes("rect", 224, width, height)
    assert min(center[2] * height, center[3] * width) == pytest.approx(
        min(width, height) / RESIZE_TO_CROP_RATIO, rel=0.01
    )
    assert rect[2] * rect[3] >= center[2] * center[3]


def test_of_a_very_wide_or_tall_image_the_rectangle_leaves_a_part_out() -> None:
    ((_, left, high, wide),) = crop_boxes("rect", 224, 3000, 1000)
    assert (left > 0.2 and wide < 0.5) and wide * 3000 == pytest.approx(320 / 224 * high * 1000, rel=0.01)
    ((top, _, high, wide),) = crop_boxes("rect", 224, 1000, 3000)
    assert (top > 0.2 and high < 0.5) and high * 3000 == pytest.approx(320 / 224 * wide * 1000, rel=0.01)


def test_an_examination_trains_on_nothing_else_than_other_validation(tiny_data: Path, images: MultiCropDecoder) -> None:
    ids = np.arange(8)
    plain = BatchDecoder(images.indexes, 0)
    work = BatchRequest("val", None, ids, (32, 48))
    assert torch.equal(plain.decode_batch(work).images, images.decode_batch(work).images)
