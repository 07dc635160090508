"""Fixtures of all tests: a data set of drawn images, a sandbox for each test, a job that has ended, a small disk."""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import hypothesis
import pytest
from support.gate import PROCESS_FILES, SMOKE_TESTS
from support.sandbox import FinishedSandbox, Sandbox

TESTS = Path(__file__).resolve().parent
RERUNS_LOG = TESTS.parent / ".ci" / "reruns.log"
# Seconds after which a test counts as hanging, by its mark; the first that it has counts.
HANG_SECONDS = {"release": 1800, "smoke": 300, "rehearsal": 900, "process": 300}
DEFAULT_HANG_SECONDS = 120

# All tests run on the CPU, also where there are GPUs: they start more processes than there may be, and compare bits.
# Those of the mark `gpu` see the GPUs again. Before torch is imported, and also for the processes that tests start.
GPUS_OF_COMPUTER = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tensors are small, and other test processes need the cores: threads that spin would take them, threads that sleep make
# a step three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The same examples in each run, however busy the computer is.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests by the lists of support/gate.py, and leave out those that need a GPU unless they are wanted."""
    for item in items:
        path = item.path.relative_to(TESTS).as_posix()
        if path in PROCESS_FILES:
            item.add_marker("process")
        if path.startswith("end_to_end/"):
            item.add_marker("rehearsal")
        if f"{path}::{item.name}" in SMOKE_TESTS:
            item.add_marker("smoke")
        if path.startswith("gpu/"):
            item.add_marker("gpu")
            if os.environ.get("IMGNET_GPU_TESTS") != "1":
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: make gpu-test"))
        marks = [mark for mark in HANG_SECONDS if item.get_closest_marker(mark)]
        item.add_marker(pytest.mark.timeout(HANG_SECONDS[marks[0]] if marks else DEFAULT_HANG_SECONDS))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a failure after which the test is run again. Such a failure is a defect of the test or of the program."""
    if report.outcome == "rerun" and "PYTEST_XDIST_WORKER" not in os.environ:
        with RERUNS_LOG.open("a") as log:
            log.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M} load {os.getloadavg()[0]:.1f} {report.nodeid}\n")
            log.write(report.longreprtext + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were run again: the log of a fresh clone is lost with it."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"run again: {report.nodeid}")
        terminalreporter.line(report.longreprtext)


def pytest_runtest_setup() -> None:
    """Begin each test with one thread of PyTorch: its tensors are small, and other processes need the cores."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gpus_of_computer() -> str | None:
    """The value of CUDA_VISIBLE_DEVICES for tests that use GPUs, None to leave it unset."""
    return GPUS_OF_COMPUTER


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 60 training and 20 validation images in ten classes. Tests must not change it."""
    from train.data.packing.synthetic import draw_sample_set

    folder = tmp_path_factory.mktemp("drawn") / "data"
    draw_sample_set(folder, train=60, val=20)
    return folder


@pytest.fixture
def sandbox(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A sandbox of this test's own. The test's process is in it too: it has its working folder and environment."""
    sandbox = Sandbox(tmp_path / "place", images)
    monkeypatch.chdir(sandbox.path)
    for name in ("IMGNET_RUNS", "XDG_CONFIG_HOME", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TMUX_TMPDIR", "HOME", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, sandbox.env[name])
    yield sandbox
    leftovers = sandbox.close()
    assert not leftovers, f"still running after the tmux server had ended: {leftovers}"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[FinishedSandbox]:
    """A sandbox in which job-1, with two processes, has run to its end. Tests must not change it."""
    sandbox = FinishedSandbox(tmp_path_factory.mktemp("finished") / "place", images)
    try:
        sandbox.run_job("--procs", "2", "--save-seconds", "0", sandbox.write_recipe(3))
        yield sandbox
    finally:
        leftovers = sandbox.close()
    assert not leftovers, f"still running after the tmux server had ended: {leftovers}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB. Only root may mount it; the test is skipped for other users."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no disk of our own: mounting one takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
