"""The HTTP server of the simulated cloud: faults, counts of calls, control commands, and kills of callers."""

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import botocore.exceptions
import pytest
from support.simcloud import http_server
from support.simcloud.in_process import Cloud, cloud, refused, served
from support.waiting import wait_for

from infra.aws import tags
from infra.aws.stack.policies import user_policy

__all__ = ["cloud", "served"]


def post(cloud: Cloud, command: str, **arguments: Any) -> Any:
    """Post a control command over HTTP."""
    request = urllib.request.Request(f"{cloud.url}/_sim/{command}", json.dumps(arguments).encode())
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


# --- faults ----------------------------------------------------------------------------------------------------------


def test_fault_strikes_times_calls_after_skip_calls(cloud: Cloud) -> None:
    cloud.front.fault(action="DescribeVpcs", code="RequestLimitExceeded", skip=1, times=2)
    outcomes = []
    for _ in range(4):
        try:
            cloud.ec2.describe_vpcs()
            outcomes.append("ok")
        except botocore.exceptions.ClientError as error:
            outcomes.append(str(error.response["ResponseMetadata"]["HTTPStatusCode"]))
    assert outcomes == ["ok", "503", "503", "ok"] and cloud.front.count("DescribeVpcs") == 4


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("RequestLimitExceeded", 503),
        ("InsufficientInstanceCapacity", 500),
        ("UnauthorizedOperation", 403),
        ("VcpuLimitExceeded", 400),
    ],
)
def test_fault_has_the_http_status_of_its_code_by_default(cloud: Cloud, code: str, status: int) -> None:
    cloud.front.fault(action="RunInstances", code=code)
    cloud.front.fault(action="RunInstances", code=code, status=418)
    request = cloud.request()
    assert refused(cloud.ec2.run_instances, **request) == (code, status)
    assert refused(cloud.ec2.run_instances, **request) == (code, 418)
    assert cloud.sim.instances() == []


def test_fault_after_does_the_call_and_loses_the_answer(cloud: Cloud) -> None:
    cloud.front.fault(action="RunInstances", code="InternalError", after=True)
    request = cloud.request(ClientToken="t")
    assert refused(cloud.ec2.run_instances, **request) == ("InternalError", 500)
    (view,) = cloud.sim.instances()
    assert cloud.ec2.run_instances(**request)["Instances"][0]["InstanceId"] == view.id


@pytest.mark.parametrize("after", [False, True])
def test_fault_drop_ends_the_connection(cloud: Cloud, after: bool) -> None:
    cloud.front.fault(action="RunInstances", drop=True, after=after)
    request = cloud.request()
    with pytest.raises(botocore.exceptions.ConnectionClosedError):
        cloud.ec2.run_instances(**request)
    assert len(cloud.sim.instances()) == after


def test_fault_delay_does_not_delay_other_calls(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(http_server, "time", SimpleNamespace(sleep=is_over.wait))
    cloud.front.fault(action="RunInstances", delay=600)
    impatient_client = cloud.new_client("ec2", read_timeout=0.3)
    request = cloud.request()
    with pytest.raises(botocore.exceptions.ReadTimeoutError):
        impatient_client.run_instances(**request)
    assert cloud.ec2.describe_vpcs() and not cloud.sim.instances()
    is_over.set()
    wait_for(cloud.sim.instances)
    assert len(cloud.sim.instances()) == 1


def test_fault_when_strikes_the_call_of_that_number(cloud: Cloud) -> None:
    cloud.front.fault(code="Unavailable", when=2)
    cloud.ec2.describe_vpcs()
    assert refused(cloud.ec2.describe_subnets)[0] == "Unavailable"
    cloud.ec2.describe_subnets()


def test_fault_has_the_error_format_of_each_service(cloud: Cloud) -> None:
    calls = {
        "ec2": ("describe_vpcs", {}, "DescribeVpcs"),
        "iam": ("get_role", {"RoleName": "x"}, "GetRole"),
        "sts": ("get_caller_identity", {}, "GetCallerIdentity"),
        "efs": ("describe_file_systems", {}, "DescribeFileSystems"),
        "ssm": ("get_parameter", {"Name": "x"}, "GetParameter"),
        "s3": ("create_bucket", {"Bucket": "b"}, "CreateBucket"),
        "service-quotas": ("get_service_quota", {"ServiceCode": "ec2", "QuotaCode": "x"}, "GetServiceQuota"),
        "pricing": ("get_products", {"ServiceCode": "AmazonEC2"}, "GetProducts"),
    }
    for service, (method, arguments, action) in calls.items():
        name = service.replace("service-quotas", "servicequotas")
        cloud.front.fault(service=name, action=action, code="AccessDenied", status=403)
        assert refused(getattr(cloud.client(service), method), **arguments) == ("AccessDenied", 403)
        assert cloud.front.calls[-1] == (name, action)
        cloud.front.fault(service="other", action=action, code="AccessDenied")
    cloud.client("sts").get_caller_identity()
    assert cloud.front.count()["GetCallerIdentity"] == 2


def test_reset_empties_every_service(cloud: Cloud) -> None:
    cloud.client("s3").create_bucket(Bucket="ours")
    cloud.client("iam").create_role(RoleName="node", AssumeRolePolicyDocument="{}")
    cloud.front.reset()
    assert refused(cloud.client("iam").get_role, RoleName="node")[0] == "NoSuchEntity"
    assert cloud.client("s3").list_buckets()["Buckets"] == []


def test_listener_may_call_the_api(cloud: Cloud) -> None:
    class Caller:
        def on_running(self, instance: Any) -> None:
            self.state = cloud.state(instance.id)

        on_dying = on_notice = lambda *arguments: None

    caller = Caller()
    cloud.sim.listeners.append(caller)
    cloud.launch()
    cloud.ec2.describe_vpcs()
    assert caller.state == "running"


# --- control ---------------------------------------------------------------------------------------------------------


def test_control_commands_do_what_the_methods_do(cloud: Cloud) -> None:
    assert post(cloud, "set", boot_seconds=5, quota_vcpu={"L-3819A6DF": 8}, login=["me", 2222])["boot_seconds"] == 5
    assert post(cloud, "capacity", **{"us-east-1a/g5.xlarge": 2}) == {"us-east-1a/g5.xlarge": 2}
    cloud.sim.set_price("us-east-1a", "g5.xlarge", 0.6)
    first, second = cloud.launch(2, InstanceMarketOptions={"MarketType": "spot"}, UserData="hello")
    assert refused(cloud.launch, InstanceMarketOptions={"MarketType": "spot"})[0] == "MaxSpotInstanceCountExceeded"
    post(cloud, "advance", seconds=5)
    rows = post(cloud, "instances")
    assert [(row["id"], row["state"], row["user_data"]) for row in rows] == [
        (first, "running", "hello"),
        (second, "running", "hello"),
    ]
    assert rows[0]["ami_tags"] == {"imgnet:user": "me", "imgnet:port": "2222"}
    post(cloud, "rebalance", id=first)
    post(cloud, "interrupt", id=first, notice=0)
    post(cloud, "kill", id=second)
    assert [row["state"] for row in post(cloud, "instances", region="us-east-1")] == ["terminated"] * 2
    assert post(cloud, "bill")["instances"] == {id: pytest.approx(0.01) for id in (first, second)}
    assert post(cloud, "leaks") == [] and post(cloud, "leftovers") == [] and post(cloud, "errors") == []
    assert post(cloud, "calls")["count"] == {"GetParameter": 2, "RunInstances": 2}
    assert post(cloud, "capacity", **{"us-east-1a/g5.xlarge": None}) == {}
    post(cloud, "fault", action="DescribeVpcs", code="Unavailable")
    post(cloud, "no_faults")
    cloud.ec2.describe_vpcs()
    post(cloud, "reset")
    assert post(cloud, "instances") == [] and post(cloud, "calls")["calls"] == []
    cloud.sim.login = ("ubuntu", 22)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("nonsense", {}), ("set", {"boot": 1}), ("kill", {"id": "i-0"}), ("fault", {"what": 1}), ("interrupt", {})],
)
def test_control_command_bad_input_is_a_one_line_error(cloud: Cloud, command: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(cloud, command, **arguments)
    assert caught.value.code == 400 and json.load(caught.value)["error"]


# --- killing the caller ----------------------------------------------------------------------------------------------

CALLER = """
import sys, boto3
ec2 = boto3.client("ec2", region_name="us-east-1", endpoint_url=sys.argv[1],
                   aws_access_key_id="k", aws_secret_access_key="s")
for name in ("a", "b", "c"):
    ec2.create_placement_group(GroupName=name, Strategy="cluster")
"""


@pytest.mark.parametrize(("when", "created"), [("before", ["a"]), ("after", ["a", "b"])])
def test_kill_caller_at_kills_before_or_after_that_call(cloud: Cloud, when: str, created: list[str]) -> None:
    post(cloud, "kill_caller", at=2, when=when)
    completed = subprocess.run([sys.executable, "-c", CALLER, cloud.url], timeout=120)
    assert completed.returncode == -signal.SIGKILL
    assert [row["name"] for row in cloud.sim.leftovers()] == created
    assert cloud.front.calls == [("ec2", "CreatePlacementGroup")] * 2 and len(cloud.front.killed) == 1


def test_kill_caller_at_never_kills_this_process(cloud: Cloud) -> None:
    cloud.front.kill_caller_at(1)
    error = refused(cloud.ec2.create_placement_group, GroupName="g", Strategy="cluster")
    assert error == ("SimulatorBroken", 501) and cloud.front.killed == [] and cloud.sim.leftovers() == []


# --- EC2 Instance Connect --------------------------------------------------------------------------------------------


def test_instance_connect_takes_keys_for_running_instances_with_our_tag_only(cloud: Cloud) -> None:
    send = cloud.client("ec2-instance-connect").send_ssh_public_key
    tag = {"Key": tags.STACK, "Value": tags.STACK_VALUE}
    own_id, other_id = (
        cloud.launch(TagSpecifications=[{"ResourceType": "instance", "Tags": instance_tags}])[0]
        for instance_tags in ([tag], [{"Key": "Name", "Value": "other"}])
    )
    cloud.sim.tick()
    key = {"InstanceOSUser": "ubuntu", "SSHPublicKey": "ssh-ed25519 AAAA" + "A" * 240}
    cloud.sim.policy = user_policy()
    assert send(InstanceId=own_id, **key)["Success"]
    assert refused(send, InstanceId=other_id, **key)[0] == "AccessDeniedException"
    cloud.sim.policy = None
    assert refused(send, InstanceId="i-0123456789abcdef0", **key)[0] == "EC2InstanceNotFoundException"
    assert refused(send, InstanceId=own_id, **{**key, "SSHPublicKey": "x" * 256})[0] == "InvalidArgsException"
    cloud.ec2.terminate_instances(InstanceIds=[own_id])
    assert refused(send, InstanceId=own_id, **key)[0] == "EC2InstanceStateInvalidException"
