"""The built-in table of instance types, compared with EC2's own descriptions."""

from dataclasses import FrozenInstanceError

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES

from infra.aws.market import offers
from infra.aws.market.instance_types import (
    BUILTIN_TYPES,
    DEFAULT_TYPES,
    GPU_ARCHITECTURES,
    ON_DEMAND_PRICES,
    RETIREMENT_REASONS,
    get_quota_family,
)


def test_builtin_types_equal_ec2s_descriptions() -> None:
    assert {name: offers._parse_instance_type(INSTANCE_TYPES[name]) for name in BUILTIN_TYPES} == BUILTIN_TYPES


def test_on_demand_prices_are_of_builtin_types_only() -> None:
    assert ON_DEMAND_PRICES.keys() < BUILTIN_TYPES.keys()
    assert (ON_DEMAND_PRICES["p4d.24xlarge"], ON_DEMAND_PRICES["p5.48xlarge"]) == (
        pytest.approx(21.96, abs=0.01),
        55.04,
    )
    assert "p5e.48xlarge" not in ON_DEMAND_PRICES


def test_retired_types_are_not_builtin_and_have_a_reason() -> None:
    assert (
        set(RETIREMENT_REASONS) == {"p3.2xlarge", "p3.8xlarge", "p3.16xlarge"}
        and not RETIREMENT_REASONS.keys() & BUILTIN_TYPES.keys()
    )
    assert RETIREMENT_REASONS["p3.16xlarge"] == "AWS stopped listing p3.16xlarge in 2026"
    assert set(DEFAULT_TYPES) <= BUILTIN_TYPES.keys()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p3dn.24xlarge", "P"),
        ("p4de.24xlarge", "P"),
        ("p2.xlarge", "P"),
        ("p5en.48xlarge", "P5"),
        ("p6-b200.48xlarge", "P5"),
        ("g4dn.xlarge", "G"),
        ("gr6.4xlarge", "G"),
        ("vt1.3xlarge", "G"),
        ("c7i.4xlarge", "Standard"),
        ("t3.micro", "Standard"),
        ("m8gd.large", "Standard"),
        ("inf2.xlarge", ""),
        ("trn1.2xlarge", ""),
        ("x1.16xlarge", ""),
        ("u-6tb1.112xlarge", ""),
        ("hpc7g.4xlarge", ""),
        ("mac1.metal", ""),
        ("dl1.24xlarge", ""),
        ("", ""),
    ],
)
def test_get_quota_family(name: str, expected: str) -> None:
    assert get_quota_family(name) == expected


def test_builtin_types_have_known_gpu_archs_and_are_frozen() -> None:
    assert {instance_type.gpu_arch for instance_type in BUILTIN_TYPES.values() if instance_type.gpus} <= set(
        GPU_ARCHITECTURES.values()
    )
    with pytest.raises(FrozenInstanceError):
        BUILTIN_TYPES["p5.48xlarge"].gpus = 9  # type: ignore[misc]
