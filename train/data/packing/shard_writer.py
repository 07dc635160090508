"""Writes one packed split: shard after shard, each complete or absent, and the manifest last.

Until the manifest is written, a .rows file beside each finished shard keeps what the index needs of it. So a call after
kill -9 resumes after the last finished shard, provided that the images before it are still the same.
"""

import hashlib
import importlib.metadata
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from train.data.index.base import DataError, encode_name_line, names_crc32, stems_sha256
from train.data.index.packed import ROW_DTYPE, UNFINISHED_MARKER, file_crc32, is_packed, read_manifest
from train.data.manifest import (
    INDEX_FILE,
    MANIFEST_FILE,
    NAMES_FILE,
    VERSION,
    FileEntry,
    Manifest,
    PackingInfo,
    shard_name,
)
from train.tools.files import FULL_DISK_ERRORS, write_atomic
from train.tools.records import decode_json, encode
from train.tools.sealed_files import read_with_checksum, with_checksum
from train.tools.text_files import to_json_bytes

from .source_images import SourceImages

COPY_JPEG_QUALITY = 90


class EncodedImage(NamedTuple):
    """The bytes of an image file as stored in a shard, its size in pixels, and the crc32 of the bytes."""

    data: bytes
    width: int
    height: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class _FinishedShard:
    """What the .rows file beside a finished shard keeps: the shard covers the source images from `first` to `end`.

    `signature` is that of these images. `source_numbers` (int64) and `rows` (`ROW_DTYPE`) are arrays over the images in
    the shard, as bytes; `skipped_images` are (number, reason) of those left out.
    """

    first: int
    end: int
    signature: str
    source_numbers: bytes
    rows: bytes
    skipped_images: tuple[tuple[int, str], ...]
    manifest_entry: FileEntry


class SplitWriter:
    """Packs one split into `folder`.

    `position` is the next source image to add. `skipped_images` are (number, reason) of the images left out so far.
    `message` tells the user why an existing set is replaced; "" when none is.
    """

    def __init__(
        self, folder: Path, source: SourceImages, short_side: int | None, shard_bytes: int, overwrite: bool
    ) -> None:
        """Look at what the folder has. Nothing is changed before `start`.

        Raises `DataError` for a finished set of other sources, unless `overwrite`: it may be the only copy.
        """
        self.folder = folder
        self.source = source
        self.short_side = short_side
        self.shard_bytes = shard_bytes
        self.message = ""
        self.skipped_images = list[tuple[int, str]]()
        self.position = 0
        self.is_complete = False
        inputs = f"{self._parameters} {source.digest()} {source.classes}"
        self._signature = hashlib.sha256(inputs.encode("utf-8", "surrogateescape")).hexdigest()
        self._finished_shards = list[_FinishedShard]()
        self._current_shard = cast("_OpenShard | None", None)
        if is_packed(folder):
            try:
                if read_manifest(folder).packing_info.signature != self._signature:
                    raise DataError(f"{folder}: a packed set of other images, or of sources that have changed since")
            except DataError as error:
                if not overwrite:
                    raise DataError(f"{error}; give another folder, or replace it: --overwrite") from error
                self.message = f"{error}; packed again"

    @property
    def _parameters(self) -> str:
        """How the images are packed; images that are packed in another way are not taken over."""
        return f"{VERSION} {self.short_side} {COPY_JPEG_QUALITY}"

    def start(self) -> None:
        """Take over what an earlier call has written; the set counts as unfinished unless all of it is there."""
        self.is_complete = is_packed(self.folder) and not self.message and self._has_all_files()
        if self.is_complete:
            left_out = read_manifest(self.folder).packing_info.left_out
            self.skipped_images = [(self.source.names.index(name), reason) for name, reason in left_out]
            self.position = len(self.source.names)
            self._remove_leftovers(None)
        else:
            (self.folder / MANIFEST_FILE).unlink(missing_ok=True)
            self.position = self._resume()
        self.kept_images = self.position - len(self.skipped_images)

    def _has_all_files(self) -> bool:
        """Return whether all files of the manifest have their sizes; otherwise `message` names the first other one."""
        for name, entry in read_manifest(self.folder).files.items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size != entry.bytes:
                self.message = f"{path}: is missing or cut short; packed again"
                return False
        return True

    def _resume(self) -> int:
        """Take over the finished shards of the same images. Returns the first source image behind them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / UNFINISHED_MARKER).touch()
        end = 0
        while shard := self._load_finished_shard(len(self._finished_shards), end):
            self._finished_shards.append(shard)
            self.skipped_images += shard.skipped_images
            end = shard.end
        self._remove_leftovers(len(self._finished_shards))
        return end

    def _shard_rows_path(self, number: int) -> Path:
        return self.folder / f".rows-{number:05d}"

    def _shard_signature(self, first: int, end: int) -> str:
        """Return a digest of what must be equal for a shard to be taken over: images, labels, how they are packed."""
        labels = self.source.labels[first:end].tobytes()
        inputs = f"{self._parameters} {self.source.digest(first, end)}"
        return hashlib.sha256(inputs.encode() + labels).hexdigest()

    def _load_finished_shard(self, number: int, first: int) -> _FinishedShard | None:
        """Return shard `number` if it is complete, begins at source image `first`, and has the same images."""
        with suppress(OSError, ValueError):
            shard = decode_json(_FinishedShard, read_with_checksum(self._shard_rows_path(number)))
            is_same = shard.first == first and shard.signature == self._shard_signature(first, shard.end)
            if is_same and (self.folder / shard_name(number)).stat().st_size == shard.manifest_entry.bytes:
                return shard
        return None

    def _remove_leftovers(self, shards_to_keep: int | None) -> None:
        """Remove the files of a killed call, except the first `shards_to_keep` shards (None: the set is finished)."""
        names_to_keep = set()
        for number in range(shards_to_keep or 0):
            names_to_keep |= {shard_name(number), self._shard_rows_path(number).name}
        # Temporary files of write_atomic have the name of their target behind a dot.
        temp_patterns = [f".{name}*" for name in (".rows-", INDEX_FILE, NAMES_FILE, MANIFEST_FILE)]
        last_pattern = "shard-*.bin" if shards_to_keep is not None else UNFINISHED_MARKER
        for pattern in (".rows-*", ".shard-*", *temp_patterns, last_pattern):
            for path in self.folder.glob(pattern):
                if path.name not in names_to_keep:
                    path.unlink()

    def add(self, number: int, image: EncodedImage | str) -> None:
        """Append a source image, or leave it out: then `image` is the reason. Raises `OSError` (disk full)."""
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
        assert self._current_shard
        first = self._finished_shards[-1].end if self._finished_shards else 0
        open_shard, self._current_shard = self._current_shard, None
        shard = _FinishedShard(
            first=first,
            end=end,
            signature=self._shard_signature(first, end),
            manifest_entry=open_shard.commit(),
            source_numbers=np.array([number for number, _ in open_shard.rows], np.int64).tobytes(),
            rows=np.array([row for _, row in open_shard.rows], ROW_DTYPE).tobytes(),
            skipped_images=tuple(image for image in self.skipped_images if first <= image[0] < end),
        )
        record = with_checksum(to_json_bytes(encode(shard)))
        write_atomic(self._shard_rows_path(len(self._finished_shards)), record)
        self._finished_shards.append(shard)

    def finish_interrupted(self) -> None:
        """Keep what can be kept of the open shard, after Ctrl-C or a file that is not an image."""
        if self._current_shard:
            with suppress(OSError):
                self._finish_shard(max(self.position, self._current_shard.rows[-1][0] + 1))
            self.discard_shard()

    def discard_shard(self) -> None:
        """Remove the open shard, because the disk is full."""
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
        rows = np.frombuffer(b"".join(shard.rows for shard in self._finished_shards), ROW_DTYPE)
        np.save(index, rows, allow_pickle=False)
        numbers = np.frombuffer(b"".join(shard.source_numbers for shard in self._finished_shards), np.int64)
        names = [self.source.names[number] for number in numbers.tolist()]
        name_lines = b"".join(map(encode_name_line, names))
        files = {shard_name(number): shard.manifest_entry for number, shard in enumerate(self._finished_shards)}
        for file_name, content in ((INDEX_FILE, index.getvalue()), (NAMES_FILE, name_lines)):
            write_atomic(self.folder / file_name, content)
            files[file_name] = FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        files[INDEX_FILE] = replace(files[INDEX_FILE], crc32=file_crc32(self.folder / INDEX_FILE))
        manifest = Manifest(
            split=self.source.split,
            short_side=self.short_side,
            images=len(names),
            classes=list(self.source.classes),
            stems_digest=stems_sha256(names),
            names_checksum=names_crc32(names),
            files=files,
            packing_info=PackingInfo(
                quality=COPY_JPEG_QUALITY,
                signature=self._signature,
                left_out=tuple((self.source.names[number], reason) for number, reason in self.skipped_images),
                versions={name: importlib.metadata.version(name) for name in ("simplejpeg", "pillow", "numpy")},
                val_fraction=self.source.val_fraction,
            ),
            fetched=None,
        )
        write_atomic(self.folder / MANIFEST_FILE, manifest.to_bytes())
        self._remove_leftovers(None)


class _OpenShard:
    """A shard that is being written, under a temporary name that readers ignore."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path = folder / shard_name(number)
        self.temp_path = folder / f".{self.path.name}.tmp"
        self.number = number
        self.size = 0
        self.rows = list[tuple[int, tuple[int, ...]]]()  # (source image, row of the index)
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

    def commit(self) -> FileEntry:
        """Make the shard durable under its final name. Returns its entry in the manifest."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.temp_path.replace(self.path)
        except OSError as error:
            self.discard()
            raise _with_shard_path(error, self.path) from error
        return FileEntry(bytes=self.size, sha256=self._digest.hexdigest())

    def discard(self) -> None:
        """Remove the temporary file."""
        with suppress(OSError):
            self._file.close()
        self.temp_path.unlink(missing_ok=True)


def _with_shard_path(error: OSError, path: Path) -> OSError:
    hint = "; finished shards stay: make room and run the command again" if error.errno in FULL_DISK_ERRORS else ""
    return OSError(error.errno or 0, f"{error.strerror}{hint}", str(path))
