"""Quota codes of instance types, and quota values."""

import pytest
from support.simcloud.http_server import AwsFrontend
from support.simcloud.in_process import shared_account
from support.simcloud.spot_market import quota_code

from infra.aws.market import quotas
from infra.aws.market.instance_types import BUILTIN_TYPES, get_quota_family


def test_get_quota_code_agrees_with_the_simulated_cloud() -> None:
    for market in ("spot", "on-demand"):
        for name in [*BUILTIN_TYPES, "c7i.2xlarge"]:
            assert quotas.get_quota_code(get_quota_family(name), market) == quota_code(name, market), name
    for family, market in (("", "spot"), ("P", "capacity-block"), ("Q", "on-demand")):
        assert quotas.get_quota_code(family, market) == ""


def test_look_up_quota_returns_the_regions_value(front: AwsFrontend) -> None:
    front.sim.quota_vcpu = {"L-417A185B": 96.0, "L-7212CCBC": 0.0}
    assert quotas.look_up_quota(shared_account(), "L-417A185B") == 96.0
    assert quotas.look_up_quota(shared_account(), "L-7212CCBC") == 0.0  # nothing allowed is not the same as unknown


@pytest.mark.parametrize("fault", ["AccessDeniedException", "NoSuchResourceException", "UnrecognizedClientException"])
def test_look_up_quota_on_errors_returns_none(front: AwsFrontend, fault: str) -> None:
    front.fault(action="GetServiceQuota", code=fault, times=99)
    assert quotas.look_up_quota(shared_account(), "L-417A185B") is None
    front.reset()
    assert quotas.look_up_quota(shared_account(), "L-00000000") is None
