"""The session of a self-test: launches its jobs within a limit in dollars, waits for them, and removes everything.

By the run folders there, and a file that says whether the stack is its own, a second one can remove what a killed left.
"""

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.backends.aws.admin import AwsAdministration
from cluster.backends.planner import Plan
from cluster.errors import ClusterError
from cluster.jobs import billing, store, submit
from cluster.jobs.job import Job
from cluster.planning.launch_options import make_launch_options
from infra.aws.instances.instances import Instance
from train.recipe import Data, Model, Phase, Recipe
from train.tools.files import write_atomic
from train.tools.records import encode, read_record
from train.tools.text_files import to_json_bytes

STATE_FILE = "selftest-state.json"  # in the folder of a self-test that has not been cleaned up
TRAINING_SECONDS = 1200.0  # from a launch to the first training steps of all machines
ENDLESS_EPOCHS = 10_000
FEW_IMAGES = Data(name="sample", root="data/selftest", train=320, val=80)  # of the built-in set
COMMAND_SECONDS = 60.0
POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class SelftestState:
    """What a self-test must remove at its end."""

    region: str
    owns_stack: bool  # there was none before


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job of the self-test."""

    title: str
    minutes: float  # it is expected to take
    dollar_share: float  # of the self-test's limit, at most
    machines: int = 2
    market: str = "on-demand"
    internet: str = "public"
    is_large: bool = False
    epochs: int = ENDLESS_EPOCHS


@dataclass
class SelftestSession:
    """The jobs and the stack of one self-test.

    A machine of `small_type` has one network card, one of `large_type` several. `max_dollars` is the limit of all jobs.
    `tags` (KEY=VALUE) are those of all that is created. `ask` asks the user to do something by hand; None: nobody is
    there to do it. `earlier_names` are those of the jobs of earlier sessions.
    """

    cloud: AwsAdministration
    folder: Path
    region: str
    small_type: str
    large_type: str
    max_dollars: float
    tags: tuple[str, ...] = ()
    ask: Callable[[str], object] | None = None
    has_stack: bool = False
    earlier_names: set[str] = field(default_factory=set)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def plan(self, request: JobRequest) -> Plan:
        """Plan a job, with its part of what is left of the limit. Raises `ClusterError`."""
        dollars_left = self.max_dollars - self.spent_dollars
        if dollars_left <= 0:
            raise ClusterError(
                f"the limit of ${self.max_dollars:g} is spent; type the command again with a larger --max-price-total"
            )
        options = make_launch_options(
            self.cloud.backend,
            types=[self.type_of(request)],
            machines=request.machines,
            market=request.market,
            regions=(self.region,),
            tags=self.tags,
            internet=request.internet,
            max_dollars=min(request.dollar_share * self.max_dollars, dollars_left),
        )
        phase = Phase(epochs=(0, request.epochs), size=32, batch=8, lr=0.01)
        recipe = Recipe(name="selftest", data=FEW_IMAGES, model=Model(name="resnet10_tiny"), gpus=1, phases=[phase])
        plan = submit.plan(recipe, options)
        return replace(plan, spec=replace(plan.spec, generate_data=True), obstacles=())

    def type_of(self, request: JobRequest) -> str:
        """Return the machine type of a job."""
        return self.large_type if request.is_large else self.small_type

    def expected_cost(self, request: JobRequest) -> tuple[str, float | None]:
        """Return the market of a job, and its dollars at today's prices, None where unknown. Raises `ClusterError`."""
        rental = self.plan(request).rental_plan
        assert rental
        if rental.dollars_per_hour is None:
            return rental.market, None
        dollars_per_hour, dollars_once = rental.other_dollars
        hours = request.minutes / 60
        return rental.market, (rental.dollars_per_hour + dollars_per_hour) * hours + dollars_once

    def launch(self, request: JobRequest) -> Job:
        """Launch a job. Raises `ClusterError`."""
        return submit.launch(self.plan(request))

    @property
    def jobs(self) -> list[Job]:
        """The jobs of this session, also one whose launch was interrupted."""
        return [job for job in store.all_jobs() if job.name not in self.earlier_names]

    @property
    def spent_dollars(self) -> float:
        """What the jobs have cost until now."""
        return sum(billing.cost_report(job).cost.dollars for job in self.jobs)

    def machines(self, job: Job) -> Sequence[Instance]:
        """Return the live machines of a job."""
        return [row for row in self.all_machines(job) if row.is_billed]

    def all_machines(self, job: Job) -> Sequence[Instance]:
        """Return the machines of a job, also those that have ended."""
        return self.cloud.rented_machines(self.region, job.spec.uid)

    def run_on_machine(self, job: Job, machine: str, argv: list[str]) -> None:
        """Run a command on a machine over ssh. Raises `ClusterError`."""
        command = job.backend.shell_command(machine, argv, tty=False)
        completed = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
        if completed.returncode:
            raise ClusterError(f"{' '.join(argv)} on machine {machine}: {completed.stderr.strip()}")

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until a condition holds. Raises `ClusterError` that begins with `what` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterError(f"{what}: not within {seconds / 60:.0f} minutes")
            time.sleep(POLL_SECONDS)

    def wait_for_training(self, job: Job, after_attempt: int = 0) -> None:
        """Wait until all machines of a job train, in a later attempt than this. Raises `ClusterError`."""

        def trains() -> bool:
            job.refresh()
            if job.has_ended:
                raise ClusterError(f"{job.name} ended before it trained: {describe_end(job)}")
            attempts = [row for row in job.timeline() if row.machines and row.attempt > after_attempt]
            has_all = bool(attempts) and len(attempts[-1].machines) == job.spec.machines
            return has_all and attempts[-1].last_step is not None

        self.wait_until(trains, TRAINING_SECONDS, f"{job.name} trains on {job.spec.machines} machines")

    def wait_for_end(self, job: Job) -> str:
        """Wait until a job has ended, and return its state and reason. Raises `ClusterError`."""

        def has_ended() -> bool:
            job.refresh()
            return job.has_ended

        self.wait_until(has_ended, TRAINING_SECONDS, f"{job.name} ends")
        return describe_end(job)

    # --- what is left -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Remove an earlier session's leftovers; note whether there is a stack. Raises `ClusterError`, `OSError`."""
        if leftovers := self.remove_everything():
            raise ClusterError(
                f"an earlier self-test has left something: {'; '.join(leftovers)}; type the command again"
            )
        self.earlier_names = {job.name for job in store.all_jobs()}
        owns_stack = not self.cloud.has_stack(self.region)
        state = SelftestState(region=self.region, owns_stack=owns_stack)
        write_atomic(self.folder / STATE_FILE, to_json_bytes(encode(state)))

    def remove_everything(self) -> list[str]:
        """Terminate the folder's jobs; remove an own stack. Returns what is left. Raises `DamagedRecord`, `OSError`."""
        state = read_record(self.folder / STATE_FILE, SelftestState)
        if state is None:
            return []
        leftovers: list[str] = []
        for job in self.jobs:
            try:
                billing.terminate_job(job)
            except ClusterError as error:
                leftovers.append(f"{job.name}: {error}")
        if state.owns_stack and not leftovers:
            try:
                leftovers += self.cloud.remove_stack(state.region, delete_data=True)
            except ClusterError as error:
                leftovers.append(str(error))
        if not leftovers:
            (self.folder / STATE_FILE).unlink()
        return leftovers

    def describe_leftovers(self) -> list[str]:
        """Return a line for each resource in the region that no live job needs. Raises `ClusterError`."""
        is_live_by_uid = {job.spec.uid: False for job in store.all_jobs()}
        garbage = self.cloud.find_garbage(self.region, is_live_by_uid, include_unknown=False)
        return [line for uid, line in garbage.remove.items() if uid in is_live_by_uid]


def describe_end(job: Job) -> str:
    """Return the state and the reason of a job's end."""
    status = job.status()
    return f"{status.state}: {status.reason}" if status.reason else str(status.state)
