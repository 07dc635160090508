"""Agents of two machines in this process, tick by tick, with processes that only note what is asked of them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.known import known
from support.waiting import wait_for

from cluster.agent import agent as agent_module
from cluster.agent.agent import Agent
from cluster.agent.ending import JobFinished
from cluster.agent.processes.base import AttemptProcesses, ProcessesExit
from cluster.state.attempts import Attempt
from cluster.state.heartbeats import MachineStatus
from cluster.state.states import AgentPhase, MachineState
from train.tools.agent_protocol import Fault, KeptStateReport, TrainerProgress, TrainerState
from train.tools.records import read_record

OWN_FAILURE = ProcessesExit(AgentPhase.FAILED, "the trainer of rank 1 ended with code 9 and no result", Fault.OWN)


class NotedProcesses(AttemptProcesses):
    """Processes that do not exist: `calls` is what was asked of them, and a test says how they do and end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:4])
        self.calls: list[str] = []
        self.progress: TrainerProgress | None = TrainerProgress(state=TrainerState.STARTING)
        self.exit: ProcessesExit | None = None
        self.kept: list[KeptStateReport] = []

    def start(self, attempt: Attempt, machine_rank: int, goes_on_in_place: bool = False) -> Path:
        self.calls.append(f"start {attempt.number} as {machine_rank}")
        self.exit = None
        return self.work / "train.log"

    def request_save_and_exit(self) -> None:
        self.calls.append("save and exit")

    def request(self, file: str) -> None:
        self.calls.append(file)

    def read_progress(self) -> TrainerProgress | None:
        return self.progress

    def read_kept_states(self) -> list[KeptStateReport]:
        return self.kept

    def exit_codes(self) -> list[int | None]:
        return [1 if self.exit else None]

    def collect_exit(self, exit_codes: list[int | None]) -> ProcessesExit | None:
        return self.exit

    def stop(self, include_standby: bool = False) -> None:
        self.calls.append("stop")

    def train(self, step: int = 8) -> None:
        self.progress = TrainerProgress(state=TrainerState.TRAINING, step=step)


class TickedAgents:
    """The agents of a job's machines. One that has ended, with the end in `ends`, has no more ticks."""

    def __init__(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agent_module, "Trainers", NotedProcesses)
        monkeypatch.setattr(agent_module, "TmuxWindows", Mock())
        self.run = run
        self.agents = [
            Agent(run.run_folder.shared, run.run_folder.work_folder(name), name, "127.0.0.1")
            for name in run.spec.machine_names
        ]
        self.ends: dict[str, JobFinished] = {}

    @property
    def processes(self) -> list[Any]:
        return [agent.trainers for agent in self.agents]

    def tick(self) -> None:
        for agent in self.agents:
            if agent.machine not in self.ends:
                try:
                    agent.tick(time.monotonic())
                except JobFinished as end:
                    self.ends[agent.machine] = end

    def tick_until(self, condition: Callable[[], Any]) -> None:
        def is_reached() -> bool:
            self.tick()
            return bool(condition())

        wait_for(is_reached, describe=lambda: ([agent.phase for agent in self.agents], self.ends))

    def start(self) -> None:
        self.tick_until(lambda: all(agent.phase == AgentPhase.RUNNING for agent in self.agents))
        for processes in self.processes:
            processes.train()
        self.tick()

    def status(self, machine: str) -> MachineStatus:
        return known(read_record(self.run.run_folder.status_path(machine), MachineStatus))


@pytest.fixture
def ticked(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[TickedAgents]:
    run = hand_made(machines=2, heartbeat_seconds=0.02, heartbeat_timeout_seconds=60.0)
    ticked = TickedAgents(run, monkeypatch)
    yield ticked
    for agent in ticked.agents:
        agent.status_writer.close()
        agent.temp_folder.remove()


def test_failed_processes_are_told_with_their_fault_and_start_a_new_attempt(ticked: TickedAgents) -> None:
    ticked.start()
    ticked.processes[1].exit = OWN_FAILURE
    ticked.tick()
    failed = ticked.status("1")
    assert (failed.phase, failed.fault, failed.reason) == (AgentPhase.FAILED, Fault.OWN, OWN_FAILURE.reason)
    ticked.tick_until(lambda: all(agent.current.number == 2 for agent in ticked.agents))
    for rank, processes in enumerate(ticked.processes):
        assert [call for call in processes.calls if call != "stop"] == [f"start {n} as {rank}" for n in (1, 2)]
    assert (ticked.status("1").fault, ticked.status("1").reason) == (Fault.NONE, "")


def test_attempt_that_others_have_begun_ends_the_processes_of_the_one_before(ticked: TickedAgents) -> None:
    ticked.start()
    ticked.run.write_attempt(2, *(agent.id for agent in reversed(ticked.agents)))
    ticked.tick()
    for processes, rank in zip(ticked.processes, (1, 0), strict=True):
        assert processes.calls[-2:] == ["stop", f"start 2 as {rank}"]


def test_death_of_a_machine_in_a_handover_is_seen_by_its_lock(ticked: TickedAgents) -> None:
    ticked.start()
    ticked.run.write_attempt(2, *(agent.id for agent in ticked.agents), live_step=8)
    for processes in ticked.processes:
        processes.progress = TrainerProgress(state=TrainerState.JOINING)
    ticked.tick()
    survivor, lost = ticked.agents
    lost.status_writer.close()
    ticked.ends["1"] = JobFinished(MachineState.FAILED)  # it has no more ticks
    survivor.last_peer_poll_time = 0.0
    ticked.tick()
    assert (survivor.phase, survivor.status.reason) == (AgentPhase.FAILED, "machine 1 died")


@pytest.mark.parametrize("keeps_state", [False, True])
def test_stop_request_lets_all_save_and_ends_the_job_as_stopped(ticked: TickedAgents, keeps_state: bool) -> None:
    """Trainers that go on in place have saved too, and wait for the next attempt, of which there is none."""
    ticked.start()
    ticked.run.write_shared("stop", "stopped by the user")
    ticked.tick()
    assert [processes.calls[-1] for processes in ticked.processes] == ["save and exit"] * 2 and not ticked.ends
    for processes in ticked.processes:
        processes.exit = None if keeps_state else ProcessesExit(AgentPhase.SAVED)
        processes.kept = [KeptStateReport(step=8, has_saved=True, reason="")] if keeps_state else []
    ticked.tick()
    assert {(end.state, str(end)) for end in ticked.ends.values()} == {(MachineState.STOPPED, "stopped by the user")}


def test_result_of_the_processes_ends_the_job_as_done(ticked: TickedAgents) -> None:
    ticked.start()
    ticked.run.write_shared("result.json", '{"epochs": []}')
    ticked.tick()
    assert not ticked.ends, "the processes have not ended"
    for processes in ticked.processes:
        processes.exit = replace(OWN_FAILURE, reason="a failure after the result")
    ticked.tick()
    assert [end.state for end in ticked.ends.values()] == [MachineState.DONE] * 2


def test_machine_at_risk_saves_and_one_that_has_to_leave_waits_for_a_checkpoint(ticked: TickedAgents) -> None:
    ticked.start()
    ticked.agents[0].watchdog.risk_reason = "EC2 may interrupt it soon"
    ticked.tick()
    assert ticked.processes[0].calls[-1] == "save" and "save" not in ticked.processes[1].calls
    ticked.agents[0].watchdog.notice_path.write_text('{"reason": "EC2 interrupts it", "seconds": 120}')
    ticked.agents[0].watchdog.poll_once(time.monotonic())
    ticked.tick()
    assert not ticked.ends, "its last steps are not saved"
    for processes in ticked.processes:
        processes.exit = ProcessesExit(AgentPhase.SAVED)
    ticked.tick_until(lambda: ticked.agents[1].current.number == 2)
    ticked.tick()
    assert (ticked.ends["0"].state, str(ticked.ends["0"])) == (MachineState.LEFT, "EC2 interrupts it")
    assert ticked.processes[1].calls[-1] == "start 2 as 0"


def test_machine_whose_processes_fail_alone_and_again_is_left_out(ticked: TickedAgents) -> None:
    ticked.start()
    for _ in range(2):
        ticked.processes[1].exit = OWN_FAILURE
        ticked.tick_until(lambda: ticked.processes[1].exit is None or ticked.ends)
    ticked.tick_until(lambda: ticked.ends)
    end = ticked.ends["1"]
    assert (end.state, end.fault) == (MachineState.FAILED, Fault.MACHINE) and "failed repeatedly" in str(end)
    assert ticked.processes[0].calls[-1] == "start 3 as 0"


def test_machines_that_were_added_to_the_job_are_asked_to_join(ticked: TickedAgents) -> None:
    ticked.start()
    ticked.run.run_folder.write_spec(replace(ticked.run.spec, machines=3))

    def are_asked() -> bool:
        ticked.run.write_status("waiting", "2", id="2.a", phase="spare")
        return all("save and exit" in processes.calls for processes in ticked.processes)

    ticked.tick_until(are_asked)


def test_a_spare_that_cannot_read_the_shared_folder_takes_nobody_for_silent(ticked: TickedAgents) -> None:
    ticked.start()
    spare, member = ticked.agents
    spare.enter_phase(AgentPhase.SPARE)
    folder, now = spare.peers.status_folder, time.monotonic()
    spare.peers.refresh(now)
    folder.rename(folder.with_name("away"))
    spare.peers.refresh(now + 90)
    assert spare.cluster_view(now + 90).status_ages[member.id] < 60
    folder.with_name("away").rename(folder)
    spare.peers.refresh(now + 90)
    assert spare.cluster_view(now + 90).status_ages[member.id] > 60
