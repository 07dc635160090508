"""Built-in table of EC2 instance types worth renting, used for display and planning where EC2 cannot be asked.

Shapes: EC2's DescribeInstanceTypes of October 2026. Prices: AWS's price list of 2026 for us-east-1, Linux, on demand
(P types and the largest G types as of July, all others as of January).
"""

from dataclasses import dataclass

ON_DEMAND_PRICE_REGION = "us-east-1"  # the only region whose prices ON_DEMAND_PRICES has


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """A type of EC2 instance."""

    name: str
    vcpus: int
    gpus: int
    gpu: str  # GPU name as EC2 writes it; "CPU" for a type without GPUs
    gpu_gb: int  # memory of each GPU in GiB
    efa_cards: tuple[int, ...]  # indexes of the network cards that take an Elastic Fabric Adapter (EFA)
    network_gbps: float  # sustained network bandwidth in Gbit/s
    markets: tuple[str, ...] = ("on-demand", "spot")  # in which EC2 sells the type, sorted; also "capacity-block"
    takes_placement_group: bool = True  # whether EC2 puts such machines close together when asked

    @property
    def gpu_arch(self) -> str:
        """The architecture that CUDA programs are compiled for: "sm_80"; "" when unknown."""
        return GPU_ARCHITECTURES.get(self.gpu, "")

    @property
    def interface_cards(self) -> tuple[int, ...]:
        """The network cards that get an interface: the first, which has the machine's address, and all with EFA."""
        return tuple(sorted({0, *self.efa_cards}))


GPU_ARCHITECTURES = {
    "P100": "sm_60",
    "V100": "sm_70",
    "T4": "sm_75",
    "A100": "sm_80",
    "A10G": "sm_86",
    "L4": "sm_89",
    "L40S": "sm_89",
    "H100": "sm_90",
    "H200": "sm_90",
    "B200": "sm_100",
    "B300": "sm_103",
    "RTX PRO 4500": "sm_120",
    "RTX PRO Server 6000": "sm_120",
}

# Types that EC2 also sells in capacity blocks.
_CAPACITY_BLOCK_TYPES = (
    "p4d.24xlarge p4de.24xlarge p5.4xlarge p5.48xlarge p5e.48xlarge p5en.48xlarge p6-b200.48xlarge p6-b300.48xlarge"
)

_TableRow = tuple[str, int, int, str, int, int, int, float, float | None]
# fmt: off
_BUILTIN_ROWS: list[_TableRow] = [
    # type             vCPU GPUs GPU     GB  EFA cards Gbit    $/h
    ("p5en.48xlarge",   192, 8, "H200", 141, 16, 16, 3200.0,  63.296),
    ("p5e.48xlarge",    192, 8, "H200", 141, 32, 32, 3200.0,    None),
    ("p5.48xlarge",     192, 8, "H100",  80, 32, 32, 3200.0,   55.04),
    ("p5.4xlarge",       16, 1, "H100",  80,  1,  1,  100.0,    6.88),
    ("p4de.24xlarge",    96, 8, "A100",  80,  4,  4,  400.0, 27.44705),
    ("p4d.24xlarge",     96, 8, "A100",  40,  4,  4,  400.0, 21.957642),
    ("p3dn.24xlarge",    96, 8, "V100",  32,  1,  1,  100.0,  31.212),
    ("p6-b200.48xlarge", 192, 8, "B200", 179, 8,  8, 3200.0, 113.9328),
    ("p6-b300.48xlarge", 192, 8, "B300", 269, 16, 17, 6400.0,   None),
    ("g6e.xlarge",        4, 1, "L40S",  45,  0,  1,    2.5,   1.861),
    ("g6e.2xlarge",       8, 1, "L40S",  45,  0,  1,    5.0, 2.24208),
    ("g6e.4xlarge",      16, 1, "L40S",  45,  0,  1,   20.0, 3.00424),
    ("g6e.8xlarge",      32, 1, "L40S",  45,  1,  1,   25.0, 4.52856),
    ("g6e.12xlarge",     48, 4, "L40S",  45,  1,  1,  100.0, 10.49264),
    ("g6e.24xlarge",     96, 4, "L40S",  45,  2,  2,  200.0, 15.06559),
    ("g6e.48xlarge",    192, 8, "L40S",  45,  4,  4,  400.0, 30.13118),
    ("g5.xlarge",         4, 1, "A10G",  22,  0,  1,    2.5,   1.006),
    ("g5.2xlarge",        8, 1, "A10G",  22,  0,  1,    5.0,   1.212),
    ("g5.4xlarge",       16, 1, "A10G",  22,  0,  1,   10.0,   1.624),
    ("g5.8xlarge",       32, 1, "A10G",  22,  1,  1,   25.0,   2.448),
    ("g5.12xlarge",      48, 4, "A10G",  22,  1,  1,   40.0,   5.672),
    ("g5.24xlarge",      96, 4, "A10G",  22,  1,  1,   50.0,   8.144),
    ("g5.48xlarge",     192, 8, "A10G",  22,  1,  1,  100.0,  16.288),
    ("g6.xlarge",         4, 1, "L4",    22,  0,  1,    2.5,  0.8048),
    ("g6.2xlarge",        8, 1, "L4",    22,  0,  1,    5.0,  0.9776),
    ("g6.4xlarge",       16, 1, "L4",    22,  0,  1,   10.0,  1.3232),
    ("g6.8xlarge",       32, 1, "L4",    22,  1,  1,   25.0,  2.0144),
    ("g6.12xlarge",      48, 4, "L4",    22,  1,  1,   40.0,  4.6016),
    ("g6.24xlarge",      96, 4, "L4",    22,  1,  1,   50.0,  6.6752),
    ("g6.48xlarge",     192, 8, "L4",    22,  1,  1,  100.0, 13.3504),
    ("g4dn.xlarge",       4, 1, "T4",    16,  0,  1,    5.0,   0.526),
    ("g4dn.2xlarge",      8, 1, "T4",    16,  0,  1,   10.0,   0.752),
    ("g4dn.4xlarge",     16, 1, "T4",    16,  0,  1,   20.0,   1.204),
    ("g4dn.8xlarge",     32, 1, "T4",    16,  1,  1,   50.0,   2.176),
    ("g4dn.12xlarge",    48, 4, "T4",    16,  1,  1,   50.0,   3.912),
    ("g4dn.metal",       96, 8, "T4",    16,  1,  1,  100.0,   7.824),
    ("g7e.48xlarge",    192, 8, "RTX PRO Server 6000", 96, 4, 4, 1600.0, 33.14),
    ("c7i.2xlarge",       8, 0, "CPU",    0,  0,  1,  3.125,   0.357),
    ("c6i.2xlarge",       8, 0, "CPU",    0,  0,  1,  3.125,    0.34),
    ("m7i.2xlarge",       8, 0, "CPU",    0,  0,  1,  3.125,  0.4032),
]
# fmt: on

# The price list and botocore still have these types. Only DescribeInstanceTypes shows that they are gone.
RETIREMENT_REASONS = {
    name: f"AWS stopped listing {name} in 2026" for name in ("p3.2xlarge", "p3.8xlarge", "p3.16xlarge")
}
# Machines of published runs, for forecasts to compare with. Nobody can rent them. Source: EC2's page of 2018.
_HISTORIC_ROWS: list[_TableRow] = [("p3.16xlarge", 64, 8, "V100", 16, 0, 1, 25.0, 24.48)]
DEFAULT_TYPES = ("p4d.24xlarge", "g6e.48xlarge", "g5.48xlarge", "p5.48xlarge")  # for a recipe that names no type


def _make_instance_type(row: _TableRow) -> InstanceType:
    name, vcpus, gpus, gpu, gpu_gb, efa_interfaces, network_cards, network_gbps, _ = row
    block_market = ("capacity-block",) if name in _CAPACITY_BLOCK_TYPES.split() else ()
    return InstanceType(
        name=name,
        vcpus=vcpus,
        gpus=gpus,
        gpu=gpu,
        gpu_gb=gpu_gb,
        efa_cards=tuple(range(network_cards - efa_interfaces, network_cards)),  # the last cards of each type
        network_gbps=network_gbps,
        markets=(*block_market, "on-demand", "spot"),
    )


BUILTIN_TYPES = {row[0]: _make_instance_type(row) for row in _BUILTIN_ROWS}
HISTORIC_TYPES = {row[0]: _make_instance_type(row) for row in _HISTORIC_ROWS}
# Dollars an hour in ON_DEMAND_PRICE_REGION.
ON_DEMAND_PRICES = {row[0]: row[-1] for row in _BUILTIN_ROWS if row[-1] is not None}
HISTORIC_PRICES = {row[0]: row[-1] for row in _HISTORIC_ROWS}
