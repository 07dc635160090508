"""The order of a self-test: what runs after a failure and after Ctrl-C, and what is removed at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import ClusterError
from cluster.jobs import billing, store
from cluster.selftest import selftest
from cluster.selftest.report import Observation, SelftestReport, StepState
from cluster.selftest.session import STATE_FILE, SelftestSession
from cluster.selftest.steps import Step


def make_session(cloud: Any, folder: Path) -> SelftestSession:
    return SelftestSession(
        cloud, folder, region="us-east-1", small_type="g6.xlarge", large_type="g6e.24xlarge", max_dollars=10.0
    )


class FakeCloud:
    """A cloud that records what is done to its stack."""

    backend = "aws"

    def __init__(self, has_stack: bool = False, leftovers: tuple[str, ...] = ()) -> None:
        self.stack = has_stack
        self.leftovers = leftovers
        self.removed: list[tuple[str, bool]] = []

    def has_stack(self, region: str) -> bool:
        return self.stack

    def remove_stack(self, region: str, delete_data: bool) -> list[str]:
        self.removed.append((region, delete_data))
        return list(self.leftovers)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SelftestSession:
    monkeypatch.setenv(store.RUNS_ENV_VAR, str(tmp_path / "runs"))
    return make_session(FakeCloud(), tmp_path)


def part(name: str, log: list[str], error: BaseException | None = None, is_right: bool = True) -> Any:
    """Return a part of a step that writes its name to the log, yields an observation, and then perhaps fails."""

    def observe(session: SelftestSession) -> Iterator[Observation]:
        log.append(name)
        yield Observation(name, is_right, "seen")
        if error:
            raise error

    observe.__name__ = name
    return observe


@pytest.fixture
def run_steps(session: SelftestSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SelftestReport]:
    def run(*steps: Step, last: Step) -> SelftestReport:
        monkeypatch.setattr(selftest, "STEPS", steps)
        monkeypatch.setattr(selftest, "LAST_STEP", last)
        return selftest.run_selftest(session, lambda line: None)

    return run


def step(*parts: Any, needs_stack: bool = False) -> Step:
    return Step(title="a step", parts=parts, needs_stack=needs_stack)


def test_part_that_fails_stops_neither_the_next_part_nor_the_next_step(
    run_steps: Callable[..., SelftestReport],
) -> None:
    log: list[str] = []
    report = run_steps(
        step(part("first", log, ClusterError("no capacity")), part("second", log, RuntimeError("a bug"))),
        step(part("third", log, is_right=False), part("fourth", log)),
        last=step(part("last", log)),
    )
    assert log == ["first", "second", "third", "fourth", "last"]
    assert [result.state for result in report.steps] == [StepState.FAILED, StepState.FAILED, StepState.PASSED]
    seen = [observation.seen for observation in report.steps[0].observations]
    assert seen == ["seen", "ClusterError: no capacity", "seen", "RuntimeError: a bug"]


def test_step_without_its_stack_is_skipped_and_only_the_last_follows_an_interruption(
    run_steps: Callable[..., SelftestReport],
) -> None:
    log: list[str] = []
    report = run_steps(
        step(part("rents", log), needs_stack=True),
        step(part("first", log, KeyboardInterrupt())),
        step(part("second", log)),
        last=step(part("last", log)),
    )
    assert log == ["first", "last"] and report.is_interrupted and not report.has_passed
    assert [result.state for result in report.steps] == [StepState.SKIPPED, StepState.INTERRUPTED, StepState.PASSED]
    assert report.steps[1].observations[0].what == "first"


def test_jobs_of_a_failed_part_are_terminated_before_the_next_part(
    run_steps: Callable[..., SelftestReport], session: SelftestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    jobs: list[Any] = []
    job: Any = SimpleNamespace(name="job-1", has_ended=False)

    def terminate(ended_job: Any) -> None:
        log.append("terminated")
        ended_job.has_ended = True

    def launches(session: SelftestSession) -> Iterator[Observation]:
        jobs.append(job)
        yield Observation("launched", True, "job-1")
        raise ClusterError("it does not train")

    monkeypatch.setattr(billing, "terminate_job", terminate)
    monkeypatch.setattr(SelftestSession, "spent_dollars", 0.0)
    monkeypatch.setattr(SelftestSession, "jobs", jobs)
    run_steps(step(launches, part("next", log)), last=step())
    assert log == ["terminated", "next"]


def test_stack_is_removed_only_if_there_was_none_before(session: SelftestSession) -> None:
    cloud: Any = session.cloud
    session.begin()
    assert session.remove_everything() == [] and cloud.removed == [("us-east-1", True)]
    assert not (session.folder / STATE_FILE).exists()
    cloud.removed.clear()
    cloud.stack = True
    session.begin()
    assert session.remove_everything() == [] and cloud.removed == []


def test_what_a_killed_session_left_is_removed_first(session: SelftestSession) -> None:
    session.begin()
    cloud: Any = FakeCloud(has_stack=True, leftovers=("vpc-1 stays",))
    second = make_session(cloud, session.folder)
    with pytest.raises(ClusterError, match="vpc-1 stays"):
        second.begin()
    assert (session.folder / STATE_FILE).exists(), "what is left is not forgotten"
    cloud.leftovers, cloud.stack = (), False
    second.begin()
    assert len(cloud.removed) == 2
