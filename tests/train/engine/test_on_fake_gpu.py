"""The branches for GPUs, on fake CUDA tensors and a CUDA that is recorded. What NCCL and cuDNN do, tests/gpu asks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.mocked_cuda import mock_cuda
from torch._subclasses.fake_tensor import FakeTensorMode

from train.data.loading import loader
from train.data.order.work import BatchRequest
from train.distributed import ddp, network, process_group
from train.engine.inputs import BatchPreprocessor
from train.recipe import Comm

GPU = torch.device("cuda", 0)


class Stream:
    """A stream of CUDA: its name alone."""

    def __init__(self, name: object = "side") -> None:
        self.name = name if name == "compute" else "side"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happened, in order, on a fake GPU of compute capability 9.0. Tensors are fake meanwhile."""
    mock_cuda(monkeypatch)
    told: list[str] = []

    @contextlib.contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        told.append(f"begin {stream.name}")
        yield
        told.append(f"end {stream.name}")

    def copy(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if GPU in arguments:
            told.append(f"copy {options}")
        return to(tensor, *arguments, **options)

    to = torch.Tensor.to
    torch._C._ensureCUDADeviceGuardSet()
    # A build without CUDA fills no memory of the device, and takes no part of its tensors, also of fake ones.
    monkeypatch.setattr(torch, "tensor", lambda values, device: torch.empty(len(values), device=device))
    monkeypatch.setattr(torch.Tensor, "__getitem__", lambda tensor, part: tensor.narrow(0, 0, part.stop))
    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: told.append(f"kept for {stream.name}"))
    monkeypatch.setattr(
        Stream, "wait_stream", lambda *both: told.append(" waits for ".join(s.name for s in both)), False
    )
    for name, value in (("Stream", Stream), ("stream", inside), ("current_stream", lambda _: Stream("compute"))):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield told


def batch_of(count: int) -> loader.Batch:
    request = BatchRequest("val", None, np.arange(count), (32, 32))
    return loader.Batch(torch.zeros(request.batch_shape, dtype=torch.uint8), np.zeros(count, np.int64), request)


def test_a_batch_is_copied_beside_the_step_and_kept_for_it(events: list[str]) -> None:
    images, labels = BatchPreprocessor(GPU).prepare(batch_of(4))
    copies = ["begin side", *["copy {'non_blocking': True}"] * 2, "end side"]
    assert events == [*copies, "compute waits for side", "kept for compute", "kept for compute"]
    assert (images.device, labels.device, images.dtype) == (GPU, GPU, torch.bfloat16)
    assert images.shape == (4, 3, 32, 32) and images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("transport", "local_world_size", "hook"), [
    ("sockets", 2, "bf16"), ("sockets", 4, "auto"), ("efa", 2, "auto"), ("unknown", 2, "auto"),
])  # fmt: skip
def test_sums_of_gpus_over_sockets_are_bfloat16(
    transport: str, local_world_size: int, hook: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(network, "detect_transport", lambda backend, _: transport if backend == "nccl" else "gloo")
    monkeypatch.setattr(network, "has_efa", lambda: transport == "sockets")
    monkeypatch.setattr(process_group, "sum_from_cpu", lambda _, values: values)
    over_sockets = process_group.print_transport(process_group.ProcessGroup(0, 0, 4, local_world_size, GPU))
    assert ("WARNING: NCCL TALKS OVER SOCKETS" in capsys.readouterr().out) == (transport == "sockets")
    for comm, expected in ((Comm(), hook), (Comm(hook="none"), "none"), (Comm(hook="fp16"), "fp16")):
        assert ddp.choose_hook(comm, over_sockets, exact=False).hook == expected
    assert ddp.choose_hook(Comm(), over_sockets, exact=True).hook == "auto"
