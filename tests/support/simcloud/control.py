"""Control commands of a simulated cloud in another process: POST /_sim/<command> with JSON, answered by JSON."""

from collections.abc import Callable
from typing import Any

from support.simcloud.cloud import Settings

SETTINGS = (*vars(Settings()), "quota_vcpu")


def _capacity(front: Any, **places_by_pool: int) -> None:
    """Set the free places of pools: {"us-east-1a/p4d.24xlarge": 4}."""
    front.sim.capacity |= {tuple(pool.split("/")): places for pool, places in places_by_pool.items()}


def _set(front: Any, **settings: Any) -> None:
    """Change settings by name. Raises `ValueError` for an unknown name."""
    for name, value in settings.items():
        if name not in SETTINGS:
            raise ValueError(f"no setting {name}")
        setattr(front.sim, name, value)


# Each takes the front and the arguments of the command.
CONTROL_COMMANDS: dict[str, Callable[..., Any]] = {
    "advance": lambda front, seconds: front.sim.advance(seconds),
    "bill": lambda front: front.sim.bill(),
    "calls": lambda front: {"calls": front.calls, "count": front.count(), "killed": front.killed},
    "capacity": _capacity,
    "errors": lambda front: front.sim.errors,
    "fault": lambda front, **settings: front.fault(**settings),
    "forget_past": lambda front: front.forget_past(),
    "instances": lambda front: front.sim.instances(),
    "interrupt": lambda front, id, notice=120.0: front.sim.interrupt(id, notice),
    "kill": lambda front, id, reason="Server.InternalError": front.sim.kill(id, reason),
    "kill_caller": lambda front, at, when="before": front.kill_caller_at(at, when),
    "leaks": lambda front: front.sim.leaks(),
    "leftovers": lambda front: front.sim.leftovers(),
    "no_faults": lambda front: front.faults.clear(),
    "rebalance": lambda front, id: front.sim.rebalance(id),
    "reserve": lambda front, **details: front.sim.reserve(**details),
    "reset": lambda front: front.reset(),
    "set": _set,
    "spare_callers": lambda front: front.spare_callers(),
    "transfer": lambda front, id, **moved_bytes: front.sim.transfer(id, **moved_bytes),
}
