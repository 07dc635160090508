"""Machines rented from AWS: EC2, spot or on demand, away again when the job ends."""

import contextlib
import json
import shutil
import time
from dataclasses import replace as with_other
from functools import cache
from pathlib import Path

from cluster.backends import ssh
from cluster.backends.ssh import alive as alive
from cluster.backends.ssh import taken as taken
from cluster.connectors import tmux
from cluster.connectors.hosts_file import Hosts
from cluster.errors import BadInput, ClusterError
from cluster.machines.fleet import Fleet
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec
from infra.aws.errors import CloudError
from infra.aws.journal import Journal
from infra.aws.market import billing
from train.tools.filesystem import read_json

from .controller import Cloud
from .errors import lines
from .instances import HOSTS, JOURNAL, Rented
from .rental_spec import GRACE

DESCRIPTION = "machines rented from AWS"
REMOTE = True


@cache
def _cloud(run: Path) -> Cloud:
    return Cloud(Spec.from_json(json.loads(Folders(run).spec.read_text())), Folders(run))


def cloud(folders: Folders) -> Cloud:
    """Return what this process knows of the job's machines. Raises `ClusterError`."""
    with lines():
        return _cloud(folders.run)


def check(spec: Spec, runs: Path) -> None:
    """Raise `ClusterError` when a program is missing here. What AWS has to say, the plan has asked."""
    tmux.require()
    for program in ("ssh", "ssh-keygen"):
        if not shutil.which(program):
            raise ClusterError(f"{program} is missing; install it: sudo apt-get install openssh-client")
    if not spec.cloud:
        raise BadInput("nobody has said what is to be rented; imgnet-cluster launch says it")


def launch(spec: Spec, folders: Folders) -> None:
    """Start the supervisor in a session of the job's name; it rents the machines and does all the rest."""
    if not ssh.supervised(folders):
        with lines():
            Rented(spec, folders, print).begin(folders.mark)
    ssh.launch(spec, folders)


def step(spec: Spec, folders: Folders) -> bool:
    """Rent what is missing, set it up, bring files home. Returns whether the job is, or may be, at work."""
    return cloud(folders).step()


def dead(spec: Spec, folders: Folders) -> list[str]:
    """Return the machines that certainly have no agent at work: EC2 says they are gone, or they say so."""
    return cloud(folders).dead()


def replace(spec: Spec, folders: Folders, name: str) -> None:
    """Start a machine's agent again, or rent another machine in its place; in the background."""
    cloud(folders).replace(name)


def lose(spec: Spec, folders: Folders, name: str, notice: float | None) -> None:
    """Have EC2 end a machine, as a power cut does; with `notice`, tell its agent ahead as EC2 does."""
    if notice is None:
        with lines():
            Rented(spec, folders, print).lose(name)
    else:
        fleet(spec, folders).lose(name, notice)


def fleet(spec: Spec, folders: Folders) -> Fleet:
    """Return the machines for one command, as the supervisor last wrote down how to reach them."""
    said = read_json(folders.run / HOSTS)
    if not said:
        raise ClusterError(f"{spec.name} has no machines yet; imgnet-cluster status {spec.name}")
    return Fleet(with_other(spec, hosts=Hosts.from_json(said).to_json()), folders)


def terminate(spec: Spec, folders: Folders) -> list[str]:
    """End all machines of the job, and return when EC2 says so. Raises `ClusterError` with what is not gone."""
    with lines():
        if not (folders.run / JOURNAL).exists():
            tmux.kill(spec.name, folders.run)
            return []
        rented = Rented(spec, folders, lambda text: None)
        left = rented.end()
        with contextlib.suppress(CloudError, OSError):
            billing.settle(rented.account, rented.journal, time.time())
    if left:
        raise ClusterError(f"{spec.name} is not gone yet: {'; '.join(left)}; again: imgnet-cluster down {spec.name}")
    tmux.kill(spec.name, folders.run)
    return []


def extend(spec: Spec, folders: Folders, hours: float) -> None:
    """Let the machines live for so many hours since the first came. Raises `ClusterError` with who did not hear it."""
    here = fleet(spec, folders)
    rented = Rented(spec, folders, print)
    since = rented.since or time.time()
    place = rented.place
    allowed, late = rented.limits(place, hours) if place else (hours, float(GRACE))
    if allowed < hours:
        raise BadInput(f"--max-hours {hours:g}: --max-price-total allows {allowed:.3g}")
    left = 3600 * hours - (time.time() - since)
    if left <= 0:
        raise BadInput(f"{hours:g} hours are over already; end it: imgnet-cluster stop {spec.name}")
    silent = []
    for name, remote in here.remotes.items():
        try:
            remote.run(["sudo", "-n", "imgnet-limit", f"{left + late:.0f}"], timeout=30)
            remote.write(f"{here.board.rows[name]['work']}/limit", json.dumps({"hours": hours}).encode())
        except (ClusterError, KeyError) as error:
            silent.append(f"machine {name}: {error}")
    if not silent:  # for machines that come later
        folders.describe(with_other(spec, max_hours=hours, late=late))
        name = spec.names[0]
        here.remotes[name].write(f"{here.machines.job_folder(name)}/job.json", folders.spec.read_bytes())
    here.close()
    with lines():
        rented.tell_expiry(time.time() + left + late)
    if silent:
        raise ClusterError(f"not all have heard it: {'; '.join(silent)}; the same again")


def dollars(spec: Spec, folders: Folders) -> float:
    """Return what the job's machines have cost until now, as far as their prices are known."""
    return billing.Meter(Journal(folders.run / JOURNAL)).dollars(time.time())


def dollars_until(spec: Spec, folders: Folders, moment: float) -> float | None:
    """Return what the job's machines had cost at a moment, None when the price of one of them is not known."""
    meter = billing.Meter(Journal(folders.run / JOURNAL))
    return None if meter.unknown(moment) else meter.dollars(moment)
