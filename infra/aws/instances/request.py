"""Builds the RunInstances request for a job's machines as plain data.

A request is built once, recorded in the journal, and sent again unchanged when the outcome is unknown.

Sources: AWS, RunInstances; "Ensuring idempotency"; "Launch instances using Capacity Blocks"; "Launch instances into
Capacity Reservations in a group"; "Maximize network bandwidth on Amazon EC2 instances with multiple network cards" (an
EFA-only interface is device 0 of its card, and never the primary interface).
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.aws import tags
from infra.aws.launch_request import (
    Internet,
    NetworkInterfaceParameters,
    Place,
    ReservationTargetParameters,
    RunInstances,
    UntaggedRunInstances,
)
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
    terms: str = ""  # what the job may rent and spend, as a tag
    disk_gb: int = DISK_GB
    internet: Internet = Internet.PUBLIC
    use_placement_group: bool = True  # in a cluster placement group


def format_machine_range(names: Sequence[str]) -> str:
    """Return the tag value of machines that have no names yet, "0-15". A single machine has its name at once: "3"."""
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


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
        "NetworkInterfaces": network_interfaces(
            instance_type,
            stack.subnets[place.zone],
            stack.security_group,
            is_public=instance_request.internet is Internet.PUBLIC,
        ),
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
    elif place.market == "capacity-block":
        request["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    if place.reservation:
        request["CapacityReservationSpecification"] = {"CapacityReservationTarget": _target(place.reservation.id)}
        if place.reservation.placement_group:
            request["Placement"] = {"GroupName": place.reservation.placement_group}

    def specifications(token: str) -> list[tags.TagSpecification]:
        return tags.tag_specifications(resource_types, machine_tags(instance_request, names, token))

    # The token is a hash of the request, and is itself a tag: it is computed with that tag empty.
    token = make_client_token(
        instance_request.job_uid, number, place, {**request, "TagSpecifications": specifications("")}
    )
    return {**request, "TagSpecifications": specifications(token), "ClientToken": token}


def _target(reservation_id: str) -> ReservationTargetParameters:
    """Return the reservation, or the group of reservations, as RunInstances takes it."""
    if reservation_id.startswith("arn:"):
        return {"CapacityReservationResourceGroupArn": reservation_id}
    return {"CapacityReservationId": reservation_id}


def machine_tags(instance_request: InstanceRequest, names: Sequence[str], token: str) -> dict[str, str]:
    """Return the tags of the machines and of the disks, network interfaces and spot requests that come with them."""
    return {
        tags.STACK: tags.STACK_VALUE,
        tags.JOB: instance_request.job_uid,
        tags.MACHINE: format_machine_range(names),
        tags.OWNER: instance_request.owner,
        tags.LAUNCH: token,
        tags.EXPIRES: tags.format_time(instance_request.expires),
        tags.BOOT_KEY: instance_request.host_key,
        tags.TERMS: instance_request.terms,
        tags.NAME: f"imgnet {instance_request.job_name}",
    }


def network_interfaces(
    instance_type: InstanceType, subnet: str, group: str, is_public: bool
) -> list[NetworkInterfaceParameters]:
    """Return the network interfaces of a machine: the primary one, and one on each further card that takes EFA.

    Those on further cards are EFA only, so that the machine has one IP address and no asymmetric routes. With
    `is_public`, a machine with one interface gets a public address at once. EC2 accepts no request that asks for one
    for several interfaces: these machines get theirs when they run (infra/aws/instances/internet.py).
    """
    interfaces: list[NetworkInterfaceParameters] = [
        {
            "DeviceIndex": 0,
            "NetworkCardIndex": card,
            "SubnetId": subnet,
            "Groups": [group],
            "DeleteOnTermination": True,
            "InterfaceType": "efa-only" if card else "efa" if card in instance_type.efa_cards else "interface",
        }
        for card in instance_type.interface_cards
    ]
    if is_public and len(interfaces) == 1:
        interfaces[0]["AssociatePublicIpAddress"] = True
    return interfaces


def make_client_token(job_uid: str, number: int, place: Place, request: Mapping[str, object]) -> str:
    """Return the client token of a request: the same whenever it is sent again, and different for every other."""
    frozen = json.dumps([job_uid, number, place.region, request], sort_keys=True)
    return base64.b32encode(hashlib.sha256(frozen.encode()).digest()).decode().rstrip("=").lower()
