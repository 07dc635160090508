"""Fixtures of the data tests: packed sets."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from train.data.packing.pack import copy_targets, pack_set


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 + 4 small images: `data`, packed in full size, and as copies of 32 and 40 pixels. Copy before changing."""
    root = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    for number in range(24 + 4):
        split = "train" if number < 24 else "val"
        class_name = "abc"[number % 3]
        pixels = rng.integers(0, 255, (34 + number, 70 - number, 3), np.uint8)
        path = root / f"data/{split}/{class_name}/{number:02d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(simplejpeg.encode_jpeg(pixels))
    pack_set(root / "data", {None: root / "full"}, shard_bytes=12_000)
    pack_set(root / "data", copy_targets(root / "data-sz", [32, 40]), shard_bytes=8_000)
    return root


@pytest.fixture
def full(sets: Path, tmp_path: Path) -> Path:
    shutil.copytree(sets / "full", tmp_path / "full")
    return tmp_path / "full"
