"""The way of machines to the internet: public addresses, and the NAT gateway of a job with all its parts."""

from types import SimpleNamespace

import pytest
from support.aws_gang import GangTestbed
from support.simcloud.internet import count_bytes

from infra.aws import tags
from infra.aws.error_codes import may_succeed_later
from infra.aws.instances import instances, internet
from infra.aws.stack.resources import StackContext
from infra.errors import CloudError

ZONE = "us-east-1a"
SSH_ADDRESS = "203.0.113.7/32"
PARTS = dict.fromkeys(("describe_nat_gateways", "describe_addresses", "describe_subnets", "describe_route_tables"), 1)


def job_tags(bed: GangTestbed) -> dict[str, str]:
    return {tags.STACK: tags.STACK_VALUE, tags.JOB: bed.uid}


@pytest.fixture
def gateway(bed: GangTestbed) -> str:
    ec2 = bed.account.ec2
    specifications = tags.tag_specifications(["internet-gateway"], {tags.STACK: tags.STACK_VALUE})
    response = ec2.create_internet_gateway(TagSpecifications=specifications)
    gateway_id = str(response["InternetGateway"]["InternetGatewayId"])
    ec2.attach_internet_gateway(InternetGatewayId=gateway_id, VpcId=bed.stack.vpc)
    return gateway_id


def ensure(bed: GangTestbed) -> str:
    context = StackContext(bed.account, bed.journal)
    return internet.ensure_subnet(context, bed.stack, ZONE, job_tags(bed), SSH_ADDRESS, bed.clock.sleep)


def count_parts(bed: GangTestbed) -> dict[str, int]:
    found = instances.list_leftovers(bed.account, job_tags(bed))
    return {operation: len(found[operation]) for operation in PARTS}


def test_gateways_tell_what_they_have_processed(bed: GangTestbed, gateway: str) -> None:
    assert internet.read_nat_bytes(bed.account, bed.uid) == {}
    ensure(bed)
    (found,) = instances.list_leftovers(bed.account, job_tags(bed))["describe_nat_gateways"]
    with bed.sim.lock:
        for _ in range(2):
            count_bytes(SimpleNamespace(id=found["NatGatewayId"]), "us-east-1", 10**9)
            bed.sim.advance(400)
        count_bytes(SimpleNamespace(id="nat-of-another"), "us-east-1", 10**9)
    assert internet.read_nat_bytes(bed.account, bed.uid) == {found["NatGatewayId"]: 2 * 10**9}


def test_machines_with_several_cards_get_public_addresses_twice_the_same(bed: GangTestbed) -> None:
    machines = bed.acquire(bed.place(ZONE, type="p4d.24xlarge"), n=2)
    assert not any(machine.public_ip for machine in machines)
    for machine in [*machines, *machines]:
        internet.give_public_address(bed.account, machine.primary_interface_id)
    assert all(machine.public_ip for machine in bed.gang().list_instances())
    assert bed.account.ec2.describe_addresses()["Addresses"] == [], "no Elastic IP, which has a quota"


def test_subnet_of_a_job_leads_through_its_nat_gateway(bed: GangTestbed, gateway: str) -> None:
    bed.sim.nat_seconds = 90.0
    subnet = ensure(bed)
    assert subnet not in bed.stack.subnets.values() and ensure(bed) == subnet and count_parts(bed) == PARTS
    found = instances.list_leftovers(bed.account, job_tags(bed))
    (table,) = found["describe_route_tables"]
    targets = {route["DestinationCidrBlock"]: route for route in table["Routes"]}
    (nat_gateway,) = found["describe_nat_gateways"]
    assert nat_gateway["State"] == "available"
    assert targets["0.0.0.0/0"]["NatGatewayId"] == nat_gateway["NatGatewayId"]
    assert targets[SSH_ADDRESS]["GatewayId"] == gateway, "answers over ssh leave by the jump host's own address"
    assert [association["SubnetId"] for association in table["Associations"]] == [subnet]


def test_parts_that_ec2_does_not_show_yet_are_waited_for(bed: GangTestbed, gateway: str) -> None:
    bed.sim.visible_after = 5.0
    bed.front.fault(action="CreateNatGateway", code="InvalidElasticIpID.NotFound", times=2)
    ensure(bed)
    assert count_parts(bed) == PARTS


def test_failed_nat_gateway_is_told_at_once_and_the_next_try_makes_another(bed: GangTestbed, gateway: str) -> None:
    bed.sim.nat_seconds, bed.sim.nat_failure = 20.0, "Subnet has insufficient free addresses"
    for _ in range(2):
        with pytest.raises(CloudError, match=r"^the NAT gateway failed: Subnet has insufficient free addresses$"):
            ensure(bed)
    assert sum(bed.clock.pauses) < 60
    bed.sim.nat_failure = ""
    ensure(bed)
    assert count_parts(bed) == {**PARTS, "describe_nat_gateways": 3}


def test_machine_that_ends_before_it_has_an_address_is_no_refusal(bed: GangTestbed) -> None:
    (machine,) = bed.acquire(bed.place(ZONE, type="p4d.24xlarge"), n=1)
    bed.sim.stop_seconds = 60.0
    instances.terminate(bed.account, [machine.id])
    for code in ("IncorrectState", "InvalidNetworkInterfaceID.NotFound"):
        with pytest.raises(CloudError, match=code) as caught:
            internet.give_public_address(bed.account, machine.primary_interface_id)
        assert may_succeed_later(caught.value)
        bed.sim.advance(60.0)
    assert bed.clock.pauses == [], "the other machines wait for their addresses"


def test_jump_host_has_one_address_that_is_not_the_nat_gateways(bed: GangTestbed, gateway: str) -> None:
    ensure(bed)
    (gateways_address,) = bed.account.ec2.describe_addresses()["Addresses"]
    for machine in bed.acquire(bed.place(ZONE, type="p4d.24xlarge"), n=2):
        instances.attach_elastic_ip(bed.account, machine, job_tags(bed))
        addresses = bed.account.ec2.describe_addresses()["Addresses"]
        (address,) = (one for one in addresses if one["AllocationId"] != gateways_address["AllocationId"])
        assert address["NetworkInterfaceId"] == machine.primary_interface_id


@pytest.mark.rehearsal
def test_creation_killed_at_any_step_and_repeated_has_each_part_once(bed: GangTestbed, gateway: str) -> None:
    steps = bed.count_steps(lambda: ensure(bed), None)
    assert steps >= 20
    for step in range(1, steps + 1):
        bed.end_job()
        bed.jobs += 1
        bed.uid = f"job-{bed.jobs}-9073e811"
        bed.count_steps(lambda: ensure(bed), step)
        ensure(bed)
        assert count_parts(bed) == PARTS, step
