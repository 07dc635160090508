"""The built-in table of instance types, compared with EC2's own descriptions."""

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES

from infra.aws.market import offers
from infra.aws.market.instance_types import (
    BUILTIN_TYPES,
    get_quota_family,
)


def test_builtin_types_equal_ec2s_descriptions() -> None:
    assert {name: offers._parse_instance_type(INSTANCE_TYPES[name]) for name in BUILTIN_TYPES} == BUILTIN_TYPES


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("P", "p3dn.24xlarge p4de.24xlarge p2.xlarge"),
        ("P5", "p5en.48xlarge p6-b200.48xlarge"),
        ("G", "g4dn.xlarge gr6.4xlarge vt1.3xlarge"),
        ("Standard", "c7i.4xlarge t3.micro m8gd.large"),
        ("", "inf2.xlarge trn1.2xlarge x1.16xlarge u-6tb1.112xlarge hpc7g.4xlarge mac1.metal dl1.24xlarge"),
    ],
)
def test_get_quota_family(family: str, names: str) -> None:
    assert {get_quota_family(name) for name in names.split()} == {family}
