"""Runs random schedules of faults against jobs on rented machines, and checks that each job's result is unharmed.

    .venv/bin/python benchmarks/elastic/rented_trials.py                      # 20 trials
    .venv/bin/python benchmarks/elastic/rented_trials.py --seed 7 --count 1   # one of them again

Trials that begin with seed 0 write their section of RESULTS.md.

Each trial is a small job on two or three machines of the simulated EC2 (tests/support/simcloud). Its steps are slowed
down so that it lasts about a minute. Machines are interrupted, lost and frozen; trainers, agents and the supervisor are
killed; EC2 answers with errors, has no capacity, or refuses the keys. Faults also strike while the job recovers from an
earlier one. Afterwards all of this must hold: the job has ended by itself as done; every image was used once in every
epoch; weights, batch-norm statistics and momentum equal, bit for bit, those of an undisturbed run of one process;
`cost` says what the cloud's meter says; and nothing is left that runs or costs. A trial that fails keeps its folder.
"""

import argparse
import contextlib
import functools
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.aws_user import TYPE, Renter
from support.sandbox import Sandbox
from support.simcloud.fixture import CloudProcess
from support.simcloud.process_keeper import process_ids
from support.ssh_machines import command_line, send_signal

from benchmarks.elastic.bench import TRAIN_IMAGES, VAL_IMAGES, last_checkpoint
from benchmarks.elastic.fault_plan import (
    MAX_TRAINER_KILLS,
    RENTED_EVENT_WEIGHTS,
    FaultTrial,
    RentedTrialPlan,
    TrialOutcome,
)
from benchmarks.elastic.trials import checkpoint_differences, print_outcome, table
from benchmarks.measure import describe_machine, write_section
from cluster.jobs.job import Job
from cluster.state.result import check_image_usage
from train.tools.agent_protocol import checkpoint_step

COUNT = 20
DEADLINE_SECONDS = 480.0  # for a job; it takes a fifth of this on a quiet computer
START_SECONDS = 300.0  # until the first step, on a busy computer
LOOK_SECONDS = 3.0  # how often the user looks at a job that has no supervisor
EPOCHS = 20
PAUSE_SECONDS = 0.1
RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="rented_trial",
    data=Data(name="drawn", root={data!r}, train={train}, val={val}),
    model=Model(name="resnet10_tiny"),
    optim=Optim(nesterov=True, loss={loss!r}),
    machines=1,
    gpus={machines},
    phases=[Phase(epochs=(0, {epochs}), size=32, batch=2, lr=0.01)],
)
"""
TRAINING_OPTIONS = ("--exact", "--keep-batch", "--save-seconds", "1", "--workers", "0", "--procs", "1", "--log-ids")


class RentedTrialBench:
    """What all trials share: the folder, the images, the cloud, and the undisturbed runs."""

    def __init__(self, folder: Path) -> None:
        from train.data.packing.synthetic import draw_sample_set

        self.folder = folder
        self.images = folder / "images"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.images.exists():
            draw_sample_set(self.images, train=TRAIN_IMAGES, val=VAL_IMAGES)
        self.cloud = CloudProcess()
        self._reference_lock = threading.Lock()

    def write_recipe(self, sandbox: Sandbox, machines: int, pause: float = PAUSE_SECONDS) -> str:
        """Write the project of a trial into its sandbox, and return the path of its recipe.

        Each computation of the loss takes `pause` seconds longer.
        """
        project = sandbox.path / "project"
        loss = sandbox.write_slow_loss(project, 0, pause)
        recipe = project / "recipe.py"
        names = {"data": str(self.images), "train": TRAIN_IMAGES, "val": VAL_IMAGES}
        recipe.write_text(RECIPE.format(**names, loss=loss, machines=machines, epochs=EPOCHS))
        return str(recipe)

    def reference_checkpoint(self, machines: int) -> Path:
        """Return the last checkpoint of an undisturbed run of one process, which computes as `machines` machines do.

        Raises `RuntimeError` when that run fails.
        """
        folder = self.folder / f"alone-{machines}"
        with self._reference_lock:
            if not folder.exists():
                sandbox = Sandbox(folder, self.images)
                try:
                    command = ("launch", "--local", *TRAINING_OPTIONS, self.write_recipe(sandbox, machines, pause=0.0))
                    launched = sandbox.cli(*command, timeout=600)
                finally:
                    sandbox.close()
                if launched.code:
                    raise RuntimeError(f"the undisturbed run failed: {launched}")
        return last_checkpoint(Job(folder / "runs" / "job-1").run_folder.shared, 1)

    def close(self) -> None:
        """End the cloud."""
        self.cloud.close()


class RentedTrial(FaultTrial):
    """One job on rented machines, and the faults of its plan."""

    def __init__(self, bench: RentedTrialBench, plan: RentedTrialPlan) -> None:
        super().__init__(TrialOutcome(plan, bench.folder / f"trial-{plan.seed}"))
        self.bench, self.plan, self.cloud = bench, plan, bench.cloud
        self.renter = Renter(Sandbox(self.outcome.folder, bench.images), self.cloud)
        self.random = random.Random(plan.seed + 1_000_000)
        self.endings: list[tuple[float, Callable[[], object]]] = []  # when a lasting fault ends, and how
        self.killed_trainers: set[str] = set()  # instances
        self.next_look = 0.0
        self.job: Job

    def program_pids(self, instance_id: str, module: str) -> list[int]:
        """Return the processes of a Python module on a machine."""
        lines = {pid: command_line(pid) for pid in process_ids(self.cloud.folder / instance_id)}
        return [pid for pid, line in sorted(lines.items()) if f"-m {module}" in line and "tmux" not in line]

    # --- faults ------------------------------------------------------------------------------------------------------

    def inject_event(self, kind: str, number: float) -> bool:
        """Inject an event of the plan; `number` is random, 0 to 1. Return False if that is not possible now."""
        if kind == "supervisor killed":
            self.renter.kill_supervisor()
            self.next_look = time.monotonic() + 8 * number
        elif kind == "EC2 answers with errors":
            self.cloud.post("fault", service="ec2", code="InternalError", status=500, times=1 + int(8 * number))
            self.cloud.post("fault", service="ec2", drop=True, times=2)
        elif kind == "EC2 limits the calls":
            self.cloud.post("fault", service="ec2", code="RequestLimitExceeded", status=503, times=1 + int(20 * number))
        elif kind == "keys expired":
            self.cloud.post("fault", service="ec2", code="ExpiredToken", message="too old", times=100_000)
            self.endings.append((time.monotonic() + 3 + 12 * number, lambda: self.cloud.post("no_faults")))
        else:
            return self._inject_on_machine(kind, number)
        self.add_log_line(kind)
        return True

    def _inject_on_machine(self, kind: str, number: float) -> bool:
        machines = sorted(self.renter.live_instances_by_machine().items())
        if not machines:
            return False
        machine, instance_id = machines[int(number * len(machines))]
        victims = machines if kind == "all machines lost" else [(machine, instance_id)]
        agents = self.program_pids(instance_id, "cluster.agent")
        trainers = self.program_pids(instance_id, "train")
        match kind:
            case "machine interrupted with notice":
                self.cloud.interrupt(instance_id, notice=4 + 16 * (10 * number % 1))
            case "machine lost" | "all machines lost" | "no capacity":
                if kind == "no capacity":
                    self.cloud.post("fault", action="RunInstances", code="InsufficientInstanceCapacity", times=2)
                for _, victim_id in victims:
                    self.cloud.post("kill", id=victim_id, reason="Server.SpotInstanceTermination")
            case "machine frozen":
                if not agents:
                    return False
                self._freeze(instance_id, 1 + 11 * (10 * number % 1))
            case "trainer killed":
                if (
                    not trainers
                    or instance_id in self.killed_trainers
                    or len(self.killed_trainers) > MAX_TRAINER_KILLS - 1
                ):
                    return False
                self.killed_trainers.add(instance_id)
                send_signal([trainers[int(100 * number) % len(trainers)]], signal.SIGKILL)
            case "agent killed":
                if not agents:
                    return False
                send_signal(agents, signal.SIGKILL)
            case _:
                raise ValueError(f"no such event: {kind}")
        self.add_log_line(f"{kind}: {', '.join(f'machine {name}, {victim_id}' for name, victim_id in victims)}")
        return True

    def _freeze(self, instance_id: str, seconds: float) -> None:
        """Stop all processes of a machine for some seconds; tmux first, because it continues stopped processes."""
        folder = self.cloud.folder / instance_id
        pids = sorted(process_ids(folder), key=lambda pid: not command_line(pid).startswith("tmux"))
        send_signal(pids, signal.SIGSTOP)
        self.endings.append((time.monotonic() + seconds, lambda: send_signal(pids[::-1], signal.SIGCONT)))

    def end_faults(self, is_over: bool = False) -> None:
        """End the lasting faults whose time has come; all of them when the trial is over."""
        now = time.monotonic()
        due = [ending for ending in self.endings if is_over or now >= ending[0]]
        self.endings = [ending for ending in self.endings if ending not in due]
        for _, end in due:
            end()

    def look_at_job(self) -> None:
        """Type a command, as a user does now and then; it starts a supervisor if none runs."""
        if time.monotonic() < self.next_look or self.renter.supervisor_pids() or self.job.has_ended:
            return
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.job.path / ".supervised", (0, 0))  # else it is not started again within 20 s
        self.renter.run("ls")
        self.next_look = time.monotonic() + LOOK_SECONDS

    # --- the trial from start to end ---------------------------------------------------------------------------------

    def start_job(self) -> None:
        """Launch the job, and wait until it trains."""
        self.cloud.begin()
        recipe = self.bench.write_recipe(self.renter.sandbox, self.plan.machines)
        options = ("--machines", str(self.plan.machines), "--lost-seconds", "3", "--max-exchanges", "99")
        limits = ("--max-hours", "5", "--type", TYPE)
        self.renter.run("launch", "-d", "-y", *TRAINING_OPTIONS, *options, *limits, recipe)
        self.job = self.renter.sandbox.job(1)
        self.renter.wait_for(lambda: self.renter.training_step(self.job), START_SECONDS)

    def run_events(self) -> None:
        """Inject the planned events, then wait for the job's end. Raises `TimeoutError` if the job hangs."""
        events = list(self.plan.events)
        next_event_time = time.monotonic() + events[0][0]
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.job.has_ended:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ended after {DEADLINE_SECONDS:g} s: {self.job.status()}")
            self.end_faults()
            self.look_at_job()
            if events and time.monotonic() >= next_event_time:
                self.inject_next_event(events)
                next_event_time = time.monotonic() + (events[0][0] if events else 0)
            time.sleep(0.1)
        self.outcome.seconds = time.monotonic() - self.start_time

    def check_outcome(self) -> None:
        """Check the job's result, and note the problems in the outcome."""
        self.end_faults(is_over=True)
        self.cloud.post("no_faults")
        problems, result = self.outcome.problems, self.job.result
        if result is None or result.state != "done":
            problems.append(f"the job is {self.job.state}: {self.job.status().reason}")
            return
        self.outcome.attempts = result.attempts
        if [epoch.epoch for epoch in result.epochs] != list(range(1, EPOCHS + 1)):
            problems.append(f"the result has the epochs {[epoch.epoch for epoch in result.epochs]}")
        problems += check_image_usage(self.job.run_folder, result.epochs)
        (shared,) = self.cloud.folder.glob(f"efs/*/{self.job.spec.uid}")
        training_attempts = [attempt.number for attempt in self.job.run_folder.attempts.all() if attempt.members]
        checkpoint = last_checkpoint(shared, max(training_attempts))
        reference = self.bench.reference_checkpoint(self.plan.machines)
        if checkpoint_step(checkpoint) != checkpoint_step(reference):
            problems.append(f"{checkpoint_step(checkpoint)} steps, undisturbed {checkpoint_step(reference)}")
        problems += checkpoint_differences(checkpoint, reference)
        self.renter.wait_for(lambda: not self.renter.supervisor_pids(), 60)
        costs_are_right = functools.partial(self.renter.assert_costs_match_the_bill, self.job)
        for check in (self.renter.assert_nothing_left, costs_are_right, self.cloud.assert_clean):
            try:
                check()
            except AssertionError as error:
                problems.append(str(error)[:2000])

    def clean_up(self) -> None:
        """End all processes of the trial; remove its folder unless there were problems."""
        self.end_faults(is_over=True)
        self.cloud.post("no_faults")
        leftovers = self.renter.sandbox.close()
        if leftovers and not self.outcome.problems:
            self.outcome.problems.append(f"still running: {leftovers}")
        self.write_log()
        if self.outcome.problems:
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(self.cloud.folder / "efs", self.outcome.folder / "efs")
        else:
            shutil.rmtree(self.outcome.folder, ignore_errors=True)
        self.cloud.post("reset")


def section(outcomes: list[TrialOutcome], load_before: float) -> list[str]:
    """Return the lines of the section of RESULTS.md."""
    seconds = [outcome.seconds for outcome in outcomes]
    jobs = f"{statistics.median(seconds):.0f} s (median; at most {max(seconds):.0f})"
    return [
        "## Random faults on rented machines",
        "",
        f"{describe_machine()}; `benchmarks/elastic/rented_trials.py`, {len(outcomes)} schedules on 2 or 3 machines",
        f"of the simulated EC2; a job of {EPOCHS} epochs with its faults took {jobs}; load {load_before:.1f} before,",
        f"{os.getloadavg()[0]:.1f} after. Good: done by itself, every image once in every epoch, weights, batch-norm",
        "statistics and momentum equal bit for bit to an undisturbed run, `cost` as the cloud's meter, nothing left.",
        "We know no peer that promises this on rented machines, so none is measured beside it.",
        "",
        *table(outcomes, RENTED_EVENT_WEIGHTS),
    ]


def main() -> int:
    """Run the trials and print the table. Return 1 if a trial failed."""
    parser = argparse.ArgumentParser(description="Run random schedules of faults against jobs on rented machines.")
    parser.add_argument("--count", type=int, default=COUNT, help=f"number of trials (default: {COUNT})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial; each further trial adds one")
    parser.add_argument(
        "--folder", type=Path, help="where trials run and failed trials stay (default: a new folder in /tmp)"
    )
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="rented-"))).resolve()
    bench = RentedTrialBench(folder)
    load_before = os.getloadavg()[0]
    outcomes: list[TrialOutcome] = []
    try:
        for seed in range(options.seed, options.seed + options.count):
            outcomes.append(RentedTrial(bench, RentedTrialPlan.from_seed(seed)).run())
            print_outcome(outcomes[-1])
    finally:
        bench.close()
    lines = section(outcomes, load_before)
    print("\n".join(lines))
    if options.seed == 0:
        write_section("elastic/rented_trials.py", lines)
    has_failed = any(outcome.problems for outcome in outcomes)
    if not has_failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
