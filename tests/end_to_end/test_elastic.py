"""A job of three machines on this computer, by the installed command: machines are killed, given notice and frozen.

At the end the parameters are those of a run that nobody disturbed, bit for bit, and every image was used once in every
epoch.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact_jobs import BATCH, IMAGES, OPTIONS, final_parameters, have_trained, write_recipe
from support.known import known
from support.sandbox import Sandbox
from support.waiting import wait_for

from cluster.jobs.job import Job
from cluster.state import attempts as job_attempts
from cluster.state import status
from cluster.state.heartbeats import MachineStatus
from train.data.order import usage_log

EPOCHS = 16
STEPS_PER_EPOCH = IMAGES // (3 * BATCH)
PACE = (8, 1.0)  # for `Sandbox.write_slow_loss`


@dataclass
class ElasticJob:
    """A job of three machines, and what can be done to them."""

    sandbox: Sandbox
    job: Job

    def statuses(self) -> dict[str, MachineStatus]:
        """Return the last status of each machine."""
        return status.machine_statuses(self.job.run)

    def attempts(self) -> list[job_attempts.Attempt]:
        return self.job.run_folder.attempts.all()

    def newest_attempt(self) -> job_attempts.Attempt:
        return job_attempts.newest_attempt(self.job.run_folder.shared) or job_attempts.Attempt()

    def agent_pid(self, machine: str) -> int:
        return self.statuses()[machine].pid or 0

    def kill_agents(self, *machines: str) -> None:
        for pid in [self.agent_pid(machine) for machine in machines]:
            os.kill(pid, signal.SIGKILL)

    def describe(self) -> str:
        """Return the attempts and the machines' states, for the message of a failure."""
        lines = [
            f"{attempt.number} {attempt.machine_names} {attempt.reason} from {attempt.first_step}"
            for attempt in self.attempts()
        ]
        states = {machine: row.state for machine, row in self.statuses().items()}
        return "\n".join([*lines, json.dumps(states)])

    def wait_for(self, condition: Callable[[], Any], seconds: float = 180.0) -> None:
        """Wait for a condition. Raises `AssertionError` when the job ends before."""

        def holds() -> Any:
            if value := condition():
                return value
            result = self.job.result
            assert result is None, f"the job has ended: {result.reason}\n{self.describe()}"
            return None

        wait_for(holds, seconds, describe=self.describe, poll_seconds=0.05)

    def wait_for_steps(self, steps: int, *machines: str, after_attempt: int = 0) -> None:
        """Wait until these machines, and no others, have trained `steps` steps in an attempt after `after_attempt`."""
        self.wait_for(lambda: have_trained(self.job, steps, *machines, after_attempt=after_attempt))


def write_slow_recipe(sandbox: Sandbox) -> Path:
    project = sandbox.path / "project"
    loss = sandbox.write_slow_loss(project, *PACE)
    return write_recipe(project / "several.py", sandbox.data, 3, EPOCHS, loss)


@pytest.fixture(scope="module")
def undisturbed_parameters(tmp_path_factory: pytest.TempPathFactory, images: Path) -> dict[str, Any]:
    """The final parameters of one process alone, which computes all three chunks of each step itself."""
    sandbox = Sandbox(tmp_path_factory.mktemp("alone") / "sandbox", images)
    try:
        recipe = write_slow_recipe(sandbox)
        sandbox.train_fast()
        result = sandbox.cli("launch", "--local", *OPTIONS, recipe)
        assert result.code == 0, result
        return final_parameters(sandbox.job().run_folder.shared)
    finally:
        leftovers = sandbox.close()
        assert not leftovers


@pytest.fixture(params=[pytest.param("--in-place", marks=pytest.mark.release), "--no-in-place"])
def elastic_job(sandbox: Sandbox, request: pytest.FixtureRequest) -> ElasticJob:
    """A job of three machines that train. A parameter is options of the launch."""
    options = ("--machines", "3", "--log-ids", "--lost-seconds", "5", *request.param.split())
    result = sandbox.cli("launch", "--local", "-d", *options, *OPTIONS, write_slow_recipe(sandbox))
    assert result.code == 0, result
    elastic_job = ElasticJob(sandbox, sandbox.job())
    # For 20 s after a launch the supervisor takes an agent that is missing for one that has not started yet.
    os.utime(elastic_job.job.run_folder.launch_path, (time.time() - 60,) * 2)
    elastic_job.wait_for_steps(3, "0", "1", "2")
    return elastic_job


def assert_ended_undisturbed(elastic_job: ElasticJob, undisturbed_parameters: dict[str, Any]) -> None:
    """Assert that the job is done, with every image once per epoch and the undisturbed parameters, and left nothing."""
    job = elastic_job.job
    assert job.result and job.result.state == "done", elastic_job.describe()
    first_steps = {attempt.number: attempt.first_step for attempt in elastic_job.attempts() if attempt.members}
    steps = dict.fromkeys(range(EPOCHS), STEPS_PER_EPOCH)
    assert usage_log.find_usage_errors(job.path / "ids", first_steps, IMAGES, steps) == []
    parameters = final_parameters(job.run_folder.shared)
    assert parameters.keys() == undisturbed_parameters.keys()
    assert not [name for name, value in parameters.items() if not torch.equal(value, undisturbed_parameters[name])]
    assert len(job.result.epochs) == EPOCHS and job.result.steps == EPOCHS * STEPS_PER_EPOCH
    elastic_job.sandbox.wait_for(lambda: not elastic_job.sandbox.job_pids())


def test_job_ends_undisturbed_after_a_kill_a_notice_and_a_freeze(
    elastic_job: ElasticJob, undisturbed_parameters: dict[str, Any]
) -> None:
    sandbox = elastic_job.sandbox
    job = elastic_job.job
    killed = sandbox.cli("rehearse-loss", "job-1", "--machine", "1")
    assert killed.code == 0 and "machine 1 of job-1 was killed" in killed.out, killed
    elastic_job.wait_for_steps(1, "0", "2", after_attempt=1)
    elastic_job.wait_for_steps(3, "0", "1", "2", after_attempt=2)  # the supervisor has started machine 1 again

    number = elastic_job.newest_attempt().number
    assert sandbox.cli("rehearse-loss", "job-1", "--machine", "2", "--notice", "60", "--for-good").code == 0
    elastic_job.wait_for_steps(3, "0", "1", after_attempt=number)
    attempt_after_notice = elastic_job.newest_attempt()
    assert "machine 2 left" in attempt_after_notice.reason

    frozen_machine = attempt_after_notice.machine_names[1]
    agent_pid = elastic_job.agent_pid(frozen_machine)
    # tmux would wake the processes of its panes, so it is frozen too.
    frozen_pids = [sandbox.parent_pid(agent_pid), agent_pid, *sandbox.descendant_pids(agent_pid)]
    for pid in frozen_pids:
        os.kill(pid, signal.SIGSTOP)
    elastic_job.wait_for_steps(1, *({"0", "1"} - {frozen_machine}), after_attempt=attempt_after_notice.number)
    for pid in reversed(frozen_pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    sandbox.train_fast()
    sandbox.wait_for(lambda: job.has_ended)
    assert job.state == "done"
    states = {machine: row.state for machine, row in elastic_job.statuses().items()}
    assert states == {"0": "done", "1": "done", "2": "left"}
    assert_ended_undisturbed(elastic_job, undisturbed_parameters)

    assert job.result
    rows = job.result.timeline
    assert [row.attempt for row in rows] == list(range(1, len(rows) + 1)) and rows[0].reason == "start"
    rows_by_reason = {row.reason: row for row in rows}
    assert rows_by_reason[attempt_after_notice.reason].steps_lost == 0, "a change with notice loses no step"
    went_on_in_place = [attempt.live_step is not None for attempt in elastic_job.attempts() if attempt.members]
    if job.spec.recovery.in_place:
        assert not went_on_in_place[0] and all(went_on_in_place[1:]), elastic_job.describe()
        assert not any(row.steps_lost for row in rows), "trainers that keep their state lose no step"
    trained_rows = [row for row in rows[1:] if row.last_step is not None]  # an attempt may end before its first step
    assert len(trained_rows) >= 4 and all(known(row.pause) > 0 for row in trained_rows)


IN_PLACE = pytest.param("--in-place --no-standby", marks=pytest.mark.release, id="in-place")
ANEW = pytest.param("--no-in-place --no-standby", id="anew")


@pytest.mark.parametrize("elastic_job", [IN_PLACE, ANEW], indirect=True)
def test_job_ends_undisturbed_after_losing_two_machines_the_supervisor_and_all(
    elastic_job: ElasticJob, undisturbed_parameters: dict[str, Any]
) -> None:
    sandbox = elastic_job.sandbox
    assert elastic_job.newest_attempt().machine_names[0] == "0", "the machine of rank 0 is one of the two"
    (supervisor_pid,) = sandbox.program_pids("-m cluster.jobs.supervisor")
    os.kill(supervisor_pid, signal.SIGKILL)  # it would start new agents, perhaps before the loss is noticed
    elastic_job.kill_agents("0", "1")
    elastic_job.wait_for_steps(1, "2", after_attempt=1)
    assert sandbox.cli("ls").code == 0  # starts another supervisor, which starts the agents
    reasons = {attempt.reason for attempt in elastic_job.attempts()[1:]}  # two when a busy computer sees one loss first
    assert reasons in ({"machines 0, 1 lost"}, {"machine 0 lost", "machine 1 lost"}), elastic_job.describe()
    elastic_job.wait_for_steps(3, "0", "1", "2", after_attempt=2)

    (supervisor_pid,) = sandbox.program_pids("-m cluster.jobs.supervisor")
    os.kill(supervisor_pid, signal.SIGKILL)
    number = elastic_job.newest_attempt().number
    step = max(row.last_step for row in elastic_job.statuses().values())
    elastic_job.wait_for(lambda: min(row.last_step for row in elastic_job.statuses().values()) > step + 2)
    assert elastic_job.newest_attempt().number == number, "the end of the supervisor has changed something"

    elastic_job.kill_agents("0", "1", "2")
    sandbox.wait_for(lambda: not sandbox.pids("-m train"))
    status_result = sandbox.cli("status", "--exit-code")
    assert status_result.code == 100 and "imgnet-cluster resume job-1" in status_result.out, status_result
    assert json.loads(sandbox.cli("ls", "-o", "json").out)[0]["state"] == "failed"
    sandbox.wait_for(lambda: not sandbox.job_pids())
    sandbox.train_fast()
    resumed = sandbox.cli("resume", "job-1")
    assert resumed.code == 0 and "job-1 done" in resumed.out, resumed
    assert_ended_undisturbed(elastic_job, undisturbed_parameters)
