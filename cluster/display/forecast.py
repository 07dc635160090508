"""Prints forecasts: candidates to choose from, one of them term by term, and a forecast beside the actual times."""

from collections.abc import Sequence

from cluster.planning.forecasts import Candidate
from cluster.report.tables import format_error
from train.forecast import TERMS, TermComparison, longest_term
from train.metrics.text import three_digits

from .cloud import format_dollars
from .plan import show_plan
from .tables import print_table, print_wrapped


def show_forecasts(candidates: Sequence[Candidate], notes: Sequence[str]) -> None:
    """Print a row for each of several candidates, or the plan and the phases of a single one; then notes."""
    if len(candidates) == 1:
        show_plan(candidates[0].plan)
        show_phases(candidates[0])
    else:
        show_candidates(candidates)
    for note in notes:
        print_wrapped(f"note: {note}", len("note: "))


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
                "on demand": format_dollars(candidate.dollars),
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
    cost = f", {format_dollars(candidate.dollars)} on demand" if candidate.machine_type.on_demand_price != 0 else ""
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
