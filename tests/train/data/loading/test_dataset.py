"""Opening the data set of a recipe: which copies its phases read, and what is missing on this machine."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from train.data.index.open import DataError
from train.data.loading.dataset import open_dataset
from train.data.packing.pack import copy_targets, pack_set
from train.recipe import Phase, Recipe


@pytest.fixture(scope="module")
def packed(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny set, packed, with resized copies of 48 pixels beside it. Shared: copy it before changing it."""
    root = tmp_path_factory.mktemp("packed") / "set"
    pack_set(tiny_data, {None: root}, shard_bytes=20_000)
    pack_set(tiny_data, copy_targets(root.with_name("set-sz"), [48]))
    return root


def one_phase(tiny: Any, copy: int | None) -> Recipe:
    recipe: Recipe = tiny(name="one", phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.01, copy=copy)])
    return recipe


@pytest.mark.parametrize("copy", [48, None])
def test_open_dataset_index_alone_suffices_if_all_phases_read_copies(
    copy: int | None, tiny: Any, packed: Path, tmp_path: Path
) -> None:
    root = tmp_path / "set"
    shutil.copytree(packed, root)
    for split in ("train", "val"):
        path = root / split / "manifest.json"
        path.write_text(path.read_text().replace('"fetched": null', '"fetched": "index"', 1))
        for shard in (root / split).glob("*.bin"):
            shard.unlink()
    if copy:
        assert len(open_dataset(one_phase(tiny, copy), root, packed.with_name("set-sz")).indexes["train", 48]) == 50
    else:
        message = "has the index and no images, but a phase of the recipe reads full-size images"
        with pytest.raises(DataError, match=message) as caught:
            open_dataset(one_phase(tiny, copy), root, packed.with_name("set-sz"))
        assert f"data fetch SOURCE {root}" in str(caught.value)


def test_open_dataset_without_the_copies_reads_the_full_size_images(tiny: Any, packed: Path, tmp_path: Path) -> None:
    log = list[str]()
    dataset = open_dataset(one_phase(tiny, 48), packed, tmp_path, log=log.append)
    assert dataset.recipe.phases[0].copy is None and len(log) == 1
    assert f"imgnet-cluster data resize {packed} {tmp_path} --sizes 48" in log[0]


@pytest.mark.parametrize(("changes", "opens_full_size"), [
    ({"copy": 48}, False), ({"copy": 48, "rect_val": True}, True), ({"copy": 48, "rect_train": True}, True), ({}, True),
])  # fmt: skip
def test_open_dataset_opens_full_size_files_where_a_phase_needs_their_sizes(
    changes: dict[str, Any], opens_full_size: bool, tiny: Any, tiny_data: Path, packed: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_data, tmp_path / "data")
    for path in (tmp_path / "data").rglob("*.JPEG"):
        path.write_bytes(b"")
    recipe = tiny(name="one", phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.01, **changes)])
    if opens_full_size:
        with pytest.raises(DataError, match="the file is empty"):
            open_dataset(recipe, tmp_path / "data", packed.with_name("set-sz"))
        return
    dataset = open_dataset(recipe, tmp_path / "data", packed.with_name("set-sz"))
    assert dataset.train.names() == open_dataset(recipe, packed, packed.with_name("set-sz")).train.names()
    (tmp_path / "data/train/disc/more.JPEG").write_bytes(b"")
    with pytest.raises(DataError, match="the file is empty"):  # the names are not those of the copy
        open_dataset(recipe, tmp_path / "data", packed.with_name("set-sz"))
