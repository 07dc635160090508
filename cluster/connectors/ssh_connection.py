"""One persistent ssh connection: pinned host key, public-key login, jump host, and a keep-alive that detects its end.

A machine out of reach is not gone: `Unreachable` may pass by itself, `SSHRefused` needs a change by the user.
"""

import base64
import binascii
import contextlib
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import ClusterError

from .known_hosts import fingerprint, host_key_error_message, known_host_keys
from .ssh_config import Route

if TYPE_CHECKING:
    import paramiko

CONNECT_SECONDS = 10.0
AGENT_SECONDS = 30.0  # for ssh-agent to name its keys; one that is forwarded over a dead connection never does
KEEPALIVE_SECONDS = 5.0  # between two keep-alive requests
KEEPALIVE_TIMEOUT_SECONDS = 10.0  # without an answer to one, the other side is dead or cut off
SOCKET_POLL_SECONDS = 1.0  # how often paramiko's thread wakes up; by default ten times a second
SESSION_WAIT_SECONDS = 60.0
MAX_SESSIONS = 8  # sshd's MaxSessions is 10 by default, and the user may have a session as well
PACKET_BYTES = 1 << 15
WINDOW_BYTES = 1 << 23
# The names of the signature algorithms that an RSA host key may have in the negotiation.
RSA_SIGNATURE_TYPES = {"rsa-sha2-512": "ssh-rsa", "rsa-sha2-256": "ssh-rsa"}
# Our own errors say what is wrong. Once, not for each connection: a logger keeps all the handlers that it gets.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Unreachable(ClusterError):
    """The machine cannot be reached now: no answer, connection refused or cut. Its processes may still run."""


class SSHRefused(ClusterError):
    """The machine answers, but one side rejects the other: host key, user or login key."""


class HostKeyRefused(SSHRefused):
    """The machine offers a host key that is not known for it."""


class SSHConnection:
    """An authenticated connection to one machine; `connect` makes it. Several threads may share its channels."""

    def __init__(self, transport: "paramiko.Transport", jump_connection: "SSHConnection | None") -> None:
        self.transport = transport
        self.jump_connection = jump_connection
        self.session_slots = threading.BoundedSemaphore(MAX_SESSIONS)
        self.heard()
        threading.Thread(target=self._keepalive, name="ssh-keepalive", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the connection is open, as far as this side knows."""
        return self.transport.is_active()

    def heard(self) -> None:
        """Note that the machine has just sent something, or has taken what was sent to it."""
        self.last_heard = time.monotonic()

    def _keepalive(self) -> None:
        """Send keep-alive requests; close the connection when one is not answered and nothing else comes.

        To TCP alone a frozen sshd looks idle. On a slow link an answer waits for megabytes sent before it.
        """
        while self.is_alive:
            answered = threading.Event()
            threading.Thread(target=self._close_when_silent, args=(answered,), daemon=True).start()
            with contextlib.suppress(Exception):  # closed meanwhile
                self.transport.global_request("keepalive@openssh.com", wait=True)
            answered.set()
            self.transport.join(KEEPALIVE_SECONDS)  # returns at once when the connection ends

    def _close_when_silent(self, answered: threading.Event) -> None:
        self.heard()
        while not answered.wait(max(0.0, self.last_heard + KEEPALIVE_TIMEOUT_SECONDS - time.monotonic())):
            if time.monotonic() >= self.last_heard + KEEPALIVE_TIMEOUT_SECONDS:
                return self.close()

    @contextlib.contextmanager
    def open_session(self) -> "Iterator[paramiko.Channel]":
        """Open a channel for one command and close it at the end. Raises `EOFError` when the connection is lost."""
        while not self.session_slots.acquire(timeout=0.5):
            if not self.is_alive:
                raise EOFError("the connection was cut")
        try:
            with contextlib.closing(self._open_channel()) as channel:
                yield channel
        finally:
            self.session_slots.release()

    def _open_channel(self) -> "paramiko.Channel":
        """Open a channel. sshd counts closed ones until their process ends: while it has no free one, try again."""
        import paramiko

        deadline = time.monotonic() + SESSION_WAIT_SECONDS
        while True:
            try:
                return self.transport.open_channel("session", window_size=WINDOW_BYTES, timeout=CONNECT_SECONDS)
            except (OSError, EOFError, paramiko.SSHException) as error:
                # A transport keeps one error for all its threads, so any thread may get another's ChannelException.
                if not self.is_alive or not isinstance(error, paramiko.SSHException) or "Timeout" in str(error):
                    raise EOFError(str(error)) from None
                if time.monotonic() > deadline:
                    raise SSHRefused(f"sshd opens no more sessions ({error}); raise MaxSessions there") from None
                time.sleep(0.02)

    def close(self) -> None:
        """Close the connection and that to the jump host. Threads that wait for a channel get an error."""
        with contextlib.suppress(Exception):
            self.transport.close()
        if self.jump_connection:
            self.jump_connection.close()


def connect(route: Route, machine_label: str, timeout_seconds: float = CONNECT_SECONDS) -> SSHConnection:
    """Connect and log in. Raises `Unreachable` or `SSHRefused`, each with one line."""
    import paramiko

    jump_connection = (
        connect(route.jump_route, f"the jump host {route.jump_route.host} of {machine_label}", timeout_seconds)
        if route.jump_route
        else None
    )
    transport = None
    try:
        stream = _open_transport_stream(route, jump_connection, timeout_seconds)
        transport = paramiko.Transport(stream, default_window_size=WINDOW_BYTES)
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = timeout_seconds
        _verify_host_key(transport, route, timeout_seconds)
        _log_in(transport, route)
        if isinstance(transport.sock, socket.socket):
            transport.sock.settimeout(SOCKET_POLL_SECONDS)
    except BaseException as error:
        for connection in (transport, jump_connection):
            with contextlib.suppress(Exception):
                if connection:
                    connection.close()
        if isinstance(error, SSHRefused):
            raise type(error)(f"{machine_label}: {error}") from None
        if not isinstance(error, OSError | EOFError | paramiko.SSHException):
            raise
        way = " by its ProxyCommand" if route.proxy_command else ""
        raise Unreachable(
            f"{machine_label}: cannot be reached at {route.host} port {route.port}{way}: {_failure_reason(error)}; "
            "is it running, and does ssh reach it from here?"
        ) from None
    return SSHConnection(transport, jump_connection)


def _failure_reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, EOFError):
        return "it closed the connection"
    text = str(getattr(error, "strerror", None) or error)
    if "banner" in text:
        return "no ssh server answers there"
    return " ".join(text.split()) or type(error).__name__


def _open_transport_stream(
    route: Route, jump_connection: SSHConnection | None, timeout_seconds: float
) -> "socket.socket | paramiko.Channel":
    """Return the byte stream below the connection: a socket, a channel of the jump host, or a program's own."""
    if jump_connection:
        return jump_connection.transport.open_channel(
            "direct-tcpip", (route.host, route.port), ("127.0.0.1", 0), timeout=timeout_seconds
        )
    if route.proxy_command:
        return ProxyProgram(route.proxy_command)
    sock = socket.create_connection((route.host, route.port), timeout_seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class ProxyProgram(socket.socket):
    """A socket whose other end is the standard input and output of a ProxyCommand, which sh runs, as OpenSSH does.

    Not `paramiko.ProxyCommand`: it knows no shell, and reads on for ever after the end (its issues 2551 and 1277).
    """

    def __init__(self, command: str) -> None:
        own_end, other_end = socket.socketpair()
        super().__init__(fileno=own_end.detach())
        with other_end:
            self.process = subprocess.Popen(
                ["sh", "-c", f"exec {command}"],
                stdin=other_end.fileno(),
                stdout=other_end.fileno(),
                stderr=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """Close the socket and end the program."""
        super().close()
        self.process.terminate()
        threading.Thread(target=self.process.wait, name="ssh-proxy-end", daemon=True).start()  # leaves no zombie


def _verify_host_key(transport: "paramiko.Transport", route: Route, timeout_seconds: float) -> None:
    """Do the key exchange, known types first, as sshd offers one key. Raises `SSHRefused` for one that is not known."""
    import paramiko

    known_keys = known_host_keys(route)
    known_types = {key.key_type for key in known_keys if key.marker != "@cert-authority"}
    security_options = transport.get_security_options()
    security_options.key_types = sorted(
        list(security_options.key_types), key=lambda name: RSA_SIGNATURE_TYPES.get(name, name) not in known_types
    )
    try:
        transport.start_client(timeout=timeout_seconds)
    except paramiko.ssh_exception.IncompatiblePeer as error:
        raise SSHRefused(
            f"its ssh server and this computer have no algorithm in common: {error}; "
            f"update the older of the two; for details: ssh -vv {route.host}"
        ) from None
    if not transport.initial_kex_done:  # at its deadline start_client returns without an error
        raise TimeoutError
    offered_key = transport.get_remote_server_key()
    key_type, key_base64 = offered_key.get_name(), offered_key.get_base64()
    if any(key.marker == "@revoked" and key.key_base64 == key_base64 for key in known_keys):
        raise SSHRefused(
            f"its host key {fingerprint(key_base64)} is marked as revoked in known_hosts; give the machine a new one"
        )
    if ("", key_type, key_base64) not in [(key.marker, key.key_type, key.key_base64) for key in known_keys]:
        raise HostKeyRefused(host_key_error_message(route, key_type, key_base64, known_keys))


def _log_in(transport: "paramiko.Transport", route: Route) -> None:
    """Offer the login keys one by one, first the files, then those of ssh-agent. Raises `SSHRefused`."""
    import paramiko

    passphrase_key_paths: list[str] = []
    tried_keys = 0
    for key in _loadable_keys(route, passphrase_key_paths):
        tried_keys += 1
        try:
            if not transport.auth_publickey(route.user, key):
                return
            raise SSHRefused(f"wants more than a key from {route.user}; allow a key alone in its sshd_config")
        except paramiko.BadAuthenticationType as error:
            allowed_types = ", ".join(error.allowed_types)
            raise SSHRefused(f"takes no keys from {route.user}, only {allowed_types}; change its sshd_config") from None
        except paramiko.AuthenticationException as error:
            if not transport.is_active() and tried_keys > 1:
                raise SSHRefused(
                    f"closed the connection after {tried_keys} keys; name the right one as key in "
                    "hosts.toml, or in ~/.ssh/config with IdentityFile and IdentitiesOnly yes"
                ) from None
            if not transport.is_active() or "timeout" in str(error).lower():
                raise EOFError("it closed the connection during the login") from None
    destination = f"-p {route.port} {route.user}@{route.host}"
    if passphrase_key_paths:
        key_path = passphrase_key_paths[0]
        raise SSHRefused(f"the key {key_path} has a passphrase; give it to ssh-agent: ssh-add {key_path}")
    if not tried_keys:
        raise SSHRefused(
            f"there is no key to log in with; make one and copy it there: ssh-keygen; ssh-copy-id {destination}"
        )
    tried_files = " and ".join(str(path) for path in route.key_files if path.exists()) or "the keys of ssh-agent"
    raise SSHRefused(
        f"does not let {route.user} in with {tried_files}; try: ssh-copy-id {destination}, or set another user or key"
    )


def _loadable_keys(route: Route, passphrase_key_paths: list[str]) -> "Iterator[paramiko.PKey]":
    """Yield the keys to offer. Appends to `passphrase_key_paths` the files that need a passphrase."""
    import paramiko

    for path in route.key_files:
        if not path.exists():
            if route.requires_keys and path == route.key_files[0]:
                raise SSHRefused(
                    f"the key {path} does not exist; make it: ssh-keygen -f {path}, or name another key file"
                )
            continue
        if _read_public_key(path):
            continue  # the key itself is in the agent
        try:
            yield from _with_certificates(paramiko.PKey.from_path(path), [path], route)
        except (TypeError, paramiko.PasswordRequiredException):
            passphrase_key_paths.append(str(path))
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            if route.requires_keys:
                raise SSHRefused(f"the key {path} cannot be used: {error}; name another key file") from None
    with _agent_keys(route) as keys:
        for key in keys:
            yield from _with_certificates(key, route.key_files, route)


def _with_certificates(key: "paramiko.PKey", paths: Iterable[Path], route: Route) -> "Iterator[paramiko.PKey]":
    """Yield a key with each of its certificates, then the key alone: a certificate may have expired."""
    key_fields = key.asbytes()[4 + len(key.get_name()) :]  # after the length of the type and the type
    for certificate in (*(path.with_name(f"{path.name}-cert.pub") for path in paths), *route.certificate_files):
        with contextlib.suppress(OSError, ValueError):
            key.load_certificate(certificate.read_text())
            if key.public_blob and key_fields in key.public_blob.key_blob:
                yield key
    key.public_blob = None
    yield key


def _read_public_key(path: Path) -> bytes | None:
    """Return the public key that a file of OpenSSH's one-line form has, None for any other file."""
    try:
        columns = path.read_bytes().split(None, 2)
        return (
            base64.b64decode(columns[1], validate=True) if columns[0].startswith((b"ssh-", b"ecdsa-", b"sk-")) else None
        )
    except (OSError, IndexError, binascii.Error):
        return None


@contextlib.contextmanager
def _agent_keys(route: Route) -> "Iterator[Sequence[paramiko.PKey]]":
    """Yield ssh-agent's keys as OpenSSH orders them, if it answers. paramiko knows only that of SSH_AUTH_SOCK."""
    import paramiko
    from paramiko.agent import AgentSSH

    agent: Any = AgentSSH()  # Any: what paramiko's own Agent calls is not in its types
    with contextlib.ExitStack() as stack:
        if route.agent_socket:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(AGENT_SECONDS)
            with contextlib.suppress(OSError, paramiko.SSHException):
                connection.connect(route.agent_socket)
                agent._connect(connection)
            connection.settimeout(None)  # before it signs, it may ask its user
        named = [
            _read_public_key(path) or _read_public_key(path.with_name(f"{path.name}.pub")) for path in route.key_files
        ]
        keys = sorted(agent.get_keys(), key=lambda key: key.asbytes() not in named)
        if route.identities_only:
            keys = [key for key in keys if key.asbytes() in named]
        for key in keys:
            key.sign_ssh_data = _signer(key)
        yield keys


def _signer(key: "paramiko.AgentKey") -> Callable[..., bytes]:
    """Return the key's method that signs, which for a key that the agent does not sign with returns a wrong signature.

    An agent declines for a FIDO key that is not plugged in, or a removed smart card; paramiko's connection would end.
    """
    import paramiko

    sign = key.sign_ssh_data

    def sign_or_give_up(data: bytes, algorithm: str | None = None) -> bytes:
        try:
            return bytes(sign(data, algorithm))
        except paramiko.SSHException:
            message = paramiko.Message()
            message.add_string(algorithm or key.get_name())
            message.add_string(b"declined")
            return message.asbytes()

    return sign_or_give_up
