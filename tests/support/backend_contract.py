"""The contract that every backend keeps, as tests that a package with a backend of its own can run too.

Write a module of tests that imports the functions of this module and has a fixture `backend_run`, which returns the
`Run` of a job that was never started, with the backend's name in its specification.
"""

import shutil

import pytest

from cluster.backends import catalog, registry
from cluster.backends.base import Backend, BilledBackend
from cluster.errors import ClusterError
from cluster.state.run_folder import Run


@pytest.fixture
def backend(backend_run: Run) -> Backend:
    """The backend of the run, found by its name as every command finds it."""
    return registry.open_backend(backend_run)


def test_backend_has_name_and_description(backend: Backend) -> None:
    assert backend.name == backend.run.spec.backend and backend.name in catalog.backend_names()
    assert backend.description and "\n" not in backend.description and type(backend).__doc__


def test_job_that_never_started_has_no_life(backend: Backend) -> None:
    assert not backend.is_supervised() and not backend.agents_alive()


def test_terminate_of_a_job_that_never_started_does_nothing(backend: Backend) -> None:
    assert backend.terminate() == []
    shutil.rmtree(backend.run.folder.path)
    assert not backend.is_supervised() and not backend.agents_alive()
    assert registry.open_backend(backend.run).terminate() == []


def test_commands_for_a_job_that_never_started_raise_one_line(backend: Backend) -> None:
    (machine, *_) = backend.run.spec.machine_names
    for command in (backend.attach_command, backend.shell_command):
        with pytest.raises(ClusterError) as failure:
            command(machine)
        assert backend.run.spec.name in str(failure.value) and "\n" not in str(failure.value)


def test_cost_of_a_job_that_never_started_is_zero(backend: Backend) -> None:
    assert backend.cost_dollars() == 0.0
    assert backend.cost_dollars_until(0.0) == (0.0 if isinstance(backend, BilledBackend) else None)


def test_reserved_names_are_names(backend: Backend) -> None:
    assert all(isinstance(name, str) for name in type(backend).reserved_names())
