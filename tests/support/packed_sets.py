"""Packed data sets of random bytes instead of images, for tests of code that only copies them."""

import hashlib
import io
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from train.data.manifest import FileEntry, Manifest, PackingInfo

INDEX_DTYPE = [
    *(("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("label", "<u4")),
    *(("width", "<u2"), ("height", "<u2"), ("crc", "<u4")),
]


def make_split(folder: Path, images: int = 12, seed: int = 0, each: int = 1000, shard: int = 4500) -> Manifest:
    """Write a split of images of about `each` bytes, in shards of at most `shard` bytes. Returns its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(f"{seed} {folder.name}")
    shards = [b""]
    rows = []
    for number in range(images):
        data = generator.randbytes(each + generator.randrange(7))
        if len(shards[-1]) + len(data) > shard:
            shards.append(b"")
        rows.append((len(shards) - 1, len(shards[-1]), len(data), number * 2 // images, 32, 32, zlib.crc32(data)))
        shards[-1] += data
    names = "".join(f"{'ab'[number * 2 // images]}/{number:04d}.JPEG\n" for number in range(images)).encode()
    index = io.BytesIO()
    np.save(index, np.array(rows, INDEX_DTYPE))
    files = {f"shard-{number:05d}.bin": data for number, data in enumerate(shards)}
    files |= {"index.npy": index.getvalue(), "names.txt": names}
    sums = {name: (hashlib.sha256(data).hexdigest(), zlib.crc32(data)) for name, data in files.items()}
    manifest = Manifest(
        split=folder.name, short_side=None, images=images, classes=["a", "b"], packing_info=PackingInfo(), fetched=None,
        stems_digest=sums["names.txt"][0], names_checksum=sums["names.txt"][1],
        files={name: FileEntry(bytes=len(files[name]), sha256=sha, crc32=crc) for name, (sha, crc) in sums.items()},
    )  # fmt: skip
    for old_file in folder.iterdir():
        old_file.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return manifest


def make_set(root: Path, **options: Any) -> Path:
    """Write the splits train/ and val/, which is a third as large. Returns the root."""
    make_split(root / "train", **options)
    make_split(root / "val", **{**options, "images": max(2, options.get("images", 12) // 3)})
    return root


def content(root: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder that are not hidden, by relative path."""
    paths = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}
