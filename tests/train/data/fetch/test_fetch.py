"""Tests of fetching packed sets: every byte arrives once, whatever goes wrong on the way."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.packed_sets import content, make_set, make_split
from support.waiting import DEADLINE_SECONDS

from train.data.fetch import download
from train.data.fetch.fetch import FetchResult, SetToFetch, fetch_sets, format_bytes
from train.data.fetch.resume import PartialSplit
from train.data.fetch.sources import FolderSource
from train.data.index.base import DataError
from train.data.index.packed import load_packed_index
from train.data.manifest import FetchError
from train.tools.filesystem import write_atomic

REPO = Path(__file__).resolve().parents[4]


class FaultySource(FolderSource):
    """A folder source that records what is read from it, and fails as told."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []  # (path, offset, length)
        self.errors: dict[str, list[Exception | None]] = {}  # by path: what the next reads raise, one each
        self.corruptions: dict[str, int] = {}  # by path: how many reads of the first byte are wrong
        self.short_reads = 0  # how many of the next reads end after one byte
        self.lock = threading.Lock()

    def read_small_file(self, path: str) -> bytes | None:
        if self.errors.get(path) and (error := self.errors[path].pop(0)):
            raise error
        return super().read_small_file(path)

    def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        with self.lock:
            self.reads.append((path, offset, length))
            error = self.errors.get(path, []) and self.errors[path].pop(0)
            is_corrupt = self.corruptions.get(path, 0) > 0 and offset == 0
            self.corruptions[path] = self.corruptions.get(path, 0) - is_corrupt
            is_short = self.short_reads > 0
            self.short_reads -= is_short
        if error:
            raise error
        for chunk in super().read_range(path, offset, length, size):
            chunk = bytes([chunk[0] ^ 1]) + chunk[1:] if is_corrupt else chunk
            yield chunk[:1] if is_short else chunk
            is_corrupt = False
            if is_short:
                return

    def paths_read(self) -> set[str]:
        return {path for path, _, _ in self.reads}

    @property
    def bytes_read(self) -> int:
        return sum(length for _, _, length in self.reads)


@pytest.fixture
def source(tmp_path: Path) -> FaultySource:
    return FaultySource(make_set(tmp_path / "source"))


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(download, "MAX_RETRY_SECONDS", 0.02)


def fetch_one(source: FolderSource, target: Path, index_only: bool = False, **options: Any) -> FetchResult:
    """Fetch one set, with a short timeout."""
    defaults: dict[str, Any] = {"stall_timeout": 0.3, "log": lambda _: None}
    return fetch_sets([SetToFetch(source, target, index_only)], **{**defaults, **options})


def data_bytes(root: Path) -> int:
    """Return the size of all files of a set but its manifests."""
    return sum(len(data) for path, data in content(root).items() if not path.endswith("manifest.json"))


# --- whole sets ------------------------------------------------------------------------------------------------------


def test_format_bytes_uses_readable_units() -> None:
    texts = {7: "7 bytes", 1200: "1.2 kB", 256_000_000: "256 MB", 140_400_000_000: "140 GB"}
    assert {count: format_bytes(count) for count in texts} == texts


@pytest.mark.parametrize("max_parallel", [1, 3, 8])
def test_fetch_sets_copies_every_byte(tmp_path: Path, max_parallel: int) -> None:
    root = make_set(tmp_path / "source", images=6, each=100, shard=250)
    progress: list[tuple[int, int]] = []
    result = fetch_one(
        FolderSource(root),
        tmp_path / "t",
        max_parallel=max_parallel,
        progress=lambda *step: progress.append(step),
    )
    total = data_bytes(root)
    assert content(tmp_path / "t") == content(root) and (result.fetched_bytes, result.existing_bytes) == (total, 0)
    assert progress == sorted(progress) and progress[-1] == (total, total)
    assert not list((tmp_path / "t").rglob("*.part")) + list((tmp_path / "t").rglob(".fetch.jsonl"))


def test_fetch_sets_keeps_max_parallel_files_in_flight(tmp_path: Path, source: FaultySource) -> None:
    in_flight = max_in_flight = reads = 0
    barrier = threading.Barrier(3)

    class CountingSource(FaultySource):
        def read_range(self, *args: Any) -> Iterator[bytes]:
            nonlocal in_flight, max_in_flight, reads
            with source.lock:
                in_flight += 1
                reads += 1
                max_in_flight = max(max_in_flight, in_flight)
                is_early = reads <= 3
            if is_early:
                barrier.wait(DEADLINE_SECONDS)  # they pass only if three files are requested at once
            yield from super().read_range(*args)
            with source.lock:
                in_flight -= 1

    fetch_one(CountingSource(source.root), tmp_path / "t", max_parallel=3)
    assert max_in_flight == 3 and not barrier.broken


def test_fetch_sets_writes_manifest_last(tmp_path: Path, source: FaultySource, monkeypatch: pytest.MonkeyPatch) -> None:
    contents_before = []
    write_manifest = PartialSplit.write_manifest

    def recording_write_manifest(partial: PartialSplit) -> None:
        contents_before.append(content(tmp_path / "t"))
        write_manifest(partial)

    monkeypatch.setattr(PartialSplit, "write_manifest", recording_write_manifest)
    fetch_one(source, tmp_path / "t")
    before_train, before_val = contents_before
    assert "train/names.txt" in before_train and "train/manifest.json" not in before_train
    assert "val/names.txt" in before_val and "train/manifest.json" in before_val
    assert "val/manifest.json" not in {*before_train, *before_val}


# --- repeated fetches ------------------------------------------------------------------------------------------------


def test_fetch_sets_into_complete_target_logs_one_line(tmp_path: Path, source: FaultySource) -> None:
    fetch_one(source, tmp_path / "t")
    before = source.bytes_read
    lines: list[str] = []
    result = fetch_one(source, tmp_path / "t", log=lines.append)
    (line,) = lines
    assert line.startswith(f"{tmp_path / 't'}: is there already, by its file sizes; nothing to fetch")
    assert source.bytes_read == before and result.fetched_bytes == 0 and result.existing_bytes > 0


def test_fetch_sets_refetches_only_damaged_files(tmp_path: Path, source: FaultySource) -> None:
    fetch_one(source, tmp_path / "t")
    source.reads.clear()
    (tmp_path / "t/train/shard-00001.bin").unlink()
    (tmp_path / "t/val/names.txt").write_bytes(b"short")
    fetch_one(source, tmp_path / "t")
    assert source.paths_read() == {"train/shard-00001.bin", "val/names.txt"}
    assert content(tmp_path / "t") == content(source.root)


STUCK_FETCH = """
import sys, time
from pathlib import Path
from train.data.fetch.fetch import SetToFetch, fetch_sets
from train.data.fetch.sources import FolderSource
from train.data.index.base import DataError
from train.data.index.packed import load_packed_index

class StuckSource(FolderSource):
    count = 0
    def read_range(self, path, offset, length, size):
        StuckSource.count += 1
        if path.endswith(".bin") and StuckSource.count > int(sys.argv[3]):
            Path(sys.argv[2]).with_name("stuck").touch()
            time.sleep(600)
        yield from super().read_range(path, offset, length, size)

fetch_sets([SetToFetch(StuckSource(Path(sys.argv[1])), Path(sys.argv[2]))], max_parallel=2)
"""


@pytest.mark.parametrize("after", [0, 2, 3, 5])
def test_fetch_sets_after_kill_refetches_at_most_one_file_per_stream(
    tmp_path: Path, source: FaultySource, after: int, until: Any
) -> None:
    target = tmp_path / "t"
    argv = [sys.executable, "-c", STUCK_FETCH, str(source.root), str(target), str(after)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(REPO)}) as process:
        try:
            until((tmp_path / "stuck").exists)
        finally:
            process.send_signal(signal.SIGKILL)
    assert not (target / "val/manifest.json").exists()
    incomplete = {path.name.removesuffix(".part") for path in target.rglob("*.part")}
    assert 1 <= len(incomplete) <= 2, "a stream has more than one incomplete file"
    complete_names = content(target).keys() & content(source.root).keys()
    complete_bytes = sum((source.root / name).stat().st_size for name in complete_names if "manifest" not in name)
    result = fetch_one(source, target)
    assert content(target) == content(source.root)
    assert result.fetched_bytes == source.bytes_read == data_bytes(source.root) - result.existing_bytes
    assert result.existing_bytes == complete_bytes
    assert result.existing_bytes > 0 or after == 0, "complete files were fetched again"


def test_fetch_sets_with_truncated_journal_completes(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    source.errors["train/shard-00002.bin"] = [FetchError("enough")] * 99
    with pytest.raises(FetchError, match="enough"):
        fetch_one(source, target, max_parallel=1)
    journal = target / "train/.fetch.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    source.errors.clear()
    fetch_one(source, target)
    assert content(target) == content(source.root)


def test_fetch_sets_over_foreign_partial_file_completes(tmp_path: Path, source: FaultySource) -> None:
    (tmp_path / "t/train").mkdir(parents=True)
    (tmp_path / "t/train/index.npy.part").write_bytes(bytes(100_000))
    fetch_one(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


def test_fetch_sets_ignores_a_partial_file_of_full_size(tmp_path: Path, source: FaultySource) -> None:
    """After a power cut a partial file may be as long as the whole and lack data."""
    target = tmp_path / "t"
    source.errors["train/shard-00000.bin"] = [FetchError("enough")]
    with pytest.raises(FetchError, match="enough"):
        fetch_one(source, target, max_parallel=1)
    size = (source.root / "train/shard-00000.bin").stat().st_size
    (target / "train/shard-00000.bin.part").write_bytes(bytes(size))
    result = fetch_one(source, target)
    assert content(target) == content(source.root)
    assert result.existing_bytes == sum(
        (source.root / "train" / name).stat().st_size for name in ("index.npy", "names.txt")
    )


# --- errors ----------------------------------------------------------------------------------------------------------


def test_fetch_sets_with_wrong_checksum_refetches_file(tmp_path: Path, source: FaultySource) -> None:
    source.corruptions["train/shard-00001.bin"] = 1
    fetch_one(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


def test_fetch_sets_with_wrong_checksum_twice_raises(tmp_path: Path, source: FaultySource) -> None:
    source.corruptions["train/shard-00001.bin"] = 99
    with pytest.raises(FetchError) as caught:
        fetch_one(source, tmp_path / "t", max_parallel=1)
    message = str(caught.value)
    assert message.startswith(f"{source.root}/train/shard-00001.bin: its checksum is not that of the manifest")
    assert "\n" not in message
    assert not list((tmp_path / "t").rglob("shard-00001*")) + list((tmp_path / "t").rglob("manifest.json"))
    source.corruptions.clear()
    fetch_one(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


def test_fetch_sets_after_source_change_fetches_only_changed_split(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    fetch_one(source, target)
    source.reads.clear()
    make_split(source.root / "train", seed=1, images=3)  # fewer shards, and another index.npy
    fresh = FaultySource(source.root)
    fetch_one(fresh, target)
    assert content(target) == content(source.root)
    assert not [name for name in fresh.paths_read() if name.startswith("val/")]


def test_fetch_sets_interrupted_update_leaves_no_manifest(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    fetch_one(source, target)
    names = source.root / "train/names.txt"
    old_names = names.read_bytes()
    shard = source.root / "train/shard-00001.bin"
    old_size = shard.stat().st_size
    make_split(source.root / "train", seed=1)
    assert names.read_bytes() == old_names and shard.stat().st_size == old_size
    fresh = FaultySource(source.root)
    fresh.errors["train/shard-00000.bin"] = [FetchError("enough")]
    with pytest.raises(FetchError, match="enough"):
        fetch_one(fresh, target, max_parallel=1)
    assert not (target / "train/manifest.json").exists() and not (target / "train/shard-00001.bin").exists()
    assert (target / "val/manifest.json").exists()
    fetch_one(fresh, target)
    assert content(target) == content(source.root)
    assert "train/names.txt" not in fresh.paths_read(), "names.txt has not changed"


def test_fetch_sets_when_manifest_changes_midway_raises(tmp_path: Path, source: FaultySource) -> None:
    new_manifest = (
        (source.root / "train/manifest.json").read_bytes().replace(b'"signature": ""', b'"signature": "again"')
    )

    class ChangingSource(FaultySource):
        def read_range(self, path: str, *args: Any) -> Iterator[bytes]:
            yield from super().read_range(path, *args)
            write_atomic(source.root / "train/manifest.json", new_manifest)

    with pytest.raises(FetchError, match=r"source/train: was changed while it was fetched; .*, fetch again") as caught:
        fetch_one(ChangingSource(source.root), tmp_path / "t")
    assert "\n" not in str(caught.value) and not (tmp_path / "t/train/manifest.json").exists()
    source.reads.clear()
    fetch_one(source, tmp_path / "t")
    assert not [name for name in source.paths_read() if name.startswith("train/")], "its files have not changed"
    assert content(tmp_path / "t") == content(source.root)


def test_fetch_sets_names_replaced_resized_or_missing_file(tmp_path: Path, source: FaultySource) -> None:
    class ReplacingSource(FaultySource):
        def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
            yield from super().read_range(path, offset, min(length, 1000), size)
            if path.endswith("shard-00000.bin"):
                replacement = source.root / "replacement"
                replacement.write_bytes((source.root / path).read_bytes())
                replacement.replace(source.root / path)

    with pytest.raises(FetchError, match=r"shard-00000\.bin: was replaced while it was fetched"):
        fetch_one(ReplacingSource(source.root), tmp_path / "t", max_parallel=1)
    with (source.root / "train/shard-00002.bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(FetchError, match=r"shard-00002\.bin: has \d+ bytes, its manifest says \d+"):
        fetch_one(FaultySource(source.root), tmp_path / "t")
    (source.root / "train/shard-00002.bin").unlink()
    with pytest.raises(FetchError, match=r"shard-00002\.bin: No such file"):
        fetch_one(FaultySource(source.root), tmp_path / "t")


def test_fetch_sets_after_transient_errors_continues_at_same_byte(tmp_path: Path, source: FaultySource) -> None:
    source.errors["train/shard-00000.bin"] = [OSError("slow down"), TimeoutError("nothing"), ConnectionError("cut")]
    source.errors["train/manifest.json"] = [OSError("slow down")] * 2
    source.short_reads = 5
    fetch_one(source, tmp_path / "t", stall_timeout=20.0)
    assert content(tmp_path / "t") == content(source.root)
    assert any(offset == 1 for _, offset, _ in source.reads), "a received byte was fetched again"


def test_fetch_sets_tolerates_slow_but_not_silent_source(
    tmp_path: Path, source: FaultySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each look at the clock another hundredth of a second is over."""
    monkeypatch.setattr(download, "time", SimpleNamespace(monotonic=itertools.count(step=0.01).__next__))
    source.short_reads = 60
    fetch_one(source, tmp_path / "t", max_parallel=1, stall_timeout=0.2)
    assert content(tmp_path / "t") == content(source.root)

    class EmptySource(FaultySource):
        def read_range(self, *args: Any) -> Iterator[bytes]:
            yield from ()

    with pytest.raises(FetchError, match="the file ended early; nothing was received"):
        fetch_one(EmptySource(source.root), tmp_path / "other")


def test_fetch_sets_from_dead_source_names_the_file(tmp_path: Path, source: FaultySource) -> None:
    source.errors["train/shard-00002.bin"] = [OSError(errno.EIO, "Input/output error")] * 9999
    start_time = time.monotonic()
    with pytest.raises(FetchError) as caught:
        fetch_one(source, tmp_path / "t", stall_timeout=0.4)
    assert time.monotonic() - start_time > 0.3
    line = str(caught.value)
    assert "source/train/shard-00002.bin: " in line and "Input/output error" in line and "\n" not in line
    assert "nothing was received for 0 s" in line and "fetch again: complete files are kept" in line
    source.errors = {"val/manifest.json": [OSError("away")] * 9999}
    with pytest.raises(FetchError, match=r"val/manifest\.json: away; nothing was received"):
        fetch_one(source, tmp_path / "t")


def test_fetch_sets_without_disk_space_raises_before_fetching(
    tmp_path: Path, source: FaultySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(FetchError, match=r"t: its disk has 5\.0 kB free, but 1\d\.\d kB are still to be fetched"):
        fetch_one(source, tmp_path / "t")
    assert source.reads == []


def test_fetch_sets_when_disk_fills_keeps_complete_files(
    tmp_path: Path, source: FaultySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_pwrite = os.pwrite
    free_bytes = 11_000

    def pwrite(file_descriptor: int, data: Any, offset: int) -> int:
        nonlocal free_bytes
        free_bytes -= len(data)
        if free_bytes < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_pwrite(file_descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(FetchError, match=r"t/train/[a-z0-9.-]+: No space left on device; what was fetched stays: make"):
        fetch_one(source, tmp_path / "t", max_parallel=1)
    monkeypatch.undo()
    result = fetch_one(source, tmp_path / "t")
    assert result.existing_bytes >= 5000 and content(tmp_path / "t") == content(source.root)


def test_fetch_sets_continues_partial_writes(
    tmp_path: Path, source: FaultySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: real_pwrite(handle, data[:300], offset))
    fetch_one(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


# --- once per machine ------------------------------------------------------------------------------------------------

SECOND_FETCH = """
import sys
from pathlib import Path
from train.data.fetch.fetch import SetToFetch, fetch_sets
from train.data.fetch.sources import FolderSource
from train.data.index.base import DataError
from train.data.index.packed import load_packed_index
sets = [SetToFetch(FolderSource(Path(sys.argv[1])), Path(sys.argv[2]))]
result = fetch_sets(sets, log=lambda line: print(line, flush=True))
print(result.fetched_bytes, flush=True)
"""


def test_fetch_sets_in_two_processes_fetches_once(tmp_path: Path, source: FaultySource) -> None:
    started, may_continue = threading.Event(), threading.Event()

    class BlockedSource(FaultySource):
        def read_range(self, *args: Any) -> Iterator[bytes]:
            started.set()
            may_continue.wait(120)
            yield from super().read_range(*args)

    target = tmp_path / "t"
    results: list[FetchResult] = []
    first = threading.Thread(target=lambda: results.append(fetch_one(BlockedSource(source.root), target)))
    first.start()
    assert started.wait(120)
    argv = [sys.executable, "-c", SECOND_FETCH, str(source.root), str(target)]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as second:
        assert second.stdout
        assert second.stdout.readline() == f"another process is fetching {target}: waiting for it\n"
        may_continue.set()
        lines = second.stdout.read().splitlines()
    first.join(120)
    assert lines[0].startswith(f"{target}: is there already") and lines[1:] == ["0"]
    assert results[0].fetched_bytes > 0
    assert content(target) == content(source.root)


# --- only the index --------------------------------------------------------------------------------------------------


def index_files(root: Path) -> dict[str, bytes]:
    """Return the content of all files but shards and manifests."""
    return {name: data for name, data in content(root).items() if not name.endswith((".bin", "manifest.json"))}


def test_fetch_sets_index_only_fetches_no_shards(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    lines: list[str] = []
    fetch_one(source, target, index_only=True)
    assert index_files(target) == index_files(source.root)
    assert not list(target.rglob("*.bin"))
    for split in ("train", "val"):
        target_manifest, source_manifest = (
            json.loads((root / split / "manifest.json").read_text()) for root in (target, source.root)
        )
        assert target_manifest == {**source_manifest, "fetched": "index"}
    source.reads.clear()
    fetch_one(source, target, index_only=True, log=lines.append)
    assert source.reads == [] and len(lines) == 1
    fetch_one(source, target)
    assert {name[-4:] for name in source.paths_read()} == {".bin"} and content(target) == content(source.root)
    source.reads.clear()
    fetch_one(source, target, index_only=True)
    assert source.reads == [] and content(target) == content(source.root), "complete shards stay"


def test_fetch_sets_index_only_removes_stale_shards(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    fetch_one(source, target)
    old_names = content(source.root).keys()
    make_split(source.root / "train", seed=5)
    assert content(source.root).keys() == old_names
    fetch_one(FolderSource(source.root), target, index_only=True)
    assert not list((target / "train").glob("*.bin"))
    fetch_one(FolderSource(source.root), target)
    assert content(target) == content(source.root)


def test_fetch_sets_index_only_removes_incomplete_shards(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    fetch_one(source, target, index_only=True)
    source.errors["train/shard-00002.bin"] = [FetchError("enough")]
    with pytest.raises(FetchError, match="enough"):
        fetch_one(source, target, max_parallel=1)
    assert list((target / "train").glob("*.bin"))
    fetch_one(source, target, index_only=True)
    assert not list((target / "train").glob("*.bin")), "the reader needs all shards or none"


def test_fetch_sets_overwrites_unknown_shard_beside_index(tmp_path: Path, source: FaultySource) -> None:
    fetch_one(source, tmp_path / "t", index_only=True)
    size = (source.root / "train/shard-00000.bin").stat().st_size
    (tmp_path / "t/train/shard-00000.bin").write_bytes(bytes(size))
    fetch_one(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


def test_load_packed_index_without_shards_opens(tmp_path: Path, source: FaultySource) -> None:
    fetch_one(source, tmp_path / "t", index_only=True)
    index = load_packed_index(tmp_path / "t/train", None)
    assert len(index) == 12 and index.name(3) == "a/0003.JPEG"
    with pytest.raises(DataError) as caught:
        index.read(3)
    assert "shard-00000.bin" in str(caught.value) and "\n" not in str(caught.value)


# --- invalid sources -------------------------------------------------------------------------------------------------


def test_fetch_sets_from_invalid_source_raises_and_creates_nothing(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    with pytest.raises(FetchError, match=r"nowhere: there is no such folder"):
        fetch_one(FolderSource(tmp_path / "nowhere"), target)
    (tmp_path / "files/train/a").mkdir(parents=True)
    with pytest.raises(FetchError, match=r"files: has single files, .* imgnet-cluster data pack \S+files \S+files-pac"):
        fetch_one(FolderSource(tmp_path / "files"), target)
    (source.root / "val/manifest.json").unlink()
    with pytest.raises(
        FetchError, match=r"source/val/manifest\.json: is not there: no packed set, or packing is not finished"
    ):
        fetch_one(source, target)
    for text in ("{", "[]", '{"format": "imgnet-cluster packed", "version": 2}'):
        (source.root / "val/manifest.json").write_text(text)
        with pytest.raises(FetchError, match=r"val/manifest\.json: is not the manifest of a packed set"):
            fetch_one(source, target)
    (source.root / "val/manifest.json").write_text('{"format": "imgnet-cluster packed", "version": 99}')
    with pytest.raises(FetchError, match=r"another format"):
        fetch_one(source, target)
    assert not target.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", ".hidden", "a/b", "", "..", "a\n"])
def test_parse_manifest_with_unsafe_file_name_raises(tmp_path: Path, source: FaultySource, name: str) -> None:
    path = source.root / "train/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0"}
    path.write_text(json.dumps(manifest))
    with pytest.raises(FetchError, match="is not the manifest of a packed set"):
        fetch_one(source, tmp_path / "t")


def test_fetch_sets_into_folder_of_single_files_raises(tmp_path: Path, source: FaultySource) -> None:
    (tmp_path / "t/train/n01440764").mkdir(parents=True)
    with pytest.raises(FetchError, match=r"t/train: is not a packed set, it has n01440764/; fetch into another"):
        fetch_one(source, tmp_path / "t")
