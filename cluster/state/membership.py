"""Who trains next: pure decisions from what one agent knows. No files, no clock, no processes.

While steps advance nobody is lost: training is synchronous, so progress is everyone's heartbeat. Silence counts only
when trainers have failed or stand still; then the members that still speak make the next attempt, the first of them at
once, each later one half a second after the one before it, in case those are dead.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .attempts import Attempt
from .heartbeats import Word

CRASHES = 3  # by the same members at the same step, or by one machine's own fault


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What was asked of the job; seconds. `want` machines to start with and to grow back to, `least` to go on with."""

    names: tuple[str, ...]
    want: int
    least: int = 1
    silence: float = 2.5  # without a new word from a machine
    lost: float = 5.0  # without progress, and some member is silent
    early: float = 15.0  # the same, before the first step of an attempt
    stall: float = 120.0  # without progress, though all speak
    late: float = 300.0  # the same, before the first step
    orphaned: float = 60.0  # all members silent, a spare alone: they may only have lost the shared folder
    turn: float = 0.5
    rented: bool = False  # who leaves is replaced by others, also when all leave at once


@dataclass(frozen=True, kw_only=True)
class View:
    """What one agent knows. Ages and `quiet`, `down` in seconds; `pace` is the longest it ever was quiet in this
    attempt and went on; `hurry`: this machine has been told to leave, and has no time to wait for a better moment.
    `moving`: whose words we saw change; None: all. A word that was found once may be of a machine that is long dead.
    """

    me: str
    phase: str
    attempt: Attempt | None
    words: Mapping[str, Word]
    ages: Mapping[str, float]
    quiet: float = 0.0
    down: float = 0.0
    pace: float = 0.0
    hurry: bool = False
    moving: Collection[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Action:
    """What to do: "nothing", "ask" the trainers to save and end, "fail" them, or "propose" an attempt.

    `stacks`: they stand still, and should write down where.
    """

    do: str = "nothing"
    reason: str = ""
    stacks: bool = False
    attempt: Attempt | None = field(default=None)


NOTHING = Action()


def decide(view: View, rules: Rules) -> Action:
    """Return what this agent has to do now."""
    attempt = view.attempt
    if attempt is None:
        return _gather(view, rules)
    if view.me not in attempt.members:
        return _outside(view, rules, attempt)
    if view.phase == "running":
        return _running(view, rules, attempt)
    if view.phase in ("failed", "saved"):
        return _next(view, rules, attempt)
    return NOTHING


def fresh(view: View, rules: Rules, one: str) -> bool:
    """Whether a machine speaks."""
    heard = one in view.ages and (view.moving is None or one in view.moving)
    return one == view.me or (heard and view.ages[one] < rules.silence)


def spares(view: View, rules: Rules) -> list[str]:
    """Return the machines that are ready and in no attempt, by number; none that failed by itself again and again."""
    members = view.attempt.members if view.attempt else ()
    faults = view.attempt.faults if view.attempt else {}
    found = [
        one
        for one, word in view.words.items()
        if word.phase == "spare" and not word.leaving and one not in members and fresh(view, rules, one)
    ]
    return sorted((one for one in found if faults.get(_name(one), 0) < CRASHES), key=_number)


def _name(one: str) -> str:
    return one.partition(".")[0]


def _number(one: str) -> tuple[int, str]:
    return int(_name(one)), one


def _gather(view: View, rules: Rules) -> Action:
    """Before the first attempt: wait until all are ready, or cannot be."""
    ready = spares(view, rules)
    if view.me not in ready:
        return NOTHING
    dead = [word for word in view.words.values() if word.phase == "ended" and word.state == "failed"]
    if len(rules.names) - len(dead) < rules.want:
        why = "; ".join(f"machine {word.name}: {word.reason}" if rules.want > 1 else word.reason for word in dead)
        return _propose(view, ready, Attempt(state="failed", reason=why), rules)
    if len(ready) < rules.want and not _enough_for_now(view, rules, ready):
        return NOTHING
    return _propose(view, ready, Attempt(members=tuple(ready[: rules.want]), reason="start"), rules)


def _enough_for_now(view: View, rules: Rules, ready: list[str]) -> bool:
    """Whether to begin with fewer: they have waited for long, and nobody else is on the way."""
    coming = [
        one
        for one, word in view.words.items()
        if one not in ready and word.phase != "ended" and fresh(view, rules, one)
    ]
    return len(ready) >= rules.least and not coming and view.down > rules.orphaned


def _outside(view: View, rules: Rules, attempt: Attempt) -> Action:
    """A spare: it takes over only when the members have all been silent for long."""
    ready = spares(view, rules)
    if view.me not in ready or not attempt.members:
        return NOTHING
    silent = min(view.ages.get(one, rules.orphaned) for one in attempt.members)
    ended = all(one in view.words and view.words[one].phase == "ended" for one in attempt.members)
    if (silent < rules.orphaned and not ended) or len(ready) < rules.least:
        return NOTHING
    following = Attempt(
        members=tuple(ready[: rules.want]), reason="all members were lost",
        faults=attempt.faults,
    )  # fmt: skip
    return _propose(view, ready, following, rules)


def _running(view: View, rules: Rules, attempt: Attempt) -> Action:
    """Our trainers are at work: do they have to end?"""
    peers = {one: view.words[one] for one in attempt.members if one in view.words and one != view.me}
    phases = {one: word.phase for one, word in peers.items() if word.attempt == attempt.number}
    gone = [one for one in attempt.members if one != view.me and one not in peers]
    down = [one for one, phase in phases.items() if phase in ("failed", "ended")]
    if down:
        return Action(do="fail", reason=f"{_machines(down)} failed", stacks=view.quiet > rules.lost)
    if gone and any(_name(one) in map(_name, view.words) for one in gone):
        return Action(do="fail", reason=f"{_machines(gone)} started anew")
    if "saved" in phases.values() and view.quiet > rules.lost:
        return Action(do="fail", reason="the others have saved and ended")
    silent = [one for one in attempt.members if not fresh(view, rules, one)]
    me = view.words.get(view.me)
    begun = me is not None and me.at >= 0
    patience = (rules.lost if begun else rules.early) if silent else (rules.stall if begun else rules.late)
    if view.quiet > max(patience, 3 * view.pace):
        why = f"{_machines(silent)} silent" if silent else "nobody silent"
        return Action(do="fail", reason=f"no progress for {view.quiet:.0f} s, {why}", stacks=not silent)
    calm = begun and all(one in view.words and view.words[one].warm for one in attempt.members)
    if me and me.leaving and (calm or view.hurry or len(attempt.members) == 1):
        return Action(do="ask", reason=f"{_machines([view.me])} leaving")
    joining = spares(view, rules) if calm and len(attempt.members) < rules.want else []
    if joining:
        return Action(do="ask", reason=f"{_machines(joining)} joins")
    return NOTHING


def _next(view: View, rules: Rules, attempt: Attempt) -> Action:
    """Our trainers have ended: propose the next attempt once all that speak are as far."""
    here = [one for one in attempt.members if one in view.words and fresh(view, rules, one)]
    said = {one: view.words[one] for one in here}
    for one, word in said.items():
        if word.attempt != attempt.number or (one != view.me and word.phase in ("warming", "spare", "running")):
            return NOTHING
    here = [one for one in here if said[one].phase in ("failed", "saved")]
    return _propose(view, here, following(view, rules, attempt, here), rules)


def following(view: View, rules: Rules, attempt: Attempt, here: list[str]) -> Attempt | None:
    """Return the attempt after this one, without members when the job must end; None while there are too few."""
    said = {one: view.words[one] for one in here}
    final = [word for word in said.values() if word.fault == "final"]
    if final:
        return Attempt(state="failed", reason=final[0].reason)
    own = [word for word in said.values() if word.fault == "own"]
    faults = dict(attempt.faults)
    for word in own:
        faults[word.name] = faults.get(word.name, 0) + 1
    step = max((word.at for word in said.values()), default=-1)
    crashes = 0
    if len(here) == len(attempt.members) and any(word.phase == "failed" for word in said.values()):
        crashes = 1 + (attempt.crashes if attempt.step == step else 0)
    why = "; ".join(f"machine {word.name}: {word.reason}" if rules.want > 1 else word.reason for word in own)
    if crashes >= CRASHES:
        why = why or next((word.reason for word in said.values() if word.phase == "failed"), "")
        return Attempt(state="failed", reason=f"{why} ({CRASHES} times at step {max(step, 0)})")
    leaving = [word for word in said.values() if word.leaving]
    banned = {name for name, count in faults.items() if count >= CRASHES}
    stay = [one for one in here if not said[one].leaving and _name(one) not in banned]
    joining = [one for one in spares(view, rules) if one not in stay][: max(0, rules.want - len(stay))]
    members = tuple(stay + joining)
    lost = [one for one in attempt.members if one not in here]
    if not members:
        if leaving and not banned:
            return Attempt(state="left" if rules.rented else "stopped", reason=leaving[0].leaving)
        return Attempt(state="failed", reason=f"{why} ({CRASHES} times)")
    if len(members) < rules.least:
        return None
    parts = [why] if why else []
    parts += [f"{_machines(lost)} lost"] if lost else []
    parts += [f"{_machines([one.id for one in leaving])} left"] if leaving else []
    parts += [f"{_machines(joining)} joined"] if joining else []
    first = next((word.reason for word in said.values() if word.phase == "failed"), "")
    reason = "; ".join(parts) or first
    return Attempt(members=members, reason=reason, step=step, crashes=crashes, faults=faults)


def _propose(view: View, proposers: list[str], attempt: Attempt | None, rules: Rules) -> Action:
    """Propose when it is our turn; those before us may be faster."""
    if attempt is None or view.me not in proposers or view.down < rules.turn * proposers.index(view.me):
        return NOTHING
    return Action(do="propose", attempt=attempt)


def _machines(ids: list[str]) -> str:
    """Return "machine 2" or "machines 1, 2"."""
    names = [_name(one) for one in sorted(ids, key=_number)]
    return f"machine{'s' * (len(names) > 1)} {', '.join(names)}"
