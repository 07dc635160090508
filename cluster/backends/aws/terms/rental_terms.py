"""What a job may rent and spend, as a tag of its instances. A computer that adopts the job obeys these terms.

The terms are not read from the job's description in the shared folder, because each of the job's machines can change
that. Tags can be written by the account only.
"""

import json
from dataclasses import dataclass
from typing import Self

from infra.aws.launch_request import Internet
from infra.costs import TrafficForecast
from train.tools.records import decode_json, encode


@dataclass(frozen=True, kw_only=True)
class RentalTerms:
    """What a job may rent and spend. Times are in seconds since 1970.

    `exchanges` is the number of machines of this launch that may still be exchanged. `spent` is the job's cost in
    dollars until the time `at`. `start` is when the first machine of this launch was granted, None in the request for
    it.
    """

    machines: int
    spares: int
    exchanges: int
    hours: float | None
    dollars: float | None
    spent: float
    at: float
    start: float | None
    internet: Internet
    on_demand_spares: int = 0
    late_spares: int = 0
    traffic: tuple[float, float] = (0.0, 0.0)  # expected dollars: once, and per hour

    def to_tag(self) -> str:
        """Return the tag's value, which has at most 256 characters (AWS, "Tag restrictions")."""
        return json.dumps(encode(self), separators=(",", ":"))

    @classmethod
    def from_tag(cls, text: str) -> Self:
        """Return the terms of a tag's value. Raises `DamagedRecord`."""
        return decode_json(cls, text.encode(), "the tag imgnet:terms")

    @property
    def expected_traffic(self) -> TrafficForecast:
        """What the traffic of a launch is expected to cost."""
        dollars_once, dollars_per_hour = self.traffic
        return TrafficForecast(dollars_once=dollars_once, dollars_per_hour=dollars_per_hour)
