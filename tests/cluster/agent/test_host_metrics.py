"""Tests of the measured machine load, with made-up /proc and /sys folders, and a script as nvidia-smi."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.known import known
from support.waiting import wait_for

from cluster.agent import host_metrics
from cluster.agent.host_metrics import HostSampler
from cluster.state.heartbeats import GpuLoad, MachineLoad

GPU_LINE = "0, 97, 61234, 64, 612.50"
GPU_MEMORY_GB = 61234 * 2**20 / 1e9


class Clock:
    """A clock that stands still until a test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Host:
    """A folder that looks like the root of a machine's file system."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, Clock()

    def write(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    def write_cpu_ticks(self, *ticks: int) -> None:
        self.write("proc/stat", f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\nintr 5\n")

    def write_network_bytes(self, **interfaces: tuple[int, int]) -> None:
        lines = [
            f"{name:>6}: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0" for name, (received, sent) in interfaces.items()
        ]
        self.write("proc/net/dev", "\n".join(["Inter-|", " face |", *lines]) + "\n")

    def add_interface(self, name: str, interface_type: int = 1) -> None:
        self.write(f"sys/class/net/{name}/type", f"{interface_type}\n")
        (self.root / f"sys/class/net/{name}/device").mkdir()

    def write_port_counters(self, name: str, **counts: int) -> None:
        for file, count in counts.items():
            self.write(f"sys/class/infiniband/{name}/ports/1/{file.replace('__', '/')}", f"{count}\n")

    def sampler(self) -> HostSampler:
        return HostSampler(self.root, self.clock)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    return Host(tmp_path / "root")


# --- /proc and /sys -----------------------------------------------------------------------------------------------


def test_sample_cpu_counts_busy_ticks_since_last_call(host: Host) -> None:
    host.write_cpu_ticks(100, 0, 100, 1000, 50, 0, 0, 0, 70, 0)
    sampler = host.sampler()
    host.write_cpu_ticks(130, 5, 110, 1040, 60, 2, 2, 1, 99, 0)  # 50 of 100 ticks; a guest's 29 are in the user's
    assert sampler.sample().cpu == 50.0
    host.write_cpu_ticks(130, 5, 110, 1140, 60, 2, 2, 1, 99, 0)
    assert sampler.sample().cpu == 0.0
    assert sampler.sample().cpu is None  # no tick has passed


def test_sample_memory_is_total_minus_available_in_decimal_gb(host: Host) -> None:
    host.write("proc/meminfo", "MemTotal: 2000000 kB\nMemFree: 10 kB\nMemAvailable: 500000 kB\nBuffers: 1 kB\n")
    assert host.sampler().sample() == MachineLoad(memory_gb=1.54, memory_total_gb=2.05)


def test_sample_network_counts_physical_interfaces_only(host: Host) -> None:
    host.add_interface("eth0")
    host.add_interface("eth1")
    host.write_network_bytes(lo=(0, 0), eth0=(10**9, 0), eth1=(0, 0), docker0=(0, 0))
    sampler = host.sampler()
    host.clock.now += 2
    host.write_network_bytes(
        lo=(10**12, 10**12), eth0=(10**9 + 500_000_000, 0), eth1=(0, 250_000_000), docker0=(10**9, 10**9)
    )
    metrics = sampler.sample()
    assert (metrics.net_in_gbit, metrics.net_out_gbit) == (2.0, 1.0)
    host.clock.now += 1
    assert sampler.sample().net_in_gbit == 0.0


def test_sample_network_without_devices_counts_all_but_loopback(host: Host) -> None:
    host.write_network_bytes(lo=(0, 0), veth=(0, 0))
    sampler = host.sampler()
    host.clock.now += 1
    host.write_network_bytes(lo=(10**9, 0), veth=(125_000_000, 0))
    assert sampler.sample().net_in_gbit == 1.0


def test_sample_network_new_or_reset_interface_has_no_rate(host: Host) -> None:
    host.write_network_bytes(eth0=(10**9, 10**9))
    sampler = host.sampler()
    host.clock.now += 1
    host.write_network_bytes(eth0=(5, 5), eth1=(10**12, 10**12))
    metrics = sampler.sample()
    assert (metrics.net_in_gbit, metrics.net_out_gbit) == (0.0, 0.0)


def test_sample_network_counts_efa_bytes_and_infiniband_words(host: Host) -> None:
    for name, interface_type in (("eth0", 1), ("ib0", 32)):
        host.add_interface(name, interface_type)
    host.write_network_bytes(eth0=(0, 0), ib0=(0, 0))
    host.write_port_counters("efa_0", hw_counters__rx_bytes=0, hw_counters__tx_bytes=0)
    host.write_port_counters(
        "mlx5_0", counters__port_rcv_data=0, counters__port_xmit_data=0, hw_counters__duplicate_request=0
    )
    sampler = host.sampler()
    host.clock.now += 1
    host.write_network_bytes(eth0=(125_000_000, 0), ib0=(10**9, 10**9))  # the port counts ib0's bytes
    host.write_port_counters("efa_0", hw_counters__rx_bytes=10**9, hw_counters__tx_bytes=2 * 10**9)
    host.write_port_counters("mlx5_0", counters__port_rcv_data=10**9, counters__port_xmit_data=125_000_000)
    metrics = sampler.sample()
    assert (metrics.net_in_gbit, metrics.net_out_gbit) == (1 + 8 + 32, 16 + 4)


def test_sample_missing_sources_leave_values_unknown(host: Host) -> None:
    host.write("proc/stat", "")
    host.write("proc/meminfo", "MemTotal: many kB\n")
    sampler = host.sampler()
    host.clock.now += 1
    assert sampler.sample() == MachineLoad()


def test_sample_real_machine_takes_little_processor_time(host: Host) -> None:
    sampler = HostSampler()
    start_time = time.process_time()
    for _ in range(100):
        metrics = sampler.sample()
    assert time.process_time() - start_time < 1.0  # processor time; 0.01 s is typical
    assert known(metrics.memory_total_gb) > known(metrics.memory_gb) > 0 and known(metrics.net_in_gbit) >= 0


# --- GPUs ---------------------------------------------------------------------------------------------------------


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; it may still be a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class FakeNvidiaSmi:
    """A script called nvidia-smi, and samplers that find it. Each start is logged with its process id and arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.samplers = folder, Clock(), list[HostSampler]()

    def install(self, script: str, shell: str = "/bin/sh") -> HostSampler:
        """Write the script, and return a sampler that finds it."""
        program = self.folder / "nvidia-smi"
        program.write_text(f"#!{shell}\n{script}\n")
        program.chmod(0o755)
        self.samplers.append(HostSampler(self.folder / "root", self.clock))
        return self.samplers[-1]

    def install_logged(self, script: str) -> HostSampler:
        """Install a shell script that logs its starts."""
        return self.install(f'echo "$$ $*" >>{self.folder}/starts\n{script}')

    @property
    def starts(self) -> list[str]:
        path = self.folder / "starts"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def pids(self) -> list[int]:
        return [int(line.split()[0]) for line in self.starts]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvidiaSmi]:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake = FakeNvidiaSmi(tmp_path)
    yield fake
    for sampler in fake.samplers:
        sampler.close()
    assert all(has_ended(pid) for pid in fake.pids)


def test_gpu_sampler_leaves_out_unavailable_values(smi: FakeNvidiaSmi) -> None:
    sampler = smi.install_logged(
        f'echo "{GPU_LINE}"; echo "nonsense, 1"; echo "1, [N/A], 10, [Unknown Error], 70.1"; exec sleep 100'
    )
    readings = wait_for(lambda: [gpus for gpus in [sampler.sample().gpus] if len(gpus) == 2])[0]
    assert readings[0].memory_gb == pytest.approx(GPU_MEMORY_GB, abs=0.01)
    assert replace(readings[0], memory_gb=None) == GpuLoad(use=97.0, temperature=64.0, watts=612.5)
    assert readings[1] == GpuLoad(memory_gb=0.01, watts=70.1)
    assert smi.starts[0].split()[1:] == [
        "--query-gpu=index,utilization.gpu,memory.used,temperature.gpu,power.draw",
        *("--format=csv,noheader,nounits", "-l", "1"),
    ]


def test_gpu_sampler_keeps_newest_line_of_one_process(smi: FakeNvidiaSmi) -> None:
    sampler = smi.install_logged(
        f'echo "{GPU_LINE}"; until [ -e {smi.folder}/go ]; do sleep 0.02; done; printf "0, 1, 2, "; sleep 0.1; '
        'printf "3, 4\\n"; exec sleep 100'
    )
    wait_for(lambda: sampler.sample().gpus)
    (smi.folder / "go").touch()
    wait_for(lambda: sampler.sample().gpus == (GpuLoad(use=1.0, memory_gb=0.0, temperature=3.0, watts=4.0),))
    assert len(smi.starts) == 1


def test_gpu_sampler_reads_lines_of_buffering_program_at_once(
    smi: FakeNvidiaSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    sampler = smi.install(f"import time\nprint('{GPU_LINE}')\ntime.sleep(100)", sys.executable)
    assert wait_for(lambda: sampler.sample().gpus)[0].use == 97.0


def test_gpu_sampler_hung_process_never_blocks_and_is_replaced(smi: FakeNvidiaSmi) -> None:
    sampler = smi.install_logged(
        f'[ -e {smi.folder}/once ] || {{ touch {smi.folder}/once; exec sleep 100; }}; echo "{GPU_LINE}"; sleep 100'
    )
    for _ in range(20):
        assert sampler.sample().gpus == ()
    wait_for((smi.folder / "once").exists)
    assert not has_ended(smi.pids[0]), "a sample has waited for the end of nvidia-smi, which takes 100 s"
    smi.clock.now += host_metrics.HUNG_SECONDS + 1
    sampler.sample()
    wait_for(lambda: has_ended(smi.pids[0]))
    wait_for(lambda: sampler.sample() and sampler.gpus.process is None)
    smi.clock.now += 2
    wait_for(lambda: sampler.sample().gpus)
    assert len(smi.starts) == 2


def test_gpu_sampler_hides_stale_values(smi: FakeNvidiaSmi) -> None:
    sampler = smi.install_logged(f'echo "{GPU_LINE}"; exec sleep 100')
    wait_for(lambda: sampler.sample().gpus)
    smi.clock.now += host_metrics.STALE_SECONDS - 1
    assert sampler.sample().gpus
    smi.clock.now += 2
    assert not sampler.sample().gpus


def test_gpu_sampler_restart_delay_doubles(smi: FakeNvidiaSmi) -> None:
    sampler = smi.install_logged("exit 9")
    start_time, restart_times = smi.clock.now, []
    while smi.clock.now < start_time + 200:
        count = len(smi.starts)
        sampler.sample()
        if sampler.gpus.process is not None:
            sampler.gpus.process.wait(120)
            sampler.sample()
        if len(smi.starts) > count:
            restart_times.append(smi.clock.now - start_time)
        smi.clock.now += 1
    assert restart_times == [0, 1, 3, 7, 15, 31, 63, 123, 183]


def test_gpu_sampler_restart_delay_resets_after_long_run(smi: FakeNvidiaSmi) -> None:
    sampler = smi.install_logged(f'echo "{GPU_LINE}"; exec sleep 100')
    sampler.gpus.restart_delay = 60.0
    wait_for(lambda: sampler.sample().gpus)
    smi.clock.now += 61
    os.kill(smi.pids[0], signal.SIGKILL)
    wait_for(lambda: sampler.sample() and sampler.gpus.process is None)
    smi.clock.now += 1
    wait_for(lambda: sampler.sample() and len(smi.starts) == 2)


@pytest.mark.parametrize("content", ["not a program", "#!/nowhere/sh\n"])
def test_gpu_sampler_program_cannot_start_returns_no_gpus(smi: FakeNvidiaSmi, content: str) -> None:
    sampler = smi.install("")
    (smi.folder / "nvidia-smi").write_text(content)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        assert sampler.sample().gpus == ()
        smi.clock.now += 1
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files


def test_gpu_sampler_close_kills_process_for_good(smi: FakeNvidiaSmi) -> None:
    sampler = smi.install_logged("trap '' TERM HUP; while :; do sleep 0.1; done")
    wait_for(lambda: sampler.sample() and smi.starts)
    sampler.close()
    assert has_ended(smi.pids[0])
    sampler.close()
    smi.clock.now += 100
    assert sampler.sample().gpus == () and sampler.gpus.process is None


def test_gpu_sampler_process_dies_with_killed_parent(smi: FakeNvidiaSmi) -> None:
    smi.install_logged("exec sleep 100")
    script = "import time; from cluster.agent.host_metrics import HostSampler as S; S().sample(); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(host_metrics.__file__).parents[2])
    try:
        wait_for(lambda: smi.starts)
        assert not has_ended(smi.pids[0])
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: has_ended(smi.pids[0]))
