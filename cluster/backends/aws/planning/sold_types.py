"""Instance types that EC2 sells in the markets that a launch allows: on demand, spot, or as a capacity block."""

from collections.abc import Mapping, Sequence

from cluster.errors import ClusterError
from infra.aws.market.instance_types import InstanceType


def choose_sold_types(
    known_types: Mapping[str, InstanceType], names: Sequence[str], markets: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the types that EC2 sells in one of the markets, and notes on the others. Raises `ClusterError`."""
    sold_names = [name for name in names if set(markets) & set(known_types[name].markets)]
    unsold_names = [name for name in names if name not in sold_names]
    asked = " or ".join(markets)
    if not sold_names:
        is_on_demand = any("on-demand" in known_types[name].markets for name in unsold_names)
        next_step = "pass --on-demand" if is_on_demand else "buy a block: imgnet-cluster offers --capacity-blocks"
        raise ClusterError(f"EC2 does not sell {', '.join(unsold_names)} as {asked}; {next_step}")
    notes = [f"{', '.join(unsold_names)}: not requested, EC2 does not sell them as {asked}"] if unsold_names else []
    return sold_names, notes
