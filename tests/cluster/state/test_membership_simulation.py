"""Hundreds of random schedules of kills, freezes, notices and crashes, in simulated time: the agents must agree.

Agents as agent.py has them, but for files and processes: statuses arrive late, attempts are exclusive by number, the
trainers of an attempt advance while all its members run them.
"""

import json
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.state.attempts import Attempt
from cluster.state.heartbeats import MachineStatus, PeerStatuses
from cluster.state.membership import Action, ClusterView, MembershipRules, decide

TICK, BEAT = 0.25, 0.5
TROUBLE, QUIET = 40.0, 150.0  # seconds with faults, and then without, in which all must have agreed
WARM = 1.0  # seconds to get ready, or for trainers to make their first step
LAUNCH = "this one"


class Texts:
    """The status folder: each file's texts and when they were written. A reader sees what is old enough."""

    def __init__(self) -> None:
        self.files: dict[str, list[tuple[float, str]]] = {}
        self.seen = 0.0

    def write(self, name: str, at: float, text: str) -> None:
        self.files.setdefault(f"{name}.json", []).append((at, text))

    def read(self, name: str, until: float) -> str:
        for at, text in reversed(self.files.get(name, [])):
            if at <= until:
                return text
        raise FileNotFoundError(name)


class Reader:
    """The same folder as one agent sees it, so many seconds late; stands in for a path."""

    def __init__(self, texts: Texts, delay: float) -> None:
        self.texts, self.delay, self.now = texts, delay, 0.0

    def __truediv__(self, name: str) -> Any:
        reader = self

        class File:
            def read_text(self) -> str:
                return reader.texts.read(name, reader.now - reader.delay)

        return File()


@dataclass
class Agent:
    """One start of a machine's agent."""

    id: str
    peers: PeerStatuses
    reader: Reader
    begun_at: float
    phase: str = "warming"
    since: float = 0.0
    attempt: Attempt | None = None
    at: int = -1
    warm: bool = False
    fault: str = ""
    reason: str = ""
    leaving: str = ""
    told: float = 0.0
    trained_at: float = 0.0
    pace: float = 0.0
    progressed: float = 0.0
    ticked: float = 0.0
    heard: float = -9.0
    beaten: float = -9.0
    said: Any = None
    frozen_until: float = 0.0
    frozen: float = 0.0  # seconds in all
    asked: bool = False
    exit: str = ""  # how its trainers have ended: "", "saved", "own", "peer"
    proposing: tuple[float, Attempt | None, Attempt] | None = None
    alive: bool = True

    @property
    def name(self) -> str:
        return self.id.partition(".")[0]


@dataclass
class World:
    """All machines, the shared folder and the schedule of one seed."""

    seed: int
    rng: random.Random = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        machines, spares = rng.randint(2, 4), rng.choice([0, 0, 1])
        names = tuple(map(str, range(machines + spares)))
        self.rules = MembershipRules(
            machine_names=names, target_size=machines, min_size=rng.choice([1, 1, 2]), heartbeat_timeout=2.5 if rng.random() < 0.7 else 1.5,
            loss_timeout=3.0, startup_loss_timeout=6.0, stall_timeout=20.0, startup_stall_timeout=30.0, orphan_timeout=20.0,
        )  # fmt: skip
        self.delays = {name: rng.choice([0.0, 0.0, 0.25, 0.75]) for name in names}
        self.texts, self.attempts = Texts(), dict[int, Attempt]()
        self.agents = {name: self.boot(name) for name in names}
        self.steps: dict[int, int] = {}
        self.events = 0
        self.crashes: dict[str, int] = {}
        self.back: dict[str, float] = {}
        self.gone: set[str] = set()  # for good
        self.stepped: dict[int, float] = {}  # when each attempt made its last step
        self.lives: list[Agent] = list(self.agents.values())

    def boot(self, name: str) -> Agent:
        reader = Reader(self.texts, self.delays[name])
        peers = PeerStatuses(Path("/nowhere"), self.rules.machine_names, LAUNCH)
        peers.status_folder = reader  # type: ignore[assignment]
        made = Agent(f"{name}.{self.rng.randrange(1 << 24):06x}", peers, reader, self.now)
        made.ticked = made.progressed = made.since = self.now
        return made

    # --- what happens to the machines ----------------------------------------------------------------------------

    def trouble(self) -> None:
        """Perhaps a kill, a freeze, a notice or a crash; the dead come back after a while."""
        for name, at in list(self.back.items()):
            if self.now >= at:
                del self.back[name]
                self.agents[name] = self.boot(name)
                self.lives.append(self.agents[name])
        for name, one in self.agents.items():
            if not one.alive and name not in self.back and name not in self.gone:
                enough = len(self.rules.machine_names) - len(self.gone) > self.rules.min_size
                if self.attempts and enough and self.rng.random() < 0.2:
                    self.gone.add(name)
                else:
                    self.back[name] = self.now + self.rng.uniform(0.5, 12.0)
        if self.now > TROUBLE or self.rng.random() > TICK / 5:
            return
        self.events += 1
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            one = self.rng.choice([one for one in self.agents.values()])
            kind = self.rng.choice(["kill", "kill", "freeze", "notice", "crash", "peer"])
            if kind == "kill":
                one.alive = False
            elif kind == "freeze":
                seconds = self.rng.uniform(0.5, 15.0)
                one.frozen_until, one.frozen = self.now + seconds, one.frozen + seconds
            elif kind == "notice" and not one.leaving:
                one.leaving, one.told = "a notice", self.now
            elif kind == "crash" and one.phase == "running" and self.crashes.get(one.name, 0) < 2:
                self.crashes[one.name] = self.crashes.get(one.name, 0) + 1
                one.exit = "own"
            elif kind == "peer" and one.phase == "running":
                one.exit = "peer"

    def train(self) -> None:
        """Let the trainers of each attempt make a step, where all its members run them."""
        for number, attempt in self.attempts.items():
            team = [one for one in self.lives if one.id in attempt.members]
            if len(team) < len(attempt.members) or not attempt.members:
                continue
            at_work = [one for one in team if one.alive and one.phase == "running" and one.frozen_until <= self.now]
            at_work = [one for one in at_work if one.attempt == attempt and not one.exit]
            if len(at_work) < len(team) or any(self.now - one.since < WARM for one in team):
                continue
            self.steps[number], self.stepped[number] = self.steps.get(number, attempt.crash_step) + 1, self.now
            if any(one.asked for one in team):
                for one in team:
                    one.exit = "saved"
            for one in team:
                one.trained_at, one.at = self.now, self.steps[number]

    # --- an agent ------------------------------------------------------------------------------------------------

    def enter(self, one: Agent, phase: str, fault: str = "", reason: str = "") -> None:
        one.phase, one.fault, one.reason, one.since = phase, fault, reason, self.now

    def word(self, one: Agent) -> MachineStatus:
        return MachineStatus(
            id=one.id, attempt=one.attempt.number if one.attempt else 0, phase=one.phase, last_step=one.at, is_standby_ready=one.warm,
            leave_reason=one.leaving, fault=one.fault, reason=one.reason,
        )  # fmt: skip

    def say(self, one: Agent) -> None:
        word = self.word(one)
        news = (word.phase, word.attempt, word.leave_reason, word.fault)
        if news == one.said and self.now - one.beaten < BEAT:
            return
        one.said, one.beaten = news, self.now
        self.texts.write(one.name, self.now, json.dumps({**asdict(word), "launch": LAUNCH, "time": self.now}))

    def newest(self) -> Attempt | None:
        return self.attempts[max(self.attempts)] if self.attempts else None

    def publish(self, one: Agent, known: Attempt | None, attempt: Attempt) -> None:
        """As attempts.propose: nothing when somebody was faster."""
        newest = self.newest()
        if newest != known:
            return
        number = newest.number + 1 if newest else 1
        assert number not in self.attempts
        self.judge(one, attempt)
        self.attempts[number] = replace(attempt, number=number, proposer=one.id)

    def judge(self, proposer: Agent, attempt: Attempt) -> None:
        """Every member spoke a moment ago, but for the time in which the proposer itself was frozen."""
        recent = self.rules.heartbeat_timeout + max(self.delays.values()) + 4 * TICK + 0.5 + proposer.frozen
        for member in attempt.members:
            (life,) = [one for one in self.lives if one.id == member]
            last = max(at for at, text in self.texts.files[f"{life.name}.json"] if member in text)
            assert self.now - last <= recent, f"{member} was silent for {self.now - last} s"
        if attempt.end_state == "failed":
            healthy = [one for one in self.agents.values() if one.alive and not one.leaving]
            assert self.crashes or len(healthy) < self.rules.min_size, f"ended: {attempt.reason}"
        if attempt.end_state == "stopped":
            assert proposer.leaving

    def live(self, one: Agent) -> None:
        """One turn of Agent.live."""
        gap, one.ticked = self.now - one.ticked, self.now
        if gap > 1.0:
            one.peers.discount_pause(gap)
            one.progressed += gap
        one.reader.now = self.now
        if one.phase in ("failed", "saved") or self.now - one.heard > BEAT / 2:
            one.heard = self.now
            one.peers.refresh(self.now)
        if one.proposing and self.now >= one.proposing[0]:
            self.publish(one, *one.proposing[1:])
            one.proposing = None
        self.obey(one)
        if one.alive:
            self.attend(one)
            self.leave(one)
        if not one.alive:
            return
        one.peers.statuses[one.id], one.peers.changed_at[one.id] = self.word(one), self.now
        told = one.leaving and self.now - one.told > 7.5
        view = ClusterView(
            own_id=one.id, phase=one.phase, attempt=one.attempt, statuses=one.peers.statuses, status_ages=one.peers.ages(self.now),
            seen_changing=one.peers.seen_changing, seconds_without_progress=self.now - one.progressed,
            seconds_in_phase=self.now - one.since, longest_progress_gap=one.pace, is_deadline_near=bool(told),
        )  # fmt: skip
        self.act(one, decide(view, self.rules))
        self.say(one)

    def act(self, one: Agent, action: Action) -> None:
        if action.kind == "ask":
            one.asked = True
        elif action.kind == "fail":
            assert one.attempt
            still = self.now - self.stepped.get(one.attempt.number, 0.0)
            told = any(word in action.reason for word in ("failed", "restarted", "have saved"))
            assert told or still >= self.rules.loss_timeout, f"lost while steps advanced: {action.reason}"
            self.enter(one, "failed", "", action.reason)
        elif action.kind == "propose" and action.attempt and not one.proposing:
            one.proposing = (self.now + self.rng.choice([0.0, 0.0, TICK, 2 * TICK]), one.attempt, action.attempt)

    def obey(self, one: Agent) -> None:
        newest = self.newest()
        if newest is None or newest == one.attempt:
            return
        one.attempt, one.at, one.pace, one.warm, one.asked, one.exit, one.proposing = (
            newest,
            -1,
            0.0,
            False,
            False,
            "",
            None,
        )
        one.trained_at = 0.0
        if not newest.members:
            self.end(one)
        elif one.id in newest.members:
            one.progressed = self.now
            self.enter(one, "running")
        elif one.leaving:
            self.end(one)
        else:
            self.enter(one, "warming")

    def end(self, one: Agent) -> None:
        self.enter(one, "ended")
        self.say(one)
        one.alive = False

    def attend(self, one: Agent) -> None:
        if one.phase == "warming" and self.now - one.since >= WARM:
            self.enter(one, "spare")
        if one.phase != "running":
            return
        if one.trained_at > one.progressed:
            one.pace = max(one.pace, one.trained_at - one.progressed) if one.at >= 0 and one.warm else 0.0
            one.progressed = one.trained_at
        if one.at >= 0:
            one.warm = one.warm or self.now - one.since > 2 * WARM
        if one.exit:
            self.enter(
                one, "saved" if one.exit == "saved" else "failed", one.exit if one.exit == "own" else "", one.exit
            )

    def leave(self, one: Agent) -> None:
        if one.leaving:
            waiting = one.phase in ("failed", "saved") or (one.phase == "running" and one.at >= 0)
            if not waiting or self.now - one.told > 30.0:
                self.end(one)

    # --- the whole -----------------------------------------------------------------------------------------------

    def over(self) -> bool:
        newest = self.newest()
        return newest is not None and not newest.members

    def settled(self) -> bool:
        """All living agents train in one attempt of living machines, as many as there may be, or wait beside it."""
        newest, living = self.newest(), [one for name, one in self.agents.items() if name not in self.gone]
        if newest is None or not all(one.alive and one.frozen_until <= self.now for one in living):
            return False
        banned = {name for name, count in newest.fault_counts.items() if count >= 3}
        able = [one for one in living if one.name not in banned]
        team = [one for one in living if one.id in newest.members]
        rest = [one for one in living if one.id not in newest.members]
        return (
            len(team) == len(newest.members) == min(self.rules.target_size, len(able))
            and all(one.attempt == newest for one in living)
            and all(one.phase == "running" and one.at >= 0 for one in team)
            and all(one.phase in ("spare", "warming") for one in rest)
        )

    def run(self) -> None:
        calm_since: float | None = None
        while self.now < TROUBLE + QUIET and not self.over():
            self.now = round(self.now + TICK, 6)
            self.trouble()
            self.train()
            for one in self.rng.sample(list(self.agents.values()), len(self.agents)):
                if one.alive and one.frozen_until <= self.now:
                    self.live(one)
            if self.now > TROUBLE:
                calm_since = (calm_since or self.now) if self.settled() else None
                if calm_since and self.now - calm_since > 10.0:
                    return
        assert self.over(), self.picture()

    def picture(self) -> str:
        lines = [f"seed {self.seed}, {self.now:g} s, want {self.rules.target_size}, least {self.rules.min_size}"]
        lines += [
            f"  attempt {one.number} by {one.proposer}: {one.members} {one.end_state} {one.reason}"
            for one in self.attempts.values()
        ]
        for one in self.agents.values():
            number = one.attempt.number if one.attempt else 0
            lines.append(
                f"  {one.id}: alive {one.alive}, {one.phase} of {number}, at {one.at}, {one.reason} {one.leaving}"
            )
        return "\n".join(lines)


@pytest.mark.parametrize("group", range(10))
def test_simulated_agents_agree_on_living_members(group: int) -> None:
    ended = 0
    for seed in range(30 * group, 30 * group + 30):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{world.picture()}") from None
        assert len(world.attempts) <= 4 * world.events + len(world.rules.machine_names) + 4, world.picture()
        ended += world.over()
    assert ended < 15, "too many schedules end before they are worth anything"


def test_simulation_without_faults_has_one_attempt() -> None:
    world = World(1)
    world.trouble = lambda: None  # type: ignore[method-assign]
    world.run()
    assert len(world.attempts) == 1 and world.settled()
    assert len(world.attempts[1].members) == world.rules.target_size


@pytest.mark.parametrize("broken", ["nobody is ever lost", "the silent are members", "a silent one is lost at once"])
def test_simulation_detects_broken_rules(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would say of other rules."""
    right = decide

    def wrong(view: ClusterView, rules: MembershipRules) -> Action:
        if broken == "nobody is ever lost":
            return right(replace(view, seconds_without_progress=0.0), rules)
        if broken == "the silent are members":
            found = right(view, rules)
            if found.attempt and found.attempt.members and view.attempt:
                return replace(found, attempt=replace(found.attempt, members=view.attempt.members))
            return found
        silent = [one for one in (view.attempt.members if view.attempt else ()) if view.status_ages.get(one, 9) > 1.0]
        return Action(kind="fail") if silent and view.phase == "running" else right(view, rules)

    monkeypatch.setitem(globals(), "decide", wrong)
    with pytest.raises(AssertionError):
        for group in range(5):
            test_simulated_agents_agree_on_living_members(group)
