"""The fixed prices of AWS that a job pays besides its machines, in dollars, and what traffic costs at them.

All are those of us-east-1, also for other regions. The sources are pages of AWS, and for those that could not be read
here the public pages of 2026 that quote them:

  disks, public addresses   AWS, "Amazon EBS pricing", "Amazon VPC pricing"
  NAT gateway               AWS, "Amazon VPC pricing": 0.045 an hour and 0.045 per GB (README of 1debit/alternat)
  EFS, elastic throughput   AWS, "Amazon EFS pricing": 0.30 per GB and month, 0.03 per GB read, 0.06 per GB written
                            (factualminds.com/blog/amazon-efs-pricing-throughput-modes-storage-classes, June 2026)
  S3 Standard               AWS, "Amazon S3 pricing": 0.023 per GB and month, 0.0004 per 1000 GET requests
                            (c3x.dev/blog/s3-request-fees-explained); machines of the region read it free of charge
  data out                  AWS, "Amazon EC2 on-demand pricing", data transfer: 0.09 per GB up to 10 TB a
                            month (leanopstech.com/blog/aws-data-transfer-pricing-2026). The first 100 GB of an account
                            in a month are free; that is not deducted here
  between regions           AWS, "Amazon S3 pricing", data transfer: 0.02 per GB from the regions of the USA and Europe
                            to most others (repost.aws, "Cost effective methods for accessing S3 buckets cross-region")
"""

from infra.costs import GB, Traffic, TrafficCost

MONTH_HOURS = 730
DISK_PER_GB_HOUR = 0.08 / MONTH_HOURS  # gp3
ADDRESS_PER_HOUR = 0.005  # a public IPv4 address
NAT_PER_HOUR = 0.045  # without its address
NAT_PER_GB = 0.045
EFS_PER_GB_MONTH = 0.30  # Standard
EFS_PER_GB_READ = 0.03
EFS_PER_GB_WRITTEN = 0.06
S3_PER_GB_MONTH = 0.023
S3_PER_1000_READS = 0.0004
DATA_OUT_PER_GB = 0.09
BETWEEN_REGIONS_PER_GB = 0.02


def price_traffic(traffic: Traffic, uses_nat: bool) -> tuple[TrafficCost, ...]:
    """Return what traffic costs, a row for each kind that there was. Without a NAT gateway the way in is free."""
    rows = (
        _by_gb("shared folder, read", traffic.shared_read_bytes, EFS_PER_GB_READ),
        _by_gb("shared folder, written", traffic.shared_written_bytes, EFS_PER_GB_WRITTEN),
        _by_gb("NAT gateway", traffic.internet_bytes * uses_nat, NAT_PER_GB),
        _by_gb("data out to this computer", traffic.home_bytes, DATA_OUT_PER_GB),
        _by_gb("between regions", traffic.between_regions_bytes, BETWEEN_REGIONS_PER_GB),
        _row("S3", traffic.object_reads / 1000, "1000 requests", S3_PER_1000_READS),
    )
    return tuple(row for row in rows if row.amount)


def traffic_dollars(traffic: Traffic, uses_nat: bool) -> float:
    """Return what traffic costs in all."""
    return sum(row.dollars for row in price_traffic(traffic, uses_nat))


def _by_gb(name: str, amount_bytes: int, price: float) -> TrafficCost:
    return _row(name, amount_bytes / GB, "GB", price)


def _row(name: str, amount: float, unit: str, price: float) -> TrafficCost:
    return TrafficCost(name=name, amount=amount, unit=unit, price=price, dollars=amount * price)
