"""What the journal of a job says about its instances: where they were rented, since when, why they ended, what is left.

Reads the run folder only and makes no request.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.backends.aws.terms.rental_spec import MAX_HOURS_WITHOUT_LIMIT, RentalSpec, RentalTerms, compute_limits
from cluster.connectors.hosts_file import Host
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec, RequestedLimits
from infra.aws import journal_events as events
from infra.aws.instances.instances import Instance
from infra.aws.journal import EventT, Journal
from infra.aws.launch_request import Internet, Place
from infra.aws.market import billing
from infra.aws.stack import key_pairs
from infra.costs import JobCost, TrafficForecast
from infra.errors import CloudError
from train.tools import host

from .traffic import read_traffic

REMOTE_FOLDER = "~/.imgnet"  # on every rented machine; its boot script creates the folder
REMOTE_PYTHON = f"{REMOTE_FOLDER}/python"
LONGEST_SEARCH_SECONDS = 3600.0  # for the stack and the first machines; a search alone ends after 20 minutes
ADDRESS_SECONDS = 300.0  # for EC2 to show a public address; a boot that has no way to the internet fails after 600 s
NO_MACHINES_IN_TIME = "it had no machines an hour after its launch"


class InstanceHistory:
    """The history of one job's instances, as the journal in its run folder has it."""

    def __init__(self, spec: JobSpec, run_folder: RunFolder) -> None:
        self.spec = spec
        self.run_folder = run_folder
        self.max_exchanges = spec.recovery.max_exchanges
        self._changed_hours: float | None = None
        self._changed_dollars: float | None = None
        self.rental_spec = RentalSpec.from_json(spec.cloud)
        self.journal = Journal(run_folder.journal_path)

    # --- requests -----------------------------------------------------------------------------------------------------

    def granted_requests(self) -> list[events.LaunchRequest]:
        """Return the launch requests that EC2 granted, in order."""
        return [recorded.request for recorded in self.journal.launch_requests() if recorded.is_granted]

    @property
    def last_region(self) -> str:
        """The region of the last request that was not refused; without one, the region that is tried first."""
        regions = [
            recorded.request.place.region for recorded in self.journal.launch_requests() if not recorded.is_refused
        ]
        return regions[-1] if regions else self.rental_spec.region

    @property
    def current_place(self) -> Place | None:
        """Where this launch has its instances: the place of its last granted request for the first; None before it."""
        request = self.last_full_request()
        return request.place if request and self.first_machine_time is not None else None

    @property
    def first_names(self) -> tuple[str, ...]:
        """The machines that are rented by one request. All others are spares."""
        return self.rental_spec.split_spares(self.spec.machine_names)[0]

    @property
    def rents_spares_late(self) -> bool:
        """Whether spares are rented only while another machine is at risk."""
        return self.rental_spec.late_spares > 0

    def last_full_request(self) -> events.LaunchRequest | None:
        """Return the last granted request for the `first_names`, None when there is none."""
        full_requests = [request for request in self.granted_requests() if request.names == self.first_names]
        return full_requests[-1] if full_requests else None

    @property
    def internet(self) -> Internet:
        """The machines' way to the internet: the requested one, a NAT gateway once EC2 has refused public addresses."""
        requested = self.rental_spec.internet
        is_refused = requested is Internet.PUBLIC and self.journal.events(events.PublicAddressRefused)
        return Internet.NAT if is_refused and not self.rental_spec.network_ids else requested

    @property
    def claim(self) -> str:
        """The ID with which this computer has adopted the job, "" when it launched the job."""
        return "".join(event.claim for event in self.journal.events(events.JobAdopted)[-1:])

    # --- this launch --------------------------------------------------------------------------------------------------

    def has_launch(self, launch_id: str) -> bool:
        """Whether a launch is recorded: as a start or resume of the job, or as a move to other instances."""
        started_ids = {event.launch_id for event in self.journal.events(events.LaunchStarted)}
        return launch_id in started_ids | {event.launch_id for event in self.journal.events(events.LaunchMoved)}

    def record_launch(self, launch_id: str) -> None:
        """Record when a launch starts, by the later of two clocks: this process's own may have stood still."""
        if not self.has_launch(launch_id):  # a restarted supervisor repeats the call
            self.journal.copy(events.LaunchStarted(time=max(time.time(), host.unix_time()), launch_id=launch_id))

    def record_move(self, launch_id: str) -> None:
        """Record that the launch continues on other instances, under a new launch ID."""
        self.journal.write(events.LaunchMoved(launch_id=launch_id))

    def _launch_events(self, event_type: type[EventT]) -> list[EventT]:
        """Return the events of a type in this launch, a launch being a start or a resume of the job."""
        found: list[EventT] = []
        for event in self.journal.events(events.JournalEvent):  # in the order of writing: clocks may be set
            if isinstance(event, events.LaunchStarted):
                found.clear()
            elif isinstance(event, event_type):
                found.append(event)
        return found

    @property
    def first_machine_time(self) -> float | None:
        """When the first instance of this launch was granted, in seconds since 1970; None before it."""
        return min((grant.time for grant in self._launch_events(events.RequestGranted)), default=None)

    @property
    def has_moved(self) -> bool:
        """Whether all machines of this launch were rented more than once."""
        grants = self._launch_events(events.RequestGranted)
        return [{machine.name for machine in grant.machines} for grant in grants].count({*self.first_names}) > 1

    @property
    def is_terminating(self) -> bool:
        """Whether a command began to terminate the instances of this launch. Then nothing is rented for it any more."""
        return bool(self._launch_events(events.TerminationStarted))

    @property
    def is_too_late(self) -> bool:
        """Whether this launch has got no instance for an hour.

        Nobody expects machines, at a price of then, when a computer that was off looks at the job days later. Nor may a
        request that EC2 has not carried out be sent again: after a day EC2 does not know it, and would rent by it.
        """
        starts = self.journal.events(events.LaunchStarted)
        is_late = bool(starts) and host.unix_time() > starts[-1].time + LONGEST_SEARCH_SECONDS
        return is_late and not self._launch_events(events.RequestGranted)

    @property
    def exchanged_ids(self) -> set[str]:
        """The instances of this launch that were terminated because they are broken."""
        releases = self._launch_events(events.InstancesReleased)
        return {instance_id for release in releases if release.is_exchange for instance_id in release.ids}

    @property
    def exchanges_left(self) -> int:
        """How many machines of this launch may still be exchanged.

        Other machines of the same type and place are as good as a broken one was. When the next ones break too, the
        cause is elsewhere, and every further machine would only cost money.
        """
        return max(0, self.max_exchanges - len(self.exchanged_ids))

    def external_termination_reason(self) -> str:
        """Return why the last instances of this launch ended, if neither EC2 nor the job did; else "".

        The cause is then another computer, a user of the AWS console, or the instances' own time limit. All of them
        want the job to end, so no new instances are rented. The instance that ended last decides, because EC2 may have
        interrupted another one before that was never replaced. A launch that is too late has ended too.
        """
        if self.is_too_late:
            return NO_MACHINES_IN_TIME
        find = self.journal.events
        released_ids = {instance_id for event in find(events.InstancesReleased) for instance_id in event.ids}
        released_ids |= {instance_id for event in find(events.TerminationStarted) for instance_id in event.ids}
        grants = self._launch_events(events.RequestGranted)
        last_ids = {machine.name: machine.id for grant in grants for machine in grant.machines}
        ends = self.journal.events(events.InstanceEnded)
        endings = {event.id: (event.ended, event.reason) for event in ends if event.reason != events.FORGOTTEN}
        # EC2 shows a terminated instance for about an hour. One that is missing ended earlier, while no supervisor ran.
        unseen_ending = (math.inf, "Client.InstanceInitiatedShutdown")
        last_endings = [endings.get(each, unseen_ending) for each in last_ids.values() if each not in released_ids]
        _, reason = max(last_endings, default=(0.0, ""))
        if not reason.startswith("Client."):
            return ""
        if "InstanceInitiated" in reason:
            return "its machines powered themselves off, at their time limit or after the job's end"
        return "its machines were terminated by a user (imgnet-cluster down, or the AWS console)"

    def has_waited_for_addresses(self, machines: Sequence[Instance]) -> bool:
        """Whether one of these machines has waited for its public address for `ADDRESS_SECONDS`."""
        ids, deadline = {machine.id for machine in machines}, host.unix_time() - ADDRESS_SECONDS
        return any(
            event.id in ids and event.time < deadline for event in self.journal.events(events.PublicAddressRequested)
        )

    # --- cost and limits ----------------------------------------------------------------------------------------------

    @classmethod
    def job_cost(cls, run_path: Path, moment: float) -> JobCost:
        """Return what the machines of a run folder and their traffic have cost until `moment`. Reads files only."""
        return billing.job_cost(Journal(RunFolder(run_path).journal_path), moment, read_traffic(run_path).until(moment))

    @property
    def closing_time(self) -> float | None:
        """When EC2 ends the instances, in seconds since 1970; None for never. An extended reservation ends later."""
        places = [self.current_place, *self.rental_spec.places]
        return max((place.closing_time for place in places if place and place.closing_time is not None), default=None)

    @property
    def dollars_per_hour(self) -> float | None:
        """The price of all machines where they are now, with disks, addresses and expected traffic; None: unknown."""
        place = self.current_place
        rental_spec = replace(self.rental_spec, internet=self.internet)
        return rental_spec.dollars_per_hour(len(self.spec.machine_names), place) if place else None

    @property
    def expected_traffic(self) -> TrafficForecast:
        """What the traffic of one launch of the job is expected to cost; a part of `dollars_per_hour`."""
        return self.rental_spec.traffic

    def total_dollars(self, moment: float) -> float:
        """Return the known dollars until `moment`."""
        return self.cost_until(moment).dollars

    def cost_until(self, moment: float) -> JobCost:
        """Return what `job_cost` does. Called several times a second, so it reads a journal that is known already."""
        return billing.job_cost(self.journal, moment, read_traffic(self.run_folder.path).until(moment))

    @property
    def earlier_cost(self) -> float:
        """The cost of the job's earlier launches, in dollars."""
        return self.total_dollars(self.first_machine_time or host.unix_time())

    def change_limits(self, hours: float | None, dollars: float | None) -> None:
        """Let this object use other limits than the requested ones, those that are not None."""
        self._changed_hours, self._changed_dollars = hours, dollars

    @property
    def max_hours(self) -> float | None:
        """The requested time limit in hours, None for none."""
        return self._requested_limits.max_hours if self._changed_hours is None else self._changed_hours

    @property
    def max_dollars(self) -> float | None:
        """The limit for all machines of the job together, None for no limit."""
        if self._changed_dollars is not None:
            return self._changed_dollars
        requested = self._requested_limits.cloud
        return requested.max_dollars if requested else None

    @property
    def _requested_limits(self) -> RequestedLimits:
        """The limits in the run folder's job.json: `extend` may have changed them since this process started."""
        written = self.run_folder.read_limits()
        return written or RequestedLimits(max_hours=self.spec.max_hours, cloud=self.spec.rental_facts)

    def with_machine_limits(self, spec: JobSpec) -> JobSpec:
        """Return the specification that the machines get. Its time limit keeps the limit in dollars too.

        It names the machines' region, without which boto3 does nothing.
        """
        max_hours, grace_seconds = self.compute_limits(self.dollars_per_hour)
        limit_name = self._explain_limit(max_hours, grace_seconds)
        cloud = {**(spec.cloud or {}), "environment": {"AWS_REGION": self.last_region}}
        return replace(spec, cloud=cloud, max_hours=max_hours, poweroff_grace=grace_seconds, limit_name=limit_name)

    def compute_limits(self, dollars_per_hour: float | None) -> tuple[float, float]:
        """Return the time limit in hours since this launch's first machine, and the seconds from it until power-off."""
        max_dollars = self.max_dollars
        other_dollars = 0.0 if max_dollars is None else self._other_dollars(dollars_per_hour)
        return compute_limits(self.max_hours, max_dollars, dollars_per_hour, other_dollars, self._seconds_until_closing)

    @property
    def _seconds_until_closing(self) -> float:
        """The seconds from the first machine of this launch until the cloud ends all machines."""
        closing_time = self.closing_time
        return math.inf if closing_time is None else closing_time - (self.first_machine_time or host.unix_time())

    def _explain_limit(self, max_hours: float, grace_seconds: float) -> str:
        """Return what set this time limit when it was not the requested hours, else ""."""
        if 3600 * max_hours + grace_seconds >= self._seconds_until_closing - 1:
            return "the end of its reserved machines on EC2"
        requested_hours = MAX_HOURS_WITHOUT_LIMIT if self.max_hours is None else self.max_hours
        if self.max_dollars is None or max_hours >= requested_hours:
            return ""
        return f"the limit of ${self.max_dollars:,.2f} (--max-price-total)"

    def _other_dollars(self, dollars_per_hour: float | None) -> float:
        """Return what the job costs beside `dollars_per_hour` since this launch's first machine.

        The cost of earlier launches, of traffic that does not come by the hour, and of more traffic than expected.
        """
        start = self.first_machine_time
        dollars_once = self.expected_traffic.dollars_once
        if not dollars_per_hour or start is None:
            return self.earlier_cost + dollars_once
        now = host.unix_time()
        if self.has_moved:  # the earlier machines had another price
            return self.total_dollars(now) - dollars_per_hour * (now - start) / 3600 + dollars_once
        cost, earlier_cost = (self.cost_until(moment) for moment in (now, start))
        expected_dollars = dollars_once + self.expected_traffic.dollars_per_hour * (now - start) / 3600
        excess_dollars = max(0.0, cost.traffic_dollars - earlier_cost.traffic_dollars - expected_dollars)
        return earlier_cost.dollars + dollars_once + excess_dollars

    @property
    def is_price_limit_reached(self) -> bool:
        """Whether the job has to stop now, so that it ends within its price limit.

        The agents stop at the time limit that was computed when the machines were rented. More traffic than was
        expected then shortens the time.
        """
        now = host.unix_time()
        if self.max_dollars is None:
            return False
        if self.total_dollars(now) >= self.max_dollars:
            return True
        hours, _ = self.compute_limits(self.dollars_per_hour)
        is_limited_by_price = self.max_hours is None or hours < self.max_hours
        return bool(self.first_machine_time and is_limited_by_price and now - self.first_machine_time >= 3600 * hours)

    @property
    def power_off_time(self) -> float:
        """The latest time at which the machines of this launch power off: the time limit plus the grace period."""
        max_hours, grace_seconds = self.compute_limits(self.dollars_per_hour)
        return (self.first_machine_time or host.unix_time()) + 3600 * max_hours + grace_seconds

    @property
    def is_overdue(self) -> bool:
        """Whether all machines of this launch should be off."""
        return self.first_machine_time is not None and host.unix_time() > self.power_off_time

    def terms(self, now: float) -> RentalTerms:
        """Return what the job may rent and spend from `now` on, in seconds since 1970."""
        traffic = self.expected_traffic
        return RentalTerms(
            machines=len(self.spec.machine_names),
            spares=self.spec.recovery.spares,
            exchanges=self.exchanges_left,
            hours=None if self.max_hours is None else round(self.max_hours, 4),
            dollars=self.max_dollars,
            spent=round(self.total_dollars(now), 4),
            at=round(now),
            start=None if self.first_machine_time is None else round(self.first_machine_time),
            internet=self.internet,
            on_demand_spares=self.rental_spec.on_demand_spares,
            late_spares=self.rental_spec.late_spares,
            traffic=(round(traffic.dollars_once, 2), round(traffic.dollars_per_hour, 2)),
        )

    def hosts(self, machines: Mapping[str, Instance]) -> dict[str, Host]:
        """Return how to reach each instance. Raises `CloudError` for one whose host key is unknown."""
        return ssh_hosts(self.journal.events(events.LaunchRequest, events.HostKeyReplaced), machines)

    def has_own_host_key(self, machine: Instance) -> bool:
        """Whether the journal has the host key that an instance generated itself."""
        return machine.id in own_host_keys(self.journal.events(events.HostKeyReplaced))


# --- how to log in: jump host, user and host keys ---------------------------------------------------------------------


def find_jump_host(machines: Mapping[str, Instance]) -> Instance | None:
    """Return the first machine with a public address, through which all others are reached."""
    return next((machine for machine in machines.values() if machine.public_ip), None)


def ssh_hosts(recorded: Sequence[events.JournalEvent], instances: Mapping[str, Instance]) -> dict[str, Host]:
    """Return how to reach each instance, by machine name. `recorded` are the events of the job's journal.

    Instances without a public address are reached through the one that has it (the jump host). Raises `CloudError`
    for an instance that has the job's tag but is missing in the journal: its host key is then unknown.
    """
    request_by_token = {event.token: event for event in recorded if isinstance(event, events.LaunchRequest)}
    host_keys = own_host_keys(recorded)
    for instance in instances.values():
        if instance.launch_token not in request_by_token:
            raise CloudError(
                f"instance {instance.id} has the tag of this job, but cloud.jsonl has no record of its launch, so "
                "its host key is unknown; if nothing needs it: aws ec2 terminate-instances --region "
                f"{instance.region} --instance-ids {instance.id}"
            )
    jump_host = find_jump_host(instances)

    def host_key(instance: Instance) -> str:
        return host_keys.get(instance.id, request_by_token[instance.launch_token].host_key)

    hosts = {}
    for name, instance in instances.items():
        request = request_by_token[instance.launch_token]
        jump = None if instance.public_ip else jump_host
        hosts[name] = Host(
            host=instance.public_ip or instance.private_ip,
            address=instance.private_ip,
            port=request.ssh_port,
            user=request.ssh_user,
            key=str(key_pairs.KEY_PATH.expanduser()),
            python=REMOTE_PYTHON,
            folder=REMOTE_FOLDER,
            host_key=host_key(instance),
            jump=f"{request.ssh_user}@{jump.public_ip}:{request.ssh_port}" if jump else None,
            jump_host_key=host_key(jump) if jump else None,
        )
    return hosts


def own_host_keys(recorded: Sequence[events.JournalEvent]) -> dict[str, str]:
    """Return the host keys that instances generated themselves, by ID. All others use the one of their user data."""
    return {event.id: event.key for event in recorded if isinstance(event, events.HostKeyReplaced)}
