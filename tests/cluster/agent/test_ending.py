"""Why a machine's part of a job ends. The test sets the clock."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.agent.ending import EndConditions, JobFinished
from cluster.agent.watchdog import SAVE_GRACE_SECONDS
from cluster.state.states import AgentPhase, MachineState


class Conditions:
    """End conditions of a job of two machines, of which this one has no watchdog thread."""

    def __init__(self, run: Any) -> None:
        self.now = 1000.0
        self.shared: Path = run.run_folder.shared
        self.seconds_left = 60.0
        self.watchdog = SimpleNamespace(limit_reason="", leave_reason="", seconds_left=lambda: self.seconds_left)
        self.conditions = EndConditions(run.spec, self.shared, self.watchdog, lambda: self.now)  # type: ignore[arg-type]

    def check(self, phase: AgentPhase = AgentPhase.RUNNING, has_made_steps: bool = True) -> bool:
        return self.conditions.check(phase, has_made_steps)

    def end(self, phase: AgentPhase = AgentPhase.RUNNING, has_made_steps: bool = True) -> tuple[str, str]:
        with pytest.raises(JobFinished) as caught:
            self.check(phase, has_made_steps)
        return caught.value.state, caught.value.reason


@pytest.fixture
def conditions(hand_made: Any) -> Conditions:
    return Conditions(hand_made(machines=2))


def test_check_result_ends_all_but_a_training_machine(conditions: Conditions) -> None:
    assert not any(conditions.check(phase) for phase in AgentPhase), "there is no reason yet"
    (conditions.shared / "result.json").write_text("{}")
    assert not conditions.check(AgentPhase.RUNNING)
    assert conditions.end(AgentPhase.WARMING) == (MachineState.DONE, "")


def test_check_shared_folder_that_fails_for_a_moment_ends_nothing(
    conditions: Conditions, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_stat = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(conditions.shared)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real_stat(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert not conditions.check() and not conditions.check(AgentPhase.WARMING)


def test_check_stop_saves_first_but_not_for_ever(conditions: Conditions) -> None:
    (conditions.shared / "stop").write_text('{"reason": "enough"}')
    assert conditions.check() and conditions.conditions.stop_reason == "enough"
    conditions.now += SAVE_GRACE_SECONDS
    assert conditions.check()
    for phase, has_made_steps in ((AgentPhase.RUNNING, False), (AgentPhase.SPARE, True)):
        assert conditions.end(phase, has_made_steps) == (MachineState.STOPPED, "enough"), "there is nothing to save"
    conditions.now += 0.1
    assert conditions.end() == (MachineState.STOPPED, "enough")


def test_check_leaving_machine_waits_for_its_steps_to_be_saved(conditions: Conditions, hand_made: Any) -> None:
    conditions.watchdog.leave_reason = "a notice"
    for phase in (AgentPhase.RUNNING, AgentPhase.SAVED, AgentPhase.FAILED):
        assert not conditions.check(phase)
    assert conditions.end(AgentPhase.SPARE) == (MachineState.LEFT, "a notice")
    assert conditions.end(AgentPhase.RUNNING, has_made_steps=False) == (MachineState.LEFT, "a notice")
    conditions.seconds_left = 0.0
    assert conditions.end() == (MachineState.LEFT, "a notice")
    only_machine = Conditions(hand_made("job-2"))
    only_machine.watchdog.leave_reason = "a notice"
    assert only_machine.end(AgentPhase.SPARE) == (MachineState.STOPPED, "a notice")
