"""Adoption of a job from a shared folder that others can write to: what is taken from it, and what is refused."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.local_connector import LocalConnector

from cluster.errors import BadInput, ClusterError, NoSuchJob
from cluster.jobs import adopt, store, submit
from cluster.jobs.job import Job
from cluster.planning.launch_options import make_launch_options

UID = "job-3-9073e811"
Change = Callable[..., None]


@pytest.fixture
def shared(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shared folder with the description of one unfinished job, beside a hosts file that names it."""
    monkeypatch.setattr(adopt, "SSHConnector", lambda host: contextlib.nullcontext(LocalConnector()))
    monkeypatch.setattr(Job, "refresh", lambda self: None)  # would start a supervisor, which would log in
    monkeypatch.setattr(adopt, "FIRST_FILES_SECONDS", 0.0)  # which it would bring
    shared: Path = sandbox.path / "shared"
    (shared / UID).mkdir(parents=True)
    (sandbox.path / "hosts.toml").write_text(f'shared = "{shared}"\n[[machines]]\nhost = "127.0.0.1"\n')
    (sandbox.path / "hosts.toml").chmod(0o600)
    recipe = submit.load_recipes(sandbox.write_recipe())[0]
    spec = submit.plan(recipe, make_launch_options(hosts=str(sandbox.path / "hosts.toml"), data=sandbox.data)).spec
    (shared / UID / "job.json").write_text(json.dumps(spec.to_json() | {"uid": UID, "name": "job-3"}))
    (shared / UID / "launch").write_text("0123456789abcdef" * 2)
    return shared


@pytest.fixture
def change(shared: Path) -> Change:

    def change_fields(**changes: object) -> None:
        path = shared / UID / "job.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change_fields


def test_adopted_job_has_the_machines_of_the_hosts_file_and_the_training_of_the_description(shared: Path) -> None:
    (shared / "\x1b[2J").mkdir()  # no name of a job
    (shared / "\x1b[2J" / "job.json").touch()
    job = adopt.adopt("hosts.toml")
    assert job.name == "job-3" and job.spec.name == "job-3" and job.spec.uid == UID
    assert job.spec.hosts and job.spec.hosts.shared == str(shared)
    assert job.spec.recipe.name == "tiny" and not job.spec.is_one_computer
    assert (job.run_folder.shared / "job.json").read_bytes() == job.run_folder.spec_path.read_bytes()


@pytest.mark.parametrize("changes", [
    {"backend": "aws", "cloud": {"region": "us-east-1"}, "max_hours": 2000.0},
    {"backend": "ssh", "cloud": {"region": "us-east-1"}},
    {"backend": "local", "hosts": None},
    {"backend": "\x1b]0;evil\x07"},
])  # fmt: skip
def test_job_of_another_backend_is_refused_and_leaves_no_run_folder(change: Change, changes: dict[str, object]) -> None:
    change(**changes)
    with pytest.raises(ClusterError, match=f"^{UID} is not a job of your own machines") as caught:
        adopt.adopt("hosts.toml")
    assert str(caught.value).isprintable()
    assert store.all_jobs() == [] and not list(store.runs_folder().glob("*"))


def test_fields_that_name_things_of_this_computer_are_not_taken(change: Change) -> None:
    change(queue="/etc", parallel=99, hosts={"shared": "/", "machines": [{"host": "evil"}]}, poweroff_grace=1.0)
    change(metadata_address="http://evil", name="../../evil", forecast={"minutes": 1.0, "terms": {"evil": 1.0}})
    Path("runs/job-3").mkdir(parents=True)
    spec = adopt.adopt("hosts.toml").spec
    assert (spec.queue, spec.parallel, spec.metadata_address) == ("", 1, "")
    assert spec.name == "job-1", "job-3 is taken"
    assert spec.poweroff_grace is None and spec.forecast is None
    assert "evil" not in json.dumps(spec.to_json())


@pytest.mark.parametrize(("name", "text", "problem"), [
    ("job.json", "[" * 100_000, "it is nested too deep"),
    ("job.json", "[]", "it describes no job"),
    ("job.json", "{}", "it has no 'recipe'"),
    ("job.json", "{", "Expecting property name.*"),
    ("launch", "../../evil", ".*"),
])  # fmt: skip
def test_damaged_file_is_refused_in_one_line(shared: Path, name: str, text: str, problem: str) -> None:
    (shared / UID / name).write_text(text)
    with pytest.raises(ClusterError, match=rf"^{shared}/{UID}/{name} is damaged") as caught:
        adopt.adopt("hosts.toml")
    assert re.search(problem, str(caught.value)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("uid", ["../secrets", "job-3", "job-3-9073e811/..", "-rf-12345678x"])
def test_uid_that_is_no_job_name_is_refused(shared: Path, uid: str) -> None:
    with pytest.raises(BadInput, match="is not the name of a job"):
        adopt.adopt("hosts.toml", uid)


def test_description_of_another_job_and_a_job_that_has_ended_are_refused(shared: Path, change: Change) -> None:
    change(uid="../../home")
    with pytest.raises(ClusterError, match="describes another job"):
        adopt.adopt("hosts.toml")
    (shared / UID / "result.json").touch()
    with pytest.raises(NoSuchJob, match="no unfinished job"):
        adopt.adopt("hosts.toml")
