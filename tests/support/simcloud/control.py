"""Control commands of a simulated cloud in another process: POST /_sim/<command> with JSON, answered by JSON."""

from collections.abc import Callable
from typing import Any

from support.simcloud.cloud import DEFAULTS

Arguments = dict[str, Any]


def _fault(front: Any, arguments: Arguments) -> None:
    front.fault(**arguments)


def _no_faults(front: Any, arguments: Arguments) -> None:
    front.faults = []


def _capacity(front: Any, arguments: Arguments) -> dict[str, int]:
    """Set the free places: {"us-east-1a/p4d.24xlarge": 4, "us-east-1b/g5.xlarge": null}, where null is no limit.

    Returns all limits.
    """
    for pool, places in arguments.items():
        zone, type = pool.split("/")
        if places is None:
            front.sim.capacity.pop((zone, type), None)
        else:
            front.sim.capacity[zone, type] = int(places)
    return {f"{zone}/{type}": places for (zone, type), places in front.sim.capacity.items()}


def _set(front: Any, arguments: Arguments) -> dict[str, Any]:
    """Change settings by name. Returns all settings."""
    for name, value in arguments.items():
        if name not in (*DEFAULTS, "quota_vcpu"):
            raise ValueError(f"no setting {name}")
        setattr(front.sim, name, tuple(value) if name == "login" else value)
    return {name: getattr(front.sim, name) for name in (*DEFAULTS, "quota_vcpu")}


def _interrupt(front: Any, arguments: Arguments) -> None:
    front.sim.interrupt(arguments["id"], arguments.get("notice"))


def _rebalance(front: Any, arguments: Arguments) -> None:
    front.sim.rebalance(arguments["id"])


def _kill(front: Any, arguments: Arguments) -> None:
    front.sim.kill(arguments["id"], arguments.get("reason", "Server.InternalError"))


def _kill_caller(front: Any, arguments: Arguments) -> None:
    front.kill_caller_at(int(arguments["at"]), arguments.get("when", "before"))


def _spare_callers(front: Any, _: Arguments) -> None:
    front.spare_callers()


def _advance(front: Any, arguments: Arguments) -> None:
    front.sim.advance(float(arguments["seconds"]))


def _transfer(front: Any, arguments: Arguments) -> None:
    front.sim.transfer(**arguments)


def _instances(front: Any, arguments: Arguments) -> Any:
    return front.sim.instances(arguments.get("region", "us-east-1"))


def _calls(front: Any, arguments: Arguments) -> dict[str, Any]:
    return {"calls": front.calls, "count": front.count(), "killed": front.killed}


def _reserve(front: Any, arguments: Arguments) -> str:
    return str(front.sim.reserve(**arguments))


def _reset(front: Any, arguments: Arguments) -> None:
    front.reset()


CONTROL_COMMANDS: dict[str, Callable[[Any, Arguments], Any]] = {
    "advance": _advance,
    "bill": lambda front, arguments: front.sim.bill(),
    "calls": _calls,
    "capacity": _capacity,
    "errors": lambda front, arguments: front.sim.errors,
    "fault": _fault,
    "instances": _instances,
    "interrupt": _interrupt,
    "kill": _kill,
    "kill_caller": _kill_caller,
    "spare_callers": _spare_callers,
    "leaks": lambda front, arguments: front.sim.leaks(),
    "leftovers": lambda front, arguments: front.sim.leftovers(),
    "no_faults": _no_faults,
    "rebalance": _rebalance,
    "reserve": _reserve,
    "reset": _reset,
    "set": _set,
    "transfer": _transfer,
}
