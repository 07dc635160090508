"""What stands in the way of a launch, all of it at once: credentials, permissions, quotas, places, image, tools here.

Changes nothing: permissions are asked for by DryRun, which EC2 answers with DryRunOperation where all was well.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.aws import tags
from infra.aws.errors import DENIED, CloudError, NoCredentials, code_of
from infra.aws.market import offers, quotas
from infra.aws.market.instance_types import Kind

from . import amis

if TYPE_CHECKING:
    from infra.aws.client import Account

OK, WARNING, ERROR = "ok", "warning", "error"
TOOLS = {"tmux": "tmux", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}  # and the packages that have them
HOME = "us-east-1"  # of every account, whatever regions it has switched on
POLICY = "imgnet-cluster check --iam"
UNLIKE_ANY = "imgnet-dry-run"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: how it is ("ok", "warning", "error"), what it is, what to type next ("" nothing)."""

    level: str
    what: str
    type_next: str = ""


def check(
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
    found = _identity(account)
    if all(one.level == OK for one in found):
        kinds, lines = _types(account, types)
        found += lines
        image, lines = _image(account, kinds, ami)
        found += lines + _quotas(account, kinds, machines, market)
        subnets, lines = _subnets(account, kinds, machines, stack_missing)
        found += lines + _permissions(account, kinds, market, image, subnets, bool(stack_missing))
    return found + tools()


def tools() -> list[Finding]:
    """Look for the programs that are needed here."""
    return [
        Finding(OK, f"{name}: {path}")
        if (path := shutil.which(name))
        else Finding(ERROR, f"{name} is not installed here", f"sudo apt-get install {package}")
        for name, package in TOOLS.items()
    ]


def _failed(error: CloudError, level: str = ERROR) -> Finding:
    """Return an error as a finding; our errors say what to type after the last semicolon."""
    what, _, further = str(error).rpartition("; ")
    return Finding(level, what or further, further.removeprefix("type: ") if what else "")


def known_region(name: str) -> None:
    """Raise `CloudError` when there is no region of this name; asks nobody."""
    known = _regions()
    if known and name not in known:
        near = _nearest(name, known)
        raise CloudError(f"boto3 knows no region {name}; --region {near}, or pip install -U boto3")


# --- who, and where -----------------------------------------------------------------------------------------------


def _identity(account: "Account") -> list[Finding]:
    """Whether AWS knows us, and the region is one of ours."""
    try:
        known_region(account.region)
    except CloudError as error:
        return [_failed(error)]
    try:
        number, arn = account.identity
        found = [Finding(OK, f"credentials: {arn} in account {number}")]
    except NoCredentials as error:
        off = account.region != HOME and _switched_off(account)
        return [_off(account.region)] if off else [_failed(error)]
    except CloudError as error:
        return [_failed(error)]
    return [*found, _off(account.region) if _switched_off(account) else Finding(OK, f"region {account.region}")]


def _regions() -> list[str]:
    from boto3.session import Session

    session = Session()
    return [one for part in session.get_available_partitions() for one in session.get_available_regions("ec2", part)]


def _nearest(region: str, known: list[str]) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(region, known, 1)), HOME)


def _switched_off(account: "Account") -> bool:
    """Whether the account has not opted in to its region. One that is off refuses all keys, so another one is asked."""
    from infra.aws.client import call

    if not account.region.startswith(("af-", "ap-", "ca-", "eu-", "il-", "me-", "mx-", "sa-", "us-")):
        return False
    try:
        ec2 = account.at(HOME).ec2
        said = call("look up regions", ec2.describe_regions, RegionNames=[account.region], AllRegions=True)
    except CloudError:
        return False
    return any(one.get("OptInStatus") == "not-opted-in" for one in said["Regions"])


def _off(region: str) -> Finding:
    command = f"aws account enable-region --region-name {region}"
    return Finding(ERROR, f"region {region} is not switched on for this account (it takes minutes)", command)


# --- types, image, quotas, addresses ------------------------------------------------------------------------------


def _types(account: "Account", types: Sequence[str]) -> tuple[list[Kind], list[Finding]]:
    """Return the types that are offered, and where."""
    try:
        names, lines = offers.settle(account, types)
        where = offers.zones(account, names)
        kinds = list(offers.kinds(account, names).values())
    except CloudError as error:
        return [], [_failed(error)]
    found = [Finding(WARNING, line) for line in lines]
    places = [Finding(OK, f"{one.name} ({one.gpus} {one.gpu}): {', '.join(where.get(one.name, []))}") for one in kinds]
    return kinds, found + places


def _image(account: "Account", kinds: Sequence[Kind], ami: str | None) -> tuple[amis.Image | None, list[Finding]]:
    """Return the image of the first type that has one. A type that has none is an error only if all are so."""
    image, found, failed = None, [], []
    for arch in dict.fromkeys(one.arch for one in kinds):
        try:
            one = amis.resolve(account, arch, ami)
            image = image or one
            found.append(Finding(OK, f"image {one.id} for {arch or 'machines without GPUs'}: {one.name or 'no name'}"))
        except CloudError as error:
            failed.append(error)
    return image, list(dict.fromkeys([*found, *(_failed(one, WARNING if image else ERROR) for one in failed)]))


def _quotas(account: "Account", kinds: Sequence[Kind], machines: int, market: str) -> list[Finding]:
    """Compare each quota with what types need of it. Too little of one is an error only if no other is enough."""
    needs: dict[tuple[str, str, int], list[str]] = {}
    for which in market.split("-then-"):
        for kind in kinds:
            asked = quotas.code(kind.family, which), which, machines * kind.vcpus
            needs.setdefault(asked, []).append(kind.name)
    allowed = {code: quotas.value(account, code) if code else None for code in {code for code, _, _ in needs}}
    short = {asked for asked in needs if (have := allowed[asked[0]]) is not None and have < asked[2]}
    level = WARNING if len(short) < len(needs) else ERROR
    return [_quota(account.region, asked, names, allowed[asked[0]], level) for asked, names in needs.items()]


def _quota(region: str, asked: tuple[str, str, int], names: Sequence[str], have: float | None, level: str) -> Finding:
    code, market, need = asked
    what = f"{', '.join(names)}, {market}: {need} vCPU"
    if have is None:
        command = f"aws service-quotas get-service-quota --region {region} --service-code ec2 --quota-code {code}"
        return Finding(WARNING, f"{what}, and the quota {code} cannot be looked up", command if code else "")
    if have >= need:
        return Finding(OK, f"{what} of {have:g} that quota {code} allows")
    return Finding(level, f"{what}, and quota {code} allows {have:g}", quotas.request_command(region, code, need))


def _subnets(
    account: "Account", kinds: Sequence[Kind], machines: int, missing: Sequence[str]
) -> tuple[list[str], list[Finding]]:
    """Return our subnets that have addresses enough; every network interface takes one."""
    from infra.aws.client import pages

    need = machines * max((max(1, kind.efa) for kind in kinds), default=1)
    try:
        said = pages("look at our subnets", account.ec2, "describe_subnets", "Subnets",
                     Filters=tags.filters({tags.STACK: tags.OURS}))  # fmt: skip
    except CloudError as error:
        return [], [_failed(error)]
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


def _permissions(
    account: "Account",
    kinds: Sequence[Kind],
    market: str,
    image: amis.Image | None,
    subnets: Sequence[str],
    stack: bool,
) -> list[Finding]:
    """Ask EC2 whether it would do what a launch does."""
    found = [_permitted(action, call) for action, call in _calls(account, stack)]
    if image and kinds:
        subnet = subnets[0] if subnets else None
        words = _machine(kinds[0].name, image.id, subnet, spot=market.startswith("spot"))
        found.insert(0, _permitted("RunInstances", lambda: account.once.run_instances(DryRun=True, **words)))
    return found


def _machine(name: str, image: str, subnet: str | None, spot: bool) -> dict[str, Any]:
    """One machine as a launch would ask for it, as far as permissions look: type, tags, metadata service, market."""
    kinds = ["instance", "volume", "network-interface", *(["spot-instances-request"] if spot else [])]
    words: dict[str, Any] = {
        "MinCount": 1, "MaxCount": 1, "InstanceType": name, "ImageId": image,
        "MetadataOptions": {"HttpTokens": "required"},
        "TagSpecifications": tags.specifications(kinds, {tags.STACK: tags.OURS}),
    }  # fmt: skip
    words |= {"SubnetId": subnet} if subnet else {}
    return words | ({"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {})


def _calls(account: "Account", stack: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """The other calls of a launch that EC2 can try, each with the tag that the least policy wants to see."""

    def tagged(kind: str) -> list[dict[str, Any]]:
        return tags.specifications([kind], {tags.STACK: tags.OURS})

    ec2 = account.ec2
    yield (
        "CreatePlacementGroup",
        lambda: ec2.create_placement_group(
            DryRun=True, GroupName=UNLIKE_ANY, Strategy="cluster", TagSpecifications=tagged("placement-group")
        ),
    )
    if stack:
        yield (
            "CreateVpc",
            lambda: ec2.create_vpc(DryRun=True, CidrBlock="10.77.0.0/16", TagSpecifications=tagged("vpc")),
        )
        yield (
            "CreateInternetGateway",
            lambda: ec2.create_internet_gateway(DryRun=True, TagSpecifications=tagged("internet-gateway")),
        )


def _permitted(action: str, dry_run: Callable[[], object]) -> Finding:
    """Whether EC2 would do it: it says so by an error of its own."""
    from infra.aws.client import call

    try:
        call(f"ec2:{action}", dry_run)
    except CloudError as error:
        if code_of(error) == "DryRunOperation":
            return Finding(OK, f"ec2:{action} is permitted")
        if code_of(error) in DENIED:
            return Finding(ERROR, f"ec2:{action} is not permitted", POLICY)
        return Finding(WARNING, f"whether ec2:{action} is permitted is not known ({error})", POLICY)
    return Finding(WARNING, f"ec2:{action} did not understand DryRun", "")
