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

from train.data.index.base import DataError, encoded, names_crc, names_digest
from train.data.index.packed import (
    INDEX,
    MANIFEST,
    NAMES,
    ROW,
    UNFINISHED,
    VERSION,
    Manifest,
    Rows,
    crc_of,
    is_packed,
    read_manifest,
)
from train.data.index.shards import shard_name
from train.tools.filesystem import as_json, replace, seal, unseal

from .source_images import Origin


class Ready(NamedTuple):
    """An image as it is to be stored."""

    data: bytes
    width: int
    height: int
    crc: int


@dataclass(frozen=True)
class _Part:
    """A finished shard: which source images it covers, those in it, those left out."""

    first: int
    end: int
    numbers: NDArray[np.int64]
    rows: Rows
    bad: list[tuple[int, str]]
    file: dict[str, Any]


def signature(source: Origin, short: int | None, quality: int) -> str:
    """Return what changes when the sources do, or how they are packed."""
    how = f"{VERSION} {short} {quality} {source.digest()} {source.classes}"
    return hashlib.sha256(how.encode("utf-8", "surrogateescape")).hexdigest()


def check_finished(folder: Path, source: Origin, short: int | None, quality: int, anew: bool) -> None:
    """Raise `DataError` when a finished set lies there that is not of these sources: it may be the only one."""
    if anew or not is_packed(folder):
        return
    try:
        made = read_manifest(folder).made.get("signature")
    except DataError as error:
        raise DataError(f"{error}; to replace it: --anew") from error
    if made != signature(source, short, quality):
        raise DataError(
            f"{folder}: a packed set of other images, or of sources that have changed since; give another folder, or "
            "replace it: --anew"
        )


class Writer:
    """Packs one split into `folder`. `position` is the next source image that it lacks; `said` is worth telling."""

    def __init__(self, folder: Path, source: Origin, short: int | None, quality: int, shard_bytes: int) -> None:
        self.folder, self.source, self.short = folder, source, short
        self.quality, self.shard_bytes = quality, shard_bytes
        self.said, self.bad = "", list[tuple[int, str]]()
        self._parts, self._shard = list[_Part](), cast("_Shard | None", None)
        self.whole = self._finished()
        self.position = len(source.names) if self.whole else self._resume()
        self.kept = self.position - len(self.bad)

    @cached_property
    def _signature(self) -> str:
        return signature(self.source, self.short, self.quality)

    def _finished(self) -> bool:
        """Whether all is there, made of the same sources; what else lies there is no longer valid, and said."""
        if not is_packed(self.folder):
            return False
        try:
            manifest = read_manifest(self.folder)
            if manifest.made.get("signature") != self._signature:
                raise DataError(f"{self.folder}: the sources, or how they are packed, have changed")
            for name, file in manifest.files.items():
                path = self.folder / name
                if not path.exists() or path.stat().st_size != file["bytes"]:
                    raise DataError(f"{path}: is missing or cut short")
        except DataError as error:
            self.said = f"{error}; made anew"
            (self.folder / MANIFEST).unlink()
            return False
        self.bad = [(self.source.names.index(name), why) for name, why in manifest.made["left_out"]]
        self._sweep(None)
        return True

    def _resume(self) -> int:
        """Take over the shards that are whole and of the same images; return the first source image behind them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / UNFINISHED).touch()
        end = 0
        while part := self._stored(len(self._parts), end):
            self._parts.append(part)
            self.bad += part.bad
            end = part.end
        self._sweep(len(self._parts))
        return end

    def _rows_file(self, number: int) -> Path:
        return self.folder / f".rows-{number:05d}.npz"

    def _how(self, first: int, end: int) -> str:
        """What must be equal for a shard to be taken over: its images, their labels, how they are packed."""
        labels = self.source.labels[first:end].tobytes()
        how = f"{VERSION} {self.short} {self.quality} {self.source.digest(first, end)}"
        return hashlib.sha256(how.encode() + labels).hexdigest()

    def _stored(self, number: int, first: int) -> _Part | None:
        with (
            suppress(OSError, ValueError, KeyError),
            np.load(BytesIO(unseal(self._rows_file(number))), allow_pickle=False) as kept,
        ):
            end, size = int(kept["end"]), (self.folder / shard_name(number)).stat().st_size
            if int(kept["first"]) == first and str(kept["how"]) == self._how(first, end) and size == int(kept["bytes"]):
                bad = [(int(one), str(why)) for one, why in zip(kept["bad"], kept["why"], strict=True)]
                file = {"bytes": size, "sha256": str(kept["sha256"])}
                return _Part(first, end, kept["numbers"], kept["rows"], bad, file)
        return None

    def _sweep(self, parts: int | None) -> None:
        """Remove what a killed call left; `parts` shards are to be gone on from, None: all are finished."""
        keep = {one for n in range(parts or 0) for one in (shard_name(n), self._rows_file(n).name)}
        kinds = [".rows-*", ".shard-*", *(f".{one}*" for one in (".rows-", INDEX, NAMES, MANIFEST))]
        kinds.append("shard-*.bin" if parts is not None else UNFINISHED)
        for path in (path for kind in kinds for path in self.folder.glob(kind)):
            if path.name not in keep:
                path.unlink()

    def add(self, number: int, image: Ready | str) -> None:
        """Append a source image, or leave it out: then `image` says why. Raises `OSError` when the disk is full."""
        if isinstance(image, str):
            self.bad.append((number, image))
        else:
            if self._shard and self._shard.size + len(image.data) > self.shard_bytes:
                self._close(number)
            if not self._shard:
                self._shard = _Shard(self.folder, len(self._parts))
            self._shard.add(number, int(self.source.labels[number]), image)
        self.position = number + 1

    def _close(self, end: int) -> None:
        """Finish the open shard, which covers the source images up to `end`."""
        assert self._shard
        first, number = self._parts[-1].end if self._parts else 0, len(self._parts)
        bad = [one for one in self.bad if first <= one[0] < end]
        shard, self._shard = self._shard, None
        file, rows = shard.close(), np.array([row for _, row in shard.rows], ROW)
        part = _Part(first, end, np.array([one for one, _ in shard.rows], np.int64), rows, bad, file)
        kept = BytesIO()
        np.savez(
            kept, first=first, end=end, how=self._how(first, end), numbers=part.numbers, rows=rows,
            bad=np.array([one for one, _ in bad], np.int64), why=np.array([why for _, why in bad], np.str_),
            bytes=file["bytes"], sha256=file["sha256"],
        )  # fmt: skip
        replace(self._rows_file(number), seal(kept.getvalue()))
        self._parts.append(part)

    def stop(self) -> None:
        """Keep what can be kept of an open shard: somebody pressed Ctrl-C, or a file is no image."""
        if self._shard:
            with suppress(OSError):
                self._close(max(self.position, self._shard.rows[-1][0] + 1))
            self.drop()

    def drop(self) -> None:
        """Leave no half file: the disk is full."""
        if self._shard:
            self._shard.drop()
            self._shard = None

    def finish(self) -> None:
        """Write index, names and manifest. Raises `DataError` when no image is left, `OSError` (disk full)."""
        if self.whole:
            return
        if self._shard:
            self._close(self.position)
        if not self._parts:
            raise DataError(f"{self.source.root / self.source.split}: has no images that can be decoded")
        index = BytesIO()
        rows = np.concatenate([part.rows for part in self._parts])
        np.save(index, rows, allow_pickle=False)
        names = [self.source.names[number] for part in self._parts for number in part.numbers]
        files = {shard_name(number): part.file for number, part in enumerate(self._parts)}
        for name, content in ((INDEX, index.getvalue()), (NAMES, b"".join(map(encoded, names)))):
            replace(self.folder / name, content)
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        files[INDEX]["crc32"] = crc_of(self.folder / INDEX)
        replace(self.folder / MANIFEST, as_json(self._manifest(names, files).to_json()))
        self._sweep(None)

    def _manifest(self, names: list[str], files: dict[str, dict[str, Any]]) -> Manifest:
        left_out = [(self.source.names[number], why) for number, why in self.bad]
        made = {
            "quality": self.quality,
            "signature": self._signature,
            "left_out": left_out,
            "versions": {name: importlib.metadata.version(name) for name in ("simplejpeg", "pillow", "numpy")},
        }
        return Manifest(
            split=self.source.split,
            short=self.short,
            images=len(names),
            classes=list(self.source.classes),
            source=names_digest(names),
            names=names_crc(names),
            files=files,
            made=made,
        )


class _Shard:
    """A shard that is being written, under a name that no reader looks at."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path, self.number = folder / shard_name(number), number
        self.temp = folder / f".{self.path.name}.tmp"
        self.size, self.rows = 0, list[tuple[int, tuple[int, ...]]]()
        self._file: IO[bytes] = self.temp.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()

    def add(self, number: int, label: int, image: Ready) -> None:
        """Append an image. Raises `OSError` with the shard's name."""
        try:
            self._file.write(image.data)
        except OSError as error:
            raise _named(error, self.path) from error
        self._digest.update(image.data)
        row = (self.number, self.size, len(image.data), label, image.width, image.height, image.crc)
        self.rows.append((number, row))
        self.size += len(image.data)

    def close(self) -> dict[str, Any]:
        """Make it durable under its name; return its entry in the manifest."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.temp.replace(self.path)
        except OSError as error:
            self.drop()
            raise _named(error, self.path) from error
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}

    def drop(self) -> None:
        """Leave nothing."""
        with suppress(OSError):
            self._file.close()
        self.temp.unlink(missing_ok=True)


def _named(error: OSError, path: Path) -> OSError:
    more = "; what is finished stays: make room and call again" if error.errno == errno.ENOSPC else ""
    return OSError(error.errno or 0, f"{error.strerror}{more}", str(path))
