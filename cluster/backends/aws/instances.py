"""A job's machines at AWS: rents them, tells where they are, notes which are gone, ends them.

All that changes something is written into <run>/cloud.jsonl before it is done. Only the supervisor rents; any command
may end. Never touches the machines themselves.
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
JOURNAL_FILE, HOSTS_FILE = "cloud.jsonl", "hosts.json"


class EndedExternally(NoMachines):
    """Somebody, or a limit, has ended the job's machines; it is stopped."""


class JobInstances:
    """The machines of one job. `stopping` says why the job is to stop; whoever waits then raises `Interrupted`."""

    def __init__(
        self,
        spec: JobSpec,
        run_folder: RunFolder,
        log: Callable[[str], None],
        get_stop_reason: Callable[[], str] = lambda: "",
    ) -> None:
        self.spec, self.run_folder, self.log, self.get_stop_reason = spec, run_folder, log, get_stop_reason
        self.rental_spec = RentalSpec.from_json(spec.cloud)
        self.allowed_address = self.rental_spec.ssh_address  # the address to which ssh is open
        self.journal = Journal(run_folder.path / JOURNAL_FILE)
        self.rent_lock = threading.Lock()
        self.is_account_checked = False
        self.account = Account(self.rental_spec.region)
        self.gang = self._make_gang(self.account)
        asked = [one["place"]["region"] for one in self.gang.launch_requests() if one["end"] != "refused"]
        self.region = asked[-1] if asked else self.rental_spec.region
        if self.region != self.rental_spec.region:
            self.account = self.account.in_region(self.region)
            self.gang = self._make_gang(self.account)
        self.stack: stack.Stack | None = None
        self.instance_types: dict[str, InstanceType] = {}
        self.resolved_images: dict[tuple[str, str], amis.Image] = {}

    def _make_gang(self, account: Account) -> Gang:
        return Gang(account, self.spec.uid, self.journal, self.log, self._sleep_unless_stopping)

    def _sleep_unless_stopping(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            if why := self.get_stop_reason():
                raise Interrupted(why)
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.5, left))

    def _granted_requests(self) -> list[dict[str, Any]]:
        lines = self.journal.lines("ask", "granted")
        granted = {one["number"] for one in lines if one["what"] == "granted"}
        return [one for one in lines if one["what"] == "ask" and one["number"] in granted]

    # --- where we stand ----------------------------------------------------------------------------------------------

    @property
    def current_place(self) -> Place | None:
        """Where the gang is: of the last asking for all of its machines; None before the first."""
        whole = self._last_full_request()
        return Place(**whole["place"]) if whole else None

    def _last_full_request(self) -> dict[str, Any] | None:
        """The last asking for all machines that was granted."""
        return next(
            (one for one in reversed(self._granted_requests()) if len(one["names"]) == len(self.spec.machine_names)),
            None,
        )

    @property
    def first_machine_time(self) -> float | None:
        """When the first machine of this launch came, in seconds since 1970."""
        return min((one["time"] for one in self._launch_grants()), default=None)

    def _launch_grants(self) -> list[dict[str, Any]]:
        """The journal's lines of machines that came in this launch."""
        begun = max((one["time"] for one in self.journal.lines("begin")), default=0.0)
        return [one for one in self.journal.lines("granted") if one["time"] >= begun]

    @property
    def earlier_cost(self) -> float:
        """The dollars that earlier launches of the job have cost."""
        return billing.CostMeter(self.journal).total_dollars(self.first_machine_time or time.time())

    @property
    def max_hours(self) -> float | None:
        """The limit of time that is asked for; it may have been extended."""
        limit: float | None = (read_json(self.run_folder.spec_path) or {}).get("max_hours", self.spec.max_hours)
        return limit

    def compute_limits(self, place: Place, hours: float | None = None) -> tuple[float, float]:
        """Return the hours since the first machine of this launch after which the job saves and ends there, and the
        seconds after that until the power goes; with another limit of `hours` than was asked for.
        """
        spent, count, now = self.earlier_cost, len(self.spec.machine_names), time.time()
        rate = self.rental_spec.dollars_per_hour(count, place)
        if rate and self.first_machine_time and sum(len(one["machines"]) == count for one in self._launch_grants()) > 1:
            # All have moved: what the hours before cost is known, and is not what they would have cost here.
            spent = billing.CostMeter(self.journal).total_dollars(now) - rate * (now - self.first_machine_time) / 3600
        return self.rental_spec.compute_limits(count, place, self.max_hours if hours is None else hours, spent)

    @property
    def is_overdue(self) -> bool:
        """Whether the time of this launch is over, and its machines should have ended by themselves."""
        if self.first_machine_time is None or self.current_place is None:
            return False
        hours, late = self.compute_limits(self.current_place)
        return time.time() - self.first_machine_time > 3600 * hours + late

    def record_launch(self, launch_id: str) -> None:
        """Note that a launch of the job has begun; once, however often its supervisor does."""
        if launch_id not in [one["mark"] for one in self.journal.lines("begin", "move")]:
            self.journal.write("begin", mark=launch_id)

    def record_move(self, launch_id: str) -> None:
        """Note that a launch goes on with other machines, under another mark."""
        self.journal.write("move", mark=launch_id)

    @property
    def is_terminating(self) -> bool:
        """Whether somebody began to end what this launch has rented; then nothing is rented for it any more."""
        last = self.journal.lines("begin", "end")[-1:]
        return bool(last) and last[0]["what"] == "end"

    def check_account(self) -> None:
        """Raise `NoCredentials` when these are another account's: it knows nothing of the machines."""
        if (
            not self.is_account_checked
            and self.rental_spec.account_id
            and self.rental_spec.account_id != self.account.identity[0]
        ):
            other = self.account.identity[0]
            raise NoCredentials(
                f"{self.spec.name} is of account {self.rental_spec.account_id}, these credentials are of {other}"
            )
        self.is_account_checked = True

    def list_instances(self) -> dict[str, Instance]:
        """Return the machines that are there, by name. Raises `CloudError` when AWS does not say."""
        self.check_account()
        return instances.live_by_name(self.gang.list_instances())

    def ensure_jump_host(self, instances_by_name: dict[str, Instance]) -> dict[str, Instance]:
        """Return the machines, one of which has a public address: EC2 gives none to those with several cards.

        Raises `CloudError`.
        """
        if not instances_by_name or any(one.public_ip for one in instances_by_name.values()):
            return instances_by_name
        head = instances_by_name[min(instances_by_name, key=int)]
        self.journal.write("address", id=head.id)
        own = {key: value for key, value in head.tags.items() if key not in (tags.MACHINE, tags.LAUNCH)}
        instances.attach_elastic_ip(self.account, head, own)
        self.log(f"machine {head.name} has a public address; the others are reached through it")
        deadline = time.monotonic() + instances.INSTANCE_VISIBILITY_SECONDS
        while time.monotonic() < deadline:
            again = self.list_instances()
            if not again or any(one.public_ip for one in again.values()):
                return again
            self._sleep_unless_stopping(1.0)
        raise CloudError(f"{head.id} does not show the address that it was given")

    # --- renting -----------------------------------------------------------------------------------------------------

    def find_or_rent(self, before_renting: Callable[[], None]) -> dict[str, Instance]:
        """Return the machines of the job: those that are there; or all are rented, after `anew` was called.

        Raises `NoMachines`, `CloudError`. What a crash left unanswered is asked again first: never two gangs.
        """
        self.check_account()
        if self.gang.open_requests():
            self._ensure_stack(self.account)
            self.gang.finish_open_requests()
        found = self.list_instances()
        if self.is_terminating:
            raise NoMachines(f"its machines were ended; go on: imgnet-cluster resume {self.spec.name}")
        if not found:
            if how := external_termination_reason(self.journal, self._launch_grants()) or (
                "its time is over" if self.is_overdue else ""
            ):
                raise EndedExternally(f"{how}; go on: imgnet-cluster resume {self.spec.name}")
            before_renting()
            found = {one.name: one for one in self._rent_all()}
        try:
            return self.ensure_jump_host(found)
        except CloudError as error:
            if error.code in KIND_BY_CODE or not error.code:  # else it would go wrong again, while all machines bill
                raise
            raise NoMachines(str(error)) from error

    def _rent_all(self) -> list[Instance]:
        regions = list(dict.fromkeys(one.region for one in self.rental_spec.places))
        if self._granted_requests():  # the data, and what has been trained so far, are there and nowhere else
            regions = [self.region]
        for region in regions:
            self.region, self.account = region, self.account.in_region(region)
            self.gang = self._make_gang(self.account)
            own = self._ensure_stack(self.account)
            places = [one for one in self.rental_spec.places if one.region == region and one.zone in own.subnets]
            self.instance_types |= list_instance_types(self.account, sorted({one.type for one in places}))
            places = [one for one in places if one.type in self.instance_types]
            try:
                if not places:
                    raise CloudError(f"{region}: none of its zones has machines of the types that were asked for")
                seconds = ACQUIRE_TIMEOUT_SECONDS if region == regions[-1] else 0.0
                return self.gang.acquire(
                    places, self.spec.machine_names, self._instance_request, self.instance_types, seconds
                )
            except Interrupted:
                raise
            except CloudError as error:
                stop = isinstance(error, LaunchRefused) or self.gang.open_requests()  # elsewhere too; or it is not over
                if region == regions[-1] or stop:
                    raise
                self.log(f"{error}; the next region")
        raise CloudError("no region was asked for")

    def _ensure_stack(self, account: Account) -> stack.Stack:
        if self.stack is None or self.stack.region != account.region:
            self.stack = stack.ensure(account, self.resolve_ssh_address(), self.log)
        return self.stack

    def resolve_ssh_address(self) -> str:
        """The address that is let in: as it was said, else this computer's now. It moves, and a job lives on."""
        if not self.rental_spec.is_address_fixed:
            with contextlib.suppress(CloudError):
                self.allowed_address = get_public_address()
        return self.allowed_address

    def rent_replacement(self, name: str) -> Instance:
        """Rent another machine in place of one, in the same zone and group. Raises `Refused`, `CloudError`."""
        with self.rent_lock:
            whole = self._last_full_request()
            assert whole
            place = Place(**whole["place"])
            self._ensure_stack(self.account)
            self.instance_types |= (
                list_instance_types(self.account, [place.type]) if place.type not in self.instance_types else {}
            )
            group = whole["request"].get("Placement", {}).get("GroupName", "")
            return self.gang.request_instances(
                place, [name], self._instance_request(place), self.instance_types[place.type], group
            )[0]

    def _instance_request(self, place: Place) -> InstanceRequest:
        """What a machine is to be, with a bootstrap host key that no other asking has."""
        assert self.stack
        kind, now = self.instance_types[place.type], time.time()
        where = place.region, kind.gpu_arch
        if where not in self.resolved_images:  # once: a newer one would make another request of the same asking
            self.resolved_images[where] = amis.resolve_image(self.account, kind.gpu_arch, self.rental_spec.ami)
        image = self.resolved_images[where]
        if image.ssh_port != DEFAULT_SSH_PORT:
            ports, group = (DEFAULT_SSH_PORT, image.ssh_port), self.stack.security_group
            security_group.allow_ssh_from(
                self.account, group, self.resolve_ssh_address(), self.rental_spec.owner, ports=ports
            )
        hours, late = self.compute_limits(place)
        left = max(0.0, 3600 * hours - (now - (self.first_machine_time or now))) + late
        private, public = key_pairs.generate_key_pair()
        data = build_user_data(
            poweroff_seconds=round(left), private_key=private, public_key=public, file_system=self.stack.file_system,
            access_point=self.stack.access_point, region=place.region, ssh_user=image.ssh_user, python=image.python,
        )  # fmt: skip
        return InstanceRequest(
            job_uid=self.spec.uid, job_name=self.spec.name, owner=self.rental_spec.owner, expires=now + left, image=image,
            stack=self.stack, user_data=data, host_key=public, use_placement_group=self.rental_spec.use_placement_group,
        )  # fmt: skip

    def write_hosts(self, hosts_by_name: Mapping[str, Host]) -> Hosts:
        """Write down how to reach the machines, for commands that want to, in the order of their names."""
        hosts = Hosts(None, tuple(hosts_by_name[name] for name in self.spec.machine_names if name in hosts_by_name))
        write_atomic(
            self.run_folder.path / HOSTS_FILE, to_json_bytes({**hosts.to_json(), "names": list(hosts_by_name)})
        )
        return hosts

    def update_expiry_tags(self, expiry_time: float) -> None:
        """Tag the machines with another end of their time, for who looks for what is past it. Raises `CloudError`."""
        ids = [one.id for one in self.list_instances().values()]
        new = tags.to_aws_tags({tags.EXPIRES: tags.format_time(expiry_time)})
        call("tag machines (ec2:CreateTags)", self.account.ec2.create_tags, Resources=ids, Tags=new)

    # --- the end -----------------------------------------------------------------------------------------------------

    def terminate_job(self) -> list[str]:
        """End everything that bills. Returns a line for each thing that is not gone. Raises `CloudError`."""
        self.check_account()
        left = self._uninterruptible_gang(self.account).terminate_job()
        for region in {one["place"]["region"] for one in self.gang.launch_requests()} - {self.region}:
            left += self._uninterruptible_gang(self.account.in_region(region)).terminate_job()
        return left

    def _uninterruptible_gang(self, account: Account) -> Gang:
        """Whoever ends things is not kept from it by a stop."""
        return Gang(account, self.spec.uid, self.journal, self.log)

    def kill_machine(self, name: str) -> None:
        """Take a machine away as a power cut does. Raises `CloudError` when it is not there."""
        found = self.list_instances()
        if name not in found:
            raise CloudError(f"machine {name} is not there; imgnet-cluster status {self.spec.name}")
        self.terminate([found[name].id], "lost in a rehearsal")

    def terminate(self, ids: list[str], reason: str) -> None:
        """End some machines, whose place others take."""
        self.journal.write("release", ids=ids, why=reason)
        instances.terminate(self.account, ids)

    def terminate_all(self) -> None:
        """End the machines that are left, and return when EC2 shows none of them any more."""
        while found := self.list_instances():
            self.terminate([one.id for one in found.values()], "all moved")
            self._sleep_unless_stopping(1.0)


def external_termination_reason(journal: Journal, grant_lines: Iterable[Mapping[str, Any]]) -> str:
    """Return how the last machines of a launch were ended, "" when it was EC2 or we ourselves: then others may come.

    From another computer, in the console, or by their own limit: whoever did that does not want others. Those that
    ended last tell, for EC2 may have taken one away before, in whose place none came. `grants` are the launch's lines
    of machines that came.
    """
    released = {id for line in journal.lines("release", "end") for id in line["ids"]}
    last = {one["name"]: one["id"] for line in grant_lines for one in line["machines"]}
    known = {line["id"]: (line["ended"], line["why"]) for line in journal.lines("gone")}
    forgotten = (math.inf, "Client.InstanceInitiatedShutdown")  # an hour or more ago, with nobody to see it
    _, why = max((known.get(id, forgotten) for id in last.values() if id not in released), default=(0.0, ""))
    if not why.startswith("Client."):
        return ""
    if "InstanceInitiated" in why:
        return "its machines were ended by their own limit, or when it was done"
    return "its machines were ended by somebody (down, or the AWS console)"
