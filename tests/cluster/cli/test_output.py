"""What the commands print: data on stdout, messages on stderr, pure JSON, color on terminals only."""

import json
import os
import shutil
import subprocess
from typing import Any

import pytest
from support.sandbox import COMMAND


def test_logs_prints_the_log_files_unchanged(sandbox: Any, finished: Any) -> None:
    shutil.copytree(finished.path / "runs", sandbox.path / "runs")
    logs, record = sandbox.path / "runs/job-1/logs", sandbox.path / "runs/job-1/supervisor.jsonl"
    for rank in ("0", "1"):
        assert sandbox.cli("logs", "--rank", rank).out == (logs / f"000001/rank-{rank}.log").read_text()
    agent_lines = sandbox.cli("logs", "--agent").out.splitlines()
    assert agent_lines[-1].endswith(": done") and all(" attempt " in line for line in agent_lines)
    record.unlink(missing_ok=True)
    for kind, reason in (("--setup", "need no set-up"), ("--supervisor", "supervisor of job-1 has recorded nothing")):
        refused = sandbox.cli("logs", kind)
        assert refused.code == 1 and "no such log; " in refused.err and reason in refused.err
    record.write_text('{"time": 0, "message": "a loss"}\n{"time": 0, "mess')
    assert sandbox.cli("logs", "--supervisor").out.endswith(' a loss\n{"time": 0, "mess')
    assert sandbox.cli("logs", "-f").code == 0


def test_status_is_that_of_the_newest_job_and_json_has_nothing_else_on_stdout(finished: Any) -> None:
    assert finished.cli("status").out == finished.cli("status", "job-1").out == finished.cli("status", "1").out
    listed, shown = (finished.cli(command, "-o", "json") for command in ("ls", "status"))
    assert (listed.code, listed.err, shown.code, shown.err) == (0, "", 0, "")
    for status in (*json.loads(listed.out), json.loads(shown.out)):
        assert (status["job"], status["state"], status["attempt"]) == ("job-1", "done", 1)
    assert status["result"]["top1"] == status["top1"]


def test_output_without_terminal_has_no_color_and_full_lines(finished: Any) -> None:
    for argv in (["ls"], ["plan", finished.write_recipe(3)], ["status"]):
        ran = finished.cli(*argv, env={"COLUMNS": "40"})
        assert ran.code == 0 and "\x1b" not in ran.out + ran.err and "…" not in ran.out
    assert "\x1b" not in finished.output()


def test_output_on_terminal_has_color_unless_no_color(finished: Any, on_terminal: Any) -> None:
    green = "\x1b[32m"
    for command in ("ls", "status"):
        assert f"{green}done" in on_terminal(command, cwd=finished.path)[1], command
        screen = on_terminal(command, cwd=finished.path, NO_COLOR="1")[1]
        assert "job-1" in screen and green not in screen


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_closed_pipe_ends_silently(finished: Any, unbuffered: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head -1` does, but immediately
    env = {**finished.env, "PYTHONUNBUFFERED": unbuffered}
    ran = subprocess.run(
        [finished.command, "ls"], stdout=write_end, stderr=subprocess.PIPE, text=True, env=env, cwd=finished.path
    )
    os.close(write_end)
    assert ran.stderr == "" and ran.returncode in (0, 1)


@pytest.mark.parametrize(("streams", "job", "code", "message"), [
    ("", "job-1", 0, ""),
    ("<&- >&- 2>&-", "job-1", 0, ""),
    (">&-", "job-9", 102, "error: job-9: there is no such job"),
    (">/dev/full", "job-1", 1, "error: "),
])  # fmt: skip
def test_closed_streams_change_nothing_but_the_output_and_a_full_device_is_an_error(
    finished: Any, streams: str, job: str, code: int, message: str
) -> None:
    argv = ["sh", "-c", f'"$@" {streams}', "sh", finished.command, "status", "--exit-code", job]
    ran = subprocess.run(argv, capture_output=True, text=True, env=finished.env, cwd=finished.path)
    assert ran.returncode == code and ran.stderr.count("\n") == bool(message) and ran.stderr.startswith(message)


def test_ascii_locale_has_all_output(finished: Any) -> None:
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ran = finished.cli("status", env=ascii_locale)
    assert ran.code == 0 and ran.err == "" and ran.out == finished.cli("status").out


def test_ls_damaged_job_is_a_row_and_a_warning(sandbox: Any, hand_made: Any) -> None:
    runs_folder = hand_made("job-1").run_folder.path.parent
    (runs_folder / "job-2").mkdir()
    (runs_folder / "job-2/job.json").write_text('{"name": "job-2", "recipe"')
    ran = sandbox.cli("ls", "-o", "json")
    assert ran.code == 0
    assert [(row["job"], row["state"]) for row in json.loads(ran.out)] == [("job-1", "failed"), ("job-2", "damaged")]
    assert ran.err.startswith("warning: ") and ran.err.count("\n") == 1 and "job-2/job.json" in ran.err
    ran = sandbox.cli("ls")
    assert [line.split()[:2] for line in ran.out.splitlines()[2:]] == [["job-1", "tiny"], ["job-2", "damaged"]]
    ran = sandbox.cli("status", "job-2")
    assert ran.code == 1 and ran.err.startswith("error: ") and ran.err.count("\n") == 1 and "job-2/job.json" in ran.err


HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b]52;c;cm0=\x07\r\x1b[8m\u202eend"


def test_control_characters_of_machines_do_not_reach_the_terminal(hand_made: Any, on_terminal: Any) -> None:
    run = hand_made(machines=2)
    run.write_attempt(1, "0.a", "1.b")
    run.write_attempt(2, "0.a", reason=HOSTILE)
    for machine in ("0", "1"):
        run.write_status("training", machine, phase="running", attempt=2, reason=HOSTILE, doing=HOSTILE)
    run.run_folder.path.joinpath("logs/000002").mkdir(parents=True)
    run.run_folder.path.joinpath("logs/000002/rank-0.log").write_text(f"{HOSTILE}\n")
    agent_line = json.dumps({"time": 0, "attempt": 1, "state": "training", "reason": HOSTILE})
    run.run_folder.path.joinpath("logs/agent-0.jsonl").write_text(agent_line + "\n")
    with run.hold_agent_lock("0"), run.hold_agent_lock("1"):
        for words in (["ls"], ["status"], ["logs"], ["logs", "--agent"]):
            code, screen = on_terminal(*words, NO_COLOR="1", cwd=run.run_folder.path.parents[1])
            assert code == 0, screen
            assert "end" in screen or words == ["ls"]
            for mark in ("\x1b]", "\x1b[2J", "\x1b[8m", "\x07", "\u202e"):
                assert mark not in screen, (words, screen)
    log = subprocess.run([COMMAND, "logs"], capture_output=True, cwd=run.run_folder.path.parents[1])
    assert log.stdout == b"end\n"  # on a pipe too: `logs | tail` ends at a terminal
