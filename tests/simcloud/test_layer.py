"""The behavior of EC2 that moto lacks and the simulated EC2 adds. An upgrade of moto must pass these tests."""

import moto
import pytest
from support.simcloud.cloud import SimulatedAws
from support.simcloud.in_process import START, Cloud, cloud, refused, served

__all__ = ["cloud", "served"]
NOT_FOUND = "InvalidInstanceID.NotFound"
JOB_TAG = {"Key": "job", "Value": "job-3"}


def tag_specifications(*kinds: str) -> list[dict[str, object]]:
    return [{"ResourceType": kind, "Tags": [JOB_TAG]} for kind in kinds]


def test_moto_has_the_version_that_is_patched() -> None:
    assert moto.__version__ == "5.2.5", "run these tests, mend support/simcloud/moto_patches.py, then change this line"


# --- counts and tokens -----------------------------------------------------------------------------------------------


def test_run_instances_launches_what_the_capacity_allows(cloud: Cloud) -> None:
    cloud.sim.capacity = {("us-east-1a", "g5.xlarge"): 3}
    assert len(cloud.launch(MinCount=1, MaxCount=5)) == 3
    assert cloud.sim.capacity == {("us-east-1a", "g5.xlarge"): 0}


def test_run_instances_below_min_count_launches_none(cloud: Cloud) -> None:
    cloud.sim.capacity = {("us-east-1a", "g5.xlarge"): 3}
    error = refused(cloud.launch, 4)
    assert error == ("InsufficientInstanceCapacity", 500)
    assert cloud.find_ids() == [] and cloud.sim.capacity["us-east-1a", "g5.xlarge"] == 3


def test_capacity_returns_after_terminate_but_not_interrupt(cloud: Cloud) -> None:
    cloud.sim.capacity = {("us-east-1a", "g5.xlarge"): 2}
    first, second = cloud.launch(2, InstanceMarketOptions={"MarketType": "spot"})
    cloud.ec2.terminate_instances(InstanceIds=[first])
    cloud.sim.interrupt(second, 0)
    assert cloud.sim.capacity["us-east-1a", "g5.xlarge"] == 1


def test_client_token_repeated_gives_the_same_instances(cloud: Cloud) -> None:
    ids = cloud.launch(3, ClientToken="t")
    assert cloud.launch(3, ClientToken="t") == ids == cloud.find_ids()


def test_client_token_repeated_shows_the_present_states(cloud: Cloud) -> None:
    ids = cloud.launch(2, ClientToken="t")
    cloud.ec2.terminate_instances(InstanceIds=ids)
    instances = cloud.ec2.run_instances(**cloud.request(MinCount=2, MaxCount=2, ClientToken="t"))["Instances"]
    assert [(instance["InstanceId"], instance["State"]["Name"]) for instance in instances] == [
        (id, "terminated") for id in ids
    ]


def test_client_token_is_bound_to_parameters_and_region(cloud: Cloud) -> None:
    ids = cloud.launch(ClientToken="t")
    assert refused(cloud.launch, 2, ClientToken="t")[0] == "IdempotentParameterMismatch"
    west = cloud.client("ec2", "us-west-2")
    request = cloud.request(ClientToken="t", ImageId=cloud.image("us-west-2"))
    assert west.run_instances(**request)["Instances"][0]["InstanceId"] not in ids
    assert cloud.find_ids() == ids


# --- life ------------------------------------------------------------------------------------------------------------


def test_describe_instances_hides_young_instances(cloud: Cloud) -> None:
    cloud.sim.visible_after = 10
    (id,) = cloud.launch(TagSpecifications=tag_specifications("instance"))
    for call in (cloud.ec2.describe_instances, cloud.ec2.terminate_instances):
        assert refused(call, InstanceIds=[id]) == (NOT_FOUND, 400)
    assert refused(cloud.ec2.create_tags, Resources=[id], Tags=[JOB_TAG])[0] == NOT_FOUND
    assert cloud.find_ids("job-3") == [] and cloud.sim.leaks()
    cloud.sim.advance(10)
    assert cloud.find_ids("job-3") == [id] and cloud.state(id) == "running"


def test_instance_changes_state_by_the_clock(cloud: Cloud) -> None:
    cloud.sim.boot_seconds = 30
    cloud.sim.stop_seconds = 20
    (id,) = cloud.launch()
    cloud.sim.advance(29)
    assert cloud.state(id) == "pending" and cloud.sim.instances()[0].state == "pending"
    cloud.sim.advance(1)
    assert cloud.state(id) == "running"
    (change,) = cloud.ec2.terminate_instances(InstanceIds=[id])["TerminatingInstances"]
    assert (change["PreviousState"]["Name"], change["CurrentState"]) == (
        "running",
        {"Code": 32, "Name": "shutting-down"},
    )
    cloud.sim.advance(19)
    assert cloud.state(id) == "shutting-down"
    cloud.sim.advance(1)
    assert cloud.state(id) == "terminated"


def test_terminated_instance_has_reason_and_time_but_no_address(cloud: Cloud) -> None:
    (id,) = cloud.launch()
    assert "StateReason" not in cloud.instance(id)
    cloud.ec2.terminate_instances(InstanceIds=[id])
    instance = cloud.instance(id)
    assert instance["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert instance["StateTransitionReason"] == "User initiated (2026-11-21 20:00:00 GMT)"
    assert "PrivateIpAddress" not in instance and "PublicIpAddress" not in instance
    assert instance["NetworkInterfaces"] == []


def test_terminated_instance_is_forgotten_after_an_hour(cloud: Cloud) -> None:
    (id,) = cloud.launch()
    cloud.ec2.terminate_instances(InstanceIds=[id])
    cloud.sim.advance(1)
    assert cloud.state(id) == "terminated"
    cloud.sim.advance(3600)
    assert refused(cloud.instance, id)[0] == NOT_FOUND


def test_terminate_instances_with_one_unknown_id_ends_none(cloud: Cloud) -> None:
    ids = cloud.launch(2)
    assert refused(cloud.ec2.terminate_instances, InstanceIds=[*ids, "i-0123456789abcdef0"])[0] == NOT_FOUND
    assert [cloud.state(id) for id in ids] == ["running", "running"]


def test_stop_instances_keeps_the_disk_and_rejects_spot(cloud: Cloud) -> None:
    (spot,) = cloud.launch(InstanceMarketOptions={"MarketType": "spot"})
    assert refused(cloud.ec2.stop_instances, InstanceIds=[spot])[0] == "UnsupportedOperation"
    (on_demand,) = cloud.launch()
    cloud.ec2.stop_instances(InstanceIds=[on_demand])
    assert cloud.state(on_demand) == "stopped"
    assert {row["kind"] for row in cloud.sim.leaks() if row["id"] != spot} == {"instance", "volume"}


# --- how instances end -----------------------------------------------------------------------------------------------


class Listener:
    def __init__(self, sim: SimulatedAws) -> None:
        self.events: list[tuple[object, ...]] = []
        sim.listeners.append(self)

    def on_running(self, instance: object) -> None:
        self.events.append(("running", instance.id, instance.state))  # type: ignore[attr-defined]

    def on_dying(self, instance: object) -> None:
        self.events.append(("dying", instance.id, instance.reason))  # type: ignore[attr-defined]

    def on_notice(self, instance: object, when: float, action: str) -> None:
        self.events.append((action, instance.id, when))  # type: ignore[attr-defined]


def test_listeners_get_each_event_once_in_order(cloud: Cloud) -> None:
    listener = Listener(cloud.sim)
    (id,) = cloud.launch(InstanceMarketOptions={"MarketType": "spot"})
    cloud.state(id)
    cloud.sim.rebalance(id)
    cloud.sim.interrupt(id, 30)
    cloud.sim.advance(29.5)
    assert listener.events == [("running", id, "running"), ("rebalance", id, START), ("terminate", id, START + 30)]
    cloud.sim.advance(0.5)
    cloud.ec2.terminate_instances(InstanceIds=[id])
    assert listener.events[3:] == [("dying", id, "Server.SpotInstanceTermination")]
    assert cloud.instance(id)["StateTransitionReason"] == "Service initiated (2026-11-21 20:00:30 GMT)"


def test_power_off_follows_the_shutdown_behavior(cloud: Cloud) -> None:
    (terminating,) = cloud.launch(InstanceInitiatedShutdownBehavior="terminate")
    (stopping,) = cloud.launch()
    for id in (terminating, stopping):
        cloud.sim.power_off(id)
        assert cloud.instance(id)["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
        assert cloud.instance(id)["StateTransitionReason"] == "", "EC2 gives no time for these"
    assert (cloud.state(terminating), cloud.state(stopping)) == ("terminated", "stopped")


def test_kill_terminates_a_pending_instance_at_once(cloud: Cloud) -> None:
    cloud.sim.boot_seconds = cloud.sim.stop_seconds = 60
    listener = Listener(cloud.sim)
    (id,) = cloud.launch()
    cloud.sim.kill(id, "Server.InsufficientInstanceCapacity")
    instance = cloud.instance(id)
    assert instance["State"]["Name"] == "terminated"
    assert instance["StateReason"]["Code"] == "Server.InsufficientInstanceCapacity"
    assert listener.events == [("dying", id, "Server.InsufficientInstanceCapacity")] and not cloud.sim.leaks()


def test_reset_ends_live_instances_and_keeps_addresses_unique(cloud: Cloud) -> None:
    listener = Listener(cloud.sim)
    ids = cloud.launch(3)
    addresses_before = {view.private for view in cloud.sim.instances()}
    cloud.sim.boot_seconds = 99
    cloud.sim.reset()
    assert sorted(str(event[1]) for event in listener.events if event[0] == "dying") == sorted(ids)
    assert cloud.find_ids() == [] and cloud.sim.boot_seconds == 0
    cloud.launch(3)
    addresses = addresses_before | {view.private for view in cloud.sim.instances()}
    assert len(addresses) == 6 and all(address.startswith("127.1.") for address in addresses)


# --- dollars ---------------------------------------------------------------------------------------------------------


def test_bill_counts_seconds_from_launch_to_shutting_down(cloud: Cloud) -> None:
    cloud.sim.boot_seconds = cloud.sim.stop_seconds = 50
    cloud.sim.set_price("us-east-1a", "g5.xlarge", 0.36)
    disk = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 730, "VolumeType": "gp3"}}]
    (spot,) = cloud.launch(InstanceMarketOptions={"MarketType": "spot"}, BlockDeviceMappings=disk)
    cloud.sim.advance(1000)
    cloud.ec2.terminate_instances(InstanceIds=[spot])
    cloud.sim.advance(5000)
    cloud.sim.bill()  # the clock ticks only in calls: the disk is deleted here, with the instance
    cloud.sim.advance(5000)
    bill = cloud.sim.bill()
    assert bill["instances"] == {spot: pytest.approx(0.1)}
    assert bill["addresses"] == pytest.approx(0.005 * 1000 / 3600)
    assert bill["volumes"] == pytest.approx(0.08 * 6000 / 3600)
    assert bill["total"] == pytest.approx(0.1 + bill["addresses"] + bill["volumes"])


def test_bill_is_for_a_minute_at_least_and_by_market(cloud: Cloud) -> None:
    (id,) = cloud.launch(InstanceType="p4d.24xlarge")
    cloud.sim.advance(5)
    cloud.ec2.terminate_instances(InstanceIds=[id])
    assert cloud.sim.bill()["instances"][id] == pytest.approx(21.96 / 60)


def test_leaks_cost_and_leftovers_do_not(cloud: Cloud) -> None:
    cloud.sim.stop_seconds = 5
    cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster")
    cloud.ec2.allocate_address(TagSpecifications=tag_specifications("elastic-ip"))
    ids = cloud.launch(TagSpecifications=tag_specifications("instance", "volume"))
    assert sorted(row["kind"] for row in cloud.sim.leaks()) == ["address", "instance", "volume"]
    assert all(row["tags"] == {"job": "job-3"} for row in cloud.sim.leaks())
    cloud.ec2.terminate_instances(InstanceIds=ids)
    assert len(cloud.sim.leaks()) == 3, "shutting-down is not gone"
    cloud.sim.advance(5)
    assert [row["kind"] for row in cloud.sim.leaks()] == ["address"]
    assert [(row["kind"], row["name"]) for row in cloud.sim.leftovers()] == [("placement-group", "g")]
