"""Packs data sets: every image in full size, or as copies with a short side such as 160 or 352 pixels, aspect kept.

In full size the bytes of each file are stored as they are, so a packed set decodes to the pixels of the folder. So are
those of an image that is smaller than a copy would be. Other copies are JPEG files of `COPY_JPEG_QUALITY`.

Reading 160-pixel copies instead of originals feeds a GPU 8 times as fast at 128 pixels. Every image is decoded once,
for all sizes of a call. A call may be killed and repeated: it resumes after the last finished shard.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

from train.data.decode import BadImage, Pixels, decode_image, encode_jpeg
from train.data.index import folder as index_folder
from train.data.index import packed
from train.data.index.base import DataError
from train.data.index.open import empty_classes
from train.data.manifest import PACK_LOCK_FILE
from train.data.threads import map_in_threads
from train.data.validation_split import notes_on_empty_classes
from train.tools.files import SHARED_LOCK, locked
from train.tools.process_log import Progress, no_progress

from .shard_writer import COPY_JPEG_QUALITY, EncodedImage, SplitWriter
from .source_images import SourceImages, open_source_splits

SHARD_BYTES = 256 * 10**6


@dataclass
class PackResult:
    """The result of packing: images written, images kept from an earlier call, sources left out, and messages.

    `skipped_files` are (where, reason). `messages` tell which sets were packed again, and which classes lack images.
    """

    written: int = 0
    kept: int = 0
    skipped_files: list[tuple[str, str]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def shrink_to_short_side(pixels: Pixels, short_side: int) -> Pixels:
    """Return the image resized to a short side in pixels (bicubic). A smaller image is returned unchanged."""
    height, width, _ = pixels.shape
    factor = short_side / min(height, width)
    if factor >= 1:
        return pixels
    size = max(short_side, round(width * factor)), max(short_side, round(height * factor))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def copy_targets(target: Path, sizes: Sequence[int]) -> dict[int | None, Path]:
    """Return the folder target/<size> of each short side."""
    return {size: target / str(size) for size in sizes}


def pack_set(
    source: Path,
    targets: Mapping[int | None, Path],
    *,
    val_fraction: float = 0.0,
    skip_bad: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = no_progress,
) -> PackResult:
    """Pack the images of `source` into each of `targets`, by short side in pixels (None: full size).

    `val_fraction` of train/ is held out for validation where the source has no val/. Images are never enlarged. A
    finished set of other images, or of sources that have changed since, is replaced only with `overwrite`. Without
    `skip_bad`, the first file that is not an image ends the call; the next one resumes after the finished shards.
    Raises `DataError`, and `OSError` when the disk is full.
    """
    source_splits = open_source_splits(source, val_fraction)
    for root in targets.values():
        _check_target(source, source_splits, root)
    untrained, unvalidated = (empty_classes(split.classes, split.labels) for split in source_splits)
    notes = notes_on_empty_classes(untrained, unvalidated, len(source_splits[0].classes))
    result = PackResult(messages=[f"warning: {note}" for note in notes])
    total = sum(len(split_source.names) for split_source in source_splits)
    with ExitStack() as locks:
        for root in sorted({*targets.values()}):
            root.mkdir(parents=True, exist_ok=True)
            # A second call waits, and then finds everything packed.
            locks.enter_context(locked(root / PACK_LOCK_FILE, permissions=SHARED_LOCK))
        writers_by_split = [
            [
                SplitWriter(root / split_source.split, split_source, short_side, shard_bytes, overwrite)
                for short_side, root in targets.items()
            ]
            for split_source in source_splits
        ]
        for writer in chain.from_iterable(writers_by_split):  # after the checks of all sets
            writer.start()
        done_before = 0
        for split_source, writers in zip(source_splits, writers_by_split, strict=True):

            def report_progress(done_in_split: int, done_before: int = done_before) -> None:
                progress(done_before + done_in_split, total)

            _pack_split(split_source, writers, skip_bad, result, report_progress)
            done_before += len(split_source.names)
    return result


def _check_target(source: Path, source_splits: Sequence[SourceImages], target: Path) -> None:
    if target.resolve().is_relative_to(source.resolve()):
        raise DataError(f"{target}: lies in {source}, among the images; give a folder beside {source}")
    for split_source in source_splits:
        folder = target / split_source.split
        if folder.is_dir() and not packed.is_packed(folder) and (classes := index_folder.class_folders(folder)):
            raise DataError(f"{folder / classes[0]}: a folder of images is there; remove it, or give another folder")


def _pack_split(
    source: SourceImages,
    writers: Sequence[SplitWriter],
    skip_bad: bool,
    result: PackResult,
    report_progress: Callable[[int], None],
) -> None:
    """Pack one split: full size and resized copies, a writer for each. Count the images in `result`."""
    result.messages += [writer.message for writer in writers if writer.message]
    result.kept += sum(writer.kept_images for writer in writers)
    bad_images = {number: reason for writer in writers for number, reason in writer.skipped_images}
    if bad_images and not skip_bad:
        raise _bad_image_error(source, *min(bad_images.items()))
    first_by_writer = {writer: writer.position for writer in writers if not writer.is_complete}

    def encode(number: int) -> dict[int | None, EncodedImage] | str:
        short_sides = [writer.short_side for writer, first in first_by_writer.items() if first <= number]
        try:
            return _encode_for_targets(source.read(number), short_sides)
        except BadImage as error:
            return str(error)

    start = min(first_by_writer.values(), default=len(source.names))
    if start:
        report_progress(start)
    try:
        for number, encoded in enumerate(map_in_threads(encode, range(start, len(source.names))), start):
            if isinstance(encoded, str):
                if not skip_bad:
                    raise _bad_image_error(source, number, encoded)
                bad_images[number] = encoded
            for writer, first in first_by_writer.items():
                if first <= number:
                    writer.add(number, encoded if isinstance(encoded, str) else encoded[writer.short_side])
                    result.written += not isinstance(encoded, str)
            report_progress(number + 1)
    except OSError:
        for writer in first_by_writer:
            writer.discard_shard()
        raise
    except BaseException:
        for writer in first_by_writer:
            writer.finish_interrupted()
        raise
    for writer in first_by_writer:
        writer.finish()
    result.skipped_files += [(source.location(number), bad_images[number]) for number in sorted(bad_images)]


def _bad_image_error(source: SourceImages, number: int, reason: str) -> DataError:
    return DataError(f"{source.location(number)}: {reason}; repair or remove it, or pass --skip-bad")


def _encode_for_targets(data: bytes, short_sides: Sequence[int | None]) -> dict[int | None, EncodedImage]:
    """Decode an image once and encode it for each short side. Raises `BadImage`."""
    pixels = decode_image(data)
    encoded: dict[int | None, EncodedImage] = {}
    for short_side in short_sides:
        resized = pixels if short_side is None else shrink_to_short_side(pixels, short_side)
        content = data if resized is pixels else encode_jpeg(resized, COPY_JPEG_QUALITY)
        height, width, _ = resized.shape
        encoded[short_side] = EncodedImage(content, width, height, zlib.crc32(content))
    return encoded
