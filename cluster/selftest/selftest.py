"""Runs a self-test: all steps that do not need a failed one, and in any case the last, which removes everything."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from cluster.errors import ClusterError, NoCloudAccess
from train.tools.host import git_commit

from .report import Observation, SelftestReport, StepResult, StepState
from .session import JobRequest, SelftestSession
from .steps import JOB_REQUESTS, LAST_STEP, STEPS, Part, Step, end_jobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExpectedCost:
    """What a job of the self-test is expected to cost. `dollars` is None where `problem` says why that is unknown."""

    request: JobRequest
    machines: str
    dollars: float | None
    problem: str = ""


def expected_costs(session: SelftestSession) -> list[ExpectedCost]:
    """Return what each job is expected to cost, at today's prices. Raises `NoCloudAccess`."""
    costs = []
    for request in JOB_REQUESTS:
        type_name = session.settings.large_type if request.is_large else session.settings.small_type
        machines = f"{request.machines} x {type_name}"
        try:
            plan = session.plan(request)
            assert plan.rental_plan
            rate = plan.rental_plan.dollars_per_hour
            dollars = None if rate is None else rate * request.minutes / 60
            cost = ExpectedCost(request=request, machines=f"{machines}, {plan.rental_plan.market}", dollars=dollars)
        except NoCloudAccess:
            raise
        except ClusterError as error:
            cost = ExpectedCost(request=request, machines=machines, dollars=None, problem=str(error))
        costs.append(cost)
    return costs


def run_selftest(session: SelftestSession, tell: Callable[[str], object]) -> SelftestReport:
    """Run all steps and return their report. `tell` is called with a line for the user before each step.

    Ctrl-C ends the present step, and what was rented is removed. Raises `ClusterError`, `OSError` when the session
    cannot begin.
    """
    started = time.time()
    session.begin()
    results: list[StepResult] = []
    try:
        for step in STEPS:
            tell(f"step {len(results) + 1} of {len(STEPS) + 1}: {step.title}")
            results.append(_run_step(session, step))
            if results[-1].state is StepState.INTERRUPTED:
                break
    finally:
        tell(f"step {len(STEPS) + 1} of {len(STEPS) + 1}: {LAST_STEP.title}")
        results.append(_run_step(session, LAST_STEP))
    return SelftestReport(
        cloud=session.cloud.backend,
        region=session.settings.region,
        started=datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=git_commit(),
        seconds=time.time() - started,
        dollars=session.spent_dollars,
        max_dollars=session.settings.max_dollars,
        steps=tuple(results),
    )


def _run_step(session: SelftestSession, step: Step) -> StepResult:
    """Run the parts of a step. One that fails does not keep the others from running, nor its machines."""
    start, dollars_before = time.monotonic(), session.spent_dollars
    observations: list[Observation] = []
    is_skipped = step.needs_stack and not session.has_stack
    state = StepState.SKIPPED if is_skipped else StepState.PASSED
    if is_skipped:
        observations.append(Observation(what="it needs the stack", is_right=False, seen="step 1 did not make it"))
    try:
        for part in () if is_skipped else step.parts:
            for observation in _observe(session, part):
                logger.info("%s: %s", observation.what, observation.seen)
                observations.append(observation)
    except KeyboardInterrupt:
        state = StepState.INTERRUPTED
        observations.append(Observation(what="the step runs to its end", is_right=False, seen="interrupted"))
    if state is StepState.PASSED and not all(observation.is_right for observation in observations):
        state = StepState.FAILED
    return StepResult(
        title=step.title,
        state=state,
        seconds=time.monotonic() - start,
        dollars=session.spent_dollars - dollars_before,
        observations=tuple(observations),
    )


def _observe(session: SelftestSession, part: Part) -> Iterator[Observation]:
    """Yield what a part of a step sees, and end its jobs. An error becomes an observation."""
    for action in (part, end_jobs):
        try:
            yield from action(session)
        except Exception as error:  # a bug must not keep the next part from running, and the user from its report
            if not isinstance(error, ClusterError):
                logger.exception("an unexpected error; the self-test goes on")
            what = action.__name__.replace("_", " ")
            yield Observation(what=what, is_right=False, seen=f"{type(error).__name__}: {error}")
