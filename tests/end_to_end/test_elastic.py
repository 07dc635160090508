"""A job of three machines on this computer, by the installed command: machines are killed, given notice and frozen.

At the end the parameters are those of a run that nobody disturbed, bit for bit, and every image was used once in every
epoch.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact_jobs import (
    BATCH,
    IMAGES,
    OPTIONS,
    describe,
    final_parameters,
    newest_attempt,
    wait_for_steps,
    write_recipe,
)
from support.known import known
from support.sandbox import Sandbox
from support.ssh_machines import send_signal

from cluster.jobs.job import Job
from cluster.state import status
from train.data.order import usage_log
from train.tools.process import descendant_pids

EPOCHS = 16
STEPS_PER_EPOCH = IMAGES // (3 * BATCH)
PACE = (8, 1.0)  # for `Sandbox.write_recipe`


def agent_pid(job: Job, machine: str) -> int:
    return status.machine_statuses(job.run)[machine].pid or 0


def kill_agents(job: Job, *machines: str) -> None:
    for pid in [agent_pid(job, machine) for machine in machines]:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed_parameters(tmp_path_factory: pytest.TempPathFactory, images: Path) -> dict[str, Any]:
    """The final parameters of one process alone, which computes all three chunks of each step itself."""
    sandbox = Sandbox(tmp_path_factory.mktemp("alone") / "sandbox", images)
    try:
        recipe = write_recipe(sandbox, 3, EPOCHS, PACE)
        sandbox.train_fast()
        result = sandbox.cli("launch", "--local", *OPTIONS, recipe)
        assert result.code == 0, result
        return final_parameters(sandbox.job().run_folder.shared)
    finally:
        leftovers = sandbox.close()
        assert not leftovers


@pytest.fixture(params=["--in-place auto", "--in-place off"])
def job(sandbox: Sandbox, request: pytest.FixtureRequest) -> Job:
    """A job of three machines that train. A parameter is options of the launch."""
    options = ("--machines", "3", "--log-ids", "--lost-seconds", "5", *OPTIONS, *request.param.split())
    result = sandbox.cli("launch", "--local", "-d", *options, write_recipe(sandbox, 3, EPOCHS, PACE))
    assert result.code == 0, result
    job = sandbox.job()
    # For 20 s after a launch the supervisor takes an agent that is missing for one that has not started yet.
    os.utime(job.run_folder.launch_path, (time.time() - 60,) * 2)
    wait_for_steps(job, 3, "0", "1", "2")
    return job


def assert_ended_undisturbed(sandbox: Sandbox, job: Job, undisturbed_parameters: dict[str, Any]) -> None:
    """Assert that the job is done, with every image once per epoch and the undisturbed parameters, and left nothing."""
    assert job.result and job.result.state == "done", describe(job)
    first_steps = {attempt.number: attempt.first_step for attempt in job.run_folder.attempts.all() if attempt.members}
    steps = dict.fromkeys(range(EPOCHS), STEPS_PER_EPOCH)
    assert usage_log.find_usage_errors(job.path / "ids", first_steps, IMAGES, steps) == []
    parameters = final_parameters(job.run_folder.shared)
    assert parameters.keys() == undisturbed_parameters.keys()
    assert not [name for name, value in parameters.items() if not torch.equal(value, undisturbed_parameters[name])]
    assert len(job.result.epochs) == EPOCHS and job.result.steps == EPOCHS * STEPS_PER_EPOCH
    sandbox.wait_for(lambda: not sandbox.job_pids())


def test_job_ends_undisturbed_after_a_kill_a_notice_and_a_freeze(
    sandbox: Sandbox, job: Job, undisturbed_parameters: dict[str, Any]
) -> None:
    killed = sandbox.cli("rehearse-loss", "job-1", "--machine", "1")
    assert killed.code == 0 and "machine 1 of job-1 was killed" in killed.out, killed
    wait_for_steps(job, 1, "0", "2", after_attempt=1)
    wait_for_steps(job, 3, "0", "1", "2", after_attempt=2)  # the supervisor has started machine 1 again

    number = newest_attempt(job).number
    assert sandbox.cli("rehearse-loss", "job-1", "--machine", "2", "--notice", "60", "--for-good").code == 0
    wait_for_steps(job, 3, "0", "1", after_attempt=number)
    attempt_after_notice = newest_attempt(job)
    assert "machine 2 left" in attempt_after_notice.reason

    frozen_machine = attempt_after_notice.machine_names[1]
    frozen_agent = agent_pid(job, frozen_machine)
    # tmux would wake the processes of its panes, so it is frozen too.
    frozen_pids = [sandbox.parent_pid(frozen_agent), frozen_agent, *descendant_pids(frozen_agent)]
    send_signal(frozen_pids, signal.SIGSTOP)
    wait_for_steps(job, 1, *({"0", "1"} - {frozen_machine}), after_attempt=attempt_after_notice.number)
    send_signal(frozen_pids[::-1], signal.SIGCONT)
    sandbox.train_fast()
    sandbox.wait_for(lambda: job.has_ended)
    states = {machine: row.state for machine, row in status.machine_statuses(job.run).items()}
    assert states == {"0": "done", "1": "done", "2": "left"}
    assert_ended_undisturbed(sandbox, job, undisturbed_parameters)

    assert job.result
    rows = job.result.timeline
    assert [row.attempt for row in rows] == list(range(1, len(rows) + 1)) and rows[0].reason == "start"
    rows_by_reason = {row.reason: row for row in rows}
    assert rows_by_reason[attempt_after_notice.reason].steps_lost == 0, "a change with notice loses no step"
    history = job.run_folder.attempts.all()
    went_on_in_place = [attempt.live_step is not None for attempt in history if attempt.members]
    if job.spec.recovery.goes_on_in_place:
        assert not went_on_in_place[0] and all(went_on_in_place[1:]), describe(job)
        assert not any(row.steps_lost for row in rows), "trainers that keep their state lose no step"
    trained_rows = [row for row in rows[1:] if row.last_step is not None]  # an attempt may end before its first step
    assert len(trained_rows) >= 4 and all(known(row.pause) > 0 for row in trained_rows)


IN_PLACE = pytest.param("--no-standby", id="in-place")
ANEW = pytest.param("--in-place off --no-standby", marks=pytest.mark.release, id="anew")


@pytest.mark.parametrize("job", [
    pytest.param(f"{kind.values[0]} --workers 1", marks=kind.marks, id=kind.id) for kind in (IN_PLACE, ANEW)
], indirect=True)  # fmt: skip
def test_machine_whose_processes_all_get_sigterm_leaves_without_a_lost_step(
    sandbox: Sandbox, job: Job, undisturbed_parameters: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """So Slurm preempts a node: its agent, its trainers and the workers of their loaders get the signal."""
    agent = agent_pid(job, "2")
    send_signal([agent, *descendant_pids(agent)], signal.SIGTERM)
    wait_for_steps(job, 1, "0", "1", after_attempt=1)
    sandbox.train_fast()
    sandbox.wait_for(lambda: job.has_ended)
    assert_ended_undisturbed(sandbox, job, undisturbed_parameters)
    assert job.result
    row = job.result.timeline[1]
    assert (row.reason, row.steps_lost) == ("machine 2 left", 0), describe(job)
    assert row.in_place == (request.node.callspec.id == IN_PLACE.id)


@pytest.mark.parametrize("job", [IN_PLACE, ANEW], indirect=True)
def test_job_ends_undisturbed_after_losing_two_machines_the_supervisor_and_all(
    sandbox: Sandbox, job: Job, undisturbed_parameters: dict[str, Any]
) -> None:
    assert newest_attempt(job).machine_names[0] == "0", "the machine of rank 0 is one of the two"
    (supervisor_pid,) = sandbox.program_pids("-m cluster.jobs.supervisor")
    os.kill(supervisor_pid, signal.SIGKILL)  # it would start new agents, perhaps before the loss is noticed
    kill_agents(job, "0", "1")
    wait_for_steps(job, 1, "2", after_attempt=1)
    assert sandbox.cli("ls").code == 0  # starts another supervisor, which starts the agents
    # Two attempts when a busy computer sees one loss first; more when the loss comes in a validation whose weights the
    # lost machine has not written yet.
    reasons = {attempt.reason for attempt in job.run_folder.attempts.all()[1:]}
    reasons -= {"the machine that wrote the weights of the best validation is lost"}
    assert reasons in ({"machines 0, 1 lost"}, {"machine 0 lost", "machine 1 lost"}), describe(job)
    wait_for_steps(job, 3, "0", "1", "2", after_attempt=2)

    (supervisor_pid,) = sandbox.program_pids("-m cluster.jobs.supervisor")
    os.kill(supervisor_pid, signal.SIGKILL)
    attempt = newest_attempt(job)
    step = max(row.last_step for row in status.machine_statuses(job.run).values())
    wait_for_steps(job, step + 3 - attempt.first_step, "0", "1", "2")
    assert newest_attempt(job).number == attempt.number, "the end of the supervisor has changed something"

    kill_agents(job, "0", "1", "2")
    sandbox.wait_for(lambda: not sandbox.pids("-m train"))
    status_result = sandbox.cli("status", "--exit-code")
    assert status_result.code == 100 and "imgnet-cluster resume job-1" in status_result.out, status_result
    assert json.loads(sandbox.cli("ls", "-o", "json").out)[0]["state"] == "failed"
    sandbox.wait_for(lambda: not sandbox.job_pids())
    sandbox.train_fast()
    resumed = sandbox.cli("resume", "job-1")
    assert resumed.code == 0 and "job-1 done" in resumed.out, resumed
    assert_ended_undisturbed(sandbox, job, undisturbed_parameters)
