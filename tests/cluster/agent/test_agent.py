"""Tests of the agent process on a hand-made run folder, with trainers that are real processes but do not train.

What a trainer does is Python text, which a sitecustomize module runs in place of the trainer, with `report`, `out` and
`rank` defined. So a trainer ends in any way within a tenth of a second.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.known import known
from support.simcloud.gpus import install_gpus
from support.simcloud.traffic import Moved, write_proc

from cluster.state.heartbeats import MachineStatus
from infra.costs import Traffic
from train.engine.options import parse_run_options
from train.tools import host
from train.tools.records import read_record
from train.tools.text_files import read_json_lines

ROOT = Path(__file__).resolve().parents[3]

STAND_IN = """\
import sys
if sys.orig_argv[1:4] == ["-P", "-m", "train"]:
    import json, os, signal, subprocess, time, traceback
    from pathlib import Path
    from train.engine.agent_channel import AgentChannel
    report, rank = AgentChannel(), int(os.environ["RANK"])
    out = Path(sys.orig_argv[sys.orig_argv.index("--out") + 1])
    def until(condition):
        while not condition():
            time.sleep(0.01)
    try:
        exec(os.environ["TRAINER"])
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 99
    os._exit(code)
"""
PUBLISH = "(out / 'result.json').write_text('{\"epochs\": []}')\n"
TRAIN = "report.install_signal_handlers(); report.report_state('training', step=8, steps=16)\n"
SAVE_WHEN_ASKED = TRAIN + "until(report.stop_requested); report.report_state('saved', step=9); sys.exit(3)"


def read_shared(run: Any, path: str) -> Any:
    return json.loads((run.run_folder.shared / path).read_text())


def final_status(run: Any) -> MachineStatus:
    status = known(read_record(run.run_folder.status_path(), MachineStatus))
    assert status.ended
    return status


class Agents:
    """Starts agents on run folders, and reads their statuses and logs."""

    def __init__(self, sandbox: Any) -> None:
        self.place = sandbox
        self.started: list[subprocess.Popen[bytes]] = []
        (sandbox.path / "stand-in").mkdir()
        (sandbox.path / "stand-in/sitecustomize.py").write_text(STAND_IN)

    def start(self, run: Any, trainer: str = PUBLISH, machine: str = "0", *options: str) -> "subprocess.Popen[bytes]":
        path = f"{ROOT}{os.pathsep}{self.place.path / 'stand-in'}"
        with self.log.open("ab") as log:
            arguments = [str(run.run_folder.shared), str(run.run_folder.work_folder(machine)), machine, *options]
            agent = subprocess.Popen(
                [sys.executable, "-P", "-m", "cluster.agent", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.place.path,
                env={**self.place.env, "PYTHONPATH": path, "TRAINER": trainer},
            )
        self.started.append(agent)
        return agent

    def run(self, run: Any, trainer: str = PUBLISH) -> int:
        """Run an agent until it ends by itself, and return its exit code. No trainer may be left."""
        code = self.start(run, trainer).wait(120)
        assert not self.trainers(), self.log.read_text()
        return code

    @property
    def log(self) -> Path:
        return Path(self.place.path / "agent.log")

    def trainers(self) -> list[int]:
        return list(self.place.pids("-m train "))

    def wait_for_step(self, run: Any) -> None:
        self.place.wait_for(lambda: (run.job.status().step or 0) >= 8)

    def end(self, run: Any) -> tuple[str, str]:
        status = final_status(run)
        return status.state, status.reason

    def states(self, run: Any) -> list[str]:
        changes = read_json_lines(run.run_folder.shared / "logs/agent-0.jsonl", "state")
        return [str(change["state"]) for change in changes]


@pytest.fixture
def agents(sandbox: Any) -> Iterator[Agents]:
    agents = Agents(sandbox)
    yield agents
    for agent in agents.started:
        agent.kill()
        agent.wait()


def test_agent_trainers_write_result_job_is_done(agents: Any, hand_made: Any) -> None:
    """The trainers get the options of the job."""
    options = {"max_steps": 7, "scale": 0.5, "workers": 0, "skip_bad": True, "gpus": 4, "save_seconds": 2.0}
    run = hand_made(**options, target="top5=93")
    write_argv = "(out / 'argv').write_text(json.dumps(sys.orig_argv))\ntime.sleep(0.3)\n"
    assert agents.run(run, TRAIN + write_argv + PUBLISH) == 0
    assert agents.end(run) == ("done", "")
    assert agents.states(run) == ["setup", "waiting", "starting", "training", "done"]
    assert run.job.wait(120) == "done" and run.job.status().attempt == 1
    trained = parse_run_options(read_shared(run, "argv")[4:])
    assert (trained.recipe, trained.out) == (str(run.run_folder.recipe_path), run.run_folder.shared)
    assert {name: getattr(trained, name) for name in options} == options
    assert (trained.data, trained.copies) == (run.spec.train.data, run.spec.train.copies)
    assert (trained.target, trained.attempt, trained.resume) == ("top5=93", 1, "none")
    assert trained.log_dir == run.run_folder.work_folder()


def test_agent_of_a_rented_machine_counts_its_traffic(agents: Any, hand_made: Any) -> None:
    """What S3 sends does not come over the internet. There is no S3 here: the fetch fails."""
    run = hand_made(cloud={"gpus_per_machine": 0}, data_source="s3://bucket/set")
    root = agents.place.path / "root"
    write_proc(root, run.run_folder.shared, Moved(efs_read=1 << 20, efs_written=2 << 20, internet=900))
    agents.place.env[host.ROOT_VARIABLE] = str(root)
    assert agents.run(run) == 1
    moved = Traffic(shared_read_bytes=1 << 20, shared_written_bytes=2 << 20, internet_bytes=900)
    traffic = known(final_status(run).traffic)
    assert traffic.stored_bytes > 0 and replace(traffic, stored_bytes=0) == moved


def test_agent_crash_resumes_from_newest_checkpoint(agents: Any, hand_made: Any) -> None:
    run = hand_made(procs=2)
    saved = run.write_checkpoint(1, 8)
    crash = "if rank == 1 and not (out / 'crashed').exists():\n    (out / 'crashed').touch()\n    os.abort()\n"
    wait_for_crash = "until((out / 'crashed').exists)\ntime.sleep(0.3)\n"
    write_argv = "(out / f'argv-{rank}').write_text(json.dumps(sys.orig_argv))\nuntil((out / 'argv-1').exists)\n"
    assert agents.run(run, TRAIN + crash + wait_for_crash + write_argv + PUBLISH) == 0
    argv = read_shared(run, "argv-1")
    assert Path(argv[argv.index("--resume") + 1]).samefile(run.run_folder.shared / saved)
    assert run.job.wait(120) == "done"
    reasons = [row.reason for row in run.job.result.timeline]
    assert reasons == ["start", "the trainer of rank 1 was killed by SIGABRT"]
    status = final_status(run)
    assert (status.pid, status.step) == (agents.started[0].pid, 8)
    assert status.reason == "", "the reason of the crash belongs to the crash"


def test_agents_of_two_machines_survive_loss_of_the_first(agents: Any, hand_made: Any) -> None:
    run = hand_made(
        machines=2, procs=2, lost_seconds=4.0, heartbeat_timeout_seconds=4.0, heartbeat_seconds=0.2, in_place="off"
    )
    next_step = "if os.environ['WORLD_SIZE'] == '2': report.report_state('training', step=9); time.sleep(0.5)\n"
    end = "if os.environ['WORLD_SIZE'] == '2':\n    " + PUBLISH + "    sys.exit(0)\n"
    trainer = TRAIN + next_step + end + "until(lambda: False)"
    first_agent, second_agent = (agents.start(run, trainer, name) for name in ("0", "1"))
    agents.place.wait_for(lambda: len(agents.trainers()) == 4)
    agents.wait_for_step(run)
    first_agent.kill()  # the machine of rank 0
    assert second_agent.wait(120) == 0 and not agents.trainers()
    first, second = (read_shared(run, f"attempts/00000{number}.json") for number in (1, 2))
    assert second["reason"] == "machine 0 lost" and second["members"] == first["members"][1:]
    assert second["master_port"] != first["master_port"]
    assert run.job.wait(120) == "done"


def test_trainers_that_keep_their_state_go_on_as_the_same_processes(agents: Any, hand_made: Any) -> None:
    """Their peer is lost, so they wait in a collective: the agent asks them to abort it. One has finished a step more.

    They make progress until the peer is lost: an agent that the computer holds up before counts as no loss.
    """
    run = hand_made(
        machines=2, procs=2, lost_seconds=1.0, heartbeat_timeout_seconds=1.0, heartbeat_seconds=0.2, in_place="on"
    )
    train_on = "while not (out / 'lost').exists():\n    report.ticks += 1; time.sleep(0.05)\n"
    train_on += "    report.report_state('training', ticks=report.ticks)\n"
    keep = "until(report.abort_requested); report.report_kept_state(8 + rank % 2, has_saved=False, reason='it hangs')\n"
    go_on = "until(report.read_next_request); request = report.read_next_request()\n"
    note = "(out / f'next-{rank}').write_text(json.dumps([os.getpid(), request.argv, request.environment]))\n"
    begin = "os.environ.update(request.environment); report.begin_attempt(); report.report_state('training', step=10)\n"
    trainer = "report.not_in_place = ''\n" + TRAIN + "(out / f'pid-{rank}').write_text(str(os.getpid()))\n"
    trainer += train_on + keep + go_on + note + begin + "until(lambda: len(list(out.glob('next-*'))) == 2)\n" + PUBLISH
    first_agent, second_agent = (agents.start(run, trainer, name) for name in ("0", "1"))
    shared = run.run_folder.shared
    agents.place.wait_for(lambda: len(list(shared.glob("pid-*"))) == 4)
    agents.wait_for_step(run)
    first_agent.kill()
    run.write_shared("lost", "")
    assert second_agent.wait(120) == 0 and not agents.trainers()
    first, second = (read_shared(run, f"attempts/00000{number}.json") for number in (1, 2))
    assert (second["live_step"], second["reason"]) == (9, "machine 0 lost")
    for local_rank in range(2):
        pid, argv, environment = read_shared(run, f"next-{2 + local_rank}")
        assert pid == int((shared / f"pid-{2 + local_rank}").read_text())
        assert parse_run_options(argv).live_step == 9
        assert (environment["RANK"], environment["WORLD_SIZE"]) == (str(local_rank), "2")
        assert environment["IMGNET_WORK"] == str(run.run_folder.work_folder("1") / "000002")
        assert environment["IMGNET_TOKEN"] == second["token"] != first["token"]


def test_trainer_that_does_not_leave_in_time_is_killed_and_comes_back_as_a_new_one(agents: Any, hand_made: Any) -> None:
    """That of machine 1 hangs. The one of machine 0 keeps its state, goes on with it, and waits for the new one."""
    run = hand_made(machines=2, lost_seconds=1.0, heartbeat_seconds=0.2, stall_seconds=5.0)
    hang = (
        "if '--live-step' in sys.orig_argv: (out / 'new').touch(); until((out / 'result.json').exists); os._exit(0)\n"
    )
    hang += f"report.not_in_place = ''; {TRAIN}time.sleep(99 * rank)\n"
    keep = "until(report.abort_requested); report.report_kept_state(8, has_saved=False, reason='closed by peer')\n"
    go_on = "until(report.read_next_request); os.environ.update(report.read_next_request().environment)\n"
    end = "report.begin_attempt(); report.report_state('training', step=9); until((out / 'new').exists)\n" + PUBLISH
    started = [agents.start(run, hang + keep + go_on + end, machine) for machine in ("0", "1")]
    assert [agent.wait(120) for agent in started] == [0, 0] and not agents.trainers()
    first, second = (read_shared(run, f"attempts/00000{number}.json") for number in (1, 2))
    assert (second["live_step"], second["members"]) == (8, first["members"])
    assert second["reason"].startswith("no progress for ") and second["reason"].endswith(", all machines respond")
    log = run.run_folder.work_folder("1") / "logs/000001/rank-1.log"
    assert "most recent call first" in log.read_text()


def test_agent_second_in_same_work_folder_exits(agents: Any, hand_made: Any) -> None:
    run = hand_made()
    first = agents.start(run, SAVE_WHEN_ASKED)
    agents.wait_for_step(run)
    assert agents.start(run).wait(120) == 1
    assert "another agent already uses this work folder" in agents.log.read_text()
    assert first.poll() is None and len(agents.trainers()) == 1 and not (run.run_folder.shared / "result.json").exists()
    run.write_shared("stop", "{}")
    assert first.wait(120) == 0


def test_agent_with_a_file_that_cannot_be_shipped_says_how_it_ended(agents: Any, hand_made: Any) -> None:
    run = hand_made()
    (run.run_folder.shared / "events/run").mkdir(parents=True)
    events = run.run_folder.work_folder() / "events"
    events.mkdir()
    (events / "run").write_text("of a script that had a folder there before")
    agent = agents.start(run, SAVE_WHEN_ASKED)
    agents.wait_for_step(run)
    run.write_shared("stop", "{}")
    assert agent.wait(120) == 0
    status = json.loads(run.run_folder.status_path().read_text())
    assert (status["ended"], status["state"]) == (True, "stopped")


LOSE_A_GPU = """
until((out / 'gpus-counted').exists)
Path(os.environ['GPU_FOLDER'], 'gpus').write_text('1 2\\n')
sys.exit(5)
"""
UNKILLABLE = """
if sys.orig_argv[1:4] == ["-P", "-m", "cluster.agent"]:
    import subprocess
    from train.tools import process
    def hang(processes, timeout_seconds=None):
        if processes:
            raise subprocess.TimeoutExpired("trainer", timeout_seconds or 0)
    process.kill_process_groups = hang
"""


def test_agent_that_loses_a_gpu_ends_at_once(agents: Any, hand_made: Any, tmp_path: Path) -> None:
    install_gpus(tmp_path, tmp_path, 2)
    agents.place.env |= {"PATH": f"{tmp_path}:{agents.place.env['PATH']}", "GPU_FOLDER": str(tmp_path)}
    run = hand_made(procs=2)
    agent = agents.start(run, LOSE_A_GPU)
    agents.place.wait_for(lambda: "starting" in agents.states(run))
    run.write_shared("gpus-counted", "")
    assert agent.wait(120) == 1
    status = final_status(run)
    assert (status.fault, status.state) == ("machine", "failed")
    assert status.reason.startswith("1 of 2 GPUs answer (nvidia-smi: Unable to determine the device handle")
    assert "; before: the trainer of rank 0 ended with code 5" in status.reason
    assert status.reason.endswith("; restart the machine")
    assert agents.states(run).count("starting") == 1, "a broken machine is in no further attempt"


def test_agent_of_a_rented_machine_with_too_few_gpus_starts_no_trainer(
    agents: Any, hand_made: Any, tmp_path: Path
) -> None:
    """A replacement is not checked before its agent starts."""
    install_gpus(tmp_path, tmp_path, 1)
    agents.place.env |= {"PATH": f"{tmp_path}:{agents.place.env['PATH']}"}
    run = hand_made(machines=2, procs=2, cloud={"gpus_per_machine": 2})
    assert agents.run(run) == 0
    status = final_status(run)
    assert (status.state, status.fault, status.reason) == ("left", "machine", "1 of 2 GPUs answer")
    assert "starting" not in agents.states(run)


def test_agent_with_a_trainer_that_cannot_be_killed_ends(agents: Any, hand_made: Any) -> None:
    """It hangs in the driver. The agent still answers. A rented machine leaves: it will be exchanged."""
    with (agents.place.path / "stand-in/sitecustomize.py").open("a") as file:
        file.write(UNKILLABLE)
    run = hand_made(cloud={"gpus_per_machine": 1})
    assert agents.start(run, "sys.exit(5)").wait(120) == 0
    status = final_status(run)
    assert (status.fault, status.state) == ("machine", "left")
    assert status.reason.startswith("a process cannot be killed: it hangs in the kernel, in a driver or on a file sys")
    assert not status.reason.endswith("; restart the machine")
