"""`imgnet-cluster record`: a run as DAWNBench's TSV and JSON and as MLPerf's log, and whether such files add up."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import BadInput, ClusterError

if TYPE_CHECKING:
    from cluster.jobs.submit import Job

FORMAT_BY_SUFFIX = {".tsv": "tsv", ".json": "json", ".log": "mlperf"}
MLLOG_MARK = ":::MLLOG"


@click.command()
@click.argument("job", required=False)
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(FORMAT_BY_SUFFIX.values())),
    help="How. [default: by -o's name, else tsv]",
)
@click.option(
    "-o", "--output", "path", type=click.Path(path_type=Path), metavar="FILE",
    help="Where to: x.tsv, x.json, x.log; a name without such an end makes all three.",
)  # fmt: skip
@click.option("--author", metavar="NAME", help="Whose record it is, for the JSON.")
@click.option("--email", metavar="ADDRESS", help="And how to reach them.")
@click.option("--code-url", metavar="URL", help="Where the code can be had.")
@click.option("--check", metavar="FILE|JOB", help="Write nothing; see whether it adds up, and agrees with its job.")
def record(
    job: str | None, record_format: str | None, output_path: Path | None, author: str | None, email: str | None,
    code_url: str | None, check: str | None,
) -> None:  # fmt: skip
    """Write down what JOB has run (default: the newest): hours, accuracies, hardware, price, the schedule as executed.

    Hours count from the start of loading the images. What is not known is null. Nobody is asked: it works on a job
    that is over, after its machines are gone. --check prints the first row that does not fit; exit code 1.
    """
    from cluster.jobs import store

    if check is not None:
        if record_format or output_path or author or email or code_url:
            raise BadInput("--check writes nothing; leave the other options out")
        return click.echo(_check_record(check, store.find(job) if job else None))
    files = _output_files(record_format, output_path) if output_path is not None else {}
    said = _load_run_data(store.find(job))
    _require_consistent_result(said)
    who = {"author": author, "email": email, "code": code_url}
    if output_path is None:
        return click.echo(_render(record_format or "tsv", said, **who), nl=False)
    for one, file in files.items():
        log = output_path.name + ".log" if one == "json" and file != output_path else None
        _write_text(file, _render(one, said, log=log, **who))
        click.echo(f"written: {file}")


def _load_run_data(job: "Job") -> dict[str, Any]:
    """What a job has run. Raises `ClusterError`."""
    from cluster.records import run_data

    from .inspect import refresh

    refresh(job)
    with _damage_as_cluster_error(f"{job.path}: a file in it is damaged"):
        return run_data.collect_run_data(job)


@contextlib.contextmanager
def _damage_as_cluster_error(description: str) -> Iterator[None]:
    """Turn what plain data of an unforeseen form leads to into one line."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ClusterError(f"{description} ({type(error).__name__}: {error})") from error


def _require_consistent_result(run_data: dict[str, Any]) -> None:
    """Raise `ClusterError` where the run folder tells an epoch in two ways: of which should a record be?"""
    from cluster.records import check as records_check

    with _damage_as_cluster_error(f"{run_data['job']}: result.json is damaged"):
        if wrong := next(records_check.check_metrics_against_result(run_data), None):
            raise ClusterError(f"{run_data['job']}: {wrong}; nothing was written, for it cannot be known which is true")


def _render(record_format: str, run_data: dict[str, Any], **authorship: str | None) -> str:
    """The record in one of its forms."""
    from cluster.records import writers
    from train.tools.filesystem import to_json_bytes

    with _damage_as_cluster_error(f"{run_data['job']}: a file of its run folder is damaged"):
        if record_format == "json":
            return to_json_bytes(writers.dawnbench_entry(run_data, **authorship)).decode()
        return writers.render_tsv(run_data) if record_format == "tsv" else writers.render_mlperf_log(run_data)


def _output_files(record_format: str | None, output_path: Path) -> dict[str, Path]:
    """Return which file gets which form. Raises `BadInput` where that cannot be a file's name."""
    if output_path.name in ("", ".."):
        raise BadInput(f"-o {output_path}: names no file; name one, such as {output_path / 'mine'}")
    if record_format or output_path.suffix in FORMAT_BY_SUFFIX:
        found = {record_format or FORMAT_BY_SUFFIX[output_path.suffix]: output_path}
    else:
        found = {one: output_path.with_name(output_path.name + end) for end, one in FORMAT_BY_SUFFIX.items()}
    for one in found.values():
        if one.is_dir():
            raise BadInput(f"-o {output_path}: {one} is a folder; name a file, such as {one / 'mine'}")
    return found


def _write_text(path: Path, text: str) -> None:
    from train.tools.filesystem import write_atomic

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())


def _check_record(file_or_job: str, job: "Job | None") -> str:
    """Return a line that says what is in order. Raises `ClusterError` with the first row that is not."""
    from cluster.jobs import store
    from cluster.records import check as records_check

    path = Path(file_or_job)
    texts = _read_record_files(path) if path.is_file() else {}
    if not texts:
        job = store.find(file_or_job)
    entry = _parse_entry(texts["json"], path) if "json" in texts else None
    job = job or _find_job_of_entry(entry)
    said = _load_run_data(job) if job else None
    if not texts and said:
        texts = {kind: _render(kind, said) for kind in FORMAT_BY_SUFFIX.values()}
        entry = _parse_entry(texts["json"], path)
    with _damage_as_cluster_error(f"{file_or_job}: is no record of ours, or damaged"):
        wrong = next(records_check.find_problems(texts.get("tsv"), entry, texts.get("mlperf"), said), None)
        if wrong is None:
            return f"{file_or_job}: {_check_summary(texts, entry, job)}"
    raise ClusterError(f"{file_or_job}: {wrong}")


def _read_record_files(path: Path) -> dict[str, str]:
    """Return the text of a file by its form, and of those of the other forms beside it. Raises `ClusterError`."""
    text = _read_text(path)
    form = "json" if text.lstrip().startswith("{") else "mlperf" if text.startswith(MLLOG_MARK) else "tsv"
    found = {form: text}
    for end, other in FORMAT_BY_SUFFIX.items():
        beside = path.with_suffix(end)
        if other != form and beside != path and beside.is_file():
            text = _read_text(beside)
            if other != "mlperf" or MLLOG_MARK in text:  # any program's log may lie there
                found[other] = text
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise ClusterError(f"{path}: is no text; a record is TSV, JSON or lines of {MLLOG_MARK}") from None


def _parse_entry(text: str, path: Path) -> dict[str, Any]:
    from cluster.records.check import parse_json

    try:
        found = parse_json(text)
    except ValueError as error:
        raise ClusterError(f"{path.with_suffix('.json')}: is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ClusterError(f"{path.with_suffix('.json')}: is no JSON object")
    return found


def _find_job_of_entry(entry: dict[str, Any] | None) -> "Job | None":
    """Return the job of this folder that a JSON is of, None when it is of none."""
    from cluster.jobs import store

    misc = (entry or {}).get("misc")
    uid = misc.get("uid") if isinstance(misc, dict) else None
    for one in store.all_jobs() if uid else []:
        with contextlib.suppress(ClusterError):  # a damaged one is not it
            if one.spec.uid == uid:
                return one
    return None


def _check_summary(text_by_format: dict[str, str], entry: dict[str, Any] | None, job: "Job | None") -> str:
    """What was looked at, in one line."""
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


COMMANDS = (record,)
