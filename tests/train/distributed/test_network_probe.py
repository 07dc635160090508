"""The network probe in real processes over the loopback; its errors; and what it concludes from speeds and logs."""

import datetime
import json
import multiprocessing
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.waiting import DEADLINE_SECONDS
from torch._C._distributed_c10d import HashStore

from train.distributed import gpu, network, network_probe
from train.distributed.process_group import ProcessGroup
from train.tools.process import free_port, rank_environments

Start = Callable[..., Any]


@pytest.fixture
def store_port() -> int:
    return free_port()


@pytest.fixture
def start(runs: Any, tmp_path: Path, store_port: int) -> Start:
    """Returns a function that starts a rank of the probe."""

    def start_rank(rank: int, world: int, *arguments: object, address: str = "127.0.0.1") -> Any:
        (variables,) = rank_environments(1, rank, world, address, store_port)
        module = "train.distributed.network_probe"
        return runs.start_module(module, *arguments, environment=variables, out=tmp_path / f"rank-{rank}")

    return start_rank


def test_probe_measures_pairs_and_all_reduce_of_three_machines(start: Start) -> None:
    other_ranks = [start(rank, 3, "--bytes", 100_003) for rank in (1, 2)]
    code, out, err = start(0, 3, "--bytes", 100_003).result()
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert list(result["pairs"]) == ["0-1", "0-2", "1-2"] and all(
        0.001 < speed < 10_000 for speed in result["pairs"].values()
    )
    assert result["all_reduce"]["bytes"] == 100_000 and result["all_reduce"]["seconds"] > 0
    assert result["all_reduce"]["gbps"] == pytest.approx(
        8e5 / 1e9 / result["all_reduce"]["seconds"], rel=0.01, abs=0.001
    )
    assert (result["torch"], result["backend"], result["warning"]) == (torch.__version__, "gloo", None)
    assert result["transport"].startswith("gloo on ")
    assert [rank.result() for rank in other_ranks] == [(0, "", "")] * 2


def test_missing_ranks_are_named_before_the_timeout(store_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only while both ranks sleep, a minute at each turn."""
    clock = SimpleNamespace(now=0)
    both_sleep = threading.Barrier(2, lambda: setattr(clock, "now", clock.now + 60))
    fake_time = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _: both_sleep.wait(DEADLINE_SECONDS))
    monkeypatch.setattr(network_probe, "time", fake_time)
    monkeypatch.setenv("MASTER_PORT", str(store_port))

    def connect(rank: int) -> str:
        deadline: Any = SimpleNamespace(time_left=datetime.timedelta(seconds=601))
        with pytest.raises(network_probe.ProbeError) as caught:
            network_probe.connect_all_ranks(deadline, rank, 4)
        return f"{deadline.current_step}: {caught.value}"

    with ThreadPoolExecutor() as pool:
        for message in pool.map(connect, (0, 2)):
            assert message.startswith("waiting for all ranks: rank 1, 3 did not connect; is its machine up")
    assert clock.now == 600


def test_probe_names_an_unreachable_rank_0(start: Start) -> None:
    code, _, err = start(1, 2, "--timeout", 2).result()
    assert code == 1 and err.count("\n") == 1
    assert err.startswith("rank 1: connecting to rank 0 at 127.0.0.1:") and "is its machine up" in err


def test_probe_unknown_host_name_is_one_line(start: Start) -> None:
    code, _, err = start(1, 2, "--timeout", 2, address="nowhere.invalid").result()
    assert code == 1 and err.count("\n") == 1 and "nowhere.invalid" in err


def test_probe_names_a_pair_that_does_not_finish(start: Start) -> None:
    for timeout in (3, 30, 100):  # a busy computer may take longer than the first to connect them
        processes = [start(rank, 2, "--timeout", timeout, "--rounds", 10**9, "--bytes", 10) for rank in (0, 1)]
        results = [process.result() for process in processes]
        assert all((code, out, err.count("\n")) == (1, "", 1) for code, out, err in results)
        if all(f"rank {rank}: pair 0-1: " in err for rank, (_, _, err) in enumerate(results)):
            break
    else:
        pytest.fail(f"no pair is named: {results}")
    assert any(f"not finished after {timeout} s" in err for _, _, err in results)


def test_probe_ends_when_another_rank_dies(start: Start, store_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_amid_the_pair() -> None:
        deadline = network_probe.Deadline(600, 1)
        store = network_probe.connect_all_ranks(deadline, 1, 2)
        network_probe.join_probe_group(deadline, 1, 2, store, "gloo", torch.device("cpu"))
        network_probe.time_exchange(torch.zeros(10, dtype=torch.uint8), 0, 1, rounds=1)
        signal.raise_signal(signal.SIGKILL)

    survivor = start(0, 2, "--timeout", 600, "--rounds", 10**9, "--bytes", 10)
    monkeypatch.setenv("MASTER_PORT", str(store_port))
    other = multiprocessing.get_context("fork").Process(target=die_amid_the_pair, daemon=True)
    other.start()
    code, _, err = survivor.result()
    assert code == 1 and err.count("\n") == 1 and err.startswith("rank 0: pair 0-1: ")
    other.join()
    assert other.exitcode == -signal.SIGKILL


# --- measuring ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_measure_links_same_result_on_all_ranks(world: int, in_group: Callable[[int, Any], list[Any]]) -> None:
    def work(group: ProcessGroup) -> Any:
        deadline = network_probe.Deadline(60, group.rank)
        try:
            if world == 1:
                torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            return network_probe.measure_links(deadline, group.device, 100_000, 2), deadline.current_step
        finally:
            deadline.timer.cancel()

    answers = in_group(world, work)
    pairs = {1: [], 2: ["0-1"], 3: ["0-1", "0-2", "1-2"]}[world]
    for result, last_step in answers:
        assert list(result["pairs"]) == pairs and all(speed > 0 for speed in result["pairs"].values())
        assert result["pairs"] == answers[0][0]["pairs"] and last_step == f"all-reduce over {world} ranks"


def test_to_gbps_uses_1e9_bits() -> None:
    assert network_probe.to_gbps(125_000_000, 2.0) == 0.5


FAST_PAIRS = {"0-1": 10.0, "0-2": 9.0, "0-3": 10.0, "1-2": 11.0, "1-3": 10.0, "2-3": 9.5}


@pytest.mark.parametrize(
    "pairs, slow",
    [
        ({}, []),
        ({"0-1": 1.0}, []),
        (FAST_PAIRS, []),
        ({**FAST_PAIRS, "1-2": 4.0}, ["1-2"]),
        ({**FAST_PAIRS, "1-2": 4.0, "0-2": 1.0, "2-3": 3.0}, ["2"]),
        ({**FAST_PAIRS, "1-2": 4.0, "0-2": 1.0, "2-3": 3.0, "0-1": 2.0}, ["2", "0-1"]),
        ({"0-1": 10.0, "0-2": 1.0, "1-2": 1.1}, ["2"]),
        ({"0-1": 10.0, "0-10": 1.0, "1-10": 10.0}, ["0-10"]),
    ],
)
def test_slow_pairs_names_pairs_or_whole_machines(pairs: dict[str, float], slow: list[str]) -> None:
    assert network.slow_pairs(pairs) == slow


def test_slow_pairs_threshold() -> None:
    assert network.slow_pairs({**FAST_PAIRS, "1-2": 4.0}, threshold=0.3) == []


# --- the GPU ------------------------------------------------------------------------------------------------------

COMPILED_ARCHS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    "capability, built, fits",
    [
        ((8, 0), COMPILED_ARCHS, True),
        ((8, 9), COMPILED_ARCHS, True),
        ((9, 0), COMPILED_ARCHS, True),
        ((10, 3), COMPILED_ARCHS, True),
        ((7, 0), COMPILED_ARCHS, False),
        ((11, 0), COMPILED_ARCHS, False),
        ((12, 1), [*COMPILED_ARCHS, "compute_120"], True),
        ((13, 0), [*COMPILED_ARCHS, "compute_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((8, 0), ["sm_86"], False),
        ((8, 0), [], False),
    ],
)
def test_explain_unsupported_gpu_by_compiled_archs(capability: tuple[int, int], built: list[str], fits: bool) -> None:
    assert (gpu.explain_unsupported_gpu("Card", capability, built) is None) is fits


def test_explain_unsupported_gpu_says_what_to_install() -> None:
    message = gpu.explain_unsupported_gpu("Tesla V100-SXM2-16GB", (7, 0), COMPILED_ARCHS) or ""
    assert message.startswith("Tesla V100-SXM2-16GB is sm_70, and torch ") and "sm_75, sm_80" in message
    assert "install an older torch that has sm_70, or use other GPUs" in message and "\n" not in message
    assert "install another torch that has sm_110" in (
        gpu.explain_unsupported_gpu("Card", (11, 0), COMPILED_ARCHS) or ""
    )


def test_explain_invisible_gpu() -> None:
    assert "is built without CUDA" in gpu.explain_invisible_gpu(None)
    assert "(CUDA 13.0) sees no GPU; its driver is too old" in gpu.explain_invisible_gpu("13.0")


# --- the transport ------------------------------------------------------------------------------------------------

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


def test_has_efa_by_driver(tmp_path: Path) -> None:
    for name, driver in {"mlx5_0": "mlx5_core", "rdmap16s27": "efa"}.items():
        assert not network.has_efa(tmp_path / "infiniband")
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "infiniband" / name / "device").mkdir(parents=True)
        (tmp_path / "infiniband" / name / "device/driver").symlink_to(tmp_path / "drivers" / driver)
    assert network.has_efa(tmp_path / "infiniband")


def test_efa_variables_only_with_efa_and_never_over_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "has_efa", lambda: False)
    assert network.efa_variables() == {}
    monkeypatch.setattr(network, "has_efa", lambda: True)
    variables = {
        "FI_EFA_USE_HUGE_PAGE": "0",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_PROVIDER": "efa",
        "NCCL_SOCKET_FAMILY": "AF_INET",
    }
    assert network.efa_variables() == variables
    monkeypatch.setenv("NCCL_SOCKET_FAMILY", "AF_INET6")
    del variables["NCCL_SOCKET_FAMILY"]
    assert network.efa_variables() == variables


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


def test_nccl_gets_the_whole_name_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert network.interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
