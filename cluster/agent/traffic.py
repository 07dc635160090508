"""Counts what this machine moves that a cloud bills by amount: shared folder, internet, object store.

The kernel counts the shared folder for all processes of the machine. EFS meters a request about file data in steps of
1 KiB from 32 KiB on, and any other request as at least 4 KiB (AWS, "How Amazon EFS reports file system and object
sizes"; re:Post, "How do I estimate Elastic Throughput mode costs"). The kernel tells the sum of the bytes and not the
size of each request, so what EFS meters is bounded from above.

Nothing counts the internet alone: the messages of the trainers use the same interfaces. Its traffic therefore counts
until training may start, as everything that the interfaces have carried by then, without the shared folder.
"""

import contextlib
import math
import os
import time
from dataclasses import replace
from pathlib import Path

from cluster.state.heartbeats import MachineStatus
from infra.costs import NO_TRAFFIC, Traffic
from train.tools import host

MIN_DATA_BYTES = 32 * host.KIB  # that EFS meters of a request about file data
MEASURE_SECONDS = 600.0  # between two looks at the size of the job's folder, each of which EFS meters
METADATA_BYTES = 4 * host.KIB  # that EFS meters of any other request


class TrafficMeter:
    """The traffic of this machine since its boot. The agent of a machine continues from the status of the one before.

    `previous` is the last status that was written under this machine's name, perhaps by another machine.
    """

    def __init__(self, shared: Path, address: str, previous: MachineStatus | None) -> None:
        self.shared = shared.resolve()
        self.root = Path(os.environ.get(host.ROOT_VARIABLE, "/"))
        self.last_measure_time = -math.inf  # monotonic seconds
        self.set_up_traffic = NO_TRAFFIC  # over the internet, from the object store, and the size of the job's folder
        if previous and previous.traffic and (previous.boot_id, previous.address) == (host.boot_id(), address):
            self.set_up_traffic = replace(previous.traffic, shared_read_bytes=0, shared_written_bytes=0)

    def read(self) -> Traffic:
        """Return the traffic until now."""
        counters = host.read_nfs_counters(self.shared, self.root)
        if counters is None:
            return self.set_up_traffic
        if time.monotonic() - self.last_measure_time > MEASURE_SECONDS:
            self.last_measure_time = time.monotonic()
            stored_bytes = max(self.set_up_traffic.stored_bytes, _folder_bytes(self.shared))
            self.set_up_traffic = replace(self.set_up_traffic, stored_bytes=stored_bytes)
        reads = bound_metered_bytes(counters.read_bytes, counters.reads, counters.max_read_bytes)
        writes = bound_metered_bytes(counters.written_bytes, counters.writes, counters.max_write_bytes)
        return replace(
            self.set_up_traffic,
            shared_read_bytes=reads + counters.metadata_reads * METADATA_BYTES,
            shared_written_bytes=writes + counters.metadata_writes * METADATA_BYTES,
        )

    def count_internet(self) -> None:
        """Count what the interfaces have carried since the boot as internet traffic, unless that was done before."""
        if self.set_up_traffic.internet_bytes:
            return
        counters = host.read_nfs_counters(self.shared, self.root)
        shared_bytes = counters.read_bytes + counters.written_bytes if counters else 0
        carried_bytes = sum(sum(counts) for counts in host.read_interface_bytes(self.root).values())
        self.set_up_traffic = replace(self.set_up_traffic, internet_bytes=max(0, carried_bytes - shared_bytes))

    def count_object_reads(self, requests: int) -> None:
        """Count requests to the object store, unless that was done before."""
        if not self.set_up_traffic.object_reads:
            self.set_up_traffic = replace(self.set_up_traffic, object_reads=requests)


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder. A file that is removed meanwhile counts nothing."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += (Path(parent) / name).lstat().st_size
    return size


def bound_metered_bytes(data_bytes: int, requests: int, max_request_bytes: int) -> int:
    """Return an upper bound of the bytes that EFS meters for `requests` that transfer `data_bytes` of file data.

    EFS meters the most when as many requests as possible are as large as they may be, and all others are tiny.
    """
    return data_bytes + max(0, requests - data_bytes // max_request_bytes) * MIN_DATA_BYTES
