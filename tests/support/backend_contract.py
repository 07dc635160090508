"""The contract that every backend keeps, as tests that a package with a backend of its own can run too.

Write a module of tests that imports all names of this module and has a fixture `backend_run`, which returns what
`make_unstarted_run` does for the backend's name. Start it in a folder outside the checkout of this project by

    PYTHONPATH=CHECKOUT:CHECKOUT/tests python -m pytest test_contract.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.backends import catalog
from cluster.backends.base import Backend
from cluster.backends.planner import MachinePlanner, MachineRequest
from cluster.errors import ClusterError
from cluster.state.run_folder import Run, RunFolder
from cluster.state.spec import JobSpec
from infra.costs import JobCost
from train.recipe.schedule import Schedule

from .specs import TINY, make_spec


def make_unstarted_run(folder: Path, backend: str, **fields: Any) -> Run:
    """Return the run of a job of a backend that was never started. `fields` are fields of its specification."""
    run_folder = RunFolder(folder / "runs" / "job-1")
    run_folder.shared.mkdir(parents=True)
    spec = make_spec(name="job-1", recipe=TINY, backend=backend, **fields)
    run_folder.spec_path.write_text(json.dumps(spec.to_json()))
    return Run(spec, run_folder)


@pytest.fixture
def backend(backend_run: Run) -> Backend:
    """The backend of the run, found by its name as every command finds it."""
    return catalog.open_backend(backend_run)


def test_backend_has_name_and_description(backend: Backend) -> None:
    assert backend.name == backend.run.spec.backend and backend.name in catalog.backend_names()
    assert backend.description and "\n" not in backend.description and type(backend).__doc__


def test_terminate_of_a_job_that_never_started_does_nothing(backend: Backend) -> None:
    assert not backend.is_supervised() and not backend.agents_alive() and backend.terminate() == []
    shutil.rmtree(backend.run.folder.path)
    assert not backend.is_supervised() and not backend.agents_alive()
    assert catalog.open_backend(backend.run).terminate() == []


def test_commands_for_a_job_that_never_started_raise_one_line(backend: Backend) -> None:
    (machine, *_) = backend.run.spec.machine_names
    for command in (backend.attach_command, backend.shell_command):
        with pytest.raises(ClusterError) as failure:
            command(machine)
        assert backend.run.spec.name in str(failure.value) and "\n" not in str(failure.value)


def test_cost_of_a_job_that_never_started_is_zero(backend: Backend) -> None:
    assert backend.job_cost() == backend.job_cost(0.0) == JobCost()


def test_command_line_offers_the_backend(backend: Backend) -> None:
    assert catalog.usable_options()[backend.name] is type(backend).options, catalog.why_unusable(backend.name)


def test_plan_survives_its_file(backend: Backend) -> None:
    """Without an answer of the source of machines, a planner still describes its machines and data in plain data."""
    options = type(backend).options()
    request = MachineRequest(workload=TINY, options=options, is_offline=True)
    try:
        planner = type(backend).planner_class(request)
    except ClusterError as error:  # such as: the hosts file is missing
        assert "\n" not in str(error)
        return
    assert isinstance(planner, MachinePlanner) and planner.default_procs(2) >= 1
    spec = planner.complete(backend.run.spec, Schedule(TINY, 60, 1)).spec
    written = json.dumps(spec.to_json())
    assert json.dumps(JobSpec.from_json(json.loads(written)).to_json()) == written
