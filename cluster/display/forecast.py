"""What a person sees of forecasts: rows to choose from, one row term by term, and a forecast beside what came of it."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from cluster.planning import candidates, choose
from cluster.planning.candidates import Row

from . import tables
from .cloud import dollars

TERMS = ("compute", "all-reduce", "optimizer", "logging", "loader", "validation", "fixed")


def number(minutes: float | None) -> str:
    """Return minutes with three digits, "" when they are not known."""
    return "" if minutes is None else f"{minutes:.0f}" if minutes >= 100 else f"{minutes:.3g}"


def most(row: Row) -> str:
    """Return which term takes longest in which epochs, such as "loader 0-16, compute 16-38"."""
    if row.forecast is None:
        return ""
    told = [(phase["most"], phase["start"], phase["end"]) for phase in row.forecast.phases()]
    runs = [(name, list(some)) for name, some in groupby(told, key=lambda one: one[0])]
    return ", ".join(f"{name} {some[0][1]}-{some[-1][2]}" for name, some in runs)


def show_rows(found: Sequence[Row]) -> None:
    """Print a row for each type and number of machines, and where more of them stop being worth it."""
    target = any(one.epochs for one in found)
    columns = ["type", "machines", "GPUs", "minutes", "start", "on demand", "spot"]
    columns += ["to target", "for"] if target else []
    tables.table(
        [*columns, "a machine's work", "what takes longest, by epochs"],
        [
            (
                one.kind.name, one.machines, one.plan.spec.procs * one.machines, number(one.minutes),
                number(sum(one.forecast.start.values()) / 60) if one.forecast else "",
                dollars(one.dollars(one.minutes)), "?",
                *((number(one.to_target), dollars(one.dollars(one.to_target))) if target else ()),
                "" if one.share is None else f"{100 * one.share:.0f} %", most(one) or "nobody has measured this here",
            )
            for one in found
        ],
    )  # fmt: skip
    for name, some in candidates.by_type(found).items():
        if sentence := choose.knee(some):
            print(f"{name}: {sentence}")
    if target:
        print("to target: until the epoch after which the recipe's source had met it; of a row without one, the whole")
    sources = dict.fromkeys(one.forecast.source for one in found if one.forecast)
    print("a machine's work: images a second of training beside one machine's of the first row of its type")
    print("spot: nobody knows beforehand; today's price: imgnet-cluster offers")
    print(f"constants: {', '.join(sources) or 'none'}; start is boot, set-up, fetch and the trainers' own")


def show_phases(row: Row) -> None:
    """Print one forecast, a row for each phase, in seconds."""
    show_line(row)
    if row.forecast is None:
        return
    tables.table(
        ("epochs", "size", "batch", "seconds", *TERMS, "longest"),
        [
            (
                f"{one['start']}-{one['end']}", one["size"], one["batch"], f"{one['seconds']:.1f}",
                *(f"{one['terms'][name]:.1f}" for name in TERMS), one["most"],
            )
            for one in row.forecast.phases()
        ],
    )  # fmt: skip
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in row.forecast.start.items() if seconds)
    print(f"before the first step, in seconds: {parts or 'nothing'}; constants: {row.forecast.source}")


def show_line(row: Row) -> None:
    """Print a forecast in one line: minutes and prices of the whole, and until the target."""
    where = f"on {row.machines} x {row.kind.name}"
    if row.forecast is None:
        return print(f"forecast {where}: none, for nobody has measured this model on {row.kind.gpu}")
    cost = "" if row.kind.on_demand == 0 else f", {dollars(row.dollars(row.minutes))} on demand, spot {dollars(None)}"
    target = f"; to the target {number(row.to_target)} minutes" if row.epochs else ""
    print(f"forecast {where}: {number(row.minutes)} minutes{cost}{target}; longest: {row.forecast.most}")


def show_choice(row: Row, command: str) -> None:
    """Print the row that was chosen, and the command that launches it."""
    print(f"take {row.machines} x {row.kind.name}: {number(row.minutes)} minutes, {dollars(row.dollars(row.minutes))}")
    print(f"  {command}")


def show_against(rows: Sequence[Mapping[str, Any]], source: str = "") -> None:
    """Print a forecast beside what the run took, term by term; the error of less than a second says nothing."""
    tables.table(
        ("forecast", "seconds", "took", "error"),
        [
            (
                one["term"], f"{one['forecast']:.1f}", f"{one['actual']:.1f}",
                "" if one["error"] is None or one["actual"] < 1 else f"{100 * one['error']:+.0f} %",
            )
            for one in rows
        ],
    )  # fmt: skip
    if source:
        print(f"constants: {source}; those of this run, next time: imgnet-cluster plan --from JOB")
