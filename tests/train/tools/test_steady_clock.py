"""A clock that tells Unix time and never jumps, whatever is done to the wall clock."""

import time
from typing import Any

import pytest

from train.tools import host
from train.tools.host import SteadyClock


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The wall clock and the seconds since boot, both to be set by hand."""
    values = {"wall": 1000.0, "boot": 50.0}
    monkeypatch.setattr(time, "time", lambda: values["wall"])
    monkeypatch.setattr(host, "seconds_since_boot", lambda: values["boot"])
    monkeypatch.delenv(host.CLOCK_OFFSET_VARIABLE, raising=False)
    return values


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_steady_clock_ignores_jumps_of_the_wall_clock(clocks: Any, jump: float) -> None:
    clock = SteadyClock()
    assert (clock.time(), clock.jump()) == (1000.0, 0.0)
    clocks["wall"] += 5 + jump
    clocks["boot"] += 5
    assert (clock.time(), clock.jump()) == (1005.0, jump)


def test_steady_clock_of_a_trainer_is_that_of_its_agent(clocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent_clock = SteadyClock()
    clocks["wall"] -= 7200
    monkeypatch.setenv(host.CLOCK_OFFSET_VARIABLE, repr(agent_clock.offset))
    assert SteadyClock().time() == agent_clock.time() == 1000.0
