"""The command line: parse, call `jobs`, show. Thin, and quick: what a command needs is imported inside it."""

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from .cli_data import data
from .command import Group, Number, fail, output, print_json, schedule_options, yes
from .errors import INTERRUPTED, OK, UNFINISHED, USAGE, BadInput, ClusterError

if TYPE_CHECKING:
    from .jobs import Job


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="imgnet-cluster", prog_name="imgnet-cluster")
def cli() -> None:
    """Train an ImageNet-scale image classifier on the machines you have, with one command.

    \b
    imgnet-cluster launch --local recipes/quickstart.py      draw a data set and train on it, here
    imgnet-cluster attach job-1                              the live tmux session
    imgnet-cluster tensorboard job-1                         its curves
    """


@cli.command()
@click.argument("recipe")
@schedule_options
@output
def plan(recipe: str, output: str, only: tuple[str, ...], **options: Any) -> None:
    """Show what RECIPE would do: its rows with global batch, rate and steps. Starts nothing."""
    from . import view

    plans = [_plan(one, recipe, options) for one in _select(recipe, only)]
    if output == "table":
        for one in plans:
            view.show_plan(one)
        return
    shown = [
        {
            "recipe": one.spec.recipe.name,
            "machines": one.spec.machines,
            "gpus": one.spec.gpus,
            "images": one.schedule.images,
            "phases": one.schedule.table(),
            "steps": one.schedule.steps,
            "notes": list(one.notes),
        }
        for one in plans
    ]
    print_json(shown[0] if len(shown) == 1 else shown)


def _select(recipe: str, only: tuple[str, ...]) -> list[Any]:
    from train.recipe_file import RecipeError, select

    from . import jobs

    try:
        return select(jobs.load_recipes(recipe), only)
    except RecipeError as error:
        raise BadInput(str(error)) from error


def _plan(recipe: Any, file: str, options: dict[str, Any], backend: str = "plan") -> Any:
    from . import jobs

    return jobs.plan(recipe, recipe_file=file, backend=backend, **options)


@cli.command()
@click.argument("recipe")
@click.option("--local", is_flag=True, help="On this computer.")
@schedule_options
@click.option(
    "--copies", metavar="DIR", help="Prepared copies of the images. [default: the data folder's name with -sz]"
)
@click.option("--max-hours", type=Number(0, min_open=True), help="Save and end after so long.")
@click.option("--save-seconds", type=Number(0), default=60.0, show_default=True, help="A checkpoint so often.")
@click.option("--skip-bad", is_flag=True, help="Leave out files that are not images instead of ending.")
@click.option(
    "--workers", type=click.IntRange(0), help="Loader processes of each trainer. [default: by the processors]"
)
@click.option("-d", "--detach", is_flag=True, help="Return as soon as the job is at work.")
@click.option("--dry-run", "--dryrun", is_flag=True, help="Show what would be done.")
@yes
def launch(
    recipe: str, local: bool, detach: bool, dry_run: bool, yes: bool, only: tuple[str, ...], **options: Any
) -> None:
    """Train RECIPE in a tmux session of its own and follow it. Ctrl-C leaves it running.

    Exit code: 0 done, 100 failed, 103 stopped.
    """
    from . import backends, jobs, view

    if not local:
        described = "; ".join(f"--{name}: {backends.get(name).DESCRIPTION}" for name in backends.names())
        raise BadInput(f"say where: {described}")
    if options["machines"] not in (None, 1):
        raise BadInput("--local is one machine; for another table of the recipe: imgnet-cluster plan --machines N")
    plans = [_plan(one, recipe, options, "local") for one in _select(recipe, only)]
    if detach and len(plans) > 1:
        raise BadInput(
            f"{recipe}: has {len(plans)} recipes, and this is one machine; choose with --only, or leave out -d"
        )
    for one in plans:
        view.show_plan(one)
        backends.get("local").check(one.spec, jobs.runs())
    if dry_run:
        click.echo(f"would launch {len(plans)} job{'s' * (len(plans) > 1)} in {jobs.runs()}; nothing was started")
        return
    if not yes and sys.stdin.isatty() and not click.confirm("launch?", default=False):
        raise ClusterError("nothing was started")
    code = OK
    for one in plans:
        job = jobs.launch(one)
        click.echo(f"{job.name} launched, run folder {job.run}")
        view.show_next(job)
        if not detach:
            code = max(code, _follow(job))
    sys.exit(code)


def _follow(job: "Job") -> int:
    from . import view

    try:
        return view.follow(job)
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached; {job.name} goes on. Come back: imgnet-cluster attach {job.name}; "
            f"end it: imgnet-cluster stop {job.name}",
            err=True,
        )
        return INTERRUPTED


def _refresh(job: "Job") -> None:
    """Bring a job up to date as far as that can be; what is known is shown in any case. Raises `ClusterError`."""
    _ = job.spec  # a damaged one is an error, and not a warning as well
    try:
        job.refresh()
    except ClusterError as error:
        click.echo(f"warning: {error}", err=True)


@cli.command()
@output
def ls(output: str) -> None:
    """List the jobs of this folder."""
    from . import jobs, view

    found = []
    for job in jobs.all_jobs():
        try:
            _refresh(job)
            found.append(job.status())
        except ClusterError as error:
            click.echo(f"warning: {error}", err=True)
    if output == "json":
        return print_json(found)
    columns = ("job", "recipe", "state", "epoch", "step", "top1", "top5", "img/s", "time")
    view.table(
        columns,
        [
            (
                one["job"],
                one["recipe"],
                one["state"],
                one["epoch"],
                one["step"],
                *(one[name] and f"{one[name]:.2f}" for name in ("top1", "top5")),
                one["images_per_second"] and f"{one['images_per_second']:.0f}",
                view.span(one["seconds"]),
            )
            for one in found
        ],
    )


@cli.command()
@click.argument("job", required=False)
@click.option("--exit-code", is_flag=True, help="Exit with 0 done, 100 failed, 101 not finished, 103 stopped.")
@output
def status(job: str | None, exit_code: bool, output: str) -> None:
    """Show how JOB stands (default: the newest)."""
    import time

    from . import jobs, view

    found = jobs.find(job)
    _refresh(found)
    said = found.status()
    if output == "json":
        print_json({**said, "result": found.result})
    else:
        said |= {"created": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(said["created"]))}
        for name, value in said.items():
            if value not in (None, ""):
                click.echo(f"{name:18} {value:.4g}" if isinstance(value, float) else f"{name:18} {value}")
    if exit_code:
        sys.exit(view.EXIT.get(said["state"], UNFINISHED))


@cli.command()
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends. Ctrl-C leaves it running.")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Which trainer.")
@click.option("--agent", is_flag=True, help="The agent's changes of state instead.")
def logs(job: str | None, follow: bool, rank: int, agent: bool) -> None:
    """Print what a trainer of JOB has written (default: the newest job, rank 0)."""
    import time

    from . import jobs, view

    found, shown, before = jobs.find(job), 0, None
    while True:
        found.refresh()
        ended, path = found.ended, found.log(None if agent else rank)
        shown = shown if path == before else 0  # from the set-up's to the first attempt's
        before = path
        if not follow and not path.exists():
            raise ClusterError(
                f"{path}: there is no such log; {found.name} has {found.spec.procs} trainers, and is {found.state}"
            )
        if path.exists():
            with path.open("rb") as file:
                file.seek(shown)
                while part := file.read(1 << 20):
                    shown += len(part)
                    sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
        if ended or not follow:
            break
        time.sleep(0.3)
    if follow:
        sys.exit(view.EXIT[found.state])


@cli.command()
@click.argument("job", required=False)
def attach(job: str | None) -> None:
    """Show the tmux session of JOB on this terminal. Ctrl-b d leaves it running."""
    from . import jobs, tmux

    found = jobs.find(job)
    found.refresh()
    if found.ended:
        raise ClusterError(
            f"{found.name} is {found.state}; its session is gone. What it wrote: imgnet-cluster logs {found.name}"
        )
    if not tmux.mine(found.name, found.run):
        raise ClusterError(f"{found.name} has no tmux session; imgnet-cluster status {found.name}")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ClusterError(f"attach needs a terminal; without one: imgnet-cluster logs -f {found.name}")
    os.environ.pop("TMUX", None)  # a session inside the user's own tmux is meant
    words = tmux.attach_command(found.name)
    os.execvp(words[0], words)


@cli.command()
@click.argument("job", required=False)
@click.option("--port", type=click.IntRange(0, 65535), default=6006, show_default=True, help="0 takes a free one.")
def tensorboard(job: str | None, port: int) -> None:
    """Serve the curves of JOB on 127.0.0.1 until Ctrl-C (default: the newest)."""
    from . import jobs
    from . import tensorboard as board

    sys.exit(board.serve(jobs.find(job), port))


@cli.command()
@click.argument("job")
def stop(job: str) -> None:
    """Save JOB and end it; `resume` goes on from there."""
    from . import jobs

    found = jobs.find(job)
    found.stop()
    click.echo(f"{found.name} {found.state}; go on: imgnet-cluster resume {found.name}")


@cli.command()
@click.argument("job")
@click.option("-d", "--detach", is_flag=True, help="Return as soon as the job is at work.")
def resume(job: str, detach: bool) -> None:
    """Go on with JOB from its newest whole checkpoint, and follow it. Ctrl-C leaves it running."""
    from . import jobs

    found = jobs.find(job)
    found.resume()
    click.echo(f"{found.name} resumed")
    sys.exit(OK if detach else _follow(found))


cli.add_command(data)


def main() -> None:
    """Run the command line; click's own errors are one line too."""
    try:
        sys.exit(cli.main(prog_name="imgnet-cluster", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as help:
        click.echo(help.format_message())
        sys.exit(USAGE)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "imgnet-cluster"
        fail(f"{' '.join(error.format_message().split())} ({where} --help)", USAGE)
    except click.Abort:
        fail("interrupted", INTERRUPTED)


if __name__ == "__main__":
    main()
