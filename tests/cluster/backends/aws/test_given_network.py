"""A launch into a network of the user's, planned and checked with the simulated EC2."""

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from support.aws_network import Network
from support.simcloud.http_server import AwsFrontend
from support.specs import TINY

from cluster.backends.aws.terms.rental_spec import RentalSpec
from cluster.cli.app import cli
from cluster.errors import BadInput, ClusterError
from cluster.jobs import submit
from cluster.planning.launch_options import make_launch_options
from infra.aws.client import Account
from infra.aws.launch_request import Internet
from infra.aws.stack import stack

RECIPE = replace(TINY, gpus=8, types=("p4d.24xlarge",))
TO_SSH = {"internet": Internet.PRIVATE, "ssh_address": "10.9.0.7/32"}


@pytest.fixture
def theirs(front: AwsFrontend) -> Network:
    return Network(Account())


def make_plan(**options: Any) -> tuple[dict[str, str], RentalSpec]:
    """Return what the plan says, and what the job may rent."""
    launch_options = make_launch_options(backend="aws", **{"machines": 2, "market": "on-demand", **options})
    plan = submit.plan(RECIPE, launch_options)
    assert plan.rental_plan
    return dict(plan.rental_plan.facts), RentalSpec.from_json(plan.spec.cloud)


def test_plan_names_the_network_and_rents_in_its_zones_only(theirs: Network) -> None:
    facts, rental_spec = make_plan(vpc=theirs.vpc)
    assert {place.zone for place in rental_spec.places} == {"us-east-1a", "us-east-1b"}
    assert rental_spec.network_ids == (theirs.vpc, theirs.public_a, theirs.public_b)
    assert theirs.vpc in facts["VPC"] and "NAT gateway" not in facts["internet"], "none is made in it"
    facts, rental_spec = make_plan(subnets=(theirs.private,), **TO_SSH)
    assert [place.zone for place in rental_spec.places] == ["us-east-1a"] and rental_spec.internet is Internet.PRIVATE
    assert "your NAT gateway costs $0.045 per GB" in facts["internet"]
    with pytest.raises(ClusterError, match=f"not offered in us-east-1b of {theirs.vpc};"):
        make_plan(subnets=(theirs.public_b,), zones=("us-east-1a",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subnets": ("vpc-1",)}, "--subnet.*'vpc-1' is no ID such as subnet-"),
        ({"vpc": "subnet-1"}, "--vpc.*'subnet-1' is no ID such as vpc-"),
        ({"vpc": "vpc-1", "regions": ("us-east-1", "us-east-2")}, "give one --region"),
        ({"vpc": "vpc-1", "internet": Internet.NAT}, "give --internet private"),
        ({"vpc": "vpc-1", "internet": Internet.PRIVATE}, r"such as --from 10\.0\.0\.5/32"),
    ],
)
def test_options_that_a_network_does_not_allow_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_plan(**options)


def test_stack_in_a_network_of_the_user_is_found_without_options_and_keeps_a_job_in_its_region(theirs: Network) -> None:
    with pytest.raises(BadInput, match="--internet private needs a network of yours: --subnet"):
        make_plan(**TO_SSH)
    stack.ensure(Account(), "10.9.0.7/32", network_ids=[theirs.vpc])
    with pytest.raises(ClusterError, match="makes no NAT gateway in a network of yours"):
        make_plan(internet=Internet.NAT)
    with pytest.raises(ClusterError, match="leads to an internet gateway"):
        make_plan(**TO_SSH)
    with pytest.raises(BadInput, match=r"the stack of us-east-1 is in a network of yours.* --region us-east-1"):
        make_plan(regions=("us-east-2", "us-east-1"))
    stack.remove(Account(), False)
    stack.ensure(Account(), "10.9.0.7/32", network_ids=[theirs.private])
    assert make_plan(**TO_SSH)[1].network_ids == (theirs.vpc, theirs.private), "also of a private network"


def test_check_and_up_take_a_network_and_down_leaves_it(theirs: Network) -> None:
    def run(*words: str, code: int = 0) -> str:
        ran = CliRunner().invoke(cli, words)
        assert ran.exit_code == code, ran.output
        return " ".join(ran.output.split())

    network = ("--vpc", theirs.vpc)
    checked = run("check", *network, "--type", "g5.xlarge")
    assert f"network {theirs.vpc}, which is yours" in checked and "CreateSecurityGroup is permitted" in checked
    assert "CreateVpc" not in checked and f"imgnet-cluster up --stack --vpc {theirs.vpc}" in checked
    assert "has no route to the internet" in run("check", "--subnet", theirs.lost, "--type", "g5.xlarge", code=1)
    assert f'"ec2:Vpc": "arn:aws:ec2:*:*:vpc/{theirs.vpc}"' in run("check", "--iam", *network)
    for command in (("up", "--stack"), ("check",)):
        assert "is no ID such as vpc-" in run(*command, "--vpc", theirs.lost, code=2)
    before = theirs.describe()
    assert "network 10.77" not in run("up", "--stack", "--dry-run", *network)
    assert theirs.vpc in run("up", "--stack", *network, "--from", "10.9.0.7/32")
    assert "ec2:RunInstances is permitted" in run("check", "--type", "g5.xlarge"), "in the network that the stack has"
    run("down", "--stack", "--delete-data", "-y")
    assert theirs.describe() == before
