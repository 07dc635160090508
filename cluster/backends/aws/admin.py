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
from infra.aws.client import Account, my_address
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

from .errors import lines
from .instances import JOURNAL

Say = Callable[[str], None]


def regions(asked: Sequence[str]) -> list[str]:
    """Return the regions that are meant: those named, else the one of the environment. Raises `ClusterError`."""
    with lines():
        return list(asked) or [Account().region]


# --- the stack ----------------------------------------------------------------------------------------------------


def up(region: str | None, address: str | None, bucket: str | None, say: Say) -> stack.Stack:
    """Make the stack of a region, or what is missing of it. Raises `ClusterError`."""
    with lines():
        return stack.ensure(Account(region), address or my_address(), say, bucket)


def missing(region: str | None) -> list[str]:
    """Return what `up` would make. Raises `ClusterError`."""
    with lines():
        return stack.missing(Account(region))


def down_stack(region: str | None, delete_data: bool, say: Say) -> list[str]:
    """Remove the stack of a region. Returns a line for each thing that is left. Raises `ClusterError`."""
    with lines():
        account = Account(region)
        there = [one for one in instances.all_of(account) if one.bills]
        if there:
            jobs = ", ".join(sorted({one.uid for one in there}))
            raise ClusterError(f"{len(there)} machines run in the stack, of {jobs}; first: imgnet-cluster down --all")
        return stack.remove(account, delete_data, say)


# --- what bears our tags ------------------------------------------------------------------------------------------


def machines(region: str) -> list[Instance]:
    """Return all machines of ours in a region that still bill. Raises `ClusterError`."""
    with lines():
        return [one for one in instances.all_of(Account(region)) if one.state != "terminated"]


def by_job(found: Sequence[Instance]) -> list[dict[str, Any]]:
    """Return a row for each job: how many machines of what, where, since when, until when, whose."""
    rows = []
    for uid in sorted({one.uid for one in found}):
        mine = [one for one in found if one.uid == uid]
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
                "since": tags.stamp(min(one.launched for one in mine)),
                "expires": max(one.tags.get(tags.EXPIRES, "") for one in mine),
                "owner": mine[0].tags.get(tags.OWNER, ""),
            }
        )
    return rows


def down(region: str, name: str, say: Say) -> list[str]:
    """End a job by the tags of its machines: `name` is its uid, or its name if only one job has it.

    Returns a line for each thing that is not gone. Raises `NoSuchJob`, `ClusterError`.
    """
    with lines():
        account = Account(region)
        owners = {
            one.uid: one.tags.get(tags.OWNER, "") for one in instances.all_of(account) if one.state != "terminated"
        }
        uids = set(owners) | set(_strays(account))
        found = sorted(one for one in uids if one == name or one.rpartition("-")[0] == name)
        if not found:
            raise NoSuchJob(f"{name}: nothing in {region} bears its tag; what there is: imgnet-cluster ls --cloud")
        if len(found) > 1:
            raise ClusterError(f"{name}: several jobs have this name; say which: {', '.join(found)}")
        if found[0] != name and owners.get(found[0], account.owner) != account.owner:
            whose = f"{name} is {found[0]} of {owners[found[0]]}"
            raise ClusterError(f"{whose}; if it is to end: imgnet-cluster down {found[0]}")
        return end(account, found[0], say)


def end(account: Account, uid: str, say: Say) -> list[str]:
    """End all that bears a job's tag. Returns a line for each thing that is not gone. Raises `CloudError`."""
    ids = [] if uid else [one.id for one in instances.all_of(account) if not one.uid and one.bills]  # of no job at all
    left = instances.end(account, uid, ids, say)
    lines_left = [f"machine {one.id} in {one.region}: {one.state}" for one in left]
    return lines_left + instances.sweep(account, {tags.JOB: uid})


def _strays(account: Account) -> dict[str, list[dict[str, str]]]:
    """Return by job the tags of what machines leave: addresses, disks, placement groups, spot requests."""
    found: dict[str, list[dict[str, str]]] = {}
    for see in (instances.addresses, instances.volumes, instances.groups, instances.spot_requests):
        for one in map(tags.read, see(account, {tags.STACK: tags.OURS})):
            if tags.JOB in one:
                found.setdefault(one[tags.JOB], []).append(one)
    return found


def garbage(region: str, known: Mapping[str, bool], unknown: bool, now: float) -> tuple[dict[str, str], list[str]]:
    """Return what is to be removed by job, with the reason, and a line for each that is left alone, with the reason.

    `known` says for each job of this computer whether it lives. A job that nobody here knows is another computer's: it
    is left alone until its expiry, unless `unknown`. Raises `ClusterError`.
    """
    with lines():
        account = Account(region)
        found = [one for one in instances.all_of(account) if one.bills]
        strays = _strays(account)
    remove, stay = {}, []
    for uid in sorted({one.uid for one in found} | set(strays)):
        mine = [one for one in found if one.uid == uid]
        said = [one.tags for one in mine] or strays[uid]
        expires = max(tags.moment(one.get(tags.EXPIRES, "")) or 0.0 for one in said)
        whose = uid or "no job"
        what = f"{whose}: {len(mine)} machines in {region}" if mine else f"{whose}: what its machines left in {region}"
        if expires < now:
            remove[uid] = f"{what}, past the end of their time ({tags.stamp(expires)})"
        elif known.get(uid) is False or not uid:
            remove[uid] = f"{what}, of a job that has ended"
        elif uid in known:
            stay.append(f"{what}: it is at work; end it: imgnet-cluster down {uid.rpartition('-')[0]}")
        elif unknown:
            remove[uid] = f"{what}, of a job that this computer does not know"
        else:
            until = f"until {tags.stamp(expires)}, of {said[0].get(tags.OWNER, 'nobody')}"
            stay.append(f"{what}: not of a job of this folder, {until}; end it: imgnet-cluster down {uid}")
    return remove, stay


def remove(region: str, uids: Sequence[str], say: Say) -> list[str]:
    """Remove all of some jobs. Returns a line for each thing that is not gone. Raises `ClusterError`."""
    with lines():
        account = Account(region)
        return [line for uid in uids for line in end(account, uid, say)]


# --- prices, and what is in order ---------------------------------------------------------------------------------


def offered(region: str | None, gpu: str | None, recipe: Recipe | None, machines: int | None) -> list[dict[str, Any]]:
    """Return a row for each type and zone, with minutes and dollars of a recipe on so many. Raises `ClusterError`."""
    with lines():
        found = offers.offers(Account(region), gpu)
    rows = [_row(one, recipe, machines) for one in found]
    return sorted(rows, key=lambda row: row["dollars"] or float("inf")) if recipe else rows


def _row(one: offers.Offer, recipe: Recipe | None, machines: int | None) -> dict[str, Any]:
    kind, minutes, price = one.kind, None, one.spot if one.spot is not None else one.on_demand
    count = machines or (recipe.machines if recipe else 1)
    if recipe:
        planned, each = recipe.at(count), max(1, kind.gpus)
        with contextlib.suppress(ValueError):  # a batch that cannot be shared out among so many
            schedule = Schedule(planned, planned.data.train, count * each)
            guess = forecast(schedule, gpus=each, gpu=kind.gpu, gbit=kind.gbit, machines=count, vcpus=kind.vcpus)
            minutes = guess.minutes if guess else None
    dollars = None if minutes is None or price is None else count * price * minutes / 60
    return {
        "type": one.type, "zone": one.zone, "gpus": kind.gpus, "gpu": kind.gpu, "gpu_gb": kind.gpu_gb, "efa": kind.efa,
        "gbit": kind.gbit, "spot": one.spot, "on_demand": one.on_demand, "on_demand_shipped": one.on_demand_shipped,
        "machines": count, "minutes": minutes, "dollars": dollars,
    }  # fmt: skip


def check(region: str | None, types: Sequence[str], count: int, market: str) -> list[preflight.Finding]:
    """Return all that stands in the way of a launch, or does not. Raises `ClusterError`: there is no region."""
    with lines():
        account = Account(region)
        try:
            gone = stack.missing(account)
        except CloudError:  # which the check finds out by itself, and says
            gone = []
        return preflight.check(account, types=types, machines=count, market=market, stack_missing=gone)


def policies(data: str | None = None) -> dict[str, Any]:
    """Return the least policies of the user and of the machines, as plain data; with `data`, an s3:// place outside the
    stack's bucket, what reading from there takes. Raises `ClusterError`.
    """
    found = {"user": stack_policies.for_user(), "machines": stack_policies.for_machines()}
    with lines():
        return {**found, "data": stack_policies.for_data(*s3.place(data))} if data else found


def cost(run: Path, now: float | None = None) -> dict[str, Any]:
    """Return what a job has cost: a row for each machine, and sums. From its journal; asks nobody."""
    now, journal = time.time() if now is None else now, Journal(run / JOURNAL)
    found, gate = billing.rows(journal, now), billing.gate(journal, now)
    unknown = [one.id for one in found if one.dollars is None]
    return {
        "machines": [{**vars(one), "all": one.all} for one in found],
        "dollars": sum(one.all for one in found) + gate,
        "machine_dollars": sum(one.dollars or 0.0 for one in found),
        "disk_dollars": sum(one.disk for one in found),
        "address_dollars": sum(one.address for one in found) + gate,
        "hours": sum(one.seconds for one in found) / 3600,
        "unknown": unknown,
        "running": sum(one.ended is None for one in found),
    }
