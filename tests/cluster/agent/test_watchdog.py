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

from cluster.agent.watchdog import GRACE, METADATA_SECONDS, SPOT_SECONDS, Guard
from train.tools.filesystem import as_json, replace

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
) -> Guard:
    return Guard(work, hours, elapsed, metadata, kill or (lambda: pytest.fail("killed")))


def look(one: Guard, now: float) -> None:
    """As its thread does."""
    with contextlib.suppress(Exception):
        one.look(now)


# --- the metadata service -------------------------------------------------------------------------------------------


def test_while_the_service_knows_nothing_there_is_no_reason_to_leave(tmp_path: Path, service: Any) -> None:
    one = guard(tmp_path, metadata=service.address)
    one.look(one.begun)
    assert (one.leaving, one.limit, one.hurry()) == ("", "", False) and one.seconds_left() == float("inf")
    assert service.asked == [SPOT, REBALANCE] and len(service.tokens) == 1


def test_a_spot_notice_is_two_minutes_ahead(tmp_path: Path, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service.says[SPOT] = json.dumps({"action": "terminate", "time": "2026-01-02T03:04:05Z"})
    one = guard(tmp_path, metadata=service.address)
    one.look(one.begun)
    assert one.leaving == "spot/instance-action: terminate at 2026-01-02T03:04:05Z"
    assert SPOT_SECONDS - 5 < one.seconds_left() <= SPOT_SECONDS and not one.hurry()
    monkeypatch.setattr("cluster.agent.watchdog.time.monotonic", lambda: one.told + 16)
    assert one.hurry()


def test_a_rebalance_recommendation_is_a_notice_too(tmp_path: Path, service: Any) -> None:
    service.says[REBALANCE] = json.dumps({"noticeTime": "2026-01-02T03:04:05Z"})
    one = guard(tmp_path, metadata=service.address)
    one.look(one.begun)
    assert one.leaving == "events/recommendations/rebalance: rebalance at 2026-01-02T03:04:05Z"


def test_it_is_asked_every_two_seconds_and_not_after_a_notice(tmp_path: Path, service: Any) -> None:
    one = guard(tmp_path, metadata=service.address)
    for after in (0.0, 0.5, METADATA_SECONDS - 0.1, METADATA_SECONDS + 0.1, METADATA_SECONDS + 0.5):
        one.look(one.begun + after)
    assert service.asked == 2 * [SPOT, REBALANCE] and len(service.tokens) == 1
    service.says[SPOT] = json.dumps({"action": "stop", "time": "now"})
    for round_ in range(2, 6):
        one.look(one.begun + round_ * 3)
    assert service.asked == [*2 * [SPOT, REBALANCE], SPOT]


def test_a_token_that_has_expired_is_asked_for_again(tmp_path: Path, service: Any) -> None:
    one = guard(tmp_path, metadata=service.address)
    one.look(one.begun)
    service.tokens.append("of another time")
    service.says[SPOT] = json.dumps({"action": "stop", "time": "now"})
    one.look(one.begun + 3)
    assert one.leaving == ""
    one.look(one.begun + 6)
    assert one.leaving == "spot/instance-action: stop at now"


def test_a_service_that_is_down_is_no_notice_and_is_asked_again(tmp_path: Path, service: Any) -> None:
    one = guard(tmp_path, metadata="http://127.0.0.1:9")
    one.look(one.begun)
    assert one.leaving == ""
    one.metadata = service.address.rstrip("/")
    service.says[SPOT] = json.dumps({"action": "stop", "time": "now"})
    one.look(one.begun + 3)
    assert one.leaving


@pytest.mark.parametrize("text", ["<html>", "[]", "7", "null", '"soon"'])
def test_an_answer_that_is_no_notice_is_none_and_ends_nothing(tmp_path: Path, service: Any, text: str) -> None:
    service.says[SPOT] = text
    one = guard(tmp_path, metadata=service.address)
    look(one, one.begun)
    assert one.leaving == ""


@pytest.mark.parametrize(
    "raw", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b"\xff" * 70000]
)
def test_a_service_that_does_not_speak_http_ends_nothing(tmp_path: Path, service: Any, raw: bytes) -> None:
    service.garbage = raw
    one = guard(tmp_path, metadata=service.address)
    look(one, one.begun)
    assert one.leaving == ""


def test_a_proxy_of_the_environment_is_not_asked(tmp_path: Path, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    service.says[SPOT] = json.dumps({"action": "stop", "time": "now"})
    one = guard(tmp_path, metadata=service.address)
    one.look(one.begun)
    assert one.leaving


# --- the notice file ------------------------------------------------------------------------------------------------


def test_a_notice_file_says_why_and_how_long(tmp_path: Path) -> None:
    one = guard(tmp_path)
    replace(tmp_path / "notice", as_json({"reason": "a rehearsal", "seconds": 300}))
    one.look(one.begun)
    assert one.leaving == "a rehearsal" and 295 < one.seconds_left() <= 300
    replace(tmp_path / "notice", as_json({"reason": "another", "seconds": 1}))
    one.look(one.begun + 1)
    assert one.leaving == "a rehearsal", "the first one counts"


def test_a_notice_for_whoever_was_here_before_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "notice").write_text("{}")
    one = guard(tmp_path)
    one.look(one.begun)
    assert one.leaving == "" and not (tmp_path / "notice").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[1]", "7", '{"seconds": "soon"}', '{"reason": null, "seconds": null}']
)
def test_a_notice_that_says_little_is_one_all_the_same(tmp_path: Path, text: str) -> None:
    one = guard(tmp_path)
    (tmp_path / "notice").write_text(text)
    look(one, one.begun)
    assert one.leaving == "this machine will be taken away" and GRACE - 5 < one.seconds_left() <= GRACE


# --- the limit ------------------------------------------------------------------------------------------------------


def test_the_limit_is_told_first_and_kills_when_nobody_hears(tmp_path: Path) -> None:
    killed: list[int] = []
    one = guard(tmp_path, hours=1.0, kill=lambda: killed.append(1))
    one.look(one.begun + 3599)
    assert one.limit == ""
    one.look(one.begun + 3601)
    assert "1 hours (--max-hours)" in one.limit and not killed
    one.look(one.begun + 3601 + 2 * GRACE - 1)
    assert not killed
    one.look(one.begun + 3601 + 2 * GRACE + 1)
    assert killed == [1]


def test_the_time_before_this_agent_counts_too(tmp_path: Path) -> None:
    one = guard(tmp_path, hours=1.0, elapsed=3000)
    now = time.monotonic()
    one.look(now + 590)
    assert one.limit == ""
    one.look(now + 610)
    assert one.limit == "the limit of 1 hours (--max-hours) was reached"


def test_a_strange_notice_or_service_does_not_disarm_the_limit(tmp_path: Path, service: Any) -> None:
    killed: list[int] = []
    service.says[SPOT] = "[]"
    one = guard(tmp_path, hours=1.0, metadata=service.address, kill=lambda: killed.append(1))
    (tmp_path / "notice").write_text("[1]")
    for after in (3601, 3601 + 2 * GRACE + 1, 3602 + 2 * GRACE + 1):
        look(one, one.begun + after)
    assert one.limit and killed


def test_an_agent_that_has_ended_in_time_is_not_killed(tmp_path: Path) -> None:
    one = guard(tmp_path, hours=1.0)
    one.look(one.begun + 3601)
    one.over = True
    one.look(one.begun + 9999)


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    one = guard(tmp_path)
    one.look(one.begun + 1e9)
    assert one.limit == ""


# --- signals, and the thread, in a process of its own ---------------------------------------------------------------

HANGS = """
import os, sys, time
from pathlib import Path
from cluster import guard
work = Path(sys.argv[1])
guard.GRACE, guard.METADATA_SECONDS = 0.2, 0.05
def killed():
    (work / "killed").touch()
    os._exit(7)
hours = float(sys.argv[2]) / 3600 if sys.argv[2] else None
one = guard.Guard(work, hours, 0.0, sys.argv[3], killed, float(sys.argv[4]) if sys.argv[4] else None)
one.start()
import threading
def tell():
    while True:
        for name in ("leaving", "limit"):
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
def test_a_signal_is_heard_while_the_main_thread_is_blocked(
    tmp_path: Path, place: Fixture, hanging: Fixture, number: signal.Signals
) -> None:
    one = hanging()
    one.send_signal(number)
    assert place.wait_for(lambda: read(tmp_path / "leaving"), 10) == f"the agent got {number.name}"
    assert one.poll() is None


def test_ctrl_c_in_an_attached_window_ends_no_rented_machine(tmp_path: Path, place: Fixture, hanging: Fixture) -> None:
    one = hanging(late="900")
    one.send_signal(signal.SIGINT)
    one.send_signal(signal.SIGTERM)
    assert place.wait_for(lambda: read(tmp_path / "leaving"), 10) == "the agent got SIGTERM"


def test_a_notice_is_heard_while_the_main_thread_is_blocked(tmp_path: Path, place: Fixture, hanging: Fixture) -> None:
    hanging()
    replace(tmp_path / "notice", as_json({"reason": "a rehearsal"}))
    assert place.wait_for(lambda: read(tmp_path / "leaving"), 10) == "a rehearsal"


def test_the_limit_kills_an_agent_that_hangs(tmp_path: Path, hanging: Fixture) -> None:
    one = hanging(seconds="0.3")
    assert one.wait(20) == 7 and (tmp_path / "killed").exists()
    assert "--max-hours" in read(tmp_path / "limit")


@pytest.mark.parametrize("answer", ["[]", b"garbage\r\n\r\n"], ids=["a list", "no http"])
def test_a_strange_service_does_not_make_it_deaf(
    tmp_path: Path, place: Fixture, hanging: Fixture, service: Any, answer: str | bytes
) -> None:
    if isinstance(answer, bytes):
        service.garbage = answer
    else:
        service.says[SPOT] = answer
    one = hanging(metadata=service.address)
    place.wait_for(lambda: len(service.asked) >= 1, 10)
    one.send_signal(signal.SIGTERM)
    assert place.wait_for(lambda: read(tmp_path / "leaving"), 5) == "the agent got SIGTERM"
