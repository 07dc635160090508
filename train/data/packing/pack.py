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

from train.data.decode import LONGEST, BadImage, Pixels, decode, encode
from train.data.index import folder as index_folder
from train.data.index import packed
from train.data.index.base import DataError, Progress
from train.data.threads import in_threads
from train.tools.filesystem import locked

from .shard_writer import Ready, Writer, check_finished
from .source_images import Origin, open_sources

QUALITY = 90  # of copies
FULL_QUALITY = 95  # of full-size images that are not JPEG files a strict reader takes
SHARD = 256 * 10**6  # bytes


@dataclass
class Packed:
    """What a call did: images written, images kept from before, sources left out, and what is worth telling."""

    written: int = 0
    kept: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def shrink(pixels: Pixels, short: int) -> Pixels:
    """Return the image with its short side at `short` pixels; a smaller one as it is."""
    height, width, _ = pixels.shape
    factor = short / min(height, width)
    if factor >= 1:
        return pixels
    size = max(short, round(width * factor)), max(short, round(height * factor))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def copies_in(target: Path, sizes: Sequence[int]) -> dict[int | None, Path]:
    """Return where copies of these short sides go: target/<size>. Raises `DataError` for sizes that are none."""
    if not sizes or min(sizes) < 32:
        raise DataError(f"sizes: must be 32 pixels or more, not {', '.join(map(str, sizes)) or 'none'}")
    return {size: target / str(size) for size in sizes}


def pack_set(
    source: Path,
    targets: Mapping[int | None, Path],
    *,
    skip_bad: bool = False,
    anew: bool = False,
    shard_bytes: int = SHARD,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Pack the images of `source` into each of `targets`, by short side in pixels, None for full size.

    Raises `DataError`, `OSError` (disk full). Without `skip_bad` the first file that is not an image ends it; the
    shards finished so far stay, and count next time. A finished set of other images, or of sources that have changed,
    is replaced only if `anew`. Images are never enlarged.
    """
    sources = open_sources(source)
    for root in targets.values():
        _check_target(source, sources, root)
    done, total, before = Packed(), sum(len(one.names) for one in sources), 0
    with ExitStack() as held:
        for root in sorted({*targets.values()}):
            root.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(root / ".pack.lock"))  # a second call waits, and then finds everything there
        for one, (short, root) in product(sources, targets.items()):
            check_finished(root / one.split, one, short, _quality(short), anew)
        todo = [(one, _writers(one, targets, shard_bytes)) for one in sources]  # from here on all are unfinished
        for one, writers in todo:

            def tell(count: int, before: int = before) -> None:
                if progress:
                    progress(before + count, total)

            _pack(one, writers, skip_bad, workers, done, tell)
            before += len(one.names)
    return done


def _writers(source: Origin, targets: Mapping[int | None, Path], shard_bytes: int) -> list[Writer]:
    return [Writer(root / source.split, source, short, _quality(short), shard_bytes) for short, root in targets.items()]


def _quality(short: int | None) -> int:
    return QUALITY if short else FULL_QUALITY


def _check_target(source: Path, sources: Sequence[Origin], root: Path) -> None:
    if root.resolve().is_relative_to(source.resolve()):
        raise DataError(f"{root}: lies in {source}, among the images; give a folder beside {source}")
    for one in sources:
        folder = root / one.split
        if folder.is_dir() and not packed.is_packed(folder) and (found := index_folder.class_folders(folder)):
            raise DataError(f"{folder / found[0]}: a folder of images is there; remove it, or give another folder")


def _pack(
    source: Origin,
    writers: Sequence[Writer],
    skip_bad: bool,
    workers: int | None,
    done: Packed,
    tell: Callable[[int], None],
) -> None:
    """Bring the writers of one split to their end."""
    done.said += [one.said for one in writers if one.said]
    done.kept += sum(one.kept for one in writers)
    bad = {number: why for one in writers for number, why in one.bad}
    if bad and not skip_bad:
        raise _no_image(source, *min(bad.items()))
    lacking = {one: one.position for one in writers if not one.whole}

    def make(number: int) -> dict[int | None, Ready] | str:
        wanted = [one.short for one, first in lacking.items() if first <= number]
        try:
            return _ready(source.read(number), wanted)
        except BadImage as error:
            return str(error)

    start = min(lacking.values(), default=len(source.names))
    if start:
        tell(start)
    try:
        for number, made in enumerate(in_threads(make, range(start, len(source.names)), workers), start):
            if isinstance(made, str):
                if not skip_bad:
                    raise _no_image(source, number, made)
                bad[number] = made
            for one, first in lacking.items():
                if first <= number:
                    one.add(number, made if isinstance(made, str) else made[one.short])
                    done.written += not isinstance(made, str)
            tell(number + 1)
    except OSError:
        for one in lacking:
            one.drop()
        raise
    except BaseException:
        for one in lacking:
            one.stop()
        raise
    for one in lacking:
        one.finish()
    done.bad += [(source.where(number), bad[number]) for number in sorted(bad)]


def _no_image(source: Origin, number: int, why: str) -> DataError:
    return DataError(f"{source.where(number)}: {why}; mend or remove it, or say --skip-bad")


def _ready(data: bytes, wanted: Sequence[int | None]) -> dict[int | None, Ready]:
    """Decode an image once and make what is asked for of it. Raises `BadImage`."""
    pixels, plain = _decoded(data)
    made: dict[int | None, Ready] = {}
    for short in wanted:
        small = pixels if short is None else shrink(pixels, short)
        height, width, _ = small.shape
        if short is None and plain:
            stored = data
        elif max(height, width) > LONGEST:
            raise BadImage(f"{width} x {height} pixels do not fit into a JPEG file")
        else:
            stored = encode(small, _quality(short))
        made[short] = Ready(stored, width, height, zlib.crc32(stored))
    return made


def _decoded(data: bytes) -> tuple[Pixels, bool]:
    """The pixels, and whether the bytes can be stored as they are: a strict reader takes them."""
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, "RGB")), True
    except ValueError:
        return decode(data), False
