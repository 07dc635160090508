"""What the journal of a job says about its instances: where they were rented, since when, why they ended, what is left.

Reads the run folder only and makes no request.
"""

import math
import time

from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from infra.aws.instances.request_history import RequestHistory
from infra.aws.journal import Journal
from infra.aws.journal_events import (
    InstanceEnded,
    InstancesReleased,
    LaunchMoved,
    LaunchRequest,
    LaunchStarted,
    RequestGranted,
    TerminationStarted,
)
from infra.aws.launch_request import Place
from infra.aws.market import billing
from train.tools.filesystem import read_json

from .rental_spec import RentalSpec

JOURNAL_FILE = "cloud.jsonl"


class InstanceHistory:
    """The history of one job's instances, as the journal in its run folder has it."""

    def __init__(self, spec: JobSpec, run_folder: RunFolder) -> None:
        self.spec = spec
        self.run_folder = run_folder
        self.rental_spec = RentalSpec.from_json(spec.cloud)
        self.journal = Journal(run_folder.path / JOURNAL_FILE)
        self.request_history = RequestHistory(self.journal)

    # --- requests -----------------------------------------------------------------------------------------------------

    def granted_requests(self) -> list[LaunchRequest]:
        """Return the launch requests that EC2 granted, in order."""
        return [recorded.request for recorded in self.request_history.requests() if recorded.is_granted]

    @property
    def used_regions(self) -> set[str]:
        """The regions in which instances were requested."""
        return {recorded.request.place.region for recorded in self.request_history.requests()}

    @property
    def last_region(self) -> str:
        """The region of the last request that was not refused; without one, the region that is tried first."""
        regions = [
            recorded.request.place.region for recorded in self.request_history.requests() if not recorded.is_refused
        ]
        return regions[-1] if regions else self.rental_spec.region

    @property
    def current_place(self) -> Place | None:
        """Where the job's instances are: the place of the last granted request for all machines; None before it."""
        request = self.last_full_request()
        return request.place if request else None

    def last_full_request(self) -> LaunchRequest | None:
        """Return the last granted request for all machines of the job, None when there is none."""
        machine_count = len(self.spec.machine_names)
        full_requests = [request for request in self.granted_requests() if len(request.names) == machine_count]
        return full_requests[-1] if full_requests else None

    # --- this launch --------------------------------------------------------------------------------------------------

    def has_launch(self, launch_id: str) -> bool:
        """Whether a launch is recorded: as a start or resume of the job, or as a move to other instances."""
        started_ids = {event.launch_id for event in self.journal.events(LaunchStarted)}
        moved_ids = {event.launch_id for event in self.journal.events(LaunchMoved)}
        return launch_id in started_ids | moved_ids

    def _launch_grants(self) -> list[RequestGranted]:
        """Return the grants of this launch, a launch being a start or a resume of the job."""
        launch_time = max((event.time for event in self.journal.events(LaunchStarted)), default=0.0)
        return [event for event in self.journal.events(RequestGranted) if event.time >= launch_time]

    @property
    def first_machine_time(self) -> float | None:
        """When the first instance of this launch was granted, in seconds since 1970; None before it."""
        return min((grant.time for grant in self._launch_grants()), default=None)

    @property
    def is_terminating(self) -> bool:
        """Whether a command began to terminate the instances of this launch. Then nothing is rented for it any more."""
        last_events = self.journal.events(LaunchStarted, TerminationStarted)[-1:]
        return bool(last_events) and isinstance(last_events[0], TerminationStarted)

    def external_termination_reason(self) -> str:
        """Return why the last instances of this launch ended, if neither EC2 nor the job did; else "".

        The cause is then another computer, a user of the AWS console, or the instances' own time limit. All of them
        want the job to end, so no new instances are rented. The instance that ended last decides, because EC2 may have
        interrupted another one before that was never replaced.
        """
        released_ids = {instance_id for event in self.journal.events(InstancesReleased) for instance_id in event.ids}
        released_ids |= {instance_id for event in self.journal.events(TerminationStarted) for instance_id in event.ids}
        last_ids = {machine.name: machine.id for grant in self._launch_grants() for machine in grant.machines}
        endings = {event.id: (event.ended, event.reason) for event in self.journal.events(InstanceEnded)}
        # EC2 shows a terminated instance for about an hour. One that is missing ended earlier, while no supervisor ran.
        unseen_ending = (math.inf, "Client.InstanceInitiatedShutdown")
        _, reason = max(
            (
                endings.get(instance_id, unseen_ending)
                for instance_id in last_ids.values()
                if instance_id not in released_ids
            ),
            default=(0.0, ""),
        )
        if not reason.startswith("Client."):
            return ""
        if "InstanceInitiated" in reason:
            return "its machines powered themselves off, at their time limit or after the job's end"
        return "its machines were terminated by a user (imgnet-cluster down, or the AWS console)"

    # --- limits -------------------------------------------------------------------------------------------------------

    @property
    def earlier_cost(self) -> float:
        """The cost of the job's earlier launches, in dollars."""
        return billing.CostMeter(self.journal).total_dollars(self.first_machine_time or time.time())

    @property
    def max_hours(self) -> float | None:
        """The requested time limit in hours, read from the run folder because `extend` may have changed it."""
        max_hours: float | None = (read_json(self.run_folder.spec_path) or {}).get("max_hours", self.spec.max_hours)
        return max_hours

    def compute_limits(self, place: Place, hours: float | None = None) -> tuple[float, float]:
        """Return the time limit in hours since this launch's first machine, and the seconds from it until power-off.

        `hours` replaces the requested time limit.
        """
        spent_dollars = self.earlier_cost
        machine_count = len(self.spec.machine_names)
        rate = self.rental_spec.dollars_per_hour(machine_count, place)
        full_grants = [grant for grant in self._launch_grants() if len(grant.machines) == machine_count]
        if rate and self.first_machine_time and len(full_grants) > 1:
            # The job moved to other instances. The limit counts from the first machine and assumes today's rate for
            # all of that time. Correct this by the difference to what the earlier instances really cost.
            now = time.time()
            spent_dollars = billing.CostMeter(self.journal).total_dollars(now)
            spent_dollars -= rate * (now - self.first_machine_time) / 3600
        max_hours = self.max_hours if hours is None else hours
        return self.rental_spec.compute_limits(machine_count, place, max_hours, spent_dollars)

    @property
    def is_overdue(self) -> bool:
        """Whether the time limit and the grace period of this launch are over, so that all machines should be off."""
        if self.first_machine_time is None or self.current_place is None:
            return False
        max_hours, grace_seconds = self.compute_limits(self.current_place)
        return time.time() - self.first_machine_time > 3600 * max_hours + grace_seconds
