"""The trainers of one machine, as stand-ins: how they are started, told who to be, and how their end is understood."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.agent import trainers
from cluster.agent.trainers import TrainerExit, Trainers
from cluster.state.attempts import Attempt
from train.tools import process

Fixture = Any

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
    asked = json.loads(line)
    os.environ.update(asked["environment"])
    argv, log = asked["argv"], asked["log"]
rank, out, report = int(os.environ["RANK"]), Path(argv[argv.index("--out") + 1]), AgentChannel()
def until(condition):
    while not condition():
        time.sleep(0.01)
exec((out / "trainer.py").read_text())
"""


@pytest.fixture
def team(hand_made: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainers]]:
    """Make the trainers of machine 0 of a job, which run this Python text; nothing of them may be left."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def words(module: str, *argv: str) -> list[str]:
        code = f"import sys; sys.argv[0] = {module.rpartition('.')[2]!r}; exec(open({str(script)!r}).read())"
        return [sys.executable, "-c", code, *argv]

    monkeypatch.setattr(trainers, "module_command", words)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    made: list[Trainers] = []

    def make(text: str = "until(lambda: False)", **changes: Any) -> Trainers:
        run = hand_made(**changes)
        run.shared("trainer.py", text)
        (tmp_path / "temp").mkdir(exist_ok=True)
        made.append(Trainers(run.spec, run.folders.shared, run.folders.work_folder(), tmp_path / "temp"))
        return made[-1]

    process.adopt_orphans()  # as the agent does
    yield make
    process._LIBC.prctl(process._PR_SET_CHILD_SUBREAPER, 0)
    for one in made:
        one.stop(include_standby=True)
        assert all(child.poll() is not None for child in (*one.processes, *one.standby_processes))


def attempt(number: int = 1, **more: Any) -> Attempt:
    return Attempt(**{"number": number, "members": ("0.a", "1.b"), "master_port": 1234, **more})


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def gone(pid: str) -> bool:
    """Whether a process has ended; it may still be a zombie of ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def end_of(team: Trainers) -> TrainerExit:
    return wait_for(lambda: team.collect_exit(team.exit_codes()))


TELL = "(out / f'told-{rank}').write_text(json.dumps([argv, dict(os.environ), os.getpid()])); until(lambda: False)"


def told(team: Trainers, rank: int) -> tuple[list[str], dict[str, str], int]:
    path = team.shared / f"told-{rank}"
    wait_for(lambda: path.exists() and path.read_text())
    argv, environment, pid = json.loads(path.read_text())
    return argv, environment, pid


def test_start_ranks_follow_machine_rank(team: Fixture) -> None:
    one = team(TELL, procs=2)
    log = one.start(attempt(resume="checkpoints/000001/resume-00000008-ab.pt"), 1)
    assert log == one.work / "logs/000001/rank-2.log" and one.first_rank == 2
    for rank in (2, 3):
        argv, environment, _ = told(one, rank)
        assert (environment["RANK"], environment["LOCAL_RANK"]) == (str(rank), str(rank - 2))
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "1234")
        assert environment["IMGNET_WORK"] == str(one.work / "000001")
        said = " ".join(argv)
        assert f"--resume {one.shared}/checkpoints/000001/resume-00000008-ab.pt" in said and "--attempt 1" in said


def test_start_uses_ready_standby_and_makes_new_one(team: Fixture) -> None:
    one = team(TELL, procs=2, standby=True)
    wait_for(one.ensure_standby)
    pids = [child.pid for child in one.standby_processes]
    one.start(attempt(), 0)
    assert [told(one, rank)[2] for rank in (0, 1)] == pids and one.standby_processes == []
    wait_for(one.ensure_standby)
    assert [child.pid for child in one.standby_processes] != pids and one.exit_codes() == [None, None]
    (one.shared / "told-0").unlink()
    after = [child.pid for child in one.standby_processes]
    one.stop()
    one.start(attempt(2), 0)
    assert told(one, 0)[2] == after[0] and told(one, 0)[1]["IMGNET_WORK"].endswith("/000002")


def test_start_without_standby_starts_new_processes(team: Fixture) -> None:
    one = team(TELL, standby=False)
    assert one.ensure_standby() and one.standby_processes == [], "there is none, so all is ready"
    one.start(attempt(), 0)
    assert told(one, 0)[1]["RANK"] == "0"


def test_start_incomplete_standby_is_not_used(team: Fixture) -> None:
    one = team(TELL, procs=2, standby=True)
    wait_for(one.ensure_standby)
    victim, other = one.standby_processes
    victim.kill()
    victim.wait()
    assert not one.is_standby_ready
    one.start(attempt(), 0)
    assert {told(one, rank)[2] for rank in (0, 1)}.isdisjoint({victim.pid, other.pid})
    assert other.poll() is not None, "the half of a standby is ended"
    wait_for(one.ensure_standby)


def test_ensure_standby_replaces_dead_process(team: Fixture) -> None:
    one = team(TELL, standby=True)
    wait_for(one.ensure_standby)
    before = one.standby_processes[0].pid
    one.standby_processes[0].kill()
    one.standby_processes[0].wait()
    wait_for(lambda: one.ensure_standby() and one.standby_processes[0].pid != before)


def test_ensure_standby_low_memory_starts_none(team: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "_available_memory_gb", lambda: 1.5)
    one = team(TELL, standby=True)
    assert one.ensure_standby() and one.standby_processes == []


def test_stop_spares_standby_unless_included(team: Fixture) -> None:
    child = "import subprocess\nchild = subprocess.Popen(['sleep', '4321'], start_new_session=True).pid\n"
    one = team(child + "(out / 'child').write_text(str(child))\n" + TELL, standby=True)
    wait_for(one.ensure_standby)
    one.start(attempt(), 0)
    told(one, 0)
    wait_for(one.ensure_standby)
    (standby,) = one.standby_processes
    one.stop()
    assert standby.poll() is None and one.processes == [] and one.is_standby_ready
    wait_for(lambda: gone((one.shared / "child").read_text()))
    one.stop(include_standby=True)
    assert standby.poll() is not None and one.standby_processes == []


SAVED = "report.install_signal_handlers(); until(report.stop_requested); sys.exit(3)"


def test_request_save_and_exit_ends_as_saved(team: Fixture) -> None:
    one = team(SAVED, procs=2)
    one.start(attempt(), 0)
    assert one.collect_exit(one.exit_codes()) is None
    one.request_save_and_exit()
    assert end_of(one) == TrainerExit("saved")
    one.stop()
    one.start(attempt(2), 0)
    assert not (one.attempt_folder / "ask").exists() and one.exit_codes() == [None, None]


@pytest.mark.parametrize(
    "text, ending",
    [
        ("if rank == 3: os.kill(os.getpid(), 9)", TrainerExit("failed", "the trainer of rank 3 was killed by SIGKILL", "own")),
        ("if rank == 2: os.abort()", TrainerExit("failed", "the trainer of rank 2 was killed by SIGABRT", "")),
        ("if rank == 3: sys.exit(5)", TrainerExit("failed", "the trainer of rank 3 ended with code 5 and no result", "own")),
        ("sys.exit(0)", TrainerExit("failed", "the trainer of rank 2 ended with code 0 and no result", "own")),
        ("if rank == 3: report.report_failure('a bug'); sys.exit(1)", TrainerExit("failed", "a bug", "own")),
        ("if rank == 3: report.report_failure('no data', 'final'); sys.exit(1)", TrainerExit("failed", "no data", "final")),
        ("if rank == 3: report.report_failure('gloo: closed', 'peer'); sys.exit(1)", TrainerExit("failed", "gloo: closed", "")),
    ],
    ids=["SIGKILL", "SIGABRT", "a code", "no result", "own", "final", "peer"],
)  # fmt: skip
def test_collect_exit_tells_reason_and_fault(team: Fixture, text: str, ending: TrainerExit) -> None:
    one = team(f"{text}\nuntil(lambda: False)", procs=2)
    one.start(attempt(), 1)
    assert end_of(one) == ending


def test_collect_exit_own_failure_wins_over_peer_failures(team: Fixture) -> None:
    late = "until((report.folder / 'failed-0.json').exists); report.report_failure('the reason', 'own'); sys.exit(1)"
    one = team(f"if rank: {late}\nreport.report_failure('Connection closed by peer', 'peer'); sys.exit(1)", procs=2)
    one.start(attempt(), 0)
    assert end_of(one) == TrainerExit("failed", "the reason", "own")


def test_collect_exit_kill_wins_over_reported_failures(team: Fixture) -> None:
    text = "if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(0.1); report.report_failure('a reset', 'own'); sys.exit(1)"
    one = team(text, procs=2)
    one.start(attempt(), 0)
    assert end_of(one).reason == "the trainer of rank 1 was killed by SIGKILL"


def test_collect_exit_ignores_reports_of_earlier_attempt(team: Fixture) -> None:
    one = team("if not (out / 'again').exists(): report.report_failure('of attempt 1'); sys.exit(1)\nuntil(lambda: False)")
    one.start(attempt(), 0)
    assert end_of(one).reason == "of attempt 1"
    (one.shared / "again").touch()
    one.stop()
    one.start(attempt(2), 0)
    assert one.read_progress() == {} and not (one.work / "000001").exists()
    one.processes[0].kill()
    assert end_of(one).reason == "the trainer of rank 0 was killed by SIGKILL"


def test_dump_stacks_writes_stacks_to_log(team: Fixture) -> None:
    one = team("report.install_signal_handlers(); report.report_state('training')\ndef stuck():\n    until(lambda: False)\nstuck()")
    log = one.start(attempt(), 0)
    wait_for(lambda: one.read_progress().get("state") == "training")
    one.dump_stacks()
    wait_for(lambda: "in stuck" in log.read_text())
    assert one.exit_codes() == [None]
