"""A self-test on a cloud: all steps that do not need a failed one, and in any case the last, which removes everything.

Each part of a step yields what it sees; an exception ends only this part.

The parts try what a simulation cannot show: permissions, images, the boot, public addresses of machines with several
network cards, a NAT gateway, the limits on the machines, the names of spot machines, and what is left at the end.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from cluster.errors import ClusterError
from cluster.jobs import billing
from cluster.jobs.job import Job
from cluster.state.states import JobState
from infra.aws.instances.instances import Instance
from train.tools.agent_protocol import CHECKPOINTS_FOLDER
from train.tools.host import git_commit

from .report import Observation, SelftestReport, StepResult, StepState
from .session import JobRequest, SelftestSession, describe_end

logger = logging.getLogger(__name__)

Part = Callable[[SelftestSession], Iterator[Observation]]
POWEROFF_SECONDS = 30  # the limit that a machine is given, to see it power off
INTERRUPTION_SECONDS = 600.0  # within which the user interrupts a machine, and EC2 ends it
POWEROFF_SEEN_SECONDS = 300.0  # within which the cloud must show that

# The shares add up to 1. `minutes` are estimates: about six of boot and set-up, and the work.
ONE_MACHINE = JobRequest(title="one machine powers off at its limit", machines=1, minutes=10, dollar_share=0.05)
FAILING_BOOT = JobRequest(
    title="a boot that fails, for lack of internet", minutes=12, dollar_share=0.08, internet="none"
)
SPOT_PAIR = JobRequest(title="a spot machine is lost and replaced", minutes=15, dollar_share=0.08, market="spot")
NAT_PAIR = JobRequest(
    title="two machines behind a NAT gateway", minutes=10, dollar_share=0.08, internet="nat", epochs=3
)
LARGE_PAIR = JobRequest(
    title="two machines with several network cards", minutes=9, dollar_share=0.71, market="spot-then-on-demand",
    is_large=True,
)  # fmt: skip
JOB_REQUESTS = (ONE_MACHINE, FAILING_BOOT, SPOT_PAIR, NAT_PAIR, LARGE_PAIR)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the self-test: parts that do not need each other."""

    title: str
    parts: tuple[Part, ...]
    needs_stack: bool = True


def check_account(session: SelftestSession) -> Iterator[Observation]:
    """Check permissions, quotas, types and image, create the stack, and check again with the very request."""
    yield _check_launch(session, "before the stack: permissions, quotas, types, image")
    yield Observation("the stack can be created", True, session.cloud.ensure_stack(session.region, None, None))
    session.has_stack = True
    missing_parts = session.cloud.missing_stack_parts(session.region)
    yield Observation("nothing of the stack is missing", not missing_parts, "; ".join(missing_parts) or "complete")
    yield _check_launch(session, "with the stack: the request of a launch")


def _check_launch(session: SelftestSession, what: str) -> Observation:
    types = (session.small_type, session.large_type)
    findings = session.cloud.check_launch(session.region, types, 2, "spot-then-on-demand")
    errors = [finding.what for finding in findings if finding.level == "error"]
    warnings = [finding.what for finding in findings if finding.level == "warning"]
    return Observation(what, not errors, "; ".join([*errors, *warnings]) or f"{len(findings)} checks passed")


def power_off_one_machine(session: SelftestSession) -> Iterator[Observation]:
    """Train on one on-demand machine, set its time limit to half a minute, and see it power off and end."""
    job = session.launch(ONE_MACHINE)
    session.wait_for_training(job)
    yield Observation("a machine boots, mounts the file system and trains", True, _start(job))
    (machine,) = session.machines(job)
    yield Observation("it has a public address", bool(machine.public_ip), f"{machine.type} in {machine.zone}")
    session.run_on_machine(job, machine.name, ["sudo", "-n", "imgnet-limit", str(POWEROFF_SECONDS)])
    session.wait_until(lambda: not session.machines(job), POWEROFF_SEEN_SECONDS, "the machine powers off")
    reasons = {row.end_reason for row in session.all_machines(job)}
    has_powered_off = all("InstanceInitiated" in reason for reason in reasons)
    yield Observation("a machine powers itself off at its limit", has_powered_off, ", ".join(reasons))
    end = session.wait_for_end(job)
    yield Observation("the job then ends and rents no other", job.state == JobState.STOPPED, end)


def read_reason_of_failed_boot(session: SelftestSession) -> Iterator[Observation]:
    """Launch two machines, of which one has no way to the internet although it needs one."""
    job = session.launch(FAILING_BOOT)
    end = session.wait_for_end(job)
    yield Observation("a boot that fails says why", job.state == JobState.FAILED and "boot failed: " in end, end)
    consoles = [path.name for path in job.path.glob("console-*.log")]
    yield Observation("the console of the machine is kept", bool(consoles), ", ".join(consoles) or "none")


def replace_lost_machine(session: SelftestSession) -> Iterator[Observation]:
    """Train on two spot machines, lose one, see it replaced, and stop."""
    job = session.launch(SPOT_PAIR)
    session.wait_for_training(job)
    machines = session.machines(job)
    indexes = ", ".join(str(machine.launch_index) for machine in machines)
    have_names = [machine.name for machine in machines] == ["0", "1"]
    yield Observation(
        "two spot machines have names of their own", have_names, f"launch indexes {indexes}; {_start(job)}"
    )
    are_together = len({(machine.zone, machine.placement_group) for machine in machines}) == 1
    place = f"{machines[0].zone}, {'a group' if machines[0].placement_group else 'no group'}"
    yield Observation("they are in one zone and one placement group", are_together, place)
    attempt = job.last_attempt_number
    job.kill_machine("1")
    session.wait_for_training(job, after_attempt=attempt)
    pauses = ", ".join(f"{row.pause:.0f}" for row in job.timeline() if row.pause is not None)
    yield Observation("a lost machine is replaced and joins", True, f"pauses of {pauses} s")
    transport = _transport(job)
    yield Observation("the log names the transport", bool(transport), "; ".join(transport) or "it names none")
    files = f"~/.imgnet/shared/{job.spec.uid}/{CHECKPOINTS_FOLDER}/*/step-*"
    session.run_on_machine(job, "1", ["timeout", "50", "sh", "-c", f"until ls {files}; do sleep 1; done"])
    yield Observation("the new machine sees a checkpoint in the shared folder", True, files)
    if session.ask:
        yield from _see_interruption(session, job, session.ask)
    yield _stop(session, job)


def _see_interruption(session: SelftestSession, job: Job, ask: Callable[[str], object]) -> Iterator[Observation]:
    """Ask the user to interrupt a spot machine; check that it leaves at EC2's notice and is replaced."""
    ids = {machine.id for machine in session.machines(job)}
    attempt = job.last_attempt_number

    def ended() -> list[Instance]:
        return [machine for machine in session.all_machines(job) if machine.id in ids and not machine.is_billed]

    ask(
        f"interrupt {' or '.join(sorted(ids))} within {INTERRUPTION_SECONDS / 60:.0f} minutes: "
        "EC2 console, Spot Requests, Actions, Initiate interruption"
    )
    session.wait_until(lambda: bool(ended()), INTERRUPTION_SECONDS, "a machine is interrupted by hand")
    session.wait_for_training(job, after_attempt=attempt)
    reasons = [row.reason for row in job.timeline() if row.attempt > attempt]
    has_left = any(part.endswith(" left") for part in reasons[0].split("; "))
    seen = "; ".join([*reasons, *(machine.end_reason for machine in ended())])
    yield Observation("a spot machine that is interrupted leaves at the notice and is replaced", has_left, seen)


def train_behind_nat_gateway(session: SelftestSession) -> Iterator[Observation]:
    """Train on two machines behind a NAT gateway until the job is done. One is the ssh jump host of the other."""
    job = session.launch(NAT_PAIR)
    end = session.wait_for_end(job)
    yield Observation("machines behind a NAT gateway train to the end", job.state == JobState.DONE, end)
    dollars = billing.cost_report(job).cost.nat_dollars
    yield Observation("the gateway was there and is counted", dollars > 0, f"${dollars:.3f}")


def use_several_network_cards(session: SelftestSession) -> Iterator[Observation]:
    """Train on two machines with several network cards each, which get public addresses after their launch."""
    job = session.launch(LARGE_PAIR)
    session.wait_for_training(job)
    machines = session.machines(job)
    with_address = sum(bool(machine.public_ip) for machine in machines)
    seen = f"{with_address} of {len(machines)} {machines[0].type}, {machines[0].market}; {_start(job)}"
    what = "machines with several network cards get public addresses"
    yield Observation(what, with_address == len(machines), seen)
    transport = _transport(job)
    is_efa_used = bool(transport) and not any("EFA" in line for line in transport)
    seen = "; ".join(transport) or "the log names no transport"
    yield Observation("the machines talk over EFA where they have it", is_efa_used, seen)
    yield _stop(session, job)


def _transport(job: Job) -> list[str]:
    """Return the lines of a job's log that say how its processes talk."""
    log = job.log_path()
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line for line in lines if " processes, by " in line or "THIS MACHINE HAS EFA" in line]


def _start(job: Job) -> str:
    rows = job.machine_details().values()
    slowest = max((row.seconds for row in rows), key=lambda seconds: sum(seconds.values()), default={})
    steps = [f"{step} {seconds:.0f} s" for step, seconds in slowest.items() if seconds >= 1]
    return f"start: {', '.join(steps) or 'less than a second'}"


def _stop(session: SelftestSession, job: Job) -> Observation:
    job.stop()
    live_count = len(session.machines(job))
    has_ended = job.state == JobState.STOPPED and not live_count
    return Observation("stop saves, ends and terminates", has_ended, f"{describe_end(job)}, {live_count} machines left")


def end_jobs(session: SelftestSession) -> Iterator[Observation]:
    """Terminate the jobs that are still at work, because their part of a step failed."""
    for job in session.jobs:
        if not job.has_ended:
            billing.terminate_job(job)
            yield Observation(f"{job.name} ends by itself", False, "it was terminated")


def remove_everything(session: SelftestSession) -> Iterator[Observation]:
    """Terminate what is left, remove the stack if the self-test made it, and look for anything that is billed."""
    leftovers = session.remove_everything()
    yield Observation("everything can be removed", not leftovers, "; ".join(leftovers) or "removed")
    leftovers = session.describe_leftovers()
    yield Observation("nothing is left of the jobs", not leftovers, "; ".join(leftovers) or "nothing")


STEPS = (
    Step(title="account, permissions and stack", parts=(check_account,), needs_stack=False),
    Step(title="one machine on demand", parts=(power_off_one_machine, read_reason_of_failed_boot)),
    Step(
        title="two spot machines, and two behind a NAT gateway", parts=(replace_lost_machine, train_behind_nat_gateway)
    ),
    Step(title="two machines with several network cards", parts=(use_several_network_cards,)),
)
LAST_STEP = Step(title="nothing is left", parts=(remove_everything,), needs_stack=False)  # also after Ctrl-C


def run_selftest(session: SelftestSession, tell: Callable[[str], object]) -> SelftestReport:
    """Run all steps and return their report. `tell` is called with a line for the user before each step.

    Ctrl-C ends the present step, and what was rented is removed. Raises as `SelftestSession.begin` does.
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
        region=session.region,
        started=datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=git_commit(),
        seconds=time.time() - started,
        dollars=session.spent_dollars,
        max_dollars=session.max_dollars,
        steps=tuple(results),
    )


def _run_step(session: SelftestSession, step: Step) -> StepResult:
    """Run the parts of a step. One that fails does not keep the others from running, nor its machines."""
    start, dollars_before = time.monotonic(), session.spent_dollars
    observations: list[Observation] = []
    is_skipped = step.needs_stack and not session.has_stack
    state = StepState.SKIPPED if is_skipped else StepState.PASSED
    if is_skipped:
        observations.append(Observation("it needs the stack", False, "step 1 did not make it"))
    try:
        for part in () if is_skipped else step.parts:
            for observation in _observe(session, part):
                logger.info("%s: %s", observation.what, observation.seen)
                observations.append(observation)
    except KeyboardInterrupt:
        state = StepState.INTERRUPTED
        observations.append(Observation("the step runs to its end", False, "interrupted"))
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
    for action in (part, end_jobs):
        try:
            yield from action(session)
        except Exception as error:  # a bug must not keep the next part from running, and the user from its report
            if not isinstance(error, ClusterError):
                logger.exception("an unexpected error; the self-test goes on")
            yield Observation(action.__name__.replace("_", " "), False, f"{type(error).__name__}: {error}")
