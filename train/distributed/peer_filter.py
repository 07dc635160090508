"""Protects the ports of a run: the kernel drops connections from all addresses but those of the run's machines.

Neither torch's store nor Gloo can check who connects. A socket filter can (SO_ATTACH_FILTER in socket(7)): a program of
classic BPF that the kernel runs on each packet of a socket. No privileges are needed, and it also works for sockets
that a library has opened in this process. A dropped packet gets no answer, so that a stranger cannot tell the port from
a closed one behind a firewall. A computer on the same network segment as the machines can forge an address.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Collection, Sequence

from train.tools.agent_protocol import PEERS_VARIABLE

from .network import own_tcp_sockets

SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python's socket module lacks it
# linux/filter.h: offsets from here on count from the IP header. Smaller offsets count, on a TCP socket, from the TCP
# header.
NETWORK_HEADER = 0xFFF00000
IPV4_SOURCE, IPV6_SOURCE = 12, 8  # offsets in the IP headers
TCP_FLAGS, SYN = 13, 0x02
# Instructions of classic BPF (linux/bpf_common.h).
LOAD_WORD, LOAD_BYTE, SHIFT_RIGHT = 0x20, 0x30, 0x74
JUMP, JUMP_IF_EQUAL, JUMP_IF_BITS, RETURN = 0x05, 0x15, 0x45, 0x06
ACCEPT, DROP = 0xFFFFFFFF, 0
MAX_BRANCH = 200  # a conditional jump skips at most 255 instructions
# Only processes of this machine connect from these addresses, also to its other addresses.
LOOPBACK = ("127.0.0.1", "::1")

Instruction = tuple[int, int, int, int]  # operation, instructions to skip if true, if false, operand


def peer_addresses() -> tuple[str, ...]:
    """Return the addresses of the machines that take part in this run; () when they are not known."""
    return tuple(filter(is_address, os.environ.get(PEERS_VARIABLE, "").split(",")))


def is_address(text: str) -> bool:
    """Whether a text is an IPv4 or IPv6 address."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(text)
        return True
    return False


def admit_only(listener: socket.socket, addresses: Collection[str]) -> None:
    """Let a listening socket accept connections only from these addresses and from this machine.

    Existing connections stay open. Raises `OSError` when the kernel refuses the filter.
    """
    program = filter_program(addresses, with_ipv6=listener.family == socket.AF_INET6)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(buffer)))


def admit_only_peers(listener: socket.socket) -> None:
    """Let a socket accept connections of this run's machines only, if known. Prints when the kernel refuses."""
    if peers := peer_addresses():
        try:
            admit_only(listener, peers)
        except OSError as error:
            port = listener.getsockname()[1]
            warning = f"the kernel takes no filter for port {port} ({error.strerror}): strangers can connect to it"
            print(f"WARNING: {warning}", file=sys.stderr, flush=True)


def guard_ports() -> None:
    """Let all ports on which this process listens accept connections only from the machines of this run."""
    if not peer_addresses():
        return
    for listener in own_tcp_sockets(is_listening=True):
        admit_only_peers(listener)


def filter_program(addresses: Collection[str], with_ipv6: bool) -> Sequence[Instruction]:
    """Return the program that lets a listening TCP socket receive only from these addresses and this machine.

    It checks the packets that ask for a connection (SYN). All other packets cost three instructions.
    """
    parsed = {ipaddress.ip_address(address) for address in {*addresses, *LOOPBACK}}
    ipv4 = sorted(int(address) for address in parsed if address.version == 4)
    ipv6 = sorted(address.packed for address in parsed if address.version == 6) if with_ipv6 else []
    ipv6_part = [instruction for address in ipv6 for instruction in _accept_ipv6(address)]
    return [
        (LOAD_BYTE, 0, 0, TCP_FLAGS),
        (JUMP_IF_BITS, 1, 0, SYN),
        (RETURN, 0, 0, ACCEPT),
        (LOAD_BYTE, 0, 0, NETWORK_HEADER),
        (SHIFT_RIGHT, 0, 0, 4),
        (JUMP_IF_EQUAL, 1, 0, 6),
        (JUMP, 0, 0, len(ipv6_part) + 1),
        *ipv6_part,
        (RETURN, 0, 0, DROP),
        (LOAD_WORD, 0, 0, NETWORK_HEADER + IPV4_SOURCE),
        *_accept_any(ipv4),
        (RETURN, 0, 0, DROP),
    ]


def _accept_any(values: Sequence[int]) -> list[Instruction]:
    """Return instructions that accept the packet when the loaded word is one of these values, and else continue."""
    instructions: list[Instruction] = []
    for start in range(0, len(values), MAX_BRANCH):
        part = values[start : start + MAX_BRANCH]
        instructions += [(JUMP_IF_EQUAL, len(part) - index, 0, value) for index, value in enumerate(part)]
        instructions += [(JUMP, 0, 0, 1), (RETURN, 0, 0, ACCEPT)]
    return instructions


def _accept_ipv6(address: bytes) -> list[Instruction]:
    """Return instructions that accept the packet when it comes from this address, and else continue."""
    instructions: list[Instruction] = []
    words = struct.unpack("!4I", address)
    for index, word in enumerate(words):
        instructions += [
            (LOAD_WORD, 0, 0, NETWORK_HEADER + IPV6_SOURCE + 4 * index),
            (JUMP_IF_EQUAL, 0, 2 * (len(words) - index) - 1, word),
        ]
    return [*instructions, (RETURN, 0, 0, ACCEPT)]
