"""Prints a plan: machines, price and schedule; forecasts, also beside the actual times; reports of checked machines."""

import time
from collections.abc import Iterable, Sequence

from cluster.backends.catalog import UNKNOWN_MACHINES
from cluster.backends.planner import Plan
from cluster.jobs import store
from cluster.machines.checks import describe_age
from cluster.machines.host_check import HostReport
from cluster.machines.setup_progress import fold_by_machine
from cluster.planning.forecasts import Candidate
from cluster.planning.resume import ResumePlan
from cluster.report.tables import differing_settings, format_error, schedule_table
from cluster.state.spec import JobSpec
from cluster.state.states import work_title
from train.forecast import TERMS, TermComparison, longest_term
from train.metrics.text import describe_training, three_digits
from train.recipe.schedule import PhaseRow

from . import cloud
from .tables import print_table, print_wrapped

LEVEL_CHARACTERS = 8  # of "error" and "warning" before a line
UNKNOWN_WITHOUT_CLOUD = "offers, spot prices, image, quotas, missing shared resources"


def show_plan(plan: Plan, unasked_reason: str = "") -> None:
    """Print the rental with its price, then schedule and notes. `unasked_reason` says why no cloud was asked."""
    if plan.rental_plan:
        if unasked_reason:
            print_wrapped(f"the cloud could not be asked: {unasked_reason}")
            print_wrapped(f"so unknown are: {UNKNOWN_WITHOUT_CLOUD}")
        cloud.show_rental_plan(plan.rental_plan)
    print_wrapped(_summary_line(plan))
    if plan.schedule:
        print_wrapped(describe_training(plan.spec.recipe))
        show_schedule(plan.schedule.table(), plan.missing_copies)
        left_out = " (files; those that are no images are left out)" if plan.spec.train.skip_bad else ""
        print(f"{plan.schedule.steps} steps over {plan.schedule.images} images{left_out}")
    _show_notes(plan)


def _show_notes(plan: Plan) -> None:
    """Print the notes of a plan, then what would make the job fail."""
    print_notes(plan.notes)
    for obstacle in plan.obstacles:
        print_wrapped(f"would be refused: {obstacle}", len("note: "))


def show_other_jobs(spec: JobSpec, parallel: int = 1) -> None:
    """Print a note on each of the user's other jobs that is on the machines of `parallel` jobs like this one."""
    hosts = spec.host_list[: parallel * len(spec.machine_names)]
    names = {host.endpoint: host.host for host in hosts}
    for job in store.jobs_on_machines(hosts):
        if job.spec.uid != spec.uid:
            shared_hosts = [names[host.endpoint] for host in job.spec.host_list if host.endpoint in names]
            age = describe_age(max(0.0, time.time() - job.spec.created))
            print_wrapped(
                f"note: {job.name}, launched {age}, is on {', '.join(shared_hosts)} too; two jobs share processors, "
                f"GPUs and memory. Look at it, or stop it: imgnet-cluster status {job.run.handle}, "
                f"imgnet-cluster stop {job.run.handle}",
                len("note: "),
            )


def show_resume_plan(plan: ResumePlan) -> None:
    """Print what a resume would do: what it rents, the phases that are left, and the options that it changes."""
    spec, schedule = plan.spec, plan.schedule
    if plan.rental_plan:
        cloud.show_rental_plan(plan.rental_plan)
    print_wrapped(_summary_line(plan))
    if schedule is None:
        print_wrapped(f"{spec.name} starts its command again, which continues from what it has saved")
    elif plan.steps_done:
        print_wrapped(
            f"{spec.name} was trained until step {plan.steps_done} of {schedule.steps}; "
            "it continues from its newest checkpoint"
        )
    else:
        print_wrapped(f"{spec.name} has saved no step; it starts again from step 0 of {schedule.steps}")
    epochs = schedule.epochs if schedule else ()
    last_epoch = next((epoch for epoch in epochs if epoch.first_step + epoch.steps > plan.steps_done), None)
    if schedule and last_epoch:
        show_schedule([row for row in schedule.table() if row.end > last_epoch.number])
    for change in plan.changes:
        print_wrapped(f"changed: {change}", len("changed: "))
    _show_notes(plan)


def rental_question(plans: Sequence[Plan]) -> str:
    """Return the question that the user answers before machines are rented, with their highest cost."""
    machine_count = sum(len(plan.spec.machine_names) for plan in plans)
    machines = "1 machine" if machine_count == 1 else f"{machine_count} machines"
    limits = [plan.rental_plan.max_dollars if plan.rental_plan else None for plan in plans]
    known_limits = [limit for limit in limits if limit is not None]
    if len(known_limits) < len(limits):
        return f"rent {machines} at an unknown price?"
    return f"rent {machines} for at most {_highest_cost(plans)}, and for a minute at least?"


def _highest_cost(plans: Sequence[Plan]) -> str:
    """Return what plans of known prices cost at most: at today's prices, and if spot prices rise meanwhile."""
    rentals = [plan.rental_plan for plan in plans if plan.rental_plan]
    dollars = cloud.format_dollars(sum(rental.max_dollars or 0.0 for rental in rentals))
    if all(rental.ceiling_dollars is None for rental in rentals):
        return f"{dollars} at today's prices"
    ceiling = sum(
        rental.max_dollars or 0.0 if rental.ceiling_dollars is None else rental.ceiling_dollars for rental in rentals
    )
    return f"{dollars} at today's prices ({cloud.format_dollars(ceiling)} if spot prices rise to on demand)"


def _summary_line(plan: Plan) -> str:
    spec = plan.spec
    has_several_machines = len(spec.machine_names) > 1
    machines = f"machines: {spec.machines}" + (f" and {spec.recovery.spares} spare" if spec.recovery.spares else "")
    if spec.is_one_computer:
        machines = f"{machines} on this computer" if has_several_machines else "this computer"
    processes = f"processes{' of each' if has_several_machines else ''}: {spec.procs}"
    own_price = "" if spec.backend == UNKNOWN_MACHINES else ", $0.00"
    price = "" if plan.rental_plan else own_price
    if command := spec.own_command:
        training = f"{command.name}: {command.short_text}"
    else:
        training = f"{spec.recipe.name}: {spec.recipe.model.name} on {spec.recipe.data.name}"
    return f"{training}; {machines}, {processes}{price}"


def show_schedule(rows: Sequence[PhaseRow], missing_copies: Sequence[int] = ()) -> None:
    """Print a schedule. A phase whose resized copies are missing reads the full-size images."""
    optional = ("lr per 256", "min scale", "pre-resized to", "val crop")
    print_table(schedule_table(rows, missing_copies).rows, optional)


def show_host_reports(reports: Sequence[HostReport]) -> None:
    """Print a row for each machine, then each problem once, with the machines that have it."""
    print_table(map(_report_cells, reports), optional=("fsync ms", "memory GB", "CPUs", "python"))
    hosts = {report.machine: report.host for report in reports}
    for level in ("error", "warning"):
        lines = [(report.machine, line) for report in reports for line in getattr(report, f"{level}s")]
        for text in fold_by_machine(lines, hosts):
            print_wrapped(f"{level:{LEVEL_CHARACTERS}} {text}", LEVEL_CHARACTERS + 1)


def _report_cells(report: HostReport) -> dict[str, object]:
    result = "error" if report.errors else "warning" if report.warnings else "ok"
    cells: dict[str, object] = {"machine": report.machine, "host": report.host, "result": result}
    if not (facts := report.facts):
        return cells | dict.fromkeys(("python", "torch", "GPUs", "CPUs", "memory GB", "free GB", "fsync ms"))
    gpu_names = list(dict.fromkeys(facts.gpus))
    return cells | {
        "python": facts.python,
        "torch": report.torch or "none",
        "GPUs": f"{len(facts.gpus)} x {', '.join(gpu_names)}" if gpu_names else "none",
        "CPUs": facts.cpus,
        "memory GB": facts.memory_gb,
        "free GB": facts.work.free_gb,
        "fsync ms": facts.shared.fsync_ms,
    }


def show_other_plans(plans: Sequence[Plan]) -> None:
    """Print a row with the differing settings of each plan of a sweep. Only the first plan is printed in full."""
    settings = [plan.spec.settings for plan in plans]
    names = differing_settings(settings)
    has_steps = any(plan.schedule for plan in plans)
    has_price = any(plan.rental_plan for plan in plans)
    work = work_title(plan.spec.work_kind for plan in plans)
    rows = []
    most_dollars: list[float | None] = []
    for plan, values in zip(plans, settings, strict=True):
        most_dollars.append(plan.rental_plan.max_dollars if plan.rental_plan else None)
        row: dict[str, object] = {work: plan.spec.workload.name, **{name: values.get(name) for name in names}}
        row |= {"steps": plan.schedule.steps if plan.schedule else None} if has_steps else {}
        rows.append(row | ({"at most": cloud.format_dollars(most_dollars[-1])} if has_price else {}))
    print(f"\nabove is the plan of the first of {len(plans)} runs; all of them:")
    print_table(rows)
    known_dollars = [dollars for dollars in most_dollars if dollars is not None]
    if has_price and len(known_dollars) == len(plans):
        print(f"all runs together at most {_highest_cost(plans)}")
    print_notes(dict.fromkeys(note for plan in plans for note in plan.notes if note not in plans[0].notes))


def print_notes(notes: Iterable[str]) -> None:
    """Print each note, on a narrow terminal on several lines."""
    for note in notes:
        print_wrapped(f"note: {note}", len("note: "))


def show_forecasts(candidates: Sequence[Candidate], notes: Sequence[str]) -> None:
    """Print a row for each of several candidates, or the plan and the phases of a single one; then notes."""
    if len(candidates) == 1:
        show_plan(candidates[0].plan)
        show_phases(candidates[0])
    else:
        show_candidates(candidates)
    print_notes(notes)


def show_candidates(candidates: Sequence[Candidate]) -> None:
    """Print a row for each candidate."""
    rows, sources = list[dict[str, object]](), list[str]()
    for candidate in candidates:
        minutes, longest = None, "no measurements of this model on this GPU"
        if candidate.forecast:
            minutes, longest = candidate.forecast.minutes, longest_term(candidate.forecast.terms)
            sources.append(candidate.forecast.source)
        rows.append(
            {
                "type": candidate.machine_type.name,
                "machines": candidate.machines,
                "GPUs": candidate.plan.spec.procs * candidate.machines,
                "minutes": three_digits(minutes),
                "on demand": cloud.format_dollars(candidate.dollars),
                "longest term": longest,
            }
        )
    print_table(rows)
    print_wrapped("spot prices change: today's are shown by imgnet-cluster offers")
    print_wrapped(
        f"constants: {', '.join(dict.fromkeys(sources)) or 'none'}; the term start is boot, set-up, fetch and the "
        "start of the trainers"
    )


def show_phases(candidate: Candidate) -> None:
    """Print a forecast: minutes and price of the whole run in one line, then the seconds of each phase by term."""
    name, count = candidate.machine_type.name, candidate.machines
    machines = name if count == 1 else f"{count} x {name}"
    run_forecast = candidate.forecast
    if run_forecast is None:
        gpu = candidate.machine_type.gpu or "an unknown GPU"
        print_wrapped(f"forecast on {machines}: none, there are no measurements of this model on {gpu}")
        return
    cost = (
        f", {cloud.format_dollars(candidate.dollars)} on demand" if candidate.machine_type.on_demand_price != 0 else ""
    )
    longest = f"longest: {longest_term(run_forecast.terms)}"
    print_wrapped(f"forecast on {machines}: {three_digits(run_forecast.minutes)} minutes{cost}; {longest}")
    rows = [
        {
            "epochs": f"{phase.start}-{phase.end}",
            "size": phase.size,
            "batch": phase.batch,
            "seconds": f"{phase.seconds:.1f}",
            **{term: f"{phase.terms[term]:.1f}" for term in TERMS},
        }
        for phase in run_forecast.phases
    ]
    print_table(rows, optional=("batch", "size"))
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in run_forecast.start.items() if seconds)
    print_wrapped(f"before the first step, in seconds: {parts or 'nothing'}; constants: {run_forecast.source}")


def show_forecast_vs_actual(rows: Sequence[TermComparison], constants_source: str = "", job_name: str = "") -> None:
    """Print the forecast of a job beside the actual times, term by term. Terms below a second get no relative error."""
    print_table(
        {
            "seconds of": row.term,
            "forecast": f"{row.forecast:.1f}",
            "actual": f"{row.actual:.1f}",
            "error": format_error(row),
        }
        for row in rows
    )
    if constants_source:
        print(
            f"constants: {constants_source}; to use those of this job next time: imgnet-cluster plan --from {job_name}"
        )


def show_missing_forecast(job_name: str, recipe_file: str) -> None:
    """Print that a job had no forecast, and the command for a forecast with the speeds that the job measured."""
    command = f"imgnet-cluster plan --from {job_name} {recipe_file or 'RECIPE'}"
    print_wrapped(
        f"forecast: none, because the speed of these machines was not known; by the speeds of this job: {command}"
    )
