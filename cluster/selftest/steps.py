"""The steps of a self-test on a cloud. Each part of a step yields what it sees; an exception ends only this part.

The parts try what a simulation cannot show: permissions, images, the boot, public addresses of machines with several
network cards, a NAT gateway, the limits on the machines, the names of spot machines, and what is left at the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.jobs import billing
from cluster.jobs.job import Job
from cluster.state.states import JobState

from .report import Observation
from .session import JobRequest, SelftestSession, describe_end

Part = Callable[[SelftestSession], Iterator[Observation]]
POWEROFF_SECONDS = 30  # the limit that a machine is given, to see it power off
POWEROFF_SEEN_SECONDS = 300.0  # within which the cloud must show that

# The shares add up to 1. `minutes` are estimates: about six of boot and set-up, and the work.
ONE_MACHINE = JobRequest(
    title="one machine powers off at its limit", machines=1, market="on-demand", minutes=10, dollar_share=0.05
)
FAILING_BOOT = JobRequest(
    title="a boot that fails, for lack of internet",
    machines=2,
    market="on-demand",
    minutes=12,
    dollar_share=0.08,
    internet="none",
)
SPOT_PAIR = JobRequest(
    title="a spot machine is lost and replaced", machines=2, market="spot", minutes=15, dollar_share=0.08
)
NAT_PAIR = JobRequest(
    title="two machines behind a NAT gateway",
    machines=2,
    market="on-demand",
    minutes=10,
    dollar_share=0.08,
    internet="nat",
    epochs=3,
)
LARGE_PAIR = JobRequest(
    title="two machines with several network cards",
    machines=2,
    market="spot-then-on-demand",
    minutes=9,
    dollar_share=0.71,
    is_large=True,
)
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
    yield Observation(
        what="the stack can be created",
        is_right=True,
        seen=session.cloud.ensure_stack(session.settings.region, None, None),
    )
    session.has_stack = True
    missing_parts = session.cloud.missing_stack_parts(session.settings.region)
    yield Observation(
        what="nothing of the stack is missing", is_right=not missing_parts, seen="; ".join(missing_parts) or "complete"
    )
    yield _check_launch(session, "with the stack: the request of a launch")


def _check_launch(session: SelftestSession, what: str) -> Observation:
    settings = session.settings
    types = (settings.small_type, settings.large_type)
    findings = session.cloud.check_launch(settings.region, types, 2, "spot-then-on-demand")
    errors = [finding.what for finding in findings if finding.level == "error"]
    warnings = [finding.what for finding in findings if finding.level == "warning"]
    seen = "; ".join([*errors, *warnings]) or f"{len(findings)} checks passed"
    return Observation(what=what, is_right=not errors, seen=seen)


def power_off_one_machine(session: SelftestSession) -> Iterator[Observation]:
    """Train on one on-demand machine, set its time limit to half a minute, and see it power off and end."""
    job = session.launch(ONE_MACHINE)
    session.wait_for_training(job)
    yield Observation(what="a machine boots, mounts the file system and trains", is_right=True, seen=_start(job))
    (machine,) = session.machines(job)
    yield Observation(
        what="it has a public address", is_right=bool(machine.public_ip), seen=f"{machine.type} in {machine.zone}"
    )
    session.run_on_machine(job, machine.name, ["sudo", "-n", "imgnet-limit", str(POWEROFF_SECONDS)])
    session.wait_until(lambda: not session.machines(job), POWEROFF_SEEN_SECONDS, "the machine powers off")
    end_reasons = {row.end_reason for row in session.all_machines(job)}
    yield Observation(
        what="a machine powers itself off at its limit",
        is_right=all("InstanceInitiated" in reason for reason in end_reasons),
        seen=", ".join(end_reasons),
    )
    end = session.wait_for_end(job)
    yield Observation(what="the job then ends and rents no other", is_right=job.state == JobState.STOPPED, seen=end)


def read_reason_of_failed_boot(session: SelftestSession) -> Iterator[Observation]:
    """Launch two machines, of which one has no way to the internet although it needs one."""
    job = session.launch(FAILING_BOOT)
    end = session.wait_for_end(job)
    yield Observation(what="a boot that fails says why", is_right=_is_boot_failure(job), seen=end)
    consoles = [path.name for path in job.path.glob("console-*.log")]
    yield Observation(
        what="the console of the machine is kept", is_right=bool(consoles), seen=", ".join(consoles) or "none"
    )


def _is_boot_failure(job: Job) -> bool:
    return job.state == JobState.FAILED and "boot failed: " in describe_end(job)


def replace_lost_machine(session: SelftestSession) -> Iterator[Observation]:
    """Train on two spot machines, lose one, see it replaced, and stop."""
    job = session.launch(SPOT_PAIR)
    session.wait_for_training(job)
    machines = session.machines(job)
    indexes = ", ".join(str(machine.launch_index) for machine in machines)
    yield Observation(
        what="two spot machines have names of their own",
        is_right=[machine.name for machine in machines] == ["0", "1"],
        seen=f"launch indexes {indexes}; {_start(job)}",
    )
    yield Observation(
        what="they are in one zone and one placement group",
        is_right=len({(machine.zone, machine.placement_group) for machine in machines}) == 1,
        seen=f"{machines[0].zone}, {'a group' if machines[0].placement_group else 'no group'}",
    )
    attempt = job.last_attempt_number
    job.kill_machine("1")
    session.wait_for_training(job, after_attempt=attempt)
    pauses = [row.pause for row in job.timeline() if row.pause is not None]
    yield Observation(
        what="a lost machine is replaced and joins",
        is_right=True,
        seen=f"pauses of {', '.join(f'{pause:.0f}' for pause in pauses)} s",
    )
    job.stop()
    yield _stopped(session, job)


def train_behind_nat_gateway(session: SelftestSession) -> Iterator[Observation]:
    """Train on two machines behind a NAT gateway until the job is done. One is the ssh jump host of the other."""
    job = session.launch(NAT_PAIR)
    end = session.wait_for_end(job)
    yield Observation(
        what="machines behind a NAT gateway train to the end", is_right=job.state == JobState.DONE, seen=end
    )
    dollars = billing.cost_report(job).cost.nat_dollars
    yield Observation(what="the gateway was there and is counted", is_right=dollars > 0, seen=f"${dollars:.3f}")


def use_several_network_cards(session: SelftestSession) -> Iterator[Observation]:
    """Train on two machines with several network cards each, which get public addresses after their launch."""
    job = session.launch(LARGE_PAIR)
    session.wait_for_training(job)
    machines = session.machines(job)
    with_address = sum(bool(machine.public_ip) for machine in machines)
    yield Observation(
        what="machines with several network cards get public addresses",
        is_right=with_address == len(machines),
        seen=f"{with_address} of {len(machines)} {machines[0].type}, {machines[0].market}; {_start(job)}",
    )
    log = job.log_path()
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    transport = [line for line in lines if " processes, by " in line or "THIS MACHINE HAS EFA" in line]
    yield Observation(
        what="the machines talk over EFA where they have it",
        is_right=bool(transport) and not any("EFA" in line for line in transport),
        seen="; ".join(transport) or "the log names no transport",
    )
    job.stop()
    yield _stopped(session, job)


def _start(job: Job) -> str:
    """Return how long each step of the start took, of the slowest machine."""
    rows = job.machine_details().values()
    slowest = max((row.seconds for row in rows), key=lambda seconds: sum(seconds.values()), default={})
    steps = [f"{step} {seconds:.0f} s" for step, seconds in slowest.items() if seconds >= 1]
    return f"start: {', '.join(steps)}" if steps else "start: less than a second"


def _stopped(session: SelftestSession, job: Job) -> Observation:
    live_machines = session.machines(job)
    return Observation(
        what="stop saves, ends and terminates",
        is_right=job.state == JobState.STOPPED and not live_machines,
        seen=f"{describe_end(job)}, {len(live_machines)} machines left",
    )


def end_jobs(session: SelftestSession) -> Iterator[Observation]:
    """Terminate the jobs that are still at work, because their part of a step failed."""
    for job in session.jobs:
        if not job.has_ended:
            billing.terminate_job(job)
            yield Observation(what=f"{job.name} ends by itself", is_right=False, seen="it was terminated")


def remove_everything(session: SelftestSession) -> Iterator[Observation]:
    """Terminate what is left, remove the stack if the self-test made it, and look for anything that is billed."""
    leftovers = session.remove_everything()
    yield Observation(what="everything can be removed", is_right=not leftovers, seen="; ".join(leftovers) or "removed")
    leftovers = session.describe_leftovers()
    yield Observation(
        what="nothing is left of the jobs", is_right=not leftovers, seen="; ".join(leftovers) or "nothing"
    )


STEPS = (
    Step(title="account, permissions and stack", parts=(check_account,), needs_stack=False),
    Step(title="one machine on demand", parts=(power_off_one_machine, read_reason_of_failed_boot)),
    Step(
        title="two spot machines, and two behind a NAT gateway", parts=(replace_lost_machine, train_behind_nat_gateway)
    ),
    Step(title="two machines with several network cards", parts=(use_several_network_cards,)),
)
LAST_STEP = Step(title="nothing is left", parts=(remove_everything,), needs_stack=False)  # also after Ctrl-C
