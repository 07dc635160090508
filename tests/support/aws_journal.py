"""Journals of rented machines, written by hand: events at chosen times."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra.aws.instances.amis import Image
from infra.aws.instances.request import InstanceRequest, build_launch_request
from infra.aws.journal_events import (
    JournalEvent,
    LaunchedMachine,
    LaunchRequest,
    RequestGranted,
    encode_event,
)
from infra.aws.launch_request import Place
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.stack.stack import Stack


def write_journal(path: Path, *events: JournalEvent) -> None:
    """Write a journal with these events."""
    path.write_text("".join(json.dumps(encode_event(event)) + "\n" for event in events))


def launch_request(
    number: int, place: Place, names: Sequence[str], time: float = 0.0, *, has_overhead: bool = False
) -> LaunchRequest:
    """Return a request for machines. `has_overhead`: with a disk of 100 GB each, which costs money too."""
    image = Image("ami-1", "ubuntu", 22, 0, "/dev/sda1", "", "")
    stack = Stack(place.region, "vpc-1", {place.zone: "subnet-1"}, "sg-1", "fs-1", "key")
    instance_request = InstanceRequest(
        job_uid="job-1-0", job_name="job-1", owner="ann", expires=0.0, image=image, stack=stack, user_data="",
        host_key="",
    )  # fmt: skip
    request = build_launch_request(instance_request, BUILTIN_TYPES[place.type], place, names, number)
    request.parameters["NetworkInterfaces"] = []
    request.parameters["BlockDeviceMappings"] = [{"Ebs": {"VolumeSize": 100}}] if has_overhead else []
    return replace(request, time=time, new_group="")


def request_granted(number: int, *machines: tuple[str, str, float], time: float = 0.0) -> RequestGranted:
    """Return the grant of a request, with machines as (instance ID, name, launch time)."""
    return RequestGranted(
        time=time,
        number=number,
        machines=tuple(LaunchedMachine(id=id, name=name, launched=launched) for id, name, launched in machines),
    )
