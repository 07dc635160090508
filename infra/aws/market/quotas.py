"""EC2 quotas: how many vCPUs of a family an account may use at once in a region. AWS counts neither machines nor GPUs.

Also those of networks and addresses, of which AWS allows 5 each a region at first.

Sources: AWS, "Amazon EC2 endpoints and quotas", "Spot Instance quotas" (a new account may use 0 vCPUs of P and G as
spot machines, 5 of the standard families; a terminated machine counts until EC2 detects its termination).
"""

import re

from infra.aws.client import Account, call
from infra.aws.error_codes import quota_service
from infra.aws.journal import Journal
from infra.aws.journal_events import InstanceEnded, InstancesReleased, RequestRefused
from infra.errors import CloudError
from train.tools import host

RELEASE_SECONDS = 600.0  # within which EC2 no longer counts a machine that has ended
SPOT = "spot"
ON_DEMAND = "on-demand"
ADDRESSES = "L-0263D0A3"  # Elastic IP addresses in a region
QUOTA_CODES = {
    ("P5", SPOT): "L-C4BD4855",
    ("P", SPOT): "L-7212CCBC",
    ("G", SPOT): "L-3819A6DF",
    ("Standard", SPOT): "L-34B43A08",
    ("P5", ON_DEMAND): "L-417A185B",  # on demand, one quota covers all P types
    ("P", ON_DEMAND): "L-417A185B",
    ("G", ON_DEMAND): "L-DB2E81BA",
    ("Standard", ON_DEMAND): "L-1216C47A",
}


def get_quota_family(name: str) -> str:
    """Return the quota family of a type: "P5", "P", "G", "Standard", "" when unknown.

    "P5" is P5 and later, which have a spot quota of their own.
    """
    series = name.partition(".")[0]
    if re.match(r"p[5-9]", series):
        return "P5"
    if re.match(r"(p[1-4]|g[1-9]|gr\d|vt\d)", series):
        return "P" if series[0] == "p" else "G"
    return "Standard" if re.match(r"[acdhimrtz]\d", series) else ""


def get_quota_code(type_name: str, market: str) -> str:
    """Return the code of the quota to which a type counts in a market ("spot", "on-demand"), "" when unknown."""
    return QUOTA_CODES.get((get_quota_family(type_name), market), "")


def look_up_quota(account: Account, code: str, *, of_new_account: bool = False) -> float | None:
    """Return what a quota allows this account or a new one, None when unknown. Raises nothing."""
    try:
        client = account.quotas
        function = client.get_aws_default_service_quota if of_new_account else client.get_service_quota
        response = call("look up a quota", function, ServiceCode=quota_service(code), QuotaCode=code)
        return float(response["Quota"]["Value"])
    except (CloudError, KeyError, TypeError, ValueError):
        return None


def may_be_released(journal: Journal) -> bool:
    """Whether EC2 may still count machines that have ended: a machine of the job ended a moment ago."""
    return any(
        host.unix_time() - event.time < RELEASE_SECONDS
        for event in journal.events(InstanceEnded, InstancesReleased, RequestRefused)
        if not isinstance(event, RequestRefused) or event.machines
    )
