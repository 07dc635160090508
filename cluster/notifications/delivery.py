"""Delivers notifications to one target, in order: each by a process that is killed when it takes too long."""

import contextlib
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import IO
from uuid import uuid4

from cluster.connectors.local import module_command
from cluster.connectors.untrusted import one_line
from cluster.errors import BadInput, ClusterError
from train.tools.filesystem import to_json_bytes
from train.tools.process import kill_process_groups, start_process

from .events import EventKind, Notification
from .targets import chosen_targets, describe_target, is_webhook, parse_target

URL_VARIABLE = "IMGNET_WEBHOOK_URL"  # from which the process that posts takes the URL
DELIVERY_SECONDS = 30.0  # for one try
RETRY_SECONDS = 5.0
MAX_TRIES = 3
KILL_SECONDS = 5.0
POLL_SECONDS = 0.05
MAX_OUTPUT_BYTES = 4096
TEST_TEXT = "a test of imgnet-cluster: notifications of jobs arrive here"


@dataclass(frozen=True)
class Outcome:
    """What became of a notification: `error` is "" when it was delivered."""

    notification: Notification
    error: str


class Delivery:
    """The notifications that one target has to get. No method blocks or raises."""

    def __init__(self, target: str, max_tries: int = MAX_TRIES) -> None:
        self.target = target
        self.max_tries = max_tries
        self.label = describe_target(target)
        self.fingerprint = sha256(target.encode()).hexdigest()[:12]  # names the target where it must not be shown
        self.waiting: deque[Notification] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._tries = 0
        self._next_time = 0.0  # of a start, or the deadline of the running process; monotonic

    def poll(self, now: float | None = None) -> Outcome | None:
        """Start what is due, and return the outcome of the first notification when it has one."""
        now = time.monotonic() if now is None else now
        if self._process is None:
            if not self.waiting or now < self._next_time:
                return None
            error = self._start(self.waiting[0], now)
        else:
            code = self._process.poll()
            if code is None and now < self._next_time:
                return None
            error = self._end(code)
        if error is None:
            return None
        self._tries += 1
        if error and self._tries < self.max_tries:
            self._next_time = now + RETRY_SECONDS
            return None
        self._tries, self._next_time = 0, 0.0
        return Outcome(self.waiting.popleft(), error)

    def abandon(self) -> list[Outcome]:
        """Give up all that is not delivered yet."""
        if self._process is not None:
            self._end(None)
        outcomes = [Outcome(notification, "there was no time left for it") for notification in self.waiting]
        self.waiting.clear()
        return outcomes

    def _start(self, notification: Notification, now: float) -> str | None:
        """Start the process that delivers. Returns why that failed, None when it did not."""
        output: IO[bytes] | None = None
        try:
            output = tempfile.TemporaryFile()  # noqa: SIM115  `_end` closes it
            with tempfile.TemporaryFile() as content:  # no pipe: a command that does not read it would block us
                content.write(to_json_bytes(notification.payload()))
                content.seek(0)
                if is_webhook(self.target):
                    argv, variables = module_command("cluster.notifications.webhook"), {URL_VARIABLE: self.target}
                else:
                    argv, variables = ["sh", "-c", self.target], event_variables(notification)
                process = start_process(argv, None, variables, stdin=content.fileno(), output=output)
        except OSError as error:
            if output:
                output.close()
            return error.strerror or type(error).__name__
        self._process, self._output, self._next_time = process, output, now + DELIVERY_SECONDS
        return None

    def _end(self, code: int | None) -> str:
        """Return why the process failed, "" when it did not. A code of None: it is killed."""
        process, output = self._process, self._output
        assert process and output
        self._process = self._output = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            kill_process_groups([process], KILL_SECONDS)
        with output:
            if code is None:
                return f"not over in {DELIVERY_SECONDS:g} s"
            if code == 0:
                return ""
            output.seek(0)
            text = one_line(output.read(MAX_OUTPUT_BYTES))
        # What a command prints may be secret, such as a URL that curl quotes.
        return text if is_webhook(self.target) else f"it ended with code {code}"


def event_variables(notification: Notification) -> dict[str, str]:
    """Return the variables by which a command knows the event. No option of ours takes its default from them."""
    return {
        "IMGNET_EVENT": str(notification.event),
        "IMGNET_EVENT_TEXT": notification.text,
        "IMGNET_EVENT_JOB": notification.job,
        "IMGNET_EVENT_MACHINES": " ".join(notification.machines),
    }


def send_tests(targets: Sequence[str]) -> Iterator[str]:
    """Send a notification of the kind "test" to each target, and yield how the target is shown when it took it.

    Raises `BadInput` for wrong targets, `ClusterError` with those that did not take it, after one try.
    """
    try:
        chosen = chosen_targets([parse_target(target) for target in targets])
    except ValueError as error:
        raise BadInput(f"--notify: {error}") from error
    errors = []
    for delivery in [Delivery(target, max_tries=1) for target in chosen]:
        test = Notification(id=uuid4().hex[:12], event=EventKind.TEST, text=TEST_TEXT, time=time.time())
        delivery.waiting.append(test)
        while (outcome := delivery.poll()) is None:
            time.sleep(POLL_SECONDS)
        if outcome.error:
            errors.append(f"{delivery.label}: {outcome.error}")
        else:
            yield delivery.label
    if errors:
        raise ClusterError("; ".join(errors))
