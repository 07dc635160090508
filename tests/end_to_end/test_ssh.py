"""Jobs on machines over real ssh, by the installed command.

Machines lose their power, freeze, and are cut off from us; two users look after one job.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import exact_jobs
from support.exact_jobs import final_parameters
from support.known import known
from support.sandbox import ENDLESS, ENDLESS_PACE, Sandbox
from support.ssh_machines import Testbed
from support.waiting import wait_for

from cluster.jobs.job import Job
from cluster.state import attempts, status
from train.weights.safetensors_file import read_safetensors

EPOCHS = 20
PACE = (12, 1.0)  # for `Sandbox.write_slow_loss`: a job does not end before its faults
OPTIONS = ("--procs", "1", "--log-ids", *exact_jobs.OPTIONS)


class SshUser:
    """A user with a sandbox, and the machines of a testbed."""

    def __init__(self, sandbox: Sandbox, bed: Testbed, epochs: int = EPOCHS) -> None:
        self.sandbox = sandbox
        self.bed = bed
        self.hosts_file = bed.write_hosts_toml(sandbox.path / "hosts.toml")
        self.recipe = sandbox.path / "project/hosts.py"
        loss = sandbox.write_slow_loss(self.recipe.parent, *(ENDLESS_PACE if epochs == ENDLESS else PACE))
        exact_jobs.write_recipe(self.recipe, sandbox.data, 4, epochs, loss)

    def launch(self, *options: str) -> Job:
        result = self.sandbox.cli("launch", "--ssh", self.hosts_file, "-d", "-y", *OPTIONS, *options, self.recipe)
        assert result.code == 0, result
        return self.sandbox.job()

    def wait_for(self, condition: Callable[[], Any], job: Job, seconds: float = 180.0) -> None:
        wait_for(condition, seconds, describe=lambda: self.describe(job), poll_seconds=0.1)

    def describe(self, job: Job) -> str:
        log_path = job.run_folder.supervisor_log_path
        log = log_path.read_text() if log_path.exists() else ""
        return "\n".join([str(job.timeline()), str(job.status()), log])

    def wait_for_steps(self, job: Job, attempt: int, steps: int = 6) -> None:
        """Wait until an attempt of this number or a later one has trained `steps` steps, as seen from home."""

        def has_trained() -> bool:
            newest = attempts.newest_attempt(job.run_folder.shared)
            if newest is None or newest.number < attempt or not newest.members:
                return False
            statuses = status.machine_statuses(job.run).values()
            return any(
                machine.attempt == newest.number and machine.last_step >= newest.first_step + steps
                for machine in statuses
            )

        self.wait_for(lambda: has_trained() or job.has_ended, job)
        assert not job.has_ended, self.describe(job)

    def newest_members(self, job: Job) -> tuple[str, ...]:
        """Return the machines of the newest attempt, that of rank 0 first."""
        newest = attempts.newest_attempt(job.run_folder.shared)
        assert newest
        return newest.machine_names

    def remote_shared_folder(self) -> Path:
        """Return the shared folder of job-1 on the machines."""
        return next(self.bed.shared.glob("job-1-*"))


@pytest.fixture
def make_user(sandbox: Sandbox, testbed: Callable[..., Testbed]) -> Callable[..., SshUser]:
    return lambda count, epochs=EPOCHS: SshUser(sandbox, testbed(count), epochs)


def test_power_cut_and_freeze_do_not_change_the_final_bits(make_user: Callable[..., SshUser]) -> None:
    user = make_user(4)
    job = user.launch("--machines", "4", "--lost-seconds", "3")
    machines = user.bed.machines
    user.wait_for_steps(job, 1)
    machines[0].power_off()
    user.wait_for_steps(job, 2)
    assert user.newest_members(job)[0] != "0"
    machines[0].boot()
    user.wait_for_steps(job, 3)
    machines[2].freeze()
    user.wait_for_steps(job, 4)
    assert "2" not in user.newest_members(job)
    machines[2].thaw()
    user.sandbox.train_fast()
    assert job.wait(120) == "done", user.describe(job)
    result = job.result
    assert result
    assert result.ids_wrong == [] and len(result.epochs) == EPOCHS and result.attempts >= 4
    assert result.timeline[0].machines == ("0", "1", "2", "3")
    assert set(result.setup) == {"0", "1", "2", "3"}
    assert result.setup["1"].keys() >= {"connecting", "code", "agent"}

    undisturbed = user.sandbox.cli("launch", "--local", *OPTIONS, user.recipe)
    assert undisturbed.code == 0, undisturbed
    expected = final_parameters(user.sandbox.job(2).run_folder.shared)
    parameters = final_parameters(user.remote_shared_folder())
    assert parameters.keys() == expected.keys() and len(expected) > 40
    network = read_safetensors(job.run_folder.network_folder / "model.safetensors")  # it came home
    assert len(network) > 30 and all(tensor.equal(expected[name]) for name, tensor in network.items())
    assert not [name for name, value in expected.items() if not value.equal(parameters[name])]


def test_unreachable_machines_train_on_and_another_user_can_adopt_the_job(
    make_user: Callable[..., SshUser],
) -> None:
    user = make_user(2, ENDLESS)
    sandbox = user.sandbox
    job = user.launch("--machines", "2", "--no-standby")
    user.wait_for_steps(job, 1)
    work_folders = [path for machine in user.bed.machines for path in machine.home.rglob(f"jobs/{job.spec.uid}")]
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
    user.wait_for(lambda: job.has_ended or known(job.status().step) > step, job)
    assert len(job.run_folder.attempts.all()) == 1, user.describe(job)
    shell = sandbox.cli("ssh", "job-1", "--machine", "1", "--", "sh", "-c", "echo $HOME")
    assert shell.out.strip() == str(user.bed.machines[1].home), shell

    other_folder = sandbox.path / "elsewhere"
    other_folder.mkdir()
    adopted = sandbox.cli("adopt", "--ssh", user.hosts_file, cwd=other_folder)
    assert adopted.code == 0 and job.spec.uid in adopted.out, adopted
    adopted_again = sandbox.cli("adopt", "--ssh", user.hosts_file, cwd=other_folder)
    assert adopted_again.code == 1 and "is here already" in adopted_again.err
    adopted_job = Job(next((other_folder / "runs").iterdir()))
    user.wait_for(lambda: (adopted_job.status().step or 0) > 0, adopted_job)
    assert sandbox.cli("stop", adopted_job.name, cwd=other_folder).code == 0
    user.wait_for(lambda: job.has_ended and adopted_job.has_ended, job)
    assert job.state == adopted_job.state == "stopped"

    step = known(job.status().step)
    assert sandbox.cli("resume", "-d", "job-1").code == 0
    user.wait_for(lambda: (job.status().step or 0) > step and job.status().doing == "training", job)
    assert sandbox.cli("stop", "job-1").code == 0
    assert job.state == "stopped"
    for path in (job.path / "logs").rglob("rank-*.log"):
        assert path.read_bytes() == (user.remote_shared_folder() / path.relative_to(job.path)).read_bytes()
    assert user.bed.leaks() == []


def test_launch_on_two_machines_without_a_shared_folder_is_refused(make_user: Callable[..., SshUser]) -> None:
    user = make_user(2)
    user.bed.write_hosts_toml(user.hosts_file, shared=None)
    launched = user.sandbox.cli("launch", "--ssh", user.hosts_file, "-y", user.recipe)
    assert launched.code == 2 and launched.err.count("\n") == 1 and "shared" in launched.err
