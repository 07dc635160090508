"""`imgnet-cluster report`: what came of a job, or of several side by side, as one page for a browser."""

from pathlib import Path

import click

from .inspect import refresh


@click.command()
@click.argument("job", nargs=-1)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Where to. [default: report.html in the run folder; of several jobs in the folder of all]",
)  # fmt: skip
@click.option("--open", "show", is_flag=True, help="Show it in the browser.")
def report(job: tuple[str, ...], output: Path | None, open_browser: bool) -> None:
    """Write a page about JOB, or several side by side (default: the newest): one file, which needs no network.

    A job that runs, failed or was stopped has one too, of what there is so far.
    """
    from cluster import report as reports
    from cluster.jobs import store

    named = [store.find(one) for one in job] or [store.find()]
    found = list({one.name: one for one in named}.values())
    for one in found:
        refresh(one)
    place = found[0].path if len(found) == 1 else store.runs_folder()
    path = reports.write_report(found, output or place / reports.REPORT_FILENAME)
    click.echo(path)
    if open_browser and click.launch(str(path)):
        click.echo(f"warning: no browser could be started here; open {path} in one", err=True)


COMMANDS = (report,)
