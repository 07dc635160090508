"""Dollars: what runs, by the second, each thing from its start to its end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class Line:
    """One thing on the bill."""

    kind: str
    hourly: float
    start: float
    minimum: float
    end: float | None = None

    def dollars(self, now: float) -> float:
        """What it has cost: by the second, at least the minimum of seconds."""
        seconds = max((self.end if self.end is not None else now) - self.start, self.minimum)
        return seconds / 3600 * self.hourly


class Meter:
    """The bill of a cloud. Prices of us-east-1 in dollars an hour (a month has 730 hours)."""

    ADDRESS = 0.005  # public IPv4, in use or idle
    GB: ClassVar[dict[str, float]] = {"gp3": 0.08 / 730, "gp2": 0.10 / 730, "io2": 0.125 / 730, "standard": 0.05 / 730}
    EFS_GB = 0.30 / 730
    EFS_MIBPS = 6.0 / 730  # provisioned throughput

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.lines: dict[str, Line] = {}

    def start(self, id: str, kind: str, hourly: float, minimum: float = 0.0) -> None:
        """A thing of this kind begins to cost."""
        self.lines[id] = Line(kind, hourly, self.now(), minimum)

    def stop(self, id: str) -> None:
        """It costs no more. An unknown or ended thing: nothing."""
        line = self.lines.get(id)
        if line is not None and line.end is None:
            line.end = self.now()

    def volume(self, volume: Any) -> None:
        """A disk begins to cost."""
        self.start(volume.id, "volumes", self.GB.get(volume.volume_type, 0.1 / 730) * int(volume.size), 60.0)

    def bill(self) -> dict[str, Any]:
        """Dollars until now, by kind; of instances one by one."""
        now = self.now()
        kinds: dict[str, Any] = {"instances": {}, "volumes": 0.0, "addresses": 0.0, "efs": 0.0}
        for id, line in self.lines.items():
            if line.kind == "instances":
                kinds["instances"][id] = line.dollars(now)
            else:
                kinds[line.kind] += line.dollars(now)
        rest = sum(value for kind, value in kinds.items() if kind != "instances")
        return {"total": sum(kinds["instances"].values()) + rest, **kinds}
