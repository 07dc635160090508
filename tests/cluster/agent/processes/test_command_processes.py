"""Tests of the processes of a user's command: their variables, their folder, their end, and what they leave behind."""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.waiting import wait_for

from cluster.agent.processes import commands
from cluster.agent.processes.base import ProcessesExit
from cluster.agent.processes.commands import MAX_REASON_CHARACTERS, CommandProcesses
from cluster.script import checkpoint_folder, secret_values
from cluster.script.snapshot import newest_version
from cluster.state.attempts import Attempt
from cluster.state.spec import UserProject
from cluster.state.states import AgentPhase
from train.metrics.records import StepRow, read_metrics_file
from train.recipe import Command
from train.tools import process
from train.tools.agent_protocol import Fault, metrics_file
from train.tools.files import FORMER_UTF8_VARIABLE, PROJECT_ROOT

ATTEMPT = Attempt(number=2, members=("0.a", "1.b"), master_port=1234, reason="machine 2 lost")
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)"
SAVING = """\
import os, signal, time
{handler}
with open(os.environ["IMGNET_CHECKPOINTS"] + "/model", "w") as file:
    file.write("the first half")
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def make(hand_made: Any, tmp_path: Path) -> Iterator[Callable[..., CommandProcesses]]:
    """Make the processes of machine 1 that run a shell script. None of them may be left."""
    started: list[CommandProcesses] = []

    def make_processes(script: str, argv: tuple[str, ...] = (), procs: int = 1, **fields: Any) -> CommandProcesses:
        command = Command(argv=argv or ("sh", "-c", script), **fields)
        source = tmp_path / "source"
        (source / "sub").mkdir(parents=True, exist_ok=True)
        (source / "sub/data.txt").write_text("first\n")
        project = UserProject(folder="/elsewhere", workdir="sub")
        run = hand_made(workload=command, user_project=project, procs=procs)
        (tmp_path / "temp").mkdir(exist_ok=True)
        work = run.run_folder.work_folder("1")
        started.append(CommandProcesses(run.spec, command, run.run_folder.shared, work, tmp_path / "temp", source))
        return started[-1]

    process.adopt_orphans()  # as the agent does
    yield make_processes
    process._LIBC.prctl(process._PR_SET_CHILD_SUBREAPER, 0)
    for processes in started:
        processes.stop(include_standby=True)
        assert processes.guard is None and not processes.processes


def wait_for_exit(processes: CommandProcesses) -> ProcessesExit:
    return wait_for(lambda: processes.collect_exit(processes.exit_codes()))


def start_and_end(processes: CommandProcesses) -> ProcessesExit:
    processes.start(ATTEMPT, 1)
    return wait_for_exit(processes)


def log(processes: CommandProcesses, rank: int = 1) -> str:
    return (processes.work / f"logs/000002/rank-{rank}.log").read_text()


def test_ranks_get_the_variables_of_torchrun(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROJECT_ROOT), "/own"]))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONUTF8", "1")  # as `use_utf8_names` sets it
    monkeypatch.setenv(FORMER_UTF8_VARIABLE, "")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    processes = make("env", procs=2, env={"OWN": "a b", "OMP_NUM_THREADS": "7", "NCCL_SOCKET_IFNAME": "ib0"})
    processes.spec = replace(processes.spec, uid="job-1-12345678")
    processes.secrets = {"PYTHONUNBUFFERED": "of a file"}
    assert processes.start(ATTEMPT, 1).name == "rank-2.log"
    assert wait_for_exit(processes) == ProcessesExit(AgentPhase.FINISHED)
    text = log(processes, 3)
    assert text.startswith("attempt 2: machine 2 lost; machines: 0, 1\n")
    variables = dict(line.split("=", 1) for line in text.splitlines()[1:] if "=" in line)
    expected = {
        **{"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"},
        **{"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "OWN": "a b"},
        **{"TORCHELASTIC_RESTART_COUNT": "1", "OMP_NUM_THREADS": "7", "PYTHONPATH": "/own"},
        **{"NCCL_SOCKET_IFNAME": "ib0", "PYTHONUNBUFFERED": "of a file", "TORCHELASTIC_RUN_ID": "job-1-12345678"},
        "IMGNET_EVENTS": str(processes.work / "events"),
        **{"PYTHONUTF8": None, FORMER_UTF8_VARIABLE: None},
        "PYTHONSAFEPATH": None,  # Python would not search modules beside the script
    }
    assert {name: variables.get(name) for name in expected} == expected
    assert variables["PATH"].startswith(f"{Path(sys.executable).parent}:")
    assert Path(variables["IMGNET_CHECKPOINTS"]).is_dir()


@pytest.mark.parametrize(("place", "is_active"), [
    ({}, True),
    ({"is_one_computer": False, "backend": "slurm"}, True),
    ({"is_one_computer": False, "cloud": {"zone": "a"}}, False),
])  # fmt: skip
def test_environment_that_is_active_in_the_users_shell_counts_on_this_computer_and_on_slurm(
    make: Any, monkeypatch: pytest.MonkeyPatch, place: dict[str, Any], is_active: bool
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/own")
    processes = make("")
    processes.spec = replace(processes.spec, **place)
    assert ("PATH" not in processes._job_environment()) == is_active


def test_secrets_stay_in_no_file_of_a_machine_that_never_starts_the_command(make: Any, tmp_path: Path) -> None:
    processes = make('echo "$TOKEN"')
    sent = processes.work / secret_values.SENT_FILE
    sent.write_bytes(secret_values.sent_bytes({"TOKEN": "hunter2"}))
    command = replace(processes.command, secrets=("TOKEN",))
    folders = (processes.shared, processes.work, tmp_path / "temp", tmp_path / "source")
    of_next_agent = CommandProcesses(processes.spec, command, *folders)
    assert not sent.exists()
    start_and_end(of_next_agent)
    of_next_agent.stop(include_standby=True)
    assert log(of_next_agent).splitlines()[-1] == "hunter2"


def test_command_runs_in_this_machines_copy_of_the_project(make: Any, tmp_path: Path) -> None:
    processes = make("cat data.txt; pwd; echo mine >own.txt; echo changed >data.txt")
    (tmp_path / "source/sub/random.py").touch()
    start_and_end(processes)
    folder = processes.work / "project/sub"
    assert log(processes).splitlines()[1:] == ["first", str(folder)]
    assert (tmp_path / "source/sub/data.txt").read_text() == "first\n"
    assert (folder / "random.py").exists()
    (tmp_path / "source/sub/random.py").unlink()  # a name that would hide a module of Python
    (tmp_path / "source/link").symlink_to("sub/data.txt")
    command = Command(argv=("sh", "-c", "cat data.txt own.txt ../link"))
    of_next_agent = (processes.spec, command, processes.shared, processes.work, tmp_path / "temp", tmp_path / "source")
    later = CommandProcesses(*of_next_agent)
    start_and_end(later)
    later.stop(include_standby=True)
    assert log(later).splitlines()[-3:] == ["first", "mine", "first"]
    assert not (folder / "random.py").exists()


# As users report it: huggingface/open-r1, issue 620.
WATCHDOG_ERROR = """\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f5a in libc10.so)
frame #6: clone + 0x43 (0x7f4b in libc.so.6)
"""


@pytest.mark.parametrize(("script", "reason", "fault"), [
    ("echo ValueError: bad >&2; exit 3", "ended with code 3: ValueError: bad", Fault.OWN),
    ("kill -9 $$", "was killed by SIGKILL", Fault.OWN),
    ("exit 137", "ended with code 137 (128 + SIGKILL)", Fault.OWN),
    ("exit 255", "ended with code 255", Fault.OWN),
    ("printf 'bad\\033[1m\\001 end'; exit 1", "ended with code 1: bad [1m end", Fault.OWN),
    ("head -c 9000 /dev/zero | tr '\\0' x; exit 1", f"ended with code 1: {'x' * (MAX_REASON_CHARACTERS - 3)}...",
     Fault.OWN),
    ("echo 'RuntimeError: Connection closed by peer'; exit 1",
     "ended with code 1: RuntimeError: Connection closed by peer", Fault.NONE),
    ("echo 'gloo: Connection reset'; echo 'terminate called without an active exception'; kill -ABRT $$",
     "was killed by SIGABRT; its last line: gloo: Connection reset", Fault.NONE),
    (f"cat <<'EOF'\n{WATCHDOG_ERROR}\nEOF\nkill -ABRT $$",
     "was killed by SIGABRT; its last line: [PG ID 0 Rank 1] Watchdog caught collective operation "
     "timeout: WorkNCCL(SeqNum=4)", Fault.NONE),
])  # fmt: skip
def test_failure_is_told_with_code_and_last_line(
    make: Any, monkeypatch: pytest.MonkeyPatch, script: str, reason: str, fault: Fault
) -> None:
    monkeypatch.setattr(commands, "COLLATERAL_SECONDS", 0.0)
    assert start_and_end(make(script)) == ProcessesExit(AgentPhase.FAILED, f"rank 1 {reason}", fault, rank=1)


@pytest.mark.parametrize(("argv", "copy", "problem"), [
    (("no-such-program", "x"), shutil.copy, "no-such-program: No such file or directory"),
    ((), Mock(side_effect=OSError(28, "No space left", "project/data.txt")), "project/data.txt: No space left"),
])  # fmt: skip
def test_command_that_cannot_be_started_is_wrong_input(
    make: Any, argv: tuple[str, ...], copy: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "copy", copy)
    processes, reason = make("exit 0", argv=argv), f"the command cannot be started: {problem}"
    assert start_and_end(processes) == ProcessesExit(AgentPhase.FAILED, reason, Fault.INPUT)
    assert reason in log(processes)


def test_container_gets_the_variables_of_the_user_the_gpus_and_the_region(make: Any, tmp_path: Path) -> None:
    processes = make("", image="img:1", env={"PYTHONPATH": "lib"})
    processes.spec = replace(processes.spec, cloud={"environment": {"AWS_REGION": "us-west-2"}})
    text = " ".join(processes._container_argv(0, tmp_path, {"PYTHONPATH": "lib"}))
    assert "--env AWS_REGION --env CUDA_VISIBLE_DEVICES --env PYTHONPATH " in text


def test_error_of_docker_is_told_not_its_advice(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nprintf \"docker: no space.\\n\\nRun 'docker run --help'\\n\"\nexit 125\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert start_and_end(make("", image="img:1")).reason == "rank 1 ended with code 125: docker: no space."


def test_working_folder_without_files_is_there(make: Any) -> None:
    processes = make("pwd")
    processes.spec = replace(processes.spec, user_project=UserProject(folder="/elsewhere", workdir="only/ignored"))
    assert start_and_end(processes).phase == AgentPhase.FINISHED
    assert log(processes).splitlines()[-1].endswith("/project/only/ignored")


def test_rank_that_ended_well_is_waited_for_by_none_but_the_others_are(make: Any, tmp_path: Path) -> None:
    processes = make(f'[ "$LOCAL_RANK" = 0 ] || until [ -e {tmp_path}/end ]; do sleep 0.01; done', procs=2)
    processes.start(ATTEMPT, 1)
    wait_for(lambda: processes.exit_codes() == [0, None])
    assert processes.collect_exit(processes.exit_codes()) is None
    (tmp_path / "end").touch()
    assert wait_for_exit(processes).phase == AgentPhase.FINISHED


def test_rank_0_that_gives_no_sign_for_too_long_has_stalled(make: Any, tmp_path: Path) -> None:
    script = f"echo ready; until [ -e {tmp_path}/go ]; do sleep 0.01; done; echo on; exec sleep 1000"
    processes = make(script, stall_seconds=60.0)
    processes.start(ATTEMPT, 0)

    def wait_for_sign(text: str) -> None:
        wait_for(lambda: text in log(processes, 0))
        processes.looked_at = 0.0  # it is looked at twice a second
        processes.read_progress()

    wait_for_sign("ready")
    assert processes.collect_exit(processes.exit_codes()) is None
    processes.last_sign = (processes.last_sign[0], processes.last_sign[1] - 60.0)
    (tmp_path / "go").touch()
    wait_for_sign("on")
    assert processes.collect_exit(processes.exit_codes()) is None and processes.found_exit is None, "output is a sign"
    processes.last_sign = (processes.last_sign[0], processes.last_sign[1] - 60.0)
    reason = "no progress of rank 0 for 60 s (--stall-seconds)"
    assert wait_for_exit(processes) == ProcessesExit(AgentPhase.FAILED, reason, Fault.OWN, rank=0)


def test_steps_of_rank_0_are_in_the_metrics_with_no_number_of_images_once_they_are_counted_anew(
    make: Any, tmp_path: Path
) -> None:
    script = f"for step in 3 5 1 7; do echo step $step; until [ -e {tmp_path}/$step ]; do sleep 0.01; done; done"
    processes = make(f"{script}; echo step 9", progress=r"step (?P<step>\d+)")
    processes.start(ATTEMPT, 0)
    path = metrics_file(processes.work, 2)

    def logged_steps() -> list[tuple[int, int]]:
        processes.looked_at = 0.0  # it is looked at twice a second
        processes.read_progress()
        return [(row.step, row.images) for row in read_metrics_file(path, StepRow)]

    for step in (3, 5, 1, 7):
        wait_for(lambda: [logged for logged, _ in logged_steps()][-1:] == [step])  # noqa: B023 (called in this round)
        assert logged_steps() == logged_steps(), "each step once"
        (tmp_path / str(step)).touch()
    assert wait_for_exit(processes).phase == AgentPhase.FINISHED
    processes.looked_at = time.monotonic()
    assert processes.read_progress().step == 9, "its last words are read, however recently it was looked at"
    assert logged_steps() == [(3, 4), (5, 6), (1, 0), (7, 0), (9, 0)]


def test_script_that_makes_no_process_group_is_told_of_also_at_its_end(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "GROUP_SECONDS", 0.0)
    processes = make(f"until [ -e {tmp_path}/end ]; do sleep 0.01; done", procs=2)
    with socket.create_server(("127.0.0.1", 0)) as of_the_script:
        attempt = replace(ATTEMPT, master_port=of_the_script.getsockname()[1])
        processes.start(attempt, 0)
        assert processes.problem() and processes.read_progress() and not processes.problem()
        processes.start(replace(attempt, master_port=process.free_port()), 0)
        problem = "no process listens on MASTER_PORT: without init_process_group, each rank trains alone"
        assert processes.read_progress() and processes.problem() == problem
    (tmp_path / "end").touch()
    assert wait_for_exit(processes) == ProcessesExit(AgentPhase.FINISHED, problem)
    assert start_and_end(processes).reason == "", "machine 1 cannot know it"
    processes.spec = replace(processes.spec, procs=1)
    assert processes.start(replace(attempt, members=("0.a",)), 0) and not processes.problem(), "a rank without others"


def test_request_sends_the_save_signal_once_and_any_exit_counts_as_saved(make: Any) -> None:
    processes = make("trap 'echo saving; exit 1' USR1; echo ready; while :; do sleep 0.01; done", save_signal="USR1")
    processes.start(ATTEMPT, 1)
    wait_for(lambda: "ready" in log(processes))
    assert processes.collect_exit(processes.exit_codes()) is None
    processes.request_save_and_exit()
    processes.request_save_and_exit()
    assert wait_for_exit(processes) == ProcessesExit(AgentPhase.SAVED)
    assert log(processes).count("saving") == 1


def test_command_that_ignores_the_signal_is_killed_after_the_grace(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = make("", argv=(sys.executable, "-S", "-c", DEAF))
    processes.start(ATTEMPT, 1)
    wait_for(lambda: "deaf" in log(processes))
    processes.request_save_and_exit()
    assert processes.collect_exit(processes.exit_codes()) is None
    monkeypatch.setattr(commands, "SAVE_GRACE_SECONDS", 0.0)
    end = wait_for(lambda: processes.collect_exit(processes.exit_codes()))
    assert end.phase == AgentPhase.SAVED and "after SIGTERM, which it ignored" in end.reason
    assert processes.exit_codes() == [-9]


@pytest.mark.parametrize(("handler", "save_signal", "is_copied"), [
    ("signal.signal(signal.SIGTERM, signal.SIG_DFL)", "TERM", False),
    ("signal.signal(signal.SIGTERM, lambda *_: os._exit(1))", "TERM", True),
    ("signal.signal(signal.SIGINT, signal.default_int_handler)", "INT", True),
])  # fmt: skip
def test_last_files_are_copied_unless_the_save_signal_has_killed_rank_0(
    make: Any, monkeypatch: pytest.MonkeyPatch, handler: str, save_signal: str, is_copied: bool
) -> None:
    for name in ("REST_SECONDS", "RESTLESS_SECONDS"):  # nothing is copied before the end
        monkeypatch.setattr(checkpoint_folder, name, 1000.0)
    argv = (sys.executable, "-S", "-c", SAVING.format(handler=handler))
    processes = make("", argv=argv, save_signal=save_signal)
    processes.start(ATTEMPT, 0)
    wait_for(lambda: "ready" in log(processes, 0))
    processes.request_save_and_exit()
    assert wait_for_exit(processes) == ProcessesExit(AgentPhase.SAVED)
    assert bool(newest_version(processes.shared)) == is_copied


def test_stop_ends_a_process_that_went_to_the_background(make: Any) -> None:
    processes = make("setsid sleep 1000 & echo $!")
    start_and_end(processes)
    pid = int(log(processes).splitlines()[-1])
    assert Path(f"/proc/{pid}").exists()
    processes.stop()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text())
