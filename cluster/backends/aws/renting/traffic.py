"""What a rented job has moved in all its launches, by machine, in a file of the run folder.

Each machine counts since its boot and writes the count into its status, which the next machine of that name overwrites.
So the supervisor writes down the last count of each boot of each machine, and what came home to itself. A supervisor on
another computer finds the counts of the live machines in their statuses.
"""

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

from cluster.machines.fleet import Fleet
from cluster.state.heartbeats import MachineStatus, parse_status
from infra.costs import NO_TRAFFIC, Traffic
from train.tools import host
from train.tools.files import write_atomic
from train.tools.records import encode, read_record
from train.tools.text_files import to_json_bytes

TRAFFIC_FILE = "traffic.json"  # in the run folder
COUNT_SECONDS = 2.0  # between two looks at the machines' statuses
GATEWAY = "gateway "  # begins the name of a NAT gateway's counter
MAX_COUNTS = 10_000  # of one job; a machine that invents boots must not fill the disk


@dataclass(frozen=True, kw_only=True)
class TrafficCount:
    """What one counter has counted, and when it was first and last read (seconds since 1970)."""

    first: float
    last: float
    traffic: Traffic

    def until(self, moment: float) -> Traffic:
        """Return what was counted until `moment`, as if it had come evenly."""
        if moment >= self.last:
            return self.traffic
        if moment <= self.first:
            return NO_TRAFFIC
        return self.traffic.scaled((moment - self.first) / (self.last - self.first))


@dataclass(frozen=True, kw_only=True)
class TrafficRecord:
    """All counts of a job, by counter: a boot of a machine, a supervisor, or a NAT gateway."""

    counts: dict[str, TrafficCount] = field(default_factory=dict)

    def until(self, moment: float) -> Traffic:
        """Return what the job had moved at `moment`. The internet counts by its gateways where they have more."""
        moved, by_gateways = NO_TRAFFIC, 0
        for counter, count in self.counts.items():
            if counter.startswith(GATEWAY):
                by_gateways += count.until(moment).internet_bytes
            else:
                moved += count.until(moment)
        return replace(moved, internet_bytes=max(moved.internet_bytes, by_gateways))


def read_traffic(run_path: Path) -> TrafficRecord:
    """Return what a job has moved, by the file in its run folder. Raises `DamagedRecord`."""
    return read_record(run_path / TRAFFIC_FILE, TrafficRecord) or TrafficRecord()


class TrafficLog:
    """The file, as the job's supervisor writes it."""

    def __init__(self, run_path: Path) -> None:
        self.run_path = run_path
        self.counts = read_traffic(run_path).counts
        self.written_counts = dict(self.counts)
        self.own_name = f"supervisor {uuid4().hex}"
        self.former_home_bytes = 0  # over connections to machines that the job has left
        self.last_count_time = 0.0  # monotonic seconds

    def count(self, fleet: Fleet, gateway_bytes: Mapping[str, int], is_last: bool = False) -> None:
        """Take over what a fleet's machines have reported, not at every call unless this is the last one.

        `gateway_bytes` are what the job's NAT gateways have processed, by their IDs.
        """
        now = time.monotonic()
        if not (is_last or now - self.last_count_time > COUNT_SECONDS):
            return
        self.last_count_time = now
        statuses = [parse_status(content) for content, _ in fleet.mirror.last_status.values()]
        with contextlib.suppress(OSError):  # a full disk: a later call writes it
            self.update(filter(None, statuses), fleet.received_bytes, host.unix_time(), gateway_bytes)

    def leave(self, fleet: Fleet, gateway_bytes: Mapping[str, int]) -> None:
        """Take over what a fleet's machines have reported, for the last time: the job moves to others."""
        self.count(fleet, gateway_bytes, is_last=True)
        self.former_home_bytes += fleet.received_bytes

    def update(
        self,
        statuses: Iterable[MachineStatus],
        home_bytes: int,
        now: float,
        gateway_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Take over the counts of machines and gateways, and what came home. Raises `OSError` when the disk is full."""
        for gateway, processed_bytes in gateway_bytes.items():
            self._note(f"{GATEWAY}{gateway}", Traffic(internet_bytes=processed_bytes), now)
        for status in statuses:
            if status.traffic:
                self._note(f"{status.address} {status.boot_id}", status.traffic, now)
        if home_bytes := self.former_home_bytes + home_bytes:
            self._note(self.own_name, Traffic(home_bytes=home_bytes), now)
        if self.counts != self.written_counts:
            content = to_json_bytes(encode(TrafficRecord(counts=self.counts)))
            write_atomic(self.run_path / TRAFFIC_FILE, content)
            self.written_counts = dict(self.counts)

    def _note(self, counter: str, traffic: Traffic, now: float) -> None:
        """Note the count of a counter. It counts as read now when it has grown."""
        known = self.counts.get(counter)
        if known is None and len(self.counts) < MAX_COUNTS:
            self.counts[counter] = TrafficCount(first=now, last=now, traffic=traffic)
        elif known and (grown := known.traffic.max_with(traffic)) != known.traffic:
            self.counts[counter] = replace(known, last=now, traffic=grown)
