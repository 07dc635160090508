"""Trying the links: real processes that send over the loopback, and what is said when one does not come."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from train.distributed import network, network_probe
from train.distributed.process_group import ProcessGroup
from train.tools.process import free_port

ROOT = Path(__file__).resolve().parents[3]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start rank K of N as the caller does; what is left at the end is killed."""
    started, port = [], free_port()

    def one(rank: int, world: int, *words: object, address: str = "127.0.0.1") -> "subprocess.Popen[str]":
        place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "MASTER_ADDR": address}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "train.distributed.network_probe", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **place,
                "MASTER_PORT": str(port),
                "PYTHONPATH": str(ROOT),
                "OMP_WAIT_POLICY": "PASSIVE",
            },
        )
        started.append(process)
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def test_three_machines_measure_each_pair_and_a_sum_and_rank_0_says_it(start: Start) -> None:
    others = [start(rank, 3, "--bytes", 100_003) for rank in (1, 2)]
    code, out, err = ended(start(0, 3, "--bytes", 100_003))
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert list(said["pairs"]) == ["0-1", "0-2", "1-2"] and all(0.001 < one < 10_000 for one in said["pairs"].values())
    assert said["all_reduce"]["bytes"] == 100_000 and said["all_reduce"]["seconds"] > 0
    assert said["all_reduce"]["gbps"] == pytest.approx(8e5 / 1e9 / said["all_reduce"]["seconds"], rel=0.01, abs=0.001)
    assert (said["torch"], said["backend"], said["warning"]) == (torch.__version__, "gloo", None)
    assert said["transport"].startswith("gloo on ")
    assert [ended(one) for one in others] == [(0, "", "")] * 2


def test_who_does_not_come_is_named_in_time(start: Start) -> None:
    there = [start(rank, 4, "--timeout", 5) for rank in (0, 2)]
    for rank, process in zip((0, 2), there, strict=True):
        code, out, err = ended(process)
        assert (code, out) == (1, "") and err.startswith(
            f"rank {rank}: waiting for all: rank 1, 3 did not come; is it up"
        )
        assert err.count("\n") == 1


def test_a_head_that_does_not_answer_is_named_in_time(start: Start) -> None:
    code, _, err = ended(start(1, 2, "--timeout", 2))
    assert code == 1 and err.count("\n") == 1
    assert err.startswith("rank 1: looking for rank 0 at 127.0.0.1:") and "is its machine up" in err


def test_a_head_whose_name_means_nothing_is_one_line(start: Start) -> None:
    code, _, err = ended(start(1, 2, "--timeout", 2, address="nowhere.invalid"))
    assert code == 1 and err.count("\n") == 1 and "nowhere.invalid" in err


def test_a_pair_that_is_never_through_is_named_in_time(start: Start) -> None:
    both = [start(rank, 2, "--timeout", 5, "--rounds", 10**9, "--bytes", 10) for rank in (0, 1)]
    said = [ended(one) for one in both]
    for rank, (code, out, err) in enumerate(said):
        assert (code, out, err.count("\n")) == (1, "", 1) and err.startswith(f"rank {rank}: pair 0-1: ")
    assert any("not over after 5 s" in err for _, _, err in said)


def sockets(pid: int) -> int:
    """How many sockets a process has."""
    found = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(one.readlink()).startswith("socket:")
    return found


def test_who_dies_under_way_ends_the_others_in_one_line(start: Start) -> None:
    both = [start(rank, 2, "--timeout", 90, "--rounds", 10**9, "--bytes", 10) for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while sockets(both[1].pid) < 3:  # one to the store; those to each other come later
        assert time.monotonic() < deadline
        time.sleep(0.02)
    both[1].send_signal(signal.SIGKILL)
    start_of_end = time.monotonic()
    code, _, err = ended(both[0])
    assert code == 1 and err.count("\n") == 1 and err.startswith("rank 0: ")
    assert time.monotonic() - start_of_end < 60


# --- measuring ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_knows_all_that_was_measured(world: int, in_group: Callable[[int, Any], list[Any]]) -> None:
    def work(group: ProcessGroup) -> Any:
        deadline = network_probe.Deadline(60, group.rank)
        try:
            if world == 1:
                torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            return network_probe.measure_links(deadline, group.device, 1000, 2), deadline.current_step
        finally:
            deadline.timer.cancel()

    answers = in_group(world, work)
    pairs = {1: [], 2: ["0-1"], 3: ["0-1", "0-2", "1-2"]}[world]
    for found, doing in answers:
        assert list(found["pairs"]) == pairs and all(one > 0 for one in found["pairs"].values())
        assert found["pairs"] == answers[0][0]["pairs"] and doing == f"the sum over {world}"


def test_a_gigabit_is_a_thousand_million_bits() -> None:
    assert network_probe.to_gbps(125_000_000, 2.0) == 0.5


FAST = {"0-1": 10.0, "0-2": 9.0, "0-3": 10.0, "1-2": 11.0, "1-3": 10.0, "2-3": 9.5}


@pytest.mark.parametrize(
    "pairs, slow",
    [
        ({}, []),
        ({"0-1": 1.0}, []),
        (FAST, []),
        ({**FAST, "1-2": 4.0}, ["1-2"]),
        ({**FAST, "1-2": 4.0, "0-2": 1.0, "2-3": 3.0}, ["2"]),
        ({**FAST, "1-2": 4.0, "0-2": 1.0, "2-3": 3.0, "0-1": 2.0}, ["2", "0-1"]),
        ({"0-1": 10.0, "0-2": 1.0, "1-2": 1.1}, ["2"]),
        ({"0-1": 10.0, "0-10": 1.0, "1-10": 10.0}, ["0-10"]),
    ],
)
def test_a_slow_pair_is_named_or_the_machine_all_of_whose_pairs_are_slow(
    pairs: dict[str, float], slow: list[str]
) -> None:
    assert network.slow_pairs(pairs) == slow


def test_how_slow_is_slow_can_be_said() -> None:
    assert network.slow_pairs({**FAST, "1-2": 4.0}, threshold=0.3) == []


# --- the card -----------------------------------------------------------------------------------------------------

BUILT = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    "capability, built, fits",
    [
        ((8, 0), BUILT, True),
        ((8, 9), BUILT, True),
        ((9, 0), BUILT, True),
        ((10, 3), BUILT, True),
        ((7, 0), BUILT, False),
        ((11, 0), BUILT, False),
        ((12, 1), [*BUILT, "compute_120"], True),
        ((13, 0), [*BUILT, "compute_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((8, 0), ["sm_86"], False),
        ((8, 0), [], False),
    ],
)
def test_a_card_needs_code_of_its_kind(capability: tuple[int, int], built: list[str], fits: bool) -> None:
    assert (network_probe.explain_unsupported_gpu("Card", capability, built) is None) is fits


def test_a_card_that_torch_has_no_code_for_is_named_with_what_to_do() -> None:
    said = network_probe.explain_unsupported_gpu("Tesla V100-SXM2-16GB", (7, 0), BUILT) or ""
    assert said.startswith("Tesla V100-SXM2-16GB is sm_70, and torch ") and "sm_75, sm_80" in said
    assert "install an older torch that has sm_70, or take other GPUs" in said and "\n" not in said
    assert "install another torch that has sm_110" in (
        network_probe.explain_unsupported_gpu("Card", (11, 0), BUILT) or ""
    )


def test_a_torch_that_sees_no_gpu_says_why() -> None:
    assert "is built without CUDA" in network_probe.explain_invisible_gpu(None)
    assert "(CUDA 13.0) sees no GPU; its driver is too old" in network_probe.explain_invisible_gpu("13.0")


# --- what carries it ----------------------------------------------------------------------------------------------

LOGS = {
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


@pytest.mark.parametrize("name", LOGS)
def test_nccl_says_what_it_talks_over(name: str) -> None:
    assert network.parse_nccl_transport(LOGS[name]) == name.strip()


def test_what_nccl_told_its_file_is_read_and_the_file_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOGS["sockets"])
    assert network.detect_transport("nccl", log) == "sockets" and not log.exists()
    assert network.detect_transport("nccl") == "unknown"


def test_gloo_takes_the_interface_that_is_set_or_the_one_of_this_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ens5")
    assert network.detect_transport("gloo") == "gloo on ens5"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(network.socket, "gethostbyname", lambda _: "127.0.0.1")
    assert network.detect_transport("gloo") == "gloo on lo"
    monkeypatch.setattr(network.socket, "gethostbyname", lambda _: "127.0.1.1")
    assert network.detect_transport("gloo") == "gloo on lo"


def test_efa_that_is_passed_over_is_said_aloud() -> None:
    assert "NCCL TALKS OVER SOCKETS ALTHOUGH THIS MACHINE HAS EFA" in (network.transport_warning("sockets", True) or "")
    for found, there in (("efa", True), ("sockets", False), ("unknown", True), ("gloo on eth0", True)):
        assert network.transport_warning(found, there) is None


def test_efa_is_known_by_its_driver(tmp_path: Path) -> None:
    for name, driver in {"mlx5_0": "mlx5_core", "rdmap16s27": "efa"}.items():
        assert not network.has_efa(tmp_path / "infiniband")
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "infiniband" / name / "device").mkdir(parents=True)
        (tmp_path / "infiniband" / name / "device/driver").symlink_to(tmp_path / "drivers" / driver)
    assert network.has_efa(tmp_path / "infiniband")
