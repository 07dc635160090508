"""Damaged run folders: whatever one file holds, every command ends with its output or with one clear line.

Each case changes one file of a run folder: one value of it, all of it, or its kind. The commands run in this process.
"""

import contextlib
import copy
import json
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support import aws_journal
from support.sandbox import FinishedSandbox
from support.waiting import PATIENCE

from cluster.cli.app import cli
from cluster.cli.options import CommandGroup
from cluster.display import progress
from cluster.errors import ClusterError
from cluster.jobs import store
from cluster.jobs.job import Job
from cluster.jobs.supervision import Supervision
from cluster.state.run_folder import AGENT_LOCK
from infra.aws.journal_events import InstanceEnded
from infra.aws.launch_request import Place
from train.tools.files import locked

COMMANDS_PER_KIND = 1000
MAX_SECONDS = round(10 * PATIENCE)
MAX_ERROR_CHARACTERS = 3000
EXIT_CODES = (0, 1, 2, 100, 101, 102, 103)
COMMANDS = (
    *(["ls"], ["ls", "-o", "json"], ["status"], ["status", "-o", "json", "--exit-code"], ["logs"], ["logs", "--agent"]),
    *(["logs", "--machine", "0"], ["top"], ["cost"], ["record"]),
    *(["resume", "-d", "job-1"], ["follow"]),
)
SLOW_COMMANDS = (["report"],)
SLOW_SHARE = 0.004
VALUES: tuple[Any, ...] = (
    *(None, [], {}, "", "x", -1, 0, 1, 1e308, -1e308, 10**18, True, "../../x", [[[]]], {"a": {}}, [1], ["x"], 2.5),
    *("a" * 300_000, "\u202e\x1b[31m\n\x1b]0;title\x07", "\ud800", float("nan"), float("inf")),
)
TEXTS = (
    *(b"", b"{", b"null", b"[]", b'"x"', b"{}", b"1e999", b"NaN", b"\0" * 1000, b"\xff\xfe{\0}", b'{"state": "done"}'),
    *(b'{"a":' * 100_000, b"[ " * 5000, b"9" * 5000, b"x" * 30_000_000, b'{"kind": "epoch"}\n[]\n', bytes(range(256))),
)
DELETED = object()
JsonPath = tuple[Any, ...]


@click.group(cls=CommandGroup)
def commands() -> None:
    """The commands, and one that follows a job as `launch` does."""


@commands.command()
def follow() -> None:
    raise SystemExit(progress.follow(store.find()))


for command in cli.commands.values():
    commands.add_command(command)


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def let_run(folder: Path) -> None:
    (folder / "result.json").unlink()
    (folder / "machine/shared/result.json").unlink()
    for path in (folder / "machine/shared/status").iterdir():
        change_json(path, lambda status: status.update(state="training", phase="running", ended=False))


def let_die(folder: Path) -> None:
    """Let the job have ended, but for its result."""
    (folder / "result.json").unlink()


def let_fail(folder: Path) -> None:
    (folder / "machine/shared/result.json").unlink()
    change_json(folder / "result.json", lambda result: result.update(state="failed", reason="a loss"))


def let_be_rented(folder: Path) -> None:
    """Let the machine of the job have been rented."""
    created = json.loads((folder / "job.json").read_text())["created"]
    place = Place(region="us-east-1", zone="us-east-1a", type="g5.xlarge", market="spot", price=3.6)
    cloud = {"places": [], "ssh_address": "10.0.0.0/8", "owner": "ann"}
    rental = {"backend": "aws", "cloud": cloud, "hosts": {"shared": "/mnt/x", "machines": []}}
    change_json(folder / "job.json", lambda spec: spec.update(rental))
    aws_journal.write_journal(
        folder / "cloud.jsonl",
        aws_journal.launch_request(1, place, ["0"], created, has_overhead=True),
        aws_journal.request_granted(1, ("i-1", "0", created), time=created),
        InstanceEnded(time=created + 1000, id="i-1", name="0", ended=created + 1000, reason="ended by us"),
    )
    (folder / "cloud.json").write_text(json.dumps({"doing": "renting", "time": created}))
    setup = {"host": "10.0.0.1", "step": "agent", "seconds": {"booting": 30.0, "code": 2.0}, "gpus": ["A10G"]}
    (folder / "machines.json").write_text(json.dumps({"launch": "x", "is_ready": True, "machines": {"0": setup}}))


KINDS: dict[str, Callable[[Path], None]] = {
    "finished": lambda folder: None,
    "running": let_run,
    "died": let_die,
    "failed": let_fail,
    "rented": let_be_rented,
}


def damage(folder: Path, generator: random.Random) -> str:
    """Change one file of a run folder, but none that only the agent reads. Returns a description of the change."""
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix not in (".pt", ".safetensors", ".html")
        and "lock" not in path.name
        and "work" not in path.parts
    ]
    path = generator.choice(paths)
    content = path.read_bytes()
    path.unlink()
    return f"{path.relative_to(folder)}: {damaged(path, content, generator)}"


def damaged(path: Path, content: bytes, generator: random.Random) -> str:
    """Write something else in place of a file that had this content. Returns a description of the change."""
    if generator.random() < 0.75 and path.suffix in (".json", ".jsonl"):
        lines = [content] if path.suffix == ".json" else content.splitlines()
        number = generator.randrange(len(lines)) if lines else 0
        with contextlib.suppress(ValueError, IndexError):
            value = json.loads(lines[number])
            where = generator.choice([*json_paths(value)])
            new = generator.choice([*VALUES, DELETED])
            lines[number] = json.dumps(changed_json(value, where, new)).encode()
            path.write_bytes(b"\n".join(lines) + b"\n")
            return f"line {number}, {where} = {repr(new)[:40]}"
    what = generator.choice(["folder", "FIFO", "loop", "dangling", "cut", "text", "text", "text"])
    if what == "folder":
        path.mkdir()
    elif what == "FIFO":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "dangling":
        path.symlink_to("/nonexistent/x")
    elif what == "cut":
        path.write_bytes(content[: generator.randrange(len(content) + 1)])
    else:
        text = generator.choice(TEXTS)
        path.write_bytes(text)
        return f"{text[:20]!r} ... of {len(text)} bytes"
    return what


def json_paths(value: Any, prefix: JsonPath = ()) -> Iterator[JsonPath]:
    """Yield the paths of all values inside of a JSON value, of long lists only the first and the last."""
    yield prefix
    keys = list(value) if isinstance(value, dict) else {0, len(value) - 1} if isinstance(value, list) and value else ()
    for key in keys:
        yield from json_paths(value[key], (*prefix, key))


def changed_json(value: Any, path: JsonPath, new: Any) -> Any:
    """Return a JSON value in which the value at a path is another, or missing."""
    if not path:
        return None if new is DELETED else new
    value = copy.deepcopy(value)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if new is DELETED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = new
    return value


class TooSlow(BaseException):
    """A command took longer than `MAX_SECONDS`."""


def run_command(words: list[str]) -> str:
    """Run a command in this process. Returns what is wrong with its output, "" when nothing is."""

    def stop(*_: object) -> None:
        raise TooSlow

    previous_handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_SECONDS)
    try:
        result = CliRunner().invoke(commands, words)
    except TooSlow:
        return f"took longer than {MAX_SECONDS} s"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)
    if result.exc_info and not isinstance(result.exception, SystemExit | None):
        places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(result.exc_info[2])]
        return f"{result.exception!r:.200} at {' '.join(places[-4:])}"
    if "Traceback" in result.output:
        return "a traceback in the output"
    if result.exit_code not in EXIT_CODES:
        return f"exit code {result.exit_code}"
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if result.exit_code in (1, 2) and len(errors) != 1:
        return f"exit code {result.exit_code} with {len(errors)} errors: {result.output[-300:]!r}"
    if sum("damaged" in line for line in lines) > 1 or len(lines) > 2:
        return f"told more than once: {lines}"
    if any(len(line) > MAX_ERROR_CHARACTERS for line in lines):
        return "a message of several thousand characters"
    if "\x1b" in result.output and words[0] != "logs":
        return "an escape sequence in the output"
    return ""


@pytest.fixture
def job_folder(finished: FinishedSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run folder of a finished job, of which no command can start a job."""
    folder = tmp_path / "runs/job-1"
    ignored = shutil.ignore_patterns("*.pt", "*.safetensors", "events.out*", "report.html")
    shutil.copytree(finished.path / "runs/job-1", folder, ignore=ignored)

    def refuse(*_: object) -> None:
        raise ClusterError("no job is started here")

    monkeypatch.setattr(Job, "start_locked", refuse)
    monkeypatch.setattr("cluster.jobs.supervision.PROCESS_START_SECONDS", 0)  # a job without a status is not booting
    monkeypatch.setattr(Supervision, "ensure", refuse)
    monkeypatch.setenv("IMGNET_RUNS", str(folder.parent))
    for name in ("TMUX_TMPDIR", "HOME"):
        monkeypatch.setenv(name, finished.env[name])
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_commands_on_damaged_run_folders_end_without_traceback(kind: str, job_folder: Path) -> None:
    KINDS[kind](job_folder)
    generator = random.Random(kind)
    intact_folder = job_folder.parent.with_name("intact")
    shutil.copytree(job_folder, intact_folder)
    lock_path = job_folder / "machine/work/0" / AGENT_LOCK
    quick_commands = [words for words in COMMANDS if not (kind == "running" and words == ["follow"])]  # has no end then
    run_command(["report"])  # imports what draws, which takes long
    problems: dict[tuple[str, str], str] = {}
    command_count = 0
    while command_count < COMMANDS_PER_KIND:
        shutil.rmtree(job_folder)
        shutil.copytree(intact_folder, job_folder)
        commands_of_case = generator.sample(quick_commands, 6)
        if generator.random() < 6 * SLOW_SHARE:
            commands_of_case += SLOW_COMMANDS
        with locked(lock_path) if kind == "running" else contextlib.nullcontext():
            description = damage(job_folder, generator)
            for words in commands_of_case:
                command_count += 1
                if problem := run_command(words):
                    problems.setdefault((words[0], problem[-60:]), f"{description} | {' '.join(words)} | {problem}")
    assert not problems, "\n" + "\n".join(problems.values())
