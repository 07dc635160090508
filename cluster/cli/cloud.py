"""The commands about rented machines and the AWS resources around them: up, down, gc, cost, extend, offers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cluster.errors import BadInput, ClusterError, NoSuchJob
from infra.errors import NoAnswer, NoCredentials

from .options import (
    FaultTolerantCommand,
    FiniteFloatRange,
    GroupedCommand,
    ask_regions,
    confirm_or_abort,
    describe_regions,
    dry_run_option,
    flag,
    grouped_option,
    launch_options,
    network_ids,
    open_cloud,
    output_option,
    pluralize,
    print_json,
    print_rows,
    regions_option,
    typed_options,
    warn,
    yes_option,
)

if TYPE_CHECKING:
    from cluster.backends.aws.admin import AwsAdministration
    from cluster.jobs.job import Job

DEFAULT_BLOCK_HOURS = 24.0
MORE_HOURS = 1e-3  # two limits that are computed from the same dollars differ by less
region_option = grouped_option(
    "AWS",
    "--region",
    metavar="REGION",
    config_name="regions",
    help="AWS region.  [default: from the AWS configuration]",
)
tag_option = grouped_option(
    "AWS",
    "--tag",
    "tags",
    metavar="KEY=VALUE",
    multiple=True,
    config_name="tags",
    help="Tag of the AWS resources that a launch creates, as your organization may demand. Can be given several times.",
)


def fail_if_resources_remain(descriptions: list[str]) -> None:
    """Print the resources that could not be removed. Raises `ClusterError` when there are any."""
    for description in descriptions:
        click.echo(f"not removed: {description}", err=True)
    if descriptions:
        were = "was" if len(descriptions) == 1 else "were"
        raise ClusterError(f"{pluralize(len(descriptions), 'resource')} {were} not removed; run the command again")


@click.command(cls=GroupedCommand)
@flag("AWS", "--stack", help="Create the long-lived resources of the region: network, file system, keys, role.")
@grouped_option("AWS", "--bucket", metavar="imgnet-NAME", help="Create an S3 bucket for data too.")
@grouped_option(
    "AWS", "--from", "address", metavar="CIDR", help="Address range that may connect by ssh.  [default: this computer]"
)
@launch_options(
    vpc="Put it into this network of your own, which is not changed.",
    subnets="Use these subnets only, one in each zone.",
)
@tag_option
@region_option
@dry_run_option
def up(
    stack: bool,
    bucket: str | None,
    address: str | None,
    vpc: str | None,
    subnets: tuple[str, ...],
    tags: tuple[str, ...],
    region: str | None,
    dry_run: bool,
) -> None:
    """Create the AWS resources that jobs of a region share.

    A launch does so by itself. Run `up --stack` again when the address of this computer has changed: it then allows ssh
    from the new address.
    """
    if not stack:
        raise BadInput("nothing to create; run: imgnet-cluster up --stack")
    cloud = open_cloud()
    ids = network_ids(vpc, subnets)
    if dry_run:
        for description in cloud.missing_stack_parts(region, ids, bucket) or ["nothing is missing"]:
            click.echo(description)
        return
    click.echo(cloud.ensure_stack(region, address, bucket, tags, ids))


@click.command(cls=FaultTolerantCommand)
@click.argument("job", required=False)
@flag(
    "Options",
    "--all",
    "all_jobs",
    help="All jobs: those in this folder, also not rented ones, and every AWS resource with imgnet-cluster's tags.",
)
@flag(
    "Options",
    "--stack",
    help="Delete the shared AWS resources of one region: that of --region, or the configured one. The file system "
    "stays unless --delete-data is given.",
)
@flag("Options", "--delete-data", help="With --stack: delete the file system and the bucket with all data.")
@regions_option
@dry_run_option
@yes_option
def down(
    job: str | None, all_jobs: bool, stack: bool, delete_data: bool, regions: tuple[str, ...], dry_run: bool, yes: bool
) -> None:
    """Terminate JOB at once, with all its rented machines.

    Nothing is saved, so it asks first if JOB trains; `imgnet-cluster stop JOB` saves a checkpoint. Returns when
    AWS reports that everything is terminated. Exit code 1 if anything is left there; machines of --ssh and --slurm
    that do not answer are named. JOB may have been launched from another computer: give its name or uid, as
    `imgnet-cluster ls --cloud` shows it.
    """
    from cluster.jobs import store
    from cluster.planning.config_file import read_config

    if sum((bool(job), all_jobs, stack)) != 1:
        raise BadInput("give exactly one of: a job, --all, --stack")
    if stack:
        read_config()  # raises for a wrong line, which may be the one of the region
        cloud = open_cloud()
        if typed_options({"regions": regions}) and len(regions) > 1:
            raise BadInput("--stack: give one --region at a time")
        region = cloud.resolve_regions(regions)[0]
        file_systems, buckets = cloud.stack_data(region)
        data = " and ".join([f"file system {id}" for id in file_systems] + [f"bucket {name}" for name in buckets])
        extent = f", with all data in {data}" if delete_data else f", all but {data}"
        target = f"the stack of {region}{extent if data else ''}"
        if dry_run:
            return click.echo(f"would remove {target}")
        confirm_or_abort(f"remove {target}?", yes)
        fail_if_resources_remain(cloud.remove_stack(region, delete_data, buckets))
        return click.echo(f"removed {target}")
    if all_jobs:
        return _down_all(open_cloud(), regions, dry_run, yes)
    try:
        local_job = store.find(job)
    except NoSuchJob:
        return _down_elsewhere(open_cloud(), regions, str(job), dry_run, yes)
    if dry_run:
        return click.echo(f"would terminate {local_job.name} (state: {local_job.state}) and all its rented machines")
    had_ended = local_job.has_ended
    if not (yes or had_ended or local_job.is_waiting):
        _confirm_loss(local_job)
    if _terminate(local_job):
        return
    if had_ended and not local_job.spec.cloud:
        return click.echo(f"{local_job.name} is {local_job.state}: nothing of it is running, and nothing is billed")
    click.echo(f"{local_job.name} is gone")


def _terminate(job: "Job") -> list[str]:
    """Terminate a job of this folder, and say which machines did not answer. Returns these. Raises `ClusterError`."""
    from cluster.display.progress import describe_silent_machines
    from cluster.jobs import billing

    silent_machines = billing.terminate_job(job)
    if silent_machines:
        click.echo(describe_silent_machines(job, silent_machines))
    return silent_machines


def _confirm_loss(job: "Job") -> None:
    """Ask before a job that may have trained is terminated. Say what would be lost, and how to keep it."""
    from cluster.state.states import JobState

    status = job.status()
    if not status.step and status.state in (JobState.ACQUIRING, JobState.BOOTING, JobState.SETUP):
        return  # nothing was trained yet
    progress = f", at step {status.step} of {status.steps}" if status.step else ""
    click.echo(
        f"{job.name} is {status.state}{progress}. `down` saves nothing: the steps since its last checkpoint are lost "
        f"(one is saved every {job.spec.train.save_seconds:g} s). To save and end it: "
        f"imgnet-cluster stop {job.run.handle}",
        err=True,
    )
    confirm_or_abort(f"terminate {job.name} without saving?", assume_yes=False)


def _down_elsewhere(
    cloud: "AwsAdministration", regions: Sequence[str], uid_or_name: str, dry_run: bool, assume_yes: bool
) -> None:
    """Terminate a job of another folder or computer, in the only region in which it rents, or else the first."""
    rows_by_region = ask_regions(cloud, regions, cloud.rented_jobs)
    found_regions = [
        region for region, rows in rows_by_region.items() if any(uid_or_name in (row.uid, row.job) for row in rows)
    ]
    if len(found_regions) > 1:
        raise BadInput(f"{uid_or_name}: found in {', '.join(found_regions)}; give one --region")
    region = [*found_regions, *rows_by_region][0]
    if dry_run:
        return click.echo(f"would terminate everything tagged {uid_or_name} in {region}")
    if found_regions:
        confirm_or_abort(f"terminate {uid_or_name}, with all that it rents in {region}, without saving?", assume_yes)
    fail_if_resources_remain(cloud.terminate_job(region, uid_or_name))
    click.echo(f"{uid_or_name} is gone")


def _down_all(cloud: "AwsAdministration", regions: Sequence[str], dry_run: bool, assume_yes: bool) -> None:
    """Terminate the unfinished jobs of this folder, and all that is billed with imgnet-cluster's tags in the regions.

    Where the cloud cannot be asked, that is an error only if a region was typed, or a job of this folder was rented.
    """
    from cluster.jobs import billing

    # Waiting jobs come first: otherwise the queue would start them as soon as the running ones end. The machines of a
    # damaged run folder are found by their tags.
    unfinished_jobs = billing.unfinished_jobs()
    tagged_uids: dict[str, list[str]] = {}
    unasked_reason = ""
    try:
        rows_by_region = ask_regions(cloud, regions, cloud.rented_jobs)
        tagged_uids = {name: [row.uid for row in rows] for name, rows in rows_by_region.items() if rows}
    except (NoCredentials, NoAnswer) as error:
        unasked_reason = f"machines of other folders and computers were not looked for: {error}"
        warn(unasked_reason)
    may_have_machines = bool(unasked_reason and (typed_options({"regions": regions}) or billing.rented_jobs()))
    own_uids = {job.spec.uid for job in unfinished_jobs}
    other_uids = [uid for uids in tagged_uids.values() for uid in uids if uid not in own_uids]
    names = [*(job.name for job in unfinished_jobs), *other_uids]
    remaining: list[str] = []
    if not names:
        click.echo("nothing to terminate")
    elif dry_run:
        click.echo(f"would terminate {', '.join(names)}")
    else:
        not_rented = [f"{job.name} (--{job.spec.backend}, not rented)" for job in unfinished_jobs if not job.spec.cloud]
        rented = [job.name for job in unfinished_jobs if job.spec.cloud]
        confirm_or_abort(f"terminate {', '.join([*rented, *not_rented, *other_uids])}, without saving?", assume_yes)
        for job in unfinished_jobs:
            try:
                _terminate(job)
            except (ClusterError, OSError) as error:
                remaining.append(str(error))
        for name in tagged_uids:  # asked again: a machine may have been replaced meanwhile
            remaining += cloud.terminate_jobs(name, [row.uid for row in cloud.rented_jobs(name)])
    fail_if_resources_remain(remaining)
    if names and not dry_run:
        click.echo(f"{', '.join(names)}: gone")
    if may_have_machines:
        raise ClusterError("other machines may run; once AWS answers, type again: imgnet-cluster down --all")


@click.command(cls=FaultTolerantCommand)
@flag("Options", "--unknown", help="Include resources of jobs that are not in this folder.")
@regions_option
@flag("Options", "-y", "--yes", help="Delete the resources.  [default: only list them]")
@output_option
def gc(unknown: bool, regions: tuple[str, ...], yes: bool, output: str) -> None:
    """Remove leftover AWS resources of imgnet-cluster's jobs.

    A resource is left over when no unfinished job owns it, or when it is past its expiry time. Without --yes the
    resources are only listed.
    """
    from cluster.jobs import billing

    cloud = open_cloud()
    is_live_by_uid = {job.spec.uid: not job.has_ended for job in billing.rented_jobs()}
    remaining: list[str] = []
    found = ask_regions(cloud, regions, lambda region: cloud.find_garbage(region, is_live_by_uid, unknown))
    for name, garbage in found.items():
        if output == "table":
            for description in garbage.remove.values():
                click.echo(f"{'removing' if yes else 'would remove'} {description}")
            for description in garbage.stay:
                click.echo(f"leaving {description}")
        if yes:
            remaining += cloud.terminate_jobs(name, list(garbage.remove))
    if output == "json":
        print_json([*found.values()])
    elif not any(garbage.remove for garbage in found.values()):
        click.echo(f"nothing to remove in {describe_regions(found)}")
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
@click.argument("job", required=False)
@click.option(
    "--max-hours",
    metavar="HOURS",
    type=FiniteFloatRange(0, min_open=True),
    help="New limit in hours since the first machine of this launch started.",
)
@click.option(
    "--max-price-total",
    "max_dollars",
    metavar="DOLLARS",
    type=FiniteFloatRange(0, min_open=True),
    help="New limit for all that JOB costs, with what it has cost already.",
)
@yes_option
def extend(job: str | None, max_hours: float | None, max_dollars: float | None, yes: bool) -> None:
    """Change the limits of JOB: hours, dollars, or both.

    Without JOB, the newest job is taken. At a limit the job saves a checkpoint and stops. A limit can be raised or
    lowered. More time for machines that cost money needs a yes, or -y. The limit in dollars of a job that has stopped
    can be raised before it is resumed.
    """
    from cluster.display import cloud as display_cloud
    from cluster.jobs import billing, store
    from train.metrics.text import hours_text

    if max_hours is None and max_dollars is None:
        raise BadInput("give a limit: --max-hours HOURS, --max-price-total DOLLARS, or both")
    extended_job = store.find(job)
    before = billing.rental_limit(extended_job)
    after = billing.rental_limit(extended_job, max_hours, max_dollars)
    if before and after and after.hours > before.hours + MORE_HOURS:
        confirm_or_abort(display_cloud.extension_question(extended_job.name, before, after), yes)
    hours = billing.extend(extended_job, max_hours, max_dollars)
    limits = [f"cost ${max_dollars:,.2f}"] if max_dollars is not None else []
    limits += [f"take {hours_text(hours)}"] if hours is not None else []
    click.echo(f"{extended_job.name} may {' and '.join(limits)}")
    if hours is None:
        click.echo(f"  continue     imgnet-cluster resume {extended_job.run.handle}")


@click.command(cls=GroupedCommand)
@click.option("--gpu", metavar="NAME", help="Only types with this GPU, such as A100.")
@click.option("--recipe", metavar="RECIPE", help="Add a forecast of this recipe's minutes and dollars on each type.")
@click.option(
    "--machines",
    metavar="N",
    type=click.IntRange(1),
    help="Number of machines for the forecast, or in the capacity block.  [default: as the recipe says, or 1]",
)
@flag(
    "Options",
    "--capacity-blocks",
    help="Show the capacity blocks that can be bought, and the AWS command that buys one. Nothing is bought.",
)
@click.option(
    "--hours",
    metavar="HOURS",
    type=FiniteFloatRange(0, min_open=True),
    help="With --capacity-blocks: how long the machines are needed. EC2 sells whole days.  [default: 24]",
)
@region_option
@output_option
def offers(
    gpu: str | None,
    recipe: str | None,
    machines: int | None,
    capacity_blocks: bool,
    hours: float | None,
    region: str | None,
    output: str,
) -> None:
    """Show the GPU instance types that EC2 offers now, with prices.

    One row for each type and availability zone. With --capacity-blocks, one row for each block of machines that can be
    reserved for a time.
    """
    from cluster.display import cloud as display_cloud
    from cluster.planning.resolve import load_recipes

    if capacity_blocks:
        if recipe:
            raise BadInput("--recipe: there is no forecast for capacity blocks; leave out one of the two")
        block_rows = open_cloud().capacity_block_rows(region, gpu, machines or 1, hours or DEFAULT_BLOCK_HOURS)
        return print_rows(block_rows, output, display_cloud.show_capacity_blocks)
    if hours is not None:
        raise BadInput("--hours is about --capacity-blocks; add that option")
    recipes = load_recipes(recipe) if recipe else []
    if len(recipes) > 1:
        raise BadInput(f"{recipe}: has {len(recipes)} recipes; --recipe takes a file with one")
    rows = open_cloud().offer_rows(region, gpu, recipes[0] if recipes else None, machines)
    print_rows(rows, output, display_cloud.show_offers)


COMMANDS = (up, down, gc, cost, extend, offers)
