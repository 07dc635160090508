"""Adoption of a rented job on another computer with the same credentials: what its tags and EC2 tell becomes a journal.

Nothing that costs money is taken from a machine or from the shared folder, which all machines can write. The number of
machines, the limits and what the job has cost are tags; type, zone and market are what EC2 says of the machines, and
prices are AWS's of today. The machines' host keys are tags too, so the first login is safe.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from cluster.backends.aws.terms.aws_options import AwsOptions
from cluster.backends.aws.terms.rental_spec import MAX_HOURS_WITHOUT_LIMIT, METADATA_URL, RentalSpec, RentalTerms
from cluster.connectors.ssh import SSHConnector
from cluster.errors import ClusterError, NoSuchJob
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from infra.aws import journal_events as events
from infra.aws import prices, tags
from infra.aws.client import Account, get_public_address
from infra.aws.instances import amis, instances
from infra.aws.instances.instances import Instance
from infra.aws.instances.request import InstanceRequest, build_launch_request
from infra.aws.journal import Journal
from infra.aws.launch_request import Internet, Place
from infra.aws.market import billing, offers
from infra.aws.stack import claims, key_pairs, security_group, stack
from infra.errors import CloudError
from train.tools import host
from train.tools.records import DamagedRecord, encode

from .instance_history import REMOTE_FOLDER, find_jump_host, ssh_hosts

CLAIM_SECONDS = 86400.0  # how long a claim stays after the job's limit: computers' clocks differ
TERMS_ROUNDING_SECONDS = 1.5  # the terms' time is rounded to a second, and EC2 rounds the start of a machine down
# Adds the public key $1 to those that may log in.
ADMIT_SCRIPT = """
umask 077
mkdir -p ~/.ssh && cd ~/.ssh || exit
grep -qxF "$1" authorized_keys 2>/dev/null || printf '\\n%s\\n' "$1" >>authorized_keys
"""


class AwsAdoption:
    """A rented job of another computer: its instances, what it may spend, and how to log in to them."""

    shared = f"{REMOTE_FOLDER}/shared"

    def __init__(self, region: str, uid: str) -> None:
        """Look at the job's instances, and let this computer log in to them. Raises `NoSuchJob`, `ClusterError`."""
        self.account = Account(region)
        self.uid = uid
        found_instances = instances.describe(self.account, {tags.JOB: uid})
        self.instances = instances.live_by_name(found_instances)
        self.terms = self._read_terms(found_instances)
        if self.terms.internet is Internet.PRIVATE:
            raise CloudError(
                f"{uid} is reached at private addresses, which no other computer takes over; to end it: "
                f"imgnet-cluster down {uid} --region {region}"
            )
        self.address = get_public_address()
        user_tags = tags.select_user_tags(self.first_machine.tags)
        self.stack = stack.ensure(self.account, self.address, user_tags=user_tags)
        self.rental_spec = self._rental_spec()
        self.events = list(self._rebuild_events(found_instances))
        self._open_ssh()
        self.hosts = ssh_hosts(self.events, self.instances)
        self._log_in()

    # --- what AWS tells ----------------------------------------------------------------------------------------------

    def _read_terms(self, found_instances: Sequence[Instance]) -> RentalTerms:
        """Return the newest terms of the job's machines. Raises `NoSuchJob`, `CloudError`."""
        down = f"to end it: imgnet-cluster down {self.uid} --region {self.account.region}"
        if any(instance.is_billed and not instance.name for instance in found_instances):
            raise CloudError(f"{self.uid}: its machines are being rented; try again in a minute, or {down}")
        if not self.instances:
            raise NoSuchJob(
                f"{self.uid} has no machines in {self.account.region}; to list all jobs: imgnet-cluster ls --cloud"
            )
        if any(instance.market == "capacity-block" for instance in self.instances.values()):
            raise CloudError(f"{self.uid}: a job in a capacity block is not adopted; {down}")
        try:
            found_terms = [
                RentalTerms.from_tag(instance.tags.get(tags.TERMS, "")) for instance in self.instances.values()
            ]
        except DamagedRecord as error:
            raise CloudError(f"{self.uid}: its machines do not say what it may spend ({error}); {down}") from error
        return max(found_terms, key=lambda terms: terms.at)

    @property
    def first_machine(self) -> Instance:
        """The instance by whose type, zone and market lost machines are replaced. No spare, if there is another."""
        return self.instances[min(self.instances, key=int)]

    def _rental_spec(self) -> RentalSpec:
        """Return what this computer may rent for the job: in the place where its machines are, at today's prices."""
        first, terms = self.first_machine, self.terms
        type_offers = offers.list_offers(self.account, offers.list_instance_types(self.account, [first.type]).values())
        offer = next((offer for offer in type_offers if offer.zone == first.zone), None)
        if offer is None:
            raise CloudError(f"{self.uid}: EC2 does not offer its type {first.type} in {first.zone} any more")
        place = Place(
            region=self.account.region,
            zone=first.zone,
            type=first.type,
            market=first.market,
            price=offer.price(first.market),
            reservation=first.reservation,
        )
        spare_place = replace(place, market="on-demand", price=offer.on_demand_price)
        self.instance_type = offer.instance_type
        return RentalSpec(
            places=(place,),
            on_demand_spares=terms.on_demand_spares,
            spare_places=(spare_place,) if terms.on_demand_spares else (),
            late_spares=terms.late_spares,
            ssh_address=self.address,
            owner=self.account.owner,
            user_tags=tags.select_user_tags(first.tags),
            ami=first.image,
            internet=terms.internet,
            network_ids=self.stack.network_ids,
            use_placement_group=bool(first.placement_group),
            account_id=self.account.identity[0],
            traffic=terms.expected_traffic,
            max_dollars=terms.dollars,
            gpus_per_machine=self.instance_type.gpus,
            torch_index_url=amis.get_torch_index_url(self.instance_type.gpu_arch),
            torch_requirement=amis.get_torch_requirement(self.instance_type.gpu_arch),
        )

    def _rebuild_events(self, found_instances: Sequence[Instance]) -> Iterator[events.JournalEvent]:
        """Yield the journal of this launch as far as EC2 tells: requests by their tokens, grants, addresses, host keys.

        Machines in another place than the first are left out: they ended before the job moved here.
        """
        (place,), spare_places = self.rental_spec.places, self.rental_spec.spare_places
        place_by_market = {known_place.market: known_place for known_place in (*spare_places, place)}
        known = [
            instance
            for instance in found_instances
            if instance.name
            and (instance.zone, instance.type) == (place.zone, place.type)
            and instance.market in place_by_market
        ]
        image = amis.resolve_image(self.account, self.instance_type.gpu_arch, self.first_machine.image)
        first_names = self.rental_spec.split_spares(tuple(map(str, range(self.terms.machines))))[0]
        for number, token in enumerate(dict.fromkeys(instance.launch_token for instance in known), 1):
            members = [instance for instance in known if instance.launch_token == token]
            launch_time = min(instance.launch_time for instance in members)
            has_first = self.first_machine in members
            yield self._rebuild_request(number, members, first_names if has_first else (), place_by_market, image)
            yield events.RequestGranted(
                time=(self.terms.start or launch_time) if has_first else launch_time,
                number=number,
                machines=tuple(
                    events.LaunchedMachine(id=instance.id, name=instance.name, launched=instance.launch_time)
                    for instance in members
                ),
            )
        yield from self._rebuild_addresses(known)
        for instance in self.instances.values():
            if key := instance.tags.get(tags.HOST_KEY):
                yield events.HostKeyReplaced(time=instance.launch_time, id=instance.id, key=key)

    def _rebuild_request(
        self,
        number: int,
        members: Sequence[Instance],
        names: tuple[str, ...],
        place_by_market: Mapping[str, Place],
        image: amis.Image,
    ) -> events.LaunchRequest:
        """Return the request that brought these machines, without its user data: it is never sent again."""
        instance = members[0]
        place = place_by_market[instance.market]
        names = names or tuple(member.name for member in members)
        instance_request = InstanceRequest(
            own_tags=instance.tags,
            image=image,
            stack=replace(self.stack, subnets={place.zone: self.stack.subnets.get(place.zone, "")}),
            user_data="",
            internet=self.terms.internet,
            use_placement_group=bool(instance.placement_group),
        )
        request = build_launch_request(
            instance_request, self.instance_type, place, names, number, instance.placement_group
        )
        request.parameters["ClientToken"] = instance.launch_token
        request.parameters["TagSpecifications"] = tags.tag_specifications(["instance"], instance.tags)
        return replace(request, time=instance.launch_time)

    def _rebuild_addresses(self, known: Sequence[Instance]) -> Iterator[events.JournalEvent]:
        """Yield what is billed for the machines' way to the internet, if they did not get it by their request."""
        start = min(instance.launch_time for instance in known)
        jump_host = find_jump_host(self.instances)
        if self.terms.internet is Internet.PUBLIC:
            if len(self.instance_type.interface_cards) > 1:
                for instance in known:
                    yield events.PublicAddressRequested(time=instance.launch_time, id=instance.id)
        elif jump_host:
            yield events.AddressRequested(time=start, id=jump_host.id)
        if self.terms.internet is Internet.NAT:
            yield events.NatGatewayRequested(time=start, region=self.account.region)

    # --- the way in --------------------------------------------------------------------------------------------------

    def _open_ssh(self) -> None:
        """Open ssh to this computer, at the image's port too, and close it where this owner was before."""
        request = next(event for event in self.events if isinstance(event, events.LaunchRequest))
        group, owner = self.stack.security_group, self.account.owner
        security_group.allow_ssh_from(self.account, group, self.address, owner, image_port=request.ssh_port)

    def _log_in(self) -> None:
        """Let this computer's key in on each machine, first on the jump host. Raises `ClusterError`."""
        jump_host = find_jump_host(self.instances)
        if jump_host is None:
            raise CloudError(f"{self.uid}: none of its machines has a public address")
        self._log_in_to(jump_host.name)
        with ThreadPoolExecutor(max_workers=16) as pool:
            for _ in pool.map(self._log_in_to, [name for name in self.instances if name != jump_host.name]):
                pass

    def _log_in_to(self, name: str) -> None:
        instance, host = self.instances[name], self.hosts[name]
        public_key = key_pairs.read_public_key(key_pairs.KEY_PATH.expanduser())
        instances.admit_key(self.account, instance, str(host.user), public_key)
        try:
            with SSHConnector(host, f"machine {name} ({host.host})") as connector:
                connector.run(["sh", "-c", ADMIT_SCRIPT, "sh", public_key], timeout=30)
        except ClusterError as error:
            has_booted = tags.HOST_KEY in instance.tags
            hint = "" if has_booted else "; it may still be booting: try again in a few minutes"
            raise ClusterError(
                f"{error}{hint}; without EC2 Instance Connect in its image a machine lets no other computer in; to end "
                f"the job: imgnet-cluster down {self.uid} --region {self.account.region}"
            ) from error

    # --- the adopted job ---------------------------------------------------------------------------------------------

    def with_terms(self, spec: JobSpec) -> JobSpec:
        """Return a job's description from the shared folder with what the account says of machines and money."""
        terms = self.terms
        recovery = replace(spec.recovery, spares=terms.spares, max_exchanges=terms.exchanges)
        return replace(
            spec,
            backend="aws",
            cloud=self.rental_spec.to_json(),
            backend_options=encode(adopted_options(self.rental_spec)),  # by which `resume` rents again
            machines=terms.machines - terms.spares,
            recovery=recovery,
            max_hours=terms.hours,
            metadata_address=METADATA_URL,
        )

    def take_over(self, run_path: Path, launch_id: str) -> None:
        """Write the job's journal to a run folder, and claim the job for this computer.

        Raises `ClusterError` when another computer adopts it at the same time.
        """
        journal = Journal(RunFolder(run_path).journal_path)
        journal.copy(events.LaunchStarted(time=host.unix_time(), launch_id=launch_id), *self.events)
        # A machine that was requested with these terms is not in their sum, although EC2 rounds its start down.
        known_dollars = billing.job_cost(journal, self.terms.at - TERMS_ROUNDING_SECONDS).dollars
        claim = uuid4().hex
        other_dollars = max(0.0, self.terms.spent - known_dollars) + self._forgotten_dollars(journal)
        journal.write(events.JobAdopted(claim=claim, dollars=other_dollars))
        hours = MAX_HOURS_WITHOUT_LIMIT if self.terms.hours is None else self.terms.hours
        machine_ids = [instance.id for instance in self.instances.values()]
        instances.set_tags(self.account, machine_ids, {tags.SSH_FROM: self.address})
        claims.write_claim(self.account, self.uid, claim, host.unix_time() + 3600 * hours + CLAIM_SECONDS)
        with contextlib.suppress(CloudError):  # the other computer's way is closed, unless it has another job
            self._open_ssh()

    def _forgotten_dollars(self, journal: Journal) -> float:
        """Return the highest cost, since the terms were written, of machines that ended before EC2 was asked.

        EC2 no longer shows them, and nobody saw their end. A late spare may never have been rented: it is left out.
        """
        grants = journal.events(events.RequestGranted)
        known_names = {machine.name for grant in grants for machine in grant.machines}
        count = len({*map(str, range(self.terms.machines - self.terms.late_spares))} - known_names)
        places = *self.rental_spec.places, *self.rental_spec.spare_places
        other_rate = self.rental_spec.disk_gb * prices.DISK_PER_GB_HOUR + prices.ADDRESS_PER_HOUR
        rate = max(place.price or 0.0 for place in places) + other_rate
        return count * rate * max(0.0, host.unix_time() - self.terms.at) / 3600


def adopted_options(rental_spec: RentalSpec) -> AwsOptions:
    """Return the options of a launch by which an adopted job would have its machines, within its limit of dollars."""
    (place,) = rental_spec.places
    return AwsOptions(
        types=(place.type,),
        market=place.market,
        regions=(place.region,),
        zones=(place.zone,),
        reservation=place.reservation or None,
        internet=rental_spec.internet,
        on_demand_spares=rental_spec.on_demand_spares > 0,
        late_spares=rental_spec.late_spares > 0,
        use_placement_group=rental_spec.use_placement_group,
        tags=tuple(f"{key}={value}" for key, value in rental_spec.user_tags.items()),
        max_dollars=rental_spec.max_dollars,
    )
