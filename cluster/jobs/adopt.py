"""Adoption: supervise a job that another computer launched. All that is known about it is on its machines."""

import re
from pathlib import Path

from cluster.backends import registry
from cluster.connectors.hosts_file import Hosts, read_hosts
from cluster.connectors.ssh import SSHConnector
from cluster.errors import BadInput, ClusterError, NoSuchJob
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from cluster.state.supervisor_records import SetupRecord
from train.tools.filesystem import locked, read_json, to_json_bytes, write_atomic
from train.tools.records import DamagedRecord, encode

from . import store
from .job import Job

UID_PATTERN = re.compile(r"[\w-]+-[0-9a-f]{8}", re.ASCII)
LAUNCH_ID_PATTERN = re.compile(r"[0-9a-f]{32}", re.ASCII)
# What an adopted job takes from its description in the shared folder, which others may have written: how to train, and
# on how many machines. It takes nothing that costs money, names a program of this computer or another backend.
ADOPTED_FIELDS = (
    "recipe",
    "recipe_file",
    "train",
    "recovery",
    "data_source",
    "copies_source",
    "uid",
    "machines",
    "procs",
    "max_hours",
    "heartbeat_seconds",
    "heartbeat_timeout_seconds",
    "git_commit",
    "created",
)

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
    if uid and not UID_PATTERN.fullmatch(uid):
        raise BadInput(f"{uid!r} is not the name of a job in {hosts.shared}; such names look like job-3-9073e811")
    connector = SSHConnector(hosts.machines[0])
    try:
        uid = uid or _find_only_unfinished(connector, hosts.shared)
        spec_json = connector.read_from(f"{hosts.shared}/{uid}/job.json", 0)
        launch_id = connector.read_from(f"{hosts.shared}/{uid}/launch", 0)
    finally:
        connector.close()
    if not spec_json:
        raise NoSuchJob(
            f"{uid}: no such job in {hosts.shared}; names look like job-3-9073e811; to see them: ls {hosts.shared}"
        )
    try:
        spec = JobSpec.parse(spec_json, "")
    except DamagedRecord as error:
        raise ClusterError(f"{hosts.shared}/{uid}/job.json is damaged ({error})") from None
    if spec.uid != uid:
        raise ClusterError(f"{hosts.shared}/{uid}/job.json is damaged (it describes another job)")
    if spec.backend != "ssh" or spec.cloud:
        raise ClusterError(f"{uid} is not a job of your own machines, launched with --ssh; only such jobs are adopted")
    if not LAUNCH_ID_PATTERN.fullmatch(launch_id.decode(errors="replace")):
        raise ClusterError(f"{hosts.shared}/{uid}/launch is damaged (it is not the ID of a launch)")
    store.runs_folder().mkdir(parents=True, exist_ok=True)
    with locked(store.runs_folder() / ".adopt.lock"):
        for job in store.all_jobs():
            local_spec = read_json(job.run_folder.spec_path)
            if isinstance(local_spec, dict) and local_spec.get("uid") == uid:
                raise ClusterError(f"{uid} is here already, as {job.name}; see: imgnet-cluster status {job.name}")
        return _create_run_folder(spec, hosts, launch_id)


def _find_only_unfinished(connector: SSHConnector, shared: str) -> str:
    """Return the uid of the only unfinished job in a shared folder. Raises `NoSuchJob`, `BadInput`."""
    lines = connector.run(["sh", "-c", LIST_UNFINISHED_SCRIPT, "sh", shared]).out.decode(errors="replace").splitlines()
    uids = [line for line in lines if UID_PATTERN.fullmatch(line)]
    if not uids:
        raise NoSuchJob(f"there is no unfinished job in {shared}")
    if len(uids) > 1:
        raise BadInput(f"there are several unfinished jobs in {shared}; name one of {', '.join(uids)}")
    return uids[0]


def _create_run_folder(spec: JobSpec, hosts: Hosts, launch_id: bytes) -> Job:
    """Create the local run folder of an adopted job and start its supervisor. Raises `BadInput`, `ClusterError`."""
    machines = hosts.machines[: len(spec.machine_names)]
    if len(machines) < len(spec.machine_names):
        raise BadInput(
            f"{spec.uid} has {len(spec.machine_names)} machines, but the hosts file lists {len(machines)}; "
            "list all machines of the job there, in the order of its launch"
        )
    path = store.create_run_folder(registry.backend_class("ssh").reserved_names())
    run_folder = RunFolder(path)
    run_folder.shared.mkdir(parents=True)
    local_spec = JobSpec(
        name=path.name,
        backend="ssh",
        is_one_computer=False,
        hosts=Hosts(hosts.shared, machines).to_json(),
        **{name: getattr(spec, name) for name in ADOPTED_FIELDS},
    )
    setup_record = SetupRecord(launch=launch_id.decode(), is_adopted=True)
    write_atomic(run_folder.recipe_path, to_json_bytes(spec.recipe.to_json()))
    write_atomic(run_folder.shared / "job.json", to_json_bytes(local_spec.to_json()))
    write_atomic(run_folder.launch_path, launch_id)
    write_atomic(path / "machines.json", to_json_bytes(encode(setup_record)))
    write_atomic(run_folder.spec_path, to_json_bytes(local_spec.to_json()))  # last: it makes the folder a job
    job = Job(path)
    job.refresh()
    return job
