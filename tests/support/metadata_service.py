"""An instance metadata service, version 2, for agents and watchdogs of tests."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.simcloud.imds import MetadataService


@pytest.fixture
def service() -> Iterator[Any]:
    """A metadata service for this test alone, on this machine: `service.texts[path] = text`."""
    texts: dict[str, str] = {}
    service: Any = MetadataService(lambda _: texts)
    service.texts, service.address = texts, f"{service.url('machine')}/"
    yield service
    service.close()
