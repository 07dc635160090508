"""Builds the request for a job's machines, as the journal records it.

A request is built once, recorded, and sent again unchanged when the outcome is unknown.

Sources: AWS, RunInstances; "Ensuring idempotency"; "Launch instances using Capacity Blocks"; "Launch instances into
Capacity Reservations in a group"; "Maximize network bandwidth on Amazon EC2 instances with multiple network cards" (an
EFA-only interface is device 0 of its card, and never the primary interface). SkyPilot makes it device 1.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from infra.aws import tags
from infra.aws.journal_events import LaunchRequest
from infra.aws.launch_request import Internet, Place
from infra.aws.market.instance_types import InstanceType
from infra.aws.stack.role import ROLE_NAME
from infra.aws.stack.stack import Stack
from infra.aws.tags import Resource

from .amis import Image

EFA_ONLY_DEVICES = (0, 1)  # what the device index of an EFA-only interface may be; the second, if EC2 refuses the first


@dataclass(frozen=True, kw_only=True)
class InstanceRequest:
    """What the machines of a job need, apart from their place."""

    own_tags: tags.Tags  # of the machines; they get those of their request too
    image: Image
    stack: Stack
    user_data: str
    internet: Internet = Internet.PUBLIC
    use_placement_group: bool = True  # in a cluster placement group
    efa_only_device: int = EFA_ONLY_DEVICES[0]


def build_launch_request(
    instance_request: InstanceRequest,
    instance_type: InstanceType,
    place: Place,
    names: Sequence[str],
    number: int,
    placement_group: str = "",
) -> LaunchRequest:
    """Return request `number` of a job, for all of the named machines or none.

    `placement_group` is the group of an earlier request that the machines join; else they get a new one, unless their
    reservation has one.
    """
    stack, image, job_uid = instance_request.stack, instance_request.image, instance_request.own_tags[tags.JOB]
    resource_types = ["instance", "volume", "network-interface"]
    parameters: Resource = {
        "ImageId": image.id,
        "InstanceType": place.type,
        "MinCount": len(names),
        "MaxCount": len(names),
        "KeyName": stack.key_name,
        "IamInstanceProfile": {"Name": ROLE_NAME},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "NetworkInterfaces": _network_interfaces(instance_request, instance_type, place.zone),
        "BlockDeviceMappings": [
            {
                "DeviceName": device,
                "Ebs": {"VolumeSize": gigabytes, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
            }
            for device, gigabytes in image.machine_disks.items()  # all: an image of the user's may keep one at the end
        ],
        "UserData": instance_request.user_data,
    }
    new_group = ""
    placement_group = placement_group or place.placement_group
    if not placement_group and instance_request.use_placement_group:
        placement_group = new_group = f"imgnet-{job_uid}-{number}"
    if placement_group:
        parameters["Placement"] = {"GroupName": placement_group}
    if place.market == "spot":
        resource_types.append("spot-instances-request")
        parameters["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
    elif place.market == "capacity-block":
        parameters["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    if place.reservation:
        is_group = place.reservation.startswith("arn:")
        target_key = "CapacityReservationResourceGroupArn" if is_group else "CapacityReservationId"
        reservation: Resource = {"CapacityReservationTarget": {target_key: place.reservation}}
        if is_group and place.market == "on-demand":  # else EC2 buys what the group lacks, and nothing tells it
            reservation["CapacityReservationPreference"] = "capacity-reservations-only"
        parameters["CapacityReservationSpecification"] = reservation

    def specifications(token: str) -> list[Resource]:
        """Return the tags of the machines and of the disks, network interfaces and spot requests with them."""
        machines = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        machine_tags = {**instance_request.own_tags, tags.MACHINE: machines, tags.LAUNCH: token}
        return tags.tag_specifications(resource_types, machine_tags)

    # The token is a hash of the request, and is itself a tag: it is computed with that tag empty.
    hashed = [job_uid, number, place.region, {**parameters, "TagSpecifications": specifications("")}]
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).digest()
    token = base64.b32encode(digest).decode().rstrip("=").lower()
    return LaunchRequest(
        number=number,
        place=place,
        names=tuple(names),
        parameters={**parameters, "TagSpecifications": specifications(token), "ClientToken": token},
        new_group=new_group,
        internet=instance_request.internet,
        ssh_user=image.ssh_user,
        ssh_port=image.ssh_port,
    )


def _network_interfaces(request: InstanceRequest, instance_type: InstanceType, zone: str) -> list[Resource]:
    """Return the network interfaces of a machine: the primary one, and one on each further card that takes EFA.

    Those on further cards are EFA only, so that the machine has one IP address and no asymmetric routes. A machine with
    one interface gets its public address, if it is to have one, at once. EC2 accepts no request that asks for one
    for several interfaces: these machines get theirs when they run (infra/aws/instances/internet.py).
    """
    interfaces: list[Resource] = [
        {
            "DeviceIndex": request.efa_only_device if card else 0,
            "NetworkCardIndex": card,
            "SubnetId": request.stack.subnets[zone],
            "Groups": [request.stack.security_group],
            "DeleteOnTermination": True,
            "InterfaceType": "efa-only" if card else "efa" if card in instance_type.efa_cards else "interface",
        }
        for card in instance_type.interface_cards
    ]
    if len(interfaces) == 1:
        # Said in both cases: a subnet of the user's may give addresses by itself.
        interfaces[0]["AssociatePublicIpAddress"] = request.internet is Internet.PUBLIC
    return interfaces
