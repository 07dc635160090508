"""Instance types, zones, prices and the choice of types, with the simulated EC2."""

import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES
from support.simcloud.http_server import AwsFrontend
from support.simcloud.in_process import shared_account

from infra.aws.client import Account
from infra.aws.market import offers
from infra.aws.market.instance_types import BUILTIN_TYPES, DEFAULT_TYPES
from infra.aws.market.quotas import get_quota_family
from infra.errors import CloudError

PREFERRED = ("p3.16xlarge", "p4d.24xlarge", "p3dn.24xlarge", "p5.48xlarge")
P3_IS_GONE = "p3.16xlarge is gone (AWS stopped listing it in 2026)"


def test_list_instance_types_leaves_out_unknown_names_arm_and_other_gpus(
    front: AwsFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It always names the types: without names EC2 would describe all, and it takes no more than 100."""
    account, sizes = Account(), list[int]()
    event = "provide-client-params.ec2.DescribeInstanceTypes"
    account.ec2.meta.events.register(event, lambda params, **_: sizes.append(len(params["InstanceTypes"])))
    monkeypatch.setattr(offers, "MAX_NAMES_PER_CALL", 10)
    names = ["p5.48xlarge", "p3.16xlarge", "g5.xlarge", "q9.large", "g5g.xlarge", "g4ad.xlarge"]  # arm64, AMD
    assert list(offers.list_instance_types(account, names).items()) == [
        (name, BUILTIN_TYPES[name]) for name in ("p5.48xlarge", "g5.xlarge")
    ]
    assert offers.list_instance_types(account, ["p3.16xlarge"]) == {}
    sizes.clear()
    assert offers.list_instance_types(account, []) == {}
    assert list(offers.list_instance_types(account, [*BUILTIN_TYPES][:25])) == [*BUILTIN_TYPES][:25]
    assert sizes == [10, 10, 5]


def test_builtin_types_equal_ec2s_descriptions() -> None:
    assert {name: offers._parse_instance_type(INSTANCE_TYPES[name]) for name in BUILTIN_TYPES} == BUILTIN_TYPES
    assert not offers._parse_instance_type(INSTANCE_TYPES["t3.micro"]).takes_placement_group


@pytest.mark.parametrize(("family", "names"), [
    ("P", "p3dn.24xlarge p4de.24xlarge p2.xlarge"),
    ("P5", "p5en.48xlarge p6-b200.48xlarge"),
    ("G", "g4dn.xlarge gr6.4xlarge vt1.3xlarge"),
    ("Standard", "c7i.4xlarge t3.micro m8gd.large"),
    ("", "inf2.xlarge trn1.2xlarge x1.16xlarge u-6tb1.112xlarge hpc7g.4xlarge mac1.metal dl1.24xlarge"),
])  # fmt: skip
def test_get_quota_family(family: str, names: str) -> None:
    assert {get_quota_family(name) for name in names.split()} == {family}


def test_spot_prices_do_not_depend_on_the_order_of_history(front: AwsFrontend) -> None:
    def row(price: str, minute: int) -> dict[str, Any]:
        when = datetime(2026, 11, 21, 20, minute, tzinfo=UTC)
        return {"AvailabilityZone": "a", "InstanceType": "t", "SpotPrice": price, "Timestamp": when}

    class Pages:
        def paginate(self, **params: Any) -> list[dict[str, Any]]:
            assert (params["ProductDescriptions"], params["InstanceTypes"]) == (["Linux/UNIX"], ["t"])
            return [{"SpotPriceHistory": [row("2", 30), row("3", 50)]}, {"SpotPriceHistory": [row("4", 10)]}]

    account = Account()
    account.__dict__["ec2"] = SimpleNamespace(can_paginate=lambda name: True, get_paginator=lambda name: Pages())
    assert offers._spot_prices(account, ["t"]) == {("t", "a"): 3.0}


def list_offers(account: Account | None, *names: str) -> list[offers.Offer]:
    """Return the offers of the named types."""
    return offers.list_offers(account, offers.list_instance_types(account, names).values())


@pytest.mark.parametrize("fault", [{"code": "UnauthorizedOperation"}, {"code": "InternalFailure", "status": 500}])
def test_list_offers_with_failed_lookups_has_unknown_prices(front: AwsFrontend, fault: dict[str, Any]) -> None:
    account = Account()
    account.__dict__["ec2"] = account.ec2_no_retry  # without retries, of which there would be eight
    for action in ("GetProducts", "DescribeSpotPriceHistory"):
        front.fault(action=action, times=99, **fault)
    found = list_offers(account, "p4d.24xlarge", "p5.48xlarge")
    assert len(found) == 4 + 6 and {offer.spot_price for offer in found} == {None}
    assert front.count("GetProducts") <= 2, "one call, repeated once: it has failed, so the others are not sent"
    prices = {(offer.on_demand_price, offer.is_builtin_price) for offer in found}
    assert prices == {(21.957642, True), (55.04, True)}


def product(price: str, unit: str = "Hrs") -> str:
    dimension = {"unit": unit, "pricePerUnit": {"USD": price}}
    return json.dumps({"terms": {"OnDemand": {"x": {"priceDimensions": {"y": dimension}}}}})


@pytest.mark.parametrize(("products", "price"), [
    ([product("21.9"), product("0.0"), product("21.9"), product("700", "Quantity")], 21.9),
    ([product("21.9"), product("22.9")], None),
    *(([text], None) for text in ("[]", '{"terms": 3}', product("?"))),
])  # fmt: skip
def test_list_price_of_malformed_products_or_of_several_prices_is_unknown(
    front: AwsFrontend, products: list[str], price: float | None
) -> None:
    account = Account()
    client = SimpleNamespace(get_products=lambda **_: {"PriceList": products})
    account.client = lambda *_: client  # type: ignore[method-assign]
    assert offers._on_demand_prices(account, ["p4d.24xlarge"]).get("p4d.24xlarge") == price


def test_list_offers_by_gpu_has_zones_and_both_prices(front: AwsFrontend) -> None:
    front.sim.set_price("us-east-1d", "p4d.24xlarge", 7.0)
    a100_types = [name for name, each in BUILTIN_TYPES.items() if offers.matches_gpu(each, "a100")]
    found_offers = list_offers(shared_account(), *a100_types)
    assert {offer.instance_type.gpu for offer in found_offers} == {"A100"}
    found = {offer.zone[-1]: offer for offer in found_offers if offer.type == "p4d.24xlarge"}
    assert [*found] == ["a", "b", "c", "d"]
    assert found["d"] == offers.Offer("p4d.24xlarge", "us-east-1d", BUILTIN_TYPES["p4d.24xlarge"], 7.0, 21.96, False)
    front.fault(action="GetProducts", code="AccessDeniedException", times=99)
    (offer, *_) = list_offers(shared_account("us-west-2"), "p4d.24xlarge")
    assert (offer.on_demand_price, offer.is_builtin_price) == (None, False), "built-in prices are those of one region"


Q9_IS_NOT_OFFERED = "EC2 offers no q9.large with x86_64 in"
NEWER = ("q9.large", "p5.48xlarge", "p3.16xlarge", "p4d.24xlarge", "p5.48xlarge")


@pytest.mark.parametrize(("region", "preferred", "requested", "types", "notes"), [
    ("us-east-1", [], [], [*DEFAULT_TYPES], []),
    ("us-east-1", PREFERRED, ["g5.xlarge"], ["g5.xlarge"], []),
    ("eu-west-1", ["p3.16xlarge", "q9.large", "p3dn.24xlarge", "p3.8xlarge"], [], ["p3dn.24xlarge"],
     [f"{text}: p3dn.24xlarge instead" for text in (P3_IS_GONE, f"{Q9_IS_NOT_OFFERED} eu-west-1")]),
    (
        "us-east-1",
        PREFERRED,  # p3dn.24xlarge among them is not requested
        NEWER,
        ["p5.48xlarge", "p4d.24xlarge"],
        [f"{Q9_IS_NOT_OFFERED} us-east-1: p5.48xlarge instead", f"{P3_IS_GONE}: not requested"],
    ),
])  # fmt: skip
def test_choose_types_takes_what_is_offered_and_notes_the_others(
    front: AwsFrontend, region: str, preferred: list[str], requested: list[str], types: list[str], notes: list[str]
) -> None:
    chosen, found_notes = offers.choose_types(shared_account(region), preferred, requested)
    assert (list(chosen), found_notes) == (types, notes)


@pytest.mark.parametrize(("region", "preferred", "requested", "next_step"), [
    ("us-east-1", PREFERRED, ["q9.large", "p3.16xlarge"], "take another: --type p4d.24xlarge"),
    ("eu-north-1", ["p3.16xlarge", "q9.large"], [], "imgnet-cluster offers, and take one: --type"),
])  # fmt: skip
def test_choose_types_with_nothing_offered(
    front: AwsFrontend, region: str, preferred: list[str], requested: list[str], next_step: str
) -> None:
    with pytest.raises(CloudError) as caught:
        offers.choose_types(shared_account(region), preferred, requested)
    message = str(caught.value)
    assert P3_IS_GONE in message and f"{Q9_IS_NOT_OFFERED} {region}" in message and message.endswith(next_step)


def test_choose_types_offline_uses_the_builtin_table() -> None:
    types = [name for name in PREFERRED if name in BUILTIN_TYPES]
    chosen, notes = offers.choose_types(None, PREFERRED)
    assert (list(chosen), notes) == (types, [f"{P3_IS_GONE}: p4d.24xlarge instead"])
    with pytest.raises(CloudError, match=r"q9\.large is not in the built-in table"):
        offers.choose_types(None, ("p5.48xlarge",), ("q9.large",))
    first, second = list_offers(None, "p4d.24xlarge", "p3.16xlarge", "p5e.48xlarge")
    assert first == offers.Offer("p4d.24xlarge", "", BUILTIN_TYPES["p4d.24xlarge"], None, 21.957642, True)
    assert (second.on_demand_price, second.is_builtin_price) == (None, False)
