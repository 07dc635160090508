"""What instances move and AWS bills by the gigabyte: what EFS reads and writes, and what a NAT gateway processes.

No process of a simulated machine really uses a network file system, so a test says what a machine has moved. The cloud
bills these bytes, and the machine's kernel counts them: in files that stand for those of /proc.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from train.tools.files import write_atomic

REQUEST_BYTES = 1 << 20  # of an NFS request, as EFS's mount helper sets it
# As Linux writes them (fs/nfs/super.c, net/core/net-procfs.c), without the lines that nobody reads.
MOUNTSTATS = """\
device proc mounted on /proc with fstype proc
device 127.0.0.1:/ mounted on {point} with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.1,rsize={request_bytes},wsize={request_bytes},namlen=255,acregmin=3,acregmax=60,hard,proto=tcp
\tage:\t100
\tevents:\t4 11 0 0 0 8 12 0 0 2 0 0 0 0 0 0 0 2 0 0 0 0 0 0 0 0 0
\tbytes:\t{read} {written} 0 0 {read} {written} 0 0
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 0 0 1 0 0 95 95 0 95 0 2 0 0
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: {reads} {reads} 0 0 {read} 0 0 0 0
\t       WRITE: {writes} {writes} 0 {written} 0 0 0 0 0
"""
NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     500       1    0    0    0     0          0         0      500       1    0    0    0     0       0          0
  eth0: {received} 2    0    0    0     0          0         0 {sent} 3    0    0    0     0       0          0
"""  # noqa: E501


@dataclass(frozen=True)
class Moved:
    """The bytes that one instance has moved since its start. `internet` came in through its way to the internet."""

    efs_read: int = 0
    efs_written: int = 0
    internet: int = 0


def write_proc(root: Path, mount_point: Path, moved: Moved) -> None:
    """Write what the kernel of a machine counts below `root`, which stands for / on it."""
    read, written = moved.efs_read, moved.efs_written
    reads, writes = (math.ceil(count / REQUEST_BYTES) for count in (read, written))
    counts = {"read": read, "written": written, "reads": reads, "writes": writes}
    mountstats = MOUNTSTATS.format(point=mount_point, request_bytes=REQUEST_BYTES, **counts)
    net_dev = NET_DEV.format(received=moved.internet + read, sent=written)
    for path, text in (("proc/self/mountstats", mountstats), ("proc/net/dev", net_dev)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(root / path, text.encode(), durable=False)
