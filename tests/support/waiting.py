"""Waiting for a condition, with a deadline: the one polling loop of all tests."""

import os
import time
from collections.abc import Callable
from typing import Any

# Every limit is multiplied by it: continuous integration, which may share its computer, sets more than 1.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
DEADLINE_SECONDS = 120.0  # a computer with nothing else to do needs a twentieth of it
POLL_SECONDS = 0.02
MAX_POLL_SECONDS = 0.05
POLL_SHARE = 0.05  # of the time waited so far: a condition that takes long is asked less often


class LargestWaits:
    """The largest share of a limit that a wait of each test has used. `make flaky` prints it."""

    def __init__(self) -> None:
        self.test = ""
        self.shares: dict[str, float] = {}

    def note(self, share: float) -> None:
        self.shares[self.test] = max(share, self.shares.get(self.test, 0.0))


largest_waits = LargestWaits()


class WaitTimeout(AssertionError, TimeoutError):
    """A condition was not true before its deadline."""


def wait_for(
    condition: Callable[[], Any],
    seconds: float = DEADLINE_SECONDS,
    describe: Callable[[], Any] = lambda: "",
    poll_seconds: float = POLL_SECONDS,
) -> Any:
    """Return the value of `condition` as soon as it is true.

    Raises `WaitTimeout` after `seconds`, multiplied by `PATIENCE`. `describe` is called then, and what it returns ends
    the message.
    """
    seconds *= PATIENCE
    start = time.monotonic()
    while not (value := condition()):
        waited_seconds = time.monotonic() - start
        if waited_seconds > seconds:
            code = getattr(condition, "__code__", None)
            line = f", line {code.co_firstlineno}" if code else ""
            name = getattr(condition, "__qualname__", repr(condition))
            raise WaitTimeout(f"not true after {seconds:g} s: {name}{line}\n{describe()}".strip())
        time.sleep(max(poll_seconds, min(MAX_POLL_SECONDS, POLL_SHARE * waited_seconds)))
    largest_waits.note((time.monotonic() - start) / seconds)
    return value
