"""Tests of the measured machine load, with made-up /proc and /sys folders."""

from pathlib import Path

import pytest

from cluster.agent.host_metrics import HostSampler
from cluster.state.heartbeats import MachineLoad


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
