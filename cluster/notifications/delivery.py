"""Delivers notifications to one target, in order: each by a process that is killed when it takes too long."""

import contextlib
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from hashlib import sha256
from uuid import uuid4

from cluster.connectors.local import module_command
from cluster.connectors.untrusted import one_line
from cluster.errors import BadInput, ClusterError
from train.tools.process import kill_process_groups, start_process
from train.tools.text_files import to_json_bytes

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


class Delivery:
    """The notifications that one target has to get. No method blocks or raises."""

    def __init__(self, target: str, max_tries: int = MAX_TRIES) -> None:
        self.target = target
        self.max_tries = max_tries
        self.label = describe_target(target)
        self.fingerprint = sha256(target.encode()).hexdigest()[:12]  # names the target where it must not be shown
        self.waiting: deque[Notification] = deque()
        self._first: Generator[None, None, str] | None = None  # the delivery of the first that waits

    def poll(self) -> tuple[Notification, str] | None:
        """Go on with the first delivery. Returns its notification and the last error ("": none) when it has ended."""
        if self._first is None:
            if not self.waiting:
                return None
            self._first = self._deliver(self.waiting[0])
        try:
            next(self._first)
            return None
        except StopIteration as end:
            self._first = None
            return self.waiting.popleft(), end.value

    def abandon(self) -> list[tuple[Notification, str]]:
        """Give up all that is not delivered yet, and kill what delivers."""
        if self._first:
            self._first.close()
        abandoned = [(notification, "there was no time left for it") for notification in self.waiting]
        self.waiting.clear()
        return abandoned

    def _deliver(self, notification: Notification) -> Generator[None, None, str]:
        """Try until the target has the notification. Yields while it waits; returns the error of the last try."""
        error = yield from self._try(notification)
        for _ in range(self.max_tries - 1):
            retry_time = time.monotonic() + RETRY_SECONDS
            while error and time.monotonic() < retry_time:
                yield
            if error:
                error = yield from self._try(notification)
        return error

    def _try(self, notification: Notification) -> Generator[None, None, str]:
        if is_webhook(self.target):
            argv, variables = module_command("cluster.notifications.webhook"), {URL_VARIABLE: self.target}
        else:
            argv, variables = ["sh", "-c", self.target], event_variables(notification)
        try:
            # No pipe: a command that does not read it would block us.
            with tempfile.TemporaryFile() as content, tempfile.TemporaryFile() as output:
                content.write(to_json_bytes(notification.payload()))
                content.seek(0)
                process = start_process(argv, None, variables, stdin=content.fileno(), output=output)
                deadline = time.monotonic() + DELIVERY_SECONDS
                try:
                    while process.poll() is None and time.monotonic() < deadline:
                        yield
                    code = process.poll()
                finally:  # also when the delivery is abandoned
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        kill_process_groups([process], KILL_SECONDS)
                output.seek(0)
                text = one_line(output.read(MAX_OUTPUT_BYTES))
        except OSError as error:
            return error.strerror or type(error).__name__
        if code is None:
            return f"not over in {DELIVERY_SECONDS:g} s"
        # What a command prints may be secret, such as a URL that curl quotes.
        return "" if code == 0 else text if is_webhook(self.target) else f"it ended with code {code}"


def event_variables(notification: Notification) -> dict[str, str]:
    """Return the variables by which a command knows the event. No option of ours takes its default from them."""
    return {
        "IMGNET_EVENT": str(notification.event),
        "IMGNET_EVENT_TEXT": notification.text,
        "IMGNET_EVENT_JOB": notification.job,
        "IMGNET_EVENT_MACHINES": " ".join(notification.machines),
    }


def send_tests(targets: Sequence[str]) -> Iterator[str]:
    """Send a test to each target, and yield the label of each that took it. Raises `BadInput`, `ClusterError`."""
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
        if failure := outcome[1]:
            errors.append(f"{delivery.label}: {failure}")
        else:
            yield delivery.label
    if errors:
        raise ClusterError("; ".join(errors))
