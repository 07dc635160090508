"""The life of an instance: what EC2 knows of it, how it looks from outside, and the ways in which it ends."""

import time
from dataclasses import dataclass
from typing import Any

from moto.ec2.models.instances import InstanceState, StateReason

STATES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
BILLED_STATES = ("pending", "running")
INTERRUPTED = "Server.SpotInstanceTermination"


@dataclass(frozen=True)
class InstanceView:
    """An instance as it looks from outside at one moment."""

    id: str
    state: str
    zone: str
    type: str
    private: str  # address
    user_data: str
    key: str  # public half of the key pair
    tags: dict[str, str]
    index: int  # in its RunInstances request
    reason: str


@dataclass
class InstanceLife:
    """What EC2 knows of an instance and moto does not. Times are seconds since 1970."""

    launch_time: float
    market: str
    key: str
    user_data: str
    address: str
    reservation_id: str | None = None  # the capacity reservation in which the instance runs
    interruption_time: float | None = None  # the time in its interruption notice
    shutdown_time: float | None = None  # or that of its stop
    termination_time: float | None = None


class InstanceEndings:
    """The ways in which instances end. A part of `support.simcloud.cloud.SimulatedAws`: it uses its lock and events."""

    def shut_down(self: Any, instance: Any, code: str, message: str, loses_capacity: bool = False) -> None:
        """Begin the end of an instance, unless it has begun. From here on it costs nothing.

        `loses_capacity` says that the instance's place does not become free.
        """
        if instance.state not in (*BILLED_STATES, "stopping", "stopped"):
            return
        had_capacity = instance.state in BILLED_STATES
        self._end(instance, "shutting-down", code, message)
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S GMT", time.gmtime(self.now()))
        initiator = "User" if code == "Client.UserInitiatedShutdown" else "Service"
        # EC2 does not say when a machine ended itself.
        is_own_end = code == "Client.InstanceInitiatedShutdown"
        instance._reason = "" if is_own_end else f"{initiator} initiated ({timestamp})"
        pool = (instance.placement.zone, instance.instance_type)
        if pool in self.capacity and had_capacity and not (loses_capacity or instance.life.reservation_id):
            self.capacity[pool] += 1

    def _terminate(self: Any, instance: Any) -> None:
        """Finish the end of an instance: disks and interfaces are deleted, its elastic address is free again."""
        from support.simcloud import internet

        internet.release_resources(instance)
        self._set_state(instance, "terminated")
        instance.life.termination_time = self.now()
        self._live_instances.pop(instance.id, None)

    def _set_state(self: Any, instance: Any, name: str) -> None:
        instance._state = InstanceState(name, STATES[name])

    def interrupt(self: Any, id: str, notice: float = 120.0) -> None:
        """Interrupt a spot instance: its notice comes now, its end `notice` seconds later.

        Raises `ValueError` for an instance that is not a live spot instance.
        """
        with self.lock:
            instance = self.find(id)
            if instance.life.market != "spot" or instance.state not in BILLED_STATES:
                raise ValueError(f"{id} is not a living spot instance")
            instance.life.interruption_time = self.now() + notice
            self.add_event("on_notice", self.view(instance), instance.life.interruption_time, "terminate")
        self.tick()

    def rebalance(self: Any, id: str) -> None:
        """Send a spot instance the recommendation to rebalance, which is no interruption notice yet."""
        with self.lock:
            self.add_event("on_notice", self.view(self.find(id)), self.now(), "rebalance")

    def power_off(self: Any, id: str) -> None:
        """Do what `shutdown -h now` on the machine does: terminate or stop it, by its shutdown behavior."""
        with self.lock:
            instance = self.find(id)
            code = "Client.InstanceInitiatedShutdown"
            if instance.instance_initiated_shutdown_behavior == "terminate" or instance.life.market == "spot":
                self.shut_down(instance, code, "Instance initiated shutdown")
            else:
                self.stop_instance(instance, code, "Instance initiated shutdown")
        self.tick()

    def stop_instance(self: Any, instance: Any, code: str, message: str) -> None:
        """Stop an on-demand instance. Its disks stay, and cost."""
        if instance.state in BILLED_STATES:
            self._end(instance, "stopping", code, message)

    def _end(self: Any, instance: Any, state: str, code: str, message: str) -> None:
        self._set_state(instance, state)
        instance.life.shutdown_time = self.now()
        instance.state_reason = StateReason(f"{code}: {message}", code)
        is_in_first_hour = self.now() - instance.life.launch_time < 3600
        self.meter.stop(instance.id, is_free=code == INTERRUPTED and is_in_first_hour)
        self.meter.stop(f"ip-{instance.id}")
        self.add_event("on_dying", self.view(instance))

    def kill(self: Any, id: str, reason: str = "Server.InternalError") -> None:
        """Terminate an instance at once and without notice, a pending one too. Its place does not become free."""
        with self.lock:
            instance = self.find(id)
            self.shut_down(instance, reason, "the instance ended", loses_capacity=True)
            if instance.state == "shutting-down":
                self._terminate(instance)
