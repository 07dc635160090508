"""Elastic addresses, and the resources that a terminated instance releases."""

from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from support.simcloud.cloud import SimulatedAws, ec2_call, moto_answer, refuse_if

MAX_ADDRESSES = 5  # of a region


def release_resources(instance: Any) -> None:
    """Release the interfaces, disks and elastic address of a terminated instance."""
    backend = instance.ec2_backend
    for interface in list(instance.nics.values()):
        for address in backend.addresses:
            if address.eni is interface:
                disassociate(address)
        interface.instance = None
        interface.attachment_id = None
        interface.status = "available"
        if interface.delete_on_termination:
            backend.enis.pop(interface.id, None)
            for private_address in interface.private_ip_addresses:
                interface.subnet.del_subnet_ip(private_address["PrivateIpAddress"])
    for disk in instance.block_device_mapping.values():
        if disk.delete_on_termination:
            SimulatedAws.current.meter.stop(disk.volume_id)
    instance.nics = {}
    instance.teardown_defaults()
    backend.iam_instance_profile_associations.pop(instance.id, None)


@ec2_call
def allocate_address(self: Any) -> ActionResult:
    """Allocate one of at most MAX_ADDRESSES of a region. It costs from now on."""
    sim = SimulatedAws.current
    is_full = len(self.ec2_backend.addresses) >= MAX_ADDRESSES
    refuse_if(is_full, "AddressLimitExceeded", "The maximum number of addresses has been reached.")
    result = moto_answer("allocate_address", self)
    address = self.ec2_backend.addresses[-1]
    address.own_ip = address.public_ip
    sim.meter.start(address.allocation_id, "addresses", sim.meter.ADDRESS_DOLLARS_PER_HOUR)
    return result


@ec2_call
def associate_address(self: Any) -> ActionResult:
    """Associate an elastic address. It becomes the loopback address of the machine, so that it leads there."""
    result = moto_answer("associate_address", self)
    for address in self.ec2_backend.addresses:
        interface = address.eni
        if interface is not None and address.public_ip != interface.private_ip_address:
            address.public_ip = interface.public_ip = interface.private_ip_address
            if interface.instance is not None:
                SimulatedAws.current.meter.stop(f"ip-{interface.instance.id}")
    return result


@ec2_call
def disassociate_address(self: Any) -> ActionResult:
    """Disassociate an elastic address, which gets its own IP address back."""
    association_id = self._get_param("AssociationId")
    addresses = [address for address in self.ec2_backend.addresses if address.association_id == association_id]
    refuse_if(not addresses, "InvalidAssociationID.NotFound", f"There is no association '{association_id}'.")
    disassociate(addresses[0])
    return EmptyResult()


def disassociate(address: Any) -> None:
    """Take an elastic address from its interface."""
    address.eni.public_ip = None
    address.public_ip = address.own_ip
    address.eni = None
    address.instance = None
    address.association_id = None


@ec2_call
def release_address(self: Any) -> ActionResult:
    """Release an elastic address. It is refused while the address is associated."""
    allocation_id = self._get_param("AllocationId")
    for address in self.ec2_backend.addresses:
        is_in_use = address.allocation_id == allocation_id and address.eni is not None
        refuse_if(is_in_use, "InvalidIPAddress.InUse", f"Address {address.public_ip} is in use.")
    result = moto_answer("release_address", self)
    SimulatedAws.current.meter.stop(allocation_id)
    return result
