"""Everything that stands in the way, at once."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.http_server import AwsFrontend

from infra.aws import tags
from infra.aws.client import Account
from infra.aws.errors import CloudError
from infra.aws.instances import preflight
from infra.aws.instances.preflight import ERROR, OK, WARNING, Finding

CHANGING = ("RunInstances", "CreatePlacementGroup", "CreateVpc", "CreateInternetGateway")


def check(account: Account | None = None, **words: Any) -> list[Finding]:
    asked = {"types": ("p4d.24xlarge", "p5.48xlarge"), "machines": 16, "market": "spot", "stack_missing": []} | words
    return preflight.run_preflight(account or Account(), **asked)


def levels(found: list[Finding]) -> dict[str, list[str]]:
    """What was said, by level."""
    return {level: [one.message for one in found if one.level == level] for level in (OK, WARNING, ERROR)}


def one(found: list[Finding], word: str) -> Finding:
    """The only finding that says a word."""
    (it,) = [it for it in found if word in it.message]
    return it


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH on which all that is needed lies."""
    for name in preflight.TOOL_PACKAGES:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def subnet(account: Account, bits: int = 20, ours: bool = True) -> str:
    """A network of ours with one subnet."""
    marked = tags.tag_specifications(["vpc"], {tags.STACK: tags.STACK_VALUE})
    vpc = account.ec2.create_vpc(CidrBlock="10.77.0.0/16", TagSpecifications=marked)["Vpc"]["VpcId"]
    made = account.ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.77.0.0/{bits}", AvailabilityZone="us-east-1a")
    if ours:
        id = made["Subnet"]["SubnetId"]
        account.ec2.create_tags(Resources=[id], Tags=tags.to_aws_tags({tags.STACK: tags.STACK_VALUE}))
    return str(made["Subnet"]["SubnetId"])


def test_where_all_is_well_everything_is_listed_and_nothing_must_be_typed(front: AwsFrontend, tools: Path) -> None:
    account = Account()
    subnet(account)
    found = check(account)
    said = levels(found)
    assert not said[WARNING] and not said[ERROR] and not [it.next_command for it in found if it.next_command]
    for word in (
        "credentials: arn:aws:", "region us-east-1", "p4d.24xlarge (8 A100): us-east-1a, us-east-1b",
        "p5.48xlarge (8 H100)", "image ami-", "1536 vCPU", "3072 vCPU", "512 addresses are free in us-east-1a",
        "ec2:RunInstances is permitted", "ec2:CreatePlacementGroup is permitted", "tmux: /", "ssh: /", "ssh-keygen: /",
    ):  # fmt: skip
        assert [what for what in said[OK] if word in what], (word, said)


def test_it_changes_nothing(front: AwsFrontend, tools: Path) -> None:
    found = check(stack_missing=["network", "file system"])
    assert one(found, "the first launch makes network, file system").level == OK
    assert {f"ec2:{name} is permitted" for name in CHANGING} <= set(levels(found)[OK])
    assert not front.sim.instances() and not front.sim.groups and not front.sim.leftovers()
    assert not [name for _, name in front.calls if name.startswith(("Create", "Run")) and name not in CHANGING]
    ec2 = Account().ec2
    mine = [{"Name": "tag-key", "Values": [tags.STACK]}]
    assert not ec2.describe_vpcs(Filters=mine)["Vpcs"]
    assert not ec2.describe_internet_gateways(Filters=mine)["InternetGateways"]


@pytest.mark.parametrize("missing", [[], ["network"]])
def test_every_changing_call_is_a_dry_run(front: AwsFrontend, tools: Path, missing: list[str]) -> None:
    account, asked = Account(), []
    for client in (account.ec2, account.ec2_no_retry):
        client.meta.events.register("provide-client-params.ec2.*", lambda params, model, **_: asked.append((model, params)))  # fmt: skip
    check(account, stack_missing=missing)
    changing = {model.name: params for model, params in asked if not model.name.startswith("Describe")}
    assert changing.keys() == set(CHANGING if missing else CHANGING[:2])
    for name, params in changing.items():
        assert params["DryRun"] is True, name
        (marked,) = {tags.read_tags(one)[tags.STACK] for one in params["TagSpecifications"]}
        assert marked == tags.STACK_VALUE


def test_the_dry_run_of_a_machine_is_what_the_least_policy_wants_to_see(front: AwsFrontend, tools: Path) -> None:
    spot = preflight._dry_run_request("g5.xlarge", "ami-1", "subnet-1", spot=True)
    assert spot["InstanceMarketOptions"] == {"MarketType": "spot"} and spot["SubnetId"] == "subnet-1"
    assert spot["MetadataOptions"] == {"HttpTokens": "required"}
    kinds = [one["ResourceType"] for one in spot["TagSpecifications"]]
    assert kinds == ["instance", "volume", "network-interface", "spot-instances-request"]
    plain = preflight._dry_run_request("g5.xlarge", "ami-1", None, spot=False)
    assert "InstanceMarketOptions" not in plain and "SubnetId" not in plain and len(plain["TagSpecifications"]) == 3


def test_without_credentials_only_what_needs_none_is_looked_at(
    front: AwsFrontend, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tools / "tmux").unlink()
    found = check()
    assert found[0] == Finding(
        ERROR, "AWS: no credentials", "aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )
    assert found[1:] == preflight.check_tools() and len(found) == 4 and not front.calls


def test_credentials_that_aws_refuses_are_an_error_and_end_the_questions(front: AwsFrontend, tools: Path) -> None:
    front.fault(action="GetCallerIdentity", code="InvalidClientTokenId", status=403, times=99)
    found = check()
    assert (found[0].level, found[0].next_command) == (ERROR, "see: aws sts get-caller-identity")
    assert "InvalidClientTokenId" in found[0].message and len(found) == 4


def test_a_region_that_does_not_exist_is_answered_with_the_nearest(front: AwsFrontend, tools: Path) -> None:
    found = check(Account("us-eats-1"))
    assert found[0] == Finding(ERROR, "boto3 knows no region us-eats-1", "--region us-east-1, or pip install -U boto3")
    assert len(found) == 4 and not front.calls


@pytest.mark.parametrize("refused", [False, True])
def test_a_region_that_is_not_switched_on_is_told_from_bad_credentials(
    front: AwsFrontend, tools: Path, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, home = Account("af-south-1"), Account("us-east-1")
    answer = {"Regions": [{"RegionName": "af-south-1", "OptInStatus": "not-opted-in"}]}
    home.__dict__["ec2"] = type("Client", (), {"describe_regions": lambda self, **_: answer})()
    monkeypatch.setattr(account, "at", lambda region: home)
    if refused:  # as AWS does: such a region knows nobody
        front.fault(action="GetCallerIdentity", code="InvalidClientTokenId", status=403, times=99)
    found = check(account)
    wrong = [it for it in found if it.level == ERROR]
    assert wrong == [
        Finding(
            ERROR,
            "region af-south-1 is not switched on for this account (it takes minutes)",
            "aws account enable-region --region-name af-south-1",
        )
    ]


def test_all_that_is_wrong_is_said_at_once_each_with_the_next_thing_to_type(
    front: AwsFrontend, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = Account()
    subnet(account, bits=28)
    front.sim.quota_vcpu = {"L-7212CCBC": 96.0, "L-C4BD4855": 0.0}
    for action in ("RunInstances", "CreatePlacementGroup"):
        front.fault(action=action, code="UnauthorizedOperation", status=403, times=99)
    (tools / "ssh-keygen").unlink()
    wrong = [it for it in check(account, types=("p3.16xlarge", "p4d.24xlarge", "p5.48xlarge")) if it.level != OK]
    command = "aws service-quotas request-service-quota-increase --region us-east-1 --service-code ec2 --quota-code"
    assert wrong == [
        Finding(WARNING, "p3.16xlarge is gone (AWS stopped listing it in 2026): p4d.24xlarge is taken instead"),
        Finding(ERROR, "p4d.24xlarge, spot: 1536 vCPU, and quota L-7212CCBC allows 96",
                f"{command} L-7212CCBC --desired-value 1536"),
        Finding(ERROR, "p5.48xlarge, spot: 3072 vCPU, and quota L-C4BD4855 allows 0",
                f"{command} L-C4BD4855 --desired-value 3072"),
        Finding(ERROR, "us-east-1a: 11 of 512 addresses are free", "imgnet-cluster gc"),
        Finding(ERROR, "ec2:RunInstances is not permitted", "imgnet-cluster check --iam"),
        Finding(ERROR, "ec2:CreatePlacementGroup is not permitted", "imgnet-cluster check --iam"),
        Finding(ERROR, "ssh-keygen is not installed here", "sudo apt-get install openssh-client"),
    ]  # fmt: skip


# --- quotas -------------------------------------------------------------------------------------------------------


def quotas(front: AwsFrontend, market: str, **allowed: float) -> list[tuple[str, str]]:
    """Level and text of what is said of quotas."""
    front.sim.quota_vcpu = {"L-" + code: value for code, value in allowed.items()}
    found = check(types=("p4d.24xlarge", "p3dn.24xlarge", "p5.48xlarge"), market=market)
    return [(it.level, it.message) for it in found if "vCPU" in it.message]


def test_a_quota_that_is_too_small_is_a_warning_while_another_is_enough(front: AwsFrontend, tools: Path) -> None:
    assert quotas(front, "spot", **{"7212CCBC": 1535, "C4BD4855": 3072}) == [
        (WARNING, "p4d.24xlarge, p3dn.24xlarge, spot: 1536 vCPU, and quota L-7212CCBC allows 1535"),
        (OK, "p5.48xlarge, spot: 3072 vCPU of 3072 that quota L-C4BD4855 allows"),
    ]


def test_the_market_says_which_quotas_are_looked_at(front: AwsFrontend, tools: Path) -> None:
    short = quotas(front, "spot-then-on-demand", **{"7212CCBC": 0, "C4BD4855": 0, "417A185B": 2000})
    assert [level for level, _ in short] == [WARNING, WARNING, OK, WARNING]
    assert short[2][1] == "p4d.24xlarge, p3dn.24xlarge, on-demand: 1536 vCPU of 2000 that quota L-417A185B allows"
    assert [level for level, _ in quotas(front, "on-demand", **{"417A185B": 1000})] == [ERROR, ERROR]
    assert front.count("GetServiceQuota") == 3 + 1  # one question for each code


def test_a_quota_that_cannot_be_looked_up_is_a_warning_and_no_reason_to_stop(front: AwsFrontend, tools: Path) -> None:
    front.fault(action="GetServiceQuota", code="AccessDeniedException", times=99)
    found = [it for it in check() if "vCPU" in it.message]
    assert [it.level for it in found] == [WARNING, WARNING] and "cannot be looked up" in found[0].message
    assert found[0].next_command.startswith("aws service-quotas get-service-quota --region us-east-1")


def test_a_type_whose_quota_is_not_known_is_a_warning(front: AwsFrontend, tools: Path) -> None:
    (it,) = [it for it in check(types=("inf2.xlarge",)) if "vCPU" in it.message]
    assert (it.level, it.next_command) == (WARNING, "")


# --- types, image, addresses, permissions --------------------------------------------------------------------------


def test_a_region_without_any_of_the_types_is_an_error_and_the_rest_is_still_looked_at(
    front: AwsFrontend, tools: Path
) -> None:
    found = check(types=("p3.16xlarge", "q9.large"))
    wrong = one(found, "p3.16xlarge")
    assert wrong.level == ERROR and "imgnet-cluster offers" in wrong.next_command
    assert one(found, "ec2:CreatePlacementGroup").level == OK and one(found, "tmux").level == OK


def test_a_type_without_an_image_is_a_warning_while_another_has_one(front: AwsFrontend, tools: Path) -> None:
    found = check(types=("p3dn.24xlarge", "p4d.24xlarge"))
    wrong = one(found, "sm_70")
    assert wrong.level == WARNING and "--type" in wrong.next_command and one(found, "image ami-").level == OK
    found = check(types=("p3dn.24xlarge",))
    assert one(found, "sm_70").level == ERROR and not [it for it in found if "RunInstances" in it.message]


def test_an_image_of_ones_own_is_looked_at_instead(front: AwsFrontend, tools: Path) -> None:
    assert one(check(ami="ami-0123456789abcdef0"), "ami-0123456789abcdef0").level == ERROR


def test_subnets_of_others_are_not_counted_and_none_is_no_error(front: AwsFrontend, tools: Path) -> None:
    account = Account()
    subnet(account, ours=False)
    assert not [it for it in check(account) if "addresses" in it.message]


def test_a_full_subnet_is_a_warning_while_another_has_addresses(front: AwsFrontend, tools: Path) -> None:
    account = Account()
    subnet(account, bits=28)
    subnet(account, bits=20)
    found = [it for it in check(account) if "addresses" in it.message]
    assert [it.level for it in found] == [WARNING, OK]
    found = [it for it in check(account, types=("g5.xlarge",), machines=2) if "addresses" in it.message]
    assert [(it.level, it.message) for it in found] == [(OK, "2 addresses are free in us-east-1a, us-east-1a")]


@pytest.mark.parametrize(("code", "level"), [
    ("DryRunOperation", OK), ("UnauthorizedOperation", ERROR), ("AccessDenied", ERROR),
    ("InvalidParameterValue", WARNING), ("VPCIdNotSpecified", WARNING),
    ("InsufficientInstanceCapacity", WARNING), ("", WARNING),
])  # fmt: skip
def test_a_dry_run_is_read_by_the_code_of_its_answer(code: str, level: str) -> None:
    def answer() -> None:
        raise CloudError("said", code)

    found = preflight._check_permission("RunInstances", answer)
    assert found.level == level and "ec2:RunInstances" in found.message
    assert bool(found.next_command) is (level != OK)


def test_a_dry_run_that_does_something_is_no_permission() -> None:
    assert preflight._check_permission("RunInstances", lambda: None).level == WARNING


def test_no_finding_is_longer_than_a_line_and_no_error_escapes(front: AwsFrontend, tools: Path) -> None:
    for action in ("DescribeInstanceTypeOfferings", "GetParameters", "DescribeSubnets", "GetServiceQuota"):
        front.fault(action=action, code="UnauthorizedOperation", times=99)
    found = check()
    assert len([it for it in found if it.level == ERROR]) == 2  # the types, and our subnets; without types no image
    assert not [it for it in found if "\n" in it.message + it.next_command]


@pytest.mark.parametrize("name", preflight.TOOL_PACKAGES)
def test_a_missing_tool_is_an_error_with_its_package(tools: Path, name: str) -> None:
    assert {it.level for it in preflight.check_tools()} == {OK}
    (tools / name).unlink()
    (wrong,) = [it for it in preflight.check_tools() if it.level != OK]
    assert wrong == Finding(
        ERROR, f"{name} is not installed here", f"sudo apt-get install {preflight.TOOL_PACKAGES[name]}"
    )
    assert shutil.which(name) is None
