"""Simulates hundreds of random schedules of kills, freezes, notices and crashes: the agents must always agree.

The simulated agents follow cluster/agent/agent.py, without files and processes. Statuses arrive late, attempts are
exclusive by number, and the trainers of an attempt advance while all its members run them. In most jobs, trainers keep
their state when others fail, but not always; some of them have finished one step more. Time is simulated.
"""

import json
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.processes.attempt_state import AttemptState
from cluster.state.attempts import Attempt
from cluster.state.heartbeats import MachineStatus, PeerStatuses
from cluster.state.membership import Action, ClusterView, MembershipRules, decide
from cluster.state.states import AgentPhase, MachineState
from train.tools.agent_protocol import Fault, TrainerProgress, TrainerState

TICK_SECONDS = 0.25
HEARTBEAT_SECONDS = 0.5
FAULT_SECONDS = 40.0  # time in which faults happen
AGREEMENT_SECONDS = 150.0  # time without faults after that, in which all must agree
START_SECONDS = 1.0  # for a standby to get ready, or for trainers to make their first step
LAUNCH_ID = "this launch"


@dataclass
class Agent:
    """One life of a machine's agent, from its start to its end."""

    id: str
    peers: PeerStatuses
    current: AttemptState
    phase: AgentPhase = AgentPhase.WARMING
    phase_since: float = 0.0
    fault: Fault = Fault.NONE
    reason: str = ""
    leave_reason: str = ""
    notice_time: float = 0.0
    last_tick_time: float = 0.0
    last_peer_poll_time: float = -9.0
    last_written: float = -9.0
    last_urgent_fields: Any = None
    frozen_until: float = 0.0
    frozen_seconds: float = 0.0  # in all
    is_save_requested: bool = False
    report: TrainerProgress | None = None  # of its trainers
    trainer_exit: str = ""  # how its trainers have ended: "", "saved", "own", "peer"
    state_step: int | None = None  # whose state its trainers hold
    hangs: bool = False  # of its trainers
    proposal: tuple[float, Attempt | None, Attempt] | None = None  # when it arrives, known attempt, new attempt
    is_alive: bool = True

    @property
    def name(self) -> str:
        return self.id.partition(".")[0]


@dataclass
class Simulation:
    """All machines, the shared folder and the faults of one seed."""

    seed: int
    rng: random.Random = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        machines, spares = rng.randint(2, 4), rng.choice([0, 0, 1])
        names = tuple(map(str, range(machines + spares)))
        self.rules = MembershipRules(
            machine_names=names,
            target_size=machines,
            min_size=rng.choice([1, 1, 2]),
            heartbeat_timeout=2.5 if rng.random() < 0.7 else 1.5,
            loss_timeout=3.0,
            startup_loss_timeout=6.0,
            stall_timeout=20.0,
            startup_stall_timeout=30.0,
            orphan_timeout=20.0,
            goes_on_in_place=rng.random() < 0.8,
        )
        self.shares_locks = rng.random() < 0.5  # so that agents that wait for each other see a death at once
        self.failed_share = rng.choice([0.2, 0.2, 0.2, 1.0])  # of the attempts in place, before their first step
        self.delays = {name: rng.choice([0.0, 0.0, 0.25, 0.75]) for name in names}
        self.status_files: dict[str, list[tuple[float, bytes]]] = {name: [] for name in names}  # all texts, with times
        self.attempts: dict[int, Attempt] = {}
        self.agents = {name: self.boot(name) for name in names}
        self.steps: dict[int, int] = {}  # finished ones of each attempt
        self.checkpoints: dict[int, int] = {}  # the step of the newest one that each attempt has written
        self.fault_count = 0
        self.crashes: dict[str, int] = {}
        self.return_times: dict[str, float] = {}  # when dead machines come back
        self.gone_names: set[str] = set()  # machines that never come back
        self.last_step_times: dict[int, float] = {}  # when each attempt made its last step
        self.all_agents: list[Agent] = list(self.agents.values())  # the dead included

    def boot(self, name: str) -> Agent:
        peers = PeerStatuses(Path("/nowhere"), self.rules.machine_names, LAUNCH_ID)
        agent_id = f"{name}.{self.rng.randrange(1 << 24):06x}"
        agent = Agent(agent_id, peers, AttemptState(last_progress_time=self.now))
        agent.last_tick_time = agent.phase_since = self.now
        return agent

    # --- faults and training -------------------------------------------------------------------------------------

    def inject_faults(self) -> None:
        """Let a kill, a freeze, a notice or a crash happen now and then; dead machines come back after a while."""
        for name, return_time in list(self.return_times.items()):
            if self.now >= return_time:
                del self.return_times[name]
                self.agents[name] = self.boot(name)
                self.all_agents.append(self.agents[name])
        for name, agent in self.agents.items():
            if not agent.is_alive and name not in self.return_times and name not in self.gone_names:
                can_spare_one = len(self.rules.machine_names) - len(self.gone_names) > self.rules.min_size
                if self.attempts and can_spare_one and self.rng.random() < 0.2:
                    self.gone_names.add(name)
                else:
                    self.return_times[name] = self.now + self.rng.uniform(0.5, 12.0)
        if self.now > FAULT_SECONDS or self.rng.random() > TICK_SECONDS / 5:
            return
        self.fault_count += 1
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            agent = self.rng.choice(list(self.agents.values()))
            kind = self.rng.choice(["kill", "kill", "freeze", "notice", "crash", "peer", "hang", "holder"])
            if kind in ("kill", "crash", "peer", "hang"):
                self.finish_step(agent.current.number)
            if kind == "kill":
                agent.is_alive = False
            elif kind == "holder" and agent.phase in ("failed", "saved"):
                agent.state_step = None
            elif kind == "hang" and agent.phase == "running":
                agent.hangs = True
            elif kind == "freeze":
                seconds = self.rng.uniform(0.5, 15.0)
                agent.frozen_until = self.now + seconds
                agent.frozen_seconds += seconds
            elif kind == "notice" and not agent.leave_reason:
                agent.leave_reason = "a notice"
                agent.notice_time = self.now
            elif kind == "crash" and agent.phase == "running" and self.crashes.get(agent.name, 0) < 2:
                self.crashes[agent.name] = self.crashes.get(agent.name, 0) + 1
                agent.trainer_exit = "own"
            elif kind == "peer" and agent.phase == "running":
                agent.trainer_exit = "peer"

    def finish_step(self, number: int) -> None:
        for agent in self.agents.values():
            is_at_work = agent.phase == "running" and agent.frozen_until <= self.now and not agent.trainer_exit
            is_in_step = agent.current.number == number and agent.state_step == self.steps.get(number, -1)
            if is_at_work and is_in_step and self.rng.random() < 0.4:
                agent.state_step = self.steps[number] + 1

    def join(self, attempt: Attempt, members: list[Agent]) -> bool:
        """Let all trainers of an attempt take the state to go on from. Returns whether that has worked."""
        held = [agent.state_step for agent in members if agent.state_step is not None]
        if attempt.live_step is not None:
            assert max(held, default=0) <= attempt.live_step, f"the agents do not know of step {max(held)}"
            is_disturbed = self.rng.random() < self.failed_share
            self.fault_count += is_disturbed
            if is_disturbed or max(held, default=-1) < attempt.live_step:
                for agent in members:
                    agent.trainer_exit = "peer"
                    agent.state_step = max(held, default=None) if self.rng.random() < 0.5 else agent.state_step
                return False
        self.steps[attempt.number] = attempt.first_step
        return True

    def train(self) -> None:
        """Let the trainers of each attempt make a step, if all its members run them."""
        for number, attempt in self.attempts.items():
            members = [agent for agent in self.all_agents if agent.id in attempt.members]
            if len(members) < len(attempt.members) or not attempt.members:
                continue
            at_work = [
                agent
                for agent in members
                if agent.is_alive and agent.phase == "running" and agent.frozen_until <= self.now
                if agent.current.attempt == attempt and not agent.trainer_exit and not agent.hangs
                if agent.current.abort_deadline is None
            ]
            if len(at_work) < len(members) or any(self.now - agent.phase_since < START_SECONDS for agent in members):
                continue
            if number not in self.steps and not self.join(attempt, members):
                continue
            self.steps[number] += 1
            self.last_step_times[number] = self.now
            if any(agent.is_save_requested for agent in members):
                for agent in members:
                    agent.trainer_exit = "saved"
            if members[0].trainer_exit or self.rng.random() < 0.05:
                self.checkpoints[number] = self.steps[number]
            for agent in members:
                agent.state_step = self.steps[number]
                agent.report = TrainerProgress(state=TrainerState.TRAINING, step=agent.state_step, not_in_place="")

    # --- an agent ------------------------------------------------------------------------------------------------

    def enter_phase(self, agent: Agent, phase: AgentPhase, fault: Fault = Fault.NONE, reason: str = "") -> None:
        agent.phase = phase
        agent.fault = fault
        agent.reason = reason
        agent.phase_since = self.now

    def own_status(self, agent: Agent) -> MachineStatus:
        return MachineStatus(
            id=agent.id,
            attempt=agent.current.number,
            phase=agent.phase,
            state=MachineState.TRAINING if agent.report else MachineState.STARTING,
            last_step=agent.current.last_step,
            kept_step=agent.current.kept_step,
            is_standby_ready=agent.current.is_standby_ready,
            leave_reason=agent.leave_reason,
            fault=agent.fault,
            reason=agent.reason,
        )

    def write_status(self, agent: Agent) -> None:
        status = self.own_status(agent)
        urgent_fields = (status.phase, status.attempt, status.leave_reason, status.fault, status.kept_step)
        if urgent_fields == agent.last_urgent_fields and self.now - agent.last_written < HEARTBEAT_SECONDS:
            return
        agent.last_urgent_fields = urgent_fields
        agent.last_written = self.now
        text = json.dumps({**asdict(status), "launch": LAUNCH_ID, "time": self.now})
        self.status_files[agent.name].append((self.now, text.encode()))

    def read_statuses(self, agent: Agent) -> None:
        """Let an agent read the status files, as they were some time ago: as late as its machine sees changes."""
        for name, texts in self.status_files.items():
            if seen := [text for time, text in texts if time <= self.now - self.delays[agent.name]]:
                agent.peers.take(name, seen[-1], self.now)
        agent.current.note_peers(agent.peers.statuses, agent.id, self.now)
        if self.shares_locks and (agent.phase in ("failed", "saved") or agent.current.is_handover):
            dead = {peer.id for peer in self.all_agents if not peer.is_alive and peer.phase != "ended"}
            agent.peers.dead_ids |= dead & agent.peers.statuses.keys()

    def newest_attempt(self) -> Attempt | None:
        return self.attempts[max(self.attempts)] if self.attempts else None

    def publish(self, agent: Agent, known: Attempt | None, attempt: Attempt) -> None:
        """Publish an attempt as attempts.propose does: nothing happens when another agent was faster."""
        newest = self.newest_attempt()
        if newest != known:
            return
        number = newest.number + 1 if newest else 1
        attempt = replace(attempt, number=number)
        if newest and (step := self.checkpoints.get(newest.number, newest.checkpoint_step)):
            attempt = replace(attempt, resume=f"checkpoints/{number:06d}/resume-{step:08d}-ab.pt")
            attempt = replace(attempt, live_step=None) if (attempt.live_step or step) < step else attempt
        self.check_attempt(agent, attempt)
        if newest:
            self.check_kept_states(agent, newest, attempt)
        self.attempts[number] = attempt

    def longest_silence(self, proposer: Agent) -> float:
        return (
            self.rules.heartbeat_timeout + max(self.delays.values()) + 4 * TICK_SECONDS + 0.5 + proposer.frozen_seconds
        )

    def check_attempt(self, proposer: Agent, attempt: Attempt) -> None:
        """Every member must have written a status a moment ago, not counting time in which the proposer was frozen."""
        longest_silence = self.longest_silence(proposer)
        for member in attempt.members:
            (member_agent,) = [agent for agent in self.all_agents if agent.id == member]
            last = max(time for time, text in self.status_files[member_agent.name] if member.encode() in text)
            assert self.now - last <= longest_silence, f"{member} was silent for {self.now - last} s"
        if attempt.end_state == "failed":
            healthy = [agent for agent in self.agents.values() if agent.is_alive and not agent.leave_reason]
            assert self.crashes or len(healthy) < self.rules.min_size, f"ended: {attempt.reason}"
        if attempt.end_state == "stopped":
            assert proposer.leave_reason

    def check_kept_states(self, proposer: Agent, newest: Attempt, attempt: Attempt) -> None:
        """The step must be the highest that a member keeps, and one must have written a moment ago that it does."""
        members = [agent for agent in self.agents.values() if agent.is_alive and agent.id in attempt.members]
        kept = [agent.current.kept_step or 0 for agent in members if agent.current.number == newest.number]
        if attempt.live_step is not None:
            begin = self.now - self.longest_silence(proposer)
            texts = [text for name in attempt.machine_names for time, text in self.status_files[name] if time >= begin]
            told = [status for status in map(json.loads, texts) if status["id"] in attempt.members]
            assert (newest.number, attempt.live_step) in [(each["attempt"], each["kept_step"]) for each in told]
            assert attempt.live_step >= max(kept, default=0) and attempt.failed_regroups < 2
        elif self.rules.goes_on_in_place and any(kept):
            has_later_checkpoint = attempt.checkpoint_step >= max(kept)
            assert has_later_checkpoint or newest.failed_regroups == 1, f"step {max(kept)} is thrown away"

    def tick(self, agent: Agent) -> None:
        """Run one turn of the agent's main loop."""
        gap = self.now - agent.last_tick_time
        agent.last_tick_time = self.now
        if gap > 1.0:
            agent.peers.discount_pause(gap)
            agent.current.last_progress_time += gap
        if agent.phase in ("failed", "saved") or self.now - agent.last_peer_poll_time > HEARTBEAT_SECONDS / 2:
            agent.last_peer_poll_time = self.now
            self.read_statuses(agent)
        if agent.proposal and self.now >= agent.proposal[0]:
            self.publish(agent, *agent.proposal[1:])
            agent.proposal = None
        self.follow_latest_attempt(agent)
        if agent.is_alive:
            self.check_trainers(agent)
            self.leave_when_safe(agent)
        if not agent.is_alive:
            return
        agent.peers.statuses[agent.id], agent.peers.changed_at[agent.id] = self.own_status(agent), self.now
        view = ClusterView(
            own_id=agent.id,
            phase=agent.phase,
            attempt=agent.current.attempt,
            statuses=agent.peers.statuses,
            status_ages=agent.peers.ages(self.now),
            seen_changing=agent.peers.seen_changing,
            seconds_without_progress=self.now - agent.current.last_progress_time,
            seconds_in_phase=self.now - agent.phase_since,
            longest_progress_gap=agent.current.longest_progress_gap,
            is_deadline_near=bool(agent.leave_reason) and self.now - agent.notice_time > 7.5,
            can_keep_state=agent.current.can_keep_state,
            have_all_started=agent.current.have_all_started,
        )
        self.execute(agent, decide(view, self.rules))
        self.write_status(agent)

    def execute(self, agent: Agent, action: Action) -> None:
        if action.kind == "ask":
            agent.is_save_requested = True
        elif action.kind == "fail":
            standstill = self.now - self.last_step_times.get(agent.current.number, 0.0)
            was_told = any(word in action.reason for word in ("failed", "restarted", "have saved", "died"))
            assert was_told or standstill >= self.rules.loss_timeout, f"lost while steps advanced: {action.reason}"
            if self.rules.goes_on_in_place and not agent.current.obstacle:
                agent.current.begin_abort(action.reason, self.now)
            else:
                agent.state_step = None
                self.enter_phase(agent, AgentPhase.FAILED, Fault.NONE, action.reason)
        elif action.kind == "propose" and action.attempt and not agent.proposal:
            arrival = self.now + self.rng.choice([0.0, 0.0, TICK_SECONDS, 2 * TICK_SECONDS])
            agent.proposal = (arrival, agent.current.attempt, action.attempt)

    def follow_latest_attempt(self, agent: Agent) -> None:
        newest = self.newest_attempt()
        if newest is None or newest == agent.current.attempt:
            return
        goes_on = agent.current.can_go_on_in(newest, agent.id)
        has_died = goes_on and agent.state_step is None
        agent.state_step = agent.state_step if goes_on else None
        agent.current = AttemptState(attempt=newest, goes_on_in_place=goes_on, last_progress_time=self.now)
        agent.hangs = False
        agent.is_save_requested = False
        agent.report = None
        agent.trainer_exit = "own" if has_died else ""
        self.crashes |= {agent.name: self.crashes.get(agent.name, 0) + 1} if has_died else {}
        agent.proposal = None
        if not newest.members:
            self.end(agent)
        elif agent.id in newest.members:
            self.enter_phase(agent, AgentPhase.RUNNING)
        elif agent.leave_reason or agent.id in newest.left_out:
            self.end(agent)
        else:
            self.enter_phase(agent, AgentPhase.WARMING)

    def end(self, agent: Agent) -> None:
        self.enter_phase(agent, AgentPhase.ENDED)
        self.write_status(agent)
        agent.is_alive = False

    def check_trainers(self, agent: Agent) -> None:
        if agent.phase == "warming" and self.now - agent.phase_since >= START_SECONDS:
            self.enter_phase(agent, AgentPhase.SPARE)
        if agent.state_step is None:
            agent.current.kept_step = None
        if agent.phase != "running":
            return
        agent.current.note_progress(agent.report, self.now)
        if agent.current.has_made_steps and self.now - agent.phase_since > 2 * START_SECONDS:
            agent.current.is_standby_ready = True
        if agent.trainer_exit:
            phase = AgentPhase.SAVED if agent.trainer_exit == "saved" else AgentPhase.FAILED
            fault = Fault.OWN if agent.trainer_exit == "own" else Fault.NONE
            self.keep(agent, phase, fault, agent.trainer_exit)
        elif agent.current.abort_deadline and not agent.hangs:
            self.keep(agent, AgentPhase.FAILED, Fault.NONE, agent.current.abort_reason)
        elif agent.current.abort_deadline and self.now > agent.current.abort_deadline:
            agent.state_step = None
            self.enter_phase(agent, AgentPhase.FAILED, Fault.NONE, agent.current.abort_reason)

    def keep(self, agent: Agent, phase: AgentPhase, fault: Fault, reason: str) -> None:
        """End the attempt on a machine, whose trainers may keep their state."""
        keeps_state = self.rules.goes_on_in_place and fault == Fault.NONE and self.rng.random() < 0.8
        agent.state_step = agent.current.kept_step = agent.state_step if keeps_state else None
        self.enter_phase(agent, phase, fault, reason)

    def leave_when_safe(self, agent: Agent) -> None:
        if agent.leave_reason:
            must_wait = agent.phase in ("failed", "saved") or (
                agent.phase == "running" and (agent.current.has_made_steps or agent.current.is_handover)
            )
            if not must_wait or self.now - agent.notice_time > 30.0:
                self.end(agent)

    # --- the whole job -------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        newest = self.newest_attempt()
        return newest is not None and not newest.members

    def has_agreed(self) -> bool:
        """Return whether all living agents train in one attempt that is as large as possible, or are its spares.

        When too few are able to train, they wait.
        """
        newest = self.newest_attempt()
        living = [agent for name, agent in self.agents.items() if name not in self.gone_names]
        if newest is None or not all(agent.is_alive and agent.frozen_until <= self.now for agent in living):
            return False
        banned = {name for name, count in newest.fault_counts.items() if count >= 3}
        able = [agent for agent in living if agent.name not in banned]
        members = [agent for agent in living if agent.id in newest.members]
        rest = [agent for agent in living if agent.id not in newest.members]
        return len(able) < self.rules.min_size or (
            len(members) == len(newest.members) == min(self.rules.target_size, len(able))
            and all(agent.current.attempt == newest for agent in living)
            and all(agent.phase == "running" and agent.current.has_made_steps for agent in members)
            and all(agent.phase in ("spare", "warming") for agent in rest)
        )

    def run(self) -> None:
        agreed_since: float | None = None
        while self.now < FAULT_SECONDS + AGREEMENT_SECONDS and not self.is_over():
            self.now = round(self.now + TICK_SECONDS, 6)
            self.inject_faults()
            self.train()
            for agent in self.rng.sample(list(self.agents.values()), len(self.agents)):
                if agent.is_alive and agent.frozen_until <= self.now:
                    self.tick(agent)
            if self.now > FAULT_SECONDS:
                agreed_since = (agreed_since or self.now) if self.has_agreed() else None
                if agreed_since and self.now - agreed_since > 10.0:
                    return
        assert self.is_over(), "they do not agree"

    def describe(self) -> str:
        rows = [*self.attempts.values(), *self.agents.values()]
        return "\n  ".join([f"seed {self.seed}, {self.now:g} s, {self.rules}", *map(str, rows)])


@pytest.mark.parametrize("group", [0, 1, *(pytest.param(group, marks=pytest.mark.process) for group in range(2, 10))])
def test_simulated_agents_agree_on_living_members(group: int) -> None:
    ended = 0
    for seed in range(30 * group, 30 * group + 30):
        simulation = Simulation(seed)
        try:
            simulation.run()
            assert len(simulation.attempts) <= 2 * simulation.fault_count + len(simulation.rules.machine_names) + 4
        except AssertionError as error:
            raise AssertionError(f"{error}\n{simulation.describe()}") from None
        ended += simulation.is_over()
    assert ended < 15, "too many jobs end before their schedule has tested anything"


def test_simulation_without_faults_has_one_attempt() -> None:
    simulation = Simulation(1)
    simulation.inject_faults = lambda: None  # type: ignore[method-assign]
    simulation.run()
    assert len(simulation.attempts) == 1 and simulation.has_agreed()
    assert len(simulation.attempts[1].members) == simulation.rules.target_size
