"""A user who rents machines with the installed command: a sandbox, and a simulated cloud that is the user's AWS."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.command_server import SETTLE_VARIABLE
from support.exact_jobs import newest_attempt
from support.sandbox import Sandbox
from support.simcloud.fixture import CloudProcess
from support.waiting import WaitTimeout, wait_for

from cluster.jobs.job import Job
from infra.aws.journal import EventT, Journal
from infra.aws.journal_events import RequestGranted

TYPE = "c7i.2xlarge"
OPTIONS = ("-y", "--procs", "1", "--workers", "0", "--no-standby")
NEVER_SECONDS = 1e6  # from running to sshd: such a machine never gets ready
SUPERVISOR_END_SECONDS = 30.0
ENDED_STATES = ("shutting-down", "terminated")


class Renter:
    """A user with a sandbox and a cloud. Nothing but the environment tells the command that the cloud is AWS."""

    def __init__(self, sandbox: Sandbox, cloud: CloudProcess) -> None:
        self.sandbox = sandbox
        self.cloud = cloud
        self.path, self.cli = sandbox.path, sandbox.cli
        self.has_stack = False
        sandbox.env |= cloud.env | {SETTLE_VARIABLE: "0.05"}

    # --- commands --------------------------------------------------------------------------------------------------

    def run(self, *arguments: Any, **settings: Any) -> str:
        """Run the installed command and return what it prints. Raises `AssertionError` when it fails.

        `settings` are those of `Sandbox.cli`.
        """
        result = self.cli(*arguments, **settings)
        assert result.code == 0, f"{arguments}: {result}\n{self.describe()}"
        return result.out

    def run_json(self, *arguments: Any, **settings: Any) -> Any:
        return json.loads(self.run(*arguments, "-o", "json", **settings))

    def create_stack(self) -> None:
        """Create the stack, once. A supervisor would wait for others that create it at the same time."""
        if not self.has_stack:
            self.run("up", "--stack")
            self.has_stack = True

    def launch_arguments(
        self, *options: str, machines: int = 2, epochs: int = 3, pace: tuple[int, float] | None = None
    ) -> tuple[str, ...]:
        """Return the arguments of a launch that does not follow the job. For `pace` see `Sandbox.write_recipe`."""
        recipe = self.sandbox.write_recipe(epochs, pace=pace)
        types = () if "--type" in options else ("--type", TYPE)
        return "launch", "-d", *OPTIONS, *types, "--machines", str(machines), *options, recipe

    def launch(self, *options: str, machines: int = 2, epochs: int = 3, pace: tuple[int, float] | None = None) -> Job:
        """Launch a job and return it. Its supervisor has only just started."""
        self.create_stack()
        output = self.run(*self.launch_arguments(*options, machines=machines, epochs=epochs, pace=pace))
        return self.sandbox.job(int(re.findall(r"job-(\d+) launched", output)[0]))

    # --- observations ------------------------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], Any], seconds: float = 180.0) -> Any:
        """Return the value of `condition` as soon as it is true.

        Raises `AssertionError` after `seconds`, with the state of the jobs and the cloud.
        """
        return wait_for(condition, seconds, describe=self.describe, poll_seconds=0.1)

    def describe(self) -> str:
        """Return what the cloud, the jobs and their supervisors say, for the message of a failure."""
        rows = [(instance["id"], instance["state"], instance["reason"]) for instance in self.cloud.instances()]
        lines = [str(rows), f"supervisors: {self.supervisor_pids()}"]
        for run_path in sorted((self.path / "runs").glob("job-*")):
            for name in ("supervisor.jsonl", "result.json", "cloud.json"):
                with contextlib.suppress(OSError):
                    lines.append(f"--- {run_path.name}/{name}\n{(run_path / name).read_text()[-1500:]}")
        return "\n".join(lines)

    def journal_events(self, job: Job, event_type: type[EventT]) -> list[EventT]:
        return Journal(job.path / "cloud.jsonl").events(event_type)

    def granted_ids(self, job: Job) -> list[list[str]]:
        return [[machine.id for machine in grant.machines] for grant in self.journal_events(job, RequestGranted)]

    def _live_instances(self) -> list[dict[str, Any]]:
        return [instance for instance in self.cloud.instances() if instance["state"] not in ENDED_STATES]

    def live_instance_ids(self) -> list[str]:
        return [instance["id"] for instance in self._live_instances()]

    def all_instance_ids(self) -> list[str]:
        return [instance["id"] for instance in self.cloud.instances()]

    def live_instances_by_machine(self) -> dict[str, str]:
        return {instance["tags"]["imgnet:machine"]: instance["id"] for instance in self._live_instances()}

    def instance_id(self, machine: str) -> str:
        """Return the live instance of a machine. Raises `KeyError` when it has none."""
        return self.live_instances_by_machine()[machine]

    def placement_group_ids(self) -> list[str]:
        groups = [resource for resource in self.cloud.post("leftovers") if resource["kind"] == "placement-group"]
        return [group["id"] for group in groups if "imgnet:job" in group["tags"]]

    def calls(self) -> list[str]:
        """Return the actions of AWS that were called since the calls were last forgotten."""
        return [action for _, action in self.cloud.post("calls")]

    def supervisor_pids(self) -> list[int]:
        return self.sandbox.pids("-m cluster.jobs.supervisor")

    def wait_for_supervisor(self) -> int:
        return self.wait_for(lambda: self.sandbox.program_pids("-m cluster.jobs.supervisor"))[0]

    def kill_supervisor(self) -> None:
        pid = self.wait_for_supervisor()
        os.kill(pid, signal.SIGKILL)
        self.wait_for(lambda: pid not in self.supervisor_pids())

    def training_step(self, job: Job) -> int:
        """Return the step that the job trains, 0 while it does not train."""
        status = job.status()
        return int(status.step or 0) if status.doing in ("training", "validating") else 0

    def wait_for_steps(self, job: Job, attempt: int = 1, steps: int = 4) -> int:
        """Wait until an attempt of this number or a later one has trained `steps` steps. Returns the job's step."""

        def has_trained() -> bool:
            assert not job.has_ended, f"{job.status()}\n{self.describe()}"
            newest = newest_attempt(job)
            is_training = newest.number >= attempt and bool(newest.members)
            return is_training and self.training_step(job) >= newest.first_step + steps

        self.wait_for(has_trained)
        return self.training_step(job)

    def wait_for_members(self, job: Job, *machines: str) -> None:
        self.wait_for(lambda: set(newest_attempt(job).machine_names) == set(machines))

    def wait_for_replacement(self, machine: str, old_id: str) -> None:
        self.wait_for(lambda: self.live_instances_by_machine().get(machine, old_id) != old_id)

    def assert_nothing_left(self) -> None:
        """Raises `AssertionError` when an instance or placement group of ours is left, or `gc` finds anything."""
        assert self.live_instance_ids() == [] == self.placement_group_ids(), self.describe()
        collected = self.cli("gc")
        assert collected.code == 0 and collected.out.startswith("nothing to remove in us-east-1, "), collected

    def assert_costs_match_the_bill(self, job: Job) -> None:
        """Raises `AssertionError` unless `cost` and the simulated cloud's bill say the same dollars."""
        report = self.run_json("cost", job.name)
        bill = self.cloud.bill()
        ids = {machine["id"] for machine in report["machines"]}
        assert ids == set(self.all_instance_ids()) == set(bill["instances"]), (report, bill)
        assert report["running"] == 0 and report["unknown"] == [], report
        dollars = {row["name"]: row["dollars"] for row in report["traffic"]}
        shared_dollars = dollars.pop("shared folder, read", 0.0) + dollars.pop("shared folder, written", 0.0)
        home_dollars = dollars.pop("data out to this computer")  # nothing in the simulation meters ssh
        assert shared_dollars == pytest.approx(bill["efs"], rel=0.001) and dollars == {}, (report, bill)
        rest = report["dollars"] - shared_dollars - home_dollars
        assert rest == pytest.approx(bill["total"] - bill["efs"], rel=0.01), (report, bill)


@pytest.fixture
def renter(simcloud: CloudProcess, sandbox: Sandbox) -> Iterator[Renter]:
    """A user with an empty cloud, in which nothing may cost anything after the test.

    A supervisor whose machines are gone waits for their answers for some seconds. Then it writes the job's report,
    which takes long on a busy computer.
    """
    user = Renter(sandbox, simcloud)
    yield user
    with contextlib.suppress(WaitTimeout):
        wait_for(lambda: user.live_instance_ids() or not user.supervisor_pids(), SUPERVISOR_END_SECONDS)
