"""What must be the same on all ranks, in groups of forked ranks. ProcessGroup on GPUs, with a CUDA that is mocked."""

import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.mocked_cuda import mock_cuda
from torch._C._distributed_c10d import HashStore

from train.data.loading.dataset import Dataset
from train.distributed import gpu, peer_filter, process_group, regroup, rendezvous
from train.engine.run import check_ranks_agree
from train.tools.errors import MachineTrouble, TrainingError
from train.tools.process import rank_environments


@pytest.mark.parametrize("numbers", [(50, 51, 50), (2**32 - 1, 2**32 - 1, 2**32 - 2)])
def test_check_same_on_all_ranks_fails_on_every_rank(numbers: Any, in_group: Any) -> None:
    def work(group: process_group.ProcessGroup) -> str:
        with pytest.raises(TrainingError) as caught:
            process_group.check_same_on_all_ranks(group, "the numbers of images", numbers[group.rank])
        return str(caught.value)

    for rank, message in enumerate(in_group(3, work)):
        expected = f"this one has {numbers[rank]}, others from {min(numbers)} to {max(numbers)}"
        assert message == f"the numbers of images differ between the machines ({expected})"


class FakeIndex:
    """What of an index is compared between machines."""

    def __init__(self, **changes: Any) -> None:
        self.images = 5
        self.folder, self.names_checksum, self.classes, self.sizes_checksum = "val", 1, ("a", "b"), 2
        vars(self).update(changes)

    def __len__(self) -> int:
        return self.images


VAL = ("val", None)


@pytest.mark.parametrize(("changes", "differs"), [
    ({VAL: FakeIndex(images=6)}, "numbers of images in val"),
    ({VAL: FakeIndex(names_checksum=2)}, "names of the images"),
    ({VAL: FakeIndex(classes=("a", "c"))}, "names of the classes"),
    ({VAL: FakeIndex(sizes_checksum=3)}, "widths and heights of"),
    ({("train", 160): FakeIndex(), ("val", 160): FakeIndex()}, "numbers of resized copies"),
    ({}, "precisions"),
])  # fmt: skip
def test_check_ranks_agree_names_what_differs(
    changes: dict[Any, FakeIndex], differs: str, in_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: process_group.ProcessGroup) -> str:
        indexes: Any = {("train", None): FakeIndex(), VAL: FakeIndex()}
        check_ranks_agree(group, Dataset(indexes, None))  # type: ignore[arg-type]
        if group.rank == 1:
            indexes |= changes
            if not changes:
                monkeypatch.setattr(process_group, "compute_dtype", lambda *_: torch.float16)
        with pytest.raises(TrainingError) as caught:
            check_ranks_agree(group, Dataset(indexes, None))  # type: ignore[arg-type]
        return str(caught.value)

    assert all(differs in message for message in in_group(2, work))


JoinRank = Callable[[int], process_group.ProcessGroup]


@pytest.fixture
def join_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> JoinRank:
    """Join as one of two ranks of this machine."""
    monkeypatch.setattr(rendezvous, "open_store", lambda *_: None)
    monkeypatch.setattr(peer_filter, "guard_ports", lambda: None)
    monkeypatch.setenv("IMGNET_WORK", str(tmp_path))
    variables = (*process_group.NCCL_WATCHDOG_VARIABLES, *process_group.IN_PLACE_NCCL_VARIABLES)
    for name in (*variables, "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")  # so that what the test leaves there is removed after it
        monkeypatch.delenv(name)

    def join(rank: int) -> process_group.ProcessGroup:
        for name, value in rank_environments(2, 0, 2, "127.0.0.1", 1234)[rank].items():
            monkeypatch.setenv(name, value)
        return process_group.join_process_group()

    return join


def test_join_takes_the_gpu_of_the_local_rank_and_nccl(join_rank: JoinRank, monkeypatch: pytest.MonkeyPatch) -> None:
    mocked = mock_cuda(monkeypatch, gpus=2)
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "600")  # a user's own setting holds
    group = join_rank(1)
    assert group.device == mocked.device == torch.device("cuda", 1) and mocked.backend == "nccl"
    assert group.nccl_log_path is None and "NCCL_DEBUG" not in mocked.environment
    group = join_rank(0)
    assert group.device == torch.device("cuda", 0) and group.nccl_log_path
    assert mocked.environment["NCCL_DEBUG_FILE"] == str(group.nccl_log_path)
    sleep_seconds = 4 * int(mocked.environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) / 1000  # before NCCL's end
    assert sleep_seconds <= 1 and mocked.environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert mocked.environment["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "600"
    assert group.guard is None and "NCCL_NVLS_ENABLE" not in mocked.environment


@pytest.mark.parametrize("way", ["on", "auto"])
def test_join_with_nccl_guards_the_sums_of_a_process_that_goes_on_in_place(
    way: str, join_rank: JoinRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    mocked = mock_cuda(monkeypatch, gpus=2)
    monkeypatch.setenv("IMGNET_IN_PLACE", way)
    monkeypatch.setenv("IMGNET_TOKEN", "secret")
    events = list[str]()
    own = SimpleNamespace(confirm=lambda: events.append("confirmed"), poison=lambda: events.append("poisoned"))
    make = Mock(return_value=own)
    monkeypatch.setattr(process_group, "StepGuard", make)
    monkeypatch.setattr(regroup, "shut_down_connections", lambda: None)
    monkeypatch.setattr(regroup, "_is_aborted", False)  # what follows sets it, also for the tests after this one
    group = join_rank(0)
    group.confirm_sums()
    regroup.abort_collectives()
    regroup.leave_group()
    regroup.abort_collectives()
    if way == "on":
        make.assert_called_once_with(2, group.device, "secret")
        assert mocked.environment.items() >= process_group.IN_PLACE_NCCL_VARIABLES.items()
        assert events == ["confirmed", "poisoned"], "the group that was left has no guard any more"
    else:
        assert group.guard is None and not events


@pytest.mark.parametrize(("hangs", "limit", "problem"), [
    (False, 60.0, "CUDA error: illegal access"), (True, 0.1, "the GPU has not ended its work 0.1 s after the abort"),
])  # fmt: skip
def test_gpu_that_fails_or_hangs_after_an_abort(hangs: bool, limit: float, problem: str, monkeypatch: Any) -> None:
    is_over = threading.Event()

    def synchronize(_: torch.device) -> None:
        if hangs:
            is_over.wait()
        raise RuntimeError("CUDA error: illegal access\nadvice")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert gpu.find_problem_after_abort(torch.device("cuda"), limit) == problem
    is_over.set()
    assert gpu.find_problem_after_abort(torch.device("cpu"), 0.1) == ""


def test_join_without_a_gpu_for_each_rank_says_so(join_rank: JoinRank, monkeypatch: pytest.MonkeyPatch) -> None:
    mock_cuda(monkeypatch, gpus=1)
    with pytest.raises(RuntimeError, match=r"process 1 has no GPU: this machine has 1; use --procs 1 or fewer"):
        join_rank(1)


@pytest.mark.parametrize(("capability", "dtypes"), [
    ((9, 0), {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}),
    ((7, 5), {"auto": torch.float16, "fp16": torch.float16, "fp32": torch.float32}),
])  # fmt: skip
def test_compute_dtype_of_each_precision(
    capability: tuple[int, int], dtypes: dict[str, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    mock_cuda(monkeypatch, capability=capability)
    gpu = torch.device("cuda", 0)
    assert {name: process_group.compute_dtype(gpu, name) for name in dtypes} == dtypes
    assert {process_group.compute_dtype(torch.device("cpu"), name) for name in dtypes} == {torch.float32}
    if "bf16" not in dtypes:
        with pytest.raises(TrainingError, match=r"^precision: Mocked GPU has no bfloat16; set precision to fp16"):
            process_group.compute_dtype(gpu, "bf16")


@pytest.mark.parametrize("node", [1, -1, 7])
def test_bind_to_numa_node_keeps_processors_beside_the_gpu(
    node: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a machine of one node, or of unknown ones, nothing changes."""
    ids = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: ids)
    bound = list[set[int]]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(40)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    gpu.bind_to_numa_node(torch.device("cuda", 0), tmp_path)
    for path, text in (
        ("sys/bus/pci/devices/0000:1b:00.0/numa_node", f"{node}"),
        ("sys/devices/system/node/node1/cpulist", "24-26,47,36-99"),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"{text}\n")
    gpu.bind_to_numa_node(torch.device("cuda", 0), tmp_path)
    assert bound == ([{24, 25, 26, 36, 37, 38, 39}] if node == 1 else [])


@pytest.fixture
def unusable_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    mock_cuda(monkeypatch, capability=(7, 0))
    return f"Mocked GPU is sm_70, and torch {torch.__version__} is built for sm_75, sm_80, sm_90"


def test_gpu_that_torch_cannot_use_is_said_aloud(
    join_rank: JoinRank, unusable_gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert join_rank(0).device == torch.device("cpu")
    assert capsys.readouterr().out.startswith(f"WARNING: THE RUN TRAINS ON THE CPU: {unusable_gpu}")
    join_rank(1)
    assert capsys.readouterr().out == "", "once on a machine"


def test_gpu_that_torch_cannot_use_ends_one_of_several_machines(
    monkeypatch: pytest.MonkeyPatch, unusable_gpu: str
) -> None:
    """The others would wait for it with NCCL, and it for them with Gloo."""
    for name, value in rank_environments(1, 1, 2, "127.0.0.1", 1234)[0].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MachineTrouble, match=f'^{re.escape(unusable_gpu)}.*set CUDA_VISIBLE_DEVICES="" on all'):
        process_group.join_process_group()


def test_gpu_that_torch_cannot_use_ends_a_job_on_a_machine_that_is_not_the_users_computer(
    join_rank: JoinRank, unusable_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train on the processors of a machine that costs as much as its GPUs; a further attempt is no better."""
    monkeypatch.setenv("IMGNET_NEEDS_GPU", "1")
    with pytest.raises(TrainingError, match=f'^{re.escape(unusable_gpu)}.*set CUDA_VISIBLE_DEVICES="" on all'):
        join_rank(0)


def test_find_gpu_problem_of_a_gpu_that_only_the_driver_sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mock_cuda(monkeypatch, gpus=0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.find_gpu_problem(tmp_path / "none") == gpu.find_gpu_problem(tmp_path) == ""
    (tmp_path / "0000:00:1e.0").mkdir()
    assert "is built without CUDA" in gpu.find_gpu_problem(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.find_gpu_problem(tmp_path) == "", "hidden on purpose"


def test_ranks_on_gpus_exit_only_when_none_sends_any_more() -> None:
    """Rank 0, whose process holds the store, is the last one."""
    store, ended, threads = HashStore(), list[int](), list[threading.Thread]()

    def meet(rank: int) -> None:
        process_group.meet_over_store(store, process_group.ProcessGroup(rank, 0, 3, 1, torch.device("cuda")))
        ended.append(rank)

    for rank in (0, 2):
        threads.append(threading.Thread(target=meet, args=(rank,)))
        threads[-1].start()
    threads[-1].join(0.1)
    assert ended == [], "rank 1 may still send"
    meet(1)
    for thread in threads:
        thread.join(120)
    assert sorted(ended) == [0, 1, 2]


def test_rank_whose_peer_is_gone_exits_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "EXIT_TIMEOUT", timedelta(seconds=0.1))
    process_group.meet_over_store(HashStore(), process_group.ProcessGroup(0, 0, 3, 1, torch.device("cuda")))


COMPILED_ARCHS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(("capability", "built", "fits"), [
    *((capability, COMPILED_ARCHS, True) for capability in ((8, 0), (8, 9), (9, 0), (10, 3))),
    *((capability, COMPILED_ARCHS, False) for capability in ((7, 0), (11, 0))),
    *((capability, [*COMPILED_ARCHS, "compute_120"], True) for capability in ((12, 1), (13, 0))),
    ((9, 0), ["sm_90a"], True), ((10, 3), ["sm_100a"], False), ((8, 0), ["sm_86"], False), ((8, 0), [], False),
])  # fmt: skip
def test_explain_unsupported_gpu_by_compiled_archs(capability: tuple[int, int], built: list[str], fits: bool) -> None:
    assert (gpu.explain_unsupported_gpu("Card", capability, built) is None) is fits
