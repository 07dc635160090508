"""What a person sees of forecasts: rows to choose from, one row term by term, and a forecast beside what came of it."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from cluster.planning import choose
from cluster.planning.candidates import Candidate, group_by_type

from . import tables
from .cloud import format_dollars

TERM_COLUMNS = ("compute", "all-reduce", "optimizer", "logging", "loader", "validation", "fixed")


def format_minutes(minutes: float | None) -> str:
    """Return minutes with three digits, "" when they are not known."""
    return "" if minutes is None else f"{minutes:.0f}" if minutes >= 100 else f"{minutes:.3g}"


def dominant_terms(candidate: Candidate) -> str:
    """Return which term takes longest in which epochs, such as "loader 0-16, compute 16-38"."""
    if candidate.forecast is None:
        return ""
    told = [(phase["most"], phase["start"], phase["end"]) for phase in candidate.forecast.phase_rows()]
    runs = [(name, list(some)) for name, some in groupby(told, key=lambda one: one[0])]
    return ", ".join(f"{name} {some[0][1]}-{some[-1][2]}" for name, some in runs)


def show_candidates(candidates: Sequence[Candidate]) -> None:
    """Print a row for each type and number of machines, and where more of them stop being worth it."""
    target = any(one.epochs_to_target for one in candidates)
    columns = ["type", "machines", "GPUs", "minutes", "start", "on demand", "spot"]
    columns += ["to target", "for"] if target else []
    tables.print_table(
        [*columns, "a machine's work", "what takes longest, by epochs"],
        [
            (
                one.machine_type.name, one.machines, one.plan.spec.procs * one.machines, format_minutes(one.minutes),
                format_minutes(sum(one.forecast.startup_seconds.values()) / 60) if one.forecast else "",
                format_dollars(one.dollars(one.minutes)), "?",
                *((format_minutes(one.minutes_to_target), format_dollars(one.dollars(one.minutes_to_target))) if target else ()),
                "" if one.scaling_efficiency is None else f"{100 * one.scaling_efficiency:.0f} %", dominant_terms(one) or "nobody has measured this here",
            )
            for one in candidates
        ],
    )  # fmt: skip
    for name, some in group_by_type(candidates).items():
        if sentence := choose.diminishing_returns(some):
            print(f"{name}: {sentence}")
    if target:
        print("to target: until the epoch after which the recipe's source had met it; of a row without one, the whole")
    sources = dict.fromkeys(one.forecast.source for one in candidates if one.forecast)
    print("a machine's work: images a second of training beside one machine's of the first row of its type")
    print("spot: nobody knows beforehand; today's price: imgnet-cluster offers")
    print(f"constants: {', '.join(sources) or 'none'}; start is boot, set-up, fetch and the trainers' own")


def show_phase_forecasts(candidate: Candidate) -> None:
    """Print one forecast, a row for each phase, in seconds."""
    show_forecast_line(candidate)
    if candidate.forecast is None:
        return
    tables.print_table(
        ("epochs", "size", "batch", "seconds", *TERM_COLUMNS, "longest"),
        [
            (
                f"{one['start']}-{one['end']}", one["size"], one["batch"], f"{one['seconds']:.1f}",
                *(f"{one['terms'][name]:.1f}" for name in TERM_COLUMNS), one["most"],
            )
            for one in candidate.forecast.phase_rows()
        ],
    )  # fmt: skip
    parts = ", ".join(
        f"{name} {seconds:.0f}" for name, seconds in candidate.forecast.startup_seconds.items() if seconds
    )
    print(f"before the first step, in seconds: {parts or 'nothing'}; constants: {candidate.forecast.source}")


def show_forecast_line(candidate: Candidate) -> None:
    """Print a forecast in one line: minutes and prices of the whole, and until the target."""
    where = f"on {candidate.machines} x {candidate.machine_type.name}"
    if candidate.forecast is None:
        return print(f"forecast {where}: none, for nobody has measured this model on {candidate.machine_type.gpu}")
    cost = (
        ""
        if candidate.machine_type.on_demand_price == 0
        else f", {format_dollars(candidate.dollars(candidate.minutes))} on demand, spot {format_dollars(None)}"
    )
    target = (
        f"; to the target {format_minutes(candidate.minutes_to_target)} minutes" if candidate.epochs_to_target else ""
    )
    print(
        f"forecast {where}: {format_minutes(candidate.minutes)} minutes{cost}{target}; longest: {candidate.forecast.longest_term}"
    )


def show_choice(candidate: Candidate, command: str) -> None:
    """Print the row that was chosen, and the command that launches it."""
    print(
        f"take {candidate.machines} x {candidate.machine_type.name}: {format_minutes(candidate.minutes)} minutes, {format_dollars(candidate.dollars(candidate.minutes))}"
    )
    print(f"  {command}")


def show_forecast_vs_actual(rows: Sequence[Mapping[str, Any]], constants_source: str = "") -> None:
    """Print a forecast beside what the run took, term by term; the error of less than a second says nothing."""
    tables.print_table(
        ("forecast", "seconds", "took", "error"),
        [
            (
                one["term"], f"{one['forecast']:.1f}", f"{one['actual']:.1f}",
                "" if one["error"] is None or one["actual"] < 1 else f"{100 * one['error']:+.0f} %",
            )
            for one in rows
        ],
    )  # fmt: skip
    if constants_source:
        print(f"constants: {constants_source}; those of this run, next time: imgnet-cluster plan --from JOB")
