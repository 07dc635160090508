"""Fixtures of the data tests: both ways to decode an image."""

from collections.abc import Iterator
from typing import Any

import pytest

from train.data import decode


@pytest.fixture(params=["whole", "region"])
def route(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Decode whole images, or only regions with nvimgcodec."""
    if request.param == "region":
        pytest.importorskip("nvidia.nvimgcodec", reason="the extra nvimgcodec is not installed")
    else:
        monkeypatch.setattr(decode, "region_decoder", lambda _: None)
    yield request.param
