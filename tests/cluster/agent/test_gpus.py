"""The GPUs of a machine, with an nvidia-smi whose GPUs can be lost and whose driver can hang."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.simcloud.gpus import break_gpu, install_gpus
from support.waiting import wait_for

from cluster.agent.host_metrics import ANSWER_SECONDS, QUERY_SECONDS, STALE_SECONDS, Gpus
from cluster.state.heartbeats import GpuLoad


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Gpus]:
    """A machine with two simulated GPUs. Its clock stands still."""
    install_gpus(tmp_path, tmp_path, 2)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = Gpus(clock)
    yield gpus
    gpus.close()


def answer(gpus: Gpus) -> str:
    gpus.start_check()
    (problem,) = wait_for(lambda: [answer for answer in (gpus.poll_check(),) if answer is not None])
    assert gpus.poll_check() == "", "a problem is told once"
    return str(problem)


def test_gpu_that_is_lost_after_the_first_check_is_found(gpus: Gpus, tmp_path: Path) -> None:
    assert answer(gpus) == "" and gpus.is_check_needed
    break_gpu(tmp_path, [], "lost")
    assert answer(gpus).startswith("1 of 2 GPUs answer (nvidia-smi: Unable to determine the device handle for GPU")


@pytest.mark.parametrize("has_answered", [True, False])
def test_driver_that_hangs_is_found_without_waiting(
    gpus: Gpus, clock: Clock, tmp_path: Path, has_answered: bool
) -> None:
    """One that never answered is no loss: a computer may train on its processors beside it."""
    assert not has_answered or answer(gpus) == ""
    break_gpu(tmp_path, [], "hangs")
    gpus.start_check()
    clock.now += ANSWER_SECONDS - 1
    assert gpus.poll_check() is None
    process = gpus.process
    clock.now += 2
    assert gpus.poll_check() == ("0 of 2 GPUs answer (nvidia-smi: no answer in 60 s)" if has_answered else "")
    assert process is not None and process.poll() is not None and gpus.is_check_needed == has_answered


@pytest.mark.parametrize("expected", [0, 8])
def test_machine_without_nvidia_smi_is_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: int) -> None:
    """Then its image is at fault, and another machine would be no better."""
    monkeypatch.setenv("PATH", str(tmp_path))
    gpus = Gpus()
    gpus.expected = expected
    gpus.start_check()
    assert gpus.poll_check() == "" and not gpus.is_check_needed and gpus.read_loads() == ()


def install(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho >>'{folder}/starts'\n{script}\n")


ROWS = """\
echo "1, GPU-b, [N/A], 10, [Unknown Error], 70.1"
echo "0, GPU-a, 97, 61234, 64, 612.50"
echo nonsense
"""


def test_loads_are_those_of_the_last_answer_and_become_stale_while_nvidia_smi_hangs(
    gpus: Gpus, clock: Clock, tmp_path: Path
) -> None:
    install(tmp_path, ROWS)
    first, second = wait_for(gpus.read_loads)
    assert first == GpuLoad(use=97.0, memory_gb=64.21, temperature=64.0, watts=612.5)
    assert second == GpuLoad(memory_gb=0.01, watts=70.1)
    install(tmp_path, "exec sleep 100")
    clock.now += QUERY_SECONDS
    assert len(gpus.read_loads()) == 2
    clock.now += STALE_SECONDS
    assert gpus.read_loads() == () == gpus.read_loads()
    wait_for(lambda: (tmp_path / "starts").read_text() == "\n\n")  # a run that hangs is not started again
    process = gpus.process
    gpus.close()
    clock.now += QUERY_SECONDS
    assert process and process.poll() is not None and gpus.read_loads() == () and gpus.process is None


@pytest.mark.parametrize("content", ["not a program", "#!/nowhere/sh\n", "#!/bin/sh\nexit 9\n"])
def test_nvidia_smi_that_fails_is_started_again(gpus: Gpus, clock: Clock, tmp_path: Path, content: str) -> None:
    (tmp_path / "nvidia-smi").write_text(content)
    for _ in range(3):
        assert gpus.read_loads() == ()
        if gpus.process:
            gpus.process.wait()
        clock.now += QUERY_SECONDS
    install(tmp_path, ROWS)
    assert wait_for(gpus.read_loads)


DMESG = """\
#!/bin/sh
echo "[   50.100000] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault"
echo "[ 1234.500000] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, name=python, GPU has fallen off the bus."
echo "[ 1234.600000] eth0: link is up"
"""


def test_newest_xid_tells_what_the_driver_told_the_kernel(
    gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dmesg").write_text(DMESG)
    (tmp_path / "dmesg").chmod(0o755)
    xid = "kernel: Xid (PCI:0000:3b:00): 79, pid=12, name=python, GPU has fallen off the bus."
    assert gpus.newest_xid(since=100.0) == xid and gpus.newest_xid(since=2000.0) == ""
    (tmp_path / "dmesg").write_text(
        "#!/bin/sh\necho 'dmesg: read kernel buffer failed: Operation not permitted' >&2\nexit 1\n"
    )
    assert gpus.newest_xid(since=100.0) == ""
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus.newest_xid(since=100.0) == ""
