"""What is known of the links between machines: what carries them, and which are slow. Imports no torch."""

import contextlib
import fcntl
import os
import re
import socket
import statistics
import struct
from collections.abc import Mapping
from pathlib import Path


def slow_pairs(pair_gbps: Mapping[str, float], threshold: float = 0.5) -> list[str]:
    """Return the pairs ("0-2") below factor times what is usual; where it is a machine's whole lot, its rank ("2").

    Usual is the median over the ranks of each one's fastest pair: one slow machine of three spoils two pairs of three,
    and would hide in the median of the pairs.
    """
    ranks = sorted({rank for pair in pair_gbps for rank in pair.split("-")}, key=int)
    own = {rank: [pair for pair in pair_gbps if rank in pair.split("-")] for rank in ranks}
    usual = statistics.median(max(pair_gbps[pair] for pair in own[rank]) for rank in ranks) if ranks else 0.0
    slow = [pair for pair in pair_gbps if pair_gbps[pair] < threshold * usual]
    whole = [rank for rank in ranks if len(ranks) > 2 and set(own[rank]) <= set(slow)]
    return whole + [pair for pair in slow if not set(pair.split("-")) & set(whole)]


def detect_transport(backend: str, log: Path | None = None) -> str:
    """Return what carries the messages: "gloo on eth0", or of NCCL what `nccl_transport` finds in its log."""
    if backend == "nccl":
        text = log.read_text(errors="replace") if log else ""
        if log:
            log.unlink(missing_ok=True)
        return parse_nccl_transport(text)
    return f"gloo on {os.environ.get('GLOO_SOCKET_IFNAME') or _interface_with_address(_hostname_address())}"


def interface_variables(address: str) -> dict[str, str]:
    """Return the variables that bind Gloo and NCCL to the network on which the head's address is reached.

    Left to themselves they take what the host's name means: on Debian that is 127.0.1.1. What is set already holds.
    """
    if {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & os.environ.keys():
        return {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((address, 9))  # sends nothing: asks the kernel which way it would go
        name = _interface_with_address(one.getsockname()[0])
        if name in (known for _, known in socket.if_nameindex()):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


def enable_nccl_log() -> Path | None:
    """Let NCCL write what it chooses into a file of the agent's folder, and return that; None without an agent."""
    work = os.environ.get("IMGNET_WORK")
    if not work or "NCCL_DEBUG" in os.environ:
        return None
    path = Path(work) / "nccl.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(path)}
    return path


def _hostname_address() -> str:
    """The address that Gloo takes: what this machine's name means, else the loopback's."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _interface_with_address(address: str) -> str:
    """The network interface that has an address, "lo" for all of 127/8."""
    other = "lo" if address.startswith("127.") else address
    return next((name for name, mine in interface_addresses().items() if mine == address), other)


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one (netdevice(7), SIOCGIFADDR)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(one, 0x8915, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def parse_nccl_transport(nccl_output: str) -> str:
    """Return "efa", "ib", "roce", "sockets", another network's name, or "unknown", from what NCCL_DEBUG=INFO says."""
    networks = re.findall(r"Using network (.+)|Assigned NET plugin (.+) to comm|via NET/([\w ]+?)/", nccl_output)
    name = "".join(networks[-1]).strip().lower() if networks else ""
    if "libfabric" in name or "ofi" in name:
        providers = re.findall(r"NET/OFI Selected provider is ([\w-]+)", nccl_output, re.IGNORECASE)
        return str(providers[-1]).lower() if providers else "libfabric"
    if name == "ib":
        return "roce" if re.search(r"NET/IB : Using.*/RoCE", nccl_output) else "ib"
    return {"socket": "sockets", "": "unknown"}.get(name, name)


def transport_warning(transport_name: str, efa_available: bool) -> str | None:
    """Return one line when NCCL passes over the EFA that is there, None when all is well."""
    if not efa_available or transport_name in ("efa", "unknown") or transport_name.startswith("gloo"):
        return None
    return (
        f"NCCL TALKS OVER {transport_name.upper()} ALTHOUGH THIS MACHINE HAS EFA: many times slower; take an image with "
        "aws-ofi-nccl (its lib folder on LD_LIBRARY_PATH), and let the security group pass all traffic to itself"
    )


def has_efa(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether this machine has an Elastic Fabric Adapter, by the drivers of its devices."""
    return any((one / "device/driver").resolve().name == "efa" for one in devices.glob("*"))
