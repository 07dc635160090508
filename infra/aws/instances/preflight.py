"""What stands in the way of a launch, all of it at once: credentials, permissions, quotas, places, image, tools here.

Changes nothing: permissions are asked for by DryRun, which EC2 answers with DryRunOperation where all was well.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.aws import tags
from infra.aws.errors import DENIED_CODES, CloudError, NoCredentials, get_error_code
from infra.aws.market import offers, quotas
from infra.aws.market.instance_types import InstanceType

from . import amis

if TYPE_CHECKING:
    from infra.aws.client import Account

OK, WARNING, ERROR = "ok", "warning", "error"
TOOL_PACKAGES = {
    "tmux": "tmux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}  # and the packages that have them
ALWAYS_ENABLED_REGION = "us-east-1"  # of every account, whatever regions it has switched on
POLICY_COMMAND = "imgnet-cluster check --iam"
DRY_RUN_GROUP_NAME = "imgnet-dry-run"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: how it is ("ok", "warning", "error"), what it is, what to type next ("" nothing)."""

    level: str
    message: str
    next_command: str = ""


def run_preflight(
    account: "Account",
    *,
    types: Sequence[str],
    machines: int,
    market: str,
    stack_missing: Sequence[str] = (),
    ami: str | None = None,
) -> list[Finding]:
    """Look at everything that `machines` machines of the first of `types` that will do need; `market` is "spot",
    "on-demand" or "spot-then-on-demand"; `stack_missing` what a first launch would make. Raises nothing of AWS's.
    """
    found = _check_identity(account)
    if all(one.level == OK for one in found):
        kinds, lines = _check_types(account, types)
        found += lines
        image, lines = _check_image(account, kinds, ami)
        found += lines + _check_quotas(account, kinds, machines, market)
        subnets, lines = _check_subnets(account, kinds, machines, stack_missing)
        found += lines + _check_permissions(account, kinds, market, image, subnets, bool(stack_missing))
    return found + check_tools()


def check_tools() -> list[Finding]:
    """Look for the programs that are needed here."""
    return [
        Finding(OK, f"{name}: {path}")
        if (path := shutil.which(name))
        else Finding(ERROR, f"{name} is not installed here", f"sudo apt-get install {package}")
        for name, package in TOOL_PACKAGES.items()
    ]


def _finding_from_error(error: CloudError, level: str = ERROR) -> Finding:
    """Return an error as a finding; our errors say what to type after the last semicolon."""
    what, _, further = str(error).rpartition("; ")
    return Finding(level, what or further, further.removeprefix("type: ") if what else "")


def check_region(name: str) -> None:
    """Raise `CloudError` when there is no region of this name; asks nobody."""
    known = _list_known_regions()
    if known and name not in known:
        near = _closest_region(name, known)
        raise CloudError(f"boto3 knows no region {name}; --region {near}, or pip install -U boto3")


# --- who, and where -----------------------------------------------------------------------------------------------


def _check_identity(account: "Account") -> list[Finding]:
    """Whether AWS knows us, and the region is one of ours."""
    try:
        check_region(account.region)
    except CloudError as error:
        return [_finding_from_error(error)]
    try:
        number, arn = account.identity
        found = [Finding(OK, f"credentials: {arn} in account {number}")]
    except NoCredentials as error:
        off = account.region != ALWAYS_ENABLED_REGION and _is_region_disabled(account)
        return [_disabled_region_finding(account.region)] if off else [_finding_from_error(error)]
    except CloudError as error:
        return [_finding_from_error(error)]
    return [
        *found,
        _disabled_region_finding(account.region)
        if _is_region_disabled(account)
        else Finding(OK, f"region {account.region}"),
    ]


def _list_known_regions() -> list[str]:
    from boto3.session import Session

    session = Session()
    return [one for part in session.get_available_partitions() for one in session.get_available_regions("ec2", part)]


def _closest_region(region: str, known_regions: list[str]) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(region, known_regions, 1)), ALWAYS_ENABLED_REGION)


def _is_region_disabled(account: "Account") -> bool:
    """Whether the account has not opted in to its region. One that is off refuses all keys, so another one is asked."""
    from infra.aws.client import call

    if not account.region.startswith(("af-", "ap-", "ca-", "eu-", "il-", "me-", "mx-", "sa-", "us-")):
        return False
    try:
        ec2 = account.in_region(ALWAYS_ENABLED_REGION).ec2
        said = call("look up regions", ec2.describe_regions, RegionNames=[account.region], AllRegions=True)
    except CloudError:
        return False
    return any(one.get("OptInStatus") == "not-opted-in" for one in said["Regions"])


def _disabled_region_finding(region: str) -> Finding:
    command = f"aws account enable-region --region-name {region}"
    return Finding(ERROR, f"region {region} is not switched on for this account (it takes minutes)", command)


# --- types, image, quotas, addresses ------------------------------------------------------------------------------


def _check_types(account: "Account", types: Sequence[str]) -> tuple[list[InstanceType], list[Finding]]:
    """Return the types that are offered, and where."""
    try:
        names, lines = offers.choose_types(account, types)
        where = offers.list_zones_by_type(account, names)
        kinds = list(offers.list_instance_types(account, names).values())
    except CloudError as error:
        return [], [_finding_from_error(error)]
    found = [Finding(WARNING, line) for line in lines]
    places = [Finding(OK, f"{one.name} ({one.gpus} {one.gpu}): {', '.join(where.get(one.name, []))}") for one in kinds]
    return kinds, found + places


def _check_image(
    account: "Account", instance_types: Sequence[InstanceType], ami: str | None
) -> tuple[amis.Image | None, list[Finding]]:
    """Return the image of the first type that has one. A type that has none is an error only if all are so."""
    image, found, failed = None, [], []
    for arch in dict.fromkeys(one.gpu_arch for one in instance_types):
        try:
            one = amis.resolve_image(account, arch, ami)
            image = image or one
            found.append(Finding(OK, f"image {one.id} for {arch or 'machines without GPUs'}: {one.name or 'no name'}"))
        except CloudError as error:
            failed.append(error)
    return image, list(
        dict.fromkeys([*found, *(_finding_from_error(one, WARNING if image else ERROR) for one in failed)])
    )


def _check_quotas(
    account: "Account", instance_types: Sequence[InstanceType], machines: int, market: str
) -> list[Finding]:
    """Compare each quota with what types need of it. Too little of one is an error only if no other is enough."""
    needs: dict[tuple[str, str, int], list[str]] = {}
    for which in market.split("-then-"):
        for kind in instance_types:
            asked = quotas.get_quota_code(kind.quota_family, which), which, machines * kind.vcpus
            needs.setdefault(asked, []).append(kind.name)
    allowed = {code: quotas.look_up_quota(account, code) if code else None for code in {code for code, _, _ in needs}}
    short = {asked for asked in needs if (have := allowed[asked[0]]) is not None and have < asked[2]}
    level = WARNING if len(short) < len(needs) else ERROR
    return [_quota_finding(account.region, asked, names, allowed[asked[0]], level) for asked, names in needs.items()]


def _quota_finding(
    region: str, requirement: tuple[str, str, int], names: Sequence[str], allowed_vcpus: float | None, level: str
) -> Finding:
    code, market, need = requirement
    what = f"{', '.join(names)}, {market}: {need} vCPU"
    if allowed_vcpus is None:
        command = f"aws service-quotas get-service-quota --region {region} --service-code ec2 --quota-code {code}"
        return Finding(WARNING, f"{what}, and the quota {code} cannot be looked up", command if code else "")
    if allowed_vcpus >= need:
        return Finding(OK, f"{what} of {allowed_vcpus:g} that quota {code} allows")
    return Finding(
        level, f"{what}, and quota {code} allows {allowed_vcpus:g}", quotas.quota_increase_command(region, code, need)
    )


def _check_subnets(
    account: "Account", instance_types: Sequence[InstanceType], machines: int, missing: Sequence[str]
) -> tuple[list[str], list[Finding]]:
    """Return our subnets that have addresses enough; every network interface takes one."""
    from infra.aws.client import paginate

    need = machines * max((max(1, kind.efa_interfaces) for kind in instance_types), default=1)
    try:
        said = paginate("look at our subnets", account.ec2, "describe_subnets", "Subnets",
                     Filters=tags.make_filters({tags.STACK: tags.STACK_VALUE}))  # fmt: skip
    except CloudError as error:
        return [], [_finding_from_error(error)]
    made = [Finding(OK, f"the first launch makes {', '.join(missing)}")] if missing else []
    full = [one for one in said if one["AvailableIpAddressCount"] < need]
    level = WARNING if len(full) < len(said) else ERROR
    lines = [
        Finding(level, f"{one['AvailabilityZone']}: {one['AvailableIpAddressCount']} of {need} addresses are free",
                "imgnet-cluster gc")
        for one in full
    ]  # fmt: skip
    free = [one for one in said if one not in full]
    if free:
        lines.append(Finding(OK, f"{need} addresses are free in {', '.join(one['AvailabilityZone'] for one in free)}"))
    return [one["SubnetId"] for one in free], made + lines


# --- permissions --------------------------------------------------------------------------------------------------


def _check_permissions(
    account: "Account",
    instance_types: Sequence[InstanceType],
    market: str,
    image: amis.Image | None,
    subnets: Sequence[str],
    creates_stack: bool,
) -> list[Finding]:
    """Ask EC2 whether it would do what a launch does."""
    found = [_check_permission(action, call) for action, call in _dry_run_calls(account, creates_stack)]
    if image and instance_types:
        subnet = subnets[0] if subnets else None
        words = _dry_run_request(instance_types[0].name, image.id, subnet, spot=market.startswith("spot"))
        found.insert(
            0, _check_permission("RunInstances", lambda: account.ec2_no_retry.run_instances(DryRun=True, **words))
        )
    return found


def _dry_run_request(name: str, image: str, subnet: str | None, spot: bool) -> dict[str, Any]:
    """One machine as a launch would ask for it, as far as permissions look: type, tags, metadata service, market."""
    kinds = ["instance", "volume", "network-interface", *(["spot-instances-request"] if spot else [])]
    words: dict[str, Any] = {
        "MinCount": 1, "MaxCount": 1, "InstanceType": name, "ImageId": image,
        "MetadataOptions": {"HttpTokens": "required"},
        "TagSpecifications": tags.tag_specifications(kinds, {tags.STACK: tags.STACK_VALUE}),
    }  # fmt: skip
    words |= {"SubnetId": subnet} if subnet else {}
    return words | ({"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {})


def _dry_run_calls(account: "Account", creates_stack: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """The other calls of a launch that EC2 can try, each with the tag that the least policy wants to see."""

    def tagged(kind: str) -> list[dict[str, Any]]:
        return tags.tag_specifications([kind], {tags.STACK: tags.STACK_VALUE})

    ec2 = account.ec2
    yield (
        "CreatePlacementGroup",
        lambda: ec2.create_placement_group(
            DryRun=True, GroupName=DRY_RUN_GROUP_NAME, Strategy="cluster", TagSpecifications=tagged("placement-group")
        ),
    )
    if creates_stack:
        yield (
            "CreateVpc",
            lambda: ec2.create_vpc(DryRun=True, CidrBlock="10.77.0.0/16", TagSpecifications=tagged("vpc")),
        )
        yield (
            "CreateInternetGateway",
            lambda: ec2.create_internet_gateway(DryRun=True, TagSpecifications=tagged("internet-gateway")),
        )


def _check_permission(action: str, dry_run: Callable[[], object]) -> Finding:
    """Whether EC2 would do it: it says so by an error of its own."""
    from infra.aws.client import call

    try:
        call(f"ec2:{action}", dry_run)
    except CloudError as error:
        if get_error_code(error) == "DryRunOperation":
            return Finding(OK, f"ec2:{action} is permitted")
        if get_error_code(error) in DENIED_CODES:
            return Finding(ERROR, f"ec2:{action} is not permitted", POLICY_COMMAND)
        return Finding(WARNING, f"whether ec2:{action} is permitted is not known ({error})", POLICY_COMMAND)
    return Finding(WARNING, f"ec2:{action} did not understand DryRun", "")
