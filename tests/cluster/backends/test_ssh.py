"""The backend of the user's own machines: a machine that answers too slowly, too few machines, machines in use."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.log_lines import log_lines

from cluster.backends import ssh
from cluster.connectors.hosts_file import Host, Hosts
from cluster.display.plan import show_other_jobs
from cluster.jobs import store
from cluster.state.result import write_result
from cluster.state.run_folder import Run
from cluster.state.spec import JobSpec
from cluster.state.states import JobState


def test_dry_run_of_a_resume_checks_the_machines_like_a_resume(hand_made: Any, sandbox: Any) -> None:
    hosts = Hosts(None, (Host(host="127.0.0.1"),))
    stopped = hand_made(machines=1, backend="ssh", hosts=hosts, uid="job-1-00000001")
    run = Run(stopped.spec, stopped.run_folder)
    write_result(run, ssh.SshBackend(run), end_reason="stopped by the user", end_state=JobState.STOPPED)
    for more in ([], ["--dry-run"]):
        resumed = sandbox.cli("resume", "job-1", "--machines", "2", *more)
        assert resumed.code == 2 and "the hosts file lists 1 machines, but the job needs 2" in resumed.err, resumed


def test_plan_names_the_users_other_jobs_on_the_machines(
    hand_made: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hosts(*names: str) -> Hosts:
        return Hosts("/s", tuple(Host(host=name, port=port) for name, port in zip(names, (None, 22), strict=False)))

    at_work = hand_made("job-1", machines=2, backend="ssh", hosts=hosts("gpu1", "gpu2"), uid="job-1-00000001")
    hand_made("job-2", backend="ssh", hosts=hosts("gpu2"), uid="job-2-00000002").run_folder.result_path.write_text("{}")
    hand_made("job-3", backend="ssh", hosts=hosts("gpu2"), uid="job-3-00000003", queue="other")
    monkeypatch.setenv("IMGNET_RUNS", str(at_work.run_folder.path.parent))
    planned = replace(at_work.spec, name="", uid="", machines=1)

    def note(planned: JobSpec, parallel: int = 1) -> str:
        show_other_jobs(planned, parallel)
        return " ".join(capsys.readouterr().out.split())

    assert note(replace(planned, hosts=hosts("gpu3", "GPU2"))) == "", "it takes the first machine only"
    assert note(at_work.spec) == "", "a resume is not another job"
    text = note(replace(planned, hosts=hosts("gpu3", "GPU2")), parallel=2)
    assert text.startswith("note: job-1, launched 60 minutes ago, is on GPU2 too; two jobs share processors, GPUs and")
    assert text.endswith("or stop it: imgnet-cluster status job-1, imgnet-cluster stop job-1")
    monkeypatch.setenv("IMGNET_RUNS", str(tmp_path))
    monkeypatch.setattr(store, "busy_runs_folders", lambda: [at_work.run_folder.path.parent])
    assert note(replace(at_work.spec, uid="")).endswith("imgnet-cluster stop runs/job-1")


def test_final_network_that_never_comes_is_given_up(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = hand_made(machines=1, backend="ssh", hosts=Hosts(None, (Host(host="127.0.0.1"),)))
    run.write_shared("result.json", "{}")
    never = threading.Event()
    backend = ssh.SshBackend(Run(run.spec, run.run_folder))
    monkeypatch.setattr(ssh, "FINAL_NETWORK_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(backend, "fetch_network", lambda: never.wait(60))
    with log_lines("cluster.backends") as lines:
        backend._fetch_final_network()
    never.set()
    assert lines == ["what was trained stays on the machines: not complete after 0 s"]
