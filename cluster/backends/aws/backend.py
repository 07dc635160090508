"""Backend `aws`: EC2 instances, spot or on demand, that are terminated when the job ends."""

import contextlib
import json
import shutil
import time
from dataclasses import replace as replace_fields  # `replace` is a function of the backend interface
from functools import cache
from pathlib import Path

from cluster.backends import ssh
from cluster.backends.ssh import agents_alive as agents_alive
from cluster.backends.ssh import reserved_names as reserved_names
from cluster.connectors import tmux
from cluster.connectors.hosts_file import Hosts
from cluster.errors import BadInput, ClusterError
from cluster.machines.fleet import Fleet
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from infra.aws.errors import CloudError
from infra.aws.journal import Journal
from infra.aws.market import billing
from train.tools.filesystem import read_json

from .controller import AwsController
from .errors import aws_errors_as_cluster_errors
from .instances import HOSTS_FILE, JOURNAL_FILE, JobInstances
from .rental_spec import POWEROFF_GRACE_SECONDS

DESCRIPTION = "machines rented from AWS"
IS_REMOTE = True


@cache
def _cached_controller(run_path: Path) -> AwsController:
    run_folder = RunFolder(run_path)
    return AwsController(JobSpec.from_json(json.loads(run_folder.spec_path.read_text())), run_folder)


def get_controller(run_folder: RunFolder) -> AwsController:
    """Return this process's controller of the job's instances. Raises `ClusterError`."""
    with aws_errors_as_cluster_errors():
        return _cached_controller(run_folder.path)


def check(spec: JobSpec, runs_folder: Path) -> None:
    """Check that all programs are installed here (`ClusterError`). AWS was already asked when the job was planned."""
    tmux.require_tmux()
    for program in ("ssh", "ssh-keygen"):
        if not shutil.which(program):
            raise ClusterError(f"{program} is missing; install it: sudo apt-get install openssh-client")
    if not spec.cloud:
        raise BadInput("the job has no rental specification; start it with: imgnet-cluster launch")


def launch(spec: JobSpec, run_folder: RunFolder) -> None:
    """Start the supervisor in a tmux session that has the job's name. It rents the instances and does all the rest."""
    if not ssh.is_supervised(run_folder):
        with aws_errors_as_cluster_errors():
            JobInstances(spec, run_folder, print).record_launch(run_folder.launch_id)
    ssh.launch(spec, run_folder)


def poll(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Rent missing instances, set them up and copy new files to the run folder.

    Returns whether the job is running, or may be.
    """
    return get_controller(run_folder).poll()


def dead_machines(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """Return the machines that certainly have no running agent: EC2 says that they are gone, or they say so."""
    return get_controller(run_folder).dead_machines()


def replace(spec: JobSpec, run_folder: RunFolder, name: str) -> None:
    """Start a machine's agent again, or rent another instance in its place, in the background."""
    get_controller(run_folder).replace(name)


def kill_machine(spec: JobSpec, run_folder: RunFolder, name: str, notice_seconds: float | None) -> None:
    """Terminate a machine's instance at once, or give its agent a notice as EC2 does before an interruption."""
    if notice_seconds is None:
        with aws_errors_as_cluster_errors():
            JobInstances(spec, run_folder, print).kill_machine(name)
    else:
        open_fleet(spec, run_folder).kill_machine(name, notice_seconds)


def open_fleet(spec: JobSpec, run_folder: RunFolder) -> Fleet:
    """Open connections to the machines for one command, at the addresses that the supervisor wrote down last."""
    hosts = read_json(run_folder.path / HOSTS_FILE)
    if not hosts:
        raise ClusterError(f"{spec.name} has no machines yet; see: imgnet-cluster status {spec.name}")
    return Fleet(replace_fields(spec, hosts=Hosts.from_json(hosts).to_json()), run_folder)


def terminate(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """Terminate all instances of the job and wait until EC2 confirms it.

    Raises `ClusterError` that names what is not terminated.
    """
    with aws_errors_as_cluster_errors():
        if not (run_folder.path / JOURNAL_FILE).exists():  # nothing was ever rented
            tmux.kill_session(spec.name, run_folder.path)
            return []
        job_instances = JobInstances(spec, run_folder, lambda text: None)
        leftovers = job_instances.terminate_job()
        with contextlib.suppress(CloudError, OSError):
            billing.record_spot_costs(job_instances.account, job_instances.journal, time.time())
    if leftovers:
        raise ClusterError(
            f"{spec.name} is not completely terminated: {'; '.join(leftovers)}; "
            f"run again: imgnet-cluster down {spec.name}"
        )
    tmux.kill_session(spec.name, run_folder.path)
    return []


def extend_time_limit(spec: JobSpec, run_folder: RunFolder, hours: float) -> None:
    """Set the job's time limit to `hours` since its first machine started.

    Raises `BadInput` when the price limit forbids it or the time is already over, `ClusterError` with the machines on
    which the new limit could not be set.
    """
    fleet = open_fleet(spec, run_folder)
    job_instances = JobInstances(spec, run_folder, print)
    start_time = job_instances.first_machine_time or time.time()
    place = job_instances.current_place
    if place:
        allowed_hours, grace_seconds = job_instances.compute_limits(place, hours)
    else:
        allowed_hours, grace_seconds = hours, float(POWEROFF_GRACE_SECONDS)
    if allowed_hours < hours:
        raise BadInput(f"--max-hours {hours:g}: --max-price-total allows only {allowed_hours:.3g} hours")
    seconds_left = 3600 * hours - (time.time() - start_time)
    if seconds_left <= 0:
        raise BadInput(
            f"{spec.name} has been running for more than {hours:g} hours; to stop it: imgnet-cluster stop {spec.name}"
        )
    problems = []
    for name, connector in fleet.connectors.items():
        try:
            connector.run(["sudo", "-n", "imgnet-limit", f"{seconds_left + grace_seconds:.0f}"], timeout=30)
            limit_path = f"{fleet.setup_progress.rows[name].work}/limit"
            connector.write(limit_path, json.dumps({"hours": hours}).encode())
        except (ClusterError, KeyError) as error:
            problems.append(f"machine {name}: {error}")
    if not problems:  # replacements that are rented later read the limit from the spec
        run_folder.write_spec(replace_fields(spec, max_hours=hours, poweroff_grace=grace_seconds))
        name = spec.machine_names[0]
        shared_spec_path = f"{fleet.provisioner.job_folder(name)}/job.json"
        fleet.connectors[name].write(shared_spec_path, run_folder.spec_path.read_bytes())
    fleet.close()
    with aws_errors_as_cluster_errors():
        job_instances.update_expiry_tags(time.time() + seconds_left + grace_seconds)
    if problems:
        raise ClusterError(f"the limit was not set everywhere: {'; '.join(problems)}; run the command again")


def cost_dollars(spec: JobSpec, run_folder: RunFolder) -> float:
    """Return the cost of the job's machines until now in dollars. Machines of unknown price are not counted."""
    return billing.CostMeter(Journal(run_folder.path / JOURNAL_FILE)).total_dollars(time.time())


def cost_dollars_until(spec: JobSpec, run_folder: RunFolder, moment: float) -> float | None:
    """Return the cost of the job's machines until `moment`, None when the price of one of them is unknown."""
    meter = billing.CostMeter(Journal(run_folder.path / JOURNAL_FILE))
    return None if meter.unpriced_machines(moment) else meter.total_dollars(moment)
