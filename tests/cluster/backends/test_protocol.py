"""Every backend implements the functions of the `Backend` protocol."""

import inspect
import shutil
from typing import Any

import pytest

from cluster.backends import base, registry
from cluster.errors import BadInput

Fixture = Any
FUNCTION_NAMES = [
    name for name, value in vars(base.Backend).items() if inspect.isfunction(value) and not name.startswith("_")
]
every_backend = pytest.mark.parametrize("name", registry.backend_names())


def test_protocol_has_the_functions_of_a_jobs_life() -> None:
    expected = {"check", "launch", "poll", "agents_alive", "dead_machines", "replace", "kill_machine", "terminate"}
    assert "local" in registry.backend_names() and expected <= set(FUNCTION_NAMES)


@every_backend
@pytest.mark.parametrize("function_name", FUNCTION_NAMES)
def test_backend_functions_have_the_protocols_parameters(name: str, function_name: str) -> None:
    protocol_function = getattr(base.Backend, function_name)
    expected = list(inspect.signature(protocol_function).parameters.values())[1:]  # without self
    actual = list(inspect.signature(getattr(registry.get_backend(name), function_name)).parameters.values())
    assert [(parameter.name, parameter.kind) for parameter in actual] == [
        (parameter.name, parameter.kind) for parameter in expected
    ]


@every_backend
def test_backend_description_is_one_line(name: str) -> None:
    description = registry.get_backend(name).DESCRIPTION
    assert description and "\n" not in description and registry.get_backend(name).__doc__


@pytest.mark.parametrize("name", ["cloud", "", "__init__", "local.py", "../local", "Local"])
def test_get_backend_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=r"no backend .*; the backends are .*local"):
        registry.get_backend(name)


@every_backend
def test_terminate_of_a_job_that_never_started_does_nothing(hand_made: Fixture, name: str) -> None:
    backend = registry.get_backend(name)
    hosts = {"shared": "/nowhere", "machines": []} if backend.IS_REMOTE else None
    run = hand_made(backend=name, hosts=hosts)
    assert not backend.agents_alive(run.spec, run.run_folder)
    backend.terminate(run.spec, run.run_folder)
    shutil.rmtree(run.run_folder.path)
    assert not backend.agents_alive(run.spec, run.run_folder)
    backend.terminate(run.spec, run.run_folder)
    assert backend.cost_dollars(run.spec, run.run_folder) >= 0


def test_local_backend_is_free_and_the_only_one_not_remote(hand_made: Fixture) -> None:
    run = hand_made()
    assert registry.get_backend("local").cost_dollars(run.spec, run.run_folder) == 0.0
    assert [name for name in registry.backend_names() if not registry.get_backend(name).IS_REMOTE] == ["local"]
