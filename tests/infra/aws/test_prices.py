"""What traffic costs, by kind."""

import pytest

from infra.aws import prices
from infra.costs import NO_TRAFFIC, Traffic

MOVED = Traffic(
    shared_read_bytes=10**9,
    shared_written_bytes=2 * 10**9,
    internet_bytes=3 * 10**9,
    home_bytes=4 * 10**9,
    object_reads=5000,
)


def test_each_kind_of_traffic_is_a_row_with_its_price() -> None:
    rows = {row.name: (row.amount, row.unit, row.price, row.dollars) for row in prices.price_traffic(MOVED, True)}
    assert rows == {
        "shared folder, read": (1.0, "GB", 0.03, 0.03),
        "shared folder, written": (2.0, "GB", 0.06, 0.12),
        "NAT gateway": (3.0, "GB", 0.045, pytest.approx(0.135)),
        "data out to this computer": (4.0, "GB", 0.09, 0.36),
        "S3": (5.0, "1000 requests", 0.0004, 0.002),
    }
    assert prices.traffic_dollars(MOVED, True) == pytest.approx(0.647)
    assert prices.traffic_dollars(MOVED, False) == pytest.approx(0.647 - 0.135), "the way in is free without a gateway"
    assert prices.price_traffic(NO_TRAFFIC, True) == ()
