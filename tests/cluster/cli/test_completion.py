"""Tab completion: jobs, recipes, machines, names of AWS, files; and the scripts for the shells."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import get_completion_class

from cluster.cli.app import cli
from cluster.cli.completion import PROGRAM, SHELLS, VARIABLE


@pytest.fixture
def complete(sandbox: Any) -> Callable[..., list[str]]:
    """Return the completions of the last word: values, or "file:" and "dir:" where the shell completes a path."""

    def run(*words: str) -> list[str]:
        completion_class = get_completion_class("bash")
        items = completion_class(cli, {}, PROGRAM, VARIABLE).get_completions(list(words[:-1]), words[-1])
        return [item.value if item.type == "plain" else f"{item.type}:{item.value}" for item in items]

    return run


def write_job(folder: Path, number: int, machines: int = 1, spares: int = 0, name: str = "") -> None:
    path = folder / "runs" / f"job-{number}" / "job.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"machines": machines, "recovery": {"spares": spares}, "given_name": name}))


def test_jobs_are_completed_newest_first(sandbox: Any, complete: Any) -> None:
    for number in (2, 9, 10):
        write_job(sandbox.path, number, name="wide" if number == 9 else "")
    (sandbox.path / "runs" / "job-11").mkdir()  # a launch that was killed
    for command in ("stop", "resume", "status", "logs", "attach", "eval", "report", "predict"):
        assert complete(command, "") == ["job-10", "job-9", "job-2", "wide"], command
    assert complete("report", "job-2", "job-1") == ["job-10"] and complete("attach", "w") == ["wide"]
    assert complete("plan", "--from", "job-") == ["job-10", "job-9", "job-2"]
    assert complete("eval", "net") == ["file:net"]


def test_machines_are_those_of_the_job(sandbox: Any, complete: Any) -> None:
    write_job(sandbox.path, 1, machines=2, spares=1, name="wide")
    write_job(sandbox.path, 2)
    for job in ("job-1", "wide"):
        assert complete("rehearse-loss", job, "--machine", "") == ["0", "1", "2"]
    assert complete("logs", "--machine", "") == ["0"]
    (sandbox.path / "runs" / "job-2" / "job.json").write_text("{")
    assert complete("logs", "--machine", "") == []


def test_recipes_are_files_here_or_those_of_the_project(sandbox: Any, complete: Any) -> None:
    (sandbox.path / "recipes").mkdir()
    for command in ("launch", "plan", "check"):
        assert complete(command, "") == ["file:"]
        assert complete(command, "recipes/qu") == ["file:recipes/qu"]
        assert complete(command, f"{sandbox.path}/rec") == [f"file:{sandbox.path}/rec"]
        assert complete(command, "quick") == ["quickstart"]
    assert complete("launch", "--local", "rec") == ["file:rec"]


@pytest.mark.parametrize(("words", "expected"), [
    (("data", "check", "/pa"), "file:/pa"),
    (("launch", "--data", "d"), "dir:d"),
    (("launch", "--ssh", "h"), "file:h"),
    (("launch", "--type", "p4d.24"), "p4d.24xlarge"),
    (("launch", "--zone", "eu-west-1c"), "eu-west-1c"),
    (("ls", "--region", "ap-northeast-2"), "ap-northeast-2"),
    (("launch", "--lo"), "--local"),
    (("comp",), "completion"),
    (("completion", "z"), "zsh"),
])  # fmt: skip
def test_values_are_completed_by_what_the_help_calls_them(complete: Any, words: tuple[str, ...], expected: str) -> None:
    assert expected in complete(*words)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_prints_a_script_that_its_shell_accepts(sandbox: Any, shell: str) -> None:
    ran = sandbox.cli("completion", shell)
    assert ran.code == 0 and f"{VARIABLE}={shell}_complete" in ran.out, ran
    if shutil.which(shell):
        flags = ["--no-execute"] if shell == "fish" else ["-n"]
        checked = subprocess.run([shell, *flags], input=ran.out, capture_output=True, text=True)
        assert checked.returncode == 0, checked
