"""`imgnet-cluster report`: the HTML report of a job, or of several jobs side by side."""

from pathlib import Path

import click

from .inspect import refresh


@click.command()
@click.argument("job", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to write.  [default: report.html in the run folder; for several jobs, in the folder of all runs]",
)
@click.option("--open", "open_browser", is_flag=True, help="Open the report in the browser.")
def report(job: tuple[str, ...], output: Path | None, open_browser: bool) -> None:
    """Write an HTML report about JOB (default: the newest job).

    Several jobs are shown side by side. The report is one file and needs no network. Jobs that are running, failed or
    were stopped have one too, of the data that exists so far.
    """
    from cluster import report as reports
    from cluster.jobs import store

    named_jobs = [store.find(name) for name in job] or [store.find()]
    jobs = list({found_job.name: found_job for found_job in named_jobs}.values())
    for found_job in jobs:
        refresh(found_job)
    folder = jobs[0].path if len(jobs) == 1 else store.runs_folder()
    path = reports.write_report(jobs, output or folder / reports.REPORT_FILENAME)
    click.echo(path)
    if open_browser and click.launch(str(path)):
        click.echo(f"warning: no browser could be started; open {path} in a browser", err=True)


COMMANDS = (report,)
