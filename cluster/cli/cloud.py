"""The commands about what is rented: up, down, gc, cost, extend, offers, check."""

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import EXIT_ERROR, BadInput, ClusterError, NoSuchJob

from .options import FiniteFloatRange, output_option, print_json, yes_option

if TYPE_CHECKING:
    from cluster.jobs.submit import Job

region_option = click.option("--region", metavar="REGION", help="Where. [default: as the AWS configuration says]")
dry_run_option = click.option("--dry-run", "--dryrun", is_flag=True, help="Show what would be done.")


def print_progress(text: str) -> None:
    """Tell what is being done: talk, not data."""
    click.echo(text, err=True)


def fail_if_resources_remain(descriptions: list[str]) -> None:
    """Say what is still there, and fail for it."""
    for one in descriptions:
        click.echo(f"still there: {one}", err=True)
    if descriptions:
        raise ClusterError(f"{len(descriptions)} thing{'s are' if len(descriptions) > 1 else ' is'} still there")


def confirm_or_abort(question: str, assume_yes: bool) -> None:
    """Ask a person. Raises `ClusterError` when the answer is no, or there is nobody to answer."""
    if not assume_yes and not sys.stdin.isatty():
        raise ClusterError(f"{question} nobody can answer that here; say so: -y")
    if not assume_yes and not click.confirm(question, default=False):
        raise ClusterError("nothing was done")


@click.command()
@click.option("--stack", is_flag=True, help="The long-lived things of a region: network, file system, keys, role.")
@click.option("--bucket", metavar="NAME", help="And a bucket for data.")
@click.option("--from", "address", metavar="CIDR", help="Whom ssh is open to. [default: this computer]")
@region_option
@dry_run_option
def up(stack: bool, bucket: str | None, address: str | None, region: str | None, dry_run: bool) -> None:
    """Make the stack of a region; a launch does so by itself. Let this computer's address in when it has changed."""
    from cluster.backends.aws import admin

    if not stack:
        raise BadInput("say what: imgnet-cluster up --stack")
    if dry_run:
        for one in admin.missing_stack_parts(region) or ["nothing is missing"]:
            click.echo(one)
        return
    made = admin.ensure_stack(region, address, bucket, print_progress)
    click.echo(f"the stack of {made.region} is there: {made.vpc}, file system {made.file_system}")


@click.command()
@click.argument("job", required=False)
@click.option("--all", "everything", is_flag=True, help="All jobs: those of this folder, and all that bears our tags.")
@click.option("--stack", is_flag=True, help="The stack of a region; its file system only with --delete-data.")
@click.option("--delete-data", is_flag=True, help="With --stack: the file system and the bucket too, with all in them.")
@region_option
@dry_run_option
@yes_option
def down(
    job: str | None, all_jobs: bool, stack: bool, delete_data: bool, region: str | None, dry_run: bool, yes: bool
) -> None:
    """End JOB at once and all that it rents; return when AWS says that it is gone. Exit code 1 while anything is left.

    JOB may be one that this computer never saw: its name or uid, as ls --cloud shows it.
    """
    from cluster.jobs import billing, store

    if sum((bool(job), all_jobs, stack)) != 1:
        raise BadInput("say what: a job, --all, or --stack")
    if stack:
        from cluster.backends.aws import admin

        what = "the stack with its file system and all data" if delete_data else "the stack but for its file system"
        if dry_run:
            return click.echo(f"would remove {what} of {admin.resolve_regions([region] if region else [])[0]}")
        confirm_or_abort(f"remove {what}?", yes)
        return fail_if_resources_remain(admin.remove_stack(region, delete_data, print_progress))
    if all_jobs:
        return _down_all(region, dry_run, yes)
    try:
        found = store.find(job)
    except NoSuchJob:
        from cluster.backends.aws import admin

        there = admin.resolve_regions([region] if region else [])[0]
        if dry_run:
            return click.echo(f"would end all that bears the tag of {job} in {there}")
        fail_if_resources_remain(admin.terminate_job(there, str(job), print_progress))
        return click.echo(f"{job} is gone")
    if dry_run:
        return click.echo(f"would end {found.name}, which is {found.state}, and all that it rents")
    billing.terminate_job(found)
    click.echo(f"{found.name} is gone")


def _rented_jobs() -> "list[Job]":
    """The jobs of this folder that rent, or rented; a damaged one is left out."""
    from cluster.jobs import store

    found = []
    for one in store.all_jobs():
        with contextlib.suppress(ClusterError):
            found += [one] if one.spec.cloud else []
    return found


def _regions_to_search(region: str | None) -> list[str]:
    """Return the regions to look at: the one named, else the usual one and those of this folder's jobs."""
    from cluster.backends.aws import admin

    if region:
        return [region]
    own = {place["region"] for one in _rented_jobs() for place in (one.spec.cloud or {})["places"]}
    return sorted({*admin.resolve_regions([]), *own})


def _down_all(region: str | None, dry_run: bool, assume_yes: bool) -> None:
    from cluster.backends.aws import admin
    from cluster.jobs import billing

    mine = sorted(
        (one for one in _rented_jobs() if not one.has_ended), key=lambda one: not one.is_waiting
    )  # else their turn comes
    regions = _regions_to_search(region)
    uids = {one.spec.uid: one for one in mine}
    found = [row for where in sorted(regions) for row in admin.summarize_by_job(admin.list_instances(where))]
    names = [*[one.name for one in mine], *[row["uid"] for row in found if row["uid"] not in uids]]
    if dry_run or not names:
        return click.echo(f"would end {', '.join(names)}" if names else "there is nothing to end")
    confirm_or_abort(f"end {', '.join(names)}?", assume_yes)
    lines: list[str] = []
    for one in mine:
        try:
            billing.terminate_job(one)
        except (ClusterError, OSError) as error:
            lines.append(str(error))
    for where in sorted(regions):
        lines += admin.terminate_jobs(
            where, sorted({one.job_uid for one in admin.list_instances(where)}), print_progress
        )
    fail_if_resources_remain(lines)
    click.echo(f"{', '.join(names)}: gone")


@click.command()
@click.option("--unknown", is_flag=True, help="Also what belongs to a job that this folder does not know.")
@region_option
@click.option("-y", "--yes", is_flag=True, help="Do it; without it is only shown what would be done.")
@output_option
def gc(unknown: bool, region: str | None, yes: bool, output: str) -> None:
    """Remove what bears our tags and belongs to no live job, or is past its time. Only shows it without --yes."""
    from cluster.backends.aws import admin

    known = {one.spec.uid: not one.has_ended for one in _rented_jobs()}
    lines: list[str] = []
    shown = []
    for where in _regions_to_search(region):
        remove, stay = admin.find_garbage(where, known, unknown, time.time())
        shown.append({"region": where, "remove": remove, "stay": stay})
        if output == "table":
            for one in remove.values():
                click.echo(f"{'removing' if yes else 'would remove'} {one}")
            for one in stay:
                click.echo(f"leaving {one}")
        if yes:
            lines += admin.terminate_jobs(where, list(remove), print_progress)
    if output == "json":
        print_json(shown)
    elif not any(one["remove"] for one in shown):
        click.echo(f"nothing to remove in {', '.join(str(one['region']) for one in shown)}")
    elif not yes:
        click.echo("nothing was removed; do it: imgnet-cluster gc --yes")
    fail_if_resources_remain(lines)


@click.command()
@click.argument("job", required=False)
@click.option(
    "--top5",
    type=FiniteFloatRange(0, 100),
    help="What had been spent when the validation first reached so many percent.",
)
@output_option
def cost(job: str | None, top5: float | None, output: str) -> None:
    """Show what JOB has cost (default: the newest): machines, disks, addresses; per epoch, to the target, wasted."""
    from cluster.display import cloud
    from cluster.jobs import billing, store

    from .inspect import refresh

    mine = store.find(job)
    refresh(mine)  # its machines may have gone with nobody here to see it
    found = billing.cost_report(mine, top5)
    if output == "json":
        print_json(found)
    else:
        cloud.show_cost(found)


@click.command()
@click.argument("job")
@click.option(
    "--max-hours", type=FiniteFloatRange(0, min_open=True), required=True, help="Since the first of its machines came."
)
def extend(job: str, max_hours: float) -> None:
    """Give JOB more time, or less: it saves and ends so many hours after the first machine of this launch came."""
    from cluster.jobs import billing, store

    found = store.find(job)
    billing.extend(found, max_hours)
    click.echo(f"{found.name} may take {max_hours:g} hours")


@click.command()
@click.option("--gpu", metavar="NAME", help="Only with such GPUs, such as A100.")
@click.option("--recipe", metavar="RECIPE", help="With the forecast of this recipe, for --machines.")
@click.option("--machines", type=click.IntRange(1), help="How many machines. [default: as the recipe says]")
@region_option
@output_option
def offers(gpu: str | None, recipe: str | None, machines: int | None, region: str | None, output: str) -> None:
    """Show what EC2 offers now: types by zone, GPUs, prices; with --recipe its minutes and dollars on each."""
    from cluster.backends.aws import admin
    from cluster.display import cloud
    from cluster.jobs import submit

    recipes = submit.load_recipes(recipe) if recipe else []
    if len(recipes) > 1:
        raise BadInput(f"{recipe}: has {len(recipes)} recipes; --recipe takes a file with one")
    rows = admin.offer_rows(region, gpu, recipes[0] if recipes else None, machines)
    if output == "json":
        print_json(rows)
    else:
        cloud.show_offers(rows)


@click.command()
@click.argument("recipe", required=False)
@click.option("--machines", type=click.IntRange(1), help="How many machines. [default: as the recipe says]")
@click.option("--type", metavar="TYPE", help="This type. [default: those of the recipe]")
@click.option("--on-demand", is_flag=True, help="Machines that nobody takes away.")
@click.option("--iam", is_flag=True, help="Print the least policies, of the user and of the machines, as JSON.")
@click.option(
    "--data", metavar="S3", help="With --iam: also what reading a set there takes, outside the stack's bucket."
)
@region_option
@output_option
def check(
    recipe: str | None,
    machines: int | None,
    type: str | None,
    on_demand: bool,
    iam: bool,
    data: str | None,
    region: str | None,
    output: str,
) -> None:
    """Show all that stands in the way of a launch at AWS, with what to type next. Exit code 1 when something does."""
    from cluster.backends.aws import admin
    from cluster.display import cloud
    from cluster.jobs import submit

    if iam:
        return print_json(admin.iam_policies(data))
    if data:
        raise BadInput("--data goes with --iam: it prints what reading a set there takes")
    found = submit.load_recipes(recipe)[0] if recipe else None
    types = [type] if type else list(found.types) if found else []
    count = machines or (found.machines if found else 1)
    findings = admin.check_launch(region, types, count, "on-demand" if on_demand else "spot")
    rows: list[dict[str, Any]] = [vars(one) for one in findings]
    if output == "json":
        print_json(rows)
    else:
        cloud.show_findings(rows)
    if any(one["level"] == "error" for one in rows):
        sys.exit(EXIT_ERROR)


COMMANDS = (up, down, gc, cost, extend, offers, check)
