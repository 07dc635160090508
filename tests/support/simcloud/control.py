"""Orders to a cloud that runs in another process: POST /_sim/<order> with JSON, answered by JSON."""

from collections.abc import Callable
from typing import Any

from support.simcloud.cloud import DEFAULTS


def _fault(front: Any, words: dict[str, Any]) -> None:
    front.fault(**words)


def _no_faults(front: Any, words: dict[str, Any]) -> None:
    front.faults = []


def _capacity(front: Any, words: dict[str, Any]) -> dict[str, int]:
    """{"us-east-1a/p4d.24xlarge": 4, "us-east-1b/g5.xlarge": null}: null is no limit. Answers all limits."""
    for place, free in words.items():
        zone, type = place.split("/")
        if free is None:
            front.sim.capacity.pop((zone, type), None)
        else:
            front.sim.capacity[zone, type] = int(free)
    return {f"{zone}/{type}": free for (zone, type), free in front.sim.capacity.items()}


def _set(front: Any, words: dict[str, Any]) -> dict[str, Any]:
    """Settings by name; answers all of them."""
    for name, value in words.items():
        if name not in (*DEFAULTS, "quota_vcpu"):
            raise ValueError(f"no setting {name}")
        setattr(front.sim, name, tuple(value) if name == "login" else value)
    return {name: getattr(front.sim, name) for name in (*DEFAULTS, "quota_vcpu")}


def _interrupt(front: Any, words: dict[str, Any]) -> None:
    front.sim.interrupt(words["id"], words.get("notice"))


def _rebalance(front: Any, words: dict[str, Any]) -> None:
    front.sim.rebalance(words["id"])


def _power_off(front: Any, words: dict[str, Any]) -> None:
    front.sim.power_off(words["id"])


def _kill(front: Any, words: dict[str, Any]) -> None:
    front.sim.kill(words["id"], words.get("reason", "Server.InternalError"))


def _kill_caller(front: Any, words: dict[str, Any]) -> None:
    front.kill_caller_at(int(words["at"]), words.get("when", "before"))


def _price(front: Any, words: dict[str, Any]) -> None:
    front.sim.set_price(words["zone"], words["type"], float(words["price"]))


def _advance(front: Any, words: dict[str, Any]) -> None:
    front.sim.advance(float(words["seconds"]))


def _instances(front: Any, words: dict[str, Any]) -> Any:
    return front.sim.instances(words.get("region", "us-east-1"))


def _calls(front: Any, words: dict[str, Any]) -> dict[str, Any]:
    return {"calls": front.calls, "count": front.count(), "killed": front.killed}


def _reset(front: Any, words: dict[str, Any]) -> None:
    front.reset()


ORDERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "advance": _advance,
    "bill": lambda front, words: front.sim.bill(),
    "calls": _calls,
    "capacity": _capacity,
    "errors": lambda front, words: front.sim.errors,
    "fault": _fault,
    "instances": _instances,
    "interrupt": _interrupt,
    "kill": _kill,
    "kill_caller": _kill_caller,
    "leaks": lambda front, words: front.sim.leaks(),
    "leftovers": lambda front, words: front.sim.leftovers(),
    "no_faults": _no_faults,
    "power_off": _power_off,
    "price": _price,
    "rebalance": _rebalance,
    "reset": _reset,
    "set": _set,
}
