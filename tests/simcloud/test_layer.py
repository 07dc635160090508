"""The life and the bill of instances that moto lacks and the simulated EC2 adds. An upgrade of moto must pass these."""

import moto
import pytest
from support.simcloud.in_process import Cloud, cloud, refused, served

__all__ = ["cloud", "served"]
NOT_FOUND = "InvalidInstanceID.NotFound"
JOB_TAG = {"Key": "job", "Value": "job-3"}
SPOT = {"MarketType": "spot"}


def tag_specifications(*kinds: str) -> list[dict[str, object]]:
    return [{"ResourceType": kind, "Tags": [JOB_TAG]} for kind in kinds]


def test_moto_has_the_version_that_is_patched() -> None:
    assert moto.__version__ == "5.2.5", "run these tests, mend support/simcloud/moto_patches.py, then change this line"


def test_instance_is_not_listed_too_early_nor_an_hour_after_its_end(cloud: Cloud) -> None:
    cloud.sim.visible_after = 10
    (id,) = cloud.launch(TagSpecifications=tag_specifications("instance"))
    for call in (cloud.ec2.describe_instances, cloud.ec2.terminate_instances):
        assert refused(call, InstanceIds=[id]) == (NOT_FOUND, 400)
    assert refused(cloud.ec2.create_tags, Resources=[id], Tags=[JOB_TAG])[0] == NOT_FOUND
    assert cloud.find_ids("job-3") == [] and cloud.sim.leaks()
    cloud.sim.advance(10)
    assert cloud.find_ids("job-3") == [id] and cloud.state(id) == "running"
    cloud.ec2.terminate_instances(InstanceIds=[id])
    assert "PrivateIpAddress" not in cloud.instance(id)
    cloud.sim.advance(3600)
    assert refused(cloud.instance, id)[0] == NOT_FOUND


def test_terminate_instances_with_one_unknown_id_ends_none(cloud: Cloud) -> None:
    ids = cloud.launch(2)
    assert refused(cloud.ec2.terminate_instances, InstanceIds=[*ids, "i-0123456789abcdef0"])[0] == NOT_FOUND
    assert [cloud.state(id) for id in ids] == ["running", "running"]


def test_power_off_follows_the_shutdown_behavior(cloud: Cloud) -> None:
    (terminating,) = cloud.launch(InstanceInitiatedShutdownBehavior="terminate")
    (stopping,) = cloud.launch()
    for id in (terminating, stopping):
        cloud.sim.power_off(id)
        assert cloud.instance(id)["StateTransitionReason"] == "", "EC2 gives no time for these"
    assert (cloud.state(terminating), cloud.state(stopping)) == ("terminated", "stopped")
    assert {(row["kind"], row["id"]) for row in cloud.sim.leaks()} >= {("instance", stopping)}


# --- dollars ---------------------------------------------------------------------------------------------------------


def test_bill_counts_seconds_from_launch_to_shutting_down(cloud: Cloud) -> None:
    cloud.sim.boot_seconds = cloud.sim.stop_seconds = 50
    cloud.sim.set_price("us-east-1a", "g5.xlarge", 0.36)
    disk = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 730, "VolumeType": "gp3"}}]
    (spot,) = cloud.launch(InstanceMarketOptions=SPOT, BlockDeviceMappings=disk)
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


def test_efs_is_billed_by_what_is_read_and_written(cloud: Cloud) -> None:
    (id,) = cloud.launch()
    cloud.sim.tick()
    cloud.sim.transfer(id, efs_read=2 * 10**9)
    cloud.sim.transfer(id, efs_written=3 * 10**9)
    assert cloud.sim.bill()["efs"] == pytest.approx(0.06 + 0.18)


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
