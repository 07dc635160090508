"""The store at which ranks meet: which address it listens on, and what somebody without the token can see."""

import contextlib
import datetime
import socket

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from train.distributed import rendezvous
from train.tools.agent_protocol import TOKEN_VARIABLE
from train.tools.process import free_port

TIMEOUT = datetime.timedelta(seconds=10)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    return port


def can_connect(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


@pytest.mark.parametrize(("address", "listens_to_all"), [
    ("127.0.0.1", False), ("localhost", True),
    ("192.0.2.1", True),  # an address for documentation, which no machine has
])  # fmt: skip
def test_store_listens_on_the_address_of_the_ranks_only_if_this_machine_has_it(
    address: str, listens_to_all: bool, port: int
) -> None:
    with rendezvous._listen(address, port):
        assert can_connect("127.0.0.1", port) and can_connect("127.0.0.2", port) == listens_to_all


def test_keys_are_apart_from_those_of_a_client_without_the_token(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first_rank = rendezvous.open_store(0, 2, TIMEOUT)
    second_rank = rendezvous.open_store(1, 2, TIMEOUT)
    assert first_rank and second_rank
    first_rank.set("address", "of rank 0")
    assert second_rank.get("address") == b"of rank 0"
    stranger = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
    assert not stranger.check(["address"])
    stranger.set("address", "of the stranger")
    assert second_rank.get("address") == b"of rank 0"
    monkeypatch.setenv(TOKEN_VARIABLE, "a guess")
    guesser = rendezvous.open_store(1, 2, TIMEOUT)
    assert guesser and not guesser.check(["address"])


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_port_in_use_is_an_error(port: int, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `DistNetworkError`, after which the agents try another port: an `OSError` would end the job."""
    monkeypatch.setenv("MASTER_ADDR", address)
    with socket.create_server(("", port)), pytest.raises(dist.DistNetworkError, match="in use"):
        rendezvous.open_store(0, 2, TIMEOUT)


def test_run_without_a_token_has_no_store_of_its_own(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert rendezvous.open_store(0, 2, TIMEOUT) is None
