"""Tests of the readers of this machine's memory, network counters and GPUs, with made-up /proc folders."""

from pathlib import Path

from train.tools import host

NETWORK_TABLE = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     500       1    0    0    0     0          0         0      500       1    0    0    0     0       0          0
  eth0:    1000       2    0    0    0     0          0         0     2000       3    0    0    0     0       0          0
docker0:3000       2    0    0    0     0          0         0     4000       3    0    0    0     0       0          0
"""  # noqa: E501


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_read_memory_counts_kib(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 2000000 kB\nMemFree: 10 kB\nMemAvailable: 500000 kB\nBuffers: 1 kB\n")
    assert host.read_memory(tmp_path) == host.Memory(total_gb=2.048, available_gb=0.512)


def test_read_memory_is_none_where_it_is_unknown(tmp_path: Path) -> None:
    assert host.read_memory(tmp_path) is None
    for text in ("", "MemTotal: many kB\n", "MemTotal: 2000000 kB\nMemFree: 10 kB\n"):
        write(tmp_path, "proc/meminfo", text)
        assert host.read_memory(tmp_path) is None


def test_read_memory_of_this_machine() -> None:
    memory = host.read_memory()
    assert memory and 0 < memory.available_gb <= memory.total_gb < 1e5


def test_read_interface_bytes_leaves_out_the_loopback(tmp_path: Path) -> None:
    assert host.read_interface_bytes(tmp_path) == {}
    write(tmp_path, "proc/net/dev", NETWORK_TABLE)
    assert host.read_interface_bytes(tmp_path) == {"eth0": (1000, 2000), "docker0": (3000, 4000)}


def test_gpu_query_command_and_cells() -> None:
    command = host.gpu_query_command(["index", "name"], "-l", "1", program="/bin/nvidia-smi")
    assert command == ["/bin/nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader,nounits", "-l", "1"]
    assert host.gpu_query_cells("0, Tesla V100, [N/A]") == ["0", "Tesla V100", "[N/A]"]
