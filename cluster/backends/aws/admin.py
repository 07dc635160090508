"""What can be asked of AWS without a job's run folder: the stack, what bears our tags, prices, what is in order.

Everything here works from tags alone, on a computer that never saw the jobs.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError, NoSuchJob
from infra.aws import s3, tags
from infra.aws.client import Account, get_public_address
from infra.aws.errors import CloudError
from infra.aws.instances import instances, preflight
from infra.aws.instances.instances import Instance
from infra.aws.journal import Journal
from infra.aws.market import billing, offers
from infra.aws.stack import policies as stack_policies
from infra.aws.stack import stack
from train.forecast import forecast
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe

from .errors import aws_errors_as_cluster_errors
from .instances import JOURNAL_FILE

Log = Callable[[str], None]


def resolve_regions(requested: Sequence[str]) -> list[str]:
    """Return the regions that are meant: those named, else the one of the environment. Raises `ClusterError`."""
    with aws_errors_as_cluster_errors():
        return list(requested) or [Account().region]


# --- the stack ----------------------------------------------------------------------------------------------------


def ensure_stack(region: str | None, address: str | None, bucket: str | None, log: Log) -> stack.Stack:
    """Make the stack of a region, or what is missing of it. Raises `ClusterError`."""
    with aws_errors_as_cluster_errors():
        return stack.ensure(Account(region), address or get_public_address(), log, bucket)


def missing_stack_parts(region: str | None) -> list[str]:
    """Return what `up` would make. Raises `ClusterError`."""
    with aws_errors_as_cluster_errors():
        return stack.missing_parts(Account(region))


def remove_stack(region: str | None, delete_data: bool, log: Log) -> list[str]:
    """Remove the stack of a region. Returns a line for each thing that is left. Raises `ClusterError`."""
    with aws_errors_as_cluster_errors():
        account = Account(region)
        there = [one for one in instances.describe_region(account) if one.is_billed]
        if there:
            jobs = ", ".join(sorted({one.job_uid for one in there}))
            raise ClusterError(f"{len(there)} machines run in the stack, of {jobs}; first: imgnet-cluster down --all")
        return stack.remove(account, delete_data, log)


# --- what bears our tags ------------------------------------------------------------------------------------------


def list_instances(region: str) -> list[Instance]:
    """Return all machines of ours in a region that still bill. Raises `ClusterError`."""
    with aws_errors_as_cluster_errors():
        return [one for one in instances.describe_region(Account(region)) if one.state != "terminated"]


def summarize_by_job(found_instances: Sequence[Instance]) -> list[dict[str, Any]]:
    """Return a row for each job: how many machines of what, where, since when, until when, whose."""
    rows = []
    for uid in sorted({one.job_uid for one in found_instances}):
        mine = [one for one in found_instances if one.job_uid == uid]
        count = Counter(one.state for one in mine)
        rows.append(
            {
                "job": mine[0].tags.get(tags.NAME, "").removeprefix("imgnet "),
                "uid": uid,
                "machines": len(mine),
                "state": ", ".join(f"{number} {state}" for state, number in count.items()),
                "type": ", ".join(sorted({one.type for one in mine})),
                "market": ", ".join(sorted({one.market for one in mine})),
                "zone": ", ".join(sorted({one.zone for one in mine})),
                "since": tags.format_time(min(one.launch_time for one in mine)),
                "expires": max(one.tags.get(tags.EXPIRES, "") for one in mine),
                "owner": mine[0].tags.get(tags.OWNER, ""),
            }
        )
    return rows


def terminate_job(region: str, uid_or_name: str, log: Log) -> list[str]:
    """End a job by the tags of its machines: `name` is its uid, or its name if only one job has it.

    Returns a line for each thing that is not gone. Raises `NoSuchJob`, `ClusterError`.
    """
    with aws_errors_as_cluster_errors():
        account = Account(region)
        owners = {
            one.job_uid: one.tags.get(tags.OWNER, "")
            for one in instances.describe_region(account)
            if one.state != "terminated"
        }
        uids = set(owners) | set(_leftover_tags_by_job(account))
        found = sorted(one for one in uids if one == uid_or_name or one.rpartition("-")[0] == uid_or_name)
        if not found:
            raise NoSuchJob(
                f"{uid_or_name}: nothing in {region} bears its tag; what there is: imgnet-cluster ls --cloud"
            )
        if len(found) > 1:
            raise ClusterError(f"{uid_or_name}: several jobs have this name; say which: {', '.join(found)}")
        if found[0] != uid_or_name and owners.get(found[0], account.owner) != account.owner:
            whose = f"{uid_or_name} is {found[0]} of {owners[found[0]]}"
            raise ClusterError(f"{whose}; if it is to end: imgnet-cluster down {found[0]}")
        return terminate_by_uid(account, found[0], log)


def terminate_by_uid(account: Account, uid: str, log: Log) -> list[str]:
    """End all that bears a job's tag. Returns a line for each thing that is not gone. Raises `CloudError`."""
    ids = (
        [] if uid else [one.id for one in instances.describe_region(account) if not one.job_uid and one.is_billed]
    )  # of no job at all
    left = instances.terminate_and_wait(account, uid, ids, log)
    lines_left = [f"machine {one.id} in {one.region}: {one.state}" for one in left]
    return lines_left + instances.remove_leftovers(account, {tags.JOB: uid})


def _leftover_tags_by_job(account: Account) -> dict[str, list[dict[str, str]]]:
    """Return by job the tags of what machines leave: addresses, disks, placement groups, spot requests."""
    found: dict[str, list[dict[str, str]]] = {}
    for see in (instances.elastic_ips, instances.detached_volumes, instances.placement_groups, instances.spot_requests):
        for one in map(tags.read_tags, see(account, {tags.STACK: tags.STACK_VALUE})):
            if tags.JOB in one:
                found.setdefault(one[tags.JOB], []).append(one)
    return found


def find_garbage(
    region: str, local_jobs: Mapping[str, bool], include_unknown: bool, now: float
) -> tuple[dict[str, str], list[str]]:
    """Return what is to be removed by job, with the reason, and a line for each that is left alone, with the reason.

    `known` says for each job of this computer whether it lives. A job that nobody here knows is another computer's: it
    is left alone until its expiry, unless `unknown`. Raises `ClusterError`.
    """
    with aws_errors_as_cluster_errors():
        account = Account(region)
        found = [one for one in instances.describe_region(account) if one.is_billed]
        strays = _leftover_tags_by_job(account)
    remove, stay = {}, []
    for uid in sorted({one.job_uid for one in found} | set(strays)):
        mine = [one for one in found if one.job_uid == uid]
        said = [one.tags for one in mine] or strays[uid]
        expires = max(tags.parse_time(one.get(tags.EXPIRES, "")) or 0.0 for one in said)
        whose = uid or "no job"
        what = f"{whose}: {len(mine)} machines in {region}" if mine else f"{whose}: what its machines left in {region}"
        if expires < now:
            remove[uid] = f"{what}, past the end of their time ({tags.format_time(expires)})"
        elif local_jobs.get(uid) is False or not uid:
            remove[uid] = f"{what}, of a job that has ended"
        elif uid in local_jobs:
            stay.append(f"{what}: it is at work; end it: imgnet-cluster down {uid.rpartition('-')[0]}")
        elif include_unknown:
            remove[uid] = f"{what}, of a job that this computer does not know"
        else:
            until = f"until {tags.format_time(expires)}, of {said[0].get(tags.OWNER, 'nobody')}"
            stay.append(f"{what}: not of a job of this folder, {until}; end it: imgnet-cluster down {uid}")
    return remove, stay


def terminate_jobs(region: str, uids: Sequence[str], log: Log) -> list[str]:
    """Remove all of some jobs. Returns a line for each thing that is not gone. Raises `ClusterError`."""
    with aws_errors_as_cluster_errors():
        account = Account(region)
        return [line for uid in uids for line in terminate_by_uid(account, uid, log)]


# --- prices, and what is in order ---------------------------------------------------------------------------------


def offer_rows(
    region: str | None, gpu: str | None, recipe: Recipe | None, machine_count: int | None
) -> list[dict[str, Any]]:
    """Return a row for each type and zone, with minutes and dollars of a recipe on so many. Raises `ClusterError`."""
    with aws_errors_as_cluster_errors():
        found = offers.list_offers(Account(region), gpu)
    rows = [_offer_row(one, recipe, machine_count) for one in found]
    return sorted(rows, key=lambda row: row["dollars"] or float("inf")) if recipe else rows


def _offer_row(offer: offers.Offer, recipe: Recipe | None, machine_count: int | None) -> dict[str, Any]:
    kind, minutes, price = (
        offer.instance_type,
        None,
        offer.spot_price if offer.spot_price is not None else offer.on_demand_price,
    )
    count = machine_count or (recipe.machines if recipe else 1)
    if recipe:
        planned, each = recipe.for_machines(count), max(1, kind.gpus)
        with contextlib.suppress(ValueError):  # a batch that cannot be shared out among so many
            schedule = Schedule(planned, planned.data.train, count * each)
            guess = forecast(
                schedule, gpus=each, gpu=kind.gpu, gbit=kind.network_gbps, machines=count, vcpus=kind.vcpus
            )
            minutes = guess.total_minutes if guess else None
    dollars = None if minutes is None or price is None else count * price * minutes / 60
    return {
        "type": offer.type, "zone": offer.zone, "gpus": kind.gpus, "gpu": kind.gpu, "gpu_gb": kind.gpu_gb, "efa": kind.efa_interfaces,
        "gbit": kind.network_gbps, "spot": offer.spot_price, "on_demand": offer.on_demand_price, "on_demand_shipped": offer.is_builtin_price,
        "machines": count, "minutes": minutes, "dollars": dollars,
    }  # fmt: skip


def check_launch(region: str | None, types: Sequence[str], machine_count: int, market: str) -> list[preflight.Finding]:
    """Return all that stands in the way of a launch, or does not. Raises `ClusterError`: there is no region."""
    with aws_errors_as_cluster_errors():
        account = Account(region)
        try:
            gone = stack.missing_parts(account)
        except CloudError:  # which the check finds out by itself, and says
            gone = []
        return preflight.run_preflight(account, types=types, machines=machine_count, market=market, stack_missing=gone)


def iam_policies(data: str | None = None) -> dict[str, Any]:
    """Return the least policies of the user and of the machines, as plain data; with `data`, an s3:// place outside the
    stack's bucket, what reading from there takes. Raises `ClusterError`.
    """
    found = {"user": stack_policies.user_policy(), "machines": stack_policies.machine_policy()}
    with aws_errors_as_cluster_errors():
        return {**found, "data": stack_policies.dataset_policy(*s3.parse_s3_url(data))} if data else found


def job_cost(run_path: Path, now: float | None = None) -> dict[str, Any]:
    """Return what a job has cost: a row for each machine, and sums. From its journal; asks nobody."""
    now, journal = time.time() if now is None else now, Journal(run_path / JOURNAL_FILE)
    found, gate = billing.machine_costs(journal, now), billing.jump_host_address_dollars(journal, now)
    unknown = [one.id for one in found if one.dollars is None]
    return {
        "machines": [{**vars(one), "all": one.total_dollars} for one in found],
        "dollars": sum(one.total_dollars for one in found) + gate,
        "machine_dollars": sum(one.dollars or 0.0 for one in found),
        "disk_dollars": sum(one.disk_dollars for one in found),
        "address_dollars": sum(one.address_dollars for one in found) + gate,
        "hours": sum(one.seconds for one in found) / 3600,
        "unknown": unknown,
        "running": sum(one.ended is None for one in found),
    }
