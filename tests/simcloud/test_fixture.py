"""The whole simulated cloud, as other tests and a person use it: the leak check, and the command."""

import pytest
from support.simcloud.fixture import IMAGE, CloudProcess, simcloud  # noqa: F401  # pytest finds the fixture by its name here
from support.simcloud.in_process import launch_machines

pytestmark = pytest.mark.rehearsal  # whole processes, which take long


def launch(cloud: CloudProcess) -> str:
    image = cloud.client("ssm").get_parameter(Name=IMAGE)["Parameter"]["Value"]
    return launch_machines(cloud.client("ec2"), image)[0]


def test_assert_clean_fails_on_what_costs_and_on_a_changed_foreign_resource(
    simcloud: CloudProcess,  # noqa: F811
) -> None:
    assert simcloud.instances() == [] == simcloud.leaks() and simcloud.bill()["total"] < 1e-5
    simcloud.assert_clean()
    ec2 = simcloud.client("ec2")
    id = launch(simcloud)
    with pytest.raises(AssertionError, match=id):
        simcloud.assert_clean()
    ec2.terminate_instances(InstanceIds=[id])
    simcloud.wait_for(lambda: not simcloud.leaks())
    (foreign_id,) = [row["id"] for row in simcloud.foreign_resources if row["kind"] == "instance"]
    ec2.create_tags(Resources=[foreign_id], Tags=[{"Key": "imgnet:stack", "Value": "imgnet"}])
    with pytest.raises(AssertionError, match="touched"):
        simcloud.assert_clean()
    simcloud.begin()
