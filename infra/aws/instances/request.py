"""What is asked of EC2 for machines, as plain data: built once, kept in the journal, and sent again unchanged.

Sources: AWS, RunInstances; "Ensuring idempotency"; "Elastic Fabric Adapter" (interfaces of p4d and p5: network card k,
device 0 on the first card and 1 on all others).
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infra.aws import tags
from infra.aws.market.instance_types import InstanceType
from infra.aws.stack.stack import Stack

from .amis import Image

DISK_GB = 150  # at least: code, environment, and what a machine without fast disks keeps of the data


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where machines are asked for: a zone, a type, a market ("spot" or "on-demand"), dollars an hour if known."""

    region: str
    zone: str
    type: str
    market: str
    price: float | None = None


@dataclass(frozen=True, kw_only=True)
class InstanceRequest:
    """What the machines of a job shall be, wherever they are. `expires` is in seconds since 1970."""

    job_uid: str
    job_name: str
    owner: str
    expires: float
    image: Image
    stack: Stack
    user_data: str
    host_key: str  # public half of the one in the user data
    disk_gb: int = DISK_GB
    use_placement_group: bool = True  # in a cluster placement group


def format_machine_range(names: Sequence[str]) -> str:
    """Return machine names as their tag says them: "0-15", or "3". They follow each other."""
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


def machine_name_in_range(machine_range: str, launch_index: int) -> str:
    """Return the name of the machine with this launch index, "" when the tag is none of ours."""
    first, _, last = machine_range.partition("-")
    if not first.isdecimal() or (last and not last.isdecimal()):
        return ""
    name = int(first) + launch_index
    return str(name) if name <= int(last or first) else ""


def placement_group_name(job_uid: str, number: int) -> str:
    """Return the name of an asking's placement group: each has its own, for an emptied one remembers nothing."""
    return f"imgnet-{job_uid}-{number}"


def build_run_instances(
    instance_request: InstanceRequest, instance_type: InstanceType, place: Place, names: Sequence[str], number: int
) -> dict[str, Any]:
    """Return the words of RunInstances for all of these machines or none, with the token of asking `number`."""
    request: dict[str, Any] = {
        "ImageId": instance_request.image.id,
        "InstanceType": place.type,
        "MinCount": len(names),
        "MaxCount": len(names),
        "KeyName": instance_request.stack.key_name,
        "IamInstanceProfile": {"Name": instance_request.stack.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "NetworkInterfaces": network_interfaces(
            instance_type, instance_request.stack.subnets[place.zone], instance_request.stack.security_group
        ),
        "BlockDeviceMappings": [
            {
                "DeviceName": instance_request.image.root_device,
                "Ebs": {
                    "VolumeSize": max(instance_request.disk_gb, instance_request.image.snapshot_gb),
                    "VolumeType": "gp3",
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        "UserData": instance_request.user_data,
    }
    if instance_request.use_placement_group:
        request["Placement"] = {"GroupName": placement_group_name(instance_request.job_uid, number)}
    kinds = ["instance", "volume", "network-interface"]
    if place.market == "spot":
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        kinds.append("spot-instances-request")
    request["TagSpecifications"] = tags.tag_specifications(kinds, machine_tags(instance_request, names, ""))
    token = make_client_token(instance_request.job_uid, number, place, request)
    request["TagSpecifications"] = tags.tag_specifications(kinds, machine_tags(instance_request, names, token))
    return {**request, "ClientToken": token}


def machine_tags(instance_request: InstanceRequest, names: Sequence[str], token: str) -> dict[str, str]:
    """Return the tags of machines and of all that comes with them."""
    return {
        tags.STACK: tags.STACK_VALUE, tags.JOB: instance_request.job_uid, tags.MACHINE: format_machine_range(names), tags.OWNER: instance_request.owner,
        tags.LAUNCH: token, tags.EXPIRES: tags.format_time(instance_request.expires), tags.NAME: f"imgnet {instance_request.job_name}",
    }  # fmt: skip


def network_interfaces(instance_type: InstanceType, subnet: str, group: str) -> list[dict[str, Any]]:
    """Return the network interfaces: all that speak EFA, on as many cards; a public address only where there is one."""
    found = []
    for card in range(
        max(1, min(instance_type.efa_interfaces, instance_type.network_cards) if instance_type.efa_interfaces else 1)
    ):
        one: dict[str, Any] = {"DeviceIndex": int(card > 0), "NetworkCardIndex": card, "SubnetId": subnet}
        one |= {
            "Groups": [group],
            "DeleteOnTermination": True,
            "InterfaceType": "efa" if instance_type.efa_interfaces else "interface",
        }
        found.append(one)
    if len(found) == 1:  # AWS gives none to a machine with several
        found[0]["AssociatePublicIpAddress"] = True
    return found


def make_client_token(job_uid: str, number: int, place: Place, request: dict[str, Any]) -> str:
    """Return the client token: the same for the same asking, whoever sends it again, and never for another."""
    frozen = json.dumps([job_uid, number, place.region, request], sort_keys=True)
    return base64.b32encode(hashlib.sha256(frozen.encode()).digest()).decode().rstrip("=").lower()
