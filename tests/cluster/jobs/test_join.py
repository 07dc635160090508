"""`join`: which machines may join a running job, and what is refused before anything is set up."""

import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors.hosts_file import Host, Hosts
from cluster.errors import ClusterError
from cluster.jobs.job import Job
from cluster.jobs.join import begin_join
from cluster.jobs.supervision import job_lock
from cluster.state.run_folder import Run, RunFolder
from cluster.state.spec import JobSpec
from train.recipe.command import Command


def test_machines_are_spares_until_they_are_set_up_and_refusals_change_nothing(
    hand_made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, gpu1, gpu2 = tmp_path / "hosts.toml", Host(host="gpu1"), Host(host="gpu2")
    file.write_text('shared = "/shared"\nmachines = ["gpu1", "gpu2", "gpu3", "gpu4:2222", "gpu5", "gpu6"]\n')
    monkeypatch.setattr(Job, "refresh", lambda job: None)  # which would start a supervisor

    def make_run(name: str, *members: str, hosts: tuple[Host, ...] = (gpu1, gpu2), **changes: Any) -> Any:
        values = {"machines": len(hosts), "backend": "ssh", "backend_options": {"hosts": str(file)}, "gpus": 4}
        run = hand_made(name, uid=f"{name}-00000001", hosts=Hosts("/shared", hosts), **{**values, **changes})
        run.write_attempt(1, *members)
        run.write_status("training", "1")
        monkeypatch.setenv("IMGNET_RUNS", str(run.run_folder.path.parent))
        return run

    def spec_of(run: Any) -> JobSpec:
        return Run.read(run.run_folder.path).spec

    def refused(run: Any, *hosts: str) -> str:
        before = spec_of(run)
        with pytest.raises(ClusterError) as caught:
            begin_join(run.job, hosts)
        assert spec_of(run) == before and not list(run.run_folder.path.glob(".join-*"))
        return str(caught.value)

    run = make_run("job-1", "0.a", "1.a")
    assert "no faster on 3 machines than on 2: each step is cut into 4 batches, one for each GPU" in refused(
        run, "gpu3"
    )
    assert "hosts.toml does not list gpu9" in refused(run, "gpu3", "gpu9")
    assert refused(run, "gpu2") == "gpu2 is machine 1 of job-1; if it is lost, it returns by itself"
    make_run("job-2", "0.a", hosts=(Host(host="GPU5"),))
    assert refused(run, "gpu4", "gpu5") == "gpu5 is busy with job-2; wait, or stop that job"
    fixed = make_run("job-3", "0.a", "1.a", recipe=Command(argv=["a"], elastic=False))
    assert "its command is not elastic" in refused(fixed, "gpu3")
    fixed.run_folder.request_stop()
    assert "does not train now, so no machine can join it" in refused(fixed, "gpu3")
    for _ in range(2):  # typed twice
        assert begin_join(run.job, ["gpu4:2222", "gpu3"]) == {"2": "gpu4", "3": "gpu3"}
    spec = spec_of(run)
    assert [host.host for host in spec.host_list] == ["gpu1", "gpu2", "gpu4", "gpu3"]
    assert (spec.machines, spec.recovery.spares, spec.joining) == (2, 2, ("2", "3"))
    assert all(run.run_folder.join_marker(name).exists() for name in spec.joining)
    joined = spec.with_joined("3").with_joined("3")
    assert (joined.machines, joined.recovery.spares, joined.joining) == (3, 1, ("2",))

    run = make_run("job-4", "0.a", gpus=2)  # a machine is lost, and no more than two have work
    assert begin_join(run.job, ["gpu6"]) == {"2": "gpu6"}
    assert spec_of(run).with_joined("2").machines == 2
    run.write_status("failed", "1", ended=True)
    write_spec = RunFolder.write_spec
    monkeypatch.setattr(RunFolder, "write_spec", lambda folder, spec: sys.exit())  # killed before it is written
    with pytest.raises(SystemExit):
        begin_join(run.job, ["gpu2"])
    assert run.run_folder.join_marker("1").exists(), "else a machine of the specification would wait for ever"
    monkeypatch.setattr(RunFolder, "write_spec", write_spec)
    assert begin_join(run.job, ["gpu2"]) == {"1": "gpu2"}, "it was repaired"

    run = make_run("job-5", "0.a", gpus=2)

    def late_lock(path: Path, seconds: float) -> Any:
        run.run_folder.request_stop()  # by `down`, which held the lock until now
        return job_lock(path, seconds)

    monkeypatch.setattr("cluster.jobs.join.job_lock", late_lock)
    assert "does not train now" in refused(run, "gpu6")
