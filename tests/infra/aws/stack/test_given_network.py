"""A network of the user's that has the stack: checked, used, and left as it was."""

from collections.abc import Callable
from typing import Any

import pytest
from support import iam
from support.aws_network import Network
from support.aws_stack import OWN_CIDR, RecordingAccount

from infra.aws import tags
from infra.aws.launch_request import Internet
from infra.aws.stack import efs, policies, stack
from infra.errors import CloudError


@pytest.fixture
def theirs(account: RecordingAccount) -> Network:
    network = Network(account)
    account.calls.clear()
    return network


def test_stack_in_a_network_of_the_user_makes_a_group_and_mount_targets_there_and_takes_them_away(
    account: RecordingAccount, theirs: Network
) -> None:
    before = theirs.describe()
    inspection = stack.inspect(account, [theirs.vpc], Internet.PUBLIC)
    assert inspection.network.describe().startswith(f"{theirs.vpc}, which is yours") and not account.changes()
    assert "network 10.77.0.0/16 with" not in " ".join(inspection.missing_parts) and inspection.stack is None
    own_stack = stack.ensure(account, OWN_CIDR, network_ids=[theirs.vpc], internet=Internet.PUBLIC)
    assert own_stack.subnets == {"us-west-1a": theirs.public_a, "us-west-1b": theirs.public_b}, "those with a gateway"
    assert own_stack.network_ids == (theirs.vpc, theirs.public_a, theirs.public_b)
    assert not {"CreateVpc", "CreateSubnet", "CreateRoute", "CreateVpcEndpoint", "ModifyVpcAttribute"} & {
        *account.changes()
    }
    account.calls.clear()
    assert stack.ensure(account, OWN_CIDR) == own_stack == stack.inspect(account).stack, (
        "the file system's tag names it"
    )
    assert not account.changes() and theirs.describe() == before
    assert stack.remove(account, False) == [] and theirs.describe() == before
    own_groups = tags.make_filters({tags.STACK: tags.STACK_VALUE})
    assert not account.ec2.describe_security_groups(Filters=own_groups)["SecurityGroups"]
    assert stack.ensure(account, OWN_CIDR).network_ids == (), "the file system that stayed is in our own network now"


def test_subnet_alone_implies_its_network_and_private_subnets_may_be_used(
    account: RecordingAccount, theirs: Network
) -> None:
    own_stack = stack.ensure(account, OWN_CIDR, network_ids=[theirs.private], internet=Internet.PRIVATE)
    assert (own_stack.vpc, own_stack.subnets) == (theirs.vpc, {"us-west-1a": theirs.private})
    for internet in (Internet.PRIVATE, None):
        inspection = stack.inspect(account, [theirs.private], internet)
        assert "no S3 gateway endpoint" in inspection.network.describe()
    theirs.ec2.create_vpc_endpoint(
        VpcId=theirs.vpc, ServiceName="com.amazonaws.us-west-1.s3", RouteTableIds=[theirs.private_table]
    )
    inspection = stack.inspect(account, [theirs.private], Internet.PRIVATE)
    assert "no S3 gateway endpoint" not in inspection.network.describe()
    for ids, unknown in (([theirs.private, theirs.public_b], theirs.public_b), (["vpc-9", theirs.private], "vpc-9")):
        with pytest.raises(
            CloudError, match=rf"^{unknown}: the stack .* uses only {theirs.vpc} .*down --stack, then up"
        ):
            stack.inspect(account, ids)


WRONG_NETWORKS: list[tuple[Callable[[Network], list[str]], Internet | None, str]] = [
    (lambda theirs: ["subnet-9"], None, "subnet-9: us-west-1 has no such .*aws ec2 describe-subnets"),
    (lambda theirs: ["vpc-9"], None, "vpc-9: us-west-1 has no such network"),
    (lambda theirs: ["vpc-9", theirs.public_a], None, "subnet-.* is in vpc-.* and not in vpc-9; name one network"),
    (lambda theirs: [theirs.public_a, theirs.private], None, "are both in us-west-1a; leave one of them out"),
    (lambda theirs: [theirs.private], Internet.PUBLIC, "no route to an internet gateway .*--internet private --from"),
    (lambda theirs: [theirs.lost], Internet.PRIVATE, "no route to the internet .*NAT gateway, or name another subnet"),
    (lambda theirs: [theirs.public_a], Internet.NAT, "makes no NAT gateway in a network of yours; use --internet priv"),
    (lambda theirs: [theirs.lost], None, "no route to the internet"),
    (lambda theirs: [theirs.public_b], Internet.PRIVATE, "leads to an internet gateway .*leave --internet private out"),
]


@pytest.mark.parametrize(("ids", "internet", "message"), WRONG_NETWORKS)
def test_network_that_does_not_suit_is_one_line_before_anything_is_made(
    account: RecordingAccount, theirs: Network, ids: Callable[[Network], list[str]], internet: Internet, message: str
) -> None:
    for function in (
        lambda: stack.inspect(account, ids(theirs), internet),
        lambda: stack.ensure(account, OWN_CIDR, network_ids=ids(theirs), internet=internet),
    ):
        with pytest.raises(CloudError, match=message) as caught:
            function()
        assert "\n" not in str(caught.value)
    assert not account.changes()


def test_network_without_dns_or_beside_a_stack_of_our_own_is_refused(
    account: RecordingAccount, theirs: Network
) -> None:
    theirs.set_dns_hostnames(False)
    with pytest.raises(CloudError, match=f"enableDnsHostnames is off.*--vpc-id {theirs.vpc} --enable-dns-hostnames"):
        stack.inspect(account, [theirs.vpc])
    stack.ensure(account, OWN_CIDR)
    with pytest.raises(CloudError, match=f"{theirs.vpc}: the stack of us-west-1 uses only a network of its own"):
        stack.ensure(account, OWN_CIDR, network_ids=[theirs.vpc])


def test_zone_without_efs_is_left_out_and_the_subnet_of_the_user_is_not_marked(
    account: RecordingAccount, theirs: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = theirs.describe()
    create = efs._create_mount_target

    def create_in_b_only(*arguments: Any) -> bool:
        is_refused = "us-west-1a" in arguments
        account.denied = {"CreateMountTarget": "UnsupportedAvailabilityZone"} if is_refused else {}
        return create(*arguments)

    monkeypatch.setattr(efs, "_create_mount_target", create_in_b_only)
    with pytest.raises(CloudError, match=r"^EFS serves none of us-west-1a; name other subnets: --subnet$"):
        stack.ensure(account, OWN_CIDR, network_ids=[theirs.public_a])
    both = [theirs.public_a, theirs.public_b]
    own_stack = stack.ensure(account, OWN_CIDR, network_ids=both)
    assert own_stack.network_ids == (theirs.vpc, theirs.public_b) and theirs.describe() == before
    account.calls.clear()
    for ids in (both, [theirs.vpc], []):
        assert stack.inspect(account, ids).stack == own_stack == stack.ensure(account, OWN_CIDR, network_ids=ids)
    assert not account.changes()


def test_user_policy_for_a_network_of_the_user_allows_no_other_one() -> None:
    ec2 = "arn:aws:ec2:us-east-1:123456789012:"
    policy = policies.network_policy("vpc-9", "123456789012", "us-east-1")
    for vpc, is_allowed in (("vpc-9", True), ("vpc-8", False)):
        assert iam.is_allowed(policy, "ec2:CreateSecurityGroup", f"{ec2}vpc/{vpc}", {}) is is_allowed
        context = {"ec2:Vpc": f"{ec2}vpc/{vpc}"}
        assert iam.is_allowed(policy, "ec2:RunInstances", f"{ec2}subnet/subnet-1", context) is is_allowed
        plain = policies.user_policy("123456789012", "us-east-1")
        assert not iam.is_allowed(plain, "ec2:RunInstances", f"{ec2}subnet/subnet-1", context)
