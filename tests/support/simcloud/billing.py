"""The bill of a simulated cloud: dollars by the second, for each resource from its start to its end."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class BillLine:
    """What one resource costs. Times are in seconds."""

    kind: str
    dollars_per_hour: float
    start: float
    minimum_seconds: float
    step_seconds: float = 0.0  # what is begun is billed; 0: by the second
    end: float | None = None

    def dollars(self, now: float) -> float:
        """Return the cost until now: by the second or step, but at least for the minimum time."""
        end = self.end if self.end is not None else now
        seconds = max(end - self.start, self.minimum_seconds)
        if self.step_seconds:
            seconds = math.ceil(seconds / self.step_seconds) * self.step_seconds
        return seconds / 3600 * self.dollars_per_hour


class BillingMeter:
    """Measures what the resources of a cloud cost, at prices of us-east-1."""

    ADDRESS_DOLLARS_PER_HOUR = 0.005  # public IPv4, in use or idle
    NAT_DOLLARS_PER_HOUR = 0.045
    GP3_DOLLARS_PER_GB_HOUR = 0.08 / 730
    EFS_DOLLARS_PER_GB_READ = 0.03  # elastic throughput
    EFS_DOLLARS_PER_GB_WRITTEN = 0.06
    NAT_DOLLARS_PER_GB = 0.045

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.lines: dict[str, BillLine] = {}
        self.traffic_dollars = {"efs": 0.0, "nat": 0.0}  # of what file systems and NAT gateways have moved

    def start(self, id: str, kind: str, dollars_per_hour: float, minimum: float = 0.0, step: float = 0.0) -> None:
        """Start the cost of a resource: of at least `minimum` seconds, in begun steps of `step` seconds."""
        self.lines[id] = BillLine(kind, dollars_per_hour, self.now(), minimum, step)

    def stop(self, id: str, is_free: bool = False) -> None:
        """End the cost of a resource, which is 0 if `is_free`. Does nothing for one that is unknown or has ended."""
        line = self.lines.get(id)
        if line is not None and line.end is None:
            line.end = self.now()
            line.dollars_per_hour *= not is_free

    def bill(self) -> dict[str, Any]:
        """Return the dollars until now by kind, those of instances one by one."""
        now = self.now()
        instances = {id: line.dollars(now) for id, line in self.lines.items() if line.kind == "instances"}
        others = {"volumes": 0.0, "addresses": 0.0, **self.traffic_dollars}
        for line in self.lines.values():
            if line.kind != "instances":
                others[line.kind] += line.dollars(now)
        return {"total": sum(instances.values()) + sum(others.values()), "instances": instances, **others}
