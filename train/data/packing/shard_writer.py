"""One packed split in the making: shard after shard, each whole or not there, the manifest last.

Beside a finished shard lies what the index needs of it, until the manifest is written: a call after kill -9 goes on
behind the last finished shard, as far as the images before it are still the same.
"""

import errno
import hashlib
import importlib.metadata
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from train.data.index.base import DataError, encode_name_line, names_crc32, stems_sha256
from train.data.index.packed import (
    INDEX_FILE,
    MANIFEST_FILE,
    NAMES_FILE,
    ROW_DTYPE,
    UNFINISHED_MARKER,
    VERSION,
    IndexRows,
    PackedManifest,
    file_crc32,
    is_packed,
    read_manifest,
)
from train.data.index.shards import shard_name
from train.tools.filesystem import read_with_checksum, to_json_bytes, with_checksum, write_atomic

from .source_images import SourceImages


class EncodedImage(NamedTuple):
    """An image as it is to be stored."""

    data: bytes
    width: int
    height: int
    crc: int


@dataclass(frozen=True)
class _FinishedShard:
    """A finished shard: which source images it covers, those in it, those left out."""

    first: int
    end: int
    source_numbers: NDArray[np.int64]
    rows: IndexRows
    skipped_images: list[tuple[int, str]]
    manifest_entry: dict[str, Any]


def packing_signature(source: SourceImages, short_side: int | None, quality: int) -> str:
    """Return what changes when the sources do, or how they are packed."""
    how = f"{VERSION} {short_side} {quality} {source.digest()} {source.classes}"
    return hashlib.sha256(how.encode("utf-8", "surrogateescape")).hexdigest()


def check_existing_set(
    folder: Path, source: SourceImages, short_side: int | None, quality: int, overwrite: bool
) -> None:
    """Raise `DataError` when a finished set lies there that is not of these sources: it may be the only one."""
    if overwrite or not is_packed(folder):
        return
    try:
        made = read_manifest(folder).packing_info.get("signature")
    except DataError as error:
        raise DataError(f"{error}; to replace it: --anew") from error
    if made != packing_signature(source, short_side, quality):
        raise DataError(
            f"{folder}: a packed set of other images, or of sources that have changed since; give another folder, or "
            "replace it: --anew"
        )


class SplitWriter:
    """Packs one split into `folder`. `position` is the next source image that it lacks; `said` is worth telling."""

    def __init__(
        self, folder: Path, source: SourceImages, short_side: int | None, quality: int, shard_bytes: int
    ) -> None:
        self.folder, self.source, self.short_side = folder, source, short_side
        self.quality, self.shard_bytes = quality, shard_bytes
        self.message, self.skipped_images = "", list[tuple[int, str]]()
        self._finished_shards, self._current_shard = list[_FinishedShard](), cast("_OpenShard | None", None)
        self.is_complete = self._check_complete()
        self.position = len(source.names) if self.is_complete else self._resume()
        self.kept_images = self.position - len(self.skipped_images)

    @cached_property
    def _signature(self) -> str:
        return packing_signature(self.source, self.short_side, self.quality)

    def _check_complete(self) -> bool:
        """Whether all is there, made of the same sources; what else lies there is no longer valid, and said."""
        if not is_packed(self.folder):
            return False
        try:
            manifest = read_manifest(self.folder)
            if manifest.packing_info.get("signature") != self._signature:
                raise DataError(f"{self.folder}: the sources, or how they are packed, have changed")
            for name, file in manifest.files.items():
                path = self.folder / name
                if not path.exists() or path.stat().st_size != file["bytes"]:
                    raise DataError(f"{path}: is missing or cut short")
        except DataError as error:
            self.message = f"{error}; made anew"
            (self.folder / MANIFEST_FILE).unlink()
            return False
        self.skipped_images = [(self.source.names.index(name), why) for name, why in manifest.packing_info["left_out"]]
        self._remove_leftovers(None)
        return True

    def _resume(self) -> int:
        """Take over the shards that are whole and of the same images; return the first source image behind them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / UNFINISHED_MARKER).touch()
        end = 0
        while part := self._load_finished_shard(len(self._finished_shards), end):
            self._finished_shards.append(part)
            self.skipped_images += part.skipped_images
            end = part.end
        self._remove_leftovers(len(self._finished_shards))
        return end

    def _shard_rows_path(self, number: int) -> Path:
        return self.folder / f".rows-{number:05d}.npz"

    def _shard_signature(self, first: int, end: int) -> str:
        """What must be equal for a shard to be taken over: its images, their labels, how they are packed."""
        labels = self.source.labels[first:end].tobytes()
        how = f"{VERSION} {self.short_side} {self.quality} {self.source.digest(first, end)}"
        return hashlib.sha256(how.encode() + labels).hexdigest()

    def _load_finished_shard(self, number: int, first: int) -> _FinishedShard | None:
        with (
            suppress(OSError, ValueError, KeyError),
            np.load(BytesIO(read_with_checksum(self._shard_rows_path(number))), allow_pickle=False) as kept,
        ):
            end, size = int(kept["end"]), (self.folder / shard_name(number)).stat().st_size
            if (
                int(kept["first"]) == first
                and str(kept["how"]) == self._shard_signature(first, end)
                and size == int(kept["bytes"])
            ):
                bad = [(int(one), str(why)) for one, why in zip(kept["bad"], kept["why"], strict=True)]
                file = {"bytes": size, "sha256": str(kept["sha256"])}
                return _FinishedShard(first, end, kept["numbers"], kept["rows"], bad, file)
        return None

    def _remove_leftovers(self, shards_to_keep: int | None) -> None:
        """Remove what a killed call left; `parts` shards are to be gone on from, None: all are finished."""
        keep = {one for n in range(shards_to_keep or 0) for one in (shard_name(n), self._shard_rows_path(n).name)}
        kinds = [".rows-*", ".shard-*", *(f".{one}*" for one in (".rows-", INDEX_FILE, NAMES_FILE, MANIFEST_FILE))]
        kinds.append("shard-*.bin" if shards_to_keep is not None else UNFINISHED_MARKER)
        for path in (path for kind in kinds for path in self.folder.glob(kind)):
            if path.name not in keep:
                path.unlink()

    def add(self, number: int, image: EncodedImage | str) -> None:
        """Append a source image, or leave it out: then `image` says why. Raises `OSError` when the disk is full."""
        if isinstance(image, str):
            self.skipped_images.append((number, image))
        else:
            if self._current_shard and self._current_shard.size + len(image.data) > self.shard_bytes:
                self._finish_shard(number)
            if not self._current_shard:
                self._current_shard = _OpenShard(self.folder, len(self._finished_shards))
            self._current_shard.add(number, int(self.source.labels[number]), image)
        self.position = number + 1

    def _finish_shard(self, end: int) -> None:
        """Finish the open shard, which covers the source images up to `end`."""
        assert self._current_shard
        first, number = self._finished_shards[-1].end if self._finished_shards else 0, len(self._finished_shards)
        bad = [one for one in self.skipped_images if first <= one[0] < end]
        shard, self._current_shard = self._current_shard, None
        file, rows = shard.commit(), np.array([row for _, row in shard.rows], ROW_DTYPE)
        part = _FinishedShard(first, end, np.array([one for one, _ in shard.rows], np.int64), rows, bad, file)
        kept = BytesIO()
        np.savez(
            kept, first=first, end=end, how=self._shard_signature(first, end), numbers=part.source_numbers, rows=rows,
            bad=np.array([one for one, _ in bad], np.int64), why=np.array([why for _, why in bad], np.str_),
            bytes=file["bytes"], sha256=file["sha256"],
        )  # fmt: skip
        write_atomic(self._shard_rows_path(number), with_checksum(kept.getvalue()))
        self._finished_shards.append(part)

    def finish_interrupted(self) -> None:
        """Keep what can be kept of an open shard: somebody pressed Ctrl-C, or a file is no image."""
        if self._current_shard:
            with suppress(OSError):
                self._finish_shard(max(self.position, self._current_shard.rows[-1][0] + 1))
            self.discard_shard()

    def discard_shard(self) -> None:
        """Leave no half file: the disk is full."""
        if self._current_shard:
            self._current_shard.discard()
            self._current_shard = None

    def finish(self) -> None:
        """Write index, names and manifest. Raises `DataError` when no image is left, `OSError` (disk full)."""
        if self.is_complete:
            return
        if self._current_shard:
            self._finish_shard(self.position)
        if not self._finished_shards:
            raise DataError(f"{self.source.root / self.source.split}: has no images that can be decoded")
        index = BytesIO()
        rows = np.concatenate([part.rows for part in self._finished_shards])
        np.save(index, rows, allow_pickle=False)
        names = [self.source.names[number] for part in self._finished_shards for number in part.source_numbers]
        files = {shard_name(number): part.manifest_entry for number, part in enumerate(self._finished_shards)}
        for name, content in ((INDEX_FILE, index.getvalue()), (NAMES_FILE, b"".join(map(encode_name_line, names)))):
            write_atomic(self.folder / name, content)
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        files[INDEX_FILE]["crc32"] = file_crc32(self.folder / INDEX_FILE)
        write_atomic(self.folder / MANIFEST_FILE, to_json_bytes(self._manifest(names, files).to_json()))
        self._remove_leftovers(None)

    def _manifest(self, names: list[str], files: dict[str, dict[str, Any]]) -> PackedManifest:
        left_out = [(self.source.names[number], why) for number, why in self.skipped_images]
        made = {
            "quality": self.quality,
            "signature": self._signature,
            "left_out": left_out,
            "versions": {name: importlib.metadata.version(name) for name in ("simplejpeg", "pillow", "numpy")},
        }
        return PackedManifest(
            split=self.source.split,
            short_side=self.short_side,
            images=len(names),
            classes=list(self.source.classes),
            stems_digest=stems_sha256(names),
            names_checksum=names_crc32(names),
            files=files,
            packing_info=made,
        )


class _OpenShard:
    """A shard that is being written, under a name that no reader looks at."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path, self.number = folder / shard_name(number), number
        self.temp_path = folder / f".{self.path.name}.tmp"
        self.size, self.rows = 0, list[tuple[int, tuple[int, ...]]]()
        self._file: IO[bytes] = self.temp_path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()

    def add(self, number: int, label: int, image: EncodedImage) -> None:
        """Append an image. Raises `OSError` with the shard's name."""
        try:
            self._file.write(image.data)
        except OSError as error:
            raise _with_shard_path(error, self.path) from error
        self._digest.update(image.data)
        row = (self.number, self.size, len(image.data), label, image.width, image.height, image.crc)
        self.rows.append((number, row))
        self.size += len(image.data)

    def commit(self) -> dict[str, Any]:
        """Make it durable under its name; return its entry in the manifest."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.temp_path.replace(self.path)
        except OSError as error:
            self.discard()
            raise _with_shard_path(error, self.path) from error
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}

    def discard(self) -> None:
        """Leave nothing."""
        with suppress(OSError):
            self._file.close()
        self.temp_path.unlink(missing_ok=True)


def _with_shard_path(error: OSError, path: Path) -> OSError:
    more = "; what is finished stays: make room and call again" if error.errno == errno.ENOSPC else ""
    return OSError(error.errno or 0, f"{error.strerror}{more}", str(path))
