"""A job's machines on the simulated EC2, in the test's own process: boto3 over HTTP, and a clock that moves only when
somebody waits. What a test leaves there is ended by the code under test, and nothing may remain: the leak oracle.

`from gangbed import Bed, bed`; wants the fixture `front` of tests/infra/conftest.py.
"""

import contextlib
import functools
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.simcloud.http_server import AwsFrontend

from infra.aws import client as aws_client
from infra.aws import journal
from infra.aws.client import Account
from infra.aws.instances import gang as instances_gang
from infra.aws.instances import instances
from infra.aws.instances.amis import Image
from infra.aws.instances.gang import Gang
from infra.aws.instances.instances import Instance
from infra.aws.instances.request import InstanceRequest, Place
from infra.aws.instances.user_data import build_user_data
from infra.aws.journal import Journal
from infra.aws.market import billing
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.stack.stack import Stack

START = 1_795_291_200.0  # 2026-11-21 20:00:00 GMT
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
TRUST = '{"Version": "2012-10-17", "Statement": []}'
account_at = functools.cache(lambda url: Account("us-east-1"))  # its clients take long to make


class Crash(BaseException):
    """The process is killed here."""


class Clock:
    """Stands in for the module `time`, by the clock of the cloud."""

    def __init__(self, sim: Any) -> None:
        self.time = self.monotonic = sim.now
        self.sim, self.pauses, self.meanwhile = sim, list[float](), list[Callable[[], Any]]()

    def sleep(self, seconds: float) -> None:
        """Wait by moving the clock; `meanwhile` happens while somebody waits, one thing each time."""
        if seconds:
            self.pauses.append(seconds)
            self.sim.advance(seconds)
            if self.meanwhile:
                self.meanwhile.pop(0)()


class Bed:
    """One job in one stack."""

    def __init__(self, front: AwsFrontend, url: str, folder: Path) -> None:
        self.front, self.sim, self.account = front, front.sim, account_at(url)
        self.clock, self.journal = Clock(front.sim), Journal(folder / "cloud.jsonl")
        self.uid, self.jobs = "job-3-9073e811", 3
        self.said: list[str] = []
        self.hooked: list[tuple[Any, str, Any]] = []
        self.others: list[str] = []  # what is somebody else's
        self.stack = self.network("us-east-1", self.account.ec2, ZONES)

    def network(self, region: str, ec2: Any, zones: Sequence[str]) -> Stack:
        """A stack, made by hand."""
        vpc = ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
        made = {
            zone: ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.7.{16 * place}.0/20", AvailabilityZone=zone)
            for place, zone in enumerate(zones)
        }
        group = ec2.create_security_group(GroupName="imgnet", Description="d", VpcId=vpc)["GroupId"]
        ec2.import_key_pair(KeyName="imgnet-key", PublicKeyMaterial=public_key().encode())
        with contextlib.suppress(ClientError):  # one for all regions
            self.account.iam.create_instance_profile(InstanceProfileName="imgnet-machine")
        subnets = {zone: one["Subnet"]["SubnetId"] for zone, one in made.items()}
        return Stack(region, vpc, subnets, group, "fs-1", "imgnet-key", "/k", "imgnet-machine", None, "fsap-1")

    def gang(self, account: Account | None = None) -> Gang:
        """The job's machines, as whoever comes anew sees them."""
        return Gang(account or self.account, self.uid, self.journal, self.said.append, self.clock.sleep)

    def place(self, zone: str = "us-east-1a", market: str = "spot", type: str = "g5.xlarge") -> Place:
        """A place, at the price of the day."""
        price = self.sim.market.spot_price(zone, type) if market == "spot" else 1.006
        return Place(region=zone[:-1], zone=zone, type=type, market=market, price=price)

    def want(self, place: Place) -> InstanceRequest:
        """What a machine is to be, there."""
        image = Image(self.image(place.region), "ubuntu", 22, 75, "/dev/sda1", "", "/opt/pytorch/bin/python")
        data = build_user_data(
            poweroff_seconds=7200, private_key="PRIVATE", public_key=public_key(), file_system="fs-1", access_point="fsap-1",
            region=place.region, ssh_user="ubuntu", python=image.python,
        )  # fmt: skip
        return InstanceRequest(
            job_uid=self.uid, job_name="job-3", owner="me", expires=self.sim.now() + 7200, image=image, stack=self.stack,
            user_data=data, host_key=public_key(),
        )  # fmt: skip

    def image(self, region: str = "us-east-1") -> str:
        """An image of a region."""
        from support.simcloud.spot_market import IMAGES, image_id

        return image_id(region, next(iter(IMAGES.values())))

    def acquire(self, *places: Place, n: int = 3, seconds: float = 1200.0, **wants: Any) -> list[Instance]:
        """Get n machines from the first of these places that has them: zones a and b unless named."""
        names = [str(one) for one in range(n)]

        def want(place: Place) -> InstanceRequest:
            return replace(self.want(place), **wants)

        found = places or (self.place(ZONES[0]), self.place(ZONES[1]))
        return self.gang().acquire(found, names, want, dict(BUILTIN_TYPES), seconds)

    def gather(self, *places: Place, n: int = 3) -> list[Instance]:
        """What the supervisor does when it starts: finish what was begun, look, and ask only if nothing is there."""
        own = self.gang()
        own.finish_open_requests()
        return list(instances.live_by_name(own.list_instances()).values()) or self.acquire(*places, n=n)

    # --- what is seen ------------------------------------------------------------------------------------------------

    def alive(self, zone: str = "") -> list[Any]:
        """The machines that cost, those of a zone if it is named."""
        return [one for one in self.sim.instances() if one.state in ("pending", "running") and zone in one.zone]

    def groups(self) -> list[str]:
        """The names of all placement groups."""
        return sorted(name for _, name in self.sim.groups)

    def what(self) -> list[str]:
        """The kinds of the journal's lines."""
        return [one["what"] for one in self.journal.lines()]

    def tokens(self) -> list[str]:
        """Note the client token of each RunInstances that is sent from here on."""
        found: list[str] = []
        self.hook(
            self.account.ec2_no_retry,
            "before-call.ec2.RunInstances",
            lambda params, **_: found.append(token_in(params)),
        )
        return found

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def hook(self, client: Any, event: str, function: Callable[..., Any]) -> None:
        """Let a function see, or change, what a client says or hears, until the test ends."""
        client.meta.events.register_last(event, function)
        self.hooked.append((client, event, function))

    def doctor(self, change: Callable[[dict[str, Any]], Any], action: str = "DescribeInstances") -> None:
        """Change each machine of an answer."""

        def heard(parsed: dict[str, Any], **_: Any) -> None:
            for reservation in parsed.get("Reservations", [parsed]):
                for one in list(reservation.get("Instances", [])):
                    if change(one) is False:
                        reservation["Instances"].remove(one)

        for client in (self.account.ec2, self.account.ec2_no_retry):
            self.hook(client, f"after-call.ec2.{action}", heard)

    def unhook(self) -> None:
        """Let all go well again."""
        for client, event, function in self.hooked:
            client.meta.events.unregister(event, function)
        self.hooked = []
        self.front.faults = []

    def nothing_left(self) -> None:
        """End the job; then nothing of it may be there."""
        self.unhook()
        self.clock.meanwhile = []
        assert self.gang().terminate_job() == []
        left = [one for one in self.sim.leaks() if one["id"] not in self.others]
        left += [one for one in self.sim.leftovers() if one["kind"] in ("placement-group", "network-interface")]
        assert not [one for one in left if one.get("name", "") not in self.others]


def token_in(params: dict[str, Any]) -> str:
    """The client token of a request that is about to be sent."""
    return str(params["body"]["ClientToken"])


@functools.cache
def public_key() -> str:
    """A public key for ssh."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", f"{folder}/key"]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        return " ".join(Path(f"{folder}/key.pub").read_text().split()[:2])


@pytest.fixture
def bed(
    front: AwsFrontend, front_of_session: tuple[AwsFrontend, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bed]:
    """A stack with nothing in it, at 20:00. After the test the job is ended, and nothing may be left of it."""
    front.sim.clock = lambda: START
    made = Bed(front, front_of_session[1], tmp_path)
    for module in (aws_client, instances_gang, instances, journal):
        monkeypatch.setattr(module, "time", made.clock)
    yield made
    made.nothing_left()
    made.unhook()
    assert not front.sim.errors, front.sim.errors


def machines_dollars(made: Bed) -> float:
    """What the journal says that the machines have cost, disks and addresses too."""
    return sum(one.total_dollars for one in billing.machine_costs(made.journal, made.sim.now()))
