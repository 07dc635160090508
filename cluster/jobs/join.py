"""Machines of the hosts file that join a running job, when the user says so."""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.connectors.hosts_file import Host, read_hosts
from cluster.errors import BadInput, ClusterError
from cluster.state.attempts import Attempt
from cluster.state.run_folder import Run
from cluster.state.spec import JobSpec
from cluster.state.status import read_agent_status, read_setup_record

from .job import WAIT_POLL_SECONDS, WRITE_RESULT_LOCK_SECONDS, Job
from .store import jobs_on_machines
from .supervision import job_lock


def begin_join(job: Job, host_names: Sequence[str]) -> dict[str, str]:
    """Let machines of the job's hosts file join it: its supervisor sets them up. Returns their hosts, by machine.

    Raises `ClusterError` when the job cannot use them, or one is busy; its subclass `BadInput` when one is not listed.
    """
    job.refresh()
    _newest_attempt(job)
    job.supervision.require()
    with job.report_damaged_files(), job_lock(job.path, WRITE_RESULT_LOCK_SECONDS):
        newest = _newest_attempt(job)  # again: it may have ended while this process waited for the lock
        run = Run.read(job.path)  # another command may have changed it
        spec, hosts = run.spec, _listed_hosts(run.spec, host_names)
        machines = dict(zip(spec.machine_names, spec.host_list, strict=False))
        numbers = {host.endpoint: name for name, host in machines.items()}
        new = [host for host in hosts if host.endpoint not in numbers]
        for host in new:
            for job_there in jobs_on_machines([host]):
                raise ClusterError(f"{host.host} is busy with {job_there.name}; wait, or stop that job")
        _require_use(spec, spec.machines - len(newest.members), len(new))
        joined = {}
        for host in hosts:
            name = numbers.get(host.endpoint, str(len(machines)))
            joined[name], machines[name] = host.host, host
            status = read_agent_status(run.folder, name)
            if status and not (status.ended or name in spec.joining or run.folder.disabled_marker(name).exists()):
                raise ClusterError(f"{host.host} is machine {name} of {job.name}; if it is lost, it returns by itself")
        for name in joined:  # first: a machine of the specification without a marker would never be set up
            run.folder.disabled_marker(name).unlink(missing_ok=True)
            run.folder.join_marker(name).touch()
        if spec.hosts:
            recovery = replace(spec.recovery, spares=spec.recovery.spares + len(new))
            joining = (*spec.joining, *(name for name in joined if name not in spec.machine_names))
            listed = replace(spec.hosts, machines=tuple(machines.values()))
            run.folder.write_spec(replace(spec, hosts=listed, recovery=recovery, joining=joining))
    return joined


def _newest_attempt(job: Job) -> Attempt:
    """Return the newest attempt of a job that trains. Raises `ClusterError` for another one."""
    newest, folder = job.run_folder.attempts.newest(), job.run_folder
    if job.has_ended or not newest or folder.end_reason() or newest.launch_id != folder.launch_id:
        raise ClusterError(f"{job.name} is {job.state.phrase} and does not train now, so no machine can join it")
    return newest


def wait_for_join(job: Job, machines: Collection[str]) -> dict[str, str]:
    """Wait until machines have been set up; return why each cannot join, "" if it can. Raises `ClusterError`."""
    while any(job.run_folder.join_marker(name).exists() for name in machines):
        job.refresh()
        if job.has_ended:
            raise ClusterError(f"{job.name} has ended meanwhile")
        time.sleep(WAIT_POLL_SECONDS)
    return {name: read_setup_record(job.run_folder).machines[name].reason for name in machines}


def _listed_hosts(spec: JobSpec, names: Sequence[str]) -> list[Host]:
    path = (spec.backend_options or {}).get("hosts")
    if not spec.hosts or not isinstance(path, str):
        raise BadInput(f"{spec.name} was not launched here on machines of a hosts file, so none can join it")
    machines = read_hosts(Path(path).expanduser()).machines
    hosts = {f"{host.host}:{host.endpoint[1]}": host for host in machines} | {host.host: host for host in machines}
    if unknown := [name for name in names if name not in hosts]:
        raise BadInput(f"{path} does not list {', '.join(unknown)}; add it there first")
    return [hosts[name] for name in dict.fromkeys(names)]


def _require_use(spec: JobSpec, missing: int, count: int) -> None:
    """Raise `ClusterError` when `count` more machines would have nothing to do, while `missing` are lost."""
    command, total, gpus = spec.own_command, spec.machines + count, spec.schedule_gpus
    before, after = (math.ceil(gpus / (machines * spec.procs)) for machines in (spec.machines, total))
    if count <= missing or (command.elastic if command else after < before):
        return
    limit = "its command is not elastic" if command else f"each step is cut into {gpus} batches, one for each GPU"
    raise ClusterError(f"{spec.name} would be no faster on {total} machines than on {spec.machines}: {limit}")
