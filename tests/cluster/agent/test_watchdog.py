"""What an agent hears beside its work: signals, a notice, a metadata service, the limit, even while its work hangs."""

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.watchdog import METADATA_POLL_SECONDS, SAVE_GRACE_SECONDS, SPOT_NOTICE_SECONDS, Watchdog
from train.tools.filesystem import to_json_bytes, write_atomic

Fixture = Any
ROOT = Path(__file__).resolve().parents[3]
SPOT, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"


class Metadata(http.server.BaseHTTPRequestHandler):
    """An instance metadata service, version 2: a token by PUT, and what `says` has, else 404."""

    says: dict[str, str]
    asked: list[str]
    tokens: list[str]
    garbage: bytes

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        if self.path != "/latest/api/token" or not self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
            return self.answer(400, "")
        self.tokens.append(f"token-{len(self.tokens)}")
        return self.answer(200, self.tokens[-1])

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.garbage:
            self.wfile.write(self.garbage)
            return None
        if self.headers["X-aws-ec2-metadata-token"] != self.tokens[-1]:
            return self.answer(401, "")
        return self.answer(200, self.says[self.path]) if self.path in self.says else self.answer(404, "not found")


@pytest.fixture
def service() -> Iterator[Any]:
    """A service of this test's own, on this machine; `service.says[path] = text`."""
    handler = type("Handler", (Metadata,), {"says": {}, "asked": [], "tokens": [], "garbage": b""})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    handler.address = f"http://127.0.0.1:{server.server_port}/"  # type: ignore[attr-defined]
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def guard(
    work: Path,
    hours: float | None = None,
    metadata: str = "",
    kill: Callable[[], None] | None = None,
    elapsed: float = 0.0,
) -> Watchdog:
    return Watchdog(work, hours, elapsed, metadata, kill or (lambda: pytest.fail("killed")))


def look(one: Watchdog, now: float) -> None:
    """As its thread does."""
    with contextlib.suppress(Exception):
        one.poll_once(now)


# --- the metadata service -------------------------------------------------------------------------------------------


def test_poll_once_no_notice_gives_no_leave_reason(tmp_path: Path, service: Any) -> None:
    one = guard(tmp_path, metadata=service.address)
    one.poll_once(one.start_time)
    assert (one.leave_reason, one.limit_reason, one.is_deadline_near()) == (
        "",
        "",
        False,
    ) and one.seconds_left() == float("inf")
    assert service.asked == [SPOT, REBALANCE] and len(service.tokens) == 1


def test_poll_once_spot_notice_sets_reason_and_deadline(tmp_path: Path, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service.says[SPOT] = json.dumps({"action": "terminate", "time": "2026-01-02T03:04:05Z"})
    one = guard(tmp_path, metadata=service.address)
    one.poll_once(one.start_time)
    assert one.leave_reason == "spot/instance-action: terminate at 2026-01-02T03:04:05Z"
    assert SPOT_NOTICE_SECONDS - 5 < one.seconds_left() <= SPOT_NOTICE_SECONDS and not one.is_deadline_near()
    monkeypatch.setattr("cluster.agent.watchdog.time.monotonic", lambda: one.notice_time + 16)
    assert one.is_deadline_near()


def test_poll_once_rebalance_recommendation_is_a_notice(tmp_path: Path, service: Any) -> None:
    service.says[REBALANCE] = json.dumps({"noticeTime": "2026-01-02T03:04:05Z"})
    one = guard(tmp_path, metadata=service.address)
    one.poll_once(one.start_time)
    assert one.leave_reason == "events/recommendations/rebalance: rebalance at 2026-01-02T03:04:05Z"


def test_poll_once_queries_metadata_every_two_seconds_until_notice(tmp_path: Path, service: Any) -> None:
    one = guard(tmp_path, metadata=service.address)
    for after in (0.0, 0.5, METADATA_POLL_SECONDS - 0.1, METADATA_POLL_SECONDS + 0.1, METADATA_POLL_SECONDS + 0.5):
        one.poll_once(one.start_time + after)
    assert service.asked == 2 * [SPOT, REBALANCE] and len(service.tokens) == 1
    service.says[SPOT] = json.dumps({"action": "stop", "time": "now"})
    for round_ in range(2, 6):
        one.poll_once(one.start_time + round_ * 3)
    assert service.asked == [*2 * [SPOT, REBALANCE], SPOT]


def test_poll_once_expired_token_is_renewed(tmp_path: Path, service: Any) -> None:
    one = guard(tmp_path, metadata=service.address)
    one.poll_once(one.start_time)
    service.tokens.append("of another time")
    service.says[SPOT] = json.dumps({"action": "stop", "time": "now"})
    one.poll_once(one.start_time + 3)
    assert one.leave_reason == ""
    one.poll_once(one.start_time + 6)
    assert one.leave_reason == "spot/instance-action: stop at now"


def test_poll_once_service_down_is_queried_again(tmp_path: Path, service: Any) -> None:
    one = guard(tmp_path, metadata="http://127.0.0.1:9")
    one.poll_once(one.start_time)
    assert one.leave_reason == ""
    one.metadata_address = service.address.rstrip("/")
    service.says[SPOT] = json.dumps({"action": "stop", "time": "now"})
    one.poll_once(one.start_time + 3)
    assert one.leave_reason


@pytest.mark.parametrize("text", ["<html>", "[]", "7", "null", '"soon"'])
def test_poll_once_invalid_answer_is_no_notice(tmp_path: Path, service: Any, text: str) -> None:
    service.says[SPOT] = text
    one = guard(tmp_path, metadata=service.address)
    look(one, one.start_time)
    assert one.leave_reason == ""


@pytest.mark.parametrize(
    "raw", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b"\xff" * 70000]
)
def test_poll_once_service_without_http_is_no_notice(tmp_path: Path, service: Any, raw: bytes) -> None:
    service.garbage = raw
    one = guard(tmp_path, metadata=service.address)
    look(one, one.start_time)
    assert one.leave_reason == ""


def test_poll_once_ignores_proxy_of_environment(tmp_path: Path, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    service.says[SPOT] = json.dumps({"action": "stop", "time": "now"})
    one = guard(tmp_path, metadata=service.address)
    one.poll_once(one.start_time)
    assert one.leave_reason


# --- the notice file ------------------------------------------------------------------------------------------------


def test_poll_once_notice_file_sets_reason_and_seconds(tmp_path: Path) -> None:
    one = guard(tmp_path)
    write_atomic(tmp_path / "notice", to_json_bytes({"reason": "a rehearsal", "seconds": 300}))
    one.poll_once(one.start_time)
    assert one.leave_reason == "a rehearsal" and 295 < one.seconds_left() <= 300
    write_atomic(tmp_path / "notice", to_json_bytes({"reason": "another", "seconds": 1}))
    one.poll_once(one.start_time + 1)
    assert one.leave_reason == "a rehearsal", "the first one counts"


def test_watchdog_deletes_notice_of_earlier_agent(tmp_path: Path) -> None:
    (tmp_path / "notice").write_text("{}")
    one = guard(tmp_path)
    one.poll_once(one.start_time)
    assert one.leave_reason == "" and not (tmp_path / "notice").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[1]", "7", '{"seconds": "soon"}', '{"reason": null, "seconds": null}']
)
def test_poll_once_incomplete_notice_file_has_defaults(tmp_path: Path, text: str) -> None:
    one = guard(tmp_path)
    (tmp_path / "notice").write_text(text)
    look(one, one.start_time)
    assert (
        one.leave_reason == "this machine will be terminated"
        and SAVE_GRACE_SECONDS - 5 < one.seconds_left() <= SAVE_GRACE_SECONDS
    )


# --- the limit ------------------------------------------------------------------------------------------------------


def test_poll_once_limit_sets_reason_then_hard_exits(tmp_path: Path) -> None:
    killed: list[int] = []
    one = guard(tmp_path, hours=1.0, kill=lambda: killed.append(1))
    one.poll_once(one.start_time + 3599)
    assert one.limit_reason == ""
    one.poll_once(one.start_time + 3601)
    assert "1 hours (--max-hours)" in one.limit_reason and not killed
    one.poll_once(one.start_time + 3601 + 2 * SAVE_GRACE_SECONDS - 1)
    assert not killed
    one.poll_once(one.start_time + 3601 + 2 * SAVE_GRACE_SECONDS + 1)
    assert killed == [1]


def test_poll_once_limit_includes_elapsed_seconds(tmp_path: Path) -> None:
    one = guard(tmp_path, hours=1.0, elapsed=3000)
    now = time.monotonic()
    one.poll_once(now + 590)
    assert one.limit_reason == ""
    one.poll_once(now + 610)
    assert one.limit_reason == "the limit of 1 hours (--max-hours) was reached"


def test_poll_once_invalid_notice_does_not_disarm_limit(tmp_path: Path, service: Any) -> None:
    killed: list[int] = []
    service.says[SPOT] = "[]"
    one = guard(tmp_path, hours=1.0, metadata=service.address, kill=lambda: killed.append(1))
    (tmp_path / "notice").write_text("[1]")
    for after in (3601, 3601 + 2 * SAVE_GRACE_SECONDS + 1, 3602 + 2 * SAVE_GRACE_SECONDS + 1):
        look(one, one.start_time + after)
    assert one.limit_reason and killed


def test_poll_once_stopped_watchdog_never_hard_exits(tmp_path: Path) -> None:
    one = guard(tmp_path, hours=1.0)
    one.poll_once(one.start_time + 3601)
    one.is_stopped = True
    one.poll_once(one.start_time + 9999)


def test_poll_once_without_limit_sets_no_limit_reason(tmp_path: Path) -> None:
    one = guard(tmp_path)
    one.poll_once(one.start_time + 1e9)
    assert one.limit_reason == ""


# --- signals, and the thread, in a process of its own ---------------------------------------------------------------

HANGS = """
import os, sys, time
from pathlib import Path
from cluster.agent import watchdog
work = Path(sys.argv[1])
watchdog.SAVE_GRACE_SECONDS, watchdog.METADATA_POLL_SECONDS = 0.2, 0.05
def killed():
    (work / "killed").touch()
    os._exit(7)
hours = float(sys.argv[2]) / 3600 if sys.argv[2] else None
one = watchdog.Watchdog(work, hours, 0.0, sys.argv[3], killed, float(sys.argv[4]) if sys.argv[4] else None)
one.start()
import threading
def tell():
    while True:
        for name in ("leave_reason", "limit_reason"):
            if getattr(one, name) and not (work / name).exists():  # once: the end may come in the middle of a write
                (work / name).write_text(getattr(one, name))
        time.sleep(0.01)
threading.Thread(target=tell, daemon=True).start()
(work / "ready").touch()
fifo = os.open(work / "fifo", os.O_RDONLY)  # nobody writes: the main thread is stuck from here on
"""


@pytest.fixture
def hanging(tmp_path: Path, place: Fixture) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Start a guard whose main thread hangs in a system call; give it a limit in seconds, and a service."""
    os.mkfifo(tmp_path / "fifo")
    started = []

    def start(seconds: str = "", metadata: str = "", late: str = "") -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-c", HANGS, str(tmp_path), seconds, metadata, late]
        started.append(subprocess.Popen(words, cwd=ROOT, start_new_session=True))
        place.wait_for((tmp_path / "ready").exists, 30)
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_watchdog_signal_is_noticed_while_main_thread_hangs(
    tmp_path: Path, place: Fixture, hanging: Fixture, number: signal.Signals
) -> None:
    one = hanging()
    one.send_signal(number)
    assert place.wait_for(lambda: read(tmp_path / "leave_reason"), 10) == f"the agent got {number.name}"
    assert one.poll() is None


def test_watchdog_rented_machine_ignores_ctrl_c(tmp_path: Path, place: Fixture, hanging: Fixture) -> None:
    one = hanging(late="900")
    one.send_signal(signal.SIGINT)
    one.send_signal(signal.SIGTERM)
    assert place.wait_for(lambda: read(tmp_path / "leave_reason"), 10) == "the agent got SIGTERM"


def test_watchdog_notice_is_noticed_while_main_thread_hangs(tmp_path: Path, place: Fixture, hanging: Fixture) -> None:
    hanging()
    write_atomic(tmp_path / "notice", to_json_bytes({"reason": "a rehearsal"}))
    assert place.wait_for(lambda: read(tmp_path / "leave_reason"), 10) == "a rehearsal"


def test_watchdog_limit_kills_hanging_agent(tmp_path: Path, hanging: Fixture) -> None:
    one = hanging(seconds="0.3")
    assert one.wait(20) == 7 and (tmp_path / "killed").exists()
    assert "--max-hours" in read(tmp_path / "limit_reason")


@pytest.mark.parametrize("answer", ["[]", b"garbage\r\n\r\n"], ids=["a list", "no http"])
def test_watchdog_invalid_service_does_not_block_signals(
    tmp_path: Path, place: Fixture, hanging: Fixture, service: Any, answer: str | bytes
) -> None:
    if isinstance(answer, bytes):
        service.garbage = answer
    else:
        service.says[SPOT] = answer
    one = hanging(metadata=service.address)
    place.wait_for(lambda: len(service.asked) >= 1, 10)
    one.send_signal(signal.SIGTERM)
    assert place.wait_for(lambda: read(tmp_path / "leave_reason"), 5) == "the agent got SIGTERM"
