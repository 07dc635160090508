"""Jobs on machines over real ssh, by the installed command.

Machines lose their power, freeze, and are cut off from us; two users look after one job.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import exact_jobs
from support.exact_jobs import describe, final_parameters, newest_attempt, wait_for_steps
from support.known import known
from support.sandbox import ENDLESS, Sandbox
from support.ssh_machines import Testbed
from support.waiting import wait_for

from cluster.jobs.job import Job
from train.weights.safetensors_file import read_safetensors

EPOCHS = 16
PACE = (12, 1.0)  # for `Sandbox.write_recipe`: a job does not end before its faults
POSIX_LOCALE = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # of the machines
OPTIONS = ("--procs", "1", "--log-ids", *exact_jobs.OPTIONS)


class SshUser:
    """A user with a sandbox, and the machines of a testbed."""

    def __init__(self, sandbox: Sandbox, bed: Testbed, epochs: int = EPOCHS) -> None:
        self.sandbox = sandbox
        self.bed = bed
        sandbox.data = shutil.copytree(sandbox.data, sandbox.path / "data")
        for split in ("train", "val"):
            (sandbox.data / split / "disc").rename(sandbox.data / split / "k\u00e4fer")
        self.hosts_file = bed.write_hosts_toml(sandbox.path / "hosts.toml")
        self.recipe = exact_jobs.write_recipe(sandbox, len(bed.machines), epochs, None if epochs == ENDLESS else PACE)

    def launch(self, *options: str) -> Job:
        result = self.sandbox.cli("launch", "--ssh", self.hosts_file, "-d", "-y", *OPTIONS, *options, self.recipe)
        assert result.code == 0, result
        return self.sandbox.job()

    def remote_shared_folder(self) -> Path:
        return next(self.bed.shared.glob("job-1-*"))


@pytest.fixture
def make_user(sandbox: Sandbox, testbed: Callable[..., Testbed]) -> Callable[..., SshUser]:
    return lambda count, epochs=EPOCHS: SshUser(sandbox, testbed(count, POSIX_LOCALE), epochs)


def test_job_survives_a_power_cut_and_a_freeze_and_its_network_comes_home(make_user: Callable[..., SshUser]) -> None:
    user = make_user(3)
    job = user.launch("--machines", "3", "--lost-seconds", "3")
    machines = user.bed.machines
    wait_for_steps(job, 6)
    machines[0].power_off()
    wait_for_steps(job, 6, "1", "2", after_attempt=1)
    machines[0].boot()
    wait_for_steps(job, 6, "0", "1", "2", after_attempt=2)
    machines[1].freeze()
    wait_for_steps(job, 6, "0", "2", after_attempt=3)
    machines[1].thaw()
    user.sandbox.train_fast()
    assert job.wait(120) == "done", describe(job)
    result = job.result
    assert result
    assert result.ids_wrong == [] and len(result.epochs) == EPOCHS and result.attempts >= 4
    assert result.timeline[0].machines == ("0", "1", "2")
    assert set(result.setup) == {"0", "1", "2"}
    assert result.setup["1"].keys() >= {"connecting", "code", "agent"}

    trained = final_parameters(user.remote_shared_folder())
    network = read_safetensors(job.run_folder.network_folder / "model.safetensors")  # it came home
    assert len(network) > 30 and all(tensor.equal(trained[name]) for name, tensor in network.items())

    assert user.sandbox.cli("eval").code == 0, "its classes have the same names in both locales"
    longer = user.sandbox.cli("resume", "job-1", "--epochs", "+1")
    assert longer.code == 0, longer
    assert len(known(job.result).epochs) == EPOCHS + 1
    network = read_safetensors(job.run_folder.network_folder / "model.safetensors")
    parameters = final_parameters(user.remote_shared_folder())
    assert all(tensor.equal(parameters[name]) for name, tensor in network.items()), "the new one came home"
    shutil.rmtree(user.remote_shared_folder() / "checkpoints")
    gone = user.sandbox.cli("resume", "job-1", "--epochs", "+1")
    assert gone.code == 100 and "are gone, so it cannot get more epochs" in gone.out, gone
    assert (job.path / f"network-{EPOCHS + 1}/model.safetensors").exists(), "the network of before stays"


def test_unreachable_machines_train_on_and_another_user_can_adopt_the_job(make_user: Callable[..., SshUser]) -> None:
    user = make_user(2, ENDLESS)
    sandbox = user.sandbox
    job = user.launch("--machines", "2", "--no-standby")
    wait_for_steps(job, 6)
    work_folders = [path for machine in user.bed.machines for path in machine.home.rglob(f"jobs/{job.spec.uid}-?")]
    assert len(work_folders) == 2
    assert [path.stat().st_mode & 0o77 for path in (user.remote_shared_folder(), *work_folders)] == [0, 0, 0]
    for machine in user.bed.machines:
        machine.unplug()
    (supervisor_pid,) = sandbox.program_pids("-m cluster.jobs.supervisor")
    os.kill(supervisor_pid, signal.SIGKILL)
    assert sandbox.cli("status", "--exit-code").code == 101
    sandbox.wait_for(lambda: sandbox.pids("-m cluster.jobs.supervisor"))  # status has started another
    for machine in user.bed.machines:
        machine.plug()
    step = known(job.status().step)
    wait_for(lambda: known(job.status().step) > step, describe=lambda: describe(job))
    assert len(job.run_folder.attempts.all()) == 1, describe(job)
    shell = sandbox.cli("ssh", "job-1", "--machine", "1", "--", "sh", "-c", "echo $HOME")
    assert shell.out.strip() == str(user.bed.machines[1].home), shell

    other_folder = sandbox.path / "elsewhere"
    other_folder.mkdir()
    adopted = sandbox.cli("adopt", "--ssh", user.hosts_file, cwd=other_folder)
    assert adopted.code == 0 and job.spec.uid in adopted.out, adopted
    assert json.loads(sandbox.cli("ls", "-o", "json", cwd=other_folder).out)[0]["seconds"] > 0, "at once"
    adopted_again = sandbox.cli("adopt", "--ssh", user.hosts_file, cwd=other_folder)
    assert adopted_again.code == 1 and "is here already" in adopted_again.err
    adopted_job = Job(next((other_folder / "runs").iterdir()))
    wait_for_steps(adopted_job, 1)
    assert sandbox.cli("stop", adopted_job.name, cwd=other_folder).code == 0
    wait_for(lambda: job.has_ended and adopted_job.has_ended, describe=lambda: describe(job))
    assert job.state == adopted_job.state == "stopped"

    whole_spec = replace(adopted_job.spec, user_project=job.spec.user_project)  # an adoption leaves it out
    adopted_job.run_folder.write_spec(whole_spec)
    number = newest_attempt(job).number
    assert sandbox.cli("resume", "-d", cwd=other_folder).code == 0
    wait_for_steps(adopted_job, 1, after_attempt=number)
    taken = sandbox.cli("resume", "-d", "job-1")
    assert taken.code == 0 and "is running, led by " in taken.out and str(adopted_job.path) in taken.out, taken
    step = known(adopted_job.status().step)
    for each in (job, adopted_job):  # the other computer follows
        sandbox.wait_for_step(each, step + 1)
    assert "leads the job since" in adopted_job.status().warning and not job.status().warning
    assert sandbox.cli("stop", "job-1").code == 0
    assert job.state == "stopped"
    wait_for(lambda: adopted_job.has_ended, describe=lambda: describe(adopted_job))
    for path in (job.path / "logs").rglob("rank-*.log"):
        assert path.read_bytes() == (user.remote_shared_folder() / path.relative_to(job.path)).read_bytes()
    assert user.bed.leaks() == []


def test_machine_that_is_added_to_the_file_joins_the_running_job(make_user: Callable[..., SshUser]) -> None:
    user = make_user(3)
    sandbox, machine = user.sandbox, user.bed.machines[2]
    user.bed.write_hosts_toml(user.hosts_file, count=2)
    job = user.launch()
    wait_for_steps(job, 6, "0", "1")
    user.bed.write_hosts_toml(user.hosts_file)
    machine.unplug()
    silent = sandbox.cli("join", "job-1", machine.address)
    assert silent.code == 1 and "goes on without it" in silent.err and len(silent.err.splitlines()) == 1, silent
    assert Job(job.path).machine_details()["2"].state == "failed" and Job(job.path).status().machines == 2
    machine.plug()
    joined = sandbox.cli("join", machine.address)
    assert joined.code == 0 and "machine 2 is ready and joins job-1" in joined.out, joined
    job = Job(job.path)
    wait_for_steps(job, 6, "0", "1", "2")
    again = sandbox.cli("join", machine.address)
    assert again.code == 1 and f"{machine.address} is machine 2 of job-1" in again.err, again
    sandbox.train_fast()
    assert job.wait(120) == "done", describe(job)
    result = known(job.result)
    assert result.ids_wrong == [] and len(result.epochs) == EPOCHS and result.machines == 3
    assert "machine 2 joined" in result.timeline[1].reason and result.setup["2"].keys() >= {"checks", "agent"}


def test_killed_join_goes_on_and_down_ends_a_machine_that_joins(make_user: Callable[..., SshUser]) -> None:
    user = make_user(3)
    sandbox, (_, second, third) = user.sandbox, user.bed.machines
    user.bed.write_hosts_toml(user.hosts_file, count=1)
    job = user.launch()
    wait_for_steps(job, 6, "0")
    user.bed.write_hosts_toml(user.hosts_file)
    join = sandbox.start("join", second.address)
    wait_for(lambda: "1" in Job(job.path).spec.joining, describe=lambda: describe(job))
    join.kill()
    wait_for_steps(Job(job.path), 6, "0", "1")
    join = sandbox.start("join", third.address)
    wait_for(lambda: "2" in Job(job.path).spec.joining, describe=lambda: describe(job))
    down = sandbox.cli("down", "-y", "job-1")
    assert down.code == 0 and join.wait(60) == 1, down
    job = Job(job.path)
    assert job.state == "stopped", describe(job)
    wait_for(lambda: not user.bed.leaks(), describe=lambda: str(user.bed.leaks()))  # agents save first
    assert sandbox.cli("resume", "-d", "job-1").code == 0
    wait_for_steps(job, 6, "0", "1")
    assert sandbox.cli("stop", "job-1").code == 0 and user.bed.leaks() == []
