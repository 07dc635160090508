"""Tests of BatchBuffers: batch memory that is shared with workers and reused."""

import gc
import os

import numpy as np
import pytest
import torch

from train.data.loading.batch_buffers import BatchBuffers

SHAPE = (2, 4, 4, 3)


def test_slot_is_free_after_last_view_is_gone() -> None:
    buffers = BatchBuffers(2, 96)
    first, second = buffers.acquire(SHAPE), buffers.acquire(SHAPE)
    assert first is not None and second is not None and first != second and buffers.acquire(SHAPE) is None
    tensor = buffers.lend_tensor(first, SHAPE)
    view = tensor.permute(0, 3, 1, 2)[1]
    del tensor
    gc.collect()
    assert buffers.acquire(SHAPE) is None
    del view
    gc.collect()
    assert buffers.acquire(SHAPE) == first and buffers.acquire(SHAPE) is None


def test_slot_is_free_when_only_a_copy_remains() -> None:
    buffers = BatchBuffers(1, 96)
    slot = buffers.acquire(SHAPE)
    assert slot is not None
    floats = buffers.lend_tensor(slot, SHAPE).permute(0, 3, 1, 2).to(torch.float32)
    assert buffers.acquire(SHAPE) == slot and floats.shape == (2, 3, 4, 4)


def test_slots_share_memory_with_forks_and_do_not_overlap() -> None:
    buffers = BatchBuffers(3, 100)
    if not (child := os.fork()):
        for slot in range(3):
            buffers.slot_array(slot, SHAPE)[:] = 10 + slot
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for slot in range(3):
        assert (buffers.lend_tensor(slot, SHAPE) == 10 + slot).all()


def test_acquire_with_too_large_shape_returns_none() -> None:
    buffers = BatchBuffers(1, 96)
    assert buffers.acquire((97,)) is None
    with pytest.raises(ValueError, match="buffer"):
        buffers.slot_array(0, (97,))
    assert buffers.acquire((96,)) == 0


def test_by_id_finds_buffers_while_referenced() -> None:
    buffers = BatchBuffers(1, 3)
    buffers_id = buffers.buffers_id
    assert BatchBuffers.by_id(buffers_id) is buffers
    pixels = buffers.lend_tensor(0, (3,))
    del buffers
    gc.collect()
    with pytest.raises(KeyError):
        BatchBuffers.by_id(buffers_id)
    pixels[:] = torch.from_numpy(np.arange(3, dtype=np.uint8))
    assert pixels.tolist() == [0, 1, 2]
