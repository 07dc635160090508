"""The services that moto does not have: Pricing, Service Quotas, and EC2 Instance Connect.

A function answers a call: it gets the cloud, the region and the arguments, and returns the answer as plain data.
"""

import json
from typing import Any

from support.iam import is_allowed
from support.simcloud.cloud import ACCOUNT
from support.simcloud.spot_market import ON_DEMAND, PLENTY_VCPU, QUOTAS, STANDARD

from infra.aws import tags

PRICE_LIST_REGIONS = ("us-east-1", "eu-central-1", "ap-south-1")
NEW_ACCOUNT_VCPU = 5.0  # of the standard types, none of P and G. Source: AWS, "Spot Instance quotas"
NETWORK_QUOTAS = {"L-F678F1CE": ("vpc", 5.0), "L-0263D0A3": ("ec2", 5.0)}  # networks, Elastic IP addresses
LOGIN_ACTION = "ec2-instance-connect:SendSSHPublicKey"
KEY_SECONDS = 60.0  # a key may log in for so long; source: AWS, API reference, SendSSHPublicKey


class ServiceError(Exception):
    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


def get_products(sim: Any, region: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer GetProducts of Pricing: the Linux on-demand products of EC2 that match, as JSON texts."""
    if region not in PRICE_LIST_REGIONS:
        raise ServiceError("UnknownEndpoint", f"the price list is not served in {region}", 404)
    filters = {row["Field"]: row["Value"] for row in arguments.get("Filters", [])}
    products = (_product(type, price, filters.get("regionCode", region)) for type, price in ON_DEMAND.items())
    matches = [product for product in products if filters.items() <= product["product"]["attributes"].items()]
    return {"FormatVersion": "aws_v1", "PriceList": [json.dumps(product) for product in matches]}


def _product(type: str, price: float, region: str) -> dict[str, Any]:
    attributes = {
        "capacitystatus": "Used",
        "instanceType": type,
        "licenseModel": "No License required",
        "marketoption": "OnDemand",
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "regionCode": region,
        "tenancy": "Shared",
    }
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price:.10f}"}, "beginRange": "0", "endRange": "Inf"}
    term = {"priceDimensions": {"SKU.JRTCKXETXF.6YS6EN2CT7": dimension}}
    product = {"productFamily": "Compute Instance", "sku": "SKU", "attributes": attributes}
    return {"product": product, "serviceCode": "AmazonEC2", "terms": {"OnDemand": {"SKU.JRTCKXETXF": term}}}


def get_service_quota(sim: Any, region: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer GetServiceQuota of Service Quotas: the vCPU of EC2."""
    return _quota(arguments, {id: sim.quota_vcpu.get(id, PLENTY_VCPU) for id in QUOTAS})


def get_default_service_quota(sim: Any, region: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer GetAWSDefaultServiceQuota of Service Quotas: what a new account has."""
    return _quota(arguments, {id: NEW_ACCOUNT_VCPU * (types == STANDARD) for id, (_, types) in QUOTAS.items()})


def _quota(arguments: dict[str, Any], vcpus: dict[str, float]) -> dict[str, Any]:
    code = arguments.get("QuotaCode", "")
    service, value = NETWORK_QUOTAS.get(code, ("ec2", vcpus.get(code)))
    if arguments.get("ServiceCode") != service or value is None:
        raise ServiceError("NoSuchResourceException", f"The request failed because the quota {code} does not exist.")
    return {"Quota": {"ServiceCode": service, "QuotaCode": code, "Value": float(value)}}


def send_ssh_public_key(sim: Any, region: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer SendSSHPublicKey of EC2 Instance Connect. The machine gets the key at once."""
    id, key = arguments["InstanceId"], arguments["SSHPublicKey"]
    try:
        instance = sim.view(sim.find(id))
    except KeyError as error:
        raise ServiceError("EC2InstanceNotFoundException", f"The instance {id} was not found.") from error
    context = {f"aws:ResourceTag/{tags.STACK}": instance.tags.get(tags.STACK, "")}
    arn = f"arn:aws:ec2:{region}:{ACCOUNT}:instance/{id}"
    if sim.policy is not None and not is_allowed(sim.policy, LOGIN_ACTION, arn, context):
        raise ServiceError("AccessDeniedException", f"You are not authorized to perform {LOGIN_ACTION} on {arn}.")
    if instance.state != "running":
        raise ServiceError("EC2InstanceStateInvalidException", f"The instance {id} is {instance.state}.")
    if key.split()[:1] not in (["ssh-ed25519"], ["ssh-rsa"]):
        raise ServiceError("InvalidArgsException", "The key must be of the type ED25519 or RSA.")
    if sim.machines:
        sim.machines.on_login_key(instance, arguments["InstanceOSUser"], key)
    return {"RequestId": "sim", "Success": True}


TARGETS = {
    "AWSEC2InstanceConnectService.SendSSHPublicKey": send_ssh_public_key,
    "AWSPriceListService.GetProducts": get_products,
    "ServiceQuotasV20190624.GetServiceQuota": get_service_quota,
    "ServiceQuotasV20190624.GetAWSDefaultServiceQuota": get_default_service_quota,
}
