"""The calls on existing instances: describe, terminate, stop, and tags."""

import base64
import copy
from collections.abc import Callable
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.utils import passes_filter_dict
from support.simcloud.cloud import SimulatedAws, call_moto, ec2_call, refuse_if
from support.simcloud.lifecycle import STATES


def find_instances(self: Any, ids: list[str]) -> list[Any]:
    """Return the visible instances of these ids. Raises `AwsError` when one is missing."""
    sim = SimulatedAws.current
    known = {instance.id: instance for instance in sim.all_instances(self.ec2_backend) if sim.is_visible(instance)}
    missing = [id for id in ids if id not in known]
    subject = f"ID '{''.join(missing)}' does" if len(missing) == 1 else f"IDs '{', '.join(missing)}' do"
    refuse_if(missing, "InvalidInstanceID.NotFound", f"The instance {subject} not exist")
    return [known[id] for id in dict.fromkeys(ids)]


@ec2_call
def describe_instances(self: Any) -> ActionResult:
    """Describe the visible instances of these ids or filters, in pages of instances, where moto pages reservations."""
    sim = SimulatedAws.current
    filters = self._filters_from_querystring()
    ids = self._get_param("InstanceIds", [])
    found = find_instances(self, ids) if ids else filter(sim.is_visible, sim.all_instances(self.ec2_backend))
    matches = [instance.id for instance in found if passes_filter_dict(instance, filters)]
    start = int(self._get_param("NextToken") or 0)
    end = start + int(self._get_param("MaxResults") or 1000)
    page = set(matches[start:end])
    reservations = []
    for reservation in self.ec2_backend.reservations.values():
        instances = [instance for instance in reservation.instances if instance.id in page]
        if instances:
            reservations.append(copy.copy(reservation))
            reservations[-1].instances = instances
    next_token = str(end) if end < len(matches) else None
    return ActionResult({"Reservations": reservations, "NextToken": next_token})


@ec2_call
def terminate_instances(self: Any) -> ActionResult:
    return _end(self, "TerminatingInstances", SimulatedAws.current.shut_down)


def _end(self: Any, name: str, end: Callable[[Any, str, str], None]) -> ActionResult:
    """End the instances of a request; return their changes of state under `name`."""
    rows = []
    for instance in find_instances(self, self._get_param("InstanceIds", [])):
        states = {"PreviousState": instance.state}
        end(instance, "Client.UserInitiatedShutdown", "User initiated shutdown")
        states["CurrentState"] = instance.state
        changes = {key: {"Code": STATES[state], "Name": state} for key, state in states.items()}
        rows.append({"InstanceId": instance.id, **changes})
    return ActionResult({name: rows})


@ec2_call
def stop_instances(self: Any) -> ActionResult:
    return _end(self, "StoppingInstances", SimulatedAws.current.stop_instance)


@ec2_call
def create_tags(self: Any) -> ActionResult:
    """Create tags as moto does, but refuse those of an unknown instance."""
    find_instances(self, [id for id in self._get_param("Resources", []) if id.startswith("i-")])
    return call_moto("create_tags", self)


@ec2_call
def get_console_output(self: Any) -> ActionResult:
    """Return what a machine has printed. Without a machine behind the instance, nothing."""
    (instance,) = find_instances(self, [self._get_param("InstanceId")])
    machines = SimulatedAws.current.machines
    text = machines.console_of(instance.id) if machines else ""
    output = base64.b64encode(text.encode()).decode()
    return ActionResult({"InstanceId": instance.id, "Timestamp": SimulatedAws.current.now(), "Output": output})
