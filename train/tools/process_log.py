"""What a process tells while it works: its log as JSON lines in a file and as text on its terminal, and its progress.

Modules log by `logging.getLogger(__name__)`. The program that runs them decides where that goes: a supervisor logs to
its run folder, a command shows messages to its user. `imgnet-cluster logs` prints the files.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .files import open_regular

SUPERVISOR_LOG = "supervisor.jsonl"  # in the run folder
MAX_LOG_BYTES = 5_000_000  # a full file becomes <name>.1, which replaces the one before
# Is told how much of some work is done, and how much it is in all: bytes, images or files. An error ends the work.
Progress = Callable[[int, int], object]
PROJECT_LOGGERS = ("cluster", "infra", "train")


def no_progress(done: int, total: int) -> None:
    """Ignore the progress."""


class LogFileHandler(logging.Handler):
    """Appends to a log file of limited size. A full disk or a deleted folder must not end the process that logs.

    The file is opened for each message: messages are rare, and several processes may append to the same file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def format(self, record: logging.LogRecord) -> str:
        """Return a line of JSON: time in seconds since 1970, level, module, and message with the traceback, if any."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        level = record.levelname.lower()
        return json.dumps({"time": record.created, "level": level, "source": record.name, "message": message})

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record. A message that cannot be written is dropped."""
        line = self.format(record).encode() + b"\n"
        with contextlib.suppress(OSError):
            if self.path.exists() and self.path.stat().st_size + len(line) > MAX_LOG_BYTES:
                self.path.replace(f"{self.path}.1")
            with open_regular(self.path, "ab") as file:
                file.write(line)


def log_to_file(path: Path) -> None:
    """Send this program's messages to a file and, with the time of day, to stdout. A second call replaces the first."""
    terminal = logging.StreamHandler(sys.stdout)
    terminal.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    _set_handlers(terminal, LogFileHandler(path))


def append_message(path: Path, source: str, message: str) -> None:
    """Append one warning to another process's log file, as the process of a queue does for its jobs. Also print it."""
    record = logging.LogRecord(source, logging.WARNING, "", 0, message, None, None)
    print(f"{time.strftime('%H:%M:%S')} {message.rstrip()}", flush=True)
    LogFileHandler(path).handle(record)


def log_to_user() -> None:
    """Show the messages of this program's modules on stderr, as a command that a user types does."""
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    _set_handlers(terminal)


def _set_handlers(*handlers: logging.Handler) -> None:
    for name in PROJECT_LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers[:] = handlers


def log_end(path: Path, max_bytes: int) -> str:
    """Return the last bytes of a log as text, all of a shorter one. Reads no others. Raises `OSError`."""
    with open_regular(path) as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - max_bytes))
        return log.read(max_bytes).decode(errors="replace")


def format_line(line: bytes) -> bytes:
    """Return a line of a JSON log, messages or an agent's states, as text with date and time; others unchanged."""
    try:
        entry = json.loads(line)
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
        if "message" in entry:
            return f"{moment} {entry['message'].rstrip()}\n".encode()
        step = f", step {entry['step']}" if "step" in entry else ""
        reason = f": {entry['reason']}" if entry.get("reason") else ""
        return f"{moment} attempt {entry['attempt']}{step}: {entry['state']}{reason}\n".encode()
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError):
        return line
