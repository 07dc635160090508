"""What the readers of a run folder make of a damaged file. tests/end_to_end/test_fuzz.py damages any of them."""

import json
from typing import Any

import pytest

from cluster.errors import ClusterError
from cluster.state import attempts, heartbeats

ATTEMPT = {"number": 1, "members": ["0.a"], "launch_id": "x", "reason": "start", "time": 5.0}
STATE_CHANGE = {"time": 5.0, "attempt": 1, "state": "training", "reason": ""}


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
