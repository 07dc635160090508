"""The least that a person needs to launch, and that a machine needs to run, as IAM policies in plain data.

A person may look at all, make only what bears our tag in the very call that makes it, and change or end only what bears
it. A test holds `for_user` against every call in infra/. What only an admin does, once, is in `ADMIN`.

Sources: AWS, "Actions, resources, and condition keys" for EC2, EFS, S3 and IAM; "Controlling access during launch";
"Using IAM to control access to file systems" (which keys of a condition hold for a mount).
"""

from typing import Any

from infra.aws import tags

Policy = dict[str, Any]
ROLE = "imgnet-machine"
DATA, RUNS = "data", "runs"  # the prefixes of a bucket that machines read and write
GUARDS = ("OnlyTLS", "ByMountTarget")  # the statements of the file system's policy
BUCKETS = "imgnet-*"
CHARACTERS = 6144  # the size of a managed policy, without white space

LOOK = """
ec2:DescribeAddresses ec2:DescribeAvailabilityZones ec2:DescribeImages ec2:DescribeInstanceTypeOfferings
ec2:DescribeInstanceTypes ec2:DescribeInstances ec2:DescribeInternetGateways ec2:DescribeKeyPairs
ec2:DescribeNetworkInterfaces ec2:DescribePlacementGroups ec2:DescribeRegions ec2:DescribeRouteTables
ec2:DescribeSecurityGroups ec2:DescribeSpotInstanceRequests ec2:DescribeSpotPriceHistory ec2:DescribeSubnets
ec2:DescribeVolumes ec2:DescribeVpcAttribute ec2:DescribeVpcEndpoints ec2:DescribeVpcs
elasticfilesystem:Describe* pricing:GetProducts servicequotas:GetServiceQuota servicequotas:GetAWSDefaultServiceQuota
"""
CREATE = """
ec2:AllocateAddress ec2:CreateInternetGateway ec2:CreatePlacementGroup ec2:CreateRouteTable ec2:CreateSecurityGroup
ec2:CreateSubnet ec2:CreateVpc ec2:CreateVpcEndpoint ec2:ImportKeyPair elasticfilesystem:CreateFileSystem
"""
INSIDE = "ec2:CreateRouteTable ec2:CreateSecurityGroup ec2:CreateSubnet ec2:CreateVpcEndpoint"
CHANGE = """
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
BUCKET = """
s3:CreateBucket s3:DeleteBucket s3:DeleteObject s3:GetBucketTagging s3:GetObject s3:ListBucket
s3:PutBucketPublicAccessBlock s3:PutBucketTagging s3:PutEncryptionConfiguration s3:PutObject
"""
ROLES = "iam:GetInstanceProfile iam:GetRole iam:GetRolePolicy iam:ListRolePolicies"
ADMIN = """
iam:CreateRole iam:TagRole iam:PutRolePolicy iam:DeleteRolePolicy iam:DeleteRole iam:CreateInstanceProfile
iam:TagInstanceProfile iam:AddRoleToInstanceProfile iam:RemoveRoleFromInstanceProfile iam:DeleteInstanceProfile
"""


def for_user(account: str = "*", region: str = "*", bucket: str = BUCKETS) -> Policy:
    """Return the least policy of a person who launches, in an account (its number), a region, with buckets so named."""
    ec2 = f"arn:aws:ec2:{region}:{account}:"
    asked = {"StringEquals": {f"aws:RequestTag/{tags.STACK}": tags.OURS}}
    ours = {"StringEquals": {f"aws:ResourceTag/{tags.STACK}": tags.OURS}}
    parameters = [f"arn:aws:ssm:{region}::parameter/aws/service/{name}/*" for name in ("deeplearning", "canonical")]
    new = ("instance", "volume", "network-interface", "spot-instances-request")
    old = ("key-pair", "subnet", "security-group", "placement-group")
    no_v2 = {"StringNotEquals": {"ec2:MetadataHttpTokens": "required"}}
    roles = [f"arn:aws:iam::{account}:{kind}/{ROLE}" for kind in ("role", "instance-profile")]
    spot = f"arn:aws:iam::{account}:role/aws-service-role/spot.amazonaws.com/*"
    efs = f"arn:aws:iam::{account}:role/aws-service-role/elasticfilesystem.amazonaws.com/*"
    linked = {"StringEquals": {"iam:AWSServiceName": ["spot.amazonaws.com", "elasticfilesystem.amazonaws.com"]}}
    return _policy(
        _allow("Look", LOOK, "*"),
        _allow("Images", "ssm:GetParameter ssm:GetParameters", parameters),
        _allow("MakeWithTag", CREATE, "*", asked),
        _allow("MakeInOurs", INSIDE, [f"{ec2}vpc/*", f"{ec2}route-table/*"], ours),
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
        _allow("ChangeOurs", CHANGE, "*", ours),
        _allow("MountTargets", "ec2:CreateNetworkInterface ec2:DeleteNetworkInterface", "*"),
        _allow("Roles", ROLES, roles),
        _allow("PassRole", "iam:PassRole", roles[0], {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}),
        _allow("SpotAndFiles", "iam:CreateServiceLinkedRole", [spot, efs], linked),
        _allow("Bucket", BUCKET, [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]),
    )


def for_machines(
    account: str = "*", region: str = "*", file_system: str = "*", bucket: str | None = None, role: str = ROLE
) -> Policy:
    """Return the least policy of the machines: the file system, the bucket's data to read, its runs to write."""
    files = f"arn:aws:elasticfilesystem:{region}:{account}:file-system/{file_system}"
    parts = [
        _allow("Mount", "elasticfilesystem:ClientMount elasticfilesystem:ClientWrite", files),
        _allow("FindMountTarget", "elasticfilesystem:DescribeMountTargets", files),
    ]
    if bucket:
        place = f"arn:aws:s3:::{bucket}"
        ours = {"StringLike": {"s3:prefix": [f"{DATA}/*", f"{RUNS}/*"]}}
        parts += [
            _allow("ReadData", "s3:GetObject", f"{place}/{DATA}/*"),
            _allow("WriteRuns", "s3:PutObject", f"{place}/{RUNS}/*"),
            _allow("List", "s3:ListBucket", place, ours),
        ]
    return _policy(*parts)


def for_data(bucket: str, prefix: str) -> Policy:
    """Return what it takes to read a packed set and its copies in another bucket, for the machines or a person."""
    place = f"arn:aws:s3:::{bucket}"
    below = {"StringLike": {"s3:prefix": [f"{prefix}*"]}}
    return _policy(
        _allow("ReadSet", "s3:GetObject", f"{place}/{prefix}*"), _allow("ListSet", "s3:ListBucket", place, below)
    )


def for_trust() -> Policy:
    """Return who may take the machines' role: EC2, for its machines."""
    who = {"Service": "ec2.amazonaws.com"}
    return _policy({"Effect": "Allow", "Principal": who, "Action": "sts:AssumeRole"})


def for_file_system(account: str, region: str, file_system: str) -> Policy:
    """Return the file system's own policy: by TLS, a mount target and a role of this account, or not at all."""
    place = f"arn:aws:elasticfilesystem:{region}:{account}:file-system/{file_system}"
    mount = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    anyone = {"AWS": "*"}
    by_target = {"Bool": {"elasticfilesystem:AccessedViaMountTarget": "true"}}
    return _policy(
        {
            "Sid": GUARDS[0], "Effect": "Deny", "Principal": anyone, "Action": "*", "Resource": place,
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        },
        {
            "Sid": GUARDS[1], "Effect": "Allow", "Principal": {"AWS": f"arn:aws:iam::{account}:root"},
            "Action": mount, "Resource": place, "Condition": by_target,
        },
    )  # fmt: skip


def actions(policy: Policy) -> set[str]:
    """Return the names of the actions that a policy allows; they may end in *."""
    allowed = [one["Action"] for one in policy["Statement"] if one["Effect"] == "Allow"]
    return {name for one in allowed for name in ([one] if isinstance(one, str) else one)}


def _policy(*statements: dict[str, Any]) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(name: str, words: str, resource: str | list[str], condition: dict[str, Any] | None = None) -> dict[str, Any]:
    found = {"Sid": name, "Effect": "Allow", "Action": sorted(words.split()), "Resource": resource}
    return {**found, "Condition": condition} if condition else found


def _deny(name: str, words: str, resource: str, condition: dict[str, Any]) -> dict[str, Any]:
    return {**_allow(name, words, resource, condition), "Effect": "Deny"}
