"""Held-out validation images: which they are, and that the index, packing and a run choose the same."""

from pathlib import Path
from typing import Any

import pytest

from train.data.index.open import DataError, check_layout, images_by_class, load_index
from train.data.index.packed import read_manifest
from train.data.loading.dataset import open_dataset, open_val_indexes
from train.data.packing.pack import copy_targets, pack_set
from train.data.packing.synthetic import draw_image
from train.data.validation_split import held_out_count, held_out_names
from train.recipe import Data, Model, Phase, Recipe

NAMES = [f"{name}/{number}.jpg" for name, count in (("cat", 40), ("dog", 200), ("eel", 1)) for number in range(count)]
FRACTION = 0.25


def draw_set(root: Path, images_by_name: dict[str, int]) -> Path:
    """Draw a data set that has train/ only."""
    for label, (name, count) in enumerate(images_by_name.items()):
        (root / "train" / name).mkdir(parents=True)
        for number in range(count):
            (root / "train" / name / f"{number}.JPEG").write_bytes(draw_image(0, "train", 10 * number + label))
    return root


def recipe(val_fraction: float = FRACTION, **phase: Any) -> Recipe:
    return Recipe(
        name="held out",
        data=Data(name="own", root="nowhere", train=1, val=1, val_fraction=val_fraction),
        model=Model(name="resnet10_tiny"),
        gpus=1,
        phases=[Phase(epochs=(0, 1), size=32, batch=4, lr=0.1, **phase)],
    )


@pytest.mark.parametrize(
    ("images", "fraction", "count"),
    [(0, 0.1, 0), (1, 0.9, 0), (2, 0.01, 1), (2, 0.9, 1), (10, 0.1, 1), (1300, 0.1, 130), (10, 0.0, 0)],
)
def test_held_out_count_leaves_images_on_both_sides(images: int, fraction: float, count: int) -> None:
    assert held_out_count(images, fraction) == count


def test_held_out_names_have_the_same_share_of_each_class_in_any_order() -> None:
    held_out = held_out_names(NAMES, 0.1)
    shares = [sum(name.startswith(f"{class_name}/") for name in held_out) for class_name in ("cat", "dog", "eel")]
    assert shares == [4, 20, 0] and held_out <= {*NAMES}
    assert held_out_names(reversed(NAMES), 0.1) == held_out
    assert held_out_names(NAMES, 0.2) > held_out
    in_another_format = {name.replace(".jpg", ".png") for name in held_out}
    assert held_out_names([name.replace(".jpg", ".png") for name in NAMES], 0.1) == in_another_format


def test_held_out_names_change_little_when_images_are_added() -> None:
    before = held_out_names(NAMES, 0.1)
    for number in range(200, 260):
        after = held_out_names([*NAMES, *(f"dog/{added}.jpg" for added in range(200, number))], 0.1)
        assert len(before - after) <= 1
        before = after


def test_load_index_takes_each_image_on_one_side_only(tmp_path: Path) -> None:
    root = draw_set(tmp_path / "set", {"cat": 8, "dog": 4, "eel": 1})
    train, val = (load_index(root, split, val_fraction=FRACTION) for split in ("train", "val"))
    assert images_by_class(val) == {"cat": 2, "dog": 1, "eel": 0} and images_by_class(train) == {
        "cat": 6, "dog": 3, "eel": 1,
    }  # fmt: skip
    assert sorted([*train.names(), *val.names()]) == load_index(root, "train").names()
    assert val.read(0) == (root / "train" / val.name(0)).read_bytes()
    with pytest.raises(DataError, match=r"has no val/; .*: --val-fraction 0\.1"):
        check_layout(root)
    few = draw_set(tmp_path / "few", {"cat": 1, "dog": 1})
    with pytest.raises(DataError, match="train: has too few images for validation"):
        load_index(few, "val", val_fraction=FRACTION)
    with pytest.raises(DataError, match="train: has too few images for validation"):
        pack_set(few, {None: tmp_path / "packed"}, val_fraction=FRACTION)


def test_packing_holds_out_the_images_that_training_on_the_files_does(tmp_path: Path) -> None:
    root = draw_set(tmp_path / "set", {"cat": 9, "dog": 5})
    (root / "train/cat/4.JPEG").write_bytes(b"not an image")
    pack_set(root, {None: tmp_path / "packed"}, val_fraction=FRACTION, skip_bad=True)
    pack_set(root, copy_targets(tmp_path / "set-sz", [32]), val_fraction=FRACTION, skip_bad=True)
    log: list[str] = []
    dataset = open_dataset(recipe(copy=32), root, tmp_path / "set-sz", skip_bad=True, log=log.append)
    for split in ("train", "val"):
        packed = load_index(tmp_path / "packed", split, val_fraction=FRACTION)
        assert packed.names() == dataset.indexes[split, None].names() == dataset.indexes[split, 32].names()
        assert read_manifest(tmp_path / "packed" / split).packing_info.val_fraction == FRACTION
    val_count = len(dataset.indexes["val", None])
    assert f"{root}/train: {val_count} of 13 images are held out for validation" in log and val_count in (2, 3)
    evaluated = open_val_indexes(recipe(copy=32), root, tmp_path / "set-sz", skip_bad=True)
    assert {index.names_checksum for index in evaluated.values()} == {dataset.indexes["val", None].names_checksum}
    with pytest.raises(DataError, match=r"not have the same images as .* --sizes 32 --val-fraction 0\.5 --overwrite"):
        open_dataset(recipe(0.5, copy=32), root, tmp_path / "set-sz", skip_bad=True)


def test_set_with_its_own_validation_images_is_refused(tmp_path: Path) -> None:
    root = draw_set(tmp_path / "set", {"cat": 8, "dog": 4})
    pack_set(root, {None: tmp_path / "packed"}, val_fraction=FRACTION)
    (root / "val/cat").mkdir(parents=True)
    for folder, fraction in ((root, FRACTION), (tmp_path / "packed", 0.5)):
        with pytest.raises(DataError, match=r"has validation images of its own; .* --val-fraction 0$"):
            load_index(folder, "train", val_fraction=fraction)
    assert len(open_val_indexes(recipe(0.5), tmp_path / "packed", tmp_path)["val", None]) == 3
