"""`imgnet-cluster record`: a run as DAWNBench's TSV and JSON and as MLPerf's log, and whether such files add up."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import BadInput, ClusterError

if TYPE_CHECKING:
    from cluster.jobs.submit import Job

ENDS = {".tsv": "tsv", ".json": "json", ".log": "mlperf"}
LOG = ":::MLLOG"


@click.command()
@click.argument("job", required=False)
@click.option("--format", "kind", type=click.Choice(list(ENDS.values())), help="How. [default: by -o's name, else tsv]")
@click.option(
    "-o", "--output", "path", type=click.Path(path_type=Path), metavar="FILE",
    help="Where to: x.tsv, x.json, x.log; a name without such an end makes all three.",
)  # fmt: skip
@click.option("--author", metavar="NAME", help="Whose record it is, for the JSON.")
@click.option("--email", metavar="ADDRESS", help="And how to reach them.")
@click.option("--code-url", metavar="URL", help="Where the code can be had.")
@click.option("--check", metavar="FILE|JOB", help="Write nothing; see whether it adds up, and agrees with its job.")
def record(
    job: str | None, kind: str | None, path: Path | None, author: str | None, email: str | None,
    code_url: str | None, check: str | None,
) -> None:  # fmt: skip
    """Write down what JOB has run (default: the newest): hours, accuracies, hardware, price, the schedule as executed.

    Hours count from the start of loading the images. What is not known is null. Nobody is asked: it works on a job
    that is over, after its machines are gone. --check prints the first row that does not fit; exit code 1.
    """
    from cluster.jobs import store

    if check is not None:
        if kind or path or author or email or code_url:
            raise BadInput("--check writes nothing; leave the other options out")
        return click.echo(_check(check, store.find(job) if job else None))
    files = _files(kind, path) if path is not None else {}
    said = _ran(store.find(job))
    _agrees(said)
    who = {"author": author, "email": email, "code": code_url}
    if path is None:
        return click.echo(_text(kind or "tsv", said, **who), nl=False)
    for one, file in files.items():
        log = path.name + ".log" if one == "json" and file != path else None
        _write(file, _text(one, said, log=log, **who))
        click.echo(f"written: {file}")


def _ran(job: "Job") -> dict[str, Any]:
    """What a job has run. Raises `ClusterError`."""
    from cluster.records import run_data

    from .inspect import refresh

    refresh(job)
    with _damaged(f"{job.run}: a file in it is damaged"):
        return run_data.ran(job)


@contextlib.contextmanager
def _damaged(what: str) -> Iterator[None]:
    """Turn what plain data of an unforeseen form leads to into one line."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ClusterError(f"{what} ({type(error).__name__}: {error})") from error


def _agrees(said: dict[str, Any]) -> None:
    """Raise `ClusterError` where the run folder tells an epoch in two ways: of which should a record be?"""
    from cluster.records import check as records_check

    with _damaged(f"{said['job']}: result.json is damaged"):
        if wrong := next(records_check.of_result(said), None):
            raise ClusterError(f"{said['job']}: {wrong}; nothing was written, for it cannot be known which is true")


def _text(kind: str, said: dict[str, Any], **who: str | None) -> str:
    """The record in one of its forms."""
    from cluster.records import writers
    from train.tools.filesystem import as_json

    with _damaged(f"{said['job']}: a file of its run folder is damaged"):
        if kind == "json":
            return as_json(writers.entry(said, **who)).decode()
        return writers.tsv(said) if kind == "tsv" else writers.mlperf(said)


def _files(kind: str | None, path: Path) -> dict[str, Path]:
    """Return which file gets which form. Raises `BadInput` where that cannot be a file's name."""
    if path.name in ("", ".."):
        raise BadInput(f"-o {path}: names no file; name one, such as {path / 'mine'}")
    if kind or path.suffix in ENDS:
        found = {kind or ENDS[path.suffix]: path}
    else:
        found = {one: path.with_name(path.name + end) for end, one in ENDS.items()}
    for one in found.values():
        if one.is_dir():
            raise BadInput(f"-o {path}: {one} is a folder; name a file, such as {one / 'mine'}")
    return found


def _write(path: Path, text: str) -> None:
    from train.tools.filesystem import replace

    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, text.encode())


def _check(what: str, job: "Job | None") -> str:
    """Return a line that says what is in order. Raises `ClusterError` with the first row that is not."""
    from cluster.jobs import store
    from cluster.records import check as records_check

    path = Path(what)
    texts = _read(path) if path.is_file() else {}
    if not texts:
        job = store.find(what)
    entry = _entry(texts["json"], path) if "json" in texts else None
    job = job or _job_of(entry)
    said = _ran(job) if job else None
    if not texts and said:
        texts = {kind: _text(kind, said) for kind in ENDS.values()}
        entry = _entry(texts["json"], path)
    with _damaged(f"{what}: is no record of ours, or damaged"):
        wrong = next(records_check.problems(texts.get("tsv"), entry, texts.get("mlperf"), said), None)
        if wrong is None:
            return f"{what}: {_sum(texts, entry, job)}"
    raise ClusterError(f"{what}: {wrong}")


def _read(path: Path) -> dict[str, str]:
    """Return the text of a file by its form, and of those of the other forms beside it. Raises `ClusterError`."""
    text = _of_file(path)
    form = "json" if text.lstrip().startswith("{") else "mlperf" if text.startswith(LOG) else "tsv"
    found = {form: text}
    for end, other in ENDS.items():
        beside = path.with_suffix(end)
        if other != form and beside != path and beside.is_file():
            text = _of_file(beside)
            if other != "mlperf" or LOG in text:  # any program's log may lie there
                found[other] = text
    return found


def _of_file(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise ClusterError(f"{path}: is no text; a record is TSV, JSON or lines of {LOG}") from None


def _entry(text: str, path: Path) -> dict[str, Any]:
    from cluster.records.check import parsed

    try:
        found = parsed(text)
    except ValueError as error:
        raise ClusterError(f"{path.with_suffix('.json')}: is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ClusterError(f"{path.with_suffix('.json')}: is no JSON object")
    return found


def _job_of(entry: dict[str, Any] | None) -> "Job | None":
    """Return the job of this folder that a JSON is of, None when it is of none."""
    from cluster.jobs import store

    misc = (entry or {}).get("misc")
    uid = misc.get("uid") if isinstance(misc, dict) else None
    for one in store.all_jobs() if uid else []:
        with contextlib.suppress(ClusterError):  # a damaged one is not it
            if one.spec.uid == uid:
                return one
    return None


def _sum(texts: dict[str, str], entry: dict[str, Any] | None, job: "Job | None") -> str:
    """What was looked at, in one line."""
    parts = []
    if "tsv" in texts:
        parts.append(f"{len(texts['tsv'].splitlines()) - 1} validated epochs")
    if entry:
        misc = entry["misc"]
        parts.append(f"{misc['epochs'][-1]['step']} steps in {misc['hours']:.4f} hours")
        parts.append("schedule, rates, times and cost add up")
    elif "tsv" in texts and not job:
        parts.append("in order; steps and times cannot be checked without its JSON beside it, or its job after it")
    if "mlperf" in texts:
        parts.append(f"{len(texts['mlperf'].splitlines())} lines of the log")
        if len(texts) == 1 and not job:
            parts.append(
                "in order; accuracies and rates cannot be checked without its JSON beside it, or its job after it"
            )
    return ", ".join(parts) + (f"; as {job.name} ran" if job else "")


COMMANDS = (record,)
