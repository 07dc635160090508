"""Tab completion of commands, options and values, for bash, zsh and fish.

The name of a value in `--help` decides how it is completed: JOB, RECIPE, DIR, FILE, TYPE, REGION, ZONE. Completions
come from files of this computer. A shell shows what the program prints with `VARIABLE` set: errors print nothing.
"""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    _resolve_context,
    _resolve_incomplete,
    add_completion_class,
)

PROGRAM = "imgnet-cluster"
VARIABLE = "_IMGNET_CLUSTER_COMPLETE"  # click derives this name from that of the program
FOLDER_NAMES = {"DIR", "FOLDER", "SOURCE", "TARGET"}
FILE_NAMES = {"CHECKPOINT", "FILE", "PNG", "RECIPE"}


class _ValueCompletion(ShellComplete):
    """Completes values of plain text too, which click does not."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Return the words that may follow `args` and begin with `incomplete`; none after an error."""
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                ctx = _resolve_context(self.cli, self.ctx_args, self.prog_name, args)
                target, incomplete = _resolve_incomplete(ctx, args, incomplete)
                items = target.shell_complete(ctx, incomplete)
                if not items and isinstance(target, click.Parameter):
                    items = _complete_value(target, args, incomplete)
                return items
        except Exception:  # for example a damaged file; a message would overwrite the line that is being typed
            return []


SHELLS: dict[str, type[ShellComplete]] = {
    shell_class.name: add_completion_class(type(shell_class.__name__, (_ValueCompletion, shell_class), {}))
    for shell_class in (BashComplete, ZshComplete, FishComplete)
}


def completion_script(command: click.Command, shell: str) -> str:
    """Return the script that makes a shell complete the command line."""
    return SHELLS[shell](command, {}, PROGRAM, VARIABLE).source()


def _complete_value(param: click.Parameter, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
    """Return the values of an argument or an option, or an item that lets the shell complete a path."""
    shown_name = param.human_readable_name if isinstance(param, click.Argument) else str(param.metavar)
    kinds = set(re.findall("[A-Z]+", shown_name))
    values: list[str] = []
    if param.name == "machine":  # of the job in the command line, by default of the newest
        jobs = _job_ids()
        spec = _read_spec(jobs[next(name for name in (*args, *jobs) if name in jobs)])
        values = [str(number) for number in range(spec["machines"] + spec["recovery"]["spares"])]
    elif "JOB" in kinds:
        values = list(_job_ids(incomplete))
    elif "RECIPE" in kinds:
        values = _recipe_names(incomplete)
    elif kinds & {"TYPE", "REGION", "ZONE"}:
        from cluster.backends.aws import shipped_tables as tables

        values = {"TYPE": tables.machine_types, "REGION": tables.regions, "ZONE": tables.zones}[shown_name]()
    items = [CompletionItem(value) for value in values if value.startswith(incomplete)]
    if not items and kinds & FOLDER_NAMES:
        return [CompletionItem(incomplete, type="dir")]
    if not items and kinds & FILE_NAMES:
        return [CompletionItem(incomplete, type="file")]
    return items


def _job_ids(incomplete: str = "") -> dict[str, str]:
    """Return each job's ID by ID, the newest first, then by its user's name, for which each job.json is read."""
    from cluster.state.run_folder import runs_folder

    numbers = [path.parent.name.removeprefix("job-") for path in runs_folder().glob("job-*/job.json")]
    ids = [f"job-{number}" for number in sorted((int(text) for text in numbers if text.isdecimal()), reverse=True)]
    names = {} if incomplete.startswith("job-") else {job: _read_spec(job).get("given_name") for job in ids}
    return {job: job for job in ids} | {name: job for job, name in names.items() if name}


def _read_spec(job: str) -> dict[str, Any]:  # Any: JSON of any shape
    from cluster.state.run_folder import runs_folder

    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((runs_folder() / job / "job.json").read_text()))
    return {}


def _recipe_names(incomplete: str) -> list[str]:
    """Return the names of this project's recipes, unless the typed text begins a path of the current folder."""
    from train.recipe.recipe_files import PROJECT_RECIPES

    is_path = "/" in incomplete or any(path.name.startswith(incomplete) for path in Path().iterdir())
    if not incomplete or is_path:
        return []
    return sorted(path.stem for path in PROJECT_RECIPES.glob("[!_]*.py"))
