"""Machines rented from AWS: EC2, spot or on demand, away again when the job ends."""

import contextlib
import json
import shutil
import time
from dataclasses import replace as with_other
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
    return AwsController(JobSpec.from_json(json.loads(RunFolder(run_path).spec_path.read_text())), RunFolder(run_path))


def get_controller(run_folder: RunFolder) -> AwsController:
    """Return what this process knows of the job's machines. Raises `ClusterError`."""
    with aws_errors_as_cluster_errors():
        return _cached_controller(run_folder.path)


def check(spec: JobSpec, runs_folder: Path) -> None:
    """Raise `ClusterError` when a program is missing here. What AWS has to say, the plan has asked."""
    tmux.require_tmux()
    for program in ("ssh", "ssh-keygen"):
        if not shutil.which(program):
            raise ClusterError(f"{program} is missing; install it: sudo apt-get install openssh-client")
    if not spec.cloud:
        raise BadInput("nobody has said what is to be rented; imgnet-cluster launch says it")


def launch(spec: JobSpec, run_folder: RunFolder) -> None:
    """Start the supervisor in a session of the job's name; it rents the machines and does all the rest."""
    if not ssh.is_supervised(run_folder):
        with aws_errors_as_cluster_errors():
            JobInstances(spec, run_folder, print).record_launch(run_folder.launch_id)
    ssh.launch(spec, run_folder)


def poll(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Rent what is missing, set it up, bring files home. Returns whether the job is, or may be, at work."""
    return get_controller(run_folder).poll()


def dead_machines(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """Return the machines that certainly have no agent at work: EC2 says they are gone, or they say so."""
    return get_controller(run_folder).dead_machines()


def replace(spec: JobSpec, run_folder: RunFolder, name: str) -> None:
    """Start a machine's agent again, or rent another machine in its place; in the background."""
    get_controller(run_folder).replace(name)


def kill_machine(spec: JobSpec, run_folder: RunFolder, name: str, notice_seconds: float | None) -> None:
    """Have EC2 end a machine, as a power cut does; with `notice`, tell its agent ahead as EC2 does."""
    if notice_seconds is None:
        with aws_errors_as_cluster_errors():
            JobInstances(spec, run_folder, print).kill_machine(name)
    else:
        open_fleet(spec, run_folder).kill_machine(name, notice_seconds)


def open_fleet(spec: JobSpec, run_folder: RunFolder) -> Fleet:
    """Return the machines for one command, as the supervisor last wrote down how to reach them."""
    said = read_json(run_folder.path / HOSTS_FILE)
    if not said:
        raise ClusterError(f"{spec.name} has no machines yet; imgnet-cluster status {spec.name}")
    return Fleet(with_other(spec, hosts=Hosts.from_json(said).to_json()), run_folder)


def terminate(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """End all machines of the job, and return when EC2 says so. Raises `ClusterError` with what is not gone."""
    with aws_errors_as_cluster_errors():
        if not (run_folder.path / JOURNAL_FILE).exists():
            tmux.kill_session(spec.name, run_folder.path)
            return []
        rented = JobInstances(spec, run_folder, lambda text: None)
        left = rented.terminate_job()
        with contextlib.suppress(CloudError, OSError):
            billing.record_spot_costs(rented.account, rented.journal, time.time())
    if left:
        raise ClusterError(f"{spec.name} is not gone yet: {'; '.join(left)}; again: imgnet-cluster down {spec.name}")
    tmux.kill_session(spec.name, run_folder.path)
    return []


def extend_time_limit(spec: JobSpec, run_folder: RunFolder, hours: float) -> None:
    """Let the machines live for so many hours since the first came. Raises `ClusterError` with who did not hear it."""
    here = open_fleet(spec, run_folder)
    rented = JobInstances(spec, run_folder, print)
    since = rented.first_machine_time or time.time()
    place = rented.current_place
    allowed, late = rented.compute_limits(place, hours) if place else (hours, float(POWEROFF_GRACE_SECONDS))
    if allowed < hours:
        raise BadInput(f"--max-hours {hours:g}: --max-price-total allows {allowed:.3g}")
    left = 3600 * hours - (time.time() - since)
    if left <= 0:
        raise BadInput(f"{hours:g} hours are over already; end it: imgnet-cluster stop {spec.name}")
    silent = []
    for name, remote in here.connectors.items():
        try:
            remote.run(["sudo", "-n", "imgnet-limit", f"{left + late:.0f}"], timeout=30)
            remote.write(f"{here.setup_progress.rows[name]['work']}/limit", json.dumps({"hours": hours}).encode())
        except (ClusterError, KeyError) as error:
            silent.append(f"machine {name}: {error}")
    if not silent:  # for machines that come later
        run_folder.write_spec(with_other(spec, max_hours=hours, poweroff_grace=late))
        name = spec.machine_names[0]
        here.connectors[name].write(f"{here.provisioner.job_folder(name)}/job.json", run_folder.spec_path.read_bytes())
    here.close()
    with aws_errors_as_cluster_errors():
        rented.update_expiry_tags(time.time() + left + late)
    if silent:
        raise ClusterError(f"not all have heard it: {'; '.join(silent)}; the same again")


def cost_dollars(spec: JobSpec, run_folder: RunFolder) -> float:
    """Return what the job's machines have cost until now, as far as their prices are known."""
    return billing.CostMeter(Journal(run_folder.path / JOURNAL_FILE)).total_dollars(time.time())


def cost_dollars_until(spec: JobSpec, run_folder: RunFolder, moment: float) -> float | None:
    """Return what the job's machines had cost at a moment, None when the price of one of them is not known."""
    meter = billing.CostMeter(Journal(run_folder.path / JOURNAL_FILE))
    return None if meter.unpriced_machines(moment) else meter.total_dollars(moment)
