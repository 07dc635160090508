"""AgentChannel: what a trainer reports to its agent, and the agent's request to stop."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train.data.index.open import DataError
from train.engine import main, run
from train.engine.agent_channel import AgentChannel
from train.recipe import Optim
from train.tools.agent_protocol import TrainerProgress, TrainerState, module_folders_variable
from train.tools.errors import WorkerLost
from train.tools.records import read_record


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The agent's folder IMGNET_WORK; this process is rank 4, the first of its machine."""
    for name, value in {"IMGNET_WORK": str(tmp_path), "RANK": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_report_state_merges_numbers_and_replaces_the_file(work_dir: Path) -> None:
    channel = AgentChannel()
    channel.report_state(TrainerState.WARMING, steps=10, step=0)
    channel.report_state(TrainerState.TRAINING, step=3, top1=float("nan"))
    expected = TrainerProgress(state=TrainerState.TRAINING, steps=10, step=3, top1=None)
    assert read_record(work_dir / "progress.json", TrainerProgress) == expected
    assert [path.name for path in work_dir.iterdir()] == ["progress.json"]


def test_only_the_first_trainer_of_a_machine_reports_progress_and_each_its_failure(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    channel = AgentChannel()
    channel.report_state(TrainerState.TRAINING)
    channel.report_failure("the disk is full")
    (path,) = work_dir.iterdir()
    failure = json.loads(path.read_text())
    assert path.name == "failed-4.json" and (failure["rank"], failure["reason"]) == (4, "the disk is full")


def test_requests_of_the_agent(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM asks to stop, as the file does. Without an agent nobody asks, and nothing is written."""
    previous_handler = signal.getsignal(signal.SIGTERM)
    try:
        channel = AgentChannel()
        channel.install_signal_handlers()
        requests: list[tuple[bool, bool]] = [(channel.stop_requested(), channel.save_requested())]
        for name in ("save", "ask"):
            (work_dir / name).touch()
            requests.append((channel.stop_requested(), channel.save_requested()))
            (work_dir / name).unlink()
        os.kill(os.getpid(), signal.SIGTERM)
        requests.append((channel.stop_requested(), channel.save_requested()))
        assert requests == [(False, False), (False, True), (True, False), (True, False)]
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    monkeypatch.delenv("IMGNET_WORK")
    channel = AgentChannel()
    channel.report_state(TrainerState.TRAINING)
    channel.report_failure("why")
    assert not channel.stop_requested() and not channel.save_requested() and list(work_dir.iterdir()) == []


@pytest.mark.parametrize(("error", "fault"), [
    (OSError(errno.ESTALE, "Stale file handle", "/shared/a.pt"), "own"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "own"),
    (PermissionError(errno.EACCES, "Permission denied", "/shared/a.pt"), "final"),
    (DataError("a.JPEG: not an image"), "input"),
    (WorkerLost("a data-loading worker ended"), "own"),
], ids=["file server", "memory", "permission", "images", "worker"])  # fmt: skip
def test_errors_of_files_that_may_pass_are_tried_again(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, fault: str
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    def fail(*_: object) -> int:
        raise error

    anything: Any = None
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(run, "run_attempt", fail)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit):
        main.run_rank(anything, anything)
    assert json.loads((work_dir / "failed-4.json").read_text())["fault"] == fault


INSTALL_EXCEPTHOOK = """
import atexit, sys
from train.engine.agent_channel import AgentChannel
from train.tools.errors import TrainingError
sys.excepthook = AgentChannel().excepthook
"""


NCCL = "type('DistBackendError', (RuntimeError,), {})('NCCL error: invalid usage\\nncclInvalidUsage: .\\nLast error:\\n"


@pytest.mark.parametrize(("error", "reason", "fault"), [
    ("ValueError('first\\nwhat it was')", "ValueError: what it was", "own"),
    ("TrainingError('the rate is too high')", "the rate is too high", "input"),
    ("RuntimeError('CUDA error: an illegal memory access was encountered\\nCompile with `TORCH_USE_CUDA_DSA`')",
     "GPU 0: CUDA error: an illegal memory access was encountered", "own"),
    (NCCL + "Cuda failure 2 \\'out of memory\\'')", "GPU 0: Cuda failure 2 'out of memory'", "own"),
    (NCCL + "Duplicate GPU detected : rank 0')", "GPU 0: NCCL: Duplicate GPU detected : rank 0", "own"),
    ("RuntimeError('CUDA error: uncorrectable ECC error encountered\\nCompile with `TORCH_USE_CUDA_DSA`')",
     "GPU 0 is broken: uncorrectable ECC error encountered", "machine"),
    ("RuntimeError('NCCL WARN Cuda failure \\'uncorrectable NVLink error detected during the execution\\'')",
     "GPU 0 is broken: uncorrectable NVLink error detected during the execution", "machine"),
    ("RuntimeError('[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1')", "", "peer"),
    ("RuntimeError('in the callback: Connection reset by peer\\n\\nAt:\\n  exact_sum.py(35): sum')", "", "peer"),
    ("RuntimeError('NCCL communicator was aborted on rank 1')", "", "peer"),
    ("RuntimeError('the agent has ended the attempt')", "", "peer"),
    ("RuntimeError('NCCL error, remote process exited\\nncclRemoteError: A call failed')", "", "peer"),
    ("RuntimeError('NCCL error, ncclSystemError: System call failed.\\nLast error:\\nsocket: closed')", "", "peer"),
    ("ConnectionResetError(104, 'Connection reset by peer')", "", "peer"),
    ("type('DistNetworkError', (RuntimeError,), {})('The client socket has timed out')", "", "peer"),
])  # fmt: skip
def test_excepthook_prints_reports_and_exits(error: str, reason: str, fault: str, work_dir: Path) -> None:
    """Where another process is gone, the log gets one line, and a file beside it the traceback."""
    program = f"{INSTALL_EXCEPTHOOK}atexit.register(print, 'exit handlers must not run'); raise {error}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", program]
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (completed.returncode, completed.stdout) == (1, "")
    failure, stack = json.loads((work_dir / "failed-4.json").read_text()), completed.stderr
    assert failure["fault"] == fault and (failure["reason"] == reason or fault == "peer")
    if fault == "peer":
        assert stack.startswith("another process is gone (") and stack.count("\n") == 1 and "stack-4.log" in stack
        assert "(At:" not in stack
        stack = (work_dir.parent / "logs" / work_dir.name / "stack-4.log").read_text()
    assert "Traceback (most recent call last)" in stack


FAILING_OPTIMIZER = """
import torch

class Failing(torch.optim.SGD):
    def step(self):
        raise RuntimeError("failed on purpose")

def build(groups, options):
    return Failing(groups, lr=0.0)
"""


def test_excepthook_traceback_reaches_the_terminal_of_a_run(runs: Any, tiny: Any, tmp_path: Path) -> None:
    """torch's process group wraps sys.excepthook and replaces stderr by a buffer."""
    (tmp_path / "own.py").write_text(FAILING_OPTIMIZER)
    path = runs.recipe(tiny(name="failing", optim=Optim(name="own:build")))
    folders = module_folders_variable([str(tmp_path)])
    ranks = [
        runs.start(tmp_path / "out", "--workers", "0", recipe=path, environment={**variables, **folders})
        for variables in runs.ranks(2)
    ]
    lines = runs.end(tmp_path / "out", *ranks, code=1).splitlines()
    assert "Traceback (most recent call last):" in lines and "RuntimeError: failed on purpose" in lines
    assert any(line.endswith('own.py", line 6, in step') for line in lines)
