"""The commands `report` and `record`: the HTML report of jobs, and a run as DAWNBench's and MLPerf's records."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from cluster.errors import BadInput, ClusterError
from train.tools.records import MALFORMED_DATA_ERRORS

from .inspect import refresh
from .options import OUTPUT_FORMATS, flag, warn

SUFFIXES = (".tsv", ".json", ".log")  # of DAWNBench's table and entry, and of MLPerf's log


class OutputFile(click.Path):
    """A file that a command writes. The formats that `-o` of other commands takes are refused: nobody means a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # Any: as click
        """Return the path. Fails as click's types do."""
        if str(value) in OUTPUT_FORMATS:
            self.fail(f"of this command -o names the file to write; a file of this name is ./{value}", param, ctx)
        return super().convert(value, param, ctx)


@click.command()
@click.argument("job", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=OutputFile(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to write.  [default: report.html in the run folder; for several jobs, in the folder of all runs]",
)
@flag("Options", "--open", "open_browser", help="Open the report in the browser.")
def report(job: tuple[str, ...], output: Path | None, open_browser: bool) -> None:
    """Write an HTML report about JOB (default: the newest job).

    Several jobs are shown side by side. The report is one file and needs no network. Jobs that are running, failed or
    were stopped have one too, of the data that exists so far.
    """
    from cluster.jobs import store
    from cluster.report import page

    named_jobs = [store.find(name) for name in job] or [store.find()]
    jobs = list({found_job.name: found_job for found_job in named_jobs}.values())
    for found_job in jobs:
        refresh(found_job)
    folder = jobs[0].path if len(jobs) == 1 else store.runs_folder()
    path = page.write_report(jobs, output or folder / page.REPORT_FILENAME)
    click.echo(path)
    # Without a display, xdg-open tries all it knows, and fails with noise.
    has_display = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    if open_browser and not (has_display and click.launch(str(path)) == 0):
        warn(f"no browser could be started here; copy the file to a computer with one: {path}")


@click.command()
@click.argument("job", required=False)
@click.option(
    "-o",
    "--output",
    "output_path",
    type=OutputFile(path_type=Path),
    metavar="FILE",
    help="File to write: x.tsv, x.json or x.log. A name without these endings writes all three.  [default: the first, "
    "to stdout]",
)
@click.option(
    "--author", metavar="NAME", help="Author of the record, written into the JSON record and into MLPerf's log."
)
def record(job: str | None, output_path: Path | None, author: str | None) -> None:
    """Write a benchmark record of JOB (default: the newest job).

    It contains hours, accuracies, hardware, price, the recipe, and what each epoch did. Hours count from the start of
    loading the images. Unknown values are null. Only the run folder is read, so it works after the machines are gone.
    """
    from cluster import records
    from cluster.jobs import store
    from train.tools.files import write_atomic
    from train.tools.text_files import to_json_bytes

    paths = _output_files(output_path) if output_path else []
    recorded_job = store.find(job)
    refresh(recorded_job)
    try:
        with recorded_job.report_damaged_files():
            run = records.collect_run_data(recorded_job)
        entry = records.dawnbench_entry(run, author, paths[-1].name if len(paths) > 1 else None)
        texts = (records.render_tsv(run), to_json_bytes(entry).decode(), records.render_mlperf_log(run, org=author))
    except MALFORMED_DATA_ERRORS as error:
        problem = f"{type(error).__name__}: {error}"
        raise ClusterError(f"{recorded_job.name}: a file of its run folder is damaged ({problem})") from error
    if not paths:
        click.echo(texts[0], nl=False)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, texts[SUFFIXES.index(path.suffix)].encode())
        click.echo(f"written: {path}")


def _output_files(output_path: Path) -> list[Path]:
    """Return the files to write. Raises `BadInput` when `output_path` is not the name of a file."""
    if output_path.name in ("", ".."):
        raise BadInput(f"-o {output_path}: is not a file name; give one, such as {output_path / 'mine'}")
    paths = [output_path.with_name(output_path.name + suffix) for suffix in SUFFIXES]
    paths = [output_path] if output_path.suffix in SUFFIXES else paths
    for path in paths:
        if path.is_dir():
            raise BadInput(f"-o {output_path}: {path} is a folder; name a file, such as {path / 'mine'}")
    return paths


COMMANDS = (record, report)
