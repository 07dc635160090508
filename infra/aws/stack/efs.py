"""The EFS file system that all machines of a region mount.

It is encrypted. Its policy allows mounts over TLS only, and only with a role that has the right; without a policy,
EFS lets every client of the network in. The root folder of a new file system belongs to root, and EFS does not let
clients act as root without a further right. Machines therefore mount an access point: it creates its folder for user
1000, and every client acts as that user.

Sources: AWS, "Using IAM to control access to file systems", "Working with access points", "Creating mount targets".
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from infra.aws import prices, tags
from infra.aws.client import paginate
from infra.aws.tags import Resource
from infra.errors import CloudError

from . import network, policies
from .resources import RESOURCE_NAME, StackContext, find, require_ours, wait_for

logger = logging.getLogger(__name__)

BUCKET_TAG = "imgnet:bucket"  # the tag of the file system that names the stack's bucket
NETWORK_TAG = "imgnet:network"  # the tag that names a network of the user's in which the stack is, by its IDs
EFS_READY_TIMEOUT_SECONDS = 600.0
EFS_USER_ID = 1000  # the first user of Ubuntu and of Amazon Linux
EFS_ROOT_FOLDER = "/imgnet"


@dataclass(frozen=True)
class FileSystem:
    """The stack's file system, as AWS describes it. `access_point` is an ID, "" while there is none."""

    id: str
    state: str
    size_gb: float
    bucket: str | None
    mount_target_states: dict[str, str]  # by subnet
    access_point: str
    has_policy: bool
    network_ids: tuple[str, ...] = ()  # of the user's network, () in the stack's own
    refused_subnets: tuple[str, ...] = ()  # of the user's network, which EFS does not serve

    def missing_parts(self, subnets: Mapping[str, str]) -> list[str]:
        """Return one short line for each missing part. `subnets` are the stack's, by zone."""
        lines = [
            f"mount target in {zone}"
            for zone, subnet in subnets.items()
            if self.mount_target_states.get(subnet) != "available"
        ]
        if not self.access_point:
            lines.append("access point of the file system")
        if not self.has_policy:
            lines.append("policy of the file system")
        return lines if self.state == "available" else ["file system to be available", *lines]


def find_file_system(context: StackContext) -> FileSystem | None:
    """Return the stack's file system, None when there is none or it is being deleted.

    Raises `CloudError` when a file system with the stack's creation token lacks the stack tag.
    """
    description = describe_own(context)
    if not description or _is_deleting(description):
        return None
    file_system_id = str(description["FileSystemId"])
    ask_policy = context.account.efs.describe_file_system_policy
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(find, "policy of the file system", ask_policy, FileSystemId=file_system_id)
        targets = pool.submit(_mount_targets, context, file_system_id)
        points = pool.submit(_access_points, context, file_system_id)
    response, access_points = answer.result(), points.result()
    policy = str(response["Policy"]) if response else ""
    return FileSystem(
        id=file_system_id,
        state=description["LifeCycleState"],
        size_gb=description["SizeInBytes"]["Value"] / 1e9,
        bucket=tags.read_tags(description).get(BUCKET_TAG),
        mount_target_states={target["SubnetId"]: target["LifeCycleState"] for target in targets.result()},
        access_point=access_points[0]["AccessPointId"] if access_points else "",
        has_policy=all(f'"{statement}"' in policy for statement in (policies.ONLY_TLS, policies.BY_MOUNT_TARGET)),
        network_ids=tuple(tags.read_tags(description).get(NETWORK_TAG, "").split()),
        refused_subnets=tuple(tags.read_tags(description).get(network.NO_EFS_TAG, "").split()),
    )


def exists(context: StackContext) -> bool:
    """Return whether the stack has a file system that is not being deleted. Raises `CloudError`."""
    description = describe_own(context)
    return description is not None and not _is_deleting(description)


def ensure(
    context: StackContext, stack_network: network.StackNetwork, security_group: str, found: FileSystem | None = None
) -> tuple[FileSystem, dict[str, str]]:
    """Create what is missing, wait until it is ready, and return the file system with the subnets that it serves.

    `found` is the file system as it was a moment ago. Raises `CloudError`.
    """
    account, efs, subnets = context.account, context.account.efs, stack_network.subnets
    network_tags = {NETWORK_TAG: " ".join(stack_network.given_ids)} if stack_network.is_given else {}
    file_system = found or find_file_system(context) or _create(context, network_tags)
    _tag_network(context, file_system.id, file_system.network_ids, stack_network.given_ids)
    if file_system.state != "available":
        waited_for = f"file system {file_system.id} is not available"
        file_system = _wait_until(context, lambda found: found.state == "available", waited_for)
    if not file_system.has_policy:
        context.create(
            "policy of the file system",
            efs.put_file_system_policy,
            FileSystemId=file_system.id,
            Policy=json.dumps(policies.file_system_policy(account.identity[0], account.region, file_system.id)),
        )
    if not file_system.access_point:
        folder_owner = {"OwnerUid": EFS_USER_ID, "OwnerGid": EFS_USER_ID, "Permissions": "0755"}
        context.create(
            "access point",
            efs.create_access_point,
            ClientToken=f"{RESOURCE_NAME}-{file_system.id}",
            FileSystemId=file_system.id,
            PosixUser={"Uid": EFS_USER_ID, "Gid": EFS_USER_ID},
            RootDirectory={"Path": EFS_ROOT_FOLDER, "CreationInfo": folder_owner},
            Tags=tags.to_aws_tags(context.resource_tags()),
        )
    served_subnets = {
        zone: subnet
        for zone, subnet in subnets.items()
        if subnet in file_system.mount_target_states
        or _create_mount_target(context, file_system, zone, subnet, security_group, stack_network.is_given)
    }
    if stack_network.is_given and not served_subnets:
        raise CloudError(f"EFS serves none of {', '.join(subnets)}; name other subnets: --subnet")
    served_ids = replace(stack_network, subnets=served_subnets).given_ids
    refused = [subnet for zone, subnet in subnets.items() if zone not in served_subnets]
    _tag_network(context, file_system.id, stack_network.given_ids, served_ids, [*file_system.refused_subnets, *refused])
    waited_for = f"file system {file_system.id} cannot be mounted yet"
    return _wait_until(context, lambda found: not found.missing_parts(served_subnets), waited_for), served_subnets


def remove(context: StackContext, delete_data: bool) -> None:
    """Delete the mount targets, and with `delete_data` also the file system and all its files.

    A file system that is kept is logged. Raises `CloudError`.
    """
    efs = context.account.efs
    file_system = find_file_system(context)
    if not file_system:
        return
    for target in _mount_targets(context, file_system.id):
        target_id = target["MountTargetId"]
        context.delete(f"mount target {target_id}", efs.delete_mount_target, MountTargetId=target_id)
    wait_for(lambda: not _mount_targets(context, file_system.id), f"file system {file_system.id} has mount targets")
    if file_system.network_ids:
        label = "network tag of the file system"
        keys = [NETWORK_TAG, network.NO_EFS_TAG]
        context.delete(label, efs.untag_resource, ResourceId=file_system.id, TagKeys=keys)
    if not delete_data:
        dollars = file_system.size_gb * prices.EFS_PER_GB_MONTH
        logger.info(
            f"file system {file_system.id} stays with its data ({file_system.size_gb:.1f} GB, about {dollars:.2f} $ "
            "a month); to delete it: imgnet-cluster down --stack --delete-data"
        )
        return
    for point in _access_points(context, file_system.id):
        context.delete("access point", efs.delete_access_point, AccessPointId=point["AccessPointId"])
    if context.delete(
        f"file system {file_system.id} ({file_system.size_gb:.1f} GB)",
        efs.delete_file_system,
        FileSystemId=file_system.id,
    ):
        wait_for(lambda: not describe_own(context), f"file system {file_system.id} is still being deleted")


# --- the parts -------------------------------------------------------------------------------------------------------


def _creation_token(context: StackContext) -> str:
    """Return the client token with which AWS creates at most one file system for each region."""
    return f"{RESOURCE_NAME}-{context.account.region}"


def describe_own(context: StackContext) -> Resource | None:
    """Return AWS's description of the stack's file system, also while it is being deleted.

    Raises `CloudError` when the file system with the stack's creation token lacks the stack tag.
    """
    token = _creation_token(context)
    efs = context.account.efs
    for description in paginate("file systems", efs, "describe_file_systems", "FileSystems", CreationToken=token):
        label = f"file system {description['FileSystemId']} with the creation token {token}"
        return require_ours(description, label, "remove it, or give it this tag with the value imgnet")
    return None


def _is_deleting(description: Resource | None) -> bool:
    return description is not None and description["LifeCycleState"] in ("deleting", "deleted")


def _mount_targets(context: StackContext, file_system_id: str) -> list[Resource]:
    response = find("mount targets", context.account.efs.describe_mount_targets, FileSystemId=file_system_id)
    targets = (response or {}).get("MountTargets", [])
    return [target for target in targets if target["LifeCycleState"] != "deleted"]


def _access_points(context: StackContext, file_system_id: str) -> list[Resource]:
    """Return the stack's access points that are not being deleted, by ID, so that all launches take the same one."""
    response = find("access points", context.account.efs.describe_access_points, FileSystemId=file_system_id)
    own_points = [
        point
        for point in (response or {}).get("AccessPoints", [])
        if tags.is_ours(point) and not point.get("LifeCycleState", "").startswith("delet")
    ]
    return sorted(own_points, key=lambda point: str(point["AccessPointId"]))


def _create(context: StackContext, network_tags: tags.Tags) -> FileSystem:
    """Create the file system, after a former one has been deleted. Its token allows one only."""
    wait_for(lambda: not _is_deleting(describe_own(context)), "the former file system is still being deleted")
    logger.info("creating a file system (EFS, encrypted)")
    context.create(
        "file system",
        context.account.efs.create_file_system,
        CreationToken=_creation_token(context),
        Encrypted=True,
        Backup=False,
        PerformanceMode="generalPurpose",
        ThroughputMode="elastic",
        Tags=tags.to_aws_tags({**context.resource_tags(), **network_tags}),
    )
    return wait_for(lambda: find_file_system(context), "the file system was created, but AWS does not show it")


def _tag_network(
    context: StackContext,
    file_system_id: str,
    old_ids: Sequence[str],
    network_ids: Sequence[str],
    refused_subnets: Sequence[str] = (),
) -> None:
    if network_ids and {*network_ids} != {*old_ids}:
        network_tags = {NETWORK_TAG: " ".join(network_ids)}
        network_tags |= {network.NO_EFS_TAG: " ".join(refused_subnets)} if refused_subnets else {}
        context.create(
            "network tag of the file system",
            context.account.efs.tag_resource,
            ResourceId=file_system_id,
            Tags=tags.to_aws_tags(network_tags),
        )


def _create_mount_target(
    context: StackContext, file_system: FileSystem, zone: str, subnet: str, security_group: str, is_given: bool
) -> bool:
    """Create a mount target in a subnet. Return False when EFS does not serve its zone.

    Such a subnet is marked, unless it is the user's.
    """
    try:
        logger.info(f"creating a mount target in {zone}")
        context.create(
            f"mount target in {zone}",
            context.account.efs.create_mount_target,
            FileSystemId=file_system.id,
            SubnetId=subnet,
            SecurityGroups=[security_group],
        )
    except CloudError as error:
        if error.code != "UnsupportedAvailabilityZone":
            raise
        logger.info(f"EFS does not serve {zone}: no machines will be launched there")
        if is_given:
            return False
        no_efs_tag = tags.to_aws_tags({network.NO_EFS_TAG: "yes"})
        create_tags = context.account.ec2.create_tags
        context.create(f"no-EFS tag of the subnet in {zone}", create_tags, Resources=[subnet], Tags=no_efs_tag)
        return False
    return True


def _wait_until(context: StackContext, condition: Callable[[FileSystem], bool], timeout_message: str) -> FileSystem:
    def find_if() -> FileSystem | None:
        file_system = find_file_system(context)
        return file_system if file_system and condition(file_system) else None

    return wait_for(find_if, timeout_message, EFS_READY_TIMEOUT_SECONDS)
