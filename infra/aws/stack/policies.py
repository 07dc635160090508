"""The least that a person needs to launch, and that a machine needs to run, as IAM policies in plain data.

A person may look at all, make only what bears our tag in the very call that makes it, and change or end only what bears
it. A test holds `for_user` against every call in infra/. What only an admin does, once, is in `ADMIN`.

Sources: AWS, "Actions, resources, and condition keys" for EC2, EFS, S3 and IAM; "Controlling access during launch";
"Using IAM to control access to file systems" (which keys of a condition hold for a mount).
"""

from typing import Any

from infra.aws import tags

Policy = dict[str, Any]
ROLE_NAME = "imgnet-machine"
DATA_PREFIX, RUNS_PREFIX = "data", "runs"  # the prefixes of a bucket that machines read and write
FILE_SYSTEM_STATEMENTS = ("OnlyTLS", "ByMountTarget")  # the statements of the file system's policy
BUCKET_PATTERN = "imgnet-*"
MAX_POLICY_CHARACTERS = 6144  # the size of a managed policy, without white space

READ_ACTIONS = """
ec2:DescribeAddresses ec2:DescribeAvailabilityZones ec2:DescribeImages ec2:DescribeInstanceTypeOfferings
ec2:DescribeInstanceTypes ec2:DescribeInstances ec2:DescribeInternetGateways ec2:DescribeKeyPairs
ec2:DescribeNetworkInterfaces ec2:DescribePlacementGroups ec2:DescribeRegions ec2:DescribeRouteTables
ec2:DescribeSecurityGroups ec2:DescribeSpotInstanceRequests ec2:DescribeSpotPriceHistory ec2:DescribeSubnets
ec2:DescribeVolumes ec2:DescribeVpcAttribute ec2:DescribeVpcEndpoints ec2:DescribeVpcs
elasticfilesystem:Describe* pricing:GetProducts servicequotas:GetServiceQuota servicequotas:GetAWSDefaultServiceQuota
"""
CREATE_ACTIONS = """
ec2:AllocateAddress ec2:CreateInternetGateway ec2:CreatePlacementGroup ec2:CreateRouteTable ec2:CreateSecurityGroup
ec2:CreateSubnet ec2:CreateVpc ec2:CreateVpcEndpoint ec2:ImportKeyPair elasticfilesystem:CreateFileSystem
"""
CREATE_IN_VPC_ACTIONS = "ec2:CreateRouteTable ec2:CreateSecurityGroup ec2:CreateSubnet ec2:CreateVpcEndpoint"
CHANGE_ACTIONS = """
ec2:AssociateAddress ec2:AssociateRouteTable ec2:AttachInternetGateway ec2:AuthorizeSecurityGroupEgress
ec2:AuthorizeSecurityGroupIngress ec2:CancelSpotInstanceRequests ec2:CreateRoute ec2:CreateTags
ec2:DeleteInternetGateway ec2:DeleteKeyPair ec2:DeletePlacementGroup ec2:DeleteRouteTable
ec2:DeleteSecurityGroup ec2:DeleteSubnet ec2:DeleteVolume ec2:DeleteVpc ec2:DeleteVpcEndpoints
ec2:DetachInternetGateway ec2:DisassociateAddress ec2:DisassociateRouteTable ec2:GetConsoleOutput ec2:ModifyVpcAttribute
ec2:ReleaseAddress ec2:ReplaceRoute ec2:RevokeSecurityGroupIngress ec2:TerminateInstances
elasticfilesystem:CreateAccessPoint elasticfilesystem:CreateMountTarget elasticfilesystem:DeleteAccessPoint
elasticfilesystem:DeleteFileSystem elasticfilesystem:DeleteMountTarget elasticfilesystem:PutFileSystemPolicy
elasticfilesystem:TagResource elasticfilesystem:UntagResource
"""
BUCKET_ACTIONS = """
s3:CreateBucket s3:DeleteBucket s3:DeleteObject s3:GetBucketTagging s3:GetObject s3:ListBucket
s3:PutBucketPublicAccessBlock s3:PutBucketTagging s3:PutEncryptionConfiguration s3:PutObject
"""
READ_ROLE_ACTIONS = "iam:GetInstanceProfile iam:GetRole iam:GetRolePolicy iam:ListRolePolicies"
ADMIN_ACTIONS = """
iam:CreateRole iam:TagRole iam:PutRolePolicy iam:DeleteRolePolicy iam:DeleteRole iam:CreateInstanceProfile
iam:TagInstanceProfile iam:AddRoleToInstanceProfile iam:RemoveRoleFromInstanceProfile iam:DeleteInstanceProfile
"""


def user_policy(account: str = "*", region: str = "*", bucket: str = BUCKET_PATTERN) -> Policy:
    """Return the least policy of a person who launches, in an account (its number), a region, with buckets so named."""
    ec2 = f"arn:aws:ec2:{region}:{account}:"
    asked = {"StringEquals": {f"aws:RequestTag/{tags.STACK}": tags.STACK_VALUE}}
    ours = {"StringEquals": {f"aws:ResourceTag/{tags.STACK}": tags.STACK_VALUE}}
    parameters = [f"arn:aws:ssm:{region}::parameter/aws/service/{name}/*" for name in ("deeplearning", "canonical")]
    new = ("instance", "volume", "network-interface", "spot-instances-request")
    old = ("key-pair", "subnet", "security-group", "placement-group")
    no_v2 = {"StringNotEquals": {"ec2:MetadataHttpTokens": "required"}}
    roles = [f"arn:aws:iam::{account}:{kind}/{ROLE_NAME}" for kind in ("role", "instance-profile")]
    spot = f"arn:aws:iam::{account}:role/aws-service-role/spot.amazonaws.com/*"
    efs = f"arn:aws:iam::{account}:role/aws-service-role/elasticfilesystem.amazonaws.com/*"
    linked = {"StringEquals": {"iam:AWSServiceName": ["spot.amazonaws.com", "elasticfilesystem.amazonaws.com"]}}
    return _make_policy(
        _allow("Look", READ_ACTIONS, "*"),
        _allow("Images", "ssm:GetParameter ssm:GetParameters", parameters),
        _allow("MakeWithTag", CREATE_ACTIONS, "*", asked),
        _allow("MakeInOurs", CREATE_IN_VPC_ACTIONS, [f"{ec2}vpc/*", f"{ec2}route-table/*"], ours),
        _allow("Run", "ec2:RunInstances", [f"{ec2}{kind}/*" for kind in new], asked),
        _allow("RunInOurs", "ec2:RunInstances", [f"{ec2}{kind}/*" for kind in old], ours),
        _allow("RunImage", "ec2:RunInstances", f"arn:aws:ec2:{region}::image/*"),
        _deny("OnlyIMDSv2", "ec2:RunInstances", f"{ec2}instance/*", no_v2),
        _allow("TagNew", "ec2:CreateTags", f"{ec2}*/*", {**asked, "Null": {"ec2:CreateAction": "false"}}),
        _allow(
            "TagNewFiles",
            "elasticfilesystem:TagResource",
            "*",
            {"StringEquals": {"elasticfilesystem:CreateAction": "CreateFileSystem"}},
        ),
        _allow("ChangeOurs", CHANGE_ACTIONS, "*", ours),
        _allow("MountTargets", "ec2:CreateNetworkInterface ec2:DeleteNetworkInterface", "*"),
        _allow("Roles", READ_ROLE_ACTIONS, roles),
        _allow("PassRole", "iam:PassRole", roles[0], {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}),
        _allow("SpotAndFiles", "iam:CreateServiceLinkedRole", [spot, efs], linked),
        _allow("Bucket", BUCKET_ACTIONS, [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]),
    )


def machine_policy(
    account: str = "*", region: str = "*", file_system: str = "*", bucket: str | None = None, role: str = ROLE_NAME
) -> Policy:
    """Return the least policy of the machines: the file system, the bucket's data to read, its runs to write."""
    files = f"arn:aws:elasticfilesystem:{region}:{account}:file-system/{file_system}"
    parts = [
        _allow("Mount", "elasticfilesystem:ClientMount elasticfilesystem:ClientWrite", files),
        _allow("FindMountTarget", "elasticfilesystem:DescribeMountTargets", files),
    ]
    if bucket:
        place = f"arn:aws:s3:::{bucket}"
        ours = {"StringLike": {"s3:prefix": [f"{DATA_PREFIX}/*", f"{RUNS_PREFIX}/*"]}}
        parts += [
            _allow("ReadData", "s3:GetObject", f"{place}/{DATA_PREFIX}/*"),
            _allow("WriteRuns", "s3:PutObject", f"{place}/{RUNS_PREFIX}/*"),
            _allow("List", "s3:ListBucket", place, ours),
        ]
    return _make_policy(*parts)


def dataset_policy(bucket: str, prefix: str) -> Policy:
    """Return what it takes to read a packed set and its copies in another bucket, for the machines or a person."""
    place = f"arn:aws:s3:::{bucket}"
    below = {"StringLike": {"s3:prefix": [f"{prefix}*"]}}
    return _make_policy(
        _allow("ReadSet", "s3:GetObject", f"{place}/{prefix}*"), _allow("ListSet", "s3:ListBucket", place, below)
    )


def trust_policy() -> Policy:
    """Return who may take the machines' role: EC2, for its machines."""
    who = {"Service": "ec2.amazonaws.com"}
    return _make_policy({"Effect": "Allow", "Principal": who, "Action": "sts:AssumeRole"})


def file_system_policy(account: str, region: str, file_system: str) -> Policy:
    """Return the file system's own policy: by TLS, a mount target and a role of this account, or not at all."""
    place = f"arn:aws:elasticfilesystem:{region}:{account}:file-system/{file_system}"
    mount = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    anyone = {"AWS": "*"}
    by_target = {"Bool": {"elasticfilesystem:AccessedViaMountTarget": "true"}}
    return _make_policy(
        {
            "Sid": FILE_SYSTEM_STATEMENTS[0], "Effect": "Deny", "Principal": anyone, "Action": "*", "Resource": place,
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        },
        {
            "Sid": FILE_SYSTEM_STATEMENTS[1], "Effect": "Allow", "Principal": {"AWS": f"arn:aws:iam::{account}:root"},
            "Action": mount, "Resource": place, "Condition": by_target,
        },
    )  # fmt: skip


def allowed_actions(policy: Policy) -> set[str]:
    """Return the names of the actions that a policy allows; they may end in *."""
    allowed = [one["Action"] for one in policy["Statement"] if one["Effect"] == "Allow"]
    return {name for one in allowed for name in ([one] if isinstance(one, str) else one)}


def _make_policy(*statements: dict[str, Any]) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(
    statement_id: str, action_names: str, resource: str | list[str], condition: dict[str, Any] | None = None
) -> dict[str, Any]:
    found = {"Sid": statement_id, "Effect": "Allow", "Action": sorted(action_names.split()), "Resource": resource}
    return {**found, "Condition": condition} if condition else found


def _deny(statement_id: str, action_names: str, resource: str, condition: dict[str, Any]) -> dict[str, Any]:
    return {**_allow(statement_id, action_names, resource, condition), "Effect": "Deny"}
