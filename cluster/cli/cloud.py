"""The commands about rented machines and the AWS resources around them: up, down, gc, cost, extend, offers, check."""

import contextlib
import sys
import time
from typing import TYPE_CHECKING

import click

from cluster.errors import EXIT_ERROR, BadInput, ClusterError, NoSuchJob

from .options import (
    FiniteFloatRange,
    GroupedCommand,
    cloud_option,
    dry_run_option,
    grouped_option,
    open_cloud,
    output_option,
    print_json,
    yes_option,
)

if TYPE_CHECKING:
    from cluster.backends.rentals import CloudAdministration
    from cluster.jobs.job import Job

region_option = grouped_option(
    "AWS", "--region", metavar="REGION", help="AWS region.  [default: from the AWS configuration]"
)


def fail_if_resources_remain(descriptions: list[str]) -> None:
    """Print the resources that could not be removed. Raises `ClusterError` when there are any."""
    for description in descriptions:
        click.echo(f"not removed: {description}", err=True)
    if len(descriptions) == 1:
        raise ClusterError("1 resource was not removed; run the command again")
    if descriptions:
        raise ClusterError(f"{len(descriptions)} resources were not removed; run the command again")


def confirm_or_abort(question: str, assume_yes: bool) -> None:
    """Ask for confirmation on the terminal.

    When the answer is no, the command exits. Raises `ClusterError` when there is no terminal and `assume_yes` is not
    set.
    """
    if assume_yes:
        return
    if not sys.stdin.isatty():
        raise ClusterError(f"{question} There is no terminal to confirm on; pass -y")
    if not click.confirm(question, default=False):
        click.echo("nothing was done", err=True)
        sys.exit(EXIT_ERROR)


@click.command()
@click.option(
    "--stack", is_flag=True, help="Create the long-lived resources of the region: network, file system, keys, role."
)
@click.option("--bucket", metavar="NAME", help="Create an S3 bucket for data too.")
@click.option(
    "--from", "address", metavar="CIDR", help="Address range that may connect by ssh.  [default: this computer]"
)
@region_option
@cloud_option
@dry_run_option
def up(
    stack: bool, bucket: str | None, address: str | None, region: str | None, backend: str | None, dry_run: bool
) -> None:
    """Create the AWS resources that jobs of a region share.

    A launch does so by itself. Run `up --stack` again when the address of this computer has changed: it then allows ssh
    from the new address.
    """
    if not stack:
        raise BadInput("nothing to create; run: imgnet-cluster up --stack")
    cloud = open_cloud(backend)
    if dry_run:
        for description in cloud.missing_stack_parts(region) or ["nothing is missing"]:
            click.echo(description)
        return
    click.echo(cloud.ensure_stack(region, address, bucket))


@click.command()
@click.argument("job", required=False)
@click.option(
    "--all",
    "all_jobs",
    is_flag=True,
    help="All jobs: those in this folder, and every AWS resource with imgnet-cluster's tags.",
)
@click.option(
    "--stack", is_flag=True, help="The stack of a region. Its file system stays unless --delete-data is given."
)
@click.option("--delete-data", is_flag=True, help="With --stack: delete the file system and the bucket with all data.")
@region_option
@cloud_option
@dry_run_option
@yes_option
def down(
    job: str | None,
    all_jobs: bool,
    stack: bool,
    delete_data: bool,
    region: str | None,
    backend: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Terminate JOB at once, with all its rented machines.

    Returns when AWS reports that everything is terminated. Exit code 1 if anything is left. JOB may have been launched
    from another computer: give its name or uid, as `imgnet-cluster ls --cloud` shows it.
    """
    from cluster.jobs import billing, store

    if sum((bool(job), all_jobs, stack)) != 1:
        raise BadInput("give exactly one of: a job, --all, --stack")
    if stack:
        cloud = open_cloud(backend)
        target = "the stack, its file system and all data" if delete_data else "the stack except for its file system"
        if dry_run:
            return click.echo(f"would remove {target} of {cloud.resolve_regions([region] if region else [])[0]}")
        confirm_or_abort(f"remove {target}?", yes)
        return fail_if_resources_remain(cloud.remove_stack(region, delete_data))
    if all_jobs:
        return _down_all(open_cloud(backend), region, dry_run, yes)
    try:
        local_job = store.find(job)
    except NoSuchJob:
        cloud = open_cloud(backend)
        job_region = cloud.resolve_regions([region] if region else [])[0]
        if dry_run:
            return click.echo(f"would terminate everything tagged {job} in {job_region}")
        fail_if_resources_remain(cloud.terminate_job(job_region, str(job)))
        return click.echo(f"{job} is gone")
    if dry_run:
        return click.echo(f"would terminate {local_job.name} (state: {local_job.state}) and all its rented machines")
    had_ended = local_job.has_ended
    billing.terminate_job(local_job)
    if had_ended and not local_job.spec.cloud:
        return click.echo(f"{local_job.name} is {local_job.state}: nothing of it was running, and nothing is billed")
    click.echo(f"{local_job.name} is gone")


def _rented_jobs() -> "list[Job]":
    """Return the jobs of this folder that run, or ran, on rented machines. Damaged run folders are left out."""
    from cluster.jobs import store

    rented_jobs = []
    for job in store.all_jobs():
        with contextlib.suppress(ClusterError):
            if job.spec.cloud:
                rented_jobs.append(job)
    return rented_jobs


def _regions_to_search(cloud: "CloudAdministration", region: str | None) -> list[str]:
    """Return the named region; without one, the configured region and those of this folder's jobs."""
    if region:
        return [region]
    own_specs = [job.spec for job in _rented_jobs() if job.spec.backend == cloud.backend]
    job_regions = {job_region for spec in own_specs for job_region in cloud.regions_of(spec)}
    return sorted({*cloud.resolve_regions([]), *job_regions})


def _down_all(cloud: "CloudAdministration", region: str | None, dry_run: bool, assume_yes: bool) -> None:
    """Terminate the unfinished jobs of this folder, and every instance with imgnet-cluster's tags in the regions."""
    from cluster.jobs import billing

    # Waiting jobs first: otherwise the queue would start them as soon as the running ones end.
    unfinished_jobs = sorted((job for job in _rented_jobs() if not job.has_ended), key=lambda job: not job.is_waiting)
    regions = _regions_to_search(cloud, region)
    own_uids = {job.spec.uid for job in unfinished_jobs}
    tagged_uids = [row.uid for name in regions for row in cloud.rented_jobs(name)]
    names = [*(job.name for job in unfinished_jobs), *(uid for uid in tagged_uids if uid not in own_uids)]
    if not names:
        return click.echo("nothing to terminate")
    if dry_run:
        return click.echo(f"would terminate {', '.join(names)}")
    confirm_or_abort(f"terminate {', '.join(names)}?", assume_yes)
    remaining: list[str] = []
    for job in unfinished_jobs:
        try:
            billing.terminate_job(job)
        except (ClusterError, OSError) as error:
            remaining.append(str(error))
    for name in regions:
        remaining += cloud.terminate_jobs(name, [row.uid for row in cloud.rented_jobs(name)])
    fail_if_resources_remain(remaining)
    click.echo(f"{', '.join(names)}: gone")


@click.command()
@click.option("--unknown", is_flag=True, help="Include resources of jobs that are not in this folder.")
@region_option
@cloud_option
@click.option("-y", "--yes", is_flag=True, help="Delete the resources.  [default: only list them]")
@output_option
def gc(unknown: bool, region: str | None, backend: str | None, yes: bool, output: str) -> None:
    """Remove leftover AWS resources of imgnet-cluster's jobs.

    A resource is left over when no unfinished job owns it, or when it is past its expiry time. Without --yes the
    resources are only listed.
    """
    from cluster.backends.rentals import Garbage
    from train.tools.records import encode

    cloud = open_cloud(backend)
    is_live_by_uid = {job.spec.uid: not job.has_ended for job in _rented_jobs()}
    remaining: list[str] = []
    found: list[Garbage] = []
    for name in _regions_to_search(cloud, region):
        garbage = cloud.find_garbage(name, is_live_by_uid, unknown, time.time())
        found.append(garbage)
        if output == "table":
            for description in garbage.remove.values():
                click.echo(f"{'removing' if yes else 'would remove'} {description}")
            for description in garbage.stay:
                click.echo(f"leaving {description}")
        if yes:
            remaining += cloud.terminate_jobs(name, list(garbage.remove))
    if output == "json":
        print_json([encode(garbage) for garbage in found])
    elif not any(garbage.remove for garbage in found):
        click.echo(f"nothing to remove in {', '.join(garbage.region for garbage in found)}")
    elif not yes:
        click.echo("nothing was removed; to remove: imgnet-cluster gc --yes")
    fail_if_resources_remain(remaining)


@click.command()
@click.argument("job", required=False)
@click.option(
    "--top5",
    metavar="PERCENT",
    type=FiniteFloatRange(0, 100),
    help="Also show the cost until validation first reached this top-5 accuracy (in percent).",
)
@output_option
def cost(job: str | None, top5: float | None, output: str) -> None:
    """Show what JOB has cost (default: the newest job).

    Per machine, disk and address; per epoch; until the target; and for work that had to be repeated after losses.
    """
    from cluster.display import cloud as display_cloud
    from cluster.jobs import billing, store

    from .inspect import refresh

    found_job = store.find(job)
    refresh(found_job)  # its machines may have been terminated while nothing here was watching
    report = billing.cost_report(found_job, top5)
    if output == "json":
        print_json(report.to_json())
    else:
        display_cloud.show_cost(report)


@click.command()
@click.argument("job")
@click.option(
    "--max-hours",
    metavar="HOURS",
    type=FiniteFloatRange(0, min_open=True),
    required=True,
    help="New limit in hours since the first machine of this launch started.",
)
def extend(job: str, max_hours: float) -> None:
    """Change the time limit of JOB on its rented machines.

    At the limit the job saves a checkpoint and stops. The limit can be raised or lowered.
    """
    from cluster.jobs import billing, store

    running_job = store.find(job)
    billing.extend(running_job, max_hours)
    click.echo(f"{running_job.name} may take {max_hours:g} hours")


@click.command()
@click.option("--gpu", metavar="NAME", help="Only types with this GPU, such as A100.")
@click.option("--recipe", metavar="RECIPE", help="Add a forecast of this recipe's minutes and dollars on each type.")
@click.option(
    "--machines",
    metavar="N",
    type=click.IntRange(1),
    help="Number of machines for the forecast.  [default: as the recipe says]",
)
@region_option
@cloud_option
@output_option
def offers(
    gpu: str | None, recipe: str | None, machines: int | None, region: str | None, backend: str | None, output: str
) -> None:
    """Show the GPU instance types that EC2 offers now, with prices.

    One row for each type and availability zone.
    """
    from cluster.display import cloud as display_cloud
    from cluster.planning.resolve import load_recipes
    from train.tools.records import encode

    recipes = load_recipes(recipe) if recipe else []
    if len(recipes) > 1:
        raise BadInput(f"{recipe}: has {len(recipes)} recipes; --recipe takes a file with one")
    rows = open_cloud(backend).offer_rows(region, gpu, recipes[0] if recipes else None, machines)
    if output == "json":
        print_json([encode(row) for row in rows])
    else:
        display_cloud.show_offers(rows)


@click.command(cls=GroupedCommand)
@click.argument("recipe", required=False)
@grouped_option(
    "Machines",
    "--machines",
    metavar="N",
    type=click.IntRange(1),
    help="Number of machines.  [default: as the recipe says]",
)
@grouped_option("AWS", "--type", metavar="TYPE", help="EC2 instance type.  [default: the types of the recipe]")
@grouped_option("AWS", "--on-demand", is_flag=True, help="Check for on-demand instances.  [default: spot instances]")
@region_option
@cloud_option
@grouped_option(
    "AWS",
    "--iam",
    is_flag=True,
    help="Print the minimal IAM policies of the user and of the machines as JSON, for --region or all, and exit.",
)
@grouped_option(
    "AWS",
    "--data",
    metavar="S3",
    help="With --iam: also allow reading this data set outside the stack's bucket, such as s3://my-bucket/imagenet.",
)
@output_option
def check(
    recipe: str | None,
    machines: int | None,
    type: str | None,
    on_demand: bool,
    iam: bool,
    data: str | None,
    region: str | None,
    backend: str | None,
    output: str,
) -> None:
    """Check whether a launch on AWS would succeed.

    Checks permissions, quotas, prices and types, and shows what to type next for each problem. Exit code 1 if there is
    a problem.
    """
    from cluster.display import cloud as display_cloud
    from cluster.planning.resolve import load_recipes
    from train.tools.records import encode

    cloud = open_cloud(backend)
    if iam:
        return print_json(cloud.iam_policies(region, data))
    if data:
        raise BadInput("--data needs --iam: it adds the permission to read that data set to the policies")
    checked_recipe = load_recipes(recipe)[0] if recipe else None
    types = [type] if type else list(checked_recipe.types) if checked_recipe else []
    machine_count = machines or (checked_recipe.machines if checked_recipe else 1)
    findings = cloud.check_launch(region, types, machine_count, "on-demand" if on_demand else "spot")
    if output == "json":
        print_json([encode(finding) for finding in findings])
    else:
        display_cloud.show_findings(findings)
    if any(finding.level == "error" for finding in findings):
        sys.exit(EXIT_ERROR)


COMMANDS = (up, down, gc, cost, extend, offers, check)
