"""HTML report about one job, or about several jobs side by side: one file that needs nothing but a browser.

facts             collects what is known of a job, as plain data: activity, steps, sample_images
tables            the tables as text: job_tables, for the page only
charts            the charts as SVG: machine_timeline, svg
page              renders report.html.jinja, macros.html.jinja and style.css
"""

from collections.abc import Sequence
from pathlib import Path

from cluster.jobs.job import Job
from train.tools.files import write_atomic

REPORT_FILENAME = "report.html"  # in a run folder


def render_report(jobs: Sequence[Job]) -> str:
    """Return the HTML page about these jobs.

    Raises `ClusterError` when a run folder is damaged.
    """
    from .facts import collect_facts  # imported here: matplotlib and jinja2 are large
    from .page import render_page

    return render_page([collect_facts(job) for job in jobs])


def write_report(jobs: Sequence[Job], path: Path) -> Path:
    """Write the page and return its path. A reader sees the old page or the new one, never a part of it.

    Raises `ClusterError`, `OSError`.
    """
    write_atomic(path, render_report(jobs).encode("utf-8", "replace"), durable=False)
    return path
