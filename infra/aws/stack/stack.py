"""The stack of a region: the long-lived things that jobs stand in. Free but for what the file system holds.

Found by its tags, made by whoever needs it first, and never taken from anybody who has something of the same name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.aws import tags
from infra.aws.client import Account
from infra.aws.errors import CloudError
from infra.aws.journal import Journal

from . import buckets, efs, key_pairs, network, role
from . import security_group as stack_security_group
from .resources import Resource, StackContext, discard


@dataclass(frozen=True)
class Stack:
    """What a launch needs to know. `subnets` by zone; `key_file` is on this computer; `access_point` is the EFS's."""

    region: str
    vpc: str
    subnets: dict[str, str]
    security_group: str
    file_system: str
    key_name: str
    key_file: str
    instance_profile: str
    bucket: str | None = None
    access_point: str = ""


def stack_journal(region: str) -> Journal:
    """Return the journal of this computer about a region's stack."""
    return Journal(Path(f"~/.imgnet/aws/{region}.jsonl").expanduser())


def find(account: Account) -> Stack | None:
    """Return the stack, None while a part is missing. Changes nothing. Raises `CloudError`."""
    return _inspect(account)[1]


def missing_parts(account: Account) -> list[str]:
    """Return what `ensure` would make, one short line each; nothing when all is there. Changes nothing."""
    return _inspect(account)[0]


def ensure(account: Account, address: str, log: Callable[[str], None] = discard, bucket: str | None = None) -> Stack:
    """Make what is missing, let `address` log in, and return the stack. Safe to call again, by two, and after a crash.

    Raises `CloudError` when something bears our name and not our tag, or may not be made; `OSError` of the journal.
    """
    stack_security_group.parse_single_address(address)
    work, path = StackContext(account, log, stack_journal(account.region)), key_pairs.ensure_own_key()
    public = key_pairs.read_public_key(path)
    name = key_pairs.key_pair_name(public)
    role.ensure(work)
    net = network.ensure(work)
    group = stack_security_group.ensure_security_group(work, str(net.vpc))
    stack_security_group.allow_ssh_from(account, group, address, account.owner, log=log, journal=work.journal)
    stack_security_group.ensure_key_pair(work, name, public)
    files, subnets = efs.ensure(work, net.subnets, group)
    store = bucket or files.bucket
    if store:
        buckets.ensure(work, store, files.id)
    role.grant_access(work, files.id, store)
    return Stack(
        account.region,
        str(net.vpc),
        subnets,
        group,
        files.id,
        name,
        str(path),
        role.ROLE_NAME,
        store,
        files.access_point,
    )


def remove(account: Account, delete_data: bool, log: Callable[[str], None] = discard) -> list[str]:
    """Remove the stack, the data only when told to. Returns a line for each thing that is left.

    Raises `CloudError`, with nothing done, while machines run in it.
    """
    work = StackContext(account, log, stack_journal(account.region))
    machines = network.list_machines(work)
    if machines:
        names = ", ".join(map(_machine_label, machines))
        raise CloudError(
            f"machines still run in the stack of {account.region}: {names}; type: imgnet-cluster down --all"
        )
    files = efs.find_file_system(work)
    if files and files.bucket:
        buckets.remove(work, files.bucket, files.id, delete_data)
    efs.remove(work, delete_data)
    role.remove(work)
    stack_security_group.remove_key_pairs(work)
    for vpc in network.list_vpc_ids(work):
        stack_security_group.remove_security_groups(work, vpc)
    network.remove(work)
    return work.leftovers


def _machine_label(machine: Resource) -> str:
    job = tags.read_tags(machine).get(tags.JOB)
    return f"{machine['InstanceId']} ({job})" if job else str(machine["InstanceId"])


def _inspect(account: Account) -> tuple[list[str], Stack | None]:
    """What is missing, and the stack when nothing is that can be seen."""
    work, path = StackContext(account), key_pairs.KEY_PATH.expanduser()
    net, files = network.inspect_network(work), efs.find_file_system(work)
    group = stack_security_group.find_security_group(work, net.vpc) if net.vpc else None
    lines = list(net.missing_parts)
    if not group or not stack_security_group.is_complete(group):
        lines.append("security group imgnet: ssh from your address alone")
    lines += files.missing_parts(net.subnets) if files else ["file system (EFS, encrypted; empty it costs nothing)"]
    name = key_pairs.key_pair_name(key_pairs.read_public_key(path)) if path.exists() else ""
    if not name or not stack_security_group.has_key_pair(work, name):
        lines.append(f"key pair {name}".rstrip() + ("" if name else " (made on this computer)"))
    lines += role.missing_parts(work, files.id if files else None, files.bucket if files else None)
    if not net.vpc or not group or not files or [one for one in lines if one != role.ROLE_UNREADABLE]:
        return lines, None
    store = (files.id, name, str(path), role.ROLE_NAME, files.bucket, files.access_point)
    return lines, Stack(account.region, net.vpc, net.subnets, group["GroupId"], *store)
