"""A simulated EC2 in this process, for tests that ask it and rent nothing."""

from collections.abc import Iterator
from functools import cache

import botocore.loaders
import pytest
from support.simcloud.cloud import SimulatedAws
from support.simcloud.http_server import AwsFrontend, serve


@pytest.fixture(scope="session")
def front_of_session() -> Iterator[tuple[AwsFrontend, str]]:
    server, url = serve(sim=SimulatedAws())
    yield server.front, url
    server.shutdown()
    server.server_close()


ONE_LOADER = cache(botocore.loaders.create_loader)  # else each session reads EC2's description anew: 0.3 s


@pytest.fixture
def front(front_of_session: tuple[AwsFrontend, str], monkeypatch: pytest.MonkeyPatch) -> AwsFrontend:
    """An empty cloud, to which boto3 in this process goes: its faults, its calls, `front.sim`."""
    found, url = front_of_session
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
    monkeypatch.setattr("botocore.session.create_loader", ONE_LOADER)
    found.reset()
    return found
