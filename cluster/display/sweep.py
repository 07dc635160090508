"""Prints the jobs of a sweep side by side: their plans before the launch, and their results at the end."""

from collections.abc import Sequence

from cluster.backends.planner import Plan
from cluster.jobs.job import Job
from cluster.report.tables import differing_settings
from cluster.state.states import work_title
from train.metrics.text import format_duration

from .cloud import format_dollars
from .tables import print_table, print_wrapped

BEST_MARK = "*"


def show_other_plans(plans: Sequence[Plan]) -> None:
    """Print a row with the differing settings of each plan of a sweep. Only the first plan is printed in full."""
    settings = [plan.spec.settings for plan in plans]
    names = differing_settings(settings)
    has_steps = any(plan.schedule for plan in plans)
    has_price = any(plan.rental_plan for plan in plans)
    rows = []
    most_dollars: list[float | None] = []
    for plan, values in zip(plans, settings, strict=True):
        most_dollars.append(plan.rental_plan.max_dollars if plan.rental_plan else None)
        at_most = [format_dollars(most_dollars[-1])] if has_price else []
        steps = [plan.schedule.steps if plan.schedule else None] if has_steps else []
        rows.append((plan.spec.workload.name, *(values.get(name) for name in names), *steps, *at_most))
    print(f"\nabove is the plan of the first of {len(plans)} runs; all of them:")
    work = work_title(plan.spec.work_kind for plan in plans)
    print_table((work, *names, *(["steps"] if has_steps else []), *(["at most"] if has_price else [])), rows)
    known_dollars = [dollars for dollars in most_dollars if dollars is not None]
    if has_price and len(known_dollars) == len(plans):
        print(f"all runs together at most {format_dollars(sum(known_dollars))}")
    for note in dict.fromkeys(note for plan in plans for note in plan.notes if note not in plans[0].notes):
        print_wrapped(f"note: {note}", len("note: "))


def show_sweep(jobs: Sequence[Job]) -> None:
    """Print a row for each job of a sweep: the settings that differ, the best accuracy, time and cost."""
    settings = [job.hparams for job in jobs]
    statuses = [job.status() for job in jobs]
    names = differing_settings(settings)
    best = max((status.top1 for status in statuses if status.top1 is not None), default=None)
    has_cost = any(job.result and job.result.dollars for job in jobs)
    work = work_title(status.work for status in statuses)
    columns = ("job", work, "state", *names, "top-1", "best", "at work", *(["cost"] if has_cost else []))
    rows = [
        (
            job.name,
            status.recipe,
            status.state,
            *(values.get(name) for name in names),
            "" if status.top1 is None else f"{status.top1:.2f}",
            BEST_MARK if status.top1 is not None and status.top1 == best else "",
            format_duration(status.seconds),
            *([format_dollars(job.result.dollars) if job.result else ""] if has_cost else []),
        )
        for job, values, status in zip(jobs, settings, statuses, strict=True)
    ]
    print_table(columns, rows, optional=(work,))
    print(f"  compare     imgnet-cluster report {' '.join(job.name for job in jobs)}")
    print(f"  curves      imgnet-cluster tensorboard {' '.join(job.name for job in jobs)}")
