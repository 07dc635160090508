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
from infra.aws.client import pages
from infra.aws.errors import CloudError

from . import network, policies
from .resources import NAME, Thing, Work, not_ours, permitted, until

BUCKET = "imgnet:bucket"  # the tag of the file system that names the stack's bucket
DOLLARS_GB_MONTH = 0.30  # EFS Standard, us-east-1
READY_SECONDS = 600.0
USER = 1000  # the first user of Ubuntu and of Amazon Linux
FOLDER = "/imgnet"


@dataclass(frozen=True)
class Files:
    """The file system, as AWS describes it. `targets` are the states of its mount targets, by subnet."""

    id: str
    state: str
    gigabytes: float
    bucket: str | None
    targets: dict[str, str]
    access_point: str
    guarded: bool  # has the policy

    def missing(self, subnets: Mapping[str, str]) -> list[str]:
        """Return what is missing of it, a short line each; `subnets` by zone."""
        lines = [f"mount target in {zone}" for zone, one in subnets.items() if self.targets.get(one) != "available"]
        lines += [] if self.access_point else ["access point of the file system"]
        lines += [] if self.guarded else ["policy of the file system"]
        return lines if self.state == "available" else ["file system to be available", *lines]


def look(work: Work) -> Files | None:
    """Describe the file system. Raises `CloudError` when there is one with our token that is not ours."""
    found = _described(work)
    if not found or _ending(found):
        return None
    id = str(found["FileSystemId"])
    said = permitted("policy of the file system", work.account.efs.describe_file_system_policy, FileSystemId=id)
    return Files(
        id=id,
        state=found["LifeCycleState"],
        gigabytes=found["SizeInBytes"]["Value"] / 1e9,
        bucket=tags.read(found).get(BUCKET),
        targets={one["SubnetId"]: one["LifeCycleState"] for one in _targets(work, id)},
        access_point=next((one["AccessPointId"] for one in _access_points(work, id)), ""),
        guarded=bool(said) and all(f'"{name}"' in said["Policy"] for name in policies.GUARDS),
    )


def ensure(work: Work, subnets: Mapping[str, str], group: str) -> tuple[Files, dict[str, str]]:
    """Make what is missing, wait for it, and return it with the subnets that it serves. Raises `CloudError`."""
    efs, files = work.account.efs, look(work) or _make(work)
    if files.state != "available":
        files = until(lambda: _available(work), f"file system {files.id} is not available", READY_SECONDS)
    if not files.guarded:
        words = {"FileSystemId": files.id, "Policy": json.dumps(_policy(work, files.id))}
        work.make("policy of the file system", efs.put_file_system_policy, **words)
    if not files.access_point:
        owner = {"OwnerUid": USER, "OwnerGid": USER, "Permissions": "0755"}
        work.make(
            "access point", efs.create_access_point, ClientToken=f"{NAME}-{files.id}", FileSystemId=files.id,
            PosixUser={"Uid": USER, "Gid": USER}, RootDirectory={"Path": FOLDER, "CreationInfo": owner},
            Tags=tags.pairs(work.tags()),
        )  # fmt: skip
    served = {
        zone: one for zone, one in subnets.items() if one in files.targets or _mount(work, files, zone, one, group)
    }
    return until(lambda: _ready(work, served), f"file system {files.id} cannot be reached yet", READY_SECONDS), served


def remove(work: Work, delete_data: bool) -> None:
    """Remove the mount targets, and the file system with all that is in it only when told to."""
    efs, files = work.account.efs, look(work)
    if not files:
        return
    for target in _targets(work, files.id):
        work.drop(
            f"mount target {target['MountTargetId']}", efs.delete_mount_target, MountTargetId=target["MountTargetId"]
        )
    until(lambda: not _targets(work, files.id), f"file system {files.id} still has mount targets")
    if not delete_data:
        size = f"{files.gigabytes:.1f} GB, about {files.gigabytes * DOLLARS_GB_MONTH:.2f} $ a month"
        work.left.append(
            f"file system {files.id} stays with its data ({size}): imgnet-cluster down --stack --delete-data"
        )
        return
    for point in _access_points(work, files.id):
        work.drop("access point", efs.delete_access_point, AccessPointId=point["AccessPointId"])
    work.say(f"removing file system {files.id} and its {files.gigabytes:.1f} GB")
    if work.drop(f"file system {files.id}", efs.delete_file_system, FileSystemId=files.id):
        until(lambda: not _described(work), f"file system {files.id} is not gone yet")


# --- the parts -------------------------------------------------------------------------------------------------------


def _token(work: Work) -> str:
    return f"{NAME}-{work.account.region}"


def _policy(work: Work, id: str) -> Thing:
    return policies.for_file_system(work.account.identity[0], work.account.region, id)


def _described(work: Work) -> Thing | None:
    words = {"CreationToken": _token(work)}
    for one in pages("file systems", work.account.efs, "describe_file_systems", "FileSystems", **words):
        if not tags.ours(one):
            what = f"file system {one['FileSystemId']} with the creation token {_token(work)}"
            raise not_ours(what, "remove it, or give it this tag with the value imgnet")
        return one
    return None


def _ending(one: Thing | None) -> bool:
    return one is not None and one["LifeCycleState"] in ("deleting", "deleted")


def _targets(work: Work, id: str) -> list[Thing]:
    found = permitted("mount targets", work.account.efs.describe_mount_targets, FileSystemId=id)
    return [one for one in (found or {}).get("MountTargets", []) if one["LifeCycleState"] != "deleted"]


def _access_points(work: Work, id: str) -> list[Thing]:
    found = permitted("access points", work.account.efs.describe_access_points, FileSystemId=id)
    all = (found or {}).get("AccessPoints", [])
    mine = [one for one in all if tags.ours(one) and not one.get("LifeCycleState", "").startswith("delet")]
    return sorted(mine, key=lambda one: str(one["AccessPointId"]))


def _make(work: Work) -> Files:
    """Make it, after the one that is just being deleted, if there is one. The token lets only one be made."""
    until(lambda: not _ending(_described(work)), "the file system that is being deleted is still there")
    work.say("making a file system (EFS, encrypted)")
    work.make(
        "file system", work.account.efs.create_file_system, CreationToken=_token(work), Encrypted=True, Backup=False,
        PerformanceMode="generalPurpose", ThroughputMode="elastic", Tags=tags.pairs(work.tags()),
    )  # fmt: skip
    return until(lambda: look(work), "the file system was made, and AWS does not show it")


def _available(work: Work) -> Files | None:
    files = look(work)
    return files if files and files.state == "available" else None


def _mount(work: Work, files: Files, zone: str, subnet: str, group: str) -> bool:
    """Make a mount target; False where EFS does not serve the zone."""
    words = {"FileSystemId": files.id, "SubnetId": subnet, "SecurityGroups": [group]}
    try:
        work.say(f"making a mount target in {zone}")
        work.make(f"mount target in {zone}", work.account.efs.create_mount_target, **words)
    except CloudError as error:
        if error.code != "UnsupportedAvailabilityZone":
            raise
        network.without_files(work, zone, subnet)
        return False
    return True


def _ready(work: Work, subnets: Mapping[str, str]) -> Files | None:
    files = look(work)
    return files if files and not files.missing(subnets) else None
