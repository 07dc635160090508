"""The report page: one HTML file that contains everything. It requests nothing from the network and runs no script.

This module collects what the page shows; report.html.jinja says how it looks. The template escapes every text: names of
classes, recipes and machines, and the reasons of failures, are texts that other people wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cluster.plots import curves, figures, machine_timeline, svg
from cluster.plots.curves import Chart
from cluster.plots.job_facts import ConfusedClasses, JobFacts, SampleImage
from train.data.order.rect_val import MAX_ASPECT_RATIO

from . import tables
from .summary import Tile, comparison_table, tiles
from .tables import Table, display_text

FOLDER = Path(__file__).parent  # of the template and of the style sheet
# A browser that obeys this policy fetches nothing and runs nothing, whatever the page contains.
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True, kw_only=True)
class JobHeader:
    """The top of a page about one job."""

    recipe: str
    job: str
    state: str
    description: str
    notes: Sequence[str]  # the reason of the end, the outcome of the target
    tiles: Sequence[Tile]


@dataclass(frozen=True, kw_only=True)
class JobSections:
    """The sections of one job. What is None or empty is left out of the page."""

    prefix: str  # of the headings, on a page of several jobs
    machines_chart: Chart | None
    time_chart: Chart | None
    time_breakdown: Table | None
    start_note: str
    forecast_chart: Chart | None
    forecast_note: str  # instead of a chart
    attempts: Table | None
    cost_chart: Chart | None
    cost: Table | None
    phases: Table
    epochs: Table | None
    sample_images: Sequence[SampleImage]
    job_with_same_images: str
    worst_classes: Table | None
    errors: Table | None
    confused_classes: Sequence[ConfusedClasses]
    provenance: Table


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All that the page shows, about one job or about several side by side."""

    title: str
    header: JobHeader | None  # of a single job
    comparison: Table | None  # of several jobs
    training_note: str
    training_charts: Sequence[Chart]
    jobs: Sequence[JobSections]


def render_page(all_facts: Sequence[JobFacts]) -> str:
    """Return the page about one job, or about several side by side."""
    with figures.matplotlib_settings():
        report = report_data(all_facts)
    return environment().get_template("report.html.jinja").render(report=report)


def environment() -> Environment:
    """Return what renders the template: every text is escaped, and a name that does not exist is an error."""
    jinja = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else display_text(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["css_color"] = lambda color: f"var(--{svg.CSS_VARIABLE_BY_COLOR[color]})"
    jinja.globals.update(
        css=Markup((FOLDER / "style.css").read_text()),
        content_security_policy=CONTENT_SECURITY_POLICY,
        max_aspect_ratio=f"{MAX_ASPECT_RATIO:g}",
    )
    return jinja


def report_data(all_facts: Sequence[JobFacts]) -> ReportData:
    """Return what the page about these jobs shows."""
    job_names = ", ".join(facts.job for facts in all_facts)
    recipe_names = ", ".join(dict.fromkeys(facts.status.recipe for facts in all_facts))
    has_several_jobs = len(all_facts) > 1
    charts = curves.training_charts(all_facts)
    has_validation = any(epoch.result.top1 is not None for facts in all_facts for epoch in facts.epochs)
    note = "" if has_validation else "No validation yet."
    if not charts:
        note = "Training has not started yet."
        if all(not facts.schedule for facts in all_facts):
            note = (
                "A command of your own: its curves are what it writes to $IMGNET_EVENTS (imgnet-cluster tensorboard)."
            )
    if has_several_jobs and (cost_chart := curves.cost_chart(all_facts)):
        charts = [*charts, cost_chart]
    return ReportData(
        title=f"{job_names}: {recipe_names}",
        header=None if has_several_jobs else _job_header(all_facts[0]),
        comparison=comparison_table(all_facts) if has_several_jobs else None,
        training_note=note,
        training_charts=charts,
        jobs=[_job_sections(all_facts, index) for index in range(len(all_facts))],
    )


def _job_header(facts: JobFacts) -> JobHeader:
    status = facts.status
    return JobHeader(
        recipe=status.recipe,
        job=facts.job,
        state=status.state,
        description=f"{facts.model}{f', images of {facts.data}' if facts.data else ''}, on {facts.backend}",
        notes=[note for note in (status.reason, status.target) if note],
        tiles=tiles(facts),
    )


def _job_sections(all_facts: Sequence[JobFacts], index: int) -> JobSections:
    facts = all_facts[index]
    name = facts.job
    has_several_jobs = len(all_facts) > 1
    images = facts.sample_images
    jobs_with_same_images = [earlier.job for earlier in all_facts[:index] if earlier.sample_images == images]
    return JobSections(
        prefix=f"{name}: " if has_several_jobs else "",
        machines_chart=machine_timeline.machines_chart(facts, name),
        time_chart=curves.time_breakdown_chart(facts, name),
        time_breakdown=tables.time_breakdown_table(facts),
        start_note=_start_note(facts),
        forecast_chart=curves.forecast_chart(facts, name),
        forecast_note=_forecast_note(facts),
        attempts=tables.attempts_table(facts),
        cost_chart=None if has_several_jobs else curves.cost_chart([facts]),
        cost=tables.cost_table(facts),
        phases=tables.phases_table(facts),
        epochs=tables.epochs_table(facts),
        sample_images=images,
        job_with_same_images=next(iter(jobs_with_same_images), ""),
        worst_classes=tables.worst_classes_table(facts),
        errors=tables.errors_table(facts),
        confused_classes=facts.confused_classes,
        provenance=tables.make_table(("what", "value"), facts.provenance),
    )


def _start_note(facts: JobFacts) -> str:
    """Return a sentence on the time before the first step."""
    start = facts.status.where.start if facts.status.where else {}
    if not start:
        return ""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.items())
    return f"before the first step {sum(start.values()):.1f}: {parts}"


def _forecast_note(facts: JobFacts) -> str:
    """Return the forecast as a single number, for a forecast without terms to draw."""
    forecast = facts.forecast
    return f"{forecast.minutes:.3g} minutes (constants: {forecast.source})" if forecast else ""
