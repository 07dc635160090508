"""Tests of BatchBuffers: batch memory that is shared with workers and reused."""

import gc

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
