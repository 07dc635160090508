"""A connector for a machine over ssh, on one persistent connection that is made again when it drops.

A command runs exactly once, even if the connection drops meanwhile (see `ssh_scripts`). Reading a file, or writing the
same bytes again, is simply repeated. A machine out of reach for `reconnect_seconds` raises `Unreachable`; it may live.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from cluster.errors import ClusterError

from . import ssh_scripts, untrusted
from .hosts_file import Host
from .ssh_channel import AnswerTimeLimit, SSHChannel
from .ssh_config import Route, resolve_route, with_keys
from .ssh_connection import CONNECT_SECONDS, HostKeyRefused, SSHConnection, SSHRefused, Unreachable, connect
from .ssh_scripts import LIST_FILES_SCRIPT, READ_SCRIPT, WRITE_SCRIPT, build_script, quote_path
from .untrusted import BadAnswer, CommandExit, NewBytes

__all__ = ["CommandFailed", "CommandResult", "HostKeyRefused", "SSHConnector", "SSHRefused", "Unreachable"]

DEFAULT_RECONNECT_SECONDS = 30.0
MAX_CONNECT_PAUSE_SECONDS = 1.0  # between two attempts to connect
DEADLINE_GRACE_SECONDS = 10.0  # how long to wait beyond a command's own deadline, which the machine enforces
SCRIPT_SECONDS = 120.0  # for reading or writing a file, beside the time that its bytes take
READ_LIMIT_BYTES = 1 << 24
# Of a command's answer, the bytes for whose way a slow link gets more time: a minute in all. The set-up of a machine
# has about six commands. Whoever answers bit by bit can hold it up for hardly longer than a machine that hangs.
MAX_COUNTED_BYTES = 1 << 17
EXTRA_BYTES = 1 << 16  # of an answer beside what was asked for: what the login shell prints, and stderr
MAX_QUOTED_BYTES = 10_000  # of a failed command's output
MAX_QUICK_DROPS = 5  # how often in a row a connection may drop within a second of being used
ReturnType = TypeVar("ReturnType")


@dataclass(frozen=True)
class CommandResult:
    """The outcome of a command: its arguments, exit code (negative: killed by that signal), output and seconds."""

    argv: tuple[str, ...]
    code: int
    out: bytes
    err: bytes
    seconds: float


class CommandFailed(ClusterError):
    """A command ended with a non-zero exit code. Carries its `CommandResult`; the text shows its last ten lines."""

    def __init__(self, result: CommandResult, machine_name: str) -> None:
        output = (result.out + result.err)[-MAX_QUOTED_BYTES:].decode(errors="replace")
        lines = [untrusted.one_line(line) for line in output.strip().splitlines()[-10:]]
        super().__init__("\n".join([f"{machine_name}: {result.argv[0]} ended with code {result.code}", *lines]))
        self.result = result


@dataclass(eq=False)
class SSHConnector:
    """Runs commands and moves files on a machine over ssh. Commands are argument lists; no shell interprets them.

    Connects at the first use. May be used from several threads, which share the connection. `name` precedes the text of
    its errors. Paths on the machine may begin with ~/. An answer that breaks a rule of `untrusted` raises `BadAnswer`
    and ends the connection. The commands are those of the job `owner`, in its launch `launch`.
    """

    host: Host
    name: str = ""
    reconnect_seconds: float = DEFAULT_RECONNECT_SECONDS
    owner: str = ""
    launch: str = ""
    max_output_bytes: int = untrusted.MAX_OUTPUT_BYTES  # of one command
    received_bytes: int = 0  # of all answers, without what ssh adds to them

    def __post_init__(self) -> None:
        self.name = self.name or self.host.host
        self._lock, self._count_lock, self._route_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._route: Route | None = None
        self._connection: SSHConnection | None = None
        self._has_swept = False

    def change_keys(self, host: Host) -> None:
        """Expect other host keys from the next login on. The connection, if there is one, is kept."""
        with self._route_lock:
            self.host, self._route = host, self._route and with_keys(self._route, host)

    @property
    def route(self) -> Route:
        """How to reach the machine, from hosts.toml and ~/.ssh/config; resolved once. Raises `ClusterError`."""
        with self._route_lock:
            self._route = self._route or resolve_route(self.host)
            return self._route

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next call makes a new one."""
        with self._lock:
            if self._connection:
                self._connection.close()
            self._connection = None

    # --- commands -------------------------------------------------------------------------------------------------

    def run(
        self, argv: Sequence[str], *, check: bool = True, timeout: float | None = None, input: bytes = b""
    ) -> CommandResult:
        """Run a command and wait until it ends. A reconnection does not run it again.

        Background processes that the command leaves running do not delay the return.

        Raises `CommandFailed` if the command fails and `check` is true, and always if it is not over after `timeout`
        seconds; then it is killed with every process that it started. Raises `Unreachable` if the connection is lost
        for `reconnect_seconds`, or the answer takes much longer than `timeout`; the command may then still run.
        """
        command_id = uuid.uuid4().hex
        start = time.monotonic()
        was_sent = False
        max_bytes = MAX_COUNTED_BYTES + len(input)
        time_limit = None if timeout is None else AnswerTimeLimit(timeout + 2 * DEADLINE_GRACE_SECONDS, max_bytes)

        def attempt(connection: SSHConnection) -> tuple[CommandExit, bytes]:
            nonlocal was_sent
            sweep = not self._has_swept
            self._has_swept = True
            script = ssh_scripts.run_script(
                command_id,
                self.host.folder,
                argv,
                input_bytes=len(input),
                timeout=timeout,
                is_retry=was_sent,
                sweep=sweep,
                owner=self.owner,
                launch=self.launch,
            )
            was_sent = True
            return self._wait_for_command(connection, command_id, script, input, time_limit)

        try:
            command_exit, output = self._retry_on_reconnect(attempt)
        except Unreachable as error:
            raise Unreachable(f"{error}; {argv[0]} may still run there") if was_sent else error from None
        stdout, stderr = output[: command_exit.stdout_bytes], output[command_exit.stdout_bytes :]
        seconds = time.monotonic() - start
        if timeout is not None and command_exit.code == -9 and seconds >= timeout:
            stderr += f"not over in {timeout} s".encode()
            check = True
        result = CommandResult(tuple(argv), command_exit.code, stdout, stderr, seconds)
        if check and command_exit.code:
            raise CommandFailed(result, self.name)
        return result

    def _wait_for_command(
        self,
        connection: SSHConnection,
        command_id: str,
        script: bytes,
        input: bytes,
        time_limit: AnswerTimeLimit | None,
    ) -> tuple[CommandExit, bytes]:
        """Start a command, or find the one already started. Returns how it ended, and its stdout followed by stderr."""
        received = bytearray()
        parsed_exit = None
        with self._open_channel(connection, script, self.max_output_bytes + EXTRA_BYTES, time_limit) as channel:
            with contextlib.suppress(BrokenPipeError):  # the script has ended already; its exit code says why
                channel.send(input)
            for data in channel.receive():
                received += data
                parsed_exit = parsed_exit or untrusted.parse_exit(command_id, received, self.max_output_bytes)
                if parsed_exit:
                    command_exit, begin = parsed_exit
                    end = begin + command_exit.stdout_bytes + command_exit.stderr_bytes
                    if len(received) >= end:
                        channel.send(b"\n")  # the machine may remove the command's files
                        return command_exit, bytes(received[begin:end])
            code, stderr = channel.wait_for_exit()
        if code == ssh_scripts.EXIT_INPUT_TRUNCATED:
            raise EOFError("the input did not arrive")
        if code == ssh_scripts.EXIT_ENDED:
            raise ClusterError(f"{self.name}: the job has ended")
        problem = (
            f"{self.host.folder}/commands cannot be used"
            if code == ssh_scripts.EXIT_NO_FOLDER
            else "its login shell runs no commands"
        )
        raise ClusterError(f"{self.name}: {problem}: {_last_line(stderr) or f'code {code}'}")

    def end_commands(self, next_script: str = "", **variables: str) -> bytes:
        """End all commands of the job, also those that another process started, with all that they started.

        No command of this launch begins afterwards, on whichever connection. Then runs a script as `run_repeatable`
        does.
        """
        ending = ssh_scripts.end_commands_script(self.host.folder, self.owner, self.launch)
        return self.run_repeatable(f"{ending}\n{next_script}", **variables)

    def run_repeatable(self, script: str, **variables: str) -> bytes:
        """Run a script that may run twice when the connection drops, and return what it prints.

        `variables` are set first; their values are quoted for sh. Raises `ClusterError` when the script fails.
        """
        script_bytes = build_script(script, **variables)
        return self._run_script(script_bytes, self.host.folder, bytes, limit_bytes=EXTRA_BYTES)

    # --- files ----------------------------------------------------------------------------------------------------

    def write(self, path: str, content: bytes) -> None:
        """Replace a file of the machine atomically, also while another call writes it. Creates its folder."""
        folder, _, name = path.rpartition("/")
        folder = folder or ("/" if path.startswith("/") else ".")
        temp = quote_path(f"{folder}/.{name[:200]}.{uuid.uuid4().hex}") + ".$$"
        size = str(len(content))
        script = build_script(WRITE_SCRIPT, p=quote_path(path), f=quote_path(folder), t=temp, n=size)
        self._run_script(script, path, bytes, content)

    def read_from(self, path: str, offset: int, limit: int = READ_LIMIT_BYTES) -> bytes:
        """Return at most `limit` bytes of a file from an offset; b"" if the file is shorter or does not exist."""
        script = build_script(READ_SCRIPT, p=quote_path(path), o=str(offset + 1), n=str(limit))
        return self._run_script(script, path, bytes, limit_bytes=limit)[:limit]

    def list_files(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of every file below a folder, by relative path."""
        script = build_script(LIST_FILES_SCRIPT, f=quote_path(folder))
        return self._run_script(script, folder, untrusted.parse_listing, limit_bytes=untrusted.MAX_LISTING_BYTES)

    def read_new_bytes(
        self,
        folder: str,
        machine_names: Sequence[str],
        known_sizes: Mapping[str, int],
        limit: int = READ_LIMIT_BYTES,
        on_data: Callable[[], None] = lambda: None,
    ) -> NewBytes:
        """Return what the mirrored files of a job's folder have gained beyond their known sizes, in one round trip.

        Paths are relative to `folder`, in `known_sizes` and in the result. A new empty file is included, with no bytes;
        the status files of `machine_names` and attempt files are whole. At most about `limit` bytes; the next call
        brings the rest. `on_data` is called whenever a part of the answer has come. It may take any time.
        """
        delimiter = uuid.uuid4().hex
        script = ssh_scripts.new_bytes_script(folder, machine_names, known_sizes, delimiter, limit)
        return self._run_script(
            script,
            folder,
            lambda stdout: untrusted.parse_new_bytes(stdout, delimiter, known_sizes, machine_names),
            # The last file may exceed the limit by its header, and status files do not count.
            limit_bytes=limit + untrusted.MAX_PATH_BYTES + untrusted.MAX_RECORD_BYTES * len(machine_names),
            is_time_limited=False,
            on_data=on_data,
        )

    def _run_script(
        self,
        script: bytes,
        path: str,
        parse: Callable[[bytes], ReturnType],
        content: bytes = b"",
        limit_bytes: int = 0,
        is_time_limited: bool = True,
        on_data: Callable[[], None] = lambda: None,
    ) -> ReturnType:
        """Run a script to its end, again when the connection drops. Return its parsed stdout of at most `limit_bytes`.

        `content` is the script's input. Raises `ClusterError` with the path and the last line of stderr if it fails.
        """
        seconds, counted_bytes = SCRIPT_SECONDS, len(content) + limit_bytes + EXTRA_BYTES
        time_limit = AnswerTimeLimit(seconds, counted_bytes) if is_time_limited else None

        def attempt(connection: SSHConnection) -> ReturnType:
            stdout = bytearray()
            with self._open_channel(connection, script, limit_bytes + EXTRA_BYTES, time_limit) as channel:
                with contextlib.suppress(BrokenPipeError):  # the script has ended already; its exit code says why
                    channel.send(content)
                    channel.paramiko_channel.shutdown_write()
                for data in channel.receive():
                    stdout += data
                    on_data()
                code, stderr = channel.wait_for_exit()
            if code or not channel.has_answered:  # a login shell may end well and have run nothing
                what = path if channel.has_answered else "its login shell runs no commands"
                raise ClusterError(f"{self.name}: {what}: {_last_line(stderr) or f'code {code}'}")
            return parse(bytes(stdout))

        return self._retry_on_reconnect(attempt)

    @contextlib.contextmanager
    def _open_channel(
        self, connection: SSHConnection, script: bytes, limit_bytes: int, time_limit: AnswerTimeLimit | None = None
    ) -> Iterator[SSHChannel]:
        """Run a script on a channel of its own, and count what it prints."""
        if time_limit:
            time_limit.check()
        with connection.open_session() as paramiko_channel:
            channel = SSHChannel(connection, paramiko_channel, limit_bytes, time_limit)
            try:
                channel.start(script)
                yield channel
            finally:
                with self._count_lock:
                    self.received_bytes += channel.received_bytes

    # --- the connection -------------------------------------------------------------------------------------------

    def _retry_on_reconnect(self, operation: Callable[[SSHConnection], ReturnType]) -> ReturnType:
        """Call an operation with the connection; repeat it on a new connection each time the connection drops."""
        quick_drops = 0
        while True:
            connection = self._connect()
            start = time.monotonic()
            try:
                return operation(connection)
            except EOFError as error:
                self._discard_connection(connection)
                quick_drops = quick_drops + 1 if time.monotonic() - start < 1 else 0
                if quick_drops > MAX_QUICK_DROPS:
                    raise Unreachable(f"{self.name}: the connection drops again and again: {error}") from None
            except TimeoutError as error:
                self._discard_connection(connection)
                raise Unreachable(f"{self.name}: does not answer: {error}; is it frozen?") from None
            except BadAnswer as error:
                self._discard_connection(connection)
                raise BadAnswer(error.rule, self.name) from None

    def _connect(self) -> SSHConnection:
        """Return the connection, or a new one. Raises `Unreachable` after `reconnect_seconds`, `SSHRefused` at once."""
        deadline = time.monotonic() + self.reconnect_seconds
        pause = 0.1
        with self._lock:
            while not (self._connection and self._connection.is_alive):
                try:
                    seconds = max(1.0, min(CONNECT_SECONDS, self.reconnect_seconds))
                    self._connection = connect(self.route, self.name, seconds)
                except Unreachable:
                    if time.monotonic() + pause > deadline:
                        raise
                    time.sleep(pause)
                    pause = min(2 * pause, MAX_CONNECT_PAUSE_SECONDS)
            return self._connection

    def _discard_connection(self, connection: SSHConnection) -> None:
        connection.close()
        with self._lock:
            if self._connection is connection:
                self._connection = None


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return untrusted.one_line(lines[-1]) if lines else ""
