"""Invented jobs in fixed states, for the pictures of docs/screenshots. On-demand prices are those of the program."""

from dataclasses import replace

from cluster.backends.planner import Plan
from cluster.jobs.billing import CostReport
from cluster.state.heartbeats import GpuLoad, MachineLoad, MachineStatus
from cluster.state.states import AgentPhase, AttemptReason, JobState, MachineState, SetupStep
from cluster.state.status import JobStatus, MachineRow
from cluster.state.timeline import AttemptRow
from infra.aws.instances.amis import ROOT_DISK_GB
from infra.aws.market.instance_types import ON_DEMAND_PRICES
from infra.aws.prices import ADDRESS_PER_HOUR, DISK_PER_GB_HOUR, price_traffic
from infra.costs import GB, JobCost, MachineCost, Traffic
from train.metrics.time_table import PartTime, TimePart, TimeTable

NOON = 1_795_003_200.0  # 18 November 2026, 12:00:00 UTC
MACHINE_TYPE = "p4d.24xlarge"
MACHINES, GPUS = 4, 8  # of the running job; GPUs of each machine
LOST = "2"

RUNNING = JobStatus(
    job="job-3",
    recipe="resnet50_18min",
    backend="aws",
    machines=MACHINES,
    procs=GPUS,
    created=NOON,
    state=JobState.RUNNING,
    doing="training",
    attempt=2,
    step=2861,
    steps=4806,
    epoch=21,
    epochs=38,
    images_per_second=58_310.0,
    lr=1.106,
    top1=62.48,
    top5=84.91,
    run="runs/job-3",
    goodput=0.962,
    seconds=474.0,
)
OTHER_JOBS = [
    replace(
        RUNNING, job="job-1", recipe="quickstart", backend="local", machines=1, state=JobState.DONE, step=691, epoch=9,
        images_per_second=843.0, top1=99.6, top5=100.0, seconds=88.0,
    ),
    replace(
        RUNNING, job="job-2", recipe="birds", backend="ssh", machines=2, state=JobState.FAILED, step=120, epoch=1,
        images_per_second=1204.0, top1=12.5, top5=38.25, seconds=61.0,
    ),
    RUNNING,
    replace(
        RUNNING, job="job-4", recipe="finetune", backend="ssh", machines=2, state=JobState.STOPPED, step=1520, epoch=4,
        images_per_second=2350.0, top1=88.13, top5=97.5, seconds=734.0,
    ),
    replace(
        RUNNING, job="job-5", recipe="lr0.4", backend="local", machines=1, state=JobState.WAITING, step=None,
        epoch=None, images_per_second=None, top1=None, top5=None, seconds=0.0,
    ),
]  # fmt: skip

TIME_TABLE = TimeTable(
    wall=272.7,
    parts={
        TimePart.STEPS: PartTime(seconds=244.8, epoch=20, most=17.9),
        TimePart.WAITS: PartTime(seconds=4.1, epoch=1, most=2.2),
        TimePart.VALIDATION: PartTime(seconds=11.0, epoch=20, most=0.9),
        TimePart.SWITCHES: PartTime(seconds=4.3, epoch=15, most=2.4),
        TimePart.CHECKPOINTS: PartTime(seconds=1.9, epoch=12, most=0.3),
        TimePart.OTHER: PartTime(seconds=6.6, epoch=1, most=0.8),
    },
    pauses=53.3,
    start={"setup": 4.1, "starting": 9.8, "indexing": 1.2, "joining": 3.4, "warming": 28.7},
)
STATUS = replace(RUNNING, where=TIME_TABLE)
ATTEMPTS = [
    AttemptRow(attempt=1, at=NOON + 148, machines=("0", "1", "2", "3"), reason=AttemptReason.START, first_step=0),
    AttemptRow(
        attempt=2, at=NOON + 336, machines=("0", "1", "3"), reason="machine 2 lost", first_step=1987, pause=52.6,
        steps_lost=21,
    ),
]  # fmt: skip


def machine_rows() -> dict[str, MachineRow]:
    """Return the machines of the running job: one of them is lost."""
    return {str(number): machine_row(number) for number in range(MACHINES)}


def machine_row(number: int) -> MachineRow:
    """Return one machine with the load of its GPUs."""
    name = str(number)
    gpus = tuple(
        GpuLoad(use=97.0 - (number + gpu) % 4, memory_gb=31.4, temperature=61.0 + gpu, watts=320.0)
        for gpu in range(GPUS)
    )
    status = MachineStatus(
        id=f"{name}.a",
        state=MachineState.TRAINING,
        phase=AgentPhase.RUNNING,
        attempt=2,
        step=RUNNING.step,
        steps=RUNNING.steps,
        loss=1.613 + number / 1000,
        busy=(0.93, *[0.71] * 7) if number == 3 else (0.71,) * 8,
        use=MachineLoad(
            cpu=41.0 + number,
            memory_gb=131.0,
            memory_total_gb=1152.0,
            net_in_gbit=24.31 + number / 10,
            net_out_gbit=24.28,
            gpus=gpus,
        ),
    )
    seconds = {
        SetupStep.BOOTING: 41.2 + number,
        SetupStep.CONNECTING: 3.1,
        SetupStep.ENVIRONMENT: 22.4 + 2 * number,
        SetupStep.WARMING: 28.7,
    }
    is_lost = name == LOST
    return MachineRow(
        host=f"203.0.113.{21 + number}",
        state=MachineState.LOST if is_lost else MachineState.TRAINING,
        reason="no heartbeat for 5.2 s; a new machine is being rented" if is_lost else "",
        status=None if is_lost else status,
        notes=(),
        seconds=seconds,
    )


def cost_report() -> CostReport:
    """Return the bill of the running job."""
    machines = tuple(machine_cost(number) for number in range(MACHINES))
    traffic = Traffic(
        shared_read_bytes=round(152 * GB), shared_written_bytes=round(3.1 * GB), home_bytes=round(0.06 * GB)
    )
    cost = JobCost(machines=machines, traffic=price_traffic(traffic, uses_nat=False))
    return CostReport(
        job=RUNNING.job,
        backend="EC2",
        is_billed=True,
        cost=cost,
        per_epoch=cost.dollars / (RUNNING.epoch or 1),
        to_target=None,
        wasted=cost.machine_dollars * TIME_TABLE.pauses / RUNNING.seconds,
        wasted_seconds=TIME_TABLE.pauses,
        rented_now=(
            f"{cost.running} machines still run and are billed; they power off at 16:05; to end them now: "
            f"imgnet-cluster down {RUNNING.job}"
        ),
    )


def machine_cost(number: int) -> MachineCost:
    """Return the bill of one machine."""
    seconds = 336.0 if str(number) == LOST else RUNNING.seconds
    hours = seconds / 3600
    price = ON_DEMAND_PRICES[MACHINE_TYPE]
    return MachineCost(
        id=f"i-0f3a9c1d2e4b5a6{number:02x}",
        name=str(number),
        type=MACHINE_TYPE,
        market="on-demand",
        zone="us-east-1c",
        launched=NOON,
        ended=NOON + seconds if str(number) == LOST else None,
        price=price,
        seconds=seconds,
        dollars=hours * price,
        disk_dollars=hours * ROOT_DISK_GB * DISK_PER_GB_HOUR,
        address_dollars=hours * ADDRESS_PER_HOUR,
        why="lost" if str(number) == LOST else "",
    )


def with_known_price(plan: Plan) -> Plan:
    """Return a plan made without AWS as it would look with an answer: with the price and the zones."""
    assert plan.rental_plan
    rental = plan.rental_plan
    rate = rental.machines * ON_DEMAND_PRICES[rental.type]
    known_facts = {"zones in order": "us-east-1c, us-east-1d, us-east-1a", "ssh": "from 198.51.100.7/32 only"}
    priced = replace(
        rental,
        dollars_per_hour=rate,
        dollars=rate * (rental.minutes or 0.0) / 60,
        facts=tuple((label, known_facts.get(label, text)) for label, text in rental.facts),
    )
    return replace(plan, rental_plan=priced)
