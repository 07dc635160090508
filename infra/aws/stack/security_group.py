"""Who may come in: the security group, ssh from known addresses alone, the key pair."""

import ipaddress
import re
from collections.abc import Callable, Sequence

from infra.aws import tags
from infra.aws.client import Account, call, call_with_retry, paginate
from infra.aws.errors import CloudError
from infra.aws.journal import Journal

from .resources import RESOURCE_NAME, Resource, StackContext, discard, not_ours_error

SSH_PORT = 22
ANY_IPV4 = "0.0.0.0/0"
NEW_GROUP_RULES = {
    "IpPermissions": [],
    "IpPermissionsEgress": [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": ANY_IPV4}]}],
}


# --- the security group ----------------------------------------------------------------------------------------------


def find_security_group(context: StackContext, vpc: str) -> Resource | None:
    """Return our security group. Raises `CloudError` when there is one of its name that is not ours."""
    where = tags.make_filters({}, vpc_id=[vpc], group_name=[RESOURCE_NAME])
    for one in paginate(
        "security groups", context.account.ec2, "describe_security_groups", "SecurityGroups", Filters=where
    ):
        if not tags.is_ours(one):
            raise not_ours_error(f"security group {RESOURCE_NAME} in {vpc}", "rename it, or remove it")
        return one
    return None


def is_complete(group: Resource) -> bool:
    """Whether a group lets all in and out that is between its own machines, and all out."""
    return not _missing_rules(group, "in") and not _missing_rules(group, "out")


def ensure_security_group(context: StackContext, vpc: str) -> str:
    """Return our security group, made if it is not there; who may log in is another matter. Raises `CloudError`."""
    ec2, group = context.account.ec2, find_security_group(context, vpc)
    if not group:
        context.log(f"making security group {RESOURCE_NAME}")
        words = {"GroupName": RESOURCE_NAME, "Description": "imgnet-cluster: machines of jobs", "VpcId": vpc}
        specifications = context.tag_specifications("security-group")
        made = context.create("security group", ec2.create_security_group, TagSpecifications=specifications, **words)
        group = {"GroupId": made["GroupId"], **NEW_GROUP_RULES} if made else find_security_group(context, vpc)
    if not group:
        raise CloudError(f"security group {RESOURCE_NAME} in {vpc}: AWS has it and does not show it; type it again")
    for way, function in (("in", ec2.authorize_security_group_ingress), ("out", ec2.authorize_security_group_egress)):
        for rule in _missing_rules(group, way):
            context.create(
                f"rule of the security group ({way})", function, GroupId=group["GroupId"], IpPermissions=[rule]
            )
    return str(group["GroupId"])


def remove_security_groups(context: StackContext, vpc: str) -> None:
    """Remove our security groups of a network."""
    where = tags.make_filters({tags.STACK: tags.STACK_VALUE}, vpc_id=[vpc])
    for one in paginate(
        "security groups", context.account.ec2, "describe_security_groups", "SecurityGroups", Filters=where
    ):
        context.delete("security group", context.account.ec2.delete_security_group, GroupId=one["GroupId"])


def _missing_rules(group: Resource, direction: str) -> list[Resource]:
    """The rules that are not there: EFA wants all with itself in both directions, said by group."""
    rules = group["IpPermissions" if direction == "in" else "IpPermissionsEgress"]
    everything = [one for one in rules if one["IpProtocol"] == "-1"]
    groups = {pair["GroupId"] for one in everything for pair in one.get("UserIdGroupPairs", [])}
    ranges = {place["CidrIp"] for one in everything for place in one.get("IpRanges", [])}
    found: list[Resource] = []
    if group["GroupId"] not in groups:
        found.append({"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]})
    if direction == "out" and ANY_IPV4 not in ranges:
        found.append({"IpProtocol": "-1", "IpRanges": [{"CidrIp": ANY_IPV4}]})
    return found


# --- ssh -------------------------------------------------------------------------------------------------------------


def list_ssh_addresses(account: Account, group: str) -> list[str]:
    """Return the addresses that may log in. Raises `CloudError`."""
    return sorted({place["CidrIp"] for _, place in _ssh_rules(account, group)})


def allow_ssh_from(
    account: Account,
    group: str,
    address: str,
    owner: str,
    *,
    ports: Sequence[int] = (SSH_PORT,),
    log: Callable[[str], None] = discard,
    journal: Journal | None = None,
) -> None:
    """Let one address (a /32) log in, in the place of this owner's old ones. Raises `CloudError`."""
    address, mark, doors = parse_single_address(address), rule_description(owner), _ssh_rules(account, group)
    work, there = StackContext(account, log, journal), [(port, place["CidrIp"]) for port, place in doors]
    for port in ports:
        if (port, address) not in there:
            log(f"letting in ssh from {address}")
            rule = _ssh_rule(port, {"CidrIp": address, "Description": mark})
            function = account.ec2.authorize_security_group_ingress
            work.create(f"ssh from {address}", function, GroupId=group, IpPermissions=[rule])
    for port, place in doors:  # after the new one: a crash between the two locks nobody out
        if place.get("Description") == mark and place["CidrIp"] != address:
            log(f"no more ssh from {place['CidrIp']}, where {owner} was before")
            rule = _ssh_rule(port, {"CidrIp": place["CidrIp"]})
            function = account.ec2.revoke_security_group_ingress
            work.delete(f"ssh from {place['CidrIp']}", function, GroupId=group, IpPermissions=[rule])


def parse_single_address(text: str) -> str:
    """Return an address as a /32. Raises `CloudError` when it is none, or more than one."""
    try:
        found = ipaddress.IPv4Network(text)
    except ValueError:
        found = None
    if not found or found.num_addresses != 1 or found.network_address.is_unspecified:
        raise CloudError(f"--from {text}: ssh is let in from one IPv4 address, such as 203.0.113.7/32")
    return str(found)


def rule_description(owner: str) -> str:
    """Return the description of an owner's rule, in the letters that AWS takes."""
    return re.sub(r"[^a-zA-Z0-9. _:/()#,@\[\]+=&;{}!$*-]", "_", f"ssh from {owner}")[:255]


def _ssh_rule(port: int, ip_range: Resource) -> Resource:
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": [ip_range]}


def _ssh_rules(account: Account, group: str) -> list[tuple[int, Resource]]:
    """The rules that let addresses in: port and range."""
    found = call_with_retry("security group", account.ec2.describe_security_groups, GroupIds=[group])["SecurityGroups"]
    rules = [rule for one in found for rule in one["IpPermissions"] if rule["IpProtocol"] == "tcp"]
    return [(int(rule["FromPort"]), place) for rule in rules for place in rule.get("IpRanges", [])]


# --- the key pair ----------------------------------------------------------------------------------------------------


def has_key_pair(context: StackContext, name: str) -> bool:
    """Whether a key pair is there. Raises `CloudError` when one of its name is not ours."""
    where = [{"Name": "key-name", "Values": [name]}]
    for one in call("key pairs", context.account.ec2.describe_key_pairs, Filters=where)["KeyPairs"]:
        if not tags.is_ours(one):
            raise not_ours_error(f"key pair {name}", f"type: aws ec2 delete-key-pair --key-name {name}")
        return True
    return False


def ensure_key_pair(context: StackContext, name: str, public_key: str) -> None:
    """Make EC2 know a public key. Raises `CloudError`."""
    if not has_key_pair(context, name):
        context.log(f"importing key pair {name}")
        words = {"KeyName": name, "PublicKeyMaterial": public_key.encode()}
        specifications = context.tag_specifications("key-pair")
        if not context.create(
            "key pair", context.account.ec2.import_key_pair, TagSpecifications=specifications, **words
        ):
            has_key_pair(context, name)


def remove_key_pairs(context: StackContext) -> None:
    """Remove all key pairs of ours."""
    where = tags.make_filters({tags.STACK: tags.STACK_VALUE})
    for one in call("key pairs", context.account.ec2.describe_key_pairs, Filters=where)["KeyPairs"]:
        context.delete(f"key pair {one['KeyName']}", context.account.ec2.delete_key_pair, KeyName=one["KeyName"])
