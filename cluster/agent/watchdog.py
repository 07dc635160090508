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

WATCHDOG_POLL_SECONDS = 0.2
METADATA_POLL_SECONDS = 2.0
SPOT_NOTICE_SECONDS = 120.0  # AWS, "Spot Instance interruption notices"
MAX_LEAVE_DELAY_SECONDS = 15.0
IDLE_POWEROFF_SECONDS = 600.0  # seconds after the job's end until a rented machine's power goes
SAVE_GRACE_SECONDS = 30.0  # seconds for a save before a stop becomes a kill
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Watchdog:
    """Hears why this machine has to leave (`leaving`), or the job has to end (`limit`); "" while there is no reason.

    `hours` is the job's limit, of which `elapsed` seconds are over. `metadata` is the address of an instance metadata
    service, "" for none: EC2 tells there, two minutes ahead, that it takes a spot machine away (AWS, "Spot Instance
    interruption notices"). A rented machine cuts its own power `late` seconds after the limit; None: it is not rented.
    """

    def __init__(
        self,
        work: Path,
        max_hours: float | None,
        elapsed_seconds: float,
        metadata_address: str,
        hard_exit: Callable[[], None],
        poweroff_grace: float | None = None,
        limit_name: str = "",
    ) -> None:
        self.poweroff_grace, self.limit_name = poweroff_grace, limit_name
        self.notice_path, self.limit_override_path, self.max_hours, self.hard_exit = (
            work / "notice",
            work / "limit",
            max_hours,
            hard_exit,
        )
        # As AWS's own tools name it: where a machine's metadata service is not at the usual address.
        self.metadata_address = (
            metadata_address and os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata_address)
        ).rstrip("/")
        self.leave_reason, self.limit_reason = "", ""
        self.notice_time, self.notice_seconds = (
            0.0,
            SAVE_GRACE_SECONDS,
        )  # when we were told to leave, and how long before
        self.start_time = time.monotonic() - elapsed_seconds
        self.is_stopped = False
        self._limit_reached_time: float | None = None
        self._last_metadata_poll = 0.0
        self._metadata_token = ""
        self.notice_path.unlink(missing_ok=True)  # meant for whoever was here before

    def start(self) -> None:
        """Begin to hear. Called once, in the main thread."""
        if self.poweroff_grace is not None and self.max_hours is not None:
            self.schedule_poweroff(3600 * self.max_hours - (time.monotonic() - self.start_time) + self.poweroff_grace)
        self._signal_pipe, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)  # Python writes the number to the pipe
        threading.Thread(target=self._watch_loop, daemon=True).start()

    def stop(self) -> None:
        """Hear nothing any more. A rented machine that nobody ends now ends by itself."""
        self.is_stopped = True
        if self.poweroff_grace is not None:
            self.schedule_poweroff(IDLE_POWEROFF_SECONDS)

    def schedule_poweroff(self, seconds: float) -> None:
        """Let the machine cut its own power in so many seconds (infra/aws/instances/user_data.py), not earlier as it was to."""
        words = ["sudo", "-n", "imgnet-limit", f"{max(1.0, seconds):.0f}"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the time it booted with holds then
            subprocess.run(words, timeout=20, stdin=subprocess.DEVNULL, capture_output=True)

    def _watch_loop(self) -> None:
        while not self.is_stopped:
            if select.select([self._signal_pipe], [], [], WATCHDOG_POLL_SECONDS)[0]:
                for number in os.read(self._signal_pipe, 100):
                    if (
                        number == signal.SIGINT and self.poweroff_grace is not None
                    ):  # a Ctrl-C in `attach` ends no rented machine
                        continue
                    if number in STOP_SIGNALS:
                        self._record_notice(f"the agent got {signal.Signals(number).name}", SAVE_GRACE_SECONDS)
            with contextlib.suppress(Exception):  # whatever a service or a file may say, the rest must still be heard
                self.poll_once(time.monotonic())

    def poll_once(self, now: float) -> None:
        """Look once at the clock, then at the notice and the metadata service, whatever these may say."""
        if (
            self.limit_override_path.exists()
            and isinstance(said := read_json(self.limit_override_path), dict)
            and not self.limit_reason
        ):
            self.max_hours, self.limit_name = float(said["hours"]), ""
        if self.max_hours is not None and now - self.start_time > 3600 * self.max_hours and not self.limit_reason:
            what = self.limit_name or f"the limit of {self.max_hours:g} hours (--max-hours)"
            self.limit_reason, self._limit_reached_time = f"{what} was reached", now
        if (
            self._limit_reached_time is not None
            and now - self._limit_reached_time > 2 * SAVE_GRACE_SECONDS
            and not self.is_stopped
        ):
            self.hard_exit()  # the main thread should long be gone; it hangs, and a limit is a limit
        if self.leave_reason:
            return
        if self.notice_path.exists():
            said = read_json(self.notice_path)
            said = said if isinstance(said, dict) else {}
            seconds = said.get("seconds")
            self._record_notice(
                str(said.get("reason") or "this machine will be taken away"),
                float(seconds) if isinstance(seconds, int | float) else SAVE_GRACE_SECONDS,
            )
        elif self.metadata_address and now - self._last_metadata_poll > METADATA_POLL_SECONDS:
            self._last_metadata_poll = now
            self._record_notice(self.query_metadata(), SPOT_NOTICE_SECONDS)

    def _record_notice(self, reason: str, seconds: float) -> None:
        if reason and not self.leave_reason:
            self.notice_time, self.notice_seconds = time.monotonic(), seconds
            self.leave_reason = reason

    def is_deadline_near(self) -> bool:
        """Whether a quarter of the notice is over: until then the others may get ready."""
        return bool(self.leave_reason) and time.monotonic() - self.notice_time > min(
            MAX_LEAVE_DELAY_SECONDS, self.notice_seconds / 4
        )

    def seconds_left(self) -> float:
        """Seconds until we are taken away, as far as we were told; without notice, until a save has had its time."""
        return (
            max(self.notice_seconds, SAVE_GRACE_SECONDS) - (time.monotonic() - self.notice_time)
            if self.leave_reason
            else float("inf")
        )

    def query_metadata(self) -> str:
        """Return what the metadata service says of this machine's end, "" when nothing, or when it does not answer."""
        try:
            for name in ("spot/instance-action", "events/recommendations/rebalance"):
                text = self._get_metadata(f"latest/meta-data/{name}")
                if text:
                    what = json.loads(text)
                    return f"{name}: {what.get('action', 'rebalance')} at {what.get('time') or what.get('noticeTime')}"
        except (OSError, ValueError):
            self._metadata_token = ""
        return ""

    def _get_metadata(self, path: str) -> str:
        """Ask by IMDSv2: a token first (AWS, "Use the Instance Metadata Service"). 404 means that there is nothing."""
        if not self._metadata_token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            self._metadata_token = self._request("latest/api/token", "PUT", headers)
        try:
            return self._request(path, "GET", {"X-aws-ec2-metadata-token": self._metadata_token})
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return ""

    def _request(self, path: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self.metadata_address}/{path}", method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=1.0) as answer:
            text: bytes = answer.read(4096)
            return text.decode(errors="replace")
