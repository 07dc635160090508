"""The backend `slurm` with commands of Slurm that a test writes: bad input, a silent controller, its requests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.backends.backend_options import SlurmOptions
from cluster.backends.slurm import slurm_commands
from cluster.backends.slurm.backend import SlurmBackend, check_partition, check_submission, may_run_agent, read_options
from cluster.backends.slurm.batch_script import batch_arguments, batch_script
from cluster.backends.slurm.slurm_commands import SlurmError, SlurmJob, SlurmStep, parse_seconds
from cluster.errors import BadInput, ClusterError
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import load_recipes, plan
from cluster.state.run_folder import Run

UID = "job-1-12345678"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Write a command of Slurm as a shell script. It notes its arguments and input in the file that is returned."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(name: str, script: str) -> Path:
        notes = folder / f"{name}.notes"
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n{script}\n')
        path.chmod(0o755)
        return notes

    return write


@pytest.fixture
def backend(hand_made: Any) -> SlurmBackend:
    run = hand_made(backend="slurm", uid=UID, machines=2, is_one_computer=False)
    run.run_folder.launch_path.write_text("launch")
    return SlurmBackend(Run(run.spec, run.run_folder))


@pytest.mark.parametrize(("text", "seconds"), [
    ("0:05", 5), ("12:00", 720), ("1:02:03", 3723), ("2-00:00:01", 172801), ("UNLIMITED", None), ("", None),
])  # fmt: skip
def test_parse_seconds(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


def test_missing_program_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hand_made: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match=r"squeue: No such file.*login node"):
        slurm_commands.run("squeue")
    with pytest.raises(ClusterError, match=r"sbatch, squeue, .* missing; launch with --slurm on a login node"):
        SlurmBackend.check(hand_made(backend="slurm").spec, tmp_path)


def test_command_that_fails_or_hangs_is_one_line(program: Any) -> None:
    program("sbatch", "echo 'sbatch: error: Batch job submission failed:' >&2; echo 'no account' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"^sbatch: Batch job submission failed: no account$"):
        slurm_commands.submit([], "")
    lookup = "sinfo: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host"
    program("sinfo", f"echo '{lookup}\nsinfo: fatal: Could not establish a configuration source' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"^sinfo knows no cluster here; run this on a login node of the .*cluster$"):
        check_partition(SlurmOptions(), 1)
    program("squeue", "exec sleep 600")
    with pytest.raises(SlurmError, match=r"^squeue: no answer in 0 s$"):
        slurm_commands.run("squeue", timeout=0.2)


@pytest.mark.parametrize(
    "variable", ["SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SQUEUE_PARTITION", "SINFO_PARTITION", "SCANCEL_INTERACTIVE"]
)
def test_commands_do_not_inherit_an_outer_job_nor_options_of_the_user(
    program: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name, value in {variable: "99", "SLURM_CONF": "/etc/here", "SBATCH_ACCOUNT": "us"}.items():
        monkeypatch.setenv(name, value)
    program("squeue", f'echo "${variable}|$SLURM_CONF|$SBATCH_ACCOUNT"')
    assert slurm_commands.run("squeue") == "|/etc/here|us\n"
    assert slurm_commands.without_outer_job(["srun"]) == ["env", "-u", variable, "srun"]


def test_partition_that_slurm_hides_is_used_as_any_other(program: Any, backend: SlurmBackend) -> None:
    is_asked = 'case "$*" in *--all*) ;; *) exit 0;; esac'  # as sinfo and squeue do
    program("sinfo", f"{is_asked}; echo 'night|4|(null)|night'")
    check_partition(SlurmOptions(partition="night", gpus_per_node=0), 4)
    job, step = f"8|{UID}|RUNNING|None|9:10|1:00|n[4-5]", "8.0|machine-1|n4|9:00"
    program("squeue", f'{is_asked}; case "$*" in *--steps*) echo "{step}";; *) echo "{job}";; esac')
    assert "--nodelist=n4" in backend.shell_command("1")
    assert "--all --steps" in batch_script(backend.run.spec, SlurmOptions(), backend.run.folder, ["0"], 0.0)


@pytest.mark.parametrize(("options", "nodes", "message"), [
    ({"partition": "none"}, 1, "--partition none: the cluster has the partitions cpu, gpu"),
    ({}, 5, "the partition cpu has 4 nodes, but the job needs 5"),
    ({"partition": "gpu"}, 3, "the partition gpu has 2 nodes"),
    ({"partition": "gpu,none"}, 1, "--partition gpu,none: the cluster has the partitions cpu, gpu"),
    ({"partition": "gpu,cpu"}, 5, "the partition gpu,cpu has 4 nodes, but the job needs 5"),
    ({"gpus_per_node": 1}, 1, "partition cpu have no GPUs.*--gpus-per-node 0"),
])  # fmt: skip
def test_partition_that_cannot_run_the_job_is_refused_and_no_other(
    program: Any, options: dict[str, Any], nodes: int, message: str
) -> None:
    program("sinfo", "echo 'cpu|4|(null)|cpu*'; echo 'gpu|2|gpu:a100:8|gpu'")
    with pytest.raises(BadInput, match=message) as failure:
        check_partition(SlurmOptions(**options), nodes)
    assert "\n" not in str(failure.value)
    check_partition(SlurmOptions(gpus_per_node=0), 4)
    check_partition(SlurmOptions(partition="gpu", gpus_per_node=8), 2)
    check_partition(SlurmOptions(partition="gpu,cpu", gpus_per_node=8), 4)


def test_option_that_sbatch_refuses_is_found_before_the_launch_and_nodes_that_are_down_are_no_obstacle(
    program: Any, backend: SlurmBackend, tmp_path: Path
) -> None:
    sbatch = program("sbatch", "echo 'sbatch: error: Invalid --time specification' >&2; exit 1")
    with pytest.raises(BadInput, match=r"^sbatch: Invalid --time specification$"):
        check_submission(backend.run.spec, tmp_path)
    assert sbatch.read_text().startswith("--test-only ") and "--nodes=2" in sbatch.read_text()
    busy = "allocation failure: Requested partition configuration not available now"
    program("sbatch", f"echo '{busy}' >&2; exit 1")
    check_submission(backend.run.spec, tmp_path)


def test_refused_submission_cancels_a_job_whose_id_did_not_arrive(program: Any, backend: SlurmBackend) -> None:
    program("sbatch", "echo 'sbatch: error: timed out' >&2; exit 1")
    program("squeue", f"[ -e {backend.run.folder.path}/slurm ] && echo '8|{UID}|PENDING|Priority|0:00|1:00|'; exit 0")
    scancel = program("scancel", "")
    with pytest.raises(SlurmError, match=r"^sbatch: timed out$"):
        backend.launch()
    assert scancel.read_text().splitlines()[-1] == "--quiet 8"


def test_plan_takes_the_gpus_of_a_node_and_the_machines_of_the_recipe(sandbox: Any) -> None:
    (recipe,) = load_recipes(sandbox.write_recipe(2))
    spec = plan(recipe, make_launch_options("slurm", gpus_per_node=4, partition="gpu")).spec
    assert (spec.machines, spec.procs, spec.is_one_computer) == (1, 4, False)
    assert read_options(spec) == SlurmOptions(partition="gpu", gpus_per_node=4)
    spec = plan(recipe, make_launch_options("slurm", procs=2, machines=3)).spec
    assert (spec.machines, spec.procs, read_options(spec).gpus_per_node) == (3, 2, 2)


def test_arguments_of_sbatch(backend: SlurmBackend) -> None:
    def arguments(options: SlurmOptions, **more: Any) -> list[str]:
        return batch_arguments(backend.run.spec, options, backend.run.folder, UID, 2, **more)

    options = SlurmOptions(partition="gpu", gpus_per_node=8, sbatch_arguments=("--mem=0",))
    given = arguments(options)
    expected = {"--partition=gpu", "--gpus-per-node=8", "--nodes=2", "--no-kill"}
    assert expected <= set(given) and given[-1] == "--mem=0" and "--time" not in " ".join(given)
    assert "--time=3" in arguments(options, seconds_left=61.0)
    assert "--time=4:00:00" in arguments(SlurmOptions(time_limit="4:00:00"))
    assert "--gpus-per-node=8" in batch_script(backend.run.spec, options, backend.run.folder, ["0", "1"], 0.0)


@pytest.mark.parametrize(("job", "elapsed", "silence", "has_ended", "expected"), [
    ({"state": "PENDING"}, [], float("inf"), False, True),
    ({"elapsed": 5.0}, [], float("inf"), False, True),  # its steps are about to start
    ({"elapsed": 150.0}, [], float("inf"), False, False),  # it should have started them long ago
    ({}, [], 10.0, False, False),  # the step has ended: the agent is dead
    ({}, [300.0], 10.0, False, True),
    ({}, [300.0], 25.0, False, False),  # a node without power
    ({}, [300.0], 1.0, True, False),  # the agent has ended, and its step is about to
    ({}, [2.0], 8.0, True, True),  # a new agent, whose first status is still to come
    ({"state": "COMPLETING"}, [], 10.0, False, False),
])  # fmt: skip
def test_may_run_agent(
    job: dict[str, Any], elapsed: list[float], silence: float, has_ended: bool, expected: bool
) -> None:
    steps = [SlurmStep(id="7.0", job_id="7", name="machine-0", node="n1", elapsed=seconds) for seconds in elapsed]
    running = SlurmJob(id="7", name=UID, state="RUNNING", reason="", elapsed=300.0, seconds_left=None, nodes="n[1-2]")
    assert may_run_agent(replace(running, **job), steps, silence, has_ended) == expected


@pytest.mark.parametrize("home_is_ahead", [60.0, -3600.0])
def test_clocks_of_two_computers_do_not_tell_whether_an_agent_runs(
    home_is_ahead: float, program: Any, hand_made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(
        "squeue",
        f'case "$*" in *--steps*) echo "8.0|machine-0|n4|9:00";; *) echo "8|{UID}|RUNNING|None|9:10|1:00|n4";; esac',
    )
    run = hand_made(backend="slurm", uid=UID, is_one_computer=False)
    run.run_folder.launch_path.write_text("launch")
    clock = 5000.0
    is_alive = True

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds
        if is_alive:
            run.write_status("training", phase="running", time=clock, launch="launch")

    home = SimpleNamespace(time=lambda: clock + home_is_ahead, monotonic=lambda: clock, sleep=sleep)
    monkeypatch.setattr("cluster.backends.slurm.backend.time", home)
    backend = SlurmBackend(Run(run.spec, run.run_folder))
    for _ in range(3):
        sleep(25.0)
        assert backend.has_agent("0")
    is_alive = False
    sleep(25.0)
    assert not backend.has_agent("0")


def test_machine_is_not_dead_while_slurm_does_not_answer(program: Any, backend: SlurmBackend) -> None:
    program("squeue", "exit 1")
    assert backend.dead_machines() == [] and backend.agents_alive() and backend.waits_for() == ""
    assert backend.terminate() == ["0", "1"]


def test_job_that_slurm_forgot_has_no_agent(program: Any, backend: SlurmBackend) -> None:
    program("squeue", "")
    scancel = program("scancel", "")
    assert backend.dead_machines() == ["0", "1"] and not backend.agents_alive()
    assert backend.terminate() == [] and not scancel.exists()


def test_waiting_job_shows_the_reason_and_is_no_failure(program: Any, backend: SlurmBackend) -> None:
    squeue = program("squeue", f"echo '8|{UID}|PENDING|Priority|0:00|1:00:00|'")
    assert backend.waits_for() == "waiting for Slurm to start its job 8: Priority"
    assert backend.agents_alive() and backend.dead_machines() == []
    assert len(squeue.read_text().splitlines()) == 1  # one question for all of this
    with pytest.raises(ClusterError, match=r"machine 1 of job-1: waiting for Slurm .*Priority"):
        backend.attach_command("1")


def test_job_that_is_over_does_not_wait_for_a_replacement(program: Any, backend: SlurmBackend) -> None:
    program("squeue", f"echo '8|{UID}|COMPLETED|None|9:10|1:00|n[4-5]'; echo '9|{UID}.1|PENDING|Priority|0:00|1:00|'")
    assert backend.agents_alive() and backend.dead_machines() == ["0"]
    backend.run.folder.shared.joinpath("result.json").touch()
    assert not backend.agents_alive()


def test_job_that_slurm_ended_says_how(program: Any, backend: SlurmBackend) -> None:
    program("squeue", f"echo '3|{UID}|COMPLETED|None|1:00|1:00|'; echo '8|{UID}|PREEMPTED|None|0:09|1:00|n1'")
    assert not backend.agents_alive() and backend.explain_end() == "Slurm ended its job 8: preempted"
    backend.run.folder.shared.joinpath("stop").touch()
    assert backend.explain_end() == ""


def test_shell_is_a_step_beside_the_agent(program: Any, backend: SlurmBackend) -> None:
    program(
        "squeue",
        f'case "$*" in *--steps*) echo "8.2|machine-1|n5|0:10"; echo "8.0|machine-1|n4|9:00";; '
        f'*) echo "8|{UID}|RUNNING|None|9:10|1:00|n[4-5]";; esac',
    )
    argv = backend.shell_command("1", ["nvidia-smi"], tty=False)
    assert argv[:2] == ["srun", "--jobid=8"] and "--nodelist=n5" in argv and argv[-1] == "nvidia-smi"
    assert "--overlap" in argv and "--pty" not in argv and "--pty" in backend.shell_command("1")
    assert backend.attach_command("1")[-1].endswith("work/1/train.log")
    with pytest.raises(ClusterError, match=r"machine 0 of job-1: it has no running agent"):
        backend.shell_command("0")
