"""Quota codes of instance types, and quota values."""

from support.simcloud.spot_market import quota_code

from infra.aws.market import quotas
from infra.aws.market.instance_types import BUILTIN_TYPES, get_quota_family


def test_get_quota_code_agrees_with_the_simulated_cloud() -> None:
    for market in ("spot", "on-demand"):
        for name in [*BUILTIN_TYPES, "c7i.2xlarge"]:
            assert quotas.get_quota_code(get_quota_family(name), market) == quota_code(name, market), name
    for family, market in (("", "spot"), ("P", "capacity-block"), ("Q", "on-demand")):
        assert quotas.get_quota_code(family, market) == ""
