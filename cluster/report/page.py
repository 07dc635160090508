"""The report page: one HTML file that contains everything. It requests nothing from the network and runs no script.

report.html.jinja says what the page shows, and takes tables and charts from the modules of this package. The template
escapes every text: names of classes, recipes and machines, and the reasons of failures, are texts of other people.
"""

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cluster.plots import figures
from train.data.order.rect_val import MAX_ASPECT_RATIO

from . import charts, job_tables, svg, tables
from .facts import JobFacts
from .machine_timeline import machines_chart

FOLDER = Path(__file__).parent  # of the template and of the style sheet
# A browser that obeys this policy fetches nothing and runs nothing, whatever the page contains.
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render_page(all_facts: Sequence[JobFacts]) -> str:
    """Return the page about one job, or about several side by side."""
    with figures.matplotlib_settings():
        return environment().get_template("report.html.jinja").render(jobs=all_facts)


def environment() -> Environment:
    """Return what renders the template: every text is escaped, and a name that does not exist is an error."""
    jinja = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else tables.display_text(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["css_color"] = lambda color: f"var(--{svg.CSS_VARIABLE_BY_COLOR[color]})"
    jinja.filters["data_uri"] = lambda jpeg: f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
    jinja.globals.update(
        charts=charts,
        machines_chart=machines_chart,
        tables=tables,
        job_tables=job_tables,
        css=Markup((FOLDER / "style.css").read_text()),
        content_security_policy=CONTENT_SECURITY_POLICY,
        max_aspect_ratio=f"{MAX_ASPECT_RATIO:g}",
    )
    return jinja
