"""Watchdog thread for signals, spot notices and the time limit.

It never reads the shared folder, so it works while NFS hangs.

    <work>/notice   {"reason": ..., "seconds": 120}: this machine will be terminated (`rehearse-loss --notice`)
    <work>/limit    {"hours": 4, "name": "..."}: a time limit that replaces the job's own (`imgnet-cluster extend`)

Signals reach the thread through a pipe. Python would run a handler in the main thread only, which may hang in a read.
"""

import contextlib
import json
import math
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

from train.metrics.text import hours_text
from train.tools.text_files import read_json

WATCHDOG_POLL_SECONDS = 0.2
METADATA_POLL_SECONDS = 2.0
METADATA_TIMEOUT_SECONDS = 1.0
METADATA_TOKEN_TTL_SECONDS = 21600
INTERRUPTION_NOTICE = "spot/instance-action"  # entry of the metadata: EC2 is about to terminate the machine
REBALANCE_RECOMMENDATION = "events/recommendations/rebalance"  # entry of the metadata: EC2 may do so soon
SPOT_NOTICE_SECONDS = 120.0  # AWS, "Spot Instance interruption notices"
MAX_LEAVE_DELAY_SECONDS = 15.0  # a machine that has to leave waits at most this long for a better moment to save
IDLE_POWEROFF_SECONDS = 600.0  # from the job's end until a rented machine powers itself off
POWEROFF_COMMAND_TIMEOUT_SECONDS = 20.0
SAVE_GRACE_SECONDS = 30.0  # time for a save before trainers that were asked to stop are killed
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Watchdog:
    """Notices that this machine has to leave (`leave_reason`) or that the job has to end (`limit_reason`).

    Both are "" while there is no reason. `risk_reason` says that it may have to soon, which often comes to nothing
    (AWS, "EC2 instance rebalance recommendations"). `max_hours` is the time limit, of which `elapsed_seconds` have
    passed; `limit_name` describes one that follows from a price. At `metadata_address`, "" for none, EC2 announces two
    minutes ahead that it terminates a spot instance (AWS, "Spot Instance interruption notices"). `hard_exit` is called
    when the main thread hangs after the limit. A rented machine powers itself off `poweroff_grace` seconds after it;
    None for other machines.
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
        self.max_hours = max_hours
        self.hard_exit = hard_exit
        self.poweroff_grace = poweroff_grace
        self.limit_name = limit_name
        self.notice_path = work / "notice"
        self.limit_override_path = work / "limit"
        # AWS's own tools read this variable too, where a metadata service is not at its usual address.
        if metadata_address:
            metadata_address = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata_address)
        self.metadata_address = metadata_address.rstrip("/")
        self.leave_reason = ""
        self.limit_reason = ""
        self.risk_reason = ""
        self.notice_time = 0.0  # when the notice came
        self.notice_seconds = SAVE_GRACE_SECONDS  # time from the notice until the machine is terminated
        self.start_time = time.monotonic() - elapsed_seconds
        self.is_stopped = False
        self._limit_reached_time: float | None = None
        self._last_metadata_poll = 0.0
        self._metadata_token = ""
        self.notice_path.unlink(missing_ok=True)  # a notice for an earlier agent of this machine

    def start(self) -> None:
        """Start the thread. Call it once, in the main thread."""
        if self.poweroff_grace is not None and self.max_hours is not None:
            self.schedule_poweroff(3600 * self.max_hours - self.elapsed_seconds + self.poweroff_grace)
        self._signal_pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signal_number in STOP_SIGNALS:
            signal.signal(signal_number, lambda *_: None)  # Python writes the number to the pipe
        threading.Thread(target=self._watch_loop, daemon=True).start()

    def stop(self) -> None:
        """Stop the thread. A rented machine that nobody terminates powers off after `IDLE_POWEROFF_SECONDS`."""
        self.is_stopped = True
        if self.poweroff_grace is not None:
            self.schedule_poweroff(IDLE_POWEROFF_SECONDS)

    def schedule_poweroff(self, seconds: float) -> None:
        """Set the timer that powers the machine off, in seconds from now. If that fails, the boot script's stays."""
        argv = ["sudo", "-n", "imgnet-limit", f"{max(1.0, seconds):.0f}"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                argv, timeout=POWEROFF_COMMAND_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL, capture_output=True
            )

    def _watch_loop(self) -> None:
        while not self.is_stopped:
            if select.select([self._signal_pipe], [], [], WATCHDOG_POLL_SECONDS)[0]:
                for number in os.read(self._signal_pipe, 100):
                    # A Ctrl-C in `imgnet-cluster attach` must not end a rented machine.
                    if number in STOP_SIGNALS and (number != signal.SIGINT or self.poweroff_grace is None):
                        self._record_notice(f"the agent got {signal.Signals(number).name}", SAVE_GRACE_SECONDS)
            # Whatever a service or a file may contain, the next signal and the limit must still be noticed.
            with contextlib.suppress(Exception):
                self.poll_once(time.monotonic())

    @property
    def limit(self) -> str:
        """The limit as messages call it, "" without one."""
        if self.max_hours is None:
            return ""
        return self.limit_name or f"the limit of {hours_text(self.max_hours)} (--max-hours)"

    @property
    def elapsed_seconds(self) -> float:
        """How many seconds of the time limit have passed."""
        return time.monotonic() - self.start_time

    @property
    def limit_share(self) -> float | None:
        """The share of the time limit that has passed, None without one."""
        return self.elapsed_seconds / (3600 * self.max_hours) if self.max_hours else None

    def poll_once(self, now: float) -> None:
        """Check the limit, then the notices: an unreadable notice or a broken service must not disarm the limit."""
        self._check_limit(now)
        if self.leave_reason:
            return
        if self.notice_path.exists():
            self._read_notice_file()
        elif self.metadata_address and now - self._last_metadata_poll > METADATA_POLL_SECONDS:
            self._last_metadata_poll = now
            self.poll_metadata()

    def _check_limit(self, now: float) -> None:
        if not self.limit_reason:
            override = read_json(self.limit_override_path) if self.limit_override_path.exists() else None
            override = override if isinstance(override, dict) else {}
            hours = override.get("hours")
            if isinstance(hours, int | float) and math.isfinite(hours):  # else the limit stays as it is
                self.max_hours = float(hours)
                self.limit_name = str(override.get("name", ""))
            if self.max_hours is not None and now - self.start_time > 3600 * self.max_hours:
                self.limit_reason = f"{self.limit} was reached"
                self._limit_reached_time = now
        if self._limit_reached_time is None or self.is_stopped:
            return
        if now - self._limit_reached_time > 2 * SAVE_GRACE_SECONDS:
            self.hard_exit()  # the main thread should have ended long ago, so it hangs

    def _read_notice_file(self) -> None:
        notice = read_json(self.notice_path)
        notice = notice if isinstance(notice, dict) else {}
        seconds = notice.get("seconds")
        self._record_notice(
            str(notice.get("reason") or "this machine will be terminated"),
            float(seconds) if isinstance(seconds, int | float) else SAVE_GRACE_SECONDS,
        )

    def _record_notice(self, reason: str, seconds: float) -> None:
        """Remember the first reason to leave. Ignores "", which stands for no reason."""
        if reason and not self.leave_reason:
            self.notice_time = time.monotonic()
            self.notice_seconds = seconds
            self.leave_reason = reason

    def is_deadline_near(self) -> bool:
        """Whether the time for others to get ready is over: 1/4 of the notice, at most `MAX_LEAVE_DELAY_SECONDS`."""
        if not self.leave_reason:
            return False
        return time.monotonic() - self.notice_time > min(MAX_LEAVE_DELAY_SECONDS, self.notice_seconds / 4)

    def seconds_left(self) -> float:
        """Return the seconds until this machine is terminated, inf without a notice.

        A notice shorter than `SAVE_GRACE_SECONDS`, the time for a save, counts as that long.
        """
        if not self.leave_reason:
            return float("inf")
        return max(self.notice_seconds, SAVE_GRACE_SECONDS) - (time.monotonic() - self.notice_time)

    def poll_metadata(self) -> None:
        """Ask the metadata service for a notice, else for a warning of one. What is no notice changes nothing."""
        try:
            if notice := self._get_notice(INTERRUPTION_NOTICE):
                reason = f"{INTERRUPTION_NOTICE}: {notice.get('action')} at {notice.get('time')}"
                self._record_notice(reason, SPOT_NOTICE_SECONDS)
            elif not self.risk_reason and (notice := self._get_notice(REBALANCE_RECOMMENDATION)):
                self.risk_reason = f"EC2 may interrupt it soon (rebalance recommendation at {notice.get('noticeTime')})"
        except (OSError, ValueError):
            self._metadata_token = ""

    def _get_notice(self, name: str) -> dict[str, object]:
        """Return an entry of the metadata that is a JSON object, {} for none. Raises `OSError`, `ValueError`.

        IMDSv2 needs a token (AWS, "Use the Instance Metadata Service"). Status 404 means that there is no such entry.
        """
        if not self._metadata_token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(METADATA_TOKEN_TTL_SECONDS)}
            self._metadata_token = self._request("latest/api/token", "PUT", headers)
        headers = {"X-aws-ec2-metadata-token": self._metadata_token}
        try:
            notice = json.loads(self._request(f"latest/meta-data/{name}", "GET", headers))
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return {}
        return notice if isinstance(notice, dict) else {}

    def _request(self, path: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self.metadata_address}/{path}", method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores proxies of the environment
        with opener.open(request, timeout=METADATA_TIMEOUT_SECONDS) as response:
            text: bytes = response.read(4096)
            return text.decode(errors="replace")
