"""The HTTP server of the simulated cloud: faults, and kills of callers."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest
from support.simcloud.in_process import Cloud, cloud, served

__all__ = ["cloud", "served"]


CALLER = """
import sys, boto3
ec2 = boto3.client("ec2", region_name="us-east-1", endpoint_url=sys.argv[1],
                   aws_access_key_id="k", aws_secret_access_key="s")
for name in ("a", "b", "c"):
    ec2.create_placement_group(GroupName=name, Strategy="cluster")
"""


@pytest.mark.parametrize(("when", "created"), [("before", ["a"]), ("after", ["a", "b"])])
def test_kill_caller_kills_before_or_after_that_call(cloud: Cloud, when: str, created: list[str]) -> None:
    command = json.dumps({"at": 2, "when": when}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{cloud.url}/_sim/kill_caller", command), timeout=120).close()
    completed = subprocess.run([sys.executable, "-c", CALLER, cloud.url], timeout=120)
    assert completed.returncode == -signal.SIGKILL
    assert [row["name"] for row in cloud.sim.leftovers()] == created
    assert cloud.front.calls == [("ec2", "CreatePlacementGroup")] * 2 and len(cloud.front.killed) == 1
