"""A report: one page of HTML about a job, or about several side by side, that needs nothing but a browser.

markup      HTML that cannot be broken into           gather, lives   what there is to show, as plain data
draw        a drawing of matplotlib that lies in it   pictures        validation images, small
charts, timelines   what is drawn                     page, headline  what stands where, in the style of look
"""

from collections.abc import Sequence
from pathlib import Path

from cluster.errors import ClusterError
from cluster.jobs.job import Job
from train.tools.filesystem import write_atomic

REPORT_FILENAME = "report.html"  # in a run folder


def render_report(jobs: Sequence[Job]) -> str:
    """Return the page of these jobs. Raises `ClusterError` when a run folder is damaged, or nothing can be drawn."""
    from .facts import collect_facts
    from .page import render_page

    try:
        import matplotlib
    except ImportError as error:
        raise ClusterError(
            f"a report is drawn by matplotlib, which is missing here ({error}): pip install matplotlib"
        ) from error
    return render_page([collect_facts(one) for one in jobs])


def write_report(jobs: Sequence[Job], path: Path) -> Path:
    """Write the page; a reader sees the old one or the new. Raises `ClusterError`, `OSError`."""
    write_atomic(path, render_report(jobs).encode("utf-8", "replace"), durable=False)
    return path
