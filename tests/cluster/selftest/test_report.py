"""The report of a self-test: what is left out of it, and its two files."""

import json
from pathlib import Path

import pytest

from cluster.selftest import report
from cluster.selftest.report import Observation, SelftestReport, StepResult, StepState
from train.tools.records import decode


def make_report(*states: StepState, seen: str = "as it should be") -> SelftestReport:
    """Return a report with a step for each state."""
    steps = tuple(
        StepResult(
            title=f"step {number}",
            state=state,
            seconds=90.0,
            dollars=1.25,
            observations=(Observation("a thing", state is StepState.PASSED, seen),),
        )
        for number, state in enumerate(states)
    )
    return SelftestReport(
        cloud="aws",
        region="us-east-1",
        started="2026-11-23T09:00:00Z",
        commit="abc",
        seconds=600.0,
        dollars=2.5,
        max_dollars=10.0,
        steps=steps,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("credentials: arn:aws:sts::123456789012:assumed-role/admin/jane in account 123456789012",
         "credentials: <arn> in account <account>"),
        ("AWS does not accept AKIAIOSFODNN7EXAMPLE", "AWS does not accept <key>"),
        ("ssh from 203.0.113.7/32, machine 10.77.0.5", "ssh from <address>/32, machine 10.77.0.5"),
        ("i-0123456789012 of ami-123456789012, torch 2.13.0", "i-0123456789012 of ami-123456789012, torch 2.13.0"),
        ("/home/jane/runs of jane on janes-laptop", "<private>/runs of <private> on janes-laptop"),
    ],
)  # fmt: skip
def test_private_things_are_left_out_and_others_stay(text: str, expected: str) -> None:
    assert report.remove_private(text, ["/home/jane", "jane", "me"]) == expected


def test_report_is_written_as_json_and_as_text(tmp_path: Path) -> None:
    written = make_report(StepState.PASSED, StepState.FAILED, seen='account 123456789012, "quoted"')
    text = report.write_report(tmp_path, written)
    assert text == (tmp_path / "selftest-report.txt").read_text()
    assert "2 step 1: failed after 1.5 minutes, $1.25\n  WRONG  a thing: account <account>" in text
    assert "$2.50 of $10.00 in 10.0 minutes" in text
    read = decode(SelftestReport, json.loads((tmp_path / "selftest-report.json").read_text()))
    assert read.steps[1].observations[0].seen == 'account <account>, "quoted"' and read.max_dollars == 10.0
