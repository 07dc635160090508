"""A job's machines on the simulated EC2 in the test's own process: boto3 over HTTP, and a clock that waiting moves.

After a test the code under test ends the job, and nothing of it may remain.

`from support.aws_gang import GangTestbed, bed`; this needs the fixture `front` of tests/infra/conftest.py.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.aws_journal import IMAGE, INSTANCE_REQUEST, user_data
from support.log_lines import log_lines
from support.simcloud.http_server import AwsFrontend
from support.simcloud.in_process import account_at
from support.simcloud.spot_market import IMAGES, image_id, spot_price

from infra.aws import client as aws_client
from infra.aws import tags
from infra.aws.client import Account
from infra.aws.instances import gang as instances_gang
from infra.aws.instances import instances
from infra.aws.instances.gang import Gang
from infra.aws.instances.instances import Instance
from infra.aws.instances.request import InstanceRequest
from infra.aws.journal import Journal
from infra.aws.journal_events import JournalEvent
from infra.aws.launch_request import Place
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.stack import resources
from infra.aws.stack.key_pairs import generate_key_pair
from infra.aws.stack.stack import Stack
from train.tools import host

START = 1_795_291_200.0  # 2026-11-21 20:00:00 GMT
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


class Crash(BaseException):
    """Stands for a kill of the process."""


class Clock:
    """Replaces the module `time`, and the steady clock of this process, by the clock of the cloud."""

    def __init__(self, sim: Any) -> None:
        self.time = self.monotonic = sim.now
        self.sim = sim
        self.pauses: list[float] = []
        self.meanwhile: list[Callable[[], Any]] = []

    def set_time(self, unix_time: float) -> None:
        """Ignore the dates of the answers, which are those of the real web server."""

    def sleep(self, seconds: float) -> None:
        """Move the clock instead of waiting. Each call runs the next function of `meanwhile`."""
        if seconds:
            self.pauses.append(seconds)
            self.sim.advance(seconds)
            if self.meanwhile:
                self.meanwhile.pop(0)()


class GangTestbed:
    """One job in one stack, and what a test does with them."""

    def __init__(self, front: AwsFrontend, url: str, folder: Path) -> None:
        self.front = front
        self.sim = front.sim
        self.account = account_at(url, "us-east-1")
        self.clock = Clock(front.sim)
        self.journal = Journal(folder / "cloud.jsonl")
        self.uid = "job-3-9073e811"
        self.jobs = 3
        self.log_lines: list[str] = []
        self.hooks: list[tuple[Any, str, Any]] = []
        self.foreign_ids: list[str] = []  # ids and names of resources of somebody else
        self.stack = self.create_stack("us-east-1", self.account.ec2, ZONES)

    def create_stack(self, region: str, ec2: Any, zones: Sequence[str]) -> Stack:
        """Create the resources of a stack without the code of `infra.aws.stack`."""
        vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
        subnets = {}
        for index, zone in enumerate(zones):
            subnet = ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.77.{16 * index}.0/20", AvailabilityZone=zone)
            subnets[zone] = subnet["Subnet"]["SubnetId"]
        group = ec2.create_security_group(GroupName="imgnet", Description="d", VpcId=vpc)["GroupId"]
        ec2.import_key_pair(KeyName="imgnet-key", PublicKeyMaterial=public_key().encode())
        with contextlib.suppress(ClientError):  # it exists: one profile serves all regions
            self.account.iam.create_instance_profile(InstanceProfileName="imgnet-machine")
        return Stack(region, vpc, subnets, group, "fs-1", "imgnet-key", None, "fsap-1")

    def gang(self, account: Account | None = None) -> Gang:
        """Return the job's machines, as a new supervisor sees them."""
        return Gang(account or self.account, self.uid, self.journal, self.clock.sleep)

    def place(self, zone: str = "us-east-1a", market: str = "spot", type: str = "g5.xlarge") -> Place:
        price = spot_price(self.sim, zone, type) if market == "spot" else 1.006
        return Place(region=zone[:-1], zone=zone, type=type, market=market, price=price)

    def instance_request(self, place: Place) -> InstanceRequest:
        image = replace(IMAGE, id=self.image_id(place.region))
        job_tags = tags.job_tags(self.uid, "job-3", "ann", self.sim.now() + 7200, {})
        own_tags = {**job_tags, tags.BOOT_KEY: public_key(), tags.TERMS: ""}
        text = user_data("PRIVATE", public_key(), 7200, image)
        return replace(INSTANCE_REQUEST, own_tags=own_tags, image=image, stack=self.stack, user_data=text)

    def image_id(self, region: str = "us-east-1") -> str:
        return image_id(region, next(iter(IMAGES.values())))

    def acquire(self, *places: Place, n: int = 3, seconds: float = 1200.0, **changes: Any) -> list[Instance]:
        """Rent n machines in the first of these places that has them; without places in zone a or b.

        `changes` are changes of the request.
        """
        make_request = lambda place: replace(self.instance_request(place), **changes)  # noqa: E731
        places = places or (self.place(ZONES[0]), self.place(ZONES[1]))
        return self.gang().acquire(places, [*map(str, range(n))], make_request, dict(BUILTIN_TYPES), seconds)

    def find_or_acquire(self) -> list[Instance]:
        """Do what a supervisor does at its start: finish open requests, and rent machines if there are none."""
        gang = self.gang()
        gang.finish_open_requests()
        return list(instances.live_by_name(gang.list_instances()).values()) or self.acquire()

    # --- observations ----------------------------------------------------------------------------------------------

    def live_instances(self, zone: str = "") -> list[Any]:
        return [row for row in self.sim.instances() if row.state in ("pending", "running") and zone in row.zone]

    def placement_group_names(self) -> list[str]:
        return sorted(name for _, name in self.sim.groups)

    def journal_kinds(self) -> list[type[JournalEvent]]:
        return [type(event) for event in self.journal.events(JournalEvent)]

    # --- faults ----------------------------------------------------------------------------------------------------

    def hook(self, client: Any, event: str, function: Callable[..., Any]) -> None:
        """Let a function see or change the requests or responses of a client, until the test ends."""
        client.meta.events.register_last(event, function)
        self.hooks.append((client, event, function))

    def change_instances(self, change: Callable[[dict[str, Any]], Any], action: str = "DescribeInstances") -> None:
        """Let a function change each instance in responses to an action, or remove it by returning False."""

        def change_response(parsed: dict[str, Any], **_: Any) -> None:
            for reservation in parsed.get("Reservations", [parsed]):
                for instance in list(reservation.get("Instances", [])):
                    if change(instance) is False:
                        reservation["Instances"].remove(instance)

        for client in (self.account.ec2, self.account.ec2_no_retry):
            self.hook(client, f"after-call.ec2.{action}", change_response)

    def remove_faults(self) -> None:
        for client, event, function in self.hooks:
            client.meta.events.unregister(event, function)
        self.hooks, self.front.faults = [], []

    def count_steps(self, act: Callable[[], Any], at: int | None) -> int:
        """Run `act`, killed at step `at`, and return the number of steps that it made.

        Steps are requests and responses of EC2, and the moments before and after an event is written to the journal.
        """
        count = 0
        write = self.journal.write

        def step(**_: Any) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise Crash

        def counted_write(event: JournalEvent) -> None:
            step()
            write(event)
            step()

        for client in (self.account.ec2, self.account.ec2_no_retry):
            for name in ("before-send.ec2", "response-received.ec2"):
                self.hook(client, name, step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.journal, "write", counted_write)
            try:
                act()
                assert at is None, f"there is no step {at}"
            except Crash:
                pass
            finally:
                self.remove_faults()
        return count

    def end_job(self) -> None:
        """End the job. Raises `AssertionError` when something of it remains."""
        self.remove_faults()
        self.clock.meanwhile = []
        assert self.gang().terminate_job() == []
        resources = [row for row in self.sim.leaks() if row["id"] not in self.foreign_ids]
        resources += [row for row in self.sim.leftovers() if row["kind"] in ("placement-group", "network-interface")]
        assert not [row for row in resources if row.get("name", "") not in self.foreign_ids]


@functools.cache
def public_key() -> str:
    return generate_key_pair()[1]


@pytest.fixture
def bed(
    front: AwsFrontend, front_of_session: tuple[AwsFrontend, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GangTestbed]:
    """A stack without machines, at 20:00. After the test the job is ended, and nothing may be left of it."""
    front.sim.clock = lambda: START
    testbed = GangTestbed(front, front_of_session[1], tmp_path)
    for module in (aws_client, instances_gang, instances, resources):
        monkeypatch.setattr(module, "time", testbed.clock)
    monkeypatch.setattr(host, "steady_clock", testbed.clock)
    with log_lines("infra") as testbed.log_lines:
        yield testbed
    testbed.end_job()
    testbed.remove_faults()
    assert not front.sim.errors, front.sim.errors
