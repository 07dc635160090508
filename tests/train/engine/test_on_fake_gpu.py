"""The branches for GPUs, on fake CUDA tensors and a CUDA that is recorded. What NCCL and cuDNN do, tests/gpu asks."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.mocked_cuda import mock_cuda
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from train.data.loading import loader
from train.data.order.work import BatchRequest
from train.distributed import comm_hooks, ddp, exact_sum, network, process_group
from train.engine import validation, warmup
from train.engine.inputs import BatchPreprocessor
from train.inference import predict
from train.recipe import Comm
from train.tools import checkpoint_io

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
    monkeypatch.setattr(torch.Tensor, "backward", lambda _: None)
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


class Network(nn.Module):
    """Scores of three classes. It notes the shapes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, device=GPU))
        self.shapes: list[tuple[object, ...]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.shapes.append((self.training, images.shape[0], *images.shape[2:]))
        return images.float().mean((2, 3))


def test_a_batch_is_copied_beside_the_step_and_kept_for_it(events: list[str]) -> None:
    images, labels = BatchPreprocessor(GPU).prepare(batch_of(4))
    copies = ["begin side", *["copy {'non_blocking': True}"] * 2, "end side"]
    assert events == [*copies, "compute waits for side", "kept for compute", "kept for compute"]
    assert (images.device, labels.device, images.dtype) == (GPU, GPU, torch.bfloat16)
    assert images.shape == (4, 3, 32, 32) and images.is_contiguous(memory_format=torch.channels_last)


def test_validation_fills_its_last_batch_and_counts_the_real_images(events: Any, monkeypatch: Any) -> None:
    preprocessor, model, hits = BatchPreprocessor(GPU), Network(), torch.zeros((), dtype=torch.int64, device=GPU)
    preprocessor.warmed_shapes = {(8, 32, 32)}
    count, sums = Mock(return_value=(hits, hits)), SimpleNamespace(item=lambda: 0.0, tolist=lambda: [0, 0, 3])
    monkeypatch.setattr(validation, "count_correct", count)
    monkeypatch.setattr(validation, "read_sum", lambda *_: sums)
    clock: Any = SimpleNamespace(begin_step=lambda _: None, next_batch=next, end_step=lambda *_: None)
    group = process_group.ProcessGroup(0, 0, 1, 1, GPU)
    validation.run_validation(group, model, iter([batch_of(3)]), 1, 3, preprocessor, clock)
    assert model.shapes == [(False, 8, 32, 32)] and count.call_args.args[0].shape == (3, 3)


@pytest.mark.parametrize("searches", [False, True])
def test_warm_up_runs_the_largest_shape_or_all_to_search(searches: bool, events: Any, monkeypatch: Any) -> None:
    train, val = [(8, 32, 32), (4, 64, 64)], [(16, 32, 32)]
    model, preprocessor, searched = Network(), BatchPreprocessor(GPU, kernel_search=searches), set[bool]()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not searches)
    model.register_forward_pre_hook(lambda *_: searched.add(torch.backends.cudnn.benchmark))
    for val_shapes in (val, []):  # the second time there is nothing new
        warmup.warm_up(model, model, train, val_shapes, preprocessor)
    assert searched == {searches}
    expected = [(True, 8, 32, 32), (True, 4, 64, 64), (False, 16, 32, 32)]
    assert model.shapes == (expected if searches else expected[1:2]), (
        "a later phase may take more memory than the first"
    )
    assert preprocessor.warmed_shapes == {*train, *val}, "so that the last batches of validation are filled up"


@pytest.mark.parametrize(("device", "niceness"), [(GPU, 5), (CPU, 0)])
def test_loader_pins_batches_for_a_gpu_and_gives_way_to_the_trainer(
    device: Any, niceness: int, monkeypatch: Any
) -> None:
    started, pinned = Mock(return_value=[]), Mock()
    monkeypatch.setattr(loader, "DataLoader", started)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    decoder: Any = SimpleNamespace(decode_batch=lambda request: request)
    assert list(loader.BatchStream(decoder, [], 2, device, 1000)) == []
    given = started.call_args.kwargs
    assert given["pin_memory"] == (device == GPU) and given["worker_init_fn"].args[1] == niceness
    requests: list[Any] = [batch_of(2)]
    assert len(list(loader.BatchStream(decoder, requests, 0, device, 1000))) == 1
    assert pinned.call_count == (2 if device == GPU else 0), "images and labels"


@pytest.mark.parametrize("can_pin", [True, False])
def test_a_checkpoint_is_copied_into_pinned_memory_and_waited_for_once(
    can_pin: bool, events: list[str], monkeypatch: Any
) -> None:
    def empty_like(tensor: torch.Tensor, *, device: str, pin_memory: bool = False, requires_grad: bool) -> torch.Tensor:
        if pin_memory and not can_pin:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(tensor.shape, device=device)

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        events.append(f"{source.device.type} to {target.device}, non_blocking={non_blocking}")
        return target

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    stream = SimpleNamespace(synchronize=lambda: events.append("waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    state = {"a": nn.Parameter(torch.zeros(3, device=GPU)), "b": [torch.zeros(2, device=GPU), torch.zeros(1)], "c": 1}
    copied = checkpoint_io.copy_to_cpu(state)
    assert copied["a"].device == CPU and not copied["a"].requires_grad and copied["c"] == 1
    on_gpu, on_cpu = f"cuda to cpu, non_blocking={can_pin}", "cpu to cpu, non_blocking=False"
    assert events == [on_gpu, on_gpu, on_cpu, "waits"]


def test_hierarchical_sums_run_beside_the_backward_pass(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    future = Mock(return_value=SimpleNamespace(set_result=lambda _: events.append("done")))
    monkeypatch.setattr(torch.futures, "Future", future)
    for name in ("reduce", "all_reduce", "broadcast"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: events.append(name))
    groups = object.__new__(comm_hooks.MachineGroups)
    vars(groups).update(
        stream=None, world_size=4, machine_ranks=[0, 1], leader_rank=0, machine_group=1, leaders_group=2
    )
    bucket: Any = SimpleNamespace(buffer=lambda: torch.ones(4, device=GPU))
    comm_hooks.hierarchical_hook(groups, bucket)
    sums = ["reduce", "all_reduce", "broadcast"]
    assert events == ["side waits for compute", "begin side", *sums, "done", "end side"]
    assert future.call_args.kwargs == {"devices": [GPU]}


@pytest.mark.parametrize("device", [CPU, GPU])
def test_powersgd_waits_on_a_cpu_and_exact_is_deterministic_on_a_gpu(
    device: Any, events: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(comm_hooks, "powerSGD_hook", lambda *_: SimpleNamespace(wait=lambda: events.append("waits")))
    bucket: Any = SimpleNamespace(buffer=lambda: torch.ones(4, device=device))
    comm_hooks.low_rank_hook(comm_hooks.powersgd_state(2), bucket)
    assert events == ["waits"] * (device == CPU)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    parameter = nn.Parameter(torch.ones(2, device=device))
    model: Any = SimpleNamespace(double=lambda: None, parameters=lambda: [parameter])
    exact_sum.make_gradients_exact(model)
    assert torch.backends.cudnn.deterministic == (device == GPU)


@pytest.mark.parametrize(("gpus", "kind"), [(1, "cuda"), (0, "cpu")])
def test_predict_takes_the_gpu_and_the_peak_is_of_its_memory(gpus: int, kind: str, monkeypatch: Any) -> None:
    mock_cuda(monkeypatch, gpus)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3e9 if device == GPU else 0)
    assert process_group.peak_memory_gb(GPU) == 3.0
    devices, network_of = list[torch.device](), SimpleNamespace(mean=(0,), std=(1,))
    model, recipe = SimpleNamespace(to=devices.append), SimpleNamespace(precision="auto")
    trained = SimpleNamespace(build=lambda: model, description=network_of, recipe=recipe)
    monkeypatch.setattr(predict, "open_trained", lambda *_: trained)
    monkeypatch.setattr(predict, "BatchPreprocessor", lambda device, **_: devices.append(device))
    options: Any = SimpleNamespace(source="", model=None, images=())
    predict.predict_images(options)
    assert devices == [torch.device(kind)] * 2


@pytest.mark.parametrize(("transport", "local_world_size", "hook"), [
    ("sockets", 2, "bf16"), ("sockets", 4, "auto"), ("efa", 2, "auto"), ("unknown", 2, "auto"),
])  # fmt: skip
def test_sums_of_gpus_over_sockets_are_bfloat16(
    transport: str, local_world_size: int, hook: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(network, "detect_transport", lambda backend, _: transport if backend == "nccl" else "gloo")
    monkeypatch.setattr(network, "has_efa", lambda: transport == "sockets")
    monkeypatch.setattr(process_group, "read_sum", lambda _, values: values)
    over_sockets = process_group.print_transport(process_group.ProcessGroup(0, 0, 4, local_world_size, GPU))
    assert ("WARNING: NCCL TALKS OVER SOCKETS" in capsys.readouterr().out) == (transport == "sockets")
    for comm, expected in ((Comm(), hook), (Comm(hook="none"), "none"), (Comm(hook="fp16"), "fp16")):
        assert ddp.choose_hook(comm, over_sockets, exact=False).hook == expected
    assert ddp.choose_hook(Comm(), over_sockets, exact=True).hook == "auto"
