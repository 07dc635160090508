"""Why a machine's part of a job ends. The test sets the clock."""

import contextlib
import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.agent.ending import EndConditions, JobFinished
from cluster.agent.watchdog import SAVE_GRACE_SECONDS
from cluster.state.states import AgentPhase

_, WARMING, SPARE, FAILED, SAVED, _, RUNNING = AgentPhase
DONE, STOPPED, LEFT = ("done", ""), ("stopped", "enough"), ("left", "a notice")
FILES = {"result": ("result.json", "{}"), "stop": ("stop", '{"reason": "enough"}')}


@pytest.mark.parametrize(("cause", "phase", "has_made_steps", "seconds", "expected"), [
    *(("", phase, True, 0.0, False) for phase in AgentPhase),
    ("result", RUNNING, True, 0.0, False), ("result", WARMING, True, 0.0, DONE),
    # A stop saves first, if there is something to save, but not for ever.
    ("stop", RUNNING, True, SAVE_GRACE_SECONDS, True), ("stop", RUNNING, True, SAVE_GRACE_SECONDS + 0.1, STOPPED),
    ("stop", RUNNING, False, 0.0, STOPPED), ("stop", SPARE, True, 0.0, STOPPED),
    # A machine that has to leave waits for its steps to be saved, for 60 seconds.
    *(("leave", phase, True, 0.0, False) for phase in (RUNNING, SAVED, FAILED)),
    ("leave", SPARE, True, 0.0, LEFT), ("leave", RUNNING, False, 0.0, LEFT), ("leave", RUNNING, True, 60.0, LEFT),
    ("leave alone", SPARE, True, 0.0, ("stopped", "a notice")),
])  # fmt: skip
def test_machine_ends_saves_first_or_goes_on(
    cause: str, phase: AgentPhase, has_made_steps: bool, seconds: float, expected: Any, hand_made: Any
) -> None:
    now = 1000.0
    run = hand_made(machines=1 if cause == "leave alone" else 2)
    leave_reason = "a notice" if cause.startswith("leave") else ""
    watchdog: Any = SimpleNamespace(limit_reason="", leave_reason=leave_reason, seconds_left=lambda: 1060.0 - now)
    if cause in FILES:
        run.write_shared(*FILES[cause])
    conditions = EndConditions(run.spec, run.run_folder.shared, watchdog, lambda: now)
    with contextlib.suppress(JobFinished):
        conditions.check(phase, has_made_steps)
    now += seconds
    outcome: Any
    try:
        outcome = conditions.check(phase, has_made_steps)
    except JobFinished as end:
        outcome = end.state, end.reason
    assert outcome == expected


def test_shared_folder_that_fails_for_a_moment_ends_nothing(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = hand_made(machines=2)
    real_stat, shared = os.stat, run.run_folder.shared

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(shared)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real_stat(path, **options)

    watchdog: Any = SimpleNamespace(limit_reason="", leave_reason="")
    monkeypatch.setattr(os, "stat", stat)
    assert not any(EndConditions(run.spec, shared, watchdog).check(phase, True) for phase in (RUNNING, WARMING))
