"""What carries the collectives, and the variables that lead to it."""

import socket
from pathlib import Path

import pytest

from train.distributed import network

NCCL_LOGS = {
    "efa": "ip-1:9:9 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)\n"
    "ip-1:9:9 [0] NCCL INFO Using network AWS Libfabric\n",
    "efa ": "h:1:1 [0] NCCL INFO Using network Libfabric\n"
    "h:1:1 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 3 nics)\n",
    "tcp": "h [0] NCCL INFO NET/OFI Selected Provider is tcp (found 1 nics)\nh [0] NCCL INFO Using network Libfabric\n",
    "ib": "h [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>\nh [0] NCCL INFO Using network IB\n",
    "roce": "h [0] NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE\nh [0] NCCL INFO Using network IB\n",
    "sockets": "h [0] NCCL INFO NET/IB : No device found.\nh [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n"
    "h [0] NCCL INFO Using network Socket\n",
    "sockets ": "h [0] NCCL INFO Initialized NET plugin Socket\nh [0] NCCL INFO Assigned NET plugin Socket to comm\n",
    "sockets  ": "h [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n",
    "fastrak": "h [0] NCCL INFO Using network FasTrak\n",
    "unknown": "h [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n",
}


@pytest.mark.parametrize("name", NCCL_LOGS)
def test_parse_nccl_transport(name: str) -> None:
    assert network.parse_nccl_transport(NCCL_LOGS[name]) == name.strip()


def test_detect_transport_reads_and_removes_nccl_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(NCCL_LOGS["sockets"])
    assert network.detect_transport("nccl", log) == "sockets" and not log.exists()
    assert network.detect_transport("nccl", log) == "unknown", "NCCL wrote no log"
    assert network.detect_transport("nccl") == "unknown"


def test_detect_transport_gloo_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ens5")
    assert network.detect_transport("gloo") == "gloo on ens5"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.0.1")
    assert network.detect_transport("gloo") == "gloo on lo"
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert network.detect_transport("gloo") == "gloo on lo"


def test_transport_warning_when_efa_is_not_used() -> None:
    assert "NCCL TALKS OVER SOCKETS ALTHOUGH THIS MACHINE HAS EFA" in (network.transport_warning("sockets", True) or "")
    for transport, has_efa in (("efa", True), ("sockets", False), ("unknown", True), ("gloo on eth0", True)):
        assert network.transport_warning(transport, has_efa) is None


def test_efa_variables_only_with_efa_and_never_over_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "has_efa", lambda: False)
    assert network.efa_variables() == {}
    monkeypatch.setattr(network, "has_efa", lambda: True)
    monkeypatch.setenv("FI_EFA_USE_HUGE_PAGE", "1")
    expected = {"FI_EFA_USE_DEVICE_RDMA": "1", "FI_PROVIDER": "efa", "NCCL_SOCKET_FAMILY": "AF_INET"}
    assert network.efa_variables() == expected


def test_library_variables_only_with_efa_and_behind_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "has_efa", lambda: True)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    assert network.library_variables(tmp_path) == {}, "the folders do not exist"
    for name in ("opt/amazon/efa/lib", "opt/amazon/ofi-nccl/lib"):
        (tmp_path / name).mkdir(parents=True)
    expected = f"/mine:{tmp_path}/opt/amazon/ofi-nccl/lib:{tmp_path}/opt/amazon/efa/lib"
    assert network.library_variables(tmp_path) == {"LD_LIBRARY_PATH": expected}
    monkeypatch.setattr(network, "has_efa", lambda: False)
    assert network.library_variables(tmp_path) == {}


def test_compile_cache_outlives_the_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    inductor = f"{tmp_path}/inductor"
    variables = {"TORCHINDUCTOR_CACHE_DIR": inductor, "TRITON_CACHE_DIR": f"{tmp_path}/triton"}
    assert network.compile_cache_variables(tmp_path) == variables
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    assert network.compile_cache_variables(tmp_path) == {"TORCHINDUCTOR_CACHE_DIR": inductor}
    assert network.compile_cache_variables(Path("/proc/cannot/be/made")) == {}


def test_nccl_gets_the_whole_name_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert network.interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_has_efa_by_driver(tmp_path: Path) -> None:
    for name, driver in {"mlx5_0": "mlx5_core", "rdmap16s27": "efa"}.items():
        assert not network.has_efa(tmp_path)
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device/driver").symlink_to(tmp_path / "drivers" / driver)
    assert network.has_efa(tmp_path)
