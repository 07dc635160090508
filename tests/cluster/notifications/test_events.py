"""The events that a job's files show, each found once and only those of the last launch; and who is told.

The URL of a webhook is a secret, which is never shown whole.
"""

import time
from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import BadInput
from cluster.notifications.events import Event, SupervisorView, describe, find_events
from cluster.notifications.targets import chosen_targets, describe_target
from cluster.planning.launch_options import LaunchOptions
from cluster.state.run_folder import Run
from train.recipe import Command
from train.tools.option_fields import OptionError


class Teller:
    """Finds events and remembers them, as the notifier does."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.told: set[str] = set()

    def new(self, *dead_machines: str, dollars: float = 0.0) -> list[Event]:
        view = SupervisorView(dead_machines=dead_machines, dollars=dollars)
        run = Run.read(self.run.run_folder.path)
        events = list(find_events(run, view, self.run.job.result, self.told))
        self.told |= {key for event in events for key in event.keys}
        return events


@pytest.fixture
def run(hand_made: Any, request: pytest.FixtureRequest) -> Any:
    """A job of two machines in its first attempt, of a recipe or of the test's own workload."""
    run = hand_made(machines=2, **getattr(request, "param", {}))
    run.run_folder.launch_path.write_text("one")
    for machine in "01":
        run.write_status("training", machine, launch="one", attempt=1, phase="running")
    run.write_attempt(1, "0.a", "1.b", launch_id="one", reason="start")
    return run


def test_loss_and_return_of_a_machine_are_told_once(run: Any) -> None:
    teller = Teller(run)
    assert teller.new() == []
    run.write_attempt(2, "0.a", launch_id="one", reason="machine 1 lost")
    run.write_status("left", "1", id="1.b", launch="one", ended=True, reason="spot/instance-action: terminate at 12:00")
    (lost,) = teller.new()
    assert (lost.kind, lost.machines) == ("machine_lost", ("1",))
    assert lost.text == "machine 1 was lost (spot/instance-action: terminate at 12:00); 1 of 2 machines are left"
    assert teller.new() == [] and teller.new("1") == []
    run.write_attempt(3, "0.a", "1.c", launch_id="one", resume="checkpoints/000003/resume-00000040-ef01.pt")
    (back,) = teller.new()
    assert (back.kind, back.text) == ("machine_back", "machine 1 joined; 2 of 2 machines train from step 40")
    (lost,) = teller.new("1")  # the loss pauses the job: no attempt says so
    assert lost.text == "machine 1 was lost; 1 of 2 machines are left" and teller.new("1") == []
    run.write_attempt(4, "0.a", "1.d", launch_id="one", reason="machine 1 lost; machine 1 joined")
    (back,) = teller.new()
    assert back.kind == "machine_back" and teller.new() == []


def test_events_of_an_earlier_launch_are_not_told_again(run: Any) -> None:
    run.write_attempt(2, "0.a", launch_id="one", reason="machine 1 lost")
    run.run_folder.launch_path.write_text("two")
    run.write_attempt(3, "0.d", "1.e", launch_id="two", reason="start")
    assert Teller(run).new() == []


@pytest.mark.parametrize("run", [{}, {"workload": Command(argv=("python", "train.py"))}], indirect=True)
def test_limit_of_time_is_told_when_it_is_near_and_when_it_is_reached(run: Any) -> None:
    teller = Teller(run)
    limit = "the limit of 2 hours (--max-hours)"
    run.write_status("training", "0", launch="one", limit=limit, limit_share=0.89)
    assert teller.new() == []
    run.write_status("training", "0", launch="one", limit=limit, limit_share=0.9)
    (near,) = teller.new()
    assert (near.kind, near.text) == ("limit_near", f"90% of {limit} is used; then it saves and stops")
    run.write_status("training", "0", launch="one", limit="the limit of 1.9 hours (--max-hours)", limit_share=0.95)
    assert [event.kind for event in teller.new()] == ["limit_near"], "another limit: it was changed"
    run.write_status("stopping", "0", launch="one", limit=limit, limit_share=1.01)
    (reached,) = teller.new()
    assert (reached.kind, reached.text) == ("limit_reached", f"{limit} was reached; it saves and stops")
    assert teller.new() == []


def test_limit_of_price_is_read_from_the_job_as_extend_has_left_it(run: Any) -> None:
    spec = replace(run.spec, cloud={"max_dollars": 10.0}, machines=2)
    run.run_folder.write_spec(spec)
    teller = Teller(run)
    (near,) = teller.new(dollars=9.2)
    text = "92% of the limit of $10.00 (--max-price-total) is used; to raise it: imgnet-cluster extend job-1"
    assert near.text == text
    run.run_folder.write_spec(replace(spec, cloud={"max_dollars": 20.0}))
    assert teller.new(dollars=11.0) == []
    run.write_shared("stop", '{"reason": "the limit of $20.00 (--max-price-total) was reached"}')
    (reached,) = teller.new(dollars=19.0)
    assert reached.kind == "limit_reached" and "$20.00 (--max-price-total) was reached" in reached.text


def test_text_of_machines_cannot_call_a_channel_and_is_one_line(run: Any) -> None:
    event = Event(kind="failed", keys=(), text="failed: <!channel>\n\x1b[31m" + "x" * 5000)  # type: ignore[arg-type]
    notification = describe(event, Run.read(run.run_folder.path), "1", time.time(), None)
    assert notification.text.startswith("job-1 (tiny, local): failed: (!channel) [31mxxx")
    assert len(notification.text) <= 600
    payload = notification.payload()
    assert payload["content"] == payload["text"] and payload["allowed_mentions"] == {"parse": []}


URL = "https://hooks.slack.com/services/T0/B0/s3cr3t"


@pytest.mark.parametrize("target", ["", "  ", "a\nb", "ftp://h/s3cr3t", "https:///s3cr3t", "https://h:1e9/s3cr3t"])
def test_wrong_target_is_refused_without_showing_a_url(target: str) -> None:
    with pytest.raises(OptionError, match="'--notify': ") as error:
        LaunchOptions(notify=(target,))
    assert "s3cr3t" not in str(error.value)


@pytest.mark.parametrize(("target", "shown"), [
    (URL, "https://hooks.slack.com/..."),
    ("https://me:s3cr3t@host:81/s3cr3t?key=s3cr3t", "https://host:81/..."),
    ("true", "true"),
    ("curl -sf -d @- https://chat.googleapis.com/s3cr3t", "curl ..."),
    ("KEY=s3cr3t /home/me/tell", "..."),
])  # fmt: skip
def test_url_is_shown_by_its_host_and_a_command_by_its_program(target: str, shown: str) -> None:
    assert describe_target(target) == shown


def test_none_drops_configured_targets_and_words_of_the_shell_are_accepted() -> None:
    assert chosen_targets((URL, "none")) == ()
    accepted = ("exec true", "X=1 true", "$HOME/tell", "cat > /dev/null", "echo a://b 'a job'", URL)
    assert LaunchOptions(notify=accepted).notify == accepted
    assert chosen_targets((*accepted, URL)) == accepted


@pytest.mark.parametrize(("target", "message"), [
    ("no-such-program x", "no program no-such-program"),
    ("./tell.sh", "give the whole path, .*: /"),
    ("echo 'a", "is no command: No closing quotation"),
])  # fmt: skip
def test_command_that_could_not_run_is_refused_before_the_launch(target: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        chosen_targets([target])


def test_targets_of_a_job_are_in_one_file_that_others_cannot_read(hand_made: Any) -> None:
    run = hand_made()
    spec = Run.read(run.run_folder.path).spec
    run.run_folder.write_spec(replace(spec, notify=(URL,)))
    assert Run.read(run.run_folder.path).spec.notify == (URL,)
    files = [path for path in run.run_folder.path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert files == [run.run_folder.notify_path] and files[0].stat().st_mode & 0o077 == 0
    run.run_folder.write_spec(spec)
    assert Run.read(run.run_folder.path).spec.notify == ()
