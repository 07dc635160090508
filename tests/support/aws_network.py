"""A network on the simulated EC2 that is somebody else's: public, private and unconnected subnets in two zones."""

import json
import time
from typing import Any

from infra.aws import tags
from infra.aws.client import Account


class Network:
    """A network of somebody: public subnets in two zones, one behind a NAT gateway, one that leads nowhere."""

    def __init__(self, account: Account) -> None:
        self.ec2, self.region = account.ec2, account.region
        self.vpc = self.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
        self.set_dns_hostnames(True)
        self.public_a, self.public_b = self.create_subnet(1, "a"), self.create_subnet(2, "b")
        self.private, self.lost = self.create_subnet(3, "a"), self.create_subnet(4, "b")
        gateway = self.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        self.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=self.vpc)
        tables = self.ec2.describe_route_tables(Filters=tags.make_filters({}, vpc_id=[self.vpc]))["RouteTables"]
        self.create_route(tables[0]["RouteTableId"], GatewayId=gateway)  # the main one, which no subnet names
        self.address = self.ec2.allocate_address(Domain="vpc")["AllocationId"]
        gateway = self.ec2.create_nat_gateway(SubnetId=self.public_a, AllocationId=self.address)["NatGateway"]
        self.nat = nat = gateway["NatGatewayId"]
        self.private_table = self.create_table(self.private)
        self.create_route(self.private_table, NatGatewayId=nat)
        self.create_table(self.lost)

    def set_dns_hostnames(self, is_on: bool) -> None:
        self.ec2.modify_vpc_attribute(VpcId=self.vpc, EnableDnsHostnames={"Value": is_on})

    def create_subnet(self, number: int, zone: str) -> str:
        place = {"CidrBlock": f"10.9.{number}.0/24", "AvailabilityZone": f"{self.region}{zone}"}
        return str(self.ec2.create_subnet(VpcId=self.vpc, **place)["Subnet"]["SubnetId"])

    def create_table(self, subnet: str) -> str:
        table = str(self.ec2.create_route_table(VpcId=self.vpc)["RouteTable"]["RouteTableId"])
        self.ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
        return table

    def create_route(self, table: str, **target: str) -> None:
        self.ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", **target)

    def describe(self) -> dict[str, Any]:
        """Return everything in the network that may not change."""
        in_vpc = tags.make_filters({}, vpc_id=[self.vpc])
        kinds = ("subnets", "route_tables", "vpc_endpoints", "vpcs")
        found = [getattr(self.ec2, f"describe_{kind}")(Filters=in_vpc) for kind in kinds]
        for answer in found:
            answer.pop("ResponseMetadata")
            for subnet in answer.get("Subnets", []):
                subnet.pop("AvailableIpAddressCount")
        return json.loads(json.dumps(found, default=str))

    def remove(self) -> None:
        self.ec2.delete_nat_gateway(NatGatewayId=self.nat)
        gateways = {"Filters": tags.make_filters({}, state=["deleting"])}
        while self.ec2.describe_nat_gateways(**gateways)["NatGateways"]:
            time.sleep(0.1)
        self.ec2.release_address(AllocationId=self.address)
