"""The images of the experiments: a part of CIFAR-10, and photographs that stand upright or are turned.

Both are made once in the work folder, whole or not at all, and chosen by the hash of their names, so that they are the
same ones everywhere.
"""

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from train.tools.filesystem import to_json_bytes

IMAGES_PER_CLASS = 800  # 8,000 images: 1,000 steps of 8, 32 of 256, 8 of 1,024
FOLDS = 5
SHORT_SIDE_PIXELS, JPEG_QUALITY = 128, 90  # of the photographs' copies: pixels, and of the JPEG
SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageSourceError(Exception):
    """Images that cannot be used; the text is one line that says which and why."""


@dataclass(frozen=True)
class ImageSet:
    """A folder with train/ and val/, the digest of its files' names and bytes, and how many classes there are."""

    folder: Path
    fingerprint: str
    classes: int


def prepare_cifar(source: Path, work: Path, per_class: int = IMAGES_PER_CLASS) -> ImageSet:
    """Return `per_class` training images of each class and all validation images of a folder, .tar or .tar.gz.

    Raises `Trouble`.
    """

    def build(folder: Path) -> None:
        chosen = set(_choose_names(list_images(source), per_class))
        for name, content in read_images(source):
            if _relative_name(name) in chosen:
                _write(folder / _relative_name(name), content)

    return _build_once(work / f"cifar10-{per_class}", build)


def _relative_name(name: str) -> str:
    """The split, the class and the file of a path."""
    return "/".join(PurePosixPath(name).parts[-3:])


def _choose_names(image_paths: list[str], per_class: int) -> Iterator[str]:
    """The names split/class/file to take."""
    by_class: dict[str, list[str]] = {}
    for name in map(_relative_name, image_paths):
        split = name.partition("/")[0]
        if split == "val":
            yield name
        elif split == "train":
            by_class.setdefault(name.split("/")[1], []).append(name)
    if not by_class:
        raise ImageSourceError(
            "--data has no train/<class>/<image>: CIFAR-10 as JPEG files is needed, a folder or a tar"
        )
    for kind, mine in by_class.items():
        if len(mine) < per_class:
            raise ImageSourceError(f"train/{kind} has {len(mine)} images; {per_class} of each class are needed")
        yield from sorted(mine, key=name_hash)[:per_class]


def prepare_photographs(source: Path, work: Path, fold: int) -> ImageSet:
    """Return all photographs of a folder or .tar twice, upright and turned by 180 degrees; a fifth of them, the
    fold's, for validation. Both classes have the same shapes and were saved in the same way. Raises `Trouble`.
    """

    def build(folder: Path) -> None:
        files = sorted((PurePosixPath(name).name for name in list_images(source)), key=name_hash)
        if len(files) < 2 * FOLDS or len(set(files)) < len(files):
            raise ImageSourceError(
                f"{source}: has {len(set(files))} photographs of different names; 10 and more are needed"
            )
        places = {name: place for place, name in enumerate(files)}
        for name, content in read_images(source):
            file = PurePosixPath(name)
            split = "val" if places[file.name] % FOLDS == fold else "train"
            for kind, content_of in zip(("turned", "upright"), turned_and_upright(content), strict=True):
                _write(folder / split / kind / f"{file.stem}.jpg", content_of)

    return _build_once(work / f"photographs-{fold}", build)


def turned_and_upright(content: bytes) -> tuple[bytes, bytes]:
    """Return a photograph's copy turned by 180 degrees, and upright, as JPEG files of one size and quality."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as whole:
        factor = SHORT_SIDE_PIXELS / min(whole.size)
        width, height = (max(SHORT_SIDE_PIXELS, round(side * factor)) for side in whole.size)
        small = whole.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    found = []
    for one in (small.transpose(Image.Transpose.ROTATE_180), small):
        with io.BytesIO() as file:
            one.save(file, "JPEG", quality=JPEG_QUALITY)
            found.append(file.getvalue())
    return found[0], found[1]


def name_hash(name: str) -> str:
    """Return what a name is ordered by: its hash, which has nothing to do with what the image shows."""
    return hashlib.sha256(PurePosixPath(name).name.encode()).hexdigest()


def list_images(source: Path) -> list[str]:
    """Return the paths of all images in a folder or a .tar. Raises `Trouble`."""
    if source.is_dir():
        found = (one.relative_to(source).as_posix() for one in sorted(source.rglob("*")))
        return [name for name in found if _is_image(name)]
    try:
        with tarfile.open(source) as tar:
            return [one.name for one in tar if one.isfile() and _is_image(one.name)]
    except (OSError, tarfile.TarError) as error:
        raise ImageSourceError(f"{source}: is neither a folder nor a tar that can be read ({error})") from error


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def read_images(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the bytes of each image."""
    if source.is_dir():
        for name in list_images(source):
            yield name, (source / name).read_bytes()
        return
    with tarfile.open(source) as tar:
        for one in tar:
            if one.isfile() and _is_image(one.name) and (file := tar.extractfile(one)):
                yield one.name, file.read()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _build_once(folder: Path, build: Callable[[Path], None]) -> ImageSet:
    """The images of a folder, which is made first where it is not there: packed, for to open a small file takes longer
    than to decode it. The digest is that of the files before.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temp = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            build(temp / "files")
            told = _describe_set(temp / "files")
            _pack(temp / "files", temp / "set")
            shutil.rmtree(temp / "files")
            (temp / "told.json").write_bytes(to_json_bytes(told))
            temp.rename(folder)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return ImageSet(folder / "set", **json.loads((folder / "told.json").read_text()))


def _describe_set(folder: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    for one in sorted(folder.glob("*/*/*")):
        digest.update(f"{one.relative_to(folder).as_posix()} {one.stat().st_size}\n".encode() + one.read_bytes())
    return {"fingerprint": digest.hexdigest()[:16], "classes": len(list((folder / "train").iterdir()))}


def _pack(folder: Path, target: Path) -> None:
    from train.data.packing.pack import pack_set

    pack_set(folder, {None: target})
