"""The commands that check machines, permissions and the program itself before money is spent: check, selftest."""

import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, BadInput, ClusterError
from infra.errors import NoCredentials

from .cloud import fail_if_resources_remain, region_option, tag_option
from .options import (
    FiniteFloatRange,
    GroupedCommand,
    confirm_or_abort,
    flag,
    grouped_option,
    launch_options,
    network_ids,
    open_cloud,
    output_option,
    print_json,
    print_rows,
    typed_options,
    yes_option,
)

if TYPE_CHECKING:
    from cluster.selftest.session import SelftestSession


@click.command(cls=GroupedCommand)
@click.argument("recipe", required=False)
@launch_options(
    hosts="Check your own machines, those of a hosts.toml file, instead of AWS.",
    machines="Number of machines.  [default: as the recipe says; with --ssh: all of the file]",
    types="EC2 instance type. Can be given several times.  [default: the types of the recipe]",
    reservation="Check for these reserved machines: a reservation (cr-...), or the ARN of a resource group of them.",
    vpc="Check this network of your own (vpc-...). With --iam: also print the permission to use it.",
    subnets="Check this subnet of your own (subnet-...). Can be given several times.",
)
@flag("AWS", "--on-demand", help="Check for on-demand instances.  [default: spot instances]")
@tag_option
@region_option
@flag(
    "AWS",
    "--iam",
    help="Print the minimal IAM policies of user and machines as JSON, for --region or for all regions, and exit.",
)
@grouped_option(
    "Data",
    "--data",
    metavar="DIR|S3",
    help="Folder of the images on the machines, or their address, such as s3://my-bucket/imagenet. With --iam: also "
    "print the permission to read this data set, which is in another bucket.  [default: as the recipe says]",
)
@grouped_option(
    "Notifications",
    "--notify",
    "notify_targets",
    metavar="COMMAND|URL",
    multiple=True,
    help="Send a test notification to this command or webhook, as --notify of launch would, and exit.",
)
@output_option
def check(
    recipe: str | None,
    hosts: str | None,
    machines: int | None,
    types: tuple[str, ...],
    reservation: str | None,
    vpc: str | None,
    subnets: tuple[str, ...],
    on_demand: bool,
    tags: tuple[str, ...],
    iam: bool,
    data: str | None,
    region: str | None,
    notify_targets: tuple[str, ...],
    output: str,
) -> None:
    """Check whether a launch would succeed, on AWS or with --ssh.

    On AWS: permissions, quotas, instance types and images. With --ssh: login and host key, Python and packages, disk
    space, GPUs and driver, clock, shared folder, other jobs and images; nothing is left on the machines. The images are
    those of --data or of RECIPE. --ssh may be in the configuration file; an option for AWS then asks AWS. Each problem
    is printed with what to do. Exit code 1 if there is one that would stop a launch.
    """
    if notify_targets:
        from cluster.notifications.delivery import send_tests

        for label in send_tests(notify_targets):
            click.echo(f"sent to {label}")
        return
    aws_options = {"types": types, "reservation": reservation, "on_demand": on_demand, "tags": tags, "region": region}
    typed = typed_options({"hosts": hosts, "vpc": vpc, "subnets": subnets, **aws_options})
    is_about_aws = bool(typed.keys() - {"hosts"} or iam)
    if "hosts" in typed and is_about_aws:
        raise BadInput("--ssh checks your own machines; leave out the options for AWS")
    if hosts and not is_about_aws:
        return _check_hosts(hosts, recipe, machines, data, output)
    from cluster.display import cloud as display_cloud
    from cluster.planning.resolve import load_recipes
    from train.recipe import SAMPLE

    cloud = open_cloud()
    if iam:
        return print_json(cloud.iam_policies(region, data, vpc))
    checked_recipe = load_recipes(recipe)[0] if recipe else None
    if checked_recipe and not reservation:  # which has machines of one type
        types = types or checked_recipe.types
    machine_count = machines or (checked_recipe.machines if checked_recipe else 1)
    market = "on-demand" if on_demand else "spot"
    if not data and checked_recipe and checked_recipe.data != SAMPLE:
        data = checked_recipe.data.root
    images = "" if data is None or data == "sample" else data
    ids = network_ids(vpc, subnets)
    findings = cloud.check_launch(region, types, machine_count, market, tags, reservation, ids, images)
    print_rows(findings, output, display_cloud.show_findings)
    if any(finding.level == "error" for finding in findings):
        sys.exit(EXIT_ERROR)


def _check_hosts(hosts: str, recipe: str | None, machines: int | None, data: str | None, output: str) -> None:
    """Check the machines of a hosts file as a launch would, and print a report."""
    from cluster.backends import catalog
    from cluster.display.plan import show_host_reports, show_other_jobs
    from cluster.jobs import store
    from cluster.planning.launch_options import make_launch_options
    from cluster.planning.resolve import load_recipes
    from cluster.planning.resolve import plan as resolve_plan
    from train.recipe import SAMPLE, Model, Phase, Recipe

    any_recipe = Recipe(
        name="check",
        data=SAMPLE,
        model=Model(name="resnet18"),
        gpus=1,
        phases=[Phase(epochs=(0, 1), size=32, batch=1, lr=0.1)],
    )
    checked_recipe = load_recipes(recipe)[0] if recipe else any_recipe
    options = make_launch_options("ssh", hosts=hosts, machines=machines, data=data)
    spec = resolve_plan(checked_recipe, options, recipe_file=recipe or "").spec
    backend_class = catalog.backend_class(spec.backend)
    backend_class.check(spec, store.runs_folder())
    reports = backend_class.check_machines(spec)
    if output == "table":
        show_other_jobs(spec)
    print_rows(reports, output, show_host_reports)
    if unusable := sum(bool(report.errors) for report in reports):
        raise ClusterError(f"{unusable} of the {len(reports)} machines cannot be used")
    if output == "table":
        click.echo("all machines can be used")


@click.command(cls=GroupedCommand)
@flag("AWS", "--aws", help="Try an account of AWS.")
@region_option
@tag_option
@grouped_option(
    "AWS",
    "--type",
    "small_type",
    metavar="TYPE",
    default="g6.xlarge",
    show_default=True,
    help="Instance type for the tests with one network card.",
)
@grouped_option(
    "AWS",
    "--large-type",
    metavar="TYPE",
    default="g6e.24xlarge",
    show_default=True,
    help="Instance type for the test with several network cards.",
)
@flag(
    "AWS",
    "--interruption",
    help="Also ask you to interrupt a spot machine in the EC2 console, and wait up to 10 minutes for it.",
)
@grouped_option(
    "Limits",
    "--max-price-total",
    "max_dollars",
    metavar="DOLLARS",
    type=FiniteFloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Highest cost of all machines together.",
)
@flag("Output", "--clean", help="Only remove the leftovers of a killed self-test; test nothing.")
@yes_option
def selftest(
    aws: bool, region: str | None, max_dollars: float, interruption: bool, clean: bool, yes: bool, **options: Any
) -> None:  # Any: further ones of `SelftestSession`
    """Try a cloud account with small jobs, and write a report.

    The price is shown first. Everything that is rented or created is removed at the end, also after Ctrl-C; after a
    kill, by `--clean`. The report names no account and can be sent to the project. Exit code: 0 when every step passed.
    """
    from cluster.planning.launch_options import make_launch_options
    from cluster.selftest.session import STATE_FILE, SelftestSession, SelftestState
    from cluster.state.run_folder import RUNS_ENV_VAR, runs_folder
    from train.tools.files import locked
    from train.tools.records import read_record

    if not aws:
        raise BadInput("name the cloud: imgnet-cluster selftest --aws")
    make_launch_options(
        "aws", tags=options["tags"]
    )  # raises for a tag that AWS would refuse, before anything is planned
    cloud = open_cloud()
    folder = runs_folder() / "selftest"
    os.environ[RUNS_ENV_VAR] = str(folder)  # its jobs are none of the user's folder
    if clean and (state := read_record(folder / STATE_FILE, SelftestState)):
        region = state.region
    region = cloud.resolve_regions([region] if region else [])[0]
    ask = partial(click.echo, err=True) if interruption else None
    session = SelftestSession(cloud, folder, region=region, max_dollars=max_dollars, ask=ask, **options)
    if not clean:
        _show_costs(session)
        confirm_or_abort(f"rent machines in {region} for at most ${max_dollars:.2f} at today's prices?", yes)
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(signal_number, signal.default_int_handler)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / ".lock", 0):
            if not clean:
                sys.exit(_run(session))
            fail_if_resources_remain(session.remove_everything())
            click.echo("nothing is left of a self-test")
    except BlockingIOError as error:
        raise ClusterError(f"{folder}: another self-test is running there") from error


def _run(session: "SelftestSession") -> int:
    from cluster.selftest.report import REPORT_NAME, StepState, write_report
    from cluster.selftest.session import STATE_FILE
    from cluster.selftest.steps import run_selftest

    report = run_selftest(session, lambda line: click.echo(line, err=True))
    click.echo(write_report(session.folder, report), nl=False)
    click.echo(f"report: {session.folder / REPORT_NAME}.json and .txt, which you can send to the project", err=True)
    if (session.folder / STATE_FILE).exists():
        raise ClusterError(
            "the self-test could not remove everything; remove it: imgnet-cluster selftest --aws --clean"
        )
    if StepState.INTERRUPTED in report.states:
        return EXIT_INTERRUPTED
    return EXIT_OK if report.states == {StepState.PASSED} else EXIT_ERROR


def _show_costs(session: "SelftestSession") -> None:
    """Print what each job is expected to cost, and the sum. Raises `NoCredentials`."""
    from cluster.display.tables import print_table
    from cluster.selftest.steps import JOB_REQUESTS

    rows = []
    total = 0.0
    for request in JOB_REQUESTS:
        market, dollars = "", None
        try:
            market, dollars = session.expected_cost(request)
        except NoCredentials:
            raise
        except ClusterError as error:
            click.echo(f"{request.title}: {error}", err=True)
        machines = f"{request.machines} x {session.type_of(request)}" + (f", {market}" if market else "")
        price = "unknown" if dollars is None else f"${dollars:.2f}"
        minutes = f"{request.minutes:.0f}"
        rows.append({"job": request.title, "machines": machines, "minutes": minutes, "dollars": price})
        total += dollars or 0.0
    print_table(rows)
    click.echo(
        f"about ${total:.2f} in all, at most ${session.max_dollars:.2f} at today's prices: with disks, addresses, "
        "expected traffic and a NAT gateway; a spot price may rise meanwhile, at most to on demand"
    )


COMMANDS = (check, selftest)
