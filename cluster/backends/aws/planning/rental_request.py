"""What the user wants to rent: a reservation, a region, and the instance types that have images and one PyTorch."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cluster.backends.aws.terms.aws_options import AwsOptions
from cluster.backends.aws.terms.rental_spec import MARKETS
from cluster.backends.planner import ResumedRun
from cluster.errors import BadInput, ClusterError
from infra.aws.client import Account
from infra.aws.instances import amis, preflight
from infra.aws.journal import Journal
from infra.aws.launch_request import Place, get_group_region
from infra.aws.market import offers
from infra.aws.market.instance_types import InstanceType
from infra.aws.market.reservations import CAPACITY_BLOCK, Reservation, find_reservation, format_utc
from infra.errors import CloudError
from train.forecast import DEFAULT_CONSTANTS, Constants


@dataclass(frozen=True)
class RentalRequest:
    """What the user wants to rent. `offline`: all facts come from tables that ship with the program."""

    options: AwsOptions
    offline: bool = False
    resumed: ResumedRun | None = None  # None: for a new job

    @cached_property
    def account(self) -> Account | None:
        """The account in the region of the reservation, else in the first one; None offline. Raises `CloudError`."""
        if self.offline:
            return None
        return self._first_account.in_region(self.reservation.region) if self.reservation else self._first_account

    @cached_property
    def _first_account(self) -> Account:
        group_region = get_group_region(self.options.reservation or "")
        account = Account(next(iter(self.options.regions), group_region or None))
        account.require_answer()
        return account

    @cached_property
    def reservation(self) -> Reservation | None:
        """The reservation that has the machines, None when the user names none.

        Raises `CloudError`, also when another option contradicts it.
        """
        options = self.options
        if options.reservation is None:
            return None
        if self.offline:
            raise CloudError(
                f"--reservation {options.reservation}: only AWS knows its type and zone, and it cannot be asked; "
                "see: imgnet-cluster check"
            )
        account = self._first_account
        reservation = find_reservation(
            account,
            options.regions or (account.region,),
            options.reservation,
            time.time(),
            options.types,
            options.zones,
        )
        if options.market not in ("spot", reservation.market):  # spot is the default
            raise CloudError(
                f"{reservation.id}: its machines are of the market {reservation.market}; leave out --{options.market}"
            )
        return reservation

    def constants_for(self, machine_type: str) -> Constants:
        """Return the constants of a forecast: what a resumed job has measured on such machines, else the presets."""
        measured = None
        if self.resumed and machine_type == self.resumed.rented_type:
            measured = self.resumed.constants
        return measured or DEFAULT_CONSTANTS


def choose_instance_types(
    preferred_types: Sequence[str], request: RentalRequest
) -> tuple[dict[str, InstanceType], list[str]]:
    """Choose the instance types to request, in order of preference.

    All have an image, unless the user names one, and take the same build of PyTorch as the first, with which all
    machines are set up. They have as many GPUs as the first, because the schedule is made for one number of GPUs.
    Returns them by name, and notes on the types that are left out. Raises `ClusterError`.
    """
    for region in request.options.regions:
        preflight.check_region(region)
    account = request.account
    if request.reservation:
        preferred_types = [request.reservation.type]
    types, notes = offers.choose_types(account, preferred_types, request.options.types)
    if not request.reservation:  # reserved machines are sold
        types = choose_sold_types(types, MARKETS[request.options.market], notes)
    if not request.options.ami:
        if all(amis.is_legacy_arch(each.gpu_arch) for each in types.values()):
            raise ClusterError(amis.explain_legacy_arch(next(iter(types.values())).gpu_arch))
        is_old = {name: amis.is_legacy_arch(each.gpu_arch) for name, each in types.items()}
        types = _leave_out(types, is_old, "no AWS image: docs/aws.md, 'V100 machines'", notes)
    first = next(iter(types.values()))
    index = amis.get_torch_index_url(first.gpu_arch)
    is_mixed = {name: amis.get_torch_index_url(each.gpu_arch) != index for name, each in types.items()}
    types = _leave_out(types, is_mixed, f"needs another PyTorch build than {first.name}", notes)
    is_other = {name: each.gpus != first.gpus for name, each in types.items()}
    return _leave_out(types, is_other, f"their number of GPUs differs from that of {first.name}", notes), notes


def _leave_out(
    types: Mapping[str, InstanceType], is_unfit: Mapping[str, bool], reason: str, notes: list[str]
) -> dict[str, InstanceType]:
    """Return the types that fit, and add a note on the others."""
    if unfit := [name for name in types if is_unfit[name]]:
        notes.append(f"{', '.join(unfit)}: not requested, {reason}")
    return {name: each for name, each in types.items() if not is_unfit[name]}


def choose_sold_types(
    types: Mapping[str, InstanceType], markets: Sequence[str], notes: list[str]
) -> dict[str, InstanceType]:
    """Return the types that EC2 sells in one of the markets, and add a note on the others. Raises `ClusterError`."""
    is_unsold = {name: set(markets).isdisjoint(each.markets) for name, each in types.items()}
    asked = " or ".join(markets)
    if all(is_unsold.values()):
        is_on_demand = any("on-demand" in each.markets for each in types.values())
        next_step = "pass --on-demand" if is_on_demand else "buy a block: imgnet-cluster offers --capacity-blocks"
        raise ClusterError(f"EC2 does not sell {', '.join(types)} as {asked}; {next_step}")
    return _leave_out(types, is_unsold, f"EC2 does not sell them as {asked}", notes)


def options_of_resume(options: AwsOptions, resumed: ResumedRun | None) -> AwsOptions:
    """Return the options with the region in which the resumed job last had machines: its shared folder is there.

    Raises `BadInput` when the options name other regions only.
    """
    if resumed is None:
        return options
    journal = Journal(resumed.run.folder.journal_path)
    regions = [recorded.request.place.region for recorded in journal.launch_requests() if recorded.is_granted]
    if not regions:  # the job never had a machine
        return options
    region = regions[-1]
    if options.regions and region not in options.regions:
        name = resumed.run.spec.name
        raise BadInput(
            f"--region {', '.join(options.regions)}: the checkpoints of {name} are in the shared folder of {region}; "
            "leave --region out"
        )
    return replace(options, regions=(region,))


def choose_reserved_place(account: Account, reservation: Reservation, machine_count: int) -> Place:
    """Return the place of reserved machines, with the price per hour that applies from now on.

    Raises `ClusterError` when too few of them are free, and `CloudError`.
    """
    free_count = reservation.free_count
    if free_count < machine_count:
        next_step = f"pass --machines {free_count}" if free_count else "wait until others end"
        raise ClusterError(
            f"{reservation.id}: {free_count} of its {reservation.machine_count} machines are free, and the job needs "
            f"{machine_count}; {next_step}"
        )
    if reservation.market == CAPACITY_BLOCK:
        return reservation.place(0.0)
    type_offers = offers.list_offers(account, offers.list_instance_types(account, [reservation.type]).values())
    prices = [offer.on_demand_price for offer in type_offers if offer.zone == reservation.zone]
    return reservation.place(prices[0] if prices else None)


def describe_reservation(reservation: Reservation) -> str:
    """Return the line of the plan about the reservation that has the machines."""
    free = f"{reservation.free_count} of {reservation.machine_count} machines are free"
    if reservation.closing_time is None:
        return f"{reservation.id}: {free}; reserved machines cost the on-demand price, whether they are used or not"
    return (
        f"{reservation.id}: {free}; the capacity block was paid for when it was bought (EC2 does not tell how much), "
        "so its machines cost nothing more; "
        f"EC2 ends them at {format_utc(reservation.closing_time)}, 30 minutes before the block ends"
    )
