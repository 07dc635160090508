"""A region that still lists p3, as those did in which AWS has not yet retired it.

Numbers: EC2's page on P3 instances. All else is as EC2 describes p3dn.24xlarge, the one type that is left.
"""

import copy

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES, InstanceType, InstanceTypeBackend

P3_TYPES = {  # vCPUs, GPUs, GiB of memory, network, its baseline in Gbit/s
    "p3.2xlarge": (8, 1, 61, "Up to 10 Gigabit", 2.5),
    "p3.8xlarge": (32, 4, 244, "10 Gigabit", 10.0),
    "p3.16xlarge": (64, 8, 488, "25 Gigabit", 25.0),
}


def list_p3(monkeypatch: pytest.MonkeyPatch, region: str = "us-east-1") -> None:
    """Let the simulated EC2 of this process offer p3 in the first zone of a region."""
    for name, (vcpus, gpus, memory_gb, performance, baseline) in P3_TYPES.items():
        description = copy.deepcopy(INSTANCE_TYPES["p3dn.24xlarge"])
        description |= {"InstanceType": name, "VCpuInfo": {"DefaultVCpus": vcpus}}
        description["MemoryInfo"] = {"SizeInMiB": 1024 * memory_gb}
        description["GpuInfo"]["Gpus"][0] |= {"Count": gpus, "MemoryInfo": {"SizeInMiB": 16384}}
        description["GpuInfo"]["TotalGpuMemoryInMiB"] = 16384 * gpus
        card = {"NetworkCardIndex": 0, "NetworkPerformance": performance, "BaselineBandwidthInGbps": baseline}
        card |= {"MaximumNetworkInterfaces": 4, "InterfaceTypes": ["interface"]}
        description["NetworkInfo"] |= {
            "NetworkPerformance": performance,
            "EfaSupported": False,
            "MaximumNetworkCards": 1,
            "NetworkCards": [card],
        }
        description["NetworkInfo"].pop("EfaInfo", None)
        description.pop("InstanceStorageInfo", None)
        description["InstanceStorageSupported"] = False
        monkeypatch.setitem(INSTANCE_TYPES, name, description)
    described = [*InstanceTypeBackend.instance_types, *map(InstanceType, P3_TYPES)]
    monkeypatch.setattr(InstanceTypeBackend, "instance_types", described)
    offerings = INSTANCE_TYPE_OFFERINGS["availability-zone"]
    rows = [{"InstanceType": name, "Location": f"{region}a"} for name in P3_TYPES]
    monkeypatch.setitem(offerings, region, [*offerings[region], *rows])
