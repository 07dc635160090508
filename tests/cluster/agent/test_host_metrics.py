"""What a machine says of its own use: from made-up /proc and /sys folders, and from an nvidia-smi that is a script."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.agent import host_metrics
from cluster.agent.host_metrics import HostSampler

ROW = "0, 97, 61234, 64, 612.50"
MEMORY = 61234 * 2**20 / 1e9


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Host:
    """A folder that looks like / of a machine."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, Clock()

    def write(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    def stat(self, *ticks: int) -> None:
        self.write("proc/stat", f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\nintr 5\n")

    def net(self, **cards: tuple[int, int]) -> None:
        lines = [f"{name:>6}: {got} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0" for name, (got, sent) in cards.items()]
        self.write("proc/net/dev", "\n".join(["Inter-|", " face |", *lines]) + "\n")

    def card(self, name: str, kind: int = 1) -> None:
        self.write(f"sys/class/net/{name}/type", f"{kind}\n")
        (self.root / f"sys/class/net/{name}/device").mkdir()

    def port(self, name: str, **counts: int) -> None:
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
    host.stat(100, 0, 100, 1000, 50, 0, 0, 0, 70, 0)
    sampler = host.sampler()
    host.stat(130, 5, 110, 1040, 60, 2, 2, 1, 99, 0)  # 50 of 100 ticks; a guest's 29 are in the user's
    assert sampler.sample()["cpu"] == 50.0
    host.stat(130, 5, 110, 1140, 60, 2, 2, 1, 99, 0)
    assert sampler.sample()["cpu"] == 0.0
    assert "cpu" not in sampler.sample()  # no tick has passed


def test_sample_memory_is_total_minus_available_in_decimal_gb(host: Host) -> None:
    host.write("proc/meminfo", "MemTotal: 2000000 kB\nMemFree: 10 kB\nMemAvailable: 500000 kB\nBuffers: 1 kB\n")
    assert host.sampler().sample() == {"memory_gb": 1.54, "memory_total_gb": 2.05, "gpus": []}


def test_sample_network_counts_physical_interfaces_only(host: Host) -> None:
    host.card("eth0")
    host.card("eth1")
    host.net(lo=(0, 0), eth0=(10**9, 0), eth1=(0, 0), docker0=(0, 0))
    sampler = host.sampler()
    host.clock.now += 2
    host.net(lo=(10**12, 10**12), eth0=(10**9 + 500_000_000, 0), eth1=(0, 250_000_000), docker0=(10**9, 10**9))
    said = sampler.sample()
    assert (said["net_in_gbit"], said["net_out_gbit"]) == (2.0, 1.0)
    host.clock.now += 1
    assert sampler.sample()["net_in_gbit"] == 0.0


def test_sample_network_without_devices_counts_all_but_loopback(host: Host) -> None:
    host.net(lo=(0, 0), veth=(0, 0))
    sampler = host.sampler()
    host.clock.now += 1
    host.net(lo=(10**9, 0), veth=(125_000_000, 0))
    assert sampler.sample()["net_in_gbit"] == 1.0


def test_sample_network_new_or_reset_interface_has_no_rate(host: Host) -> None:
    host.net(eth0=(10**9, 10**9))
    sampler = host.sampler()
    host.clock.now += 1
    host.net(eth0=(5, 5), eth1=(10**12, 10**12))
    said = sampler.sample()
    assert (said["net_in_gbit"], said["net_out_gbit"]) == (0.0, 0.0)


def test_sample_network_counts_efa_bytes_and_infiniband_words(host: Host) -> None:
    for name, kind in (("eth0", 1), ("ib0", 32)):
        host.card(name, kind)
    host.net(eth0=(0, 0), ib0=(0, 0))
    host.port("efa_0", hw_counters__rx_bytes=0, hw_counters__tx_bytes=0)
    host.port("mlx5_0", counters__port_rcv_data=0, counters__port_xmit_data=0, hw_counters__duplicate_request=0)
    sampler = host.sampler()
    host.clock.now += 1
    host.net(eth0=(125_000_000, 0), ib0=(10**9, 10**9))  # the port counts ib0's bytes
    host.port("efa_0", hw_counters__rx_bytes=10**9, hw_counters__tx_bytes=2 * 10**9)
    host.port("mlx5_0", counters__port_rcv_data=10**9, counters__port_xmit_data=125_000_000)
    said = sampler.sample()
    assert (said["net_in_gbit"], said["net_out_gbit"]) == (1 + 8 + 32, 16 + 4)


def test_sample_missing_sources_leave_out_keys(host: Host) -> None:
    host.write("proc/stat", "")
    host.write("proc/meminfo", "MemTotal: many kB\n")
    sampler = host.sampler()
    host.clock.now += 1
    assert sampler.sample() == {"gpus": []}


def test_sample_real_machine_has_memory_and_network(host: Host) -> None:
    sampler = HostSampler()
    begun = time.process_time()
    for _ in range(100):
        said = sampler.sample()
    assert time.process_time() - begun < 1.0  # 0.01 here
    assert said["memory_total_gb"] > said["memory_gb"] > 0 and said["net_in_gbit"] >= 0


# --- GPUs ---------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], Any]) -> Any:
    """What the condition gave as soon as it is true; a failure after 30 seconds."""
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline, "not true after 30 s"
        time.sleep(0.01)
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Smi:
    """A script called nvidia-smi, and samplers that find it; it notes its process and words each time it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.samplers = folder, Clock(), list[HostSampler]()

    def says(self, script: str, shell: str = "/bin/sh") -> HostSampler:
        program = self.folder / "nvidia-smi"
        program.write_text(f"#!{shell}\n{script}\n")
        program.chmod(0o755)
        self.samplers.append(HostSampler(self.folder / "root", self.clock))
        return self.samplers[-1]

    def shell(self, script: str) -> HostSampler:
        return self.says(f'echo "$$ $*" >>{self.folder}/starts\n{script}')

    @property
    def starts(self) -> list[str]:
        path = self.folder / "starts"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def pids(self) -> list[int]:
        return [int(line.split()[0]) for line in self.starts]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Smi]:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    one = Smi(tmp_path)
    yield one
    for sampler in one.samplers:
        sampler.close()
    assert all(gone(pid) for pid in one.pids)


def test_gpu_sampler_leaves_out_unavailable_values(smi: Smi) -> None:
    sampler = smi.shell(f'echo "{ROW}"; echo "nonsense, 1"; echo "1, [N/A], 10, [Unknown Error], 70.1"; exec sleep 100')
    found = until(lambda: [gpus for gpus in [sampler.sample()["gpus"]] if len(gpus) == 2])[0]
    assert found[0] == {"use": 97.0, "memory_gb": pytest.approx(MEMORY, abs=0.01), "temperature": 64.0, "watts": 612.5}
    assert found[1] == {"memory_gb": 0.01, "watts": 70.1}
    assert smi.starts[0].split()[1:] == [
        "--query-gpu=index,utilization.gpu,memory.used,temperature.gpu,power.draw",
        *("--format=csv,noheader,nounits", "-l", "1"),
    ]


def test_gpu_sampler_keeps_newest_line_of_one_process(smi: Smi) -> None:
    sampler = smi.shell(
        f'echo "{ROW}"; until [ -e {smi.folder}/go ]; do sleep 0.02; done; printf "0, 1, 2, "; sleep 0.1; '
        'printf "3, 4\\n"; exec sleep 100'
    )
    until(lambda: sampler.sample()["gpus"])
    (smi.folder / "go").touch()
    until(lambda: sampler.sample()["gpus"] == [{"use": 1.0, "memory_gb": 0.0, "temperature": 3.0, "watts": 4.0}])
    assert len(smi.starts) == 1


def test_gpu_sampler_reads_lines_of_buffering_program_at_once(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    sampler = smi.says(f"import time\nprint('{ROW}')\ntime.sleep(100)", sys.executable)
    assert until(lambda: sampler.sample()["gpus"])[0]["use"] == 97.0


def test_gpu_sampler_hung_process_never_blocks_and_is_replaced(smi: Smi) -> None:
    sampler = smi.shell(
        f'[ -e {smi.folder}/once ] || {{ touch {smi.folder}/once; exec sleep 100; }}; echo "{ROW}"; sleep 100'
    )
    begun = time.monotonic()
    for _ in range(20):
        assert sampler.sample()["gpus"] == []
    assert time.monotonic() - begun < 5  # 0.01 here
    until((smi.folder / "once").exists)
    smi.clock.now += host_metrics.HUNG_SECONDS + 1
    sampler.sample()
    until(lambda: gone(smi.pids[0]))
    until(lambda: sampler.sample() and sampler.gpus.process is None)
    smi.clock.now += 2
    until(lambda: sampler.sample()["gpus"])
    assert len(smi.starts) == 2


def test_gpu_sampler_hides_stale_values(smi: Smi) -> None:
    sampler = smi.shell(f'echo "{ROW}"; exec sleep 100')
    until(lambda: sampler.sample()["gpus"])
    smi.clock.now += host_metrics.STALE_SECONDS - 1
    assert sampler.sample()["gpus"]
    smi.clock.now += 2
    assert not sampler.sample()["gpus"]


def test_gpu_sampler_restart_delay_doubles(smi: Smi) -> None:
    sampler = smi.shell("exit 9")
    begun, times = smi.clock.now, []
    while smi.clock.now < begun + 200:
        count = len(smi.starts)
        sampler.sample()
        if sampler.gpus.process is not None:
            sampler.gpus.process.wait(30)
            sampler.sample()
        if len(smi.starts) > count:
            times.append(smi.clock.now - begun)
        smi.clock.now += 1
    assert times == [0, 1, 3, 7, 15, 31, 63, 123, 183]


def test_gpu_sampler_restart_delay_resets_after_long_run(smi: Smi) -> None:
    sampler = smi.shell(f'echo "{ROW}"; exec sleep 100')
    sampler.gpus.restart_delay = 60.0
    until(lambda: sampler.sample()["gpus"])
    smi.clock.now += 61
    os.kill(smi.pids[0], signal.SIGKILL)
    until(lambda: sampler.sample() and sampler.gpus.process is None)
    smi.clock.now += 1
    until(lambda: sampler.sample() and len(smi.starts) == 2)


@pytest.mark.parametrize("content", ["not a program", "#!/nowhere/sh\n"])
def test_gpu_sampler_program_cannot_start_returns_no_gpus(smi: Smi, content: str) -> None:
    sampler = smi.says("")
    (smi.folder / "nvidia-smi").write_text(content)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        assert sampler.sample()["gpus"] == []
        smi.clock.now += 1
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files


def test_gpu_sampler_close_kills_process_for_good(smi: Smi) -> None:
    sampler = smi.shell("trap '' TERM HUP; while :; do sleep 0.1; done")
    until(lambda: sampler.sample() and smi.starts)
    sampler.close()
    assert gone(smi.pids[0])
    sampler.close()
    smi.clock.now += 100
    assert sampler.sample()["gpus"] == [] and sampler.gpus.process is None


def test_gpu_sampler_process_dies_with_killed_parent(smi: Smi) -> None:
    smi.shell("exec sleep 100")
    ours = "import time; from cluster.agent.host_metrics import HostSampler; s = HostSampler(); s.sample(); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", ours], cwd=Path(host_metrics.__file__).parents[2])
    try:
        until(lambda: smi.starts)
        assert not gone(smi.pids[0])
    finally:
        process.kill()
        process.wait()
    until(lambda: gone(smi.pids[0]))
