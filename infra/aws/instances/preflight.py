"""Checks before a launch, all at once: credentials, permissions, quotas, zones, image, and the tools on this computer.

Changes nothing. Permissions are checked with DryRun calls, which EC2 answers with the error DryRunOperation when the
call would succeed.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType

from infra.aws import tags
from infra.aws.client import Account, call, paginate
from infra.aws.error_codes import DENIED_CODES, FREE_PLAN_CODE, NETWORKS_QUOTA, TAG_POLICY_CODE, quota_increase_command
from infra.aws.launch_request import Place
from infra.aws.market import offers, quotas
from infra.aws.market.instance_types import InstanceType
from infra.aws.market.reservations import Reservation, find_reservation
from infra.aws.stack.network import VPC_CIDR
from infra.aws.stack.stack import Stack, StackInspection
from infra.errors import CloudError
from infra.offers import LaunchFinding

from . import amis
from .request import EFA_ONLY_DEVICES, InstanceRequest, build_launch_request

OK = "ok"
WARNING = "warning"
ERROR = "error"
TOOL_PACKAGES = {"tmux": "tmux", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}  # Ubuntu package by program
POLICY_COMMAND = "imgnet-cluster check --iam"
DRY_RUN_GROUP_NAME = "imgnet-dry-run"


def run_preflight(
    account: Account,
    *,
    types: Sequence[str],
    machines: int,
    market: str,
    reservation_id: str | None = None,
    inspection: StackInspection | None = None,
    user_tags: tags.Tags = MappingProxyType({}),
    network_ids: Sequence[str] = (),
) -> list[LaunchFinding]:
    """Check everything that a launch of `machines` machines needs. Errors of AWS become findings.

    `types` are the instance types in order of preference; `market` is "spot", "on-demand" or "spot-then-on-demand";
    a reservation decides on both, and no quota counts then; `inspection` is what the stack has and lacks; `user_tags`
    are tags of the user that the launch would set, as an organization may demand; `network_ids` name a network of the
    user's.
    """
    findings = _check_identity(account)
    if findings[0].level != OK:
        return findings + check_tools()
    reservation = None
    if reservation_id:
        try:
            reservation = find_reservation(account, [account.region], reservation_id, time.time(), types)
        except CloudError as error:
            return [*findings, finding_from_error(error), *check_tools()]
        findings.append(_check_reservation(reservation, machines))
        types, market = [reservation.type], reservation.market
    instance_types, type_findings = _check_types(account, types)
    image, image_findings = _check_image(account, instance_types)
    quota_findings = [] if reservation else _check_quotas(account, instance_types, machines, market)
    findings += type_findings + image_findings + quota_findings
    findings += _check_network_quotas(account, needs_network=inspection is not None and not inspection.network.vpc)
    missing_parts, given_vpc = inspection.missing_parts if inspection else [], None
    if inspection and inspection.network.is_given:
        given_vpc = inspection.network.vpc
        findings.append(LaunchFinding(OK, f"network {inspection.network.describe()}"))
    if missing_parts:
        findings.append(LaunchFinding(OK, f"the first launch creates {', '.join(missing_parts)}"))
    for zone in inspection.network.zones_without_efs if inspection else ():
        findings.append(LaunchFinding(OK, f"{zone}: EFS does not serve it, so no machines are rented there"))
    own_stack = inspection.stack if inspection else None
    if image and instance_types:
        findings += _check_launch_permission(
            account, instance_types, market, reservation, image, own_stack, user_tags, network_ids
        )
    dry_runs = _dry_run_calls(account, bool(missing_parts), given_vpc, user_tags)
    findings += [_check_permission(action, dry_run) for action, dry_run in dry_runs]
    return findings + check_tools()


def check_tools() -> list[LaunchFinding]:
    """Check that the programs that a launch needs are installed on this computer."""
    return [
        LaunchFinding(OK, f"{name}: {path}")
        if (path := shutil.which(name))
        else LaunchFinding(ERROR, f"{name} is not installed here", f"sudo apt-get install {package}")
        for name, package in TOOL_PACKAGES.items()
    ]


def finding_from_error(error: CloudError, level: str = ERROR) -> LaunchFinding:
    """Return an error as a finding."""
    return LaunchFinding.from_line(level, str(error))


def check_region(name: str) -> None:
    """Raise `CloudError` when boto3 knows no region of this name. Makes no AWS call."""
    known_regions = _list_known_regions()
    if known_regions and name not in known_regions:
        closest_region = next(iter(get_close_matches(name, known_regions, 1)), "us-east-1")
        raise CloudError(
            f"boto3 knows no region {name}; pass --region {closest_region}, or update boto3: pip install -U boto3"
        )


# --- identity and region ------------------------------------------------------------------------------------------


def _check_identity(account: Account) -> list[LaunchFinding]:
    """Check that the region exists, and that AWS accepts the credentials."""
    try:
        check_region(account.region)
        number, arn = account.identity
    except CloudError as error:
        return [finding_from_error(error)]
    return [LaunchFinding(OK, f"credentials: {arn} in account {number}"), LaunchFinding(OK, f"region {account.region}")]


def _list_known_regions() -> list[str]:
    from boto3.session import Session

    session = Session()
    return [
        region
        for partition in session.get_available_partitions()
        for region in session.get_available_regions("ec2", partition)
    ]


# --- types, image, quotas -----------------------------------------------------------------------------------------


def _check_types(account: Account, types: Sequence[str]) -> tuple[list[InstanceType], list[LaunchFinding]]:
    """Check which types the region offers. Return them, and findings with their zones."""
    try:
        types_by_name, notes = offers.choose_types(account, types)
        zones_by_type = offers.list_zones_by_type(account, list(types_by_name))
    except CloudError as error:
        return [], [finding_from_error(error)]
    findings = [LaunchFinding(WARNING, note) for note in notes]
    for instance_type in types_by_name.values():
        zones = ", ".join(zones_by_type.get(instance_type.name, []))
        gpus = f"{instance_type.gpus} {instance_type.gpu}" if instance_type.gpus else "no GPU"
        findings.append(LaunchFinding(OK, f"{instance_type.name} ({gpus}): {zones}"))
    return [*types_by_name.values()], findings


def _check_image(
    account: Account, instance_types: Sequence[InstanceType]
) -> tuple[amis.Image | None, list[LaunchFinding]]:
    """Return the image of the first type that has one. A type without one is an error only when no type has one."""
    first_image = None
    findings: list[LaunchFinding] = []
    errors: list[CloudError] = []
    for arch in dict.fromkeys(instance_type.gpu_arch for instance_type in instance_types):
        try:
            image = amis.resolve_image(account, arch)
        except CloudError as error:
            errors.append(error)
            continue
        first_image = first_image or image
        label = arch or "machines without GPUs"
        findings.append(LaunchFinding(OK, f"image {image.id} for {label}: {image.name or 'no name'}"))
    level = WARNING if first_image else ERROR
    findings += [finding_from_error(error, level) for error in errors]
    return first_image, list(dict.fromkeys(findings))


def _check_quotas(
    account: Account, instance_types: Sequence[InstanceType], machines: int, market: str
) -> list[LaunchFinding]:
    """Compare each quota with the vCPUs that a launch needs of it.

    A quota that is too small is an error only when no other type or market has enough.
    """
    names_by_need: dict[tuple[str, str, int], list[str]] = {}  # the need is a quota code, a market, and vCPUs
    for single_market in market.split("-then-"):
        for instance_type in instance_types:
            code = quotas.get_quota_code(instance_type.name, single_market)
            need = (code, single_market, machines * instance_type.vcpus)
            names_by_need.setdefault(need, []).append(instance_type.name)
    codes = {code for code, _, _ in names_by_need}
    limits = {code: quotas.look_up_quota(account, code) if code else None for code in codes}
    is_short = [(limit := limits[code]) is not None and limit < vcpus for code, _, vcpus in names_by_need]
    level = ERROR if all(is_short) else WARNING
    findings = []
    for (code, single_market, vcpus), names in names_by_need.items():
        label = f"{', '.join(names)}, {single_market}: {vcpus} vCPU"
        limit = limits[code]
        if limit is None:
            command = f"aws service-quotas get-service-quota --region {account.region} --service-code ec2 --quota-code"
            message = f"{label}, but quota {code or '(unknown)'} cannot be looked up"
            findings.append(LaunchFinding(WARNING, message, f"{command} {code}" if code else ""))
        elif limit >= vcpus:
            findings.append(LaunchFinding(OK, f"{label} of {limit:g} that quota {code} allows"))
        else:
            default = quotas.look_up_quota(account, code, of_new_account=True)
            new_account = "" if default is None else f"; a new account has {default:g}"
            command = quota_increase_command(account.region, code, vcpus)
            findings.append(LaunchFinding(level, f"{label}, but quota {code} allows {limit:g}{new_account}", command))
    return findings


def _check_network_quotas(account: Account, needs_network: bool) -> list[LaunchFinding]:
    """Compare the networks (VPC) and the addresses of all users in the region with what the quotas allow.

    A job needs addresses of this kind only without public ones: those are not Elastic IP addresses.
    """
    findings = []
    wanted = [(quotas.ADDRESSES, "describe_addresses", "Addresses", 2, WARNING, "Elastic IP addresses")]
    if needs_network:
        wanted.insert(0, (NETWORKS_QUOTA, "describe_vpcs", "Vpcs", 1, ERROR, "networks (VPC)"))
    for code, operation, key, need, level, name in wanted:
        try:
            used = len(paginate(name, account.ec2, operation, key))
        except CloudError as error:
            findings.append(finding_from_error(error, WARNING))
            continue
        limit = quotas.look_up_quota(account, code)
        purpose = "the stack needs one" if code == NETWORKS_QUOTA else "--internet nat needs 2, --internet none 1"
        allowed = "an unknown number" if limit is None else f"{limit:g}"
        is_short = limit is not None and used + need > limit
        command = quota_increase_command(account.region, code, used + 2 * need) if is_short else ""
        message = f"{used} {name} in use of {allowed} that quota {code} allows; {purpose}"
        findings.append(LaunchFinding(level if is_short else OK, message, command))
    return findings


def _check_reservation(reservation: Reservation, machines: int) -> LaunchFinding:
    """Check that enough of the reserved machines are free."""
    free = f"{reservation.id}: {reservation.free_count} of {reservation.machine_count} machines are free"
    level = OK if reservation.free_count >= machines else ERROR
    return LaunchFinding(level, f"{free} ({reservation.type}, {reservation.market}), {machines} are needed")


# --- permissions --------------------------------------------------------------------------------------------------


def _check_launch_permission(
    account: Account,
    instance_types: Sequence[InstanceType],
    market: str,
    reservation: Reservation | None,
    image: amis.Image,
    own_stack: Stack | None,
    user_tags: tags.Tags,
    network_ids: Sequence[str],
) -> list[LaunchFinding]:
    """Ask EC2 by DryRun whether it would launch one machine, by the very request of a launch.

    EC2 authorizes each resource of a request, and takes default ones, which are not ours, for those that it does not
    name: without the stack the answer would be about another request.
    """
    options = [f"--{'vpc' if id.startswith('vpc-') else 'subnet'} {id}" for id in network_ids]
    up_command = " ".join(["imgnet-cluster up --stack", *options])
    if own_stack is None:
        message = "ec2:RunInstances cannot be tried before the stack is there; the first launch makes it"
        return [LaunchFinding(WARNING, message, up_command)]
    try:
        zones_by_type = offers.list_zones_by_type(account, [instance_type.name for instance_type in instance_types])
        owner = account.owner
    except CloudError as error:
        return [finding_from_error(error, WARNING)]
    candidates = [
        (instance_type, zone)
        for instance_type in instance_types
        for zone in ([reservation.zone] if reservation else zones_by_type.get(instance_type.name, []))
        if zone in own_stack.subnets
    ]
    if not candidates:
        message = "the stack has no subnet in a zone that offers the types"
        return [LaunchFinding(ERROR, message, up_command)]
    instance_request = InstanceRequest(
        own_tags=tags.job_tags("dry-run", "dry-run", owner, time.time(), user_tags),
        image=image,
        stack=own_stack,
        user_data="",
        use_placement_group=False,  # it would have to exist
    )

    def try_request(instance_type: InstanceType, zone: str, efa_only_device: int = 0) -> LaunchFinding:
        place = Place(region=own_stack.region, zone=zone, type=instance_type.name, market=market.partition("-then-")[0])
        place = reservation.place(None) if reservation else place
        own_request = replace(instance_request, efa_only_device=efa_only_device)
        request = build_launch_request(own_request, instance_type, place, ["0"], 0)
        run_instances = partial(account.ec2_no_retry.run_instances, DryRun=True, **request.parameters)
        return _check_permission("RunInstances", run_instances)

    several_cards = [each for each in candidates if len(each[0].interface_cards) > 1]
    tried = {index: try_request(*several_cards[0], index) for index in EFA_ONLY_DEVICES if several_cards}
    accepted = [str(index) for index, finding in tried.items() if finding.level == OK]
    findings = [try_request(*candidates[0], int(accepted[0]) if accepted else 0)]
    if accepted:
        message = f"EC2 takes EFA-only interfaces as device {' or '.join(accepted)} of their network cards"
        findings.append(LaunchFinding(OK, f"{message} ({several_cards[0][0].name})"))
    return findings


def _dry_run_calls(
    account: Account, creates_stack: bool, given_vpc: str | None, user_tags: tags.Tags
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the other calls of a launch that support DryRun, with the tag that `policies.user_policy` requires."""
    ec2 = account.ec2
    group = {"GroupName": DRY_RUN_GROUP_NAME, "Strategy": "cluster"}
    calls = [("CreatePlacementGroup", ec2.create_placement_group, "placement-group", group)]
    if creates_stack and given_vpc:
        own_group = {"GroupName": DRY_RUN_GROUP_NAME, "Description": DRY_RUN_GROUP_NAME, "VpcId": given_vpc}
        calls += [("CreateSecurityGroup", ec2.create_security_group, "security-group", own_group)]
    elif creates_stack:
        calls += [
            ("CreateVpc", ec2.create_vpc, "vpc", {"CidrBlock": str(VPC_CIDR)}),
            ("CreateInternetGateway", ec2.create_internet_gateway, "internet-gateway", {}),
        ]
    for action, function, resource_type, params in calls:
        specifications = tags.tag_specifications([resource_type], {**user_tags, tags.STACK: tags.STACK_VALUE})
        yield action, partial(function, DryRun=True, TagSpecifications=specifications, **params)


def _check_permission(action: str, dry_run: Callable[[], object]) -> LaunchFinding:
    """Return whether EC2 would carry out a call. A DryRun always ends in an error; its code is the answer."""
    try:
        call(f"ec2:{action}", dry_run)
    except CloudError as error:
        if error.code == "DryRunOperation":
            return LaunchFinding(OK, f"ec2:{action} is permitted")
        if error.code in DENIED_CODES and POLICY_COMMAND in str(error):
            return LaunchFinding(ERROR, f"ec2:{action} is not permitted", POLICY_COMMAND)
        if error.code in (*DENIED_CODES, TAG_POLICY_CODE, FREE_PLAN_CODE):  # the user's policy cannot change it
            return finding_from_error(error)
        return LaunchFinding(WARNING, f"cannot find out whether ec2:{action} is permitted ({error})", POLICY_COMMAND)
    return LaunchFinding(WARNING, f"cannot find out whether ec2:{action} is permitted: DryRun was ignored", "")
