"""The EC2 instances of one job: rents them, records how to reach them, notices which are gone, terminates them.

Every change is written to the journal <run>/cloud.jsonl before the request is sent. Only the supervisor rents; any
command may terminate. This module never connects to the machines themselves.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from infra.aws import journal_events as events
from infra.aws import prices, tags
from infra.aws.client import Account
from infra.aws.error_codes import AUTHENTICATION_CODES, DENIED_CODES, ErrorKind, may_succeed_later
from infra.aws.instances import amis, instances, internet
from infra.aws.instances.gang import Gang, LaunchRefused
from infra.aws.instances.instances import Instance
from infra.aws.instances.request import InstanceRequest
from infra.aws.instances.user_data import build_user_data
from infra.aws.launch_request import Internet, Place
from infra.aws.market import billing, quotas
from infra.aws.market.instance_types import InstanceType
from infra.aws.market.offers import list_instance_types
from infra.aws.market.reservations import find_reservation
from infra.aws.stack import claims, key_pairs, security_group, stack
from infra.aws.stack.resources import StackContext
from infra.errors import AdoptedElsewhere, CloudError, Interrupted, NoCredentials, NoMachines
from train.tools import host

from .instance_history import NO_MACHINES_IN_TIME, InstanceHistory
from .ssh_access import SshAccess

ACQUIRE_TIMEOUT_SECONDS = 1200.0
QUOTA_POLL_SECONDS = 15.0
GATEWAY_LOOK_SECONDS = 300.0  # CloudWatch has a new value so often, and each question is billed

logger = logging.getLogger(__name__)


class NoExchangeLeft(Exception):
    """A machine is broken, and the job may exchange no more. The text has the reason, in one line."""


class AddressNotShown(CloudError):
    """EC2 has given an instance a public address, but does not show it."""


class JobInstances(InstanceHistory):
    """The instances of one job: their history, and what changes them.

    If the job moved to another region before, the object starts in that region.
    """

    def __init__(self, spec: JobSpec, run_folder: RunFolder, get_stop_reason: Callable[[], str] = lambda: "") -> None:
        super().__init__(spec, run_folder)
        self.get_stop_reason = get_stop_reason
        self.ssh_access = SshAccess(self.rental_spec)
        self.rent_lock = threading.Lock()
        self._exchange_lock = threading.Lock()  # held while exchanged machines are counted and another is terminated
        self.account = Account(self.rental_spec.region).in_region(self.last_region)
        self.gang = self._make_gang(self.account)
        self.stack: stack.Stack | None = None
        self.instance_types: dict[str, InstanceType] = {}
        self.nat_subnets: dict[str, str] = {}  # by zone
        self.gateway_bytes: dict[str, int] = {}  # what the job's NAT gateways had processed at the last look, by ID
        self._gateway_look_time = -math.inf  # monotonic seconds
        self.resolved_images: dict[tuple[str, str], amis.Image] = {}  # by region and GPU architecture
        if seen := self.rental_spec.fresh_inspection:
            self.instance_types |= seen.types
            self.resolved_images[seen.region, seen.gpu_arch] = seen.image

    def _make_gang(self, account: Account) -> Gang:
        return Gang(account, self.spec.uid, self.journal, self.sleep_unless_stopping)

    def sleep_unless_stopping(self, seconds: float) -> None:
        """Sleep. Raises `Interrupted` as soon as the job is to stop."""
        deadline = time.monotonic() + seconds
        while True:
            if reason := self.get_stop_reason():
                raise Interrupted(reason)
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return
            time.sleep(min(0.5, seconds_left))

    # --- state --------------------------------------------------------------------------------------------------------

    def check_access(self, ask_cloud: bool) -> None:
        """Raise `NoCredentials` without credentials, with `ask_cloud` also when AWS or the job does not accept them."""
        self.account.require_credentials()
        if ask_cloud:
            self.check_account()
            self.require_ownership()
            self.gang.list_instances()

    def check_account(self) -> None:
        """Raise `NoCredentials` when the credentials belong to another AWS account, which does not see the machines."""
        expected = self.rental_spec.account_id
        if expected and expected != (actual := self.account.identity[0]):
            raise NoCredentials(
                f"{self.spec.name} runs in AWS account {expected}, but these credentials are for account {actual}"
            )

    def require_ownership(self) -> None:
        """Raise `AdoptedElsewhere` when another computer has adopted the job, which must have rented something."""
        if not self.granted_requests():
            return
        claim = claims.read_claim(self.account, self.spec.uid)
        if claim.id != self.claim:
            since = claim.since or host.unix_time()
            holder = f" ({claim.holder})" if claim.holder else ""
            raise AdoptedElsewhere(
                f"{self.spec.name} was adopted by another computer{holder}, which supervises it since "
                f"{tags.format_time(since)}; to end it from here: imgnet-cluster down {self.spec.name}",
                since,
            )

    def list_machines(self) -> dict[str, Instance]:
        """Return the live instances by machine name. Raises `CloudError` when AWS does not answer."""
        self.check_account()
        self.require_ownership()
        if time.monotonic() - self._gateway_look_time > GATEWAY_LOOK_SECONDS:
            self._gateway_look_time = time.monotonic()
            with contextlib.suppress(CloudError):  # the machines' own counts remain
                is_nat = self.internet is Internet.NAT
                self.gateway_bytes |= internet.read_nat_bytes(self.account, self.spec.uid) if is_nat else {}
        return instances.live_by_name(self._without_strays(self.gang.list_instances()))

    def _without_strays(self, found_instances: list[Instance]) -> list[Instance]:
        """Terminate what the computer that had the job before rented while this one adopted it; return all others.

        Nobody here can log in to such an instance.
        """
        if not self.claim:
            return found_instances
        known_tokens = {recorded.request.token for recorded in self.journal.launch_requests()}
        strays = [instance for instance in found_instances if instance.launch_token not in known_tokens]
        if stray_ids := [instance.id for instance in strays if instance.is_billed]:
            logger.warning("terminating %d machines that another computer rented", len(stray_ids))
            instances.terminate(self.account, stray_ids)
        return [instance for instance in found_instances if instance not in strays]

    def ensure_reachable(self, instances_by_name: dict[str, Instance]) -> dict[str, Instance]:
        """Give each instance its way to the internet and one a public address, and return the updated instances.

        RunInstances gives no public address to instances with several network cards, so they get it here. If EC2
        refuses, or shows none for `ADDRESS_SECONDS`, they are terminated, and the next ones are rented behind a NAT
        gateway. Raises `NoMachines` for an error that would occur again while all instances are billed, else
        `CloudError`.
        """
        try:
            instances_by_name = self._ensure_public_addresses(instances_by_name)
            return self._ensure_jump_host(instances_by_name)
        except CloudError as error:
            if may_succeed_later(error):
                raise
            raise NoMachines(str(error)) from error

    def _ensure_public_addresses(self, instances_by_name: dict[str, Instance]) -> dict[str, Instance]:
        """Give a public address to each instance that was rented to have one. Idempotent."""
        if all(instance.public_ip for instance in instances_by_name.values()):
            return instances_by_name  # at almost every poll: the journal need not be read
        internet_by_token = {request.token: request.internet for request in self.journal.events(events.LaunchRequest)}
        without_address = {
            name: instance
            for name, instance in instances_by_name.items()
            if not instance.public_ip and internet_by_token.get(instance.launch_token) is Internet.PUBLIC
        }
        if not without_address:
            return instances_by_name
        if self.internet is Internet.PUBLIC:
            try:
                for instance in without_address.values():
                    self.journal.write(events.PublicAddressRequested(id=instance.id))
                    internet.give_public_address(self.account, instance.primary_interface_id)
                return self._wait_for_addresses([*without_address.values()])
            except CloudError as error:
                is_told = error.code or isinstance(error, AddressNotShown)  # else EC2 was not asked, or did not answer
                may_come = may_succeed_later(error) and not self.has_waited_for_addresses([*without_address.values()])
                if not is_told or may_come or error.code in (*DENIED_CODES, *AUTHENTICATION_CODES):
                    raise
                self.journal.write(events.PublicAddressRefused(id=instance.id, message=str(error)))
                if self.rental_spec.network_ids:
                    raise NoMachines(f"{error}; name a subnet behind a NAT gateway: --internet private") from error
        logger.info(
            "EC2 refuses machines with several network cards public addresses; renting them again behind a NAT gateway "
            f"({prices.NAT_PER_HOUR + prices.ADDRESS_PER_HOUR:g} $/h and {prices.NAT_PER_GB:g} $/GB)"
        )
        self.terminate([instance.id for instance in without_address.values()], "EC2 refused it a public address")
        return {name: instance for name, instance in instances_by_name.items() if name not in without_address}

    def _wait_for_addresses(self, expected: Sequence[Instance]) -> dict[str, Instance]:
        """Wait until EC2 shows the public addresses of these instances, as far as they live. Returns all that live."""
        deadline = time.monotonic() + instances.INSTANCE_VISIBILITY_SECONDS
        while time.monotonic() < deadline:
            current = self.list_machines()
            if all(current[instance.name].public_ip for instance in expected if instance.name in current):
                return current
            self.sleep_unless_stopping(1.0)
        ids = ", ".join(instance.id for instance in expected)
        raise AddressNotShown(f"EC2 does not show the public address that was given to {ids}")

    def _ensure_jump_host(self, instances_by_name: dict[str, Instance]) -> dict[str, Instance]:
        is_private = self.internet is Internet.PRIVATE
        if is_private or not instances_by_name or any(instance.public_ip for instance in instances_by_name.values()):
            return instances_by_name
        jump_host = instances_by_name[min(instances_by_name, key=int)]
        self.journal.write(events.AddressRequested(id=jump_host.id))
        own_tags = {**self._job_tags(0.0), tags.EXPIRES: jump_host.expires}
        instances.attach_elastic_ip(self.account, jump_host, own_tags)
        logger.info(f"machine {jump_host.name} has a public address; all others are reached through it")
        return self._ensure_jump_host(self._wait_for_addresses([jump_host]))  # another one, if it has ended meanwhile

    # --- renting ------------------------------------------------------------------------------------------------------

    def finish_open_requests(self) -> None:
        """Send requests again whose answer a crash lost. EC2 knows them for a day, so no instance is rented twice."""
        self.check_account()
        self.require_ownership()
        may_send = not self.is_too_late or any(instance.is_billed for instance in self.gang.list_instances())
        if may_send and self.gang.open_requests():
            self._ensure_stack(self.account)
            self.gang.finish_open_requests()

    def rent_all(self) -> dict[str, Instance]:
        """Rent all `first_names` in one zone of the first region with capacity, then spares. Raises `CloudError`."""
        self.require_ownership()
        all_places = tuple(self._refresh_reservation(place) for place in self.rental_spec.places)
        self.rental_spec = replace(self.rental_spec, places=all_places)
        regions = list(dict.fromkeys(place.region for place in self.rental_spec.places))
        if self.granted_requests():  # data and checkpoints are on the shared file system of the region used before
            regions = [self.account.region]
        for region in regions:
            is_last_region = region == regions[-1]
            self.account = self.account.in_region(region)
            self.gang = self._make_gang(self.account)
            zones = self._ensure_stack(self.account).subnets
            if self.is_too_late:  # this computer may have slept meanwhile
                raise NoMachines(f"{NO_MACHINES_IN_TIME}; to continue: imgnet-cluster resume {self.spec.name}")
            places = [each for each in self.rental_spec.places if each.region == region and each.zone in zones]
            self._look_up_types({place.type for place in places})
            places = [place for place in places if place.type in self.instance_types]
            try:
                if not places:
                    raise CloudError(f"{region}: none of its zones has machines of the requested types")
                timeout_seconds = ACQUIRE_TIMEOUT_SECONDS if is_last_region else 0.0
                rented_instances = self.gang.acquire(
                    places, self.first_names, self._instance_request, self.instance_types, timeout_seconds
                )
            except Interrupted:
                raise
            except CloudError as error:
                # A refusal would be the same elsewhere; an open request may still bring instances here.
                is_final = isinstance(error, LaunchRefused) or self.gang.open_requests()
                if is_last_region or is_final:
                    raise
                logger.info(f"{error}; trying the next region")
                self._leave_region()
            else:  # addresses come before spares: a machine waits only so long for its way to the internet
                with contextlib.suppress(CloudError):  # no machine's tag kept it open while the job searched
                    self.restore_access()
                machines = self.ensure_reachable({instance.name: instance for instance in rented_instances})
                spares = self._rent_first_spares() if machines else self.rent_all().values()
                return machines | {instance.name: instance for instance in spares}
        raise CloudError("there is no region to rent machines in; name one: --region us-east-1")

    def _leave_region(self) -> None:
        """Remove what the job is billed for in a region without machines, and record the end of those refused there.

        What fails here is done at the end of the job.
        """
        self.nat_subnets.clear()
        with contextlib.suppress(CloudError):
            self.gang.list_instances()
            if not instances.remove_leftovers(self.account, self.spec.uid, self.sleep_unless_stopping):
                self.journal.write(events.TerminationFinished())
        self.sleep_unless_stopping(0.0)  # a stop request may have ended the wait for the NAT gateway

    def _refresh_reservation(self, place: Place) -> Place:
        """Return a place with the time at which EC2 ends its machines now; it may have changed. Raises `NoMachines`."""
        if not place.reservation:
            return place
        now = host.unix_time()
        reservation = find_reservation(
            self.account, [place.region], place.reservation, now, [place.type], [place.zone], place.market
        )
        return reservation.place(place.price)

    def _ensure_stack(self, account: Account) -> stack.Stack:
        if self.stack is None or self.stack.region != account.region:
            terms, seen = self.rental_spec, self.rental_spec.fresh_inspection
            known = seen.stack if seen and seen.region == account.region else None
            address, ids = self.ssh_access.resolve_address(), terms.network_ids
            self.stack = stack.ensure(account, address, None, terms.user_tags, ids, self.internet, known)
        return self.stack

    def _look_up_types(self, names: set[str]) -> None:
        if new_names := sorted(names - self.instance_types.keys()):
            self.instance_types |= list_instance_types(self.account, new_names)

    def _rent_first_spares(self) -> list[Instance]:
        """Rent the spares with one request, unless they are rented late. Returns [] when EC2 refuses the request.

        The job then starts without spares, and the supervisor requests each of them again as it does a lost machine.
        Raises `Interrupted`.
        """
        _, names = self.rental_spec.split_spares(self.spec.machine_names)
        if not names or self.rental_spec.late_spares:
            return []
        try:
            return self._rent_beside_others(names)
        except Interrupted:
            raise
        except CloudError as error:  # the other machines are there, so no other region is to be tried
            logger.warning("the job starts without its spares: %s", error)
            return []

    def rent_replacement(self, name: str) -> Instance:
        """Rent one instance for a lost machine or a late spare, in the same zone and placement group.

        If the answer to an earlier request was lost, the instance that it started is taken: else both would be billed.
        """
        while True:
            try:
                return self._find_or_rent_one(name)
            except LaunchRefused as refusal:
                if refusal.error_kind is not ErrorKind.QUOTA_EXCEEDED or not quotas.may_be_released(self.journal):
                    raise
                logger.info(f"{refusal}; EC2 may still count machines that have ended; asking again")
            self.sleep_unless_stopping(QUOTA_POLL_SECONDS)

    def _find_or_rent_one(self, name: str) -> Instance:
        with self.rent_lock:
            self.finish_open_requests()
            found = self.list_machines().get(name)
            if found and not any(found.id in event.ids for event in self.journal.events(events.InstancesReleased)):
                return found
            return self._rent_beside_others([name])[0]

    def _rent_beside_others(self, names: Sequence[str]) -> list[Instance]:
        """Rent instances in the zone and group of the others, spares perhaps on demand. Raises `CloudError`."""
        request = self.last_full_request()
        assert request
        self.require_ownership()
        is_spare = names[0] not in self.first_names
        place = self.rental_spec.spare_place(request.place) if is_spare else request.place
        self._ensure_stack(self.account)
        self._look_up_types({place.type})
        instance_request = self._instance_request(place, request.place)
        return self.gang.request_instances(
            place, names, instance_request, self.instance_types[place.type], request.placement_group
        )

    def _instance_request(self, place: Place, first_place: Place | None = None) -> InstanceRequest:
        """Describe the instances to rent at a place. Each request gets a bootstrap host key of its own.

        `first_place` is where the other machines are, which decides on the time that the money lasts; None: there too.
        """
        assert self.stack
        instance_type = self.instance_types[place.type]
        now = host.unix_time()
        image_key = place.region, instance_type.gpu_arch
        if image_key not in self.resolved_images:
            # Resolved once per process: a newer image would change a request that is repeated with the same token.
            self.resolved_images[image_key] = amis.resolve_image(
                self.account, instance_type.gpu_arch, self.rental_spec.ami
            )
        image = self.resolved_images[image_key]
        own_stack = self.stack
        if image.ssh_port != security_group.SSH_PORT:
            security_group.allow_ssh_from(
                self.account,
                self.stack.security_group,
                self.ssh_access.resolve_address(),
                self.rental_spec.owner,
                image_port=image.ssh_port,
            )
        rental_spec = replace(self.rental_spec, internet=self.internet)
        rate = rental_spec.dollars_per_hour(len(self.spec.machine_names), first_place or place)
        max_hours, grace_seconds = self.compute_limits(rate)
        elapsed_seconds = max(0.0, now - (self.first_machine_time or now))  # the clock may have been set back
        seconds_left = round(max(0.0, 3600 * max_hours - elapsed_seconds) + grace_seconds)
        if self.internet is Internet.NAT:
            own_stack = replace(
                own_stack, subnets={place.zone: self._ensure_nat_subnet(place.zone, now + seconds_left)}
            )
        keys, cards = key_pairs.generate_key_pair(), len(instance_type.interface_cards)
        return InstanceRequest(
            own_tags={
                **self._job_tags(now + seconds_left),
                tags.BOOT_KEY: keys[1],
                tags.SSH_FROM: self.ssh_access.address,
                tags.TERMS: self.terms(now).to_tag(),
            },
            image=image,
            stack=own_stack,
            user_data=build_user_data(own_stack, image, cards, self.internet, keys, poweroff_seconds=seconds_left),
            internet=self.internet,
            use_placement_group=self.rental_spec.use_placement_group,
        )

    def _ensure_nat_subnet(self, zone: str, expires: float) -> str:
        """Return the job's subnet in a zone, behind the job's NAT gateway."""
        assert self.stack
        if zone not in self.nat_subnets:
            self.journal.write(events.NatGatewayRequested(region=self.account.region))
            self.nat_subnets[zone] = internet.ensure_subnet(
                StackContext(self.account, self.journal),
                self.stack,
                zone,
                self._job_tags(expires),
                self.ssh_access.resolve_address(),
                self.sleep_unless_stopping,
            )
        return self.nat_subnets[zone]

    def _job_tags(self, expires: float) -> dict[str, str]:
        owner, user_tags = self.rental_spec.owner, self.rental_spec.user_tags
        return tags.job_tags(self.spec.uid, self.spec.name, owner, expires, user_tags)

    def set_expiry(self, expiry_time: float) -> None:
        """Set the expiry of all live instances, which `gc` reads, and the terms by their tags. Raises `CloudError`."""
        instance_ids = [instance.id for instance in self.list_machines().values()]
        self.journal.write(events.ExpiryChanged(ids=tuple(instance_ids), expires=expiry_time))
        new_tags = {tags.EXPIRES: tags.format_time(expiry_time), tags.TERMS: self.terms(host.unix_time()).to_tag()}
        instances.set_tags(self.account, instance_ids, new_tags)

    # --- terminating --------------------------------------------------------------------------------------------------

    def terminate_job(self) -> list[str]:
        """Terminate everything of the job that is billed, in all regions that it used."""
        self.check_account()
        requested = {recorded.request.place.region for recorded in self.journal.launch_requests()}
        with_gateway = {each.region for each in self.journal.events(events.NatGatewayRequested)}  # before requests
        accounts = [self.account.in_region(region) for region in {self.account.region, *requested, *with_gateway}]
        # These gangs' waits ignore a stop request, which must not interrupt the termination.
        gangs = [Gang(account, self.spec.uid, self.journal) for account in accounts]
        leftovers = [line for gang in gangs for line in gang.terminate_job()]
        for account in accounts:
            with contextlib.suppress(CloudError, OSError):
                billing.record_spot_costs(account, self.journal, host.unix_time())
        return leftovers

    def terminate(self, ids: list[str], reason: str, is_exchange: bool = False) -> None:
        """Terminate some instances. The journal marks them as ended by the job, so replacements may be rented."""
        self.require_ownership()
        self.journal.write(events.InstancesReleased(ids=tuple(ids), reason=reason, is_exchange=is_exchange))
        instances.terminate(self.account, ids)

    def release_broken(self, machine: Instance, reason: str) -> None:
        """Terminate a broken machine, in whose place another may be rented. Raises `NoExchangeLeft`, `CloudError`.

        The journal has the machines that were exchanged, so a supervisor that is started again counts on.
        """
        with self._exchange_lock:
            earlier_ids = self.exchanged_ids - {machine.id}
            if len(earlier_ids) >= self.max_exchanges:
                raise NoExchangeLeft(
                    f"{reason}; machines exchanged before: {len(earlier_ids)} of {self.max_exchanges} (--max-exchanges)"
                )
            logger.warning("machine %s (%s): %s; it is exchanged", machine.name, machine.id, reason)
            self.terminate([machine.id], reason, is_exchange=True)

    def read_console(self, machine: Instance) -> str:
        """Return what an instance printed while it booted. Raises `CloudError`."""
        return instances.read_console(self.account, machine.id)

    # --- access -------------------------------------------------------------------------------------------------------

    def record_host_key(self, machine: Instance, key: str) -> None:
        """Write the host key that an instance generated itself to the journal and to a tag.

        Without the tag the job goes on, but no other computer can adopt it.
        """
        self.journal.write(events.HostKeyReplaced(id=machine.id, key=key))
        with contextlib.suppress(CloudError):
            instances.set_tags(self.account, [machine.id], {tags.HOST_KEY: key})

    def restore_access(self) -> str:
        """Open ssh to this computer again if it was closed. Returns a warning if it has another address, else ""."""
        return self.ssh_access.restore(self.account, self.last_full_request())

    def note_access(self) -> None:
        """To be called when machines answered over ssh: if this computer has a new address, their tag gets it."""
        if self.ssh_access.new_address and (request := self.last_full_request()):
            with contextlib.suppress(CloudError):
                ids = [machine.id for machine in self.list_machines().values()]
                self.ssh_access.follow(self.account, request, ids)
