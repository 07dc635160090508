"""The check of a machine's GPUs, with an nvidia-smi whose GPUs can be lost and whose driver can hang."""

from pathlib import Path

import pytest
from support.simcloud.gpus import break_gpu, install_gpus
from support.waiting import wait_for

from cluster.agent.gpus import ANSWER_SECONDS, GpuCheck


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuCheck:
    """The check of a machine with two simulated GPUs. Its clock stands still until the test sets another."""
    install_gpus(tmp_path, tmp_path, 2)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return GpuCheck(0, lambda: 100.0)


def answer(check: GpuCheck) -> str:
    """Start a check and return its answer."""
    check.start()
    (problem,) = wait_for(lambda: [answer for answer in (check.poll(),) if answer is not None])
    assert check.poll() == "", "a problem is told once"
    return str(problem)


def test_gpu_that_is_lost_after_the_first_check_is_found(check: GpuCheck, tmp_path: Path) -> None:
    assert answer(check) == "" and check.is_needed
    break_gpu(tmp_path, [], "lost")
    assert answer(check).startswith("1 of 2 GPUs answer (nvidia-smi: Unable to determine the device handle for GPU")


@pytest.mark.parametrize("has_answered", [True, False])
def test_driver_that_hangs_is_found_without_waiting(check: GpuCheck, tmp_path: Path, has_answered: bool) -> None:
    """One that never answered is no loss: a computer may train on its processors beside it."""
    assert not has_answered or answer(check) == ""
    break_gpu(tmp_path, [], "hangs")
    check.start()
    check.clock = lambda: 100.0 + ANSWER_SECONDS - 1
    assert check.poll() is None
    process = check.nvidia_smi.process
    check.clock = lambda: 100.0 + ANSWER_SECONDS + 1
    assert check.poll() == ("0 of 2 GPUs answer (nvidia-smi: no answer in 60 s)" if has_answered else "")
    assert process is not None and process.poll() is not None and check.is_needed == has_answered


@pytest.mark.parametrize("expected", [0, 8])
def test_machine_without_nvidia_smi_is_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: int) -> None:
    """Then its image is at fault, and another machine would be no better."""
    monkeypatch.setenv("PATH", str(tmp_path))
    check = GpuCheck(expected)
    check.start()
    assert check.poll() == "" and not check.is_needed


DMESG = """\
#!/bin/sh
echo "[   50.100000] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault"
echo "[ 1234.500000] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, name=python, GPU has fallen off the bus."
echo "[ 1234.600000] eth0: link is up"
"""


def test_newest_xid_tells_what_the_driver_told_the_kernel(
    check: GpuCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
