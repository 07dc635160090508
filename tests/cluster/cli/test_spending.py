"""Machines that cost money are rented only after a yes: on a terminal, or by `-y`."""

from typing import Any

import pytest
from support.aws_user import TYPE, Renter, renter
from support.simcloud.fixture import simcloud

from cluster.cli import launch as launch_module
from cluster.display.terminal import clean
from cluster.jobs import submit
from cluster.jobs.job import Job
from cluster.planning.launch_options import make_launch_options

__all__ = ["renter", "simcloud"]  # fixtures


def test_launch_on_aws_without_terminal_or_yes_rents_nothing(renter: Renter, on_terminal: Any) -> None:
    arguments = ("launch", "-d", "--type", TYPE, "--machines", "2", renter.sandbox.write_recipe())
    ran = renter.cli(*arguments)
    assert ran.code == 2 and ran.err.startswith("error: rent 2 machines for at most $"), ran
    assert ran.err.endswith("? There is no terminal to confirm on; pass -y\n") and ran.err.count("\n") == 1
    assert "2 hours; the machines power off" in ran.out, "the plan is shown all the same"

    code, output = on_terminal(*arguments, typed=b"n\n")
    screen = clean(output)
    assert code == 1 and "rent 2 machines for at most $" in screen and screen.endswith("nothing was done\n"), screen
    assert not (renter.path / "runs").exists() and not renter.all_instance_ids()


def test_second_launch_of_a_job_that_runs_is_told(
    sandbox: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IMGNET_RUNS", str(sandbox.path / "runs"))
    monkeypatch.setattr(Job, "is_alive", property(lambda job: not job.has_ended))
    (recipe,) = submit.load_recipes(sandbox.write_recipe())

    def note(**options: Any) -> str:
        plan = submit.plan(recipe, make_launch_options("aws", types=(TYPE,), **options), offline=True)
        launch_module._tell_of_duplicate(plan)
        return capsys.readouterr().err

    job = submit.create_job(submit.plan(recipe, make_launch_options("aws", types=(TYPE,)), offline=True).spec)
    assert note(max_hours=1.0) == "", "another request"
    assert note().startswith("note: job-1 runs already, with the same recipe and options; ")
    job.run_folder.result_path.write_text("{}")
    assert note() == ""
