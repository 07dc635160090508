"""The report page: one HTML file that contains everything. It requests nothing from the network and runs no script.

report.html.jinja says what the page shows, and takes tables and charts from the modules of this package. The template
escapes every text: names of classes, recipes and machines, and the reasons of failures, are texts of other people.

`python -m cluster.report.page RUN_FOLDER` writes the report of a job into its run folder. The supervisor runs this in a
process of its own when a job has ended, so that a failing report cannot harm the job.
"""

import base64
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cluster.jobs.job import Job
from cluster.plots import figures
from train.data.order.rect_val import MAX_ASPECT_RATIO
from train.tools.errors import one_line_error
from train.tools.files import write_atomic

from . import charts, tables
from .facts import collect_facts

REPORT_FILENAME = "report.html"  # in a run folder
FOLDER = Path(__file__).parent  # of the template and of the style sheet
# A browser that obeys this policy fetches nothing and runs nothing, whatever the page contains.
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render_report(jobs: Sequence[Job]) -> str:
    """Return the HTML page about one job, or several side by side. Raises `ClusterError` for a damaged run folder."""
    all_facts = []
    for job in jobs:
        with job.report_damaged_files():
            all_facts.append(collect_facts(job))
    with figures.matplotlib_settings():
        return environment().get_template("report.html.jinja").render(jobs=all_facts)


def write_report(jobs: Sequence[Job], path: Path) -> Path:
    """Write the page, which replaces an old one at once, and return its path. Raises `ClusterError`, `OSError`."""
    write_atomic(path, render_report(jobs).encode("utf-8", "replace"), durable=False)
    return path


def environment() -> Environment:
    """Return what renders the template: every text is escaped, and a name that does not exist is an error."""
    jinja = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else tables.format_cell(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["css_color"] = lambda color: f"var(--{figures.CSS_VARIABLE_BY_COLOR[color]})"
    jinja.filters["data_uri"] = lambda jpeg: f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
    jinja.globals.update(
        charts=charts,
        tables=tables,
        css=Markup((FOLDER / "style.css").read_text()),
        content_security_policy=CONTENT_SECURITY_POLICY,
        max_aspect_ratio=f"{MAX_ASPECT_RATIO:g}",
    )
    return jinja


def main() -> int:
    """Write the report. Return 0, or 1 with one line on stderr when it could not be written."""
    run_folder = Path(sys.argv[1])
    os.nice(10)  # jobs that still run on this computer come first
    try:
        write_report([Job(run_folder)], run_folder / REPORT_FILENAME)
    except Exception as error:  # the job has ended, and a missing report must not make it fail
        reason = f"{type(error).__name__}: {one_line_error(error)}"
        print(f"{run_folder.name}: no report was written: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
