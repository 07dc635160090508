"""Prices of us-east-1, and the services that moto does not have: Pricing, Service Quotas, EC2 Instance Connect."""

import hashlib
import json
from typing import Any

from support.simcloud.instance_connect import send_ssh_public_key

# Dollars per hour, Linux, on demand. Large GPU machines: Karpenter's list of 2026-07-20; small ones: from memory.
ON_DEMAND = {
    "p3.2xlarge": 3.06,
    "p3.8xlarge": 12.24,
    "p3.16xlarge": 24.48,
    "p3dn.24xlarge": 31.21,
    "p4d.24xlarge": 21.96,
    "p4de.24xlarge": 27.45,
    "p5.4xlarge": 6.88,
    "p5.48xlarge": 55.04,
    "p5en.48xlarge": 63.30,
    "p6-b200.48xlarge": 113.93,
    "g4dn.xlarge": 0.526,
    "g4dn.12xlarge": 3.912,
    "g5.xlarge": 1.006,
    "g5.2xlarge": 1.212,
    "g5.12xlarge": 5.672,
    "g5.48xlarge": 16.29,
    "g6.xlarge": 0.8048,
    "g6.12xlarge": 4.602,
    "g6.48xlarge": 13.35,
    "g6e.xlarge": 1.861,
    "g6e.12xlarge": 10.493,
    "g6e.48xlarge": 30.13,
    "g7e.48xlarge": 33.14,
    "c5.large": 0.085,
    "c7i.2xlarge": 0.4,  # as all types without a price here; in the list, so that what is planned is what is billed
    "t3.micro": 0.0104,
}
PRICE_LIST_REGIONS = ("us-east-1", "eu-central-1", "ap-south-1")
NEW_ACCOUNT_VCPU = 5.0  # of the standard types, none of P and G. Source: AWS, "Spot Instance quotas"


def on_demand(type: str, vcpu: int) -> float:
    """Return the on-demand price in dollars per hour. A type without a price here costs 5 cents per vCPU."""
    return ON_DEMAND.get(type, 0.05 * vcpu)


def spot_factor(zone: str, type: str) -> float:
    """Return the spot price as a fraction of the on-demand price: 0.30 to 0.50, by zone and type."""
    return 0.30 + int(hashlib.sha256(f"{zone} {type}".encode()).hexdigest()[:4], 16) / 0xFFFF * 0.20


class ServiceError(Exception):
    """An error of a service: code, message, HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


def get_products(sim: Any, region: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer GetProducts of Pricing: the Linux on-demand products of EC2 that match, as JSON texts."""
    if region not in PRICE_LIST_REGIONS:
        raise ServiceError("UnknownEndpoint", f"the price list is not served in {region}", 404)
    if arguments.get("ServiceCode") != "AmazonEC2":
        raise ServiceError("InvalidParameterException", "the simulated price list knows AmazonEC2 alone")
    filters = {row["Field"]: row["Value"] for row in arguments.get("Filters", [])}
    texts = []
    for type, price in ON_DEMAND.items():
        product = _product(type, price, filters.get("regionCode", region))
        attributes = product["product"]["attributes"]
        checked = {name: value for name, value in filters.items() if name in attributes or name == "instanceType"}
        if all(attributes.get(name) == value for name, value in checked.items()):
            texts.append(json.dumps(product))
    return {"FormatVersion": "aws_v1", "PriceList": texts}


def _product(type: str, price: float, region: str) -> dict[str, Any]:
    sku = hashlib.sha256(f"{type} {region}".encode()).hexdigest()[:16].upper()
    attributes = {
        "capacitystatus": "Used",
        "instanceType": type,
        "licenseModel": "No License required",
        "locationType": "AWS Region",
        "marketoption": "OnDemand",
        "operatingSystem": "Linux",
        "operation": "RunInstances",
        "preInstalledSw": "NA",
        "regionCode": region,
        "servicecode": "AmazonEC2",
        "tenancy": "Shared",
    }
    if region == "us-east-1":
        attributes["location"] = "US East (N. Virginia)"
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price:.10f}"}, "beginRange": "0", "endRange": "Inf"}
    term = {"sku": sku, "offerTermCode": "JRTCKXETXF", "priceDimensions": {f"{sku}.JRTCKXETXF.6YS6EN2CT7": dimension}}
    product = {"productFamily": "Compute Instance", "sku": sku, "attributes": attributes}
    return {"product": product, "serviceCode": "AmazonEC2", "terms": {"OnDemand": {f"{sku}.JRTCKXETXF": term}}}


def get_service_quota(sim: Any, region: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer GetServiceQuota of Service Quotas: the vCPU of EC2."""
    from support.simcloud.spot_market import PLENTY_VCPU, QUOTAS

    return _quota(arguments, {id: sim.quota_vcpu.get(id, PLENTY_VCPU) for id in QUOTAS})


def get_default_service_quota(sim: Any, region: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer GetAWSDefaultServiceQuota of Service Quotas: what a new account has."""
    from support.simcloud.spot_market import QUOTAS

    return _quota(
        arguments, {id: NEW_ACCOUNT_VCPU if "standard" in types else 0.0 for id, (_, types) in QUOTAS.items()}
    )


def _quota(arguments: dict[str, Any], vcpus: dict[str, float]) -> dict[str, Any]:
    code = arguments.get("QuotaCode", "")
    if arguments.get("ServiceCode") != "ec2" or code not in vcpus:
        raise ServiceError("NoSuchResourceException", f"The request failed because the quota {code} does not exist.")
    return {"Quota": {"ServiceCode": "ec2", "QuotaCode": code, "Value": float(vcpus[code])}}


TARGETS = {
    "AWSEC2InstanceConnectService.SendSSHPublicKey": send_ssh_public_key,
    "AWSPriceListService.GetProducts": get_products,
    "ServiceQuotasV20190624.GetServiceQuota": get_service_quota,
    "ServiceQuotasV20190624.GetAWSDefaultServiceQuota": get_default_service_quota,
}
