"""Each reader of a run folder, on files of any content: it returns a record, nothing, or raises `DamagedRecord`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import ClusterError
from cluster.state import attempts, heartbeats, status, supervisor_records, timeline
from cluster.state.run_folder import Run, RunFolder
from cluster.state.status import JobResult
from infra.aws.journal import Journal
from infra.aws.journal_events import JournalEvent
from train.tools.records import DamagedRecord, read_record

ATTEMPT = {"number": 1, "members": ["0.a"], "launch_id": "x", "reason": "start", "time": 5.0}
STATUS = {"id": "0.a", "state": "training", "phase": "running", "attempt": 1, "step": 3, "time": 5.0, "busy": [0.5]}
RESULT = {"state": "done", "reason": "", "attempts": 1, "epochs": [], "seconds": {"total": 3.0}, "top1": 2.0}
SETUP = {"launch": "x", "machines": {"0": {"host": "a", "step": "agent", "seconds": {"code": 1.5}}}}
STATE_CHANGE = {"time": 5.0, "attempt": 1, "state": "training", "reason": ""}
EVENT = {"what": "InstanceEnded", "time": 5.0, "id": "i-1", "name": "0", "ended": 4.0, "reason": "x"}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def read_history(folder: RunFolder) -> list[attempts.Attempt]:
    folder.attempts.check()
    timeline.read_timeline(folder)
    return folder.attempts.all()


READERS: dict[str, tuple[str, dict[str, Any], Callable[[RunFolder], Any]]] = {
    "job": ("job.json", {}, lambda folder: Run.read(folder.path)),
    "result": ("result.json", RESULT, lambda folder: read_record(folder.result_path, JobResult)),
    "attempt": ("machine/shared/attempts/000001.json", ATTEMPT, read_history),
    "status": ("machine/shared/status/0.json", STATUS, lambda folder: heartbeats.read_status(folder.status_path())),
    "setup": ("machines.json", SETUP, status.read_setup_record),
    "activity": ("cloud.json", {"doing": "x", "time": 5}, lambda folder: supervisor_records.read_activity(folder.path)),
    "journal": ("cloud.jsonl", EVENT, lambda folder: Journal(folder.path / "cloud.jsonl").events(JournalEvent)),
    "state log": ("logs/agent-0.jsonl", STATE_CHANGE, lambda folder: timeline.startup_seconds(folder, "0")),
}


@st.composite
def changed_records(draw: Any, record: dict[str, Any]) -> bytes:
    """The text of a record with one other value, or of something else."""
    if not draw(st.booleans()) or not record:
        return draw(st.binary() | values.map(lambda value: json.dumps(value).encode()))
    return json.dumps({**record, draw(st.sampled_from([*record])): draw(values)}).encode()


@pytest.mark.parametrize("reader", READERS)
def test_reader_on_any_content_returns_or_raises_damaged_record(reader: str, hand_made: Any) -> None:
    name, record, read = READERS[reader]
    run = hand_made()
    record = record or run.spec.to_json()
    path: Path = run.run_folder.path / name
    path.parent.mkdir(parents=True, exist_ok=True)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
    @given(changed_records(record))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read(run.run_folder)
        except DamagedRecord as error:
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 1000

    check()


@pytest.mark.parametrize("attempt", [
    {"members": 3}, {"members": []}, {"members": ["0"], "resume": "../x"}, [], ATTEMPT | {"number": 2, "time": 1e17},
])  # fmt: skip
def test_damaged_attempt_is_one_line_with_its_file(attempt: Any, hand_made: Any) -> None:
    run = hand_made()
    run.write_attempt(1, "0.a")
    path = run.write_shared("attempts/000002.json", json.dumps(attempt))
    assert attempts.read_attempt(run.run_folder.shared, 2) is None
    with pytest.raises(ClusterError, match=str(path)) as error:
        run.job.status()
    assert "\n" not in str(error.value)


def test_change_of_state_without_a_date_is_damaged() -> None:
    for time, is_damaged in ((5.0, False), (1e17, True), (-1e17, True)):
        line = json.dumps({**STATE_CHANGE, "time": time}).encode()
        assert (heartbeats.parse_state_change(line) is None) == is_damaged


@pytest.mark.parametrize("text", ["[]", '{"epochs": 3}', "{", '{"epochs": [], "seconds": {"total": "x"}}'])
def test_damaged_result_of_trainers_ends_the_job_as_failed(text: str, hand_made: Any) -> None:
    run = hand_made()
    run.write_status("done", ended=True)
    path = run.write_shared("result.json", text)
    run.job.refresh()
    assert run.job.state == "failed" and str(path) in run.job.result.reason


@pytest.mark.parametrize("change", [{"machines": 10**9}, {"machines": "2"}, {"procs": {}}, {"created": 1e308}])
def test_job_json_of_wrong_values_is_damaged(change: dict[str, Any], hand_made: Any) -> None:
    run = hand_made()
    run.run_folder.spec_path.write_text(json.dumps({**run.spec.to_json(), **change}))
    with pytest.raises(ClusterError, match=f"damaged.*job.json: .*{next(iter(change))}"):
        run.job.status()
