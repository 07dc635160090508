"""The way of an instance to the internet: a public or elastic address, or a NAT gateway of its route table."""

from datetime import UTC, datetime
from typing import Any

from moto.cloudwatch.models import cloudwatch_backends
from moto.core.responses import ActionResult, EmptyResult
from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends
from support.simcloud import placement_groups
from support.simcloud.cloud import ACCOUNT, SimulatedAws, call_moto, ec2_call, refuse_if

ANY_IPV4 = "0.0.0.0/0"
MAX_ADDRESSES = 5  # of a region


def nat_gateway_of(instance: Any) -> Any | None:
    """Return the NAT gateway to which the route table of an instance leads, None without one."""
    interface = instance.nics.get(0)
    for table in instance.ec2_backend.route_tables.values():
        if interface and interface.subnet.id in [association.get("SubnetId") for association in table.associations]:
            for route in table.routes:
                if str(route.destination_cidr_block) == ANY_IPV4 and route.nat_gateway is not None:
                    return route.nat_gateway
    return None


def has_internet(instance: Any) -> bool:
    gateway, interface = nat_gateway_of(instance), instance.nics.get(0)
    return gateway.state == "available" if gateway else bool(interface and interface.public_ip)


@ec2_call
def modify_network_interface_attribute(self: Any) -> ActionResult:
    """Give the primary interface of a running instance a public address, unless the cloud refuses that."""
    sim = SimulatedAws.current
    interface = self.ec2_backend.get_network_interface(self._get_param("NetworkInterfaceId"))
    message = "An instance with several interfaces gets no public address."
    refuse_if(sim.refuses_public_addresses, "UnsupportedOperation", message)
    instance = interface.instance
    is_live = instance is not None and instance.state in ("pending", "running")
    refuse_if(not is_live, "IncorrectState", f"'{interface.id}' is not attached to a running instance.")
    is_primary = (interface.network_card_index, interface.device_index) == (0, 0)
    refuse_if(not is_primary, "InvalidParameterValue", "Only the primary interface can have a public address.")
    if not (interface.public_ip or sim.hides_public_addresses):
        interface.public_ip = interface.private_ip_address
        sim.meter.start(f"ip-{instance.id}", "addresses", sim.meter.ADDRESS_DOLLARS_PER_HOUR, 60.0)
    return EmptyResult()


def release_resources(instance: Any) -> None:
    backend = instance.ec2_backend
    for interface in list(instance.nics.values()):
        for address in [one for one in backend.addresses if one.eni is interface]:
            disassociate(address)
        interface.instance = interface.attachment_id = None
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
    result = call_moto("allocate_address", self)
    address = self.ec2_backend.addresses[-1]
    address.own_ip = address.public_ip
    address.start = sim.now()
    sim.meter.start(address.allocation_id, "addresses", sim.meter.ADDRESS_DOLLARS_PER_HOUR)
    return result


@ec2_call
def create_route_table(self: Any) -> ActionResult:
    result = call_moto("create_route_table", self)
    result.result["RouteTable"].start = SimulatedAws.current.now()
    return result


@ec2_call
def describe_addresses(self: Any) -> ActionResult:
    return _without_new("Addresses", call_moto("describe_addresses", self))


@ec2_call
def describe_route_tables(self: Any) -> ActionResult:
    return _without_new("RouteTables", call_moto("describe_route_tables", self))


def _without_new(key: str, result: Any) -> ActionResult:
    shown_since = SimulatedAws.current.now() - SimulatedAws.current.visible_after
    resources = result.result[key]
    return ActionResult({key: [one for one in resources if getattr(one, "start", 0.0) <= shown_since]})


@ec2_call
def associate_address(self: Any) -> ActionResult:
    """Associate an elastic address. It becomes the loopback address of the machine, so that it leads there."""
    result = call_moto("associate_address", self)
    for address in self.ec2_backend.addresses:
        interface = address.eni
        if interface is not None and address.public_ip != interface.private_ip_address:
            address.public_ip = interface.public_ip = interface.private_ip_address
            if interface.instance is not None:
                SimulatedAws.current.meter.stop(f"ip-{interface.instance.id}")
    return result


@ec2_call
def disassociate_address(self: Any) -> ActionResult:
    id = self._get_param("AssociationId")
    addresses = [address for address in self.ec2_backend.addresses if address.association_id == id]
    refuse_if(not addresses, "InvalidAssociationID.NotFound", f"There is no association '{id}'.")
    disassociate(addresses[0])
    return EmptyResult()


def disassociate(address: Any) -> None:
    address.eni.public_ip = None
    address.public_ip = address.own_ip
    address.eni = address.instance = address.association_id = None


@ec2_call
def release_address(self: Any) -> ActionResult:
    """Release an elastic address. It is refused while the address is associated."""
    allocation_id = self._get_param("AllocationId")
    for address in self.ec2_backend.addresses:
        is_in_use = address.allocation_id == allocation_id and address.eni is not None
        refuse_if(is_in_use, "InvalidIPAddress.InUse", f"Address {address.public_ip} is in use.")
    result = call_moto("release_address", self)
    SimulatedAws.current.meter.stop(allocation_id)
    return result


@ec2_call
def create_nat_gateway(self: Any) -> ActionResult:
    """Create a NAT gateway, which is available after `nat_seconds`. The same client token gives the same gateway."""
    sim = SimulatedAws.current
    token = self._get_param("ClientToken")
    for gateway in self.ec2_backend.nat_gateways.values():
        if token and gateway.token == token:
            return ActionResult({"NatGateway": gateway})
    result = call_moto("create_nat_gateway", self)
    gateway = list(self.ec2_backend.nat_gateways.values())[-1]
    gateway.token = token
    gateway.state = "pending"
    gateway.change_time = sim.now()
    gateway._created_at = datetime.fromtimestamp(sim.now(), UTC).replace(tzinfo=None)
    sim.meter.start(gateway.id, "nat", sim.meter.NAT_DOLLARS_PER_HOUR, 3600.0, step=3600.0)
    return result


def count_bytes(gateway: Any, region: str, from_internet: int) -> None:
    """Let CloudWatch count what a NAT gateway has received from the internet."""
    metric = {
        "MetricName": "BytesInFromDestination",
        "Dimensions": [{"Name": "NatGatewayId", "Value": gateway.id}],
        "Value": float(from_internet),
        "Timestamp": datetime.fromtimestamp(SimulatedAws.current.now(), UTC).replace(tzinfo=None),
    }
    cloudwatch_backends[ACCOUNT][region].put_metric_data("AWS/NATGateway", [metric])


@ec2_call
def delete_nat_gateway(self: Any) -> ActionResult:
    """Begin to delete a NAT gateway, which takes `nat_seconds`. Until then its address is in use."""
    sim = SimulatedAws.current
    id = self._get_param("NatGatewayId")
    gateway = self.ec2_backend.nat_gateways.get(id)
    is_known = gateway is not None and gateway.state != "deleted"
    refuse_if(not is_known, "NatGatewayNotFound", f"The Nat Gateway {id} was not found")
    if gateway.state != "deleting":
        gateway.state = "deleting"
        gateway.change_time = sim.now()
        sim.meter.stop(id)
    return ActionResult({"NatGatewayId": id})


@ec2_call
def describe_nat_gateways(self: Any) -> ActionResult:
    """Describe NAT gateways by state and tags. moto ignores tags."""
    filters = self._filters_from_querystring()
    gateways = self.ec2_backend.nat_gateways.values()
    return ActionResult({"NatGateways": [one for one in gateways if placement_groups.matches(one, filters)]})


def tick(sim: SimulatedAws, now: float) -> None:
    for backend in list(ec2_backends[ACCOUNT].values()):
        gateways: list[Any] = [*backend.nat_gateways.values()]  # with attributes of ours
        for gateway in gateways:
            if gateway.state in ("available", "failed", "deleted") or now < gateway.change_time + sim.nat_seconds:
                continue
            new_state = "failed" if sim.nat_failure else "available"
            gateway.state = {"pending": new_state, "deleting": "deleted"}[gateway.state]
            gateway.failure_message = sim.nat_failure if gateway.state == "failed" else None
            if gateway.state == "deleted":
                gateway.delete_time = utcnow()
            if gateway.state in ("failed", "deleted"):
                sim.meter.stop(gateway.id)
                for address in [one for one in backend.addresses if one.eni is gateway._eni]:
                    disassociate(address)
                backend.enis.pop(gateway._eni.id, None)
