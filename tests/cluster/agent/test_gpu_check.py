"""The check of a machine's GPUs, with an nvidia-smi whose GPUs can be lost and whose driver can hang."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.gpus import break_gpu, install_gpus
from support.waiting import wait_for

from cluster.agent.gpu_check import ANSWER_SECONDS, GpuCheck


class Machine:
    """A machine with simulated GPUs. `now` is its clock, in seconds, which only the test changes."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.folder = folder
        self.now = 100.0
        install_gpus(folder, folder, gpus)

    def check(self, expected: int = 0) -> GpuCheck:
        return GpuCheck(self.folder, expected, lambda: self.now)

    def break_gpu(self, how: str) -> None:
        break_gpu(self.folder, [], how)


@pytest.fixture
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    yield lambda gpus=2: Machine(tmp_path, gpus)


def answer(check: GpuCheck) -> str:
    """Start a check and return its answer."""
    check.start()
    (problem,) = wait_for(lambda: [answer for answer in (check.poll(),) if answer is not None])
    assert check.poll() == "", "a problem is told once"
    return str(problem)


def test_gpu_that_is_lost_after_the_first_check_is_found(make_machine: Any) -> None:
    machine = make_machine(2)
    check = machine.check()
    assert answer(check) == "" and check.is_needed
    machine.break_gpu("lost")
    assert answer(check) == (
        "1 of 2 GPUs answer (nvidia-smi: Unable to determine the device handle for GPU 0000:00:1E.0: Unknown Error)"
    )


def test_missing_gpu_of_a_rented_machine_is_found_by_the_first_check(make_machine: Any) -> None:
    assert answer(make_machine(2).check(expected=4)) == "2 of 4 GPUs answer"


def test_driver_that_hangs_is_found_without_waiting(make_machine: Any) -> None:
    machine = make_machine(1)
    check = machine.check()
    assert answer(check) == ""
    machine.break_gpu("hangs")
    check.start()
    machine.now += ANSWER_SECONDS - 1
    assert check.poll() is None
    process = check.process
    machine.now += 2
    assert check.poll() == "0 of 1 GPUs answer (nvidia-smi: no answer in 60 s)"
    assert process is not None and process.poll() is not None and not check.is_under_way


@pytest.mark.parametrize("expected", [0, 8])
def test_machine_without_nvidia_smi_is_never_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: int
) -> None:
    """Then its image is at fault, and another machine would be no better."""
    monkeypatch.setenv("PATH", str(tmp_path))
    check = GpuCheck(tmp_path, expected)
    check.start()
    assert check.poll() == "" and not check.is_needed


def test_driver_that_never_answered_is_no_loss(make_machine: Any) -> None:
    """A computer may train on its processors beside a driver that hangs."""
    machine = make_machine(1)
    machine.break_gpu("hangs")
    check = machine.check()
    check.start()
    machine.now += ANSWER_SECONDS + 1
    assert check.poll() == "" and not check.is_needed


DMESG = """\
#!/bin/sh
echo "[   50.100000] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault"
echo "[ 1234.500000] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, name=python, GPU has fallen off the bus."
echo "[ 1234.600000] eth0: link is up"
"""


def test_newest_xid_tells_what_the_driver_told_the_kernel(
    make_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = make_machine(1).check()
    (tmp_path / "dmesg").write_text(DMESG)
    (tmp_path / "dmesg").chmod(0o755)
    xid = "kernel: Xid (PCI:0000:3b:00): 79, pid=12, name=python, GPU has fallen off the bus."
    assert check.newest_xid(since=100.0) == xid and check.newest_xid(since=2000.0) == ""
    (tmp_path / "dmesg").write_text(
        "#!/bin/sh\necho 'dmesg: read kernel buffer failed: Operation not permitted' >&2\nexit 1\n"
    )
    assert check.newest_xid(since=100.0) == ""
    monkeypatch.setenv("PATH", "/nowhere")
    assert check.newest_xid(since=100.0) == ""
