"""A self-test: what runs after a failure and Ctrl-C, what is removed at the end, and its report without secrets."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.errors import ClusterError
from cluster.jobs import billing
from cluster.selftest import steps as selftest
from cluster.selftest.report import Observation, SelftestReport, StepState, remove_private
from cluster.selftest.session import STATE_FILE, JobRequest, SelftestSession
from cluster.selftest.steps import Step
from cluster.state.run_folder import RUNS_ENV_VAR


def make_session(cloud: Any, folder: Path) -> SelftestSession:
    return SelftestSession(
        cloud, folder, region="us-east-1", small_type="g6.xlarge", large_type="g6e.24xlarge", max_dollars=10.0
    )


def make_cloud(has_stack: bool = False, leftovers: tuple[str, ...] = ()) -> Mock:
    return Mock(backend="aws", has_stack=Mock(return_value=has_stack), remove_stack=Mock(return_value=list(leftovers)))


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SelftestSession:
    monkeypatch.setenv(RUNS_ENV_VAR, str(tmp_path / "runs"))
    return make_session(make_cloud(), tmp_path)


def part(
    name: str, log: list[str], error: BaseException | None = None, is_right: bool = True, seen: str = "seen"
) -> Any:
    """Return a part of a step that writes its name to the log, yields an observation, and then perhaps fails."""

    def observe(session: SelftestSession) -> Iterator[Observation]:
        log.append(name)
        yield Observation(name, is_right, seen)
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
    assert log == ["first", "last"] and StepState.INTERRUPTED in report.states
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


@pytest.mark.parametrize("line", ["rank 0: 2 processes, by gloo", "rank 0: ready"])
def test_spot_pair_shows_its_transport_and_its_checkpoint_on_the_new_machine(
    session: SelftestSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    (tmp_path / "log").write_text(f"{line}\n")
    job: Any = Mock(log_path=lambda: tmp_path / "log", state="stopped")
    job.spec = SimpleNamespace(uid="job-1-00000000")
    job.timeline.return_value, job.machine_details.return_value = [], {}
    machine = {"zone": "us-east-1a", "placement_group": "", "launch_index": 0}
    machines = [SimpleNamespace(name=name, **machine) for name in ("0", "1")]
    ran = Mock()
    for name, value in {"launch": lambda _: job, "machines": lambda _: machines, "run_on_machine": ran}.items():
        monkeypatch.setattr(session, name, value)
    monkeypatch.setattr(session, "wait_for_training", Mock())
    observations = {each.what: each for each in selftest.replace_lost_machine(session)}
    assert observations["the log names the transport"].is_right == ("processes, by" in line)
    (_, name, argv), _ = ran.call_args
    assert name == "1" and "~/.imgnet/shared/job-1-00000000/checkpoints/*/step-*" in argv[-1]
    ran.side_effect = ClusterError("machine 1: no such file")
    assert [each.is_right for each in selftest._observe(session, selftest.replace_lost_machine)][-1] is False


def test_a_job_beyond_the_limit_is_refused_with_the_option_that_sets_it(
    session: SelftestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelftestSession, "spent_dollars", 10.0)
    with pytest.raises(ClusterError, match=r"^the limit of \$10 is spent; .* with a larger --max-price-total$"):
        session.plan(JobRequest(title="one more", minutes=1, dollar_share=0.1))


def test_stack_is_removed_only_if_there_was_none_before(session: SelftestSession) -> None:
    cloud: Any = session.cloud
    session.begin()
    assert session.remove_everything() == []
    cloud.remove_stack.assert_called_once_with("us-east-1", delete_data=True)
    assert not (session.folder / STATE_FILE).exists()
    cloud.remove_stack.reset_mock()
    cloud.has_stack.return_value = True
    session.begin()
    assert session.remove_everything() == [] and not cloud.remove_stack.called


@pytest.mark.parametrize(("text", "expected"), [
    ("credentials: arn:aws:sts::123456789012:assumed-role/admin/jane in account 123456789012",
     "credentials: <arn> in account <account>"),
    ("AWS does not accept AKIAIOSFODNN7EXAMPLE", "AWS does not accept <key>"),
    ("ssh from 203.0.113.7/32, machine 10.77.0.5", "ssh from <address>/32, machine 10.77.0.5"),
    ("i-0123456789012 of ami-123456789012, torch 2.13.0", "i-0123456789012 of ami-123456789012, torch 2.13.0"),
    ("/home/jane/runs of jane on janes-laptop", "<private>/runs of <private> on janes-laptop"),
])  # fmt: skip
def test_private_things_are_left_out_and_others_stay(text: str, expected: str) -> None:
    assert remove_private(text, ["/home/jane", "jane", "me"]) == expected
