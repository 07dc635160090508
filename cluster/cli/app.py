"""The command line: parses the arguments, calls `cluster.jobs` and prints the result.

Start-up must stay fast: a command imports what it needs inside its function; `--help` and Tab load no large package.
"""

import os
import shlex
import sys
from pathlib import Path

import click

from cluster.display.terminal import prepare_standard_streams
from cluster.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE
from train.tools.files import use_utf8_names

from . import checks, cloud, completion, data, inspect, launch, plan, results, run
from .options import CommandGroup, exit_with_error


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="imgnet-cluster", prog_name="imgnet-cluster")
def cli() -> None:
    """Train an image classifier, or run any PyTorch script, on your own machines or on rented ones.

    \b
    imgnet-cluster launch --local recipes/quickstart.py      train on a generated data set, on this computer
    imgnet-cluster run --local -- python train.py            run a script of your own as torchrun would
    imgnet-cluster attach job-1                              show the live tmux session
    imgnet-cluster tensorboard job-1                         show the curves
    """


@click.command()
@click.argument("folder", required=False, default=".", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Write a small project of your own into FOLDER.

    It has a recipe, a model and a loss, and trains at once on the built-in data set. No file is replaced.
    """
    from cluster.new_project import write_project

    kept = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for path in write_project(folder):
        click.echo(path)
    if kept:
        more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
        click.echo(f"kept as it was: {', '.join(kept[:3])}{more}", err=True)
    change_folder = "" if folder == Path() else f"cd {shlex.quote(str(folder))}; "
    click.echo(f"train it: {change_folder}imgnet-cluster launch --local recipe.py", err=True)


@click.command("completion")
@click.argument("shell", type=click.Choice([*completion.SHELLS]))
def completion_command(shell: str) -> None:
    """Print a script that completes the command line in SHELL.

    It completes commands, options, jobs, recipes, machines, files, and the names of AWS's types, regions and zones. It
    makes no request.

    \b
    bash   imgnet-cluster completion bash > ~/.local/share/bash-completion/completions/imgnet-cluster
    zsh    imgnet-cluster completion zsh > ~/.zfunc/_imgnet-cluster          with ~/.zfunc in fpath before compinit
    fish   imgnet-cluster completion fish > ~/.config/fish/completions/imgnet-cluster.fish
    """
    click.echo(completion.completion_script(cli, shell))


cli.add_section("Start", init, completion_command)
cli.add_section("Plan and run", plan.plan, *launch.COMMANDS, *run.COMMANDS)
cli.add_section("Look at jobs", *inspect.COMMANDS)
cli.add_section("Results", *results.COMMANDS)
cli.add_section("AWS", *cloud.COMMANDS, *checks.COMMANDS)
cli.add_section("Data", data.data)


def prepare_environment() -> None:
    """Name the user and the home where this computer knows neither, as in `docker run --user`: libraries ask for both.

    Exits with one line when the current folder is gone: relative paths and the folder `runs` mean nothing then.
    """
    try:
        Path.home()
    except RuntimeError:
        os.environ |= {"HOME": "/", "LOGNAME": os.environ.get("LOGNAME") or f"uid-{os.getuid()}"}
    try:
        Path.cwd()
    except FileNotFoundError:
        exit_with_error("the current folder was deleted; change to another one, such as: cd ~", EXIT_ERROR)


def main() -> None:
    """Run the command line and exit. Usage errors that click finds are one line too."""
    use_utf8_names()
    prepare_standard_streams()
    prepare_environment()
    try:
        sys.exit(cli.main(prog_name="imgnet-cluster", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(EXIT_USAGE)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        words = [word for word in sys.argv[1:2] if word in cli.commands]  # click has no context for some errors
        command_path = context.command_path if context else " ".join(["imgnet-cluster", *words])
        message = " ".join(error.format_message().split())
        exit_with_error(f"{message} ({command_path} --help)", EXIT_USAGE)
    except click.Abort:
        exit_with_error("interrupted", EXIT_INTERRUPTED)
