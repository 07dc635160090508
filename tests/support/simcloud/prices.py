"""Prices of us-east-1 and the two services that moto does not have: Pricing and Service Quotas."""

import hashlib
import json
from typing import Any

# Dollars an hour, Linux, on demand. The big GPU machines by Karpenter's list of 2026-07-20, the small ones from memory.
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
    "t3.micro": 0.0104,
}
REGIONS = ("us-east-1", "eu-central-1", "ap-south-1")  # where the price list is served


def on_demand(type: str, vcpu: int) -> float:
    """Dollars an hour; a type without a price here costs 5 cents a vCPU."""
    return ON_DEMAND.get(type, 0.05 * vcpu)


def spot_factor(zone: str, type: str) -> float:
    """The part of the on-demand price: 0.30 to 0.50, by zone and type."""
    return 0.30 + int(hashlib.sha256(f"{zone} {type}".encode()).hexdigest()[:4], 16) / 0xFFFF * 0.20


class ServiceError(Exception):
    """An answer that is an error: code, message, HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


def get_products(sim: Any, region: str, ask: dict[str, Any]) -> dict[str, Any]:
    """Pricing GetProducts of AmazonEC2: the Linux on-demand product of a type, as a list of JSON texts."""
    if region not in REGIONS:
        raise ServiceError("UnknownEndpoint", f"the price list is not served in {region}", 404)
    if ask.get("ServiceCode") != "AmazonEC2":
        raise ServiceError("InvalidParameterException", "the simulated price list knows AmazonEC2 alone")
    wanted = {one["Field"]: one["Value"] for one in ask.get("Filters", [])}
    texts = []
    for type, price in ON_DEMAND.items():
        product = _product(type, price, wanted.get("regionCode", region))
        facts = product["product"]["attributes"]
        if all(facts.get(name) == value for name, value in wanted.items() if name in facts or name == "instanceType"):
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


def get_service_quota(sim: Any, region: str, ask: dict[str, Any]) -> dict[str, Any]:
    """Service Quotas GetServiceQuota of ec2, in vCPU (and the number of elastic addresses)."""
    from support.simcloud.spot_market import PLENTY, QUOTAS

    code = ask.get("QuotaCode", "")
    known = {one: (name, sim.quota_vcpu.get(one, PLENTY)) for one, (_, _, name) in QUOTAS.items()}
    known["L-0263D0A3"] = ("EC2-VPC Elastic IPs", float(sim.max_addresses))
    if ask.get("ServiceCode") != "ec2" or code not in known:
        raise ServiceError("NoSuchResourceException", f"The request failed because the quota {code} does not exist.")
    name, value = known[code]
    arn = f"arn:aws:servicequotas:{region}:123456789012:ec2/{code}"
    quota: dict[str, Any] = {
        "ServiceCode": "ec2",
        "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
        "QuotaArn": arn,
    }
    quota |= {"QuotaCode": code, "QuotaName": name, "Value": float(value), "Unit": "None", "Adjustable": True}
    return {"Quota": {**quota, "GlobalQuota": False}}


TARGETS = {
    "AWSPriceListService.GetProducts": get_products,
    "ServiceQuotasV20190624.GetServiceQuota": get_service_quota,
}
