"""Reservations and capacity blocks with the simulated EC2: which are usable, why not, and which can be bought."""

import shlex
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator
from support.error_lines import error_line
from support.simcloud.http_server import AwsFrontend
from support.simcloud.in_process import shared_account

from infra.aws.market import reservations
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.market.reservations import Reservation, find_reservation
from infra.errors import CloudError, NoMachines

ZONE, TYPE = "us-east-1a", "p5.48xlarge"
START = 1_795_291_200.0  # 2026-11-21 20:00 UTC
HOUR = 3600.0
GROUP = "arn:aws:resource-groups:us-east-1:123456789012:group/mine"


@pytest.fixture(autouse=True)
def clock(front: AwsFrontend) -> None:
    """It is 20:00."""
    front.sim.clock = lambda: START


def find(id: str, *regions: str, now: float = START, **wishes: Any) -> Reservation:
    return find_reservation(shared_account(), regions or ("us-east-1",), id, now, **wishes)


def refusal(id: str, *regions: str, **wishes: Any) -> str:
    """Return why no machine can be launched in a reservation: one line that begins with its ID."""
    text = error_line(NoMachines, find, id, *regions, **wishes)
    assert text.startswith(f"{id}: ")
    return text.removeprefix(f"{id}: ")


def reserve_block(front: AwsFrontend, count: int = 4, hours: float = 24.0, **details: Any) -> str:
    return front.sim.reserve(TYPE, ZONE, count, **{"is_block": True, "end": START + hours * HOUR, **details})


def test_unknown_reservation_is_refused(front: AwsFrontend) -> None:
    id = front.sim.reserve(TYPE, "us-west-2a", 2)
    assert refusal(id).startswith("this account has no such reservation in us-east-1; list yours: aws ec2 describe-")
    assert find(id, "us-east-1", "us-west-2").region == "us-west-2"


def test_lookup_that_is_not_permitted_is_no_unknown_reservation(front: AwsFrontend) -> None:
    front.sim.policy = {"Version": "2012-10-17", "Statement": []}
    with pytest.raises(CloudError, match=r"ec2:DescribeCapacityReservations.*not permitted") as caught:
        find("cr-0123456789abcdef0")
    assert not isinstance(caught.value, NoMachines)


NEXT_STEP = "; list what can be bought: imgnet-cluster offers --capacity-blocks"


@pytest.mark.parametrize(("details", "reason"), [
    ({"interruptible": True}, "EC2 may interrupt its machines (an interruptible reservation)"),
    ({"tenancy": "dedicated"}, "its tenancy is dedicated"),
    ({"platform": "Windows"}, "its platform is Windows"),
    ({"placement_group": "theirs", "placement_group_owner": "999999999999"},
     "its placement group belongs to another account, which is not supported"),
    ({"state": "payment-pending"}, "it is not active yet (payment-pending)"),
    ({"start": START + 15.5 * HOUR, "hours": 39.5},
     "it is not active yet (scheduled), it starts at 2026-11-22 11:30 UTC; launch then"),
    ({"state": "cancelled"}, f"it is cancelled{NEXT_STEP}"),
    ({"start": START - 25 * HOUR, "hours": -1.0}, f"it ended at 2026-11-21 19:00 UTC{NEXT_STEP}"),
    ({"hours": 0.4}, "EC2 ended its machines at 2026-11-21 19:54 UTC, 30 minutes before the end of the block"),
])  # fmt: skip
def test_reservation_that_is_of_no_use_now_is_refused(front: AwsFrontend, details: dict[str, Any], reason: str) -> None:
    assert refusal(reserve_block(front, **details)).startswith(reason)


def test_group_is_the_sum_of_its_usable_members_of_one_kind(front: AwsFrontend) -> None:
    reserve_block(front, 2, groups=[GROUP], hours=48)
    reserve_block(front, 3, groups=[GROUP], hours=24)
    reserve_block(front, 9, groups=[GROUP], start=START + HOUR, hours=25)  # not yet
    front.sim.reserve("p4d.24xlarge", ZONE, 4, groups=[GROUP])
    front.sim.reserve(TYPE, ZONE, 64)  # of no group
    blocks = find(GROUP)
    assert (blocks.id, blocks.type, blocks.free_count, blocks.machine_count) == (GROUP, TYPE, 5, 5)
    assert blocks.closing_time == START + 23.5 * HOUR, "the first of them to end"
    others = find(GROUP, types=["p4d.24xlarge"])
    assert (others.market, others.free_count, others.closing_time) == ("on-demand", 4, None)


def test_group_without_usable_members_is_refused(front: AwsFrontend) -> None:
    assert refusal(GROUP).startswith("us-east-1 shows no reservations of this group; list groups: aws resource-groups")
    assert refusal(GROUP, "us-west-2") == "it is in us-east-1, not in us-west-2; pass --region us-east-1"
    first = reserve_block(front, groups=[GROUP], start=START + HOUR)
    second = front.sim.reserve(TYPE, ZONE, 2, groups=[GROUP], state="failed")
    text = refusal(GROUP)
    assert text.startswith(f"{first}: it is not active yet") and f"; {second}: it is failed" in text


@pytest.mark.parametrize(
    ("hours", "expected"), [(0.5, 24), (6, 24), (24, 24), (24.5, 48), (336, 336), (337, 504), (4368, 4368)]
)
def test_blocks_are_sold_by_the_day_and_by_the_week(hours: float, expected: int) -> None:
    assert reservations.get_block_hours(hours) == expected
    with pytest.raises(CloudError, match="no capacity blocks of more than 182 days"):
        reservations.get_block_hours(182 * 24 + 1)


def test_offerings_are_listed_by_fee_with_a_command_that_buys_one_and_nothing_is_bought(front: AwsFrontend) -> None:
    types = [BUILTIN_TYPES[name] for name in (TYPE, "p5.4xlarge")]
    offerings = reservations.list_block_offerings(shared_account(), types, 4, 6)
    fees = [offering.fee for offering in offerings]
    assert fees == sorted(fees) and {offering.machines for offering in offerings} == {4}
    assert {offering.type for offering in offerings} == {TYPE, "p5.4xlarge"}
    assert {offering.hours for offering in offerings} == {23.5}
    assert front.count("PurchaseCapacityBlock") == 0 and front.count("DescribeCapacityBlockOfferings") == 2
    program, service, verb, *words = shlex.split(offerings[0].buy)
    assert (program, service, verb) == ("aws", "ec2", "purchase-capacity-block")
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options.pop("--region") == "us-east-1"
    parameters = {name.removeprefix("--").replace("-", " ").title().replace(" ", ""): options[name] for name in options}
    model = botocore.session.get_session().get_service_model("ec2").operation_model("PurchaseCapacityBlock")
    assert model.input_shape is not None
    report = ParamValidator().validate(parameters, model.input_shape)
    assert not report.has_errors() and parameters.keys() <= model.input_shape.members.keys(), parameters
    assert parameters["InstancePlatform"] == "Linux/UNIX"
