"""Machines for the tests of their set-up: real sshd, and a shell script that stands for their Python."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.ssh_machines import Testbed

from benchmarks.launch.stub import StubDelays


class StubPython:
    """The script that stands for Python on `count` machines; it lies in a folder of the test."""

    def __init__(self, folder: Path, count: int = 1) -> None:
        no_delays = StubDelays(environment=0, probe=0, start=0, beat=0.2, count=count)
        self.path = no_delays.write_script(folder / "python")
        self.log_path, self.overrides = folder / "python.log", folder / "python.d"
        self.overrides.mkdir()

    def override(self, call: str, script: str) -> None:
        """Let a module on a machine, such as "cluster.machines.probe-1", run these lines of sh first."""
        (self.overrides / call).write_text(script)

    def calls(self, module: str) -> list[str]:
        """The numbers of the machines on which this module was called, sorted."""
        lines = [line.split() for line in self.log_path.read_text().splitlines()] if self.log_path.exists() else []
        return sorted(machine for name, machine in lines if name == module)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Three machines for all tests of a file."""
    with Testbed(tmp_path_factory.mktemp("testbed") / "bed", 3) as bed:
        yield bed


@pytest.fixture
def make_stub() -> Callable[..., StubPython]:
    """Make the machines' Python in a folder: make_stub(tmp_path, count=2)."""
    return StubPython
