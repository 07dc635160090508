"""One script on one channel of a connection: what goes in, what comes out, and how it ended.

paramiko waits for ever where a window is full or a peer is silent (its issues 448, 1778, 2463), so every wait here is a
short one, after which the connection is looked at.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Self

from .ssh_connection import PACKET, Link


class Talk:
    """One script on one channel. Every wait ends when the connection does, with `EOFError`."""

    def __init__(self, link: Link, script: bytes) -> None:
        self.link, self.script = link, script
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        import paramiko

        with self.stack:
            self.channel = self.stack.enter_context(self.link.session())
            self.channel.settimeout(0.5)
            try:
                # The script goes in on stdin, so that neither its length nor the login shell matters.
                self.channel.exec_command(f"exec sh -c 'eval \"$(head -c {len(self.script)})\"'")
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise EOFError(str(error)) from None
            self.err = bytearray()
            self.send(self.script)
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def send(self, content: bytes | BinaryIO) -> None:
        """Send it all. Raises `BrokenPipeError` when the script has ended."""
        if isinstance(content, bytes):
            parts: Iterable[bytes] = (content[start : start + PACKET] for start in range(0, len(content), PACKET))
        else:
            content.seek(0)
            parts = iter(lambda: content.read(PACKET), b"")
        for part in parts:
            while part:
                try:
                    part = part[self.channel.send(part) :]
                except TimeoutError:
                    self._alive()
                except OSError:
                    self._alive()
                    raise BrokenPipeError from None

    def receive(self, seconds: float | None) -> Iterator[bytes]:
        """Give what the script prints until it closes its output. Raises `TimeoutError` after `seconds` of silence."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                data = self.channel.recv(1 << 20)
            except TimeoutError:
                self._alive()
                self._drain()
                if deadline and time.monotonic() > deadline:
                    raise TimeoutError(f"{seconds:g} s of silence") from None
                continue
            if not data:
                return
            deadline = None if seconds is None else time.monotonic() + seconds
            yield data

    def end(self) -> tuple[int, bytes]:
        """Return the script's exit code and what it said on stderr. Raises `EOFError` when they have been lost."""
        code = self.channel.recv_exit_status()
        self._drain()
        if code < 0:
            raise EOFError("the connection was cut")
        return code, bytes(self.err)

    def _drain(self) -> None:
        while self.channel.recv_stderr_ready():
            self.err += self.channel.recv_stderr(PACKET)

    def _alive(self) -> None:
        if not self.link.alive:
            raise EOFError("the connection was cut")
