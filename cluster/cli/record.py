"""The commands `report` and `record`: the HTML report of jobs, and a run as DAWNBench's and MLPerf's records."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import BadInput, ClusterError
from train.tools.records import MALFORMED_DATA_ERRORS

from .inspect import refresh
from .options import OUTPUT_FORMATS, warn

if TYPE_CHECKING:
    from cluster.jobs.job import Job
    from cluster.records.run_data import RunData
    from cluster.records.writers import JsonDict

FORMAT_BY_SUFFIX = {".tsv": "tsv", ".json": "json", ".log": "mlperf"}
MLLOG_MARK = ":::MLLOG"


class OutputFile(click.Path):
    """A file that a command writes. The formats that `-o` of other commands takes are refused: nobody means a file."""

    def convert(
        self,
        value: Any,  # Any: a text or a path
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # Any: as click.Path returns it, here always a path
        """Return the path. Fails as click's types do."""
        if str(value) in OUTPUT_FORMATS:
            self.fail(f"of this command -o names the file to write; a file of this name is ./{value}", param, ctx)
        return super().convert(value, param, ctx)


def has_display() -> bool:
    """Whether a browser can show something: without a display, xdg-open tries all it knows, and fails with noise."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


@click.command()
@click.argument("job", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=OutputFile(path_type=Path, dir_okay=False),
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
    if open_browser and not (has_display() and click.launch(str(path)) == 0):
        warn(f"no browser could be started here; copy the file to a computer with one: {path}")


@click.command()
@click.argument("job", required=False)
@click.option(
    "-o",
    "--output",
    "output_path",
    type=OutputFile(path_type=Path),
    metavar="FILE",
    help="File to write: x.tsv, x.json or x.log. A name without these endings writes all three.  [default: stdout]",
)
@click.option(
    "--format",
    "record_format",
    type=click.Choice(list(FORMAT_BY_SUFFIX.values())),
    help="Format of the record.  [default: from the name of the file, else tsv]",
)
@click.option(
    "--author", metavar="NAME", help="Author of the record, written into the JSON record and into MLPerf's log."
)
@click.option("--email", metavar="ADDRESS", help="Contact e-mail of the author, written into the JSON record.")
@click.option("--code-url", metavar="URL", help="URL of the published code, written into the JSON record.")
@click.option(
    "--check", metavar="FILE|JOB", help="Write nothing. Check that a record is consistent, and agrees with its job."
)
def record(
    job: str | None,
    record_format: str | None,
    output_path: Path | None,
    author: str | None,
    email: str | None,
    code_url: str | None,
    check: str | None,
) -> None:
    """Write a benchmark record of JOB (default: the newest job).

    It contains hours, accuracies, hardware, price, and the schedule as executed. Hours count from the start of loading
    the images. Unknown values are null. Only the run folder is read, so it works after the machines are gone. --check
    prints the first row that is wrong; exit code 1.
    """
    from cluster.jobs import store

    if check is not None:
        if record_format or output_path or author or email or code_url:
            raise BadInput("--check writes nothing, so it cannot be combined with the other options; leave them out")
        return click.echo(_check_record(check, store.find(job) if job else None))
    path_by_format = _output_files(record_format, output_path) if output_path is not None else {}
    recorded_job = store.find(job)
    run = _load_run_data(recorded_job)
    _require_consistent_result(run, recorded_job)
    authorship = {"author": author, "email": email, "code_url": code_url}
    if output_path is None:
        return click.echo(_render(record_format or "tsv", run, **authorship), nl=False)
    for file_format, path in path_by_format.items():
        # The JSON names the log that is written together with it.
        log_filename = output_path.name + ".log" if file_format == "json" and path != output_path else None
        _write_text(path, _render(file_format, run, log_filename=log_filename, **authorship))
        click.echo(f"written: {path}")


def _load_run_data(job: "Job") -> "RunData":
    """Return the data of a run from its run folder. Raises `ClusterError`."""
    from cluster.jobs import checkpoints
    from cluster.records import run_data

    from .inspect import refresh

    refresh(job)
    checkpoints.require_recipe(job)
    with job.report_damaged_files():
        return run_data.collect_run_data(job)


@contextlib.contextmanager
def _damage_as_cluster_error(description: str) -> Iterator[None]:
    """Turn the errors that data of an unexpected form causes into a one-line `ClusterError`."""
    try:
        yield
    except MALFORMED_DATA_ERRORS as error:
        raise ClusterError(f"{description} ({type(error).__name__}: {error})") from error


def _require_consistent_result(run: "RunData", job: "Job") -> None:
    """Raise `ClusterError` when metrics and result.json disagree about an epoch: a record could follow only one."""
    from cluster.records import check as records_check

    if job.result and (problem := next(records_check.check_metrics_against_result(run, job.result), None)):
        raise ClusterError(f"{run.job}: {problem}; nothing was written, because one of the two must be wrong")


def _render(record_format: str, run: "RunData", **authorship: str | None) -> str:
    """Return the record in one of the formats."""
    from cluster.records import writers
    from train.tools.filesystem import to_json_bytes

    with _damage_as_cluster_error(f"{run.job}: a file of its run folder is damaged"):
        if record_format == "json":
            return to_json_bytes(writers.dawnbench_entry(run, **authorship)).decode()
        if record_format == "tsv":
            return writers.render_tsv(run)
        return writers.render_mlperf_log(run, org=authorship.get("author"))


def _output_files(record_format: str | None, output_path: Path) -> dict[str, Path]:
    """Return the file of each format to write. Raises `BadInput` when `output_path` is not the name of a file."""
    if output_path.name in ("", ".."):
        raise BadInput(f"-o {output_path}: is not a file name; give one, such as {output_path / 'mine'}")
    if record_format or output_path.suffix in FORMAT_BY_SUFFIX:
        path_by_format = {record_format or FORMAT_BY_SUFFIX[output_path.suffix]: output_path}
    else:
        path_by_format = {
            file_format: output_path.with_name(output_path.name + suffix)
            for suffix, file_format in FORMAT_BY_SUFFIX.items()
        }
    for path in path_by_format.values():
        if path.is_dir():
            raise BadInput(f"-o {output_path}: {path} is a folder; name a file, such as {path / 'mine'}")
    return path_by_format


def _write_text(path: Path, text: str) -> None:
    from train.tools.filesystem import write_atomic

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())


def _check_record(file_or_job: str, job: "Job | None") -> str:
    """Return a line about what was checked. Raises `ClusterError` with the first row that is wrong.

    A file is checked together with the files of the other formats beside it, and against its job where the job is
    known. For a job, the records that it would write now are checked.
    """
    from cluster.jobs import store
    from cluster.records import check as records_check

    path = Path(file_or_job)
    text_by_format = _read_record_files(path) if path.is_file() else {}
    if not text_by_format:
        job = store.find(file_or_job)
    entry = _parse_entry(text_by_format["json"], path) if "json" in text_by_format else None
    job = job or _find_job_of_entry(entry)
    run, result = (_load_run_data(job), job.result) if job else (None, None)
    if not text_by_format and run:
        text_by_format = {file_format: _render(file_format, run) for file_format in FORMAT_BY_SUFFIX.values()}
        entry = _parse_entry(text_by_format["json"], path)
    with _damage_as_cluster_error(f"{file_or_job}: is not a record that this program wrote, or damaged"):
        texts = text_by_format.get("tsv"), entry, text_by_format.get("mlperf")
        problem = next(records_check.find_problems(*texts, run, result), None)
        if problem is None:
            return f"{file_or_job}: {_check_summary(text_by_format, entry, job)}"
    raise ClusterError(f"{file_or_job}: {problem}")


def _read_record_files(path: Path) -> dict[str, str]:
    """Return the texts of a record and of the files beside it, by format. Raises `ClusterError`."""
    text = _read_text(path)
    own_format = "json" if text.lstrip().startswith("{") else "mlperf" if text.startswith(MLLOG_MARK) else "tsv"
    text_by_format = {own_format: text}
    for suffix, file_format in FORMAT_BY_SUFFIX.items():
        sibling = path.with_suffix(suffix)
        if file_format != own_format and sibling != path and sibling.is_file():
            text = _read_text(sibling)
            if file_format != "mlperf" or MLLOG_MARK in text:  # a .log file may belong to any other program
                text_by_format[file_format] = text
    return text_by_format


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise ClusterError(f"{path}: is not text; a record is TSV, JSON or lines of {MLLOG_MARK}") from None


def _parse_entry(text: str, path: Path) -> "JsonDict":
    """Return the JSON object of a record. Raises `ClusterError`."""
    from train.tools.filesystem import parse_json

    try:
        entry = parse_json(text.encode())
    except ValueError as error:
        raise ClusterError(f"{path.with_suffix('.json')}: is no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ClusterError(f"{path.with_suffix('.json')}: is not a JSON object")
    return entry


def _find_job_of_entry(entry: "JsonDict | None") -> "Job | None":
    """Return the job of this folder that a record describes, None when there is none."""
    from cluster.jobs import store

    misc = (entry or {}).get("misc")
    uid = misc.get("uid") if isinstance(misc, dict) else None
    for job in store.all_jobs() if uid else []:
        with contextlib.suppress(ClusterError):  # the run folder of another job may be damaged
            if job.spec.uid == uid:
                return job
    return None


def _check_summary(text_by_format: dict[str, str], entry: "JsonDict | None", job: "Job | None") -> str:
    """Return in one line what was checked, and what could not be."""
    parts = []
    if "tsv" in text_by_format:
        parts.append(f"{len(text_by_format['tsv'].splitlines()) - 1} validated epochs")
    if entry:
        misc = entry["misc"]
        parts.append(f"{misc['epochs'][-1]['step']} steps in {misc['hours']:.4f} hours")
        parts.append("schedule, rates, times and cost add up")
    elif "tsv" in text_by_format and not job:
        parts.append("in order; steps and times cannot be checked without its JSON beside it, or its job after it")
    if "mlperf" in text_by_format:
        parts.append(f"{len(text_by_format['mlperf'].splitlines())} lines of the log")
        if len(text_by_format) == 1 and not job:
            parts.append(
                "in order; accuracies and rates cannot be checked without its JSON beside it, or its job after it"
            )
    return ", ".join(parts) + (f"; as {job.name} ran" if job else "")


COMMANDS = (record, report)
