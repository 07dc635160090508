"""A CUDA that is not there: torch.cuda tells of GPUs, and whatever needs one is recorded instead."""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist


@dataclass
class MockedCuda:
    """What code under test asked of CUDA. `environment` is that at the start of the process group."""

    device: torch.device | None = None
    backend: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def mock_cuda(monkeypatch: pytest.MonkeyPatch, gpus: int = 1, capability: tuple[int, int] = (9, 0)) -> MockedCuda:
    """Let torch tell of `gpus` GPUs of a compute capability. Tensors stay on the CPU."""
    mocked = MockedCuda()

    def set_device(device: torch.device) -> None:
        mocked.device = device

    def init_process_group(backend: str, **_: Any) -> None:
        mocked.backend = backend
        mocked.environment = dict(os.environ)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "Mocked GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    return mocked
