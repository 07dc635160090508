"""What EC2 offers, asked of the simulated one; and what is said when it cannot be asked."""

import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES
from support.simcloud.http_server import AwsFrontend

from infra.aws.client import Account
from infra.aws.errors import CloudError, NoCredentials
from infra.aws.market import offers
from infra.aws.market.instance_types import (
    BUILTIN_TYPES,
    DEFAULT_TYPES,
    ON_DEMAND_PRICES,
    RETIREMENT_REASONS,
    find_builtin_type,
)

EIGHTEEN = ("p3.16xlarge", "p4d.24xlarge", "p3dn.24xlarge", "p5.48xlarge")
GONE = "p3.16xlarge is gone (AWS stopped listing it in 2026)"


def refusal(*words: Any, **more: Any) -> str:
    """The text of a `CloudError` of `settle`, which must be one line."""
    with pytest.raises(CloudError) as caught:
        offers.choose_types(*words, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_kinds_are_described_by_ec2_and_what_it_does_not_know_is_absent(front: AwsFrontend) -> None:
    names = ["p5.48xlarge", "p3.16xlarge", "g5.xlarge", "q9.large"]
    assert offers.list_instance_types(Account(), names) == {
        name: find_builtin_type(name) for name in ("p5.48xlarge", "g5.xlarge")
    }
    assert (
        offers.list_instance_types(Account(), []) == {} and offers.list_instance_types(Account(), ["p3.16xlarge"]) == {}
    )


def test_ec2_is_never_asked_for_all_its_types(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    account, asked = Account(), []
    see = lambda params, **_: asked.append(params)
    account.ec2.meta.events.register("provide-client-params.ec2.DescribeInstanceTypes", see)
    offers.list_instance_types(account, ["p3.16xlarge"])
    offers.list_instance_types(account, [])
    offers.list_offers(account)
    assert asked and all(1 <= len(one["InstanceTypes"]) <= 100 for one in asked)
    monkeypatch.setattr(offers, "MOST_NAMES", 10)
    asked.clear()
    assert list(offers.list_instance_types(account, [*BUILTIN_TYPES][:25])) == [*BUILTIN_TYPES][:25]
    assert [len(one["InstanceTypes"]) for one in asked[-3:]] == [10, 10, 5]


def test_machines_that_our_images_do_not_run_on_are_left_out(front: AwsFrontend) -> None:
    assert offers.list_instance_types(Account(), ["g5g.xlarge", "g5.xlarge"]).keys() == {"g5.xlarge"}  # arm64
    other = json.loads(json.dumps(INSTANCE_TYPES["g5.xlarge"]))
    other["GpuInfo"]["Gpus"][0]["Manufacturer"] = "AMD"
    assert offers._is_supported(INSTANCE_TYPES["g5.xlarge"]) and not offers._is_supported(other)


def test_a_type_without_gpus_is_of_processors(front: AwsFrontend) -> None:
    (kind,) = offers.list_instance_types(Account(), ["c7i.4xlarge"]).values()
    assert (kind.gpus, kind.gpu, kind.gpu_gb, kind.gpu_arch, kind.vcpus, kind.quota_family) == (
        0,
        "CPU",
        0,
        "",
        16,
        "Standard",
    )


@pytest.mark.parametrize(("said", "cards", "expected"), [
    ("4x 100 Gigabit", [100.0] * 4, 400), ("3200 Gigabit", [50.0] * 32, 3200), ("Up to 10 Gigabit", [2.5], 2.5),
    ("12.5 Gigabit", [12.5], 12.5), ("400 Gigabit", [400.0] * 4, 400), ("High", [], 0), ("", [1.0], 1),
])  # fmt: skip
def test_the_network_is_counted_by_what_it_always_holds(said: str, cards: list[float], expected: float) -> None:
    network = {"NetworkPerformance": said, "NetworkCards": [{"BaselineBandwidthInGbps": one} for one in cards]}
    assert offers._sustained_gbps(network) == expected


def test_zones_are_those_where_ec2_has_the_type(front: AwsFrontend) -> None:
    found = offers.list_zones_by_type(Account(), ["p3dn.24xlarge", "p3.16xlarge", "p4d.24xlarge"])
    assert found == {
        "p3dn.24xlarge": ["us-east-1c", "us-east-1d"],
        "p4d.24xlarge": ["us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d"],
    }
    assert (
        offers.list_zones_by_type(Account(), []) == {}
        and offers.list_zones_by_type(Account("eu-north-1"), ["p3dn.24xlarge"]) == {}
    )


# --- prices -------------------------------------------------------------------------------------------------------


def asked_prices(names: list[str], region: str = "us-east-1") -> dict[tuple[str, str, str], float]:
    account = Account(region)
    return offers.look_up_prices(account, names, offers.list_zones_by_type(account, names))


def test_prices_are_the_newest_of_each_zone_and_the_price_list_of_the_region(front: AwsFrontend) -> None:
    front.sim.set_price("us-east-1c", "p3dn.24xlarge", 9.5)
    front.sim.set_price("us-east-1d", "p3dn.24xlarge", 11.25)
    found = asked_prices(["p3dn.24xlarge", "p5.48xlarge"])
    dn = {key: price for key, price in found.items() if key[1] == "p3dn.24xlarge"}
    assert dn == {
        ("us-east-1c", "p3dn.24xlarge", "spot"): 9.5,
        ("us-east-1d", "p3dn.24xlarge", "spot"): 11.25,
        ("us-east-1c", "p3dn.24xlarge", "on-demand"): 31.21,
        ("us-east-1d", "p3dn.24xlarge", "on-demand"): 31.21,
    }
    assert len(found) == 4 + 2 * 6


def test_the_order_of_the_history_does_not_matter(front: AwsFrontend) -> None:
    def row(price: str, minute: int) -> dict[str, Any]:
        when = datetime(2026, 11, 21, 20, minute, tzinfo=UTC)
        return {"AvailabilityZone": "a", "InstanceType": "t", "SpotPrice": price, "Timestamp": when}

    class Pages:
        def paginate(self, **asked: Any) -> list[dict[str, Any]]:
            assert (asked["ProductDescriptions"], asked["InstanceTypes"]) == (["Linux/UNIX"], ["t"])
            return [{"SpotPriceHistory": [row("2", 30), row("3", 50)]}, {"SpotPriceHistory": [row("4", 10)]}]

    account = Account()
    account.__dict__["ec2"] = type("Client", (), {"get_paginator": lambda self, name: Pages()})()
    assert offers._spot_prices(account, ["t"]) == {("a", "t", "spot"): 3.0}


def test_on_demand_prices_are_asked_side_by_side_and_a_list_that_fails_is_asked_once(front: AwsFrontend) -> None:
    names = [name for name in ON_DEMAND_PRICES if "4xlarge" in name]
    asked_prices(names)
    assert front.count("GetProducts") == len(names)
    before = len(front.calls)
    front.fault(action="GetProducts", code="InternalErrorException", status=500, times=99)
    start = time.monotonic()
    found = asked_prices(names)
    assert found and all(market == "spot" for _, _, market in found)
    assert [name for _, name in front.calls[before:]].count("GetProducts") == 2  # one call, tried twice
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("fault", [
    {"code": "AccessDeniedException", "status": 400}, {"code": "UnauthorizedOperation"},
    {"code": "InternalFailure", "status": 500},
])  # fmt: skip
def test_a_price_that_cannot_be_looked_up_is_unknown_and_stops_nothing(front: AwsFrontend, fault: dict[str, Any]) -> None:
    account = Account()
    account.__dict__["ec2"] = account.ec2_no_retry  # not patient: this would be eight tries
    for action in ("GetProducts", "DescribeSpotPriceHistory"):
        front.fault(action=action, times=99, **fault)
    found = offers.list_offers(account, names=["p4d.24xlarge", "p5.48xlarge"])
    assert len(found) == 4 + 6 and {one.spot_price for one in found} == {None}
    assert {(one.on_demand_price, one.is_builtin_price) for one in found} == {(21.957642, True), (55.04, True)}


def test_prices_are_unknown_where_there_is_no_way_to_aws(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    account = Account()
    account.__dict__["ec2"] = account.ec2_no_retry
    assert offers.look_up_prices(account, ["p4d.24xlarge"], {"p4d.24xlarge": ["us-east-1a"]}) == {}


@pytest.mark.parametrize("body", ["", "[]", "{}", "null", '{"terms": {}}', '{"terms": 3}',
                                  '{"terms": {"OnDemand": {"x": {"priceDimensions": {"y": {"pricePerUnit": {"USD": "?"}}}}}}}'])  # fmt: skip
def test_a_price_list_that_says_something_else_is_no_price(body: str) -> None:
    client = type("Client", (), {"get_products": lambda self, **_: {"PriceList": [body]}})()
    assert offers._list_price(client, "p4d.24xlarge", "us-east-1") is None


def test_two_prices_for_one_machine_are_no_price() -> None:
    def product(price: str, unit: str = "Hrs") -> str:
        dimension = {"unit": unit, "pricePerUnit": {"USD": price}}
        return json.dumps({"terms": {"OnDemand": {"x": {"priceDimensions": {"y": dimension}}}}})

    def listed(*texts: str) -> float | None:
        client = type("Client", (), {"get_products": lambda self, **_: {"PriceList": list(texts)}})()
        return offers._list_price(client, "p4d.24xlarge", "us-east-1")

    assert listed(product("21.9"), product("0.0"), product("21.9"), product("700", "Quantity")) == 21.9
    assert listed(product("21.9"), product("22.9")) is None and listed() is None


# --- offers -------------------------------------------------------------------------------------------------------


def test_offers_are_types_by_zone_with_both_prices(front: AwsFrontend) -> None:
    front.sim.set_price("us-east-1d", "p4d.24xlarge", 7.0)
    found = offers.list_offers(Account(), "a100")
    assert [(one.type, one.zone[-1]) for one in found if one.type.startswith("p4d.")] == [
        ("p4d.24xlarge", zone) for zone in "abcd"
    ]
    assert {one.instance_type.gpu for one in found} == {"A100"}
    last = [one for one in found if one.zone == "us-east-1d" and one.type == "p4d.24xlarge"]
    assert last == [offers.Offer("p4d.24xlarge", "us-east-1d", BUILTIN_TYPES["p4d.24xlarge"], 7.0, 21.96, False)]


def test_without_names_all_of_the_table_that_the_region_has(front: AwsFrontend) -> None:
    found = {one.type for one in offers.list_offers(Account())}
    assert {"p4d.24xlarge", "g5.xlarge", "g4dn.xlarge"} <= found <= BUILTIN_TYPES.keys()
    assert not {one.type for one in offers.list_offers(Account("eu-north-1"), "V100")}


def test_a_named_type_that_the_table_lacks_is_looked_up_too(front: AwsFrontend) -> None:
    assert {one.type for one in offers.list_offers(Account(), "L4", ["gr6.4xlarge", "p4d.24xlarge"])} == {"gr6.4xlarge"}
    assert offers.list_offers(Account(), "A100", ["gr6.4xlarge"]) == []


def test_the_shipped_price_is_of_one_region_and_is_guessed_for_no_other(front: AwsFrontend) -> None:
    front.fault(action="GetProducts", code="AccessDeniedException", times=99)
    (one, *_) = offers.list_offers(Account("us-west-2"), names=["p4d.24xlarge"])
    assert (one.on_demand_price, one.is_builtin_price) == (None, False) and one.spot_price
    (one, *_) = offers.list_offers(Account("us-west-2"), names=["p4d.24xlarge"], offline=True)
    assert (one.zone, one.spot_price, one.on_demand_price, one.is_builtin_price) == ("", None, None, False)


def test_no_credentials_are_said_and_not_taken_for_no_price(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(NoCredentials):
        offers.list_offers(Account())
    with pytest.raises(NoCredentials):
        offers.look_up_prices(Account(), ["p4d.24xlarge"], {})


# --- settle -------------------------------------------------------------------------------------------------------


def test_the_preference_is_settled_by_what_is_offered_and_what_is_gone_is_said(front: AwsFrontend) -> None:
    types, lines = offers.choose_types(Account(), EIGHTEEN)
    assert types == ["p4d.24xlarge", "p3dn.24xlarge", "p5.48xlarge"]
    assert lines == [f"{GONE}: p4d.24xlarge is taken instead"]
    types, lines = offers.choose_types(Account("eu-west-1"), ("p3.16xlarge", "q9.large", "p3dn.24xlarge", "p3.8xlarge"))
    assert types == ["p3dn.24xlarge"]
    assert lines == [
        f"{GONE}: p3dn.24xlarge is taken instead",
        "EC2 offers no q9.large with x86_64 in eu-west-1: p3dn.24xlarge is taken instead",
    ]
    assert offers.choose_types(Account(), ("p5.48xlarge", "p3.16xlarge")) == (["p5.48xlarge"], [])


def test_what_ec2_offers_counts_more_than_our_list_of_the_retired(
    front: AwsFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RETIREMENT_REASONS, "p5.48xlarge", "AWS stopped listing p5.48xlarge in 2031")
    assert offers.choose_types(Account(), ("p5.48xlarge",)) == (["p5.48xlarge"], [])


def test_nothing_wanted_means_the_default_types(front: AwsFrontend) -> None:
    assert offers.choose_types(Account(), ()) == (list(DEFAULT_TYPES), [])
    assert offers.choose_types(None, (), offline=True) == (list(DEFAULT_TYPES), [])


def test_a_type_asked_for_by_name_is_taken_alone_or_refused_with_the_next_thing_to_type(front: AwsFrontend) -> None:
    assert offers.choose_types(Account(), EIGHTEEN, "g5.xlarge") == (["g5.xlarge"], [])
    assert offers.choose_types(Account(), EIGHTEEN, "p5.48xlarge") == (["p5.48xlarge"], [])
    assert refusal(Account(), EIGHTEEN, "p3.16xlarge") == f"{GONE}; take another: --type p4d.24xlarge"
    said = refusal(Account("eu-north-1"), ("p3.8xlarge",), "p3dn.24xlarge")
    assert said == ("EC2 offers no p3dn.24xlarge with x86_64 in eu-north-1; see what there is: imgnet-cluster offers")


def test_nothing_of_the_preference_offered_is_one_line_that_names_all(front: AwsFrontend) -> None:
    said = refusal(Account("eu-north-1"), ("p3.16xlarge", "p3dn.24xlarge"))
    assert GONE in said and "no p3dn.24xlarge" in said and "imgnet-cluster offers" in said


def test_an_ec2_that_does_not_answer_is_not_taken_for_one_that_offers_nothing(front: AwsFrontend) -> None:
    front.fault(action="DescribeInstanceTypeOfferings", code="UnauthorizedOperation", times=99)
    assert "not permitted" in refusal(Account(), EIGHTEEN) and front.count("DescribeInstanceTypeOfferings") == 1


def test_offline_the_same_is_said_from_the_table() -> None:
    for more in ({}, {"offline": True}):
        types, lines = offers.choose_types(None, EIGHTEEN, **more)
        assert (types, lines) == (list(EIGHTEEN[1:]), [f"{GONE}: p4d.24xlarge is taken instead"])
    assert refusal(None, EIGHTEEN, "p3.16xlarge") == f"{GONE}; take another: --type p4d.24xlarge"
    assert "q9.large is not in the shipped table" in refusal(None, ("p5.48xlarge",), "q9.large")
    (one,) = offers.list_offers(None, names=["p4d.24xlarge", "p3.16xlarge"])
    assert one == offers.Offer("p4d.24xlarge", "", BUILTIN_TYPES["p4d.24xlarge"], None, 21.957642, True)
    (one,) = offers.list_offers(None, names=["p5e.48xlarge"])
    assert (one.on_demand_price, one.is_builtin_price) == (None, False)
    assert {one.instance_type.gpu for one in offers.list_offers(None, "h100")} == {"H100"}


def test_offline_nothing_is_asked_boto3_is_not_even_loaded_and_it_is_quick() -> None:
    code = (
        "import sys; from infra import offers\n"
        f"offers.settle(None, {EIGHTEEN!r}); offers.offers(None)\n"
        "print(sorted({'boto3', 'torch', 'numpy'} & sys.modules.keys()))"
    )
    root = Path(__file__).resolve().parents[4]
    env = {**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    start = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=env, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
    assert time.monotonic() - start < 10  # 0.15 s on a quiet machine


def test_the_market_and_zone_of_a_price_look_like_the_words_of_ec2(front: AwsFrontend) -> None:
    for zone, type, market in asked_prices(["g5.xlarge"]):
        assert re.fullmatch(r"us-east-1[a-f]", zone) and type == "g5.xlarge" and market in ("spot", "on-demand")
