"""The simulated AWS: moto, and what it leaves out: settings, a clock, events, the life of instances, dollars."""

import hashlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # 1301 images of 2017

from moto.core.model_instances import reset_model_data
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend, ec2_backends
from moto.ssm.models import ssm_backends
from support.simcloud.billing import BillingMeter
from support.simcloud.lifecycle import INTERRUPTED, InstanceEndings, InstanceView
from support.simcloud.traffic import Moved

from infra.aws.stack.policies import Policy

if TYPE_CHECKING:
    from support.simcloud.placement_groups import PlacementGroup
    from support.simcloud.reservations import CapacityReservation

ACCOUNT = "123456789012"
moto_originals: dict[str, Any] = {}  # what `moto_patches` has replaced, by name
EC2_CALLS: dict[str, Callable[[Any], ActionResult]] = {}  # what `ec2_call` marks


class AwsError(EC2ClientError):
    """An error of EC2 by its code. The HTTP status follows from `moto_patches.HTTP_STATUS_BY_CODE`."""


def refuse_if(is_wrong: object, code: str, message: str) -> None:
    if is_wrong:
        raise AwsError(code, message)


def call_moto(name: str, *arguments: Any, **options: Any) -> Any:
    return moto_originals[name](*arguments, **options)


def ec2_call(function: Callable[[Any], ActionResult]) -> Callable[[Any], ActionResult]:
    """Let a function answer EC2's call of the same name in moto's place. It gets moto's `EC2Response`."""
    EC2_CALLS[function.__name__] = function
    return function


@dataclass(kw_only=True)
class Settings:
    """What may be set on a cloud at any time. `reset` returns to what the constructor was given."""

    visible_after: float = 0.0  # seconds until EC2 lists a new instance, address or route table
    boot_seconds: float = 0.0  # from pending to running
    stop_seconds: float = 0.0  # from shutting-down to terminated
    quota_seconds: float = 10.0  # from terminated until the quota no longer counts an instance
    efs_seconds: float = 0.0  # to create or delete a file system or mount target
    zone_without_efs: str = "us-east-1e"  # use1-az3; sources: AWS, "Managing mount targets"
    forget_seconds: float = 3600.0  # EC2 lists a terminated instance for this long
    policy: Policy | None = None  # of the caller, see `permissions`; None allows every call
    has_launch_indexes: bool = True  # False: all instances of a request have the launch index 0
    needs_internet: bool = False  # the boot of a machine without a way to the internet fails
    internet_wait_seconds: float = 600.0  # a booting machine waits no longer for its way to the internet
    refuses_public_addresses: bool = False  # EC2 gives no public address to a running instance
    hides_public_addresses: bool = False  # it takes the request for one, and never shows it
    nat_seconds: float = 0.0  # to create or delete a NAT gateway
    nat_failure: str = ""  # why new NAT gateways fail, in EC2's words; "": they do not fail
    boot_download_bytes: int = 0  # that each machine fetches over the internet while it is set up
    ssh_delay_seconds: float = 0.0  # of a machine, from running to sshd
    failing_machines: Collection[int] = ()  # numbers (from 0, in the order of booting) of machines whose set-up fails
    has_instance_connect: bool = True  # the image lets keys log in that EC2 Instance Connect sends
    efa_only_device: int | None = None  # the device index that an EFA-only interface must have; None: any
    gpus: int = 0  # of machines that boot from now on
    tells_time: bool = False  # each answer has the time of this cloud; else that of the computer


class SimulatedAws(Settings, InstanceEndings):
    """The cloud of this process. There is one: the servers show the one that was made last.

    Besides the settings these attributes may be set: `clock`; `capacity`, the free places by (zone, type), unlimited
    where missing; `quota_vcpu`, the vCPU by quota code, plenty where missing. `login` is the user and the ssh port,
    which the images have as tags. `machines` are the `SimulatedMachines` of this cloud, if it has any. They take
    `events` as soon as `has_event` is set: names and arguments of their methods.
    """

    current: "SimulatedAws"
    lock = threading.RLock()  # one for all clouds, as moto's backends are shared by all

    def __init__(self, login: tuple[str, int] = ("ubuntu", 22), **settings: Any) -> None:
        self._settings = Settings(**settings)
        self.login = login
        self.machines: Any = None
        self.events: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.has_event = threading.Event()
        self.errors: list[str] = []
        # Clouds of different processes on one computer begin at different addresses.
        self._address_numbers = itertools.count(os.getpid() % 200 * 250)
        self._live_instances: dict[str, Any] = {}
        self.reset()

    def reset(self) -> None:
        """Empty the cloud and restore its settings. Its machines end; addresses are not used again."""
        from support.simcloud import moto_patches

        with self.lock:
            SimulatedAws.current = self
            moto_patches.install()
            self.events.clear()
            self._live_instances.clear()
            self.clock: Callable[[], float] = time.time
            self._clock_offset = 0.0
            for name, value in vars(self._settings).items():
                setattr(self, name, value)
            self.capacity: dict[tuple[str, str], int] = {}
            self.quota_vcpu: dict[str, float] = {}
            self.launches_by_token: dict[tuple[str, str], tuple[str, Any]] = {}  # of (region, client token)
            self.groups: dict[tuple[str, str], PlacementGroup] = {}  # of (region, name)
            self.reservations: dict[str, CapacityReservation] = {}
            self.spot_scores: dict[str, int] = {}  # by zone, where they have been set
            self.spot_prices: dict[tuple[str, str], float] = {}  # by (zone, type), where they have been set
            self.meter = BillingMeter(self.now)
            self.moved: dict[str, Moved] = {}  # by instance
            moto_patches.reset_backends()
            reset_model_data()
        if self.machines:
            self.machines.reset()

    def add_event(self, name: str, *arguments: Any) -> None:
        self.events.append((name, arguments))
        self.has_event.set()

    # --- time ------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the seconds since 1970, by the clock of this cloud."""
        return self.clock() + self._clock_offset

    def advance(self, seconds: float) -> None:
        with self.lock:
            self._clock_offset += seconds
        self.tick()

    def tick(self) -> None:
        """Do what is due: boots, announced interruptions, ends."""
        from support.simcloud import efs, internet, reservations

        with self.lock:
            now = self.now()
            for instance in self.live_instances():
                life = instance.life
                if instance.state == "pending" and now >= life.launch_time + self.boot_seconds:
                    self._set_state(instance, "running")
                    self.add_event("on_running", self.view(instance))
                if life.interruption_time is not None and now >= life.interruption_time:
                    self.shut_down(instance, INTERRUPTED, "Spot instance termination", loses_capacity=True)
                if instance.state == "shutting-down" and now >= life.shutdown_time + self.stop_seconds:
                    self._terminate(instance)
                if instance.state == "stopping" and now >= life.shutdown_time + self.stop_seconds:
                    self._set_state(instance, "stopped")
            reservations.tick(self)
            efs.tick(now)
            internet.tick(self, now)

    def run(self) -> None:
        """Tick for ever, so that things happen between calls too. For a thread of its own."""
        while True:
            time.sleep(0.1)
            with self.lock:
                if SimulatedAws.current is self:  # an older cloud's clock must not move the resources of the next
                    self.tick()

    # --- instances -------------------------------------------------------------------------------------------------

    def all_instances(self, backend: EC2Backend) -> Iterator[Any]:
        for reservation in list(backend.reservations.values()):
            yield from reservation.instances

    def is_visible(self, instance: Any) -> bool:
        """Return whether EC2 lists an instance: not too early, and for an hour after its end."""
        now = self.now()
        life = instance.life
        is_forgotten = life.termination_time is not None and now >= life.termination_time + self.forget_seconds
        return now >= life.launch_time + self.visible_after and not is_forgotten

    def instances(self, region: str = "us-east-1") -> list[InstanceView]:
        """Return all instances of a region as they are now, including the terminated ones."""
        self.tick()
        with self.lock:
            return [self.view(instance) for instance in self.all_instances(ec2_backends[ACCOUNT][region])]

    def view(self, instance: Any) -> InstanceView:
        """Return an instance as it looks from outside."""
        life = instance.life
        tags = instance.ec2_backend.tags
        return InstanceView(
            id=instance.id,
            state=instance.state,
            zone=instance.placement.zone,
            type=instance.instance_type,
            private=life.address,
            user_data=life.user_data,
            key=life.key,
            tags=dict(tags.get(instance.id, {})),
            index=instance.ami_launch_index,
            reason=instance.state_reason.code,
        )

    def find(self, id: str) -> Any:
        """Return the instance of an id, live or ended, of any region. Raises `KeyError`."""
        backends = list(ec2_backends[ACCOUNT].values())
        return {instance.id: instance for backend in backends for instance in self.all_instances(backend)}[id]

    def transfer(self, id: str, efs_read: int = 0, efs_written: int = 0, internet: int = 0) -> None:
        """Let a running instance move bytes. Raises `ValueError` for one that does not run."""
        from support.simcloud.internet import count_bytes, nat_gateway_of

        with self.lock:
            instance = self.find(id)
            if instance.state != "running":
                raise ValueError(f"{id} does not run")
            before = self.moved.get(id, Moved())
            moved = Moved(before.efs_read + efs_read, before.efs_written + efs_written, before.internet + internet)
            self.moved[id] = moved
            meter, dollars = self.meter, self.meter.traffic_dollars
            dollars["efs"] += efs_read / 1e9 * meter.EFS_DOLLARS_PER_GB_READ
            dollars["efs"] += efs_written / 1e9 * meter.EFS_DOLLARS_PER_GB_WRITTEN
            if gateway := nat_gateway_of(instance):
                dollars["nat"] += internet / 1e9 * meter.NAT_DOLLARS_PER_GB
                count_bytes(gateway, instance.region_name, internet)
            self.add_event("on_transfer", self.view(instance), moved)

    def add_instance(self, instance: Any) -> None:
        from support.simcloud.spot_market import dollars_per_hour

        self._live_instances[instance.id] = instance
        self._set_state(instance, "pending")
        self.meter.start(instance.id, "instances", dollars_per_hour(self, instance), minimum=60.0)
        for disk in instance.block_device_mapping.values():  # gp3: we use no other kind
            gb = int(instance.ec2_backend.volumes[disk.volume_id].size)
            self.meter.start(disk.volume_id, "volumes", self.meter.GP3_DOLLARS_PER_GB_HOUR * gb, minimum=60.0)
        if instance.public_ip:
            self.meter.start(f"ip-{instance.id}", "addresses", self.meter.ADDRESS_DOLLARS_PER_HOUR, 60.0)

    def reserve(self, type: str, zone: str, count: int, **details: Any) -> str:
        """Add a reservation, which begins now, and return its id. `details` are fields of a `CapacityReservation`."""
        from support.simcloud.reservations import CapacityReservation

        with self.lock:
            id = "cr-" + hashlib.sha256(f"reservation {len(self.reservations)}".encode()).hexdigest()[:17]
            details = {"start": self.now(), **details}
            self.reservations[id] = CapacityReservation(id=id, zone=zone, type=type, count=count, **details)
            return id

    def live_instances(self) -> list[Any]:
        return list(self._live_instances.values())

    def limit_capacity(self, type: str, zones: Collection[str], places: int) -> None:
        self.capacity |= {(zone, type): places for zone in zones}

    def next_address(self) -> str:
        """Return a loopback address that no instance had: from 127.1.0.2 to 127.1.249.251, then again."""
        number = next(self._address_numbers) % (250 * 250)
        return f"127.1.{number // 250}.{number % 250 + 2}"

    # --- dollars ---------------------------------------------------------------------------------------------------

    def set_price(self, zone: str, type: str, dollars: float) -> None:
        """Set the spot price of a type in a zone, in dollars per hour, for instances launched from now on."""
        self.spot_prices[zone, type] = dollars

    def bill(self) -> dict[str, Any]:
        """Return the dollars until now: {"total", "instances": {id: dollars}, "volumes", "addresses", "efs"}."""
        self.tick()
        with self.lock:
            return self.meter.bill()

    def leaks(self) -> list[dict[str, Any]]:
        """Return the resources that cost: instances that are not terminated, volumes, addresses, throughput."""
        from support.simcloud import leak_check

        self.tick()
        with self.lock:
            return list(leak_check.billable(self))

    def leftovers(self) -> list[dict[str, Any]]:
        """Return the resources that are free or meant to stay: groups, key pairs, networks, file systems."""
        from support.simcloud import leak_check

        with self.lock:
            return list(leak_check.free(self))

    def name_images(self, images: Collection[str]) -> None:
        """Let public parameters name only these images, by the keys of `spot_market.IMAGES`, until a reset."""
        from support.simcloud import spot_market

        with self.lock:
            for backend in list(ssm_backends[ACCOUNT].values()):
                spot_market.make_parameters(backend, images)
