"""Adoption: supervises a job that another computer launched.

The facts about the job are on its machines and, for rented machines, in the account that pays for them.
"""

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.connectors.hosts_file import Hosts, read_hosts
from cluster.connectors.ssh import SSHConnector
from cluster.errors import BadInput, ClusterError, NoSuchJob
from cluster.machines.mirror import LAUNCH_ID_PATTERN
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from cluster.state.supervisor_records import SetupRecord
from train.tools.files import locked, write_atomic
from train.tools.records import DamagedRecord, encode
from train.tools.text_files import read_json, to_json_bytes

from . import store
from .job import Job

if TYPE_CHECKING:
    from cluster.backends.aws.admin import AwsAdministration

UID_PATTERN = re.compile(r"[\w-]+-[0-9a-f]{8}", re.ASCII)
# What an adopted job takes from its description in the shared folder, which others may have written: how to train, and
# on how many machines. It takes nothing that costs money, names a program of this computer or another backend.
ADOPTED_FIELDS = (
    *("workload", "recipe_file", "train", "recovery", "data_source", "copies_source", "generate_data", "uid"),
    *("given_name", "machines", "procs", "max_hours", "heartbeat_seconds", "heartbeat_timeout_seconds"),
    *("git_commit", "created"),
)
LIST_TIMEOUT_SECONDS = 60.0
FIRST_FILES_SECONDS = 20.0  # for the supervisor to bring what `ls` shows
POLL_SECONDS = 0.2
# Prints the folders in the shared folder $1 that have a job.json and no result.json.
LIST_UNFINISHED_SCRIPT = (
    'cd "$1" 2>/dev/null && for spec in */job.json; do uid=${spec%/*}; '
    '[ -e "$spec" ] && [ ! -e "$uid/result.json" ] && echo "$uid"; done; :'
)


def adopt(hosts_file: str | Path, uid: str | None = None) -> Job:
    """Create a run folder for a job of the machines in `hosts_file`, and start a supervisor on this computer.

    The supervisor of the computer that launched the job may still be running: two supervisors do no harm.

    Raises `NoSuchJob` when there is no such job, `BadInput` when several are unfinished and no uid is given,
    `ClusterError` when its description is damaged or the job is here already, `Unreachable`.
    """
    hosts = read_hosts(Path(hosts_file).expanduser())
    if not hosts.shared:
        raise BadInput(f"{hosts_file}: names no shared folder, where the jobs are described; add: shared = DIR")
    if uid:
        _require_uid(uid)
    with SSHConnector(hosts.machines[0]) as connector:
        uid = uid or _find_only_unfinished(connector, hosts.shared)
        spec, launch_id = _read_description(connector, hosts.shared, uid)
    if spec.backend != "ssh" or spec.cloud:
        raise ClusterError(
            f"{uid} is not a job of your own machines, launched with --ssh; a job on rented machines is adopted by "
            f"the account that pays for them: imgnet-cluster adopt {uid} --region REGION"
        )
    machines = hosts.machines[: len(spec.machine_names)]
    if len(machines) < len(spec.machine_names):
        raise BadInput(
            f"{uid} has {len(spec.machine_names)} machines, but the hosts file lists {len(machines)}; "
            "list all machines of the job there, in the order of its launch"
        )
    adopted_spec = _take_fields(spec, backend="ssh", hosts=Hosts(hosts.shared, machines))
    return _create_job(adopted_spec, launch_id, lambda run_path: None)


def adopt_rented(cloud: "AwsAdministration", regions: Sequence[str], uid: str) -> Job:
    """Create a run folder for a job on rented machines, and supervise it here instead of on the other computer.

    The cloud's account says what the job may rent and spend. `regions` has the job's region, or nothing for the
    configured one. Raises `NoSuchJob`, `BadInput`, `ClusterError`.
    """
    _require_uid(uid)
    _require_new(uid)
    adoption = cloud.begin_adoption(cloud.resolve_regions(regions)[0], uid)
    name, host = next(iter(adoption.hosts.items()))
    with SSHConnector(host, f"machine {name} ({host.host})") as connector:
        spec, launch_id = _read_description(connector, adoption.shared, uid)
    if spec.backend != cloud.backend:
        raise ClusterError(f"{uid} is not a job on machines that are rented from {cloud.backend}")
    adopted_spec = adoption.with_terms(_take_fields(spec))
    return _create_job(adopted_spec, launch_id, lambda path: adoption.take_over(path, launch_id))


def _require_uid(uid: str) -> None:
    if not UID_PATTERN.fullmatch(uid):
        raise BadInput(f"{uid!r} is not the name of a job on its machines; such names look like job-3-9073e811")


def _require_new(uid: str) -> None:
    for job in store.all_jobs():
        local_spec = read_json(job.run_folder.spec_path)
        if isinstance(local_spec, dict) and local_spec.get("uid") == uid:
            raise ClusterError(f"{uid} is here already, as {job.name}; see: imgnet-cluster status {job.name}")


def _find_only_unfinished(connector: SSHConnector, shared: str) -> str:
    """Return the uid of the only unfinished job in a shared folder. Raises `NoSuchJob`, `BadInput`."""
    result = connector.run(["sh", "-c", LIST_UNFINISHED_SCRIPT, "sh", shared], timeout=LIST_TIMEOUT_SECONDS)
    lines = result.out.decode(errors="replace").splitlines()
    uids = [line for line in lines if UID_PATTERN.fullmatch(line)]
    if not uids:
        raise NoSuchJob(f"there is no unfinished job in {shared}")
    if len(uids) > 1:
        raise BadInput(f"there are several unfinished jobs in {shared}; name one of {', '.join(uids)}")
    return uids[0]


def _read_description(connector: SSHConnector, shared: str, uid: str) -> tuple[JobSpec, str]:
    """Return a job's description in a shared folder, and the ID of its launch. Raises `NoSuchJob`, `ClusterError`."""
    spec_json = connector.read_from(f"{shared}/{uid}/job.json", 0)
    launch_id = connector.read_from(f"{shared}/{uid}/launch", 0).decode(errors="replace")
    if not spec_json:
        raise NoSuchJob(
            f"{uid}: no such job in {shared}, or its machines are not set up yet; names look like job-3-9073e811; to "
            f"see them: ls {shared}"
        )
    try:
        spec = JobSpec.parse(spec_json, "")
    except DamagedRecord as error:
        raise ClusterError(f"{shared}/{uid}/job.json is damaged ({error})") from None
    if spec.uid != uid:
        raise ClusterError(f"{shared}/{uid}/job.json is damaged (it describes another job)")
    if not LAUNCH_ID_PATTERN.fullmatch(launch_id):
        raise ClusterError(f"{shared}/{uid}/launch is damaged (it is not the ID of a launch)")
    return spec, launch_id


def _take_fields(spec: JobSpec, backend: str = "", hosts: Hosts | None = None) -> JobSpec:
    """Return the specification of an adopted job, without a name, from the fields that may be taken over."""
    fields = {name: getattr(spec, name) for name in ADOPTED_FIELDS}
    return JobSpec(name="", backend=backend, is_one_computer=False, hosts=hosts, **fields)


def _create_job(spec: JobSpec, launch_id: str, take_over: Callable[[Path], None]) -> Job:
    """Create a run folder, call `take_over` with it before it is a job, start its supervisor. Raises `ClusterError`."""
    store.runs_folder().mkdir(parents=True, exist_ok=True)
    with locked(store.runs_folder() / ".adopt.lock"):
        _require_new(spec.uid)
        path = store.create_run_folder(spec.uid.rpartition("-")[0])
        spec = replace(spec, name=path.name)
        run_folder = RunFolder(path)
        run_folder.shared.mkdir(parents=True)
        setup_record = SetupRecord(launch=launch_id, is_adopted=True)
        write_atomic(run_folder.launch_path, launch_id.encode())
        write_atomic(run_folder.setup_record_path, to_json_bytes(encode(setup_record)))
        try:
            take_over(path)
        except ClusterError:
            shutil.rmtree(path)
            raise
        run_folder.write_spec(spec)  # last: it makes the folder a job
    job = Job(path)
    job.refresh()
    deadline = time.monotonic() + FIRST_FILES_SECONDS
    while time.monotonic() < deadline and not (job.has_ended or job.status().seconds):
        time.sleep(POLL_SECONDS)
    return job
