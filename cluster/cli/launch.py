"""The commands that start, stop and change a job (launch, stop, resume, rehearse-loss, adopt), and config."""

import functools
import json
import shlex
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import EXIT_INTERRUPTED, EXIT_OK, BadInput, ClusterError
from infra.errors import NoAnswer, NoCredentials

from .cloud import region_option
from .options import (
    DEFAULT_BACKEND,
    CommandFunction,
    FaultTolerantCommand,
    FiniteFloatRange,
    GroupedCommand,
    GroupedOption,
    click_options,
    configured_options,
    confirm_or_abort,
    deferred_options,
    dry_run_option,
    flag,
    given_options,
    grouped_option,
    launch_options,
    only_option,
    open_cloud,
    output_option,
    pluralize,
    print_json,
    typed_options,
    yes_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cluster.backends.planner import Plan
    from cluster.jobs.job import Job
    from cluster.planning.launch_options import LaunchOptions
    from train.tools.option_fields import OptionSet

detach_option = flag("Output", "-d", "--detach", help="Return when the job is running; do not follow it.")
requests_option = flag("Output", "--requests", help="With --dry-run: also show the requests to AWS, as JSON.")


START_OPTIONS = ("detach", "dry_run", "requests", "yes")


def start_options(command: CommandFunction) -> CommandFunction:
    """Add the options of `carry_out` to a command."""
    return detach_option(dry_run_option(requests_option(yes_option(command))))


def backend_options() -> list[GroupedOption]:
    """Return the options that only one backend has, among them those that choose it."""
    from cluster.backends import catalog

    classes = catalog.usable_options().values()
    return click_options([option for each in classes for option in each.launch_options()], is_configurable=True)


@click.command(cls=GroupedCommand)
@click.argument("recipe")
@deferred_options(backend_options)
@launch_options()
@grouped_option(
    "Machines",
    "--parallel",
    metavar="N",
    type=click.IntRange(1),
    help="Number of recipes to run concurrently, if the file has several.  [default: 1; with --ssh: as many as "
    "the machines in the file suffice for]",
)
@only_option
@start_options
def launch(recipe: str, parallel: int | None, only: tuple[str, ...], **options: Any) -> None:  # Any: those of a launch
    """Train RECIPE and follow the job.

    Without a choice such as --local or --ssh, the machines are rented from AWS. The plan and its price are shown first,
    and machines that cost money are rented only after a yes, or with -y. With --dry-run nothing is started; AWS is
    asked for the plan, and the plan says so when AWS cannot be asked. The machines of --ssh are asked what
    `imgnet-cluster check --ssh FILE` asks. Ctrl-C stops following; the job keeps running. Exit code: 0 done,
    100 failed, 103 stopped.
    """
    from cluster.planning.resolve import load_work, plan_work

    start = {name: options.pop(name) for name in START_OPTIONS}
    own_options = read_options(options)
    makers = [functools.partial(plan_work, work, own_options, recipe_file=recipe) for work in load_work(recipe, only)]
    carry_out(makers, parallel, **start)


def read_options(options: "Mapping[str, object]") -> "LaunchOptions":
    """Return those options of a launch that are typed or configured. Raises `BadInput`."""
    from cluster.planning.launch_options import add_configured, make_launch_options

    backend, keywords = add_configured(typed_options(options), configured_options(options), DEFAULT_BACKEND)
    return make_launch_options(backend, **keywords)


def carry_out(
    makers: "Sequence[Callable[..., Plan]]",
    parallel: int | None = None,
    *,
    detach: bool,
    dry_run: bool,
    requests: bool,
    yes: bool,
) -> None:
    """Show the plans that `makers` return, all for one backend, ask before money is spent, launch, and follow the jobs.

    Exits with the code of the jobs; with `dry_run` nothing is launched. Raises `ClusterError`.
    """
    from cluster.backends import catalog
    from cluster.display import plan as display_plan
    from cluster.display import progress
    from cluster.display.tables import print_wrapped
    from cluster.jobs import queue, store, submit

    if requests and not dry_run:
        raise BadInput("--requests needs --dry-run")
    plans, unasked_reason = _plan_all(makers, dry_run)
    max_parallel = queue.resolve_parallel(plans, parallel) if len(plans) > 1 else 1
    plans = [_with_command(plan, is_only=len(plans) == 1) for plan in plans]
    display_plan.show_plan(plans[0], unasked_reason)
    if len(plans) > 1:
        display_plan.show_other_plans(plans)
    display_plan.show_other_jobs(plans[0].spec, max_parallel)
    backend_class = catalog.backend_class(plans[0].spec.backend)
    for plan in plans:
        if requests and plan.rental_plan:
            for action, arguments in plan.rental_plan.requests:
                click.echo(f"{action}\n{json.dumps(arguments, indent=1)}")
        if not (dry_run and backend_class.is_billed):  # a dry run shows the price from any computer
            submit.check(plan.spec)
    if dry_run:
        largest_spec = max((plan.spec for plan in plans), key=lambda spec: len(spec.machine_names))
        if reports := backend_class.check_machines(largest_spec):
            display_plan.show_host_reports(reports)
            usable, needed = sum(not report.errors for report in reports), largest_spec.machines
            if usable < needed:
                raise ClusterError(f"a launch would fail: {usable} of the {needed} machines that it needs can be used")
        is_refused = any(plan.obstacles for plan in plans)
        launched = "" if is_refused else f"would launch {pluralize(len(plans), 'job')} in {store.runs_folder()}; "
        return print_wrapped(f"{launched}nothing was started")
    for plan in plans:
        plan.require_no_obstacle()
    if backend_class.is_billed:
        for plan in plans:
            _tell_of_duplicate(plan)
        confirm_or_abort(display_plan.rental_question(plans), yes)
    existing_names = {job.name for job in store.all_jobs()}
    try:
        if len(plans) > 1:
            jobs = queue.enqueue(plans, max_parallel)
        else:
            job = submit.launch(plans[0])
    except KeyboardInterrupt:
        sys.exit(_tell_of_interruption([job for job in store.all_jobs() if job.name not in existing_names]))
    if len(plans) > 1:
        sys.exit(_follow_all(jobs, max_parallel, detach))
    if job.name in existing_names:
        click.echo(f"resuming interrupted {job.name}, run folder {job.path} (run again to launch a new job)")
    else:
        click.echo(f"{job.spec.title} launched, run folder {job.path}")
    progress.print_next_commands(job)
    sys.exit(EXIT_OK if detach else _follow(job))


def _tell_of_interruption(jobs: "Sequence[Job]") -> int:
    """Say on stderr which jobs were started before Ctrl-C, and how to stop them. Returns the exit code."""
    names = ", ".join(job.name for job in jobs)
    stops = "; ".join(f"imgnet-cluster stop {job.run.handle}" for job in jobs)
    click.echo(f"interrupted; {f'{names} may go on; to stop: {stops}' if jobs else 'nothing was started'}", err=True)
    return EXIT_INTERRUPTED


def _tell_of_duplicate(plan: "Plan") -> None:
    """Say on stderr that a job of the same work and options runs already, if one does."""
    from cluster.jobs import submit
    from train.metrics.text import format_duration

    if job := submit.find_running_duplicate(plan.spec):
        age = format_duration(time.time() - job.spec.created)
        click.echo(
            f"note: {job.name} runs already, with the same {plan.spec.work_kind} and options; it was launched {age} "
            f"ago and has cost ${job.backend.job_cost().dollars:,.2f}. Follow it instead of a second job: "
            f"imgnet-cluster logs -f {job.run.handle}",
            err=True,
        )


def _with_command(plan: "Plan", is_only: bool) -> "Plan":
    """Return a plan whose job will know the command that launches it alone, as it was typed."""
    from cluster.notifications.targets import describe_target

    words = ["imgnet-cluster", *sys.argv[1:]]
    for target in plan.spec.notify:
        words = [word.replace(target, describe_target(target)) for word in words]
    if not (is_only or "--only" in words):
        words += ["--only", plan.spec.workload.name]
    return replace(plan, spec=replace(plan.spec, command=shlex.join(words)))


def _plan_all(makers: "Sequence[Callable[..., Plan]]", dry_run: bool) -> "tuple[list[Plan], str]":
    """Return the plans that the functions make, and why the cloud could not be asked, "" if it was.

    Each takes the keyword `offline`. A launch raises `NoCredentials` or `NoAnswer`; a dry run plans without the cloud.
    """
    plans = []
    unasked_reason = ""
    for make in makers:
        try:
            plans.append(make(offline=bool(unasked_reason)))
        except (NoCredentials, NoAnswer) as error:
            if dry_run:
                unasked_reason = str(error)
                plans.append(make(offline=True))
            elif isinstance(error, NoCredentials):
                other_machines = "without AWS: --local (this computer) or --ssh FILE (your own machines)"
                raise NoCredentials(f"{error}; {other_machines}") from error
            else:
                raise
    return plans, unasked_reason


def _follow_all(launched_jobs: "list[Job]", max_parallel: int, detach: bool) -> int:
    """Follow the jobs of a sweep one after the other, then show their table. Returns the largest exit code."""
    from cluster.display import progress

    names = ", ".join(job.name for job in launched_jobs)
    click.echo(f"{names} launched, {max_parallel} at a time\n  list         imgnet-cluster ls")
    click.echo(f"  curves       imgnet-cluster tensorboard {' '.join(job.run.handle for job in launched_jobs)}")
    code = EXIT_OK
    for number, job in enumerate([] if detach else launched_jobs, 1):
        code = max(code, _follow(job, launched_jobs[number:]))
        if code == EXIT_INTERRUPTED:
            return code
    if not detach:
        progress.show_sweep(launched_jobs)
    return code


def _follow(job: "Job", others: "Sequence[Job]" = ()) -> int:
    """Follow a job until it ends, beside others of its sweep. Returns its exit code; Ctrl-C only detaches."""
    from cluster.display import progress
    from cluster.display.tables import print_wrapped

    try:
        return progress.follow(job, others)
    except KeyboardInterrupt:
        click.echo(err=True)  # after the "^C"
        print_wrapped(
            f"detached; {job.name} keeps running{_describe_billing(job)}. "
            f"Follow it: imgnet-cluster logs -f {job.run.handle}; "
            f"its session: imgnet-cluster attach {job.run.handle}; stop it: imgnet-cluster stop {job.run.handle}",
            to_stderr=True,
        )
        return EXIT_INTERRUPTED


def _describe_billing(job: "Job") -> str:
    """Return the price of a job that keeps running, its end, and how to end it now; "" if nothing is rented."""
    if not job.backend.is_billed:
        return ""
    at_once = f"to end it at once, without saving: imgnet-cluster down {job.run.handle}"
    rented = job.backend.rented_now()
    if not rented or not rented.machines:
        return f" and rents machines, which are billed; {at_once}"
    rate = rented.dollars_per_hour
    price = "at an unknown price" if rate is None else f"${rate:,.2f} an hour with the expected traffic"
    return f" and is billed, {price}, until {rented.power_off} at the latest; {at_once}"


@click.command(cls=FaultTolerantCommand)
@output_option
def config(output: str) -> None:
    """Show the defaults of the options and where each is set.

    An option that is typed counts first, then its environment variable, such as IMGNET_MAX_HOURS, then the
    configuration file, in which the line is max-hours = 4, then the built-in default. Other commands that have the
    option take the same default.
    """
    from cluster.display.tables import print_table, print_wrapped
    from cluster.planning.config_file import config_path

    context = launch.make_context("launch", ["RECIPE"], parent=click.get_current_context())
    options = [
        option for option in launch.get_params(context) if isinstance(option, GroupedOption) and option.config_name
    ]
    rows = [_config_row(option, context) for option in options]
    if output == "json":
        return print_json({"file": str(config_path()), "options": rows})
    print_table(rows)
    note = "" if config_path().exists() else ", which does not exist"
    print_wrapped(f"configuration file: {config_path()}{note}")


def _config_row(option: GroupedOption, context: click.Context) -> dict[str, str]:
    """Return option, value and source of a default of the parsed launch; "" for none, or one that depends."""
    from cluster.planning.config_file import config_key, config_keys

    key = config_key(next(name for name in option.opts if name.startswith("--")))
    is_switch = isinstance(option.flag_value, str)
    default = None if is_switch else config_keys()[key].option.default
    value, source = option.configured(context) or ("" if default in (None, ()) else option.text(default), "default")
    return {"option": key, "value": "yes" if value and is_switch else value, "source": source}


@click.command()
@click.argument("job", required=False)
def stop(job: str | None) -> None:
    """Save a checkpoint of JOB and stop it.

    Without JOB, the newest job is taken. `imgnet-cluster resume JOB` continues from the checkpoint.
    """
    from cluster.jobs import store
    from cluster.state.states import JobState

    stopped_job = store.find(job)
    stopped_job.stop()
    state = stopped_job.state
    hint = "" if state == JobState.DONE else f"; continue: imgnet-cluster resume {stopped_job.run.handle}"
    click.echo(f"{stopped_job.name} {state}{hint}")


def resume_options() -> list[GroupedOption]:
    """Return the options that a resume may change. Their help names no default: the job keeps its value."""
    from cluster.backends import catalog
    from cluster.planning.launch_options import LaunchOptions, MoreEpochs

    options_classes: list[type[OptionSet]] = [LaunchOptions, MoreEpochs, *catalog.usable_options().values()]
    options = [option for options_class in options_classes for option in options_class.launch_options()]
    return click_options((option for option in options if not option.is_fixed), shows_default=False)


@click.command(cls=GroupedCommand)
@click.argument("job", required=False)
@deferred_options(resume_options)
@grouped_option(
    "Command",
    "--env",
    multiple=True,
    metavar="NAME|NAME=VALUE",
    help="New value of a secret variable of the job's command: that of this shell, or VALUE.",
)
@detach_option
@dry_run_option
@yes_option
def resume(job: str | None, env: tuple[str, ...], detach: bool, dry_run: bool, yes: bool, **options: object) -> None:
    """Continue JOB from its newest checkpoint, and follow it.

    Without JOB, the newest job is taken. An option changes what the job was launched with; without it, the job keeps
    its value. The schedule stays the same, on other machines too; --epochs lengthens it, also when the job is done.
    What is left to do is shown first, and machines that cost money are rented only after a yes, or with -y. Ctrl-C
    stops following; the job keeps running.
    """
    from cluster.display import plan as display_plan
    from cluster.display.tables import print_wrapped
    from cluster.jobs import store
    from cluster.script import secret_values

    resumed_job = store.find(job)
    plan = resumed_job.plan_resume(**given_options(options))
    command = resumed_job.spec.own_command
    secrets = secret_values.new_values(env, command.secrets if command else (), resumed_job.spec.uid, resumed_job.name)
    display_plan.show_resume_plan(plan)
    display_plan.show_other_jobs(plan.spec)
    is_billed = resumed_job.backend.is_billed
    if not (dry_run and is_billed):  # as with a launch
        resumed_job.backend.check(plan.spec, resumed_job.path.parent)
    if leader := resumed_job.backend.leader():
        print_wrapped(f"{resumed_job.name} is running, led by {leader}; a resume takes it over from there")
    if dry_run:
        return click.echo(f"would resume {resumed_job.name}; nothing was started")
    if is_billed:
        plan.require_no_obstacle()
        confirm_or_abort(display_plan.rental_question([plan]), yes)
    secret_values.keep(resumed_job.spec.uid, resumed_job.path, secrets)
    try:
        resumed_job.resume(plan)
    except KeyboardInterrupt:
        sys.exit(_tell_of_interruption([] if resumed_job.has_ended else [resumed_job]))
    click.echo(f"{resumed_job.name} resumed")
    sys.exit(EXIT_OK if detach else _follow(resumed_job))


@click.command("rehearse-loss")
@click.argument("job", required=False)
@click.option("--machine", metavar="N", required=True, type=click.IntRange(0), help="Number of the machine.")
@click.option(
    "--notice",
    type=FiniteFloatRange(0),
    metavar="SECONDS",
    help="Warn the machine this long in advance, as a spot interruption notice does.",
)
@flag("Options", "--for-good", help="Do not replace the killed machine.")
def rehearse_loss(job: str | None, machine: int, notice: float | None, for_good: bool) -> None:
    """Kill a machine of JOB, to rehearse a recovery.

    Without JOB, the newest job is taken. It goes on without the machine, which is then replaced. Without --notice the
    machine fails at once, as in a power cut.
    """
    from cluster.jobs import store

    running_job = store.find(job)
    running_job.kill_machine(str(machine), notice, for_good)
    outcome = "has received the notice" if notice is not None else "was killed"
    click.echo(f"machine {machine} of {running_job.name} {outcome}")
    click.echo(f"  recovery     imgnet-cluster status {running_job.run.handle}")


@click.command()
@click.argument("uid", required=False)
@click.option("--ssh", "hosts", metavar="FILE", help="The machines of a job on your own machines: a hosts.toml file.")
@region_option
def adopt(uid: str | None, hosts: str | None, region: str | None) -> None:
    """Supervise a job that another computer launched.

    Its files are copied here, and lost machines are replaced from here. UID is the name of the job on its machines and
    in `ls --cloud`, such as job-3-9073e811. With --ssh it is needed only when several jobs are unfinished.

    Without --ssh the job has rented machines, and this computer has credentials of the same account. The other computer
    then rents and terminates nothing more for the job.
    """
    from cluster.display import progress
    from cluster.jobs import adopt as adoption

    if hosts:
        job = adoption.adopt(hosts, uid)
    elif uid:
        job = adoption.adopt_rented(open_cloud(), [region] if region else [], uid)
    else:
        raise BadInput(
            "which job? pass --ssh hosts.toml for your own machines, or the UID of a job that `ls --cloud` lists"
        )
    click.echo(f"{job.name} is {job.spec.uid}, run folder {job.path}")
    progress.print_next_commands(job)


COMMANDS = (launch, stop, resume, rehearse_loss, adopt, config)
