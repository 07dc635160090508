"""Tests of the measured machine load, with made-up /proc and /sys folders, and a script as nvidia-smi."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import wait_for

from cluster.agent import gpus
from cluster.agent.host_metrics import HostSampler
from cluster.state.heartbeats import GpuLoad, MachineLoad


class Host:
    """A folder that looks like the root of a machine's file system, and a clock that stands still."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 1000.0

    def write(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    def write_cpu_ticks(self, *ticks: int) -> None:
        self.write("proc/stat", f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\nintr 5\n")

    def write_network_bytes(self, counts: dict[str, tuple[int, int]]) -> None:
        """Write what interfaces, and the ports of network adapters that bypass the kernel, have received and sent."""
        files = {"efa_0": ("hw_counters/rx_bytes", "hw_counters/tx_bytes"),
                 "mlx5_0": ("counters/port_rcv_data", "counters/port_xmit_data")}  # fmt: skip
        for name in files.keys() & counts.keys():
            for file, count in zip(files[name], counts[name], strict=True):
                self.write(f"sys/class/infiniband/{name}/ports/1/{file}", f"{count}\n")
        interfaces = {name: pair for name, pair in counts.items() if name not in files}
        lines = [f"{name:>6}: {pair[0]} 1 0 0 0 0 0 0 {pair[1]} 1 0" for name, pair in interfaces.items()]
        self.write("proc/net/dev", "\n".join(["Inter-|", " face |", *lines]) + "\n")

    def add_devices(self, *names: str) -> None:
        for name in names:
            (self.root / f"sys/class/net/{name}/device").mkdir(parents=True)

    def sampler(self) -> HostSampler:
        return HostSampler(self.root, lambda: self.now)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    return Host(tmp_path / "root")


def test_sample_cpu_counts_busy_ticks_since_last_call(host: Host) -> None:
    host.write_cpu_ticks(100, 0, 100, 1000, 50, 0, 0, 0, 70, 0)
    sampler = host.sampler()
    host.write_cpu_ticks(130, 5, 110, 1040, 60, 2, 2, 1, 99, 0)  # 50 of 100 ticks; a guest's 29 are in the user's
    assert sampler.sample().cpu == 50.0
    host.write_cpu_ticks(130, 5, 110, 1140, 60, 2, 2, 1, 99, 0)
    assert sampler.sample().cpu == 0.0
    assert sampler.sample().cpu is None  # no tick has passed


Counts = dict[str, tuple[int, int]]
ETH, IB = (10**9, 10**9), {"ib0": (10**9, 10**9)}


@pytest.mark.parametrize("devices, before, after, rates", [
    pytest.param(("eth0", "eth1"), {"eth0": (10**9, 0), "eth1": (0, 0), "docker0": (0, 0)},
                 {"lo": (10**12, 0), "eth0": (1_250_000_000, 0), "eth1": (0, 125_000_000), "docker0": ETH}, (2, 1),
                 id="physical interfaces"),
    pytest.param((), {"lo": (0, 0), "veth": (0, 0)}, {"lo": ETH, "veth": (125_000_000, 0)}, (1, 0), id="veth"),
    pytest.param((), {"eth0": ETH}, {"eth0": (5, 5), "eth1": (10**12, 10**12)}, (0, 0), id="reset, new"),
    # The port of InfiniBand counts words of four bytes, among them those of ib0.
    pytest.param(("eth0", "ib0"), {"eth0": (0, 0), "ib0": (0, 0), "efa_0": (0, 0), "mlx5_0": (0, 0)},
                 {"eth0": (125_000_000, 0), **IB, "efa_0": (10**9, 2 * 10**9), "mlx5_0": (10**9, 125_000_000)},
                 (1 + 8 + 32, 16 + 4), id="EFA and InfiniBand"),
])  # fmt: skip
def test_sample_network_rates(
    host: Host, devices: tuple[str, ...], before: Counts, after: Counts, rates: tuple[int, int]
) -> None:
    host.add_devices(*devices)
    host.write_network_bytes(before)
    sampler = host.sampler()
    host.now += 1
    host.write_network_bytes(after)
    load = sampler.sample()
    assert (load.net_in_gbit, load.net_out_gbit) == rates
    host.now += 1
    assert sampler.sample().net_in_gbit == 0.0


def test_sample_memory_is_total_minus_available_and_other_values_unknown_without_sources(host: Host) -> None:
    host.write("proc/meminfo", "MemTotal: 2000000 kB\nMemFree: 10 kB\nMemAvailable: 500000 kB\nBuffers: 1 kB\n")
    assert host.sampler().sample() == MachineLoad(memory_gb=1.54, memory_total_gb=2.05)
    host.write("proc/stat", "")
    host.write("proc/meminfo", "MemTotal: many kB\n")
    sampler = host.sampler()
    host.now += 1
    assert sampler.sample() == MachineLoad()


class FakeNvidiaSmi:
    """A shell script as nvidia-smi, which logs its starts, and a sampler that finds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0

    def install(self, script: str) -> HostSampler:
        program = self.folder / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$*" >>{self.folder}/starts\n{script}\n')
        program.chmod(0o755)
        self.sampler = HostSampler(self.folder / "root", lambda: self.now)
        return self.sampler

    @property
    def starts(self) -> list[str]:
        path = self.folder / "starts"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvidiaSmi]:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake = FakeNvidiaSmi(tmp_path)
    yield fake
    fake.sampler.gpus.close()


def test_gpus_are_those_of_the_newest_lines_and_become_stale_while_nvidia_smi_hangs(smi: FakeNvidiaSmi) -> None:
    lines = 'echo "0, 97, 61234, 64, 612.50"; echo nonsense; echo "1, [N/A], 10, [Unknown Error], 70.1"'
    wait_for_go = 'until [ -e "$(dirname "$0")/go" ]; do sleep 0.01; done'
    sampler = smi.install(f'{lines}; {wait_for_go}; printf "0, 1, 2, "; sleep 0.1; echo "3, 4"; exec sleep 100')
    first, second = wait_for(lambda: (gpus := sampler.sample().gpus)[1:] and gpus)
    assert first == GpuLoad(use=97.0, memory_gb=64.21, temperature=64.0, watts=612.5)
    assert second == GpuLoad(memory_gb=0.01, watts=70.1)
    smi.now += gpus.STALE_SECONDS
    assert sampler.sample().gpus == ()
    (smi.folder / "go").touch()
    assert wait_for(lambda: sampler.sample().gpus) == (GpuLoad(use=1.0, memory_gb=0.0, temperature=3.0, watts=4.0),)
    query = "--query-gpu=index,utilization.gpu,memory.used,temperature.gpu,power.draw"
    assert smi.starts == [f"{query} --format=csv,noheader,nounits -l 5"], "it is started once"


@pytest.mark.parametrize("content", ["not a program", "#!/nowhere/sh\n", "#!/bin/sh\nexit 9\n"])
def test_gpus_of_an_nvidia_smi_that_fails_are_none_until_it_works(smi: FakeNvidiaSmi, content: str) -> None:
    sampler = smi.install("")
    (smi.folder / "nvidia-smi").write_text(content)
    for _ in range(3):
        assert sampler.sample().gpus == ()
        if sampler.gpus.nvidia_smi.process:
            sampler.gpus.nvidia_smi.process.wait()
        smi.now += gpus.QUERY_SECONDS
    (smi.folder / "nvidia-smi").write_text('#!/bin/sh\nprintf "0, 1, 2, 3, 4"\n')  # without the end of the line
    wait_for(lambda: sampler.sample().gpus)


def test_close_kills_nvidia_smi_for_good(smi: FakeNvidiaSmi) -> None:
    sampler = smi.install("trap '' TERM HUP; while :; do sleep 0.1; done")
    wait_for(lambda: sampler.sample() and smi.starts)
    process = sampler.gpus.nvidia_smi.process
    sampler.gpus.close()
    assert process and process.poll() is not None
    smi.now += 100
    assert sampler.sample().gpus == () and len(smi.starts) == 1
