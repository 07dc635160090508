"""Machines for the tests of their set-up: real sshd, and a shell script that stands for their Python."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ssh_machines import Testbed, command_line
from support.waiting import wait_for

from benchmarks.launch.stub import StubDelays
from cluster.connectors.hosts_file import Hosts, read_hosts
from cluster.machines.fleet import Fleet


class StubPython:
    """The script that stands for Python on `count` machines; it lies in a folder of the test."""

    def __init__(self, folder: Path, count: int = 1) -> None:
        no_delays = StubDelays(environment=0, probe=0, start=0, beat=0.2, count=count)
        self.path = no_delays.write_script(folder / "python")
        self.log_path, self.overrides = folder / "python.log", folder / "python.d"
        self.overrides.mkdir()

    def override(self, call: str, script: str) -> None:
        (self.overrides / call).write_text(script)

    def calls(self, module: str) -> list[str]:
        """The numbers of the machines on which this module was called, sorted."""
        lines = [line.split() for line in self.log_path.read_text().splitlines()] if self.log_path.exists() else []
        return sorted(machine for name, machine in lines if name == module)


class FleetJob:
    """A job on the first machines of the testbed, not set up yet. The test takes the part of the supervisor."""

    def __init__(self, make_run: Callable[..., Any], bed: Testbed, stub: StubPython, path: Path, count: int) -> None:
        self.make_run, self.bed, self.stub, self.machines = make_run, bed, stub, bed.machines[:count]
        self.hosts = read_hosts(bed.write_hosts_toml(path / "hosts.toml", count=count, python=str(stub.path)))
        self.uid = f"job-1-{time.monotonic_ns()}"
        self.shared = bed.shared / self.uid
        self.spec: dict[str, Any] = {"machines": count, "backend": "ssh", "uid": self.uid}
        self.fleets: list[Fleet] = []

    def change_host(self, number: int, **changes: Any) -> None:
        machines = list(self.hosts.machines)
        machines[number] = replace(machines[number], **changes)
        self.hosts = Hosts(self.hosts.shared, tuple(machines))

    def new_fleet(self, name: str = "job-1", **progress: Any) -> Fleet:
        """Make a fleet for the job with a run folder of its own; `progress` goes into its machines.json."""
        run = self.make_run(name, hosts=self.hosts, **self.spec)
        run.run_folder.launch_path.write_text("first")
        if progress:
            (run.run_folder.path / "machines.json").write_text(json.dumps({"launch": "first", **progress}))
        self.fleets.append(Fleet(run.spec, run.run_folder, reconnect_seconds=2))
        return self.fleets[-1]

    @property
    def fleet(self) -> Fleet:
        return self.fleets[0]

    def agents(self, machine: str) -> list[int]:
        """The agents on a machine, also one that is about to end because another runs; briefly also their children."""
        pids = self.machines[int(machine)].processes("cluster.agent", self.uid)
        return [pid for pid in pids if command_line(pid).startswith(f"/bin/sh {self.stub.path} ")]

    def status(self, machine: str) -> dict[str, Any]:
        path = self.fleet.folders.status_path(machine)
        return json.loads(path.read_text()) if path.exists() else {}

    def pull_until(self, condition: Callable[[], Any]) -> None:

        def pull() -> Any:
            self.fleet.pull_files()
            return condition()

        wait_for(pull)

    def close(self) -> None:
        """End everything on the machines."""
        for machine in self.machines:
            machine.thaw()
            machine.plug()
        for fleet in self.fleets:
            fleet.terminate()
            fleet.close()
        wait_for(lambda: not self.bed.leaks(), describe=self.bed.leaks)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with Testbed(tmp_path_factory.mktemp("testbed") / "bed", 3) as bed:
        yield bed


@pytest.fixture
def make_stub() -> Callable[..., StubPython]:
    """Make the machines' Python in a folder: make_stub(tmp_path, count=2)."""
    return StubPython


@pytest.fixture
def make_job(hand_made: Callable[..., Any], bed: Testbed, tmp_path: Path) -> Iterator[Callable[..., FleetJob]]:
    """Make a job on so many machines, with changes of its specification: make_job(2, machines=1, spares=1)."""
    for machine in bed.machines:
        shutil.rmtree(machine.home / ".imgnet" / "jobs", ignore_errors=True)  # the code stays, as for any next job
    jobs: list[FleetJob] = []

    def make(count: int, **spec: Any) -> FleetJob:
        jobs.append(FleetJob(hand_made, bed, StubPython(tmp_path, count), tmp_path, count))
        jobs[-1].spec |= spec
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
