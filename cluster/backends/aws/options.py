"""The options of a launch on machines rented from AWS. Imports nothing of AWS, so that `launch --help` stays fast."""

from dataclasses import dataclass
from typing import ClassVar

from cluster.backends.options import BackendOptions
from infra.aws.launch_request import Internet
from train.tools.option_fields import option_field


def parse_internet(text: str) -> Internet:
    """Return the way to the internet of this name. Raises `ValueError`."""
    if text not in list(Internet):
        raise ValueError(f"{text!r} is not one of {', '.join(Internet)}.")
    return Internet(text)


@dataclass(frozen=True, kw_only=True)
class AwsOptions(BackendOptions):
    """Which machines to rent, where, and for how much."""

    machines_title: ClassVar[str] = "machines rented from AWS"
    switch_help: ClassVar[str] = "Train on machines rented from AWS.  [default]"

    type: str | None = option_field(
        None,
        metavar="TYPE",
        group="AWS",
        help="EC2 instance type.  [default: the first type of the recipe that is offered]",
    )
    market: str = option_field(
        "spot",
        group="AWS",
        help="How the machines are bought.",
        switches={
            "spot": "Spot instances (interruptible).  [default]",
            "on-demand": "On-demand instances (not interruptible).",
            "spot-then-on-demand": "Spot instances; on-demand instances when there is no spot capacity.",
        },
    )
    regions: tuple[str, ...] = option_field(
        (),
        "--region",
        metavar="REGION",
        group="AWS",
        help="AWS region. Several are tried in the given order.  [default: from the AWS configuration]",
    )
    zones: tuple[str, ...] = option_field(
        (),
        "--zone",
        metavar="ZONE",
        group="AWS",
        help="Use only this availability zone. Can be given several times.",
    )
    ssh_address: str | None = option_field(
        None,
        "--from",
        metavar="CIDR",
        group="AWS",
        help="Address range that may connect by ssh.  [default: this computer]",
    )
    ami: str | None = option_field(
        None,
        metavar="AMI",
        group="AWS",
        help="Machine image (AMI) of your own.  [default: AWS's newest deep-learning image]",
    )
    internet: Internet = option_field(
        Internet.PUBLIC,
        metavar="public|nat|none",
        parse=parse_internet,
        group="AWS",
        help="The machines' way to the internet: a public address each, a NAT gateway for the time of the job, or "
        "none, for an image that needs nothing.  [default: public; nat if EC2 refuses the addresses]",
    )
    use_placement_group: bool = option_field(
        True, "--no-group", group="AWS", help="Do not put the machines into one placement group."
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
