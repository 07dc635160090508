"""Taking over a job that another computer launched: the machines know all there is to know."""

import json
from dataclasses import replace
from pathlib import Path

from cluster.backends import registry
from cluster.connectors.hosts_file import Hosts, read_hosts
from cluster.connectors.ssh import Remote
from cluster.errors import BadInput, ClusterError, NoSuchJob
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec
from train.tools.filesystem import as_json, locked, read_json
from train.tools.filesystem import replace as replace_file

from . import store
from .job import Job

# The jobs in a shared folder that have no result.
UNFINISHED = (
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
    remote = Remote(hosts.machines[0])
    try:
        uid = uid or _only(remote, hosts.shared)
        described, mark = (remote.read_from(f"{hosts.shared}/{uid}/{name}", 0) for name in ("job.json", "launch"))
    finally:
        remote.close()
    if not described:
        raise NoSuchJob(
            f"{uid}: there is no such job in {hosts.shared}; names are such as job-3-9073e811: ls {hosts.shared}"
        )
    try:
        spec = Spec.from_json(json.loads(described))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterError(f"{hosts.shared}/{uid}/job.json is damaged ({type(error).__name__}: {error})") from None
    store.runs().mkdir(parents=True, exist_ok=True)
    with locked(store.runs() / ".adopt.lock"):
        for job in store.all_jobs():
            said = read_json(job.folders.spec)
            if isinstance(said, dict) and said.get("uid") == uid:
                raise ClusterError(f"{uid} is here already, as {job.name}; imgnet-cluster status {job.name}")
        return _create(spec, hosts, mark)


def _only(remote: Remote, shared: str) -> str:
    """Return the one job that is not finished."""
    found = remote.run(["sh", "-c", UNFINISHED, "sh", shared]).out.decode().split()
    if not found:
        raise NoSuchJob(f"there is no unfinished job in {shared}")
    if len(found) > 1:
        raise BadInput(f"there are several jobs in {shared}; name one of {', '.join(found)}")
    return found[0]


def _create(spec: Spec, hosts: Hosts, mark: bytes) -> Job:
    machines = hosts.machines[: len(spec.names)]
    if len(machines) < len(spec.names):
        raise BadInput(f"{spec.uid} has {len(spec.names)} machines, the hosts file names {len(machines)}")
    run = store.make_folder(registry.get("ssh").taken())
    folders = Folders(run)
    folders.shared.mkdir(parents=True)
    mine = replace(spec, name=run.name, hosts=Hosts(hosts.shared, machines).to_json())
    replace_file(folders.recipe, as_json(spec.recipe.to_json()))
    replace_file(folders.shared / "job.json", as_json(mine.to_json()))
    replace_file(folders.launch, mark)
    replace_file(run / "machines.json", as_json({"launch": mark.decode(), "adopted": True, "machines": {}}))
    replace_file(folders.spec, as_json(mine.to_json()))
    job = Job(run)
    job.refresh()
    return job
