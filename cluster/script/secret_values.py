"""Values of environment variables that only the processes of a job may see: `--env NAME` and `--env-file`.

The job's files have only the names. The values are kept here, for machines that come later and for a resume:

    ~/.local/state/imgnet-cluster/secrets/<uid>.json    mode 0600 in a folder of mode 0700, on the launching computer
    <work>/.secrets.json                                mode 0600, on another machine until its agent has read it

The first is removed with the job: the next launch removes those of jobs that are done or whose run folder is gone.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import BadInput, ClusterError
from train.recipe.command import check_variable
from train.tools.errors import one_line_error
from train.tools.files import read_file, write_atomic
from train.tools.records import DamagedRecord, encode, read_record
from train.tools.text_files import read_json, to_json_bytes

SENT_FILE = ".secrets.json"  # in a machine's work folder
MAX_ENV_FILE_BYTES = 1_000_000
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "$": "$"}
# $1: the machine's work folder. The values come on stdin.
SEND_SCRIPT = (
    'umask 077 && mkdir -p "$1" && cd "$1" && rm -f .secrets.new && set -C && cat >.secrets.new && '
    f"mv -f .secrets.new {SENT_FILE}"
)


@dataclass(frozen=True, kw_only=True)
class KeptSecrets:
    """The values of a job's secret variables, by name, and its run folder."""

    run: str
    values: dict[str, str]


# --- what the user gives ------------------------------------------------------------------------------------------


def collect(arguments: Sequence[str], files: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of all variables that --env and --env-file name. --env counts more than a file.

    `environment` is that of the caller, which has the value of an `--env NAME`. Raises `BadInput`.
    """
    values: dict[str, str] = {}
    for name in files:
        path = Path(name).expanduser()
        try:
            text = read_file(path, MAX_ENV_FILE_BYTES).decode()
        except OSError as error:
            raise BadInput(f"--env-file {name}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise BadInput(f"--env-file {name}: is no text in UTF-8") from None
        values |= parse_env_file(text, name)
    for argument in arguments:
        variable, equals, value = argument.partition("=")
        _check_variable(variable, f"--env {variable}")
        if not equals and variable not in environment:
            raise BadInput(
                f"--env {variable}: your environment has no such variable; type export {variable}=VALUE before, or "
                f"pass --env-file FILE with a line {variable}=VALUE"
            )
        values[variable] = value if equals else environment[variable]
    return values


def parse_env_file(text: str, source: str) -> dict[str, str]:
    """Return the variables of a file with lines such as NAME=value, as dotenv has them.

    Empty lines, comments and `export` are left out. A value may be in quotes; in double ones a backslash escapes.
    Nothing is expanded. Raises `BadInput`, which never shows a value.
    """
    values: dict[str, str] = {}
    for number, raw_line in enumerate(text.splitlines(), 1):
        where = f"--env-file {source}, line {number}"
        line = raw_line.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, rest = line.partition("=")
        if not equals:
            raise BadInput(f"{where}: has no `=`; write NAME=value")
        _check_variable(name.strip(), where)
        values[name.strip()] = _parse_value(rest.strip(), where)
    return values


def _parse_value(text: str, where: str) -> str:
    if text[:1] not in ("'", '"'):
        return text.partition(" #")[0].rstrip()
    quote, value, characters = text[0], "", iter(text[1:])
    for character in characters:
        if character == quote:
            rest = "".join(characters).strip()
            if rest and not rest.startswith("#"):
                raise BadInput(f"{where}: there is text after the value in quotes")
            return value
        if character == "\\" and quote == '"':
            escaped = next(characters, "")
            value += ESCAPES.get(escaped, f"\\{escaped}")
        else:
            value += character
    raise BadInput(f"{where}: the quote is not closed; a value of several lines is written with \\n in double quotes")


def _check_variable(name: str, where: str) -> None:
    try:
        check_variable(name)
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from None


# --- on the launching computer ------------------------------------------------------------------------------------


def secrets_folder() -> Path:
    """Return the folder of the secrets of this user's jobs.

    It follows from no variable: a supervisor in a tmux server that runs already has other ones than the launch.
    """
    return Path.home() / ".local" / "state" / "imgnet-cluster" / "secrets"


def keep(uid: str, run_folder: Path, values: Mapping[str, str]) -> None:
    """Keep the values of a job until it is done. Nothing is written for a job without any. Raises `ClusterError`."""
    if not values:
        return
    folder = secrets_folder()
    kept = KeptSecrets(run=str(run_folder.absolute()), values=dict(values))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        remove_unneeded(folder)
        write_atomic(folder / f"{uid}.json", to_json_bytes(encode(kept)), mode=0o600)
    except OSError as error:
        raise ClusterError(
            f"{one_line_error(error)}: the values of --env cannot be kept there; make that folder writable"
        ) from None


def remove_unneeded(folder: Path) -> None:
    """Remove the secrets of jobs that are done, or whose run folder is gone."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, DamagedRecord):
            kept = read_record(path, KeptSecrets)
            result = read_json(Path(kept.run, "result.json")) if kept else None
            is_done = isinstance(result, dict) and result.get("state") == "done"
            if kept and (is_done or not Path(kept.run).is_dir()):
                path.unlink()


def kept_values(uid: str) -> dict[str, str]:
    """Return the values that this computer keeps for a job, none when it keeps none. Raises `ClusterError`."""
    try:
        kept = read_record(secrets_folder() / f"{uid}.json", KeptSecrets)
    except DamagedRecord as error:
        raise ClusterError(f"{error}; give the values again: imgnet-cluster resume --env NAME") from None
    return kept.values if kept else {}


def new_values(arguments: Sequence[str], names: Sequence[str], uid: str, job: str) -> dict[str, str]:
    """Return the values of a job's secret variables for its next launch, those of `resume --env` before kept ones.

    Raises `BadInput` for another variable than the job's, and `ClusterError` when a value is not known.
    """
    given = collect(arguments, [], os.environ)
    if unknown := sorted(given.keys() - set(names)):
        known = ", ".join(names) or "none"
        raise BadInput(f"--env {unknown[0]}: is no secret variable of {job}, which has {known}")
    return require(names, {**kept_values(uid), **given}, job)


def require(names: Sequence[str], values: Mapping[str, str], job: str) -> dict[str, str]:
    """Return the values of these names. Raises `ClusterError` when one is not known."""
    missing = [name for name in names if name not in values]
    if missing:
        options = " ".join(f"--env {name}" for name in missing)
        raise ClusterError(
            f"the value of {', '.join(missing)} is not known here; set it in your shell and type "
            f"imgnet-cluster resume {job} {options}"
        )
    return {name: values[name] for name in names}


def sent_bytes(values: Mapping[str, str]) -> bytes:
    """Return what `SEND_SCRIPT` reads, for a machine's agent."""
    return to_json_bytes(dict(values))


# --- on a machine -------------------------------------------------------------------------------------------------


def receive(names: Sequence[str], work: Path, uid: str, job: str) -> dict[str, str]:
    """Return an agent's values: those sent to its work folder, removed now, or kept here. Raises `ClusterError`."""
    if not names:
        return {}
    sent = work / SENT_FILE
    try:
        values = read_record(sent, dict[str, str])
    except DamagedRecord as error:
        raise ClusterError(str(error)) from None
    if values is not None:
        sent.unlink(missing_ok=True)
    return require(names, kept_values(uid) if values is None else values, job)
