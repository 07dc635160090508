"""The door of the simulated cloud: faults by call, counting, orders over HTTP, and killing who calls."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import boto3
import botocore.exceptions
import pytest
from botocore.config import Config
from support.simcloud.http_server import Fault
from support.simcloud.in_process import Cloud, cloud, refused, served

__all__ = ["cloud", "served"]


def post(cloud: Cloud, order: str, **words: Any) -> Any:
    """Give an order over HTTP."""
    request = urllib.request.Request(f"{cloud.url}/_sim/{order}", json.dumps(words).encode())
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_fault_strikes_so_many_times_after_so_many_calls(cloud: Cloud) -> None:
    cloud.front.fault(action="DescribeVpcs", code="RequestLimitExceeded", skip=1, times=2)
    calls = []
    for _ in range(4):
        try:
            cloud.ec2.describe_vpcs()
            calls.append("ok")
        except botocore.exceptions.ClientError as error:
            calls.append(str(error.response["ResponseMetadata"]["HTTPStatusCode"]))
    assert calls == ["ok", "503", "503", "ok"] and cloud.front.count("DescribeVpcs") == 4


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
def test_a_code_has_the_http_status_of_ec2_unless_one_is_given(cloud: Cloud, code: str, status: int) -> None:
    cloud.front.fault(action="RunInstances", code=code)
    cloud.front.fault(action="RunInstances", code=code, status=418)
    words = cloud.request()
    assert refused(cloud.ec2.run_instances, **words) == (code, status)
    assert refused(cloud.ec2.run_instances, **words) == (code, 418)
    assert cloud.sim.instances() == []


def test_what_real_retries_do_is_seen(cloud: Cloud) -> None:
    cloud.front.fault(action="RunInstances", code="InsufficientInstanceCapacity", times=9)
    words = cloud.request(ClientToken="t")
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    config = Config(retries={"mode": "standard"})
    patient = boto3.client("ec2", region_name="us-east-1", endpoint_url=cloud.url, config=config, **keys)
    assert refused(patient.run_instances, **words)[0] == "InsufficientInstanceCapacity"
    assert cloud.front.count("RunInstances") == 3, "standard mode tries three times"


def test_a_lost_answer_means_that_the_call_was_done(cloud: Cloud) -> None:
    cloud.front.fault(action="RunInstances", code="InternalError", after=True)
    words = cloud.request(ClientToken="t")
    assert refused(cloud.ec2.run_instances, **words) == ("InternalError", 500)
    (there,) = cloud.sim.instances()
    assert cloud.ec2.run_instances(**words)["Instances"][0]["InstanceId"] == there.id


@pytest.mark.parametrize("after", [False, True])
def test_a_dropped_connection_gives_no_answer(cloud: Cloud, after: bool) -> None:
    cloud.front.fault(action="RunInstances", drop=True, after=after)
    words = cloud.request()
    with pytest.raises(botocore.exceptions.ConnectionClosedError):
        cloud.ec2.run_instances(**words)
    assert len(cloud.sim.instances()) == after


def test_a_slow_call_is_done_and_others_go_on_meanwhile(cloud: Cloud) -> None:
    cloud.front.fault(action="RunInstances", delay=2)
    impatient = cloud.new_client("ec2", read_timeout=0.3)
    words = cloud.request()
    begun = time.monotonic()
    with pytest.raises(botocore.exceptions.ReadTimeoutError):
        impatient.run_instances(**words)
    assert cloud.ec2.describe_vpcs() and time.monotonic() - begun < 2
    deadline = time.monotonic() + 20
    while not cloud.sim.instances() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(cloud.sim.instances()) == 1


def test_a_fault_may_wait_for_the_call_of_a_number(cloud: Cloud) -> None:
    cloud.front.fault(code="Unavailable", when=2)
    cloud.ec2.describe_vpcs()
    assert refused(cloud.ec2.describe_subnets)[0] == "Unavailable"
    cloud.ec2.describe_subnets()


def test_services_are_told_apart_and_each_gets_errors_as_it_writes_them(cloud: Cloud) -> None:
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
    for service, (call, words, action) in calls.items():
        name = service.replace("service-quotas", "servicequotas")
        cloud.front.fault(service=name, action=action, code="AccessDenied", status=403)
        assert refused(getattr(cloud.client(service), call), **words) == ("AccessDenied", 403)
        assert cloud.front.calls[-1] == (name, action)
        cloud.front.fault(service="other", action=action, code="AccessDenied")
    cloud.client("sts").get_caller_identity()
    assert cloud.front.count()["GetCallerIdentity"] == 2


def test_all_services_answer_at_the_one_url_of_the_environment(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("AWS_ENDPOINT_URL", cloud.url), ("AWS_ACCESS_KEY_ID", "k"), ("AWS_SECRET_ACCESS_KEY", "s")):
        monkeypatch.setenv(name, value)
    made = {
        name: boto3.client(name, region_name="us-east-1")
        for name in ("ec2", "iam", "s3", "sts", "efs", "ssm", "pricing", "service-quotas")
    }
    assert made["sts"].get_caller_identity()["Account"] == "123456789012"
    made["s3"].create_bucket(Bucket="ours")
    made["s3"].put_object(Bucket="ours", Key="a/b", Body=b"text")
    assert made["s3"].get_object(Bucket="ours", Key="a/b")["Body"].read() == b"text"
    made["iam"].create_role(RoleName="node", AssumeRolePolicyDocument="{}")
    assert made["iam"].get_role(RoleName="node")["Role"]["RoleName"] == "node"
    assert made["pricing"].get_products(ServiceCode="AmazonEC2")["PriceList"]
    assert ("s3", "PutObject") in cloud.front.calls
    cloud.front.reset()
    assert refused(made["iam"].get_role, RoleName="node")[0] == "NoSuchEntity", "a reset empties every service"
    assert made["s3"].list_buckets()["Buckets"] == []


def test_the_server_is_on_loopback_alone(cloud: Cloud) -> None:
    port = int(cloud.url.rpartition(":")[2])
    with socket.socket() as one:
        one.settimeout(5)
        assert one.connect_ex(("127.0.0.2", port)) != 0, "it listens at 127.0.0.1, not at 0.0.0.0"


def test_a_listener_may_call_the_api(cloud: Cloud) -> None:
    class Caller:
        def on_running(self, instance: Any) -> None:
            self.said = cloud.state(instance.id)

        on_dying = on_notice = lambda *words: None

    caller = Caller()
    cloud.sim.listeners.append(caller)
    cloud.launch()
    cloud.ec2.describe_vpcs()
    assert caller.said == "running"


# --- orders ----------------------------------------------------------------------------------------------------------


def test_orders_over_http_do_what_the_methods_do(cloud: Cloud) -> None:
    assert post(cloud, "set", boot_seconds=5, quota_vcpu={"L-3819A6DF": 8}, login=["me", 2222])["boot_seconds"] == 5
    assert post(cloud, "capacity", **{"us-east-1a/g5.xlarge": 2}) == {"us-east-1a/g5.xlarge": 2}
    post(cloud, "price", zone="us-east-1a", type="g5.xlarge", price=0.6)
    first, second = cloud.launch(2, InstanceMarketOptions={"MarketType": "spot"}, UserData="hello")
    assert refused(cloud.launch, InstanceMarketOptions={"MarketType": "spot"})[0] == "MaxSpotInstanceCountExceeded"
    post(cloud, "advance", seconds=5)
    shown = post(cloud, "instances")
    assert [(one["id"], one["state"], one["user_data"]) for one in shown] == [
        (first, "running", "hello"),
        (second, "running", "hello"),
    ]
    assert shown[0]["ami_tags"] == {"imgnet:user": "me", "imgnet:port": "2222"}
    post(cloud, "rebalance", id=first)
    post(cloud, "interrupt", id=first, notice=0)
    post(cloud, "power_off", id=second)
    assert [one["state"] for one in post(cloud, "instances", region="us-east-1")] == ["terminated"] * 2
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
    ("order", "words"),
    [("nonsense", {}), ("set", {"boot": 1}), ("kill", {"id": "i-0"}), ("fault", {"what": 1}), ("interrupt", {})],
)
def test_a_wrong_order_is_an_error_with_a_line(cloud: Cloud, order: str, words: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(cloud, order, **words)
    assert caught.value.code == 400 and json.load(caught.value)["error"]


# --- killing the caller ----------------------------------------------------------------------------------------------

CALLER = """
import sys, boto3
ec2 = boto3.client("ec2", region_name="us-east-1", endpoint_url=sys.argv[1],
                   aws_access_key_id="k", aws_secret_access_key="s")
for name in ("a", "b", "c"):
    ec2.create_placement_group(GroupName=name, Strategy="cluster")
"""


@pytest.mark.parametrize(("when", "left"), [("before", ["a"]), ("after", ["a", "b"])])
def test_the_caller_dies_at_the_call_of_a_number(cloud: Cloud, when: str, left: list[str]) -> None:
    post(cloud, "kill_caller", at=2, when=when)
    done = subprocess.run([sys.executable, "-c", CALLER, cloud.url], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [one["name"] for one in cloud.sim.leftovers()] == left
    assert cloud.front.calls == [("ec2", "CreatePlacementGroup")] * 2 and len(cloud.front.killed) == 1


def test_this_process_is_not_killed(cloud: Cloud) -> None:
    cloud.front.kill_caller_at(1)
    answer = refused(cloud.ec2.create_placement_group, GroupName="g", Strategy="cluster")
    assert answer == ("SimulatorBroken", 501) and cloud.front.killed == [] and cloud.sim.leftovers() == []


def test_a_fault_of_no_kind_and_a_kill_at_no_time_are_refused(cloud: Cloud) -> None:
    with pytest.raises(ValueError, match="before or after"):
        cloud.front.kill_caller_at(1, "during")
    assert not Fault(action="RunInstances").strikes("ec2", "DescribeVpcs", 1)
