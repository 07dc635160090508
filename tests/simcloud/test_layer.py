"""The contract of the simulated EC2: what moto breaks and AWS keeps. An upgrade of moto must pass this again."""

import moto
import pytest
from support.simcloud.cloud import SimulatedAws
from support.simcloud.in_process import START, Cloud, cloud, refused, served

__all__ = ["cloud", "served"]
LATE = "InvalidInstanceID.NotFound"
DAY = {"Key": "job", "Value": "job-3"}


def tagged(*kinds: str) -> list[dict[str, object]]:
    return [{"ResourceType": kind, "Tags": [DAY]} for kind in kinds]


def test_moto_is_the_version_whose_insides_this_layer_knows() -> None:
    assert moto.__version__ == "5.2.5", "run these tests, mend simcloud/patches.py, then change this line"


# --- counts and tokens -----------------------------------------------------------------------------------------------


def test_as_many_as_there_are_between_the_least_and_the_most(cloud: Cloud) -> None:
    cloud.sim.capacity = {("us-east-1a", "g5.xlarge"): 3}
    assert len(cloud.launch(MinCount=1, MaxCount=5)) == 3
    assert cloud.sim.capacity == {("us-east-1a", "g5.xlarge"): 0}


def test_fewer_than_the_least_is_none_and_http_500(cloud: Cloud) -> None:
    cloud.sim.capacity = {("us-east-1a", "g5.xlarge"): 3}
    answer = refused(cloud.launch, 4)
    assert answer == ("InsufficientInstanceCapacity", 500)
    assert cloud.find_ids() == [] and cloud.sim.capacity["us-east-1a", "g5.xlarge"] == 3


def test_another_zone_has_its_own_capacity(cloud: Cloud) -> None:
    cloud.sim.capacity = {("us-east-1a", "g5.xlarge"): 0}
    (id,) = cloud.launch(Placement={"AvailabilityZone": "us-east-1b"})
    assert cloud.instance(id)["Placement"]["AvailabilityZone"] == "us-east-1b"


def test_a_terminated_instance_gives_its_place_back_and_a_taken_one_does_not(cloud: Cloud) -> None:
    cloud.sim.capacity = {("us-east-1a", "g5.xlarge"): 2}
    first, second = cloud.launch(2, InstanceMarketOptions={"MarketType": "spot"})
    cloud.ec2.terminate_instances(InstanceIds=[first])
    cloud.sim.interrupt(second, 0)
    assert cloud.sim.capacity["us-east-1a", "g5.xlarge"] == 1


def test_the_least_above_the_most_and_zero_are_refused(cloud: Cloud) -> None:
    assert refused(cloud.launch, MinCount=5, MaxCount=2)[0] == "InvalidParameterCombination"
    assert refused(cloud.launch, MinCount=0, MaxCount=2)[0] == "InvalidParameterValue"


def test_the_same_token_gives_the_same_instances(cloud: Cloud) -> None:
    ids = cloud.launch(3, ClientToken="t")
    assert cloud.launch(3, ClientToken="t") == ids == cloud.find_ids()
    assert cloud.find_ids(client_token="t") == ids and cloud.find_ids(client_token="other") == []


def test_the_same_token_gives_the_terminated_ones_too_with_their_state(cloud: Cloud) -> None:
    ids = cloud.launch(2, ClientToken="t")
    cloud.ec2.terminate_instances(InstanceIds=ids)
    again = cloud.ec2.run_instances(**cloud.request(MinCount=2, MaxCount=2, ClientToken="t"))["Instances"]
    assert [(one["InstanceId"], one["State"]["Name"]) for one in again] == [(id, "terminated") for id in ids]


def test_the_same_token_with_other_words_is_refused_and_other_regions_have_their_own(cloud: Cloud) -> None:
    ids = cloud.launch(ClientToken="t")
    assert refused(cloud.launch, 2, ClientToken="t")[0] == "IdempotentParameterMismatch"
    west = cloud.client("ec2", "us-west-2")
    words = cloud.request(ClientToken="t", ImageId=cloud.image("us-west-2"))
    assert west.run_instances(**words)["Instances"][0]["InstanceId"] not in ids
    assert cloud.find_ids() == ids


def test_a_token_that_launched_nothing_is_free(cloud: Cloud) -> None:
    cloud.sim.capacity = {("us-east-1a", "g5.xlarge"): 0}
    assert refused(cloud.launch, ClientToken="t")[0] == "InsufficientInstanceCapacity"
    cloud.sim.capacity = {}
    assert cloud.launch(2, ClientToken="t")


# --- life ------------------------------------------------------------------------------------------------------------


def test_a_young_instance_is_not_seen_by_id_nor_by_filter(cloud: Cloud) -> None:
    cloud.sim.visible_after = 10
    (id,) = cloud.launch(TagSpecifications=tagged("instance"))
    for call in (cloud.ec2.describe_instances, cloud.ec2.describe_instance_status, cloud.ec2.terminate_instances):
        assert refused(call, InstanceIds=[id]) == (LATE, 400)
    assert refused(cloud.ec2.create_tags, Resources=[id], Tags=[DAY])[0] == LATE
    assert cloud.find_ids(**{"tag:job": "job-3"}) == [] and cloud.sim.leaks()
    cloud.sim.advance(10)
    assert cloud.find_ids(**{"tag:job": "job-3"}) == [id] and cloud.state(id) == "running"


def test_pending_running_shutting_down_terminated_by_the_clock(cloud: Cloud) -> None:
    cloud.sim.boot_seconds, cloud.sim.stop_seconds = 30, 20
    (id,) = cloud.launch()
    cloud.sim.advance(29)
    assert cloud.state(id) == "pending" and cloud.sim.instances()[0].state == "pending"
    assert cloud.ec2.describe_instance_status(InstanceIds=[id])["InstanceStatuses"] == []
    cloud.sim.advance(1)
    assert cloud.state(id) == "running" and len(cloud.ec2.describe_instance_status()["InstanceStatuses"]) == 1
    (change,) = cloud.ec2.terminate_instances(InstanceIds=[id])["TerminatingInstances"]
    assert (change["PreviousState"]["Name"], change["CurrentState"]) == (
        "running",
        {"Code": 32, "Name": "shutting-down"},
    )
    cloud.sim.advance(19)
    assert cloud.state(id) == "shutting-down"
    cloud.sim.advance(1)
    assert cloud.state(id) == "terminated"


def test_a_terminated_instance_has_a_reason_and_a_time_and_no_address(cloud: Cloud) -> None:
    (id,) = cloud.launch()
    assert "StateReason" not in cloud.instance(id)
    cloud.ec2.terminate_instances(InstanceIds=[id])
    found = cloud.instance(id)
    assert found["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert found["StateTransitionReason"] == "User initiated (2026-11-21 20:00:00 GMT)"
    assert "PrivateIpAddress" not in found and "PublicIpAddress" not in found and found["NetworkInterfaces"] == []


def test_an_hour_after_its_end_an_instance_is_forgotten(cloud: Cloud) -> None:
    (id,) = cloud.launch()
    cloud.ec2.terminate_instances(InstanceIds=[id])
    cloud.sim.advance(1)
    assert cloud.state(id) == "terminated"
    cloud.sim.advance(3600)
    assert refused(cloud.instance, id)[0] == LATE


def test_one_unknown_id_terminates_none(cloud: Cloud) -> None:
    ids = cloud.launch(2)
    assert refused(cloud.ec2.terminate_instances, InstanceIds=[*ids, "i-0123456789abcdef0"])[0] == LATE
    assert [cloud.state(id) for id in ids] == ["running", "running"]


def test_a_protected_instance_ends_none(cloud: Cloud) -> None:
    first, second = cloud.launch(2)
    cloud.ec2.modify_instance_attribute(InstanceId=second, DisableApiTermination={"Value": True})
    assert refused(cloud.ec2.terminate_instances, InstanceIds=[first, second])[0] == "OperationNotPermitted"
    assert cloud.state(first) == "running"


def test_malformed_ids_are_told_from_unknown_ones(cloud: Cloud) -> None:
    for call in (cloud.ec2.describe_instances, cloud.ec2.terminate_instances):
        assert refused(call, InstanceIds=["i-nonsense"])[0] == "InvalidInstanceID.Malformed"


def test_terminating_twice_is_fine(cloud: Cloud) -> None:
    (id,) = cloud.launch()
    cloud.ec2.terminate_instances(InstanceIds=[id])
    (change,) = cloud.ec2.terminate_instances(InstanceIds=[id])["TerminatingInstances"]
    assert change["PreviousState"]["Name"] == change["CurrentState"]["Name"] == "terminated"


def test_a_spot_instance_cannot_be_stopped_and_a_stopped_one_keeps_its_disk(cloud: Cloud) -> None:
    (spot,) = cloud.launch(InstanceMarketOptions={"MarketType": "spot"})
    assert refused(cloud.ec2.stop_instances, InstanceIds=[spot])[0] == "UnsupportedOperation"
    (other,) = cloud.launch()
    cloud.ec2.stop_instances(InstanceIds=[other])
    assert cloud.state(other) == "stopped"
    assert refused(cloud.ec2.start_instances, InstanceIds=[other]) == ("NotImplemented", 501)
    assert {one["kind"] for one in cloud.sim.leaks() if one["id"] != spot} == {"instance", "volume"}


def test_pages_hold_instances_not_reservations(cloud: Cloud) -> None:
    ids = cloud.launch(7) + cloud.launch(2)
    pages = list(cloud.ec2.get_paginator("describe_instances").paginate(PaginationConfig={"PageSize": 5}))
    sizes = [sum(len(one["Instances"]) for one in page["Reservations"]) for page in pages]
    told = [i["InstanceId"] for page in pages for one in page["Reservations"] for i in one["Instances"]]
    assert sizes == [5, 4] and told == ids
    assert refused(cloud.ec2.describe_instances, InstanceIds=ids, MaxResults=5)[0] == "InvalidParameterCombination"


# --- how instances end -----------------------------------------------------------------------------------------------


class Listener:
    def __init__(self, sim: SimulatedAws) -> None:
        self.heard: list[tuple[object, ...]] = []
        sim.listeners.append(self)

    def on_running(self, instance: object) -> None:
        self.heard.append(("running", instance.id, instance.state))  # type: ignore[attr-defined]

    def on_dying(self, instance: object) -> None:
        self.heard.append(("dying", instance.id, instance.reason))  # type: ignore[attr-defined]

    def on_notice(self, instance: object, when: float, action: str) -> None:
        self.heard.append((action, instance.id, when))  # type: ignore[attr-defined]


def test_listeners_hear_of_running_notice_and_death_once_each_in_order(cloud: Cloud) -> None:
    ear = Listener(cloud.sim)
    (id,) = cloud.launch(InstanceMarketOptions={"MarketType": "spot"})
    cloud.state(id)
    cloud.sim.rebalance(id)
    cloud.sim.interrupt(id, 30)
    cloud.sim.advance(29.5)
    assert ear.heard == [("running", id, "running"), ("rebalance", id, START), ("terminate", id, START + 30)]
    cloud.sim.advance(0.5)
    cloud.ec2.terminate_instances(InstanceIds=[id])
    assert ear.heard[3:] == [("dying", id, "Server.SpotInstanceTermination")]
    assert cloud.instance(id)["StateTransitionReason"] == "Service initiated (2026-11-21 20:00:30 GMT)"


def test_a_listener_that_fails_is_kept_as_an_error_and_others_hear(cloud: Cloud) -> None:
    class Deaf(Listener):
        def on_running(self, instance: object) -> None:
            raise RuntimeError("no sshd")

    Deaf(cloud.sim)
    ear = Listener(cloud.sim)
    cloud.state(cloud.launch()[0])
    assert "no sshd" in cloud.sim.errors.pop() and ear.heard


def test_only_a_living_spot_instance_is_interrupted(cloud: Cloud) -> None:
    (id,) = cloud.launch()
    with pytest.raises(ValueError, match="not a living"):
        cloud.sim.interrupt(id)


def test_power_off_terminates_or_stops_as_the_request_said(cloud: Cloud) -> None:
    (ends,) = cloud.launch(InstanceInitiatedShutdownBehavior="terminate")
    (stops,) = cloud.launch()
    for id in (ends, stops):
        cloud.sim.power_off(id)
        assert cloud.instance(id)["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
        assert cloud.instance(id)["StateTransitionReason"] == "", "EC2 gives no time for these"
    assert (cloud.state(ends), cloud.state(stops)) == ("terminated", "stopped")


def test_a_kill_ends_a_pending_instance_without_shutting_down(cloud: Cloud) -> None:
    cloud.sim.boot_seconds = cloud.sim.stop_seconds = 60
    ear = Listener(cloud.sim)
    (id,) = cloud.launch()
    cloud.sim.kill(id, "Server.InsufficientInstanceCapacity")
    found = cloud.instance(id)
    assert (found["State"]["Name"], found["StateReason"]["Code"]) == (
        "terminated",
        "Server.InsufficientInstanceCapacity",
    )
    assert ear.heard == [("dying", id, "Server.InsufficientInstanceCapacity")] and not cloud.sim.leaks()


def test_a_reset_kills_the_living_and_no_address_is_used_again(cloud: Cloud) -> None:
    ear = Listener(cloud.sim)
    ids = cloud.launch(3)
    before = {one.private for one in cloud.sim.instances()}
    cloud.sim.boot_seconds = 99
    cloud.sim.reset()
    assert sorted(one[1] for one in ear.heard if one[0] == "dying") == sorted(ids)
    assert cloud.find_ids() == [] and cloud.sim.boot_seconds == 0
    cloud.launch(3)
    after = {one.private for one in cloud.sim.instances()}
    assert len(before | after) == 6 and all(one.startswith("127.1.") for one in before | after)


def test_the_settings_a_cloud_was_made_with_come_back(cloud: Cloud) -> None:
    try:
        one = SimulatedAws(boot_seconds=7, login=("me", 2222))
        one.boot_seconds = 1
        one.reset()
        assert (one.boot_seconds, one.login) == (7, ("me", 2222))
        with pytest.raises(TypeError):
            SimulatedAws(bootseconds=7)
    finally:
        SimulatedAws.current = cloud.sim


# --- dollars ---------------------------------------------------------------------------------------------------------


def test_the_bill_is_by_the_second_from_launch_to_shutting_down(cloud: Cloud) -> None:
    cloud.sim.boot_seconds = cloud.sim.stop_seconds = 50
    cloud.sim.set_price("us-east-1a", "g5.xlarge", 0.36)
    disk = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 730, "VolumeType": "gp3"}}]
    (spot,) = cloud.launch(InstanceMarketOptions={"MarketType": "spot"}, BlockDeviceMappings=disk)
    cloud.sim.advance(1000)
    cloud.ec2.terminate_instances(InstanceIds=[spot])
    cloud.sim.advance(5000)
    cloud.sim.bill()  # the disk goes with the machine, so late only because nobody looked
    cloud.sim.advance(5000)
    bill = cloud.sim.bill()
    assert bill["instances"] == {spot: pytest.approx(0.1)}
    assert bill["addresses"] == pytest.approx(0.005 * 1000 / 3600)
    assert bill["volumes"] == pytest.approx(0.08 * 6000 / 3600)
    assert bill["total"] == pytest.approx(0.1 + bill["addresses"] + bill["volumes"])


def test_a_minute_is_the_least_and_on_demand_has_its_own_price(cloud: Cloud) -> None:
    (id,) = cloud.launch(InstanceType="p4d.24xlarge")
    cloud.sim.advance(5)
    cloud.ec2.terminate_instances(InstanceIds=[id])
    assert cloud.sim.bill()["instances"][id] == pytest.approx(21.96 / 60)


def test_leaks_are_what_costs_and_leftovers_what_does_not(cloud: Cloud) -> None:
    cloud.sim.stop_seconds = 5
    cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster")
    cloud.ec2.allocate_address(TagSpecifications=tagged("elastic-ip"))
    ids = cloud.launch(TagSpecifications=tagged("instance", "volume"))
    assert sorted(one["kind"] for one in cloud.sim.leaks()) == ["address", "instance", "volume"]
    assert all(one["tags"] == {"job": "job-3"} for one in cloud.sim.leaks())
    cloud.ec2.terminate_instances(InstanceIds=ids)
    assert len(cloud.sim.leaks()) == 3, "shutting-down is not gone"
    cloud.sim.advance(5)
    assert [one["kind"] for one in cloud.sim.leaks()] == ["address"]
    assert [(one["kind"], one["name"]) for one in cloud.sim.leftovers()] == [("placement-group", "g")]
