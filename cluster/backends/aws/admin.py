"""AWS without a run folder: the stack, tagged resources, prices and permissions."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.backends.aws.planning.images import UPLOAD_HINT, data_folder, find_images
from cluster.backends.aws.renting.adoption import AwsAdoption
from cluster.backends.aws.s3_source import S3Source
from cluster.backends.aws.terms.aws_options import AwsOptions
from cluster.backends.aws.terms.rental_spec import RentalSpec
from cluster.backends.rentals import Garbage, OfferRow, RentedJob
from cluster.errors import BadInput, ClusterError, NoSuchJob
from cluster.state.spec import JobSpec
from infra.aws import prices, s3, tags
from infra.aws.client import Account, call, get_public_address
from infra.aws.instances import instances, preflight
from infra.aws.instances.amis import ROOT_DISK_GB
from infra.aws.instances.instances import Instance
from infra.aws.launch_request import get_group_region
from infra.aws.market import offers, reservations
from infra.aws.market.instance_types import BUILTIN_TYPES, ON_DEMAND_PRICES
from infra.aws.market.reservations import CAPACITY_BLOCK
from infra.aws.stack import policies as stack_policies
from infra.aws.stack import stack
from infra.aws.tags import Resource
from infra.errors import CloudError
from infra.offers import CapacityBlockRow, LaunchFinding
from train.data.fetch.sources import fetch_manifest
from train.data.manifest import SPLITS, FetchError
from train.forecast import forecast
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools.host import unix_time


class AwsAdministration:
    """Manages AWS without run folders: it finds all jobs by their tags, also on a computer that did not launch them.

    The stack of a region is what its jobs share. A region of None is the one that the user's environment names. Methods
    raise `ClusterError`. Lines are for the user, one for each resource.
    """

    backend = "aws"

    def resolve_regions(self, requested: Sequence[str]) -> list[str]:
        """Return the requested regions, or the environment's region if none is requested."""
        return list(requested) or [Account().region]

    def enabled_regions(self, region: str) -> list[str]:
        """Return all regions that the account may use. `region` is the one that is asked."""
        response = call("list the regions (ec2:DescribeRegions)", Account(region).ec2.describe_regions)
        return sorted(each["RegionName"] for each in response["Regions"])

    def regions_of(self, spec: JobSpec) -> set[str]:
        """Return the regions in which a job may have rented machines."""
        return {place.region for place in RentalSpec.from_json(spec.cloud).places}

    def ensure_stack(
        self,
        region: str | None,
        address: str | None,
        bucket: str | None,
        tag_texts: Sequence[str] = (),
        network_ids: Sequence[str] = (),
    ) -> str:
        """Create the missing parts of a region's stack, and return a line about it.

        `address` is the CIDR range that may connect over ssh, None for this computer; each tag has the form KEY=VALUE;
        `network_ids` name a network of the user's.
        """
        user_tags = _parse_tags(tag_texts)
        address = address or get_public_address()
        own_stack = stack.ensure(Account(region), address, bucket, user_tags, network_ids)
        return f"the stack of {own_stack.region} is ready: {own_stack.vpc}, file system {own_stack.file_system}"

    def missing_stack_parts(
        self, region: str | None, network_ids: Sequence[str] = (), bucket: str | None = None
    ) -> list[str]:
        """Return what `ensure_stack` would create."""
        return stack.inspect(Account(region), network_ids, bucket=bucket).missing_parts

    def has_stack(self, region: str) -> bool:
        """Return whether the network, the file system or a bucket of a region's stack exists."""
        return stack.exists(Account(region))

    def stack_data(self, region: str) -> tuple[list[str], list[str]]:
        """Return what of a region's stack stores data: its file systems and its buckets."""
        return stack.list_data(Account(region))

    def remove_stack(self, region: str | None, delete_data: bool, buckets: Sequence[str] | None = None) -> list[str]:
        """Remove a region's stack, with these buckets (None: all), unless instances still run in it.

        Returns a line for each resource that is left.
        """
        return stack.remove(Account(region), delete_data, buckets)

    def rented_jobs(self, region: str) -> list[RentedJob]:
        """Return a row for each job that has machines in a region that are not terminated, or leftovers that cost."""
        account = Account(region)
        machines: dict[str, list[Instance]] = {}
        for instance in instances.describe(account, {}):
            if instance.state != "terminated":
                machines.setdefault(instance.job_uid, []).append(instance)
        leftovers = _leftovers_by_job(account)
        billed = {uid: [each for each in found if each.description] for uid, found in leftovers.items()}
        return [
            _job_row(uid, region, machines.get(uid, []), billed.get(uid, []))
            for uid in sorted({*machines, *(uid for uid, found in billed.items() if found)})
        ]

    def rented_machines(self, region: str, uid: str) -> list[Instance]:
        """Return the instances of a job that EC2 shows in a region, by name."""
        found_instances = instances.describe(Account(region), {tags.JOB: uid})
        return sorted(found_instances, key=lambda instance: (instance.name, instance.id))

    def begin_adoption(self, region: str, uid: str) -> AwsAdoption:
        """Find a rented job by its tags, and let this computer log in to its machines.

        The other computer supervises the job until `AwsAdoption.take_over`, but may lose its own access earlier.
        """
        return AwsAdoption(region, uid)

    def terminate_job(self, region: str, uid_or_name: str) -> list[str]:
        """Terminate a job found by the tags of its resources, by its uid or, if that is unambiguous, by its name.

        Another owner's job has to be named by its uid. Returns a line for each resource that is not gone.
        """
        account = Account(region)
        owner_by_uid = {
            instance.job_uid: instance.tags.get(tags.OWNER, "")
            for instance in instances.describe(account, {})
            if instance.state != "terminated"
        }
        uids = set(owner_by_uid) | set(_leftovers_by_job(account))
        matches = sorted(uid for uid in uids if uid == uid_or_name or uid.rpartition("-")[0] == uid_or_name)
        if not matches:
            raise NoSuchJob(
                f"{uid_or_name}: nothing in {region} has the tag of this job; to list all: imgnet-cluster ls --cloud"
            )
        if len(matches) > 1:
            raise ClusterError(f"{uid_or_name}: several jobs have this name; use one of {', '.join(matches)}")
        (uid,) = matches
        if uid != uid_or_name and owner_by_uid.get(uid, account.owner) != account.owner:
            raise ClusterError(
                f"{uid_or_name} is {uid}, which belongs to {owner_by_uid[uid]}; "
                f"to terminate it anyway: imgnet-cluster down {uid}"
            )
        return terminate_by_uid(account, uid)

    def terminate_jobs(self, region: str, uids: Sequence[str]) -> list[str]:
        """Terminate all resources of some jobs. Returns a line for each that is not gone."""
        account = Account(region)
        return [line for uid in uids for line in terminate_by_uid(account, uid)]

    def find_garbage(self, region: str, local_jobs: Mapping[str, bool], include_unknown: bool) -> Garbage:
        """Find the resources in a region that no live job needs, by their tags.

        `local_jobs` says for each job of this runs folder whether it is alive. Any other job is another computer's: it
        is left alone until it expires by AWS's clock, unless `include_unknown`.
        """
        account = Account(region)
        found_instances = _remaining_instances(account)
        leftovers = _leftovers_by_job(account)
        now = unix_time()  # after an answer of AWS, which has set a wrong clock
        to_remove = {}
        to_keep = []
        for uid in sorted({instance.job_uid for instance in found_instances} | set(leftovers)):
            job_instances = [instance for instance in found_instances if instance.job_uid == uid]
            job_leftovers = leftovers.get(uid, [])
            tag_sets = [instance.tags for instance in job_instances] or [each.tags for each in job_leftovers]
            expires = max(tags.parse_time(tag_set.get(tags.EXPIRES, "")) or 0.0 for tag_set in tag_sets)
            parts = [_describe_machines(job_instances)] if job_instances else []
            parts += [each.description for each in job_leftovers if each.description]
            summary = f"{uid or 'no job'}: {', '.join(parts) or 'leftovers that cost nothing'} in {region}"
            if expires < now:
                to_remove[uid] = f"{summary}, past the end of their time ({tags.format_time(expires)})"
            elif local_jobs.get(uid) is False or not uid:
                to_remove[uid] = f"{summary}, of a job that has ended"
            elif uid in local_jobs:
                to_keep.append(
                    f"{summary}: the job is running; to end it: imgnet-cluster down {uid.rpartition('-')[0]}"
                )
            elif include_unknown:
                to_remove[uid] = f"{summary}, of a job that this computer does not know"
            else:
                expiry = f"expires {tags.format_time(expires)}, owner {tag_sets[0].get(tags.OWNER, 'unknown')}"
                to_keep.append(f"{summary}: not a job of this folder, {expiry}; to end it: imgnet-cluster down {uid}")
        return Garbage(region=region, remove=to_remove, stay=tuple(to_keep))

    def offer_rows(
        self, region: str | None, gpu: str | None, recipe: Recipe | None, machine_count: int | None
    ) -> list[OfferRow]:
        """Return a row for each instance type and zone that EC2 offers.

        With a recipe, each row has the forecast on `machine_count` machines (None: the recipe's number), and the
        cheapest row is first.
        """
        account = Account(region)
        types = offers.list_instance_types(account, list(BUILTIN_TYPES)).values()
        found_offers = offers.list_offers(account, [each for each in types if offers.matches_gpu(each, gpu)])
        rows = [_offer_row(offer, recipe, machine_count) for offer in found_offers]
        return sorted(rows, key=lambda row: row.dollars or float("inf")) if recipe else rows

    def capacity_block_rows(
        self, region: str | None, gpu: str | None, machine_count: int, hours: float
    ) -> list[CapacityBlockRow]:
        """Return the capacity blocks on offer in a region, those of the right length first, then by fee."""
        account = Account(region)
        zones_by_type = offers.list_zones_by_type(account, list(BUILTIN_TYPES))
        types = [
            instance_type
            for instance_type in offers.list_instance_types(account, list(zones_by_type)).values()
            if CAPACITY_BLOCK in instance_type.markets and offers.matches_gpu(instance_type, gpu)
        ]
        return reservations.list_block_offerings(account, types, machine_count, hours)

    def check_launch(
        self,
        region: str | None,
        types: Sequence[str],
        machine_count: int,
        market: str,
        tag_texts: Sequence[str] = (),
        reservation: str | None = None,
        network_ids: Sequence[str] = (),
        data: str = "",
    ) -> list[LaunchFinding]:
        """Check everything that a launch needs of AWS, in the stack's network or in one of the user's.

        `data` is the folder or the address of its images, "" when they are generated.
        """
        user_tags = _parse_tags(tag_texts)
        account = Account(region or get_group_region(reservation or "") or None)
        inspection, error = None, None
        try:
            inspection = stack.inspect(account, network_ids)
        except CloudError as caught:
            error = caught
        findings = preflight.run_preflight(
            account,
            types=types,
            machines=machine_count,
            market=market,
            reservation_id=reservation,
            inspection=inspection,
            user_tags=user_tags,
            network_ids=network_ids,
        )
        if error and not any(finding.level == preflight.ERROR for finding in findings):  # else it has the same error
            findings.append(preflight.finding_from_error(error))
        if data and findings[0].level == preflight.OK:
            findings += _check_images(account, data)
        return findings

    def iam_policies(
        self, region: str | None = None, data: str | None = None, vpc: str | None = None
    ) -> dict[str, stack_policies.Policy]:
        """Return the least permissions of user and machines, for a region or all, and who may use the machines' role.

        With `data` also to read there, with `vpc` also to rent in this network of the user's.
        """
        policies = {
            "user": stack_policies.user_policy(region=region or "*"),
            "machines": stack_policies.machine_policy(region=region or "*"),
            "trust": stack_policies.trust_policy(),
        }
        if vpc:
            policies["network"] = stack_policies.network_policy(vpc, region=region or "*")
        if data:
            policies["data"] = stack_policies.dataset_policy(*s3.parse_s3_url(data), region or "*")
        return policies


def _check_images(account: Account, data: str) -> list[LaunchFinding]:
    """Check that this computer can read the images of a launch, or that its machines may find their folder."""
    try:
        if data.startswith(s3.S3_SCHEME):
            for split in SPLITS:
                fetch_manifest(S3Source(data), split)
        elif "://" in data:
            raise ClusterError(f"{data}: not an address of S3 (s3://bucket/set), and no folder")
        else:
            data = str(data_folder(Path(data)))
        notes, obstacles = find_images(data, UPLOAD_HINT, AwsOptions(), account)
    except (FetchError, ClusterError) as error:
        notes, obstacles = [], [str(error)]
    findings = [LaunchFinding.from_line(preflight.ERROR, line) for line in obstacles]
    return findings + [LaunchFinding.from_line(preflight.WARNING, line) for line in notes]


def _parse_tags(texts: Sequence[str]) -> dict[str, str]:
    try:
        return tags.parse_user_tags(texts)
    except ValueError as error:
        raise BadInput(f"--tag: {error}") from error


def terminate_by_uid(account: Account, uid: str) -> list[str]:
    """Terminate all resources with a job's tag; with "", the instances that have the stack's tag and no job's.

    Returns a line for each resource that is not gone. Raises `CloudError`.
    """
    jobless_ids = []
    if not uid:
        jobless_ids = [instance.id for instance in _remaining_instances(account) if not instance.job_uid]
    remaining = instances.terminate_and_wait(account, uid, jobless_ids)
    lines = [f"machine {instance.id} in {instance.region}: {instance.state}" for instance in remaining]
    return lines + instances.remove_leftovers(account, uid)


def _remaining_instances(account: Account) -> list[Instance]:
    """Return the instances with the stack tag that have not ended. The disk of a stopped one is billed."""
    return [each for each in instances.describe(account, {}) if each.state not in instances.TERMINATING_STATES]


@dataclass(frozen=True, kw_only=True)
class _Leftover:
    """What an instance left."""

    tags: dict[str, str]
    description: str  # what it is and costs, "" when it costs nothing


def _leftovers_by_job(account: Account) -> dict[str, list[_Leftover]]:
    """Return by job uid what instances leave, from addresses to NAT gateways."""
    leftovers: dict[str, list[_Leftover]] = {}
    for operation, resources in instances.list_leftovers(account, {tags.STACK: tags.STACK_VALUE}).items():
        for resource in resources:
            resource_tags = tags.read_tags(resource)
            if tags.JOB in resource_tags:
                leftover = _Leftover(tags=resource_tags, description=_describe_leftover(operation, resource))
                leftovers.setdefault(resource_tags[tags.JOB], []).append(leftover)
    return leftovers


def _job_row(uid: str, region: str, machines: Sequence[Instance], leftovers: Sequence[_Leftover]) -> RentedJob:
    """Return the row of a job: that of its machines or, if it has none, of the billed resources that it has left."""

    def join(values: Iterable[str]) -> str:
        return ", ".join(sorted({*values}))

    tag_sets = [each.tags for each in machines or leftovers]
    state_counts = Counter(machine.state for machine in machines)
    states = [f"{count} {state}" for state, count in state_counts.items()]
    return RentedJob(
        job=tag_sets[0].get(tags.NAME, "").removeprefix("imgnet "),
        uid=uid,
        machines=len(machines),
        state=", ".join(states or [each.description for each in leftovers]),
        type=join(machine.type for machine in machines),
        market=join(machine.market for machine in machines),
        zone=join(machine.zone for machine in machines) or region,
        since=tags.format_time(min(machine.launch_time for machine in machines)) if machines else "",
        expires=max(tag_set.get(tags.EXPIRES, "") for tag_set in tag_sets),
        owner=tag_sets[0].get(tags.OWNER, ""),
    )


def _describe_leftover(operation: str, resource: Resource) -> str:
    """Return what a resource of a describing operation is and costs, "" when it costs nothing."""
    match operation:
        case "describe_volumes":
            dollars = resource["Size"] * prices.DISK_PER_GB_HOUR
            name = f"a disk of {resource['Size']} GB"
        case "describe_addresses":
            name, dollars = "an address", prices.ADDRESS_PER_HOUR
        case "describe_nat_gateways":
            name, dollars = "a NAT gateway", prices.NAT_PER_HOUR
        case _:
            return ""
    return f"{name} (${dollars * prices.MONTH_HOURS:,.2f} a month)"


def _describe_machines(job_instances: Sequence[Instance]) -> str:
    """Return how many machines a job has and what they cost at most, where the shipped tables have the price."""
    billed_types = [instance.type for instance in job_instances if instance.is_billed]
    known_prices = [ON_DEMAND_PRICES.get(name) for name in billed_types]
    dollars = sum(price for price in known_prices if price is not None)
    price = f" (on demand ${dollars:,.2f} an hour)" if None not in known_prices else ""
    parts = [f"{len(billed_types)} machine{'s' * (len(billed_types) > 1)}{price}"] if billed_types else []
    if stopped_count := len(job_instances) - len(billed_types):
        dollars = stopped_count * ROOT_DISK_GB * prices.DISK_PER_GB_HOUR * prices.MONTH_HOURS
        parts.append(f"{stopped_count} stopped (disks, ${dollars:,.2f} a month or more)")
    return ", ".join(parts)


def _offer_row(offer: offers.Offer, recipe: Recipe | None, machine_count: int | None) -> OfferRow:
    instance_type = offer.instance_type
    price = offer.spot_price if offer.spot_price is not None else offer.on_demand_price
    machine_count = machine_count or (recipe.machines if recipe else 1)
    minutes = None
    if recipe:
        sized_recipe = recipe.for_machines(machine_count)
        gpus_per_machine = max(1, instance_type.gpus)
        with contextlib.suppress(ValueError):  # the batch cannot be divided among this many GPUs
            run_forecast = forecast(
                Schedule(sized_recipe, sized_recipe.data.train, machine_count * gpus_per_machine),
                gpus=gpus_per_machine,
                gpu=instance_type.gpu,
                gbit=instance_type.network_gbps,
                machines=machine_count,
                vcpus=instance_type.vcpus,
            )
            minutes = run_forecast.minutes if run_forecast else None
    return OfferRow(
        type=offer.type,
        zone=offer.zone,
        gpus=instance_type.gpus,
        gpu=instance_type.gpu,
        gpu_gb=instance_type.gpu_gb,
        efa=len(instance_type.efa_cards),
        gbit=instance_type.network_gbps,
        spot=offer.spot_price,
        on_demand=offer.on_demand_price,
        on_demand_shipped=offer.is_builtin_price,
        machines=machine_count,
        minutes=minutes,
        dollars=None if minutes is None or price is None else machine_count * price * minutes / 60,
    )
