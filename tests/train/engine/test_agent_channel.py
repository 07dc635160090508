"""What a trainer tells the agent beside it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train.engine.agent_channel import AgentChannel
from train.recipe import Optim


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The agent's folder; this process is rank 4, the first of its machine."""
    for name, value in {"IMGNET_WORK": str(tmp_path), "RANK": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def said(work: Path) -> Any:
    return json.loads((work / "progress.json").read_text())


def test_news_add_up_and_replace_each_other(work: Path) -> None:
    report = AgentChannel()
    report.report_state("warming", steps=10, step=0)
    report.report_state("training", step=3, top1=float("nan"))
    assert said(work) == {"state": "training", "steps": 10, "step": 3, "top1": None}
    assert [path.name for path in work.iterdir()] == ["progress.json"]


def test_frequent_news_may_be_dropped_but_come_with_the_next(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("train.engine.agent_channel.time.monotonic", lambda: now)
    report = AgentChannel()
    report.report_state("training", step=1)
    now += 0.1
    report.report_state("training", throttled=True, step=2, lr=0.1)
    assert said(work)["step"] == 1
    report.report_state("validating")
    assert said(work) == {"state": "validating", "step": 2, "lr": 0.1}
    now += 1
    report.report_state("training", throttled=True, step=3)
    assert said(work)["step"] == 3


def test_only_the_first_process_of_a_machine_speaks(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    AgentChannel().report_state("training")
    assert list(work.iterdir()) == []


def test_every_process_may_leave_last_words(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    AgentChannel().report_failure("the disk is full")
    (path,) = work.iterdir()
    left = json.loads(path.read_text())
    assert path.name == "failed-4.json" and (left["rank"], left["reason"]) == (4, "the disk is full")


def test_without_an_agent_nothing_is_written(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IMGNET_WORK")
    report = AgentChannel()
    report.report_state("training")
    report.report_failure("why")
    assert not report.stop_requested() and list(work.iterdir()) == []


def test_an_end_is_asked_for_by_a_file_or_a_signal(work: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        report = AgentChannel()
        assert not report.stop_requested()
        (work / "ask").touch()
        assert report.stop_requested()
        (work / "ask").unlink()
        report.install_signal_handlers()
        assert not report.stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert report.stop_requested()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("error", "reason"), [
    ("ValueError('first\\nwhat it was')", "ValueError: what it was"),
    ("TrainingError('the rate is too high')", "the rate is too high"),
    ("KeyError()", "KeyError: KeyError"),
])  # fmt: skip
def test_an_error_nobody_caught_is_printed_told_and_ends_the_process(error: str, reason: str, work: Path) -> None:
    code = "import sys; from train.engine.agent_channel import AgentChannel; from train.tools.errors import TrainingError; sys.excepthook = AgentChannel().excepthook;"
    code += f"import atexit; atexit.register(print, 'too late'); raise {error}"
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=path, timeout=60)
    assert run.returncode == 1 and run.stdout == "" and "Traceback" in run.stderr
    left = json.loads((work / "failed-4.json").read_text())
    assert left["reason"] == reason and left["fault"] == ("final" if error.startswith("TrainingError") else "own")


OWN = """
import torch

class Failing(torch.optim.SGD):
    def step(self):
        raise RuntimeError("here it is")

def build(groups, how):
    return Failing(groups, lr=0.0)
"""


@pytest.mark.parametrize("procs", [1, 2])
def test_a_run_s_unexpected_error_is_on_the_terminal_with_its_trace(
    procs: int, runs: Any, tiny: Any, tmp_path: Path
) -> None:
    """torch's process group wraps the excepthook, and gives it a buffer in place of stderr."""
    (tmp_path / "own.py").write_text(OWN)
    path = runs.recipe(tiny(name=f"failing-{procs}", optim=Optim(name="own:build")))
    words = runs.words(tmp_path / "out", ("--procs", str(procs), "--workers", "0", "--threads", "1"), path)
    environment = {**runs.environment, "PYTHONPATH": f"{runs.environment['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    run = subprocess.run(
        [sys.executable, "-m", "train", *words], capture_output=True, text=True, env=environment, timeout=120
    )
    assert run.returncode == 1
    assert "Traceback (most recent call last)" in run.stderr and 'own.py", line 6, in step' in run.stderr
    assert "RuntimeError: here it is" in run.stderr.splitlines()


@pytest.mark.parametrize("error", [
    "RuntimeError('[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1')",
    "RuntimeError('NCCL communicator was aborted on rank 1')",
    "ConnectionResetError(104, 'Connection reset by peer')",
    "type('DistBackendError', (RuntimeError,), {})('what torch calls it')",
    "type('DistNetworkError', (RuntimeError,), {})('The client socket has timed out')",
])  # fmt: skip
def test_what_a_collective_raises_when_another_process_is_gone_is_not_our_fault(error: str, work: Path) -> None:
    code = f"import sys; from train.engine.agent_channel import AgentChannel; sys.excepthook = AgentChannel().excepthook; raise {error}"
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, env=path, timeout=60).returncode == 1
    assert json.loads((work / "failed-4.json").read_text())["fault"] == "peer"


def test_a_tick_shows_that_we_go_forward_where_there_is_no_other_news(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("train.engine.agent_channel.time.monotonic", lambda: now)
    report = AgentChannel()
    report.tick()
    assert list(work.iterdir()) == [], "before the first word there is nothing to repeat"
    report.report_state("validating", step=3)
    before = (work / "progress.json").read_text()
    for _ in range(9):
        report.tick()
    assert (work / "progress.json").read_text() == before, "a tick costs no write each time"
    now += 0.6
    report.tick()
    assert said(work) == {"state": "validating", "step": 3, "ticks": 11}
    now += 0.6
    report.tick()
    assert said(work)["ticks"] == 12
