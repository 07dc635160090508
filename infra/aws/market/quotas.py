"""How many vCPUs of a family an account may have at once in a region: AWS counts neither machines nor GPUs.

Sources: AWS, "Amazon EC2 endpoints and quotas", "Spot Instance quotas". For P and G the default of spot is 0.
"""

from typing import TYPE_CHECKING

from infra.aws.errors import CloudError

if TYPE_CHECKING:
    from infra.aws.client import Account

SPOT, ON_DEMAND = "spot", "on-demand"
QUOTA_CODES = {
    ("P5", SPOT): "L-C4BD4855",
    ("P", SPOT): "L-7212CCBC",
    ("G", SPOT): "L-3819A6DF",
    ("Standard", SPOT): "L-34B43A08",
    ("P5", ON_DEMAND): "L-417A185B",  # on demand all P are of one quota
    ("P", ON_DEMAND): "L-417A185B",
    ("G", ON_DEMAND): "L-DB2E81BA",
    ("Standard", ON_DEMAND): "L-1216C47A",
}


def get_quota_code(family: str, market: str) -> str:
    """Return the code of the quota for a family ("P5", "P", "G") and a market ("spot", "on-demand"), "" unknown."""
    return QUOTA_CODES.get((family, market), "")


def look_up_quota(account: "Account", code: str) -> float | None:
    """Return how many vCPUs the account may have, None when that cannot be looked up."""
    from infra.aws.client import call

    try:
        said = call("look up a quota", account.quotas.get_service_quota, ServiceCode="ec2", QuotaCode=code)
        return float(said["Quota"]["Value"])
    except (CloudError, KeyError, TypeError, ValueError):
        return None


def quota_increase_command(region: str, code: str, vcpus: int) -> str:
    """Return the command by which a person asks AWS for more."""
    return (
        f"aws service-quotas request-service-quota-increase --region {region} --service-code ec2 --quota-code {code} "
        f"--desired-value {vcpus}"
    )
