"""Backend `aws`: EC2 instances, spot or on demand, that are rented for one job and terminated when it ends."""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace as replace_fields
from functools import cached_property
from pathlib import Path

from cluster.backends.aws.planning.plan import AwsPlanner
from cluster.backends.aws.renting.controller import HOSTS_FILE, NOT_RENTED, RentedJobController
from cluster.backends.aws.renting.instances import JobInstances
from cluster.backends.aws.terms.aws_options import AwsOptions
from cluster.backends.remote import RemoteBackend
from cluster.backends.rentals import RentalLimit, RentedNow
from cluster.connectors import tmux
from cluster.connectors.hosts_file import Hosts
from cluster.connectors.ssh_config import require_openssh
from cluster.errors import BadInput, ClusterError
from cluster.machines.fleet import Fleet
from cluster.state import supervisor_records
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from infra.costs import JobCost
from infra.errors import CloudError
from train.metrics.text import hours_text
from train.tools.files import write_atomic
from train.tools.records import DamagedRecord, read_record
from train.tools.text_files import to_json_bytes


@contextlib.contextmanager
def report_damaged_journal() -> Iterator[None]:
    """Raise the damage of a journal as a `ClusterError`."""
    try:
        yield
    except DamagedRecord as error:
        raise ClusterError(str(error)) from error


class AwsBackend(RemoteBackend):
    """Instances that are rented for one job."""

    name = "aws"
    description = "machines rented from AWS"
    is_billed = True
    options = AwsOptions
    planner_class = AwsPlanner
    provider_class = JobInstances

    @classmethod
    def check(cls, spec: JobSpec, runs_folder: Path) -> None:
        """Check that the programs it needs are installed here. Raises `ClusterError`. The plan has asked AWS before."""
        tmux.require_tmux()
        require_openssh("ssh", "ssh-keygen")
        if not spec.cloud:
            raise BadInput("the job has no rental specification; start it with: imgnet-cluster launch")

    @cached_property
    def controller(self) -> RentedJobController:
        """The controller of the job's machines, of which a supervisor has one. Raises `ClusterError`."""
        ActivityHandler.install(self.run.folder)
        with report_damaged_journal():
            return RentedJobController(self.run.spec, self.run.folder, self.provider_class)

    @property
    def supervised_fleet(self) -> Fleet | None:
        """The supervisor's connections; None in other processes, and before they are open."""
        return self.controller.fleet if "controller" in vars(self) else None

    def _open_provider(self) -> JobInstances:
        """Return the job's provider for one command. Raises `CloudError`."""
        return self.provider_class(self.run.spec, self.run.folder)

    def launch(self) -> None:
        """Start the supervisor. It rents the machines and does all the rest."""
        if not self.is_supervised():
            with report_damaged_journal():
                self._open_provider().record_launch(self.run.folder.launch_id)
        super().launch()

    def check_access(self, ask_cloud: bool = False) -> None:
        """Raise `NoCredentials` without credentials, with `ask_cloud` also when the cloud does not accept them."""
        with report_damaged_journal():
            self._open_provider().check_access(ask_cloud)

    def access_error(self) -> str:
        """Return why the cloud refuses the supervisor's credentials, "" when it accepts them."""
        return self.controller.access_error if "controller" in vars(self) else ""

    def replacement_error(self) -> str:
        """Return why no machine could be rented in place of one that was lost, "" if one could."""
        return self.controller.replacement_error if "controller" in vars(self) else ""

    def poll(self) -> bool:
        """Rent missing machines, set them up and copy new files to the run folder."""
        return self.controller.poll()

    def dead_machines(self) -> list[str]:
        """Return the machines that certainly have no agent: gone from the cloud, or reporting that none runs."""
        return self.controller.dead_machines()

    def replace(self, machine: str) -> None:
        """Start a machine's agent again, or rent another one in its place, in the background."""
        self.controller.replace(machine)

    def kill_machine(self, machine: str, notice_seconds: float | None) -> None:
        """Terminate a machine at once, or give its agent a notice as a cloud does before an interruption."""
        if notice_seconds is None:
            with report_damaged_journal():
                provider = self._open_provider()
                machines = provider.list_machines()
                if machine not in machines:
                    raise CloudError(
                        f"machine {machine} is not rented at present; see: imgnet-cluster status {self.run.handle}"
                    )
                provider.terminate([machines[machine].id], "lost in a rehearsal")
        else:
            self.open_fleet().kill_machine(machine, notice_seconds)

    def open_fleet(self) -> Fleet:
        """Open connections to the machines at the addresses that the supervisor wrote down last."""
        spec, folder = self.run.spec, self.run.folder
        hosts = read_record(folder.path / HOSTS_FILE, Hosts)
        if not hosts:
            raise ClusterError(f"{spec.name} has no machines yet; see: imgnet-cluster status {self.run.handle}")
        return Fleet(replace_fields(spec, hosts=hosts), folder)

    def terminate(self) -> list[str]:
        """Terminate all machines of the job. Raises `ClusterError`, which names what is not terminated.

        A supervisor does not terminate a job that another computer has adopted meanwhile. A command of the user does.
        """
        name, folder = self.run.spec.name, self.run.folder
        if folder.journal_path.exists():  # else nothing was ever rented
            with report_damaged_journal():
                provider = self._open_provider()
                if "controller" in vars(self):
                    provider.require_ownership()
                leftovers = provider.terminate_job()
            if leftovers:
                raise ClusterError(
                    f"{name} is not completely terminated: {'; '.join(leftovers)}; "
                    f"run again: imgnet-cluster down {self.run.handle}"
                )
        tmux.kill_session(folder.tmux_session, folder.path)
        return []

    def rented_now(self) -> RentedNow | None:
        """Return which machines the job rents now, None if none. Reads the run folder and does not ask the cloud."""
        cost = self.job_cost()
        if not cost.running and not cost.requested:
            return None
        rented = RentedNow(machines=cost.running, requested=cost.requested)
        with contextlib.suppress(CloudError):
            provider = self._open_provider()
            rate, end = provider.dollars_per_hour, provider.power_off_time
            is_overdue = end < self.run.clock()
            return replace_fields(rented, dollars_per_hour=rate, power_off_time=end, is_overdue=is_overdue)
        return rented

    def rental_limit(self, hours: float | None = None, dollars: float | None = None) -> RentalLimit:
        """Return the limit of this launch's machines, or the one that they would get from `extend_limits`."""
        provider = self._open_provider()
        provider.change_limits(hours, dollars)
        rate = provider.dollars_per_hour
        max_hours, grace_seconds = provider.compute_limits(rate)
        highest_cost = None if rate is None else provider.earlier_cost + rate * (max_hours + grace_seconds / 3600)
        return RentalLimit(hours=max_hours, dollars=highest_cost)

    def extend_limits(self, hours: float | None, dollars: float | None) -> float | None:
        """Set the limits on all machines, and in the run folder for later machines."""
        spec, folder = self.run.spec, self.run.folder
        provider = self._open_provider()
        with report_damaged_journal():
            provider.require_ownership()
        now = self.run.clock()
        if dollars is not None:
            spent_dollars = provider.total_dollars(now)
            if dollars <= spent_dollars:
                raise BadInput(
                    f"--max-price-total {dollars:g}: {spec.name} has cost ${spent_dollars:,.2f} already; pass more"
                )
            spec = replace_fields(spec, cloud={**(spec.cloud or {}), "max_dollars": dollars})
            if not folder.result_path.exists() and provider.dollars_per_hour is None:
                raise BadInput(
                    f"--max-price-total: the price of the machines of {spec.name} is unknown, so it cannot be limited; "
                    "limit the time instead: --max-hours"
                )
        if folder.result_path.exists():
            folder.write_spec(spec)
            return None
        with contextlib.closing(self.open_fleet()) as fleet:
            provider.change_limits(hours, dollars)
            return self._extend_limits_of_machines(spec, fleet, provider, hours)

    def _extend_limits_of_machines(
        self, spec: JobSpec, fleet: Fleet, provider: JobInstances, hours: float | None
    ) -> float:
        """Set the limits of live machines, then those of the run folder, from which later machines get theirs.

        `spec` and the provider have the new limits. Errors are those of `extend_limits`.
        """
        folder = self.run.folder
        limited_spec = provider.with_machine_limits(spec)
        max_hours, grace_seconds = limited_spec.max_hours or 0.0, limited_spec.poweroff_grace or 0.0
        if hours is not None and max_hours < hours:
            reason = limited_spec.limit_name or "--max-price-total"
            raise BadInput(f"--max-hours {hours:g}: {reason} allows only {hours_text(max_hours)}")
        now = self.run.clock()
        seconds_left = 3600 * max_hours - (now - (provider.first_machine_time or now))
        if seconds_left <= 0:
            cause = f", all that {limited_spec.limit_name} allows" if limited_spec.limit_name else ""
            raise BadInput(
                f"{spec.name} has been running for more than {hours_text(max_hours)}{cause}; to stop it: "
                f"imgnet-cluster stop {self.run.handle}"
            )
        problems = []
        for name, connector in fleet.connectors.items():
            if (row := fleet.setup_progress.rows.get(name)) and row.reason == NOT_RENTED:
                continue
            try:
                connector.run(["sudo", "-n", "imgnet-limit", f"{seconds_left + grace_seconds:.0f}"], timeout=30)
                limit_path = f"{fleet.setup_progress.rows[name].work}/limit"
                limit = {"hours": max_hours, "name": limited_spec.limit_name}
                connector.write(limit_path, json.dumps(limit).encode())
            except (ClusterError, KeyError) as error:
                problems.append(f"machine {name}: {error}")
        if not problems:
            folder.write_spec(replace_fields(spec, max_hours=provider.max_hours, poweroff_grace=grace_seconds))
            name = spec.machine_names[0]
            shared_spec = to_json_bytes(replace_fields(limited_spec, queue="").to_json())
            write_atomic(folder.shared / "job.json", shared_spec)  # a supervisor that sets machines up sends this one
            fleet.connectors[name].write(f"{fleet.provisioner.job_folder(name)}/job.json", shared_spec)
        with report_damaged_journal():
            provider.set_expiry(now + seconds_left + grace_seconds)
        if problems:
            raise ClusterError(f"some machines did not get the new limit: {'; '.join(problems)}; run the command again")
        return max_hours

    def job_cost(self, moment: float | None = None) -> JobCost:
        """Return what each machine has cost until `moment` (seconds since 1970; None: until now)."""
        return self.provider_class.job_cost(self.run.folder.path, self.run.clock() if moment is None else moment)


class ActivityHandler(logging.Handler):
    """Shows what the backend logs, but for warnings, as the job's activity, which `status` has."""

    @classmethod
    def install(cls, run_folder: RunFolder) -> None:
        """Show the activity in a run folder, instead of in the one of an earlier controller of this process."""
        handler = cls(run_folder)
        for name in ("infra", "cluster.backends"):
            activity_logger = logging.getLogger(name)
            others = [other for other in activity_logger.handlers if not isinstance(other, cls)]
            activity_logger.handlers[:] = [*others, handler]

    def __init__(self, run_folder: RunFolder) -> None:
        super().__init__()
        self.run_folder = run_folder

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message to the run folder."""
        if record.levelno == logging.INFO:
            supervisor_records.write_activity(self.run_folder.path, record.getMessage())
