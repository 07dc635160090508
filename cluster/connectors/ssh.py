"""A machine over ssh: the same doors as `Machine`, on one kept connection that is made again when it drops.

A command runs once, also when the connection drops under it (see ssh_command). What only reads, or writes the same
bytes, is simply done again. A machine that cannot be reached for `patience` seconds is `Unreachable`, never gone.
"""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self, TypeVar

from cluster.errors import ClusterError

from . import ssh_scripts as sh
from .hosts_file import Host
from .local import CommandFailed, CommandResult, Connector
from .ssh_channel import SSHChannel
from .ssh_config import Route, resolve_route
from .ssh_connection import CONNECT_SECONDS, SSHConnection, SSHRefused, Unreachable, connect
from .ssh_scripts import NEW_BYTES_LIMIT, new_bytes_script, parse_new_bytes

__all__ = ["SSHConnector", "SSHRefused", "Unreachable"]

DEFAULT_RECONNECT_SECONDS = 30.0
DEADLINE_GRACE_SECONDS = 10.0  # beyond a command's own deadline, which the machine keeps
READ_LIMIT_BYTES = 1 << 24
MAX_QUICK_DROPS = 5  # so many times in a row may a connection drop within a second
ReturnType = TypeVar("ReturnType")


class SSHConnector(Connector):
    """A machine behind ssh. `name` stands before its errors; connects when first used; any thread may use it."""

    def __init__(self, host: Host, name: str = "", reconnect_seconds: float = DEFAULT_RECONNECT_SECONDS) -> None:
        self.host, self.name, self.reconnect_seconds = host, name or host.host, reconnect_seconds
        self._lock = threading.Lock()
        self._connection: SSHConnection | None = None
        self._has_swept = False

    @cached_property
    def route(self) -> Route:
        """The way there, as hosts.toml and ~/.ssh/config say; asked once. Raises `ClusterError`."""
        return resolve_route(self.host)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; the next call makes a new one."""
        with self._lock:
            if self._connection:
                self._connection.close()
            self._connection = None

    # --- commands --------------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        timeout: float | None = None,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command once, to its end. What it leaves running does not hold it up.

        Raises `CommandFailed` as `Machine.run`; `Unreachable` when the connection is lost for `patience` seconds, and
        then the command may still run there.
        """
        task, start, again, begun = uuid.uuid4().hex, time.monotonic(), False, False

        def attempt(link: SSHConnection) -> tuple[sh.CommandExit, bytes]:
            nonlocal again, begun
            sweep, self._has_swept = not self._has_swept, True
            words = {"size": len(input), "timeout": timeout, "env": env, "again": again, "sweep": sweep}
            script = sh.run_script(task, self.host.folder, argv, **words)  # type: ignore[arg-type]
            again = begun = True
            return self._wait_for_command(
                link, task, script, input, None if timeout is None else timeout + DEADLINE_GRACE_SECONDS
            )

        try:
            ended, said = self._retry_on_reconnect(attempt)
        except Unreachable as error:
            raise Unreachable(f"{error}; {argv[0]} may run there") if begun else error from None
        except (KeyboardInterrupt, SystemExit):
            self._kill_command(task)
            raise
        out, err, seconds = said[: ended.stdout_bytes], said[ended.stdout_bytes :], time.monotonic() - start
        if timeout is not None and ended.code == -9 and seconds >= timeout:
            err, check = err + f"not over in {timeout} s".encode(), True
        result = CommandResult(tuple(argv), ended.code, out, err, seconds)
        if check and ended.code:
            raise CommandFailed(result, self.name)
        return result

    def _wait_for_command(
        self, connection: SSHConnection, command_id: str, script: bytes, input: bytes, silence_timeout: float | None
    ) -> tuple[sh.CommandExit, bytes]:
        """Start or find a command, and return how it ended and both its outputs, when all of it has come."""
        said, found = bytearray(), None
        with SSHChannel(connection, script) as talk:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and will say why
                talk.send(input)
            for data in talk.receive(silence_timeout):
                said += data
                found = found or sh.parse_exit(command_id, said)
                if found and len(said) >= found[1] + found[0].stdout_bytes + found[0].stderr_bytes:
                    ended, begin = found
                    talk.send(b"\n")
                    return ended, bytes(said[begin : begin + ended.stdout_bytes + ended.stderr_bytes])
            code, err = talk.wait_for_exit()
        if code == sh.EXIT_INPUT_TRUNCATED:
            raise EOFError("the input did not arrive")
        what = (
            f"{self.host.folder}/commands cannot be used" if code == sh.EXIT_NO_FOLDER else "its shell runs no commands"
        )
        raise ClusterError(f"{self.name}: {what}: {_last_line(err) or f'code {code}'}")

    def _kill_command(self, command_id: str) -> None:
        """End a command that nobody waits for any more, if the machine can be reached at once."""
        with contextlib.suppress(Exception):
            link = self._connect(5.0)
            with SSHChannel(link, sh.kill_script(command_id, self.host.folder)) as talk:
                for _ in talk.receive(5.0):
                    pass

    # --- files -----------------------------------------------------------------------------------------------------

    def put(self, source: Path, target: str) -> None:
        """Copy a file of this computer to the machine, whole or not at all; its folder is made."""
        with source.open("rb") as file:
            self._write_file(target, file, os.fstat(file.fileno()).st_size)

    def write(self, path: str, content: bytes) -> None:
        """Replace a file of the machine, whole or not at all; its folder is made."""
        self._write_file(path, content, len(content))

    def _write_file(self, path: str, content: bytes | BinaryIO, size: int) -> None:
        def attempt(link: SSHConnection) -> None:
            self._run_script(link, sh.write_script(path, size, uuid.uuid4().hex), path, content)

        self._retry_on_reconnect(attempt)

    def get(self, source: str, target: Path) -> None:
        """Copy a file of the machine to this computer, whole or not at all."""
        temp = target.with_name(f".{target.name}.{uuid.uuid4().hex}")

        def attempt(link: SSHConnection) -> None:
            with temp.open("wb") as file:
                self._run_script(link, sh.cat_script(source), source, sink=file.write)

        try:
            self._retry_on_reconnect(attempt)
            temp.replace(target)
        finally:
            temp.unlink(missing_ok=True)

    def read_from(self, path: str, offset: int, limit: int = READ_LIMIT_BYTES) -> bytes:
        """Return at most `limit` bytes of a file from an offset; nothing when it is not that long, or not there."""
        return self._retry_on_reconnect(lambda link: self._run_script(link, sh.read_script(path, offset, limit), path))

    def list_files(self, folder: str) -> dict[str, int]:
        """Return the files below a folder by relative path, with their sizes, but for hidden ones."""
        said = self._retry_on_reconnect(lambda link: self._run_script(link, sh.list_files_script(folder), folder))
        pairs = (os.fsdecode(line).split(" ", 1) for line in said.split(b"\0") if line)
        return {str(PurePosixPath(path)): int(size) for size, path in pairs}

    def read_new_bytes(
        self, folder: str, subfolders: Sequence[str], known_sizes: Mapping[str, int]
    ) -> dict[str, bytes]:
        """Return what is new in the files below the sub-folders `names`, beyond the offsets in `have`: one round trip.

        A new empty file is there too, with no bytes. At most 16 MB in all; the next call brings the rest.
        """
        mark = uuid.uuid4().hex
        script = new_bytes_script(folder, subfolders, known_sizes, mark, NEW_BYTES_LIMIT)
        said = self._retry_on_reconnect(lambda link: self._run_script(link, script, folder))
        return parse_new_bytes(said, mark)

    def _run_script(
        self,
        connection: SSHConnection,
        script: bytes,
        path: str,
        content: bytes | BinaryIO = b"",
        sink: Callable[[bytes], object] | None = None,
    ) -> bytes:
        """Let a script run to its end and return what it printed. Raises `ClusterError` when it says what is wrong."""
        said = bytearray()
        with SSHChannel(connection, script) as talk:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and will say why
                talk.send(content)
                talk.paramiko_channel.shutdown_write()
            for data in talk.receive(None):
                (sink or said.extend)(data)
            code, err = talk.wait_for_exit()
        if code:
            raise ClusterError(f"{self.name}: {path}: {_last_line(err) or f'code {code}'}")
        return bytes(said)

    # --- the connection --------------------------------------------------------------------------------------------

    def _retry_on_reconnect(self, operation: Callable[[SSHConnection], ReturnType]) -> ReturnType:
        """Do something on the connection, again on a new one whenever it drops, until it is done."""
        quick = 0
        while True:
            link = self._connect()
            start = time.monotonic()
            try:
                return operation(link)
            except EOFError as error:
                self._discard_connection(link)
                quick = quick + 1 if time.monotonic() - start < 1 else 0
                if quick > MAX_QUICK_DROPS:
                    raise Unreachable(f"{self.name}: hangs up again and again: {error}") from None
            except TimeoutError as error:
                self._discard_connection(link)
                raise Unreachable(f"{self.name}: does not answer: {error}; is it frozen?") from None

    def _connect(self, reconnect_seconds: float | None = None) -> SSHConnection:
        """The connection, made anew when there is none. Raises `Unreachable` when patience ends, `Refused` at once."""
        reconnect_seconds = self.reconnect_seconds if reconnect_seconds is None else reconnect_seconds
        deadline, pause = time.monotonic() + reconnect_seconds, 0.1
        with self._lock:
            while not (self._connection and self._connection.is_alive):
                try:
                    self._connection = connect(self.route, self.name, max(1.0, min(CONNECT_SECONDS, reconnect_seconds)))
                except Unreachable:
                    if time.monotonic() + pause > deadline:
                        raise
                    time.sleep(pause)
                    pause = min(2 * pause, 2.0)
            return self._connection

    def _discard_connection(self, connection: SSHConnection) -> None:
        connection.close()
        with self._lock:
            if self._connection is connection:
                self._connection = None


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
