"""The stack's security group, and its ssh rules for single addresses."""

import ipaddress
import logging
import re

from infra.aws import tags
from infra.aws.client import Account, call_with_retry, list_tagged
from infra.aws.journal import Journal
from infra.aws.tags import Resource
from infra.errors import CloudError

from . import network
from .resources import RESOURCE_NAME, RESOURCE_VISIBILITY_SECONDS, StackContext, require_ours, wait_for

logger = logging.getLogger(__name__)

SSH_PORT = 22
NOT_IN_DESCRIPTION = r"[^a-zA-Z0-9. _:/()#,@\[\]+=&;{}!$*-]"  # characters that AWS does not allow there


# --- the security group ----------------------------------------------------------------------------------------------


def find_security_group(context: StackContext, vpc: str) -> Resource | None:
    """Return the stack's security group of a VPC, None when there is none.

    Raises `CloudError` when a group of its name lacks the stack tag.
    """
    named = {"vpc_id": [vpc], "group_name": [RESOURCE_NAME]}
    for group in list_tagged(context.account, "describe_security_groups", {}, **named):
        return require_ours(group, f"security group {RESOURCE_NAME} in {vpc}", "rename it, or remove it")
    return None


def is_complete(group: Resource) -> bool:
    """Whether a group allows all traffic between its machines, and all outgoing traffic."""
    return not _missing_rules(group, "in") and not _missing_rules(group, "out")


def ensure_security_group(context: StackContext, vpc: str) -> str:
    """Return the ID of the stack's security group, created if missing, with the rules between machines.

    The ssh rules are set by `allow_ssh_from`. Raises `CloudError`.
    """
    ec2 = context.account.ec2
    group = find_security_group(context, vpc)
    if not group:
        logger.info(f"creating security group {RESOURCE_NAME}")
        context.create(
            "security group",
            ec2.create_security_group,
            TagSpecifications=context.tag_specifications("security-group"),
            GroupName=RESOURCE_NAME,
            Description="imgnet-cluster: machines of jobs",
            VpcId=vpc,
        )
        group = wait_for(
            lambda: find_security_group(context, vpc),
            f"AWS does not show the security group {RESOURCE_NAME} in {vpc}",
            RESOURCE_VISIBILITY_SECONDS,
        )
    authorize_functions = {"in": ec2.authorize_security_group_ingress, "out": ec2.authorize_security_group_egress}
    for direction, function in authorize_functions.items():
        for rule in _missing_rules(group, direction):
            context.create(
                f"rule of the security group ({direction})", function, GroupId=group["GroupId"], IpPermissions=[rule]
            )
    return str(group["GroupId"])


def remove_security_groups(context: StackContext) -> None:
    """Delete the stack's security groups of all networks."""
    for group in list_tagged(context.account, "describe_security_groups", {tags.STACK: tags.STACK_VALUE}):
        context.delete("security group", context.account.ec2.delete_security_group, GroupId=group["GroupId"])


def _missing_rules(group: Resource, direction: str) -> list[Resource]:
    """Return the missing rules of a direction, "in" or "out".

    EFA needs all traffic with the group itself allowed in both directions, in a rule that names the group.
    """
    rules = group["IpPermissions" if direction == "in" else "IpPermissionsEgress"]
    all_traffic_rules = [rule for rule in rules if rule["IpProtocol"] == "-1"]
    group_ids = {pair["GroupId"] for rule in all_traffic_rules for pair in rule.get("UserIdGroupPairs", [])}
    cidrs = {ip_range["CidrIp"] for rule in all_traffic_rules for ip_range in rule.get("IpRanges", [])}
    missing_rules: list[Resource] = []
    if group["GroupId"] not in group_ids:
        missing_rules.append({"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]})
    if direction == "out" and network.ANY_IPV4 not in cidrs:
        missing_rules.append({"IpProtocol": "-1", "IpRanges": [{"CidrIp": network.ANY_IPV4}]})
    return missing_rules


# --- ssh -------------------------------------------------------------------------------------------------------------


def allow_ssh_from(
    account: Account,
    group: str,
    address: str,
    owner: str,
    *,
    image_port: int = SSH_PORT,
    journal: Journal | None = None,
    known_group: Resource | None = None,
) -> None:
    """Allow ssh from one address (a /32), and close it to this owner's earlier addresses. Raises `CloudError`.

    An address from which a live machine is supervised, by this owner or another, stays open. Beside `SSH_PORT` the port
    of an image is opened. `known_group` is the group as AWS has just described it.
    """
    address = parse_single_address(address)
    description = re.sub(NOT_IN_DESCRIPTION, "_", f"ssh from {owner}")[:255]
    rules = _ssh_rules(account, group, known_group)
    context, ec2 = StackContext(account, journal), account.ec2
    open_ports = [(port, ip_range["CidrIp"]) for port, ip_range in rules]
    for port in sorted({SSH_PORT, image_port}):
        if (port, address) not in open_ports:
            logger.info(f"opening ssh to {address}")
            rule = _ssh_rule(port, {"CidrIp": address, "Description": description})
            authorize = ec2.authorize_security_group_ingress
            context.create(f"ssh from {address}", authorize, GroupId=group, IpPermissions=[rule])
    # Old addresses are closed after the new one is open: a crash between the two locks nobody out.
    former = [(port, each["CidrIp"]) for port, each in rules if each.get("Description") == description]
    former = [(port, each) for port, each in former if each != address]
    machines = network.list_machines(context) if former else []
    used_addresses = {tags.read_tags(machine).get(tags.SSH_FROM) for machine in machines}
    for port, former_address in former:
        if former_address not in used_addresses:
            logger.info(f"closing ssh to {former_address}, the former address of {owner}")
            rule, revoke = _ssh_rule(port, {"CidrIp": former_address}), ec2.revoke_security_group_ingress
            context.delete(f"ssh from {former_address}", revoke, GroupId=group, IpPermissions=[rule])


def is_open_to(account: Account, group: str, address: str) -> bool:
    """Whether ssh is open to exactly this address range. Raises `CloudError`."""
    return any(ip_range["CidrIp"] == address for _, ip_range in _ssh_rules(account, group, None))


def parse_single_address(text: str) -> str:
    """Return a single IPv4 address as a /32. Raises `CloudError` for other text and for wider ranges."""
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError:
        network = None
    if not network or network.num_addresses != 1 or network.network_address.is_unspecified:
        raise CloudError(f"--from {text}: ssh can be open to one IPv4 address only, such as 203.0.113.7/32")
    return str(network)


def _ssh_rule(port: int, ip_range: Resource) -> Resource:
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": [ip_range]}


def _ssh_rules(account: Account, group: str, known_group: Resource | None) -> list[tuple[int, Resource]]:
    """Return the TCP rules for address ranges: port and range."""
    if not known_group:
        response = call_with_retry("security group", account.ec2.describe_security_groups, GroupIds=[group])
        (known_group,) = response["SecurityGroups"]
    rules = [rule for rule in known_group["IpPermissions"] if rule["IpProtocol"] == "tcp"]
    return [(int(rule["FromPort"]), ip_range) for rule in rules for ip_range in rule.get("IpRanges", [])]
