"""`join`: which machines may join a running job, and what is refused before anything is set up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors.hosts_file import Host, Hosts
from cluster.errors import ClusterError
from cluster.jobs.job import Job
from cluster.jobs.join import begin_join
from cluster.state.run_folder import Run
from train.recipe.command import Command

HOSTS = Hosts("/shared", (Host(host="gpu1"), Host(host="gpu2")))


@pytest.fixture
def make_run(hand_made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make a job on gpu1 and gpu2, whose hosts file lists more by now. It has no supervisor."""
    file = tmp_path / "hosts.toml"
    file.write_text('shared = "/shared"\nmachines = ["gpu1", "gpu2", "gpu3", "gpu4:2222", "gpu5", "gpu6"]\n')
    monkeypatch.setattr(Job, "refresh", lambda job: None)

    def make(name: str = "job-1", members: tuple[str, ...] = ("0.a", "1.a"), **changes: Any) -> Any:
        values = {"machines": 2, "backend": "ssh", "hosts": HOSTS, "backend_options": {"hosts": str(file)}, "gpus": 4}
        run = hand_made(name, uid=f"{name}-00000001", **{**values, **changes})
        run.write_attempt(1, *members)
        for member in members:
            run.write_status("training", member[0])
        monkeypatch.setenv("IMGNET_RUNS", str(run.run_folder.path.parent))
        return run

    return make


def test_machines_are_spares_until_they_are_set_up_and_refusals_change_nothing(make_run: Callable[..., Any]) -> None:
    def refused(run: Any, *hosts: str) -> str:
        before = Run.read(run.run_folder.path).spec
        with pytest.raises(ClusterError) as caught:
            begin_join(run.job, hosts)
        assert Run.read(run.run_folder.path).spec == before and not list(run.run_folder.path.glob(".join-*"))
        return str(caught.value)

    run = make_run()
    assert "no faster on 3 machines than on 2: each step is cut into 4 batches, one for each GPU" in refused(
        run, "gpu3"
    )
    assert "hosts.toml does not list gpu9" in refused(run, "gpu3", "gpu9")
    assert refused(run, "gpu2") == "gpu2 is machine 1 of job-1; if it is lost, it returns by itself"
    make_run("job-2", hosts=Hosts("/shared", (Host(host="GPU5"),)), machines=1)
    assert refused(run, "gpu4", "gpu5") == "gpu5 is busy with job-2; wait, or stop that job"
    assert "its command is not elastic" in refused(make_run("job-3", recipe=Command(argv=["a"], elastic=False)), "gpu3")
    assert "was not launched here" in refused(make_run("job-4", backend_options=None), "gpu3")
    for _ in range(2):  # typed twice
        assert begin_join(run.job, ["gpu4:2222", "gpu3"]) == {"2": "gpu4", "3": "gpu3"}
    spec = Run.read(run.run_folder.path).spec
    assert [host.host for host in spec.host_list] == ["gpu1", "gpu2", "gpu4", "gpu3"]
    assert (spec.machines, spec.recovery.spares, spec.joining) == (2, 2, ("2", "3"))
    assert sorted(path.name for path in run.run_folder.path.glob(".join-*")) == [".join-2", ".join-3"]
    joined = spec.with_joined("3").with_joined("3")
    assert (joined.machines, joined.recovery.spares, joined.joining) == (3, 1, ("2",))
    run.run_folder.request_stop()
    with pytest.raises(ClusterError, match="does not train at present, so no machine can join it"):
        begin_join(run.job, ["gpu3"])

    run = make_run("job-5", gpus=2, members=("0.a",))  # a machine is lost, and no more than two have work
    assert begin_join(run.job, ["gpu6"]) == {"2": "gpu6"}
    joined = Run.read(run.run_folder.path).spec.with_joined("2")
    assert (joined.machines, joined.recovery.spares, joined.joining) == (2, 1, ())
    run.write_status("failed", "1", ended=True)
    assert begin_join(run.job, ["gpu2"]) == {"1": "gpu2"}, "it was repaired"
