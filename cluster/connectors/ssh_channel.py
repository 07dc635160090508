"""Runs one script on one channel of an ssh connection: sends its input, receives its output and exit code.

paramiko can wait forever when a window is full or a peer is silent (its issues 448, 1778, 2463). So every wait here is
short, and after it the connection is checked.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Self

from .ssh_connection import PACKET_BYTES, WINDOW_BYTES, SSHConnection
from .untrusted import BadAnswer

MAX_STDERR_BYTES = 1 << 16  # of what a script prints there, only the end is kept


class SSHChannel:
    """One script that runs on one channel, as a context. Every wait raises `EOFError` when the connection ends.

    A script that prints more than `limit_bytes` raises `BadAnswer`.
    """

    def __init__(self, connection: SSHConnection, script: bytes, limit_bytes: int) -> None:
        self.connection = connection
        self.limit_bytes = limit_bytes
        self.received_bytes = 0
        self.script = script
        self.exit_stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        import paramiko  # takes 0.1 s and more, which `imgnet-cluster --help` need not wait for

        with self.exit_stack:
            self.paramiko_channel = self.exit_stack.enter_context(self.connection.open_session())
            self.paramiko_channel.settimeout(0.5)
            try:
                # The script is sent on stdin, so that neither its length nor the kind of login shell matters.
                self.paramiko_channel.exec_command(f"exec sh -c 'eval \"$(head -c {len(self.script)})\"'")
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise EOFError(str(error)) from None
            self.stderr = bytearray()
            self.send(self.script)
            self.exit_stack = self.exit_stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.exit_stack.close()

    def send(self, content: bytes | BinaryIO) -> None:
        """Send all of the content to the script's stdin. Raises `BrokenPipeError` if the script has ended."""
        if isinstance(content, bytes):
            parts: Iterable[bytes] = (
                content[start : start + PACKET_BYTES] for start in range(0, len(content), PACKET_BYTES)
            )
        else:
            content.seek(0)
            parts = iter(lambda: content.read(PACKET_BYTES), b"")
        for part in parts:
            unsent = part
            while unsent:
                try:
                    unsent = unsent[self.paramiko_channel.send(unsent) :]
                    self.connection.heard()
                except TimeoutError:
                    self._require_connection()
                except OSError:
                    self._require_connection()
                    raise BrokenPipeError from None

    def receive(self, silence_timeout: float | None) -> Iterator[bytes]:
        """Yield what the script prints until it closes its stdout.

        Raises `TimeoutError` after `silence_timeout` seconds without output (None: never).
        """
        deadline = None if silence_timeout is None else time.monotonic() + silence_timeout
        while True:
            try:
                data = self.paramiko_channel.recv(1 << 20)
            except TimeoutError:
                self._require_connection()
                self._drain_stderr()
                if deadline and time.monotonic() > deadline:
                    raise TimeoutError(f"{silence_timeout:g} s of silence") from None
                continue
            if not data:
                return
            deadline = None if silence_timeout is None else time.monotonic() + silence_timeout
            self._count(data)
            yield data

    def wait_for_exit(self) -> tuple[int, bytes]:
        """Return the script's exit code and its stderr. Raises `EOFError` if the connection was lost before them."""
        code = self.paramiko_channel.recv_exit_status()
        self._drain_stderr()
        if code < 0:
            raise EOFError("the connection was cut")
        return code, bytes(self.stderr)

    def _drain_stderr(self) -> None:
        for _ in range(WINDOW_BYTES // PACKET_BYTES):  # a machine may print faster than this reads
            if not self.paramiko_channel.recv_stderr_ready():
                return
            data = self.paramiko_channel.recv_stderr(PACKET_BYTES)
            self._count(data)
            self.stderr = (self.stderr + data)[-MAX_STDERR_BYTES:]

    def _count(self, data: bytes) -> None:
        self.connection.heard()
        self.received_bytes += len(data)
        if self.received_bytes > self.limit_bytes:
            raise BadAnswer(f"is longer than {self.limit_bytes / 1e6:.1f} MB")

    def _require_connection(self) -> None:
        if not self.connection.is_alive:
            raise EOFError("the connection was cut")
