"""The HTTP server of the simulated cloud: faults, counts of calls, control commands, and kills of callers."""

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import boto3
import botocore.exceptions
import pytest
from botocore.config import Config
from support.simcloud import http_server
from support.simcloud.http_server import Fault
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
        ("Unavailable", 503),
        ("InternalError", 500),
        ("InsufficientInstanceCapacity", 500),
        ("UnauthorizedOperation", 403),
        ("VcpuLimitExceeded", 400),
        ("ExpiredToken", 400),
    ],
)
def test_fault_has_the_http_status_of_its_code_by_default(cloud: Cloud, code: str, status: int) -> None:
    cloud.front.fault(action="RunInstances", code=code)
    cloud.front.fault(action="RunInstances", code=code, status=418)
    request = cloud.request()
    assert refused(cloud.ec2.run_instances, **request) == (code, status)
    assert refused(cloud.ec2.run_instances, **request) == (code, 418)
    assert cloud.sim.instances() == []


def test_fault_is_counted_for_each_retry_of_botocore(cloud: Cloud) -> None:
    cloud.front.fault(action="RunInstances", code="InsufficientInstanceCapacity", times=9)
    request = cloud.request(ClientToken="t")
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    config = Config(retries={"mode": "standard"})
    retrying_client = boto3.client("ec2", region_name="us-east-1", endpoint_url=cloud.url, config=config, **keys)
    assert refused(retrying_client.run_instances, **request)[0] == "InsufficientInstanceCapacity"
    assert cloud.front.count("RunInstances") == 3, "standard mode tries three times"


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


def test_serve_answers_all_services_at_one_url(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("AWS_ENDPOINT_URL", cloud.url), ("AWS_ACCESS_KEY_ID", "k"), ("AWS_SECRET_ACCESS_KEY", "s")):
        monkeypatch.setenv(name, value)
    clients = {
        name: boto3.client(name, region_name="us-east-1")
        for name in ("ec2", "iam", "s3", "sts", "efs", "ssm", "pricing", "service-quotas")
    }
    assert clients["sts"].get_caller_identity()["Account"] == "123456789012"
    clients["s3"].create_bucket(Bucket="ours")
    clients["s3"].put_object(Bucket="ours", Key="a/b", Body=b"text")
    assert clients["s3"].get_object(Bucket="ours", Key="a/b")["Body"].read() == b"text"
    clients["iam"].create_role(RoleName="node", AssumeRolePolicyDocument="{}")
    assert clients["iam"].get_role(RoleName="node")["Role"]["RoleName"] == "node"
    assert clients["pricing"].get_products(ServiceCode="AmazonEC2")["PriceList"]
    assert ("s3", "PutObject") in cloud.front.calls
    cloud.front.reset()
    assert refused(clients["iam"].get_role, RoleName="node")[0] == "NoSuchEntity", "a reset empties every service"
    assert clients["s3"].list_buckets()["Buckets"] == []


def test_serve_listens_on_loopback_only(cloud: Cloud) -> None:
    port = int(cloud.url.rpartition(":")[2])
    with socket.socket() as connection:
        connection.settimeout(5)
        assert connection.connect_ex(("127.0.0.2", port)) != 0, "it listens at 127.0.0.1, not at 0.0.0.0"


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
    post(cloud, "price", zone="us-east-1a", type="g5.xlarge", price=0.6)
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
    post(cloud, "power_off", id=second)
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


def test_spare_callers_withdraws_kills_of_calls_that_have_not_come(cloud: Cloud) -> None:
    post(cloud, "kill_caller", at=1)
    post(cloud, "spare_callers")
    assert subprocess.run([sys.executable, "-c", CALLER, cloud.url], timeout=120).returncode == 0
    assert len(cloud.front.calls) == 3 and cloud.front.killed == []


def test_kill_caller_at_never_kills_this_process(cloud: Cloud) -> None:
    cloud.front.kill_caller_at(1)
    error = refused(cloud.ec2.create_placement_group, GroupName="g", Strategy="cluster")
    assert error == ("SimulatorBroken", 501) and cloud.front.killed == [] and cloud.sim.leftovers() == []


def test_fault_and_kill_caller_at_reject_bad_arguments(cloud: Cloud) -> None:
    with pytest.raises(ValueError, match="before or after"):
        cloud.front.kill_caller_at(1, "during")
    assert not Fault(action="RunInstances").strikes("ec2", "DescribeVpcs", 1)


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
