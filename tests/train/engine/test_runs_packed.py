"""Whole runs on packed sets: the same bits as on the files, and damage that ends them by name."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from train.data.index.open import DataError
from train.data.index.packed import INDEX_FILE
from train.data.loading.dataset import open_dataset
from train.data.packing.pack import copy_targets, pack_set
from train.recipe import Phase, Recipe
from train.tools import checkpoint_io


@pytest.fixture(scope="session")
def packed(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny set, packed, and copies of 48 pixels of it beside it. Copy it before changing it."""
    root = tmp_path_factory.mktemp("packed") / "set"
    pack_set(tiny_data, {None: root}, shard_bytes=20_000)
    pack_set(tiny_data, copy_targets(root.with_name("set-sz"), [48]))
    return root


def short(tiny: Any, **changes: Any) -> Recipe:
    """Two epochs, the first of 32 pixels."""
    phases = [
        Phase(epochs=(0, 1), size=32, batch=8, lr=0.01, min_scale=0.35, **changes),
        Phase(epochs=(1, 2), size=64, batch=8, lr=0.02, min_scale=0.5, rect_val=True),
    ]
    made: Recipe = tiny(name="short", phases=phases)
    return made


def weights(out: Path) -> dict[str, torch.Tensor]:
    path = checkpoint_io.newest_checkpoint(out / "checkpoints/000001")
    assert path is not None
    found: dict[str, torch.Tensor] = checkpoint_io.load_checkpoint(path)["model"]
    return found


def test_a_run_on_a_packed_set_ends_with_the_bits_of_one_on_its_files(
    runs: Any, tiny: Any, tiny_data: Path, packed: Path
) -> None:
    recipe, found = runs.recipe(short(tiny)), []
    for name, data in (("files", tiny_data), ("shards", packed)):
        out = runs.folder / f"bits-of-{name}"
        runs.run(out, "--data", str(data), recipe=recipe, world=2)
        found.append(weights(out))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_packed_copies_are_read_where_a_phase_names_them(runs: Any, tiny: Any, packed: Path) -> None:
    out = runs.folder / "copies"
    said = runs.run(out, "--data", str(packed), recipe=runs.recipe(short(tiny, copy=48)))
    assert "no copies" not in said and "done: top-1" in said


def test_bytes_that_change_during_a_run_end_it_by_shard_number_id_and_name(
    runs: Any, tiny: Any, packed: Path, tmp_path: Path
) -> None:
    root = tmp_path / "set"
    shutil.copytree(packed, root)
    rows = np.load(root / "train" / INDEX_FILE)
    shard = root / "train/shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[int(rows["offset"][1]) + 50] ^= 1
    shard.write_bytes(data)
    said = runs.run(runs.folder / "changed", "--data", str(root), recipe=runs.recipe(short(tiny)), code=None)
    named = [line for line in said.splitlines() if f"{shard}, image 1 in it (id 1, " in line]
    assert len(named) == 1 and f"imgnet-cluster data verify {root}" in named[0] and "Traceback" not in said


@pytest.mark.parametrize("copy", [48, None])
def test_an_index_alone_is_enough_as_long_as_no_phase_reads_the_images(
    copy: int | None, tiny: Any, packed: Path, tmp_path: Path
) -> None:
    root = tmp_path / "set"
    shutil.copytree(packed, root)
    for split in ("train", "val"):
        path = root / split / "manifest.json"
        path.write_text(path.read_text().replace('{\n "format"', '{\n "fetched": "index",\n "format"', 1))
        for shard in (root / split).glob("*.bin"):
            shard.unlink()
    recipe = tiny(name="one", phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.01, copy=copy)])
    if copy:
        assert len(open_dataset(recipe, root, packed.with_name("set-sz")).indexes["train", 48]) == 50
    else:
        with pytest.raises(DataError, match="has the index and no images, but a phase of the recipe reads full-size images") as caught:
            open_dataset(recipe, root, packed.with_name("set-sz"))
        assert f"data fetch SOURCE {root}" in str(caught.value)


def test_missing_and_unfinished_copies_are_told(tiny: Any, packed: Path, tmp_path: Path) -> None:
    recipe, told = short(tiny, copy=48), list[str]()
    opened = open_dataset(recipe, packed, tmp_path, log=told.append)
    assert opened.recipe.phases[0].copy is None and len(told) == 1
    assert f"imgnet-cluster data resize {packed} {tmp_path} --sizes 48" in told[0]
    shutil.copytree(packed.with_name("set-sz"), tmp_path / "sz")
    (tmp_path / "sz/48/val/manifest.json").unlink()
    with pytest.raises(DataError, match=f"{tmp_path}/sz/48/val: a packed set that is not finished"):
        open_dataset(recipe, packed, tmp_path / "sz")


def test_a_part_of_a_packed_set_is_the_same_part_as_of_its_files(tiny: Any, tiny_data: Path, packed: Path) -> None:
    parts = [open_dataset(short(tiny), one, one, scale=0.3, seed=5).train for one in (tiny_data, packed)]
    assert len(parts[0]) == 15 and parts[0].names() == parts[1].names()
    assert parts[0].names_checksum == parts[1].names_checksum
    assert [parts[0].read(n) for n in range(15)] == [parts[1].read(n) for n in range(15)]
