"""The simulated EC2: moto with what it leaves out. Settings, the clock, who listens, instances, dollars."""

import itertools
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # 1301 images of 2017

from moto.core.model_instances import reset_model_data
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend, ec2_backends
from support.simcloud.billing import Meter
from support.simcloud.lifecycle import BILLED, Ends, Shown

ACCOUNT = "123456789012"
DEFAULTS: dict[str, Any] = {
    "visible_after": 0.0,
    "boot_seconds": 0.0,
    "stop_seconds": 0.0,
    "notice_seconds": 120.0,
    "efs_seconds": 0.0,
    "efs_gb": 0.0,
    "forget_seconds": 3600.0,
    "login": ("ubuntu", 22),
    "image_gb": 75,
    "max_addresses": 5,
}


class AwsError(EC2ClientError):
    """An error of EC2 by its code; the HTTP status comes from `simcloud.patches.STATUS`."""


class Sim(Ends):
    """The cloud of this process. There is one: the last one made is what the servers show.

    Settable: `clock`, `capacity` {(zone, type): free; missing: unlimited}, `quota_vcpu` {quota code: vCPU; missing:
    plenty}, `listeners`, and what DEFAULTS lists, which keyword arguments change for good: `reset` returns to them.
    """

    current: "Sim"
    lock = threading.RLock()  # one for all clouds, as moto's backends are
    visible_after: float  # seconds until EC2 tells of a new instance
    boot_seconds: float  # pending to running
    stop_seconds: float  # shutting-down to terminated
    notice_seconds: float  # of a spot interruption
    efs_seconds: float  # a file system or mount target comes, or goes
    efs_gb: float  # stored in each file system
    forget_seconds: float  # a terminated instance is still told of
    image_gb: int  # the disk of the images
    max_addresses: int  # elastic, of a region

    def __init__(self, **defaults: Any) -> None:
        unknown = set(defaults) - set(DEFAULTS)
        if unknown:
            raise TypeError(f"no such setting: {sorted(unknown)}")
        self._defaults = {**DEFAULTS, **defaults}
        self._delivery = threading.RLock()
        self._events: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.listeners: list[Any] = []
        self.errors: list[str] = []
        self._numbers = itertools.count(os.getpid() % 200 * 250)  # two sims of one machine begin at different addresses
        self._live: dict[str, Any] = {}
        self._login = self._defaults["login"]
        Sim.current = self
        from support.simcloud import moto_patches

        moto_patches.install()
        self.reset()

    def reset(self) -> None:
        """Back to an empty cloud and the settings it began with. The living die; addresses are not used again."""
        from support.simcloud import moto_patches, spot_market

        with self.lock:
            Sim.current = self
            for instance in [one for one in self._live.values() if one.state in BILLED]:
                self._emit("on_dying", self.show(instance))
            self._live = {}
            self.clock: Callable[[], float] = time.time
            self._offset = 0.0
            for name, value in self._defaults.items():
                if name != "login":
                    setattr(self, name, value)
            self.capacity: dict[tuple[str, str], int] = {}
            self.quota_vcpu: dict[str, float] = {}
            self.tokens: dict[tuple[str, str], tuple[str, Any]] = {}
            self.groups: dict[tuple[str, str], dict[str, Any]] = {}
            self.requests: dict[str, dict[str, Any]] = {}
            self.market = spot_market.Market()
            self.meter = Meter(self.now)
            moto_patches.reset_backends()
            reset_model_data()
        self.deliver()

    # --- time ------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the epoch, by the clock of this cloud."""
        return self.clock() + self._offset

    def advance(self, seconds: float) -> None:
        """Let time pass at once."""
        with self.lock:
            self._offset += seconds
        self.tick()
        self.deliver()

    def tick(self) -> None:
        """Do what is due: boots, announced interruptions, ends."""
        with self.lock:
            now = self.now()
            for instance in list(self._live.values()):
                life, state = instance.life, instance.state
                if state == "pending" and now >= life.born + self.boot_seconds:
                    self._state(instance, "running")
                    self._emit("on_running", self.show(instance))
                if life.taken_at is not None and now >= life.taken_at and instance.state in BILLED:
                    self.shut(instance, "Server.SpotInstanceTermination", "Spot instance termination", taken=True)
                if instance.state == "shutting-down" and now >= life.dying + self.stop_seconds:
                    self._bury(instance)
                if instance.state == "stopping" and now >= life.stopping + self.stop_seconds:
                    self._state(instance, "stopped")
            from support.simcloud import efs

            efs.tick(now)

    def run(self, every: float = 0.1) -> None:
        """Keep ticking, so that things happen between calls too. For a thread of its own."""
        while True:
            time.sleep(every)
            with self.lock:
                if Sim.current is not self:  # an older cloud's clock must not move what is the next one's
                    continue
                self.tick()
            self.deliver()

    # --- listeners -------------------------------------------------------------------------------------------------

    def _emit(self, name: str, *words: Any) -> None:
        self._events.append((name, words))

    def deliver(self) -> None:
        """Tell the listeners, in order, outside the lock. Whoever delivers already delivers the rest too."""
        while self._events and self._delivery.acquire(blocking=False):
            try:
                while self._events:
                    name, words = self._events.popleft()
                    for listener in list(self.listeners):
                        self._tell(listener, name, words)
            finally:
                self._delivery.release()

    def _tell(self, listener: Any, name: str, words: tuple[Any, ...]) -> None:
        try:
            getattr(listener, name)(*words)
        except Exception:  # a machine that cannot start is the test's to see, not the caller's of the API
            self.errors.append(traceback.format_exc())
            traceback.print_exc()

    # --- instances -------------------------------------------------------------------------------------------------

    def all(self, backend: EC2Backend) -> Iterator[Any]:
        """Every instance of a region that EC2 has made, visible or not."""
        for reservation in list(backend.reservations.values()):
            yield from reservation.instances

    def visible(self, instance: Any) -> bool:
        """True if EC2 tells of it: not too young, not gone for an hour."""
        now = self.now()
        forgotten = instance.life.gone is not None and now >= instance.life.gone + self.forget_seconds
        return now >= instance.life.born + self.visible_after and not forgotten

    def instances(self, region: str = "us-east-1") -> list[Shown]:
        """All instances of a region, the terminated ones too, as they are now."""
        self.tick()
        self.deliver()
        with self.lock:
            return [self.show(one) for one in self.all(ec2_backends[ACCOUNT][region])]

    def show(self, instance: Any) -> Shown:
        """An instance for those outside."""
        life, tags = instance.life, instance.ec2_backend.tags
        return Shown(
            id=instance.id,
            state=instance.state,
            region=instance.region_name,
            zone=instance.placement.zone,
            type=instance.instance_type,
            market=life.market,
            private=life.address,
            public=instance.public_ip if instance.nics else None,
            user_data=life.user_data,
            key=life.key,
            ami_tags=dict(tags.get(life.image, {})),
            tags=dict(tags.get(instance.id, {})),
            launched=life.born,
            ended=life.dying,
            index=instance.ami_launch_index,
            group=instance.placement.group_name,
            request=life.request,
            reason=instance.state_reason.code,
        )

    def find(self, id: str) -> Any:
        """The living or dead instance of this id, in any region. Raises KeyError."""
        for backend in list(ec2_backends[ACCOUNT].values()):
            for instance in self.all(backend):
                if instance.id == id:
                    return instance
        raise KeyError(f"no instance {id}")

    def born(self, instance: Any) -> None:
        """A new instance begins to cost."""
        self._live[instance.id] = instance
        self._state(instance, "pending")
        self.meter.start(instance.id, "instances", self.market.hourly(instance), minimum=60.0)
        if instance.public_ip:
            self.meter.start(f"ip-{instance.id}", "addresses", self.meter.ADDRESS, 60.0)

    def live(self) -> list[Any]:
        """The instances that are not terminated, of all regions."""
        return list(self._live.values())

    def address(self) -> str:
        """A loopback address that no instance had: 127.1.0.2 to 127.1.249.251, then again."""
        number = next(self._numbers) % (250 * 250)
        return f"127.1.{number // 250}.{number % 250 + 2}"

    # --- dollars ---------------------------------------------------------------------------------------------------

    def set_price(self, zone: str, type: str, dollars: float) -> None:
        """Spot dollars per hour of a type in a zone, for instances launched from now on."""
        self.market.spot[zone, type] = dollars

    def bill(self) -> dict[str, Any]:
        """Dollars until now: {"total", "instances": {id: dollars}, "volumes", "addresses", "efs"}."""
        self.tick()
        with self.lock:
            return self.meter.bill()

    def leaks(self) -> list[dict[str, Any]]:
        """What exists and costs: instances that are not terminated, volumes, elastic addresses; with their tags."""
        from support.simcloud import leak_check

        self.tick()
        with self.lock:
            return leak_check.billable(self)

    def leftovers(self) -> list[dict[str, Any]]:
        """What exists and is free or meant to stay: groups, key pairs, networks, file systems."""
        from support.simcloud import leak_check

        with self.lock:
            return leak_check.free(self)

    @property
    def login(self) -> tuple[str, int]:
        """User and ssh port that the images tell by their tags."""
        return self._login[0], int(self._login[1])

    @login.setter
    def login(self, value: tuple[str, int]) -> None:
        from support.simcloud import spot_market

        self._login = (value[0], int(value[1]))
        with self.lock:
            for backend in list(ec2_backends[ACCOUNT].values()):
                spot_market.tag_images(self, backend)
