"""Facts about the network between machines: what carries the collectives, and its own addresses. No torch import."""

import contextlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from train.tools import agent_protocol

# linux/netlink.h, linux/rtnetlink.h, linux/if_addr.h
NLM_F_DUMP_REQUEST = 0x301
RTM_NEWADDR, RTM_GETADDR = 20, 22
IFA_ADDRESS, IFA_LOCAL = 1, 2
NETLINK_TIMEOUT_SECONDS = 5.0
TCP_LISTEN = "0A"  # net/tcp_states.h, as /proc/net/tcp has it
EFA_LIBRARY_FOLDERS = ("opt/amazon/ofi-nccl/lib", "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "opt/amazon/efa/lib")


def detect_transport(backend: str, log: Path | None = None) -> str:
    """Return what carries the collectives: "gloo on eth0", or for NCCL what its log shows. The log is removed."""
    if backend != "nccl":
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(socket.gethostname())  # as Gloo chooses it
            interface = interface or _interface_with_address(address)
        return f"gloo on {interface or 'lo'}"
    nccl_output = ""
    if log:
        with contextlib.suppress(OSError):  # NCCL could not write it, or the disk is full
            nccl_output = log.read_text(errors="replace")
            log.unlink(missing_ok=True)
    return parse_nccl_transport(nccl_output)


def interface_variables(address: str) -> dict[str, str]:
    """Return environment variables that bind Gloo and NCCL to the interface that leads to the address of rank 0.

    By default they use the address of the host's own name: on Debian 127.0.1.1. {} when one of them is set already.
    NCCL takes a name for the beginning of names: "ens5" also for ens50. With "=" it is the whole name.
    """
    if {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & os.environ.keys():
        return {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
        udp_socket.connect((address, 9))  # sends nothing; the kernel chooses the route
        interface = _interface_with_address(udp_socket.getsockname()[0])
        if interface in (name for _, name in socket.if_nameindex()):
            return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {}


def is_listened_on(port: int) -> bool:
    """Whether a process of this machine listens on a TCP port. True where the kernel does not tell."""
    sockets: list[list[str]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            sockets += [line.split() for line in Path(table).read_text().splitlines()[1:]]
    return not sockets or any(own.endswith(f":{port:04X}") and state == TCP_LISTEN for _, own, _, state, *_ in sockets)


def efa_variables() -> dict[str, str]:
    """Return environment variables for trainers on a machine with EFA, except variables that the user has set.

    The loaders fork, for which libfabric's huge pages run out ("Cannot allocate memory"). NCCL can hang when it finds
    its peers over IPv6. Older libfabric needs `FI_EFA_USE_DEVICE_RDMA` for GPUs to send past the processor (GPUDirect
    RDMA). Sources: AWS's aws-ofi-nccl cheat sheet, AWS ParallelCluster's tests.
    """
    if not has_efa():
        return {}
    variables = {
        "FI_EFA_USE_HUGE_PAGE": "0",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_PROVIDER": "efa",
        "NCCL_SOCKET_FAMILY": "AF_INET",
    }
    return {name: value for name, value in variables.items() if name not in os.environ}


def library_variables(root: Path = Path("/")) -> dict[str, str]:
    """Return LD_LIBRARY_PATH with the folders of AWS's EFA installer behind the user's, on a machine that has EFA.

    AWS's images list them in ld.so.conf, others may not. It must be set before a process starts.
    """
    folders = [folder for name in EFA_LIBRARY_FOLDERS if (folder := root / name).is_dir()]
    if not folders or not has_efa():
        return {}
    given = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": ":".join(filter(None, [given, *map(str, folders)]))}


def compile_cache_variables(folder: Path) -> dict[str, str]:
    """Return variables that keep what torch.compile makes in a folder, except those that the user has set.

    By default it lies in the temporary folder, which ends with the agent: each resume would compile anew. So it does
    where the folder cannot be written: torch makes it in every training, also in one that compiles nothing.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return {}
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    return {name: value for name, value in variables.items() if name not in os.environ}


def enable_nccl_log() -> Path | None:
    """Make NCCL log to a file in the agent's folder, and return it; None without an agent, or if NCCL_DEBUG is set."""
    work = os.environ.get(agent_protocol.WORK_VARIABLE)
    if not work or "NCCL_DEBUG" in os.environ:
        return None
    path = Path(work) / agent_protocol.NCCL_LOG_FILE
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(path)}
    return path


def _interface_with_address(address: str) -> str:
    """Return the name of the interface that has an address: "lo" for all of 127/8, else the address itself."""
    default = "lo" if address.startswith("127.") else address
    return next((name for name, own_address in _interface_addresses() if own_address == address), default)


def resolve(address: str) -> set[str]:
    """Return the IP addresses of a host name or of an address; an empty set when the name does not resolve."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        return {str(socket_address[0]) for *_, socket_address in found}
    return set()


def source_addresses(reached_at: Collection[str]) -> tuple[str, ...]:
    """Return the addresses that connections of this machine may come from, as other machines see them.

    These are the addresses of its interfaces and `reached_at`, at which others reach it: behind NAT others see those.
    () when the kernel does not list the interfaces.
    """
    with contextlib.suppress(OSError):
        return tuple(sorted({*own_addresses(), *reached_at}))
    return ()


def own_addresses() -> set[str]:
    """Return the IPv4 and IPv6 addresses of interfaces to other machines, but link-local IPv6. Raises `OSError`."""
    parsed = [ipaddress.ip_address(address) for _, address in _interface_addresses()]
    return {str(each) for each in parsed if not each.is_loopback and not (each.version == 6 and each.is_link_local)}


def _interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield the name of the interface of each IPv4 and IPv6 address. Raises `OSError`."""
    body = struct.pack("=BBBBI", socket.AF_UNSPEC, 0, 0, 0, 0)
    request = struct.pack("=IHHII", 16 + len(body), RTM_GETADDR, NLM_F_DUMP_REQUEST, 0, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(NETLINK_TIMEOUT_SECONDS)
        netlink.sendto(request, (0, 0))
        while True:
            for kind, message in _netlink_parts(netlink.recv(1 << 16), "=IH", 16):
                if kind != RTM_NEWADDR:  # the end, or an error
                    return
                family, _, _, _, index = struct.unpack_from("=BBBBI", message)
                attributes = dict(_netlink_parts(message[8:], "=HH", 4))
                if family in (socket.AF_INET, socket.AF_INET6):
                    address = socket.inet_ntop(family, attributes.get(IFA_LOCAL) or attributes[IFA_ADDRESS])
                    yield socket.if_indextoname(index), address


def _netlink_parts(data: bytes, length_and_kind: str, header_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the content of each message, or of each attribute in one (netlink(7), rtnetlink(7))."""
    while len(data) >= header_bytes:
        length, kind = struct.unpack_from(length_and_kind, data)
        yield kind, data[header_bytes:length]
        data = data[max(header_bytes, (length + 3) & ~3) :]


def own_tcp_sockets(is_listening: bool) -> Iterator[socket.socket]:
    """Yield each TCP socket of this process that listens, or each other one: also those that a library has opened.

    A yielded socket is a second descriptor of the same connection, which is closed before the next one is yielded.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as opened:
                    is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
                    if is_tcp and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == is_listening:
                        yield opened


def parse_nccl_transport(nccl_output: str) -> str:
    """Return "efa", "libfabric", "ib", "roce", "sockets", a plugin or "unknown", by NCCL's log (NCCL_DEBUG=INFO)."""
    networks = re.findall(r"Using network (.+)|Assigned NET plugin (.+) to comm|via NET/([\w ]+?)/", nccl_output)
    name = "".join(networks[-1]).strip().lower() if networks else ""
    if "libfabric" in name or "ofi" in name:
        providers = re.findall(r"NET/OFI Selected provider is ([\w-]+)", nccl_output, re.IGNORECASE)
        return str(providers[-1]).lower() if providers else "libfabric"
    if name == "ib":
        return "roce" if re.search(r"NET/IB : Using.*/RoCE", nccl_output) else "ib"
    return {"socket": "sockets", "": "unknown"}.get(name, name)


def transport_warning(transport_name: str, efa_available: bool) -> str | None:
    """Return a one-line warning when NCCL does not use the machine's EFA, else None."""
    if not efa_available or transport_name in ("efa", "unknown") or transport_name.startswith("gloo"):
        return None
    return (
        f"NCCL TALKS OVER {transport_name.upper()} ALTHOUGH THIS MACHINE HAS EFA: many times slower; use an image with "
        "aws-ofi-nccl (its lib folder on LD_LIBRARY_PATH), and let the security group allow all traffic within itself"
    )


def has_efa(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether this machine has an Elastic Fabric Adapter, by the drivers of its InfiniBand devices."""
    return any((device / "device/driver").resolve().name == "efa" for device in devices.glob("*"))
