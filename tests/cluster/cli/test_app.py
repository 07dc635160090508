"""The installed command: bad input gives one line and an exit code, creates no file and starts no process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors import tmux

HEAD = "from train.recipe import Data, Model, Phase, Recipe\n"


def recipe(name: str, epochs: tuple[int, int] = (0, 1), root: str = "/nowhere") -> str:
    return (
        f"Recipe(name={name!r}, data=Data(name='d', root={root!r}, train=60, val=20), gpus=1, "
        f"model=Model(name='resnet10_tiny'), phases=[Phase(epochs={epochs}, size=32, batch=8, lr=0.1)])"
    )


def tree(folder: Path) -> set[str]:
    """The paths in a folder, except for what Python and tmux leave behind."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {path for path in paths if "__pycache__" not in path and not path.startswith("home")}


def assert_refused(ran: Any, code: int, *messages: str) -> None:
    assert ran.code == code, ran
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1, ran.err
    assert not [message for message in messages if message not in ran.err], ran.err


@pytest.fixture
def refused(sandbox: Any) -> Callable[..., None]:
    """Check that a command is refused, creates no file and leaves no process."""

    def check(argv: list[str], code: int, *messages: str, env: dict[str, str] | None = None) -> None:
        before = tree(sandbox.path)
        assert_refused(sandbox.cli(*argv, env=env), code, *messages)
        assert tree(sandbox.path) == before and not sandbox.pids()

    return check


RECIPES = {
    "error.py": "\nrecipe = 1 / 0",
    "late.py": f"{HEAD}recipe = {recipe('a', epochs=(1, 2))}",
    "data.py": f"{HEAD}recipe = {recipe('a')}",
    "no_val.py": f"{HEAD}recipe = {recipe('a', root='images')}",
    "two.py": f"{HEAD}def recipes():\n    return [{recipe('a')}, {recipe('b')}]",
}


@pytest.mark.parametrize(("argv", "code", "messages"), [
    (["launch", "--local", "own.py"], 2, ["own.py: there is no such recipe file"]),
    (["launch", "--local", "error.py"], 2, ["error.py", "line 2: ZeroDivisionError"]),
    (["launch", "--local", "late.py"], 2, ["late.py", "ValueError: recipe 'a', row 1, epochs: starts at 1"]),
    (["launch", "--local", "data.py"], 1, ["/nowhere: there is no such data folder", "--data"]),
    (["launch", "--local", "--data", "image", "data.py"], 2, ["such data folder; did you mean", "/images?"]),
    (["launch", "--local", "--data", ".", "data.py"], 2, ["has no train/", "imgnet-cluster data split"]),
    (["launch", "--local", "no_val.py"], 1, ["images: has no val/"]),
    (["plan", "--only", "c", "two.py"], 2, ["'c'", "a, b"]),
    (["launch"], 2, ["RECIPE"]),
    (["plan", f"--seed={2**64}", "x.py"], 2, ["--seed"]),
    (["plan", "--nothing", "x.py"], 2, ["--nothing"]),
    (["plan", "--local", "--machines", "2", "RECIPE"], 2, ["--local plans for this computer as one machine"]),
    (["plan", "--data", "images", "--val-fraction=.1", "RECIPE"], 2, ["images: contains no images", "data check"]),
    (["train"], 2, ["train"]),
    (["selftest"], 2, ["selftest --aws"]),
    (["selftest", "--aws", "--tag", "x"], 2, ["--tag", "KEY=VALUE"]),
    (["selftest", "--aws", "--max-price-total", "nan"], 2, ["--max-price-total", "not a finite number"]),
    (["launch", "RECIPE"], 1, ["no region", "--local (this computer)", "--ssh FILE"]),
    (["launch", "--local", "--ssh", "x", "RECIPE"], 2, ["give only one of --local and --ssh"]),
    (["launch", "--spot", "--on-demand", "RECIPE"], 2, ["give only one of --spot and --on-demand"]),
    (["run", "--local", "--machines", "0", "python", "a.py", "--spot", "--on-demand"], 2, ["--machines"]),
    (["launch", "--local", "--machines=3", "--min-machines=4", "RECIPE"], 2, ["4: the job has fewer machines, 3"]),
    (["launch", "--local", "--on-demand", "RECIPE"], 2, ["--on-demand or "]),
    (["launch", "--local", "--copies", "/nowhere", "RECIPE"], 2, ["/nowhere: there is no such folder"]),
    (["launch", "--local", "--parallel", "0", "RECIPE"], 2, ["--parallel"]),
    (["down"], 2, ["give exactly one of: a job, --all, --stack"]),
    (["adopt", "foo"], 2, ["'foo' is not the name of a job on its machines"]),
    *(([command, "-o", "json"], 2, ["-o names the file to write"]) for command in ("record", "report", "export")),
    *(
        ([command, "job-7"], 102, ["job-7: there is no such job in", "IMGNET_RUNS", "ls --everywhere"])
        for command in ("status", "logs", "attach", "tensorboard", "stop", "resume", "pull")
    ),
    (["status"], 102, ["there is no job in", "IMGNET_RUNS"]),
    (["report", "--open=xx"], 2, ["does not take a value", "report --help"]),
    (["export", "nowhere.pt"], 2, ["nowhere.pt: there is no such file"]),
    (["predict", "job-1", __file__, "--model", "a:b"], 2, ["--model is for a file; the network of a job is known"]),
])  # fmt: skip
def test_bad_input_is_one_line_with_an_exit_code(
    sandbox: Any, refused: Any, argv: list[str], code: int, messages: list[str]
) -> None:
    for name, text in RECIPES.items():
        (sandbox.path / name).write_text(text)
    (sandbox.path / "images/train/a").mkdir(parents=True)
    path = sandbox.write_recipe()
    refused([path if word == "RECIPE" else word for word in argv], code, *messages)


def test_launch_unusable_runs_folder_is_named(sandbox: Any, refused: Any) -> None:
    refused(["launch", "--local", sandbox.write_recipe()], 1, "/dev/null", env={"IMGNET_RUNS": "/dev/null/runs"})


def test_rehearse_loss_needs_a_machine_of_a_running_job(hand_made: Any, refused: Any) -> None:
    run = hand_made(machines=2)
    run.write_status("training")
    with run.hold_agent_lock("1"):
        run.job.refresh()
        refused(["rehearse-loss", "job-1", "--machine", "2"], 2, "machines 0, 1", "no machine 2")
        refused(["rehearse-loss", "job-1", "--machine", "0"], 1, "machine 0 of job-1 has no running agent")
    run.write_status("stopped", ended=True)
    run.job.refresh()
    refused(["rehearse-loss", "job-1", "--machine", "0"], 1, "could be lost; which jobs run: imgnet-cluster ls")


def test_commands_take_the_newest_job_but_for_the_one_that_destroys(hand_made: Any, refused: Any, sandbox: Any) -> None:
    for number in (1, 2):
        run = hand_made(f"job-{number}", machines=2)
        run.write_status("failed", ended=True)
        run.job.refresh()
    refused(["stop"], 1, "job-2 is failed already")
    refused(["rehearse-loss", "--machine", "1"], 1, "job-2 is failed; it has no machine")
    refused(["export"], 1, "job-2 is failed and has saved nothing")
    refused(["pull"], 1, "job-2 is failed and has saved nothing")
    refused(["predict", "photo.jpg", "job-1"], 2, "photo.jpg: is neither a job nor a file")
    refused(["predict", "job-1", __file__], 1, "job-1 is failed and has saved nothing")
    refused(["predict", "1"], 2, "name the images")
    refused(["ssh", "--", "df", "-h"], 1, "job-2 runs on this computer")
    refused(["ssh", "1", "df"], 1, "job-1 runs on this computer")


def test_ls_without_jobs_names_the_folders_where_jobs_are_at_work(sandbox: Any, hand_made: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = hand_made()
    run.write_status("training")
    nothing = sandbox.cli("ls", cwd=tmp_path / "empty")
    assert (nothing.code, nothing.out) == (0, f"no jobs in {tmp_path}/empty/runs\n")
    with run.hold_agent_lock():
        tmux.start_session(run.run_folder.tmux_session, run.run_folder.path, "agent", ["sleep", "1000"])
        tmux.start_session("queue-1", sandbox.path / "runs", "queue", ["sleep", "1000"])
        hinted = sandbox.cli("ls", cwd=tmp_path / "empty").out
        assert hinted.endswith(f"running in {sandbox.path}/runs; to list them too: imgnet-cluster ls --everywhere\n")
        listed = sandbox.cli("ls", "--everywhere", cwd=tmp_path / "empty").out
        assert f"{sandbox.path}/runs:" in listed and "job-1" in listed and "running" in listed
        rows = json.loads(sandbox.cli("ls", "--everywhere", "-o", "json", cwd=tmp_path / "empty").out)
        assert [row["job"] for row in rows] == ["job-1"]


def test_report_opens_no_browser_where_there_is_no_display(finished: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    ran = finished.cli("report", "--open", "-o", path, env=dict.fromkeys(("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"), ""))
    assert (ran.code, ran.out) == (0, f"{path}\n") and path.exists()
    assert ran.err == f"warning: no browser could be started here; copy the file to a computer with one: {path}\n"


@pytest.mark.parametrize("argv, code, message", [
    (["attach", "job-1"], 1, "job-1 is done"),
    (["stop", "job-1"], 1, "job-1 is done already; which jobs run: imgnet-cluster ls"),
    (["resume", "1"], 1, "there is nothing to resume. To train it on: imgnet-cluster resume job-1 --epochs"),
    (["logs", "--rank", "2"], 1, "job-1 has 2 training processes"),
    (["status", "job-01"], 102, "job-01"),
])  # fmt: skip
def test_cli_finished_job_refuses_stop_resume_attach(finished: Any, argv: list[str], code: int, message: str) -> None:
    assert_refused(finished.cli(*argv), code, message)


def test_logs_of_a_machine_is_that_of_its_first_process(sandbox: Any, hand_made: Any) -> None:
    run = hand_made(machines=2, procs=2)
    run.write_attempt(1, "1.b", "0.a", reason="start")
    for machine in "01":
        run.write_status("failed", machine=machine, ended=True)
    for rank in range(4):
        run.write_shared(f"logs/000001/rank-{rank}.log", f"rank {rank}\n")
    for options, rank in (((), 0), (("--machine", "0"), 2), (("--machine", "1"), 0), (("--rank", "3"), 3)):
        assert sandbox.cli("logs", *options).out == f"rank {rank}\n"
    assert_refused(sandbox.cli("logs", "--machine", "2"), 2, "in attempt 1 of job-1; the machines are 1, 0")
    assert_refused(sandbox.cli("logs", "--machine", "1", "--rank", "1"), 2, "--rank counts over all machines")
    run.write_attempt(2, "0.a", reason="machine 1 is lost")
    lost = sandbox.cli("logs", "--machine", "1")
    note = "machine 1 takes no part in attempt 2 of job-1; its log of attempt 1:\n"
    assert (lost.code, lost.out, lost.err) == (0, "rank 0\n", note)
    assert_refused(sandbox.cli("logs", "--rank", "3"), 1, "job-1 has 2 training processes")
    assert_refused(sandbox.cli("logs", "--machine", "2"), 2, "attempt 2 of job-1; the machine is 0")
