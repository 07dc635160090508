"""One ssh connection that is kept: pinned host key, key authentication, jump host, and a pulse that notices the dead.

Two classes of error, because what cannot be reached is not gone: `Unreachable` may pass by itself, `Refused` may not.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cluster.errors import ClusterError

from .known_hosts import fingerprint, known_keys, refused_key
from .ssh_config import Route

if TYPE_CHECKING:
    import paramiko

CONNECT_SECONDS = 10.0
PULSE_SECONDS = 5.0  # between two questions to the other side
IDLE_SECONDS = 1.0  # between two looks of paramiko's thread at its socket; by itself it wakes ten times a second
SILENCE_SECONDS = 10.0  # without an answer: it is dead, or cut off
FULL_SECONDS = 60.0
SESSIONS = 8  # sshd's MaxSessions is 10, and a person may have one too
PACKET = 1 << 15
WINDOW = 1 << 23


class Unreachable(ClusterError):
    """There is no way to the machine now: no answer, refused, cut. What runs there may go on."""


class Refused(ClusterError):
    """The machine answers and one side will not have the other: host key, user, key."""


class Link:
    """A connection to one machine; `connect` makes it. Channels of several threads share it."""

    def __init__(self, transport: "paramiko.Transport", gate: "Link | None") -> None:
        self.transport, self.gate = transport, gate
        self.sessions = threading.BoundedSemaphore(SESSIONS)
        threading.Thread(target=self._pulse, name="ssh-pulse", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the connection stands, as far as is known."""
        return self.transport.is_active()

    def _pulse(self) -> None:
        """Ask the other side again and again, close when it is silent: TCP takes a frozen sshd for an idle one."""
        while self.alive:
            watch = threading.Timer(SILENCE_SECONDS, self.close)
            watch.daemon = True
            watch.start()
            with contextlib.suppress(Exception):  # closed under our feet
                self.transport.global_request("keepalive@openssh.com", wait=True)
            watch.cancel()
            self.transport.join(PULSE_SECONDS)  # returns at once when the connection ends

    @contextlib.contextmanager
    def session(self) -> "Iterator[paramiko.Channel]":
        """Give a channel for one command, closed at the end. Raises `EOFError` when the connection is lost."""
        while not self.sessions.acquire(timeout=0.5):
            if not self.alive:
                raise EOFError("the connection was cut")
        try:
            with contextlib.closing(self._open()) as channel:
                yield channel
        finally:
            self.sessions.release()

    def _open(self) -> "paramiko.Channel":
        """A new channel. sshd counts one that we have closed until its process has ended, so a full house may pass."""
        import paramiko

        deadline = time.monotonic() + FULL_SECONDS
        while True:
            try:
                return self.transport.open_channel("session", window_size=WINDOW, timeout=CONNECT_SECONDS)
            except (OSError, EOFError, paramiko.SSHException) as error:
                # Which thread gets the ChannelException is chance: a transport keeps one error for all of them.
                if not self.alive or not isinstance(error, paramiko.SSHException) or "Timeout" in str(error):
                    raise EOFError(str(error)) from None
                if time.monotonic() > deadline:
                    raise Refused(f"sshd gives no more sessions ({error}); raise MaxSessions there") from None
                time.sleep(0.02)

    def close(self) -> None:
        """End the connection and that to the jump host; whoever waits on it is told."""
        with contextlib.suppress(Exception):
            self.transport.close()
        if self.gate:
            self.gate.close()


def connect(route: Route, who: str, seconds: float = CONNECT_SECONDS) -> Link:
    """Connect and log in. Raises `Unreachable` or `Refused`, in one line."""
    import paramiko

    logging.getLogger("paramiko").addHandler(logging.NullHandler())  # what is wrong is said by our errors
    gate = connect(route.jump, f"the jump host {route.jump.host} of {who}", seconds) if route.jump else None
    place = f"{route.host} port {route.port}"
    transport = None
    try:
        transport = paramiko.Transport(_socket(route, gate, seconds), default_window_size=WINDOW)
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = seconds
        _check_host(transport, route, who, seconds)
        _log_in(transport, route, who)
        if isinstance(transport.sock, socket.socket):
            transport.sock.settimeout(IDLE_SECONDS)
    except BaseException as error:
        for one in (transport, gate):
            with contextlib.suppress(Exception):
                if one:
                    one.close()
        if isinstance(error, ClusterError) or not isinstance(error, OSError | EOFError | paramiko.SSHException):
            raise
        reason = _reason(error)
        raise Unreachable(f"{who}: cannot be reached at {place}: {reason}; is it up, does ssh get there?") from None
    return Link(transport, gate)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, EOFError):
        return "it hung up"
    text = str(getattr(error, "strerror", None) or error)
    return "no word of ssh from there" if "banner" in text else " ".join(text.split()) or type(error).__name__


def _socket(route: Route, gate: Link | None, seconds: float) -> Any:
    """What the connection runs on: a socket, a channel of the jump host, or a program's pipes."""
    if gate:
        return gate.transport.open_channel("direct-tcpip", (route.host, route.port), ("127.0.0.1", 0), timeout=seconds)
    if route.proxy:
        import paramiko

        return paramiko.ProxyCommand(route.proxy)
    one = socket.create_connection((route.host, route.port), seconds)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, name):
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def _check_host(transport: "paramiko.Transport", route: Route, who: str, seconds: float) -> None:
    """Agree on keys, and go on only if the host key is one that is known. Known types are asked for first."""
    import paramiko

    known = known_keys(route)
    kinds = {"rsa-sha2-512": "ssh-rsa", "rsa-sha2-256": "ssh-rsa"}
    options = transport.get_security_options()
    types = list(options.key_types)
    options.key_types = sorted(types, key=lambda one: kinds.get(one, one) not in {key.type for key in known})
    try:
        transport.start_client(timeout=seconds)
    except paramiko.ssh_exception.IncompatiblePeer as error:
        raise Refused(f"{who}: speaks an ssh that is too old or too new: {error}; see: ssh -vv {route.host}") from None
    if not transport.initial_kex_done:  # at its deadline start_client only returns
        raise TimeoutError
    offered = transport.get_remote_server_key()
    name, text = offered.get_name(), offered.get_base64()
    if any(key.revoked and key.text == text for key in known):
        raise Refused(f"{who}: its host key {fingerprint(text)} is marked as revoked in known_hosts")
    if not any((key.type, key.text) == (name, text) for key in known if not key.revoked):
        raise Refused(refused_key(route, who, name, text, [key for key in known if not key.revoked]))


def _log_in(transport: "paramiko.Transport", route: Route, who: str) -> None:
    """Offer the keys one after the other: those of the file, then the agent's."""
    import paramiko

    locked: list[str] = []
    tried = 0
    for key in _keys(route, who, locked):
        tried += 1
        try:
            if not transport.auth_publickey(route.user, key):
                return
            raise Refused(
                f"{who}: lets {route.user} in only with more than a key; allow a key alone in its sshd_config"
            )
        except paramiko.BadAuthenticationType as error:
            ways = ", ".join(error.allowed_types)
            raise Refused(f"{who}: takes no keys from {route.user}, only {ways}; see its sshd_config") from None
        except paramiko.AuthenticationException as error:
            if not transport.is_active() or "timeout" in str(error).lower():
                raise EOFError("it hung up while we logged in") from None
    place = f"-p {route.port} {route.user}@{route.host}"
    if locked:
        raise Refused(f"{who}: the key {locked[0]} has a passphrase; give it to your agent: ssh-add {locked[0]}")
    if not tried:
        raise Refused(
            f"{who}: there is no key to log in with; make one and bring it there: ssh-keygen; ssh-copy-id {place}"
        )
    files = " and ".join(str(one) for one in route.keys if one.exists()) or "the agent's keys"
    raise Refused(f"{who}: does not let {route.user} in with {files}; try: ssh-copy-id {place}, or set user and key")


def _keys(route: Route, who: str, locked: list[str]) -> "Iterator[paramiko.PKey]":
    """The keys to offer; the names of those that only the agent could open go to `locked`."""
    import paramiko

    for path in route.keys:
        if not path.exists():
            if route.asked and path == route.keys[0]:
                raise Refused(f"{who}: the key {path} is not there; make it: ssh-keygen -f {path}, or set another key")
            continue
        try:
            yield paramiko.PKey.from_path(path)
        except (TypeError, paramiko.PasswordRequiredException):
            locked.append(str(path))
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            if route.asked:
                raise Refused(f"{who}: the key {path} cannot be used: {error}") from None
    if route.agent:
        with contextlib.closing(paramiko.Agent()) as agent:
            yield from agent.get_keys()
