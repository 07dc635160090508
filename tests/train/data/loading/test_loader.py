"""Tests of the loader: batches as their requests ask for them, from any number of workers."""

import errno
import io
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from train.data.index.open import DataError, load_index
from train.data.loading.augment import trivial_augment
from train.data.loading.loader import (
    PREFETCH_BYTES_PER_WORKER,
    Batch,
    BatchBuffers,
    BatchDecoder,
    BatchStream,
    WorkerBatch,
)
from train.data.order.rng import image_generator, random_boxes, random_position_boxes
from train.data.order.work import BatchRequest
from train.data.packing.pack import pack_set
from train.tools.errors import MachineTrouble, WorkerLost

CPU = torch.device("cpu")
LARGEST_BATCH_BYTES = 3 * 8 * 96 * 96
SEED = 7

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create"
)  # the tests may use more workers than CPUs


@pytest.fixture(scope="module")
def decoder(tiny_data: Path) -> BatchDecoder:
    """A decoder of the tiny set. Its "copy of 48 pixels" is the training set backwards."""
    train = load_index(tiny_data, "train")
    val = load_index(tiny_data, "val", train.classes)
    backwards = train.take(np.arange(len(train))[::-1])
    return BatchDecoder({("train", None): train, ("train", 48): backwards, ("val", None): val}, SEED)


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def mixed_requests() -> list[BatchRequest]:
    """Return requests of training and validation, of mixed sizes, batches and epochs."""
    rng = np.random.default_rng(0)
    requests = []
    for number in range(12):
        ids = rng.choice(20, rng.integers(1, 9), replace=False)
        if number % 3 == 2:
            shape = (64, 96) if number % 2 else (32, 32)
            requests.append(BatchRequest("val", None, ids, shape, number, squares=5 if number == 5 else 1))
        else:
            size = int(rng.choice([32, 48, 96]))
            copy = 48 if number % 2 else None
            requests.append(BatchRequest("train", copy, ids, (size, size), number, 0.2, number / 8))
    return requests


def make_batches(decoder: BatchDecoder, requests: list[BatchRequest], workers: int) -> list[Batch]:
    return list(BatchStream(decoder, iter(requests), workers, CPU, LARGEST_BATCH_BYTES))


def test_decode_batch_of_train_matches_pil(decoder: BatchDecoder) -> None:
    ids = np.array([3, 0, 19, 7, 42, 8])
    seen_flips = set()
    for epoch, shape, min_scale, augment in (
        (0, (32, 32), 0.08, True), (5, (48, 64), 0.5, True), (6, (96, 96), 0.9, True), (5, (48, 32), 0.08, False),
    ):  # fmt: skip
        batch = decoder.decode_batch(BatchRequest("train", None, ids, shape, epoch, min_scale, augment=augment))
        index, aspect = decoder.indexes["train", None], shape[1] / shape[0]
        assert batch.images.shape == (6, *shape, 3) and batch.images.dtype == torch.uint8
        assert batch.labels.dtype == np.int64 and batch.labels.tolist() == index.labels[ids].tolist()
        sizes = index.widths[ids], index.heights[ids]
        boxes, flips = random_boxes(SEED, epoch, ids, *sizes, min_scale, aspect)
        if not augment:
            boxes, flips = random_position_boxes(SEED, epoch, ids, *sizes, aspect)
        for row, (top, left, height, width) in enumerate(boxes.tolist()):
            image = Image.open(io.BytesIO(index.read(ids[row]))).convert("RGB")
            part = image.crop((left, top, left + width, top + height)).resize(shape[::-1], Image.Resampling.BILINEAR)
            seen_flips.add(bool(flips[row]))
            expected = np.asarray(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flips[row] else part, int)
            assert np.abs(batch.images[row].numpy().astype(int) - expected).max() <= 2
    assert seen_flips == {True, False}


def test_each_image_is_augmented_by_draws_of_seed_epoch_and_its_id_alone(decoder: BatchDecoder) -> None:
    ids = np.arange(24)
    batches = {
        (epoch, kind): decoder.decode_batch(BatchRequest("train", None, ids, (48, 64), epoch, 0.2, augment=kind)).images
        for epoch in (0, 1)
        for kind in (True, "trivial")
    }
    for epoch in (0, 1):
        for number in ids.tolist():
            plain = batches[epoch, True][number].numpy()
            expected = trivial_augment(plain, image_generator(SEED, epoch, number))
            assert np.array_equal(batches[epoch, "trivial"][number].numpy(), expected)
    requests = [
        BatchRequest("train", None, part, (48, 64), 1, 0.2, augment="trivial") for part in (ids[::-2], ids[::2])
    ]
    backwards, evens = make_batches(decoder, requests, 2)
    assert torch.equal(backwards.images.flip(0), batches[1, "trivial"][1::2])
    assert torch.equal(evens.images, batches[1, "trivial"][::2])
    # An operation that depends on the epoch, and not on the image's crop alone: the draws of two epochs differ.
    draws = [[int(image_generator(SEED, epoch, number).integers(14)) for number in range(50)] for epoch in (0, 1)]
    assert draws[0] != draws[1] and len({*draws[0]}) > 10
    val = BatchRequest("val", None, ids[:8], (32, 32))
    assert torch.equal(decoder.decode_batch(val).images, decoder.decode_batch(replace(val, augment="trivial")).images)


def single_image_decoder(folder: Path, pixels: Any) -> BatchDecoder:
    (folder / "train" / "one").mkdir(parents=True)
    Image.fromarray(pixels).save(folder / "train" / "one" / "x.JPEG", "PNG")
    return BatchDecoder({("val", None): load_index(folder, "train")}, 0)


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (500, 3), (33, 32)])
@pytest.mark.parametrize(("min_scale", "squares"), [(None, 1), (0.08, 1), (None, 5)])
def test_decode_batch_fills_any_shape_from_any_size(
    size: tuple[int, int], min_scale: float | None, squares: int, tmp_path: Path
) -> None:
    pixels = np.full((*size, 3), 77, np.uint8)
    for shape in ((32, 32), (64, 96), (96, 64)):
        request = BatchRequest("val", None, np.array([0]), shape, 0, min_scale, squares=squares)
        decoded = single_image_decoder(tmp_path / str(shape), pixels).decode_batch(request).images
        assert decoded.shape == (squares, *shape, 3) and (decoded == 77).all()


@pytest.mark.parametrize(("workers", "largest_batch_bytes"), [
    (0, LARGEST_BATCH_BYTES), (1, LARGEST_BATCH_BYTES), (3, LARGEST_BATCH_BYTES),
    (1, 1000),  # no batch fits into its buffer
])  # fmt: skip
def test_stream_batches_is_same_for_any_worker_count(
    workers: int, largest_batch_bytes: int, decoder: BatchDecoder
) -> None:
    requests = mixed_requests()
    batches = list(BatchStream(decoder, iter(requests), workers, CPU, largest_batch_bytes))
    assert len(batches) == len(requests)
    for batch, request in zip(batches, requests, strict=True):
        direct = decoder.decode_batch(request)
        assert torch.equal(batch.images, direct.images) and (batch.labels == direct.labels).all()
        for field in ("split", "copy", "shape", "epoch", "sample_weight"):
            assert getattr(batch.request, field) == getattr(request, field)
        assert batch.request.ids.tolist() == request.ids.tolist()


def test_stream_batches_never_reuses_referenced_memory(decoder: BatchDecoder) -> None:
    """Memory of batches that nobody references is reused, however many batches are kept."""
    requests = [BatchRequest("train", None, np.array([number % 50]), (32, 32), number, 0.2) for number in range(60)]
    views = []
    for number, batch in enumerate(BatchStream(decoder, requests, 1, CPU, LARGEST_BATCH_BYTES)):
        views.append(batch.images[:, 3:, :5] if number % 2 else None)
    for view, request in zip(views, requests, strict=True):
        assert view is None or torch.equal(view, decoder.decode_batch(request).images[:, 3:, :5])


@pytest.mark.parametrize(
    ("workers", "largest_batch_bytes"), [(0, LARGEST_BATCH_BYTES), (2, LARGEST_BATCH_BYTES), (1, 9)]
)
@pytest.mark.parametrize("taken", [0, 3, 12])
def test_a_stream_goes_on_with_other_requests(
    taken: int, workers: int, largest_batch_bytes: int, decoder: BatchDecoder
) -> None:
    """The workers are the same, unless all of their batches have been taken, and leave undone what is not wanted."""
    requests = mixed_requests() if taken == 12 else 4 * mixed_requests()
    stream = BatchStream(decoder, requests, workers, CPU, largest_batch_bytes)
    assert len(list(itertools.islice(stream, taken))) == taken
    for _ in range(2):
        pids = {child.pid for child in multiprocessing.active_children()}
        stream.replace_requests(reversed(requests))
        for request in requests[:-9:-1]:
            assert torch.equal(next(stream).images, decoder.decode_batch(request).images)
        assert taken == 12 or {child.pid for child in multiprocessing.active_children()} == pids
    assert len(list(stream)) == len(requests) - 8
    assert not stream.tasks or len(stream.tasks.buffers.free_slots) == 16 * workers + 2, "all memory is free again"


def test_pin_memory_frees_buffer_slot(decoder: BatchDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # pinning itself needs a GPU
    request = BatchRequest("val", None, np.arange(3), (32, 32))
    buffers = BatchBuffers(1, LARGEST_BATCH_BYTES)
    slot = buffers.acquire(request.batch_shape)
    assert slot is not None
    decoded = decoder.decode_batch(request, torch.from_numpy(buffers.slot_array(slot, request.batch_shape)))
    batch = WorkerBatch(buffers.buffers_id, slot, decoded.labels, request).pin_memory()
    assert torch.equal(batch.images, decoded.images) and np.array_equal(batch.labels, decoded.labels)
    assert buffers.acquire(request.batch_shape) == slot


@pytest.mark.parametrize(("largest_batch_bytes", "prefetch"), [(1000, 16), (20e6, 6), (60e6, 2), (1e9, 2)])
@pytest.mark.parametrize("workers", [1, 2])
def test_stream_batches_prefetches_within_memory_limit(
    largest_batch_bytes: float, prefetch: int, workers: int, decoder: BatchDecoder
) -> None:
    """This holds across epochs, sizes and validation, which are one stream to the loader."""
    taken: list[int] = []

    def requests() -> Iterator[BatchRequest]:
        for number in range(100):
            taken.append(number)
            yield BatchRequest("train", None, np.array([number % 50]), (32, 32), 0, 0.2)

    batches = BatchStream(decoder, requests(), workers, CPU, int(largest_batch_bytes))
    assert len(taken) == prefetch * workers
    for number in range(1, 20):
        next(batches)
        assert len(taken) == prefetch * workers + number
    assert prefetch == 2 or prefetch * largest_batch_bytes <= PREFETCH_BYTES_PER_WORKER
    del batches


def test_stream_batches_needs_no_dev_shm_and_no_short_tempdir(
    decoder: BatchDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_group: Any
) -> None:
    """torch would pass tensors through /dev/shm, and by sockets in tempdir, whose paths may have 107 characters."""
    long_folder = tmp_path / ("t" * 120)
    long_folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", None)

    def count_batches(_: object) -> int:
        return len(list(BatchStream(decoder, mixed_requests(), 1, CPU, LARGEST_BATCH_BYTES)))

    assert in_group(1, count_batches) == [len(mixed_requests())]


def test_dev_shm_that_cannot_be_used_is_named(decoder: BatchDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_semaphore(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(DataLoader, "__iter__", make_semaphore)
    with pytest.raises(DataError, match=r"^/dev/shm: Read-only file system; .* or pass --workers 0$"):
        BatchStream(decoder, mixed_requests(), 1, CPU, LARGEST_BATCH_BYTES)


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_names_broken_file_in_one_line(workers: int, tiny_data: Path, tmp_path: Path, in_group: Any) -> None:
    """In its own process: the error keeps its frames alive, these keep the stream, and this keeps the workers."""
    shutil.copytree(tiny_data / "train", tmp_path / "train")
    index = load_index(tmp_path, "train")
    (tmp_path / "train" / index.name(2)).write_bytes(b"no image")
    (tmp_path / "train" / index.name(3)).unlink()
    broken = BatchDecoder({("train", None): index}, 0)

    def collect_errors(_: object) -> list[str]:
        messages = []
        for number in (2, 3):
            with pytest.raises(DataError) as caught:
                make_batches(broken, [BatchRequest("train", None, np.array([0, number]), (32, 32), 0, 0.5)], workers)
            messages.append(str(caught.value))
        return messages

    (messages,) = in_group(1, collect_errors)
    for number, message in zip((2, 3), messages, strict=True):
        assert message.startswith(f"{tmp_path}/train/{index.name(number)}: ") and "\n" not in message


@pytest.mark.parametrize(("stored", "workers"), [("files", 0), ("files", 2), ("packed", 2)])
def test_an_error_of_a_disk_or_a_file_server_is_none_of_the_images(
    stored: str, workers: int, tiny_data: Path, tmp_path: Path, in_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    if stored == "packed":
        pack_set(tiny_data, {None: tmp_path / "set"})
    index = load_index(tmp_path / "set" if stored == "packed" else tiny_data, "train")
    owner, name = (os, "pread") if stored == "packed" else (type(index), "read")
    monkeypatch.setattr(owner, name, fail)
    unreadable = BatchDecoder({("train", None): index}, 0)

    def read(_: object) -> str:
        with pytest.raises(MachineTrouble) as caught:
            make_batches(unreadable, [BatchRequest("train", None, np.array([2]), (32, 32), 0, 0.5)], workers)
        return str(caught.value)

    assert in_group(1, read) == [f"{index.location(2)}: Input/output error"]


def test_decode_batch_names_file_of_wrong_size(tiny_data: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_data / "train", tmp_path / "train")
    index = load_index(tmp_path, "train")
    Image.new("RGB", (33, 44)).save(index.location(5), "JPEG")
    changed = BatchDecoder({("train", None): index}, 0)
    for min_scale, squares in ((None, 1), (None, 5), (0.5, 1)):
        request = BatchRequest("train", None, np.array([0, 5]), (32, 32), 0, min_scale, squares=squares)
        with pytest.raises(
            DataError, match=r"has 33x44 pixels, expected .*since it was indexed, run .* again$"
        ) as caught:
            changed.decode_batch(request)
        assert str(caught.value).startswith(f"{index.location(5)}: ")


def test_stream_whose_worker_is_killed_raises_at_the_next_batch_and_sigterm_kills_none(
    decoder: BatchDecoder, in_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sends SIGTERM to all processes of a node that it takes away. SIGCHLD may come late, or never."""
    patched = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(patched, "__defaults__", (0.1,))  # seconds between checks of the workers

    def kill_worker(_: object) -> str:
        batches = BatchStream(decoder, itertools.cycle(mixed_requests()), 1, CPU, LARGEST_BATCH_BYTES)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        next(batches)
        (worker,) = multiprocessing.active_children()
        subprocess.run(["kill", str(worker.pid)], check=True)
        # No batch is held: it is then in shared memory, and the message about it is too short to be cut by the kill.
        assert sum(1 for _ in itertools.islice(batches, 200)) == 200
        os.kill(worker.pid or 0, signal.SIGKILL)
        try:
            return f"{sum(1 for _ in itertools.islice(batches, 200))} batches"
        except WorkerLost as error:
            return str(error)

    (message,) = in_group(1, kill_worker)
    assert message.startswith("a data-loading worker ended (worker (pid(s) ") and "\n" not in message
