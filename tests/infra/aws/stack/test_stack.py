import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.aws_stack import HERE, NOTHING, REGION, WHOLE, Killed, Seen, account, aws, counts, home
from support.simcloud.cloud import SimulatedAws
from support.simcloud.http_server import serve

from infra.aws.errors import CloudError
from infra.aws.stack import resources, stack

__all__ = ["account", "aws", "home"]
IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
TAG = [{"Key": "Name", "Value": "imgnet"}]


def missing_words(account: Seen) -> str:
    return " | ".join(stack.missing_parts(account))


def test_before_the_first_launch_all_is_missing_and_to_say_so_changes_nothing(account: Seen, aws: Path) -> None:
    words = missing_words(account)
    for part in ("network 10.77.0.0/16", "security group", "file system", "key pair", "role"):
        assert part in words
    assert stack.find(account) is None and not account.changes() and not list(aws.iterdir())


def test_it_is_made_once_and_is_then_whole(account: Seen) -> None:
    said: list[str] = []
    made = stack.ensure(account, HERE, said.append)
    assert counts(account) == WHOLE and len(said) > 5
    assert stack.missing_parts(account) == [] and stack.find(account) == made
    account.calls.clear()
    assert stack.ensure(account, HERE, said.append) == made
    assert not account.changes() and len(account.calls) < 30


def test_what_is_told_of_it_is_what_a_launch_needs(account: Seen, aws: Path) -> None:
    one = stack.ensure(account, HERE)
    assert list(one.subnets) == ["us-west-1a", "us-west-1b"] and one.region == REGION and one.bucket is None
    assert one.key_file == str(aws / ".imgnet/aws/id_ed25519") and one.instance_profile == "imgnet-machine"
    assert one.access_point.startswith("fsap-") and one.file_system.startswith("fs-")


def test_all_of_it_bears_our_tag_from_the_call_that_makes_it(account: Seen) -> None:
    stack.ensure(account, HERE)
    made = [(action, words) for action, words in account.calls if action.startswith(("Create", "Import"))]
    free = {"CreateRoute", "CreateMountTarget"}  # parts of something that bears it
    assert len(made) > 10
    for action, words in made:
        tags = words.get("Tags") or [tag for one in words.get("TagSpecifications", []) for tag in one["Tags"]]
        assert action in free or {"Key": "imgnet:stack", "Value": "imgnet"} in tags, action


def test_it_is_removed_in_order_and_to_remove_it_again_does_nothing(account: Seen) -> None:
    stack.ensure(account, HERE)
    assert stack.remove(account, True) == [] and counts(account) == NOTHING
    account.calls.clear()
    assert stack.remove(account, True) == [] and not account.changes()


def test_data_stays_unless_it_is_named_with_its_price_and_is_found_again(account: Seen) -> None:
    made = stack.ensure(account, HERE)
    (line,) = stack.remove(account, False)
    assert made.file_system in line and "GB" in line and "$ a month" in line and "--delete-data" in line
    assert counts(account) == {**NOTHING, "FileSystems": 1, "AccessPoints": 1}
    again = stack.ensure(account, HERE)
    assert again.file_system == made.file_system and again.access_point == made.access_point
    assert counts(account) == WHOLE


@pytest.fixture
def cloud(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedAws]:
    """The simulated cloud, where things take their time."""
    sim = SimulatedAws(boot_seconds=0, stop_seconds=1000, efs_seconds=0.2, login=("me", 22))
    sim.reset()
    server, url = serve(port=0, sim=sim)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    yield sim
    server.shutdown()
    sim.reset()


def test_it_is_not_removed_under_machines_that_run_and_waits_for_those_that_end(
    cloud: SimulatedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "BUSY_SECONDS", 30.0)
    account = Seen()
    one = stack.ensure(account, HERE)
    image = account.ssm.get_parameter(Name=IMAGE)["Parameter"]["Value"]
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "imgnet:job", "Value": "job-3-9073e811"}]}]
    network = {"DeviceIndex": 0, "SubnetId": one.subnets["us-west-1a"], "Groups": [one.security_group]}
    words = {
        "InstanceType": "m5.large",
        "IamInstanceProfile": {"Name": one.instance_profile},
        "NetworkInterfaces": [network],
    }
    (machine,) = account.ec2.run_instances(
        ImageId=image, MinCount=1, MaxCount=1, KeyName=one.key_name, TagSpecifications=tags, **words
    )["Instances"]
    account.calls.clear()
    with pytest.raises(CloudError, match=rf"{machine['InstanceId']} \(job-3-9073e811\).*imgnet-cluster down") as no:
        stack.remove(account, True)
    assert "\n" not in str(no.value) and not account.changes() and stack.find(account) == one
    account.ec2.terminate_instances(InstanceIds=[machine["InstanceId"]])
    account.after["DeleteSecurityGroup"] = lambda: setattr(cloud, "stop_seconds", 0)  # in use until then
    assert stack.remove(account, True) == [] and counts(account) == NOTHING
    assert account.changes().count("DeleteSecurityGroup") == 2
    assert not cloud.leaks() and not cloud.leftovers()


def test_what_of_it_cannot_be_removed_is_named_and_the_rest_goes_on(account: Seen) -> None:
    stack.ensure(account, HERE)
    account.deny = {"DeleteSubnet": "DependencyViolation"}
    left = stack.remove(account, True)
    assert any("subnet-" in line and "DependencyViolation" in line for line in left)
    found = counts(account)
    assert found["Roles"] == found["FileSystems"] == found["InternetGateways"] == 0
    account.deny = {}
    assert stack.remove(account, True) == [] and counts(account) == NOTHING


# --- crashes, and two at once ---------------------------------------------------------------------------------------


def until_done(account: Seen, verb: Callable[[], Any]) -> list[str]:
    """Type it again and again; each time it dies right after the first change that was not made before."""
    made: list[str] = []
    lives = 1
    while lives < 10:
        account.die = lives
        try:
            verb()
        except Killed:
            change = json.dumps(account.calls[-1], default=str)
            lives = lives + 1 if change in made else 1
            made.append(change)
            assert all(count <= WHOLE[name] for name, count in counts(account).items()), made
            continue
        account.die = None
        return [json.loads(one)[0] for one in made]
    raise AssertionError(made)


def test_killed_after_each_change_and_typed_again_it_is_made_once_and_then_removed(account: Seen) -> None:
    died = until_done(account, lambda: stack.ensure(account, HERE, bucket="imgnet-data"))
    assert counts(account) == WHOLE and stack.missing_parts(account) == []
    assert len(died) > 25 and {"CreateVpc", "PutRolePolicy", "PutBucketTagging"} <= {*died}
    died = until_done(account, lambda: stack.remove(account, True))
    assert counts(account) == NOTHING and not account.s3.list_buckets()["Buckets"]
    assert len(died) > 15 and {"DeleteVpc", "DeleteFileSystem", "DeleteRole", "DeleteBucket"} <= {*died}


def test_what_a_killed_one_has_left_is_removed_too(account: Seen) -> None:
    for lives in (2, 5, 8, 12):
        account.die = lives
        with pytest.raises(Killed):
            stack.ensure(account, HERE)
        assert stack.remove(account, True) == [] and counts(account) == NOTHING


def test_two_at_once_make_one(aws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "SETTLE", 0.4)
    found: list[Any] = []
    start = threading.Barrier(2)

    def one() -> None:
        own = Seen()
        for name in ("ec2", "efs", "iam"):
            getattr(own, name)
        start.wait(20)
        try:
            found.append(stack.ensure(own, HERE))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(found) == 2 and found[0] == found[1], found
    points = counts(Seen())
    assert points.pop("AccessPoints") in (1, 2)  # AWS takes the client token for one, moto does not
    assert points == {name: count for name, count in WHOLE.items() if name != "AccessPoints"}


BEFORE = (
    "CreateVpc",
    "CreateSubnet",
    "AttachInternetGateway",
    "CreateSecurityGroup",
    "ImportKeyPair",
    "CreateFileSystem",
)
AFTER = ("CreateVpc", "CreateInternetGateway", "CreateRouteTable", "CreateVpcEndpoint")


@pytest.mark.parametrize("moment, actions", [("before", BEFORE), ("after", AFTER)])
def test_whoever_makes_the_same_just_before_or_after_agrees_on_one(
    account: Seen, moment: str, actions: tuple[str, ...]
) -> None:
    somebody = Seen()
    for action in actions:
        other: list[Any] = []
        getattr(account, moment)[action] = lambda other=other: other.append(stack.ensure(somebody, HERE))
        made = stack.ensure(account, HERE)
        assert other == [made] and counts(account) == WHOLE, action
        assert stack.remove(account, True) == [], action


def test_an_intent_is_written_before_each_call_that_changes(account: Seen, aws: Path) -> None:
    account.die = 1
    with pytest.raises(Killed):
        stack.ensure(account, HERE)
    (line,) = (aws / f".imgnet/aws/{REGION}.jsonl").read_text().splitlines()
    assert json.loads(line)["what"] == "make role"
    account.die = None
    stack.ensure(account, HERE)
    assert len(stack.stack_journal(REGION).lines()) >= len(account.changes())


# --- what is not ours -----------------------------------------------------------------------------------------------


def foreign(account: Seen) -> list[Any]:
    """Things of others that are called as ours are; all of AWS that does not bear our tag."""
    vpc = account.ec2.describe_vpcs(Filters=[{"Name": "tag:Name", "Values": ["imgnet"]}])["Vpcs"]
    groups = account.ec2.describe_security_groups(GroupNames=["imgnet"])["SecurityGroups"]
    return [
        [one for one in vpc if one["CidrBlock"] == "10.9.0.0/16"],
        [one for one in groups if one["VpcId"] == vpc[0]["VpcId"] or one["Description"] == "theirs"],
        account.ec2.describe_key_pairs(KeyNames=["imgnet"])["KeyPairs"],
        [one["FileSystemId"] for one in account.efs.describe_file_systems(CreationToken="imgnet")["FileSystems"]],
        account.iam.get_role(RoleName="imgnet")["Role"],
    ]


def test_things_of_others_with_our_name_are_as_they_were_after_all(account: Seen) -> None:
    names = [{"ResourceType": "vpc", "Tags": TAG}]
    vpc = account.ec2.create_vpc(CidrBlock="10.9.0.0/16", TagSpecifications=names)["Vpc"]["VpcId"]
    account.ec2.create_security_group(GroupName="imgnet", Description="theirs", VpcId=vpc)
    account.ec2.create_key_pair(KeyName="imgnet")
    account.efs.create_file_system(CreationToken="imgnet", Tags=TAG)
    account.iam.create_role(RoleName="imgnet", AssumeRolePolicyDocument="{}")
    before = foreign(account)
    assert all(before) and before[1][0]["VpcId"] == vpc
    stack.ensure(account, HERE)
    assert stack.remove(account, True) == []
    assert foreign(account) == before


def test_a_file_system_with_our_token_and_not_our_tag_is_refused(account: Seen) -> None:
    account.efs.create_file_system(CreationToken=f"imgnet-{REGION}")
    for verb in (
        stack.find,
        stack.missing_parts,
        lambda one: stack.ensure(one, HERE),
        lambda one: stack.remove(one, True),
    ):
        with pytest.raises(CloudError, match=r"file system fs-.* is not ours: it has no tag imgnet:stack; remove it"):
            verb(account)


# --- bad luck -------------------------------------------------------------------------------------------------------


def test_without_a_right_to_look_at_roles_the_rest_is_told_and_made(account: Seen) -> None:
    stack.ensure(account, HERE)
    may_not = Seen()
    may_not.deny = {name: "AccessDenied" for name in ("GetInstanceProfile", "GetRole", "ListRole", "PutRole")}
    assert stack.missing_parts(may_not) == ["role: cannot be looked at"]
    said: list[str] = []
    assert stack.find(may_not) == stack.ensure(may_not, HERE, said.append) == stack.find(account)
    assert said == ["role: cannot be looked at, taken as there"]


def test_too_many_networks_in_the_region_is_said_with_what_to_type(account: Seen) -> None:
    account.deny = {"CreateVpc": "VpcLimitExceeded"}
    with pytest.raises(CloudError, match=r"as many networks.*aws service-quotas .*L-F678F1CE.*--region us-west-1"):
        stack.ensure(account, HERE)


@pytest.mark.parametrize("text", ["0.0.0.0/0", "203.0.113.0/24", "::1", "home", "0.0.0.0/32"])
def test_ssh_is_let_in_from_one_address_only_and_nothing_is_made_for_another(account: Seen, text: str) -> None:
    with pytest.raises(CloudError, match=r"from one IPv4 address"):
        stack.ensure(account, text)
    assert not account.calls


def test_an_expired_token_says_so(account: Seen) -> None:
    account.deny = {"Describe": "ExpiredToken", "Get": "ExpiredToken"}
    with pytest.raises(CloudError, match="does not accept the credentials"):
        stack.missing_parts(account)
