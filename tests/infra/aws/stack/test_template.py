"""The stack and our IAM policies as a CloudFormation template, which cfn-lint checks against AWS's own schemas.

The template is made from the requests that `stack.ensure` sends and from the policies, not from a second description.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from cfnlint.api import lint
from cfnlint.config import ManualArgs
from support.aws_stack import OWN_CIDR, REGION, RecordingAccount

from infra.aws.stack import policies, stack

Values = dict[str, Any]
Calls = list[tuple[str, Values]]
NOT_IN_TEMPLATES = ("TagSpecifications", "ClientToken", "CreationToken", "Backup", "CreateBucketConfiguration")
POLICY_PARAMETERS = ("Policy", "PolicyDocument", "AssumeRolePolicyDocument")
REFERENCES = {"vpc": "VPC", "igw": "InternetGateway", "rtb": "RouteTable", "sg": "SecurityGroup", "fs": "FileSystem"}


def rule_of(peer_property: str) -> Callable[[Values], Values]:
    """Return a function for the properties of one rule of a security group: for addresses, or the group itself."""

    def convert(params: Values) -> Values:
        (permission,) = params["IpPermissions"]
        groups = permission.get("UserIdGroupPairs", [])
        peer = {peer_property: groups[0]["GroupId"]} if groups else permission["IpRanges"][0]
        ports = {name: permission[name] for name in ("IpProtocol", "FromPort", "ToPort") if name in permission}
        return {"GroupId": params["GroupId"], **ports, **peer}

    return convert


def renamed(**names: str) -> Callable[[Values], Values]:
    """Return a function that gives parameters the names of CloudFormation's properties; "" drops one."""
    return lambda params: {names.get(key, key): value for key, value in params.items() if names.get(key, key)}


# The type of the resource that a request creates, and its properties by the request's parameters.
CREATED: dict[str, tuple[str, Callable[[Values], Values]]] = {
    "CreateRole": ("IAM::Role", dict),
    "PutRolePolicy": ("IAM::RolePolicy", dict),
    "CreateInstanceProfile": ("IAM::InstanceProfile", renamed(Tags="")),
    "CreateVpc": ("EC2::VPC", dict),
    "CreateSubnet": ("EC2::Subnet", dict),
    "CreateInternetGateway": ("EC2::InternetGateway", dict),
    "AttachInternetGateway": ("EC2::VPCGatewayAttachment", dict),
    "CreateRouteTable": ("EC2::RouteTable", dict),
    "CreateRoute": ("EC2::Route", dict),
    "AssociateRouteTable": ("EC2::SubnetRouteTableAssociation", dict),
    "CreateVpcEndpoint": ("EC2::VPCEndpoint", dict),
    "CreateSecurityGroup": ("EC2::SecurityGroup", renamed(Description="GroupDescription")),
    "AuthorizeSecurityGroupIngress": ("EC2::SecurityGroupIngress", rule_of("SourceSecurityGroupId")),
    "AuthorizeSecurityGroupEgress": ("EC2::SecurityGroupEgress", rule_of("DestinationSecurityGroupId")),
    "CreateFileSystem": ("EFS::FileSystem", renamed(Tags="FileSystemTags")),
    "CreateAccessPoint": ("EFS::AccessPoint", renamed(Tags="AccessPointTags")),
    "CreateMountTarget": ("EFS::MountTarget", dict),
    "CreateBucket": ("S3::Bucket", renamed(Bucket="BucketName")),
    "CreatePolicy": ("IAM::ManagedPolicy", dict),
    "PutBucketPolicy": ("S3::BucketPolicy", renamed(Policy="PolicyDocument")),
}  # fmt: skip
# The same of requests that set properties of the resource of a type that was created before.
CHANGED: dict[str, tuple[str, Callable[[Values], Values]]] = {
    "AddRoleToInstanceProfile": ("InstanceProfile", lambda params: {"Roles": [params["RoleName"]]}),
    "ModifyVpcAttribute": ("VPC", lambda params: {"EnableDnsHostnames": params["EnableDnsHostnames"]["Value"]}),
    "PutFileSystemPolicy": ("FileSystem", renamed(FileSystemId="", Policy="FileSystemPolicy")),
    "PutPublicAccessBlock": ("Bucket", renamed(Bucket="")),
    "PutBucketEncryption": ("Bucket", lambda params: {
        "BucketEncryption": {"ServerSideEncryptionConfiguration": [
            {"ServerSideEncryptionByDefault": rule["ApplyServerSideEncryptionByDefault"]}
            for rule in params["ServerSideEncryptionConfiguration"]["Rules"]
        ]},
    }),
    "PutBucketLifecycleConfiguration": ("Bucket", lambda params: {
        "LifecycleConfiguration": {"Rules": [
            {"Id": rule["ID"], **{name: rule[name] for name in ("Status", "AbortIncompleteMultipartUpload")}}
            for rule in params["LifecycleConfiguration"]["Rules"]
        ]},
    }),
    "PutBucketTagging": ("Bucket", lambda params: {"Tags": params["Tagging"]["TagSet"]}),
}  # fmt: skip


def plain(value: Any) -> Any:
    """Return a value with references in place of the IDs of resources that the template has once."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    match = re.fullmatch(r"([a-z]+)-[0-9a-f]{8,}", value) if isinstance(value, str) else None
    return {"Ref": REFERENCES[match[1]]} if match and match[1] in REFERENCES else value


def make_template(calls: Calls) -> str:
    """Return the template of the resources that some requests create."""
    resources: dict[str, Values] = {}
    for action, params in calls:
        specifications = params.get("TagSpecifications")
        parameters = {name: value for name, value in params.items() if name not in NOT_IN_TEMPLATES}
        parameters |= {"Tags": specifications[0]["Tags"]} if specifications else {}
        parameters |= {name: json.loads(params[name]) for name in POLICY_PARAMETERS if name in params}
        is_new = action in CREATED
        kind, convert = (CREATED if is_new else CHANGED)[action]
        name = kind.rpartition(":")[2]
        if is_new:
            name += str(sum(each.startswith(name) for each in resources) or "")
            resources[name] = {"Type": f"AWS::{kind}", "Properties": {}}
        resources[name]["Properties"] |= plain(convert(parameters))
    return json.dumps({"AWSTemplateFormatVersion": "2010-09-09", "Resources": resources})


@pytest.fixture
def calls(account: RecordingAccount) -> Calls:
    """The requests that make the whole stack, and those in which a person would create the other policies."""
    stack.ensure(account, OWN_CIDR, bucket="imgnet-data", user_tags={"Team": "ml"})
    documents = policies.user_policy(), policies.machine_policy(bucket="imgnet-*"), policies.dataset_policy("b", "p/")
    by_hand = [("CreatePolicy", {"PolicyDocument": json.dumps(document)}) for document in documents]
    return [(action, params) for action, params in account.calls if action in {*CREATED, *CHANGED}] + by_hand


def problems(calls: Calls) -> list[tuple[str, str]]:
    """Return what cfn-lint finds in the template of some requests: the resource, and rule and message."""
    matches = lint(make_template(calls), config=ManualArgs(regions=[REGION], ignore_checks=["W3010"]))
    return [(str(match.path[1]), f"{match.rule.id} {match.message}") for match in matches]  # W3010: a zone is named


def test_stack_and_policies_are_a_valid_template(calls: Calls) -> None:
    assert len(calls) > 30 and problems(calls) == []


FAULTS = [  # the request, a text of its parameters, what it becomes, the resource, and the rule that finds it
    ("CreateVpc", '"10.77.0.0/16"', '"10.77.0.0/33"', "VPC", "E3002"),
    ("CreateSubnet", '"AvailabilityZone"', '"Zone"', "Subnet", "E3002"),
    ("CreateSecurityGroup", '"VpcId"', '"Network"', "SecurityGroup", "E3002"),
    ("CreateVpcEndpoint", '"Gateway"', '"Gate"', "VPCEndpoint", "E3030"),
    ("CreateRoute", '"0.0.0.0/0"', '"0.0.0.0/40"', "Route1", "E3002"),
    ("CreateFileSystem", '"elastic"', '"elastick"', "FileSystem", "E3030"),
    ("CreateAccessPoint", '"0755"', '"0855"', "AccessPoint", "E3031"),
    ("CreateMountTarget", '"SubnetId"', '"Subnet"', "MountTarget", "E3003"),
    ("PutBucketEncryption", '"AES256"', '"AES265"', "Bucket", "E3030"),
    ("CreateRole", "sts:AssumeRole", "sts:AsumeRole", "Role", "W3037"),
    ("PutRolePolicy", "2012-10-17", "2012-10-18", "RolePolicy", "E3510"),
    ("CreatePolicy", "ec2:RunInstances", "ec2:RunInstance", "ManagedPolicy", "W3037"),
]


def test_each_of_twelve_faults_is_found(calls: Calls) -> None:
    faulty = list(calls)
    for action, text, changed, *_ in FAULTS:
        index = next(index for index, (each, _) in enumerate(faulty) if each == action)
        whole = json.dumps(faulty[index][1])
        assert text in whole.replace("\\", ""), (action, text)
        faulty[index] = (action, json.loads(whole.replace(text, changed)))
    found = problems(faulty)
    missed = [
        fault for fault in FAULTS if not any(name == fault[3] and text.startswith(fault[4]) for name, text in found)
    ]
    assert len(FAULTS) == 12 and missed == []
