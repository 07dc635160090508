"""Fixtures of all tests: a data set of drawn images, a sandbox for each test, a job that has ended, a small disk."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from support.sandbox import FinishedSandbox, Sandbox

# The same examples in each run, however busy the computer is.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that run whole jobs as rehearsals."""
    for item in items:
        if "end_to_end" in item.path.parts:
            item.add_marker("rehearsal")


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
    for name in ("IMGNET_RUNS", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TMUX_TMPDIR", "HOME", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, sandbox.env[name])
    yield sandbox
    assert_nothing_outlived(sandbox)


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


def assert_nothing_outlived(*sandboxes: Sandbox) -> None:
    """Close sandboxes. Raises `AssertionError` when a process has outlived its sandbox's tmux server."""
    leftovers = [command_line for sandbox in sandboxes for command_line in sandbox.close()]
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
