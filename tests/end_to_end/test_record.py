"""A job that ends at its accuracy target, is killed on the way and resumed; and the benchmark record of it."""

import json
import os

from support.benchmark_rules import mlperf_problems
from support.known import known
from support.sandbox import Sandbox


def test_killed_and_resumed_job_ends_at_its_target_with_a_correct_record(sandbox: Sandbox) -> None:
    """Among ten classes, five guesses are right for half of the images from the start; 60 % are learned soon."""
    job = sandbox.launch(400, "--procs", "2", "--save-seconds", "0", "--target", "top5=60")
    sandbox.wait_for(lambda: list((job.run_folder.shared / "checkpoints/000001").glob("step-*.pt")))
    os.kill(sandbox.agent_pid(), 9)
    sandbox.wait_for(lambda: not sandbox.pids("-m train "))
    assert sandbox.cli("status", "--exit-code").code == 100
    resumed = sandbox.cli("resume", "job-1")
    assert resumed.code == 0 and "top-5 of 60 % reached in epoch " in resumed.out, resumed

    result = known(job.result)
    outcome = known(result.target)
    outcome_seconds = known(outcome.seconds)
    epochs = result.epochs
    assert (result.state, result.attempts, outcome.reached) == ("done", 2, True)
    assert outcome.epoch == len(epochs) < 400 and known(epochs[-1].top5) >= 60
    assert all(known(epoch.top5) < 60 for epoch in epochs[:-1])
    first, second = (
        json.loads((job.path / f"metrics/00000{attempt}.jsonl").read_text().splitlines()[0]) for attempt in (1, 2)
    )
    assert first["begun"] == second["begun"] == known(result.clock).begun < first["time"] < second["time"]
    assert outcome_seconds > second["time"] - first["time"], "the clock goes on between the attempts"
    assert known(outcome.seconds_all) > outcome_seconds and outcome.dollars is None
    assert known(result.constants).batch_timings
    (target_line,) = [line for line in sandbox.cli("status").out.splitlines() if line.startswith("target ")]
    assert "reached in epoch" in target_line

    written = sandbox.cli("record", "-o", "mine", "--author", "Ann")
    assert written.code == 0, written
    table = [line.split("\t") for line in (sandbox.path / "mine.tsv").read_text().splitlines()]
    assert list(mlperf_problems((sandbox.path / "mine.log").read_text())) == []
    assert [float(row[3]) for row in table[1:]] == [known(epoch.top5) for epoch in epochs]
    assert float(table[-1][1]) == round(outcome_seconds / 3600, 6)
    assert sandbox.cli("resume", "job-1").code == 1, "a job that is done cannot be resumed"
