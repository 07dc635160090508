"""Checks before a launch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.http_server import AwsFrontend

from infra.aws import tags
from infra.aws.client import Account
from infra.aws.instances import preflight
from infra.aws.instances.preflight import ERROR, OK, WARNING
from infra.aws.stack import policies, resources, stack
from infra.aws.stack.network import StackNetwork
from infra.aws.stack.stack import Stack, StackInspection
from infra.offers import LaunchFinding


def check(
    account: Account | None = None, stack_missing: Sequence[str] = (), own_stack: Stack | None = None, **changes: Any
) -> list[LaunchFinding]:
    inspection = StackInspection([*stack_missing], own_stack, StackNetwork("vpc-1", {}, ()))
    params: Any = {"types": ("p4d.24xlarge", "p5.48xlarge"), "machines": 16, "market": "spot", "inspection": inspection}
    return preflight.run_preflight(account or Account(), **{**params, **changes})


def find_one(findings: list[LaunchFinding], text: str) -> LaunchFinding:
    """Return the only finding whose message contains a text."""
    (finding,) = [finding for finding in findings if text in finding.what]
    return finding


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in preflight.TOOL_PACKAGES:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def own_stack(front: AwsFrontend, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """A complete stack. The programs are those of this computer while it is made, for its ssh key."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", os.defpath)
        patch.setenv("HOME", str(tmp_path))
        patch.setattr(resources, "SETTLE_SECONDS", 0.02)
        patch.setattr(resources, "RESOURCE_POLL_SECONDS", 0.01)
        return stack.ensure(Account(), "203.0.113.7/32")


def test_run_preflight_with_the_least_policy_and_without_problems_lists_every_check(
    front: AwsFrontend, own_stack: Stack
) -> None:
    front.sim.policy = policies.user_policy(region="us-east-1")
    findings = check(own_stack=own_stack)
    assert {(finding.level, finding.type_next) for finding in findings} == {(OK, "")}
    text = " | ".join(finding.what for finding in findings)
    for part in (
        "credentials: arn:aws:", "region us-east-1", "p4d.24xlarge (8 A100): us-east-1a, us-east-1b",
        "p5.48xlarge (8 H100)", "image ami-", "1536 vCPU", "3072 vCPU",
        "ec2:RunInstances is permitted", "ec2:CreatePlacementGroup is permitted", "tmux: /", "ssh: /", "ssh-keygen: /",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(("missing", "actions"), [
    ([], {"RunInstances", "CreatePlacementGroup"}),
    (["network", "file system"], {"CreatePlacementGroup", "CreateVpc", "CreateInternetGateway"}),
])  # fmt: skip
def test_run_preflight_sends_changing_calls_as_dry_runs(
    front: AwsFrontend, own_stack: Stack, missing: list[str], actions: set[str]
) -> None:
    account, calls = Account(), []
    for client in (account.ec2, account.ec2_no_retry):
        client.meta.events.register(
            "provide-client-params.ec2.*", lambda params, model, **_: calls.append((model.name, params))
        )
    user_tags = {"CostCenter": "42"}
    findings = check(account, stack_missing=missing, own_stack=None if missing else own_stack, user_tags=user_tags)
    changing = {name: params for name, params in calls if not name.startswith("Describe")}
    assert changing.keys() == actions
    for name, params in changing.items():
        assert find_one(findings, f"ec2:{name} is permitted").level == OK
        tag_sets = [tags.read_tags(specification) for specification in params["TagSpecifications"]]
        assert params["DryRun"] is True and tag_sets
        assert all({**user_tags, tags.STACK: tags.STACK_VALUE}.items() <= tag_set.items() for tag_set in tag_sets)
    if missing:
        assert find_one(findings, "the first launch creates network, file system").level == OK
        launch = find_one(findings, "ec2:RunInstances cannot be tried before the stack is there")
        assert (launch.level, launch.type_next) == (WARNING, "imgnet-cluster up --stack")


def test_run_preflight_without_credentials_or_region_checks_tools_only(
    front: AwsFrontend, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_step = "pass --region us-east-1, or update boto3: pip install -U boto3"
    region_finding = LaunchFinding(ERROR, "boto3 knows no region us-eats-1", next_step)
    assert check(Account("us-eats-1")) == [region_finding, *preflight.check_tools()]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    next_step = "aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    assert check() == [LaunchFinding(ERROR, "AWS: no credentials", next_step), *preflight.check_tools()]
    assert not front.calls


def test_run_preflight_reports_all_problems_with_commands(front: AwsFrontend, tools: Path, own_stack: Stack) -> None:
    front.sim.quota_vcpu = {"L-7212CCBC": 96.0, "L-C4BD4855": 0.0}
    front.fault(action="RunInstances", code="UnauthorizedOperation", status=403, times=99)
    front.fault(action="CreatePlacementGroup", code="TagPolicyViolation", status=400, times=99)
    (tools / "ssh-keygen").unlink()
    findings = check(types=("p3.16xlarge", "p4d.24xlarge", "p5.48xlarge"), own_stack=own_stack)
    tag_remedy = "pass the tag as the policy wants it: --tag KEY=VALUE"
    increase = "aws service-quotas request-service-quota-increase --region us-east-1 --service-code ec2 --quota-code"
    expected = [
        (WARNING, "p3.16xlarge is gone", ""),
        (ERROR, "p4d.24xlarge, spot: 1536 vCPU, but quota L-7212CCBC", f"{increase} L-7212CCBC --desired-value 1536"),
        (ERROR, "p5.48xlarge, spot: 3072 vCPU, but quota L-C4BD4855", f"{increase} L-C4BD4855 --desired-value 3072"),
        (ERROR, "ec2:RunInstances is not permitted", "imgnet-cluster check --iam"),
        (ERROR, "ec2:CreatePlacementGroup: the organization's tag policy refuses it", tag_remedy),
        (ERROR, "ssh-keygen is not installed here", "sudo apt-get install openssh-client"),
    ]
    problems = [finding for finding in findings if finding.level != OK]
    for finding, (level, message, next_command) in zip(problems, expected, strict=True):
        assert (finding.level, finding.type_next) == (level, next_command) and finding.what.startswith(message)


def test_account_on_the_free_plan_is_told_what_to_type(front: AwsFrontend, tools: Path, own_stack: Stack) -> None:
    message = "The specified instance type is not eligible for Free Tier."
    front.fault(action="RunInstances", code="InvalidParameterCombination", message=message, times=99)
    finding = find_one(check(own_stack=own_stack), "Free plan")
    assert (finding.level, finding.type_next) == (ERROR, "aws freetier upgrade-account-plan --account-plan-type PAID")


@pytest.mark.parametrize(("taken", "said"), [(None, "device 0 or 1"), (0, "device 0"), (1, "device 1")])
def test_preflight_says_which_device_index_of_efa_only_interfaces_ec2_takes(
    front: AwsFrontend, own_stack: Stack, taken: int | None, said: str
) -> None:
    front.sim.efa_only_device = taken
    findings = check(types=("g6.xlarge", "p4d.24xlarge"), own_stack=own_stack)
    assert find_one(findings, f"EC2 takes EFA-only interfaces as {said} of their network cards (p4d.24xlarge)")
    assert find_one(findings, "ec2:RunInstances is permitted").level == OK
    assert "EFA-only" not in " ".join(each.what for each in check(types=("g6.xlarge",), own_stack=own_stack))


def test_owner_of_a_capacity_block_sees_the_block_and_no_quota(front: AwsFrontend, own_stack: Stack) -> None:
    front.sim.quota_vcpu = {"L-417A185B": 0.0, "L-C4BD4855": 0.0}
    id = front.sim.reserve("p5.48xlarge", "us-east-1b", 4, is_block=True, end=front.sim.now() + 86400)
    findings = check(types=(), reservation_id=id, machines=4, own_stack=own_stack)
    assert {(finding.level, finding.type_next) for finding in findings} == {(OK, "")}
    assert find_one(findings, f"{id}: 4 of 4 machines are free")
    assert find_one(findings, "ec2:RunInstances is permitted") and not any("vCPU" in each.what for each in findings)
    findings = check(types=(), reservation_id=id, machines=5, own_stack=own_stack)
    assert find_one(findings, f"{id}: 4 of 4 machines are free").level == ERROR
    findings = check(types=(), reservation_id="cr-0", own_stack=own_stack)
    problem = find_one(findings, "cr-0: this account has no such reservation")
    assert problem.level == ERROR and "p4d" not in " ".join(finding.what for finding in findings)


def quotas(front: AwsFrontend, market: str, **allowed: float) -> list[str]:
    front.sim.quota_vcpu = {"L-" + code: value for code, value in allowed.items()}
    findings = check(types=("p4d.24xlarge", "p3dn.24xlarge", "p5.48xlarge"), market=market)
    return [finding.level for finding in findings if "vCPU" in finding.what]


def test_market_decides_which_quotas_are_checked(front: AwsFrontend, tools: Path) -> None:
    limits = {"7212CCBC": 0, "C4BD4855": 0, "417A185B": 2000}
    assert quotas(front, "spot-then-on-demand", **limits) == [WARNING, WARNING, OK, WARNING]
    assert quotas(front, "on-demand", **{"417A185B": 1000}) == [ERROR, ERROR]
    assert front.count("GetServiceQuota") == (3 + 1) + 2  # one call for each code; the two others count addresses


def test_quota_that_cannot_be_looked_up_is_a_warning(front: AwsFrontend, tools: Path) -> None:
    front.fault(action="GetServiceQuota", code="AccessDeniedException", times=99)
    findings = [finding for finding in check(types=("p4d.24xlarge", "inf2.xlarge")) if "vCPU" in finding.what]
    assert [finding.level for finding in findings] == [WARNING, WARNING]
    assert "quota L-7212CCBC cannot be looked up" in findings[0].what
    assert findings[0].type_next.startswith("aws service-quotas get-service-quota --region us-east-1")
    assert "quota (unknown) cannot be looked up" in findings[1].what and not findings[1].type_next


def test_type_without_image_is_a_warning_while_another_has_one(front: AwsFrontend, tools: Path) -> None:
    findings = check(types=("p3dn.24xlarge", "p4d.24xlarge"))
    problem = find_one(findings, "sm_70")
    assert problem.level == WARNING and "--type" in problem.type_next
    assert find_one(findings, "image ami-").level == OK
    findings = check(types=("p3dn.24xlarge",))
    assert find_one(findings, "sm_70").level == ERROR
    assert not [finding for finding in findings if "RunInstances" in finding.what]


def test_run_preflight_turns_errors_into_one_line_findings(front: AwsFrontend, tools: Path) -> None:
    for action in ("DescribeInstanceTypeOfferings", "GetParameters", "GetServiceQuota"):
        front.fault(action=action, code="UnauthorizedOperation", times=99)
    front.fault(action="CreatePlacementGroup", code="InvalidParameterValue", times=99)
    findings = check()
    # Without types no image is looked up.
    assert len([finding for finding in findings if finding.level == ERROR]) == 1
    unclear = find_one(findings, "cannot find out whether ec2:CreatePlacementGroup is permitted")
    assert (unclear.level, unclear.type_next) == (WARNING, "imgnet-cluster check --iam")
    assert not [finding for finding in findings if "\n" in finding.what + finding.type_next]


def test_networks_and_addresses_of_all_users_are_counted_against_the_quotas(front: AwsFrontend, tools: Path) -> None:
    ec2 = Account().ec2
    for number in range(4):  # and AWS's own one
        ec2.create_vpc(CidrBlock=f"10.{number}.0.0/16")
        ec2.allocate_address(Domain="vpc")
    without_stack = StackInspection(["network"], None, StackNetwork(None, {}, ()))
    findings = check(inspection=without_stack)
    network = find_one(findings, "5 networks (VPC) in use of 5")
    assert network.level == ERROR and network.type_next.endswith("vpc --quota-code L-F678F1CE --desired-value 7")
    addresses = find_one(findings, "4 Elastic IP addresses in use of 5")
    assert addresses.level == WARNING and "--service-code ec2 --quota-code L-0263D0A3" in addresses.type_next
    assert not [finding for finding in check() if "(VPC) in use" in finding.what], "the stack has its network"
