"""Prices of us-east-1."""

import hashlib

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


def on_demand(type: str, vcpu: int) -> float:
    """Return the on-demand price in dollars per hour. A type without a price here costs 5 cents per vCPU."""
    return ON_DEMAND.get(type, 0.05 * vcpu)


def spot_factor(zone: str, type: str) -> float:
    """Return the spot price as a fraction of the on-demand price: 0.30 to 0.50, by zone and type."""
    return 0.30 + int(hashlib.sha256(f"{zone} {type}".encode()).hexdigest()[:4], 16) / 0xFFFF * 0.20
