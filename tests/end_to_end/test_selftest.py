"""`imgnet-cluster selftest --aws` on the simulated cloud: all steps, Ctrl-C and a kill. Nothing is left after any."""

import json
import re
import signal
from typing import Any

import pytest
from support.aws_user import TYPE, Renter
from support.simcloud.cloud import ACCOUNT

from cluster.selftest.report import SelftestReport, StepState
from train.tools.records import decode

TWO_CARDS = "m6in.32xlarge"  # without GPUs, which no simulated machine has
ARGUMENTS = ("selftest", "--aws", "--type", TYPE, "--large-type", TWO_CARDS, "--tag", "Team=vision")


def our_resources(renter: Renter) -> list[dict[str, Any]]:
    return [resource for resource in renter.cloud.all_resources() if "imgnet:stack" in resource["tags"]]


def interrupted_selftest(renter: Renter, signal_number: int) -> int:
    """Start a self-test, end it with a signal once it has a live machine, and return its exit code."""
    process = renter.sandbox.start(*ARGUMENTS, "-y")
    renter.wait_for(renter.live_instance_ids)
    process.send_signal(signal_number)
    return process.wait(120)


@pytest.mark.release
def test_selftest_passes_and_leaves_nothing(renter: Renter) -> None:
    renter.cloud.post("set", internet_wait_seconds=2.0, nat_seconds=0.5)
    process = renter.sandbox.start(*ARGUMENTS, "--interruption", "-y")
    wish = renter.wait_for(lambda: re.search(r"interrupt (i-\w+) or i-\w+ within", renter.sandbox.output()), 900)
    renter.cloud.interrupt(wish[1], notice=60)
    code = process.wait(900)
    folder, output = renter.path / "runs" / "selftest", renter.sandbox.output()
    text = (folder / "selftest-report.txt").read_text()
    assert code == 0, output
    assert "about $" in output and text in output and ACCOUNT not in output.partition("self-test on")[2]
    for seen in (
        "a spot machine that is interrupted leaves at the notice",
        "the log names the transport",
        "the new machine sees a checkpoint in the shared folder",
    ):
        assert f"ok     {seen}" in text
    report = decode(SelftestReport, json.loads((folder / "selftest-report.json").read_text()))
    assert [step.state for step in report.steps] == [StepState.PASSED] * 5
    assert 0 < report.dollars < report.max_dollars == 10.0
    assert report.dollars == pytest.approx(renter.cloud.bill()["total"], rel=0.05)
    assert our_resources(renter) == [] and not (folder / "selftest-state.json").exists()


def test_ctrl_c_removes_everything_and_says_so(renter: Renter) -> None:
    assert interrupted_selftest(renter, signal.SIGINT) == 130
    assert our_resources(renter) == [] and renter.live_instance_ids() == []
    assert "interrupted" in (renter.path / "runs" / "selftest" / "selftest-report.txt").read_text()


def test_after_a_kill_the_same_command_removes_everything(renter: Renter) -> None:
    assert interrupted_selftest(renter, signal.SIGKILL) == -signal.SIGKILL
    assert our_resources(renter)
    assert all(row["tags"]["Team"] == "vision" for row in our_resources(renter) if row["kind"] == "instance")
    ran = renter.cli(*ARGUMENTS, "--clean", timeout=120, env={"AWS_REGION": ""})  # the region is that of the self-test
    assert ran.code == 0 and "nothing is left" in ran.out, ran
    assert our_resources(renter) == [] and renter.live_instance_ids() == []
    renter.wait_for(lambda: not renter.supervisor_pids())
