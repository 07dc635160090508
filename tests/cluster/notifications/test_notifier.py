"""Tests of the notifier: events reach commands and webhooks once, and trouble there is told and harms nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.log_lines import log_lines
from support.waiting import wait_for
from support.webhook_server import WebhookServer, webhook_server

from cluster.notifications import delivery
from cluster.notifications import notifier as notifier_module
from cluster.notifications.events import SupervisorView
from cluster.notifications.notifier import JOURNAL_FILE, Notifier, has_untold_end, read_rows
from cluster.state.run_folder import Run

VIEW = SupervisorView()
RECORD_EVENT = 'cat > "$IMGNET_EVENT.json"; printf "%s|%s" "$IMGNET_EVENT_JOB" "$IMGNET_EVENT_TEXT" > text'


@pytest.fixture
def webhook() -> Iterator[WebhookServer]:
    with webhook_server() as server:
        yield server


@pytest.fixture
def make_run(hand_made: Any) -> Any:
    """Make a job that notifies targets; it is over if it `has_ended`."""

    def make(*targets: str, has_ended: bool = True) -> Any:
        made = hand_made()
        made.run_folder.write_spec(replace(made.spec, notify=targets))
        made.run_folder.launch_path.write_text("one")
        if has_ended:
            made.write_status("failed", launch="one", reason="out of memory", ended=True)
            made.job.refresh()
            assert made.job.has_ended
        return made

    return make


def notifier_of(run: Any) -> Notifier:
    return Notifier(Run.read(run.run_folder.path))


def test_each_event_is_sent_once_to_each_target_by_whatever_process(
    make_run: Any, webhook: WebhookServer, tmp_path: Path
) -> None:
    run = make_run(webhook.url, f"cd {tmp_path} && {RECORD_EVENT} && echo >> count")
    first, second = notifier_of(run), notifier_of(run)
    first.update(VIEW)
    second.finish()  # the first one holds the lock
    first.finish()
    notifier_of(run).finish()
    assert webhook.events == ["failed"] and webhook.paths == ["/services/T000/B000/s3cr3t"]
    assert (tmp_path / "count").read_text() == "\n"
    sent = json.loads((tmp_path / "failed.json").read_text())
    assert sent == webhook.posted[0] and (sent["event"], sent["job"], sent["recipe"]) == ("failed", "job-1", "tiny")
    assert (tmp_path / "text").read_text() == "job-1|" + sent["text"]
    assert sent["text"].startswith("job-1 (tiny, local): failed: out of memory; ")
    assert run.job.status().notifications == "" and not has_untold_end(Run.read(run.run_folder.path))


def test_supervisor_killed_while_it_sent_has_a_successor_that_sends(make_run: Any, webhook: WebhookServer) -> None:
    """The end of a killed process is the end of its delivery; the same "id" lets a receiver tell repetitions."""
    run = make_run(webhook.url)
    webhook.status = 0
    argv = [sys.executable, "-m", "cluster.jobs.supervisor", str(run.run_folder.path)]
    supervisor = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    wait_for(lambda: webhook.posted)
    assert not has_untold_end(Run.read(run.run_folder.path)), "it is being told"
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    webhook.status = 200
    wait_for(lambda: has_untold_end(Run.read(run.run_folder.path)))
    notifier_of(run).finish()
    notifier_of(run).finish()
    assert webhook.events == ["failed", "failed"] and webhook.posted[0]["id"] == webhook.posted[1]["id"]


def test_command_that_looks_at_a_job_starts_the_process_that_tells_its_end(
    sandbox: Any, make_run: Any, webhook: WebhookServer
) -> None:
    run = make_run(webhook.url)
    os.utime(run.run_folder.result_path, (0, 0))  # a supervisor would have told it long ago
    run.job.refresh()
    wait_for(lambda: webhook.events)
    wait_for(lambda: not has_untold_end(Run.read(run.run_folder.path)))
    run.job.refresh()
    assert webhook.events == ["failed"]


@pytest.mark.parametrize("status", [404, 302])
def test_refusal_is_tried_again_logged_once_and_shown_by_status_without_the_url(
    make_run: Any, webhook: WebhookServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(delivery, "RETRY_SECONDS", 0.0)
    run = make_run(webhook.url, "echo s3cr3t; exit 3")
    webhook.status = status
    with log_lines("cluster.notifications.notifier") as lines:
        notifier_of(run).finish()
    assert len(webhook.posted) == delivery.MAX_TRIES
    trouble = [f"{webhook.label}: the server answered with status {status}", "echo ...: it ended with code 3"]
    assert sorted(lines) == sorted(f"a notification could not be delivered to {line}" for line in trouble)
    assert all(line in run.job.status().notifications for line in trouble)
    assert "s3cr3t" not in (run.run_folder.path / JOURNAL_FILE).read_text()
    assert "/services" not in (run.run_folder.path / JOURNAL_FILE).read_text()


def test_target_that_hangs_is_killed_and_never_waited_for(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has started is killed with it."""
    run = make_run(f"sleep 1000 & echo $! > {tmp_path}/pid; wait")
    notifier = notifier_of(run)
    notifier.update(VIEW)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    notifier.update(VIEW)  # returns though nothing has ended
    monkeypatch.setattr("cluster.notifications.notifier.FINISH_SECONDS", 0.0)
    notifier.finish()
    wait_for(lambda: not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists())
    assert "there was no time left for it" in run.job.status().notifications


def test_full_disk_and_damaged_files_end_nothing(make_run: Any, webhook: WebhookServer) -> None:
    run = make_run(webhook.url)
    (run.run_folder.path / JOURNAL_FILE).write_text('{"torn')
    notifier = notifier_of(run)
    content = run.run_folder.result_path.read_bytes()
    run.run_folder.result_path.write_text("{")
    with log_lines("cluster.notifications.notifier") as lines:
        notifier.update(VIEW)
        notifier.update(VIEW)
    assert len(lines) == 1 and "result.json" in lines[0]
    run.run_folder.result_path.write_bytes(content)
    notifier.finish()
    assert webhook.events == ["failed"]


def test_check_sends_a_test_and_says_what_is_wrong(sandbox: Any, webhook: WebhookServer) -> None:
    result = sandbox.cli("check", "--notify", webhook.url, "--notify", "cat > sent")
    assert (result.code, result.err) == (0, "") and f"sent to {webhook.label}" in result.out
    assert webhook.events == ["test"] and json.loads((sandbox.path / "sent").read_text())["event"] == "test"
    webhook.status = 500
    result = sandbox.cli("check", "--notify", webhook.url)
    assert result.code == 1 and f"error: {webhook.label}: the server answered with status 500" in result.err
    assert sandbox.cli("check", "--notify", "ftp://x").code == 2


def test_machine_that_invents_events_floods_nobody(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "MAX_HOURLY_EVENTS", 5)
    run = make_run("true", has_ended=False)
    teller = notifier_of(run)
    for number in range(20):
        limit = f"the limit of {number} hours"
        run.write_status("training", launch="one", limit=limit, limit_share=0.95)
        teller.update(VIEW)
    assert teller.rows and sum(row.notification is not None for row in teller.rows) == 5
    later = teller.rows[0].time + 3601
    clock = SimpleNamespace(time=lambda: later, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(notifier_module, "time", clock)
    teller.update(VIEW)
    assert sum(row.notification is not None for row in teller.rows) == 6, "what waited is told later"
    monkeypatch.setattr(notifier_module, "MAX_HOURLY_EVENTS", 0)
    run.write_status("failed", launch="one", reason="out of memory", ended=True)
    run.job.refresh()
    teller.finish()
    assert [row.notification.event for row in read_rows(run.run_folder.path) if row.notification][-1] == "failed"
