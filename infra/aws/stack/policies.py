"""IAM policies as plain data: the smallest that let a person launch, and a machine run.

A person may describe everything, create only resources that get the stack tag in the creating call, and change or
delete only resources that have the stack tag. A test compares `user_policy` with every AWS call in infra/.
`ADMIN_ACTIONS` are what only an admin does, once.

Sources: AWS, "Actions, resources, and condition keys" for EC2, EFS, S3 and IAM; "Controlling access during launch";
"Granting permissions to tag resources during creation";
"Using IAM to control access to file systems" (which condition keys apply to a mount).
"""

from collections.abc import Mapping
from typing import Any

from infra.aws import tags

ROLE_NAME = "imgnet-machine"
DATA_PREFIX = "data"  # machines read objects of the bucket below this prefix
RUNS_PREFIX = "runs"  # machines write objects of the bucket below this prefix
ONLY_TLS, BY_MOUNT_TARGET = "OnlyTLS", "ByMountTarget"  # statement IDs of the policies of file system and bucket
BUCKET_PREFIX = "imgnet-"  # of the names of the stack's buckets

# Patterns keep the policy below the limit.
READ_ACTIONS = """
ec2:DescribeAddresses ec2:DescribeAvailabilityZones ec2:DescribeCapacity* ec2:DescribeImages ec2:DescribeInstanceType*
ec2:DescribeInstances ec2:DescribeInternetGateways ec2:DescribeKeyPairs ec2:DescribeNatGateways
ec2:DescribeNetworkInterfaces ec2:DescribePlacementGroups ec2:DescribeRegions ec2:DescribeRouteTables
ec2:DescribeSecurityGroups ec2:DescribeSpot* ec2:DescribeSubnets ec2:DescribeVolumes ec2:DescribeVpc*
ec2:GetGroupsForCapacityReservation ec2:GetSpotPlacementScores elasticfilesystem:Describe*
cloudwatch:GetMetricData pricing:GetProducts s3:ListAllMyBuckets servicequotas:Get*
"""
CREATE_ACTIONS = """
ec2:AllocateAddress ec2:CreateInternetGateway ec2:CreateNatGateway ec2:CreatePlacementGroup ec2:CreateRouteTable
ec2:CreateSecurityGroup ec2:CreateSubnet ec2:CreateVpc ec2:CreateVpcEndpoint ec2:ImportKeyPair
elasticfilesystem:CreateFileSystem
"""
CREATE_IN_VPC_ACTIONS = """
ec2:CreateNatGateway ec2:CreateRouteTable ec2:CreateSecurityGroup ec2:CreateSubnet ec2:CreateVpcEndpoint
"""
CHANGE_ACTIONS = """
ec2:AssociateAddress ec2:AssociateRouteTable ec2:AttachInternetGateway ec2:AuthorizeSecurityGroupEgress
ec2:AuthorizeSecurityGroupIngress ec2:CancelSpotInstanceRequests ec2:CreateRoute ec2:CreateTags
ec2:DeleteInternetGateway ec2:DeleteKeyPair ec2:DeleteNatGateway ec2:DeletePlacementGroup ec2:DeleteRouteTable
ec2:DeleteSecurityGroup ec2:DeleteSubnet ec2:DeleteVolume ec2:DeleteVpc ec2:DeleteVpcEndpoints
ec2:DetachInternetGateway ec2:DisassociateAddress ec2:DisassociateRouteTable ec2:GetConsoleOutput
ec2:ModifyNetworkInterfaceAttribute ec2:ModifyVpcAttribute ec2:ModifyVpcEndpoint
ec2:ReleaseAddress ec2:ReplaceRoute ec2:RevokeSecurityGroupIngress ec2:TerminateInstances
elasticfilesystem:CreateAccessPoint elasticfilesystem:CreateMountTarget elasticfilesystem:DeleteAccessPoint
elasticfilesystem:DeleteFileSystem elasticfilesystem:DeleteMountTarget elasticfilesystem:PutFileSystemPolicy
elasticfilesystem:TagResource elasticfilesystem:UntagResource ec2-instance-connect:SendSSHPublicKey
"""
BUCKET_ACTIONS = """
s3:AbortMultipartUpload s3:CreateBucket s3:DeleteBucket s3:DeleteObject s3:GetBucketTagging s3:GetObject s3:ListBucket
s3:PutBucketPolicy s3:PutBucketPublicAccessBlock s3:PutBucketTagging s3:PutEncryptionConfiguration
s3:PutLifecycleConfiguration s3:PutObject
"""
READ_ROLE_ACTIONS = "iam:GetInstanceProfile iam:GetRole iam:GetRolePolicy iam:ListRolePolicies"
ADMIN_ACTIONS = """
iam:CreateRole iam:TagRole iam:PutRolePolicy iam:DeleteRolePolicy iam:DeleteRole iam:CreateInstanceProfile
iam:TagInstanceProfile iam:AddRoleToInstanceProfile iam:RemoveRoleFromInstanceProfile iam:DeleteInstanceProfile
"""

# Tags in a creating call need the service's tag action.
TAG_ACTIONS = {"ec2": "ec2:CreateTags", "elasticfilesystem": "elasticfilesystem:TagResource"}

Condition = Mapping[str, Mapping[str, str | list[str]]]  # operator -> condition key -> values


Statement = dict[str, Any]  # of a policy: Sid, Effect, Principal, Action, Resource, Condition
Policy = dict[str, Any]  # a policy document of IAM: Version, Statement


def user_policy(account: str = "*", region: str = "*", bucket: str = f"{BUCKET_PREFIX}*") -> Policy:
    """Return the smallest policy that lets a person launch.

    `account` (its number), `region` and `bucket` (a name or pattern) limit the policy; "*" allows all.
    """
    aws = f"arn:{get_partition(region)}"
    ec2 = f"{aws}:ec2:{region}:{account}:"
    our_tag_in_request = {"StringEquals": {f"aws:RequestTag/{tags.STACK}": tags.STACK_VALUE}}
    our_tag_on_resource = {"StringEquals": {f"aws:ResourceTag/{tags.STACK}": tags.STACK_VALUE}}
    image_parameters = [f"{aws}:ssm:{region}::parameter/aws/service/{name}/*" for name in ("deeplearning", "canonical")]
    launched_types = ("instance", "volume", "network-interface", "spot-instances-request")
    unowned = [  # AWS's images; reservations, which their buyer need not tag
        f"{aws}:ec2:{region}::image/*",
        f"{ec2}capacity-reservation/*",
        f"{aws}:resource-groups:{region}:{account}:group/*",
    ]
    roles = [f"{aws}:iam::{account}:{kind}/{ROLE_NAME}" for kind in ("role", "instance-profile")]
    spot_role = f"{aws}:iam::{account}:role/aws-service-role/spot.amazonaws.com/*"
    efs_role = f"{aws}:iam::{account}:role/aws-service-role/elasticfilesystem.amazonaws.com/*"
    without_imdsv2 = {"StringNotEquals": {"ec2:MetadataHttpTokens": "required"}}
    linked_services = {
        "StringEquals": {"iam:AWSServiceName": ["spot.amazonaws.com", "elasticfilesystem.amazonaws.com"]}
    }
    return _make_policy(
        _allow("Look", READ_ACTIONS, "*"),
        _allow("Images", "ssm:GetParameter ssm:GetParameters", image_parameters),
        _allow("MakeWithTag", CREATE_ACTIONS, "*", our_tag_in_request),
        _allow("MakeInOurs", CREATE_IN_VPC_ACTIONS, f"{ec2}*", our_tag_on_resource),
        _allow("Run", "ec2:RunInstances", [f"{ec2}{kind}/*" for kind in launched_types], our_tag_in_request),
        _allow("RunInOurs", "ec2:RunInstances", f"{ec2}*", our_tag_on_resource),
        _allow("RunUntagged", "ec2:RunInstances", unowned),
        {**_allow("OnlyIMDSv2", "ec2:RunInstances", f"{ec2}instance/*", without_imdsv2), "Effect": "Deny"},
        *(
            _allow(
                f"TagNew{name.title()}",
                action,
                f"{aws}:{name}:{region}:{account}:*",
                {**our_tag_in_request, "Null": {f"{name}:CreateAction": "false"}},  # as part of a creating call
            )
            for name, action in TAG_ACTIONS.items()
        ),
        _allow("ChangeOurs", CHANGE_ACTIONS, "*", our_tag_on_resource),
        _allow("MountTargets", "ec2:CreateNetworkInterface ec2:DeleteNetworkInterface", "*"),
        _allow("Roles", READ_ROLE_ACTIONS, roles),
        _allow("PassRole", "iam:PassRole", roles[0], {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}),
        _allow("SpotAndFiles", "iam:CreateServiceLinkedRole", [spot_role, efs_role], linked_services),
        _allow("Bucket", BUCKET_ACTIONS, [f"{aws}:s3:::{bucket}", f"{aws}:s3:::{bucket}/*"]),
    )


def network_policy(vpc: str, account: str = "*", region: str = "*") -> Policy:
    """Return what a person needs besides to use a network of their own: our security group, machines in its subnets."""
    ec2 = f"arn:{get_partition(region)}:ec2:{region}:{account}:"
    in_vpc = {"ArnLike": {"ec2:Vpc": f"{ec2}vpc/{vpc}"}}
    return _make_policy(
        _allow("GroupInVpc", "ec2:CreateSecurityGroup", f"{ec2}vpc/{vpc}"),
        _allow("RunInVpc", "ec2:RunInstances", f"{ec2}subnet/*", in_vpc),
    )


def machine_policy(account: str = "*", region: str = "*", file_system: str = "*", bucket: str | None = None) -> Policy:
    """Return the smallest policy that lets the machines run.

    They mount the file system, read the bucket's data/ and write its runs/. Without `bucket` they may not use S3.
    """
    file_system_arn = f"arn:{get_partition(region)}:elasticfilesystem:{region}:{account}:file-system/{file_system}"
    statements = [_allow("Mount", "elasticfilesystem:ClientMount elasticfilesystem:ClientWrite", file_system_arn)]
    if bucket:
        bucket_arn = f"arn:{get_partition(region)}:s3:::{bucket}"
        own_prefixes = {"StringLike": {"s3:prefix": [f"{DATA_PREFIX}/*", f"{RUNS_PREFIX}/*"]}}
        statements += [
            _allow("ReadData", "s3:GetObject", f"{bucket_arn}/{DATA_PREFIX}/*"),
            _allow("WriteRuns", "s3:PutObject s3:AbortMultipartUpload", f"{bucket_arn}/{RUNS_PREFIX}/*"),
            _allow("List", "s3:ListBucket", bucket_arn, own_prefixes),
        ]
    return _make_policy(*statements)


def dataset_policy(bucket: str, prefix: str, region: str = "*") -> Policy:
    """Return the policy that allows reading a packed data set and its smaller copies in another bucket.

    It can be attached to the machines' role or to a person.
    """
    bucket_arn = f"arn:{get_partition(region)}:s3:::{bucket}"
    below_prefix = {"StringLike": {"s3:prefix": [f"{prefix}*"]}}
    return _make_policy(
        _allow("ReadSet", "s3:GetObject", f"{bucket_arn}/{prefix}*"),
        _allow("ListSet", "s3:ListBucket", bucket_arn, below_prefix),
    )


def trust_policy() -> Policy:
    """Return the trust policy of the machines' role: EC2 may assume it for its instances."""
    service = {"Service": "ec2.amazonaws.com"}
    return _make_policy({"Effect": "Allow", "Principal": service, "Action": "sts:AssumeRole"})


def file_system_policy(account: str, region: str, file_system: str) -> Policy:
    """Return the file system's own policy: access over TLS, through a mount target, by a role of this account only."""
    file_system_arn = f"arn:{get_partition(region)}:elasticfilesystem:{region}:{account}:file-system/{file_system}"
    return _make_policy(
        _deny_without_tls("*", file_system_arn),
        {
            "Sid": BY_MOUNT_TARGET,
            "Effect": "Allow",
            "Principal": {"AWS": f"arn:{get_partition(region)}:iam::{account}:root"},
            "Action": ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"],
            "Resource": file_system_arn,
            "Condition": {"Bool": {"elasticfilesystem:AccessedViaMountTarget": "true"}},
        },
    )


def bucket_policy(bucket: str, region: str) -> Policy:
    """Return the bucket's own policy: access over TLS only. Who has access is a matter of other policies."""
    bucket_arn = f"arn:{get_partition(region)}:s3:::{bucket}"
    return _make_policy(_deny_without_tls("s3:*", [bucket_arn, f"{bucket_arn}/*"]))


def _deny_without_tls(actions: str, resources: str | list[str]) -> Statement:
    return {
        "Sid": ONLY_TLS,
        "Effect": "Deny",
        "Principal": {"AWS": "*"},
        "Action": actions,
        "Resource": resources,
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }


def get_partition(region: str) -> str:
    """Return the first part of the ARNs of a region: AWS's own regions, China, or the government's."""
    if region.startswith("cn-"):
        return "aws-cn"
    return "aws-us-gov" if region.startswith("us-gov-") else "aws"


def _make_policy(*statements: Statement) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(
    statement_id: str, action_names: str, resource: str | list[str], condition: Condition | None = None
) -> Statement:
    statement = {"Sid": statement_id, "Effect": "Allow", "Action": sorted(action_names.split()), "Resource": resource}
    return {**statement, "Condition": condition} if condition else statement
