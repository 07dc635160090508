"""A report: one page of HTML about a job, or about several side by side, that needs nothing but a browser.

markup      HTML that cannot be broken into           gather, lives   what there is to show, as plain data
draw        a drawing of matplotlib that lies in it   pictures        validation images, small
charts, timelines   what is drawn                     page, headline  what stands where, in the style of look
"""

from collections.abc import Sequence
from pathlib import Path

from cluster.errors import ClusterError
from cluster.jobs.job import Job
from train.tools.filesystem import replace

NAME = "report.html"  # in a run folder


def report(jobs: Sequence[Job]) -> str:
    """Return the page of these jobs. Raises `ClusterError` when a run folder is damaged, or nothing can be drawn."""
    from .facts import facts
    from .page import page

    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ClusterError(
            f"a report is drawn by matplotlib, which is missing here ({error}): pip install matplotlib"
        ) from error
    return page([facts(one) for one in jobs])


def write(jobs: Sequence[Job], path: Path) -> Path:
    """Write the page; a reader sees the old one or the new. Raises `ClusterError`, `OSError`."""
    replace(path, report(jobs).encode("utf-8", "replace"), durable=False)
    return path
