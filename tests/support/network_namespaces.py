"""Small networks for tests: machines that are network namespaces on one switch, each with a network card.

A machine is a process that holds a namespace (unshare(1)). When it ends, the kernel deletes namespace and cards. Ranks
are forked from the test, move into their machine's namespace (setns(2)), and form a process group there. Needs root.
"""

import contextlib
import ctypes
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.forked_ranks import join_group, run_ranks

INTERFACE = "veth0"
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@functools.cache
def why_unavailable() -> str:
    """Return why network namespaces cannot be used on this computer, "" when they can."""
    if os.geteuid():
        return "network namespaces need root"
    try:
        with switched_machines(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"


def _ip(holder: int, *words: str) -> None:
    subprocess.run(["nsenter", "-t", str(holder), "-n", "ip", *words], check=True, capture_output=True)


def _start_holder() -> "subprocess.Popen[bytes]":
    """Start a process that holds a new network namespace until its standard input is closed."""
    command = ["unshare", "--net", "sh", "-c", "echo; cat"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    return process


@contextlib.contextmanager
def switched_machines(count: int) -> Iterator[list[int]]:
    """Make `count` machines on one switch, with the addresses 10.77.0.1, 10.77.0.2 ... Yields their holders' pids."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        holders += [_start_holder() for _ in range(count + 1)]
        switch, *machines = (holder.pid for holder in holders)
        _ip(switch, "link", "add", "switch", "type", "bridge")
        _ip(switch, "link", "set", "switch", "up")
        for number, machine in enumerate(machines, 1):
            port = f"port{number}"
            _ip(switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(machine))
            _ip(switch, "link", "set", port, "master", "switch", "up")
            _ip(machine, "addr", "add", f"10.77.0.{number}/24", "dev", INTERFACE)
            for name in (INTERFACE, "lo"):
                _ip(machine, "link", "set", name, "up")
        yield machines
    finally:
        for holder in holders:
            holder.communicate()


def give_address(machine: int, address: str) -> None:
    """Give the network card of a machine a further address, with the length of its network: fd00::1/64."""
    _ip(machine, "addr", "add", address, "dev", INTERFACE, *(("nodad",) if ":" in address else ()))


def sent_bytes() -> int:
    """Return the bytes that the card of this process's namespace has sent until now."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if INTERFACE in line)
    return int(line.partition(":")[2].split()[8])


def enter(machine: int) -> None:
    with Path(f"/proc/{machine}/ns/net").open() as namespace:
        if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def run_on_machines(
    machines: list[int], procs: int, function: Callable[[Any], Any], seconds: float = 60.0
) -> list[Any]:
    """Run function(group) in `procs` processes on each machine, which form one group. Returns the results by rank."""
    world = len(machines) * procs

    def work(rank: int, store: Path) -> Any:
        enter(machines[rank // procs])
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank % procs), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(procs), "GLOO_SOCKET_IFNAME": INTERFACE,
        }  # fmt: skip
        return function(join_group(store, rank, world, procs))

    return run_ranks(world, work, seconds)
