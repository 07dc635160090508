"""Memory for batches that is shared and used again."""

import gc
import os

import numpy as np
import pytest
import torch

from train.data.loading.batch_buffers import BatchBuffers

SHAPE = (2, 4, 4, 3)


def test_a_place_is_lent_once_until_nobody_holds_what_is_in_it() -> None:
    own = BatchBuffers(2, 96)
    first, second = own.acquire(SHAPE), own.acquire(SHAPE)
    assert first is not None and second is not None and first != second and own.acquire(SHAPE) is None
    tensor = own.lend_tensor(first, SHAPE)
    view = tensor.permute(0, 3, 1, 2)[1]
    del tensor
    gc.collect()
    assert own.acquire(SHAPE) is None
    del view
    gc.collect()
    assert own.acquire(SHAPE) == first and own.acquire(SHAPE) is None


def test_a_copy_holds_no_place() -> None:
    own = BatchBuffers(1, 96)
    place = own.acquire(SHAPE)
    assert place is not None
    floats = own.lend_tensor(place, SHAPE).permute(0, 3, 1, 2).to(torch.float32)
    assert own.acquire(SHAPE) == place and floats.shape == (2, 3, 4, 4)


def test_what_another_process_writes_is_what_is_lent_and_places_do_not_meet() -> None:
    own = BatchBuffers(3, 100)
    if not (child := os.fork()):
        for place in range(3):
            own.slot_array(place, SHAPE)[:] = 10 + place
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for place in range(3):
        assert (own.lend_tensor(place, SHAPE) == 10 + place).all()


def test_what_does_not_fit_gets_no_place() -> None:
    own = BatchBuffers(1, 96)
    assert own.acquire((97,)) is None
    with pytest.raises(ValueError, match="buffer"):
        own.slot_array(0, (97,))
    assert own.acquire((96,)) == 0


def test_a_ring_is_known_by_its_number_as_long_as_its_maker_holds_it() -> None:
    own = BatchBuffers(1, 3)
    number = own.buffers_id
    assert BatchBuffers.by_id(number) is own
    pixels = own.lend_tensor(0, (3,))
    del own
    gc.collect()
    with pytest.raises(KeyError):
        BatchBuffers.by_id(number)
    pixels[:] = torch.from_numpy(np.arange(3, dtype=np.uint8))
    assert pixels.tolist() == [0, 1, 2]
