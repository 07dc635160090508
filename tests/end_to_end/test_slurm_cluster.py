"""A real Slurm does what a backend builds on: one task per node, signals, lost nodes, preemption, terminals."""

import os
import pty
import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.slurm import SlurmCluster, slurm
from support.waiting import wait_for

__all__ = ["slurm"]  # a fixture

# Slurm goes on with the other nodes when one is lost, and srun with the other tasks.
SURVIVING_JOB = ("--no-kill", "--no-requeue", "--ntasks-per-node=1")
SURVIVING_STEP = "srun --no-kill --kill-on-bad-exit=0 --wait=0"
# A task that notes its start and the signals that it gets, and ends when there is a file `go`.
TASK = """\
#!/bin/bash
notes={folder}/$SLURM_JOB_ID-$SLURMD_NODENAME
trap 'echo TERM >> $notes' TERM
trap 'echo CONT >> $notes' CONT
trap 'echo USR1 >> $notes' USR1
# A process in a session of its own, as the trainers of an agent are.
setsid bash -c "trap 'echo child TERM >> $notes' TERM; while [ ! -e {folder}/go ]; do sleep 0.2; done" &
echo start $SLURM_PROCID $SLURM_NODEID >> $notes
while [ ! -e {folder}/go ]; do sleep 0.2; done
wait
echo end >> $notes
"""


class Tasks:
    """Tasks that note what happens to them, one for each node of a job."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "notes"
        self.folder.mkdir()
        self.script = cluster.folder / "task.sh"
        self.script.write_text(TASK.format(folder=self.folder))
        self.script.chmod(0o755)

    def start(self, nodes: int, *options: str) -> str:
        """Submit a job with one task on each of `nodes` nodes, and wait until all have started. Returns its id."""
        job_id = self.cluster.sbatch(
            f"{SURVIVING_STEP} {self.script}\necho srun=$?", f"--nodes={nodes}", *SURVIVING_JOB, *options
        )
        self.cluster.wait_for(lambda: len(self.notes(job_id)) == nodes)
        return job_id

    def notes(self, job_id: str) -> dict[str, list[str]]:
        """Return what the tasks of a job have noted so far, by node."""
        paths = sorted(self.folder.glob(f"{job_id}-*"))
        return {path.name.partition("-")[2]: path.read_text().splitlines() for path in paths}

    def have_noted(self, job_id: str, line: str, *nodes: str) -> Callable[[], bool]:
        """Return a condition: the tasks on these nodes, by default all, have noted a line."""
        return lambda: all(line in lines for node, lines in self.notes(job_id).items() if not nodes or node in nodes)

    def finish(self) -> None:
        """Let all tasks end."""
        (self.folder / "go").touch()


@pytest.fixture
def tasks(slurm: Callable[..., SlurmCluster]) -> Tasks:
    """Tasks on a cluster of three nodes."""
    return Tasks(slurm(3))


def test_each_node_runs_one_task(tasks: Tasks) -> None:
    job_id = tasks.start(3)
    assert tasks.cluster.job_state(job_id) == "RUNNING"
    assert tasks.cluster.job_fields(job_id)["NodeList"] == "node[0-2]"
    tasks.finish()
    assert tasks.cluster.wait_for_end(job_id) == "COMPLETED"
    assert tasks.notes(job_id) == {f"node{number}": [f"start {number} {number}", "end"] for number in range(3)}
    assert "srun=0" in tasks.cluster.output(job_id)


def test_end_of_a_job_is_known_without_accounting(tasks: Tasks) -> None:
    failed = tasks.cluster.sbatch("exit 7")
    assert tasks.cluster.wait_for_end(failed) == "FAILED"
    assert tasks.cluster.job_fields(failed)["ExitCode"] == "7:0"
    job_id = tasks.start(3)
    tasks.cluster.run("scancel", job_id)
    assert tasks.cluster.wait_for_end(job_id) == "CANCELLED"
    tasks.cluster.wait_for(lambda: not tasks.cluster.job_pids())
    assert tasks.have_noted(job_id, "TERM")()  # before they were killed


def test_signal_of_scancel_reaches_every_process_of_a_step(tasks: Tasks) -> None:
    """A task that handles SIGTERM goes on; so a process that an agent starts gets what the agent gets."""
    job_id = tasks.start(3)
    tasks.cluster.run("scancel", "--signal=TERM", job_id)
    for line in ("TERM", "child TERM"):
        tasks.cluster.wait_for(tasks.have_noted(job_id, line))
    tasks.finish()
    assert tasks.cluster.wait_for_end(job_id) == "COMPLETED"
    assert all(lines[-1] == "end" for lines in tasks.notes(job_id).values())


def test_notice_before_the_time_limit_reaches_the_batch_shell_alone(tasks: Tasks) -> None:
    """Slurm looks at time limits every 30 s, and counts in minutes."""
    cluster = tasks.cluster
    notice = tasks.folder / "notice"
    script = f"trap 'touch {notice}' USR1\n{SURVIVING_STEP} {tasks.script} &\nwhile ! wait; do :; done"
    job_id = cluster.sbatch(script, "--nodes=2", *SURVIVING_JOB, "--time=1", "--signal=B:USR1@20")
    cluster.wait_for(notice.exists, 150)
    assert cluster.job_state(job_id) == "RUNNING"
    assert [lines[1:] for lines in tasks.notes(job_id).values()] == [[], []]
    assert cluster.wait_for_end(job_id, 150) == "TIMEOUT"
    assert tasks.have_noted(job_id, "TERM")()  # at the limit itself, and then SIGKILL
    assert len(tasks.notes(job_id)) == 2


@pytest.mark.parametrize("lost", [1, 0], ids=["another node", "the node of the batch script"])
def test_other_tasks_survive_the_loss_of_a_node(tasks: Tasks, lost: int) -> None:
    cluster = tasks.cluster
    job_id = tasks.start(3)
    cluster.nodes[lost].power_off()
    others = [f"node{number}" for number in range(3) if number != lost]
    cluster.wait_for(lambda: cluster.node_states()[f"node{lost}"].startswith("down"))
    cluster.wait_for(lambda: cluster.job_fields(job_id)["NumNodes"] == "2")
    assert cluster.job_state(job_id) == "RUNNING"
    step = ("srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={others[0]}")
    assert cluster.run(*step, "printenv", "SLURMD_NODENAME").stdout.strip() == others[0]
    tasks.finish()
    cluster.wait_for(tasks.have_noted(job_id, "end", *others))
    assert tasks.notes(job_id)[f"node{lost}"] == [f"start {lost} {lost}"]
    if lost == 0:  # the job has no batch script any more, and holds its nodes until somebody cancels it
        assert cluster.job_state(job_id) == "RUNNING"
        cluster.run("scancel", job_id)
        assert cluster.wait_for_end(job_id) == "CANCELLED"
    cluster.nodes[lost].boot()
    cluster.wait_for(lambda: cluster.node_states()[f"node{lost}"] == "idle")


def test_job_without_no_kill_ends_with_its_node_and_is_not_requeued(tasks: Tasks) -> None:
    job_id = tasks.start(2, "--no-kill=off")
    tasks.cluster.nodes[1].power_off()
    assert tasks.cluster.wait_for_end(job_id) == "NODE_FAIL"
    tasks.cluster.wait_for(lambda: not tasks.cluster.job_pids())


def test_another_job_replaces_a_lost_node(tasks: Tasks) -> None:
    cluster = tasks.cluster
    job_id = tasks.start(2)
    cluster.nodes[1].power_off()
    cluster.wait_for(lambda: cluster.job_fields(job_id)["NumNodes"] == "1")
    replacement = tasks.start(1, f"--nodelist={cluster.nodes[2].name}")
    assert {cluster.job_state(job) for job in (job_id, replacement)} == {"RUNNING"}
    cluster.run("scancel", job_id, replacement)
    for job in (job_id, replacement):
        assert cluster.wait_for_end(job) == "CANCELLED"


def test_preempted_tasks_get_sigterm_before_the_job_ends(tasks: Tasks) -> None:
    cluster = tasks.cluster
    job_id = tasks.start(3, "--exclusive")
    urgent = cluster.sbatch("true", "--exclusive", "--partition=urgent")
    cluster.wait_for(tasks.have_noted(job_id, "TERM"))
    assert cluster.wait_for_end(job_id) == "PREEMPTED"
    assert all("CONT" in lines for lines in tasks.notes(job_id).values())
    assert cluster.wait_for_end(urgent) == "COMPLETED"


def test_preempted_job_is_requeued_where_the_partition_wants_it(tasks: Tasks) -> None:
    cluster = tasks.cluster
    job_id = tasks.start(3, "--exclusive", "--partition=requeued", "--requeue")
    urgent = cluster.sbatch("true", "--exclusive", "--partition=urgent")
    assert cluster.wait_for_end(urgent) == "COMPLETED"
    cluster.wait_for(lambda: cluster.job_fields(job_id)["Restarts"] == "1")
    cluster.wait_for(lambda: cluster.job_state(job_id) != "COMPLETING")
    assert cluster.job_state(job_id) == "PENDING"


def test_step_with_a_terminal_on_a_node_of_the_job(tasks: Tasks) -> None:
    """srun passes a terminal through: `tty` names one, and what is typed arrives."""
    job_id = tasks.start(3)
    command = ["srun", f"--jobid={job_id}", "--overlap", "--pty", "--nodes=1", "--ntasks=1", "-w", "node1", "sh"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, tasks.cluster.env)
    shown = b""

    def has_shown(text: bytes) -> bool:
        nonlocal shown
        if select.select([terminal], [], [], 0)[0]:
            shown += os.read(terminal, 4096)
        return text in shown

    try:
        os.write(terminal, b"tty; echo on-$SLURMD_NODENAME\n")
        wait_for(lambda: has_shown(b"on-node1"), describe=lambda: repr(shown))
        assert b"/dev/pts/" in shown
        os.write(terminal, b"exit\n")
        deadline = time.monotonic() + 60
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.close(terminal)
    assert tasks.cluster.job_state(job_id) == "RUNNING"


def test_jobs_go_on_without_the_controller(tasks: Tasks, tmp_path: Path) -> None:
    cluster = tasks.cluster
    job_id = tasks.start(2)
    cluster.stop_controller()
    assert cluster.run("squeue", check=False).returncode != 0
    tasks.finish()
    wait_for(tasks.have_noted(job_id, "end"))
    cluster.start_controller()
    assert cluster.wait_for_end(job_id) == "COMPLETED"
