"""The stack of a region: the long-lived AWS resources that its jobs share. Free, except for the data it stores.

The stack is found by its tags and created by the first launch that needs it. A resource of the same name
without the stack tag is never touched.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from infra.aws import tags
from infra.aws.client import Account
from infra.aws.journal import Journal
from infra.aws.launch_request import Internet
from infra.errors import CloudError

from . import buckets, efs, given_network, key_pairs, network, role
from . import security_group as stack_security_group
from .resources import StackContext


@dataclass(frozen=True)
class Stack:
    """The parts of a stack that a launch needs."""

    region: str
    vpc: str
    subnets: dict[str, str]  # by zone
    security_group: str
    file_system: str
    key_name: str
    bucket: str | None = None
    access_point: str = ""  # of the file system
    network_ids: tuple[str, ...] = ()  # of the user's network in which the stack is, () for its own


class StackInspection(NamedTuple):
    """What `inspect` has found: a line for each part that `ensure` would create; the stack, None unless complete."""

    missing_parts: list[str]
    stack: Stack | None
    network: network.StackNetwork


def stack_journal(region: str) -> Journal:
    """Return this computer's journal of changes to a region's stack."""
    return Journal(Path(f"~/.imgnet/aws/{region}.jsonl").expanduser())


def exists(account: Account) -> bool:
    """Return whether the stack's network, file system or bucket exists, complete or not. Raises `CloudError`."""
    context = StackContext(account)
    return bool(network.list_vpc_ids(context) or efs.exists(context) or buckets.list_own(context))


def list_data(account: Account) -> tuple[list[str], list[str]]:
    """Return the IDs of the stack's file systems (none or one) and the names of its buckets. Raises `CloudError`."""
    context = StackContext(account)
    file_system = efs.find_file_system(context)
    own_buckets = buckets.list_own(context, file_system.bucket if file_system else None)
    return [file_system.id] if file_system else [], own_buckets


def ensure(
    account: Account,
    address: str,
    bucket: str | None = None,
    user_tags: tags.Tags = MappingProxyType({}),
    network_ids: Sequence[str] = (),
    internet: Internet | None = None,
    complete: Stack | None = None,
) -> Stack:
    """Create what is missing, allow ssh from `address`, and return the stack.

    `network_ids` name a network of the user's, which must have the way to the internet. Of a stack that was found
    `complete` a moment ago only ssh is looked at, unless its group is not there any more. Only what is created gets the
    user's tags. Idempotent: safe to call again after a crash, and by two processes at
    once. Raises `CloudError` when a resource has the stack's name but not its tag, or when you may not create it;
    `OSError` when the journal cannot be written.
    """
    stack_security_group.parse_single_address(address)
    context = StackContext(account, stack_journal(account.region), user_tags)
    known_group = stack_security_group.find_security_group(context, complete.vpc) if complete else None
    if complete and known_group and known_group["GroupId"] == complete.security_group:
        _allow_ssh_from(context, complete.vpc, complete.security_group, address, known_group)
        return complete
    found = efs.find_file_system(context)
    own_bucket = found.bucket if found else None
    if bucket and not own_bucket:
        own_bucket = next(iter(buckets.list_own(context)), None)
    buckets.check_name(bucket, own_bucket)
    stack_network = _find_given_network(context, found, network_ids, internet)
    key_file = key_pairs.ensure_own_key()
    public_key = key_pairs.read_public_key(key_file)
    key_name = key_pairs.key_pair_name(public_key)
    role.ensure(context)
    stack_network = stack_network or network.ensure(context)
    vpc = str(stack_network.vpc)
    group = stack_security_group.ensure_security_group(context, vpc)
    _allow_ssh_from(context, vpc, group, address)
    key_pairs.ensure_key_pair(context, key_name, public_key)
    file_system, subnets = efs.ensure(context, stack_network, group, found)
    buckets.check_name(bucket, file_system.bucket)  # another process may have made one
    bucket = bucket or file_system.bucket
    if bucket:
        buckets.ensure(context, bucket, file_system.id)
    role.grant_access(context, file_system.id, bucket)
    served_network = replace(stack_network, subnets=subnets)
    return _make_stack(account.region, served_network, group, replace(file_system, bucket=bucket), key_name)


def _allow_ssh_from(
    context: StackContext, vpc: str, group: str, address: str, known_group: tags.Resource | None = None
) -> None:
    owner, journal = context.account.owner, context.journal
    stack_security_group.allow_ssh_from(
        context.account, group, address, owner, journal=journal, known_group=known_group
    )
    network.route_jobs_to(context, vpc, address)


def remove(account: Account, delete_data: bool, known_buckets: Sequence[str] | None = None) -> list[str]:
    """Delete the stack, its data only with `delete_data`. Return a line for each resource that should have gone.

    Of buckets only the known ones, None for all. Data that is kept is logged with its price. Raises `CloudError`,
    without a change, while machines run in the stack.
    """
    context = StackContext(account, stack_journal(account.region))
    machines = network.list_machines(context)
    if machines:
        job_by_id = {machine["InstanceId"]: tags.read_tags(machine).get(tags.JOB) for machine in machines}
        labels = ", ".join(f"{id} ({job})" if job else id for id, job in job_by_id.items())
        raise CloudError(
            f"machines still run in the stack of {account.region}: {labels}; type: imgnet-cluster down --all"
        )
    file_system = efs.find_file_system(context)
    stack_bucket = file_system.bucket if file_system else None
    for name in buckets.list_own(context, stack_bucket) if known_buckets is None else known_buckets:
        if buckets.remove(context, name, delete_data) and file_system and name == stack_bucket:
            buckets.untag_file_system(context, file_system.id)
    efs.remove(context, delete_data)
    role.remove(context)
    key_pairs.remove_key_pairs(context)
    stack_security_group.remove_security_groups(context)
    network.remove(context)
    return context.leftovers


def inspect(
    account: Account, network_ids: Sequence[str] = (), internet: Internet | None = None, bucket: str | None = None
) -> StackInspection:
    """Look at the stack, in its own network or in the user's, which must have this way to the internet.

    `bucket` is one that it is to have. Changes nothing. Raises `CloudError`.
    """
    context = StackContext(account)
    key_file = key_pairs.KEY_PATH.expanduser()
    key_name = key_pairs.key_pair_name(key_pairs.read_public_key(key_file)) if key_file.exists() else ""
    with ThreadPoolExecutor() as pool:
        own_network = None if network_ids else pool.submit(network.inspect_network, context)
        file_system_answer = pool.submit(efs.find_file_system, context)
        has_key_pair = pool.submit(lambda: bool(key_name) and key_pairs.has_key_pair(context, key_name))
    file_system = file_system_answer.result()
    stack_bucket = file_system.bucket if file_system else None
    buckets.check_name(bucket, stack_bucket)
    stack_network = _find_given_network(context, file_system, network_ids, internet)
    if not stack_network:
        assert own_network
        stack_network = own_network.result()
    vpc = stack_network.vpc
    group = stack_security_group.find_security_group(context, vpc) if vpc else None
    lines = list(stack_network.missing_parts)
    if not group or not stack_security_group.is_complete(group):
        lines.append("security group imgnet")
    if file_system:
        lines += file_system.missing_parts(stack_network.subnets)
    else:
        lines.append("file system (EFS, encrypted, free while empty)")
    if not key_name:
        lines.append("key pair")
    elif not has_key_pair.result():
        lines.append(f"key pair {key_name}")
    file_system_id = file_system.id if file_system else None
    lines += role.missing_parts(context, file_system_id, stack_bucket)
    lines += [f"bucket {bucket}"] if bucket and bucket != stack_bucket else []
    if not vpc or not group or not file_system or lines:
        return StackInspection(lines, None, stack_network)
    own_stack = _make_stack(account.region, stack_network, str(group["GroupId"]), file_system, key_name)
    return StackInspection(lines, own_stack, stack_network)


def _find_given_network(
    context: StackContext, file_system: efs.FileSystem | None, network_ids: Sequence[str], internet: Internet | None
) -> network.StackNetwork | None:
    """Return the user's network, which the caller names or the stack is in; None: its own. Raises `CloudError`."""
    known_ids = file_system.network_ids if file_system else ()
    is_mounted = bool(file_system and file_system.mount_target_states)
    refused_ids = file_system.refused_subnets if file_system else ()
    unknown_ids = [id for id in network_ids if id not in (*known_ids, *refused_ids)]
    if unknown_ids and is_mounted:
        place = " ".join(known_ids) or "a network of its own"
        raise CloudError(
            f"{' '.join(unknown_ids)}: the stack of {context.account.region} uses only {place}, and its file system "
            "can be mounted in one network at a time; leave --vpc and --subnet out, or to move it or add subnets "
            "(its data stay): imgnet-cluster down --stack, then up --stack --subnet ..."
        )
    ids = known_ids if is_mounted or not network_ids else network_ids
    return given_network.look_up(context, ids, internet) if ids else None


def _make_stack(
    region: str, own_network: network.StackNetwork, group: str, file_system: efs.FileSystem, key_name: str
) -> Stack:
    return Stack(
        region=region,
        vpc=str(own_network.vpc),
        subnets=own_network.subnets,
        security_group=group,
        file_system=file_system.id,
        key_name=key_name,
        bucket=file_system.bucket,
        access_point=file_system.access_point,
        network_ids=own_network.given_ids,
    )
