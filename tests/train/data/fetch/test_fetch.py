"""Tests of fetching packed sets: every byte arrives once, whatever goes wrong on the way."""

import errno
import json
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.error_lines import error_line
from support.packed_sets import content, make_set, make_split
from support.waiting import DEADLINE_SECONDS

from train.data.fetch.fetch import FetchResult, SetToFetch, fetch_sets
from train.data.fetch.sources import ByteCallback, FolderSource
from train.data.index.base import DataError
from train.data.index.packed import load_packed_index
from train.data.manifest import FetchError


class FaultySource(FolderSource):
    """A folder source that records which files are read from it, and fails as told."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.paths_read: list[str] = []
        self.errors: dict[str, Exception] = {}  # by path: what each read of a file raises after its first bytes

    def download(self, path: str, file: Path, on_bytes: ByteCallback) -> None:
        self.paths_read.append(path)
        super().download(path, file, on_bytes)
        if path in self.errors:
            with file.open("r+b") as copy:
                copy.truncate(file.stat().st_size // 2)
            raise self.errors[path]


@pytest.fixture
def source(tmp_path: Path) -> FaultySource:
    return FaultySource(make_set(tmp_path / "source"))


def fetch_one(source: FolderSource, target: Path, index_only: bool = False, **options: Any) -> FetchResult:
    return fetch_sets([SetToFetch(source, target, index_only)], **{"log": lambda _: None, **options})


def fail_at(source: FaultySource, path: str, target: Path) -> None:
    """Fetch until a file cannot be read. It can afterwards. The next file may have been fetched too."""
    source.errors[path] = FetchError("enough")
    with pytest.raises(FetchError, match="enough"):
        fetch_one(source, target, max_parallel=1)
    source.errors.clear()
    source.paths_read.clear()


def size_of(root: Path, names: Sequence[str]) -> int:
    return sum((root / name).stat().st_size for name in names if not name.endswith("manifest.json"))


def test_fetch_sets_refetches_only_what_is_missing(tmp_path: Path, source: FaultySource) -> None:
    target, total = tmp_path / "t", size_of(source.root, [*content(source.root)])
    progress, lines = list[tuple[int, int]](), list[str]()
    result = fetch_one(source, target, progress=lambda *step: progress.append(step))
    assert content(target) == content(source.root) and (result.fetched_bytes, result.existing_bytes) == (total, 0)
    assert progress == sorted(progress) and progress[-1] == (total, total)
    assert [path.name for path in target.rglob(".*")] == [".fetch.lock"]
    source.paths_read.clear()
    result = fetch_one(source, target, log=lines.append)
    assert source.paths_read == [] and (result.fetched_bytes, result.existing_bytes) == (0, total)
    (line,) = lines
    assert line.startswith(f"{target}: is there already, by its file sizes; nothing to fetch")
    (target / "train/shard-00001.bin").unlink()
    (target / "val/names.txt").write_bytes(b"short")
    fetch_one(source, target)
    assert sorted(source.paths_read) == ["train/shard-00001.bin", "val/names.txt"]
    assert content(target) == content(source.root)


@pytest.mark.parametrize("name", ["index.npy.part", "shard-00000.bin", "shard-00002.bin.part.x"])
def test_fetch_sets_trusts_no_file_that_it_has_not_verified(tmp_path: Path, source: FaultySource, name: str) -> None:
    """After a power cut a partial file may be as long as the whole and lack data."""
    target = tmp_path / "t"
    if name.endswith(".x"):
        fail_at(source, "train/shard-00002.bin", target)
    (target / "train").mkdir(parents=True, exist_ok=True)
    (target / "train" / name).write_bytes(bytes((source.root / "train" / name.partition(".part")[0]).stat().st_size))
    fetch_one(source, target)
    assert content(target) == content(source.root)


def test_fetch_sets_after_source_change_fetches_only_changed_files(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    fetch_one(source, target)
    shard, names = source.root / "train/shard-00001.bin", source.root / "train/names.txt"
    old_size, old_names = shard.stat().st_size, names.read_bytes()
    make_split(source.root / "train", seed=1)
    assert names.read_bytes() == old_names and shard.stat().st_size == old_size
    source.paths_read.clear()
    fail_at(source, "train/shard-00000.bin", target)
    assert not (target / "train/manifest.json").exists() and (target / "val/manifest.json").exists()
    kept = {name: data for name, data in content(target).items() if not name.endswith(".part")}
    assert "train/shard-00000.bin" not in kept and kept.items() <= content(source.root).items(), "an old file is left"
    fetch_one(source, target)
    assert content(target) == content(source.root)
    assert source.paths_read and all(path.startswith("train/shard-") for path in source.paths_read)
    make_split(source.root / "train", seed=2, images=3)  # fewer shards
    fetch_one(source, target)
    assert content(target) == content(source.root)


def test_fetch_sets_with_wrong_checksum_raises(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    shard = source.root / "train/shard-00001.bin"
    intact_bytes = shard.read_bytes()
    shard.write_bytes(intact_bytes[:100] + bytes([intact_bytes[100] ^ 1]) + intact_bytes[101:])
    message = error_line(FetchError, fetch_one, source, target)
    assert message.startswith(f"{shard}: its checksum is not that of the manifest")
    assert not list(target.rglob("shard-00001*")) + list(target.rglob("manifest.json"))


@pytest.mark.parametrize("code, hint", [(errno.EIO, "fetch again"), (errno.ENOSPC, "make room, and fetch again")])
def test_fetch_sets_after_an_error_names_the_file_and_keeps_complete_ones(
    tmp_path: Path, source: FaultySource, code: int, hint: str
) -> None:
    target = tmp_path / "t"
    source.errors["train/shard-00002.bin"] = OSError(code, "some reason")
    line = error_line(FetchError, fetch_one, source, target, max_parallel=1)
    assert line.startswith(f"{target}/train/shard-00002.bin: ") and "some reason; " + hint in line
    assert not (target / "train/manifest.json").exists()
    source.errors.clear()
    source.paths_read.clear()
    result = fetch_one(source, target)
    assert "train/shard-00001.bin" not in source.paths_read and content(target) == content(source.root)
    assert result.fetched_bytes == size_of(source.root, source.paths_read) and result.existing_bytes > 0
    (source.root / "val/shard-00000.bin").unlink()
    with pytest.raises(FetchError, match=r"val/shard-00000\.bin: No such file"):
        fetch_one(source, tmp_path / "other")


def test_fetch_sets_without_disk_space_raises_before_fetching(
    tmp_path: Path, source: FaultySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(FetchError, match=r"t: its disk has 5\.0 kB free, but 1\d\.\d kB are still to be fetched"):
        fetch_one(source, tmp_path / "t")
    assert source.paths_read == []


def test_fetch_sets_twice_at_once_fetches_once(tmp_path: Path, source: FaultySource) -> None:
    target, lines = tmp_path / "t", list[str]()
    may_continue = threading.Event()

    class BlockedSource(FaultySource):
        def download(self, *args: Any) -> None:
            may_continue.wait(DEADLINE_SECONDS)
            super().download(*args)

    def continue_first(line: str) -> None:
        lines.append(line)
        may_continue.set()

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(fetch_one, BlockedSource(source.root), target, log=continue_first) for _ in range(2)]
        results = [call.result(DEADLINE_SECONDS) for call in calls]
    assert lines[0] == f"another process is fetching {target}: waiting for it"
    assert sorted(result.fetched_bytes > 0 for result in results) == [False, True]
    assert content(target) == content(source.root)


def test_fetch_sets_index_only_fetches_no_shards(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    fetch_one(source, target, index_only=True)
    index_files = {name for name in content(source.root) if not name.endswith(".bin")}
    assert content(target).keys() == index_files
    index = load_packed_index(target / "train", None)
    assert len(index) == 12 and index.name(3) == "a/0003.JPEG"
    with pytest.raises(DataError, match=r"shard-00000\.bin"):
        index.read(3)
    source.paths_read.clear()
    fetch_one(source, target, index_only=True)
    assert source.paths_read == []
    fetch_one(source, target)
    assert {name[-4:] for name in source.paths_read} == {".bin"} and content(target) == content(source.root)
    source.paths_read.clear()
    fetch_one(source, target, index_only=True)
    assert source.paths_read == [] and content(target) == content(source.root), "complete shards stay"


def test_fetch_sets_between_wrong_folders_raises_and_creates_nothing(tmp_path: Path, source: FaultySource) -> None:
    target = tmp_path / "t"
    (tmp_path / "mine/train/n01440764").mkdir(parents=True)
    with pytest.raises(FetchError, match=r"mine/train: is not a packed set, it has n01440764/; fetch into another"):
        fetch_one(source, tmp_path / "mine")
    other = make_set(tmp_path / "packed", seed=5)
    (other / ".pack.lock").touch()
    before = content(other)
    with pytest.raises(FetchError, match=r"packed/train: has another set, which was packed here; fetch into another"):
        fetch_one(source, other)
    assert content(other) == before
    with pytest.raises(FetchError, match=r"nowhere: there is no such folder"):
        fetch_one(FolderSource(tmp_path / "nowhere"), target)
    (tmp_path / "files/train/a").mkdir(parents=True)
    with pytest.raises(FetchError, match=r"files: has single files, .* imgnet-cluster data pack \S+files \S+files-pac"):
        fetch_one(FolderSource(tmp_path / "files"), target)
    manifest = source.root / "val/manifest.json"
    manifest.unlink()
    with pytest.raises(FetchError, match=r"source/val/manifest\.json: is not there: no packed set, or packing is not"):
        fetch_one(source, target)
    for text, message in (
        ("{", "is not the manifest of a packed set"),
        ("[]", "is not the manifest of a packed set"),
        ('{"format": "imgnet-cluster packed", "version": 2}', "is not the manifest of a packed set"),
        ('{"format": "imgnet-cluster packed", "version": 99}', "another format"),
    ):
        manifest.write_text(text)
        with pytest.raises(FetchError, match=rf"val/manifest\.json: .*{message}"):
            fetch_one(source, target)
    assert not target.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", ".hidden", "a/b", "", "..", "a\n"])
def test_fetch_sets_with_unsafe_file_name_raises(tmp_path: Path, source: FaultySource, name: str) -> None:
    path = source.root / "train/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0"}
    path.write_text(json.dumps(manifest))
    with pytest.raises(FetchError, match="is not the manifest of a packed set"):
        fetch_one(source, tmp_path / "t")
