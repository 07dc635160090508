"""The rules of the science: one clear test for each, with its formula and its source, against a reference of its own.

`tests/support/mutations.py` breaks each of them once and sees its test fail.
"""

from collections.abc import Iterator

import pytest
import torch
from support.forked_ranks import in_group

__all__ = ["in_group"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What is computed here is small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
