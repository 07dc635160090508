"""The calls on instances that exist: describe, terminate, stop; and tags."""

import copy
import re
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.utils import passes_filter_dict
from support.simcloud.cloud import AwsError, Sim
from support.simcloud.lifecycle import STATES


def named(self: Any, ids: list[str]) -> list[Any]:
    """The instances of these ids, all of them or an error."""
    sim = Sim.current
    for one in ids:
        if not re.fullmatch(r"i-([0-9a-f]{8}|[0-9a-f]{17})", one):
            raise AwsError("InvalidInstanceID.Malformed", f'Invalid id: "{one}"')
    known = {one.id: one for one in sim.all(self.ec2_backend) if sim.visible(one)}
    missing = [one for one in ids if one not in known]
    if missing:
        words = f"ID '{missing[0]}' does" if len(missing) == 1 else f"IDs '{', '.join(missing)}' do"
        raise AwsError("InvalidInstanceID.NotFound", f"The instance {words} not exist")
    return [known[one] for one in dict.fromkeys(ids)]


def describe_instances(self: Any) -> ActionResult:
    """By ids or filters, in pages of instances (moto: of reservations)."""
    sim, filters = Sim.current, self._filters_from_querystring()
    ids, most = self._get_param("InstanceIds", []), self._get_param("MaxResults")
    if ids and most:
        message = "The parameter instancesSet cannot be used with the parameter maxResults"
        raise AwsError("InvalidParameterCombination", message)
    if most is not None and not 5 <= int(most) <= 1000:
        raise AwsError("InvalidParameterValue", f"Value ( {most} ) for parameter maxResults is invalid: 5 to 1000.")
    wanted = {one.id for one in named(self, ids)} if ids else None
    found = [
        (reservation, one)
        for reservation in self.ec2_backend.reservations.values()
        for one in reservation.instances
        if sim.visible(one) and (wanted is None or one.id in wanted) and passes_filter_dict(one, filters)
    ]
    start = int(self._get_param("NextToken") or 0)
    end = start + int(most or 1000)
    pages: dict[str, Any] = {}
    for reservation, one in found[start:end]:
        page = pages.setdefault(reservation.id, copy.copy(reservation))
        page.instances = [*(page.instances if page.instances is not reservation.instances else []), one]
    return ActionResult({"Reservations": list(pages.values()), "NextToken": str(end) if end < len(found) else None})


def describe_instance_status(self: Any) -> ActionResult:
    """Of the visible ones; a young one passes its checks only after it runs."""
    ids, everything = self._get_param("InstanceIds", []), self._get_bool_param("IncludeAllInstances", False)
    sim, filters = Sim.current, self._filters_from_querystring()
    found = named(self, ids) if ids else [one for one in sim.all(self.ec2_backend) if sim.visible(one)]
    shown = [one for one in found if (everything or one.state == "running") and passes_filter_dict(one, filters)]
    return ActionResult({"InstanceStatuses": shown})


def terminate_instances(self: Any) -> ActionResult:
    """All of them, or none if one is unknown or protected."""
    ids = self._get_param("InstanceIds", [])
    if not ids:
        raise AwsError("MissingParameter", "The request must contain the parameter InstanceId")
    found = named(self, ids)
    for one in found:
        if str(one.disable_api_termination).lower() == "true":
            message = f"The instance '{one.id}' may not be terminated. Modify its 'disableApiTermination' attribute."
            raise AwsError("OperationNotPermitted", message)
    return ActionResult({"TerminatingInstances": [_terminate(one) for one in found]})


def _terminate(instance: Any) -> dict[str, Any]:
    before = instance.state
    Sim.current.shut(instance, "Client.UserInitiatedShutdown", "User initiated shutdown", by="User initiated")
    return _change(instance, before)


def _change(instance: Any, before: str) -> dict[str, Any]:
    states = {"PreviousState": before, "CurrentState": instance.state}
    return {"InstanceId": instance.id, **{name: {"Code": STATES[to], "Name": to} for name, to in states.items()}}


def stop_instances(self: Any) -> ActionResult:
    """On-demand ones only: a one-time spot instance cannot be stopped."""
    found, done = named(self, self._get_param("InstanceIds", [])), []
    for one in found:
        if one.life.market == "spot":
            message = f"You can't stop the Spot Instance '{one.id}': it is associated with a one-time Spot request."
            raise AwsError("UnsupportedOperation", message)
    for one in found:
        before = one.state
        Sim.current.halt(one, "Client.UserInitiatedShutdown", "User initiated shutdown")
        done.append(_change(one, before))
    return ActionResult({"StoppingInstances": done})


def start_instances(self: Any) -> ActionResult:
    """Nothing here starts stopped instances."""
    raise AwsError("NotImplemented", "the simulated EC2 does not start stopped instances")


def create_tags(self: Any) -> ActionResult:
    """As moto does; an instance that is not there has no tags."""
    from support.simcloud import moto_patches

    named(self, [one for one in self._get_param("Resources", []) if one.startswith("i-")])
    answer: ActionResult = moto_patches.originals["create_tags"](self)
    return answer


ACTIONS = {
    "create_tags": create_tags,
    "describe_instances": describe_instances,
    "describe_instance_status": describe_instance_status,
    "start_instances": start_instances,
    "stop_instances": stop_instances,
    "terminate_instances": terminate_instances,
}
