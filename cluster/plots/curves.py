"""The charts of a report: what is drawn from the facts of one job, or of several side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from train.metrics.text import PARTS

from . import svg as plots_svg
from .palette import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Facts = Mapping[str, Any]
Points = Sequence[tuple[float, float]]
DASHES = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.5))}


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a name, a colour, and its mark: a line ("solid", "dashed"), a "box" or a "cross"."""

    name: str
    colour: str
    mark: str = "solid"


@dataclass(frozen=True)
class Chart:
    """A drawing as SVG with its title, legend and a word below; `narrow` is the same for a phone, "": it fits."""

    title: str
    svg: str
    keys: list[Key] = field(default_factory=list)
    note: str = ""
    narrow: str = ""


@dataclass(frozen=True)
class Line:
    """One curve."""

    key: Key
    points: Points
    steps: bool = False
    width: float = 1.8


def colour(place: int) -> str:
    """Return the colour of the job at this place."""
    return COLOURS[place % len(COLOURS)]


# --- curves ---------------------------------------------------------------------------------------------------------


def curves(found: Sequence[Facts]) -> list[Chart]:
    """Return the charts over time and images, all jobs in each; those of which there is nothing yet are left out."""
    at, images = time_unit(_ends(found, "at")), image_unit(_ends(found, "images"))
    both = (("time", "at", at), ("images", "images", images))
    charts = [
        *(_curve(f"acc-{name}", f"Accuracy over {name}", "percent", unit, _accuracy(found, key, unit))
          for name, key, unit in both),
        _curve("loss", "Loss over images", "loss", images, _loss(found, images)),
        _curve("rate", "Learning rate over images", "rate", images, _steps(found, "lr", images), zero=True),
        _sizes(found, images),
        _curve("speed", "Images per second over time", "images/s", at, _speed(found, at), zero=True),
    ]  # fmt: skip
    return [one for one in charts if one]


def _ends(found: Sequence[Facts], key: str) -> float:
    return max((row[key] for one in found for row in (*one["train"], *one["epochs"])), default=0.0)


def time_unit(seconds: float) -> tuple[str, float]:
    """Return by which word and factor to say so many seconds."""
    return ("seconds", 1.0) if seconds < 180 else ("minutes", 60.0) if seconds < 4 * 3600 else ("hours", 3600.0)


def image_unit(images: float) -> tuple[str, float]:
    """Return by which word and factor to say so many images."""
    if images < 5000:
        return "images seen", 1.0
    return ("images seen, thousands", 1e3) if images < 5e6 else ("images seen, millions", 1e6)


def _accuracy(found: Sequence[Facts], key: str, unit: tuple[str, float]) -> list[Line]:
    lines = []
    for place, one in enumerate(found):
        for measure, mark in (("top1", "solid"), ("top5", "dashed")):
            name = measure.replace("top", "top-")
            of = colour(place if len(found) > 1 else {"top1": 0, "top5": 1}[measure])
            label = f"{one['job']} {name}" if len(found) > 1 else name
            rows = [(row[key] / unit[1], row[measure]) for row in one["epochs"] if row.get(measure) is not None]
            lines.append(Line(Key(label, of, mark), rows))
    return lines


def _loss(found: Sequence[Facts], unit: tuple[str, float]) -> list[Line]:
    lines = []
    for place, one in enumerate(found):
        name = f"{one['job']} " if len(found) > 1 else ""
        second = colour(place if len(found) > 1 else 1)
        trained = [(row["images"] / unit[1], row["loss"]) for row in one["train"] if row["loss"] is not None]
        held = [(row["images"] / unit[1], row["val_loss"]) for row in one["epochs"] if row.get("val_loss") is not None]
        lines += [Line(Key(f"{name}training", colour(place)), trained),
                  Line(Key(f"{name}validation", second, "dashed"), held)]  # fmt: skip
    return lines


def _steps(found: Sequence[Facts], name: str, unit: tuple[str, float], steps: bool = False) -> list[Line]:
    return [
        Line(
            Key(one["job"], colour(place)),
            [(row["images"] / unit[1], row[name]) for row in one["train"] if row[name] is not None],
            steps,
            1.8 + 0.9 * min(2, len(found) - 1 - place),  # of lines that cover each other all are seen
        )
        for place, one in enumerate(found)
    ]


def _speed(found: Sequence[Facts], unit: tuple[str, float]) -> list[Line]:
    """Images per second; between two attempts nothing was trained, and nothing is drawn."""
    lines = []
    for place, one in enumerate(found):
        points: list[tuple[float, float]] = []
        before = None
        for row in (row for row in one["train"] if row["speed"] is not None):
            if before not in (None, row["attempt"]):
                points.append((row["at"] / unit[1], math.nan))
            points.append((row["at"] / unit[1], row["speed"]))
            before = row["attempt"]
        lines.append(Line(Key(one["job"], colour(place)), points))
    return lines


def _curve(
    name: str, title: str, label: str, unit: tuple[str, float], lines: Sequence[Line], zero: bool = False
) -> Chart | None:
    shown = [one for one in lines if one.points]
    if not shown:
        return None
    figure, (axes,) = plots_svg.axes()
    _plot(axes, shown)
    axes.set(xlabel=unit[0], ylabel=label)
    if zero:
        axes.set_ylim(bottom=0)
    keys = [one.key for one in shown]
    return Chart(title, plots_svg.svg(figure, name, title), keys if len(keys) > 1 else [])


def _plot(axes: "Axes", lines: Sequence[Line]) -> None:
    end = max(x for one in lines for x, _ in one.points)
    for one in lines:
        x, y = zip(*one.points, strict=True)
        marked = lone(one.points, 0.02 * end)
        if len(one.points) <= 40 and not one.steps:
            marked = list(range(len(one.points)))
        axes.plot(
            x, y, color=one.key.colour, linestyle=DASHES[one.key.mark], marker="o" if marked else "",
            markevery=marked or None, drawstyle="steps-post" if one.steps else "default", linewidth=one.width,
        )  # fmt: skip
    axes.margins(x=0.02)
    axes.set_xlim(left=0)


def lone(points: Points, least: float) -> list[int]:
    """Return which points end a piece of a curve that is less than so long: without a mark nobody would see it."""
    ends = [place for place, (_, y) in enumerate(points) if math.isnan(y)]
    pieces = [(begin + 1, end - 1) for begin, end in pairwise([-1, *ends, len(points)]) if end - begin > 1]
    return [last for first, last in pieces if points[last][0] - points[first][0] < least]


def _sizes(found: Sequence[Facts], unit: tuple[str, float]) -> Chart | None:
    """Image side and global batch, one above the other."""
    sides, batches = (_steps(found, name, unit, steps=True) for name in ("size", "batch"))
    if not any(one.points for one in (*sides, *batches)):
        return None
    figure, (above, below) = plots_svg.axes(rows=2)
    sides, batches = ([one for one in lines if one.points] for lines in (sides, batches))
    for axes, lines, label in ((above, sides, "side, pixels"), (below, batches, "global batch")):
        _plot(axes, lines)
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.15 * max(y for one in lines for _, y in one.points))
    below.set_xlabel(unit[0])
    title = "Side and global batch over images"
    return Chart(title, plots_svg.svg(figure, "sizes", title), [one.key for one in sides] if len(found) > 1 else [])


# --- of one job -----------------------------------------------------------------------------------------------------


def where(one: Facts, name: str) -> Chart | None:
    """Return the seconds of each epoch, stacked by part; of an old run its training and validation only."""
    rows = [(row["epoch"], row.get("where") or _two_parts(row)) for row in one["epochs"]]
    parts = [part for part in PARTS if any(said.get(part, 0.0) > 0 for _, said in rows)]
    if not rows or not parts:
        return None
    figure, (axes,) = plots_svg.axes()
    numbers, floor = [number for number, _ in rows], [0.0] * len(rows)
    for part in parts:
        seconds = [max(0.0, said.get(part, 0.0)) for _, said in rows]
        axes.bar(numbers, seconds, bottom=floor, color=_part_colour(part), width=0.8)
        floor = [below + more for below, more in zip(floor, seconds, strict=True)]
    axes.set(xlabel="epoch", ylabel="seconds")
    axes.grid(visible=False, axis="x")
    axes.xaxis.get_major_locator().set_params(integer=True)
    title = "Where the seconds of each epoch went"
    keys = [Key(PARTS[part], _part_colour(part), "box") for part in parts]
    return Chart(title, plots_svg.svg(figure, f"{name}-where", title), keys)


def _two_parts(row: Facts) -> dict[str, float]:
    return {"steps": row.get("train_seconds") or 0.0, "validation": row.get("val_seconds") or 0.0}


def _part_colour(part: str) -> str:
    return COLOURS[list(PARTS).index(part)]


def forecast(one: Facts, name: str) -> Chart | None:
    """Return the time of each term, forecast above what it took, in numbers too; before the end the forecast only."""
    rows = [
        (row["term"], row["forecast"], row["actual"], row["error"]) for row in one["against"] if row["term"] != "all"
    ]
    total = next((row for row in one["against"] if row["term"] == "all"), None)
    if not rows and one["forecast"]:
        rows = [(term, seconds, None, None) for term, seconds in one["forecast"].get("terms", {}).items() if seconds]
    if not rows:
        return None
    figure, (axes,) = plots_svg.axes(height=0.8 + 0.42 * len(rows))
    unit, factor = time_unit(max(max(told, real or 0.0) for _, told, real, _ in rows))
    for place, (_, told, real, error) in enumerate(rows):
        _bar(axes, place - 0.2, told / factor, COLOURS[3])
        if real is not None:
            _bar(axes, place + 0.2, real / factor, COLOURS[0], off(real, error))
    axes.set(xlabel=unit, ylim=(len(rows) - 0.5, -0.5))
    axes.margins(x=0.26)
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.grid(visible=False, axis="y")
    keys = [Key("forecast", COLOURS[3], "box")] + [Key("took", COLOURS[0], "box")] * bool(one["against"])
    title = "Forecast and what it took" if one["against"] else "Forecast"
    return Chart(title, plots_svg.svg(figure, f"{name}-forecast", title), keys, _in_all(one, total))


def _bar(axes: "Axes", place: float, length: float, of: str, more: str = "") -> None:
    axes.barh(place, length, height=0.36, color=of)
    axes.text(length, place, f" {length:.1f}{more and ', ' + more}", va="center", fontsize=8.5)


def off(real: float | None, error: float | None) -> str:
    """Return by how much a forecast was off; of less than a second it says nothing."""
    return "" if error is None or not real or real < 1 else f"{100 * error:+.0f} %"


def _in_all(one: Facts, total: Facts | None) -> str:
    """What the terms come to, and by whose measured constants it was told."""
    source = (one["forecast"] or {}).get("source")
    told = f" (constants: {source})" if source else ""
    if not total:
        minutes = (one["forecast"] or {}).get("minutes")
        return "" if minutes is None else f"{minutes:.3g} minutes in all{told}"
    forecast, real, error = total["forecast"], total["actual"], off(total["actual"], total["error"])
    how = f" ({error})" if error else ""
    unit, factor = time_unit(max(forecast, real))
    return f"in all {forecast / factor:.1f} {unit}{told}; it took {real / factor:.1f}{how}"


def dollars(found: Sequence[Facts]) -> Chart | None:
    """Return what the jobs had cost by when, of those that cost something."""
    priced = [(place, one) for place, one in enumerate(found) if one["dollars"]["over"]]
    if not priced:
        return None
    unit = time_unit(max(one["dollars"]["over"][-1][0] for _, one in priced))
    lines = [
        Line(Key(one["job"], colour(place)), [(at / unit[1], spent) for at, spent in one["dollars"]["over"]])
        for place, one in priced
    ]
    note = f"{unit[0]} since the first machine came; machines, disks and addresses"
    chart = _curve("dollars", "Dollars spent over time", "dollars", unit, lines, zero=True)
    return chart and Chart(chart.title, chart.svg, chart.keys, note)
