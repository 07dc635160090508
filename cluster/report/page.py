"""The page: one file of HTML with everything in it. It asks nobody for anything, and runs no script."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.plots import curves, machine_timeline, svg
from cluster.plots.curves import Chart, Facts
from train.data.order.rect_val import LONGEST
from train.metrics.text import PARTS, rates, span

from .html import Html, join, table, tag
from .style import CSS
from .summary import summary, tiles

# A browser that reads this fetches nothing and runs nothing, whatever stands in the page.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(found: Sequence[Facts]) -> str:
    """Return the page of one job, or of several side by side."""
    names = ", ".join(one["job"] for one in found)
    with svg.style():
        body = join(
            [_top(found), *_common(found), *(part for place in range(len(found)) for part in _own(found, place))]
        )
    head = join([
        Html('<meta charset="utf-8">'),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{names}: {', '.join(dict.fromkeys(one['status']['recipe'] for one in found))}"),
        tag("style", Html(CSS)),
    ])  # fmt: skip
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{tag("main", body)}</body>\n</html>\n'


def _top(found: Sequence[Facts]) -> Html:
    if len(found) > 1:
        return join([tag("h1", f"{len(found)} runs side by side"), summary(found)])
    [one] = found
    status = one["status"]
    state = tag("span", status["state"], class_=f"state {status['state']}")
    said = f"{one['model']}, images of {one['data']}, on {one['where']}"
    why = [tag("p", status[name]) for name in ("reason", "target") if status.get(name)]
    title = tag("h1", f"{status['recipe']} ", tag("span", one["job"], class_="soft"), " ", state)
    return join([title, tag("p", said, class_="soft"), *why, tiles(one)])


# --- what all jobs share --------------------------------------------------------------------------------------------


def _common(found: Sequence[Facts]) -> list[Html | None]:
    lines = curves.curves(found)
    said = "Nothing was trained yet." if not lines else ""
    if lines and not any(row.get("top1") is not None for one in found for row in one["epochs"]):
        said = "No validation yet."
    money = curves.dollars(found) if len(found) > 1 else None
    shown = [*lines, *([money] if money else [])]
    return [
        tag("h2", "Training"),
        tag("p", said, class_="soft") if said else None,
        tag("div", *map(figure, shown), class_="cards") if shown else None,
    ]


def figure(chart: Chart, wide: bool = False) -> Html:
    """Return a drawing in its card, with title and legend."""
    drawn = [Html(chart.svg)]
    if chart.narrow:
        drawn = [tag("div", Html(chart.svg), class_="broad"), tag("div", Html(chart.narrow), class_="narrow")]
    keys = [
        tag("li", tag("i", "✕" if one.mark == "cross" else "", class_=one.mark, style=f"--key: {_colour(one.colour)}"),
            one.name)
        for one in chart.keys
    ]  # fmt: skip
    note = tag("p", chart.note, class_="soft") if chart.note else None
    below = tag("ul", *keys, class_="keys") if keys else None
    return tag("figure", tag("figcaption", chart.title), *drawn, below, note, class_="card wide" if wide else "card")


def _colour(value: str) -> str:
    return f"var(--{svg.NAMES[value]})"


def card(*inside: Any, broad: bool = False) -> Html:
    """Return a card with something else in it; beside others a broad one has the most room."""
    return tag("div", *inside, class_="card ample" if broad else "card")


# --- of each job ----------------------------------------------------------------------------------------------------


def _own(found: Sequence[Facts], place: int) -> list[Html | None]:
    one, several = found[place], len(found) > 1
    name, same = one["job"], [other["job"] for other in found[:place] if other["images"] == one["images"]]
    machines, where, told = machine_timeline.machines(one, name), curves.where(one, name), curves.forecast(one, name)
    money = None if several else curves.dollars([one])
    cards = [
        *([figure(machines, wide=True)] if machines else []),
        *([figure(where)] if where else []),
        *_whole(one),
        *([figure(told)] if told else _told(one)),
        *_attempts(one),
        *([figure(money)] if money else []),
        *_spent(one),
    ]
    return [
        tag("h2", f"{name}: time, machines and money" if several else "Time, machines and money"),
        tag("div", *cards, class_="row"),
        tag("h2", f"{name}: schedule" if several else "Schedule"),
        card(*_schedule(one)),
        tag("h2", f"{name}: validation images" if several else "Validation images"),
        tag("p", f"the same as {same[0]}'s", class_="soft") if same else _images(one),
        tag("h2", f"{name}: provenance" if several else "Provenance"),
        card(table(("what", "value"), one["provenance"])),
    ]


def _attempts(one: Facts) -> list[Html]:
    rows = [
        (
            row["attempt"] if row["machines"] else "end", span(row["seconds"]), row["reason"],
            " ".join(row["machines"]), row["first_step"],
            "" if row["pause"] is None else f"{row['pause']:.1f}", row["steps_lost"],
        )
        for row in one["timeline"]
    ]  # fmt: skip
    columns = ("attempt", "at", "why", "machines", "from step", "pause, s", "steps lost")
    said = [place for place in range(len(columns)) if any(row[place] not in ("", None) for row in rows)]
    shown = [[row[place] for place in said] for row in rows]
    return [card(table([columns[place] for place in said], shown, "Attempts"), broad=True)] if rows else []


def _whole(one: Facts) -> list[Html]:
    where = one["status"].get("where")
    if not where:
        seconds = one["result"].get("seconds") or {}
        old = [(name, f"{value:.1f}") for name, value in seconds.items()]
        return [card(table(("part", "seconds"), old, "Where the time went"))] if old else []
    pauses = where.get("pauses", 0.0)
    wall = where["wall"] + pauses
    parts = [(PARTS.get(part, part), row["seconds"]) for part, row in where["parts"].items()]
    parts += [("pauses of losses", pauses)] * bool(pauses) + [("first step to last", wall)]
    rows = [(name, f"{seconds:.1f}", f"{100 * seconds / wall:.1f} %" if wall else "") for name, seconds in parts]
    start = where.get("start", {})
    before = f"before it {sum(start.values()):.1f}: " + ", ".join(f"{name} {took:.1f}" for name, took in start.items())
    below = tag("p", before, class_="soft") if start else None
    return [card(table(("part", "seconds", "share"), rows, "Where the time went"), below)]


def _told(one: Facts) -> list[Html]:
    """A forecast of which nothing can be drawn: one number."""
    told = one["forecast"]
    if not told:
        return []
    return [card(tag("h3", "Forecast"), tag("p", f"{told['minutes']:.3g} minutes (constants: {told['source']})"))]


def _spent(one: Facts) -> list[Html]:
    spent = one["dollars"]
    if not spent["machines"]:
        return []
    rows = [
        (row["name"], row["type"], row["market"], row["zone"], f"{row['seconds'] / 60:.1f}",
         "unknown" if row["dollars"] is None else f"{row['all']:.4f}", row["why"] if row["ended"] else "still there")
        for row in spent["machines"]
    ]  # fmt: skip
    columns = ("machine", "type", "market", "zone", "minutes", "dollars", "ended")
    unknown = f"; without {', '.join(spent['unknown'])}, whose price nobody knew" if spent["unknown"] else ""
    return [card(table(columns, rows, f"Dollars by machine: {spent['total']:.4f} in all{unknown}"), broad=True)]


def _schedule(one: Facts) -> list[Html]:
    columns = (
        "epochs",
        "side",
        "batch",
        "global",
        "rate",
        "per 256",
        "shape",
        "steps",
        "images from",
        "crop",
        "validation",
    )
    rows = [
        (
            f"{row['start']} to {row['end']}", f"{row['size']}{' in rectangles' if row.get('rect_train') else ''}",
            row["batch"], row["global_batch"], rates(row["lr"], row.get("peak", 0.0)),
            rates(row["lr_per_256"]), row["shape"], row["steps"],
            f"copy of {row['copy']}" if row["copy"] else "full size", f"{row['min_scale']} or more",
            ("rectangles" if row["rect_val"] else "square") + _validated(row),
        )
        for row in one["schedule"]
    ]  # fmt: skip
    epochs = [
        (
            row["epoch"], row["size"], row["global_batch"], row["lr"], _digits(row["train_loss"], 3),
            _digits(row["val_loss"], 3), _digits(row["top1"], 2), _digits(row["top5"], 2),
            _digits(row["seconds"], 1), _digits(row["images_per_second"], 0),
        )
        for row in one["epochs"]
    ]  # fmt: skip
    names = ("epoch", "side", "batch", "last rate", "loss", "val loss", "top-1, %", "top-5, %", "seconds", "images/s")
    each = tag("details", tag("summary", f"All {len(epochs)} epochs"), table(names, epochs)) if epochs else None
    return [table(columns, rows), *([each] if each else [])]


def _validated(row: Mapping[str, Any]) -> str:
    said = row.get("validate", "each")
    return "" if said == "each" else f", {said}"


def _digits(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _images(one: Facts) -> Html:
    if not one["images"]:
        return tag("p", "None was kept: no trainer came as far as that.", class_="soft")
    said = "What the validation of the last phase looks at, at its size: the square (solid)."
    if one["images"][0]["rectangle"]:
        said = (
            "What the validation of the last phase looks at, at its size: a rectangle (solid) of one of a few shapes, "
            f"at most {LONGEST:g} times as long as broad, so that part of a very tall or broad image is outside; "
            "dashed, the square centre crop."
        )
    return card(tag("p", said, class_="soft"), tag("div", *map(_image, one["images"]), class_="images"))


def _image(one: Mapping[str, Any]) -> Html:
    boxes = [("square", one["square"])] * bool(one["rectangle"]) + [("rectangle", one["rectangle"] or one["square"])]
    marks = [
        tag("rect", x=f"{100 * left:.2f}%", y=f"{100 * top:.2f}%", width=f"{100 * wide:.2f}%",
            height=f"{100 * high:.2f}%", class_=name)
        for kind, (left, top, wide, high) in boxes
        for name in ("under", kind)
    ]  # fmt: skip
    width, height = one["shown"]
    picture = tag("img", src=one["src"], width=width, height=height, alt=f"validation image, {one['label']}")
    pixels = f"{one['size'][0]} x {one['size'][1]}, seen as {one['pixels'][0]} x {one['pixels'][1]}"
    return tag(
        "figure", tag("div", picture, tag("svg", *marks, aria_hidden="true")), one["label"], Html("<br>"),
        tag("span", pixels, class_="soft"), class_="image",
    )  # fmt: skip
