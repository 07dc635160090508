"""Set-up of machines over the real sshd of the testbed, with a shell script that stands for Python there.

Every fault of a machine is named before an agent starts, and by `check --ssh`, which leaves nothing there. A supervisor
that is killed is replaced by one that finishes.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ssh_machines import Testbed
from support.waiting import wait_for

from benchmarks.launch.local import supervisor_pids
from benchmarks.launch.stub import RECIPE
from cluster.connectors.ssh import SSHRefused
from cluster.errors import SetupFailed
from cluster.jobs.job import Job
from cluster.machines import mirror
from cluster.machines.fleet import Fleet
from cluster.machines.provision import JOB_FILES

MakeJob = Callable[..., Any]  # makes a `FleetJob` of conftest.py
LaunchPaused = Callable[[str], tuple[Job, Any, Path]]
PROBE, PYTHON_ENV = "cluster.machines.probe", "cluster.machines.python_env"


@pytest.mark.parametrize(
    ("break_machine", "reason"),
    [
        (lambda job, _: job.change_host(1, host_key=job.machines[0].host_key), "its host key has CHANGED"),
        (lambda job, disk: job.change_host(1, folder=str(disk / "folder")), "folder/commands cannot be used"),
        (lambda job, _: job.stub.override(f"{PROBE}-1", "free=1"), "1 GB free, 2 GB are needed"),
        (lambda job, _: job.stub.override(f"{PYTHON_ENV}-1", "echo 'Segmentation fault'; exit 139"),
         "no Python environment was found or made: Segmentation"),
        (lambda job, _: job.stub.override(f"{PROBE}-1", """echo '{"gpus": [], "time": "x"}'; exit"""),
         "its answer to the checks is damaged"),
        (lambda job, _: job.stub.override(f"{PROBE}-1", f"echo '{'[' * 100_000}'; exit"),
         "its answer to the checks is damaged"),
    ],
    ids=["another host key", "full disk", "little room", "Python crashes", "wrong answer", "deep answer"],
)  # fmt: skip
def test_set_up_machines_fault_is_named_and_nothing_starts(
    make_job: MakeJob, full_disk: Path, break_machine: Callable[[Any, Path], None], reason: str
) -> None:
    job = make_job(2)
    break_machine(job, full_disk)
    fleet = job.new_fleet()
    with pytest.raises(SetupFailed) as caught:
        fleet.set_up_machines()
    message = str(caught.value)
    assert reason in message and message.startswith(fleet.connectors["1"].name) and "\n" not in message
    reasons = fleet.setup_progress.failure_reasons
    assert list(reasons) == ["1"] and reason in reasons["1"]
    written = json.loads(fleet.setup_progress.path.read_text())
    assert written["machines"]["1"]["reason"] == reasons["1"] and not written["is_ready"]
    assert not job.stub.calls("cluster.agent")
    assert fleet.terminate() == [], "nothing can run on a machine that was never reached"


@pytest.mark.parametrize(("complaint", "is_broken"), [("hangs", True), ("missing", False)])
def test_set_up_machines_of_a_rental_needs_its_gpus_and_uses_its_torch(
    make_job: MakeJob, tmp_path: Path, complaint: str, is_broken: bool
) -> None:
    """A machine whose driver hangs is broken; without a driver, the image is wrong."""
    index = "https://example.org/cu126"
    cloud = {"gpus_per_machine": 1, "torch_index_url": index, "torch_requirement": "torch<2.15"}
    job = make_job(1, cloud=cloud)
    variables = "$PIP_EXTRA_INDEX_URL $UV_EXTRA_INDEX_URL"
    job.stub.override(f"{PYTHON_ENV}-0", f'echo "{variables}" >{tmp_path}/index; echo "$*" >{tmp_path}/arguments')
    job.stub.override(f"{PROBE}-0", f'printf() {{ command printf "$@" | sed s/missing/{complaint}/; }}')
    fleet = job.new_fleet()
    with pytest.raises(SetupFailed, match="no GPU: nvidia-smi"):
        fleet.set_up_machines()
    assert list(fleet.broken_machines) == (["0"] if is_broken else [])
    assert (tmp_path / "index").read_text() == f"{index} {index}\n"
    assert " torch<2.15 --then" in (tmp_path / "arguments").read_text()


def test_set_up_machines_spare_may_fail(make_job: MakeJob) -> None:
    job = make_job(2, machines=1, spares=1)
    job.stub.override(f"{PROBE}-1", "echo 'the shared folder is away'; exit 1")
    fleet = job.new_fleet()
    fleet.set_up_machines()
    assert fleet.setup_progress.record.is_ready
    assert "the shared folder is away" in fleet.setup_progress.failure_reasons["1"]
    wait_for(lambda: job.stub.calls("cluster.agent") == ["0"])
    assert fleet.agents_alive() and fleet.dead_machines() == []


def test_set_up_machines_twice_repeats_nothing(make_job: MakeJob) -> None:
    job = make_job(2)
    fleet = job.new_fleet()
    fleet.set_up_machines()
    assert {*fleet.setup_progress.rows["1"].seconds} == {"connecting", "code", "environment", "checks", "agent"}
    fleet.set_up_machines()
    Fleet(fleet.spec, fleet.folders).set_up_machines()
    wait_for(lambda: job.stub.calls("cluster.agent") == ["0", "1"])
    assert job.stub.calls(PYTHON_ENV) == ["0", "1"] and job.stub.calls(PROBE) == ["0", "0", "1", "1"]


def test_machines_that_mount_one_home_have_an_agent_each(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(2)
    for number in (0, 1):
        job.change_host(number, folder=str(tmp_path / "home/.imgnet"))
    job.new_fleet().set_up_machines()
    wait_for(lambda: all((job.shared / f"status/{name}.json").exists() for name in "01"), 20)


def test_replace_host_with_another_key_keeps_the_connection(make_job: MakeJob) -> None:
    job = make_job(2)
    fleet = job.new_fleet()
    fleet.setup_progress.start_launch("first", {name: host.host for name, host in fleet.hosts.items()})
    machine, connector = job.machines[0], fleet.connectors["0"]
    connector.run(["true"])
    logins = machine.log.count("Accepted")
    fleet.replace_host("0", replace(fleet.hosts["0"], host_key=job.machines[1].host_key))
    assert fleet.connectors["0"].run(["echo", "here"]).out == b"here\n" and machine.log.count("Accepted") == logins
    fleet.connectors["0"].close()
    with pytest.raises(SSHRefused, match="its host key has CHANGED"):
        fleet.connectors["0"].run(["true"])
    fleet.replace_host("0", replace(fleet.hosts["0"], host_key=machine.host_key))
    assert fleet.connectors["0"].run(["echo", "here"]).out == b"here\n"
    fleet.replace_host("0", fleet.hosts["1"])
    assert fleet.connectors["0"] is not connector


@pytest.fixture
def launch_paused(sandbox: Any, bed: Testbed, make_stub: Callable[..., Any]) -> LaunchPaused:
    """Launch job-1 by the installed command. Its set-up pauses at a module on machine 0 as long as a file exists.

    Returns the job, the machines' Python, and the file.
    """

    def launch(module: str) -> tuple[Job, Any, Path]:
        for machine in bed.machines:
            shutil.rmtree(machine.home / ".imgnet", ignore_errors=True)
        stub, hold = make_stub(sandbox.path, 2), sandbox.path / "hold"
        hold.touch()
        stub.override(f"{module}-0", f'while [ -e "{hold}" ]; do sleep 0.05; done')
        (sandbox.path / "recipe.py").write_text(RECIPE)
        hosts = bed.write_hosts_toml(sandbox.path / "hosts.toml", count=2, python=str(stub.path))
        completed = sandbox.cli("launch", "--ssh", str(hosts), "-y", "-d", "recipe.py")
        assert completed.code == 0, completed
        sandbox.wait_for(lambda: "0" in stub.calls(module))
        return sandbox.job(), stub, hold

    return launch


def machine_states(job: Job) -> list[str]:
    return [details.state for details in job.machine_details().values()]


@pytest.mark.rehearsal
@pytest.mark.parametrize("part", [PYTHON_ENV, "cluster.agent"])
def test_killed_supervisor_is_replaced_and_setup_finishes(
    sandbox: Any, bed: Testbed, launch_paused: LaunchPaused, part: str
) -> None:
    job, _, hold = launch_paused(part)
    (pid,) = supervisor_pids(job.path)
    os.kill(pid, signal.SIGKILL)
    sandbox.wait_for(lambda: not supervisor_pids(job.path) and "job-1" not in sandbox.tmux("ls"))
    hold.unlink()
    job.refresh()  # as every command that looks at the job does
    sandbox.wait_for(lambda: machine_states(job) == ["training", "training"])
    assert len(supervisor_pids(job.path)) == 1
    attempts = job.run_folder.shared.glob("attempts/*.json")  # not a file that is being written
    assert [path.name for path in attempts] == ["000001.json"]
    assert sandbox.cli("stop", "job-1").code == 0
    assert job.state == "stopped"
    sandbox.wait_for(lambda: not bed.leaks())


@pytest.mark.parametrize("is_supervisor_killed", [False, True])
def test_stop_during_setup_ends_it_and_starts_no_agent(
    sandbox: Any, bed: Testbed, launch_paused: LaunchPaused, is_supervisor_killed: bool
) -> None:
    """What the paused module is about is never over by itself, such as a download of gigabytes."""
    job, stub, _ = launch_paused(PYTHON_ENV)
    if is_supervisor_killed:
        (pid,) = supervisor_pids(job.path)
        os.kill(pid, signal.SIGKILL)
        sandbox.wait_for(lambda: not supervisor_pids(job.path))
    completed = sandbox.cli("stop", "job-1")
    assert completed.code == 0 and machine_states(job) == ["stopped", "stopped"]
    assert job.has_ended and job.result and "stopped by the user" in job.result.reason
    assert not stub.calls("cluster.agent")
    sandbox.wait_for(lambda: not (bed.leaks() or supervisor_pids(job.path)))


def test_log_of_the_set_up_comes_while_it_goes_on(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mirror, "SETUP_LOG_SECONDS", 0.05)
    job = make_job(1)
    go_on = tmp_path / "go on"
    job.stub.override(f"{PYTHON_ENV}-0", f'echo "Downloading torch"; until [ -e "{go_on}" ]; do sleep 0.05; done')
    fleet, looks = job.new_fleet(), list[float]()
    fleet.provisioner.while_waiting = lambda: looks.append(time.monotonic())
    run_path = fleet.folders.path
    set_up = threading.Thread(target=fleet.set_up_machines, daemon=True)
    set_up.start()
    copy = run_path / "logs" / "install-0.log"
    wait_for(lambda: copy.exists() and copy.read_text() == "Downloading torch\n")
    assert Job(run_path).status().progress == "Downloading torch"
    wait_for(lambda: looks)  # the cloud is watched meanwhile
    go_on.touch()
    set_up.join(120)
    log = Path(fleet.setup_progress.rows["0"].work) / "setup.log"
    wait_for(lambda: copy.read_bytes() == log.read_bytes())
    assert "exit code 0" in copy.read_text()
    assert Job(run_path).log_path() == copy == Job(run_path).setup_logs("0")[0]
    fleet.terminate()
    fleet.folders.launch_path.write_text("second")
    with log.open("a") as file:
        file.write("of a supervisor that was killed\n")
    fleet.set_up_machines()
    wait_for(lambda: copy.read_bytes() == log.read_bytes())
    assert copy.read_text().count("that was killed") == 1


def test_files_of_a_job_are_not_written_through_links(make_job: MakeJob, tmp_path: Path) -> None:
    """Another user of the shared folder has placed them, before the job is resumed."""
    job = make_job(1)
    fleet = job.new_fleet()
    fleet.folders.leader_path.write_text("desk:/runs/job-1")
    fleet.set_up_machines()
    shared, victim = Path(fleet.provisioner.job_folder("0")), tmp_path / "victim"
    victim.write_text("mine")
    for name in JOB_FILES:
        (shared / name).unlink()
        for link in (shared / name, shared / f".{name}.new"):
            link.symlink_to(victim)
    fleet.provisioner.write_job_files("0", fleet.folders.shared)
    assert victim.read_text() == "mine"
    assert all((shared / name).read_bytes() == (fleet.folders.shared / name).read_bytes() for name in JOB_FILES)


class Checker:
    """A user who checks the machines of a testbed, and the script that is their Python."""

    def __init__(self, sandbox: Any, bed: Testbed, stub: Any) -> None:
        self.sandbox, self.bed, self.stub = sandbox, bed, stub
        self.hosts = self.write_hosts(python=str(stub.path))

    def write_hosts(self, count: int = 3, **keys: Any) -> Path:
        return self.bed.write_hosts_toml(self.sandbox.path / "hosts.toml", count=count, **keys)

    def run(self, *options: object) -> Any:
        before = self.files()
        ran = self.sandbox.cli("check", "--ssh", self.hosts, *options)
        assert self.files() == before
        assert not self.bed.leaks()
        return ran

    def files(self) -> list[str]:
        roots = [*(machine.home for machine in self.bed.machines), self.bed.shared]
        return sorted(str(path) for root in roots for path in root.rglob("*"))


@pytest.fixture
def checker(sandbox: Any, bed: Testbed, make_stub: Callable[..., Any]) -> Checker:
    for machine in bed.machines:
        shutil.rmtree(machine.home / ".imgnet", ignore_errors=True)
    return Checker(sandbox, bed, make_stub(sandbox.path))


def test_check_of_good_machines_shows_a_row_for_each(checker: Checker) -> None:
    made_before = checker.bed.machines[0].home / ".imgnet"  # empty, as an administrator may have made it
    made_before.mkdir()
    answer = f'{{"python": "{checker.stub.path}", "seconds": 0, "missing": ["torch>=2.9"], "why": "lacks"}}'
    checker.stub.override(
        "cluster.machines.python_env-0",
        f"""echo "$*" >{checker.sandbox.path}/arguments; echo '{answer}'; """
        'while [ "$1" != --then ]; do shift; done; shift; exec "$stub" -m "$@"',
    )
    ran = checker.run()
    assert ran.code == 0 and made_before.is_dir(), ran
    rows = [line.split() for line in ran.out.splitlines() if line.split()[1:2] and line.split()[1].startswith("127.")]
    assert [row[:3] for row in rows] == [[str(number), f"127.1.0.{number + 1}", "warning"] for number in range(3)]
    assert "warning  machines 0, 1, 2: no GPU: trains on the CPU" in ran.out
    assert "machine 0 (127.1.0.1): its Python lacks torch>=2.9; a launch installs them" in ran.out
    assert ran.out.endswith("\nall machines can be used\n")
    assert checker.stub.calls("cluster.machines.probe") and not checker.stub.calls("cluster.agent")
    assert (checker.sandbox.path / "arguments").read_text().startswith("--find ")


def test_check_names_each_fault_with_its_machine_and_folds_equal_ones(checker: Checker) -> None:
    text = checker.hosts.read_text()
    checker.hosts.write_text(text.replace(f'"127.1.0.2"\nport = {checker.bed.machines[1].port}', '"127.1.0.2:1"'))
    for machine in (0, 2):
        checker.stub.override(
            f"cluster.machines.python_env-{machine}", """echo '{"python": "", "why": "no pip"}'; exit 1"""
        )
    ran = checker.run()
    assert ran.code == 1 and "3 of the 3 machines cannot be used" in ran.err
    errors = [line for line in ran.out.splitlines() if line.startswith("error ")]
    assert errors[0] == "error    machines 0, 2: no pip" and len(errors) == 2
    assert errors[1].startswith("error    machine 1 (127.1.0.2): cannot be reached at 127.1.0.2 port 1: Connection ref")
    reports = json.loads(checker.run("-o", "json").out)
    assert [report["facts"] for report in reports] == [None] * 3 and all(report["errors"] for report in reports)


def test_check_with_the_real_checks_finds_a_wrong_data_folder(checker: Checker) -> None:
    checker.hosts = checker.write_hosts(count=2, python=sys.executable)
    data = checker.sandbox.path / "images"
    (data / "train/cat").mkdir(parents=True)
    ran = checker.run("--data", data)
    assert ran.code == 1 and f"error    machines 0, 1: {data}: has no val/" in ran.out, ran


def test_dry_run_asks_the_machines(checker: Checker) -> None:
    checker.stub.override("cluster.machines.probe-1", "free=1")
    recipe = checker.sandbox.path / "recipe.py"
    recipe.write_text(RECIPE)
    before = checker.files()
    ran = checker.sandbox.cli("launch", "--dry-run", "--ssh", checker.hosts, recipe)
    assert ran.code == 1 and "1 GB free, 2 GB are needed" in ran.out, ran
    assert ran.err.endswith("error: a launch would fail: 2 of the 3 machines that it needs can be used\n")
    enough = checker.sandbox.cli("launch", "--dry-run", "--ssh", checker.hosts, "--machines", "1", recipe)
    assert enough.code == 0 and "nothing was started" in enough.out and "127.1.0.2" not in enough.out, enough
    assert checker.files() == before and not (checker.sandbox.path / "runs").exists()


def test_check_of_own_machines_refuses_options_for_aws(checker: Checker) -> None:
    for options in (("--iam",), ("--type", "p4d.24xlarge"), ("--region", "us-east-1")):
        ran = checker.sandbox.cli("check", "--ssh", checker.hosts, *options)
        assert (ran.code, ran.err) == (2, "error: --ssh checks your own machines; leave out the options for AWS\n")
