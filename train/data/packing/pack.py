"""Packed sets: every image in full size, or with its short side at 160 or 352 pixels, aspect kept.

Reading 160-pixel copies instead of originals feeds a GPU 8 times faster at 128 pixels. Every image is decoded on the
way, once for all sizes of a call. A call may be killed and repeated: it goes on behind the last finished shard.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from train.data.decode import MAX_JPEG_SIDE, BadImage, Pixels, decode_image, encode_jpeg
from train.data.index import folder as index_folder
from train.data.index import packed
from train.data.index.base import DataError, ProgressCallback
from train.data.threads import map_in_threads
from train.tools.filesystem import locked

from .shard_writer import EncodedImage, SplitWriter, check_existing_set
from .source_images import SourceImages, open_source_splits

COPY_JPEG_QUALITY = 90  # of copies
FULL_SIZE_JPEG_QUALITY = 95  # of full-size images that are not JPEG files a strict reader takes
SHARD_BYTES = 256 * 10**6  # bytes


@dataclass
class PackResult:
    """What a call did: images written, images kept from before, sources left out, and what is worth telling."""

    written: int = 0
    kept: int = 0
    skipped_files: list[tuple[str, str]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def shrink_to_short_side(pixels: Pixels, short_side: int) -> Pixels:
    """Return the image with its short side at `short` pixels; a smaller one as it is."""
    height, width, _ = pixels.shape
    factor = short_side / min(height, width)
    if factor >= 1:
        return pixels
    size = max(short_side, round(width * factor)), max(short_side, round(height * factor))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def copy_targets(target: Path, sizes: Sequence[int]) -> dict[int | None, Path]:
    """Return where copies of these short sides go: target/<size>. Raises `DataError` for sizes that are none."""
    if not sizes or min(sizes) < 32:
        raise DataError(f"sizes: must be 32 pixels or more, not {', '.join(map(str, sizes)) or 'none'}")
    return {size: target / str(size) for size in sizes}


def pack_set(
    source: Path,
    targets: Mapping[int | None, Path],
    *,
    skip_bad: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> PackResult:
    """Pack the images of `source` into each of `targets`, by short side in pixels, None for full size.

    Raises `DataError`, `OSError` (disk full). Without `skip_bad` the first file that is not an image ends it; the
    shards finished so far stay, and count next time. A finished set of other images, or of sources that have changed,
    is replaced only if `anew`. Images are never enlarged.
    """
    sources = open_source_splits(source)
    for root in targets.values():
        _check_target(source, sources, root)
    done, total, before = PackResult(), sum(len(one.names) for one in sources), 0
    with ExitStack() as held:
        for root in sorted({*targets.values()}):
            root.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(root / ".pack.lock"))  # a second call waits, and then finds everything there
        for one, (short, root) in product(sources, targets.items()):
            check_existing_set(root / one.split, one, short, _jpeg_quality(short), overwrite)
        todo = [(one, _make_writers(one, targets, shard_bytes)) for one in sources]  # from here on all are unfinished
        for one, writers in todo:

            def tell(count: int, before: int = before) -> None:
                if progress:
                    progress(before + count, total)

            _pack_split(one, writers, skip_bad, workers, done, tell)
            before += len(one.names)
    return done


def _make_writers(source: SourceImages, targets: Mapping[int | None, Path], shard_bytes: int) -> list[SplitWriter]:
    return [
        SplitWriter(root / source.split, source, short, _jpeg_quality(short), shard_bytes)
        for short, root in targets.items()
    ]


def _jpeg_quality(short_side: int | None) -> int:
    return COPY_JPEG_QUALITY if short_side else FULL_SIZE_JPEG_QUALITY


def _check_target(source: Path, sources: Sequence[SourceImages], target: Path) -> None:
    if target.resolve().is_relative_to(source.resolve()):
        raise DataError(f"{target}: lies in {source}, among the images; give a folder beside {source}")
    for one in sources:
        folder = target / one.split
        if folder.is_dir() and not packed.is_packed(folder) and (found := index_folder.class_folders(folder)):
            raise DataError(f"{folder / found[0]}: a folder of images is there; remove it, or give another folder")


def _pack_split(
    source: SourceImages,
    writers: Sequence[SplitWriter],
    skip_bad: bool,
    workers: int | None,
    result: PackResult,
    report_progress: Callable[[int], None],
) -> None:
    """Bring the writers of one split to their end."""
    result.messages += [one.message for one in writers if one.message]
    result.kept += sum(one.kept_images for one in writers)
    bad = {number: why for one in writers for number, why in one.skipped_images}
    if bad and not skip_bad:
        raise _bad_image_error(source, *min(bad.items()))
    lacking = {one: one.position for one in writers if not one.is_complete}

    def make(number: int) -> dict[int | None, EncodedImage] | str:
        wanted = [one.short_side for one, first in lacking.items() if first <= number]
        try:
            return _encode_for_targets(source.read(number), wanted)
        except BadImage as error:
            return str(error)

    start = min(lacking.values(), default=len(source.names))
    if start:
        report_progress(start)
    try:
        for number, made in enumerate(map_in_threads(make, range(start, len(source.names)), workers), start):
            if isinstance(made, str):
                if not skip_bad:
                    raise _bad_image_error(source, number, made)
                bad[number] = made
            for one, first in lacking.items():
                if first <= number:
                    one.add(number, made if isinstance(made, str) else made[one.short_side])
                    result.written += not isinstance(made, str)
            report_progress(number + 1)
    except OSError:
        for one in lacking:
            one.discard_shard()
        raise
    except BaseException:
        for one in lacking:
            one.finish_interrupted()
        raise
    for one in lacking:
        one.finish()
    result.skipped_files += [(source.location(number), bad[number]) for number in sorted(bad)]


def _bad_image_error(source: SourceImages, number: int, reason: str) -> DataError:
    return DataError(f"{source.location(number)}: {reason}; mend or remove it, or say --skip-bad")


def _encode_for_targets(data: bytes, short_sides: Sequence[int | None]) -> dict[int | None, EncodedImage]:
    """Decode an image once and make what is asked for of it. Raises `BadImage`."""
    pixels, plain = _decode_for_packing(data)
    made: dict[int | None, EncodedImage] = {}
    for short in short_sides:
        small = pixels if short is None else shrink_to_short_side(pixels, short)
        height, width, _ = small.shape
        if short is None and plain:
            stored = data
        elif max(height, width) > MAX_JPEG_SIDE:
            raise BadImage(f"{width} x {height} pixels do not fit into a JPEG file")
        else:
            stored = encode_jpeg(small, _jpeg_quality(short))
        made[short] = EncodedImage(stored, width, height, zlib.crc32(stored))
    return made


def _decode_for_packing(data: bytes) -> tuple[Pixels, bool]:
    """The pixels, and whether the bytes can be stored as they are: a strict reader takes them."""
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, "RGB")), True
    except ValueError:
        return decode_image(data), False
