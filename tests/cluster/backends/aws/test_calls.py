"""The calls of AWS before the first machine: what the plan has found is not asked again, unless it is old or gone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.simcloud.http_server import AwsFrontend
from support.simcloud.in_process import shared_account
from support.specs import TINY

from cluster.backends.aws.renting.instances import JobInstances
from cluster.backends.aws.terms.rental_spec import INSPECTION_SECONDS
from cluster.jobs import submit
from cluster.jobs.job import Job
from cluster.planning.launch_options import make_launch_options
from infra.aws.stack import resources, stack
from train.tools import host

ADDRESS = "127.0.0.1/32"  # faces the simulated AWS


def read_calls(front: AwsFrontend) -> list[str]:
    actions = [action for _, action in front.calls]
    front.calls.clear()
    return actions


@pytest.fixture
def launch(front: AwsFrontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Job]:
    """Plan and create a job in a region with a complete stack. Nothing is rented yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("IMGNET_RUNS", str(tmp_path / "runs"))
    for name in ("SETTLE_SECONDS", "RESOURCE_POLL_SECONDS"):
        monkeypatch.setattr(resources, name, 0.01)

    def launch() -> Job:
        stack.ensure(shared_account(), ADDRESS)
        read_calls(front)
        options = make_launch_options("aws", machines=2, procs=1, types=["c7i.2xlarge"])
        return submit.create_job(submit.plan(replace(TINY, types=("c6i.2xlarge",)), options).spec)

    return launch


def calls_before_run_instances(front: AwsFrontend, job: Job) -> list[str]:
    """Rent the machines of a job in a new process, so to speak, and return the calls before RunInstances."""
    read_calls(front)
    assert sorted(JobInstances(job.spec, job.run_folder).rent_all()) == ["0", "1"]
    calls = read_calls(front)
    return calls[: calls.index("RunInstances")]


@pytest.mark.parametrize("change", ["", "old", "gone"])
def test_supervisor_asks_again_only_when_the_plan_is_old_or_its_stack_is_gone(
    front: AwsFrontend, launch: Callable[[], Job], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch()
    if change == "old":
        later = host.SteadyClock(host.SteadyClock.wall_offset() + INSPECTION_SECONDS + 1)
        monkeypatch.setattr(host, "steady_clock", later)
    elif change == "gone":
        assert stack.remove(shared_account(), delete_data=True) == []
    calls = calls_before_run_instances(front, job)
    assert ("DescribeVpcs" in calls) == bool(change) and (change or len(calls) <= 5), calls
