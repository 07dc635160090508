"""Journal: intents are on disk before the AWS call, and come back as the events that were written."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.aws_journal import launch_request, request_granted

from infra.aws import journal_events
from infra.aws.journal import Journal
from infra.aws.journal_events import AddressRequested, JournalEvent, LaunchStarted, TerminationFinished
from infra.aws.launch_request import Place
from train.tools.records import DamagedRecord

PLACE = Place(
    region="us-east-1", zone="us-east-1a", type="p4d.24xlarge", market="capacity-block", reservation="cr-1",
    closing_time=1.5,
)  # fmt: skip
EVENTS = (
    launch_request(1, PLACE, ["0", "1"], 1.0, has_overhead=True),
    request_granted(1, ("i-0", "0", 3.0), ("i-1", "1", 3.5), time=4.0),
    journal_events.RequestRefused(number=2, code="", message="grün\u2028\n\x85", has_no_capacity=False, machines=()),
    journal_events.InstancesReleased(ids=("i-1",), reason="all moved"),
    AddressRequested(id="i-1"),
    LaunchStarted(launch_id="a"),
    journal_events.StackChange(intent="make bucket", region="us-east-1", names={"Bucket": "imgnet-x"}),
)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "job" / "cloud.jsonl")


def all_events(journal: Journal) -> list[JournalEvent]:
    return journal.events(JournalEvent)


def test_events_come_back_from_the_file_in_order_selected_by_type(journal: Journal) -> None:
    assert all_events(journal) == []
    journal.copy(*EVENTS)
    journal.write(LaunchStarted(launch_id="b"))
    *copied_events, written_event = all_events(Journal(journal.path))
    assert copied_events == [*EVENTS] and written_event.time > 0
    assert [event.launch_id for event in journal.events(LaunchStarted)] == ["a", "b"]
    assert len(journal.events(LaunchStarted, AddressRequested)) == 3


def test_events_are_parsed_again_only_when_the_file_has_changed(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def decode_event(data: Mapping[str, object], source: str) -> JournalEvent:
        parsed.append(source)
        return journal_events.decode_event(data, source)

    monkeypatch.setattr("infra.aws.journal.decode_event", decode_event)
    journal.write(LaunchStarted(launch_id="a"))
    for _ in range(3):
        assert len(all_events(journal)) == len(journal.events(LaunchStarted)) == len(parsed) == 1
    Journal(journal.path).write(AddressRequested(id="i-1"))  # as another process does
    assert len(all_events(journal)) == 2
    journal.path.unlink()
    assert all_events(journal) == []
    journal.write(AddressRequested(id="i-1"))
    assert len(all_events(journal)) == 1


@pytest.mark.parametrize(("damaged", "problem"), [
    ('{"what": "SpotCostKnown", "id": "i-1", "dollars": "1"}', "dollars"),
    ('{"what": "RequestGranted", "number": 1, "machines": [{"id": 7}]}', "machines"),
    ('{"what": "bought"}', "'bought'"),
    ("{}", "None"),
])  # fmt: skip
def test_events_wrong_type_names_file_and_line(journal: Journal, damaged: str, problem: str) -> None:
    journal.write(LaunchStarted(launch_id="a"))
    with journal.path.open("a") as file:
        file.write(damaged + "\n")
    with pytest.raises(DamagedRecord) as failure:
        journal.events(LaunchStarted)
    assert str(failure.value).startswith(f"{journal.path}, line 2: ") and problem in str(failure.value)


def test_write_syncs_a_file_only_the_owner_may_read(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda number: synced.append(str(Path(f"/proc/self/fd/{number}").readlink())))
    before = os.umask(0)
    try:
        journal.write(TerminationFinished())
    finally:
        os.umask(before)
    assert journal.path.stat().st_mode & 0o777 == 0o600
    assert synced == [str(journal.path), str(journal.path.parent)]


@pytest.mark.parametrize("torn", ['{"what": "gran', '{"what": "granted"', '"gran', "7", "\xff\xfe", '{"a":' * 99_999])
def test_torn_line_is_ignored_and_the_next_one_is_complete(journal: Journal, torn: str) -> None:
    journal.write(AddressRequested(id="i-1"))
    with journal.path.open("ab") as file:
        file.write(torn.encode("latin-1"))
    assert [type(event) for event in all_events(journal)] == [AddressRequested]
    journal.write(TerminationFinished())
    assert [type(event) for event in all_events(journal)] == [AddressRequested, TerminationFinished]


def test_write_from_several_threads_does_not_mix_lines(journal: Journal) -> None:
    def write(name: str) -> None:
        for _ in range(20):
            Journal(journal.path).write(LaunchStarted(launch_id=name * 30_000))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = sorted(event.launch_id for event in journal.events(LaunchStarted))
    assert written == [name * 30_000 for name in "abcd" for _ in range(20)]
