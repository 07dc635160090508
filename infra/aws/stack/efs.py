"""The file system that all machines of a region see (EFS), and a bucket for those who want one.

Encrypted, mounted over TLS only and only by who has a role that may (a file system policy replaces the rule that lets
anybody in). The root of a new file system belongs to root, whom EFS does not trust without a further right; so machines
come in by an access point, which makes its folder for user 1000 and lets everybody act as that one.

Sources: AWS, "Using IAM to control access to file systems", "Working with access points", "Creating mount targets".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from infra.aws import tags
from infra.aws.client import paginate
from infra.aws.errors import CloudError

from . import network, policies
from .resources import RESOURCE_NAME, Resource, StackContext, call_if_permitted, not_ours_error, wait_for

BUCKET_TAG = "imgnet:bucket"  # the tag of the file system that names the stack's bucket
EFS_DOLLARS_PER_GB_MONTH = 0.30  # EFS Standard, us-east-1
EFS_READY_TIMEOUT_SECONDS = 600.0
EFS_USER_ID = 1000  # the first user of Ubuntu and of Amazon Linux
EFS_ROOT_FOLDER = "/imgnet"


@dataclass(frozen=True)
class FileSystem:
    """The file system, as AWS describes it. `targets` are the states of its mount targets, by subnet."""

    id: str
    state: str
    size_gb: float
    bucket: str | None
    mount_target_states: dict[str, str]
    access_point: str
    has_policy: bool  # has the policy

    def missing_parts(self, subnets: Mapping[str, str]) -> list[str]:
        """Return what is missing of it, a short line each; `subnets` by zone."""
        lines = [
            f"mount target in {zone}"
            for zone, one in subnets.items()
            if self.mount_target_states.get(one) != "available"
        ]
        lines += [] if self.access_point else ["access point of the file system"]
        lines += [] if self.has_policy else ["policy of the file system"]
        return lines if self.state == "available" else ["file system to be available", *lines]


def find_file_system(context: StackContext) -> FileSystem | None:
    """Describe the file system. Raises `CloudError` when there is one with our token that is not ours."""
    found = _describe_own(context)
    if not found or _is_deleting(found):
        return None
    id = str(found["FileSystemId"])
    said = call_if_permitted(
        "policy of the file system", context.account.efs.describe_file_system_policy, FileSystemId=id
    )
    return FileSystem(
        id=id,
        state=found["LifeCycleState"],
        size_gb=found["SizeInBytes"]["Value"] / 1e9,
        bucket=tags.read_tags(found).get(BUCKET_TAG),
        mount_target_states={one["SubnetId"]: one["LifeCycleState"] for one in _mount_targets(context, id)},
        access_point=next((one["AccessPointId"] for one in _access_points(context, id)), ""),
        has_policy=bool(said) and all(f'"{name}"' in said["Policy"] for name in policies.FILE_SYSTEM_STATEMENTS),
    )


def ensure(context: StackContext, subnets: Mapping[str, str], security_group: str) -> tuple[FileSystem, dict[str, str]]:
    """Make what is missing, wait for it, and return it with the subnets that it serves. Raises `CloudError`."""
    efs, files = context.account.efs, find_file_system(context) or _create(context)
    if files.state != "available":
        files = wait_for(
            lambda: _find_available(context), f"file system {files.id} is not available", EFS_READY_TIMEOUT_SECONDS
        )
    if not files.has_policy:
        words = {"FileSystemId": files.id, "Policy": json.dumps(_expected_policy(context, files.id))}
        context.create("policy of the file system", efs.put_file_system_policy, **words)
    if not files.access_point:
        owner = {"OwnerUid": EFS_USER_ID, "OwnerGid": EFS_USER_ID, "Permissions": "0755"}
        context.create(
            "access point", efs.create_access_point, ClientToken=f"{RESOURCE_NAME}-{files.id}", FileSystemId=files.id,
            PosixUser={"Uid": EFS_USER_ID, "Gid": EFS_USER_ID}, RootDirectory={"Path": EFS_ROOT_FOLDER, "CreationInfo": owner},
            Tags=tags.to_aws_tags(context.resource_tags()),
        )  # fmt: skip
    served = {
        zone: one
        for zone, one in subnets.items()
        if one in files.mount_target_states or _create_mount_target(context, files, zone, one, security_group)
    }
    return wait_for(
        lambda: _find_ready(context, served), f"file system {files.id} cannot be reached yet", EFS_READY_TIMEOUT_SECONDS
    ), served


def remove(context: StackContext, delete_data: bool) -> None:
    """Remove the mount targets, and the file system with all that is in it only when told to."""
    efs, files = context.account.efs, find_file_system(context)
    if not files:
        return
    for target in _mount_targets(context, files.id):
        context.delete(
            f"mount target {target['MountTargetId']}", efs.delete_mount_target, MountTargetId=target["MountTargetId"]
        )
    wait_for(lambda: not _mount_targets(context, files.id), f"file system {files.id} still has mount targets")
    if not delete_data:
        size = f"{files.size_gb:.1f} GB, about {files.size_gb * EFS_DOLLARS_PER_GB_MONTH:.2f} $ a month"
        context.leftovers.append(
            f"file system {files.id} stays with its data ({size}): imgnet-cluster down --stack --delete-data"
        )
        return
    for point in _access_points(context, files.id):
        context.delete("access point", efs.delete_access_point, AccessPointId=point["AccessPointId"])
    context.log(f"removing file system {files.id} and its {files.size_gb:.1f} GB")
    if context.delete(f"file system {files.id}", efs.delete_file_system, FileSystemId=files.id):
        wait_for(lambda: not _describe_own(context), f"file system {files.id} is not gone yet")


# --- the parts -------------------------------------------------------------------------------------------------------


def _creation_token(context: StackContext) -> str:
    return f"{RESOURCE_NAME}-{context.account.region}"


def _expected_policy(context: StackContext, file_system_id: str) -> Resource:
    return policies.file_system_policy(context.account.identity[0], context.account.region, file_system_id)


def _describe_own(context: StackContext) -> Resource | None:
    words = {"CreationToken": _creation_token(context)}
    for one in paginate("file systems", context.account.efs, "describe_file_systems", "FileSystems", **words):
        if not tags.is_ours(one):
            what = f"file system {one['FileSystemId']} with the creation token {_creation_token(context)}"
            raise not_ours_error(what, "remove it, or give it this tag with the value imgnet")
        return one
    return None


def _is_deleting(description: Resource | None) -> bool:
    return description is not None and description["LifeCycleState"] in ("deleting", "deleted")


def _mount_targets(context: StackContext, file_system_id: str) -> list[Resource]:
    found = call_if_permitted("mount targets", context.account.efs.describe_mount_targets, FileSystemId=file_system_id)
    return [one for one in (found or {}).get("MountTargets", []) if one["LifeCycleState"] != "deleted"]


def _access_points(context: StackContext, file_system_id: str) -> list[Resource]:
    found = call_if_permitted("access points", context.account.efs.describe_access_points, FileSystemId=file_system_id)
    all = (found or {}).get("AccessPoints", [])
    mine = [one for one in all if tags.is_ours(one) and not one.get("LifeCycleState", "").startswith("delet")]
    return sorted(mine, key=lambda one: str(one["AccessPointId"]))


def _create(context: StackContext) -> FileSystem:
    """Make it, after the one that is just being deleted, if there is one. The token lets only one be made."""
    wait_for(lambda: not _is_deleting(_describe_own(context)), "the file system that is being deleted is still there")
    context.log("making a file system (EFS, encrypted)")
    context.create(
        "file system", context.account.efs.create_file_system, CreationToken=_creation_token(context), Encrypted=True, Backup=False,
        PerformanceMode="generalPurpose", ThroughputMode="elastic", Tags=tags.to_aws_tags(context.resource_tags()),
    )  # fmt: skip
    return wait_for(lambda: find_file_system(context), "the file system was made, and AWS does not show it")


def _find_available(context: StackContext) -> FileSystem | None:
    files = find_file_system(context)
    return files if files and files.state == "available" else None


def _create_mount_target(
    context: StackContext, file_system: FileSystem, zone: str, subnet: str, security_group: str
) -> bool:
    """Make a mount target; False where EFS does not serve the zone."""
    words = {"FileSystemId": file_system.id, "SubnetId": subnet, "SecurityGroups": [security_group]}
    try:
        context.log(f"making a mount target in {zone}")
        context.create(f"mount target in {zone}", context.account.efs.create_mount_target, **words)
    except CloudError as error:
        if error.code != "UnsupportedAvailabilityZone":
            raise
        network.mark_without_efs(context, zone, subnet)
        return False
    return True


def _find_ready(context: StackContext, subnets: Mapping[str, str]) -> FileSystem | None:
    files = find_file_system(context)
    return files if files and not files.missing_parts(subnets) else None
