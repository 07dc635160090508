"""Tests of the plan of a command: its project, its processes, its variables, and what is refused."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.launch import carry_out
from cluster.errors import BadInput
from cluster.jobs import submit
from cluster.jobs.job import Job
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import plan_command, read_environment
from cluster.planning.resume import options_of
from cluster.state.spec import JobSpec
from train.recipe import Command


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with a script in a folder, which is the current folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "mine/code"
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tmp_path / "mine")], check=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "go.sh").write_text("echo 1\n")
    (folder / ".gitignore").write_text("ignored.py\n")
    (folder / "ignored.py").write_text("print(2)\n")
    monkeypatch.chdir(folder)
    return folder


def command(*argv: str, **fields: Any) -> Command:
    return Command(argv=argv or ("python", "train.py"), **fields)


def test_plan_has_the_repository_the_folder_in_it_and_the_rules_of_the_command(project: Path) -> None:
    spec = plan_command(command(), make_launch_options(machines=3)).spec
    assert spec.user_project and (spec.user_project.folder, spec.user_project.workdir) == (str(project.parent), "code")
    assert (spec.machines, spec.procs, spec.schedule, spec.own_command) == (3, 1, None, command())
    assert JobSpec.from_json(spec.to_json()) == spec
    assert (spec.membership_rules.min_size, options_of(spec).procs) == (1, None)
    with pytest.raises(BadInput, match=r"runs a command of your own \(train\), not a recipe"):
        _ = spec.recipe
    rigid = plan_command(command(elastic=False, retries=2, procs=2), make_launch_options(machines=3)).spec
    assert (rigid.membership_rules.min_size, rigid.membership_rules.max_crashes) == (3, 3)
    assert options_of(rigid).procs == 2, "also in a resume"


@pytest.mark.parametrize(("data", "note"), [(None, ""), ("~/.imgnet/shared/it", "~/.imgnet/shared/it must exist")])
def test_plan_on_rented_machines_speaks_of_data_only_if_the_command_has_any(
    project: Path, data: str | None, note: str
) -> None:
    planned = plan_command(command(), make_launch_options("aws", machines=2, data=data), offline=True)
    notes = "\n".join(planned.notes)
    assert note in notes and ("must exist" in notes) == bool(data) and "s3://" not in notes and not planned.obstacles


@pytest.mark.parametrize(("argv", "workdir", "fields", "options", "problem"), [
    (["python", "none.py"], "", {}, {},
     "none.py: there is no such file in .*; correct the command, or pass --workdir"),
    (["python", "ignored.py"], "", {}, {}, "ignored.py: would not be copied for the job, because git ignores it"),
    (["./go.sh"], "", {}, {}, r"./go.sh: is not executable; type: chmod \+x ./go.sh"),
    (["no-such-program"], "", {}, {}, "no-such-program: there is no such program here"),
    ([], "nowhere", {}, {}, "--workdir nowhere: there is no such folder"),
    (["python", "-m", "train"], "../../home", {}, {},
     "is not copied for a job, because it is or has your home folder"),
    ([], "", {"procs": 3}, {"machines": 2}, "needs 6 GPUs, one for each process, and this computer has 2"),
    ([], "", {}, {"seed": 3}, "a command takes no options of the trainer"),
    ([], "", {"requirements": "none.txt"}, {},
     r"none\.txt: there is no such file in .*; correct --requirements"),
    ([], "", {"requirements": "ignored.py"}, {}, r"ignored\.py: would not be copied for the job"),
    ([], "", {}, {"data": "none"}, "--data none: there is no such folder"),
    ([], "", {}, {"data": "s3://mine/x"}, "--data s3://mine/x: only recipes fetch data; .* --env DATA=s3://mine/x"),
])  # fmt: skip
def test_command_that_cannot_be_started_is_refused(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    workdir: str,
    fields: Any,
    options: Any,
    problem: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (project.parents[1] / "home").mkdir()
    (project / "needs.txt").write_text("six\n")
    assert plan_command(command(requirements="needs.txt")).spec.procs == 2
    with pytest.raises(BadInput, match=problem):
        plan_command(command(*argv, **fields), make_launch_options(**options), workdir=workdir)


def test_variables_come_from_the_line_the_file_and_the_shell(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "vars").write_text("# of mine\nA=1\nexport B = 'two words'\n\nC=\n")
    monkeypatch.setenv("TOKEN", "secret")
    assert read_environment(["A=2", "TOKEN", "D=x=y"], ["vars"]) == (
        {"A": "2", "D": "x=y"},
        {"TOKEN": "secret", "B": "two words", "C": ""},
    )


def test_ctrl_c_while_jobs_are_submitted_names_them_and_how_to_stop_them(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("IMGNET_RUNS", str(project.parent / "runs"))
    planned = plan_command(command(name="mine"), make_launch_options())
    ways = {"detach": True, "dry_run": False, "requests": False, "yes": True}
    for target, message in (
        (submit, "interrupted; nothing was started\n"),
        (Job, "interrupted; job-1 may go on; to stop: imgnet-cluster stop job-1\n"),
    ):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(target, "create_job" if target is submit else "start", interrupt)
            carry_out([lambda offline: planned], **ways)
        assert ended.value.code == 130
        assert capsys.readouterr().err == message


def test_data_of_a_command_is_a_folder_that_exists(project: Path) -> None:
    assert plan_command(command(), make_launch_options(data=str(project))).spec.train.data == str(project)
    spec = plan_command(command()).spec
    assert spec.train.data == spec.resolved_on_machine(project).train.data == "", "IMGNET_DATA would be a folder"
