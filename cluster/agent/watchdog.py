"""What must be heard even when the shared folder hangs: signals, notices, the time limit. A thread that never reads it.

    <work>/notice   {"reason": ..., "seconds": 120}: this machine will be taken away (`imgnet-cluster lose --notice`)
    <work>/limit    {"hours": 4}: another time limit than the job began with (`imgnet-cluster extend`)

Signals reach it through a pipe: Python would run a handler only when the main thread, perhaps stuck in a read, goes on.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from train.tools.filesystem import read_json

LOOK_SECONDS = 0.2
METADATA_SECONDS = 2.0
SPOT_SECONDS = 120.0  # AWS, "Spot Instance interruption notices"
LONGEST_WAIT = 15.0
IDLE = 600.0  # seconds after the job's end until a rented machine's power goes
GRACE = 30.0  # seconds for a save before a stop becomes a kill
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Guard:
    """Hears why this machine has to leave (`leaving`), or the job has to end (`limit`); "" while there is no reason.

    `hours` is the job's limit, of which `elapsed` seconds are over. `metadata` is the address of an instance metadata
    service, "" for none: EC2 tells there, two minutes ahead, that it takes a spot machine away (AWS, "Spot Instance
    interruption notices"). A rented machine cuts its own power `late` seconds after the limit; None: it is not rented.
    """

    def __init__(
        self,
        work: Path,
        hours: float | None,
        elapsed: float,
        metadata: str,
        kill: Callable[[], None],
        late: float | None = None,
        what: str = "",
    ) -> None:
        self.late, self.what = late, what
        self.notice, self.longer, self.hours, self.kill = work / "notice", work / "limit", hours, kill
        # As AWS's own tools name it: where a machine's metadata service is not at the usual address.
        self.metadata = (metadata and os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata)).rstrip("/")
        self.leaving, self.limit = "", ""
        self.told, self.seconds = 0.0, GRACE  # when we were told to leave, and how long before
        self.begun = time.monotonic() - elapsed
        self.over = False
        self._since: float | None = None
        self._asked = 0.0
        self._token = ""
        self.notice.unlink(missing_ok=True)  # meant for whoever was here before

    def start(self) -> None:
        """Begin to hear. Called once, in the main thread."""
        if self.late is not None and self.hours is not None:
            self.arm(3600 * self.hours - (time.monotonic() - self.begun) + self.late)
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # Python writes the number to the pipe
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """Hear nothing any more. A rented machine that nobody ends now ends by itself."""
        self.over = True
        if self.late is not None:
            self.arm(IDLE)

    def arm(self, seconds: float) -> None:
        """Let the machine cut its own power in so many seconds (infra/aws/instances/user_data.py), not earlier as it was to."""
        words = ["sudo", "-n", "imgnet-limit", f"{max(1.0, seconds):.0f}"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the time it booted with holds then
            subprocess.run(words, timeout=20, stdin=subprocess.DEVNULL, capture_output=True)

    def _watch(self) -> None:
        while not self.over:
            if select.select([self._read], [], [], LOOK_SECONDS)[0]:
                for number in os.read(self._read, 100):
                    if number == signal.SIGINT and self.late is not None:  # a Ctrl-C in `attach` ends no rented machine
                        continue
                    if number in SIGNALS:
                        self._leave(f"the agent got {signal.Signals(number).name}", GRACE)
            with contextlib.suppress(Exception):  # whatever a service or a file may say, the rest must still be heard
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Look once at the clock, then at the notice and the metadata service, whatever these may say."""
        if self.longer.exists() and isinstance(said := read_json(self.longer), dict) and not self.limit:
            self.hours, self.what = float(said["hours"]), ""
        if self.hours is not None and now - self.begun > 3600 * self.hours and not self.limit:
            what = self.what or f"the limit of {self.hours:g} hours (--max-hours)"
            self.limit, self._since = f"{what} was reached", now
        if self._since is not None and now - self._since > 2 * GRACE and not self.over:
            self.kill()  # the main thread should long be gone; it hangs, and a limit is a limit
        if self.leaving:
            return
        if self.notice.exists():
            said = read_json(self.notice)
            said = said if isinstance(said, dict) else {}
            seconds = said.get("seconds")
            self._leave(
                str(said.get("reason") or "this machine will be taken away"),
                float(seconds) if isinstance(seconds, int | float) else GRACE,
            )
        elif self.metadata and now - self._asked > METADATA_SECONDS:
            self._asked = now
            self._leave(self.ask(), SPOT_SECONDS)

    def _leave(self, reason: str, seconds: float) -> None:
        if reason and not self.leaving:
            self.told, self.seconds = time.monotonic(), seconds
            self.leaving = reason

    def hurry(self) -> bool:
        """Whether a quarter of the notice is over: until then the others may get ready."""
        return bool(self.leaving) and time.monotonic() - self.told > min(LONGEST_WAIT, self.seconds / 4)

    def seconds_left(self) -> float:
        """Seconds until we are taken away, as far as we were told; without notice, until a save has had its time."""
        return max(self.seconds, GRACE) - (time.monotonic() - self.told) if self.leaving else float("inf")

    def ask(self) -> str:
        """Return what the metadata service says of this machine's end, "" when nothing, or when it does not answer."""
        try:
            for name in ("spot/instance-action", "events/recommendations/rebalance"):
                text = self._get(f"latest/meta-data/{name}")
                if text:
                    what = json.loads(text)
                    return f"{name}: {what.get('action', 'rebalance')} at {what.get('time') or what.get('noticeTime')}"
        except (OSError, ValueError):
            self._token = ""
        return ""

    def _get(self, path: str) -> str:
        """Ask by IMDSv2: a token first (AWS, "Use the Instance Metadata Service"). 404 means that there is nothing."""
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            self._token = self._open("latest/api/token", "PUT", headers)
        try:
            return self._open(path, "GET", {"X-aws-ec2-metadata-token": self._token})
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return ""

    def _open(self, path: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self.metadata}/{path}", method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=1.0) as answer:
            text: bytes = answer.read(4096)
            return text.decode(errors="replace")
