"""The HTTP server of the simulated cloud: faults, and kills of callers."""

import json
import signal
import subprocess
import sys
import urllib.request

import botocore.exceptions
import pytest
from support.simcloud.in_process import Cloud, cloud, refused, served

__all__ = ["cloud", "served"]


def test_fault_strikes_calls_by_name_number_and_count(cloud: Cloud) -> None:
    cloud.front.fault(action="DescribeVpcs", code="RequestLimitExceeded", skip=1, times=2)
    cloud.front.fault(code="Unavailable", when=5)
    outcomes: list[int] = []
    for call in [cloud.ec2.describe_vpcs] * 4 + [cloud.ec2.describe_subnets] * 2:
        try:
            outcomes.append(call()["ResponseMetadata"]["HTTPStatusCode"])
        except botocore.exceptions.ClientError as error:
            outcomes.append(error.response["ResponseMetadata"]["HTTPStatusCode"])
    assert outcomes == [200, 503, 503, 200, 503, 200] and cloud.front.count("DescribeVpcs") == 4


@pytest.mark.parametrize("drop", [False, True])
def test_fault_after_does_the_call_and_loses_the_answer(cloud: Cloud, drop: bool) -> None:
    request = cloud.request(ClientToken="t")
    for after in (False, True):
        cloud.front.fault(action="RunInstances", code="InternalError", drop=drop, after=after)
        if drop:
            with pytest.raises(botocore.exceptions.ConnectionClosedError):
                cloud.ec2.run_instances(**request)
        else:
            assert refused(cloud.ec2.run_instances, **request) == ("InternalError", 500)
        assert len(cloud.sim.instances()) == after
    (view,) = cloud.sim.instances()
    assert cloud.ec2.run_instances(**request)["Instances"][0]["InstanceId"] == view.id


def test_reset_empties_every_service(cloud: Cloud) -> None:
    cloud.client("s3").create_bucket(Bucket="ours")
    cloud.client("iam").create_role(RoleName="node", AssumeRolePolicyDocument="{}")
    cloud.front.reset()
    assert refused(cloud.client("iam").get_role, RoleName="node")[0] == "NoSuchEntity"
    assert cloud.client("s3").list_buckets()["Buckets"] == []


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
