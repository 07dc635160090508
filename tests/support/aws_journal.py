"""Journals of rented machines, written by hand: events at chosen times."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra.aws import tags
from infra.aws.instances.amis import Image
from infra.aws.instances.request import InstanceRequest, build_launch_request
from infra.aws.instances.user_data import build_user_data
from infra.aws.journal_events import JournalEvent, LaunchedMachine, LaunchRequest, RequestGranted, encode_event
from infra.aws.launch_request import Internet, Place
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.stack.stack import Stack

STACK = Stack(
    region="us-east-1",
    vpc="vpc-0a1",
    subnets={"us-east-1a": "subnet-0a1", "us-east-1b": "subnet-0b2"},
    security_group="sg-0c3",
    file_system="fs-0d4",
    key_name="imgnet-0123456789ab",
    access_point="fsap-0e5",
)
IMAGE = Image("ami-0f6", "ubuntu", 22, (("/dev/sda1", 75),), "Deep Learning", "/opt/pytorch/bin/python")
INSTANCE_REQUEST = InstanceRequest(
    own_tags={
        **tags.job_tags("job-3-9073e811", "job-3", "ann", 1_795_298_400.0, {}),  # until 2026-11-21 22:00 UTC
        tags.BOOT_KEY: "ssh-ed25519 AAAA",
        tags.TERMS: '{"machines":2}',
    },
    image=IMAGE,
    stack=STACK,
    user_data="#cloud-config",
)


def user_data(private_key: str, public_key: str, limit_seconds: int = 600, image: Image = IMAGE) -> str:
    return build_user_data(STACK, image, 1, Internet.PUBLIC, (private_key, public_key), poweroff_seconds=limit_seconds)


def write_journal(path: Path, *events: JournalEvent) -> None:
    path.write_text("".join(json.dumps(encode_event(event)) + "\n" for event in events))


def launch_request(
    number: int, place: Place, names: Sequence[str], time: float = 0.0, *, has_overhead: bool = False
) -> LaunchRequest:
    """Return a request for machines. `has_overhead`: with a disk of 100 GB each, which costs money too."""
    stack = replace(STACK, region=place.region, subnets={place.zone: "subnet-1"})
    instance_request = replace(INSTANCE_REQUEST, stack=stack)
    request = build_launch_request(instance_request, BUILTIN_TYPES[place.type], place, names, number)
    request.parameters["NetworkInterfaces"] = []
    request.parameters["BlockDeviceMappings"] = [{"Ebs": {"VolumeSize": 100}}] if has_overhead else []
    return replace(request, time=time, new_group="")


def request_granted(number: int, *machines: tuple[str, str, float], time: float = 0.0) -> RequestGranted:
    """Return the grant of a request, with machines as (instance ID, name, launch time)."""
    launched = tuple(LaunchedMachine(id=id, name=name, launched=launched) for id, name, launched in machines)
    return RequestGranted(time=time, number=number, machines=launched)
