"""Backend `aws`: EC2 instances, spot or on demand, that are terminated when the job ends."""

import contextlib
import json
import shutil
from dataclasses import replace as replace_fields
from functools import cached_property
from pathlib import Path

from cluster.backends.base import BilledBackend
from cluster.backends.planner import MachinePlanner, MachineRequest
from cluster.backends.remote import RemoteBackend
from cluster.backends.rentals import JobCost
from cluster.connectors import tmux
from cluster.connectors.hosts_file import Hosts
from cluster.errors import BadInput, ClusterError
from cluster.machines.fleet import Fleet
from cluster.state.spec import JobSpec
from infra.aws.errors import CloudError
from infra.aws.journal import Journal
from infra.aws.market import billing
from train.tools.filesystem import read_json

from . import admin
from .controller import AwsController
from .errors import aws_errors_as_cluster_errors
from .instance_history import JOURNAL_FILE
from .instances import HOSTS_FILE, JobInstances
from .options import AwsOptions
from .plan import AwsPlanner
from .rental_spec import POWEROFF_GRACE_SECONDS


class AwsBackend(RemoteBackend, BilledBackend):
    """Instances that are rented for one job."""

    name = "aws"
    description = "machines rented from AWS"
    options = AwsOptions

    @classmethod
    def open_planner(cls, request: MachineRequest) -> MachinePlanner:
        """Return the planner of a rental. Asks AWS which instance types it has. Raises `ClusterError`."""
        return AwsPlanner(request)

    @classmethod
    def check(cls, spec: JobSpec, runs_folder: Path) -> None:
        """Check that all programs are installed here (`ClusterError`). AWS was asked when the job was planned."""
        tmux.require_tmux()
        for program in ("ssh", "ssh-keygen"):
            if not shutil.which(program):
                raise ClusterError(f"{program} is missing; install it: sudo apt-get install openssh-client")
        if not spec.cloud:
            raise BadInput("the job has no rental specification; start it with: imgnet-cluster launch")

    @cached_property
    def controller(self) -> AwsController:
        """The controller of the job's instances, of which a supervisor has one. Raises `ClusterError`."""
        with aws_errors_as_cluster_errors():
            return AwsController(self.run.spec, self.run.folder)

    def _open_instances(self, is_silent: bool = False) -> JobInstances:
        """Return the job's instances for one command. Raises `CloudError`."""
        return JobInstances(self.run.spec, self.run.folder, (lambda text: None) if is_silent else print)

    def launch(self) -> None:
        """Start the supervisor. It rents the instances and does all the rest."""
        if not self.is_supervised():
            with aws_errors_as_cluster_errors():
                self._open_instances().record_launch(self.run.folder.launch_id)
        super().launch()

    def poll(self) -> bool:
        """Rent missing instances, set them up and copy new files to the run folder."""
        return self.controller.poll()

    def agents_alive(self) -> bool:
        """Whether an agent is at work. Only the supervisor, which has the connections open, can tell."""
        fleet = self.controller.fleet if "controller" in vars(self) else None
        return fleet is not None and fleet.agents_alive()

    def dead_machines(self) -> list[str]:
        """Return the machines that certainly have no running agent: EC2 says that they are gone, or they say so."""
        return self.controller.dead_machines()

    def replace(self, machine: str) -> None:
        """Start a machine's agent again, or rent another instance in its place, in the background."""
        self.controller.replace(machine)

    def kill_machine(self, machine: str, notice_seconds: float | None) -> None:
        """Terminate a machine's instance at once, or give its agent a notice as EC2 does before an interruption."""
        if notice_seconds is None:
            with aws_errors_as_cluster_errors():
                self._open_instances().kill_machine(machine)
        else:
            self.open_fleet().kill_machine(machine, notice_seconds)

    def open_fleet(self) -> Fleet:
        """Open connections to the machines at the addresses that the supervisor wrote down last."""
        spec, folder = self.run.spec, self.run.folder
        hosts = read_json(folder.path / HOSTS_FILE)
        if not hosts:
            raise ClusterError(f"{spec.name} has no machines yet; see: imgnet-cluster status {spec.name}")
        return Fleet(replace_fields(spec, hosts=Hosts.from_json(hosts).to_json()), folder)

    def terminate(self) -> list[str]:
        """Terminate all instances of the job and wait until EC2 confirms it.

        Raises `ClusterError` that names what is not terminated.
        """
        name, folder = self.run.spec.name, self.run.folder
        if (folder.path / JOURNAL_FILE).exists():  # else nothing was ever rented
            with aws_errors_as_cluster_errors():
                job_instances = self._open_instances(is_silent=True)
                leftovers = job_instances.terminate_job()
                with contextlib.suppress(CloudError, OSError):
                    billing.record_spot_costs(job_instances.account, job_instances.journal, self.run.clock())
            if leftovers:
                raise ClusterError(
                    f"{name} is not completely terminated: {'; '.join(leftovers)}; "
                    f"run again: imgnet-cluster down {name}"
                )
        tmux.kill_session(name, folder.path)
        return []

    def extend_time_limit(self, hours: float) -> None:
        """Set the job's time limit to `hours` since its first machine started.

        Raises `BadInput` when the price limit forbids it or the time is already over, `ClusterError` with the machines
        on which the new limit could not be set.
        """
        spec, folder = self.run.spec, self.run.folder
        fleet = self.open_fleet()
        job_instances = self._open_instances()
        start_time = job_instances.first_machine_time or self.run.clock()
        place = job_instances.current_place
        if place:
            allowed_hours, grace_seconds = job_instances.compute_limits(place, hours)
        else:
            allowed_hours, grace_seconds = hours, float(POWEROFF_GRACE_SECONDS)
        if allowed_hours < hours:
            raise BadInput(f"--max-hours {hours:g}: --max-price-total allows only {allowed_hours:.3g} hours")
        seconds_left = 3600 * hours - (self.run.clock() - start_time)
        if seconds_left <= 0:
            raise BadInput(
                f"{spec.name} has been running for more than {hours:g} hours; "
                f"to stop it: imgnet-cluster stop {spec.name}"
            )
        problems = []
        for name, connector in fleet.connectors.items():
            try:
                connector.run(["sudo", "-n", "imgnet-limit", f"{seconds_left + grace_seconds:.0f}"], timeout=30)
                limit_path = f"{fleet.setup_progress.rows[name]['work']}/limit"
                connector.write(limit_path, json.dumps({"hours": hours}).encode())
            except (ClusterError, KeyError) as error:
                problems.append(f"machine {name}: {error}")
        if not problems:  # replacements that are rented later read the limit from the spec
            folder.write_spec(replace_fields(spec, max_hours=hours, poweroff_grace=grace_seconds))
            name = spec.machine_names[0]
            shared_spec_path = f"{fleet.provisioner.job_folder(name)}/job.json"
            fleet.connectors[name].write(shared_spec_path, folder.spec_path.read_bytes())
        fleet.close()
        with aws_errors_as_cluster_errors():
            job_instances.update_expiry_tags(self.run.clock() + seconds_left + grace_seconds)
        if problems:
            raise ClusterError(f"the limit was not set everywhere: {'; '.join(problems)}; run the command again")

    @property
    def _journal(self) -> Journal:
        return Journal(self.run.folder.path / JOURNAL_FILE)

    def job_cost(self, moment: float | None = None) -> JobCost:
        """Return what each machine has cost until `moment` (seconds since 1970; None: until now)."""
        return admin.job_cost(self.run.folder.path, moment)

    def cost_dollars(self) -> float:
        """Return the cost of the job's machines until now in dollars. Machines of unknown price are not counted."""
        return billing.CostMeter(self._journal).total_dollars(self.run.clock())

    def cost_dollars_until(self, moment: float) -> float | None:
        """Return the cost of the job's machines until `moment`, None when the price of one of them is unknown."""
        meter = billing.CostMeter(self._journal)
        return None if meter.unpriced_machines(moment) else meter.total_dollars(moment)
