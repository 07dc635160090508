"""Elastic addresses, and what a terminated instance lets go of."""

from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from support.simcloud import placement_groups
from support.simcloud.cloud import AwsError, Sim


def release(instance: Any) -> None:
    """A terminated instance lets go of its interfaces, disks and elastic address."""
    backend = instance.ec2_backend
    for nic in list(instance.nics.values()):
        for address in backend.addresses:
            if address.eni is nic:
                _unmap(address)
        nic.instance, nic.attachment_id, nic.status = None, None, "available"
        if nic.delete_on_termination:
            backend.enis.pop(nic.id, None)
            for one in nic.private_ip_addresses:
                nic.subnet.del_subnet_ip(one["PrivateIpAddress"])
    instance.nics = {}
    instance.teardown_defaults()
    backend.iam_instance_profile_associations.pop(instance.id, None)


def allocate_address(self: Any) -> ActionResult:
    """At most `max_addresses` of a region, each of which costs from now on."""
    sim = Sim.current
    if len(self.ec2_backend.addresses) >= sim.max_addresses:
        raise AwsError("AddressLimitExceeded", "The maximum number of addresses has been reached.")
    answer = placement_groups.then("allocate_address", self)
    address = self.ec2_backend.addresses[-1]
    address.own = address.public_ip
    sim.meter.start(address.allocation_id, "addresses", sim.meter.ADDRESS)
    return answer


def associate_address(self: Any) -> ActionResult:
    """The elastic address becomes the loopback address of the machine, so that it leads there."""
    from support.simcloud import instances

    for one in instances.named(self, [id for id in [self._get_param("InstanceId")] if id]):
        if one.state not in ("running", "stopped"):
            message = f"The {one.state} instance '{one.id}' is not in a valid state for this operation."
            raise AwsError("InvalidInstanceID", message)
        if len(one.nics) > 1:
            message = f"There are multiple interfaces attached to instance '{one.id}'. Please specify an interface ID"
            raise AwsError("InvalidInstanceID", f"{message} for the operation instead.")
    answer = placement_groups.then("associate_address", self)
    for address in self.ec2_backend.addresses:
        if address.eni is not None and address.public_ip != address.eni.private_ip_address:
            address.public_ip = address.eni.public_ip = address.eni.private_ip_address
            if address.eni.instance is not None:
                Sim.current.meter.stop(f"ip-{address.eni.instance.id}")
    return answer


def disassociate_address(self: Any) -> ActionResult:
    """It is its own again."""
    found = [one for one in self.ec2_backend.addresses if one.association_id == self._get_param("AssociationId")]
    if not self._get_param("AssociationId") or not found:
        id = self._get_param("AssociationId")
        raise AwsError("InvalidAssociationID.NotFound", f"The association ID '{id}' does not exist")
    _unmap(found[0])
    return EmptyResult()


def _unmap(address: Any) -> None:
    address.eni.public_ip = None
    address.public_ip, address.eni, address.instance, address.association_id = address.own, None, None, None


def release_address(self: Any) -> ActionResult:
    """Not while it is somebody's."""
    id = self._get_param("AllocationId")
    for address in self.ec2_backend.addresses:
        if address.allocation_id == id and address.eni is not None:
            raise AwsError("InvalidIPAddress.InUse", f"Address {address.public_ip} is in use.")
    answer = placement_groups.then("release_address", self)
    Sim.current.meter.stop(id)
    return answer


ACTIONS = {
    "allocate_address": allocate_address,
    "associate_address": associate_address,
    "disassociate_address": disassociate_address,
    "release_address": release_address,
}
