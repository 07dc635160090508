"""The whole simulated cloud, as other tests and a person use it: the leak check, and the command."""

import signal
from collections.abc import Iterator

import pytest
from support.simcloud.__main__ import post_command
from support.simcloud.fixture import IMAGE, CloudProcess, simcloud  # noqa: F401  # pytest finds the fixture by its name here
from support.simcloud.in_process import launch_machines
from support.simcloud.process_keeper import process_ids

pytestmark = pytest.mark.rehearsal  # whole processes, which take long


def launch(cloud: CloudProcess) -> str:
    """Launch an instance with a machine, and return its id."""
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


@pytest.fixture
def own_cloud() -> Iterator[CloudProcess]:
    """A cloud of this test's own, which the test may end."""
    cloud = CloudProcess()
    yield cloud
    cloud.close()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_signal_to_the_cloud(own_cloud: CloudProcess, signal_number: int) -> None:
    id = launch(own_cloud)
    own_cloud.wait_for((own_cloud.machine_home(id) / ".imgnet/ready").exists)
    assert process_ids(own_cloud.folder)
    own_cloud.process.send_signal(signal_number)
    exit_code = own_cloud.process.wait(120)
    assert exit_code == (-signal_number if signal_number == signal.SIGKILL else 0), own_cloud.log
    own_cloud.wait_for(lambda: not process_ids(own_cloud.folder))
    with pytest.raises(OSError):
        post_command(own_cloud.url, "instances")
