"""Small networks for tests: machines that are network namespaces on one switch, each with a card whose bytes count.

A machine is a process that holds a namespace (unshare(1)); when it ends, namespace and cards are gone. Ranks are forked
from whoever asks, move into their machine's namespace (setns(2)), and form a real group there. Needs root.
"""

import contextlib
import ctypes
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.forked_ranks import join, run_ranks

CARD = "veth0"
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@functools.cache
def missing() -> str:
    """Why there are no namespaces here, "" where there are."""
    if os.geteuid():
        return "network namespaces need root"
    try:
        with switched(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"


def _ip(holder: int, *words: str) -> None:
    subprocess.run(["nsenter", "-t", str(holder), "-n", "ip", *words], check=True, capture_output=True)


def _hold() -> "subprocess.Popen[bytes]":
    """Start a process in a network namespace of its own; it ends with its standard input."""
    one = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert one.stdout
    one.stdout.readline()
    return one


@contextlib.contextmanager
def switched(count: int) -> Iterator[list[int]]:
    """So many machines, 10.77.0.1 and on, as the processes that hold them."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        holders += [_hold() for _ in range(count + 1)]
        switch, *machines = (one.pid for one in holders)
        _ip(switch, "link", "add", "switch", "type", "bridge")
        _ip(switch, "link", "set", "switch", "up")
        for number, one in enumerate(machines, 1):
            port = f"port{number}"
            _ip(switch, "link", "add", port, "type", "veth", "peer", "name", CARD, "netns", str(one))
            _ip(switch, "link", "set", port, "master", "switch", "up")
            _ip(one, "addr", "add", f"10.77.0.{number}/24", "dev", CARD)
            for name in (CARD, "lo"):
                _ip(one, "link", "set", name, "up")
        yield machines
    finally:
        for process in holders:
            process.communicate()


def slow_down(machine: int, megabit: float) -> None:
    """Let a machine's card send so many Mbit/s and no more (tc-tbf(8))."""
    words = ("dev", CARD, "root", "tbf", "rate", f"{megabit}mbit", "burst", "256kb", "latency", "400ms")
    command = ("nsenter", "-t", str(machine), "-n", "tc", "qdisc", "replace", *words)
    subprocess.run(command, check=True, capture_output=True)


def sent() -> int:
    """The bytes that this namespace's card has sent until now."""
    line = next(one for one in Path("/proc/self/net/dev").read_text().splitlines() if CARD in one)
    return int(line.partition(":")[2].split()[8])


def _enter(machine: int) -> None:
    with Path(f"/proc/{machine}/ns/net").open() as namespace:
        if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def run_in(machines: list[int], procs: int, function: Callable[[Any], Any], seconds: float = 60.0) -> list[Any]:
    """Run function(group) in so many processes on each machine, which form one group; return their answers by rank."""
    world = len(machines) * procs

    def work(rank: int, store: Path) -> Any:
        _enter(machines[rank // procs])
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank % procs), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(procs), "GLOO_SOCKET_IFNAME": CARD,
        }  # fmt: skip
        return function(join(store, rank, world, procs))

    return run_ranks(world, work, seconds)
