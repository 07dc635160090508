"""The report page: one HTML file that contains everything. It requests nothing from the network and runs no script."""

from collections.abc import Sequence

from cluster.plots import curves, machine_timeline, svg
from cluster.plots.curves import Chart
from cluster.plots.job_facts import JobFacts, SampleImage
from cluster.state.job_result import JsonObject
from train.data.order.rect_val import MAX_ASPECT_RATIO
from train.metrics.text import PART_TITLES, format_duration, format_lr_range

from .html import Html, join, table, tag
from .style import CSS
from .summary import comparison_card, tiles

# A browser that obeys this policy fetches nothing and runs nothing, whatever the page contains.
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render_page(all_facts: Sequence[JobFacts]) -> str:
    """Return the page about one job, or about several side by side."""
    with svg.matplotlib_settings():
        sections = [section for index in range(len(all_facts)) for section in _job_sections(all_facts, index)]
        body = join([_header(all_facts), *_shared_charts(all_facts), *sections])
    job_names = ", ".join(facts.job for facts in all_facts)
    recipe_names = ", ".join(dict.fromkeys(facts.status.recipe for facts in all_facts))
    head = join(
        [
            Html('<meta charset="utf-8">'),
            tag("meta", http_equiv="Content-Security-Policy", content=CONTENT_SECURITY_POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{job_names}: {recipe_names}"),
            tag("style", Html(CSS)),
        ]
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{tag("main", body)}</body>\n</html>\n'


def _header(all_facts: Sequence[JobFacts]) -> Html:
    if len(all_facts) > 1:
        return join([tag("h1", f"{len(all_facts)} runs side by side"), comparison_card(all_facts)])
    [facts] = all_facts
    status = facts.status
    state = tag("span", status.state, class_=f"state {status.state}")
    title = tag("h1", f"{status.recipe} ", tag("span", facts.job, class_="soft"), " ", state)
    description = f"{facts.model}, images of {facts.data}, on {facts.backend}"
    notes = [tag("p", text) for text in (status.reason, status.target) if text]
    return join([title, tag("p", description, class_="soft"), *notes, tiles(facts)])


# --- charts of all jobs ---------------------------------------------------------------------------------------------


def _shared_charts(all_facts: Sequence[JobFacts]) -> list[Html | None]:
    charts = curves.training_charts(all_facts)
    has_validation = any(row.get("top1") is not None for facts in all_facts for row in facts.epochs)
    note = "" if has_validation else "No validation yet."
    if not charts:
        note = "Training has not started yet."
    if len(all_facts) > 1 and (cost_chart := curves.cost_chart(all_facts)):
        charts = [*charts, cost_chart]
    return [
        tag("h2", "Training"),
        tag("p", note, class_="soft") if note else None,
        tag("div", *map(chart_figure, charts), class_="cards") if charts else None,
    ]


def chart_figure(chart: Chart, is_wide: bool = False) -> Html:
    """Return a chart in its card, with title, legend and note."""
    drawings = [Html(chart.svg)]
    if chart.narrow_svg:
        drawings = [tag("div", Html(chart.svg), class_="broad"), tag("div", Html(chart.narrow_svg), class_="narrow")]
    legend_items = []
    for entry in chart.legend:
        mark = "✕" if entry.symbol == "cross" else ""
        symbol = tag("i", mark, class_=entry.symbol, style=f"--key: {_css_color(entry.color)}")
        legend_items.append(tag("li", symbol, entry.name))
    return tag(
        "figure",
        tag("figcaption", chart.title),
        *drawings,
        tag("ul", *legend_items, class_="keys") if legend_items else None,
        tag("p", chart.note, class_="soft") if chart.note else None,
        class_="card wide" if is_wide else "card",
    )


def _css_color(color: str) -> str:
    return f"var(--{svg.CSS_VARIABLE_BY_COLOR[color]})"


def card(*children: object, is_broad: bool = False) -> Html:
    """Return a card with any content. In a row of cards, a broad one gets the most room."""
    return tag("div", *children, class_="card ample" if is_broad else "card")


# --- sections of each job -------------------------------------------------------------------------------------------


def _job_sections(all_facts: Sequence[JobFacts], index: int) -> list[Html | None]:
    facts = all_facts[index]
    name = facts.job
    has_several_jobs = len(all_facts) > 1
    prefix = f"{name}: " if has_several_jobs else ""
    machines_chart = machine_timeline.machines_chart(facts, name)
    time_chart = curves.time_breakdown_chart(facts, name)
    forecast_chart = curves.forecast_chart(facts, name)
    cost_chart = None if has_several_jobs else curves.cost_chart([facts])
    cards = [
        *([chart_figure(machines_chart, is_wide=True)] if machines_chart else []),
        *([chart_figure(time_chart)] if time_chart else []),
        *_time_breakdown_card(facts),
        *([chart_figure(forecast_chart)] if forecast_chart else _forecast_card(facts)),
        *_attempts_card(facts),
        *([chart_figure(cost_chart)] if cost_chart else []),
        *_cost_card(facts),
    ]
    jobs_with_same_images = [
        earlier.job for earlier in all_facts[:index] if earlier.sample_images == facts.sample_images
    ]
    images_card = _sample_images_card(facts)
    if jobs_with_same_images:
        images_card = tag("p", f"the same as {jobs_with_same_images[0]}'s", class_="soft")
    return [
        _section_title(prefix, "Time, machines and cost"),
        tag("div", *cards, class_="row"),
        _section_title(prefix, "Schedule"),
        card(*_schedule_tables(facts)),
        _section_title(prefix, "Validation images"),
        images_card,
        _section_title(prefix, "Provenance"),
        card(table(("what", "value"), facts.provenance)),
    ]


def _section_title(prefix: str, title: str) -> Html:
    return tag("h2", prefix + (title[0].lower() + title[1:] if prefix else title))


def _attempts_card(facts: JobFacts) -> list[Html]:
    rows = [
        (
            row.attempt if row.machines else "end",
            format_duration(row.seconds),
            row.reason,
            " ".join(row.machines),
            row.first_step,
            "" if row.pause is None else f"{row.pause:.1f}",
            row.steps_lost,
        )
        for row in facts.timeline
    ]
    if not rows:
        return []
    columns = ("attempt", "at", "reason", "machines", "from step", "pause, s", "steps lost")
    filled_columns = [index for index in range(len(columns)) if any(row[index] not in ("", None) for row in rows)]
    filled_rows = [[row[index] for index in filled_columns] for row in rows]
    return [card(table([columns[index] for index in filled_columns], filled_rows, "Attempts"), is_broad=True)]


def _time_breakdown_card(facts: JobFacts) -> list[Html]:
    """Return a table of the time between the first step and the last by part; of an old run, its rougher division."""
    title = "Where the time went"
    breakdown = facts.status.where
    if not breakdown:
        seconds_by_state = facts.result.seconds if facts.result else {}
        old_rows = [(name, f"{value:.1f}") for name, value in seconds_by_state.items()]
        return [card(table(("part", "seconds"), old_rows, title))] if old_rows else []
    pauses = breakdown.get("pauses", 0.0)
    wall = breakdown["wall"] + pauses
    parts = [(PART_TITLES.get(part, part), row["seconds"]) for part, row in breakdown["parts"].items()]
    if pauses:
        parts.append(("pauses of losses", pauses))
    parts.append(("first step to last", wall))
    rows = [(name, f"{seconds:.1f}", f"{100 * seconds / wall:.1f} %" if wall else "") for name, seconds in parts]
    start = breakdown.get("start", {})
    start_parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.items())
    start_note = tag("p", f"before the first step {sum(start.values()):.1f}: {start_parts}", class_="soft")
    return [card(table(("part", "seconds", "share"), rows, title), start_note if start else None)]


def _forecast_card(facts: JobFacts) -> list[Html]:
    """Return the forecast as a single number, for a forecast without terms to draw."""
    forecast = facts.forecast
    if not forecast:
        return []
    text = f"{forecast['minutes']:.3g} minutes (constants: {forecast['source']})"
    return [card(tag("h3", "Forecast"), tag("p", text))]


def _cost_card(facts: JobFacts) -> list[Html]:
    cost = facts.cost
    if not cost.machines:
        return []
    rows = [
        (
            row["name"],
            row["type"],
            row["market"],
            row["zone"],
            f"{row['seconds'] / 60:.1f}",
            "unknown" if row["dollars"] is None else f"{row['all']:.4f}",
            row["why"] if row["ended"] else "still running",
        )
        for row in cost.machines
    ]
    columns = ("machine", "type", "market", "zone", "minutes", "dollars", "ended")
    unknown_note = f"; without {', '.join(cost.unknown)}, whose price is unknown" if cost.unknown else ""
    return [card(table(columns, rows, f"Dollars by machine: {cost.total:.4f} in total{unknown_note}"), is_broad=True)]


def _schedule_tables(facts: JobFacts) -> list[Html]:
    """Return the table of the phases and, where epochs have ended, the foldable table of the epochs."""
    phase_columns = (
        "epochs",
        "image size",
        "batch",
        "global",
        "learning rate",
        "per 256",
        "shape",
        "steps",
        "read from",
        "crop",
        "validation",
    )
    phase_rows = [
        (
            f"{row['start']} to {row['end']}",
            f"{row['size']}{' in rectangles' if row.get('rect_train') else ''}",
            row["batch"],
            row["global_batch"],
            format_lr_range(row["lr"], row.get("peak", 0.0)),
            format_lr_range(row["lr_per_256"]),
            row["shape"],
            row["steps"],
            f"copy of {row['copy']}" if row["copy"] else "full size",
            f"{row['min_scale']} or more",
            ("rectangles" if row["rect_val"] else "square") + _validation_note(row),
        )
        for row in facts.schedule
    ]
    phase_table = table(phase_columns, phase_rows)
    if not facts.epochs:
        return [phase_table]
    epoch_columns = (
        "epoch",
        "image size",
        "batch",
        "last rate",
        "loss",
        "val loss",
        "top-1, %",
        "top-5, %",
        "seconds",
        "images/s",
    )
    epoch_rows = [
        (
            row["epoch"],
            row["size"],
            row["global_batch"],
            row["lr"],
            _format_number(row["train_loss"], 3),
            _format_number(row["val_loss"], 3),
            _format_number(row["top1"], 2),
            _format_number(row["top5"], 2),
            _format_number(row["seconds"], 1),
            _format_number(row["images_per_second"], 0),
        )
        for row in facts.epochs
    ]
    summary_line = tag("summary", f"All {len(epoch_rows)} epochs")
    return [phase_table, tag("details", summary_line, table(epoch_columns, epoch_rows))]


def _validation_note(schedule_row: JsonObject) -> str:
    """Return when a phase validates, where that is not after each epoch."""
    policy = schedule_row.get("validate", "each")
    return "" if policy == "each" else f", {policy}"


def _format_number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _sample_images_card(facts: JobFacts) -> Html:
    images = facts.sample_images
    if not images:
        return tag("p", "There are none: no trainer has reached the point at which they are saved.", class_="soft")
    if images[0].rectangle:
        caption = (
            "What the validation of the last phase sees, at its image size. Solid: the rectangle, of one of a few "
            f"shapes, which is at most {MAX_ASPECT_RATIO:g} times as long as it is wide, so that parts of a very tall "
            "or wide image are outside. Dashed: the square center crop."
        )
    else:
        caption = "What the validation of the last phase sees, at its image size: the square (solid)."
    figures = tag("div", *map(_sample_image_figure, images), class_="images")
    return card(tag("p", caption, class_="soft"), figures)


def _sample_image_figure(sample_image: SampleImage) -> Html:
    boxes = [("rectangle", sample_image.rectangle or sample_image.square)]
    if sample_image.rectangle:
        boxes.insert(0, ("square", sample_image.square))
    frames = [
        tag(
            "rect",
            x=f"{100 * left:.2f}%",
            y=f"{100 * top:.2f}%",
            width=f"{100 * width:.2f}%",
            height=f"{100 * height:.2f}%",
            class_=frame_class,
        )
        for kind, (left, top, width, height) in boxes
        for frame_class in ("under", kind)  # a dark line below, so that the frame is visible on any image
    ]
    shown_width, shown_height = sample_image.shown
    image_width, image_height = sample_image.size
    crop_width, crop_height = sample_image.pixels
    picture = tag(
        "img",
        src=sample_image.src,
        width=shown_width,
        height=shown_height,
        alt=f"validation image, {sample_image.label}",
    )
    sizes = f"{image_width} x {image_height}, seen as {crop_width} x {crop_height}"
    return tag(
        "figure",
        tag("div", picture, tag("svg", *frames, aria_hidden="true")),
        sample_image.label,
        Html("<br>"),
        tag("span", sizes, class_="soft"),
        class_="image",
    )
