"""The page: one file of HTML with everything in it. It asks nobody for anything, and runs no script."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.plots import curves, machine_timeline, svg
from cluster.plots.curves import Chart, JobFacts
from train.data.order.rect_val import MAX_ASPECT_RATIO
from train.metrics.text import PART_TITLES, format_duration, format_lr_range

from .html import Html, join, table, tag
from .style import CSS
from .summary import comparison_card, tiles

# A browser that reads this fetches nothing and runs nothing, whatever stands in the page.
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render_page(all_facts: Sequence[JobFacts]) -> str:
    """Return the page of one job, or of several side by side."""
    names = ", ".join(one["job"] for one in all_facts)
    with svg.matplotlib_settings():
        body = join(
            [
                _header(all_facts),
                *_shared_charts(all_facts),
                *(part for place in range(len(all_facts)) for part in _job_sections(all_facts, place)),
            ]
        )
    head = join([
        Html('<meta charset="utf-8">'),
        tag("meta", http_equiv="Content-Security-Policy", content=CONTENT_SECURITY_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{names}: {', '.join(dict.fromkeys(one['status']['recipe'] for one in all_facts))}"),
        tag("style", Html(CSS)),
    ])  # fmt: skip
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{tag("main", body)}</body>\n</html>\n'


def _header(all_facts: Sequence[JobFacts]) -> Html:
    if len(all_facts) > 1:
        return join([tag("h1", f"{len(all_facts)} runs side by side"), comparison_card(all_facts)])
    [one] = all_facts
    status = one["status"]
    state = tag("span", status["state"], class_=f"state {status['state']}")
    said = f"{one['model']}, images of {one['data']}, on {one['where']}"
    why = [tag("p", status[name]) for name in ("reason", "target") if status.get(name)]
    title = tag("h1", f"{status['recipe']} ", tag("span", one["job"], class_="soft"), " ", state)
    return join([title, tag("p", said, class_="soft"), *why, tiles(one)])


# --- what all jobs share --------------------------------------------------------------------------------------------


def _shared_charts(all_facts: Sequence[JobFacts]) -> list[Html | None]:
    lines = curves.training_charts(all_facts)
    said = "Nothing was trained yet." if not lines else ""
    if lines and not any(row.get("top1") is not None for one in all_facts for row in one["epochs"]):
        said = "No validation yet."
    money = curves.cost_chart(all_facts) if len(all_facts) > 1 else None
    shown = [*lines, *([money] if money else [])]
    return [
        tag("h2", "Training"),
        tag("p", said, class_="soft") if said else None,
        tag("div", *map(chart_figure, shown), class_="cards") if shown else None,
    ]


def chart_figure(chart: Chart, is_wide: bool = False) -> Html:
    """Return a drawing in its card, with title and legend."""
    drawn = [Html(chart.svg)]
    if chart.narrow_svg:
        drawn = [tag("div", Html(chart.svg), class_="broad"), tag("div", Html(chart.narrow_svg), class_="narrow")]
    keys = [
        tag("li", tag("i", "✕" if one.symbol == "cross" else "", class_=one.symbol, style=f"--key: {_css_colour(one.colour)}"),
            one.name)
        for one in chart.legend
    ]  # fmt: skip
    note = tag("p", chart.note, class_="soft") if chart.note else None
    below = tag("ul", *keys, class_="keys") if keys else None
    return tag("figure", tag("figcaption", chart.title), *drawn, below, note, class_="card wide" if is_wide else "card")


def _css_colour(value: str) -> str:
    return f"var(--{svg.CSS_VARIABLE_BY_COLOUR[value]})"


def card(*children: Any, is_broad: bool = False) -> Html:
    """Return a card with something else in it; beside others a broad one has the most room."""
    return tag("div", *children, class_="card ample" if is_broad else "card")


# --- of each job ----------------------------------------------------------------------------------------------------


def _job_sections(all_facts: Sequence[JobFacts], index: int) -> list[Html | None]:
    one, several = all_facts[index], len(all_facts) > 1
    name, same = one["job"], [other["job"] for other in all_facts[:index] if other["images"] == one["images"]]
    machines, where, told = (
        machine_timeline.machines_chart(one, name),
        curves.time_breakdown_chart(one, name),
        curves.forecast_chart(one, name),
    )
    money = None if several else curves.cost_chart([one])
    cards = [
        *([chart_figure(machines, is_wide=True)] if machines else []),
        *([chart_figure(where)] if where else []),
        *_time_breakdown_card(one),
        *([chart_figure(told)] if told else _forecast_card(one)),
        *_attempts_card(one),
        *([chart_figure(money)] if money else []),
        *_cost_card(one),
    ]
    return [
        tag("h2", f"{name}: time, machines and money" if several else "Time, machines and money"),
        tag("div", *cards, class_="row"),
        tag("h2", f"{name}: schedule" if several else "Schedule"),
        card(*_schedule_tables(one)),
        tag("h2", f"{name}: validation images" if several else "Validation images"),
        tag("p", f"the same as {same[0]}'s", class_="soft") if same else _sample_images_card(one),
        tag("h2", f"{name}: provenance" if several else "Provenance"),
        card(table(("what", "value"), one["provenance"])),
    ]


def _attempts_card(facts: JobFacts) -> list[Html]:
    rows = [
        (
            row["attempt"] if row["machines"] else "end", format_duration(row["seconds"]), row["reason"],
            " ".join(row["machines"]), row["first_step"],
            "" if row["pause"] is None else f"{row['pause']:.1f}", row["steps_lost"],
        )
        for row in facts["timeline"]
    ]  # fmt: skip
    columns = ("attempt", "at", "why", "machines", "from step", "pause, s", "steps lost")
    said = [place for place in range(len(columns)) if any(row[place] not in ("", None) for row in rows)]
    shown = [[row[place] for place in said] for row in rows]
    return [card(table([columns[place] for place in said], shown, "Attempts"), is_broad=True)] if rows else []


def _time_breakdown_card(facts: JobFacts) -> list[Html]:
    where = facts["status"].get("where")
    if not where:
        seconds = facts["result"].get("seconds") or {}
        old = [(name, f"{value:.1f}") for name, value in seconds.items()]
        return [card(table(("part", "seconds"), old, "Where the time went"))] if old else []
    pauses = where.get("pauses", 0.0)
    wall = where["wall"] + pauses
    parts = [(PART_TITLES.get(part, part), row["seconds"]) for part, row in where["parts"].items()]
    parts += [("pauses of losses", pauses)] * bool(pauses) + [("first step to last", wall)]
    rows = [(name, f"{seconds:.1f}", f"{100 * seconds / wall:.1f} %" if wall else "") for name, seconds in parts]
    start = where.get("start", {})
    before = f"before it {sum(start.values()):.1f}: " + ", ".join(f"{name} {took:.1f}" for name, took in start.items())
    below = tag("p", before, class_="soft") if start else None
    return [card(table(("part", "seconds", "share"), rows, "Where the time went"), below)]


def _forecast_card(facts: JobFacts) -> list[Html]:
    """A forecast of which nothing can be drawn: one number."""
    told = facts["forecast"]
    if not told:
        return []
    return [card(tag("h3", "Forecast"), tag("p", f"{told['minutes']:.3g} minutes (constants: {told['source']})"))]


def _cost_card(facts: JobFacts) -> list[Html]:
    spent = facts["dollars"]
    if not spent["machines"]:
        return []
    rows = [
        (row["name"], row["type"], row["market"], row["zone"], f"{row['seconds'] / 60:.1f}",
         "unknown" if row["dollars"] is None else f"{row['all']:.4f}", row["why"] if row["ended"] else "still there")
        for row in spent["machines"]
    ]  # fmt: skip
    columns = ("machine", "type", "market", "zone", "minutes", "dollars", "ended")
    unknown = f"; without {', '.join(spent['unknown'])}, whose price nobody knew" if spent["unknown"] else ""
    return [card(table(columns, rows, f"Dollars by machine: {spent['total']:.4f} in all{unknown}"), is_broad=True)]


def _schedule_tables(facts: JobFacts) -> list[Html]:
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
            row["batch"], row["global_batch"], format_lr_range(row["lr"], row.get("peak", 0.0)),
            format_lr_range(row["lr_per_256"]), row["shape"], row["steps"],
            f"copy of {row['copy']}" if row["copy"] else "full size", f"{row['min_scale']} or more",
            ("rectangles" if row["rect_val"] else "square") + _validation_note(row),
        )
        for row in facts["schedule"]
    ]  # fmt: skip
    epochs = [
        (
            row["epoch"], row["size"], row["global_batch"], row["lr"], _format_number(row["train_loss"], 3),
            _format_number(row["val_loss"], 3), _format_number(row["top1"], 2), _format_number(row["top5"], 2),
            _format_number(row["seconds"], 1), _format_number(row["images_per_second"], 0),
        )
        for row in facts["epochs"]
    ]  # fmt: skip
    names = ("epoch", "side", "batch", "last rate", "loss", "val loss", "top-1, %", "top-5, %", "seconds", "images/s")
    each = tag("details", tag("summary", f"All {len(epochs)} epochs"), table(names, epochs)) if epochs else None
    return [table(columns, rows), *([each] if each else [])]


def _validation_note(schedule_row: Mapping[str, Any]) -> str:
    said = schedule_row.get("validate", "each")
    return "" if said == "each" else f", {said}"


def _format_number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _sample_images_card(facts: JobFacts) -> Html:
    if not facts["images"]:
        return tag("p", "None was kept: no trainer came as far as that.", class_="soft")
    said = "What the validation of the last phase looks at, at its size: the square (solid)."
    if facts["images"][0]["rectangle"]:
        said = (
            "What the validation of the last phase looks at, at its size: a rectangle (solid) of one of a few shapes, "
            f"at most {MAX_ASPECT_RATIO:g} times as long as broad, so that part of a very tall or broad image is outside; "
            "dashed, the square centre crop."
        )
    return card(tag("p", said, class_="soft"), tag("div", *map(_sample_image_figure, facts["images"]), class_="images"))


def _sample_image_figure(sample_image: Mapping[str, Any]) -> Html:
    boxes = [("square", sample_image["square"])] * bool(sample_image["rectangle"]) + [
        ("rectangle", sample_image["rectangle"] or sample_image["square"])
    ]
    marks = [
        tag("rect", x=f"{100 * left:.2f}%", y=f"{100 * top:.2f}%", width=f"{100 * wide:.2f}%",
            height=f"{100 * high:.2f}%", class_=name)
        for kind, (left, top, wide, high) in boxes
        for name in ("under", kind)
    ]  # fmt: skip
    width, height = sample_image["shown"]
    picture = tag(
        "img", src=sample_image["src"], width=width, height=height, alt=f"validation image, {sample_image['label']}"
    )
    pixels = f"{sample_image['size'][0]} x {sample_image['size'][1]}, seen as {sample_image['pixels'][0]} x {sample_image['pixels'][1]}"
    return tag(
        "figure", tag("div", picture, tag("svg", *marks, aria_hidden="true")), sample_image["label"], Html("<br>"),
        tag("span", pixels, class_="soft"), class_="image",
    )  # fmt: skip
