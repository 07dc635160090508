"""The charts of a report: what is drawn from the facts of one job, or of several side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from train.metrics.text import PART_TITLES

from . import svg as plots_svg
from .palette import SERIES_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JobFacts = Mapping[str, Any]
Points = Sequence[tuple[float, float]]
LINE_STYLES = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.5))}


@dataclass(frozen=True)
class LegendEntry:
    """One entry of a legend: a name, a colour, and its mark: a line ("solid", "dashed"), a "box" or a "cross"."""

    name: str
    colour: str
    symbol: str = "solid"


@dataclass(frozen=True)
class Chart:
    """A drawing as SVG with its title, legend and a word below; `narrow` is the same for a phone, "": it fits."""

    title: str
    svg: str
    legend: list[LegendEntry] = field(default_factory=list)
    note: str = ""
    narrow_svg: str = ""


@dataclass(frozen=True)
class Curve:
    """One curve."""

    legend_entry: LegendEntry
    points: Points
    is_step_plot: bool = False
    width: float = 1.8


def job_colour(index: int) -> str:
    """Return the colour of the job at this place."""
    return SERIES_COLOURS[index % len(SERIES_COLOURS)]


# --- curves ---------------------------------------------------------------------------------------------------------


def training_charts(all_facts: Sequence[JobFacts]) -> list[Chart]:
    """Return the charts over time and images, all jobs in each; those of which there is nothing yet are left out."""
    at, images = time_unit(_largest_value(all_facts, "at")), image_unit(_largest_value(all_facts, "images"))
    both = (("time", "at", at), ("images", "images", images))
    charts = [
        *(_curve_chart(f"acc-{name}", f"Accuracy over {name}", "percent", unit, _accuracy_curves(all_facts, key, unit))
          for name, key, unit in both),
        _curve_chart("loss", "Loss over images", "loss", images, _loss_curves(all_facts, images)),
        _curve_chart("rate", "Learning rate over images", "rate", images, _training_curves(all_facts, "lr", images), y_from_zero=True),
        _size_and_batch_chart(all_facts, images),
        _curve_chart("speed", "Images per second over time", "images/s", at, _speed_curves(all_facts, at), y_from_zero=True),
    ]  # fmt: skip
    return [one for one in charts if one]


def _largest_value(all_facts: Sequence[JobFacts], key: str) -> float:
    return max((row[key] for one in all_facts for row in (*one["train"], *one["epochs"])), default=0.0)


def time_unit(seconds: float) -> tuple[str, float]:
    """Return by which word and factor to say so many seconds."""
    return ("seconds", 1.0) if seconds < 180 else ("minutes", 60.0) if seconds < 4 * 3600 else ("hours", 3600.0)


def image_unit(images: float) -> tuple[str, float]:
    """Return by which word and factor to say so many images."""
    if images < 5000:
        return "images seen", 1.0
    return ("images seen, thousands", 1e3) if images < 5e6 else ("images seen, millions", 1e6)


def _accuracy_curves(all_facts: Sequence[JobFacts], x_column: str, unit: tuple[str, float]) -> list[Curve]:
    lines = []
    for place, one in enumerate(all_facts):
        for measure, mark in (("top1", "solid"), ("top5", "dashed")):
            name = measure.replace("top", "top-")
            of = job_colour(place if len(all_facts) > 1 else {"top1": 0, "top5": 1}[measure])
            label = f"{one['job']} {name}" if len(all_facts) > 1 else name
            rows = [(row[x_column] / unit[1], row[measure]) for row in one["epochs"] if row.get(measure) is not None]
            lines.append(Curve(LegendEntry(label, of, mark), rows))
    return lines


def _loss_curves(all_facts: Sequence[JobFacts], unit: tuple[str, float]) -> list[Curve]:
    lines = []
    for place, one in enumerate(all_facts):
        name = f"{one['job']} " if len(all_facts) > 1 else ""
        second = job_colour(place if len(all_facts) > 1 else 1)
        trained = [(row["images"] / unit[1], row["loss"]) for row in one["train"] if row["loss"] is not None]
        held = [(row["images"] / unit[1], row["val_loss"]) for row in one["epochs"] if row.get("val_loss") is not None]
        lines += [Curve(LegendEntry(f"{name}training", job_colour(place)), trained),
                  Curve(LegendEntry(f"{name}validation", second, "dashed"), held)]  # fmt: skip
    return lines


def _training_curves(
    all_facts: Sequence[JobFacts], column: str, unit: tuple[str, float], is_step_plot: bool = False
) -> list[Curve]:
    return [
        Curve(
            LegendEntry(one["job"], job_colour(place)),
            [(row["images"] / unit[1], row[column]) for row in one["train"] if row[column] is not None],
            is_step_plot,
            1.8 + 0.9 * min(2, len(all_facts) - 1 - place),  # of lines that cover each other all are seen
        )
        for place, one in enumerate(all_facts)
    ]


def _speed_curves(all_facts: Sequence[JobFacts], unit: tuple[str, float]) -> list[Curve]:
    """Images per second; between two attempts nothing was trained, and nothing is drawn."""
    lines = []
    for place, one in enumerate(all_facts):
        points: list[tuple[float, float]] = []
        before = None
        for row in (row for row in one["train"] if row["speed"] is not None):
            if before not in (None, row["attempt"]):
                points.append((row["at"] / unit[1], math.nan))
            points.append((row["at"] / unit[1], row["speed"]))
            before = row["attempt"]
        lines.append(Curve(LegendEntry(one["job"], job_colour(place)), points))
    return lines


def _curve_chart(
    name: str, title: str, y_label: str, unit: tuple[str, float], lines: Sequence[Curve], y_from_zero: bool = False
) -> Chart | None:
    shown = [one for one in lines if one.points]
    if not shown:
        return None
    figure, (axes,) = plots_svg.make_axes()
    _plot_curves(axes, shown)
    axes.set(xlabel=unit[0], ylabel=y_label)
    if y_from_zero:
        axes.set_ylim(bottom=0)
    keys = [one.legend_entry for one in shown]
    return Chart(title, plots_svg.figure_to_svg(figure, name, title), keys if len(keys) > 1 else [])


def _plot_curves(axes: "Axes", lines: Sequence[Curve]) -> None:
    end = max(x for one in lines for x, _ in one.points)
    for one in lines:
        x, y = zip(*one.points, strict=True)
        marked = short_piece_ends(one.points, 0.02 * end)
        if len(one.points) <= 40 and not one.is_step_plot:
            marked = list(range(len(one.points)))
        axes.plot(
            x, y, color=one.legend_entry.colour, linestyle=LINE_STYLES[one.legend_entry.symbol], marker="o" if marked else "",
            markevery=marked or None, drawstyle="steps-post" if one.is_step_plot else "default", linewidth=one.width,
        )  # fmt: skip
    axes.margins(x=0.02)
    axes.set_xlim(left=0)


def short_piece_ends(points: Points, min_length: float) -> list[int]:
    """Return which points end a piece of a curve that is less than so long: without a mark nobody would see it."""
    ends = [place for place, (_, y) in enumerate(points) if math.isnan(y)]
    pieces = [(begin + 1, end - 1) for begin, end in pairwise([-1, *ends, len(points)]) if end - begin > 1]
    return [last for first, last in pieces if points[last][0] - points[first][0] < min_length]


def _size_and_batch_chart(all_facts: Sequence[JobFacts], unit: tuple[str, float]) -> Chart | None:
    """Image side and global batch, one above the other."""
    sides, batches = (_training_curves(all_facts, name, unit, is_step_plot=True) for name in ("size", "batch"))
    if not any(one.points for one in (*sides, *batches)):
        return None
    figure, (above, below) = plots_svg.make_axes(rows=2)
    sides, batches = ([one for one in lines if one.points] for lines in (sides, batches))
    for axes, lines, label in ((above, sides, "side, pixels"), (below, batches, "global batch")):
        _plot_curves(axes, lines)
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.15 * max(y for one in lines for _, y in one.points))
    below.set_xlabel(unit[0])
    title = "Side and global batch over images"
    return Chart(
        title,
        plots_svg.figure_to_svg(figure, "sizes", title),
        [one.legend_entry for one in sides] if len(all_facts) > 1 else [],
    )


# --- of one job -----------------------------------------------------------------------------------------------------


def time_breakdown_chart(facts: JobFacts, name: str) -> Chart | None:
    """Return the seconds of each epoch, stacked by part; of an old run its training and validation only."""
    rows = [(row["epoch"], row.get("where") or _training_and_validation_seconds(row)) for row in facts["epochs"]]
    parts = [part for part in PART_TITLES if any(said.get(part, 0.0) > 0 for _, said in rows)]
    if not rows or not parts:
        return None
    figure, (axes,) = plots_svg.make_axes()
    numbers, floor = [number for number, _ in rows], [0.0] * len(rows)
    for part in parts:
        seconds = [max(0.0, said.get(part, 0.0)) for _, said in rows]
        axes.bar(numbers, seconds, bottom=floor, color=_part_colour(part), width=0.8)
        floor = [below + more for below, more in zip(floor, seconds, strict=True)]
    axes.set(xlabel="epoch", ylabel="seconds")
    axes.grid(visible=False, axis="x")
    axes.xaxis.get_major_locator().set_params(integer=True)
    title = "Where the seconds of each epoch went"
    keys = [LegendEntry(PART_TITLES[part], _part_colour(part), "box") for part in parts]
    return Chart(title, plots_svg.figure_to_svg(figure, f"{name}-where", title), keys)


def _training_and_validation_seconds(row: JobFacts) -> dict[str, float]:
    return {"steps": row.get("train_seconds") or 0.0, "validation": row.get("val_seconds") or 0.0}


def _part_colour(part: str) -> str:
    return SERIES_COLOURS[list(PART_TITLES).index(part)]


def forecast_chart(facts: JobFacts, name: str) -> Chart | None:
    """Return the time of each term, forecast above what it took, in numbers too; before the end the forecast only."""
    rows = [
        (row["term"], row["forecast"], row["actual"], row["error"]) for row in facts["against"] if row["term"] != "all"
    ]
    total = next((row for row in facts["against"] if row["term"] == "all"), None)
    if not rows and facts["forecast"]:
        rows = [(term, seconds, None, None) for term, seconds in facts["forecast"].get("terms", {}).items() if seconds]
    if not rows:
        return None
    figure, (axes,) = plots_svg.make_axes(height=0.8 + 0.42 * len(rows))
    unit, factor = time_unit(max(max(told, real or 0.0) for _, told, real, _ in rows))
    for place, (_, told, real, error) in enumerate(rows):
        _draw_bar(axes, place - 0.2, told / factor, SERIES_COLOURS[3])
        if real is not None:
            _draw_bar(axes, place + 0.2, real / factor, SERIES_COLOURS[0], format_forecast_error(real, error))
    axes.set(xlabel=unit, ylim=(len(rows) - 0.5, -0.5))
    axes.margins(x=0.26)
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.grid(visible=False, axis="y")
    keys = [LegendEntry("forecast", SERIES_COLOURS[3], "box")] + [LegendEntry("took", SERIES_COLOURS[0], "box")] * bool(
        facts["against"]
    )
    title = "Forecast and what it took" if facts["against"] else "Forecast"
    return Chart(
        title, plots_svg.figure_to_svg(figure, f"{name}-forecast", title), keys, _forecast_total_note(facts, total)
    )


def _draw_bar(axes: "Axes", y: float, length: float, fill_colour: str, suffix: str = "") -> None:
    axes.barh(y, length, height=0.36, color=fill_colour)
    axes.text(length, y, f" {length:.1f}{suffix and ', ' + suffix}", va="center", fontsize=8.5)


def format_forecast_error(actual: float | None, error: float | None) -> str:
    """Return by how much a forecast was off; of less than a second it says nothing."""
    return "" if error is None or not actual or actual < 1 else f"{100 * error:+.0f} %"


def _forecast_total_note(facts: JobFacts, total: JobFacts | None) -> str:
    """What the terms come to, and by whose measured constants it was told."""
    source = (facts["forecast"] or {}).get("source")
    told = f" (constants: {source})" if source else ""
    if not total:
        minutes = (facts["forecast"] or {}).get("minutes")
        return "" if minutes is None else f"{minutes:.3g} minutes in all{told}"
    forecast, real, error = total["forecast"], total["actual"], format_forecast_error(total["actual"], total["error"])
    how = f" ({error})" if error else ""
    unit, factor = time_unit(max(forecast, real))
    return f"in all {forecast / factor:.1f} {unit}{told}; it took {real / factor:.1f}{how}"


def cost_chart(all_facts: Sequence[JobFacts]) -> Chart | None:
    """Return what the jobs had cost by when, of those that cost something."""
    priced = [(place, one) for place, one in enumerate(all_facts) if one["dollars"]["over"]]
    if not priced:
        return None
    unit = time_unit(max(one["dollars"]["over"][-1][0] for _, one in priced))
    lines = [
        Curve(
            LegendEntry(one["job"], job_colour(place)), [(at / unit[1], spent) for at, spent in one["dollars"]["over"]]
        )
        for place, one in priced
    ]
    note = f"{unit[0]} since the first machine came; machines, disks and addresses"
    chart = _curve_chart("dollars", "Dollars spent over time", "dollars", unit, lines, y_from_zero=True)
    return chart and Chart(chart.title, chart.svg, chart.legend, note)
