"""Tests of the training rules: one for each rule, with its formula and source, against an independent reference.

`tests/support/mutations.py` breaks each rule once and checks that its test fails.
"""

from collections.abc import Iterator

import pytest
import torch
from support.forked_ranks import in_group

__all__ = ["in_group"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread is fastest for such small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
