"""Quota codes of instance types, and quota values."""

import shlex

import pytest
from support.simcloud.http_server import AwsFrontend
from support.simcloud.spot_market import quota_code

from infra.aws.client import Account
from infra.aws.market import quotas
from infra.aws.market.instance_types import BUILTIN_TYPES


@pytest.mark.parametrize(
    ("family", "market", "expected"),
    [
        ("G", "spot", "L-3819A6DF"),
        ("P", "spot", "L-7212CCBC"),
        ("P5", "spot", "L-C4BD4855"),
        ("G", "on-demand", "L-DB2E81BA"),
        ("P", "on-demand", "L-417A185B"),
        ("P5", "on-demand", "L-417A185B"),
        ("Standard", "spot", "L-34B43A08"),
        ("Standard", "on-demand", "L-1216C47A"),
        ("", "spot", ""),
        ("P", "capacity-block", ""),
        ("Q", "on-demand", ""),
    ],
)
def test_get_quota_code_of_family_and_market(family: str, market: str, expected: str) -> None:
    assert quotas.get_quota_code(family, market) == expected


@pytest.mark.parametrize("market", ["spot", "on-demand"])
@pytest.mark.parametrize("name", BUILTIN_TYPES)
def test_get_quota_code_agrees_with_the_simulated_cloud(name: str, market: str) -> None:
    assert quotas.get_quota_code(BUILTIN_TYPES[name].quota_family, market) == quota_code(name, market)


def test_look_up_quota_returns_the_regions_value(front: AwsFrontend) -> None:
    front.sim.quota_vcpu = {"L-417A185B": 96.0, "L-7212CCBC": 0.0}
    assert quotas.look_up_quota(Account(), "L-417A185B") == 96.0
    assert quotas.look_up_quota(Account(), "L-7212CCBC") == 0.0  # nothing allowed is not the same as unknown


@pytest.mark.parametrize("fault", ["AccessDeniedException", "NoSuchResourceException", "UnrecognizedClientException"])
def test_look_up_quota_on_errors_returns_none(front: AwsFrontend, fault: str) -> None:
    front.fault(action="GetServiceQuota", code=fault, times=99)
    assert quotas.look_up_quota(Account(), "L-417A185B") is None
    front.reset()
    assert quotas.look_up_quota(Account(), "L-00000000") is None


def test_quota_increase_command_requests_the_vcpus() -> None:
    argv = shlex.split(quotas.quota_increase_command("eu-west-1", "L-417A185B", 1536))
    assert argv[:3] == ["aws", "service-quotas", "request-service-quota-increase"]
    options = dict(zip(argv[3::2], argv[4::2], strict=True))
    assert options == {
        "--region": "eu-west-1",
        "--service-code": "ec2",
        "--quota-code": "L-417A185B",
        "--desired-value": "1536",
    }
