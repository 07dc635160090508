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
from .local import CommandFailed, Machine, Result
from .ssh_channel import Talk
from .ssh_config import Route, resolve
from .ssh_connection import CONNECT_SECONDS, Link, Refused, Unreachable, connect
from .ssh_scripts import CHANGES_BYTES, changes_script, parse_changes

__all__ = ["Refused", "Remote", "Unreachable"]

PATIENCE = 30.0
GRACE = 10.0  # beyond a command's own deadline, which the machine keeps
LIMIT = 1 << 24
QUICK = 5  # so many times in a row may a connection drop within a second
One = TypeVar("One")


class Remote(Machine):
    """A machine behind ssh. `name` stands before its errors; connects when first used; any thread may use it."""

    def __init__(self, host: Host, name: str = "", patience: float = PATIENCE) -> None:
        self.host, self.name, self.patience = host, name or host.host, patience
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._swept = False

    @cached_property
    def route(self) -> Route:
        """The way there, as hosts.toml and ~/.ssh/config say; asked once. Raises `ClusterError`."""
        return resolve(self.host)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; the next call makes a new one."""
        with self._lock:
            if self._link:
                self._link.close()
            self._link = None

    # --- commands --------------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        timeout: float | None = None,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command once, to its end. What it leaves running does not hold it up.

        Raises `CommandFailed` as `Machine.run`; `Unreachable` when the connection is lost for `patience` seconds, and
        then the command may still run there.
        """
        task, start, again, begun = uuid.uuid4().hex, time.monotonic(), False, False

        def attempt(link: Link) -> tuple[sh.Ended, bytes]:
            nonlocal again, begun
            sweep, self._swept = not self._swept, True
            words = {"size": len(input), "timeout": timeout, "env": env, "again": again, "sweep": sweep}
            script = sh.run(task, self.host.folder, argv, **words)  # type: ignore[arg-type]
            again = begun = True
            return self._attend(link, task, script, input, None if timeout is None else timeout + GRACE)

        try:
            ended, said = self._repeat(attempt)
        except Unreachable as error:
            raise Unreachable(f"{error}; {argv[0]} may run there") if begun else error from None
        except (KeyboardInterrupt, SystemExit):
            self._kill(task)
            raise
        out, err, seconds = said[: ended.out], said[ended.out :], time.monotonic() - start
        if timeout is not None and ended.code == -9 and seconds >= timeout:
            err, check = err + f"not over in {timeout} s".encode(), True
        result = Result(tuple(argv), ended.code, out, err, seconds)
        if check and ended.code:
            raise CommandFailed(result, self.name)
        return result

    def _attend(
        self, link: Link, task: str, script: bytes, input: bytes, seconds: float | None
    ) -> tuple[sh.Ended, bytes]:
        """Start or find a command, and return how it ended and both its outputs, when all of it has come."""
        said, found = bytearray(), None
        with Talk(link, script) as talk:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and will say why
                talk.send(input)
            for data in talk.receive(seconds):
                said += data
                found = found or sh.ended(task, said)
                if found and len(said) >= found[1] + found[0].out + found[0].err:
                    ended, begin = found
                    talk.send(b"\n")
                    return ended, bytes(said[begin : begin + ended.out + ended.err])
            code, err = talk.end()
        if code == sh.CUT:
            raise EOFError("the input did not arrive")
        what = f"{self.host.folder}/commands cannot be used" if code == sh.NO_FOLDER else "its shell runs no commands"
        raise ClusterError(f"{self.name}: {what}: {_last(err) or f'code {code}'}")

    def _kill(self, task: str) -> None:
        """End a command that nobody waits for any more, if the machine can be reached at once."""
        with contextlib.suppress(Exception):
            link = self._connected(5.0)
            with Talk(link, sh.kill(task, self.host.folder)) as talk:
                for _ in talk.receive(5.0):
                    pass

    # --- files -----------------------------------------------------------------------------------------------------

    def put(self, source: Path, target: str) -> None:
        """Copy a file of this computer to the machine, whole or not at all; its folder is made."""
        with source.open("rb") as file:
            self._write(target, file, os.fstat(file.fileno()).st_size)

    def write(self, path: str, content: bytes) -> None:
        """Replace a file of the machine, whole or not at all; its folder is made."""
        self._write(path, content, len(content))

    def _write(self, path: str, content: bytes | BinaryIO, size: int) -> None:
        def attempt(link: Link) -> None:
            self._checked(link, sh.write(path, size, uuid.uuid4().hex), path, content)

        self._repeat(attempt)

    def get(self, source: str, target: Path) -> None:
        """Copy a file of the machine to this computer, whole or not at all."""
        temp = target.with_name(f".{target.name}.{uuid.uuid4().hex}")

        def attempt(link: Link) -> None:
            with temp.open("wb") as file:
                self._checked(link, sh.whole(source), source, sink=file.write)

        try:
            self._repeat(attempt)
            temp.replace(target)
        finally:
            temp.unlink(missing_ok=True)

    def read_from(self, path: str, offset: int, limit: int = LIMIT) -> bytes:
        """Return at most `limit` bytes of a file from an offset; nothing when it is not that long, or not there."""
        return self._repeat(lambda link: self._checked(link, sh.read(path, offset, limit), path))

    def files(self, folder: str) -> dict[str, int]:
        """Return the files below a folder by relative path, with their sizes, but for hidden ones."""
        said = self._repeat(lambda link: self._checked(link, sh.files(folder), folder))
        pairs = (os.fsdecode(line).split(" ", 1) for line in said.split(b"\0") if line)
        return {str(PurePosixPath(path)): int(size) for size, path in pairs}

    def changes(self, folder: str, names: Sequence[str], have: Mapping[str, int]) -> dict[str, bytes]:
        """Return what is new in the files below the sub-folders `names`, beyond the offsets in `have`: one round trip.

        A new empty file is there too, with no bytes. At most 16 MB in all; the next call brings the rest.
        """
        mark = uuid.uuid4().hex
        script = changes_script(folder, names, have, mark, CHANGES_BYTES)
        said = self._repeat(lambda link: self._checked(link, script, folder))
        return parse_changes(said, mark)

    def _checked(
        self,
        link: Link,
        script: bytes,
        path: str,
        content: bytes | BinaryIO = b"",
        sink: Callable[[bytes], object] | None = None,
    ) -> bytes:
        """Let a script run to its end and return what it printed. Raises `ClusterError` when it says what is wrong."""
        said = bytearray()
        with Talk(link, script) as talk:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and will say why
                talk.send(content)
                talk.channel.shutdown_write()
            for data in talk.receive(None):
                (sink or said.extend)(data)
            code, err = talk.end()
        if code:
            raise ClusterError(f"{self.name}: {path}: {_last(err) or f'code {code}'}")
        return bytes(said)

    # --- the connection --------------------------------------------------------------------------------------------

    def _repeat(self, attempt: Callable[[Link], One]) -> One:
        """Do something on the connection, again on a new one whenever it drops, until it is done."""
        quick = 0
        while True:
            link = self._connected()
            start = time.monotonic()
            try:
                return attempt(link)
            except EOFError as error:
                self._drop(link)
                quick = quick + 1 if time.monotonic() - start < 1 else 0
                if quick > QUICK:
                    raise Unreachable(f"{self.name}: hangs up again and again: {error}") from None
            except TimeoutError as error:
                self._drop(link)
                raise Unreachable(f"{self.name}: does not answer: {error}; is it frozen?") from None

    def _connected(self, patience: float | None = None) -> Link:
        """The connection, made anew when there is none. Raises `Unreachable` when patience ends, `Refused` at once."""
        patience = self.patience if patience is None else patience
        deadline, pause = time.monotonic() + patience, 0.1
        with self._lock:
            while not (self._link and self._link.alive):
                try:
                    self._link = connect(self.route, self.name, max(1.0, min(CONNECT_SECONDS, patience)))
                except Unreachable:
                    if time.monotonic() + pause > deadline:
                        raise
                    time.sleep(pause)
                    pause = min(2 * pause, 2.0)
            return self._link

    def _drop(self, link: Link) -> None:
        link.close()
        with self._lock:
            if self._link is link:
                self._link = None


def _last(err: bytes) -> str:
    lines = err.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
