"""Fixtures with a simulated EC2 in this process."""

from collections.abc import Iterator
from functools import cache

import botocore.loaders
import pytest
from support.simcloud.cloud import SimulatedAws
from support.simcloud.http_server import AwsFrontend, serve


@pytest.fixture(scope="session")
def front_of_session() -> Iterator[tuple[AwsFrontend, str]]:
    """The server of the simulated EC2, and its URL."""
    server, url = serve(sim=SimulatedAws())
    yield server.front, url
    server.shutdown()
    server.server_close()


SHARED_LOADER = cache(botocore.loaders.create_loader)  # else each session reads EC2's service model again: 0.3 s


@pytest.fixture
def front(front_of_session: tuple[AwsFrontend, str], monkeypatch: pytest.MonkeyPatch) -> AwsFrontend:
    """An empty simulated EC2 that boto3 in this process talks to. `front.sim` is the cloud behind it."""
    front, url = front_of_session
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("botocore.session.create_loader", SHARED_LOADER)
    front.reset()
    return front
