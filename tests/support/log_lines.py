"""What a package logs, as a list of messages."""

import contextlib
import logging
from collections.abc import Iterator


class ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def log_lines(name: str, level: int = logging.DEBUG) -> Iterator[list[str]]:
    """Collect the messages of a package from `level` on, whatever other handlers it has."""
    logger = logging.getLogger(name)
    handler, level_before = ListHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
