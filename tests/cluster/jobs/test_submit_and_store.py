"""Jobs of a folder: numbers, names and order; damaged folders and a full disk; what cannot be launched."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.specs import TINY, make_spec

from cluster import launch
from cluster.errors import BadInput, ClusterError, NoSuchJob
from cluster.jobs import store, submit
from cluster.jobs.queue import enqueue
from cluster.planning.launch_options import make_launch_options


@pytest.fixture
def spec(sandbox: Any) -> Any:
    return submit.plan(submit.load_recipes(sandbox.write_recipe())[0], make_launch_options(data=sandbox.data)).spec


def test_create_job_concurrent_calls_get_distinct_numbers(
    sandbox: Any, spec: Any, run_in_processes: Callable[..., list[Any]]
) -> None:
    names_by_process = run_in_processes(6, lambda _: [submit.create_job(spec).name for _ in range(2)])
    names = [name for process_names in names_by_process for name in process_names]
    assert sorted(names) == sorted(f"job-{number}" for number in range(1, 13))
    assert [job.name for job in store.all_jobs()] == [f"job-{number}" for number in range(1, 13)]
    for job in store.all_jobs():
        assert job.spec.name == job.name and job.spec.recipe == spec.recipe
        assert job.path.stat().st_mode & 0o777 == 0o700, "other users hold no lock in it and read no secret"
        assert json.loads(job.run_folder.recipe_path.read_text())["name"] == "tiny"
    (sandbox.path / "runs/job-2").rename(sandbox.path / "runs/kept")
    (sandbox.path / "runs/job-13").touch()
    assert submit.create_job(spec).name == "job-14", "it is not a number that a path has"


def test_all_jobs_are_ordered_by_number(sandbox: Any, hand_made: Any) -> None:
    for number in (10, 9, 1, 100):
        hand_made(f"job-{number}")
    for name in ("job-", "job-x", "job-1.old", "job--1", "job-²", "other", ".job-5"):
        (sandbox.path / "runs" / name).mkdir()
    (sandbox.path / "runs/job-4").touch()
    assert [job.name for job in store.all_jobs()] == ["job-1", "job-9", "job-10", "job-100"]
    assert [store.find(name).name for name in (None, "9", "job-10")] == ["job-100", "job-9", "job-10"]


@pytest.mark.parametrize("name", ["1", "job-1", "", "job-3/", "../runs/job-3", "03"])
def test_find_unknown_name_lists_existing_jobs(hand_made: Any, name: str) -> None:
    with pytest.raises(NoSuchJob, match=r"^there is no job in .*/runs; change to the folder .*, or set IMGNET_RUNS"):
        store.find()
    for job_name in ("job-3", "job-12"):
        hand_made(job_name)
    with pytest.raises(NoSuchJob, match="there are job-3, job-12") as caught:
        store.find(name)
    assert caught.value.exit_code == 102 and "\n" not in str(caught.value)


def test_job_is_found_by_the_name_that_its_user_gave_it(sandbox: Any, hand_made: Any) -> None:
    for number, name in ((1, "base"), (2, "wide.2"), (3, ""), (4, "base")):
        hand_made(f"job-{number}", given_name=name).write_shared("logs/000001/rank-0.log", "")
    with pytest.raises(NoSuchJob, match=r"there are job-1 base, job-2 wide\.2, job-3, job-4 base\)"):
        store.find("wide")
    assert store.find("wide.2").name == "job-2" and store.is_job("wide.2") and not store.is_job("wide")
    (sandbox.path / "link").symlink_to("runs")
    assert store.find("link/job-3").path == sandbox.path / "runs/job-3" and not store.is_job("runs/job-9")
    with pytest.raises(BadInput, match=r"^base: is the name of job-1 and job-4; type one of these instead$"):
        store.find("base")
    for command in ("logs", "attach", "stop", "resume", "tensorboard", "report", "ssh", "eval", "down", "cost"):
        assert sandbox.cli(command, "wide.3").code in (1, 2, 102), command
    refused = sandbox.cli("ssh", "wide.2", "--", "ls")
    assert refused.err == "error: job-2 runs on this computer; there is nothing to log in to\n"
    assert sandbox.cli("attach", "wide.2").err.startswith("error: job-2 is failed, so its session has ended")
    assert sandbox.cli("status", "wide.2").out.startswith("job                job-2\nname               wide.2\n")


def test_hint_names_the_job_so_that_it_works_where_the_user_is(sandbox: Any, hand_made: Any, tmp_path: Path) -> None:
    hand_made("job-1", given_name="base").write_status("failed", reason="why", ended=True)
    place, other = sandbox.path, tmp_path / "other"
    other.mkdir()
    path, below = f"{place}/runs/job-1", f"{place.name}/runs/job-1"
    for folder, typed, handle in ((place, "1", "base"), (place.parent, path, below), (other, path, path)):
        refused = sandbox.cli("pull", typed, cwd=folder)
        assert refused.err.endswith(f"see: imgnet-cluster status {handle}\n"), refused


def test_name_belongs_to_one_job(sandbox: Any, spec: Any, hand_made: Any) -> None:
    job = hand_made("job-1", given_name="base", command="imgnet-cluster run --name base -- x.py --name base").job
    job.fail("")
    assert job.launch_command == "imgnet-cluster run -- x.py --name base"
    with pytest.raises(BadInput, match=r"^--name base: job-1 has this name already; choose another$"):
        submit.launch(sandbox.write_recipe(), data=sandbox.data, name="base")
    with pytest.raises(BadInput, match=r"^--name wide: names one job, and these are 2; leave it out, or pass --only$"):
        enqueue(2 * [submit.plan(spec.recipe, make_launch_options(data=sandbox.data, name="wide"))])
    assert [job.name for job in store.all_jobs()] == ["job-1"] and not sandbox.pids()


@pytest.mark.parametrize(
    "name", ["a b", "-x", "../x", "a/b", "é", "x" * 64, "a\n", "7", "007", "job-7", "JOB-7", "job7", "job-7-9073e811"]
)
def test_name_that_could_be_an_id_or_a_path_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=r"^Invalid value for '--name': .* (is no name: 1 to|looks like the ID)"):
        make_launch_options(name=name)
    with pytest.raises(ValueError, match=r"is no name|looks like"):
        make_spec(name="job-1", recipe=TINY, given_name=name)  # as one that a machine sends


def test_runs_folder_is_taken_from_the_environment(sandbox: Any, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMGNET_RUNS", "some/where")
    assert submit.create_job(spec).path == sandbox.path / "some/where/job-1"
    monkeypatch.delenv("IMGNET_RUNS")
    assert store.all_jobs() == [] and store.runs_folder() == sandbox.path / "runs"


def test_create_job_on_full_disk_leaves_no_job(spec: Any, full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMGNET_RUNS", str(full_disk / "runs"))
    with pytest.raises(ClusterError, match="No space left on device; nothing was started") as caught:
        submit.create_job(spec)
    assert str(full_disk) in str(caught.value) and "\n" not in str(caught.value)
    assert store.all_jobs() == []


def test_launch_refuses_bad_input_before_creating_a_folder(sandbox: Any) -> None:
    (sandbox.path / "two.py").write_text(
        "from dataclasses import replace\nfrom tiny_2 import recipe\n"
        "def recipes():\n    return [recipe, replace(recipe, name='other')]\n"
    )
    with pytest.raises(BadInput, match="has 2 recipes"):
        sandbox.write_recipe() and launch(sandbox.path / "two.py")
    with pytest.raises(BadInput, match="no backend 'cloud'; the backends are"):
        launch(sandbox.write_recipe(), backend="cloud")
    assert not (sandbox.path / "runs").exists() and not sandbox.pids()
