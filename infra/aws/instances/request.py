"""Builds the RunInstances request for a job's machines as plain data.

A request is built once, recorded in the journal, and sent again unchanged when the outcome is unknown.

Sources: AWS, RunInstances; "Ensuring idempotency"; "Elastic Fabric Adapter" (network interfaces of p4d and p5: network
card k, device index 0 on the first card and 1 on all others).
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.aws import tags
from infra.aws.launch_request import NetworkInterfaceParameters, Place, RunInstances, UntaggedRunInstances
from infra.aws.market.instance_types import InstanceType
from infra.aws.stack.stack import Stack

from .amis import Image

DISK_GB = 150  # least disk size: code, environment, and the data of a machine without fast local disks


@dataclass(frozen=True, kw_only=True)
class InstanceRequest:
    """What the machines of a job need, apart from their place."""

    job_uid: str
    job_name: str
    owner: str
    expires: float  # seconds since 1970
    image: Image
    stack: Stack
    user_data: str
    host_key: str  # public half of the boot host key in the user data
    disk_gb: int = DISK_GB
    use_placement_group: bool = True  # in a cluster placement group


def format_machine_range(names: Sequence[str]) -> str:
    """Return consecutive machine names as a tag value: "0-15", or "3"."""
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


def machine_name_in_range(machine_range: str, launch_index: int) -> str:
    """Return the name of machine number `launch_index` in a range such as 0-15, "" if there is no such machine."""
    first, _, last = machine_range.partition("-")
    if not first.isdecimal() or (last and not last.isdecimal()):
        return ""
    name = int(first) + launch_index
    return str(name) if name <= int(last or first) else ""


def placement_group_name(job_uid: str, number: int) -> str:
    """Return the name of the placement group of request `number`. Each request has a new group."""
    return f"imgnet-{job_uid}-{number}"


def build_run_instances(
    instance_request: InstanceRequest, instance_type: InstanceType, place: Place, names: Sequence[str], number: int
) -> RunInstances:
    """Return the parameters of RunInstances for all of the named machines or none.

    They include the client token of request `number`.
    """
    stack = instance_request.stack
    image = instance_request.image
    resource_types = ["instance", "volume", "network-interface"]
    if place.market == "spot":
        resource_types.append("spot-instances-request")
    request: UntaggedRunInstances = {
        "ImageId": image.id,
        "InstanceType": place.type,
        "MinCount": len(names),
        "MaxCount": len(names),
        "KeyName": stack.key_name,
        "IamInstanceProfile": {"Name": stack.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "NetworkInterfaces": network_interfaces(instance_type, stack.subnets[place.zone], stack.security_group),
        "BlockDeviceMappings": [
            {
                "DeviceName": image.root_device,
                "Ebs": {
                    "VolumeSize": max(instance_request.disk_gb, image.snapshot_gb),
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
    if place.market == "spot":
        request["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }

    def specifications(token: str) -> list[tags.TagSpecification]:
        return tags.tag_specifications(resource_types, machine_tags(instance_request, names, token))

    # The token is a hash of the request, and is itself a tag: it is computed with that tag empty.
    token = make_client_token(
        instance_request.job_uid, number, place, {**request, "TagSpecifications": specifications("")}
    )
    return {**request, "TagSpecifications": specifications(token), "ClientToken": token}


def machine_tags(instance_request: InstanceRequest, names: Sequence[str], token: str) -> dict[str, str]:
    """Return the tags of the machines and of the disks, network interfaces and spot requests that come with them."""
    return {
        tags.STACK: tags.STACK_VALUE,
        tags.JOB: instance_request.job_uid,
        tags.MACHINE: format_machine_range(names),
        tags.OWNER: instance_request.owner,
        tags.LAUNCH: token,
        tags.EXPIRES: tags.format_time(instance_request.expires),
        tags.NAME: f"imgnet {instance_request.job_name}",
    }


def network_interfaces(instance_type: InstanceType, subnet: str, group: str) -> list[NetworkInterfaceParameters]:
    """Return the network interfaces of a machine: one for each network card that supports EFA, one at least.

    A machine with one interface gets a public address. AWS gives none to a machine with several.
    """
    has_efa = bool(instance_type.efa_interfaces)
    count = max(1, min(instance_type.efa_interfaces, instance_type.network_cards)) if has_efa else 1
    interfaces: list[NetworkInterfaceParameters] = [
        {
            "DeviceIndex": int(card > 0),
            "NetworkCardIndex": card,
            "SubnetId": subnet,
            "Groups": [group],
            "DeleteOnTermination": True,
            "InterfaceType": "efa" if has_efa else "interface",
        }
        for card in range(count)
    ]
    if len(interfaces) == 1:
        interfaces[0]["AssociatePublicIpAddress"] = True
    return interfaces


def make_client_token(job_uid: str, number: int, place: Place, request: Mapping[str, object]) -> str:
    """Return the client token of a request: the same whenever it is sent again, and different for every other."""
    frozen = json.dumps([job_uid, number, place.region, request], sort_keys=True)
    return base64.b32encode(hashlib.sha256(frozen.encode()).digest()).decode().rstrip("=").lower()
