"""Who may come in: the security group, ssh from known addresses alone, the key pair."""

import ipaddress
import re
from collections.abc import Callable, Sequence

from infra.aws import tags
from infra.aws.client import Account, call, call_soon, pages
from infra.aws.errors import CloudError
from infra.aws.journal import Journal

from .resources import NAME, Thing, Work, nobody, not_ours

SSH = 22
ANYWHERE = "0.0.0.0/0"
NEW = {"IpPermissions": [], "IpPermissionsEgress": [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": ANYWHERE}]}]}


# --- the security group ----------------------------------------------------------------------------------------------


def find_group(work: Work, vpc: str) -> Thing | None:
    """Return our security group. Raises `CloudError` when there is one of its name that is not ours."""
    where = tags.filters({}, vpc_id=[vpc], group_name=[NAME])
    for one in pages("security groups", work.account.ec2, "describe_security_groups", "SecurityGroups", Filters=where):
        if not tags.ours(one):
            raise not_ours(f"security group {NAME} in {vpc}", "rename it, or remove it")
        return one
    return None


def complete(group: Thing) -> bool:
    """Whether a group lets all in and out that is between its own machines, and all out."""
    return not _lacking(group, "in") and not _lacking(group, "out")


def ensure_group(work: Work, vpc: str) -> str:
    """Return our security group, made if it is not there; who may log in is another matter. Raises `CloudError`."""
    ec2, group = work.account.ec2, find_group(work, vpc)
    if not group:
        work.say(f"making security group {NAME}")
        words = {"GroupName": NAME, "Description": "imgnet-cluster: machines of jobs", "VpcId": vpc}
        specifications = work.specifications("security-group")
        made = work.make("security group", ec2.create_security_group, TagSpecifications=specifications, **words)
        group = {"GroupId": made["GroupId"], **NEW} if made else find_group(work, vpc)
    if not group:
        raise CloudError(f"security group {NAME} in {vpc}: AWS has it and does not show it; type it again")
    for way, function in (("in", ec2.authorize_security_group_ingress), ("out", ec2.authorize_security_group_egress)):
        for rule in _lacking(group, way):
            work.make(f"rule of the security group ({way})", function, GroupId=group["GroupId"], IpPermissions=[rule])
    return str(group["GroupId"])


def remove_group(work: Work, vpc: str) -> None:
    """Remove our security groups of a network."""
    where = tags.filters({tags.STACK: tags.OURS}, vpc_id=[vpc])
    for one in pages("security groups", work.account.ec2, "describe_security_groups", "SecurityGroups", Filters=where):
        work.drop("security group", work.account.ec2.delete_security_group, GroupId=one["GroupId"])


def _lacking(group: Thing, way: str) -> list[Thing]:
    """The rules that are not there: EFA wants all with itself in both directions, said by group."""
    rules = group["IpPermissions" if way == "in" else "IpPermissionsEgress"]
    everything = [one for one in rules if one["IpProtocol"] == "-1"]
    groups = {pair["GroupId"] for one in everything for pair in one.get("UserIdGroupPairs", [])}
    ranges = {place["CidrIp"] for one in everything for place in one.get("IpRanges", [])}
    found: list[Thing] = []
    if group["GroupId"] not in groups:
        found.append({"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]})
    if way == "out" and ANYWHERE not in ranges:
        found.append({"IpProtocol": "-1", "IpRanges": [{"CidrIp": ANYWHERE}]})
    return found


# --- ssh -------------------------------------------------------------------------------------------------------------


def ssh_addresses(account: Account, group: str) -> list[str]:
    """Return the addresses that may log in. Raises `CloudError`."""
    return sorted({place["CidrIp"] for _, place in _doors(account, group)})


def let_in(
    account: Account,
    group: str,
    address: str,
    owner: str,
    *,
    ports: Sequence[int] = (SSH,),
    say: Callable[[str], None] = nobody,
    journal: Journal | None = None,
) -> None:
    """Let one address (a /32) log in, in the place of this owner's old ones. Raises `CloudError`."""
    address, mark, doors = one_address(address), description(owner), _doors(account, group)
    work, there = Work(account, say, journal), [(port, place["CidrIp"]) for port, place in doors]
    for port in ports:
        if (port, address) not in there:
            say(f"letting in ssh from {address}")
            rule = _door(port, {"CidrIp": address, "Description": mark})
            function = account.ec2.authorize_security_group_ingress
            work.make(f"ssh from {address}", function, GroupId=group, IpPermissions=[rule])
    for port, place in doors:  # after the new one: a crash between the two locks nobody out
        if place.get("Description") == mark and place["CidrIp"] != address:
            say(f"no more ssh from {place['CidrIp']}, where {owner} was before")
            rule = _door(port, {"CidrIp": place["CidrIp"]})
            function = account.ec2.revoke_security_group_ingress
            work.drop(f"ssh from {place['CidrIp']}", function, GroupId=group, IpPermissions=[rule])


def one_address(text: str) -> str:
    """Return an address as a /32. Raises `CloudError` when it is none, or more than one."""
    try:
        found = ipaddress.IPv4Network(text)
    except ValueError:
        found = None
    if not found or found.num_addresses != 1 or found.network_address.is_unspecified:
        raise CloudError(f"--from {text}: ssh is let in from one IPv4 address, such as 203.0.113.7/32")
    return str(found)


def description(owner: str) -> str:
    """Return the description of an owner's rule, in the letters that AWS takes."""
    return re.sub(r"[^a-zA-Z0-9. _:/()#,@\[\]+=&;{}!$*-]", "_", f"ssh from {owner}")[:255]


def _door(port: int, place: Thing) -> Thing:
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": [place]}


def _doors(account: Account, group: str) -> list[tuple[int, Thing]]:
    """The rules that let addresses in: port and range."""
    found = call_soon("security group", account.ec2.describe_security_groups, GroupIds=[group])["SecurityGroups"]
    rules = [rule for one in found for rule in one["IpPermissions"] if rule["IpProtocol"] == "tcp"]
    return [(int(rule["FromPort"]), place) for rule in rules for place in rule.get("IpRanges", [])]


# --- the key pair ----------------------------------------------------------------------------------------------------


def has_key(work: Work, name: str) -> bool:
    """Whether a key pair is there. Raises `CloudError` when one of its name is not ours."""
    where = [{"Name": "key-name", "Values": [name]}]
    for one in call("key pairs", work.account.ec2.describe_key_pairs, Filters=where)["KeyPairs"]:
        if not tags.ours(one):
            raise not_ours(f"key pair {name}", f"type: aws ec2 delete-key-pair --key-name {name}")
        return True
    return False


def ensure_key(work: Work, name: str, public: str) -> None:
    """Make EC2 know a public key. Raises `CloudError`."""
    if not has_key(work, name):
        work.say(f"importing key pair {name}")
        words = {"KeyName": name, "PublicKeyMaterial": public.encode()}
        specifications = work.specifications("key-pair")
        if not work.make("key pair", work.account.ec2.import_key_pair, TagSpecifications=specifications, **words):
            has_key(work, name)


def remove_keys(work: Work) -> None:
    """Remove all key pairs of ours."""
    where = tags.filters({tags.STACK: tags.OURS})
    for one in call("key pairs", work.account.ec2.describe_key_pairs, Filters=where)["KeyPairs"]:
        work.drop(f"key pair {one['KeyName']}", work.account.ec2.delete_key_pair, KeyName=one["KeyName"])
