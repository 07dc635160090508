"""The EC2 instances of one job: rents them, records how to reach them, notices which are gone, terminates them.

Every change is written to the journal <run>/cloud.jsonl before the request is sent. Only the supervisor rents; any
command may terminate. This module never connects to the machines themselves.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cluster.connectors.hosts_file import Host, Hosts
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from infra.aws import tags
from infra.aws.client import Account, call, get_public_address
from infra.aws.errors import KIND_BY_CODE, CloudError, Interrupted, NoCredentials
from infra.aws.instances import amis, instances
from infra.aws.instances.gang import Gang, LaunchRefused, NoMachines
from infra.aws.instances.instances import Instance
from infra.aws.instances.request import InstanceRequest, Place
from infra.aws.instances.user_data import build_user_data
from infra.aws.journal import Journal
from infra.aws.market import billing
from infra.aws.market.instance_types import InstanceType
from infra.aws.market.offers import list_instance_types
from infra.aws.stack import key_pairs, security_group, stack
from train.tools.filesystem import read_json, to_json_bytes, write_atomic

from .rental_spec import RentalSpec

ACQUIRE_TIMEOUT_SECONDS = 1200.0
DEFAULT_SSH_PORT = 22
JOURNAL_FILE = "cloud.jsonl"
HOSTS_FILE = "hosts.json"


class EndedExternally(NoMachines):
    """The job's machines were terminated by a user or by a limit, so the job stops instead of renting new ones."""


class JobInstances:
    """The instances of one job.

    `log` takes lines for the user. `get_stop_reason` returns why the job is to stop, "" while it goes on; a wait then
    raises `Interrupted`. If the job moved to another region before, the object starts in that region.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_folder: RunFolder,
        log: Callable[[str], None],
        get_stop_reason: Callable[[], str] = lambda: "",
    ) -> None:
        self.spec = spec
        self.run_folder = run_folder
        self.log = log
        self.get_stop_reason = get_stop_reason
        self.rental_spec = RentalSpec.from_json(spec.cloud)
        self.allowed_address = self.rental_spec.ssh_address  # CIDR range that may connect over ssh
        self.journal = Journal(run_folder.path / JOURNAL_FILE)
        self.rent_lock = threading.Lock()
        self.is_account_checked = False
        self.account = Account(self.rental_spec.region)
        self.gang = self._make_gang(self.account)
        requested_regions = [
            request["place"]["region"] for request in self.gang.launch_requests() if request["end"] != "refused"
        ]
        self.region = requested_regions[-1] if requested_regions else self.rental_spec.region
        if self.region != self.rental_spec.region:
            self.account = self.account.in_region(self.region)
            self.gang = self._make_gang(self.account)
        self.stack: stack.Stack | None = None
        self.instance_types: dict[str, InstanceType] = {}
        self.resolved_images: dict[tuple[str, str], amis.Image] = {}  # by region and GPU architecture

    def _make_gang(self, account: Account) -> Gang:
        return Gang(account, self.spec.uid, self.journal, self.log, self._sleep_unless_stopping)

    def _sleep_unless_stopping(self, seconds: float) -> None:
        """Sleep. Raises `Interrupted` as soon as the job is to stop."""
        deadline = time.monotonic() + seconds
        while True:
            if reason := self.get_stop_reason():
                raise Interrupted(reason)
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return
            time.sleep(min(0.5, seconds_left))

    def _granted_requests(self) -> list[dict[str, Any]]:
        """Return the journal's launch requests that EC2 granted, in order."""
        lines = self.journal.lines("ask", "granted")
        granted_numbers = {line["number"] for line in lines if line["what"] == "granted"}
        return [line for line in lines if line["what"] == "ask" and line["number"] in granted_numbers]

    # --- state, read from the journal ---------------------------------------------------------------------------------

    @property
    def current_place(self) -> Place | None:
        """Where the job's instances are: the place of the last granted request for all machines; None before it."""
        request = self._last_full_request()
        return Place(**request["place"]) if request else None

    def _last_full_request(self) -> dict[str, Any] | None:
        """Return the last granted request for all machines of the job, None when there is none."""
        machine_count = len(self.spec.machine_names)
        full_requests = [request for request in self._granted_requests() if len(request["names"]) == machine_count]
        return full_requests[-1] if full_requests else None

    @property
    def first_machine_time(self) -> float | None:
        """When the first instance of this launch was granted, in seconds since 1970; None before it."""
        return min((line["time"] for line in self._launch_grants()), default=None)

    def _launch_grants(self) -> list[dict[str, Any]]:
        """Return the journal's "granted" lines of this launch, a launch being a start or a resume of the job."""
        launch_time = max((line["time"] for line in self.journal.lines("begin")), default=0.0)
        return [line for line in self.journal.lines("granted") if line["time"] >= launch_time]

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
        full_grants = [line for line in self._launch_grants() if len(line["machines"]) == machine_count]
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

    def record_launch(self, launch_id: str) -> None:
        """Record the start of a launch. Idempotent: a restarted supervisor repeats the call."""
        if launch_id not in [line["mark"] for line in self.journal.lines("begin", "move")]:
            self.journal.write("begin", mark=launch_id)

    def record_move(self, launch_id: str) -> None:
        """Record that the launch continues on other instances, under a new launch ID."""
        self.journal.write("move", mark=launch_id)

    @property
    def is_terminating(self) -> bool:
        """Whether a command began to terminate the instances of this launch. Then nothing is rented for it any more."""
        last_lines = self.journal.lines("begin", "end")[-1:]
        return bool(last_lines) and last_lines[0]["what"] == "end"

    def check_account(self) -> None:
        """Raise `NoCredentials` when the credentials belong to another AWS account, which does not see the machines."""
        expected = self.rental_spec.account_id
        if not self.is_account_checked and expected and expected != self.account.identity[0]:
            actual = self.account.identity[0]
            raise NoCredentials(
                f"{self.spec.name} runs in AWS account {expected}, but these credentials are for account {actual}"
            )
        self.is_account_checked = True

    def list_instances(self) -> dict[str, Instance]:
        """Return the live instances by machine name. Raises `CloudError` when AWS does not answer."""
        self.check_account()
        return instances.live_by_name(self.gang.list_instances())

    def ensure_jump_host(self, instances_by_name: dict[str, Instance]) -> dict[str, Instance]:
        """Give one instance a public address if none has one, and return the updated instances.

        EC2 assigns no public address to instances with several network cards. Raises `CloudError`.
        """
        if not instances_by_name or any(instance.public_ip for instance in instances_by_name.values()):
            return instances_by_name
        jump_host = instances_by_name[min(instances_by_name, key=int)]
        self.journal.write("address", id=jump_host.id)
        address_tags = {key: value for key, value in jump_host.tags.items() if key not in (tags.MACHINE, tags.LAUNCH)}
        instances.attach_elastic_ip(self.account, jump_host, address_tags)
        self.log(f"machine {jump_host.name} has a public address; all others are reached through it")
        deadline = time.monotonic() + instances.INSTANCE_VISIBILITY_SECONDS
        while time.monotonic() < deadline:
            current = self.list_instances()
            if not current or any(instance.public_ip for instance in current.values()):
                return current
            self._sleep_unless_stopping(1.0)
        raise CloudError(f"{jump_host.id} does not show the public address that it was given")

    # --- renting ------------------------------------------------------------------------------------------------------

    def find_or_rent(self, before_renting: Callable[[], None]) -> dict[str, Instance]:
        """Return the job's live instances by machine name. If there are none, rent all, after `before_renting()`.

        Requests that a crash left unanswered are repeated first, so that instances are never rented twice. Raises
        `EndedExternally` when the launch was ended on purpose, `NoMachines`, `CloudError`.
        """
        self.check_account()
        if self.gang.open_requests():
            self._ensure_stack(self.account)
            self.gang.finish_open_requests()
        live_instances = self.list_instances()
        if self.is_terminating:
            raise NoMachines(f"its machines were terminated; to continue: imgnet-cluster resume {self.spec.name}")
        if not live_instances:
            reason = external_termination_reason(self.journal, self._launch_grants())
            if not reason and self.is_overdue:
                reason = "its time is over"
            if reason:
                raise EndedExternally(f"{reason}; to continue: imgnet-cluster resume {self.spec.name}")
            before_renting()
            live_instances = {instance.name: instance for instance in self._rent_all()}
        try:
            return self.ensure_jump_host(live_instances)
        except CloudError as error:
            if error.code in KIND_BY_CODE or not error.code:
                raise
            # Trying again would fail in the same way, while all instances are billed.
            raise NoMachines(str(error)) from error

    def _rent_all(self) -> list[Instance]:
        """Rent all machines of the job in one zone of the first region that has them. Raises `CloudError`."""
        regions = list(dict.fromkeys(place.region for place in self.rental_spec.places))
        if self._granted_requests():  # data and checkpoints are on the shared file system of the region used before
            regions = [self.region]
        for region in regions:
            is_last_region = region == regions[-1]
            self.region = region
            self.account = self.account.in_region(region)
            self.gang = self._make_gang(self.account)
            region_stack = self._ensure_stack(self.account)
            places = [
                place
                for place in self.rental_spec.places
                if place.region == region and place.zone in region_stack.subnets
            ]
            self.instance_types |= list_instance_types(self.account, sorted({place.type for place in places}))
            places = [place for place in places if place.type in self.instance_types]
            try:
                if not places:
                    raise CloudError(f"{region}: none of its zones has machines of the requested types")
                timeout_seconds = ACQUIRE_TIMEOUT_SECONDS if is_last_region else 0.0
                return self.gang.acquire(
                    places, self.spec.machine_names, self._instance_request, self.instance_types, timeout_seconds
                )
            except Interrupted:
                raise
            except CloudError as error:
                # A refusal would be the same elsewhere; an open request may still bring instances here.
                is_final = isinstance(error, LaunchRefused) or self.gang.open_requests()
                if is_last_region or is_final:
                    raise
                self.log(f"{error}; trying the next region")
        raise CloudError("there is no region to rent machines in; name one: --region us-east-1")

    def _ensure_stack(self, account: Account) -> stack.Stack:
        if self.stack is None or self.stack.region != account.region:
            self.stack = stack.ensure(account, self.resolve_ssh_address(), self.log)
        return self.stack

    def resolve_ssh_address(self) -> str:
        """Return the address range that may connect over ssh: the user's (--from), else this computer's address now.

        This computer may change networks while the job runs.
        """
        if not self.rental_spec.is_address_fixed:
            with contextlib.suppress(CloudError):
                self.allowed_address = get_public_address()
        return self.allowed_address

    def rent_replacement(self, name: str) -> Instance:
        """Rent one instance for a lost machine, in the same zone and placement group.

        Raises `LaunchRefused`, `CloudError`.
        """
        with self.rent_lock:
            request = self._last_full_request()
            assert request
            place = Place(**request["place"])
            self._ensure_stack(self.account)
            if place.type not in self.instance_types:
                self.instance_types |= list_instance_types(self.account, [place.type])
            placement_group = request["request"].get("Placement", {}).get("GroupName", "")
            new_instances = self.gang.request_instances(
                place, [name], self._instance_request(place), self.instance_types[place.type], placement_group
            )
            return new_instances[0]

    def _instance_request(self, place: Place) -> InstanceRequest:
        """Describe the instances to rent at a place. Each request gets a bootstrap host key of its own."""
        assert self.stack
        instance_type = self.instance_types[place.type]
        now = time.time()
        image_key = place.region, instance_type.gpu_arch
        if image_key not in self.resolved_images:
            # Resolved once per process: a newer image would change a request that is repeated with the same token.
            self.resolved_images[image_key] = amis.resolve_image(
                self.account, instance_type.gpu_arch, self.rental_spec.ami
            )
        image = self.resolved_images[image_key]
        if image.ssh_port != DEFAULT_SSH_PORT:
            security_group.allow_ssh_from(
                self.account,
                self.stack.security_group,
                self.resolve_ssh_address(),
                self.rental_spec.owner,
                ports=(DEFAULT_SSH_PORT, image.ssh_port),
            )
        max_hours, grace_seconds = self.compute_limits(place)
        elapsed_seconds = now - (self.first_machine_time or now)
        seconds_left = max(0.0, 3600 * max_hours - elapsed_seconds) + grace_seconds
        private_key, public_key = key_pairs.generate_key_pair()
        user_data = build_user_data(
            poweroff_seconds=round(seconds_left),
            private_key=private_key,
            public_key=public_key,
            file_system=self.stack.file_system,
            access_point=self.stack.access_point,
            region=place.region,
            ssh_user=image.ssh_user,
            python=image.python,
        )
        return InstanceRequest(
            job_uid=self.spec.uid,
            job_name=self.spec.name,
            owner=self.rental_spec.owner,
            expires=now + seconds_left,
            image=image,
            stack=self.stack,
            user_data=user_data,
            host_key=public_key,
            use_placement_group=self.rental_spec.use_placement_group,
        )

    def write_hosts(self, hosts_by_name: Mapping[str, Host]) -> Hosts:
        """Write how to reach the machines to <run>/hosts.json, for other commands, and return it in machine order."""
        hosts = Hosts(None, tuple(hosts_by_name[name] for name in self.spec.machine_names if name in hosts_by_name))
        content = {**hosts.to_json(), "names": list(hosts_by_name)}
        write_atomic(self.run_folder.path / HOSTS_FILE, to_json_bytes(content))
        return hosts

    def update_expiry_tags(self, expiry_time: float) -> None:
        """Set the expiry tag of all live instances, which `gc` reads. Raises `CloudError`."""
        instance_ids = [instance.id for instance in self.list_instances().values()]
        new_tags = tags.to_aws_tags({tags.EXPIRES: tags.format_time(expiry_time)})
        call("tag machines (ec2:CreateTags)", self.account.ec2.create_tags, Resources=instance_ids, Tags=new_tags)

    # --- terminating --------------------------------------------------------------------------------------------------

    def terminate_job(self) -> list[str]:
        """Terminate everything of the job that is billed, in all regions that it used.

        Returns a line for each resource that is not gone. Raises `CloudError`.
        """
        self.check_account()
        leftovers = self._uninterruptible_gang(self.account).terminate_job()
        used_regions = {request["place"]["region"] for request in self.gang.launch_requests()}
        for region in used_regions - {self.region}:
            leftovers += self._uninterruptible_gang(self.account.in_region(region)).terminate_job()
        return leftovers

    def _uninterruptible_gang(self, account: Account) -> Gang:
        """Return a gang whose waits ignore a stop request: a stop must not interrupt the termination."""
        return Gang(account, self.spec.uid, self.journal, self.log)

    def kill_machine(self, name: str) -> None:
        """Terminate the instance of one machine, to rehearse a loss. Raises `CloudError` when there is none."""
        live_instances = self.list_instances()
        if name not in live_instances:
            raise CloudError(f"machine {name} has no instance; see: imgnet-cluster status {self.spec.name}")
        self.terminate([live_instances[name].id], "lost in a rehearsal")

    def terminate(self, ids: list[str], reason: str) -> None:
        """Terminate some instances. The journal marks them as ended by the job, so replacements may be rented."""
        self.journal.write("release", ids=ids, why=reason)
        instances.terminate(self.account, ids)

    def terminate_all(self) -> None:
        """Terminate all live instances before a move, and wait until EC2 shows none of them."""
        while live_instances := self.list_instances():
            self.terminate([instance.id for instance in live_instances.values()], "all moved")
            self._sleep_unless_stopping(1.0)


def external_termination_reason(journal: Journal, grant_lines: Iterable[Mapping[str, Any]]) -> str:
    """Return why the last instances of a launch ended, if neither EC2 nor the job did; else "".

    The cause is then another computer, a user of the AWS console, or the instances' own time limit. All of them want
    the job to end, so no new instances are rented. The instance that ended last decides, because EC2 may have
    interrupted another one before that was never replaced. `grant_lines` are the journal's "granted" lines of the
    launch.
    """
    released_ids = {instance_id for line in journal.lines("release", "end") for instance_id in line["ids"]}
    last_ids = {machine["name"]: machine["id"] for line in grant_lines for machine in line["machines"]}
    endings = {line["id"]: (line["ended"], line["why"]) for line in journal.lines("gone")}
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
