"""Tests of the watchdog: signals, notices, the metadata service and the limit, also while the main thread hangs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.metadata_service import service

from cluster.agent.watchdog import METADATA_POLL_SECONDS, SAVE_GRACE_SECONDS, SPOT_NOTICE_SECONDS, Watchdog

__all__ = ["service"]  # fixture

ROOT = Path(__file__).resolve().parents[3]
SPOT, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"


def make_watchdog(
    work: Path,
    max_hours: float | None = None,
    metadata_address: str = "",
    hard_exit: Callable[[], None] | None = None,
    elapsed_seconds: float = 0.0,
) -> Watchdog:
    """Make a watchdog without its thread; a hard exit fails the test unless it is expected."""
    return Watchdog(work, max_hours, elapsed_seconds, metadata_address, hard_exit or (lambda: pytest.fail("hard exit")))


def poll_like_thread(watchdog: Watchdog, now: float) -> None:
    """Poll once and ignore errors, as the thread does."""
    with contextlib.suppress(Exception):
        watchdog.poll_once(now)


@pytest.fixture
def watchdog(tmp_path: Path, service: Any) -> Watchdog:
    return make_watchdog(tmp_path, metadata_address=service.address)


def test_poll_once_asks_every_two_seconds_for_a_recommendation_and_until_the_notice(
    service: Any, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no proxy is asked
    for seconds in (0.0, 0.5, METADATA_POLL_SECONDS - 0.1, METADATA_POLL_SECONDS + 0.1, METADATA_POLL_SECONDS + 0.5):
        watchdog.poll_once(watchdog.start_time + seconds)
    assert service.requested == 2 * [SPOT, REBALANCE] and len(service.tokens) == 1
    service.requested.clear()
    service.texts[REBALANCE] = json.dumps({"noticeTime": "2026-01-02T03:04:05Z"})
    for count in range(2, 5):
        watchdog.poll_once(watchdog.start_time + 3 * count)
    assert watchdog.risk_reason == "EC2 may interrupt it soon (rebalance recommendation at 2026-01-02T03:04:05Z)"
    assert (watchdog.leave_reason, watchdog.is_deadline_near(), watchdog.seconds_left()) == ("", False, float("inf"))
    service.texts[SPOT] = json.dumps({"action": "terminate", "time": "2026-01-02T03:04:05Z"})
    for count in range(5, 8):
        watchdog.poll_once(watchdog.start_time + 3 * count)
    assert service.requested == [SPOT, REBALANCE, SPOT, SPOT, SPOT]
    assert watchdog.leave_reason == "spot/instance-action: terminate at 2026-01-02T03:04:05Z"
    assert SPOT_NOTICE_SECONDS - 5 < watchdog.seconds_left() <= SPOT_NOTICE_SECONDS and not watchdog.is_deadline_near()
    monkeypatch.setattr("cluster.agent.watchdog.time.monotonic", lambda: watchdog.notice_time + 16)
    assert watchdog.is_deadline_near()


@pytest.mark.parametrize("answer", [
    "<html>", "[]", "7", "null", '"soon"', b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
])  # fmt: skip
def test_poll_once_invalid_answer_is_no_notice(service: Any, watchdog: Watchdog, answer: str | bytes) -> None:
    if isinstance(answer, bytes):
        service.garbage = answer  # in place of HTTP
    else:
        service.texts |= {SPOT: answer, REBALANCE: answer}
    poll_like_thread(watchdog, watchdog.start_time)
    assert watchdog.leave_reason == "" == watchdog.risk_reason


@pytest.mark.parametrize("fault", ["down", "expired token"])
def test_poll_once_service_that_answers_again_is_asked_again(service: Any, watchdog: Watchdog, fault: str) -> None:
    address = watchdog.metadata_address
    watchdog.poll_once(watchdog.start_time)
    if fault == "down":
        watchdog.metadata_address = "http://127.0.0.1:9"
    else:
        service.tokens.clear()
    service.texts[SPOT] = json.dumps({"action": "stop", "time": "now"})
    watchdog.poll_once(watchdog.start_time + 3)
    assert watchdog.leave_reason == ""
    watchdog.metadata_address = address
    watchdog.poll_once(watchdog.start_time + 6)
    assert watchdog.leave_reason == "spot/instance-action: stop at now"


@pytest.mark.parametrize(("text", "reason", "seconds"), [
    ('{"reason": "a rehearsal", "seconds": 300}', "a rehearsal", 300.0),
    *((text, "this machine will be terminated", SAVE_GRACE_SECONDS)
      for text in ("", "{", "{}", "[1]", '{"seconds": "soon"}', '{"reason": null, "seconds": null}')),
])  # fmt: skip
def test_poll_once_first_notice_file_sets_reason_and_seconds(
    tmp_path: Path, text: str, reason: str, seconds: float
) -> None:
    (tmp_path / "notice").write_text("{}")  # for an earlier agent
    watchdog = make_watchdog(tmp_path)
    poll_like_thread(watchdog, watchdog.start_time)
    assert watchdog.leave_reason == "" and not (tmp_path / "notice").exists()
    for content in (text, '{"reason": "another", "seconds": 1}'):
        (tmp_path / "notice").write_text(content)
        poll_like_thread(watchdog, watchdog.start_time + 1)
        assert watchdog.leave_reason == reason and seconds - 5 < watchdog.seconds_left() <= seconds


def test_poll_once_limit_sets_reason_then_hard_exits_whatever_a_notice_contains(tmp_path: Path, service: Any) -> None:
    exits: list[int] = []
    watchdog = make_watchdog(tmp_path, 1.0, service.address, lambda: exits.append(1), elapsed_seconds=600.0)
    service.texts[SPOT] = "[]"
    (tmp_path / "notice").write_text("[1]")
    assert time.monotonic() - watchdog.start_time >= 600.0, "the job ran before this agent"
    poll_like_thread(watchdog, watchdog.start_time + 3599)
    assert watchdog.limit_reason == ""
    poll_like_thread(watchdog, watchdog.start_time + 3601)
    assert "1 hour (--max-hours)" in watchdog.limit_reason and not exits
    poll_like_thread(watchdog, watchdog.start_time + 3601 + 2 * SAVE_GRACE_SECONDS - 1)
    assert not exits
    poll_like_thread(watchdog, watchdog.start_time + 3601 + 2 * SAVE_GRACE_SECONDS + 1)
    assert exits == [1]
    watchdog.is_stopped = True
    poll_like_thread(watchdog, watchdog.start_time + 9999)
    assert exits == [1]


OLD, NEW = "the limit of 1 hour (--max-hours)", "the limit of 9 dollars (--max-price-total)"
OTHER_LIMIT = json.dumps({"hours": 2.0, "name": NEW})


@pytest.mark.parametrize(("text", "hours", "name"), [
    (OTHER_LIMIT, 2, NEW), *((text, 1, OLD) for text in ("{}", '{"hours": "nan"}', '{"hours": 1e999}', "[5]", "{")),
])  # fmt: skip
def test_poll_once_new_limit_replaces_the_old_one_unless_it_is_damaged(
    tmp_path: Path, text: str, hours: int, name: str
) -> None:
    watchdog = make_watchdog(tmp_path, max_hours=1.0)
    (tmp_path / "limit").write_text(text)
    watchdog.poll_once(watchdog.start_time + 3600 * hours - 1)
    assert watchdog.limit_reason == ""
    watchdog.poll_once(watchdog.start_time + 3600 * hours + 1)
    assert watchdog.limit_reason == f"{name} was reached"


HANGING_PROCESS = """
import os, sys, time
from pathlib import Path
from cluster.agent import watchdog
work = Path(sys.argv[1])
watchdog.SAVE_GRACE_SECONDS = 0.2
def hard_exit():
    (work / "hard_exit").touch()
    os._exit(7)
hours = float(sys.argv[2]) / 3600 if sys.argv[2] else None
monitor = watchdog.Watchdog(work, hours, 0.0, "", hard_exit, float(sys.argv[3]) if sys.argv[3] else None)
monitor.start()
import threading
def write_reasons():
    while True:
        for name in ("leave_reason", "limit_reason"):
            if getattr(monitor, name) and not (work / name).exists():  # once: the process may end during a write
                (work / name).write_text(getattr(monitor, name))
        time.sleep(0.01)
threading.Thread(target=write_reasons, daemon=True).start()
(work / "ready").touch()
fifo = os.open(work / "fifo", os.O_RDONLY)  # nobody writes to it: the main thread hangs from here on
"""


@pytest.fixture
def hanging(tmp_path: Path, sandbox: Any) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Start a watchdog whose main thread hangs in a system call, with a limit in seconds."""
    os.mkfifo(tmp_path / "fifo")
    started = []

    def start(limit_seconds: str = "", poweroff_grace: str = "") -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-c", HANGING_PROCESS, str(tmp_path), limit_seconds, poweroff_grace]
        started.append(subprocess.Popen(argv, cwd=ROOT, start_new_session=True))
        sandbox.wait_for((tmp_path / "ready").exists)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("names, grace", [("SIGTERM", ""), ("SIGHUP", ""), ("SIGINT", ""), ("SIGINT SIGTERM", "900")])
def test_watchdog_signal_is_noticed_while_main_thread_hangs(
    tmp_path: Path, sandbox: Any, hanging: Any, names: str, grace: str
) -> None:
    """A rented machine, which has a grace until it powers itself off, ignores Ctrl-C."""
    process = hanging(poweroff_grace=grace)
    for name in names.split():
        process.send_signal(signal.Signals[name])
        sandbox.wait_for(lambda: "ShdPnd:\t0000000000000000" in Path(f"/proc/{process.pid}/status").read_text())
    path = tmp_path / "leave_reason"
    sandbox.wait_for(lambda: path.exists() and path.read_text())
    assert path.read_text() == f"the agent got {names.split()[-1]}" and process.poll() is None


def test_watchdog_limit_kills_hanging_agent(tmp_path: Path, hanging: Any) -> None:
    process = hanging(limit_seconds="0.3")
    assert process.wait(120) == 7 and (tmp_path / "hard_exit").exists()
    assert "--max-hours" in (tmp_path / "limit_reason").read_text()
