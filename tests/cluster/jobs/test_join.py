"""`join`: which machines may join a running job, and what is refused before anything is set up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors.hosts_file import Host, Hosts
from cluster.errors import ClusterError
from cluster.jobs import join
from cluster.jobs.job import Job
from cluster.state.run_folder import Run
from cluster.state.spec import JobSpec
from train.recipe.command import Command

HOSTS = Hosts("/shared", (Host(host="gpu1"), Host(host="gpu2")))
Fixture = Any


@pytest.fixture
def make_run(hand_made: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fixture]:
    """Make a job on gpu1 and gpu2, whose hosts file lists more by now. It has no supervisor."""
    file = tmp_path / "hosts.toml"
    file.write_text('shared = "/shared"\nmachines = ["gpu1", "gpu2", "gpu3", "gpu4:2222", "gpu5"]\n')
    monkeypatch.setattr(Job, "refresh", lambda job: None)
    monkeypatch.setattr("cluster.jobs.store.busy_runs_folders", lambda: [])

    def make(name: str = "job-1", members: tuple[str, ...] = ("0.a", "1.a"), **changes: Any) -> Fixture:
        values = {"machines": 2, "backend": "ssh", "hosts": HOSTS, "backend_options": {"hosts": str(file)}, "gpus": 4}
        run = hand_made(name, uid=f"{name}-00000001", **{**values, **changes})
        run.write_shared("launch", "first")
        for number, member in enumerate(members):
            run.write_status("training", str(number), launch="first", id=member)
            run.write_attempt(1, *members, launch_id="first")
        monkeypatch.setenv("IMGNET_RUNS", str(run.run_folder.path.parent))
        return run

    return make


def spec_of(run: Fixture) -> JobSpec:
    return Run.read(run.run_folder.path).spec


def refusal(run: Fixture, *hosts: str) -> str:
    """Return why these machines may not join. Then nothing has changed."""
    before = spec_of(run)
    with pytest.raises(ClusterError) as caught:
        join.begin_join(run.job, hosts)
    assert spec_of(run) == before and not list(run.run_folder.path.glob(".join-*"))
    return str(caught.value)


def test_machines_become_spares_until_they_are_set_up_and_then_train(make_run: Callable[..., Fixture]) -> None:
    run = make_run()
    for _ in range(2):  # typed twice
        assert join.begin_join(run.job, ["gpu4:2222", "gpu3"]) == {"2": "gpu4", "3": "gpu3"}
    spec = spec_of(run)
    assert [host.host for host in spec.host_list] == ["gpu1", "gpu2", "gpu4", "gpu3"] and spec.host_list[2].port == 2222
    assert (spec.machines, spec.recovery.spares, spec.joining) == (2, 2, ("2", "3"))
    assert sorted(path.name for path in run.run_folder.path.glob(".join-*")) == [".join-2", ".join-3"]
    trains = spec.with_joined("3").with_joined("3")
    assert (trains.machines, trains.recovery.spares, trains.joining) == (3, 1, ("2",))
    assert json.loads((run.run_folder.shared / "job.json").read_text())["joining"] == ["2", "3"]


def test_refusals_change_nothing(make_run: Callable[..., Fixture]) -> None:
    run = make_run()
    text = "does not get faster on 3 machines than on 2: each step is cut into 4 batches, one for each GPU"
    assert text in refusal(run, "gpu3"), "two of three machines would still take two batches"
    assert "hosts.toml does not list gpu9" in refusal(run, "gpu3", "gpu9")
    assert refusal(run, "gpu2") == "gpu2 is machine 1 of job-1; if it is lost, it returns by itself"
    make_run("job-2", hosts=Hosts("/shared", (Host(host="GPU3"),)), machines=1)
    assert refusal(run, "gpu4", "gpu3") == "gpu3 is busy with job-2; wait, or stop that job"
    run.run_folder.request_stop()
    assert "does not train at present, so no machine can join it" in refusal(run, "gpu4", "gpu5")
    assert "does not train at present" in refusal(make_run("job-3", members=()), "gpu5")
    assert "on 4 machines than on 2: each step is cut into 2" in refusal(make_run("job-4", gpus=2), "gpu4", "gpu5")
    assert "was not launched here" in refusal(make_run("job-5", backend_options=None), "gpu3")


def test_lost_machine_is_replaced_where_no_more_can_train(make_run: Callable[..., Fixture]) -> None:
    run = make_run(gpus=2, members=("0.a",))
    assert join.begin_join(run.job, ["gpu3"]) == {"2": "gpu3"}
    spec = spec_of(run).with_joined("2")
    assert (spec.machines, spec.recovery.spares, spec.joining) == (2, 1, ()), "it is a spare"
    run.write_status("failed", "1", launch="first", ended=True)
    assert join.begin_join(run.job, ["gpu2"]) == {"1": "gpu2"}, "it was repaired"


@pytest.mark.parametrize("is_elastic", [True, False])
def test_command_takes_more_machines_if_it_is_elastic(make_run: Callable[..., Fixture], is_elastic: bool) -> None:
    run = make_run(recipe=Command(argv=["python", "train.py"], elastic=is_elastic))
    if is_elastic:
        join.begin_join(run.job, ["gpu3"])
        assert spec_of(run).with_joined("2").machines == 3
    else:
        assert "its command is not elastic" in refusal(run, "gpu3")
