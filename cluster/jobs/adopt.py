"""Taking over a job that another computer launched: the machines know all there is to know."""

import json
from dataclasses import replace
from pathlib import Path

from cluster.backends import registry
from cluster.connectors.hosts_file import Hosts, read_hosts
from cluster.connectors.ssh import SSHConnector
from cluster.errors import BadInput, ClusterError, NoSuchJob
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from train.tools.filesystem import locked, read_json, to_json_bytes
from train.tools.filesystem import write_atomic as replace_file

from . import store
from .job import Job

# The jobs in a shared folder that have no result.
LIST_UNFINISHED_SCRIPT = (
    'cd "$1" 2>/dev/null && for one in */job.json; do d=${one%/*}; '
    '[ -e "$one" ] && [ ! -e "$d/result.json" ] && echo "$d"; done; :'
)


def adopt(hosts_file: str | Path, uid: str | None = None) -> Job:
    """Make a run folder for a job of these machines, and start a supervisor here. The other one may go on or not.

    Raises `NoSuchJob`, `BadInput` when there are several and none is named, `ClusterError`, `Unreachable`.
    """
    hosts = read_hosts(Path(hosts_file).expanduser())
    if not hosts.shared:
        raise BadInput(f"{hosts_file}: names no shared folder; the job is described there")
    remote = SSHConnector(hosts.machines[0])
    try:
        uid = uid or _find_only_unfinished(remote, hosts.shared)
        described, mark = (remote.read_from(f"{hosts.shared}/{uid}/{name}", 0) for name in ("job.json", "launch"))
    finally:
        remote.close()
    if not described:
        raise NoSuchJob(
            f"{uid}: there is no such job in {hosts.shared}; names are such as job-3-9073e811: ls {hosts.shared}"
        )
    try:
        spec = JobSpec.from_json(json.loads(described))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterError(f"{hosts.shared}/{uid}/job.json is damaged ({type(error).__name__}: {error})") from None
    store.runs_folder().mkdir(parents=True, exist_ok=True)
    with locked(store.runs_folder() / ".adopt.lock"):
        for job in store.all_jobs():
            said = read_json(job.run_folder.spec_path)
            if isinstance(said, dict) and said.get("uid") == uid:
                raise ClusterError(f"{uid} is here already, as {job.name}; imgnet-cluster status {job.name}")
        return _create_run_folder(spec, hosts, mark)


def _find_only_unfinished(remote: SSHConnector, shared: str) -> str:
    """Return the one job that is not finished."""
    found = remote.run(["sh", "-c", LIST_UNFINISHED_SCRIPT, "sh", shared]).out.decode().split()
    if not found:
        raise NoSuchJob(f"there is no unfinished job in {shared}")
    if len(found) > 1:
        raise BadInput(f"there are several jobs in {shared}; name one of {', '.join(found)}")
    return found[0]


def _create_run_folder(spec: JobSpec, hosts: Hosts, launch_id: bytes) -> Job:
    machines = hosts.machines[: len(spec.machine_names)]
    if len(machines) < len(spec.machine_names):
        raise BadInput(f"{spec.uid} has {len(spec.machine_names)} machines, the hosts file names {len(machines)}")
    run = store.create_run_folder(registry.get_backend("ssh").reserved_names())
    folders = RunFolder(run)
    folders.shared.mkdir(parents=True)
    mine = replace(spec, name=run.name, hosts=Hosts(hosts.shared, machines).to_json())
    replace_file(folders.recipe_path, to_json_bytes(spec.recipe.to_json()))
    replace_file(folders.shared / "job.json", to_json_bytes(mine.to_json()))
    replace_file(folders.launch_path, launch_id)
    replace_file(run / "machines.json", to_json_bytes({"launch": launch_id.decode(), "adopted": True, "machines": {}}))
    replace_file(folders.spec_path, to_json_bytes(mine.to_json()))
    job = Job(run)
    job.refresh()
    return job
