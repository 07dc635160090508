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

from .known_hosts import fingerprint, host_key_error_message, known_host_keys
from .ssh_config import Route

if TYPE_CHECKING:
    import paramiko

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 5.0  # between two questions to the other side
SOCKET_POLL_SECONDS = 1.0  # between two looks of paramiko's thread at its socket; by itself it wakes ten times a second
KEEPALIVE_TIMEOUT_SECONDS = 10.0  # without an answer: it is dead, or cut off
SESSION_WAIT_SECONDS = 60.0
MAX_SESSIONS = 8  # sshd's MaxSessions is 10, and a person may have one too
PACKET_BYTES = 1 << 15
WINDOW_BYTES = 1 << 23


class Unreachable(ClusterError):
    """There is no way to the machine now: no answer, refused, cut. What runs there may go on."""


class SSHRefused(ClusterError):
    """The machine answers and one side will not have the other: host key, user, key."""


class SSHConnection:
    """A connection to one machine; `connect` makes it. Channels of several threads share it."""

    def __init__(self, transport: "paramiko.Transport", jump_connection: "SSHConnection | None") -> None:
        self.transport, self.jump_connection = transport, jump_connection
        self.session_slots = threading.BoundedSemaphore(MAX_SESSIONS)
        threading.Thread(target=self._keepalive, name="ssh-pulse", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the connection stands, as far as is known."""
        return self.transport.is_active()

    def _keepalive(self) -> None:
        """Ask the other side again and again, close when it is silent: TCP takes a frozen sshd for an idle one."""
        while self.is_alive:
            watch = threading.Timer(KEEPALIVE_TIMEOUT_SECONDS, self.close)
            watch.daemon = True
            watch.start()
            with contextlib.suppress(Exception):  # closed under our feet
                self.transport.global_request("keepalive@openssh.com", wait=True)
            watch.cancel()
            self.transport.join(KEEPALIVE_SECONDS)  # returns at once when the connection ends

    @contextlib.contextmanager
    def open_session(self) -> "Iterator[paramiko.Channel]":
        """Give a channel for one command, closed at the end. Raises `EOFError` when the connection is lost."""
        while not self.session_slots.acquire(timeout=0.5):
            if not self.is_alive:
                raise EOFError("the connection was cut")
        try:
            with contextlib.closing(self._open_channel()) as channel:
                yield channel
        finally:
            self.session_slots.release()

    def _open_channel(self) -> "paramiko.Channel":
        """A new channel. sshd counts one that we have closed until its process has ended, so a full house may pass."""
        import paramiko

        deadline = time.monotonic() + SESSION_WAIT_SECONDS
        while True:
            try:
                return self.transport.open_channel("session", window_size=WINDOW_BYTES, timeout=CONNECT_SECONDS)
            except (OSError, EOFError, paramiko.SSHException) as error:
                # Which thread gets the ChannelException is chance: a transport keeps one error for all of them.
                if not self.is_alive or not isinstance(error, paramiko.SSHException) or "Timeout" in str(error):
                    raise EOFError(str(error)) from None
                if time.monotonic() > deadline:
                    raise SSHRefused(f"sshd gives no more sessions ({error}); raise MaxSessions there") from None
                time.sleep(0.02)

    def close(self) -> None:
        """End the connection and that to the jump host; whoever waits on it is told."""
        with contextlib.suppress(Exception):
            self.transport.close()
        if self.jump_connection:
            self.jump_connection.close()


def connect(route: Route, machine_label: str, timeout_seconds: float = CONNECT_SECONDS) -> SSHConnection:
    """Connect and log in. Raises `Unreachable` or `Refused`, in one line."""
    import paramiko

    logging.getLogger("paramiko").addHandler(logging.NullHandler())  # what is wrong is said by our errors
    gate = (
        connect(route.jump_route, f"the jump host {route.jump_route.host} of {machine_label}", timeout_seconds)
        if route.jump_route
        else None
    )
    place = f"{route.host} port {route.port}"
    transport = None
    try:
        transport = paramiko.Transport(
            _open_transport_stream(route, gate, timeout_seconds), default_window_size=WINDOW_BYTES
        )
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = timeout_seconds
        _verify_host_key(transport, route, machine_label, timeout_seconds)
        _log_in(transport, route, machine_label)
        if isinstance(transport.sock, socket.socket):
            transport.sock.settimeout(SOCKET_POLL_SECONDS)
    except BaseException as error:
        for one in (transport, gate):
            with contextlib.suppress(Exception):
                if one:
                    one.close()
        if isinstance(error, ClusterError) or not isinstance(error, OSError | EOFError | paramiko.SSHException):
            raise
        reason = _failure_reason(error)
        raise Unreachable(
            f"{machine_label}: cannot be reached at {place}: {reason}; is it up, does ssh get there?"
        ) from None
    return SSHConnection(transport, gate)


def _failure_reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, EOFError):
        return "it hung up"
    text = str(getattr(error, "strerror", None) or error)
    return "no word of ssh from there" if "banner" in text else " ".join(text.split()) or type(error).__name__


def _open_transport_stream(route: Route, jump_connection: SSHConnection | None, timeout_seconds: float) -> Any:
    """What the connection runs on: a socket, a channel of the jump host, or a program's pipes."""
    if jump_connection:
        return jump_connection.transport.open_channel(
            "direct-tcpip", (route.host, route.port), ("127.0.0.1", 0), timeout=timeout_seconds
        )
    if route.proxy_command:
        import paramiko

        return paramiko.ProxyCommand(route.proxy_command)
    one = socket.create_connection((route.host, route.port), timeout_seconds)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, name):
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def _verify_host_key(transport: "paramiko.Transport", route: Route, machine_label: str, timeout_seconds: float) -> None:
    """Agree on keys, and go on only if the host key is one that is known. Known types are asked for first."""
    import paramiko

    known = known_host_keys(route)
    kinds = {"rsa-sha2-512": "ssh-rsa", "rsa-sha2-256": "ssh-rsa"}
    options = transport.get_security_options()
    types = list(options.key_types)
    options.key_types = sorted(types, key=lambda one: kinds.get(one, one) not in {key.key_type for key in known})
    try:
        transport.start_client(timeout=timeout_seconds)
    except paramiko.ssh_exception.IncompatiblePeer as error:
        raise SSHRefused(
            f"{machine_label}: speaks an ssh that is too old or too new: {error}; see: ssh -vv {route.host}"
        ) from None
    if not transport.initial_kex_done:  # at its deadline start_client only returns
        raise TimeoutError
    offered = transport.get_remote_server_key()
    name, text = offered.get_name(), offered.get_base64()
    if any(key.is_revoked and key.key_base64 == text for key in known):
        raise SSHRefused(f"{machine_label}: its host key {fingerprint(text)} is marked as revoked in known_hosts")
    if not any((key.key_type, key.key_base64) == (name, text) for key in known if not key.is_revoked):
        raise SSHRefused(
            host_key_error_message(route, machine_label, name, text, [key for key in known if not key.is_revoked])
        )


def _log_in(transport: "paramiko.Transport", route: Route, machine_label: str) -> None:
    """Offer the keys one after the other: those of the file, then the agent's."""
    import paramiko

    locked: list[str] = []
    tried = 0
    for key in _loadable_keys(route, machine_label, locked):
        tried += 1
        try:
            if not transport.auth_publickey(route.user, key):
                return
            raise SSHRefused(
                f"{machine_label}: lets {route.user} in only with more than a key; allow a key alone in its sshd_config"
            )
        except paramiko.BadAuthenticationType as error:
            ways = ", ".join(error.allowed_types)
            raise SSHRefused(
                f"{machine_label}: takes no keys from {route.user}, only {ways}; see its sshd_config"
            ) from None
        except paramiko.AuthenticationException as error:
            if not transport.is_active() or "timeout" in str(error).lower():
                raise EOFError("it hung up while we logged in") from None
    place = f"-p {route.port} {route.user}@{route.host}"
    if locked:
        raise SSHRefused(
            f"{machine_label}: the key {locked[0]} has a passphrase; give it to your agent: ssh-add {locked[0]}"
        )
    if not tried:
        raise SSHRefused(
            f"{machine_label}: there is no key to log in with; make one and bring it there: ssh-keygen; ssh-copy-id {place}"
        )
    files = " and ".join(str(one) for one in route.key_files if one.exists()) or "the agent's keys"
    raise SSHRefused(
        f"{machine_label}: does not let {route.user} in with {files}; try: ssh-copy-id {place}, or set user and key"
    )


def _loadable_keys(route: Route, machine_label: str, passphrase_key_paths: list[str]) -> "Iterator[paramiko.PKey]":
    """The keys to offer; the names of those that only the agent could open go to `locked`."""
    import paramiko

    for path in route.key_files:
        if not path.exists():
            if route.requires_keys and path == route.key_files[0]:
                raise SSHRefused(
                    f"{machine_label}: the key {path} is not there; make it: ssh-keygen -f {path}, or set another key"
                )
            continue
        try:
            yield paramiko.PKey.from_path(path)
        except (TypeError, paramiko.PasswordRequiredException):
            passphrase_key_paths.append(str(path))
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            if route.requires_keys:
                raise SSHRefused(f"{machine_label}: the key {path} cannot be used: {error}") from None
    if route.uses_ssh_agent:
        with contextlib.closing(paramiko.Agent()) as agent:
            yield from agent.get_keys()
