"""What a job has cost, computed from its journal: each machine from its launch to its end, at its price.

EC2 bills by the second, one minute at least (AWS, "Amazon EC2 billing"), and no spot machine that it interrupts in its
first hour (AWS, "Billing for interrupted Spot Instances"). Disks, public addresses and traffic are included. An unknown
price stays unknown and is reported. What the job has stored in the shared file system is told with its price a month;
it is in no sum, because it is billed until somebody deletes it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

from infra.aws import journal_events as events
from infra.aws import prices
from infra.aws.client import Account
from infra.aws.journal import Journal
from infra.aws.launch_request import Internet
from infra.costs import GB, NO_TRAFFIC, JobCost, MachineCost, Traffic

from .offers import list_spot_prices

MIN_BILLED_SECONDS = 60
INTERRUPTED_CODE = "Server.SpotInstance"  # begins EC2's reason of the end of a spot machine that it has interrupted
FREE_IF_INTERRUPTED_SECONDS = 3600


def machine_costs(journal: Journal, now: float) -> list[MachineCost]:
    """Return the cost until `now` of each machine that was launched, in launch order.

    Machines of a refused request that were terminated at once are included: they are billed too.
    """
    requests: dict[int, events.LaunchRequest] = {}
    ends: dict[str, events.InstanceEnded] = {}
    exact_dollars: dict[str, float] = {}
    release_reasons: dict[str, str] = {}
    # By instance ID, because two supervisors may both have recorded the same response.
    machines: dict[str, tuple[events.LaunchRequest, events.LaunchedMachine]] = {}
    addressed_ids = set[str]()  # of machines that got a public address when they ran
    for event in journal.events(events.JournalEvent):
        match event:
            case events.LaunchRequest():
                requests[event.number] = event
            case events.RequestGranted() | events.RequestRefused() if event.number in requests:
                machines |= {machine.id: (requests[event.number], machine) for machine in event.machines}
            case events.InstanceEnded():
                # EC2 may interrupt a machine that we have released in the same moment, and then does not bill it.
                is_interrupted = event.reason.startswith(INTERRUPTED_CODE)
                reason = event.reason if is_interrupted else release_reasons.get(event.id, event.reason)
                ends[event.id] = replace(event, reason=reason)
            case events.InstancesReleased():
                release_reasons |= dict.fromkeys(event.ids, event.reason)
            case events.PublicAddressRequested():
                addressed_ids.add(event.id)
            case events.SpotCostKnown():
                exact_dollars[event.id] = event.dollars
    costs = []
    for machine_id, (request, machine) in machines.items():
        if machine.launched > now:
            continue
        place, end = request.place, ends.get(machine_id)
        if end and end.ended > now:
            end = None
        lifetime = (end.ended if end else now) - machine.launched
        seconds = float(max(MIN_BILLED_SECONDS, math.ceil(lifetime)))
        dollars = exact_dollars.get(machine_id) if end or machine_id not in ends else None
        if dollars is None and place.price is not None:
            dollars = place.price * seconds / 3600
        if end and end.reason.startswith(INTERRUPTED_CODE) and lifetime < FREE_IF_INTERRUPTED_SECONDS:
            dollars = 0.0
        disk_gb = sum(disk["Ebs"]["VolumeSize"] for disk in request.parameters["BlockDeviceMappings"])
        asked_for_address = any(nic.get("AssociatePublicIpAddress") for nic in request.parameters["NetworkInterfaces"])
        has_public_address = machine_id in addressed_ids or asked_for_address
        costs.append(
            MachineCost(
                id=machine.id,
                name=machine.name,
                type=place.type,
                market=place.market,
                zone=place.zone,
                launched=machine.launched,
                ended=end.ended if end else None,
                price=place.price,
                seconds=seconds,
                dollars=dollars,
                disk_dollars=disk_gb * prices.DISK_PER_GB_HOUR * seconds / 3600,
                address_dollars=has_public_address * prices.ADDRESS_PER_HOUR * seconds / 3600,
                why=end.reason if end else "",
            )
        )
    return costs


def _hours_of_lives(journal: Journal, event_type: type[events.JournalEvent], now: float) -> list[float]:
    """Return the hours until `now` of each life of the one resource of a kind that a job has.

    A life begins with the first event that mentions the resource, and ends when the job's resources are gone. Each
    launch of the job may begin another one.
    """
    start = None
    lives = []
    for event in journal.events(event_type, events.TerminationFinished):
        if isinstance(event, event_type):
            start = start or event.time
        elif start:
            lives.append((start, event.time))
            start = None
    if start:
        lives.append((start, now))
    return [max(0.0, min(now, end) - start) / 3600 for start, end in lives]


def job_cost(journal: Journal, now: float, traffic: Traffic = NO_TRAFFIC) -> JobCost:
    """Return what a job has cost until `now`, with its traffic until then. The cost limit is compared with its dollars.

    A NAT gateway is billed by the begun hour (AWS, "Amazon VPC pricing"). Where one was needed once, all traffic over
    the internet counts as having passed it. So does that of a network of the user's, whose gateway's hours are not the
    job's.
    """
    address_hours = sum(_hours_of_lives(journal, events.AddressRequested, now))
    nat_hours = _hours_of_lives(journal, events.NatGatewayRequested, now)
    is_private = any(request.internet is Internet.PRIVATE for request in journal.events(events.LaunchRequest))
    return JobCost(
        machines=tuple(machine_costs(journal, now)),
        shared_address_dollars=prices.ADDRESS_PER_HOUR * address_hours,
        nat_dollars=sum(
            prices.NAT_PER_HOUR * math.ceil(hours) + prices.ADDRESS_PER_HOUR * hours for hours in nat_hours
        ),
        traffic=prices.price_traffic(traffic, uses_nat=bool(nat_hours) or is_private),
        earlier_dollars=sum(event.dollars for event in journal.events(events.JobAdopted)),
        stored_gb=traffic.stored_bytes / GB,
        stored_dollars_per_month=traffic.stored_bytes / GB * prices.EFS_PER_GB_MONTH,
        requested=sum(len(each.request.names) for each in journal.launch_requests() if each.outcome is None),
    )


def record_spot_costs(account: Account, journal: Journal, now: float) -> None:
    """Write to the journal the exact cost of each spot machine that has ended in the account's region.

    Spot prices change while machines run. Raises `CloudError`.
    """
    recorded_ids = {event.id for event in journal.events(events.SpotCostKnown)}
    ended_machines = [
        machine
        for machine in machine_costs(journal, now)
        if machine.market == "spot" and machine.ended and machine.id not in recorded_ids
        if machine.zone.startswith(account.region)
    ]
    for type_name, zone in sorted({(machine.type, machine.zone) for machine in ended_machines}):
        machines = [machine for machine in ended_machines if (machine.type, machine.zone) == (type_name, zone)]
        start = min(machine.launched for machine in machines)
        end = max(machine.ended or now for machine in machines)
        period = {"StartTime": datetime.fromtimestamp(start, UTC), "EndTime": datetime.fromtimestamp(end, UTC)}
        entries = list_spot_prices(account, [type_name], AvailabilityZone=zone, **period)
        history = sorted((entry["Timestamp"].timestamp(), float(entry["SpotPrice"])) for entry in entries)
        for machine in machines:
            dollars = integrate_price(history, machine.launched, machine.launched + machine.seconds)
            if dollars is not None:
                journal.write(events.SpotCostKnown(id=machine.id, dollars=dollars))


def integrate_price(changes: Sequence[tuple[float, float]], begin: float, end: float) -> float | None:
    """Return the dollars from `begin` to `end` at a price that changes. None when the price at `begin` is unknown.

    `changes` are (time, dollars an hour) in order.
    """
    earlier_prices = [price for time, price in changes if time <= begin]
    if not earlier_prices:
        return None
    changes_between = [(time, price) for time, price in changes if begin < time < end]
    steps = [(begin, earlier_prices[-1]), *changes_between, (end, 0.0)]
    return sum((next_time - time) * price / 3600 for (time, price), (next_time, _) in pairwise(steps))
