"""The tables of a sweep: the differences between its plans, and the results of its jobs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support import report_reader
from support.specs import TINY

from cluster.display import plan as display_plan
from cluster.display import progress
from cluster.jobs import store
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import plan
from train.recipe import Recipe


def make_recipe(lr: float) -> Recipe:
    return replace(TINY, name=f"lr{lr:g}", phases=[replace(TINY.phases[0], lr=lr)])


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_plans_of_a_sweep_are_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    plans = [plan(make_recipe(lr), make_launch_options(procs=1)) for lr in (0.01, 0.1, 0.4)]
    plans[2] = replace(plans[2], notes=("only this one warns",))
    display_plan.show_other_plans(plans)
    shown = capsys.readouterr().out
    assert ["recipe", "lr", "steps"] in rows(shown) and ["lr0.4", "0.4", "16"] in rows(shown)
    assert "the first of 3 runs" in shown and "note: only this one warns" in shown


def test_sweep_ends_with_a_table_that_marks_the_best(hand_made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (lr, top1) in enumerate(((0.01, 48.33), (0.1, 55.5), (0.4, None)), 1):
        run = hand_made(f"job-{number}", recipe=make_recipe(lr))
        run.write_status("failed" if top1 is None else "stopped", reason="why", ended=True, top1=top1)
        if top1 is not None:
            run.write_metrics(1, report_reader.epoch(1, 1.0, top1=top1))
    jobs = [store.find(f"job-{number}") for number in (1, 2, 3)]
    for job in jobs:
        job.refresh()
    progress.show_sweep(jobs)
    shown = capsys.readouterr().out
    assert rows(shown)[0] == ["job", "recipe", "state", "lr", "top-1", "best", "at", "work"]
    assert ["job-1", "lr0.01", "stopped", "0.01", "48.33", "0:00"] in rows(shown)
    assert ["job-2", "lr0.1", "stopped", "0.1", "55.50", "*", "0:00"] in rows(shown)
    assert ["job-3", "lr0.4", "failed", "0.4", "0:00"] in rows(shown)
    assert "imgnet-cluster report job-1 job-2 job-3" in shown

    stopped: list[Any] = [
        SimpleNamespace(
            name=str(number), hparams={"state": number}, result=None, status=jobs[0].status, run=jobs[0].run
        )
        for number in (1, 2)
    ]
    progress.show_sweep(stopped)
    table = rows(capsys.readouterr().out)
    assert table[0][2:4] == ["state", "--state"] and ["1", "lr0.01", "stopped", "1", "48.33", "*", "0:00"] in table
