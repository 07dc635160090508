"""The life of an instance: what EC2 knows of it, how it looks from outside, and the ways it ends."""

import time
from dataclasses import dataclass
from typing import Any

from moto.ec2.models.instances import InstanceState, StateReason

STATES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
BILLED = ("pending", "running")


@dataclass(frozen=True)
class Shown:
    """An instance as the outside sees it at one moment. Times are seconds since the epoch."""

    id: str
    state: str
    region: str
    zone: str
    type: str
    market: str
    private: str
    public: str | None
    user_data: str
    key: str
    ami_tags: dict[str, str]
    tags: dict[str, str]
    launched: float
    ended: float | None
    index: int
    group: str
    request: str | None
    reason: str


@dataclass
class Life:
    """What EC2 knows of an instance and moto does not."""

    born: float
    market: str
    key: str
    user_data: str
    image: str
    address: str
    request: str | None = None
    taken_at: float | None = None  # the time a spot notice named
    dying: float | None = None
    stopping: float | None = None
    gone: float | None = None


class Ends:
    """How instances end. A part of `simcloud.layer.Sim`, whose lock and listeners it uses."""

    def shut(
        self: Any, instance: Any, code: str, message: str, taken: bool = False, by: str = "Service initiated"
    ) -> None:
        """Begin the end of an instance, unless it has begun. It costs nothing from here. `taken`: its place is lost."""
        if instance.state not in (*BILLED, "stopping", "stopped"):
            return
        ran = instance.state in BILLED
        self._state(instance, "shutting-down")
        instance.life.dying = self.now()
        instance.state_reason = StateReason(f"{code}: {message}", code)
        when = time.strftime("%Y-%m-%d %H:%M:%S GMT", time.gmtime(self.now()))
        instance._reason = f"{by} ({when})" if by else ""  # EC2 does not say when a machine ended itself
        self._end_billing(instance)
        place = (instance.placement.zone, instance.instance_type)
        if place in self.capacity and ran and not taken:
            self.capacity[place] += 1
        self.market.close_request(self, instance, taken)
        self._emit("on_dying", self.show(instance))

    def _end_billing(self: Any, instance: Any) -> None:
        self.meter.stop(instance.id)
        self.meter.stop(f"ip-{instance.id}")

    def _bury(self: Any, instance: Any) -> None:
        """Terminated: its disks and interfaces go with it, its elastic address is free again."""
        from support.simcloud import addresses

        addresses.release(instance)
        self._state(instance, "terminated")
        instance.life.gone = self.now()
        self._live.pop(instance.id, None)

    def _state(self: Any, instance: Any, name: str) -> None:
        instance._state = InstanceState(name, STATES[name])

    def interrupt(self: Any, id: str, notice: float | None = None) -> None:
        """Take a spot instance back: notice now, the end so many seconds later. Raises ValueError: not a living one."""
        with self.lock:
            instance = self.find(id)
            if instance.life.market != "spot" or instance.state not in BILLED:
                raise ValueError(f"{id} is not a living spot instance")
            seconds = self.notice_seconds if notice is None else notice
            instance.life.taken_at = self.now() + seconds
            self.market.mark_request(self, instance)
            self._emit("on_notice", self.show(instance), instance.life.taken_at, "terminate")
        self.tick()
        self.deliver()

    def rebalance(self: Any, id: str) -> None:
        """Recommend to leave a spot instance, which is no notice yet."""
        with self.lock:
            self._emit("on_notice", self.show(self.find(id)), self.now(), "rebalance")
        self.deliver()

    def power_off(self: Any, id: str) -> None:
        """What `shutdown -h now` on the machine does: by its shutdown behaviour it is terminated, or stopped."""
        with self.lock:
            instance = self.find(id)
            if instance.instance_initiated_shutdown_behavior == "terminate" or instance.life.market == "spot":
                self.shut(instance, "Client.InstanceInitiatedShutdown", "Instance initiated shutdown", by="")
            else:
                self.halt(instance, "Client.InstanceInitiatedShutdown", "Instance initiated shutdown")
        self.tick()
        self.deliver()

    def halt(self: Any, instance: Any, code: str, message: str) -> None:
        """Stop an on-demand instance: its disks stay and cost."""
        if instance.state in BILLED:
            self._state(instance, "stopping")
            instance.life.stopping = instance.life.dying = self.now()
            instance.state_reason = StateReason(f"{code}: {message}", code)
            self._end_billing(instance)
            self._emit("on_dying", self.show(instance))

    def kill(self: Any, id: str, reason: str = "Server.InternalError") -> None:
        """It is terminated at once, from pending too, without notice; its place is lost."""
        with self.lock:
            instance = self.find(id)
            self.shut(instance, reason, "the instance ended", taken=True)
            if instance.state == "shutting-down":
                self._bury(instance)
        self.deliver()
