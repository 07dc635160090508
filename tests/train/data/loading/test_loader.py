"""Batches as each Work asks for them, whoever makes them."""

import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from train.data.index.open import DataError, Index, load_index
from train.data.loading import loader
from train.data.loading.batch_buffers import BatchBuffers
from train.data.loading.loader import PREFETCH_BYTES_PER_WORKER, Batch, BatchDecoder, WorkerBatch, stream_batches
from train.data.order.rect_val import RESIZE_TO_CROP_RATIO, rect_crop_shape
from train.data.order.rng import random_boxes, random_position_boxes
from train.data.order.work import BatchRequest
from train.recipe import Phase
from train.tools import process
from train.tools.errors import WorkerLost

CPU = torch.device("cpu")
LARGEST = 3 * 8 * 96 * 96
SEED = 7

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than processors here


@pytest.fixture(scope="module")
def images(tiny_data: Path) -> BatchDecoder:
    """All images, and a "copy of 48 pixels" that is the training set backwards."""
    train = load_index(tiny_data, "train")
    val = load_index(tiny_data, "val", train.classes)
    backwards = train.take(np.arange(len(train))[::-1])
    return BatchDecoder({("train", None): train, ("train", 48): backwards, ("val", None): val}, SEED)


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def works() -> list[BatchRequest]:
    """Training and validation of all sizes, batches and epochs, mixed."""
    dice = np.random.default_rng(0)
    found = []
    for number in range(12):
        ids = dice.choice(20, dice.integers(1, 9), replace=False)
        if number % 3 == 2:
            found.append(BatchRequest("val", None, ids, (64, 96) if number % 2 else (32, 32), number))
        else:
            size = int(dice.choice([32, 48, 96]))
            found.append(BatchRequest("train", 48 if number % 2 else None, ids, (size, size), number, 0.2, number / 8))
    return found


def run(images: BatchDecoder, asked: list[BatchRequest], workers: int) -> list[Batch]:
    return list(stream_batches(images, iter(asked), workers, CPU, LARGEST))


def opened(index: Index, number: int) -> Image.Image:
    return Image.open(io.BytesIO(index.read(number))).convert("RGB")


def assert_near(found: torch.Tensor, expected: Image.Image) -> None:
    assert (np.abs(found.numpy().astype(int) - np.asarray(expected, int))).max() <= 2


def test_decode_batch_of_train_matches_pil(images: BatchDecoder) -> None:
    ids, flipped = np.array([3, 0, 19, 7, 42, 8]), set()
    for epoch, size, min_scale in ((0, 32, 0.08), (5, 64, 0.5), (6, 96, 0.9)):
        batch = images.decode_batch(BatchRequest("train", None, ids, (size, size), epoch, min_scale))
        index = images.indexes["train", None]
        assert batch.images.shape == (6, size, size, 3) and batch.images.dtype == torch.uint8
        assert batch.labels.dtype == np.int64 and batch.labels.tolist() == index.labels[ids].tolist()
        boxes, flips = random_boxes(SEED, epoch, ids, index.widths[ids], index.heights[ids], min_scale)
        for row, (top, left, height, width) in enumerate(boxes.tolist()):
            part = opened(index, ids[row]).crop((left, top, left + width, top + height))
            part = part.resize((size, size), Image.Resampling.BILINEAR)
            flipped.add(bool(flips[row]))
            assert_near(batch.images[row], part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flips[row] else part)
    assert flipped == {True, False}


def test_decode_batch_without_augment_uses_fixed_size_boxes(images: BatchDecoder) -> None:
    ids, index = np.array([3, 0, 19, 7]), images.indexes["train", None]
    batch = images.decode_batch(BatchRequest("train", None, ids, (32, 32), 5, 0.08, augment=False))
    boxes, flips = random_position_boxes(SEED, 5, ids, index.widths[ids], index.heights[ids])
    for row, (top, left, height, width) in enumerate(boxes.tolist()):
        part = opened(index, ids[row]).crop((left, top, left + width, top + height))
        part = part.resize((32, 32), Image.Resampling.BILINEAR)
        assert_near(batch.images[row], part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flips[row] else part)


@pytest.mark.parametrize("size", [32, 64, 96])
@pytest.mark.parametrize("rect", [False, True])
def test_decode_batch_of_val_is_center_crop(size: int, rect: bool, images: BatchDecoder) -> None:
    index = images.indexes["val", None]
    for number in range(len(index)):
        shape = rect_crop_shape(int(index.widths[number]), int(index.heights[number]), size) if rect else (size, size)
        (found,) = images.decode_batch(BatchRequest("val", None, np.array([number]), shape)).images
        whole = opened(index, number)
        factor = round(size * RESIZE_TO_CROP_RATIO) / min(whole.size)
        width, height = (round(side * factor) for side in whole.size)
        left, top = (width - shape[1]) // 2, (height - shape[0]) // 2
        whole = whole.resize((width, height), Image.Resampling.BILINEAR)
        assert found.shape == (*shape, 3)
        assert_near(found, whole.crop((left, top, left + shape[1], top + shape[0])))


def single(folder: Path, pixels: Any) -> BatchDecoder:
    """One image, stored without loss."""
    (folder / "train" / "one").mkdir(parents=True)
    Image.fromarray(pixels).save(folder / "train" / "one" / "x.JPEG", "PNG")
    return BatchDecoder({("val", None): load_index(folder, "train")}, 0)


def test_decode_batch_without_resize_is_exact(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (73, 101, 3), np.uint8)  # 73 = round(64 x 1.14)
    (found,) = single(tmp_path, pixels).decode_batch(BatchRequest("val", None, np.array([0]), (64, 64))).images
    assert (found.numpy() == pixels[4:68, 18:82]).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (500, 3), (33, 32)])
@pytest.mark.parametrize("min_scale", [None, 0.08])
def test_decode_batch_fills_any_shape_from_any_size(
    size: tuple[int, int], min_scale: float | None, tmp_path: Path
) -> None:
    pixels = np.full((*size, 3), 77, np.uint8)
    for shape in ((32, 32), (64, 96), (96, 64)):
        (found,) = (
            single(tmp_path / str(shape), pixels)
            .decode_batch(BatchRequest("val", None, np.array([0]), shape, 0, min_scale))
            .images
        )
        assert found.shape == (*shape, 3) and (found == 77).all()


def test_decode_batch_depends_on_epoch_and_seed(images: BatchDecoder) -> None:
    ids = np.arange(5)

    def pixels(epoch: int, seed: int = SEED) -> torch.Tensor:
        return (
            BatchDecoder(images.indexes, seed)
            .decode_batch(BatchRequest("train", None, ids, (32, 32), epoch, 0.08))
            .images
        )

    assert torch.equal(pixels(3), pixels(3))
    assert not torch.equal(pixels(3), pixels(4)) and not torch.equal(pixels(3), pixels(3, seed=8))


def test_decode_batch_crop_is_independent_of_batch(images: BatchDecoder) -> None:
    together = images.decode_batch(BatchRequest("train", None, np.array([4, 9, 2]), (32, 32), 1, 0.08)).images
    alone = images.decode_batch(BatchRequest("train", None, np.array([9]), (32, 32), 1, 0.08)).images
    assert torch.equal(together[1], alone[0])


def test_decode_batch_reads_requested_copy(images: BatchDecoder) -> None:
    full, copy = (
        images.decode_batch(BatchRequest("train", key, np.array([1]), (32, 32), 0, 1.0)) for key in (None, 48)
    )
    assert copy.labels[0] == images.indexes["train", None].labels[-2]
    assert not torch.equal(full.images, copy.images)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_stream_batches_is_same_for_any_worker_count(workers: int, images: BatchDecoder) -> None:
    asked = works()
    got = run(images, asked, workers)
    assert len(got) == len(asked)
    for batch, work in zip(got, asked, strict=True):
        direct = images.decode_batch(work)
        assert torch.equal(batch.images, direct.images) and (batch.labels == direct.labels).all()
        assert (batch.request.split, batch.request.copy, batch.request.shape, batch.request.epoch, batch.request.sample_weight) == (
            work.split, work.copy, work.shape, work.epoch, work.sample_weight,
        )  # fmt: skip
        assert batch.request.ids.tolist() == work.ids.tolist()


def test_stream_batches_keeps_its_workers(images: BatchDecoder) -> None:
    batches = stream_batches(
        images, itertools.cycle(works()), 2, CPU, LARGEST
    )  # also: an endless run is not read to its end
    shapes, workers = set(), set()
    for batch in itertools.islice(batches, 40):
        shapes.add(tuple(batch.images.shape))
        workers |= {one.pid for one in multiprocessing.active_children()}
    assert len(shapes) > 8 and len(workers) == 2
    del batches


def test_stream_batches_never_reuses_referenced_memory(images: BatchDecoder) -> None:
    """However many: what nobody holds is used again, and never what somebody does."""
    asked = [BatchRequest("train", None, np.array([number % 50]), (32, 32), number, 0.2) for number in range(60)]
    batches = stream_batches(images, asked, 1, CPU, LARGEST)
    kept, passed = [], 0
    for number, batch in enumerate(batches):
        if number % 2:
            kept.append((number, batch.images[:, 3:, :5]))
        passed += 1
    assert passed == 60
    for number, part in kept:
        assert torch.equal(part, images.decode_batch(asked[number]).images[:, 3:, :5])


def test_stream_batches_delivers_oversized_batch(images: BatchDecoder) -> None:
    work = BatchRequest("val", None, np.arange(20), (96, 128))
    (batch,) = stream_batches(images, [work], 1, CPU, largest_batch_bytes=1000)
    assert torch.equal(batch.images, images.decode_batch(work).images)


def test_pin_memory_frees_buffer_slot(images: BatchDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # as where there is a GPU
    work, shared = BatchRequest("val", None, np.arange(3), (32, 32)), BatchBuffers(1, LARGEST)
    place = shared.acquire(work.batch_shape)
    made = images.decode_batch(work, torch.from_numpy(shared.slot_array(place or 0, work.batch_shape)))
    batch = WorkerBatch(shared.buffers_id, place or 0, made.labels, work).pin_memory()
    assert torch.equal(batch.images, made.images) and batch.labels is made.labels
    assert shared.acquire(work.batch_shape) == place
    (alone,) = stream_batches(images, [work], 0, torch.device("cuda"), LARGEST)
    assert torch.equal(alone.images, made.images) and alone.images is not made.images


class Counted:
    """Works that say how many of them were taken."""

    def __init__(self, works: list[BatchRequest]) -> None:
        self.works, self.taken = works, 0

    def __iter__(self) -> Iterator[BatchRequest]:
        for work in self.works:
            self.taken += 1
            yield work


@pytest.mark.parametrize(("largest", "ahead"), [(1000, 16), (20e6, 6), (60e6, 2), (1e9, 2)])
@pytest.mark.parametrize("workers", [1, 2])
def test_stream_batches_prefetches_within_memory_limit(
    largest: float, ahead: int, workers: int, images: BatchDecoder
) -> None:
    """The next epoch, size and validation too: to the loader they are one stream."""
    asked = Counted([BatchRequest("train", None, np.array([number % 50]), (32, 32), 0, 0.2) for number in range(100)])
    batches = stream_batches(images, asked, workers, CPU, int(largest))
    assert asked.taken == ahead * workers
    for number in range(1, 20):
        next(batches)
        assert asked.taken == ahead * workers + number
    assert ahead == 2 or ahead * largest <= PREFETCH_BYTES_PER_WORKER
    del batches


def test_stream_batches_prefetches_validation(images: BatchDecoder, until: Any) -> None:
    train = [BatchRequest("train", None, np.arange(8), (32, 32), 0, 0.2) for _ in range(3)]
    val = [BatchRequest("val", None, np.arange(8), (64, 64)) for _ in range(3)]
    batches = stream_batches(images, train + val, 1, CPU, LARGEST)
    for _ in train:
        next(batches)
    (worker,) = multiprocessing.active_children()

    def idle() -> bool:
        """Whether the worker has made all: it sleeps, and goes on sleeping, and its processor time stands still."""
        looks = []
        for _ in range(20):
            state, *numbers = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            looks.append((state, *numbers[10:12]))
            time.sleep(0.025)
        return looks[0][0] == "S" and len(set(looks)) == 1

    late: list[bool] = []

    def go_on() -> None:
        late.append(True)
        os.kill(worker.pid or 0, signal.SIGCONT)

    until(idle)
    os.kill(worker.pid or 0, signal.SIGSTOP)  # so nothing more comes from it
    timer = threading.Timer(20, go_on)
    timer.start()
    try:
        assert [next(batches).request.split for _ in val] == ["val"] * 3 and not late
    finally:
        timer.cancel()
        os.kill(worker.pid or 0, signal.SIGCONT)
        del batches


def test_stream_batches_needs_no_dev_shm_and_no_short_tempdir(
    images: BatchDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_group: Any
) -> None:
    """torch would hand tensors over in the one, by sockets in the other whose paths may have 107 characters."""
    long = tmp_path / ("t" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", None)

    def work(_: object) -> int:
        return len(list(stream_batches(images, works(), 1, CPU, LARGEST)))

    assert in_group(1, work) == [len(works())]


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_batches_names_broken_file_in_one_line(
    workers: int, tiny_data: Path, tmp_path: Path, in_group: Any
) -> None:
    """In a process of its own: an error, the frames it passed and the stream in them hold each other, and workers."""
    shutil.copytree(tiny_data / "train", tmp_path / "train")
    index = load_index(tmp_path, "train")
    (tmp_path / "train" / str(index.paths[2])).write_bytes(b"no image")
    (tmp_path / "train" / str(index.paths[3])).unlink()
    broken = BatchDecoder({("train", None): index}, 0)

    def work(_: object) -> list[str]:
        found = []
        for number in (2, 3):
            with pytest.raises(DataError) as caught:
                run(broken, [BatchRequest("train", None, np.array([0, number]), (32, 32), 0, 0.5)], workers)
            found.append(str(caught.value))
        return found

    (found,) = in_group(1, work)
    for number, said in zip((2, 3), found, strict=True):
        assert said.startswith(f"{tmp_path}/train/{index.paths[number]}: ") and "\n" not in said


def test_decode_batch_names_file_of_wrong_size(tiny_data: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_data / "train", tmp_path / "train")
    index = load_index(tmp_path, "train")
    Image.new("RGB", (33, 44)).save(index.location(5), "JPEG")
    changed = BatchDecoder({("train", None): index}, 0)
    for min_scale in (None, 0.5):
        with pytest.raises(DataError) as caught:
            changed.decode_batch(BatchRequest("train", None, np.array([0, 5]), (32, 32), 0, min_scale))
        assert str(caught.value).startswith(f"{index.location(5)}: has 33x44 pixels and not ")


def test_init_worker_exits_when_parent_is_gone(in_group: Any) -> None:
    """The kernel kills it only when its parent dies after it asked for that; such a one would wait for ever."""

    def work(_: object) -> str:
        loader._init_worker(os.getppid(), 0)
        return "goes on"

    assert in_group(1, work) == ["goes on"]
    if not (child := os.fork()):
        loader._init_worker(os.getpid(), 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_stream_batches_with_killed_worker_raises(images: BatchDecoder, in_group: Any) -> None:
    """In a process of its own: torch raises the error wherever that is when the signal comes."""

    def work(_: object) -> str:
        try:
            batches = stream_batches(images, itertools.cycle(works()), 2, CPU, LARGEST)
            next(batches)
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
            return f"{len(list(itertools.islice(batches, 200)))} batches"
        except WorkerLost as error:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return str(error)

    (said,) = in_group(1, work)
    assert said.startswith("a loader process ended (worker (pid ") and "Killed" in said and "\n" not in said


def test_stream_batches_without_sigchld_raises_at_next_batch(
    images: BatchDecoder, in_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(patched, "__defaults__", (0.1,))  # seconds between looks at the workers

    def work(_: object) -> str:
        batches = stream_batches(images, itertools.cycle(works()), 1, CPU, LARGEST)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        next(batches)
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
        try:
            return f"{len(list(itertools.islice(batches, 200)))} batches"
        except WorkerLost as error:
            return str(error)

    (said,) = in_group(1, work)
    assert said.startswith("a loader process ended (worker (pid(s) ") and "\n" not in said


def test_run_with_killed_worker_ends_with_one_line(runs: Any, tiny: Any, until: Any, tmp_path: Path) -> None:
    """And counts as a crash, which is tried again, not as an error that would come back."""
    phases = [Phase(epochs=(0, 1000), size=32, batch=8, lr=0.01, min_scale=0.35)]
    out, work = runs.folder / "worker-killed", tmp_path / "work"
    work.mkdir()
    trainer = runs.start(
        out, "--workers", "2", recipe=runs.recipe(tiny(name="long", phases=phases)),
        environment={"IMGNET_WORK": str(work)},
    )  # fmt: skip

    def training() -> bool:
        path = work / "progress.json"
        return path.exists() and json.loads(path.read_text())["state"] == "training"

    until(training)
    os.kill(process.descendant_pids(trainer.pid)[-1], signal.SIGKILL)
    said = runs.end(out, trainer, code=1)
    (line,) = (one for one in said.splitlines() if "error" in one.lower())
    assert line.startswith("error: a loader process ended (worker (pid") and "Traceback" not in said
    assert json.loads((work / "failed-0.json").read_text())["fault"] == "own"
    runs.gone(out)
