"""This computer in the place of a machine: what `SSHConnector` does over ssh is done here."""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.connectors.ssh import CommandFailed, CommandResult, SSHConnector


class LocalConnector(SSHConnector):
    """Runs commands and reads files on this computer, without a connection."""

    name = "here"

    def __init__(self, name: str = "") -> None:
        self.name = name or self.name

    def run(
        self, argv: Sequence[str], *, check: bool = True, timeout: float | None = None, input: bytes = b""
    ) -> CommandResult:
        start = time.monotonic()
        ended = subprocess.run(argv, input=input, capture_output=True, timeout=timeout)
        seconds = time.monotonic() - start
        result = CommandResult(tuple(argv), ended.returncode, ended.stdout, ended.stderr, seconds)
        if check and result.code:
            raise CommandFailed(result, self.name)
        return result

    def read_from(self, path: str, offset: int, limit: int = 1 << 24) -> bytes:
        """Return at most `limit` bytes of a file from an offset; b"" if the file is shorter or does not exist."""
        with contextlib.suppress(FileNotFoundError), Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(limit)
        return b""

    def list_files(self, folder: str) -> dict[str, int]:
        sizes = {}
        for parent, _, names in os.walk(folder):
            for path in (Path(parent, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    sizes[str(path.relative_to(folder))] = path.stat().st_size
        return sizes
