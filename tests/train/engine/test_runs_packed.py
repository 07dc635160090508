"""Whole runs on packed data sets: the same bits as on image files, and errors that name what is damaged."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.run_outputs import final_state

from train.data.index.open import DataError
from train.data.loading.dataset import open_dataset
from train.data.manifest import INDEX_FILE
from train.data.packing.pack import copy_targets, pack_set
from train.recipe import Phase, Recipe


@pytest.fixture(scope="session")
def packed(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny set, packed, with resized copies of 48 pixels beside it. Shared: copy it before changing it."""
    root = tmp_path_factory.mktemp("packed") / "set"
    pack_set(tiny_data, {None: root}, shard_bytes=20_000)
    pack_set(tiny_data, copy_targets(root.with_name("set-sz"), [48]))
    return root


def short_recipe(tiny: Any, **changes: Any) -> Recipe:
    """Return a recipe of two epochs, at 32 and 64 pixels; `changes` are those of the first phase."""
    phases = [
        Phase(epochs=(0, 1), size=32, batch=8, lr=0.01, min_scale=0.35, **changes),
        Phase(epochs=(1, 2), size=64, batch=8, lr=0.02, min_scale=0.5, rect_val=True),
    ]
    recipe: Recipe = tiny(name="short", phases=phases)
    return recipe


def test_run_on_packed_set_matches_run_on_files_bit_for_bit(
    runs: Any, tiny: Any, tiny_data: Path, packed: Path
) -> None:
    recipe, weights_by_run = runs.recipe(short_recipe(tiny)), []
    for name, data in (("files", tiny_data), ("shards", packed)):
        out = runs.folder / f"bits-of-{name}"
        runs.run(out, "--data", str(data), recipe=recipe, world=2)
        weights_by_run.append(final_state(out)["model"])
    assert weights_by_run[0].keys() == weights_by_run[1].keys()
    assert all(torch.equal(weights_by_run[0][name], weights_by_run[1][name]) for name in weights_by_run[0])


def test_run_names_the_image_of_a_changed_shard(runs: Any, tiny: Any, packed: Path, tmp_path: Path) -> None:
    root = tmp_path / "set"
    shutil.copytree(packed, root)
    index_rows = np.load(root / "train" / INDEX_FILE)
    shard = root / "train/shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[int(index_rows["offset"][1]) + 50] ^= 1
    shard.write_bytes(data)
    output = runs.run(runs.folder / "changed", "--data", str(root), recipe=runs.recipe(short_recipe(tiny)), code=None)
    error_lines = [line for line in output.splitlines() if f"{shard}, image 1 in it (id 1, " in line]
    assert (
        len(error_lines) == 1 and f"imgnet-cluster data verify {root}" in error_lines[0] and "Traceback" not in output
    )


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
    recipe = tiny(name="one", phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.01, copy=copy)])
    if copy:
        assert len(open_dataset(recipe, root, packed.with_name("set-sz")).indexes["train", 48]) == 50
    else:
        message = "has the index and no images, but a phase of the recipe reads full-size images"
        with pytest.raises(DataError, match=message) as caught:
            open_dataset(recipe, root, packed.with_name("set-sz"))
        assert f"data fetch SOURCE {root}" in str(caught.value)


def test_open_dataset_reports_missing_and_unfinished_copies(tiny: Any, packed: Path, tmp_path: Path) -> None:
    recipe, log = short_recipe(tiny, copy=48), list[str]()
    dataset = open_dataset(recipe, packed, tmp_path, log=log.append)
    assert dataset.recipe.phases[0].copy is None and len(log) == 1
    assert f"imgnet-cluster data resize {packed} {tmp_path} --sizes 48" in log[0]
    shutil.copytree(packed.with_name("set-sz"), tmp_path / "sz")
    (tmp_path / "sz/48/val/manifest.json").unlink()
    with pytest.raises(DataError, match=f"{tmp_path}/sz/48/val: a packed set that is not finished"):
        open_dataset(recipe, packed, tmp_path / "sz")


def test_open_dataset_takes_same_part_of_packed_set_and_files(tiny: Any, tiny_data: Path, packed: Path) -> None:
    indexes = [open_dataset(short_recipe(tiny), root, root, scale=0.3, seed=5).train for root in (tiny_data, packed)]
    assert len(indexes[0]) == 15 and indexes[0].names() == indexes[1].names()
    assert indexes[0].names_checksum == indexes[1].names_checksum
    assert [indexes[0].read(image_id) for image_id in range(15)] == [
        indexes[1].read(image_id) for image_id in range(15)
    ]
