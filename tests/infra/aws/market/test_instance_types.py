"""The shipped table: what EC2 described when it was made."""

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
    find_builtin_type,
    get_quota_family,
)


@pytest.mark.parametrize("name", BUILTIN_TYPES)
def test_the_shipped_table_says_what_ec2_describes(name: str) -> None:
    assert BUILTIN_TYPES[name] == offers._parse_instance_type(INSTANCE_TYPES[name])


def test_it_has_the_figures_that_everything_else_counts_with() -> None:
    p4d, p5, g5 = (find_builtin_type(name) for name in ("p4d.24xlarge", "p5.48xlarge", "g5.xlarge"))
    assert p4d and p5 and g5
    assert (p4d.vcpus, p4d.gpus, p4d.gpu, p4d.gpu_gb, p4d.efa_interfaces, p4d.network_cards, p4d.network_gbps) == (
        96,
        8,
        "A100",
        40,
        4,
        4,
        400,
    )
    assert (p4d.gpu_arch, p4d.nvme_gb, p4d.memory_gb, p4d.quota_family) == ("sm_80", 8000, 1152, "P")
    assert (p5.vcpus, p5.efa_interfaces, p5.gpu_arch, p5.quota_family) == (192, 32, "sm_90", "P5")
    assert (g5.gpus, g5.efa_interfaces, g5.network_gbps, g5.quota_family) == (
        1,
        0,
        2.5,
        "G",
    )  # "up to 10": what it holds is 2.5
    assert find_builtin_type("p3.16xlarge") is None and find_builtin_type("z9.large") is None


def test_prices_are_of_types_in_the_table_and_none_is_made_up() -> None:
    assert ON_DEMAND_PRICES.keys() < BUILTIN_TYPES.keys()
    assert (ON_DEMAND_PRICES["p4d.24xlarge"], ON_DEMAND_PRICES["p5.48xlarge"]) == (
        pytest.approx(21.96, abs=0.01),
        55.04,
    )
    assert "p5e.48xlarge" not in ON_DEMAND_PRICES


def test_retired_types_are_not_in_the_table_and_have_their_line() -> None:
    assert (
        set(RETIREMENT_REASONS) == {"p3.2xlarge", "p3.8xlarge", "p3.16xlarge"}
        and not RETIREMENT_REASONS.keys() & BUILTIN_TYPES.keys()
    )
    assert RETIREMENT_REASONS["p3.16xlarge"] == "AWS stopped listing p3.16xlarge in 2026"
    assert set(DEFAULT_TYPES) <= BUILTIN_TYPES.keys()


@pytest.mark.parametrize(("name", "expected"), [
    ("p3dn.24xlarge", "P"), ("p4de.24xlarge", "P"), ("p2.xlarge", "P"), ("p5en.48xlarge", "P5"),
    ("p6-b200.48xlarge", "P5"), ("g4dn.xlarge", "G"), ("gr6.4xlarge", "G"), ("vt1.3xlarge", "G"),
    ("c7i.4xlarge", "Standard"), ("t3.micro", "Standard"), ("m8gd.large", "Standard"),
    ("inf2.xlarge", ""), ("trn1.2xlarge", ""), ("x1.16xlarge", ""), ("u-6tb1.112xlarge", ""), ("hpc7g.4xlarge", ""),
    ("mac1.metal", ""), ("dl1.24xlarge", ""), ("", ""),
])  # fmt: skip
def test_a_type_belongs_to_one_family_of_quotas(name: str, expected: str) -> None:
    assert get_quota_family(name) == expected


def test_every_card_of_the_table_has_an_architecture_and_kinds_are_frozen() -> None:
    assert {kind.gpu_arch for kind in BUILTIN_TYPES.values() if kind.gpus} <= set(GPU_ARCHITECTURES.values())
    with pytest.raises(FrozenInstanceError):
        BUILTIN_TYPES["p5.48xlarge"].gpus = 9  # type: ignore[misc]
