"""A packed set comes over whole and once, whatever goes wrong on the way."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.packed_sets import content, make_set, make_split

from train.data.fetch import download
from train.data.fetch import fetch as fetching
from train.data.fetch.fetch import FetchResult, SetToFetch, fetch_sets, format_bytes
from train.data.fetch.resume import missing_bytes, missing_ranges
from train.data.fetch.sources import FolderSource
from train.data.manifest import FetchError
from train.tools.filesystem import write_atomic

ROOT = Path(__file__).resolve().parents[4]
Words = Any


class Watched(FolderSource):
    """A folder that tells what is read of it, and fails where told."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[tuple[str, int, int]] = []
        self.fail: dict[str, list[Exception | None]] = {}  # by file: at each asking one
        self.spoil: dict[str, int] = {}  # by file: so many times its first byte is wrong
        self.cut = 0  # so many answers end after one byte
        self.lock = threading.Lock()

    def read_small_file(self, path: str) -> bytes | None:
        if self.fail.get(path) and (error := self.fail[path].pop(0)):
            raise error
        return super().read_small_file(path)

    def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        with self.lock:
            self.read.append((path, offset, length))
            error = self.fail.get(path, []) and self.fail[path].pop(0)
            bad, cut = self.spoil.get(path, 0) > 0 and offset == 0, self.cut > 0
            self.spoil[path] = self.spoil.get(path, 0) - bad
            self.cut -= cut
        if error:
            raise error
        for piece in super().read_range(path, offset, length, size):
            piece = bytes([piece[0] ^ 1]) + piece[1:] if bad else piece
            yield piece[:1] if cut else piece
            bad = False
            if cut:
                return

    def names(self) -> set[str]:
        return {path for path, _, _ in self.read}

    @property
    def bytes(self) -> int:
        return sum(length for _, _, length in self.read)


@pytest.fixture
def source(tmp_path: Path) -> Watched:
    return Watched(make_set(tmp_path / "source"))


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(download, "MAX_RETRY_SECONDS", 0.02)


def bring(source: FolderSource, target: Path, index_only: bool = False, **words: Words) -> FetchResult:
    return fetch_sets(
        [SetToFetch(source, target, index_only)],
        **{"range_bytes": 1000, "stall_timeout": 0.3, "log": lambda _: None, **words},
    )


# --- ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, came, step, found",
    [
        (10, [], 4, [(0, 4), (4, 8), (8, 10)]),
        (10, [], 10, [(0, 10)]),
        (10, [], 99, [(0, 10)]),
        (11, [(0, 4), (8, 11)], 4, [(4, 8)]),
        (11, [(3, 5)], 4, [(0, 3), (5, 9), (9, 11)]),
        (10, [(2, 6), (4, 8), (0, 1)], 3, [(1, 2), (8, 10)]),
        (10, [(0, 10), (0, 3)], 3, []),
        (1, [], 1, [(0, 1)]),
        (0, [], 4, []),
    ],
)
def test_missing_ranges_yields_gaps_of_bounded_length(
    size: int, came: list[tuple[int, int]], step: int, found: Any
) -> None:
    assert list(missing_ranges(size, came, step)) == found
    assert missing_bytes(size, came) == sum(end - begin for begin, end in found)


def test_format_bytes_uses_readable_units() -> None:
    assert [format_bytes(n) for n in (7, 1200, 256_000_000, 140_400_000_000)] == [
        "7 bytes",
        "1.2 kB",
        "256 MB",
        "140 GB",
    ]


@pytest.mark.parametrize("step, at_once", [(1, 3), (7, 8), (1000, 1), (4999, 8), (1 << 26, 8)])
def test_fetch_sets_with_any_range_size_copies_every_byte(tmp_path: Path, step: int, at_once: int) -> None:
    root = make_set(tmp_path / "source", images=6, each=100, shard=250)
    seen: list[tuple[int, int]] = []
    done = bring(
        FolderSource(root),
        tmp_path / "t",
        range_bytes=step,
        max_parallel=at_once,
        progress=lambda *both: seen.append(both),
    )
    whole = sum(len(one) for path, one in content(root).items() if not path.endswith("manifest.json"))
    assert content(tmp_path / "t") == content(root) and (done.fetched_bytes, done.existing_bytes) == (whole, 0)
    assert seen == sorted(seen) and seen[-1] == (whole, whole)
    assert not list((tmp_path / "t").rglob("*.part")) + list((tmp_path / "t").rglob(".fetch.jsonl"))


def test_fetch_sets_keeps_max_parallel_ranges_in_flight(tmp_path: Path, source: Watched) -> None:
    flying, most, all_in = [0], [0], threading.Barrier(3)

    class Slow(Watched):
        def read_range(self, *words: Any) -> Iterator[bytes]:
            with source.lock:
                flying[0] += 1
                most[0] = max(most[0], flying[0])
            if not all_in.broken:
                with contextlib.suppress(threading.BrokenBarrierError):
                    all_in.wait(0.5)  # three get here only when three are asked at once
            yield from super().read_range(*words)
            with source.lock:
                flying[0] -= 1

    bring(Slow(source.root), tmp_path / "t", max_parallel=3)
    assert most == [3]


def test_fetch_sets_writes_manifest_last(tmp_path: Path, source: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    whole = download.PartialSplit.write_manifest
    monkeypatch.setattr(
        download.PartialSplit, "write_manifest", lambda one: (seen.append(content(tmp_path / "t")), whole(one))
    )
    bring(source, tmp_path / "t")
    assert [name for one in seen for name in one if "manifest" in name] == ["train/manifest.json"]  # when val has come
    assert "train/names.txt" in seen[0] and "val/names.txt" in seen[1]


# --- again -----------------------------------------------------------------------------------------------------------


def test_fetch_sets_into_complete_target_logs_one_line(tmp_path: Path, source: Watched) -> None:
    bring(source, tmp_path / "t")
    before, said = source.bytes, []
    done = bring(source, tmp_path / "t", log=said.append)
    (line,) = said
    assert line.startswith(f"{tmp_path / 't'}: is there already, by its sizes; nothing") and source.bytes == before
    assert done.fetched_bytes == 0 and done.existing_bytes > 0


def test_fetch_sets_refetches_only_damaged_files(tmp_path: Path, source: Watched) -> None:
    bring(source, tmp_path / "t")
    source.read.clear()
    (tmp_path / "t/train/shard-00001.bin").unlink()
    (tmp_path / "t/val/names.txt").write_bytes(b"short")
    bring(source, tmp_path / "t")
    assert source.names() == {"train/shard-00001.bin", "val/names.txt"}
    assert content(tmp_path / "t") == content(source.root)


KILLED = """
import sys, time
from pathlib import Path
from train.data.fetch.fetch import SetToFetch, fetch_sets
from train.data.fetch.sources import FolderSource

class Stuck(FolderSource):
    count = 0
    def read_range(self, path, offset, length, size):
        Stuck.count += 1
        if path.endswith(".bin") and Stuck.count > int(sys.argv[3]):
            Path(sys.argv[2], "stuck").touch()
            time.sleep(600)
        yield from super().read_range(path, offset, length, size)

fetch_sets([SetToFetch(Stuck(Path(sys.argv[1])), Path(sys.argv[2]))], range_bytes=1000, max_parallel=2)
"""


@pytest.mark.parametrize("after", [0, 3, 9, 14])
def test_fetch_sets_after_kill_resumes(tmp_path: Path, source: Watched, after: int) -> None:
    target = tmp_path / "t"
    words = [sys.executable, "-c", KILLED, str(source.root), str(target), str(after)]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}) as one:
        deadline = time.monotonic() + 30
        while not (target / "stuck").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # the other thread may be at its end
        one.send_signal(signal.SIGKILL)
    assert (target / "stuck").exists() and not (target / "val/manifest.json").exists()
    journal = (target / "train/.fetch.jsonl").read_text() if (target / "train/.fetch.jsonl").exists() else ""
    lines = [json.loads(line) for line in journal.splitlines()]
    noted = sum(one["end"] - one["begin"] for one in lines if "begin" in one)
    whole = sum(len(one) for path, one in content(source.root).items() if not path.endswith("manifest.json"))
    done = bring(source, target)
    assert content(target) == {**content(source.root), "stuck": b""}
    assert done.fetched_bytes == source.bytes == whole - done.existing_bytes and done.existing_bytes >= noted
    assert noted > 0 or after == 0, "what had come was not written down"


def test_fetch_sets_with_truncated_journal_completes(tmp_path: Path, source: Watched) -> None:
    target = tmp_path / "t"
    source.fail["train/shard-00002.bin"] = [FetchError("enough")] * 99
    with pytest.raises(FetchError, match="enough"):
        bring(source, target, max_parallel=1)
    journal = target / "train/.fetch.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    source.fail.clear()
    bring(source, target)
    assert content(target) == content(source.root)


def test_fetch_sets_without_partial_file_ignores_its_ranges(tmp_path: Path, source: Watched) -> None:
    target = tmp_path / "t"
    source.fail["train/shard-00001.bin"] = [None, FetchError("enough")]
    with pytest.raises(FetchError, match="enough"):
        bring(source, target, max_parallel=1, range_bytes=700)
    assert [one.name for one in target.rglob("*.part")] == ["shard-00001.bin.part"]
    for part in target.rglob("*.part"):
        part.unlink()
    source.fail.clear()
    source.read.clear()
    assert bring(source, target).fetched_bytes == source.bytes
    assert content(target) == content(source.root)


def test_fetch_sets_over_foreign_partial_file_completes(tmp_path: Path, source: Watched) -> None:
    (tmp_path / "t/train").mkdir(parents=True)
    (tmp_path / "t/train/index.npy.part").write_bytes(bytes(100_000))
    bring(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


def test_fetch_sets_with_zeroed_partial_file_refetches_it(tmp_path: Path, source: Watched) -> None:
    """After a power cut the file may lack what the journal, which is younger, tells of."""
    target = tmp_path / "t"
    source.fail["train/shard-00000.bin"] = [OSError("x"), *[FetchError("enough")] * 9]
    with pytest.raises(FetchError, match="enough"):
        bring(source, target, max_parallel=2)
    for part in target.rglob("*.part"):
        part.write_bytes(bytes(part.stat().st_size))  # all zeros
    source.fail.clear()
    bring(source, target)
    assert content(target) == content(source.root)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_fetch_sets_with_wrong_checksum_refetches_file(tmp_path: Path, source: Watched) -> None:
    source.spoil["train/shard-00001.bin"] = 1
    bring(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


def test_fetch_sets_with_wrong_checksum_twice_raises(tmp_path: Path, source: Watched) -> None:
    source.spoil["train/shard-00001.bin"] = 99
    with pytest.raises(FetchError) as said:
        bring(source, tmp_path / "t", max_parallel=1)
    assert str(said.value).startswith(f"{source.root}/train/shard-00001.bin: its checksum is not that of the manifest")
    assert "\n" not in str(said.value)
    assert not list((tmp_path / "t").rglob("shard-00001*")) + list((tmp_path / "t").rglob("manifest.json"))
    source.spoil.clear()
    bring(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


def test_fetch_sets_after_source_change_fetches_only_changed_split(tmp_path: Path, source: Watched) -> None:
    target = tmp_path / "t"
    bring(source, target)
    source.read.clear()
    make_split(source.root / "train", seed=1, images=3)  # fewer shards, and index.npy of other bytes
    fresh = Watched(source.root)
    bring(fresh, target)
    assert content(target) == content(source.root)
    assert not [name for name in fresh.names() if name.startswith("val/")]


def test_fetch_sets_interrupted_update_leaves_no_manifest(tmp_path: Path, source: Watched) -> None:
    target = tmp_path / "t"
    bring(source, target)
    names = source.root / "train/names.txt"
    kept, stale = names.read_bytes(), (source.root / "train/shard-00001.bin").read_bytes()
    make_split(source.root / "train", seed=1)
    assert names.read_bytes() == kept and len((source.root / "train/shard-00001.bin").read_bytes()) == len(stale)
    fresh = Watched(source.root)
    fresh.fail["train/shard-00000.bin"] = [FetchError("enough")]
    with pytest.raises(FetchError, match="enough"):
        bring(fresh, target, max_parallel=1)
    assert not (target / "train/manifest.json").exists() and not (target / "train/shard-00001.bin").exists()
    assert (target / "val/manifest.json").exists()
    bring(fresh, target)
    assert content(target) == content(source.root)
    assert "train/names.txt" not in fresh.names(), "it was the same"


def test_fetch_sets_when_manifest_changes_midway_raises(tmp_path: Path, source: Watched) -> None:
    later = (
        (source.root / "train/manifest.json")
        .read_bytes()
        .replace(b'"packing_info": {}', b'"packing_info": {"again": 1}')
    )

    class Changing(Watched):
        def read_range(self, path: str, *words: Any) -> Iterator[bytes]:
            yield from super().read_range(path, *words)
            write_atomic(source.root / "train/manifest.json", later)

    with pytest.raises(FetchError, match=r"source/train: was changed while it was fetched; .*, fetch again") as said:
        bring(Changing(source.root), tmp_path / "t")
    assert "\n" not in str(said.value) and not (tmp_path / "t/train/manifest.json").exists()
    source.read.clear()
    bring(source, tmp_path / "t")
    assert not [name for name in source.names() if name.startswith("train/")], "its files were the same"
    assert content(tmp_path / "t") == content(source.root)


def test_fetch_sets_names_replaced_resized_or_missing_file(tmp_path: Path, source: Watched) -> None:
    class Replacing(Watched):
        def read_range(self, path: str, *words: Any) -> Iterator[bytes]:
            yield from super().read_range(path, *words)
            if path.endswith("shard-00000.bin"):
                other = source.root / "other"
                other.write_bytes((source.root / path).read_bytes())
                other.replace(source.root / path)

    with pytest.raises(FetchError, match=r"shard-00000\.bin: was replaced while it was fetched"):
        bring(Replacing(source.root), tmp_path / "t", max_parallel=1)
    with (source.root / "train/shard-00002.bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(FetchError, match=r"shard-00002\.bin: has \d+ bytes, its manifest says \d+"):
        bring(Watched(source.root), tmp_path / "t")
    (source.root / "train/shard-00002.bin").unlink()
    with pytest.raises(FetchError, match=r"shard-00002\.bin: No such file"):
        bring(Watched(source.root), tmp_path / "t")


def test_fetch_sets_after_transient_errors_continues_at_same_byte(tmp_path: Path, source: Watched) -> None:
    source.fail["train/shard-00000.bin"] = [OSError("slow down"), TimeoutError("nothing"), ConnectionError("cut")]
    source.fail["train/manifest.json"] = [OSError("slow down")] * 2
    source.cut = 5
    bring(source, tmp_path / "t", stall_timeout=20.0)
    assert content(tmp_path / "t") == content(source.root)
    assert any(offset % 1000 == 1 for _, offset, _ in source.read), "one byte that had come was fetched again"


def test_fetch_sets_tolerates_slow_but_not_silent_source(tmp_path: Path, source: Watched) -> None:
    source.cut = 60
    bring(source, tmp_path / "t", max_parallel=1, stall_timeout=0.2)  # 60 pauses of 0.01 s, a byte after each
    assert content(tmp_path / "t") == content(source.root)

    class Empty(Watched):
        def read_range(self, *words: Any) -> Iterator[bytes]:
            yield from ()

    with pytest.raises(FetchError, match="it ended early; nothing came"):
        bring(Empty(source.root), tmp_path / "other")


def test_fetch_sets_from_dead_source_names_file_and_range(tmp_path: Path, source: Watched) -> None:
    source.fail["train/shard-00002.bin"] = [OSError(errno.EIO, "Input/output error")] * 9999
    begun = time.monotonic()
    with pytest.raises(FetchError) as said:
        bring(source, tmp_path / "t", stall_timeout=0.4)
    line = str(said.value)
    assert "source/train/shard-00002.bin, bytes 0 to 1000: [Errno 5] Input/output error" in line or (
        "source/train/shard-00002.bin, bytes" in line and "Input/output error" in line
    )
    assert "nothing came for 0 s" in line and "fetch again, it goes on from here" in line and "\n" not in line
    assert 0.3 < time.monotonic() - begun < 10
    source.fail = {"val/manifest.json": [OSError("away")] * 9999}
    with pytest.raises(FetchError, match=r"val/manifest\.json: away; nothing came"):
        bring(source, tmp_path / "t")


def test_fetch_sets_without_disk_space_raises_before_fetching(
    tmp_path: Path, source: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = fetching.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(FetchError, match=r"t: its disk has 5\.0 kB free, and 1\d\.\d kB are still to be fetched"):
        bring(source, tmp_path / "t")
    assert source.read == []


def test_fetch_sets_when_disk_fills_keeps_received_data(
    tmp_path: Path, source: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.pwrite, [6000]

    def pwrite(handle: int, data: Any, at: int) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(FetchError, match=r"t/train/[a-z0-9.-]+: No space left on device; what has come stays: make"):
        bring(source, tmp_path / "t", max_parallel=1)
    monkeypatch.undo()
    done = bring(source, tmp_path / "t")
    assert done.existing_bytes >= 5000 and content(tmp_path / "t") == content(source.root)


def test_fetch_sets_continues_partial_writes(tmp_path: Path, source: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: write(handle, data[:300], at))
    bring(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


# --- once per machine ------------------------------------------------------------------------------------------------

SECOND = """
import sys
from pathlib import Path
from train.data.fetch.fetch import SetToFetch, fetch_sets
from train.data.fetch.sources import FolderSource
parts = [SetToFetch(FolderSource(Path(sys.argv[1])), Path(sys.argv[2]))]
print(fetch_sets(parts, range_bytes=1000, log=lambda line: print(line, flush=True)).fetched_bytes, flush=True)
"""


def test_fetch_sets_in_two_processes_fetches_once(tmp_path: Path, source: Watched) -> None:
    go, begun = threading.Event(), threading.Event()

    class Held(Watched):
        def read_range(self, *words: Any) -> Iterator[bytes]:
            begun.set()
            go.wait(30)
            yield from super().read_range(*words)

    target, done = tmp_path / "t", list[FetchResult]()
    first = threading.Thread(target=lambda: done.append(bring(Held(source.root), target)))
    first.start()
    assert begun.wait(10)
    words = [sys.executable, "-c", SECOND, str(source.root), str(target)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as second:
        assert second.stdout
        assert second.stdout.readline() == f"another process is fetching {target}: waiting for it\n"
        go.set()
        said = second.stdout.read().splitlines()
    first.join(30)
    assert said[0].startswith(f"{target}: is there already") and said[1:] == ["0"] and done[0].fetched_bytes > 0
    assert content(target) == content(source.root)


# --- only the index --------------------------------------------------------------------------------------------------


def without_images(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(root).items() if not name.endswith((".bin", "manifest.json"))}


def test_fetch_sets_index_only_fetches_no_shards(tmp_path: Path, source: Watched) -> None:
    target, said = tmp_path / "t", []
    bring(source, target, index_only=True)
    assert without_images(target) == without_images(source.root)
    assert not list(target.rglob("*.bin"))
    for split in ("train", "val"):
        mine, its = (json.loads((root / split / "manifest.json").read_text()) for root in (target, source.root))
        assert mine == {**its, "fetched": "index"}
    source.read.clear()
    bring(source, target, index_only=True, log=said.append)
    assert source.read == [] and len(said) == 1
    bring(source, target)
    assert {name[-4:] for name in source.names()} == {".bin"} and content(target) == content(source.root)
    source.read.clear()
    bring(source, target, index_only=True)
    assert source.read == [] and content(target) == content(source.root), "what is more than enough stays"


def test_fetch_sets_index_only_removes_stale_shards(tmp_path: Path, source: Watched) -> None:
    target = tmp_path / "t"
    bring(source, target)
    before = content(source.root)
    make_split(source.root / "train", seed=5)
    assert {n: len(d) for n, d in content(source.root).items()}.keys() == before.keys()
    bring(FolderSource(source.root), target, index_only=True)
    assert not list((target / "train").glob("*.bin"))
    bring(FolderSource(source.root), target)
    assert content(target) == content(source.root)


def test_fetch_sets_index_only_removes_incomplete_shards(tmp_path: Path, source: Watched) -> None:
    target = tmp_path / "t"
    bring(source, target, index_only=True)
    source.fail["train/shard-00002.bin"] = [FetchError("enough")]
    with pytest.raises(FetchError, match="enough"):
        bring(source, target, max_parallel=1)
    assert list((target / "train").glob("*.bin"))
    bring(source, target, index_only=True)
    assert not list((target / "train").glob("*.bin")), "the reader wants all or none"


def test_fetch_sets_overwrites_unknown_shard_beside_index(tmp_path: Path, source: Watched) -> None:
    bring(source, tmp_path / "t", index_only=True)
    right = (source.root / "train/shard-00000.bin").read_bytes()
    (tmp_path / "t/train/shard-00000.bin").write_bytes(bytes(len(right)))
    bring(source, tmp_path / "t")
    assert content(tmp_path / "t") == content(source.root)


def test_load_packed_index_without_shards_opens(tmp_path: Path, source: Watched) -> None:
    index = pytest.importorskip("train.data.index.packed")
    bring(source, tmp_path / "t", index_only=True)
    opened = index.load_packed_index(tmp_path / "t/train", None)
    assert len(opened) == 12 and opened.name(3) == "a/0003.JPEG"
    with pytest.raises(index.DataError) as said:
        opened.read(3)
    assert "shard-00000.bin" in str(said.value) and "\n" not in str(said.value)


# --- what is no packed set -------------------------------------------------------------------------------------------


def test_fetch_sets_from_invalid_source_raises_and_creates_nothing(tmp_path: Path, source: Watched) -> None:
    target = tmp_path / "t"
    with pytest.raises(FetchError, match=r"nowhere: there is no such folder"):
        bring(FolderSource(tmp_path / "nowhere"), target)
    (tmp_path / "files/train/a").mkdir(parents=True)
    with pytest.raises(FetchError, match=r"files: has single files, .* imgnet-cluster data pack \S+files \S+files-pac"):
        bring(FolderSource(tmp_path / "files"), target)
    (source.root / "val/manifest.json").unlink()
    with pytest.raises(FetchError, match=r"source/val/manifest\.json: is not there: no packed set, or one that is not"):
        bring(source, target)
    for text in ("{", "[]", '{"format": "imgnet-cluster packed", "version": 2}'):
        (source.root / "val/manifest.json").write_text(text)
        with pytest.raises(FetchError, match=r"val/manifest\.json: is not the manifest of a packed set"):
            bring(source, target)
    (source.root / "val/manifest.json").write_text('{"format": "imgnet-cluster packed", "version": 99}')
    with pytest.raises(FetchError, match=r"another format"):
        bring(source, target)
    assert not target.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", ".hidden", "a/b", "", "..", "a\n"])
def test_parse_manifest_with_unsafe_file_name_raises(tmp_path: Path, source: Watched, name: str) -> None:
    path = source.root / "train/manifest.json"
    said = json.loads(path.read_text())
    said["files"][name] = {"bytes": 1, "sha256": "0"}
    path.write_text(json.dumps(said))
    with pytest.raises(FetchError, match="is not the manifest of a packed set"):
        bring(source, tmp_path / "t")


def test_fetch_sets_into_folder_of_single_files_raises(tmp_path: Path, source: Watched) -> None:
    (tmp_path / "t/train/n01440764").mkdir(parents=True)
    with pytest.raises(FetchError, match=r"t/train: is not of a packed set, it has n01440764/; fetch into another"):
        bring(source, tmp_path / "t")
