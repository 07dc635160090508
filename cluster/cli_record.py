"""`imgnet-cluster record`: a run as DAWNBench's TSV and JSON and as MLPerf's log, and whether such files add up."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import BadInput, ClusterError

if TYPE_CHECKING:
    from .jobs import Job

KINDS = ("tsv", "json", "mlperf")


@click.command()
@click.argument("job", required=False)
@click.option("--format", "kind", type=click.Choice(KINDS), help="How. [default: by -o's name, else tsv]")
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
    from . import jobs

    if check is not None:
        if kind or path or author or email or code_url:
            raise BadInput("--check writes nothing; leave the other options out")
        return click.echo(_check(check, jobs.find(job) if job else None))
    said = _ran(jobs.find(job))
    who = {"author": author, "email": email, "code": code_url}
    if path is None:
        return click.echo(_text(kind or "tsv", said, **who), nl=False)
    for one, file in _files(kind, path).items():
        log = path.name + ".log" if one == "json" and file != path else None
        _write(file, _text(one, said, log=log, **who))
        click.echo(f"written: {file}")


def _ran(job: "Job") -> dict[str, Any]:
    """What a job has run. Raises `ClusterError`."""
    from . import ran
    from .cli_look import refresh

    refresh(job)
    try:
        return ran.ran(job)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ClusterError(f"{job.run}: a file in it is damaged ({type(error).__name__}: {error})") from error


def _text(kind: str, said: dict[str, Any], **who: str | None) -> str:
    """The record in one of its forms."""
    from train.files import as_json

    from . import record

    if kind == "json":
        return as_json(record.entry(said, **who)).decode()
    return record.tsv(said) if kind == "tsv" else record.mlperf(said)


def _files(kind: str | None, path: Path) -> dict[str, Path]:
    """Return which file gets which form."""
    ends = {".tsv": "tsv", ".json": "json", ".log": "mlperf"}
    if kind or path.suffix in ends:
        return {kind or ends[path.suffix]: path}
    return {one: path.with_name(path.name + end) for end, one in ends.items()}


def _write(path: Path, text: str) -> None:
    from train.files import replace

    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, text.encode())


def _check(what: str, job: "Job | None") -> str:
    """Return a line that says what is in order. Raises `ClusterError` with the first row that is not."""
    from . import jobs, record, record_check

    path = Path(what)
    texts = _read(path) if path.is_file() else {}
    if not texts:
        job = jobs.find(what)
    entry = _entry(texts["json"], path) if "json" in texts else None
    job = job or _job_of(entry)
    said = _ran(job) if job else None
    if not texts and said:
        entry, texts = record.entry(said), {"tsv": record.tsv(said), "mlperf": record.mlperf(said)}
        entry = json.loads(json.dumps(entry))
    try:
        wrong = next(record_check.problems(texts.get("tsv"), entry, texts.get("mlperf"), said), None)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ClusterError(f"{what}: is no record of ours, or damaged ({type(error).__name__}: {error})") from error
    if wrong:
        raise ClusterError(f"{what}: {wrong}")
    return f"{what}: {_sum(texts, entry, job)}"


def _read(path: Path) -> dict[str, str]:
    """Return the text of a file by its form, and of the TSV or JSON beside it. Raises `ClusterError`."""
    try:
        text = path.read_text()
        form = "json" if text.lstrip().startswith("{") else "mlperf" if text.startswith(":::MLLOG") else "tsv"
        beside = {"json": (".tsv", "tsv"), "tsv": (".json", "json")}.get(form)
        found = {form: text}
        if beside and (other := path.with_suffix(beside[0])).is_file() and other != path:
            found[beside[1]] = other.read_text()
    except UnicodeDecodeError:
        raise ClusterError(f"{path}: is no text; a record is TSV, JSON or lines of :::MLLOG") from None
    return found


def _entry(text: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ClusterError(f"{path.with_suffix('.json')}: is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ClusterError(f"{path.with_suffix('.json')}: is no JSON object")
    return found


def _job_of(entry: dict[str, Any] | None) -> "Job | None":
    """Return the job of this folder that a JSON is of, None when it is of none."""
    from . import jobs

    misc = (entry or {}).get("misc")
    uid = misc.get("uid") if isinstance(misc, dict) else None
    for one in jobs.all_jobs() if uid else []:
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
    return ", ".join(parts) + (f"; as {job.name} ran" if job else "")


COMMANDS = (record,)
