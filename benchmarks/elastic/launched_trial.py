"""Trials of jobs that the installed command launches: over ssh, or on rented machines of the simulated EC2.

The job is small, and its steps are slow, so that it lasts about a minute. The supervisor looks after it; when the
supervisor is killed, a user's next command starts another.
"""

import contextlib
import functools
import os
import shutil
import signal
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

from support.aws_user import TYPE, Renter
from support.exact_jobs import newest_attempt
from support.sandbox import Sandbox
from support.simcloud.fixture import CloudProcess
from support.simcloud.process_keeper import process_ids
from support.ssh_machines import Testbed, TestMachine, command_line, send_signal

from benchmarks.elastic.bench import TrialBench, checkpoint_differences, last_checkpoint
from benchmarks.elastic.fault_plan import MAX_TRAINER_KILLS, FaultTrial, LaunchedTrialPlan, TrialOutcome
from benchmarks.elastic.local_agents import is_trainer
from benchmarks.elastic.step_log import STEPS_FOLDER, check_steps, loss_module
from cluster.jobs.job import Job
from cluster.state.result import check_image_usage

DEADLINE_SECONDS = 480.0  # for a job; it takes a fifth of this on a quiet computer
START_SECONDS = 300.0  # until the first step, on a busy computer
LOOK_SECONDS = 3.0  # how often the user looks at a job that has no supervisor
PAUSE_SECONDS = 0.1
RECIPE = "from train.recipe import Comm, Data, Model, Optim, Phase, Recipe\n\nrecipe = {recipe!r}\n"
TRAINING_OPTIONS = ("--exact", "--save-seconds", "1", "--workers", "0", "--procs", "1", "--log-ids")


class LaunchedTrial(FaultTrial):
    """One job that a command has launched, and the faults of its plan."""

    place_options: tuple[str, ...]  # of the launch

    def __init__(self, bench: TrialBench, plan: LaunchedTrialPlan) -> None:
        super().__init__(TrialOutcome(plan, bench.folder / f"trial-{plan.seed}", bench.in_place))
        self.bench, self.plan = bench, plan
        self.sandbox = Sandbox(self.outcome.folder, bench.data)
        self.endings: list[tuple[float, Callable[[], object]]] = []  # when a lasting fault ends, and how
        self.hit: set[str] = set()  # machines of which a trainer was killed or stood still
        self.trainer_kills = 0
        self.next_look = 0.0
        self.job: Job

    @abstractmethod
    def shared_folder(self) -> Path:
        """Return the shared folder of the job on its machines."""

    def check_place(self) -> None:
        """Note in the outcome what the job has left behind at its place."""

    def supervisor_pids(self) -> list[int]:
        """Return the supervisors of the job."""
        return self.sandbox.pids("-m cluster.jobs.supervisor")

    # --- faults ------------------------------------------------------------------------------------------------------

    def kill_supervisor(self, number: float) -> None:
        """Kill the supervisor; the user looks at the job some seconds later."""
        send_signal(self.supervisor_pids(), signal.SIGKILL)
        self.next_look = time.monotonic() + 8 * number

    def kill_trainer(self, machine: str, pids: list[int], number: float) -> bool:
        """Kill one of these trainers, unless the machine would be left out or the job ended by design."""
        trainers = [pid for pid in pids if is_trainer(pid)]
        if not trainers or machine in self.hit or self.trainer_kills >= MAX_TRAINER_KILLS:
            return False
        self.hit.add(machine)
        self.trainer_kills += 1
        send_signal([trainers[int(100 * number) % len(trainers)]], signal.SIGKILL)
        return True

    def end_later(self, seconds: float, end: Callable[[], object]) -> None:
        """End a lasting fault in some seconds."""
        self.endings.append((time.monotonic() + seconds, end))

    def end_faults(self, is_over: bool = False) -> None:
        """End the lasting faults whose time has come; all of them when the trial is over."""
        now = time.monotonic()
        due = [ending for ending in self.endings if is_over or now >= ending[0]]
        self.endings = [ending for ending in self.endings if ending not in due]
        for _, end in due:
            end()

    def look_at_job(self) -> None:
        """Type a command, as a user does now and then; it starts a supervisor if none runs."""
        if time.monotonic() < self.next_look or self.supervisor_pids() or self.job.has_ended:
            return
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.job.path / ".supervised", (0, 0))  # else it is not started again within 20 s
        self.run_command("ls")
        self.next_look = time.monotonic() + LOOK_SECONDS

    # --- the trial from start to end ---------------------------------------------------------------------------------

    def run_command(self, *words: str) -> None:
        """Run the installed command. Raises `RuntimeError` when it fails."""
        result = self.sandbox.cli(*words)
        if result.code:
            raise RuntimeError(f"{words}: {result}")

    def write_recipe(self) -> str:
        """Write a project with a slow loss that logs the steps, and return the path of its recipe."""
        project, folder = self.sandbox.path / "project", self.outcome.folder
        self.sandbox.write_slow_loss(project, 0, PAUSE_SECONDS)
        (project / "slow_loss.py").write_text(loss_module(str(folder / "pace"), str(folder / STEPS_FOLDER)))
        (project / "recipe.py").write_text(RECIPE.format(recipe=self.bench.recipe))
        return str(project / "recipe.py")

    def start_job(self) -> None:
        """Launch the job, and wait until it trains."""
        way = "on" if self.bench.in_place else "off"
        options = ("--machines", str(self.plan.machines), "--lost-seconds", "3", "--in-place", way)
        self.run_command("launch", "-d", "-y", *TRAINING_OPTIONS, *options, *self.place_options, self.write_recipe())
        self.job = self.sandbox.job(1)
        self.sandbox.wait_for(lambda: self.job.status().doing == "training", START_SECONDS, self.job.status)

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
        problems, result = self.outcome.problems, self.job.result
        if result is None or result.state != "done":
            problems.append(f"the job is {self.job.state}: {self.job.status().reason}")
            return
        if [epoch.epoch for epoch in result.epochs] != list(range(1, self.bench.epochs + 1)):
            problems.append(f"the result has the epochs {[epoch.epoch for epoch in result.epochs]}")
        problems += check_image_usage(self.job.run_folder, result.epochs)
        history = [attempt for attempt in self.job.run_folder.attempts.all() if attempt.members]
        reference = self.bench.reference_folder(self.plan.machines)
        findings = check_steps(self.outcome.folder / STEPS_FOLDER, reference / STEPS_FOLDER, history, 1, self.hit)
        self.outcome.note(history, findings)
        checkpoint = last_checkpoint(self.shared_folder(), history[-1].number)
        problems += checkpoint_differences(checkpoint, last_checkpoint(reference, 1))
        self.sandbox.wait_for(lambda: not self.supervisor_pids(), 60)
        self.check_place()

    def clean_up(self) -> None:
        """End all processes of the trial; remove its folder unless there were problems."""
        self.end_faults(is_over=True)
        leftovers = [*self.sandbox.close(), *self.close_place()]
        if leftovers and not self.outcome.problems:
            self.outcome.problems.append(f"still running: {leftovers}")
        self.write_log()
        if not self.outcome.problems:
            shutil.rmtree(self.outcome.folder, ignore_errors=True)

    @abstractmethod
    def close_place(self) -> list[str]:
        """End the machines; return the commands that still ran there."""


class RentedTrial(LaunchedTrial):
    """A job on rented machines."""

    place_options = ("--max-hours", "5", "--type", TYPE, "--max-exchanges", "99")

    def __init__(self, bench: TrialBench, plan: LaunchedTrialPlan, cloud: CloudProcess) -> None:
        super().__init__(bench, plan)
        self.cloud = cloud
        self.cloud.begin()
        self.renter = Renter(self.sandbox, self.cloud)

    def program_pids(self, instance_id: str, module: str) -> list[int]:
        """Return the processes of a Python module on a machine."""
        lines = {pid: command_line(pid) for pid in process_ids(self.cloud.folder / instance_id)}
        return [pid for pid, line in sorted(lines.items()) if f"-m {module}" in line and "tmux" not in line]

    def inject_event(self, kind: str, number: float) -> bool:
        """Inject an event of the plan; `number` is random, 0 to 1. Return False if that is not possible now."""
        if kind == "supervisor killed":
            self.kill_supervisor(number)
        elif kind == "EC2 answers with errors":
            self.cloud.post("fault", service="ec2", code="InternalError", status=500, times=1 + int(8 * number))
            self.cloud.post("fault", service="ec2", drop=True, times=2)
        elif kind == "EC2 limits the calls":
            self.cloud.post("fault", service="ec2", code="RequestLimitExceeded", status=503, times=1 + int(20 * number))
        elif kind == "keys expired":
            self.cloud.post("fault", service="ec2", code="ExpiredToken", message="too old", times=100_000)
            self.end_later(3 + 12 * number, lambda: self.cloud.post("no_faults"))
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
        match kind:
            case "machine interrupted with notice":
                try:
                    self.cloud.interrupt(instance_id, notice=4 + 16 * (10 * number % 1))
                except RuntimeError:  # an earlier interruption has ended it since
                    return False
            case "machine lost" | "all machines lost" | "no capacity":
                if kind == "no capacity":
                    self.cloud.post("fault", action="RunInstances", code="InsufficientInstanceCapacity", times=2)
                for _, victim_id in victims:
                    self.cloud.post("kill", id=victim_id, reason="Server.SpotInstanceTermination")
            case "machine frozen" | "agent killed":
                if not agents:
                    return False
                if kind == "agent killed":
                    send_signal(agents, signal.SIGKILL)
                else:
                    self.hit.add(machine)
                    self._freeze(instance_id, 1 + 11 * (10 * number % 1))
            case "trainer killed":
                if not self.kill_trainer(machine, self.program_pids(instance_id, "train"), number):
                    return False
            case _:
                raise ValueError(f"no such event: {kind}")
        self.add_log_line(f"{kind}: {', '.join(f'machine {name}, {victim_id}' for name, victim_id in victims)}")
        return True

    def _freeze(self, instance_id: str, seconds: float) -> None:
        """Stop all processes of a machine for some seconds; tmux first, because it continues stopped processes."""
        folder = self.cloud.folder / instance_id
        pids = sorted(process_ids(folder), key=lambda pid: not command_line(pid).startswith("tmux"))
        send_signal(pids, signal.SIGSTOP)
        self.end_later(seconds, lambda: send_signal(pids[::-1], signal.SIGCONT))

    def end_faults(self, is_over: bool = False) -> None:
        """End the lasting faults whose time has come, and when the trial is over those of the cloud too."""
        super().end_faults(is_over)
        if is_over:
            self.cloud.post("no_faults")

    def shared_folder(self) -> Path:
        """Return the job's folder in the simulated EFS."""
        (shared,) = self.cloud.folder.glob(f"efs/*/{self.job.spec.uid}")
        return shared

    def check_place(self) -> None:
        """Note in the outcome what runs or costs, and where `cost` does not say what the cloud's meter says."""
        costs_are_right = functools.partial(self.renter.assert_costs_match_the_bill, self.job)
        for check in (self.renter.assert_nothing_left, costs_are_right, self.cloud.assert_clean):
            try:
                check()
            except AssertionError as error:
                self.outcome.problems.append(str(error)[:2000])

    def close_place(self) -> list[str]:
        """Empty the cloud, and keep its files when there were problems."""
        if self.outcome.problems:
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(self.cloud.folder / "efs", self.outcome.folder / "efs")
        self.cloud.post("reset")
        return []


class SshTrial(LaunchedTrial):
    """A job on machines over ssh: a real sshd for each, on 127.1.0.N."""

    def __init__(self, bench: TrialBench, plan: LaunchedTrialPlan) -> None:
        super().__init__(bench, plan)
        self.bed = Testbed(self.outcome.folder / "bed", plan.machines)
        self.place_options = ("--ssh", str(self.bed.write_hosts_toml(self.outcome.folder / "hosts.toml")))
        self.faulty: set[str] = set()  # machines on which a fault lasts

    def inject_event(self, kind: str, number: float) -> bool:
        """Inject an event of the plan; `number` is random, 0 to 1. Return False if that is not possible now."""
        members = newest_attempt(self.job).machine_names
        names = [name for name in members if name not in self.faulty]
        if kind == "supervisor killed":
            self.kill_supervisor(number)
            self.add_log_line(kind)
            return True
        if self.job.status().doing != "training" or len(names) < 2:  # one member must have no fault
            return False
        victims = names[:1] if "head" in kind else [names[int(number * len(names))]]
        if kind == "two machines off":
            if len(names) < 3:
                return False
            victims = [names[0], names[1 + int(number * (len(names) - 1))]]
        for name in victims:
            if not self._inject_on_machine(kind, name, self.bed.machines[int(name)], 10 * number % 1):
                return False
        self.add_log_line(f"{kind}: machine {', '.join(victims)}, members {' '.join(members)}")
        return True

    def _inject_on_machine(self, kind: str, name: str, machine: TestMachine, number: float) -> bool:
        match kind:
            case "machine off" | "head off" | "two machines off":
                machine.power_off()
                self._end_on_machine(name, 0.5 + 4 * number, machine.boot)
            case "machine frozen":
                self.hit.add(name)
                machine.freeze()
                self._end_on_machine(name, 1 + 7 * number, machine.thaw)
            case "network cut":
                machine.unplug()
                self._end_on_machine(name, 1 + 7 * number, machine.plug)
            case "notice":
                self.run_command("rehearse-loss", "job-1", "--machine", name, "--notice", "20")
            case "agent killed":
                send_signal(machine.processes("-m cluster.agent"), signal.SIGKILL)
            case "trainer killed":
                return self.kill_trainer(name, machine.processes("-m train"), number)
            case _:
                raise ValueError(f"no such event: {kind}")
        return True

    def _end_on_machine(self, name: str, seconds: float, end: Callable[[], object]) -> None:
        def end_fault() -> None:
            end()
            self.faulty.discard(name)

        self.faulty.add(name)
        self.end_later(seconds, end_fault)

    def shared_folder(self) -> Path:
        """Return the job's folder on the machines."""
        (shared,) = self.bed.shared.glob(f"{self.job.spec.uid}*")
        return shared

    def close_place(self) -> list[str]:
        """Power the machines off."""
        return self.bed.close()
