"""Tests of Trainers with stand-in processes: how trainers are started, turned from a standby, stopped, and judged."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_for

from cluster.agent import trainers as trainers_module
from cluster.agent.processes.base import ProcessesExit
from cluster.agent.trainers import Trainers
from cluster.connectors.hosts_file import Hosts
from cluster.state.attempts import Attempt
from cluster.state.states import AgentPhase
from train.distributed import network
from train.tools import host, process
from train.tools.agent_protocol import Fault

STAND_IN = """\
import json, os, signal, sys, time
from pathlib import Path
from train.engine.agent_channel import AgentChannel
argv = sys.argv[1:]
log = None
if sys.argv[0] == "standby":
    Path(argv[0]).touch()
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    assignment = json.loads(line)
    os.environ.update(assignment["environment"])
    argv, log = assignment["argv"], assignment["log"]
rank, out, report = int(os.environ["RANK"]), Path(argv[argv.index("--out") + 1]), AgentChannel()
def until(condition):
    while not condition():
        time.sleep(0.01)
def has_ended(pid_file):
    if not pid_file.exists() or not (pid := pid_file.read_text()):
        return False
    stat = Path("/proc", pid, "stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
exec((out / "trainer.py").read_text())
"""


@pytest.fixture
def make_trainers(hand_made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainers]]:
    """Make the trainers of machine 0 of a job, which run this Python text. No process of theirs may be left."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def stand_in_command(module: str, *argv: str) -> list[str]:
        code = f"import sys; sys.argv[0] = {module.rpartition('.')[2]!r}; exec(open({str(script)!r}).read())"
        return [sys.executable, "-c", code, *argv]

    monkeypatch.setattr(trainers_module, "module_command", stand_in_command)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    started: list[Trainers] = []

    def make(text: str = "until(lambda: False)", **changes: Any) -> Trainers:
        run = hand_made(**changes)
        run.write_shared("trainer.py", text)
        (tmp_path / "temp").mkdir(exist_ok=True)
        started.append(Trainers(run.spec, run.run_folder.shared, run.run_folder.work_folder(), tmp_path / "temp"))
        return started[-1]

    process.adopt_orphans()  # as the agent does
    yield make
    process._LIBC.prctl(process._PR_SET_CHILD_SUBREAPER, 0)
    for trainers in started:
        trainers.stop(include_standby=True)
        assert all(child.poll() is not None for child in (*trainers.processes, *trainers.standby_processes))


def attempt(number: int = 1, **more: Any) -> Attempt:
    return Attempt(**{"number": number, "members": ("0.a", "1.b"), "master_port": 1234, **more})


WRITE_ASSIGNMENT = (
    "(out / f'assignment-{rank}').write_text(json.dumps([argv, dict(os.environ), os.getpid()])); until(lambda: False)"
)


def read_assignment(trainers: Trainers, rank: int) -> tuple[list[str], dict[str, str], int]:
    """Wait until a rank has started; return its arguments, environment and process id."""
    path = trainers.shared / f"assignment-{rank}"
    wait_for(lambda: path.exists() and path.read_text())
    argv, environment, pid = json.loads(path.read_text())
    return argv, environment, pid


def test_start_ranks_follow_machine_rank(make_trainers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "has_efa", lambda: True)
    trainers = make_trainers(WRITE_ASSIGNMENT, procs=2)
    resume = "checkpoints/000001/resume-00000008-ab.pt"
    log = trainers.start(attempt(resume=resume, addresses=("10.0.0.1", "10.0.0.2")), 1)
    assert log == trainers.work / "logs/000001/rank-2.log" and trainers.first_rank == 2
    for rank in (2, 3):
        argv, environment, _ = read_assignment(trainers, rank)
        expected = {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank - 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "IMGNET_WORK": str(trainers.work / "000001")},
            "IMGNET_JOB": trainers.spec.uid or trainers.spec.name,
            **{"IMGNET_PEERS": "10.0.0.1,10.0.0.2", "FI_EFA_USE_HUGE_PAGE": "0", "NCCL_SOCKET_FAMILY": "AF_INET"},
        }
        assert {name: environment.get(name) for name in expected} == expected
        assert f"--attempt 1 --resume {trainers.shared}/{resume}" in " ".join(argv)


@pytest.mark.parametrize(("changes", "slurm", "needed"), [
    ({}, {}, None), ({"cloud": {"gpus_per_machine": 1}}, {}, "1"), ({"hosts": Hosts(None, ())}, {}, "1"),
    ({}, {"SLURM_GPUS_ON_NODE": "8"}, "1"), ({}, {"SLURM_JOB_GPUS": "0"}, "1"), ({}, {"SLURM_STEP_GPUS": "0"}, "1"),
    ({}, {"SLURM_GPUS_ON_NODE": "0", "SLURM_JOB_GPUS": "", "SLURM_JOB_ID": "7"}, None),
])  # fmt: skip
def test_gpus_of_rented_machines_of_those_over_ssh_and_of_slurm_must_be_used(
    changes: dict[str, Any], slurm: dict[str, str], needed: str | None, make_trainers: Any, monkeypatch: Any
) -> None:
    """On the user's own computer, training on the processors is said aloud, and goes on."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    trainers = make_trainers(WRITE_ASSIGNMENT, **changes)
    trainers.start(attempt(members=("0.a",)), 0)
    assert read_assignment(trainers, 0)[1].get("IMGNET_NEEDS_GPU") == needed


def test_start_uses_ready_standby_and_stop_spares_the_new_one(make_trainers: Any) -> None:
    trainers = make_trainers(WRITE_ASSIGNMENT, procs=2, standby=True)
    wait_for(trainers.ensure_standby)
    pids = [child.pid for child in trainers.standby_processes]
    trainers.start(attempt(), 0)
    assert [read_assignment(trainers, rank)[2] for rank in (0, 1)] == pids and trainers.standby_processes == []
    wait_for(trainers.ensure_standby)
    assert trainers.exit_codes() == [None, None]
    trainers.stop()
    assert all(standby.poll() is None for standby in trainers.standby_processes) and trainers.is_standby_ready
    assert len(trainers.standby_processes) == 2 and trainers.processes == []


def test_start_incomplete_standby_is_not_used(make_trainers: Any) -> None:
    trainers = make_trainers(WRITE_ASSIGNMENT, procs=2, standby=True)
    wait_for(trainers.ensure_standby)
    victim, other = trainers.standby_processes
    victim.kill()
    victim.wait()
    trainers.start(attempt(), 0)
    assert {read_assignment(trainers, rank)[2] for rank in (0, 1)}.isdisjoint({victim.pid, other.pid})
    assert other.poll() is not None, "an incomplete standby is killed"
    wait_for(trainers.ensure_standby)


def test_standby_that_dies_while_it_loads_is_given_up(make_trainers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the machine would never be ready, and nobody would learn why: the trainers fail too, and report it."""
    trainers = make_trainers(standby=True)
    monkeypatch.setattr(trainers_module, "module_command", lambda *_: ["false"])
    wait_for(trainers.ensure_standby, 20)
    assert trainers.standby_processes == [] and not trainers.is_standby_ready


@pytest.mark.parametrize("standby, available_gb", [(False, 100.0), (True, 1.5)], ids=["unwanted", "low memory"])
def test_ensure_standby_without_wish_or_memory_starts_none(
    make_trainers: Any, monkeypatch: pytest.MonkeyPatch, standby: bool, available_gb: float
) -> None:
    monkeypatch.setattr(host, "read_memory", lambda: host.Memory(total_gb=128.0, available_gb=available_gb))
    trainers = make_trainers(WRITE_ASSIGNMENT, standby=standby)
    assert trainers.ensure_standby() and trainers.standby_processes == [], "the machine is ready without one"
    trainers.start(attempt(), 0)
    assert read_assignment(trainers, 0)[1]["RANK"] == "0"


def nccl_abort(error: str) -> str:
    """Return a trainer of rank 3 that NCCL aborts, as it prints this."""
    line = f"[rank3]: Process group watchdog thread terminated with exception: {error}\nCompile with `X`"
    return f"if rank == 3: print({line!r}, flush=True); os.abort()"


ECC = "uncorrectable ECC error encountered"
AFTER_2 = "if rank == 3: until((report.folder / 'failed-2.json').exists)\n"
KILL_3 = "if rank == 3: (out / 'pid').write_text(str(os.getpid())); os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize("text, reason, fault", [
    ("if rank == 3: os.kill(os.getpid(), 9)", "the trainer of rank 3 was killed by SIGKILL", Fault.OWN),
    ("if rank == 2: os.abort()", "the trainer of rank 2 was killed by SIGABRT", Fault.NONE),
    ("if rank == 3: sys.exit(5)", "the trainer of rank 3 ended with code 5 and no result", Fault.OWN),
    ("sys.exit(0)", "the trainer of rank 2 ended with code 0 and no result", Fault.OWN),
    ("if rank == 3: report.report_failure('a bug'); sys.exit(1)", "a bug", Fault.OWN),
    ("if rank == 3: report.report_failure('no data', 'final'); sys.exit(1)", "no data", Fault.FINAL),
    ("if rank == 2: report.report_failure('bad loss', 'input'); sys.exit(1)", "bad loss", Fault.INPUT),
    ("if rank == 2: report.report_failure('torn', 'checkpoint'); sys.exit(1)", "torn", Fault.CHECKPOINT),
    ("if rank == 3: report.report_failure('gloo: closed', 'peer'); sys.exit(1)", "gloo: closed", Fault.NONE),
    (f"{AFTER_2}report.report_failure(*(('a bug', 'own') if rank == 3 else ('closed', 'peer')))\n"
     "until((report.folder / 'failed-3.json').exists); sys.exit(1)", "a bug", Fault.OWN),
    (f"{KILL_3}until(lambda: has_ended(out / 'pid')); report.report_failure('a reset', 'own'); sys.exit(1)",
     "the trainer of rank 3 was killed by SIGKILL", Fault.OWN),
    (nccl_abort("CUDA error: device-side assert"), "GPU 5: CUDA error: device-side assert", Fault.OWN),
    (nccl_abort(f"CUDA error: {ECC}"), f"GPU 5 is broken: {ECC}", Fault.MACHINE),
    (nccl_abort("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 60000 milliseconds"),
     "the trainer of rank 3 was killed by SIGABRT", Fault.NONE),
])  # fmt: skip
def test_collect_exit_tells_reason_and_fault(
    make_trainers: Any, monkeypatch: pytest.MonkeyPatch, text: str, reason: str, fault: Fault
) -> None:
    """Own failures win over those of peers, a kill over reports, and what NCCL has printed over its abort."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    trainers = make_trainers(f"{text}\nuntil(lambda: False)", procs=2)
    trainers.start(attempt(), 1)
    end = wait_for(lambda: trainers.collect_exit(trainers.exit_codes()))
    assert end == ProcessesExit(AgentPhase.FAILED, reason, fault)


def test_dump_stacks_writes_stacks_to_log(make_trainers: Any) -> None:
    train = "report.install_signal_handlers(); report.report_state('training')\n"
    trainers = make_trainers(train + "def stuck():\n    until(lambda: False)\nstuck()")
    log = trainers.start(attempt(), 0)
    wait_for(lambda: (progress := trainers.read_progress()) and progress.state == "training")
    trainers.dump_stacks()
    wait_for(lambda: "in stuck" in log.read_text())
    assert trainers.exit_codes() == [None]
