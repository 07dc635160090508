"""Who can connect to the ports of a run: the machines of the run can, a stranger cannot.

Machines are addresses of this computer (all of 127/8), or network namespaces with addresses of IPv4 and IPv6.
"""

import contextlib
import datetime
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forked_ranks import run_ranks
from support.network_namespaces import enter, give_address, switched_machines, why_unavailable
from support.waiting import wait_for

from train.distributed import network, peer_filter, rendezvous
from train.tools.agent_protocol import PEERS_VARIABLE, TOKEN_VARIABLE
from train.tools.process import free_port

MEMBER, JOINER, STRANGER = "127.0.0.2", "127.0.0.3", "127.0.0.66"


def can_connect(source: str, address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.5, source_address=(source, 0)):
        return True
    return False


@pytest.fixture
def store_port(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that opens the store of an attempt of machines with these addresses, and returns its port."""
    stores = []

    def open_store(*addresses: str, listen_at: str = "localhost") -> int:
        port = free_port()
        monkeypatch.setenv("MASTER_ADDR", listen_at)
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        monkeypatch.setenv(PEERS_VARIABLE, ",".join(addresses))
        stores.append(rendezvous.open_store(0, 2, datetime.timedelta(seconds=10)))
        return port

    return open_store


def test_only_machines_of_the_attempt_reach_the_store(store_port: Callable[..., int]) -> None:
    """A machine that joins is admitted by the next attempt, whose store is another one."""
    first = store_port(MEMBER)
    assert can_connect(MEMBER, ("127.0.0.1", first)) and can_connect("127.0.0.1", ("127.0.0.1", first))
    assert not can_connect(STRANGER, ("127.0.0.1", first)) and not can_connect(JOINER, ("127.0.0.1", first))
    second = store_port(MEMBER, JOINER, listen_at="127.0.0.1")
    assert can_connect(MEMBER, ("127.0.0.1", second)) and can_connect(JOINER, ("127.0.0.1", second))
    assert not can_connect(STRANGER, ("127.0.0.1", second))


def test_store_of_machines_that_are_not_known_is_open(store_port: Callable[..., int]) -> None:
    """As where the kernel does not tell a machine its addresses: the job would fail if it were shut out."""
    assert can_connect(STRANGER, ("127.0.0.1", store_port()))


@pytest.mark.parametrize("count", [1, 199, 200, 201, 1000])
def test_filter_finds_each_of_many_addresses(count: int) -> None:
    members = [f"127.{number // 200 + 1}.{number % 200}.7" for number in range(count)]
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        peer_filter.admit_only(server, members)
        for member in {*members[:: max(1, count // 20)], members[-1]}:
            assert can_connect(member, server.getsockname())
        assert not can_connect(STRANGER, server.getsockname()) and not can_connect("127.1.0.8", server.getsockname())


def test_filter_of_ipv6(tmp_path: Path) -> None:
    """The port takes IPv4 and IPv6, as that of a store at a host name does."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with switched_machines(3) as machines:
        for number, machine in enumerate(machines, 1):
            give_address(machine, f"fd00:77::{number}/64")

        def work(rank: int, _: Path) -> list[bool]:
            enter(machines[rank])
            if rank == 0:
                server = socket.create_server(("", 4000), family=socket.AF_INET6, dualstack_ipv6=True)
                peer_filter.admit_only(server, [*network.own_addresses(), "fd00:77::9:1", "fd00:77::2", "10.77.0.2"])
                (tmp_path / "listens").touch()
            else:
                wait_for((tmp_path / "listens").exists)
                own = network.own_addresses()
                assert own == {f"fd00:77::{rank + 1}", f"10.77.0.{rank + 1}"}
            reached = [can_connect("", (address, 4000)) for address in ("fd00:77::1", "10.77.0.1")]
            (tmp_path / f"done-{rank}").touch()
            wait_for(lambda: len(list(tmp_path.glob("done-*"))) == 3)
            return reached

        assert run_ranks(3, work) == [[True, True], [True, True], [False, False]]


def test_ports_of_gloo_are_guarded_when_the_group_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a port of its own. What the ranks send each other goes on over the same connections."""
    import torch
    import torch.distributed as dist

    from train.distributed import process_group

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    monkeypatch.setenv(PEERS_VARIABLE, MEMBER)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def work(rank: int, _: Path) -> tuple[list[bool], float]:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        inherited_ports = listening_ports()  # of the test's own process, from which this is forked
        group = process_group.join_process_group()
        ports = [port for port in listening_ports() if port not in inherited_ports]
        assert len(ports) == (2 if rank == 0 else 1), "the store's, and Gloo's"
        reached = [can_connect(source, ("127.0.0.1", port)) for port in ports for source in (MEMBER, STRANGER)]
        total = process_group.sum_over_processes(group, torch.ones(1 << 20))
        dist.barrier()
        return reached, float(total.mean())

    assert run_ranks(2, work) == [([True, False, True, False], 2.0), ([True, False], 2.0)]


def test_kernel_that_takes_no_filter_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(92, "Protocol not available")

    monkeypatch.setattr(peer_filter, "admit_only", refuse)
    monkeypatch.setenv(PEERS_VARIABLE, MEMBER)
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer_filter.admit_only_peers(server)
        port = server.getsockname()[1]
    assert f"WARNING: the kernel takes no filter for port {port} (Protocol not available)" in capsys.readouterr().err


def test_addresses_that_are_none_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the file of an attempt, which a machine wrote."""
    monkeypatch.setenv(PEERS_VARIABLE, f"gpu1,,{MEMBER},1.2.3,fe80::1%eth0")
    assert peer_filter.peer_addresses() == (MEMBER, "fe80::1%eth0")


def listening_ports() -> list[int]:
    return [listener.getsockname()[1] for listener in network.own_tcp_sockets(is_listening=True)]
