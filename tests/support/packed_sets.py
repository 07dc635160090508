"""Packed sets made by hand, of bytes that are no images, for tests of what only carries them."""

import hashlib
import io
import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ROW = [
    *(("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("label", "<u4")),
    *(("width", "<u2"), ("height", "<u2"), ("crc", "<u4")),
]


def make_split(folder: Path, images: int = 12, seed: int = 0, each: int = 1000, shard: int = 4500) -> dict[str, Any]:
    """Write one split of `images` pieces of about `each` bytes; returns its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    dice, shards, rows = random.Random(f"{seed} {folder.name}"), [b""], []
    for number in range(images):
        data = dice.randbytes(each + dice.randrange(7))
        if len(shards[-1]) + len(data) > shard:
            shards.append(b"")
        row = len(shards) - 1, len(shards[-1]), len(data), number * 2 // images, 32, 32, zlib.crc32(data)
        rows.append(row)
        shards[-1] += data
    names = "".join(f"{'ab'[number * 2 // images]}/{number:04d}.JPEG\n" for number in range(images)).encode()
    index = io.BytesIO()
    np.save(index, np.array(rows, ROW))
    files = {f"shard-{number:05d}.bin": data for number, data in enumerate(shards)}
    files |= {"index.npy": index.getvalue(), "names.txt": names}
    manifest = {
        "format": "imgnet-cluster packed", "version": 2, "split": folder.name, "short_side": None, "images": images,
        "classes": ["a", "b"], "stems_digest": hashlib.sha256(names).hexdigest(), "names_checksum": zlib.crc32(names),
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "crc32": zlib.crc32(data)}
            for name, data in files.items()
        },
        "packing_info": {},
    }  # fmt: skip
    for old in folder.iterdir():
        old.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def make_set(root: Path, **words: Any) -> Path:
    """Write train/ and, a third as large, val/; returns the root."""
    make_split(root / "train", **words)
    make_split(root / "val", **{**words, "images": max(2, words.get("images", 12) // 3)})
    return root


def content(root: Path) -> dict[str, bytes]:
    """All files below a folder that are not hidden."""
    found = (one for one in root.rglob("*") if one.is_file() and not one.name.startswith("."))
    return {str(one.relative_to(root)): one.read_bytes() for one in found}
