"""Every backend has the functions of the protocol, whatever it does with them."""

import inspect
import shutil
from typing import Any

import pytest

from cluster.backends import base, registry
from cluster.errors import BadInput

Fixture = Any
VERBS = [name for name, one in vars(base.Backend).items() if inspect.isfunction(one) and not name.startswith("_")]
every = pytest.mark.parametrize("name", registry.backend_names())


def test_there_is_this_computer() -> None:
    verbs = {"check", "launch", "poll", "agents_alive", "dead_machines", "replace", "kill_machine", "terminate"}
    assert "local" in registry.backend_names() and verbs <= set(VERBS)


@every
@pytest.mark.parametrize("verb", VERBS)
def test_a_backend_has_the_verbs_of_the_protocol_with_the_same_parameters(name: str, verb: str) -> None:
    wanted = list(inspect.signature(getattr(base.Backend, verb)).parameters.values())[1:]
    found = list(inspect.signature(getattr(registry.get_backend(name), verb)).parameters.values())
    assert [(one.name, one.kind) for one in found] == [(one.name, one.kind) for one in wanted]


@every
def test_a_backend_says_in_a_line_what_it_is(name: str) -> None:
    said = registry.get_backend(name).DESCRIPTION
    assert said and "\n" not in said and registry.get_backend(name).__doc__


@pytest.mark.parametrize("name", ["cloud", "", "__init__", "local.py", "../local", "Local"])
def test_an_unknown_backend_is_refused_and_the_known_are_named(name: str) -> None:
    with pytest.raises(BadInput, match=r"no backend .*; the backends are .*local"):
        registry.get_backend(name)


@every
def test_of_a_job_that_never_began_nothing_lives_and_nothing_is_ended(hand_made: Fixture, name: str) -> None:
    hosts = {"shared": "/nowhere", "machines": []} if registry.get_backend(name).IS_REMOTE else None
    run, backend = hand_made(backend=name, hosts=hosts), registry.get_backend(name)
    assert not backend.agents_alive(run.spec, run.folders)
    backend.terminate(run.spec, run.folders)
    shutil.rmtree(run.folders.path)
    assert not backend.agents_alive(run.spec, run.folders)
    backend.terminate(run.spec, run.folders)
    assert backend.cost_dollars(run.spec, run.folders) >= 0


def test_this_computer_costs_nothing_and_only_it_is_looked_at_by_everybody(hand_made: Fixture) -> None:
    run = hand_made()
    assert registry.get_backend("local").cost_dollars(run.spec, run.folders) == 0.0
    assert [name for name in registry.backend_names() if not registry.get_backend(name).IS_REMOTE] == ["local"]
