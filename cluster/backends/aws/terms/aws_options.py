"""The options of a launch on machines rented from AWS. Imports nothing of AWS, so that `launch --help` stays fast."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from cluster.backends.backend_options import BackendOptions
from infra.aws.launch_request import Internet, parse_id, parse_reservation_id
from infra.aws.tags import parse_user_tags
from train.tools.option_fields import OptionError, option_field


def parse_internet(text: str) -> Internet:
    """Return the way to the internet of this name. Raises `ValueError`."""
    if text not in list(Internet):
        raise ValueError(f"{text!r} is not one of {', '.join(Internet)}.")
    return Internet(text)


@dataclass(frozen=True, kw_only=True)
class AwsOptions(BackendOptions):
    """Which machines to rent, where, and for how much."""

    machines_title: ClassVar[str] = "machines rented from AWS"

    on_aws: bool | None = option_field(
        None, "--aws", is_fixed=True, group="Machines", help="Train on machines rented from AWS.  [default]"
    )
    types: tuple[str, ...] = option_field(
        (),
        "--type",
        metavar="TYPE",
        group="AWS",
        help="EC2 instance type. Several are tried in the given order.",
        default_text="the types of the recipe, else machines of 8 GPUs",
    )
    market: str = option_field(
        "spot",
        group="AWS",
        help="How the machines are bought.",
        switches={
            "spot": "Spot instances (interruptible).",
            "on-demand": "On-demand instances (not interruptible).",
            "spot-then-on-demand": "Spot instances; on-demand instances when there is no spot capacity.",
        },
    )
    reservation: str | None = option_field(
        None,
        metavar="ID",
        parse=parse_reservation_id,
        group="AWS",
        help="Capacity block or capacity reservation (cr-...) that has the machines, or the ARN of a resource group of "
        "them. Type, zone and price are those of the reservation; a job in a capacity block ends with the block.",
    )
    regions: tuple[str, ...] = option_field(
        (),
        "--region",
        metavar="REGION",
        group="AWS",
        help="AWS region. Several are tried in the given order.",
        default_text="from the AWS configuration",
    )
    zones: tuple[str, ...] = option_field(
        (), "--zone", metavar="ZONE", group="AWS", help="Use only this availability zone. Can be given several times."
    )
    vpc: str | None = option_field(
        None,
        metavar="ID",
        parse=partial(parse_id, prefix="vpc"),
        group="AWS",
        help="Network of your own (vpc-...), which is not changed. Its subnets that suit are used, one in each zone.",
        default_text="the stack's",
    )
    subnets: tuple[str, ...] = option_field(
        (),
        "--subnet",
        metavar="ID",
        parse=partial(parse_id, prefix="subnet"),
        group="AWS",
        help="Subnet of your own (subnet-...); its network is used. Can be given several times, once for each zone.",
    )
    ssh_address: str | None = option_field(
        None,
        "--from",
        metavar="CIDR",
        group="AWS",
        help="Address range that may connect by ssh.",
        default_text="this computer",
    )
    ami: str | None = option_field(
        None,
        metavar="AMI",
        group="AWS",
        help="Machine image (AMI) of your own.",
        default_text="AWS's newest deep-learning image",
    )
    internet: Internet = option_field(
        Internet.PUBLIC,
        metavar="public|nat|private|none",
        parse=parse_internet,
        group="AWS",
        help="The machines' way to the internet: a public address each; a NAT gateway for the time of the job; that of "
        "your own network (--subnet), where this computer reaches their private addresses; or none, for an AMI that "
        "downloads nothing.",
        default_text="public; nat if EC2 refuses the addresses",
    )
    on_demand_spares: bool = option_field(
        False, group="AWS", help="Rent the spares (--spares) on demand, beside spot machines."
    )
    late_spares: bool = option_field(
        False, group="AWS", help="Rent the spares (--spares) only when EC2 warns that it may interrupt a spot machine."
    )
    use_placement_group: bool = option_field(
        True, "--no-group", group="AWS", help="Do not put the machines into one placement group."
    )
    tags: tuple[str, ...] = option_field(
        (),
        "--tag",
        metavar="KEY=VALUE",
        group="AWS",
        help="Tag of all AWS resources that are created, as your organization may demand. Can be given several times.",
    )
    max_dollars: float | None = option_field(
        None,
        "--max-price-total",
        metavar="DOLLARS",
        group="Limits",
        minimum=0,
        is_minimum_open=True,
        help="Stop when all machines together have cost this much (saves a checkpoint first).",
    )

    def __post_init__(self) -> None:
        """Raises `OptionError` also for tags that AWS would refuse, and for options that a network does not allow."""
        super().__post_init__()
        try:
            parse_user_tags(self.tags)
        except ValueError as error:
            raise OptionError(f"Invalid value for '--tag': {error}") from error
        if self.network_ids and len(self.regions) > 1:
            raise OptionError("A network (--vpc, --subnet) is in one region; give one --region.")
        if self.network_ids and self.internet is Internet.NAT:
            raise OptionError("--internet nat makes no NAT gateway in a network of yours; give --internet private.")
        if self.internet is Internet.PRIVATE and not self.ssh_address:
            raise OptionError(
                "--internet private: say where ssh comes from in your network, such as --from 10.0.0.5/32."
            )

    @property
    def network_ids(self) -> tuple[str, ...]:
        """The IDs of the user's network and subnets, () for the network of the stack."""
        return (*([self.vpc] if self.vpc else []), *self.subnets)

    def changed(self, values: Mapping[str, object]) -> Self:
        """Return a copy with some values changed. Options that contradict the new values are reset to their defaults.

        A reservation decides on type, zone and market, so a new reservation resets these three, and each of these three
        resets the reservation. Spares on demand and late spares exist beside spot machines only. An option that is
        among the new values itself is not reset.
        """
        dropped: dict[str, object] = {}
        if "reservation" in values:
            dropped |= {"types": (), "zones": (), "market": "spot"}
        elif values.keys() & {"types", "zones", "market"}:
            dropped |= {"reservation": None}
        if "reservation" in values or values.get("market") == "on-demand" or values.get("spares") == 0:
            dropped |= {"on_demand_spares": False, "late_spares": False}
        return super().changed({**dropped, **values})
