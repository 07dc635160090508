"""Runs one script on one channel of an ssh connection: sends its input, receives its output and exit code.

paramiko can wait forever when a window is full or a peer is silent (its issues 448, 1778, 2463): waits here are short.

A login shell may print what it likes before the script runs: greetings of ~/.bashrc, banners of a module system. So the
first line of an answer is a mark that only this question has, and everything before it is dropped.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

from .ssh_connection import PACKET_BYTES, WINDOW_BYTES, SSHConnection
from .untrusted import BadAnswer

if TYPE_CHECKING:
    import paramiko

# Starts a script whatever the login shell. The script is sent on stdin, so that its length does not matter. A start-up
# file that reads from stdin takes a part of it: then its first line is not the mark, and the rest must not run.
START_SCRIPT = (
    'exec sh -c \'echo; echo {mark}; read -r line; [ "$line" = {mark} ] || {{'
    ' echo "its start-up files read from stdin; let only interactive shells do that" >&2; exit 1; }};'
    ' eval "$(head -c {length})"\''
)
MAX_GREETING_BYTES = 1 << 22  # of what a login shell prints before the script runs
MAX_STDERR_BYTES = 1 << 16  # of what a script prints there, only the end is kept
SLOWEST_BYTES_PER_SECOND = 2000  # of a link over which a job is expected to work


@dataclass
class AnswerTimeLimit:
    """Time limit of an answer that may come bit by bit: some seconds, and time for at most `max_bytes` moved bytes."""

    seconds: float
    max_bytes: int
    moved_bytes: int = 0
    start: float | None = None  # of the first question

    def check(self) -> None:
        """Raise `TimeoutError` when the answer has taken too long."""
        now = time.monotonic()
        if self.start is None:
            self.start = now
        moved_seconds = min(self.moved_bytes, self.max_bytes) / SLOWEST_BYTES_PER_SECOND
        if (seconds := now - self.start) > self.seconds + moved_seconds:
            raise TimeoutError(f"{self.moved_bytes} bytes in {seconds:.0f} s, and no end")


@dataclass
class SSHChannel:
    """One script that runs on one channel. Every wait raises `EOFError` when the connection ends.

    What the login shell prints before the script is dropped. Raises `BadAnswer` when more than `limit_bytes` come, and
    `TimeoutError` after `time_limit`.
    """

    connection: SSHConnection
    paramiko_channel: "paramiko.Channel"
    limit_bytes: int
    time_limit: AnswerTimeLimit | None = None
    received_bytes: int = 0
    has_answered: bool = False  # it has printed the mark
    mark: str = field(default_factory=lambda: uuid4().hex)
    stderr: bytearray = field(default_factory=bytearray)

    def start(self, script: bytes) -> None:
        """Start the script."""
        import paramiko  # takes 0.1 s and more, which `imgnet-cluster --help` need not wait for

        self.paramiko_channel.settimeout(0.5)
        try:
            self.paramiko_channel.exec_command(START_SCRIPT.format(mark=self.mark, length=len(script)))
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise EOFError(str(error)) from None
        with contextlib.suppress(BrokenPipeError):  # the login shell has ended already; its exit code says why
            self.send(f"{self.mark}\n".encode() + script)

    def send(self, content: bytes) -> None:
        """Send all of the content to the script's stdin. Raises `BrokenPipeError` if the script has ended."""
        for start in range(0, len(content), PACKET_BYTES):
            unsent = content[start : start + PACKET_BYTES]
            while unsent:
                try:
                    sent_bytes = self.paramiko_channel.send(unsent)
                except TimeoutError:
                    self._require_progress()
                except OSError:
                    self._require_progress()
                    raise BrokenPipeError from None
                else:
                    unsent = unsent[sent_bytes:]
                    self._note_moved(sent_bytes)

    def receive(self) -> Iterator[bytes]:
        """Yield what the script prints, from the mark on, until it closes its stdout."""
        mark = f"\n{self.mark}\n".encode()
        greeting, greeting_bytes = b"", 0  # the end of what came before the mark, and how much that was
        while True:
            try:
                data = self.paramiko_channel.recv(1 << 20)
            except TimeoutError:
                self._drain_stderr()
                self._require_progress()
                continue
            if not data:
                return
            if not self.has_answered:
                greeting_bytes += len(data)
                greeting, found, data = (greeting[-len(mark) :] + data).partition(mark)
                self.has_answered = bool(found)
                if not found:
                    self._note_moved(len(greeting))
                    if greeting_bytes > MAX_GREETING_BYTES:
                        raise BadAnswer(f"begins with more than {MAX_GREETING_BYTES / 1e6:.1f} MB of its login shell")
            if data:
                self._count(data)
                yield data

    def wait_for_exit(self) -> tuple[int, bytes]:
        """Return the script's exit code and its stderr. Raises `EOFError` if the connection was lost before them."""
        while not self.paramiko_channel.status_event.wait(0.5):  # a machine may close its output and never end
            self._require_progress()
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
        self.received_bytes += len(data)
        self._note_moved(len(data))
        if self.received_bytes > self.limit_bytes:
            raise BadAnswer(f"is longer than {self.limit_bytes / 1e6:.1f} MB")

    def _note_moved(self, byte_count: int) -> None:
        self.connection.heard()
        if self.time_limit:
            self.time_limit.moved_bytes += byte_count
            self.time_limit.check()

    def _require_progress(self) -> None:
        if not self.connection.is_alive:
            raise EOFError("the connection was cut")
        if self.time_limit:
            self.time_limit.check()
