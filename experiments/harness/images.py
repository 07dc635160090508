"""The images of the experiments: a part of CIFAR-10, and photographs that are upright or turned by 180 degrees.

Both sets are made once in the work folder, completely or not at all. The images are chosen by a hash of their names, so
that everybody gets the same set.
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

from train.tools.text_files import to_json_bytes

IMAGES_PER_CLASS = 800  # 8,000 images: 1,000 steps of 8, 32 of 256, 8 of 1,024
FOLDS = 5
MIN_PHOTOGRAPHS = 2 * FOLDS
SHORT_SIDE_PIXELS = 128  # of the photographs' copies
JPEG_QUALITY = 90
SUFFIXES = (".jpg", ".jpeg", ".png")
DESCRIPTION_FILENAME = "told.json"  # in the folder of a set: the fields of `ImageSet` besides the folder


class ImageSourceError(Exception):
    """Images that cannot be used. The text is one line that says which and why."""


@dataclass(frozen=True)
class ImageSet:
    """A set of images: a folder with train/ and val/, a hash of its files' names and bytes, its number of classes."""

    folder: Path
    fingerprint: str
    classes: int


def prepare_cifar(source: Path, work: Path, per_class: int = IMAGES_PER_CLASS) -> ImageSet:
    """Return `per_class` training images of each class and all validation images of a folder, .tar or .tar.gz.

    Raises `ImageSourceError`.
    """

    def build(folder: Path) -> None:
        chosen_names = set(_choose_names(list_images(source), per_class))
        for name, content in read_images(source):
            relative_name = _relative_name(name)
            if relative_name in chosen_names:
                _write(folder / relative_name, content)

    return _build_once(work / f"cifar10-{per_class}", build)


def _relative_name(path: str) -> str:
    """Return split/class/file of a path."""
    return "/".join(PurePosixPath(path).parts[-3:])


def _choose_names(image_paths: list[str], per_class: int) -> Iterator[str]:
    """Yield the names split/class/file of the images to take."""
    names_by_class: dict[str, list[str]] = {}
    for name in map(_relative_name, image_paths):
        split = name.partition("/")[0]
        if split == "val":
            yield name
        elif split == "train":
            names_by_class.setdefault(name.split("/")[1], []).append(name)
    if not names_by_class:
        raise ImageSourceError("--data has no train/<class>/<image>; pass CIFAR-10 as JPEG files, in a folder or a tar")
    for class_name, names in names_by_class.items():
        if len(names) < per_class:
            raise ImageSourceError(f"train/{class_name} has {len(names)} images; {per_class} of each class are needed")
        yield from sorted(names, key=name_hash)[:per_class]


def prepare_photographs(source: Path, work: Path, fold: int) -> ImageSet:
    """Return all photographs of a folder or .tar twice: upright, and turned by 180 degrees.

    A fifth of them, given by `fold`, is for validation. Both classes have the same shapes and are saved in the same
    way. Raises `ImageSourceError`.
    """

    def build(folder: Path) -> None:
        filenames = sorted((PurePosixPath(name).name for name in list_images(source)), key=name_hash)
        if len(filenames) < MIN_PHOTOGRAPHS or len(set(filenames)) < len(filenames):
            raise ImageSourceError(
                f"{source}: has {len(set(filenames))} photographs with different names of {len(filenames)}; at least "
                f"{MIN_PHOTOGRAPHS} are needed, each with a name of its own"
            )
        index_by_filename = {filename: index for index, filename in enumerate(filenames)}
        for name, content in read_images(source):
            file = PurePosixPath(name)
            split = "val" if index_by_filename[file.name] % FOLDS == fold else "train"
            for class_name, jpeg in zip(("turned", "upright"), turned_and_upright(content), strict=True):
                _write(folder / split / class_name / f"{file.stem}.jpg", jpeg)

    return _build_once(work / f"photographs-{fold}", build)


def turned_and_upright(content: bytes) -> tuple[bytes, bytes]:
    """Return small copies of a photograph, turned by 180 degrees and upright, as JPEG files of one size and quality."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as photograph:
        factor = SHORT_SIDE_PIXELS / min(photograph.size)
        width, height = (max(SHORT_SIDE_PIXELS, round(side * factor)) for side in photograph.size)
        upright = photograph.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    turned = upright.transpose(Image.Transpose.ROTATE_180)
    jpegs = []
    for image in (turned, upright):
        with io.BytesIO() as file:
            image.save(file, "JPEG", quality=JPEG_QUALITY)
            jpegs.append(file.getvalue())
    return jpegs[0], jpegs[1]


def name_hash(name: str) -> str:
    """Return the hash of a file's name, by which images are ordered: it is independent of what the image shows."""
    return hashlib.sha256(PurePosixPath(name).name.encode()).hexdigest()


def list_images(source: Path) -> list[str]:
    """Return the paths of all images in a folder or a .tar. Raises `ImageSourceError`."""
    if source.is_dir():
        names = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*"))]
        return [name for name in names if _is_image(name)]
    try:
        with tarfile.open(source) as tar:
            return [member.name for member in tar if member.isfile() and _is_image(member.name)]
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
        for member in tar:
            if member.isfile() and _is_image(member.name) and (file := tar.extractfile(member)):
                yield member.name, file.read()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _build_once(folder: Path, build: Callable[[Path], None]) -> ImageSet:
    """Return the image set of a folder, which is built first when it does not exist.

    The set is packed, because opening a small file takes longer than decoding it. The fingerprint is that of the
    unpacked files.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            build(temporary / "files")
            description = _describe_set(temporary / "files")
            _pack(temporary / "files", temporary / "set")
            shutil.rmtree(temporary / "files")
            (temporary / DESCRIPTION_FILENAME).write_bytes(to_json_bytes(description))
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return ImageSet(folder / "set", **json.loads((folder / DESCRIPTION_FILENAME).read_text()))


def _describe_set(folder: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*/*/*")):
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return {"fingerprint": digest.hexdigest()[:16], "classes": len(list((folder / "train").iterdir()))}


def _pack(folder: Path, target: Path) -> None:
    from train.data.packing.pack import pack_set

    pack_set(folder, {None: target})
